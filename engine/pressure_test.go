package engine

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"baton/handoff"
	"baton/kvcache"
	"baton/layout"
	"baton/wire"
)

// admit gives the harness a request whose prompt was computed elsewhere.
func (h *harness) admit(id uint64, prompt, generated []int32, limit int) error {
	h.t.Helper()
	tokens := slices.Concat(prompt, generated)
	table, err := h.pool.Open(kvcache.OpenRequest{
		Prompt: tokens[:len(tokens)-1], Capacity: len(prompt) + limit - 1, Reserve: h.config.reserve(len(tokens)),
		WholePrompt: true, Owner: id,
	})
	if err != nil {
		return err
	}
	for i := table.Cached(); i < len(tokens)-1; i++ {
		h.model.kv[table.Slot(i)] = tokens[i] + 1
	}
	table.Commit(tokens[table.Cached() : len(tokens)-1])
	out, refused := h.Admit(h.now, Import{
		Submit: &wire.SubmitRequestWithKV{ID: id, Prompt: prompt, Generated: generated, Sampling: wire.Sampling{MaxTokens: limit}},
		Table:  table, Arrived: h.now,
	})
	if refused != nil {
		h.t.Fatalf("request %d refused: %s", id, refused.Message)
	}
	h.collect(out)
	return nil
}

func (h *harness) pressure(short int, evicted uint64) {
	h.t.Helper()
	if s, e := h.Pressure(); s != short || e != evicted {
		h.t.Errorf("%d short and %d evicted, want %d and %d", s, e, short, evicted)
	}
}

// Three requests of one block each in a pool of five; each wants three blocks in the end.
func TestShortRequestsWaitThenGiveWay(t *testing.T) {
	h := newHarness(t, SchedulerConfig{MaxRequests: 4, MaxTokens: 16, BlockSize: 4, Blocks: 5, Continuation: 1})
	prompt := func(id uint64) []int32 { return ramp(1, int(100*id)) }
	for id := range uint64(2) {
		h.submit(wire.SubmitRequest{ID: id, Prompt: prompt(id), Sampling: wire.Sampling{MaxTokens: 12}})
	}
	h.submit(wire.SubmitRequest{ID: 2, Prompt: prompt(2), Sampling: wire.Sampling{MaxTokens: 2}})
	h.step() // the first two hold one block each and are promised another; one is left for the third
	if waiting, _, running := h.Loads(); waiting != 0 || running != 3 {
		t.Fatalf("%d waiting, %d running", waiting, running)
	}
	h.step() // the third ends
	h.submit(wire.SubmitRequest{ID: 3, Prompt: ramp(5, 900), Sampling: wire.Sampling{MaxTokens: 1}})
	for len(h.tokens[0]) < 8 {
		h.step()
		h.pressure(0, 0)
	}
	h.step() // 9 tokens: a third block each, but there is one, which the first takes
	h.pressure(1, 0)
	if _, begun := h.first[3]; begun || len(h.tokens[0]) != 9 || len(h.tokens[1]) != 8 {
		t.Errorf("%d and %d tokens; the new request began: %v", len(h.tokens[0]), len(h.tokens[1]), begun)
	}
	h.drain()
	h.pressure(0, 0)
	for id := range uint64(2) {
		if got, want := h.tokens[id], toyRun(prompt(id), 12); !slices.Equal(got, want) {
			t.Errorf("request %d: got %v, want %v", id, got, want)
		}
	}
}

