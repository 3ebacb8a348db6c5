package coordinator

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"baton/kvcache"
	"baton/tracing"
	"baton/wire"
)

// ServerConfig holds what can be chosen about a Server. The zero value is usable.
type ServerConfig struct {
	Core Config
	// Wire bounds the connections. By default a peer that says nothing for 1.2 s is declared dead.
	Wire wire.Options
	// MaxConnections is how many connections may be open at once. Default 4096.
	MaxConnections int
	// MaxStrangers is how many connections beside those may be open that have not introduced themselves
	// yet; one more takes the place of the oldest. Default 256.
	MaxStrangers int
	// Logger gets one line a request, and what peers do wrong. Default: slog.Default.
	Logger *slog.Logger
	// Tracer gets a span a request, nil none.
	Tracer *tracing.Tracer
}

// Server runs a Core for peers on the network and in this process.
//
// One goroutine owns the core; each connection has one that reads. Close ends them all.
type Server struct {
	cfg      ServerConfig
	log      *slog.Logger
	core     *Core
	inputs   chan []input
	metrics  *metrics
	block    atomic.Int64            // the fleet's block size, for readers that hash prompts
	model    atomic.Pointer[modelID] // the fleet's, for readers that admit clients
	lastPeer atomic.Uint64
	slots    chan struct{} // holds one element for each open connection
	exit     chan struct{} // closed when a client asked for SHUTDOWN

	strangers *wire.Strangers
	chains    chains

	ctx     context.Context // ends when Close begins
	cancel  context.CancelFunc
	mu      sync.Mutex
	closed  bool           // no reader may start; guarded by mu
	readers sync.WaitGroup // goroutines of Serve and of connections: they feed the core's
	deserted,
	done chan struct{} // no reader is left; the core's goroutine has ended
	hangUps sync.WaitGroup // connections being closed; started by the core's goroutine
	closing sync.Once

	// Owned by the core's goroutine.
	links map[PeerID]*link
	dirty []*link         // that messages were queued on since the last flush
	asked bool            // exit is closed
	idle  []chan struct{} // to be closed when no request is left
}

// input is what the core goroutine is told: an event, with the connection when it is a new one; or a
// question, which it answers by running ask.
type input struct {
	ev   Event
	conn *wire.Conn
	ask  func()
}

// link is a connection and whether something was queued on it that was not flushed.
type link struct {
	conn  *wire.Conn
	dirty bool
}

// ErrServerClosed is the error of a server that was closed.
var ErrServerClosed = errors.New("coordinator: the server is closed")

// NewServer starts a server, which serves nobody until Serve, Attach or Connect. Close ends it.
func NewServer(cfg ServerConfig) (*Server, error) {
	if cfg.Core.Incarnation == 0 {
		cfg.Core.Incarnation = Incarnation()
	}
	core, err := New(cfg.Core)
	if err != nil {
		return nil, err
	}
	cfg.MaxConnections = cmp.Or(cfg.MaxConnections, 4096)
	cfg.MaxStrangers = cmp.Or(cfg.MaxStrangers, 256)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	s := &Server{
		cfg: cfg, log: cfg.Logger, core: core, metrics: newMetrics(),
		inputs: make(chan []input, 64),
		slots:  make(chan struct{}, cfg.MaxConnections),
		exit:   make(chan struct{}), deserted: make(chan struct{}), done: make(chan struct{}),
		links: make(map[PeerID]*link),
	}
	s.model.Store(new(modelID))
	s.strangers = wire.NewStrangers(cfg.MaxStrangers, cfg.Logger)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	go s.run()
	return s, nil
}

// Incarnation draws a number for a process's life, never 0.
func Incarnation() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:]) | 1
}

// Serve accepts peers until ctx ends or the server is closed, and closes the listener. Its error says
// why accepting failed, and is nil after either end.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	if err := wire.AcceptAll(ctx, s.ctx, l, s.log, s.accepted); err != nil {
		return fmt.Errorf("coordinator: accept: %w", err)
	}
	return nil
}

