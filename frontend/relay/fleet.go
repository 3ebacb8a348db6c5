package relay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"baton/route"
	"baton/tracing"
)

// legKind is one of a request's two legs.
type legKind int

const (
	prefillLeg legKind = iota
	decodeLeg
)

func (l legKind) String() string { return [...]string{"prefill", "decode"}[l] }

// fleet is the workers of both pools and the routers that choose among them.
type fleet struct {
	mu      sync.Mutex
	workers []*worker
	routers [2]route.Router
	changed chan struct{} // closed when a worker may have become available
	lastID  uint64
	events  func(event string, w *worker, reason string) // of health and breakers, for logs and metrics; called with the lock

	quiet      time.Duration  // for so long nothing has come from a leg that is lost
	candidates []*worker      // scratch
	view       []route.Worker // scratch
}

func newFleet(prefill, decode route.Router) *fleet {
	return &fleet{routers: [2]route.Router{prefill, decode}, changed: make(chan struct{}), quiet: probeTimeout, events: func(string, *worker, string) {}}
}

// lease is a worker's promise to take a leg. It must be ended.
type lease struct {
	f       *fleet
	w       *worker
	leg     legKind
	choice  route.Choice
	content int64
	block   int // tokens in the blocks of choice, 0 if these are of text
	trial   bool
	ended   bool
	span    *tracing.Span

	cancel context.CancelCauseFunc // guarded: of the leg's call, nil before that
	conn   net.Conn                // guarded: where its answer comes from, nil before that has begun
	lost   error                   // guarded: why the leg was ended from outside
	begun  bool                    // guarded: the client gets its answer
	source *worker                 // guarded: of the KV that it waits for; nil where its engine finds out by itself that nothing comes
}

// outcome is how a leg went for the worker.
type outcome int

const (
	succeeded outcome = iota
	failedLeg
	failedAgain // the same request has failed at the worker before: that says nothing new of it
	canceled    // nothing can be said of the worker
)

// noWorkerError says why a leg has no worker.
type noWorkerError struct {
	leg    legKind
	reason string
}

func (e *noWorkerError) Error() string { return fmt.Sprintf("no %v worker: %s", e.leg, e.reason) }

// need says what the router of a leg looks at.
func (f *fleet) need(l legKind, conversation string) route.Need {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.routers[l].Needs(conversation)
}

// acquire chooses a worker for a leg. avoid are workers that get it only if there is no other. When there is none at
// all, it waits for one.
func (f *fleet) acquire(ctx context.Context, l legKind, q route.Request, content int64, avoid []*worker, wait time.Duration) (at *lease, err error) {
	err = f.wait(ctx, l, wait, func() bool {
		list := f.choosable(l, avoid, time.Now())
		if len(list) > 0 {
			at = f.take(l, q, content, list)
		}
		return at != nil
	})
	return at, err
}

// awaitDecode waits until a decode worker could take a leg, or a prefill worker serves whole requests.
func (f *fleet) awaitDecode(ctx context.Context, wait time.Duration) error {
	return f.wait(ctx, decodeLeg, wait, func() bool {
		return slices.ContainsFunc(f.workers, func(w *worker) bool { return w.takes(decodeLeg) || w.takes(prefillLeg) && w.known().whole })
	})
}

