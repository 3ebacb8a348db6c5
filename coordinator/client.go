package coordinator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"baton/mtls"
	"baton/wire"
)

// RequestError is how a request failed: a wire.RequestError as a Go error.
type RequestError struct {
	Code      string // one of wire's codes
	Field     string // the request's field at fault, when one is: "prompt", "max_tokens"
	Message   string
	Retryable bool  // the same request may succeed later, or on another engine
	Cause     error // what operators may want to know beside the message; nil for nothing
}

func (e *RequestError) Error() string { return e.Message }

// Unwrap returns the cause.
func (e *RequestError) Unwrap() error { return e.Cause }

// ErrClosed is the error of a Client or Stream that its user closed.
var ErrClosed = errors.New("coordinator: closed")

// ClientConfig holds what can be chosen about a Client. The zero value is usable.
type ClientConfig struct {
	Name   string       // for the coordinator's log
	Wire   wire.Options // of Open and Dial
	Logger *slog.Logger // default: slog.Default
	// Wait is how long after the loss of the coordinator Submit and Status wait for it to come back. Without a
	// coordinator they fail with a retryable error otherwise. Default 2 s.
	Wait time.Duration
	// Model and Fingerprint are those of the model that requests are made for. A fleet of another model refuses
	// the client. An empty Fingerprint suits any.
	Model, Fingerprint string
}

func (cfg *ClientConfig) hello() wire.Connect {
	return wire.Connect{Kind: KindClient, Name: cfg.Name, Incarnation: Incarnation(), Model: cfg.Model, Fingerprint: cfg.Fingerprint}
}

// Client submits requests to a coordinator, over one connection that all share. When the connection
// ends, its requests fail with a retryable error, and the client connects anew until it is closed. It is
// safe for concurrent use.
type Client struct {
	connect func(context.Context) (*wire.Conn, error)
	log     *slog.Logger
	wait    time.Duration
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	met     chan struct{} // closed by the first connection
	done    chan struct{} // closed when the goroutine that connects and reads has ended

	mu      sync.Mutex    // taken before a stream's
	conn    *wire.Conn    // nil while there is none
	away    error         // why there is none
	lost    time.Time     // since when; zero before the first
	online  chan struct{} // closed while conn is set
	lastID  uint64
	streams map[uint64]*Stream
	asked   map[uint64]chan *wire.StatusReply
}

// Open returns a client of the coordinator at addr (host:port), and connects in the background. Until
// somebody answers there, requests fail with a retryable error.
func Open(addr string, cfg ClientConfig) *Client {
	hello := cfg.hello()
	return newClient(cfg, func(ctx context.Context) (*wire.Conn, error) {
		conn, _, err := wire.Dial(ctx, "tcp", addr, hello, cfg.Wire)
		return conn, err
	})
}

// Dial is Open, and waits for the first connection until ctx ends.
func Dial(ctx context.Context, addr string, cfg ClientConfig) (*Client, error) {
	return Open(addr, cfg).await(ctx)
}

// Client returns a client of the server within this process.
func (s *Server) Client(cfg ClientConfig) (*Client, error) {
	hello := cfg.hello()
	return newClient(cfg, func(context.Context) (*wire.Conn, error) { return s.Connect(hello) }).await(s.ctx)
}

func newClient(cfg ClientConfig, connect func(context.Context) (*wire.Conn, error)) *Client {
	c := &Client{
		connect: connect, log: cfg.Logger, wait: cfg.Wait,
		met: make(chan struct{}), done: make(chan struct{}), online: make(chan struct{}),
		streams: make(map[uint64]*Stream), asked: make(map[uint64]chan *wire.StatusReply),
		away: errors.New("coordinator: the first connection is being made"),
	}
	if c.log == nil {
		c.log = slog.Default()
	}
	if c.wait <= 0 {
		c.wait = 2 * time.Second
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	go c.run()
	return c
}

// await waits for the first connection. If there is none, it closes the client and says why.
func (c *Client) await(ctx context.Context) (*Client, error) {
	select {
	case <-c.met:
		return c, nil
	case <-c.done:
		return nil, c.Err()
	case <-ctx.Done():
		c.Close()
		return nil, fmt.Errorf("coordinator: not reached: %w", c.Err())
	}
}

// reconnect tries to connect until it succeeds, is refused for good, or the client is closed; then there is
// neither a connection nor an error. It tells once what is in the way, and again when something else is; the
// loss of a coordinator was told already.
func (c *Client) reconnect(told bool) (*wire.Conn, error) {
	unclear := false // the coordinator, or something else, is there and does not answer as it should
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		conn, err := c.connect(c.ctx)
		if err == nil || c.ctx.Err() != nil {
			return conn, nil
		}
		c.setAway(err)
		var refused *wire.RefusedError
		var insecure *mtls.Error
		var handshake *wire.HandshakeError
		if errors.As(err, &refused) || errors.As(err, &insecure) && insecure.Permanent || errors.Is(err, ErrServerClosed) {
			return nil, err
		}
		level, was := slog.LevelDebug, unclear
		unclear = insecure != nil || errors.As(err, &handshake)
		if !told || unclear && !was {
			level, told = slog.LevelWarn, true
		}
		c.log.Log(c.ctx, level, "no coordinator yet; requests are refused until there is one", "error", err)
		select {
		case <-time.After(pause/2 + rand.N(pause)): // spread clients that lost the same coordinator
		case <-c.ctx.Done():
			return nil, nil
		}
	}
}

