package frontend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"baton/text"
	"baton/tracing"
)

// Config says what to serve. Backend and Model are required.
type Config struct {
	// Backend runs the requests.
	Backend Backend
	// Tokenizer is the model's; nil serves token ids only.
	Tokenizer Tokenizer
	// Output is how the model writes reasoning and tool calls, which chat answers then give apart from their content.
	// The zero value leaves everything in the content.
	Output text.OutputFormat
	// Model is the name that clients ask for.
	Model string
	// APIKeys are asked for at every endpoint but /health and /metrics; the zero value asks nobody.
	APIKeys APIKeys
	// Limits bound what a request may ask for; zero fields have defaults.
	Limits Limits
	// Conversations bound what is remembered of conversations, so that a turn costs no more than what is new in it.
	Conversations ConversationLimits
	// ShadowRate is the share of prompts, from 0 to 1, that are rendered and encoded a second time, as a whole, to compare.
	ShadowRate float64
	// ServerInfo is what /server_info shows, as JSON; nil for no such endpoint.
	ServerInfo func() any
	// Seed makes the seeds of requests that bring none repeatable: a sequence, in order of arrival. With nil
	// they are unpredictable.
	Seed *uint64
	// DrainTimeout is how long Run lets running requests finish once its context has ended (default 30 s).
	DrainTimeout time.Duration
	// WriteTimeout ends a stream whose client has read nothing for so long (default 60 s).
	WriteTimeout time.Duration
	// ReadTimeout bounds the reading of one request (default 60 s).
	ReadTimeout time.Duration
	// Logger gets a line a request; nil discards them.
	Logger *slog.Logger
	// Tracer gets a tree of spans a request; nil none.
	Tracer *tracing.Tracer
	// Registry gets the server's metrics and is what /metrics shows; nil makes one.
	Registry *prometheus.Registry
}

// Limits bound one request.
type Limits struct {
	MaxBody     int64 // bytes of a body; default 64 MiB
	MaxBodies   int64 // bytes of the bodies of all requests that run; default 2 GiB, or MaxBody if that is more
	MaxDepth    int   // nesting of its JSON; default 64
	MaxChoices  int   // answers: prompts times n; default 1024
	MaxLogprobs int   // alternatives a token; default 20
	VocabSize   int   // ids of a prompt are below it; 0 leaves the check to the backend
	MaxModelLen int   // tokens of prompt and answer; 0 leaves the check to the backend

	legs bool // single legs are taken
}

func (l *Limits) setDefaults() {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	if l.MaxBody == 0 {
		l.MaxBody = 64 << 20
	}
	if l.MaxBodies == 0 {
		l.MaxBodies = max(2<<30, l.MaxBody)
	}
	def(&l.MaxDepth, 64)
	def(&l.MaxChoices, 1024)
	def(&l.MaxLogprobs, 20)
}

func (c *Config) setDefaults() error {
	switch {
	case c.Backend == nil:
		return errors.New("frontend: Config.Backend is missing")
	case c.Model == "":
		return errors.New("frontend: Config.Model is missing: clients ask for the model by name")
	case c.Limits.MaxBody < 0, c.Limits.MaxBodies < 0, c.Limits.MaxDepth < 0, c.Limits.MaxChoices < 0, c.Limits.MaxLogprobs < 0,
		c.Limits.VocabSize < 0, c.Limits.MaxModelLen < 0:
		return fmt.Errorf("frontend: Config.Limits has a negative field: %+v", c.Limits)
	case c.DrainTimeout < 0, c.WriteTimeout < 0, c.ReadTimeout < 0:
		return errors.New("frontend: Config has a negative timeout")
	case !(c.ShadowRate >= 0 && c.ShadowRate <= 1):
		return fmt.Errorf("frontend: Config.ShadowRate is %v; it is a share, from 0 to 1", c.ShadowRate)
	}
	c.Limits.setDefaults()
	c.Conversations.setDefaults()
	def := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.DrainTimeout, 30*time.Second)
	def(&c.WriteTimeout, time.Minute)
	def(&c.ReadTimeout, time.Minute)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Registry == nil {
		c.Registry = prometheus.NewRegistry()
	}
	return nil
}

// Server answers HTTP requests. Run serves a listener; a program with a server of its own uses Handler
// and calls Shutdown.
type Server struct {
	cfg     Config
	backend Backend
	legs    Legs // the backend, if it takes single legs
	tok     Tokenizer
	log     *slog.Logger
	metrics *metrics
	started time.Time
	handler http.Handler
	seeds   seeds
	bodies  atomic.Int64 // bytes that requests hold

	prompts *Prompter

	// Requests run under ctx; cancel ends them all.
	ctx    context.Context
	cancel context.CancelCauseFunc

	mu       sync.Mutex
	draining bool // no request begins any more
	requests int  // that run
	running  sync.WaitGroup
}

