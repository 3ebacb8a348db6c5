package leg

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"baton/checkpoint"
	"baton/engine"
	"baton/handoff"
	"baton/layout"
	"baton/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// process is a shard's engines and their server, as cmd/baton puts them together.
type process struct {
	*Server
	reg     *prometheus.Registry
	listen  net.Listener
	stop    context.CancelFunc // of the engines
	ended   chan error
	closing sync.Once
}

// options are what tests change about a process.
type options struct {
	engine engine.Config
	leg    ServerConfig
}

// blockBytes is the size of a KV block of 32 tokens of the tiny llama.
const blockBytes = 24 << 10

var quiet = slog.New(slog.DiscardHandler)

// start opens an engine for the tiny llama and serves it until the test ends.
func start(t testing.TB, role string, change func(*options)) *process {
	t.Helper()
	ck, err := checkpoint.Open("../testdata/goldens/llama")
	if err != nil {
		t.Fatal(err)
	}
	p := &process{reg: prometheus.NewRegistry(), ended: make(chan error, 1)}
	o := options{engine: engine.Config{
		Role: role, Checkpoint: ck, KVBytes: 8 << 20, Threads: 1, Logger: quiet, Metrics: engine.NewMetrics(p.reg), ServedModel: "m",
	}, leg: ServerConfig{Logger: quiet}}
	if role == wire.RoleDecode {
		o.engine.Continuation = -1
	}
	if change != nil {
		change(&o)
	}
	shard, err := engine.Open(t.Context(), o.engine)
	if err != nil {
		t.Fatal(err)
	}
	if role == wire.RolePrefill {
		if p.listen, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		o.leg.Core.Address = p.listen.Addr().String()
	}
	o.leg.Core.Lease = o.engine.ExportLease
	for _, e := range shard.Engines() {
		o.leg.Core.Engines = append(o.leg.Core.Engines, e.Name())
	}
	if p.Server, err = NewServer(o.leg); err != nil {
		t.Fatal(err)
	}
	var ctx context.Context
	ctx, p.stop = context.WithCancel(context.Background())
	if p.listen != nil {
		go func() {
			if err := p.Serve(context.Background(), p.listen); err != nil {
				t.Error(err)
			}
		}()
	}
	go func() {
		err := shard.Run(ctx, func(_ context.Context, hello wire.Connect) (*wire.Conn, error) { return p.Connect(hello) })
		p.ended <- errors.Join(err, shard.Close(), ck.Close())
	}()
	t.Cleanup(func() { p.end(t) })
	p.await(t, "the engines to register", func() bool {
		s, err := p.Status(t.Context())
		return err == nil && s.Ready
	})
	return p
}

// end stops a process as an operator would.
func (p *process) end(t testing.TB) {
	p.closing.Do(func() {
		p.stop()
		if err := <-p.ended; err != nil {
			t.Error(err)
		}
		p.Close()
	})
}

// kill ends a process's server at once. Its engine cannot die without taking the test along, so it is only let go.
func (p *process) kill(t testing.TB) {
	p.closing.Do(func() {
		p.Close()
		p.stop()
		if err := <-p.ended; err != nil {
			t.Error(err)
		}
	})
}

func (p *process) await(t testing.TB, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited 20s for %s", what)
		}
	}
}

// held is how many KV blocks are in use.
func (p *process) held(t testing.TB) (n float64) {
	t.Helper()
	families, err := p.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "baton_engine_kv_blocks" {
			continue
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "state" && l.GetValue() == "used" {
					n += m.GetGauge().GetValue()
				}
			}
		}
	}
	return n
}

// rest waits until nothing is held any more.
func (p *process) rest(t testing.TB) {
	t.Helper()
	p.await(t, "rest", func() bool {
		s := p.Stats()
		return s.Requests+s.Exports+s.Claims+s.Reading == 0 && p.held(t) == 0
	})
}

func prompt(n int, seed uint64) wire.Tokens {
	rng := rand.New(rand.NewPCG(seed, 3))
	ids := make(wire.Tokens, n)
	for i := range ids {
		ids[i] = 3 + rng.Int32N(600)
	}
	return ids
}

func question(n int, seed uint64) *wire.SubmitRequest {
	return &wire.SubmitRequest{Prompt: prompt(n, seed), Sampling: wire.Sampling{
		MaxTokens: 12, Temperature: 0.8, Seed: seed, IgnoreEOS: true, Logprobs: true, TopLogprobs: 3, PromptLogprobs: true, PromptTopLogprobs: 2,
	}}
}