func (c *Client) setAway(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.away = err
}

// Done is closed when the client has ended: closed by its user, or refused before it was ever connected.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err says why there is no connection, nil when there is one.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.away
}

func (c *Client) use(conn *wire.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn, c.away = conn, nil
	close(c.online)
}

// run connects and reads from connection after connection, until the client is closed. A refusal of the
// first one is final.
func (c *Client) run() {
	defer close(c.done)
	for met := false; ; met = true {
		conn, err := c.reconnect(met)
		for err != nil {
			if !met || errors.Is(err, ErrServerClosed) {
				return
			}
			c.log.Error("the coordinator refuses this client", "error", err)
			select {
			case <-time.After(5 * time.Second):
			case <-c.ctx.Done():
				return
			}
			conn, err = c.reconnect(met)
		}
		if conn == nil {
			return
		}
		c.use(conn)
		if !met {
			close(c.met)
		}
		c.log.Info("coordinator connected", "address", conn.Peer())
		err = c.read(conn)
		c.lose(err)
		conn.Close()
		if c.ctx.Err() != nil {
			return
		}
		c.log.Warn("coordinator lost", "error", err)
	}
}

// read hands out what arrives on a connection until it ends or the client is closed.
func (c *Client) read(conn *wire.Conn) error {
	defer context.AfterFunc(c.ctx, func() { conn.Close() })()
	for {
		m, err := conn.Recv()
		var malformed *wire.MalformedError
		if errors.As(err, &malformed) {
			c.log.Warn("message dropped", "error", err)
			continue
		}
		if err != nil {
			return err
		}
		c.receive(m)
	}
}

func (c *Client) receive(m wire.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch m := m.(type) {
	case *wire.EngineReplyPartial:
		for _, r := range m.Results {
			if s := c.streams[r.ID]; s != nil {
				s.push(r, nil)
			}
		}
	case *wire.EngineReply:
		for _, r := range m.Results {
			if s := c.take(r.ID); s != nil {
				s.push(r, io.EOF)
			}
		}
	case *wire.RequestError:
		if s := c.take(m.ID); s != nil {
			s.end(&RequestError{Code: m.Code, Field: m.Field, Message: m.Message, Retryable: m.Retryable})
		}
	case *wire.RequestAborted:
		if s := c.take(m.ID); s != nil {
			s.end(&RequestError{Code: wire.CodeUnavailable, Message: "the engine gave the request up", Retryable: true})
		}
	case *wire.Disconnect:
		c.log.Error("the coordinator ends the connection", "reason", m.Reason)
	case *wire.StatusReply:
		if ch := c.asked[m.ID]; ch != nil {
			delete(c.asked, m.ID)
			ch <- m
		}
	default:
		c.log.Warn("message ignored", "message", m.Header())
	}
}

// take removes a stream that has ended; c.mu is held.
func (c *Client) take(id uint64) *Stream {
	s := c.streams[id]
	delete(c.streams, id)
	return s
}

// lose ends everything that ran over a connection that is gone.
func (c *Client) lose(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn, c.away, c.lost = nil, err, time.Now()
	c.online = make(chan struct{})
	var failure error = &RequestError{
		Code: wire.CodeUnavailable, Message: fmt.Sprintf("the connection to the coordinator ended (%v); try again", err), Retryable: true,
	}
	if c.ctx.Err() != nil {
		failure = ErrClosed
	}
	for _, s := range c.streams {
		s.end(failure)
	}
	for _, ch := range c.asked {
		close(ch)
	}
	clear(c.streams)
	clear(c.asked)
}

// connection returns the connection with a fresh number, c.mu held on success. It waits for one only shortly
// after the loss of the last.
func (c *Client) connection(ctx context.Context) (*wire.Conn, uint64, error) {
	for {
		c.mu.Lock()
		if c.conn != nil && c.ctx.Err() == nil {
			c.lastID++
			return c.conn, c.lastID, nil
		}
		online, patience, away := c.online, c.wait-time.Since(c.lost), c.away
		c.mu.Unlock()
		if c.ctx.Err() != nil {
			return nil, 0, ErrClosed
		}
		missing := &RequestError{Code: wire.CodeUnavailable, Message: "the coordinator is not reached; try again", Retryable: true, Cause: away}
		if refused := (*wire.RefusedError)(nil); errors.As(away, &refused) {
			missing.Message = "the coordinator refuses this frontend (its log says why); try again"
		}
		if patience <= 0 {
			return nil, 0, missing
		}
		select {
		case <-online:
		case <-ctx.Done():
			return nil, 0, context.Cause(ctx)
		case <-c.ctx.Done():
		case <-c.done:
			return nil, 0, missing
		case <-time.After(patience):
			return nil, 0, missing
		}
	}
}