// wait calls done, with the lock, until it reports true: at once and whenever a worker may have become available for the
// leg.
func (f *fleet) wait(ctx context.Context, l legKind, wait time.Duration, done func() bool) error {
	var timeout <-chan time.Time
	for {
		f.mu.Lock()
		if done() {
			f.mu.Unlock()
			return nil
		}
		changed := f.changed
		err := &noWorkerError{l, f.whyNone(l, time.Now())}
		f.mu.Unlock()
		if timeout == nil {
			timer := time.NewTimer(wait)
			defer timer.Stop()
			timeout = timer.C
		}
		select {
		case <-changed:
		case <-timeout:
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// choosable are the workers that may have a leg: those to avoid left out if others remain, those whose breakers keep
// requests away only if there are no others. A breaker spares requests a worker that fails them while another would not;
// it never leaves a leg without any worker that is healthy.
func (f *fleet) choosable(l legKind, avoid []*worker, now time.Time) []*worker {
	list := f.candidates[:0]
	for _, fits := range []func(w *worker) bool{
		func(w *worker) bool { return w.breaker.allows(now) && !slices.Contains(avoid, w) },
		func(w *worker) bool { return w.breaker.allows(now) },
		func(w *worker) bool { return !slices.Contains(avoid, w) },
		func(*worker) bool { return true },
	} {
		for _, w := range f.workers {
			if w.takes(l) && fits(w) {
				list = append(list, w)
			}
		}
		if len(list) > 0 {
			break
		}
	}
	f.candidates = list
	return list
}

func (f *fleet) take(l legKind, q route.Request, content int64, list []*worker) *lease {
	view := f.view[:0]
	for _, w := range list {
		view = append(view, route.Worker{ID: w.id, Slot: w.slot, Requests: w.requests[0] + w.requests[1], Content: w.content, Reports: w.reports > 0})
	}
	f.view = view
	choice := f.routers[l].Pick(q, view)
	w := list[choice.Index]
	w.requests[l]++
	w.content += content
	at := &lease{f: f, w: w, leg: l, choice: choice, content: content, trial: w.breaker.begin(time.Now())}
	w.running[at] = struct{}{}
	return at
}

// end gives the lease back. Only the first call counts.
func (l *lease) end(o outcome) {
	f, w := l.f, l.w
	f.mu.Lock()
	defer f.mu.Unlock()
	if l.ended {
		return
	}
	l.ended = true
	if l.span != nil {
		l.span.Note(attribute.Bool("baton.failed", o == failedLeg || o == failedAgain))
		l.span.End(nil)
	}
	delete(w.running, l)
	f.routers[l.leg].Done(l.choice)
	w.requests[l.leg]--
	w.content -= l.content
	switch o {
	case succeeded:
		if w.breaker.open {
			f.events("breaker closed", w, "")
		}
		w.breaker.success()
	case failedLeg:
		w.joined = false // it may be another process by now
		w.probeNow()
		if w.breaker.failure(time.Now(), l.trial) {
			f.events("breaker opened", w, "several requests in a row failed")
		}
	case failedAgain:
		w.joined = false
		w.probeNow()
		w.breaker.cancel(l.trial)
	case canceled:
		w.breaker.cancel(l.trial)
	}
	f.settle(w)
}

// settle tells whoever removes a worker that its requests are over.
func (f *fleet) settle(w *worker) {
	if w.leaving && w.idle != nil && w.requests == [2]int{} {
		close(w.idle)
		w.idle = nil
	}
}

// wake lets waiting requests look again.
func (f *fleet) wake() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// whyNone says why nobody can take a leg.
func (f *fleet) whyNone(l legKind, now time.Time) string {
	reasons := ""
	n := 0
	for _, w := range f.workers {
		if !w.roles[l] || w.takes(l) {
			continue
		}
		if n++; n <= 3 {
			reasons += "; " + w.URL + " " + w.state(now)
		}
	}
	switch {
	case n == 0:
		return "none is known (add one with POST /workers)"
	case n > 3:
		reasons += fmt.Sprintf("; and %d more", n-3)
	}
	return reasons[2:]
}

// state is one line on a worker. The caller holds the lock.
func (w *worker) state(now time.Time) string {
	switch {
	case w.leaving:
		return "is leaving"
	case !w.healthy && w.trouble == "":
		return "has not answered yet"
	case !w.healthy:
		return "is not healthy: " + w.trouble
	case w.breaker.open:
		return "failed its last requests (breaker " + w.breaker.state(now) + ")"
	}
	return "is healthy"
}

// add makes a worker known for some legs, or an already known one take them too. It is an error, and changes nothing, if
// that one takes any of them.
func (f *fleet) add(spec Worker, legs []legKind, e func() *endpoint, hostname string) (w *worker, isNew bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.workers {
		if w.URL != spec.URL || w.leaving {
			continue
		}
		for _, l := range legs {
			if w.roles[l] {
				return nil, false, fmt.Errorf("%s is a %v worker already", spec.URL, l)
			}
		}
		for _, l := range legs {
			w.roles[l] = true
		}
		w.healthy, w.joined = false, false // for a prefill worker more must be known
		w.probeNow()
		return w, false, nil
	}
	slot := 0
	for slices.ContainsFunc(f.workers, func(w *worker) bool { return w.slot == slot }) {
		slot++
	}
	f.lastID++
	w = &worker{Worker: spec, id: f.lastID, slot: slot, hostname: hostname, endpoint: e(), kick: make(chan struct{}, 1), running: make(map[*lease]struct{}), identified: make(chan struct{}), told: make(chan struct{})}
	for _, l := range legs {
		w.roles[l] = true
	}
	f.workers = append(f.workers, w)
	return w, true, nil
}

// leave lets a worker get no more requests. The channel closes when it has none; nil means that there is no such
// worker.
func (f *fleet) leave(url string) (*worker, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.workers {
		if w.URL == url && !w.leaving {
			idle := make(chan struct{})
			w.leaving, w.idle = true, idle
			f.settle(w)
			return w, idle
		}
	}
	return nil, nil
}

// remove forgets a worker that has left.
func (f *fleet) remove(w *worker) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.workers = slices.DeleteFunc(f.workers, func(o *worker) bool { return o == w })
	for _, r := range f.routers {
		r.Forget(route.Worker{ID: w.id, Slot: w.slot})
	}
	f.events("left", w, "")
}

// learner is a router that remembers where conversations are.
type learner interface {
	Learn(session route.SessionKey, worker uint64, at int64)
}

// learn tells the routers of a worker's legs that a session had a job there.
func (f *fleet) learn(w *worker, session route.SessionKey, at int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for l, r := range f.routers {
		if remembers, ok := r.(learner); ok && w.roles[l] {
			remembers.Learn(session, w.id, at)
		}
	}
}

// has reports whether any worker is known for a leg, well or not.
func (f *fleet) has(l legKind) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.workers, func(w *worker) bool { return w.roles[l] && !w.leaving })
}

