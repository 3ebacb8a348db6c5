package relay

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"baton/tracing"
)

// streamBuffer is how much of a stream is copied at a time.
const streamBuffer = 32 << 10

var streamBuffers = sync.Pool{New: func() any { return new([streamBuffer]byte) }}

func isEvents(h http.Header) bool {
	kind, _, _ := strings.Cut(h.Get("Content-Type"), ";")
	return strings.EqualFold(strings.TrimSpace(kind), "text/event-stream")
}

// deliver gives the client what a worker answers and ends the lease. prompt is the usage of the prefill leg if it must
// be merged into the answer's. start is when the leg began if its first event comes behind the transfer and one step, else it
// is zero.
func (x *exchange) deliver(at *lease, a *answer, start time.Time, prompt []byte) error {
	defer a.close()
	x.delivers = at
	err := x.checkKind(a)
	switch {
	case err != nil:
	case x.r.stream:
		err = x.stream(a, start, prompt)
	default:
		err = x.whole(a, prompt)
	}
	switch {
	case err == nil:
		x.done(at)
		return nil
	case errors.Is(err, errClientGone):
		at.end(canceled)
		return err
	}
	return x.fail(at, err)
}

// whole reads an answer that is not a stream, all of it before any is sent, so that what breaks can be retried.
func (x *exchange) whole(a *answer, prompt []byte) error {
	buf := bodies.Get().(*[]byte)
	defer func() {
		if cap(*buf) <= maxPooled {
			bodies.Put(buf)
		}
	}()
	a.within(x.s.cfg.Timeouts.Leg)
	body, err := a.readAll(*buf, x.s.cfg.Limits.MaxAnswer)
	if err != nil {
		return err
	}
	*buf = body
	completion, err := readCompletion(body)
	if err != nil {
		return err
	}
	var e edit
	if prompt != nil {
		if usage := mergedUsage(completion.get("usage"), prompt); usage != nil {
			e.put("usage", usage)
		}
	}
	if x.s.cfg.RolloutFields && x.r.chat {
		if choices := rolloutChoices(&completion); choices != nil {
			e.put("choices", choices)
		}
	}
	out := pieces{body}
	if len(e.set) > 0 {
		out = e.apply(&completion)
	}
	h := x.w.Header()
	if kind := a.header.Get("Content-Type"); kind != "" {
		h.Set("Content-Type", kind)
	}
	h.Set("Content-Length", strconv.Itoa(out.size()))
	x.begin(http.StatusOK)
	for _, piece := range out {
		if err := x.write(piece); err != nil {
			return err
		}
	}
	return nil
}

// stream copies events as they come.
func (x *exchange) stream(a *answer, start time.Time, prompt []byte) error {
	if prompt == nil || !x.r.includeUsage {
		if client, ok := x.client(); ok && a.chunked {
			return x.copyChunks(a, client, start)
		}
		return x.copyEvents(a, start, nil)
	}
	return x.copyEvents(a, start, prompt)
}

// clientKey is where a request's context has the client's connection.
type clientKey struct{}

// ConnContext is for the http.Server of a program that has one of its own: with it, streams are copied to a client's
// connection as they come from the worker's.
func (s *Server) ConnContext(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, clientKey{}, c)
}

// client is the client's connection if what is written there, once the head is sent, are the chunks of the answer.
func (x *exchange) client() (net.Conn, bool) {
	c, ok := x.ctx.Value(clientKey{}).(net.Conn)
	return c, ok && x.direct
}

// copyChunks copies a stream together with its framing, from one connection's buffer to the other connection.
func (x *exchange) copyChunks(a *answer, client net.Conn, start time.Time) (err error) {
	var end ending
	framing := chunks{data: end.add}
	defer func() { x.leave(err, &end, framing.between()) }()
	if err := x.awaitEvent(a); err != nil {
		return err
	}
	first := x.beginEvents(start)
	if err := x.flush(); err != nil {
		return err
	}
	pump := newPump(x, a, client, &framing)
	for !framing.end {
		if pump != nil && a.conn.br.Buffered() == 0 {
			if err := pump.run(); err != nil {
				return err
			}
			break
		}
		b, err := a.next()
		if err != nil {
			return streamError(err)
		}
		forward, taken, err := framing.scan(b)
		if err != nil {
			return failed(errAnswer, err)
		}
		if len(forward) > 0 {
			x.extendDeadline()
			if _, err := client.Write(forward); err != nil {
				return errClientGone
			}
		}
		a.take(taken)
		a.within(x.s.cfg.Timeouts.Stream)
	}
	a.done = true
	if err := end.check(); err != nil {
		return err
	}
	x.s.metrics.decode.Observe(time.Since(first).Seconds())
	return nil
}