// collect joins a stream's results.
func collect(ctx context.Context, st *Stream) (whole wire.Result, err error) {
	for {
		r, err := st.Next(ctx)
		if err == io.EOF {
			return whole, nil
		}
		if err != nil {
			return whole, err
		}
		if r.Start != len(whole.Tokens) {
			return whole, fmt.Errorf("a result starts at %d where %d was due", r.Start, len(whole.Tokens))
		}
		whole.Tokens, whole.Logprobs, whole.Top = append(whole.Tokens, r.Tokens...), append(whole.Logprobs, r.Logprobs...), append(whole.Top, r.Top...)
		if r.PromptTokens > 0 {
			whole.PromptTokens, whole.PromptLogprobs, whole.PromptTop = r.PromptTokens, r.PromptLogprobs, r.PromptTop
		}
		whole.Finish = r.Finish
	}
}

func (p *process) do(ctx context.Context, job Job) (wire.Result, *Stream, error) {
	st, err := p.Submit(ctx, job)
	if err != nil {
		return wire.Result{}, nil, err
	}
	r, err := collect(ctx, st)
	return r, st, err
}

// context runs a context leg and keeps what it leaves.
func (p *process) context(ctx context.Context, req *wire.SubmitRequest) (Job, error) {
	first, st, err := p.do(ctx, Job{Kind: Context, Request: req, Group: -1})
	if err != nil {
		return Job{}, err
	}
	st.Keep()
	st.Close()
	return generation(req, first, st.Left().State)
}

// generation is the job that goes on with what a context leg left.
func generation(req *wire.SubmitRequest, first wire.Result, state []byte) (Job, error) {
	m, err := wire.Decode(state)
	if err != nil {
		return Job{}, err
	}
	first.Finish, first.PromptLogprobs, first.PromptTop = "", nil, nil
	return Job{Kind: Generation, Request: req, Group: -1, State: m.(*wire.KVState), Digest: sha256.Sum256(state), First: first}, nil
}

// Two legs give the bits of one engine, whatever lies between them.
func TestTwoLegs(t *testing.T) {
	alone := start(t, wire.RoleBoth, nil)
	for _, c := range []struct {
		transport, prefill, decode string
		verify                     handoff.Verification
	}{
		{"shm", "tp=1", "tp=1", handoff.VerifyOff},
		{"tcp", "tp=1", "tp=2", handoff.VerifyAll},
		{"tcp-push", "tp=2", "tp=1", handoff.VerifySample},
		{"tcp-push", "tp=1,pp=3", "tp=2,dp=2", handoff.VerifyOff},
	} {
		t.Run(c.transport+" "+c.prefill+" to "+c.decode, func(t *testing.T) {
			configure := func(spec string) func(*options) {
				return func(o *options) {
					shards, err := layout.ParseShards(spec)
					if err != nil {
						t.Fatal(err)
					}
					o.engine.Shard, o.engine.Transport, o.engine.VerifyHandoff = shards[0], c.transport, c.verify
					o.engine.ExportLease = time.Minute
				}
			}
			prefill, decode := start(t, wire.RolePrefill, configure(c.prefill)), start(t, wire.RoleDecode, configure(c.decode))
			var wg sync.WaitGroup
			for i, n := range []int{1, 32, 77} {
				wg.Go(func() {
					req := question(n, uint64(i))
					want, _, err := alone.do(t.Context(), Job{Request: req, Group: -1})
					if err != nil {
						t.Error(err)
						return
					}
					job, err := prefill.context(t.Context(), req)
					if err != nil {
						t.Error(err)
						return
					}
					got, _, err := decode.do(t.Context(), job)
					if err != nil || !reflect.DeepEqual(got, want) {
						t.Errorf("a prompt of %d tokens: %v\n%+v\nalone\n%+v", n, err, got, want)
					}
				})
			}
			wg.Wait()
			prefill.rest(t)
			decode.rest(t)
			if s := prefill.Stats(); s.Exported != 3 || s.Released != 3 || s.Expired+s.Refused != 0 {
				t.Errorf("the prefill side counts %+v", s)
			}
			if s := decode.Stats(); s.Read != 3 || s.Lost != 0 {
				t.Errorf("the decode side counts %+v", s)
			}
		})
	}
}

// pair is a prefill and a decode process over tcp with a short lease.
func pair(t testing.TB, lease time.Duration, change func(*options)) (prefill, decode *process) {
	with := func(o *options) {
		o.engine.Transport, o.engine.ExportLease = "tcp", lease
		if change != nil {
			change(o)
		}
	}
	return start(t, wire.RolePrefill, with), start(t, wire.RoleDecode, with)
}

func code(err error) string {
	var failed *RequestError
	if errors.As(err, &failed) {
		return failed.Code
	}
	return fmt.Sprint(err)
}

