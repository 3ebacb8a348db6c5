package leg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"baton/kvcache"
	"baton/wire"
)

// ServerConfig holds what can be chosen about a Server. Core.Engines is required.
type ServerConfig struct {
	Core Config
	// Accept and Dial are the options of links that others open and that this side opens; TLS is theirs.
	Accept, Dial wire.Options
	// Permit, when set, may refuse to open a link to an address: states name them, and come from outside.
	Permit func(address string) error
	// MaxLinks is how many links others may have open. Default 1024.
	MaxLinks int
	// MaxStrangers is how many connections beside those may be open that have not introduced themselves yet; one more
	// takes the place of the oldest. Default 64.
	MaxStrangers int
	Logger       *slog.Logger // default: slog.Default
}

// Server runs a Core: engines of this process connect to it as they would to a coordinator, clients submit jobs, other
// processes' servers open links. It is safe for concurrent use. Close ends it.
//
// Whoever brings an event steps the core and does what it orders, under one lock: nothing that is ordered waits. Each
// connection has a goroutine that reads, and a link that is being opened one that dials.
type Server struct {
	cfg       ServerConfig
	log       *slog.Logger
	strangers *wire.Strangers

	ctx     context.Context // ends when Close begins
	cancel  context.CancelFunc
	workers sync.WaitGroup // goroutines of connections

	mu      sync.Mutex
	core    *Core
	closed  bool
	lastJob uint64
	streams map[uint64]*Stream
	engines map[string]*wire.Conn
	links   map[uint64]*wire.Conn // that others opened
	last    uint64                // of those
	sources map[string]*outgoing  // by address
	news    chan struct{}         // closed when what is cached has changed
	rooms   rooms
	timer   *time.Timer
}

// ErrClosed is the error of a server that was closed, and of a stream that its user closed.
var ErrClosed = errors.New("leg: closed")

// NewServer starts a server. Its incarnation is drawn at random when the configuration has none.
func NewServer(cfg ServerConfig) (*Server, error) {
	cfg.Core.Incarnation = cmp.Or(cfg.Core.Incarnation, rand.Uint64()|1)
	cfg.MaxLinks, cfg.MaxStrangers = cmp.Or(cfg.MaxLinks, 1024), cmp.Or(cfg.MaxStrangers, 64)
	core, err := New(cfg.Core)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, log: cfg.Logger, core: core,
		streams: make(map[uint64]*Stream), engines: make(map[string]*wire.Conn), links: make(map[uint64]*wire.Conn), sources: make(map[string]*outgoing),
		news: make(chan struct{}),
	}
	if s.log == nil {
		s.log = slog.Default()
	}
	s.strangers = wire.NewStrangers(cfg.MaxStrangers, s.log)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.timer = time.AfterFunc(time.Hour, func() { s.step(Tick{}) })
	return s, nil
}

// step gives the core an event and does what it orders.
func (s *Server) step(event Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.run(event)
	}
}

// run is step with the lock held.
func (s *Server) run(event Event) {
	before := s.core.cache.next
	for _, action := range s.core.Step(time.Now(), event) {
		switch a := action.(type) {
		case Tell:
			s.send(s.engines[a.Engine], a.Message)
		case Answer:
			s.send(s.links[a.Link], a.Message)
		case Ask:
			s.ask(a.Address, a.Message)
		case HangUp:
			s.hangUp(a.Address)
		case Deliver:
			if st := s.streams[a.ID]; st != nil {
				st.push(a)
			}
			if a.End {
				delete(s.streams, a.ID)
			}
		case Fail:
			if st := s.streams[a.ID]; st != nil {
				st.end(&a.Error)
			}
			delete(s.streams, a.ID)
		case Close:
			if conn := s.engines[a.Engine]; conn != nil {
				s.workers.Go(func() { conn.Close() })
			}
		case Warn:
			s.log.Warn(a.Text)
		}
	}
	if s.core.cache.next != before {
		close(s.news)
		s.news = make(chan struct{})
	}
	if at, ok := s.core.Deadline(); ok {
		s.timer.Reset(max(time.Until(at), 0))
	}
}

