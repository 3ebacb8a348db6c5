package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"baton/tracing"
)

// exchange is one request and its answer. It belongs to the handler's goroutine, but for what together runs beside it.
type exchange struct {
	s   *Server
	w   http.ResponseWriter
	rc  *http.ResponseController
	ctx context.Context // ends with the client's connection, and with the server
	r   *request

	legs context.Context // ends with ctx, and when one of two legs that run at once fails

	direct   bool      // the client takes chunks
	broken   bool      // the client has got a part of a chunk or event
	told     bool      // the client has got the engine's own error as the last event
	passed   int       // the status of an answer that was passed on as it is
	id       int64     // of the last try
	began    bool      // the answer's first byte is on its way
	delivers *lease    // of the leg whose answer that is; nil where it is made here
	deadline time.Time // of writes, as last set
	failed   []*worker // that the next try passes over
	name     string    // what the client calls the request, "" if it does not say or that cannot stand in a log
	compared bool      // the ids that were made here, with an engine's
	tries    int
	held     *holding
	waited   time.Duration // for a decode worker, before the prefill leg
	route    string        // what the answer's header says of the way
	silent   string        // the worker whose prefill leg was silent
	workers  [2]string
}

// statusClientClosed is what logs and metrics say of a client that left.
const statusClientClosed = 499

// bodies are buffers for requests.
var bodies = sync.Pool{New: func() any { return new([]byte) }}

// maxPooled bounds the buffers that are kept.
const maxPooled = 4 << 20

// serve answers a completion.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	if !s.begin() {
		writeError(w, errShuttingDown)
		return
	}
	defer s.running.Done()
	s.metrics.inFlight.Inc()
	defer s.metrics.inFlight.Dec()
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(context.Cause(s.ctx)) })()
	x := &exchange{s: s, w: w, rc: http.NewResponseController(w), ctx: ctx, legs: ctx, direct: r.ProtoMajor == 1 && r.ProtoMinor == 1, held: &holding{of: s.bodies}}
	defer x.held.keep(0)
	buf := bodies.Get().(*[]byte)
	var span *tracing.Span
	x.ctx, span = s.cfg.Tracer.Start(s.cfg.Tracer.FromHeader(ctx, r.Header), "HTTP "+r.URL.Path, true)
	x.legs = x.ctx
	err := x.run(r, buf)
	span.End(err)
	if cap(*buf) <= maxPooled {
		bodies.Put(buf)
	}
	x.finish(r, start, err)
}

// run serves the request. A panic is an internal error of this request alone.
func (x *exchange) run(r *http.Request, buf *[]byte) (err error) {
	defer func() {
		if p := recover(); p != nil {
			x.s.log.Error("panic in a request", "panic", p, "stack", string(debug.Stack()))
			err = &apiError{status: http.StatusInternalServerError, kind: "server_error", message: "the relay failed; its log says more"}
		}
	}()
	x.name = tracing.RequestID(r.Header)
	if a := x.s.cfg.Authorize; a != nil && !a(r) {
		return errUnauthorized
	}
	if err := x.readBody(r, buf); err != nil {
		return err
	}
	if x.r, err = parseRequest(r.URL.Path, *buf, r.Header); err != nil {
		return err
	}
	x.r.header = append(x.r.header, x.s.engineAuth(r.Header.Get("Authorization"))...)
	x.tokenize()
	return x.answer()
}

// readBody reads the request's body within the limits.
func (x *exchange) readBody(r *http.Request, buf *[]byte) error {
	limit := x.s.cfg.Limits.MaxBody
	tooLarge := &apiError{
		status: http.StatusRequestEntityTooLarge, kind: "invalid_request_error", code: "request_too_large",
		message: fmt.Sprintf("the body is larger than %d bytes (--max-body)", limit),
	}
	if r.ContentLength > limit {
		return tooLarge
	}
	_ = x.rc.SetReadDeadline(time.Now().Add(x.s.cfg.Timeouts.Read))
	b := (*buf)[:0]
	if need := min(int(r.ContentLength), 1<<20) + 512; need > cap(b) { // what is announced must come before it is trusted
		b = make([]byte, 0, need)
	}
	for {
		if len(b) == cap(b) {
			b = slices.Grow(b, max(512, min(len(b), int(limit))))
		}
		n, err := r.Body.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		*buf = b
		if err := x.held.take(n); err != nil {
			return err
		}
		switch {
		case int64(len(b)) > limit:
			return tooLarge
		case err == io.EOF:
			_ = x.rc.SetReadDeadline(time.Time{}) // it would end the wait for the client's disconnection
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return &apiError{
				status: http.StatusRequestTimeout, kind: "invalid_request_error",
				message: fmt.Sprintf("the body did not arrive within %v", x.s.cfg.Timeouts.Read),
			}
		case err != nil && x.ctx.Err() == nil:
			return badRequest("", "the body cannot be read: %v", err)
		case err != nil:
			return errClientGone
		}
	}
}

