package frontend

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"

	"baton/tracing"
)

// routes maps the endpoints. A known path with another method and an unknown path have JSON answers too.
func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	route := func(method, path string, f func(*exchange) error) {
		mux.HandleFunc(method+" "+path, s.handle(path, f))
		mux.HandleFunc(path, s.handle(path, notAllowed(method)))
	}
	route("POST", "/v1/chat/completions", s.chatCompletions)
	route("POST", "/v1/completions", s.completions)
	route("POST", "/tokenize", s.tokenize)
	route("POST", "/detokenize", s.detokenize)
	route("GET", "/v1/models", s.models)
	route("GET", "/v1/models/{model...}", s.model)
	if s.cfg.ServerInfo != nil {
		route("GET", "/server_info", s.serverInfo)
	}
	if s.cfg.Limits.legs {
		route("POST", "/legs/release", s.releaseLegs)
		mux.HandleFunc("POST "+cachedPath, s.cached)
		mux.HandleFunc(cachedPath, s.handle(cachedPath, notAllowed(http.MethodPost)))
	}
	mux.HandleFunc("/", s.handle("other", func(x *exchange) error {
		return &apiError{
			status: http.StatusNotFound, kind: typeInvalid, code: "unknown_url",
			message: "no such endpoint: " + x.r.Method + " " + x.r.URL.Path,
		}
	}))
	// These two answer while the server shuts down, and need no API key: load balancers and Prometheus ask
	// them, and they tell nothing about requests but numbers.
	mux.HandleFunc("GET /health", s.health)
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.cfg.Registry, promhttp.HandlerOpts{}))
	return s.deadlines(mux)
}

// notAllowed answers an endpoint's other methods.
func notAllowed(method string) func(*exchange) error {
	return func(x *exchange) error {
		x.w.Header().Set("Allow", method)
		return &apiError{
			status: http.StatusMethodNotAllowed, kind: typeInvalid,
			message: fmt.Sprintf("%s takes %s, not %s", x.r.URL.Path, method, x.r.Method),
		}
	}
}

// deadlines gives each request its time to be read and answered; what an earlier one on the same
// connection had left does not count. Writers that know no deadlines (tests, wrappers) go without.
func (s *Server) deadlines(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		now := time.Now()
		_ = rc.SetReadDeadline(now.Add(s.cfg.ReadTimeout))
		_ = rc.SetWriteDeadline(now.Add(s.cfg.WriteTimeout))
		next.ServeHTTP(w, r)
	})
}

// exchange is one request and its answer. It belongs to the handler's goroutine.
type exchange struct {
	s   *Server
	w   http.ResponseWriter
	r   *http.Request
	rc  *http.ResponseController
	ctx context.Context // ends with the client's connection, and with the server
	id  string

	held     int64     // bytes of its body
	began    bool      // headers are sent
	deadline time.Time // of writes, as last set
	summary  []any     // what the log line says beside the outcome
}

// handle wraps an endpoint: counting, logging, errors, cancellation.
func (s *Server) handle(endpoint string, f func(*exchange) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		ctx, cancel := context.WithCancelCause(r.Context())
		defer cancel(nil)
		defer context.AfterFunc(s.ctx, func() { cancel(context.Cause(s.ctx)) })()
		x := &exchange{s: s, w: w, r: r, rc: http.NewResponseController(w), ctx: ctx, id: cmp.Or(tracing.RequestID(r.Header), randomID())}
		w.Header().Set("X-Request-Id", x.id)
		defer func() { s.bodies.Add(-x.held) }()
		var err error
		var span *tracing.Span
		x.ctx, span = s.cfg.Tracer.Start(s.cfg.Tracer.FromHeader(ctx, r.Header), "HTTP "+endpoint, true, attribute.String("baton.http.id", x.id))
		defer func() { span.End(err) }()
		if s.begin() {
			defer s.end()
			s.metrics.inFlight.WithLabelValues(endpoint).Inc()
			defer s.metrics.inFlight.WithLabelValues(endpoint).Dec()
			err = x.call(f)
		} else {
			err = errShuttingDown
		}
		x.finish(endpoint, start, err)
	}
}

// call runs f; a panic is an internal error of this request alone.
func (x *exchange) call(f func(*exchange) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			x.s.log.Error("panic in a request", "id", x.id, "panic", p, "stack", string(debug.Stack()))
			err = errInternal
		}
	}()
	if err := x.s.cfg.APIKeys.authorize(x.r); err != nil {
		return err
	}
	return f(x)
}

// finish sends the error, if any, and accounts for the request.
func (x *exchange) finish(endpoint string, start time.Time, err error) {
	status := http.StatusOK
	attrs := append([]any{"id", x.id, "endpoint", endpoint}, x.summary...)
	if err != nil {
		e := toAPIError(x.ctx, err)
		status = e.status
		attrs = append(attrs, "error", err)
		x.extendDeadline()
		switch {
		case status == statusClientClosed: // below
		case x.began:
			_ = x.event(e.appendJSON(nil))
		default:
			e.write(x.w)
		}
	}
	took := time.Since(start)
	x.s.metrics.requests.WithLabelValues(endpoint, strconv.Itoa(status)).Inc()
	attrs = append(attrs, "status", status, "seconds", took.Seconds())
	if status >= http.StatusInternalServerError {
		x.s.log.Error("request failed", attrs...)
	} else {
		x.s.log.Info("request", attrs...)
	}
	if status == statusClientClosed {
		panic(http.ErrAbortHandler) // or whoever still reads took what there is for the whole answer
	}
}

