package model_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"baton/checkpoint"
	"baton/collective"
	"baton/compute"
	"baton/compute/cpu"
	"baton/internal/modelfile"
	"baton/layout"
	"baton/model"
)

// Two ranks with a thread each against one rank with two, in turns, on a model with 16 heads and 8 KV heads. What is
// reported is the median of the one's time over the other's: 1 is as fast, less is slower.
func BenchmarkTensorParallel(b *testing.B) {
	folder := filepath.Join(b.TempDir(), "model")
	random := modelfile.Random{
		Layers: 4, Hidden: 1024, Intermediate: 3072, Vocab: 8192, Heads: 16, KVHeads: 8, HeadDim: 64, Positions: 512, BF16: true, Seed: 1,
	}
	if err := random.Write(folder); err != nil {
		b.Fatal(err)
	}
	ck, err := checkpoint.Open(folder)
	if err != nil {
		b.Fatal(err)
	}
	defer ck.Close()
	one, two := newBenchRig(b, ck, layout.Shard{TP: 1, PP: 1, DP: 1, EP: 1, ExpertTP: 1}, 2), newBenchRig(b, ck, layout.Shard{TP: 2, PP: 1, DP: 1, EP: 1, ExpertTP: 2}, 1)
	for _, shape := range []struct{ sequences, rows, position int }{{1, 128, 0}, {8, 1, 63}, {1, 1, 63}} {
		name := fmt.Sprintf("decode=%d", shape.sequences)
		if shape.rows > 1 {
			name = fmt.Sprintf("prefill=%d", shape.rows)
		}
		b.Run(name, func(b *testing.B) {
			batch := benchBatch(shape.sequences, shape.rows, shape.position)
			var took [2][]time.Duration
			for b.Loop() {
				for i, rig := range []*benchRig{one, two} {
					began := time.Now()
					if err := rig.pass(batch); err != nil {
						b.Fatal(err)
					}
					took[i] = append(took[i], time.Since(began))
				}
			}
			for i := range took {
				slices.Sort(took[i])
			}
			middle := len(took[0]) / 2
			b.ReportMetric(float64(took[0][middle])/float64(took[1][middle]), "tp2/tp1")
			b.ReportMetric(float64(len(batch.Tokens))/took[0][middle].Seconds(), "tp1-tokens/s")
			b.ReportMetric(float64(len(batch.Tokens))/took[1][middle].Seconds(), "tp2-tokens/s")
		})
	}
}

// benchRig is a shard whose ranks have goroutines of their own.
type benchRig struct {
	ranks []*rank
	work  []chan model.Batch
	done  chan error
}

func newBenchRig(b *testing.B, ck *checkpoint.Checkpoint, s layout.Shard, threads int) *benchRig {
	b.Helper()
	g := &benchRig{done: make(chan error, s.Ranks())}
	worlds := []*collective.World{nil}
	if s.Ranks() > 1 {
		worlds = collective.Local(s.Ranks())
	}
	var opening sync.WaitGroup
	errs := make([]error, len(worlds))
	for i, w := range worlds {
		r := &rank{world: w}
		g.ranks = append(g.ranks, r)
		if r.backend, errs[i] = cpu.New(cpu.Options{Threads: threads}); errs[i] != nil {
			b.Fatal(errs[i])
		}
		b.Cleanup(func() { r.backend.Close() })
		opening.Go(func() { errs[i] = r.openBench(ck, s) })
	}
	opening.Wait()
	if err := errors.Join(errs...); err != nil {
		b.Fatal(err)
	}
	for _, r := range g.ranks {
		work := make(chan model.Batch)
		g.work = append(g.work, work)
		go func() {
			for batch := range work {
				g.done <- r.decoder.Forward(r.weights, r.kv, batch, func(int, []float32) {})
			}
		}()
		b.Cleanup(func() { close(work) })
	}
	return g
}

func (r *rank) openBench(ck *checkpoint.Checkpoint, s layout.Shard) error {
	if r.world != nil {
		return r.open(ck, s)
	}
	ranks := model.Solo(ck.Spec.Layers)
	var err error
	if r.weights, err = model.LoadWeights(r.backend, ck, ranks.Part); err != nil {
		return err
	}
	if r.decoder, err = model.NewDecoder(r.backend, ck.Spec, ranks, rigTokens, 512); err != nil {
		return err
	}
	r.kv = compute.KV{Blocks: rigBlocks, Layers: ck.Spec.Layers, BlockSize: rigBlock, DType: ck.Spec.WeightType}
	r.kv.Planes, r.kv.Heads, r.kv.HeadDim = ck.Spec.Cache()
	r.kv.Buf, err = r.backend.Alloc(r.kv.Blocks * r.kv.BlockBytes())
	return err
}

func (g *benchRig) pass(batch model.Batch) error {
	for _, w := range g.work {
		w <- batch
	}
	var errs []error
	for range g.work {
		errs = append(errs, <-g.done)
	}
	return errors.Join(errs...)
}

// benchBatch is rows of some sequences, each from a position on.
func benchBatch(sequences, rows, position int) model.Batch {
	var b model.Batch
	const blocks = rigBlocks / 8
	for s := range sequences {
		q := compute.Sequence{Row: len(b.Tokens), Rows: rows, Position: position}
		for i := range rigBlocks / sequences {
			q.Blocks = append(q.Blocks, int32(s*blocks+i))
		}
		for p := position; p < position+rows; p++ {
			b.Tokens = append(b.Tokens, int32(31*p+s))
			b.Positions = append(b.Positions, int32(p))
			b.Slots = append(b.Slots, q.Blocks[p/rigBlock]*rigBlock+int32(p%rigBlock))
		}
		b.Sequences = append(b.Sequences, q)
		b.Logits = append(b.Logits, int32(len(b.Tokens)-1))
	}
	return b
}
