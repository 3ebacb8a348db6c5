// Package sim plays a whole fleet in virtual time on one goroutine: the real coordinator.Core, routing,
// engine.Core (scheduler, handoff, block pool) and message codec, with a simulated network, transfer
// backend and model between and under them. A Script says which requests come and what goes wrong; the
// same script always plays the same way.
//
// After every event it checks what must never fail: no block that a transfer may touch is free or given
// to somebody else; the pools' books balance; tokens reach a client once, in order, from the engine that
// owns the stream, and are those of an undisturbed run; queues keep their order. Once everything has
// ended, nothing may be left: every request ended exactly once, every pin, slot, reservation, export and
// transfer is gone.
package sim

import (
	"container/heap"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"
)

// Options are how a run is watched.
type Options struct {
	// Trace gets a line for everything that happens; nil for none.
	Trace io.Writer
}

// Failure is a rule that a run broke.
type Failure struct {
	At   time.Duration // virtual, since the start
	What string
}

func (f *Failure) Error() string { return fmt.Sprintf("after %v: %s", f.At, f.What) }

// Counts tell what a run covered.
type Counts struct {
	Events, Requests, Finished, Aborted, Failed, Retried int
	Takeovers, Reruns, Evictions                         int
	Handoffs, Transfers, BrokenTransfers, Quarantines    int
	Flips, Corrupt                                       int // bits changed on the way; handoffs found damaged
	RankFailures, RankDelays                             int // orders that a failing rank got; orders that came late to one
}

// Add sums counts.
func (c *Counts) Add(o Counts) {
	c.Events += o.Events
	c.Requests += o.Requests
	c.Finished += o.Finished
	c.Aborted += o.Aborted
	c.Failed += o.Failed
	c.Retried += o.Retried
	c.Takeovers += o.Takeovers
	c.Reruns += o.Reruns
	c.Evictions += o.Evictions
	c.Handoffs += o.Handoffs
	c.Transfers += o.Transfers
	c.BrokenTransfers += o.BrokenTransfers
	c.Quarantines += o.Quarantines
	c.Flips += o.Flips
	c.Corrupt += o.Corrupt
	c.RankFailures += o.RankFailures
	c.RankDelays += o.RankDelays
}

// Run plays a script to its end. The error is a *Failure, or says that the script is impossible.
func Run(s Script, o Options) (counts Counts, err error) {
	if err := s.validate(); err != nil {
		return Counts{}, err
	}
	w := &world{script: s, rng: rand.New(rand.NewPCG(s.Seed, 0xc1a05)), trace: o.Trace, version: 1}
	defer func() {
		if p := recover(); p != nil {
			counts, err = w.counts, &Failure{At: time.Duration(w.now), What: fmt.Sprintf("panic: %v\n%s", p, stack())}
		}
	}()
	if err := w.build(); err != nil {
		return Counts{}, err
	}
	for probes := 0; ; probes++ {
		if w.play(); w.failure == nil {
			w.checkRest()
		}
		if w.failure != nil || !w.probe(probes) {
			break
		}
	}
	if w.failure != nil {
		return w.counts, w.failure
	}
	return w.counts, nil
}

// Bounds of a run: whatever does not come to rest within them is stuck.
const (
	maxEvents = 200_000
	maxTime   = int64(time.Minute)
)

// world is one run.
type world struct {
	script  Script
	rng     *rand.Rand
	now     int64 // nanoseconds since the start
	order   uint64
	events  events
	trace   io.Writer
	failure *Failure
	counts  Counts

	version     uint64 // of the weights, the newest
	disturbed   bool   // something went wrong: requests may fail
	coordinator *coordinatorLife
	lives       []*life // every engine that ever was
	seats       []*seat
	clients     []*client
	operator    *client
	attempts    []*attempt
	fabric      fabric
	links       uint64
	buffer      []byte // of the codec
}

// happening is an entry of the event heap.
type happening struct {
	at    int64
	order uint64
	do    func()
}

type events []happening

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].order < e[j].order
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }

// Push appends.
func (e *events) Push(x any) { *e = append(*e, x.(happening)) }

// Pop takes the last.
func (e *events) Pop() any {
	last := len(*e) - 1
	x := (*e)[last]
	(*e)[last] = happening{}
	*e = (*e)[:last]
	return x
}

// at lets something happen at a time, and everything of the same time in the order of these calls.
func (w *world) at(t int64, do func()) {
	w.order++
	heap.Push(&w.events, happening{max(t, w.now), w.order, do})
}

func (w *world) after(d time.Duration, do func()) { w.at(w.now+int64(d), do) }

// time is the virtual clock as the cores see it.
func (w *world) time() time.Time { return epoch.Add(time.Duration(w.now)) }

var epoch = time.Unix(1_700_000_000, 0)

// within draws a duration in [0, most).
func (w *world) within(most time.Duration) time.Duration {
	return time.Duration(w.rng.Int64N(int64(most)))
}

// chance is true so many times in a thousand.
func (w *world) chance(perMille int) bool { return perMille > 0 && w.rng.IntN(1000) < perMille }

func (w *world) fail(format string, args ...any) {
	if w.failure == nil {
		w.failure = &Failure{At: time.Duration(w.now), What: fmt.Sprintf(format, args...)}
		w.log("FAILED: %s", w.failure.What)
	}
}

func (w *world) log(format string, args ...any) {
	if w.trace != nil {
		fmt.Fprintf(w.trace, "%12v  %s\n", time.Duration(w.now), fmt.Sprintf(format, args...))
	}
}

