package model_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"baton/checkpoint"
	"baton/collective"
	"baton/compute"
	"baton/compute/cpu"
	"baton/layout"
	"baton/model"
)

// rig is a shard: every rank with a backend, a cache and a decoder of its own.
type rig struct {
	shard layout.Shard
	ranks []*rank
}

type rank struct {
	backend *cpu.Backend
	world   *collective.World
	decoder *model.Decoder
	weights *model.WeightSet
	kv      compute.KV
}

const (
	rigBlock  = 16
	rigBlocks = 40
	rigTokens = 160
)

func newRig(t *testing.T, ck *checkpoint.Checkpoint, spec string) *rig {
	t.Helper()
	shards, err := layout.ParseShards(spec)
	if err != nil {
		t.Fatal(err)
	}
	s := shards[0]
	if err := ck.CheckShard(s); err != nil {
		t.Fatal(err)
	}
	g := &rig{shard: s, ranks: make([]*rank, s.Ranks())}
	for i, w := range collective.Local(s.Ranks()) {
		r := &rank{world: w}
		g.ranks[i] = r
		if r.backend, err = cpu.New(cpu.Options{Threads: 1}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { r.backend.Close() })
		t.Cleanup(func() { w.Close() })
	}
	errs := g.each(func(r *rank) error { return r.open(ck, s) })
	if errs != nil {
		t.Fatal(errs)
	}
	return g
}

func (r *rank) open(ck *checkpoint.Checkpoint, s layout.Shard) error {
	ranks, err := model.Join(r.world, s, ck.Spec.Layers)
	if err != nil {
		return err
	}
	if r.weights, err = model.LoadWeights(r.backend, ck, ranks.Part); err != nil {
		return err
	}
	if r.decoder, err = model.NewDecoder(r.backend, ck.Spec, ranks, rigTokens, 512); err != nil {
		return err
	}
	planes, heads, dim := ck.Spec.Cache()
	r.kv = compute.KV{
		Blocks: rigBlocks, Layers: ranks.Part.Layers, Planes: planes, Heads: max(heads/s.TP, 1), HeadDim: dim,
		BlockSize: rigBlock, DType: ck.Spec.WeightType,
	}
	r.kv.Buf, err = r.backend.Alloc(r.kv.Blocks * r.kv.BlockBytes())
	return err
}

