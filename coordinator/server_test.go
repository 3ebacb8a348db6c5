package coordinator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"baton/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// toyEngine speaks the engine's part of the protocol. Its language: each token is the one before it plus
// one. It makes a token whenever gate lets it (nil: at once).
type toyEngine struct {
	conn   *wire.Conn
	name   string
	role   string
	gate   chan struct{}
	quit   chan struct{}
	wg     sync.WaitGroup
	mu     sync.Mutex
	stops  map[uint64]chan struct{} // running requests
	aborts chan uint64
	freed  chan uint64 // handoffs released
}

func startEngine(t *testing.T, conn *wire.Conn, inc uint64, name, role string, gate chan struct{}) *toyEngine {
	t.Helper()
	e, err := register(conn, inc, name, role, gate)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.die)
	return e
}

func register(conn *wire.Conn, inc uint64, name, role string, gate chan struct{}) (*toyEngine, error) {
	e := &toyEngine{
		conn: conn, name: name, role: role, gate: gate, quit: make(chan struct{}), stops: map[uint64]chan struct{}{},
		aborts: make(chan uint64, 1000), freed: make(chan uint64, 1000),
	}
	err := conn.Send(&wire.RegisterRole{
		Role: role, Name: name, Incarnation: inc, Model: "toy", Transport: "tcp", Ranks: []wire.RankInfo{{Transport: []byte(name)}},
		Geometry: wire.Geometry{Model: "toy", BlockSize: 16, Layers: 1, KVHeads: 1, MaxSeqLen: 4096}, Requests: 64, Blocks: 4096,
	})
	if err != nil {
		return nil, err
	}
	m, err := conn.Recv()
	if ack, ok := m.(*wire.RegisterRoleAck); err != nil || !ok || ack.Error != "" {
		return nil, fmt.Errorf("registration: %+v, %w", m, err)
	}
	e.wg.Go(e.run)
	return e, nil
}

// die ends the engine like a process that is killed.
func (e *toyEngine) die() {
	e.conn.Close()
	e.wg.Wait()
}

func (e *toyEngine) run() {
	defer close(e.quit)
	for {
		m, err := e.conn.Recv()
		if err != nil {
			return
		}
		switch m := m.(type) {
		case *wire.SubmitRequest:
			text := append(m.Prompt, m.Resume...)
			if m.Handoff {
				e.conn.Send(&wire.EngineReply{Results: []wire.Result{{
					ID: m.ID, Start: len(m.Resume), Tokens: wire.Tokens{text[len(text)-1] + 1}, PromptTokens: len(m.Prompt),
					Export: &wire.Export{Handoff: m.ID, Tokens: len(text)}, Stats: &wire.Stats{Engine: e.name},
				}}})
				continue
			}
			e.start(m.ID, text, len(m.Resume), m.Sampling.MaxTokens)
		case *wire.SubmitRequestWithKV:
			e.conn.Send(&wire.KVReadDone{ID: m.ID})
			e.start(m.ID, m.Generated, len(m.Generated), m.Sampling.MaxTokens)
		case *wire.AbortRequest:
			e.mu.Lock()
			stop := e.stops[m.ID]
			delete(e.stops, m.ID)
			e.mu.Unlock()
			if stop != nil {
				close(stop)
			}
			if e.aborts != nil {
				e.aborts <- m.ID
			}
		case *wire.ReleaseKV:
			if e.freed != nil {
				e.freed <- m.Handoff
			}
		}
	}
}