// send queues a message. A connection that cannot take it has failed, which its reader tells.
func (s *Server) send(conn *wire.Conn, m wire.Message) {
	if conn == nil {
		return
	}
	if err := conn.Send(m); err != nil {
		var size *wire.FrameSizeError
		if errors.As(err, &size) {
			s.log.Error("message not sent", "message", m.Header(), "to", conn.Peer(), "error", err)
			s.workers.Go(func() { conn.Close() })
		}
	}
}

// Connect opens a connection for an engine of this process: an engine.Dialer's job.
func (s *Server) Connect(hello wire.Connect) (*wire.Conn, error) {
	ours, theirs, err := wire.Pair(wire.Options{})
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	switch {
	case s.closed:
		err = ErrClosed
	case s.core.group(hello.Name) == nil:
		err = fmt.Errorf("leg: %q is no engine of this process", hello.Name)
	case s.engines[hello.Name] != nil:
		err = fmt.Errorf("leg: engine %q is connected already", hello.Name)
	default:
		s.engines[hello.Name] = ours
		s.workers.Go(func() { s.serveEngine(hello.Name, ours) })
	}
	s.mu.Unlock()
	if err != nil {
		ours.Close()
		theirs.Close()
		return nil, err
	}
	return theirs, nil
}

func (s *Server) serveEngine(name string, conn *wire.Conn) {
	defer conn.Close()
	err := s.receive(conn, func(m wire.Message) Event { return EngineSaid{name, m} })
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.engines, name)
	if !s.closed {
		s.log.Debug("engine disconnected", "engine", name, "error", err)
		s.run(EngineGone{name})
	}
}

// receive steps the core with what arrives until the connection ends.
func (s *Server) receive(conn *wire.Conn, event func(wire.Message) Event) error {
	for {
		m, err := conn.Recv()
		var malformed *wire.MalformedError
		switch {
		case errors.As(err, &malformed):
			s.log.Warn("message dropped", "from", conn.Peer(), "error", err)
		case err != nil:
			return err
		default:
			s.step(event(m))
		}
	}
}

// Submit starts a job and returns the stream of its results. When ctx ends, so does the job. A refusal arrives as the
// stream's error.
func (s *Server) Submit(ctx context.Context, job Job) (*Stream, error) {
	if job.Kind != Whole {
		job.Prompt = PromptDigest(job.Request.Salt, job.Request.Prompt) // off the lock
	}
	if size := s.blockSize(); size > 0 && len(s.cfg.Core.Engines) > 1 && job.Group < 0 && job.Request.Session == "" {
		job.Chain = kvcache.Chain(kvcache.Root(job.Request.Salt, ""), size, job.Request.Prompt)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	s.lastJob++
	st := &Stream{server: s, id: s.lastJob, wake: make(chan struct{}, 1)}
	s.streams[st.id] = st
	s.run(Submit{st.id, job})
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.err == nil {
		st.stop = context.AfterFunc(ctx, func() { st.abort(context.Cause(ctx)) })
	}
	return st, nil
}

func (s *Server) blockSize() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.core.blockSize()
}

// Status describes the engines, as a coordinator does its fleet.
func (s *Server) Status(context.Context) (*wire.StatusReply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	return s.core.Status(), nil
}

// Address is where other engines reach this process's link; empty where nothing is exported.
func (s *Server) Address() string { return s.cfg.Core.Address }

// Stats returns the core's counts.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.core.Stats()
}

// Drain refuses jobs from now on. Those that run, and exports, come to their end while the engines wait for them.
func (s *Server) Drain() { s.step(Drain{}) }

// Close ends all connections and streams. It returns when no goroutine of the server is left.
func (s *Server) Close() {
	s.cancel()
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.workers.Wait()
		return
	}
	s.closed = true
	s.timer.Stop()
	for _, st := range s.streams {
		st.end(ErrClosed)
	}
	clear(s.streams)
	close(s.news)
	for _, conn := range s.engines {
		s.workers.Go(func() { conn.Close() })
	}
	for _, conn := range s.links {
		s.workers.Go(func() { conn.Close() })
	}
	for address := range s.sources {
		s.hangUp(address)
	}
	s.mu.Unlock()
	s.workers.Wait()
}