func TestTheFirstGoesOnAtTheCostOfTheLast(t *testing.T) {
	h := newHarness(t, SchedulerConfig{MaxRequests: 4, MaxTokens: 16, BlockSize: 4, Blocks: 4, Continuation: 1})
	for id := range uint64(2) {
		h.submit(wire.SubmitRequest{ID: id, Prompt: ramp(4, int(100*id)), Sampling: wire.Sampling{MaxTokens: 12}})
	}
	h.submit(wire.SubmitRequest{ID: 9, Prompt: ramp(3, 900), Sampling: wire.Sampling{MaxTokens: 1}})
	for range 6 {
		h.step()
	}
	h.pressure(0, 1)
	if len(h.tokens[0]) != 6 || len(h.tokens[1]) != 5 {
		t.Errorf("%d and %d tokens", len(h.tokens[0]), len(h.tokens[1]))
	}
	if waiting := h.waiting; len(waiting) != 2 || waiting[0].id != 1 {
		t.Errorf("the evicted request is not at the front of the queue")
	}
	h.drain()
	for id := range uint64(2) {
		if got, want := h.tokens[id], toyRun(ramp(4, int(100*id)), 12); !slices.Equal(got, want) {
			t.Errorf("request %d: got %v, want %v", id, got, want)
		}
		if got := h.final[id].Stats.Evictions; got != int(id) {
			t.Errorf("request %d was evicted %d times", id, got)
		}
	}
	if s := h.final[1].Stats; s.PromptComputed <= 4 || s.PromptComputed > 4+9 {
		t.Errorf("%d tokens computed as a prompt: its own, and again those whose blocks were taken", s.PromptComputed)
	}
	if got := h.first[1].CachedTokens; got != 0 {
		t.Errorf("%d tokens cached: what it computed itself does not count", got)
	}
}

func TestADecodeEngineGivesBack(t *testing.T) {
	h := newHarness(t, SchedulerConfig{MaxRequests: 4, MaxTokens: 16, BlockSize: 4, Blocks: 4, Continuation: 1, Return: true})
	for id := range uint64(2) {
		prompt := ramp(3, int(100*id))
		h.tokens[id] = toyRun(prompt, 1)
		if err := h.admit(id, prompt, h.tokens[id], 12); err != nil {
			t.Fatal(err)
		}
	}
	h.drain()
	h.pressure(0, 1)
	r := h.final[1]
	if r.Finish != wire.FinishEvicted || r.StopToken != -1 || r.Stats.Evictions != 1 {
		t.Errorf("got %+v", r)
	}
	if got, want := h.tokens[1], toyRun(ramp(3, 100), 6); !slices.Equal(got, want) {
		t.Errorf("tokens so far %v, want %v", got, want)
	}
	if got, want := h.tokens[0], toyRun(ramp(3, 0), 12); !slices.Equal(got, want) {
		t.Errorf("the other got %v, want %v", got, want)
	}
}