// start generates up to limit tokens after those of text, the first with the given index.
func (e *toyEngine) start(id uint64, text wire.Tokens, index, limit int) {
	stop := make(chan struct{})
	e.mu.Lock()
	e.stops[id] = stop
	e.mu.Unlock()
	last := text[len(text)-1]
	e.wg.Go(func() {
		for ; index < limit; index++ {
			if e.gate != nil {
				select {
				case <-e.gate:
				case <-stop:
					e.conn.Send(&wire.RequestAborted{ID: id, SourceSafe: true})
					return
				case <-e.quit:
					return
				}
			}
			last++
			r := wire.Result{ID: id, Start: index, Tokens: wire.Tokens{last}}
			if index+1 < limit {
				e.conn.Send(&wire.EngineReplyPartial{Results: []wire.Result{r}})
				continue
			}
			r.Finish = wire.FinishLength
			r.Stats = &wire.Stats{Engine: e.name, BlocksMoved: 2, BlocksReused: 1, BytesMoved: 4096}
			e.conn.Send(&wire.EngineReply{Results: []wire.Result{r}})
		}
	})
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func newServer(t *testing.T, cfg ServerConfig) *Server {
	t.Helper()
	cfg.Logger = quiet()
	s, err := NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// listen serves s on a port of its own, or on addr.
func listen(t *testing.T, s *Server, addr string) string {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(t.Context(), l) }()
	t.Cleanup(func() {
		s.Close()
		if err := <-done; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return l.Addr().String()
}

func dialEngine(t *testing.T, addr, name, role string, gate chan struct{}) *toyEngine {
	t.Helper()
	inc := Incarnation()
	conn, _, err := wire.Dial(t.Context(), "tcp", addr, wire.Connect{Kind: KindEngine, Name: name, Incarnation: inc}, wire.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return startEngine(t, conn, inc, name, role, gate)
}

func dialClient(t *testing.T, addr string) *Client {
	t.Helper()
	c, err := Dial(t.Context(), addr, ClientConfig{Name: "test", Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// ask submits a prompt whose last token is last and returns all tokens and the stats of each leg.
func ask(ctx context.Context, c *Client, last int32, n int) (wire.Tokens, []wire.Stats, error) {
	prompt := make(wire.Tokens, 100)
	prompt[99] = last
	s, err := c.Submit(ctx, &wire.SubmitRequest{Prompt: prompt, Sampling: wire.Sampling{MaxTokens: n}})
	if err != nil {
		return nil, nil, err
	}
	defer s.Close()
	var tokens wire.Tokens
	var stats []wire.Stats
	for {
		r, err := s.Next(ctx)
		if err == io.EOF {
			return tokens, stats, nil
		}
		if err != nil {
			return tokens, stats, err
		}
		if len(r.Tokens) > 0 && r.Start != len(tokens) {
			return nil, nil, fmt.Errorf("tokens from %d on, %d were received", r.Start, len(tokens))
		}
		tokens = append(tokens, r.Tokens...)
		if r.Stats != nil {
			stats = append(stats, *r.Stats)
		}
	}
}

// eventually waits until the server's state satisfies ok.
func eventually(t *testing.T, s *Server, what string, ok func(*wire.StatusReply) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for {
		st, err := s.Status(ctx)
		if err != nil {
			t.Fatalf("waiting for %s: %v", what, err)
		}
		if ok(st) {
			return
		}
	}
}

func idle(st *wire.StatusReply) bool {
	for _, e := range st.Engines {
		if e.RequestsInUse != 0 || e.BlocksReserved != 0 {
			return false
		}
	}
	return st.Requests == 0
}

func TestDisaggregatedOverTCP(t *testing.T) {
	s := newServer(t, ServerConfig{})
	addr := listen(t, s, "127.0.0.1:0")
	p := dialEngine(t, addr, "p0", wire.RolePrefill, nil)
	dialEngine(t, addr, "d0", wire.RoleDecode, nil)
	dialEngine(t, addr, "d1", wire.RoleDecode, nil)
	c := dialClient(t, addr)

	const requests = 200
	var wg sync.WaitGroup
	for i := range requests {
		wg.Go(func() {
			tokens, stats, err := ask(t.Context(), c, int32(1000*i), 5)
			if err != nil {
				t.Errorf("request %d: %v", i, err)
				return
			}
			for j, tok := range tokens {
				if len(tokens) != 5 || tok != int32(1000*i+1+j) {
					t.Errorf("request %d got %v", i, tokens)
					break
				}
			}
			if len(stats) != 2 || stats[0].Engine != "p0" || stats[1].Engine[0] != 'd' {
				t.Errorf("request %d: stats %+v, want those of a prefill and a decode leg", i, stats)
			}
		})
	}
	wg.Wait()
	for range requests {
		<-p.freed
	}
	eventually(t, s, "an idle fleet", idle)

	st, err := c.Status(t.Context())
	if err != nil || !st.Ready || st.Model != "toy" || st.Geometry.MaxSeqLen != 4096 || len(st.Engines) != 3 || st.Policy != "prefix" {
		t.Errorf("status %+v, %v", st, err)
	}
	checkMetrics(t, s, requests)
}

func checkMetrics(t *testing.T, s *Server, requests float64) {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(s.Collector()); err != nil {
		t.Fatal(err)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			key := f.GetName()
			for _, l := range m.Label {
				key += " " + l.GetValue()
			}
			got[key] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	for key, want := range map[string]float64{
		"baton_coordinator_requests_total length":        requests,
		"baton_coordinator_handoffs_total":               requests,
		"baton_coordinator_handoff_seconds":              requests,
		"baton_coordinator_handoff_bytes_total":          requests * 4096,
		"baton_coordinator_handoff_blocks_total moved":   requests * 2,
		"baton_coordinator_handoff_blocks_total reused":  requests,
		"baton_coordinator_generated_tokens_total":       requests * 5,
		"baton_coordinator_prompt_tokens_total":          requests * 100,
		"baton_coordinator_recoveries_total reruns":      0,
		"baton_coordinator_queue_seconds prefill":        requests,
		"baton_coordinator_queue_seconds decode":         requests,
		"baton_coordinator_queue_length prefill":         0,
		"baton_coordinator_engines decode":               2,
		"baton_coordinator_ready":                        1,
		"baton_control_messages_total in SubmitRequest":  requests,
		"baton_control_messages_total out SubmitRequest": requests,
		"baton_control_messages_total out ReleaseKV":     requests,
	} {
		if v, ok := got[key]; !ok || v != want {
			t.Errorf("%s = %v (present: %v), want %v", key, v, ok, want)
		}
	}
	if got["baton_control_bytes_total in"] < 400*requests {
		t.Errorf("%v bytes came in, fewer than the prompts alone", got["baton_control_bytes_total in"])
	}
}

func TestCancelFreesTheEngine(t *testing.T) {
	s := newServer(t, ServerConfig{})
	addr := listen(t, s, "127.0.0.1:0")
	gate := make(chan struct{})
	e := dialEngine(t, addr, "e0", wire.RoleBoth, gate)
	c := dialClient(t, addr)
	for name, cancel := range map[string]func(*Stream, context.CancelFunc){
		"context": func(_ *Stream, cancel context.CancelFunc) { cancel() },
		"Close":   func(s *Stream, _ context.CancelFunc) { s.Close(); s.Close() },
	} {
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		st, err := c.Submit(ctx, &wire.SubmitRequest{Prompt: wire.Tokens{1}, Sampling: wire.Sampling{MaxTokens: 10}})
		if err != nil {
			t.Fatal(err)
		}
		gate <- struct{}{}
		if r, err := st.Next(t.Context()); err != nil || r.Tokens[0] != 2 {
			t.Fatalf("%s: first token %v, %v", name, r.Tokens, err)
		}
		st.push(wire.Result{Tokens: wire.Tokens{3}}, nil) // unread when it ends
		cancel(st, stop)
		<-e.aborts
		if _, err := st.Next(t.Context()); !errors.Is(err, context.Canceled) && !errors.Is(err, ErrClosed) {
			t.Errorf("%s: Next after the end: %v", name, err)
		}
		eventually(t, s, "an idle fleet after "+name, idle)
	}
	// A client that goes away takes its requests with it.
	if _, err := c.Submit(t.Context(), &wire.SubmitRequest{Prompt: wire.Tokens{1}, Sampling: wire.Sampling{MaxTokens: 10}}); err != nil {
		t.Fatal(err)
	}
	gate <- struct{}{}
	c.Close()
	<-e.aborts
	eventually(t, s, "an idle fleet after the client left", idle)
	if _, err := c.Submit(t.Context(), &wire.SubmitRequest{}); !errors.Is(err, ErrClosed) {
		t.Errorf("Submit on a closed client: %v", err)
	}
}

func TestManyStreamsAThirdCancelled(t *testing.T) {
	s := newServer(t, ServerConfig{})
	addr := listen(t, s, "127.0.0.1:0")
	dialEngine(t, addr, "p0", wire.RolePrefill, nil)
	gate := make(chan struct{}, 8)
	dialEngine(t, addr, "d0", wire.RoleDecode, gate)
	dialEngine(t, addr, "d1", wire.RoleDecode, gate)
	clients := []*Client{dialClient(t, addr), dialClient(t, addr)}
	var wg sync.WaitGroup
	for i := range 96 {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		wg.Go(func() {
			prompt := make(wire.Tokens, 20+37*i%500)
			st, err := clients[i%2].Submit(ctx, &wire.SubmitRequest{Prompt: prompt, Sampling: wire.Sampling{MaxTokens: 12}})
			if err != nil {
				t.Error(err)
				return
			}
			defer st.Close()
			for n := 0; ; {
				r, err := st.Next(t.Context())
				if i%3 == 0 && n >= i%7 {
					cancel()
					return
				}
				if err != nil {
					if n != 12 || err != io.EOF {
						t.Errorf("request %d failed after %d tokens: %v", i, n, err)
					}
					return
				}
				n += len(r.Tokens)
			}
		})
	}
	finished := make(chan struct{})
	wg.Go(func() {
		for {
			select {
			case gate <- struct{}{}:
			case <-finished:
				return
			}
		}
	})
	eventually(t, s, "work", func(st *wire.StatusReply) bool { return st.Requests > 0 })
	eventually(t, s, "an idle fleet", idle)
	close(finished)
	wg.Wait()
	eventually(t, s, "an idle fleet at the end", idle)
}

func TestNextGivesUpWaitingButNotTheRequest(t *testing.T) {
	s := newServer(t, ServerConfig{})
	gate := make(chan struct{})
	addr := listen(t, s, "127.0.0.1:0")
	dialEngine(t, addr, "e0", wire.RoleBoth, gate)
	c := dialClient(t, addr)
	st, err := c.Submit(t.Context(), &wire.SubmitRequest{Prompt: wire.Tokens{1}, Sampling: wire.Sampling{MaxTokens: 1}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := st.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Next with an ended context: %v", err)
	}
	gate <- struct{}{}
	if r, err := st.Next(t.Context()); err != nil || r.Finish != wire.FinishLength {
		t.Errorf("the result: %+v, %v", r, err)
	}
	if _, err := st.Next(t.Context()); err != io.EOF {
		t.Errorf("after the final: %v, want EOF", err)
	}
}

func wantError(t *testing.T, err error, code string, retryable bool) *RequestError {
	t.Helper()
	var e *RequestError
	if !errors.As(err, &e) || e.Code != code || e.Retryable != retryable {
		t.Fatalf("error %v (%+v), want code %s, retryable %v", err, e, code, retryable)
	}
	return e
}

// read takes n tokens from a stream and wants them to count up from next.
func read(t *testing.T, st *Stream, next int32, n int) {
	t.Helper()
	for range n {
		r, err := st.Next(t.Context())
		if err != nil || len(r.Tokens) != 1 || r.Tokens[0] != next {
			t.Fatalf("got %v, %v; want the token %d", r.Tokens, err, next)
		}
		next++
	}
}

func TestEngineDeathGoesUnnoticed(t *testing.T) {
	s := newServer(t, ServerConfig{})
	addr := listen(t, s, "127.0.0.1:0")
	dialEngine(t, addr, "p0", wire.RolePrefill, nil)
	c := dialClient(t, addr)
	gates := [2]chan struct{}{make(chan struct{}), make(chan struct{})}
	var streams [2]*Stream
	var engines [2]*toyEngine
	for i := range streams {
		engines[i] = dialEngine(t, addr, fmt.Sprint("d", i), wire.RoleDecode, gates[i])
		st, err := c.Submit(t.Context(), &wire.SubmitRequest{Prompt: wire.Tokens{1}, Sampling: wire.Sampling{MaxTokens: 6}})
		if err != nil {
			t.Fatal(err)
		}
		streams[i] = st
		read(t, st, 2, 1)
		gates[i] <- struct{}{} // it runs there: the next one goes to the idle engine
		read(t, st, 3, 1)
	}
	engines[0].die()
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		for range 3 + 4 { // the prefill of the one that moved makes a token
			gates[1] <- struct{}{}
		}
	}()
	read(t, streams[0], 4, 4)
	read(t, streams[1], 4, 4)
	<-finished
	for _, st := range streams {
		if _, err := st.Next(t.Context()); err != io.EOF {
			t.Errorf("the end is %v", err)
		}
	}
	eventually(t, s, "an idle fleet", idle)
}

// pipe connects to a server in a way that virtual time can wait for.
func pipe(s *Server, hello wire.Connect, opt wire.Options) (*wire.Conn, error) {
	near, far := net.Pipe()
	if err := s.Attach(wire.NewConn(near, wire.Options{}), hello); err != nil {
		return nil, err
	}
	return wire.NewConn(far, opt), nil
}

// A process that is stopped keeps its connection and says nothing. It is found out within two seconds, and
// is a stranger when it wakes.
func TestSilentEngineIsDeclaredDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t, ServerConfig{})
		engine := func(name string, opt wire.Options) *toyEngine {
			inc := Incarnation()
			conn, err := pipe(s, wire.Connect{Kind: KindEngine, Name: name, Incarnation: inc}, opt)
			if err != nil {
				t.Fatal(err)
			}
			return startEngine(t, conn, inc, name, wire.RoleBoth, make(chan struct{}))
		}
		stopped := engine("e0", wire.Options{KeepAlive: -1})
		c, err := newClient(ClientConfig{Logger: quiet()}, func(context.Context) (*wire.Conn, error) {
			return pipe(s, wire.Connect{Kind: KindClient, Name: "test"}, wire.Options{})
		}).await(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		st, err := c.Submit(t.Context(), &wire.SubmitRequest{Prompt: wire.Tokens{1}, Sampling: wire.Sampling{MaxTokens: 3}})
		if err != nil {
			t.Fatal(err)
		}
		stopped.gate <- struct{}{}
		read(t, st, 2, 1)
		began := time.Now()
		other := engine("e1", wire.Options{})
		go func() {
			other.gate <- struct{}{}
			other.gate <- struct{}{}
		}()
		read(t, st, 3, 2)
		if took := time.Since(began); took < time.Second || took > 1500*time.Millisecond {
			t.Errorf("the stream went on after %v", took)
		}
		<-stopped.conn.Done() // it was closed at the other end
		engine("e0", wire.Options{})
		synctest.Wait()
		if st, err := s.Status(t.Context()); err != nil || len(st.Engines) != 2 || !idle(st) {
			t.Errorf("status after its return: %+v, %v", st, err)
		}
	})
}

func TestShutdownBringsHandoffsToTheirEnd(t *testing.T) {
	s := newServer(t, ServerConfig{})
	addr := listen(t, s, "127.0.0.1:0")
	dialEngine(t, addr, "p0", wire.RolePrefill, nil)
	gate := make(chan struct{})
	d0 := dialEngine(t, addr, "d0", wire.RoleDecode, gate)
	c := dialClient(t, addr)
	st, err := c.Submit(t.Context(), &wire.SubmitRequest{Prompt: wire.Tokens{1}, Sampling: wire.Sampling{MaxTokens: 4}})
	if err != nil {
		t.Fatal(err)
	}
	gate <- struct{}{}
	read(t, st, 2, 2)
	done := make(chan error, 1)
	go func() { done <- s.Shutdown(t.Context()) }()
	eventually(t, s, "the stop", func(st *wire.StatusReply) bool { return st.Phase == "stopping" })
	d0.die()
	eventually(t, s, "the death", func(st *wire.StatusReply) bool { return len(st.Engines) == 1 })
	more := make(chan struct{}, 9)
	more <- struct{}{}
	dialEngine(t, addr, "d1", wire.RoleDecode, more)
	read(t, st, 4, 2)
	if err := <-done; err != nil {
		t.Errorf("Shutdown: %v", err)
	}
}

func TestRefusalsReachTheClient(t *testing.T) {
	s := newServer(t, ServerConfig{Core: Config{Wait: time.Millisecond}})
	c := dialClient(t, listen(t, s, "127.0.0.1:0"))
	_, _, err := ask(t.Context(), c, 1, 1)
	wantError(t, err, wire.CodeUnavailable, true) // after the wait, by the timer
	st, err := c.Submit(t.Context(), &wire.SubmitRequest{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = st.Next(t.Context())
	if e := wantError(t, err, wire.CodeInvalid, false); e.Field != "prompt" {
		t.Errorf("field %q", e.Field)
	}
}

func TestClientFindsARestartedCoordinator(t *testing.T) {
	first := newServer(t, ServerConfig{})
	addr := listen(t, first, "127.0.0.1:0")
	gate := make(chan struct{})
	dialEngine(t, addr, "e0", wire.RoleBoth, gate)
	c := dialClient(t, addr)
	st, err := c.Submit(t.Context(), &wire.SubmitRequest{Prompt: wire.Tokens{1}, Sampling: wire.Sampling{MaxTokens: 9}})
	if err != nil {
		t.Fatal(err)
	}
	gate <- struct{}{}
	first.Close()
	for {
		if _, err := st.Next(t.Context()); err != nil {
			wantError(t, err, wire.CodeUnavailable, true)
			break
		}
	}
	c.mu.Lock()
	if n := len(c.streams); n != 0 {
		t.Errorf("the client still keeps %d streams of the lost connection", n)
	}
	c.mu.Unlock()
	second := newServer(t, ServerConfig{})
	listen(t, second, addr)
	dialEngine(t, addr, "e0", wire.RoleBoth, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for {
		tokens, _, err := ask(ctx, c, 7, 2)
		if err == nil {
			if fmt.Sprint(tokens) != "[8 9]" {
				t.Errorf("tokens %v", tokens)
			}
			return
		}
		wantError(t, err, wire.CodeUnavailable, true) // until it has reconnected
	}
}

func TestInProcessPeersNeedNoPort(t *testing.T) {
	s := newServer(t, ServerConfig{})
	inc := Incarnation()
	conn, err := s.Connect(wire.Connect{Kind: KindEngine, Name: "e0", Incarnation: inc})
	if err != nil {
		t.Fatal(err)
	}
	startEngine(t, conn, inc, "e0", wire.RoleBoth, nil)
	c, err := s.Client(ClientConfig{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if tokens, _, err := ask(t.Context(), c, 1, 3); err != nil || len(tokens) != 3 {
		t.Errorf("%v, %v", tokens, err)
	}
	if _, err := s.Connect(wire.Connect{Kind: "spy"}); err == nil {
		t.Error("a peer of an unknown kind was attached")
	}
	s.Close()
	if _, err := s.Connect(wire.Connect{Kind: KindClient}); !errors.Is(err, ErrServerClosed) {
		t.Errorf("Connect to a closed server: %v", err)
	}
	if _, err := s.Status(t.Context()); !errors.Is(err, ErrServerClosed) {
		t.Errorf("Status of a closed server: %v", err)
	}
}

func TestShutdownLetsRequestsEnd(t *testing.T) {
	s := newServer(t, ServerConfig{})
	addr := listen(t, s, "127.0.0.1:0")
	gate := make(chan struct{})
	dialEngine(t, addr, "e0", wire.RoleBoth, gate)
	c := dialClient(t, addr)
	st, err := c.Submit(t.Context(), &wire.SubmitRequest{Prompt: wire.Tokens{1}, Sampling: wire.Sampling{MaxTokens: 2}})
	if err != nil {
		t.Fatal(err)
	}
	gate <- struct{}{}
	done := make(chan error, 1)
	go func() { done <- s.Shutdown(t.Context()) }()
	eventually(t, s, "the stop", func(st *wire.StatusReply) bool { return st.Phase == "stopping" })
	_, _, err = ask(t.Context(), c, 1, 1)
	wantError(t, err, wire.CodeUnavailable, true)
	gate <- struct{}{}
	for n := range 2 {
		if r, err := st.Next(t.Context()); err != nil || r.Start != n {
			t.Fatalf("result %d: %+v, %v", n, r, err)
		}
	}
	if err := <-done; err != nil {
		t.Errorf("Shutdown: %v", err)
	}
}

func TestShutdownThatRunsOutOfTime(t *testing.T) {
	s := newServer(t, ServerConfig{})
	addr := listen(t, s, "127.0.0.1:0")
	gate := make(chan struct{})
	dialEngine(t, addr, "e0", wire.RoleBoth, gate)
	c := dialClient(t, addr)
	st, err := c.Submit(t.Context(), &wire.SubmitRequest{Prompt: wire.Tokens{1}, Sampling: wire.Sampling{MaxTokens: 9}})
	if err != nil {
		t.Fatal(err)
	}
	gate <- struct{}{}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Shutdown(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Shutdown: %v", err)
	}
	for {
		if _, err := st.Next(t.Context()); err != nil {
			wantError(t, err, wire.CodeUnavailable, true)
			return
		}
	}
}

func TestControlMessages(t *testing.T) {
	s := newServer(t, ServerConfig{})
	addr := listen(t, s, "127.0.0.1:0")
	c := dialClient(t, addr)
	if err := c.Control(t.Context(), &wire.Pause{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, s, "the pause", func(st *wire.StatusReply) bool { return st.Phase == "paused" })
	for range 2 { // the second changes nothing
		if err := c.Control(t.Context(), &wire.Shutdown{}); err != nil {
			t.Fatal(err)
		}
	}
	<-s.Exit()
	eventually(t, s, "the stop", func(st *wire.StatusReply) bool { return st.Phase == "stopping" })
}

func TestStrangersAreKeptOut(t *testing.T) {
	s := newServer(t, ServerConfig{MaxConnections: 2, Wire: wire.Options{HandshakeTimeout: time.Minute}})
	addr := listen(t, s, "127.0.0.1:0")
	_, _, err := wire.Dial(t.Context(), "tcp", addr, wire.Connect{Kind: "spy"}, wire.Options{})
	var refused *wire.RefusedError
	if !errors.As(err, &refused) {
		t.Errorf("a peer of an unknown kind: %v", err)
	}
	_, _, err = wire.Dial(t.Context(), "tcp", addr, wire.Connect{Kind: KindClient, Version: 99 << 16}, wire.Options{})
	if !errors.As(err, &refused) {
		t.Errorf("a peer of another protocol version: %v", err)
	}
	// Strangers take no place of a peer's, and peers no more than there are.
	var silent []net.Conn
	for range 5 {
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		silent = append(silent, nc)
	}
	for range 2 {
		conn, _, err := wire.Dial(t.Context(), "tcp", addr, wire.Connect{Kind: KindClient}, wire.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	if _, _, err = wire.Dial(t.Context(), "tcp", addr, wire.Connect{Kind: KindClient}, wire.Options{}); !errors.As(err, &refused) || !strings.Contains(err.Error(), "as many as may") {
		t.Errorf("one peer more than there is room for: %v", err)
	}
	s.Close()
	for _, nc := range silent {
		if _, err := nc.Read(make([]byte, 1)); err == nil {
			t.Error("a silent connection got an answer")
		}
	}
}

func TestMalformedMessagesAreDropped(t *testing.T) {
	s := newServer(t, ServerConfig{})
	ours, theirs, err := wire.Pair(wire.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	if err := s.Attach(ours, wire.Connect{Kind: KindClient, Name: "u"}); err != nil {
		t.Fatal(err)
	}
	// A submission whose fields are a string, then a good one.
	if err := theirs.Send(&wire.Unknown{Of: wire.HeaderSubmitRequest, Raw: []byte{0xa1, 'x'}}); err != nil {
		t.Fatal(err)
	}
	if err := theirs.Send(&wire.StatusRequest{ID: 5}); err != nil {
		t.Fatal(err)
	}
	m, err := theirs.Recv()
	if st, ok := m.(*wire.StatusReply); !ok || st.ID != 5 {
		t.Errorf("got %+v, %v", m, err)
	}
	if n := testutil.ToFloat64(s.metrics.malformed); n != 1 {
		t.Errorf("%v malformed messages counted, want 1", n)
	}
}

func TestConfigsAreChecked(t *testing.T) {
	if _, err := NewServer(ServerConfig{Core: Config{Wait: -1}}); err == nil {
		t.Error("a negative wait was accepted")
	}
}

// BenchmarkServer runs requests of a 100-token prompt and 5 new tokens through TCP, 64 at a time.
func BenchmarkServer(b *testing.B) {
	s, err := NewServer(ServerConfig{Logger: quiet()})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	var engines []*toyEngine
	for _, role := range []string{wire.RolePrefill, wire.RoleDecode} {
		inc := Incarnation()
		conn, err := s.Connect(wire.Connect{Kind: KindEngine, Name: role, Incarnation: inc})
		if err != nil {
			b.Fatal(err)
		}
		e, err := register(conn, inc, role, role, nil)
		if err != nil {
			b.Fatal(err)
		}
		e.freed, e.aborts = nil, nil
		engines = append(engines, e)
	}
	defer func() {
		for _, e := range engines {
			e.die()
		}
	}()
	c, err := s.Client(ClientConfig{Logger: quiet()})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	work := make(chan int32, b.N)
	for i := range b.N {
		work <- int32(i % 1000)
	}
	close(work)
	b.ResetTimer()
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for i := range work {
				if _, _, err := ask(context.Background(), c, i, 5); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
}