// spawn runs the goroutine of one connection, unless too many are open or the server is closed.
func (s *Server) spawn(f func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrServerClosed
	}
	if err := s.takeSlot(); err != nil {
		return fmt.Errorf("coordinator: %w", err)
	}
	s.readers.Go(func() {
		defer func() { <-s.slots }()
		f()
	})
	return nil
}

func (s *Server) admit(hello wire.Connect) error {
	if hello.Kind != KindClient && hello.Kind != KindEngine {
		return fmt.Errorf("kind is %q, want %q or %q", hello.Kind, KindClient, KindEngine)
	}
	if reason := s.model.Load().foreign(&hello); reason != "" && hello.Kind == KindClient {
		return errors.New(reason)
	}
	return nil
}

// Connect opens a connection within this process, past its handshake: what wire.Dial does over a network.
// It fails when the server is closed or full.
func (s *Server) Connect(hello wire.Connect) (*wire.Conn, error) {
	ours, theirs, err := wire.Pair(s.cfg.Wire)
	if err != nil {
		return nil, err
	}
	if err := s.Attach(ours, hello); err != nil {
		ours.Close()
		theirs.Close()
		return nil, err
	}
	return theirs, nil
}

// Attach serves a peer on a connection that is past its handshake, and owns the connection from then on.
func (s *Server) Attach(conn *wire.Conn, hello wire.Connect) error {
	if err := s.admit(hello); err != nil {
		return fmt.Errorf("coordinator: %w", err)
	}
	return s.spawn(func() { s.read(conn, hello) })
}

// read feeds what arrives on a connection to the core, until it ends.
func (s *Server) read(conn *wire.Conn, hello wire.Connect) {
	peer := PeerID(s.lastPeer.Add(1))
	log := s.log.With("peer", hello.Name, "kind", hello.Kind, "from", conn.Peer())
	release := s.metrics.track(conn)
	defer release()
	defer conn.Close()
	s.inputs <- []input{{ev: Event{Peer: peer, Message: &hello}, conn: conn}}
	log.Info("connected")
	for {
		batch, err := s.receive(conn, peer, log)
		if err != nil {
			batch = append(batch, input{ev: Event{Peer: peer}})
		}
		s.inputs <- batch
		if err == nil {
			continue
		}
		if err == io.EOF || errors.Is(err, wire.ErrClosed) {
			log.Info("disconnected")
		} else {
			log.Warn("disconnected", "error", err)
		}
		return
	}
}

// maxBatch bounds how many messages are handed to the core's goroutine at once, and maxRound how many it
// takes before what they caused is sent.
const (
	maxBatch = 64
	maxRound = 256
)

var batches = sync.Pool{New: func() any { return new([maxBatch]input) }}

// receive waits for a message and takes what has arrived with it. It returns what it has when the connection
// ends.
func (s *Server) receive(conn *wire.Conn, peer PeerID, log *slog.Logger) (batch []input, err error) {
	batch = batches.Get().(*[maxBatch]input)[:0]
	for more := true; more; more = len(batch) < maxBatch-1 && conn.Buffered() {
		m, err := conn.Recv()
		var malformed *wire.MalformedError
		if errors.As(err, &malformed) {
			log.Warn("message dropped", "error", err)
			s.metrics.malformed.Inc()
			continue
		}
		if err != nil {
			return batch, err
		}
		s.metrics.in[m.Header()].Add(1)
		ev := Event{Peer: peer, Message: m}
		if r, ok := m.(*wire.SubmitRequest); ok {
			s.hash(r, &ev)
		}
		batch = append(batch, input{ev: ev})
	}
	return batch, nil
}

// hash computes a prompt's digests, which keeps that off the core's goroutine.
func (s *Server) hash(r *wire.SubmitRequest, ev *Event) {
	size := int(s.block.Load())
	if size == 0 || len(r.Prompt) > s.core.cfg.MaxPrompt {
		return
	}
	ev.BlockSize = size
	ev.Digests = s.chains.of(kvcache.Root(r.Salt, ""), size, r.Prompt)
}

