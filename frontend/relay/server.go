package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"baton/route"
)

// Server relays requests. Run serves a listener; a program with a server of its own uses Handler. Close ends it.
type Server struct {
	cfg     Config
	log     *slog.Logger
	ids     *Minter
	fleet   *fleet
	metrics *metrics
	handler http.Handler
	bodies  *budget
	held    *residency              // nil unless a router is kv_cache_aware
	spoken  atomic.Pointer[dialect] // nil until a worker has joined that says what it is

	// Requests and watchers run under ctx; cancel ends them all.
	ctx    context.Context
	cancel context.CancelCauseFunc

	mu       sync.Mutex
	draining bool
	running  sync.WaitGroup // requests
	watchers sync.WaitGroup // of workers, and what removes them
}

// New checks cfg and makes a server, which begins to watch its workers at once. It must be closed.
func New(cfg Config) (*Server, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	ids, err := NewMinter(cfg.NodeID)
	if err != nil {
		return nil, &ConfigError{"NodeID", err}
	}
	s := &Server{cfg: cfg, log: cfg.Logger, ids: ids, bodies: &budget{limit: cfg.Limits.MaxBodies}}
	held := route.NewIndex(0)
	if looks := []string{residencyRouter, conversationRouter}; slices.Contains(looks, cfg.PrefillRouter) || slices.Contains(looks, cfg.DecodeRouter) {
		s.held = &residency{index: held}
	}
	prefill, err := route.NewRouter(cfg.PrefillRouter, held)
	if err != nil {
		return nil, err
	}
	decode, err := route.NewRouter(cfg.DecodeRouter, held)
	if err != nil {
		return nil, err
	}
	s.fleet = newFleet(prefill, decode)
	s.fleet.events = s.workerEvent
	if s.metrics, err = newMetrics(cfg.Registry, s.fleet, s.bodies); err != nil {
		return nil, fmt.Errorf("relay: registering metrics: %w", err)
	}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.handler = s.routes()
	for l, list := range [][]Worker{cfg.Prefill, cfg.Decode} {
		for _, w := range list {
			if err := s.addWorker(w, legKind(l)); err != nil {
				s.Close()
				return nil, &ConfigError{[...]string{"Prefill", "Decode"}[l], err}
			}
		}
	}
	return s, nil
}

// Handler serves the endpoints.
func (s *Server) Handler() http.Handler { return s.handler }

// Engine is what the workers were found to be, "" while that is not known.
func (s *Server) Engine() string {
	if d := s.dialect(); d != nil {
		return d.name()
	}
	return ""
}

func (s *Server) dialect() dialect {
	if d := s.spoken.Load(); d != nil {
		return *d
	}
	return nil
}

// setDialect makes d what is spoken unless that is settled, and returns what is.
func (s *Server) setDialect(d dialect) dialect {
	if s.spoken.CompareAndSwap(nil, &d) {
		s.log.Info("engines", "engine", d.name(), "legs_together", d.together())
		s.fleet.kickWaiting()
	}
	return *s.spoken.Load()
}

// workerEvent logs what becomes of workers. It is called with the fleet's lock.
func (s *Server) workerEvent(event string, w *worker, reason string) {
	if w.roles[prefillLeg] {
		s.metrics.silent.WithLabelValues(w.URL) // 0, and not missing
	}
	level := slog.LevelInfo
	if reason != "" {
		level = slog.LevelWarn
	}
	s.log.Log(s.ctx, level, "worker: "+event, "worker", w.URL, "reason", reason)
}

// routes maps the endpoints. A known path with another method and an unknown path have JSON answers too.
func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	allow := map[string]string{} // methods, by path
	route := func(method, path string, f http.HandlerFunc) {
		mux.HandleFunc(method+" "+path, f)
		if before := allow[path]; before != "" {
			method = before + ", " + method
		}
		allow[path] = method
	}
	route("POST", chatPath, s.serve)
	route("POST", completionsPath, s.serve)
	route("GET", "/v1/models", s.pass)
	route("POST", "/tokenize", s.pass)
	route("POST", "/detokenize", s.pass)
	route("GET", "/health", s.health)
	route("GET", "/workers", s.listWorkers)
	route("POST", "/workers", s.postWorker)
	route("DELETE", "/workers", s.deleteWorker)
	route("GET", "/metrics", promhttp.HandlerFor(s.cfg.Registry, promhttp.HandlerOpts{}).ServeHTTP)
	for path, methods := range allow {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Allow", methods)
			writeError(w, &apiError{
				status: http.StatusMethodNotAllowed, kind: "invalid_request_error",
				message: path + " takes " + methods + ", not " + r.Method,
			})
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, &apiError{
			status: http.StatusNotFound, kind: "invalid_request_error", code: "unknown_url",
			message: "no such endpoint: " + r.Method + " " + r.URL.Path,
		})
	})
	return mux
}