var errClientGone = &apiError{status: statusClientClosed, kind: "invalid_request_error", message: "the client closed the connection"}

// answer tries until the request is served or must fail.
func (x *exchange) answer() error {
	stale := 0
	for {
		x.id = x.s.ids.Mint()
		x.tries++
		err := x.attempt()
		x.held.keep(len(x.r.body.raw))
		if err == nil {
			return nil
		}
		if x.ctx.Err() != nil {
			return x.ended()
		}
		var l *legError
		if x.began || !errors.As(err, &l) || !l.retry {
			return err
		}
		if errors.Is(err, errStale) && stale < 2*len(x.workers) {
			stale++ // the worker may never have seen it
			continue
		}
		if x.tries-stale > x.s.cfg.MaxRetries {
			return err
		}
		x.s.metrics.retries.WithLabelValues(l.leg.String()).Inc()
		x.s.log.Warn("a leg failed; the request is tried again", "id", x.id, "request_id", x.requestName(), "leg", l.leg, "worker", l.worker.URL, "error", l.err)
		if !slices.Contains(x.failed, l.worker) {
			x.failed = append(x.failed, l.worker)
		}
		if err := x.pause(); err != nil {
			return err
		}
	}
}

// pause waits a little before another try, longer each time.
func (x *exchange) pause() error {
	timer := time.NewTimer(min(time.Second, 50*time.Millisecond<<min(x.tries-1, 5)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-x.ctx.Done():
		return x.ended()
	}
}

// ended says why the request's context ended.
func (x *exchange) ended() error {
	if errors.Is(context.Cause(x.ctx), errShuttingDown) {
		return errShuttingDown
	}
	return errClientGone
}

// legError is a leg that failed without an answer for the client.
type legError struct {
	leg    legKind
	worker *worker
	err    error
	retry  bool
}

func (e *legError) Error() string {
	return fmt.Sprintf("the %v worker %s failed: %v", e.leg, e.worker.URL, e.err)
}

func (e *legError) Unwrap() error { return e.err }

// engineError is what an engine answers instead of a result.
type engineError struct {
	status int
	header http.Header
	body   []byte
	in200  bool // it came in an answer of 200
}

func (e *engineError) Error() string {
	if e.in200 {
		return fmt.Sprintf("it answers 200 with an error, taken for %d: %s", e.status, clip(e.body))
	}
	return fmt.Sprintf("it answers %d: %s", e.status, clip(e.body))
}

// attempt is one try with one request id.
func (x *exchange) attempt() error {
	t := &try{r: x.r, id: x.id, mint: x.s.ids.Mint}
	if !x.s.fleet.has(prefillLeg) {
		return x.single(t, noPrefill)
	}
	if d := x.s.dialect(); d != nil {
		if reason := d.whole(x.r); reason != "" {
			return x.single(t, reason)
		}
		if served, err := x.local(d, t); served {
			return err
		}
	}
	start := time.Now()
	if err := x.s.fleet.awaitDecode(x.ctx, x.s.cfg.WorkerWait); err != nil { // lest a prompt be computed for nothing
		return noWorker(err)
	}
	x.waited = time.Since(start)
	source, err := x.acquire(prefillLeg)
	if err != nil {
		return err
	}
	defer source.end(canceled)
	d := x.s.dialect() // a worker that takes requests has said what it is
	t.source = source.w
	switch {
	case d == nil || d.whole(x.r) != "":
		source.end(canceled)
		if d == nil {
			return x.single(t, unknownEngines)
		}
		return x.single(t, d.whole(x.r))
	case source.w.known().whole:
		return x.alone(source, d, t, noLegs)
	case d.together():
		return x.together(d, t, source)
	}
	return x.sequence(d, t, source)
}

// acquire gets a worker for a leg.
func (x *exchange) acquire(l legKind, avoid ...*worker) (*lease, error) {
	start := time.Now()
	q := x.r.routing(x.s.fleet.need(l, x.r.conversation), x.s.held.blockSize())
	got, err := x.s.fleet.acquire(x.ctx, l, q, int64(len(x.r.content)), append(avoid, x.failed...), x.s.cfg.WorkerWait)
	if err != nil {
		return nil, noWorker(err)
	}
	x.workers[l] = got.w.URL
	waited := time.Since(start)
	if l == decodeLeg {
		waited, x.waited = waited+x.waited, 0
	}
	x.s.metrics.queue.WithLabelValues(l.String()).Observe(waited.Seconds())
	x.s.metrics.routes.WithLabelValues(l.String(), got.choice.Reason).Inc()
	if len(q.Tokens) > 0 {
		got.block = x.s.held.blockSize()
	}
	return got, nil
}

// noWorker is what a client is told when a leg has no worker.
func noWorker(err error) error {
	var none *noWorkerError
	if !errors.As(err, &none) {
		return err
	}
	return &apiError{
		status: http.StatusServiceUnavailable, kind: "service_unavailable_error", code: "no_worker", retryAfter: 1,
		message: none.Error(),
	}
}

// call sends a leg and reads the head of its answer; whatever is not 200 is an error. sent may be nil; it is called
// once the request is on its way.
func (x *exchange) call(at *lease, l leg, sent func()) (*answer, error) {
	c := &call{method: http.MethodPost, path: x.r.path, body: l.body, header: append(x.trace(at), l.header...), sent: sent}
	a, err := at.w.endpoint.do(at.call(x.legs), c, x.s.cfg.Timeouts.Leg)
	if err != nil {
		return nil, x.fail(at, err)
	}
	at.answering(a.conn.Conn)
	a.held = x.held
	if a.status == http.StatusOK {
		if err := checkEncoding(a); err != nil {
			a.close()
			return nil, x.fail(at, err)
		}
		return a, nil
	}
	defer a.close()
	body, err := a.readAll(nil, min(x.s.cfg.Limits.MaxAnswer, maxError))
	switch {
	case errors.As(err, new(*tooLargeError)): // some say all of a request again
		a.header.Set("Content-Type", "application/json")
		a.header.Del("Content-Encoding")
		e := &apiError{kind: "invalid_request_error", message: fmt.Sprintf("the engine answers %d; what it says of it is left out, as it is larger than %d bytes", a.status, maxError)}
		body = e.appendJSON(nil)
	case err != nil:
		return nil, x.fail(at, err)
	}
	return nil, x.fail(at, &engineError{status: a.status, header: a.header, body: body})
}

// maxError bounds what an engine says of an error.
const maxError = 1 << 20

// trace begins the span of a leg and returns the headers of its request, which name that span.
func (x *exchange) trace(at *lease) []string {
	header := append(slices.Clone(x.r.header), "X-Request-Id: "+x.engineName())
	t := x.s.cfg.Tracer
	if t == nil {
		return header
	}
	var ctx context.Context
	ctx, at.span = t.Start(x.legs, at.leg.String()+" leg", false, attribute.String("baton.worker", at.w.URL),
		attribute.String("baton.route", at.choice.Reason), attribute.Int("baton.predicted_blocks", at.choice.Match))
	header = slices.DeleteFunc(header, func(h string) bool { return strings.HasPrefix(h, "Traceparent:") })
	return append(header, "Traceparent: "+t.Parent(ctx))
}

// requestName is what logs and the answer call the request: as the client does, or else by the id of the last try, "" before
// there is one.
func (x *exchange) requestName() string {
	switch {
	case x.name != "":
		return x.name
	case x.id == 0:
		return ""
	}
	return requestID(x.id)
}

// engineName is what engines are told that the request is called. It has the try's id where there may be another of the same
// name: vLLM refuses a request that is called like one that it has.
func (x *exchange) engineName() string {
	if d := x.s.dialect(); x.name != "" && (x.tries > 1 || d != nil && d.name() == "vllm") {
		return x.name + "-" + requestID(x.id)
	}
	return x.requestName()
}

// fail ends a lease after an error of its leg and says what the error means for the request.
func (x *exchange) fail(at *lease, err error) error {
	outcome, retry, label := failedLeg, true, "failed"
	if slices.Contains(x.failed, at.w) {
		outcome = failedAgain
	}
	lost := at.lostWorker()
	var said *engineError
	var orphaned *sourceLostError
	switch {
	case x.legs.Err() != nil:
		outcome, label = canceled, "canceled"
	case errors.Is(err, errNoRoom):
		at.end(canceled)
		x.s.metrics.legs.WithLabelValues(at.leg.String(), at.w.URL, "canceled").Inc()
		return err
	case errors.As(lost, &orphaned):
		at.end(canceled)
		x.s.metrics.legs.WithLabelValues(at.leg.String(), at.w.URL, "source_lost").Inc()
		return &legError{leg: prefillLeg, worker: orphaned.source, err: lost, retry: true}
	case lost != nil:
		err, label = lost, "lost"
	case errors.As(err, &said) && said.status == http.StatusGone:
		outcome, label = succeeded, "gone" // what the prefill leg left is not there any more: it takes another
	case errors.As(err, &said) && said.status >= 400 && said.status < 500:
		outcome, retry, label = succeeded, false, "refused" // the request is at fault, not the worker
	case errors.Is(err, errStale):
		outcome, label = canceled, "stale"
	case errors.Is(err, errTimeout), errors.As(err, new(*tooLargeError)):
		retry = false // the client has waited long enough, or would get no more
	}
	at.end(outcome)
	x.s.metrics.legs.WithLabelValues(at.leg.String(), at.w.URL, label).Inc()
	return &legError{leg: at.leg, worker: at.w, err: err, retry: retry}
}

func (x *exchange) done(at *lease) {
	at.end(succeeded)
	x.s.metrics.legs.WithLabelValues(at.leg.String(), at.w.URL, "ok").Inc()
}

// single lets a decode worker serve the whole request.
func (x *exchange) single(t *try, reason string) error {
	d := x.s.dialect()
	if d == nil {
		d = plain{}
	}
	at, err := x.acquire(decodeLeg)
	if err != nil {
		return err
	}
	defer at.end(canceled)
	return x.alone(at, d, t, reason)
}

// alone lets a worker serve the whole request.
func (x *exchange) alone(at *lease, d dialect, t *try, reason string) error {
	x.s.metrics.single.WithLabelValues(reason).Inc()
	x.route = "single; " + reason
	a, err := x.call(at, d.single(t), nil)
	if err != nil {
		return err
	}
	return x.deliver(at, a, time.Time{}, nil)
}

// sequence runs the prefill leg, then the decode leg.
func (x *exchange) sequence(d dialect, t *try, source *lease) error {
	start := time.Now()
	t.compare = x.compares(source.w)
	l, err := d.prefill(t)
	if err != nil {
		return err
	}
	a, err := x.call(source, l, nil)
	if err != nil {
		return err
	}
	buf := bodies.Get().(*[]byte)
	defer func() {
		if cap(*buf) <= maxPooled {
			bodies.Put(buf)
		}
	}()
	raw, err := a.readAll(*buf, x.s.cfg.Limits.MaxAnswer)
	a.close()
	if err != nil {
		return x.fail(source, err)
	}
	*buf = raw
	if t.answer, err = parsePrefilled(raw); err != nil {
		return x.fail(source, err)
	}
	x.compare(t, source.w)
	means, err := d.read(t)
	if err != nil {
		return x.fail(source, err)
	}
	x.done(source)
	x.s.metrics.prefill.Observe(time.Since(start).Seconds())
	x.countCached(source, t.answer.usage)
	switch means {
	case final:
		x.s.metrics.early.Inc()
		x.route = "prefill only"
		return x.deliverPrefilled(t)
	case silent:
		return x.silentReprefill(d, t, source.w)
	}
	if err := x.decode(d, t, source.w); err != nil {
		x.giveBack(d, t, source.w)
		return err
	}
	return nil
}

// giveBackTimeout bounds the wait for a prefill worker that has something taken back.
const giveBackTimeout = 2 * time.Second

// giveBack lets a prefill worker have back what no decode leg will take over, where that can be said: it would hold it for
// a while. Nobody waits for that but the server's end.
func (x *exchange) giveBack(d dialect, t *try, source *worker) {
	g, ok := d.(giver)
	if !ok {
		return
	}
	body := g.giveBack(t)
	if body == nil {
		return
	}
	c := &call{
		method: http.MethodPost, path: releasePath, body: pieces{body.join()}, // the answer's buffer is used again
		header: append(slices.Clone(x.r.header), "X-Request-Id: "+x.engineName()),
	}
	ctx, id := context.WithoutCancel(x.ctx), x.id // the client may have left
	x.s.running.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, giveBackTimeout)
		defer cancel()
		if _, _, err := source.endpoint.fetch(ctx, c, giveBackTimeout, maxProbe); err != nil {
			x.s.log.Debug("a prefill worker does not hear that nobody reads what it holds: its lease will end", "id", id, "worker", source.URL, "error", err)
		}
	})
}

