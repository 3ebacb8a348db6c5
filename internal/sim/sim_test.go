package sim

import (
	"flag"
	"strings"
	"testing"

	"baton/engine"
	"baton/kvcache"
	"baton/layout"
	"baton/wire"
)

var seeds = flag.Int("seeds", 300, "how many seeds TestSeeds runs")

func TestSeeds(t *testing.T) {
	n := uint64(*seeds)
	if testing.Short() {
		n = min(n, 60) // under the race detector
	}
	var total Counts
	for seed := uint64(1); seed <= n; seed++ {
		s := Generate(seed)
		counts, err := Run(s, Options{})
		if err != nil {
			small, why := Shrink(s, err, 200)
			t.Fatalf("seed %d fails %v\nmade smaller, it fails %v:\n%s", seed, err, why, small)
		}
		total.Add(counts)
	}
	if total.Finished < total.Requests/3 || total.Aborted == 0 || total.Quarantines == 0 || total.BrokenTransfers == 0 ||
		total.Flips == 0 || total.Corrupt == 0 || total.RankFailures == 0 || total.RankDelays == 0 {
		t.Errorf("the runs covered too little: %+v", total)
	}
}

// The same script plays the same way: otherwise no failure could be looked into.
func TestReplay(t *testing.T) {
	for seed := uint64(1); seed <= 20; seed++ {
		s := Generate(seed)
		var traces [2]strings.Builder
		for i := range traces {
			if _, err := Run(s, Options{Trace: &traces[i]}); err != nil {
				t.Fatal(err)
			}
		}
		// Addresses of pointers are all that may differ.
		if a, b := plain(traces[0].String()), plain(traces[1].String()); a != b {
			t.Fatalf("seed %d plays differently the second time", seed)
		}
	}
}

func plain(trace string) string {
	var b strings.Builder
	for part := range strings.SplitSeq(trace, "0x") {
		b.WriteString(strings.TrimLeft(part, "0123456789abcdef"))
	}
	return b.String()
}

func TestScriptText(t *testing.T) {
	for seed := range uint64(200) {
		s := Generate(seed)
		again, err := Parse(s.String())
		if err != nil {
			t.Fatal(err)
		}
		if again.String() != s.String() {
			t.Fatalf("read back as\n%s\ninstead of\n%s", again, s)
		}
	}
	for _, bad := range []string{
		"seed", "seed x", "fleet prefill=many", "fleet colour=red", "request at=noon", "fault kind", "tea at=5s",
		"fleet clients=1", "seed 1\n" + strings.Split(Generate(1).String(), "\n")[1] + "\nrequest client=7 own=1 max=1",
	} {
		if _, err := Parse(bad); err == nil {
			t.Errorf("%q was read without an error", bad)
		}
	}
	s := Generate(3)
	s.Faults = []Fault{{Kind: Freeze, Who: "coordinator"}}
	if _, err := Run(s, Options{}); err == nil {
		t.Error("a fault that nobody can have was played")
	}
}

// FuzzParse: no text makes the reader or the run panic.
func FuzzParse(f *testing.F) {
	for seed := range uint64(3) {
		f.Add(Generate(seed).String())
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		if err != nil {
			return
		}
		again, err := Parse(s.String())
		if err != nil || again.String() != s.String() {
			t.Errorf("%q is read back as %q (%v)", s, again, err)
		}
	})
}