// body reads the request's body within the limits.
func (x *exchange) body() ([]byte, error) {
	limit := x.s.cfg.Limits.MaxBody
	b, err := readSized(countedBody{http.MaxBytesReader(x.w, x.r.Body, limit), x}, min(x.r.ContentLength, limit))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.Is(err, errNoRoom):
		return nil, err
	case errors.As(err, &tooLarge):
		return nil, &apiError{
			status: http.StatusRequestEntityTooLarge, kind: typeInvalid, code: "request_too_large",
			message: fmt.Sprintf("the body is larger than %d bytes", limit),
		}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, &apiError{
			status: http.StatusRequestTimeout, kind: typeInvalid,
			message: fmt.Sprintf("the body did not arrive within %v", x.s.cfg.ReadTimeout),
		}
	case err != nil && x.ctx.Err() == nil:
		return nil, &apiError{status: http.StatusBadRequest, kind: typeInvalid, message: fmt.Sprintf("the body cannot be read: %v", err)}
	case err != nil:
		return nil, errClientGone
	}
	// The deadline must not outlast the body: it would end the wait for the client's disconnection.
	_ = x.rc.SetReadDeadline(time.Time{})
	return b, nil
}

// countedBody is a body whose bytes count against what all requests may hold, as they arrive.
type countedBody struct {
	io.Reader
	x *exchange
}

func (b countedBody) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	b.x.held += int64(n)
	if b.x.s.bodies.Add(int64(n)) > b.x.s.cfg.Limits.MaxBodies && n > 0 {
		return n, errNoRoom
	}
	return n, err
}

// Bodies of unknown worth get so much memory; when they have filled it, so many times more is believed of their size.
const (
	firstBody  = 64 << 10
	bodyGrowth = 32
)

// readSized reads all of what is said to have a size, -1 for an unknown one.
func readSized(r io.Reader, size int64) ([]byte, error) {
	b := make([]byte, 0, min(max(size, 0), firstBody)+bytes.MinRead)
	for {
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		switch {
		case errors.Is(err, io.EOF):
			return b, nil
		case err != nil:
			return b, err
		case len(b) == cap(b):
			more := len(b)
			if left := size + bytes.MinRead - int64(len(b)); left > 0 {
				more = int(min(left, bodyGrowth*int64(len(b))))
			}
			b = roomier(b, more)
		}
	}
}

// spares are buffers of large bodies: a rollout's come at every turn, and the next is a little longer.
var spares sync.Pool // of *[]byte

// Bounds of the buffers that are kept, and of the room that they have for longer ones.
const (
	maxSpare  = 4 << 20
	spareRoom = 512 << 10
)

// spare gives a body's memory to others. Nothing may refer to it.
func spare(body []byte) {
	if n := cap(body); n > firstBody+bytes.MinRead && n <= maxSpare {
		spares.Put(&body)
	}
}

// roomier is b with room for so many more bytes at least.
func roomier(b []byte, more int) []byte {
	if s, _ := spares.Get().(*[]byte); s != nil && cap(*s)-len(b) >= more {
		return append((*s)[:0], b...)
	}
	return slices.Grow(b, more+min(more/2, spareRoom))
}

// json answers with a whole body.
func (x *exchange) json(body []byte) error {
	x.extendDeadline()
	x.began = true
	writeJSON(x.w, http.StatusOK, body)
	return nil
}

// extendDeadline gives the client WriteTimeout from now to read. It is renewed once a second at most.
func (x *exchange) extendDeadline() {
	deadline := time.Now().Add(x.s.cfg.WriteTimeout)
	if deadline.Sub(x.deadline) > time.Second {
		x.deadline = deadline
		_ = x.rc.SetWriteDeadline(deadline)
	}
}

// beginEvents sends the headers of a stream.
func (x *exchange) beginEvents() {
	x.began = true
	h := x.w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no") // proxies must not collect the events
	x.w.WriteHeader(http.StatusOK)
}

// event sends one server-sent event at once.
func (x *exchange) event(data []byte) error {
	b := make([]byte, 0, len(data)+8)
	b = append(append(append(b, "data: "...), data...), "\n\n"...)
	if err := x.write(b); err != nil {
		return err
	}
	return x.flush()
}

// write queues bytes of a stream; flush sends them.
func (x *exchange) write(b []byte) error {
	x.extendDeadline()
	if _, err := x.w.Write(b); err != nil {
		return errClientGone
	}
	return nil
}

func (x *exchange) flush() error {
	if err := x.rc.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return errClientGone
	}
	return nil
}
