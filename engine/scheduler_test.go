package engine

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"baton/kvcache"
	"baton/wire"
)

const toyVocabulary = 1000

// toyModel is a language whose next token is a hash of everything before it, read through the block
// tables from a cache it really keeps: a wrong table, slot or early reuse gives another token.
type toyModel struct {
	t    *testing.T
	size int
	kv   []int32 // token of each slot, plus one
}

func newToyModel(t *testing.T, blocks, size int) *toyModel {
	return &toyModel{t: t, size: size, kv: make([]int32, blocks*size)}
}

func toyNext(tokens []int32) int32 {
	h := uint32(2166136261)
	for _, id := range tokens {
		h = (h ^ uint32(id+1)) * 16777619
	}
	return int32(h % toyVocabulary)
}

// forward stores the pass's rows, then reads each wanted row's whole context.
func (m *toyModel) forward(p *Plan) []Output {
	m.t.Helper()
	for i, slot := range p.Batch.Slots {
		m.kv[slot] = p.Batch.Tokens[i] + 1
	}
	out := make([]Output, 0, len(p.Rows))
	for i, row := range p.Batch.Logits {
		for _, seq := range p.Batch.Sequences {
			if int(row) < seq.Row || int(row) >= seq.Row+seq.Rows {
				continue
			}
			n := seq.Position + int(row) - seq.Row + 1
			context := make([]int32, n)
			for pos := range context {
				context[pos] = m.kv[int(seq.Blocks[pos/m.size])*m.size+pos%m.size] - 1
			}
			o := Output{Token: toyNext(context)}
			if target := p.Rows[i].Target; target >= 0 {
				o.Logprob = -float32(target) - float32(toyNext(context))/1e4
			}
			out = append(out, o)
		}
	}
	return out
}

// toyRun is what a request generates when nothing disturbs it.
func toyRun(prompt []int32, n int) []int32 {
	tokens := slices.Clone(prompt)
	for range n {
		tokens = append(tokens, toyNext(tokens))
	}
	return tokens[len(prompt):]
}

type harness struct {
	*Scheduler
	t      *testing.T
	pool   *kvcache.Pool
	model  *toyModel
	now    time.Time
	tokens map[uint64][]int32
	final  map[uint64]wire.Result
	first  map[uint64]wire.Result
	gone   map[uint64]bool
}

func newHarness(t *testing.T, c SchedulerConfig) *harness {
	t.Helper()
	pool, err := kvcache.New(kvcache.Config{Blocks: c.Blocks, BlockSize: c.BlockSize})
	if err != nil {
		t.Fatal(err)
	}
	if c.Vocabulary == 0 {
		c.Vocabulary = toyVocabulary
	}
	if c.MaxSeqLen == 0 {
		c.MaxSeqLen = 1000
	}
	return &harness{
		Scheduler: NewScheduler(c, pool), t: t, pool: pool, model: newToyModel(t, c.Blocks, c.BlockSize),
		now: time.Unix(0, 0), tokens: map[uint64][]int32{}, final: map[uint64]wire.Result{},
		first: map[uint64]wire.Result{}, gone: map[uint64]bool{},
	}
}

func (h *harness) submit(sub wire.SubmitRequest) {
	h.t.Helper()
	if e := h.Submit(h.now, &sub); e != nil {
		h.t.Fatalf("request %d refused: %s", sub.ID, e.Message)
	}
}

// step runs one pass and reports whether there was one.
func (h *harness) step() bool {
	h.t.Helper()
	plan, out := h.Plan(h.now)
	for _, e := range out.Failed {
		h.t.Fatalf("request %d failed: %s", e.ID, e.Message)
	}
	h.collect(out)
	if plan == nil {
		return len(out.Final) > 0
	}
	if n := len(plan.Batch.Tokens); n > h.config.MaxTokens {
		h.t.Fatalf("a pass of %d tokens, at most %d", n, h.config.MaxTokens)
	}
	outputs := h.model.forward(plan)
	h.now = h.now.Add(time.Millisecond)
	h.collect(h.Apply(h.now, plan, outputs))
	if err := h.pool.Check(); err != nil {
		h.t.Fatal(err)
	}
	return true
}

func (h *harness) collect(out Outcome) {
	h.t.Helper()
	for _, r := range slices.Concat(out.Partial, out.Final) {
		if got := len(h.tokens[r.ID]); r.Start != got {
			h.t.Fatalf("request %d: a result starts at token %d, %d were reported", r.ID, r.Start, got)
		}
		if _, ok := h.first[r.ID]; !ok {
			h.first[r.ID] = r
		}
		h.tokens[r.ID] = append(h.tokens[r.ID], r.Tokens...)
	}
	for _, r := range out.Final {
		if _, twice := h.final[r.ID]; twice || h.gone[r.ID] {
			h.t.Fatalf("request %d ended twice", r.ID)
		}
		h.final[r.ID] = r
	}
	for _, id := range out.Aborted {
		h.gone[id] = true
	}
}