// decode runs the decode leg after the prefill leg.
func (x *exchange) decode(d dialect, t *try, source *worker) error {
	l, err := d.decode(t)
	if err != nil {
		return err
	}
	avoid := []*worker{source}
	for {
		at, err := x.acquire(decodeLeg, avoid...)
		if err != nil {
			return err
		}
		defer at.end(canceled)
		if d.name() != "baton" { // ours see it themselves
			at.waitsFor(source)
		}
		x.route = "two legs"
		start := time.Now()
		a, err := x.call(at, l, nil)
		if errors.Is(err, errDial) && !slices.Contains(avoid, at.w) {
			avoid = append(avoid, at.w) // nothing was sent: what the prefill leg left behind is still good
			x.s.metrics.retries.WithLabelValues(decodeLeg.String()).Inc()
			continue
		}
		if err != nil {
			return err
		}
		var prompt []byte
		if d.mergesUsage() {
			prompt = t.answer.usage
		}
		return x.deliver(at, a, start, prompt)
	}
}

// countCached counts how much of a prompt a prefill worker had, and how much it was thought to have when it was chosen. For
// texts that is the part of the text that it had been sent before.
func (x *exchange) countCached(at *lease, usage []byte) {
	x.s.metrics.cached.Add(float64(cachedTokens(usage)))
	all, match := promptTokens(usage), at.choice.Match
	predicted := float64(match * at.block)
	if at.block == 0 && match > 0 {
		predicted = float64(all) * float64(match*contentBlock) / float64(max(1, len(x.r.content)))
	}
	x.s.metrics.predicted.Add(min(predicted, float64(all)))
}