// The model must see every way in which KV can be wrong.
func TestModelSeesWrongKV(t *testing.T) {
	const size, blocks = 4, 8
	prompt := Request{Shared: 10, Own: 3}.prompt()
	var want reading
	for _, id := range prompt {
		want.follow(1, id)
	}
	// run computes the prompt, lets spoil change what lies in memory, then computes one more token.
	run := func(tp, pp int, spoil func(m *memory)) (first, second int32) {
		held, err := holdings(geometry(size), tp, pp)
		if err != nil {
			t.Fatal(err)
		}
		m := newMemory(size, blocks, held)
		pool, _ := kvcache.New(kvcache.Config{Blocks: blocks, BlockSize: size})
		sched := engine.NewScheduler(engine.SchedulerConfig{
			MaxRequests: 1, MaxTokens: 64, MaxSeqLen: maxSeqLen, Vocabulary: vocabulary, BlockSize: size, Blocks: blocks,
		}, pool)
		submit(t, sched, prompt)
		plan, _ := sched.Plan(epoch)
		outputs := m.forward(1, plan)
		first = outputs[0].Token
		sched.Apply(epoch, plan, outputs)
		spoil(m)
		plan, _ = sched.Plan(epoch)
		return first, m.forward(1, plan)[0].Token
	}
	next := want
	next.follow(1, want.next(1))
	for _, ranks := range [][2]int{{1, 1}, {2, 1}, {4, 1}, {8, 1}, {1, 2}, {2, 2}} {
		first, second := run(ranks[0], ranks[1], func(*memory) {})
		if first != want.next(1) || second != next.next(1) {
			t.Errorf("%v ranks: tokens %d, %d; an undisturbed run has %d, %d", ranks, first, second, want.next(1), next.next(1))
		}
	}
	for _, tt := range []struct {
		name  string
		tp    int
		spoil func(m *memory)
	}{
		{"a poisoned block", 2, func(m *memory) { m.scribble(1) }},
		{"one head of one token", 2, func(m *memory) { m.ranks[1][5]++ }},
		{"one of two replicas", 8, func(m *memory) { m.ranks[7][5]++ }},
		{"blocks in wrong order", 2, func(m *memory) {
			n := m.words[0]
			for i := range n {
				p := m.ranks[0]
				p[i], p[n+i] = p[n+i], p[i]
			}
		}},
		{"another version", 2, func(m *memory) { m.store(2, want.write(2, prompt[2])) }},
	} {
		if _, second := run(tt.tp, 1, tt.spoil); second == next.next(1) {
			t.Errorf("%s: the same token all the same", tt.name)
		}
	}
}

// Every copy that a template makes from one layout to another leaves the model's KV readable.
func TestModelReadsResharded(t *testing.T) {
	const size, blocks = 4, 6
	g := geometry(size)
	for _, from := range [][2]int{{1, 1}, {2, 1}, {4, 1}, {8, 1}, {1, 2}, {2, 2}} {
		for _, to := range [][2]int{{1, 1}, {2, 1}, {4, 1}, {8, 1}, {1, 2}, {2, 2}} {
			src, _ := holdings(g, from[0], from[1])
			dst, _ := holdings(g, to[0], to[1])
			template, err := layout.Compile(g, src, dst)
			if err != nil {
				t.Fatal(err)
			}
			a, b := newMemory(size, blocks, src), newMemory(size, blocks, dst)
			for slot := range size {
				a.store(2*size+slot, uint64(slot))
			}
			for i := range template.Legs {
				leg := &template.Legs[i]
				for _, c := range leg.Apply(nil, []int32{2}, []int32{4}) {
					copy(b.ranks[leg.Dst][c.Dst/tagBytes:], a.ranks[leg.Src][c.Src/tagBytes:][:c.Len/tagBytes])
				}
			}
			for slot := range size {
				var have, want [layers * heads]uint64
				a.load(2*size+slot, &want)
				b.load(4*size+slot, &have)
				if have != want {
					t.Fatalf("%v to %v: slot %d reads %v, want %v", from, to, slot, have, want)
				}
			}
		}
	}
}

func BenchmarkSeed(b *testing.B) {
	seed := uint64(0)
	for b.Loop() {
		seed++
		if _, err := Run(Generate(seed), Options{}); err != nil {
			b.Fatal(err)
		}
	}
}

func submit(t *testing.T, s *engine.Scheduler, prompt []int32) {
	t.Helper()
	if refused := s.Submit(epoch, &wire.SubmitRequest{ID: 1, Prompt: prompt, Sampling: wire.Sampling{MaxTokens: 4}}); refused != nil {
		t.Fatal(refused.Message)
	}
}