// leave notes how the client is left when a stream has failed.
func (x *exchange) leave(err error, end *ending, between bool) {
	if err != nil && x.began {
		x.broken = !between || !end.between()
		x.told = errors.As(end.check(), new(*engineError))
	}
}

// streamError is an error of reading a stream.
func streamError(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return failed(errTimeout, err)
	}
	return failed(errReset, err)
}

// copyEvents copies a stream event by event and merges the prompt's usage into theirs, if there is one. The client gets no
// part of an event.
func (x *exchange) copyEvents(a *answer, start time.Time, prompt []byte) (err error) {
	buf := streamBuffers.Get().(*[streamBuffer]byte)
	defer streamBuffers.Put(buf)
	var events eventBuffer
	var end ending
	defer func() { x.leave(err, &end, true) }()
	first := time.Time{}
	send := func(b []byte) error {
		if len(b) == 0 {
			return nil
		}
		if first.IsZero() {
			if eventsEnd(b, 0) > 0 { // or it is too large to wait for, so no error
				if err := checkEvent(b); err != nil {
					return err
				}
			}
			first = x.beginEvents(start)
		}
		end.add(b)
		if err := x.write(mergeEvents(b, prompt)); err != nil {
			return err
		}
		return x.flush()
	}
	for {
		a.within(x.s.cfg.Timeouts.Stream)
		n, err := a.Read(buf[:])
		if err := send(events.next(buf[:n])); err != nil {
			return err
		}
		switch {
		case err == nil:
			continue
		case err != io.EOF:
			return streamError(err)
		}
		rest := events.rest()
		if string(eventData(rest)) == doneData { // its empty line is missing
			if err := send(rest); err != nil {
				return err
			}
		}
		if first.IsZero() && len(rest) == 0 {
			return failed(errNone, errEmptyStream)
		}
		if err := end.check(); err != nil {
			return err
		}
		x.s.metrics.decode.Observe(time.Since(first).Seconds())
		return nil
	}
}

// begin sends the answer's head; from here on nothing is retried.
func (x *exchange) begin(status int) {
	x.began = true
	if x.delivers != nil {
		x.delivers.begins()
	}
	h := x.w.Header()
	h.Set("X-Request-Id", x.requestName())
	if x.route != "" {
		h.Set("X-Baton-Route", x.route)
	}
	if x.silent != "" {
		h.Set("X-Baton-Silent-Reprefill", x.silent)
	}
	x.w.WriteHeader(status)
}

// beginEvents begins a stream and returns when. start is as for deliver.
func (x *exchange) beginEvents(start time.Time) time.Time {
	now := time.Now()
	if !start.IsZero() {
		x.s.metrics.transfer.Observe(now.Sub(start).Seconds())
	}
	h := x.w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no") // proxies must not collect the events
	x.begin(http.StatusOK)
	return now
}

// write queues bytes of the answer; flush sends them. The client's time to read is renewed, once a second at most.
func (x *exchange) write(b []byte) error {
	x.extendDeadline()
	if _, err := x.w.Write(b); err != nil {
		return errClientGone
	}
	return nil
}

func (x *exchange) extendDeadline() {
	if deadline := time.Now().Add(x.s.cfg.Timeouts.Write); deadline.Sub(x.deadline) > time.Second {
		x.deadline = deadline
		_ = x.rc.SetWriteDeadline(deadline)
	}
}

func (x *exchange) flush() error {
	if err := x.rc.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return errClientGone
	}
	return nil
}

// sendError answers with an error and returns the status that it stands for.
//
// Clients of the NeMo-Gym kind repeat 429, 502, 503 and 504 without end and 500 three times. So only what heals by
// itself is 503: no worker, a worker that says 503, the relay's own end. A request that fails wherever it is sent is
// 500, lest it be sent for ever.
func (x *exchange) sendError(err error) int {
	e := clientError(err)
	if e.status == statusClientClosed {
		return e.status
	}
	_ = x.rc.SetWriteDeadline(time.Now().Add(x.s.cfg.Timeouts.Write))
	if x.broken {
		return e.status // finish breaks the connection
	}
	if x.began {
		if isEvents(x.w.Header()) && !x.told {
			_ = x.write(append(e.appendJSON([]byte("data: ")), "\n\n"...))
			_ = x.flush()
		}
		return e.status
	}
	if name := x.requestName(); name != "" {
		x.w.Header().Set("X-Request-Id", name)
	}
	var said *engineError
	if errors.As(err, &said) && e.status == said.status {
		if e.retryAfter > 0 {
			x.w.Header().Set("Retry-After", strconv.Itoa(e.retryAfter))
		}
		passHeaders(x.w.Header(), said.header, time.Now())
		x.w.WriteHeader(said.status)
		_, _ = x.w.Write(said.body)
		return e.status
	}
	writeError(x.w, e)
	return e.status
}