// What the first lacks may be held outside. Then nobody is evicted in vain.
func TestBlocksHeldOutside(t *testing.T) {
	h := newHarness(t, SchedulerConfig{MaxRequests: 4, MaxTokens: 16, BlockSize: 4, Blocks: 5, Continuation: 1})
	exported, err := h.pool.Open(kvcache.OpenRequest{Prompt: ramp(12, 700)})
	if err != nil {
		t.Fatal(err)
	}
	exported.Commit(ramp(12, 700))
	pin := exported.Pin(3)
	exported.Close()
	h.submit(wire.SubmitRequest{ID: 1, Prompt: ramp(4, 1), Sampling: wire.Sampling{MaxTokens: 12}})
	for h.step() {
	}
	h.pressure(1, 0)
	if len(h.tokens[1]) != 5 {
		t.Errorf("%d tokens", len(h.tokens[1]))
	}
	pin.Release()
	h.drain()
	if got, want := h.tokens[1], toyRun(ramp(4, 1), 12); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// Whatever is told once is told as if the request had never been evicted.
func TestEvictedRequestsAreToldAsOthers(t *testing.T) {
	for _, tt := range []struct {
		prompt   int
		logprobs bool
	}{{9, true}, {9, false}, {40, true}, {40, false}} { // evicted while it decodes, or in the middle of its prompt
		h := newHarness(t, SchedulerConfig{MaxRequests: 4, MaxTokens: 5, BlockSize: 4, Blocks: 14, Continuation: 1})
		first, second, limit := ramp(6, 1), ramp(tt.prompt, 300), 56-tt.prompt
		h.submit(wire.SubmitRequest{ID: 1, Prompt: first, Sampling: wire.Sampling{MaxTokens: 40}})
		for len(h.tokens[1]) < 5 {
			h.step()
		}
		h.submit(wire.SubmitRequest{ID: 2, Prompt: second, Sampling: wire.Sampling{MaxTokens: limit, PromptLogprobs: tt.logprobs}})
		for h.evicted == 0 {
			h.step()
		}
		had := len(h.tokens[2])
		if (had > 0) != (tt.prompt == 9) {
			t.Fatalf("%+v: evicted with %d tokens", tt, had)
		}
		h.drain()
		if h.final[1].Stats.Evictions != 0 || h.final[2].Stats.Evictions == 0 {
			t.Errorf("%+v: the first was evicted %d times", tt, h.final[1].Stats.Evictions)
		}
		if !slices.Equal(h.tokens[1], toyRun(first, 40)) || !slices.Equal(h.tokens[2], toyRun(second, limit)) {
			t.Errorf("%+v: other tokens than without eviction", tt)
		}
		told := h.first[2]
		if told.CachedTokens != 0 || tt.logprobs != (len(told.PromptLogprobs) == tt.prompt-1) {
			t.Fatalf("%+v: %d tokens cached, %d prompt logprobs", tt, told.CachedTokens, len(told.PromptLogprobs))
		}
		for i, lp := range told.PromptLogprobs {
			if want := -float32(second[i+1]) - float32(toyNext(second[:i+1]))/1e4; lp != want {
				t.Errorf("prompt logprob %d is %v, want %v", i, lp, want)
			}
		}
		// Only who still owes prompt logprobs computes again what is cached.
		if got, most := h.final[2].Stats.PromptComputed, 2*tt.prompt+had; had > 0 && got >= most {
			t.Errorf("%+v: %d tokens computed in prompt passes, want less than %d", tt, got, most)
		}
	}
}

// Random requests in pools that hold barely more than the largest of them give what each alone would,
// whether the engine computes prompts again or gives requests back to one that does.
func TestRandomPressure(t *testing.T) {
	evictions, shorts := uint64(0), 0
	for seed := range uint64(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 2))
			size := []int{1, 2, 4}[rng.IntN(3)]
			c := SchedulerConfig{
				MaxRequests: 2 + rng.IntN(6), BlockSize: size, Blocks: 48/size + rng.IntN(8),
				Continuation: 1 + rng.IntN(2), Return: seed%2 == 1,
			}
			c.MaxTokens = c.MaxRequests + rng.IntN(30)
			h := newHarness(t, c)
			p := pressureRun{harness: h, rng: rng, wants: map[uint64]pressureWant{}}
			for p.next < 30 || !h.Idle() || len(p.returned) > 0 {
				if h.now.UnixMilli() > 20000 {
					t.Fatalf("it does not end: %d requests, %d to come", len(h.requests), len(p.returned))
				}
				p.feed()
				p.round()
				if short, _ := h.Pressure(); short > 0 {
					shorts++
				}
			}
			h.drain()
			for id, w := range p.wants {
				got, ended := h.tokens[id], h.final[id].Finish != ""
				if ended == h.gone[id] {
					t.Errorf("request %d: ended %v, aborted %v; want exactly one", id, ended, h.gone[id])
				}
				if want := toyRun(w.prompt, w.limit); ended && !slices.Equal(got, want) || !slices.Equal(got, want[:len(got)]) {
					t.Errorf("request %d: got %v, want %v", id, got, want)
				}
			}
			_, evicted := h.Pressure()
			evictions += evicted
		})
	}
	if evictions < 100 || shorts < 100 {
		t.Errorf("%d evictions, %d passes with short requests: too few to show anything", evictions, shorts)
	}
}

type pressureWant struct {
	prompt []int32
	limit  int
}

type pressureRun struct {
	*harness
	rng      *rand.Rand
	next     uint64
	wants    map[uint64]pressureWant
	returned []uint64 // to be brought again
}