// kickWaiting probes the workers that have not joined: what they waited for has come.
func (f *fleet) kickWaiting() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.workers {
		if !w.joined {
			w.probeNow()
		}
	}
}

func (f *fleet) hasJoined(w *worker) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return w.joined
}

func (f *fleet) hasRole(w *worker, l legKind) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return w.roles[l]
}

func (f *fleet) rolesOf(w *worker) [2]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return w.roles
}

// setHealth takes what a probe said of a worker that then had these roles; it reports whether the worker counts as
// healthy.
func (f *fleet) setHealth(w *worker, roles [2]bool, err error, failures int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case err == nil && roles != w.roles: // another probe will say whether it is fit for the other one too
	case err == nil:
		w.joined = true
		if !w.healthy {
			w.healthy, w.trouble = true, ""
			w.agreed.Store(0)
			f.events("healthy", w, "")
			f.wake()
		}
	case !w.healthy, failures >= probeFailures, errors.Is(err, errDial), isUnavailable(err):
		if w.healthy || w.trouble != err.Error() {
			f.events("not healthy", w, err.Error())
		}
		w.healthy, w.joined, w.trouble = false, false, err.Error()
		if failures >= probeFailures && hangs(err) {
			f.lose(w, err)
		}
		if failures >= probeFailures || failures > 1 && errors.Is(err, errDial) {
			f.orphan(w, err)
		}
	}
	return w.healthy
}

// hangs reports whether a probe failed as it does when a process hangs, or its host is away. A process that refuses
// connections may be ending what it has.
func hangs(err error) bool {
	var n net.Error
	return errors.Is(err, errTimeout) || errors.Is(err, errDial) && errors.As(err, &n) && n.Timeout() ||
		errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH)
}

// lostError ends the legs of a worker that hangs, or cannot be reached any more.
type lostError struct{ err error }

func (e *lostError) Error() string {
	return "it has answered no health check for a while: " + e.err.Error()
}

// lose ends the legs of a worker that does not even answer whether it is well. Those whose answers still arrive go on: an
// overloaded host may take no more connections and yet serve those that it has.
func (f *fleet) lose(w *worker, err error) {
	for l := range w.running {
		if l.cancel != nil && l.lost == nil && (l.conn == nil || sinceReceived(l.conn) >= f.quiet) {
			l.lost = &lostError{err}
			l.cancel(l.lost)
		}
	}
}

// sourceLostError ends decode legs that wait for KV from a worker that is gone: engines would wait for minutes.
type sourceLostError struct {
	source *worker
	err    error
}

func (e *sourceLostError) Error() string {
	return fmt.Sprintf("the KV does not come: the prefill worker %s is gone: %v", e.source.URL, e.err)
}

// orphan ends the legs whose KV was to come from a worker, unless they have it: then the client has a part of the answer. Heads
// of streams say nothing: vLLM sends them at once.
func (f *fleet) orphan(source *worker, err error) {
	for _, w := range f.workers {
		for l := range w.running {
			if l.source == source && l.cancel != nil && l.lost == nil && !l.begun {
				l.lost = &sourceLostError{source, err}
				l.cancel(l.lost)
			}
		}
	}
}

// waitsFor notes whose KV the leg needs.
func (l *lease) waitsFor(source *worker) {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	l.source = source
}

// call gives the lease a context for its leg's call, which ends with ctx and when the worker is lost.
func (l *lease) call(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancelCause(ctx)
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	l.cancel, l.conn = cancel, nil
	return ctx
}

// answering notes where the leg's answer comes from.
func (l *lease) answering(c net.Conn) {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	l.conn = c
}

// begins notes that the client gets the leg's answer.
func (l *lease) begins() {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	l.begun = true
}

// lostWorker is why the leg was ended from outside, nil if it was not.
func (l *lease) lostWorker() error {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	return l.lost
}

// isUnavailable reports whether a worker itself said that it is not well.
func isUnavailable(err error) bool {
	var s *statusError
	return errors.As(err, &s) && s.status == http.StatusServiceUnavailable
}