func (h *harness) drain() {
	h.t.Helper()
	for range 10000 {
		if h.Idle() {
			break
		}
		if !h.step() {
			h.t.Fatalf("stuck with %d requests", len(h.requests))
		}
	}
	if s := h.pool.Stats(); s.InUse != 0 || s.Promised != 0 || s.Free+s.Cached != s.Total {
		h.t.Fatalf("the pool did not return to its start: %+v", s)
	}
}

func ramp(n, from int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32((from + i*7) % toyVocabulary)
	}
	return out
}

func TestOneRequestWhateverTheChunking(t *testing.T) {
	for _, chunk := range []int{1, 2, 5, 16, 64} {
		h := newHarness(t, SchedulerConfig{MaxRequests: 1, MaxTokens: chunk, BlockSize: 4, Blocks: 20})
		h.submit(wire.SubmitRequest{ID: 1, Prompt: ramp(37, 3), Sampling: wire.Sampling{MaxTokens: 20}})
		h.drain()
		if got, want := h.tokens[1], toyRun(ramp(37, 3), 20); !slices.Equal(got, want) {
			t.Errorf("chunk %d: got %v, want %v", chunk, got, want)
		}
		if r := h.final[1]; r.Finish != wire.FinishLength || r.Stats.PromptComputed != 37 || h.first[1].PromptTokens != 37 {
			t.Errorf("chunk %d: final %+v, stats %+v", chunk, r, r.Stats)
		}
	}
}