// each runs f on all ranks at once.
func (g *rig) each(f func(r *rank) error) error {
	errs := make([]error, len(g.ranks))
	var wg sync.WaitGroup
	for i, r := range g.ranks {
		wg.Go(func() {
			if errs[i] = f(r); errs[i] != nil {
				r.world.Fail(errs[i])
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// pass computes one batch of every engine and returns the logits of each.
func (g *rig) pass(t *testing.T, batches []model.Batch) [][][]float32 {
	t.Helper()
	out := make([][][]float32, len(batches))
	for i := range batches {
		out[i] = make([][]float32, len(batches[i].Logits))
		if g.shard.Lockstep() {
			engines, _ := g.shard.ExpertEngines(g.shard.Rank(0, 0, i))
			for _, e := range engines {
				batches[i].Lockstep = append(batches[i].Lockstep, len(batches[e].Tokens))
			}
		}
	}
	var wg sync.WaitGroup
	errs := make([]error, len(g.ranks))
	for i, r := range g.ranks {
		at := g.shard.Place(i)
		b := batches[at.DP]
		if len(b.Tokens) == 0 && !g.shard.Lockstep() {
			continue
		}
		wg.Go(func() {
			errs[i] = r.decoder.Forward(r.weights, r.kv, b, func(row int, logits []float32) {
				if at.TP != 0 || at.PP != 0 {
					panic("logits at another rank than the first")
				}
				out[at.DP][row] = append([]float32(nil), logits...)
			})
			if errs[i] != nil {
				r.world.Fail(errs[i])
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return out
}

// newWork makes passes of sequences whose tokens do not depend on logits: prompts in chunks beside decode rows of
// others, each with its own scattered blocks. An engine but the first has nothing to do in every third pass.
func newWork(rng *rand.Rand, passes, engine, vocab int) (work []model.Batch) {
	const sequences = 4
	perm := rng.Perm(rigBlocks)
	var tables [sequences][]int32
	var lengths [sequences]int
	for i, b := range perm {
		tables[i%sequences] = append(tables[i%sequences], int32(b))
	}
	for p := range passes {
		var b model.Batch
		for s := range sequences {
			if engine > 0 && (p+engine)%3 == 0 {
				break
			}
			n := []int{0, 1, 1, 1 + rng.IntN(40)}[rng.IntN(4)]
			n = min(n, rigTokens-len(b.Tokens), len(tables[s])*rigBlock-lengths[s])
			if n == 0 {
				continue
			}
			b.Sequences = append(b.Sequences, compute.Sequence{Row: len(b.Tokens), Rows: n, Position: lengths[s], Blocks: tables[s]})
			for range n {
				p := lengths[s]
				b.Tokens = append(b.Tokens, int32(rng.IntN(vocab)))
				b.Positions = append(b.Positions, int32(p))
				b.Slots = append(b.Slots, tables[s][p/rigBlock]*rigBlock+int32(p%rigBlock))
				lengths[s]++
			}
			b.Logits = append(b.Logits, int32(len(b.Tokens)-1))
		}
		if len(b.Tokens) == 0 && engine == 0 {
			p := lengths[0]
			b = model.Batch{
				Tokens: []int32{7}, Positions: []int32{int32(p)}, Slots: []int32{tables[0][p/rigBlock]*rigBlock + int32(p%rigBlock)},
				Sequences: []compute.Sequence{{Rows: 1, Position: p, Blocks: tables[0]}}, Logits: []int32{0},
			}
			lengths[0]++
		}
		work = append(work, b)
	}
	return work
}

// Every layout gives the bits of one rank: engines with work of their own, now and then without any.
func TestLayoutsGiveTheSameBits(t *testing.T) {
	for family, specs := range map[string][]string{
		"llama":             {"tp=2", "pp=3", "tp=2,pp=2,stages=2/1"},
		"qwen2":             {"tp=2", "tp=4", "pp=2", "tp=4,pp=4"},
		"qwen3":             {"tp=2", "tp=4", "tp=8", "pp=2", "pp=3,stages=1/2/1", "tp=2,pp=2"},
		"deepseek_v3_plain": {"pp=2", "dp=2,ep=2"},
		"deepseek_v3": {
			"tp=2", "tp=4", "tp=8", "pp=3,stages=1/2/1", "tp=2,pp=2", "dp=2,ep=2", "tp=2,ep=2,expt_tp=1", "tp=2,dp=4,ep=4,expt_tp=2",
		},
		"qwen3_moe": {
			"tp=2", "tp=4", "tp=8", "pp=2", "pp=3,stages=1/2/1", "tp=2,pp=2", "tp=4,ep=1,expt_tp=2", "dp=2,ep=2",
			"tp=2,ep=2,expt_tp=1", "tp=2,dp=4,ep=4,expt_tp=2", "dp=2,ep=2,pp=2", "tp=2,dp=2,ep=2,expt_tp=1", "dp=4,ep=2,expt_tp=2",
		},
	} {
		ck, _ := loadGolden(t, family)
		one := newRig(t, ck, "tp=1")
		for _, spec := range specs {
			t.Run(family+"/"+spec, func(t *testing.T) {
				g := newRig(t, ck, spec)
				rng := rand.New(rand.NewPCG(1, 2))
				const passes = 8
				works := make([][]model.Batch, g.shard.DP)
				want := make([][][][]float32, g.shard.DP)
				for i := range works {
					works[i] = newWork(rng, passes, i, ck.Spec.VocabSize)
					want[i] = make([][][]float32, passes)
					for p, b := range works[i] {
						if len(b.Tokens) > 0 {
							want[i][p] = one.pass(t, []model.Batch{b})[0]
						}
					}
				}
				for p := range passes {
					batches := make([]model.Batch, g.shard.DP)
					for i := range batches {
						batches[i] = works[i][p]
					}
					got := g.pass(t, batches)
					for i := range got {
						for row := range got[i] {
							same(t, fmt.Sprintf("pass %d, engine %d, row %d", p, i, row), got[i][row], want[i][p][row])
						}
					}
				}
			})
		}
	}
}

func same(t *testing.T, what string, got, want []float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d logits, want %d", what, len(got), len(want))
	}
	for i := range got {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Fatalf("%s: logit %d is %v, want %v", what, i, got[i], want[i])
		}
	}
}

func TestShardsThatDoNotFit(t *testing.T) {
	ck, _ := loadGolden(t, "qwen3_moe")
	for spec, want := range map[string]string{
		"tp=3":                      "8 attention heads over 3 ranks are 2.667 a rank",
		"pp=5":                      "pp = 5; it must be in [1, 4]",
		"pp=2,stages=1/4":           "stages=1/4 is 5 layers in all; the model has 4",
		"tp=16":                     "8 attention heads over 16 ranks are 0.5 a rank",
		"dp=16,ep=16":               "8 experts over 16 ranks are 0.5 a rank",
		"tp=2,dp=8,ep=1,expt_tp=16": "an expert's 48 columns (f32) are summed in 8 parts, which 16 ranks cannot share",
	} {
		shards, err := layout.ParseShards(spec)
		if err != nil {
			t.Fatal(err)
		}
		var e *checkpoint.ShardError
		if err := ck.CheckShard(shards[0]); !errors.As(err, &e) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", spec, err, want)
		}
	}
}