// feed brings a new request or one that was returned.
func (p *pressureRun) feed() {
	if p.next < 30 && p.rng.IntN(2) == 0 {
		p.next++
		prompt := slices.Concat(ramp(p.rng.IntN(3)*4, 1), ramp(1+p.rng.IntN(12), p.rng.IntN(4)))
		p.wants[p.next] = pressureWant{prompt, 1 + p.rng.IntN(48-len(prompt))}
		if p.config.Return {
			p.returned = append(p.returned, p.next)
		} else {
			p.submit(wire.SubmitRequest{ID: p.next, Prompt: prompt, Sampling: wire.Sampling{
				MaxTokens: p.wants[p.next].limit, PromptLogprobs: p.rng.IntN(8) == 0,
			}})
		}
	}
	for len(p.returned) > 0 && p.CanAdmit() {
		id := p.returned[0]
		w := p.wants[id]
		if h := p.harness; len(h.tokens[id]) == 0 {
			h.tokens[id] = toyRun(w.prompt, 1)
		}
		if err := p.admit(id, w.prompt, p.tokens[id], w.limit); err != nil {
			return
		}
		p.returned = p.returned[1:]
	}
}

func (p *pressureRun) round() {
	plan, out := p.Plan(p.now)
	for _, r := range out.Final {
		if r.Finish != wire.FinishEvicted || len(p.tokens[r.ID]) != r.Start || len(r.Tokens) > 0 {
			p.t.Fatalf("a plan ends %+v", r)
		}
		p.returned = append(p.returned, r.ID)
	}
	if p.rng.IntN(12) == 0 && p.next > 0 {
		out, _ := p.Abort(1 + p.rng.Uint64N(p.next))
		p.collect(out)
	}
	if plan != nil {
		p.collect(p.Apply(p.now, plan, p.model.forward(plan)))
	} else if len(p.running) > 0 && p.short == len(p.running) {
		p.t.Fatalf("nobody can go on: %+v", p.pool.Stats())
	}
	if err := p.pool.Check(); err != nil {
		p.t.Fatal(err)
	}
	p.now = p.now.Add(1e6)
}

// decodeCore is a decode engine whose KV bytes are tokens, with a source that holds any prompt.
type decodeCore struct {
	*Core
	t       *testing.T
	model   *toyModel
	now     time.Time
	tokens  map[uint64][]int32 // of each request: prompt, then generated
	replies map[uint64]wire.Result
}

func newDecodeCore(t *testing.T, blocks, requests int) *decodeCore {
	t.Helper()
	g := layout.Geometry{BlockSize: 4, Layers: 1, KVHeads: 1, HeadDim: 1, Planes: 1, ElementBytes: 1}
	holdings, err := g.Holdings(1, []int{1})
	if err != nil {
		t.Fatal(err)
	}
	core, err := NewCore(CoreConfig{
		Name: "decode", Role: wire.RoleDecode, MaxRequests: requests, MaxTokens: requests, MaxSeqLen: 100,
		Vocabulary: toyVocabulary, BlockSize: 4, Blocks: blocks, Continuation: 1,
		Geometry: g, Holdings: holdings, Secret: []byte{1},
	})
	if err != nil {
		t.Fatal(err)
	}
	return &decodeCore{
		Core: core, t: t, model: newToyModel(t, blocks, 4), now: time.Unix(0, 0),
		tokens: map[uint64][]int32{}, replies: map[uint64]wire.Result{},
	}
}

// carry does what a Core orders: transfers at once.
func (c *decodeCore) carry(actions []Action) {
	c.t.Helper()
	for _, action := range actions {
		switch a := action.(type) {
		case Send:
			switch m := a.Message.(type) {
			case *wire.EngineReplyPartial:
				for _, r := range m.Results {
					c.tokens[r.ID] = append(c.tokens[r.ID], r.Tokens...)
				}
			case *wire.EngineReply:
				for _, r := range m.Results {
					c.tokens[r.ID] = append(c.tokens[r.ID], r.Tokens...)
					c.replies[r.ID] = r
				}
			case *wire.RequestError:
				c.t.Fatal(m.Message)
			}
		case Transfer:
			pull := a.Order.(handoff.StartPull)
			for _, p := range pull.Copies {
				for i := range p.Len { // the handoff's number is the request's: see bring
					c.model.kv[p.Dst+i] = 1
					if at := int(p.Src + i); at < len(c.tokens[pull.Handoff]) {
						c.model.kv[p.Dst+i] = c.tokens[pull.Handoff][at] + 1
					}
				}
			}
			c.carry(c.Step(c.now, Moved{handoff.Settled{Transfer: pull.Transfer}}))
		}
	}
}