// run is the core's goroutine. It outlives all readers, so that none of them can be stuck.
func (s *Server) run() {
	defer close(s.done)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for s.ctx.Err() == nil {
		select {
		case batch := <-s.inputs:
			s.round(batch)
		case <-timer.C:
			s.step(Event{})
		case <-s.ctx.Done():
		}
		s.flush()
		if at, ok := s.core.Deadline(); ok {
			timer.Reset(time.Until(at))
		}
	}
	s.step(Event{Message: &wire.Shutdown{}})
	for _, l := range s.links {
		s.hangUp(l.conn)
	}
	for {
		select {
		case batch := <-s.inputs:
			for _, in := range batch {
				s.hangUp(in.conn) // one that came too late
			}
		case <-s.deserted:
			return
		}
	}
}

// round handles a batch and those that wait behind it.
func (s *Server) round(batch []input) {
	for handled := 0; ; {
		for _, in := range batch {
			s.handle(in)
		}
		handled += len(batch)
		if cap(batch) == maxBatch {
			clear(batch)
			batches.Put((*[maxBatch]input)(batch[:maxBatch]))
		}
		if handled >= maxRound {
			return
		}
		select {
		case batch = <-s.inputs:
		default:
			return
		}
	}
}

func (s *Server) handle(in input) {
	if in.ask != nil {
		in.ask()
		return
	}
	if in.conn != nil {
		s.links[in.ev.Peer] = &link{conn: in.conn}
	}
	s.step(in.ev)
	if in.ev.Message == nil {
		delete(s.links, in.ev.Peer)
	}
	s.block.Store(int64(s.core.BlockSize()))
	if model := s.core.fleet.modelID(); model != *s.model.Load() {
		s.model.Store(&model)
	}
}

func (s *Server) step(ev Event) {
	ev.At = time.Now()
	for _, a := range s.core.Step(ev) {
		switch a.Kind {
		case Send:
			s.send(s.links[a.Peer], a.Message)
		case Close:
			s.log.Info("closing a connection", "reason", a.Text)
			if l := s.links[a.Peer]; l != nil {
				s.hangUp(l.conn)
			}
		case Note:
			s.log.Info(a.Text)
		case Warn:
			s.log.Warn(a.Text)
		case End:
			s.metrics.ended(a.Summary)
			logEnd(s.log, a.Summary)
			traceEnd(s.cfg.Tracer, a.Summary)
		case Exit:
			s.log.Info("shutdown", "reason", a.Text)
			if !s.asked {
				s.asked = true
				close(s.exit)
			}
		}
	}
	if len(s.idle) > 0 && s.core.Requests() == 0 {
		for _, done := range s.idle {
			close(done)
		}
		s.idle = nil
	}
}

// send queues a message. A connection that cannot take it is closed: its reader tells the core.
func (s *Server) send(l *link, m wire.Message) {
	if l == nil {
		return
	}
	if err := l.conn.Queue(m); err != nil {
		var size *wire.FrameSizeError
		if errors.As(err, &size) {
			s.log.Error("message not sent", "message", m.Header(), "error", err)
		}
		s.hangUp(l.conn)
		return
	}
	s.metrics.out[m.Header()].Add(1)
	if !l.dirty {
		l.dirty = true
		s.dirty = append(s.dirty, l)
	}
}

// flush lets the connections send what was queued.
func (s *Server) flush() {
	for i, l := range s.dirty {
		l.conn.Flush()
		l.dirty, s.dirty[i] = false, nil
	}
	s.dirty = s.dirty[:0]
}

// hangUp closes a connection without waiting for what is still to be sent.
func (s *Server) hangUp(conn *wire.Conn) {
	if conn != nil {
		s.hangUps.Go(func() { conn.Close() })
	}
}