// silentReprefill is for a prefill leg without anything to hand over: the decode worker has to compute the prompt
// again.
func (x *exchange) silentReprefill(d dialect, t *try, source *worker) error {
	x.silent = source.URL
	n := x.s.metrics.silent.WithLabelValues(source.URL)
	n.Inc()
	x.s.log.Error("silent re-prefill: the prefill worker's answer has nothing that a decode worker could take over, so its work is lost",
		"worker", source.URL, "engine", d.name(), "do", d.advice(), "policy", x.s.cfg.SilentReprefill)
	if x.s.cfg.SilentReprefill == Refuse {
		return &apiError{
			status: http.StatusInternalServerError, kind: "server_error", code: "silent_reprefill",
			message: "the prefill worker " + source.URL + " handed nothing over: " + d.advice(),
		}
	}
	return x.single(t, afterSilent)
}

// together runs both legs at once. The client gets the decode leg's answer; the prefill leg must go well all the same.
func (x *exchange) together(d dialect, t *try, source *lease) error {
	if m, ok := d.(mooncake); ok {
		m.chooseRank(t)
	}
	first, err := d.prefill(t)
	if err != nil {
		return err
	}
	second, err := d.decode(t)
	if err != nil {
		return err
	}
	at, err := x.acquire(decodeLeg, source.w)
	if err != nil {
		return err
	}
	defer at.end(canceled)
	at.waitsFor(source.w)
	x.route = "two legs at once"
	legs, cancel := context.WithCancelCause(x.ctx)
	x.legs = legs
	own := *x // what the prefill leg has of the request, which may end before it
	p := &prefillRun{x: &own, at: source, sent: make(chan struct{}), written: make(chan struct{}), done: make(chan struct{})}
	end := func() {}
	if _, ok := d.(mooncake); ok {
		own.held = nil
		own.legs, end = x.s.detached(x.ctx)
	}
	go p.run(cancel, first)
	err = x.decodeBeside(d, at, second, p)
	switch {
	case err == nil:
		p.wait(legs, prefillGrace)
	case own.legs != legs && context.Cause(legs) != errOther && p.isWritten():
		// A transfer that the prefill worker drops keeps one of its senders waiting for minutes; it has a few.
		x.s.running.Go(func() {
			<-p.done
			end()
		})
		cancel(nil)
		x.legs = x.ctx
		return err
	}
	cancel(nil)
	end()
	<-p.done
	x.legs = x.ctx
	if err != nil && p.err != nil && context.Cause(legs) == errOther {
		return p.err
	}
	return err
}