// Submit starts a request and returns the stream of its results; the ID is the client's to choose. When
// ctx ends, the request is aborted. A refusal arrives as the stream's error.
func (c *Client) Submit(ctx context.Context, req *wire.SubmitRequest) (*Stream, error) {
	conn, id, err := c.connection(ctx)
	if err != nil {
		return nil, err
	}
	s := &Stream{client: c, id: id, wake: make(chan struct{}, 1)}
	c.streams[id] = s
	c.mu.Unlock()
	m := *req
	m.ID = id
	if err := conn.Send(&m); err != nil {
		c.mu.Lock()
		c.take(id)
		c.mu.Unlock()
		var size *wire.FrameSizeError
		if errors.As(err, &size) {
			return nil, &RequestError{
				Code: wire.CodeInvalid, Field: "prompt", Cause: err,
				Message: fmt.Sprintf("the prompt has %d tokens: more than a request can carry (%d MiB)", len(req.Prompt), size.Limit>>20),
			}
		}
		return nil, &RequestError{Code: wire.CodeUnavailable, Message: fmt.Sprintf("the coordinator cannot take the request (%v); try again", err), Retryable: true}
	}
	stop := context.AfterFunc(ctx, func() { s.abort(context.Cause(ctx)) })
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stop = stop; s.err != nil {
		stop()
	}
	return s, nil
}

// Status asks the coordinator how its fleet is.
func (c *Client) Status(ctx context.Context) (*wire.StatusReply, error) {
	conn, id, err := c.connection(ctx)
	if err != nil {
		return nil, err
	}
	ch := make(chan *wire.StatusReply, 1)
	c.asked[id] = ch
	c.mu.Unlock()
	// A failed Send ends the connection, and that closes ch.
	_ = conn.Send(&wire.StatusRequest{ID: id})
	select {
	case status, ok := <-ch:
		if !ok {
			return nil, &RequestError{Code: wire.CodeUnavailable, Message: "the coordinator was lost; try again", Retryable: true}
		}
		return status, nil
	case <-ctx.Done():
		c.mu.Lock()
		delete(c.asked, id)
		c.mu.Unlock()
		return nil, context.Cause(ctx)
	}
}

// Control sends a message to the whole fleet: Pause, Unpause, Suspend, Resume, Stop, SetGenerationEpoch,
// StartProfiler, StopProfiler, Shutdown. Nothing answers; Status tells the phase.
func (c *Client) Control(ctx context.Context, m wire.Message) error {
	conn, _, err := c.connection(ctx)
	if err != nil {
		return err
	}
	c.mu.Unlock()
	return conn.Send(m)
}

// Close ends the client and the streams that are still open; the coordinator aborts their requests.
func (c *Client) Close() {
	c.cancel()
	<-c.done
}

// Stream is the results of one request, in order. Next is for one goroutine; Close is for any.
type Stream struct {
	client *Client
	id     uint64
	wake   chan struct{} // holds an element when there is news

	mu      sync.Mutex
	results []wire.Result
	err     error // how it ended; after the results
	stop    func() bool
}

// Next waits for news of the request: io.EOF after the result that carries Finish, a *RequestError when
// the request failed, ErrClosed after Close, the cause of Submit's context when that ended. When ctx ends
// before there is news, Next returns its cause and the request goes on.
func (s *Stream) Next(ctx context.Context) (wire.Result, error) {
	for {
		s.mu.Lock()
		if len(s.results) > 0 {
			r := s.results[0]
			s.results[0] = wire.Result{}
			s.results = s.results[1:]
			s.mu.Unlock()
			return r, nil
		}
		err := s.err
		s.mu.Unlock()
		if err != nil {
			return wire.Result{}, err
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return wire.Result{}, context.Cause(ctx)
		}
	}
}

// Close aborts the request if it still runs. It may be called again.
func (s *Stream) Close() { s.abort(ErrClosed) }

// abort ends the stream here, and the request at the coordinator.
func (s *Stream) abort(err error) {
	s.mu.Lock()
	running := s.err == nil
	if running {
		s.results = nil
	}
	s.mu.Unlock()
	s.end(err)
	if !running {
		return
	}
	c := s.client
	c.mu.Lock()
	conn := c.conn
	if c.take(s.id) == nil {
		conn = nil // it ended meanwhile, or its connection did
	}
	c.mu.Unlock()
	if conn != nil {
		// If this fails, so did the connection, and the coordinator aborts on its own.
		_ = conn.Send(&wire.AbortRequest{ID: s.id})
	}
}

// push adds a result, and the end if it is the last.
func (s *Stream) push(r wire.Result, err error) {
	s.mu.Lock()
	if s.err == nil {
		s.results = append(s.results, r)
	}
	s.mu.Unlock()
	if err != nil {
		s.end(err)
		return
	}
	s.notify()
}

// end makes err the stream's end unless it has one.
func (s *Stream) end(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	stop := s.stop
	s.mu.Unlock()
	if stop != nil {
		stop()
	}
	s.notify()
}

func (s *Stream) notify() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}