func (c *decodeCore) bring(id uint64, prompt []int32, limit int) {
	c.t.Helper()
	c.tokens[id] = slices.Concat(prompt, toyRun(prompt, 1))
	export := wire.Export{Handoff: id, Tokens: len(prompt)}
	for i := range c.Pool().BlocksFor(len(prompt)) {
		export.Blocks = append(export.Blocks, int32(i))
		export.Generations = append(export.Generations, 1)
	}
	c.carry(c.Step(c.now, Received{&wire.SubmitRequestWithKV{
		ID: id, Prompt: prompt, Generated: toyRun(prompt, 1), Sampling: wire.Sampling{MaxTokens: limit},
		Source: wire.Source{Ranks: []wire.RankInfo{{}}, Export: export},
	}}))
}

func (c *decodeCore) pass() bool {
	c.t.Helper()
	plan, actions := c.Plan(c.now)
	c.carry(actions)
	if plan != nil {
		c.carry(c.Step(c.now, Computed{Plan: plan, Outputs: c.model.forward(plan)}))
	}
	if err := c.Pool().Check(); err != nil {
		c.t.Fatal(err)
	}
	return plan != nil
}

// A batch of one is full while a second request waits for admission and a third for blocks: neither may
// keep the first from its next block.
func TestImportsMakeWayForTheFirst(t *testing.T) {
	c := newDecodeCore(t, 6, 1)
	prompts := map[uint64][]int32{1: ramp(4, 1), 2: ramp(3, 200), 3: ramp(5, 400)}
	c.bring(1, prompts[1], 20)
	c.pass()
	c.bring(2, prompts[2], 9)
	c.bring(3, prompts[3], 2)
	if l := c.Load(); l.Decode != 1 || l.Admission != 1 || l.Handoff.Queued != 1 {
		t.Fatalf("%+v", l)
	}
	for c.replies[1].Finish == "" {
		if !c.pass() {
			t.Fatalf("stuck: %+v, %+v", c.Load(), c.Pool().Stats())
		}
		c.carry(c.Step(c.now, Tick{})) // the third tries again
	}
	if got, want := c.tokens[1], slices.Concat(prompts[1], toyRun(prompts[1], 20)); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	r := c.replies[2]
	if r.Finish != wire.FinishEvicted || r.Start != 1 || len(r.Tokens) != 0 || r.Stats.Evictions != 1 || r.Stats.Engine != "decode" {
		t.Errorf("the second got %+v", r)
	}
	for range 100 {
		c.pass()
		c.carry(c.Step(c.now, Tick{}))
	}
	if got, want := c.tokens[3], slices.Concat(prompts[3], toyRun(prompts[3], 2)); !slices.Equal(got, want) {
		t.Errorf("the third got %v, want %v", got, want)
	}
	if l, s := c.Load(), c.Pool().Stats(); l.Evicted != 1 || l.Decode+l.Admission != 0 || s.InUse != 0 || s.Promised != 0 {
		t.Errorf("%+v, %+v", l, s)
	}
}

// A block that comes back goes to the running request that lacks it, not to an import that waits.
func TestWhoIsShortComesBeforeImports(t *testing.T) {
	c := newDecodeCore(t, 6, 4)
	outside, err := c.Pool().Open(kvcache.OpenRequest{Prompt: ramp(3, 700)})
	if err != nil {
		t.Fatal(err)
	}
	prompts := map[uint64][]int32{1: ramp(4, 1), 2: ramp(3, 200), 3: {5}}
	c.bring(1, prompts[1], 9) // three blocks at once
	c.bring(2, prompts[2], 9) // two, later a third
	for range 6 {
		c.pass()
	}
	if l := c.Load(); l.Short != 1 || l.Decode != 2 {
		t.Fatalf("%+v, %+v", l, c.Pool().Stats())
	}
	c.bring(3, prompts[3], 1)
	outside.Close()
	c.carry(c.Step(c.now, Tick{}))
	if l := c.Load(); l.Handoff.Queued != 1 {
		t.Errorf("the import took the block: %+v", l)
	}
	c.pass()
	if l := c.Load(); l.Short != 0 {
		t.Errorf("%+v", l)
	}
}