// prefillGrace is how long the prefill leg may take to end after the decode leg has.
const prefillGrace = 5 * time.Second

// decodeBeside runs the decode leg while the prefill leg runs.
func (x *exchange) decodeBeside(d dialect, at *lease, l leg, p *prefillRun) error {
	// The prefill leg may wait for the decode worker, so that one must know of the request first.
	a, err := x.call(at, l, func() { close(p.sent) })
	if err != nil {
		return err
	}
	var prompt []byte
	if d.mergesUsage() && (x.r.includeUsage || !x.r.stream) {
		p.wait(x.legs, x.s.cfg.Timeouts.Leg)
		prompt = p.usage()
	}
	return x.deliver(at, a, time.Time{}, prompt)
}

// prefillRun is the prefill leg of two that run at once.
type prefillRun struct {
	x       *exchange
	at      *lease
	sent    chan struct{} // closed when the decode leg is on its way
	written chan struct{} // closed when this one is
	done    chan struct{}

	// Valid once done is closed.
	err    error
	prompt []byte // usage
}

// isWritten reports whether the worker has the leg, so that nothing of the request is needed for it any more. It may be on
// its way.
func (p *prefillRun) isWritten() bool {
	select {
	case <-p.sent:
	default:
		return false
	}
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-p.written:
		return true
	case <-p.done:
	case <-timer.C:
	}
	return false
}