// clientError is what a client is told of an error.
func clientError(err error) *apiError {
	var known *apiError
	if errors.As(err, &known) {
		return known
	}
	var said *engineError
	if errors.As(err, &said) {
		switch {
		case said.status == http.StatusServiceUnavailable:
			return &apiError{status: said.status, retryAfter: 1}
		case said.status >= 400 && said.status < 500:
			return &apiError{status: said.status}
		}
		return &apiError{status: http.StatusInternalServerError, kind: "server_error", code: "engine_failed", message: err.Error()}
	}
	var leg *legError
	if errors.As(err, &leg) {
		code := "engine_lost"
		switch {
		case errors.Is(err, errTimeout):
			code = "engine_timeout"
		case errors.Is(err, errNone), errors.Is(err, errHalf):
			code = "engine_failed"
		}
		return &apiError{status: http.StatusInternalServerError, kind: "server_error", code: code, message: err.Error()}
	}
	return &apiError{status: http.StatusInternalServerError, kind: "server_error", message: "the relay failed; its log says more"}
}

// pass hands a request without legs to any worker that takes some.
func (s *Server) pass(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	if !s.begin() {
		writeError(w, errShuttingDown)
		return
	}
	defer s.running.Done()
	x := &exchange{s: s, w: w, rc: http.NewResponseController(w), ctx: r.Context(), legs: r.Context(), name: tracing.RequestID(r.Header), held: &holding{of: s.bodies}}
	defer x.held.keep(0)
	x.finish(r, start, x.passAny(r))
}

func (x *exchange) passAny(r *http.Request) error {
	if a := x.s.cfg.Authorize; a != nil && !a(r) {
		return errUnauthorized
	}
	var body []byte
	if err := x.readBody(r, &body); err != nil {
		return err
	}
	x.r = &request{path: r.URL.Path, content: body, header: x.s.engineAuth(r.Header.Get("Authorization"))}
	x.id, x.tries = x.s.ids.Mint(), 1
	leg := decodeLeg
	if !x.s.fleet.has(decodeLeg) {
		leg = prefillLeg
	}
	err := x.passTo(leg, r, body)
	var f *legError
	if errors.As(err, &f) && f.retry && x.ctx.Err() == nil && !x.began {
		x.s.log.Warn("a worker failed; the request is tried again", "id", x.id, "request_id", x.requestName(), "path", r.URL.Path, "worker", f.worker.URL, "error", f.err)
		x.failed, x.tries = append(x.failed, f.worker), 2
		err = x.passTo(leg, r, body)
	}
	return err
}

// passTo hands the request to one worker.
func (x *exchange) passTo(leg legKind, r *http.Request, body []byte) error {
	at, err := x.s.fleet.acquire(x.ctx, leg, x.r.routing(0, 0), 0, x.failed, x.s.cfg.WorkerWait)
	if err != nil {
		return noWorker(err)
	}
	defer at.end(canceled)
	header := append(slices.Clone(x.r.header), "X-Request-Id: "+x.engineName())
	c := &call{method: http.MethodGet, path: r.URL.Path, header: header} // for HEAD, too, whose answers announce what does not come
	if r.Method == http.MethodPost {
		c.method, c.body = http.MethodPost, pieces{body}
	}
	for {
		a, err := at.w.endpoint.do(at.call(x.ctx), c, x.s.cfg.Timeouts.Leg)
		if errors.Is(err, errStale) {
			continue
		}
		if err != nil {
			return x.fail(at, err)
		}
		defer a.close()
		a.held = x.held
		answer, err := a.readAll(nil, x.s.cfg.Limits.MaxAnswer)
		if err != nil {
			return x.fail(at, err)
		}
		if err := checkPassed(a, answer); err != nil {
			return x.fail(at, err)
		}
		at.end(succeeded)
		x.began, x.passed = true, a.status
		x.w.Header().Set("X-Request-Id", x.requestName())
		passHeaders(x.w.Header(), a.header, time.Now())
		x.w.WriteHeader(a.status)
		if _, err := x.w.Write(answer); err != nil && r.Method != http.MethodHead {
			return errClientGone
		}
		return nil
	}
}