// Context legs whose generation never comes leave nothing after their lease, and do not keep others from running.
func TestLeasesEnd(t *testing.T) {
	prefill, decode := pair(t, 150*time.Millisecond, func(o *options) {
		o.engine.KVBytes = 12 * blockBytes // four prompts
		o.engine.MaxSeqLen = 200
	})
	var jobs []Job
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range 20 { // more than fit at a time: they wait for each other's leases
		wg.Go(func() {
			job, err := prefill.context(t.Context(), question(40+i, uint64(i)))
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			jobs = append(jobs, job)
			mu.Unlock()
		})
	}
	wg.Wait()
	prefill.rest(t)
	if s := prefill.Stats(); s.Expired != 20 || s.Released != 0 {
		t.Errorf("%+v", s)
	}
	for _, job := range jobs {
		if _, _, err := decode.do(t.Context(), job); code(err) != wire.CodeGone {
			t.Fatalf("a leg whose KV is gone ended with %v", err)
		}
	}
	decode.rest(t)
	if s := prefill.Stats(); s.Refused != 20 {
		t.Errorf("%+v", s)
	}
}

// A generation leg that waits for room renews the lease of what it will read.
func TestLeasesAreRenewed(t *testing.T) {
	const lease = 150 * time.Millisecond
	prefill, decode := pair(t, lease, func(o *options) { o.engine.KVBytes = 120 * blockBytes })
	big := question(200, 1)
	big.Sampling.MaxTokens = 3500 // 116 of the blocks
	first, err := prefill.context(t.Context(), big)
	if err != nil {
		t.Fatal(err)
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	running, err := decode.Submit(ctx, first)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := running.Next(ctx); err != nil {
		t.Fatal(err)
	}
	second, err := prefill.context(t.Context(), question(190, 2))
	if err != nil {
		t.Fatal(err)
	}
	waiting, err := decode.Submit(t.Context(), second)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(4 * lease)
	if s := decode.Stats(); s.Reading != 1 || s.Requests != 2 {
		t.Fatalf("nobody waits for room: %+v", s)
	}
	leave()
	if got, err := collect(t.Context(), waiting); err != nil || len(got.Tokens) != 12 {
		t.Fatalf("%v, %v", got.Tokens, err)
	}
	decode.rest(t)
	prefill.rest(t)
}

// A client that leaves, at whatever moment, takes everything along.
func TestClientsLeave(t *testing.T) {
	for _, transport := range []string{"shm", "tcp-push"} {
		prefill, decode := pair(t, time.Second, func(o *options) { o.engine.Transport = transport })
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				time.AfterFunc(time.Duration(i)*time.Millisecond, leave)
				req := question(100, uint64(i))
				req.Sampling.MaxTokens = 2000
				first, st, err := prefill.do(ctx, Job{Kind: Context, Request: req, Group: -1})
				if err != nil {
					return
				}
				defer st.Close() // the state went nowhere
				job, err := generation(req, first, st.Left().State)
				if err != nil {
					t.Error(err)
					return
				}
				st.Keep()
				if _, _, err := decode.do(ctx, job); err == nil {
					t.Error("2000 tokens in no time")
				}
			})
		}
		wg.Wait()
		decode.rest(t)
		prefill.rest(t) // a state that was kept, and never brought to the decode side, waits for its lease
	}
}

// A prefill process that is gone, or is another by now, fails the leg in words that say what to do.
func TestSourceIsGone(t *testing.T) {
	prefill, decode := pair(t, time.Minute, nil)
	job, err := prefill.context(t.Context(), question(50, 1))
	if err != nil {
		t.Fatal(err)
	}
	address := prefill.Address()
	prefill.kill(t)
	if _, _, err := decode.do(t.Context(), job); code(err) != wire.CodeUnavailable || !strings.Contains(err.Error(), address) {
		t.Errorf("after the death: %v", err)
	}
	again := start(t, wire.RolePrefill, func(o *options) { o.engine.Transport, o.engine.ExportLease = "tcp", time.Minute })
	job.State.Address = again.Address()
	if _, _, err := decode.do(t.Context(), job); code(err) != wire.CodeGone {
		t.Errorf("of another process: %v", err)
	}
	decode.rest(t)
}

// A link that is not permitted is not opened.
func TestLinksArePermitted(t *testing.T) {
	prefill := start(t, wire.RolePrefill, func(o *options) { o.engine.ExportLease = 200 * time.Millisecond })
	decode := start(t, wire.RoleDecode, func(o *options) {
		o.leg.Permit = func(address string) error { return fmt.Errorf("%s is beyond this host", address) }
	})
	job, err := prefill.context(t.Context(), question(50, 1))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := decode.do(t.Context(), job); code(err) != wire.CodeUnavailable || !strings.Contains(err.Error(), "beyond this host") {
		t.Error(err)
	}
}