// detached is a context that outlives a request's, but not the server.
func (s *Server) detached(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(s.ctx, func() { cancel(context.Cause(s.ctx)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// errOther ends the decode leg when the prefill leg has failed.
var errOther = errors.New("the prefill leg failed")

// run sends the leg and reads all of its answer.
func (p *prefillRun) run(cancel context.CancelCauseFunc, l leg) {
	defer close(p.done)
	select {
	case <-p.sent:
	case <-p.x.legs.Done():
		return
	}
	start := time.Now()
	if p.err = p.read(l); p.err != nil {
		cancel(errOther)
		return
	}
	p.x.done(p.at)
	p.x.s.metrics.prefill.Observe(time.Since(start).Seconds())
	p.x.countCached(p.at, p.prompt)
}

func (p *prefillRun) read(l leg) error {
	a, err := p.x.call(p.at, l, func() { close(p.written) })
	if err != nil {
		return err
	}
	defer a.close()
	raw, err := a.readAll(nil, p.x.s.cfg.Limits.MaxAnswer)
	if err != nil {
		return p.x.fail(p.at, err)
	}
	if isEvents(a.header) {
		var end ending
		end.add(raw)
		if err := end.check(); err != nil {
			return p.x.fail(p.at, err)
		}
		p.prompt = lastUsage(raw)
		return nil
	}
	answer, err := parsePrefilled(raw)
	if err != nil {
		return p.x.fail(p.at, err)
	}
	p.prompt = answer.usage
	return nil
}

// wait waits for the end of the leg.
func (p *prefillRun) wait(ctx context.Context, most time.Duration) {
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-ctx.Done():
	case <-timer.C:
	}
}

// usage is what the leg said of the prompt, nil if it has not ended.
func (p *prefillRun) usage() []byte {
	select {
	case <-p.done:
		return p.prompt
	default:
		return nil
	}
}

// finish sends the error, if any, and accounts for the request.
func (x *exchange) finish(r *http.Request, start time.Time, err error) {
	status := http.StatusOK
	switch {
	case err != nil:
		status = x.sendError(err)
	case x.passed != 0:
		status = x.passed
	}
	endpoint := r.URL.Path
	x.s.metrics.requests.WithLabelValues(endpoint, strconv.Itoa(status)).Inc()
	level := slog.LevelInfo
	if status >= http.StatusInternalServerError {
		level = slog.LevelError
	}
	if x.broken || status == statusClientClosed {
		defer panic(http.ErrAbortHandler) // or whoever still reads would take what there is for the whole answer
	}
	if !x.s.log.Enabled(r.Context(), level) {
		return
	}
	attrs := []slog.Attr{
		slog.Int64("id", x.id), slog.String("request_id", x.requestName()), slog.String("endpoint", endpoint), slog.Int("status", status), slog.Float64("seconds", time.Since(start).Seconds()),
		slog.String("prefill", x.workers[prefillLeg]), slog.String("decode", x.workers[decodeLeg]), slog.Int("tries", x.tries),
	}
	if err != nil {
		attrs = append(attrs, slog.Any("error", err))
	}
	x.s.log.LogAttrs(r.Context(), level, "request", attrs...)
}