// Status describes the fleet, or fails with ErrServerClosed or ctx's error.
func (s *Server) Status(ctx context.Context) (*wire.StatusReply, error) {
	var status *wire.StatusReply
	err := s.ask(ctx, func() { status = s.core.Status() })
	if err != nil {
		return nil, err
	}
	return status, nil
}

// ask runs a function on the core's goroutine and waits for it.
func (s *Server) ask(ctx context.Context, f func()) error {
	answered := make(chan struct{})
	select {
	case s.inputs <- []input{{ask: func() { f(); close(answered) }}}:
	case <-s.ctx.Done():
		return ErrServerClosed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	select {
	case <-answered:
		return nil
	case <-s.ctx.Done():
		return ErrServerClosed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Exit is closed when a client asks the coordinator to shut down; whoever owns the server then closes it.
func (s *Server) Exit() <-chan struct{} { return s.exit }

// Shutdown refuses new requests, waits until the running ones have ended or ctx has, and closes.
func (s *Server) Shutdown(ctx context.Context) error {
	idle := make(chan struct{})
	err := s.ask(ctx, func() {
		s.idle = append(s.idle, idle)
		s.step(Event{Message: &wire.Stop{}})
	})
	if err == nil {
		select {
		case <-idle:
		case <-s.ctx.Done():
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	s.Close()
	if errors.Is(err, ErrServerClosed) {
		return nil
	}
	return err
}

// Close ends everything at once: requests fail with a retryable error, engines are told to stop,
// connections are closed. It returns when no goroutine of the server is left, but for a Serve that is
// just returning.
func (s *Server) Close() {
	s.closing.Do(func() {
		s.mu.Lock()
		s.closed = true
		s.mu.Unlock()
		s.cancel()
		s.readers.Wait()
		close(s.deserted)
		<-s.done
		s.hangUps.Wait()
	})
}

// logEnd writes the line of a request.
func logEnd(log *slog.Logger, r *Summary) {
	level := slog.LevelInfo
	if r.Message != "" {
		level = slog.LevelWarn
	}
	if !log.Enabled(context.Background(), level) {
		return
	}
	attrs := append(make([]slog.Attr, 0, 24),
		slog.Uint64("id", r.ID), slog.String("client", r.Client), slog.Uint64("client_id", r.ClientID),
		slog.String("outcome", r.Outcome), slog.Int("prompt", r.PromptTokens), slog.Int("cached", r.CachedTokens),
		slog.Int("predicted", r.PredictedTokens), slog.Int("generated", r.Generated),
		slog.Duration("took", r.Ended.Sub(r.Submitted)),
	)
	for _, n := range r.recoveries() {
		if n.count > 0 {
			attrs = append(attrs, slog.Int(n.what, n.count))
		}
	}
	if !r.Dispatched.IsZero() {
		attrs = append(attrs, slog.Duration("queued", r.Dispatched.Sub(r.Submitted)))
	}
	if r.Prefill != "" {
		attrs = append(attrs, slog.String("prefill", r.Prefill), slog.String("prefill_route", r.PrefillRoute.String()))
	}
	if r.Decode != "" {
		attrs = append(attrs, slog.String("decode", r.Decode), slog.String("decode_route", r.DecodeRoute.String()))
	}
	if !r.Read.IsZero() {
		attrs = append(attrs,
			slog.Duration("handoff", r.Read.Sub(r.Exported)), slog.Int("blocks_moved", r.Stats.BlocksMoved),
			slog.Int("blocks_reused", r.Stats.BlocksReused), slog.Int64("bytes_moved", r.Stats.BytesMoved))
	}
	if r.Message != "" {
		attrs = append(attrs, slog.String("message", r.Message))
	}
	line := slog.NewRecord(r.Ended, level, "request", 0) // where in the source is no news
	line.AddAttrs(attrs...)
	_ = log.Handler().Handle(context.Background(), line) // a log that fails has nobody to tell
}