// A prompt of exactly the budget plus one leaves a last chunk of a single token.
func TestLastChunkOfOneToken(t *testing.T) {
	h := newHarness(t, SchedulerConfig{MaxRequests: 2, MaxTokens: 8, BlockSize: 4, Blocks: 20})
	h.submit(wire.SubmitRequest{ID: 1, Prompt: ramp(9, 3), Sampling: wire.Sampling{MaxTokens: 2}})
	h.drain()
	if got, want := h.tokens[1], toyRun(ramp(9, 3), 2); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestSixteenCopiesComputeThePromptOnce(t *testing.T) {
	h := newHarness(t, SchedulerConfig{MaxRequests: 16, MaxTokens: 64, BlockSize: 4, Blocks: 400})
	prompt := ramp(103, 1)
	for id := range uint64(16) {
		h.submit(wire.SubmitRequest{ID: id, Prompt: prompt, Sampling: wire.Sampling{MaxTokens: 10}})
	}
	h.drain()
	computed := 0
	for id := range uint64(16) {
		if !slices.Equal(h.tokens[id], toyRun(prompt, 10)) {
			t.Errorf("request %d: %v", id, h.tokens[id])
		}
		computed += h.final[id].Stats.PromptComputed
	}
	if want := 103 + 15*3; computed != want {
		t.Errorf("%d prompt tokens computed, want %d: the prompt once, and its last 3 for each copy", computed, want)
	}
}

func TestConflictStepsAsideOthersPass(t *testing.T) {
	h := newHarness(t, SchedulerConfig{MaxRequests: 8, MaxTokens: 16, BlockSize: 4, Blocks: 100})
	shared := ramp(32, 1)
	h.submit(wire.SubmitRequest{ID: 1, Prompt: shared, Sampling: wire.Sampling{MaxTokens: 1}})
	h.submit(wire.SubmitRequest{ID: 2, Prompt: shared, Sampling: wire.Sampling{MaxTokens: 1}})
	h.submit(wire.SubmitRequest{ID: 3, Prompt: ramp(5, 500), Sampling: wire.Sampling{MaxTokens: 1}})
	h.step()
	h.step()
	h.step()
	if _, done := h.final[3]; !done {
		t.Error("request 3 shares nothing and should have passed request 2")
	}
	h.drain()
	if got := h.first[2].CachedTokens; got != 28 {
		t.Errorf("request 2 reused %d tokens, want 28: all blocks but the last, which gives the logits", got)
	}
}

func TestHeadOfLineWaitsForRoom(t *testing.T) {
	h := newHarness(t, SchedulerConfig{MaxRequests: 8, MaxTokens: 64, BlockSize: 4, Blocks: 10})
	h.submit(wire.SubmitRequest{ID: 1, Prompt: ramp(20, 1), Sampling: wire.Sampling{MaxTokens: 13}})  // 8 blocks
	h.submit(wire.SubmitRequest{ID: 2, Prompt: ramp(20, 50), Sampling: wire.Sampling{MaxTokens: 13}}) // 8 blocks
	h.submit(wire.SubmitRequest{ID: 3, Prompt: ramp(4, 90), Sampling: wire.Sampling{MaxTokens: 1}})   // 1 block
	h.step()
	if waiting, _, running := h.Loads(); waiting != 2 || running != 1 {
		t.Errorf("%d waiting, %d running; want 2 and 1: the head does not fit and the small one stays behind it", waiting, running)
	}
	h.drain()
	for id, prompt := range map[uint64][]int32{1: ramp(20, 1), 2: ramp(20, 50)} {
		if !slices.Equal(h.tokens[id], toyRun(prompt, 13)) {
			t.Errorf("request %d: %v", id, h.tokens[id])
		}
	}
}

func TestPromptLogprobsComputeEveryPosition(t *testing.T) {
	h := newHarness(t, SchedulerConfig{MaxRequests: 2, MaxTokens: 7, BlockSize: 4, Blocks: 100})
	prompt := ramp(30, 1)
	h.submit(wire.SubmitRequest{ID: 1, Prompt: prompt, Sampling: wire.Sampling{MaxTokens: 1}})
	h.drain()
	h.submit(wire.SubmitRequest{ID: 2, Prompt: prompt, Sampling: wire.Sampling{MaxTokens: 3, PromptLogprobs: true}})
	h.drain()
	r := h.first[2]
	if r.CachedTokens != 0 || len(r.PromptLogprobs) != 29 {
		t.Fatalf("%d cached, %d prompt logprobs; want 0 and 29", r.CachedTokens, len(r.PromptLogprobs))
	}
	for i, lp := range r.PromptLogprobs {
		if want := -float32(prompt[i+1]) - float32(toyNext(prompt[:i+1]))/1e4; lp != want {
			t.Fatalf("prompt logprob %d is %v, want %v", i, lp, want)
		}
	}
}

func TestStops(t *testing.T) {
	prompt := ramp(6, 2)
	run := toyRun(prompt, 8)
	for _, tc := range []struct {
		name   string
		p      wire.Sampling
		eos    []int32
		want   int
		finish string
	}{
		{"eos", wire.Sampling{MaxTokens: 8}, []int32{run[2]}, 3, wire.FinishStop},
		{"ignored eos", wire.Sampling{MaxTokens: 8, IgnoreEOS: true}, []int32{run[2]}, 8, wire.FinishLength},
		{"stop id", wire.Sampling{MaxTokens: 8, StopTokenIDs: []int32{run[4]}}, nil, 5, wire.FinishStop},
		{"stop id on the last token", wire.Sampling{MaxTokens: 5, StopTokenIDs: []int32{run[4]}}, nil, 5, wire.FinishStop},
		{"one token", wire.Sampling{MaxTokens: 1}, nil, 1, wire.FinishLength},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newHarness(t, SchedulerConfig{MaxRequests: 2, MaxTokens: 64, BlockSize: 4, Blocks: 100, EOS: tc.eos})
			h.submit(wire.SubmitRequest{ID: 1, Prompt: prompt, Sampling: tc.p})
			h.drain()
			r := h.final[1]
			if !slices.Equal(h.tokens[1], run[:tc.want]) || r.Finish != tc.finish {
				t.Errorf("got %v (%s), want %v (%s)", h.tokens[1], r.Finish, run[:tc.want], tc.finish)
			}
			if tc.finish == wire.FinishStop && r.StopToken != run[tc.want-1] {
				t.Errorf("stopped by %d, want %d", r.StopToken, run[tc.want-1])
			}
		})
	}
}

func TestResumeContinues(t *testing.T) {
	prompt := ramp(11, 2)
	run := toyRun(prompt, 12)
	h := newHarness(t, SchedulerConfig{MaxRequests: 2, MaxTokens: 5, BlockSize: 4, Blocks: 100})
	h.tokens[1] = slices.Clone(run[:5])
	h.submit(wire.SubmitRequest{ID: 1, Prompt: prompt, Resume: run[:5], Sampling: wire.Sampling{MaxTokens: 12}})
	h.drain()
	if !slices.Equal(h.tokens[1], run) {
		t.Errorf("got %v, want %v", h.tokens[1], run)
	}
}