// New checks cfg and makes a server. Its metrics are registered once; a second server needs another
// registry.
func New(cfg Config) (*Server, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, backend: cfg.Backend, tok: cfg.Tokenizer, log: cfg.Logger, started: time.Now()}
	if s.tok == nil {
		s.tok = idTokenizer{}
	}
	s.legs, s.cfg.Limits.legs = cfg.Backend.(Legs)
	var err error
	if s.metrics, err = newMetrics(cfg.Registry); err != nil {
		return nil, fmt.Errorf("frontend: registering metrics: %w", err)
	}
	s.prompts, err = newPrompter(s.tok, cfg.Tokenizer != nil, &s.cfg.Limits, PrompterConfig{
		Conversations: cfg.Conversations, ShadowRate: cfg.ShadowRate, Logger: cfg.Logger, Registry: cfg.Registry,
	})
	if err != nil {
		return nil, err
	}
	if cfg.Seed != nil {
		s.seeds.sequence = rand.New(rand.NewPCG(*cfg.Seed, 0))
	}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.handler = s.routes()
	return s, nil
}

// Handler serves the endpoints.
func (s *Server) Handler() http.Handler { return s.handler }

// begin counts a request in, unless the server is shutting down. end counts it out.
func (s *Server) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return false
	}
	s.requests++
	s.running.Add(1)
	return true
}

func (s *Server) end() {
	s.mu.Lock()
	s.requests--
	s.mu.Unlock()
	s.running.Done()
}

func (s *Server) isDraining() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.draining
}

// headerTimeout is how long a client may take to send a request's headers, idleTimeout how long it may
// keep a connection that it does not use.
const (
	headerTimeout = 15 * time.Second
	idleTimeout   = 2 * time.Minute
)

// Run serves ln until ctx ends, then shuts down within about Config.DrainTimeout. It closes ln. It
// returns nil after a shutdown, otherwise why serving failed.
func (s *Server) Run(ctx context.Context, ln net.Listener) error {
	var silent silentConns
	srv := &http.Server{
		Handler:           s.handler,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		ConnState:         silent.note,
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(ln) }()
	select {
	case err := <-failed:
		s.stop(context.WithoutCancel(ctx), 0, srv, &silent)
		return fmt.Errorf("frontend: serving %s: %w", ln.Addr(), err)
	case <-ctx.Done():
	}
	_ = ln.Close() // of no interest any more
	<-failed
	s.stop(context.WithoutCancel(ctx), s.cfg.DrainTimeout, srv, &silent)
	return nil
}

// stop shuts both servers down, giving running requests so long to finish.
func (s *Server) stop(ctx context.Context, drain time.Duration, srv *http.Server, silent *silentConns) {
	s.mu.Lock()
	requests := s.requests
	s.mu.Unlock()
	s.log.Info("draining", "requests", requests, "at_most", drain)
	srv.SetKeepAlivesEnabled(false)
	brief, cancel := context.WithTimeout(ctx, drain)
	defer cancel()
	if err := s.Shutdown(brief); err != nil && requests > 0 {
		s.log.Warn("requests were cut off", "after", drain)
	}
	// Answers that were cut short still have to be written. A connection without a request has none.
	silent.close()
	late, cancelLate := context.WithTimeout(ctx, 5*time.Second)
	defer cancelLate()
	if err := srv.Shutdown(late); err != nil {
		_ = srv.Close()
	}
	s.log.Info("drained")
}

// silentConns are the connections on which no request has begun. http.Server.Shutdown would wait for them for
// seconds: clients open some that they never use.
type silentConns struct {
	mu     sync.Mutex
	open   map[net.Conn]struct{}
	closed bool
}

func (c *silentConns) note(nc net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case state != http.StateNew:
		delete(c.open, nc)
	case c.closed:
		_ = nc.Close()
	default:
		if c.open == nil {
			c.open = make(map[net.Conn]struct{})
		}
		c.open[nc] = struct{}{}
	}
}

func (c *silentConns) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for nc := range c.open {
		_ = nc.Close() // nothing was sent on it
	}
}

// Shutdown refuses new requests and waits for those that run; when ctx ends first, it ends them and
// returns ctx's error. No request runs once it has returned. The server cannot be used again.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	idle := make(chan struct{})
	go func() {
		s.running.Wait()
		close(idle)
	}()
	var err error
	select {
	case <-idle:
	case <-ctx.Done():
		err = ctx.Err()
	}
	s.cancel(errShuttingDown)
	<-idle
	return err
}