// build makes the fleet and puts everything that the script orders on the clock.
func (w *world) build() error {
	if err := w.startCoordinator(); err != nil {
		return err
	}
	for _, name := range w.script.Fleet.names() {
		s, err := w.newSeat(name)
		if err != nil {
			return err
		}
		w.seats = append(w.seats, s)
		w.after(w.within(time.Millisecond), s.start)
	}
	for i := range w.script.Fleet.Clients {
		c := w.newClient("client" + strconv.Itoa(i))
		w.clients = append(w.clients, c)
		w.after(w.within(time.Millisecond), c.dial)
	}
	w.operator = w.newClient("operator")
	w.operator.dial()
	for _, r := range w.script.Requests {
		w.at(int64(r.At), func() { w.clients[r.Client].want(r, 0) })
	}
	w.disturbed = w.script.Fleet.Fail+w.script.Fleet.Hang+w.script.Fleet.Flip > 0
	for _, x := range w.script.Faults {
		if err := w.schedule(x); err != nil {
			return err
		}
	}
	return nil
}

// schedule puts a fault on the clock.
func (w *world) schedule(x Fault) error {
	do, err := w.fault(x)
	if err != nil {
		return err
	}
	w.at(int64(x.At), func() {
		w.log("fault: %s %s for %v", x.Kind, x.Who, x.For)
		w.disturbed = w.disturbed || x.Kind != Pause && x.Kind != Suspend
		do()
	})
	return nil
}

// fault finds out what a fault does.
func (w *world) fault(x Fault) (func(), error) {
	var victim *client
	var engine *seat
	if i := slices.IndexFunc(w.clients, func(c *client) bool { return c.name == x.Who }); i >= 0 {
		victim = w.clients[i]
	}
	if i := slices.IndexFunc(w.seats, func(s *seat) bool { return s.name == x.Who }); i >= 0 {
		engine = w.seats[i]
	}
	switch {
	case engine != nil && x.Kind == Crash:
		return func() { engine.crash(x.For) }, nil
	case engine != nil && x.Kind == Freeze:
		return func() { engine.freeze(x.For) }, nil
	case engine != nil && x.Kind == Cut:
		return func() { engine.cut() }, nil
	case x.Kind == RankFails || x.Kind == RankStalls:
		return w.rankFault(x)
	case engine != nil && x.Kind == Leave:
		return func() { engine.leave(x.For) }, nil
	case victim != nil && x.Kind == Crash:
		return func() { victim.crash(x.For) }, nil
	case victim != nil && x.Kind == Cut:
		return func() { victim.cut() }, nil
	case x.Who == "coordinator" && x.Kind == Crash:
		return func() { w.crashCoordinator(x.For) }, nil
	case x.Who == "coordinator" && x.Kind == Leave:
		return func() { w.leaveCoordinator(x.For) }, nil
	case x.Who == "fleet" && x.Kind == Upgrade:
		return func() { w.upgrade(x.For) }, nil
	case x.Who == "fleet" && x.Kind == Pause:
		return func() { w.operator.pause(x.For, false) }, nil
	case x.Who == "fleet" && x.Kind == Suspend:
		return func() { w.operator.pause(x.For, true) }, nil
	}
	return nil, fmt.Errorf("sim: nobody can %s %q", x.Kind, x.Who)
}

// rankFault finds out what a fault does to a rank.
func (w *world) rankFault(x Fault) (func(), error) {
	name, rank, err := parseRank(x.Who)
	if err != nil {
		return nil, err
	}
	s := w.seat(name)
	switch {
	case s == nil:
		return nil, fmt.Errorf("sim: there is no engine %q that could have the rank %q", name, x.Who)
	case x.Kind == RankFails:
		return func() { s.rankFails(rank, x.For) }, nil
	}
	return func() { s.rankStalls(rank, x.For) }, nil
}

// upgrade restarts every engine, one after the other, with the next weights.
func (w *world) upgrade(d time.Duration) {
	w.version++
	for _, s := range w.seats {
		w.after(w.within(d), func() { s.crash(w.within(d) + 1) })
	}
}

// play runs the clock until nothing happens any more.
func (w *world) play() {
	for len(w.events) > 0 && w.failure == nil {
		h := heap.Pop(&w.events).(happening)
		w.now = h.at
		w.counts.Events++
		h.do()
		w.fabric.check(w)
		if w.counts.Events > maxEvents || w.now > maxTime {
			w.fail("it does not come to rest: %s", w.unrest())
		}
	}
}

// probe asks once more for what was asked for before, a few times, now that all is quiet and nothing goes
// wrong: the coordinator must know exactly what is cached where.
func (w *world) probe(n int) bool {
	const most = 3
	if n >= min(most, len(w.script.Requests)) || w.clients[0].link == nil {
		return false
	}
	w.script.Fleet.Fail, w.script.Fleet.Hang, w.script.Fleet.Flip = 0, 0, 0
	for _, l := range w.lives {
		l.recover()
	}
	r := w.script.Requests[n]
	r.Client, r.Abort, r.Logprobs = 0, 0, false
	w.log("probe: request %d again", n+1)
	w.clients[0].want(r, 0)
	w.attempts[len(w.attempts)-1].probe = true
	return true
}

// unrest says who is still busy.
func (w *world) unrest() string {
	var busy []error
	for _, a := range w.attempts {
		if !a.ended {
			busy = append(busy, fmt.Errorf("%v has not ended", a))
		}
	}
	for _, s := range w.seats {
		if s.life != nil {
			busy = append(busy, fmt.Errorf("%v: %+v, pool %+v", s.life, s.life.core.Load(), s.life.core.Pool().Stats()))
		}
	}
	busy = append(busy, fmt.Errorf("coordinator: %+v", w.coordinator.core.Status()))
	return errors.Join(busy...).Error()
}