// Strangers at the link's port get nothing and take nothing.
func TestStrangers(t *testing.T) {
	prefill, decode := pair(t, time.Minute, func(o *options) { o.leg.MaxStrangers, o.leg.MaxLinks = 4, 3 })
	address := prefill.Address()
	dial := func() net.Conn {
		nc, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { nc.Close() })
		return nc
	}
	for i := range 20 {
		nc := dial()
		if i%2 == 0 {
			_, _ = nc.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
		}
	}
	ctx := t.Context()
	_, _, err := wire.Dial(ctx, "tcp", address, wire.Connect{Kind: "engine"}, wire.Options{})
	var refused *wire.RefusedError
	if !errors.As(err, &refused) || !strings.Contains(refused.Reason, "hands over KV") {
		t.Errorf("an engine that looks for a coordinator: %v", err)
	}
	var links []*wire.Conn
	for range 2 {
		conn, _, err := wire.Dial(ctx, "tcp", address, wire.Connect{Kind: kindLink}, wire.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		links = append(links, conn)
	}
	for _, m := range []wire.Message{&wire.ClaimKV{ID: 1, Request: 1}, &wire.RenewKV{}, &wire.SendKV{}, &wire.KVReadDone{ID: 1}, &wire.AbortRequest{}, &wire.Shutdown{}, &wire.EngineReply{}} {
		if err := links[0].Send(m); err != nil {
			t.Fatal(err)
		}
	}
	if m, err := links[0].Recv(); err != nil || m.(*wire.RequestError).Code != wire.CodeGone {
		t.Errorf("a claim of nothing: %v, %v", m, err)
	}
	job, err := prefill.context(ctx, question(50, 1))
	if err != nil {
		t.Fatal(err)
	}
	if got, _, err := decode.do(ctx, job); err != nil || len(got.Tokens) != 12 {
		t.Fatalf("%v, %v", got.Tokens, err)
	}
	fourth, _, err := wire.Dial(ctx, "tcp", address, wire.Connect{Kind: kindLink}, wire.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer fourth.Close()
	if _, err := fourth.Recv(); err == nil {
		t.Error("a fourth link of three was served")
	}
	prefill.rest(t)
}

// A process that is told to stop lets requests, and readers of what it holds, come to their end.
func TestDrain(t *testing.T) {
	prefill, decode := pair(t, time.Minute, nil)
	job, err := prefill.context(t.Context(), question(100, 1))
	if err != nil {
		t.Fatal(err)
	}
	prefill.Drain()
	prefill.stop()
	if _, _, err := prefill.do(t.Context(), Job{Kind: Context, Request: question(5, 1), Group: -1}); code(err) != wire.CodeUnavailable {
		t.Errorf("a new job: %v", err)
	}
	if s, err := prefill.Status(t.Context()); err != nil || s.Ready {
		t.Errorf("%+v, %v", s, err)
	}
	if got, _, err := decode.do(t.Context(), job); err != nil || len(got.Tokens) != 12 {
		t.Errorf("%v, %v", got.Tokens, err)
	}
	select {
	case err := <-prefill.ended:
		prefill.ended <- err
	case <-time.After(10 * time.Second):
		t.Error("it does not end")
	}
}

// Close ends what runs.
func TestClose(t *testing.T) {
	decode := start(t, wire.RoleBoth, nil)
	req := question(100, 1)
	req.Sampling.MaxTokens = 3000
	st, err := decode.Submit(t.Context(), Job{Request: req, Group: -1})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	decode.kill(t)
	if _, err := collect(t.Context(), st); !errors.Is(err, ErrClosed) && err == nil {
		t.Errorf("the stream ended with %v", err)
	}
	if _, err := decode.Submit(t.Context(), Job{Request: req}); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if _, err := decode.Connect(wire.Connect{Name: "both"}); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if _, err := decode.Status(t.Context()); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	st.Close()
	decode.Close()
}

// Only engines of this process connect, each once.
func TestConnect(t *testing.T) {
	p := start(t, wire.RoleBoth, nil)
	for _, name := range []string{"both", "other"} {
		if _, err := p.Connect(wire.Connect{Name: name}); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(p.Collector())
	families, err := reg.Gather()
	if err != nil || len(families) != 7 {
		t.Errorf("%d families, %v", len(families), err)
	}
	for _, cfg := range []Config{{}, {Engines: []string{"e"}, Lease: -1}} {
		if _, err := NewServer(ServerConfig{Core: cfg}); err == nil || !slices.ContainsFunc([]string{"Engines", "Lease"}, func(f string) bool { return strings.Contains(err.Error(), f) }) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}
