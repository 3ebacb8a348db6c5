package engine

import (
	"slices"
	"testing"
	"time"

	"baton/checkpoint"
	"baton/compute/cpu"
	"baton/kvcache"
	"baton/model"
	"baton/transfer"
	"baton/wire"
)

// generate runs sampled requests on a real model with so many KV blocks, and returns what each was told
// and how often one was evicted.
func generate(t *testing.T, ck *checkpoint.Checkpoint, blocks, continuation int) (told []wire.Result, evicted uint64) {
	t.Helper()
	c := Config{Checkpoint: ck, BlockSize: 16, MaxRequests: 6, MaxTokens: 24, Threads: 1, Continuation: continuation}
	c.KVBytes = 1
	c, err := c.withDefaults()
	if err == nil {
		t.Fatal("one byte of KV memory is accepted")
	}
	c.KVBytes = int64(blocks) * c.blockBytes()
	if c, err = c.withDefaults(); err != nil {
		t.Fatal(err)
	}
	backend, err := cpu.New(cpu.Options{Threads: c.Threads})
	if err != nil {
		t.Fatal(err)
	}
	memory, err := transfer.NewMemory(c.KVBytes, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	d, err := newDevice(c, model.Solo(ck.Spec.Layers), backend, memory.Data)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	pool, err := kvcache.New(kvcache.Config{Blocks: blocks, BlockSize: c.BlockSize})
	if err != nil {
		t.Fatal(err)
	}
	core := c.core()
	s := NewScheduler(SchedulerConfig{
		MaxRequests: c.MaxRequests, MaxTokens: c.MaxTokens, MaxSeqLen: c.MaxSeqLen, Vocabulary: core.Vocabulary,
		BlockSize: c.BlockSize, Blocks: blocks, Version: 1, Continuation: core.Continuation,
	}, pool)
	smp := sampler{mode: c.Logprobs}
	told = make([]wire.Result, c.MaxRequests)
	for id := range told {
		if e := s.Submit(time.Time{}, &wire.SubmitRequest{ID: uint64(id), Prompt: ramp(20+5*id, 3+id%2), Sampling: wire.Sampling{
			MaxTokens: 40, Temperature: 0.8, TopP: 0.95, Seed: uint64(id), Logprobs: true, TopLogprobs: 2, FrequencyPenalty: 0.2,
		}}); e != nil {
			t.Fatal(e.Message)
		}
	}
	for !s.Idle() {
		plan, _ := s.Plan(time.Time{})
		if plan == nil {
			t.Fatal("stuck")
		}
		outputs := make([]Output, len(plan.Rows))
		if err := d.run(plan.Batch, func(i int, logits []float32) { outputs[i] = smp.output(plan.Rows[i], logits) }); err != nil {
			t.Fatal(err)
		}
		out := s.Apply(time.Time{}, plan, outputs)
		for _, r := range slices.Concat(out.Partial, out.Final) {
			told[r.ID].Tokens = append(told[r.ID].Tokens, r.Tokens...)
			told[r.ID].Logprobs = append(told[r.ID].Logprobs, r.Logprobs...)
			told[r.ID].Top = append(told[r.ID].Top, r.Top...)
		}
	}
	_, evicted = s.Pressure()
	return told, evicted
}

// On a real model eviction changes no bit of what is told.
func TestEvictionIsExact(t *testing.T) {
	ck, err := checkpoint.Open("../testdata/goldens/qwen3")
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	want, evicted := generate(t, ck, 100, -1)
	if evicted != 0 {
		t.Fatalf("%d evictions although all is set aside", evicted)
	}
	got, evicted := generate(t, ck, 9, 1)
	if evicted == 0 {
		t.Fatal("no eviction")
	}
	for id, w := range want {
		g := got[id]
		same := func(a, b wire.TokenLogprobs) bool {
			return slices.Equal(a.IDs, b.IDs) && slices.Equal(a.Logprobs, b.Logprobs)
		}
		if !slices.Equal(g.Tokens, w.Tokens) || !slices.Equal(g.Logprobs, w.Logprobs) || !slices.EqualFunc(g.Top, w.Top, same) {
			t.Errorf("request %d was told\n%v %v, undisturbed\n%v %v", id, g.Tokens, g.Logprobs, w.Tokens, w.Logprobs)
		}
	}
}