// begin counts a request in, unless the server is shutting down.
func (s *Server) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return false
	}
	s.running.Add(1)
	return true
}

func (s *Server) isDraining() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.draining
}

// How long a client may take to send headers, and keep a connection that it does not use.
const (
	headerTimeout = 15 * time.Second
	clientIdle    = 2 * time.Minute
)

// Run serves ln until ctx ends, lets running requests finish for Timeouts.Drain and closes the server and ln. It returns
// nil after that, otherwise why serving failed.
func (s *Server) Run(ctx context.Context, ln net.Listener) error {
	srv := &http.Server{
		Handler:           s.handler,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       clientIdle,
		MaxHeaderBytes:    s.cfg.Limits.MaxHeader,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		ConnContext:       s.ConnContext,
	}
	defer s.Close()
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(ln) }()
	select {
	case err := <-failed:
		return fmt.Errorf("relay: serving %s: %w", ln.Addr(), err)
	case <-ctx.Done():
	}
	s.drain(s.cfg.Timeouts.Drain)
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := srv.Shutdown(late); err != nil {
		srv.Close()
	}
	<-failed
	return nil
}

// drain refuses new requests and waits for those that run, for so long at most.
func (s *Server) drain(wait time.Duration) {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	idle := make(chan struct{})
	go func() {
		s.running.Wait()
		close(idle)
	}()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-idle:
	case <-timer.C:
		s.cancel(errShuttingDown)
		<-idle
	}
}

// Close ends running requests, stops watching workers and closes the connections to them.
func (s *Server) Close() {
	s.cancel(errShuttingDown)
	s.drain(0)
	s.watchers.Wait()
	for _, w := range s.fleet.all() {
		w.endpoint.close()
	}
}

var errShuttingDown = &apiError{
	status: http.StatusServiceUnavailable, kind: "service_unavailable_error", code: "shutting_down", retryAfter: 1,
	message: "the relay is shutting down: send the request again",
}

// addWorker makes a worker take legs and watches it.
func (s *Server) addWorker(spec Worker, legs ...legKind) error {
	u, err := parseBase(spec.URL)
	if err != nil {
		return err
	}
	if u.Scheme == "http" && !s.cfg.Insecure && !isLoopbackName(u.Hostname()) {
		return &plainError{spec.URL}
	}
	if err := checkEvents(&spec); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return errShuttingDown
	}
	w, isNew, err := s.fleet.add(spec, legs, func() *endpoint {
		return newEndpoint(u, s.cfg.TLS, s.cfg.Timeouts.Connect, s.cfg.Timeouts.Idle)
	}, u.Hostname())
	if err != nil || !isNew {
		return err
	}
	ctx, stop := context.WithCancel(s.ctx)
	w.stop = stop
	s.watchers.Add(1)
	w.watched.Go(func() {
		defer s.watchers.Done()
		s.watch(ctx, w)
	})
	s.followEvents(ctx, w)
	return nil
}

// plainError refuses a worker that prompts and keys would go to in the clear.
type plainError struct{ url string }

func (e *plainError) Error() string {
	return e.url + " reaches beyond this host without TLS: name the worker by https://, or start the relay with --insecure"
}

// isLoopbackName reports whether a host without port is this one.
func isLoopbackName(host string) bool {
	host, _, _ = strings.Cut(host, "%")
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

var errNoSuchWorker = errors.New("no such worker")

// removeWorker takes a worker out of the pools. Requests that it has go on; done is closed when it is gone.
func (s *Server) removeWorker(url string) (done <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return nil, errShuttingDown
	}
	w, idle := s.fleet.leave(url)
	if w == nil {
		return nil, errNoSuchWorker
	}
	gone := make(chan struct{})
	s.watchers.Go(func() {
		defer close(gone)
		select {
		case <-idle:
		case <-s.ctx.Done():
		}
		w.stop()
		w.watched.Wait()
		w.endpoint.close()
		s.fleet.remove(w)
	})
	return gone, nil
}

// engineAuth is what workers get as Authorization.
func (s *Server) engineAuth(client string) []string {
	switch {
	case s.cfg.EngineKey != "":
		return []string{"Authorization: Bearer " + s.cfg.EngineKey}
	case client != "" && s.cfg.Authorize == nil:
		return []string{"Authorization: " + client}
	}
	return nil
}