func TestRefusals(t *testing.T) {
	h := newHarness(t, SchedulerConfig{MaxRequests: 2, MaxTokens: 64, BlockSize: 4, Blocks: 10, MaxSeqLen: 100})
	for _, tc := range []struct {
		name, field string
		sub         wire.SubmitRequest
	}{
		{"empty", "prompt", wire.SubmitRequest{}},
		{"outside the vocabulary", "prompt", wire.SubmitRequest{Prompt: []int32{1, toyVocabulary}}},
		{"negative id", "prompt", wire.SubmitRequest{Prompt: []int32{-1}}},
		{"too long", "prompt", wire.SubmitRequest{Prompt: ramp(100, 0)}},
		{"never fits", "max_tokens", wire.SubmitRequest{Prompt: ramp(30, 0), Sampling: wire.Sampling{MaxTokens: 20}}},
		{"bad stop id", "stop_token_ids", wire.SubmitRequest{Prompt: ramp(3, 0), Sampling: wire.Sampling{StopTokenIDs: []int32{5000}}}},
		{"at least more than at most", "min_tokens", wire.SubmitRequest{Prompt: ramp(3, 0), Sampling: wire.Sampling{MaxTokens: 4, MinTokens: 5}}},
		{"at least more than there is room", "min_tokens", wire.SubmitRequest{Prompt: ramp(3, 0), Sampling: wire.Sampling{MinTokens: 1 << 20}}},
		{"negative budget", "max_tokens", wire.SubmitRequest{Prompt: ramp(3, 0), Sampling: wire.Sampling{MaxTokens: -1}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := h.Submit(h.now, &tc.sub)
			if e == nil || e.Field != tc.field || e.Code != wire.CodeInvalid || e.Retryable {
				t.Errorf("got %+v, want a refusal of %s", e, tc.field)
			}
		})
	}
	if !h.Idle() {
		t.Error("a refused request left something behind")
	}
}

// Random requests over shared prefixes, with aborts in the middle of passes, must give what each request
// alone would, in pools so small that they wait and evict.
func TestRandomLoads(t *testing.T) {
	for seed := range uint64(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			size := []int{1, 4, 16}[rng.IntN(3)]
			c := SchedulerConfig{MaxRequests: 1 + rng.IntN(6), BlockSize: size, Blocks: 90/size + 2}
			c.MaxTokens = c.MaxRequests + rng.IntN(30)
			h := newHarness(t, c)
			type want struct{ prompt, tokens []int32 }
			wants := map[uint64]want{}
			for id := uint64(1); id <= 40 || !h.Idle(); {
				if id <= 40 && rng.IntN(3) == 0 {
					prompt := slices.Concat(ramp(rng.IntN(3)*8, 1), ramp(1+rng.IntN(20), rng.IntN(4)))
					n := 1 + rng.IntN(20)
					p := wire.Sampling{MaxTokens: n, PromptLogprobs: rng.IntN(8) == 0}
					h.submit(wire.SubmitRequest{ID: id, Prompt: prompt, Sampling: p})
					wants[id] = want{prompt, toyRun(prompt, n)}
					id++
				}
				plan, out := h.Plan(h.now)
				h.collect(out)
				if rng.IntN(10) == 0 {
					out, _ = h.Abort(1 + uint64(rng.IntN(40)))
					h.collect(out)
				}
				if plan != nil {
					h.collect(h.Apply(h.now, plan, h.model.forward(plan)))
				}
				if err := h.pool.Check(); err != nil {
					t.Fatal(err)
				}
			}
			h.drain()
			for id, w := range wants {
				_, ended := h.final[id]
				if ended == h.gone[id] {
					t.Errorf("request %d: ended %v, aborted %v; want exactly one", id, ended, h.gone[id])
				}
				if got := h.tokens[id]; ended && !slices.Equal(got, w.tokens) || !slices.Equal(got, w.tokens[:len(got)]) {
					t.Errorf("request %d: got %v, want %v", id, got, w.tokens)
				}
			}
		})
	}
}

// Temperatures whose inverse would overflow are greedy.
func TestTinyTemperaturesAreGreedy(t *testing.T) {
	h := newHarness(t, SchedulerConfig{MaxRequests: 2, MaxTokens: 64, BlockSize: 4, Blocks: 10})
	for i, temperature := range []float32{0, 1e-45, 1e-39, 5e-39, 9e-6} {
		h.submit(wire.SubmitRequest{ID: uint64(i), Prompt: ramp(3, 0), Sampling: wire.Sampling{Temperature: temperature, MaxTokens: 1}})
		if got := h.requests[uint64(i)].sampling.Temperature; got != 0 {
			t.Errorf("temperature %v became %v, want 0", temperature, got)
		}
	}
	h.submit(wire.SubmitRequest{ID: 9, Prompt: ramp(3, 0), Sampling: wire.Sampling{Temperature: 2e-5, MaxTokens: 1}})
	if got := h.requests[9].sampling.Temperature; got != 2e-5 {
		t.Errorf("temperature 2e-5 became %v", got)
	}
}
