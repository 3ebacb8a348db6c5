package cpu

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"baton/compute"
	"baton/tensor"
)

// A worker that outlives its backend is a leak of this package's.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// counting counts how often each piece runs.
type counting struct{ runs []atomic.Int32 }

func (c *counting) run(_ *scratch, piece int) { c.runs[piece].Add(1) }

func TestPoolRunsEveryPieceOnce(t *testing.T) {
	for _, threads := range []int{1, 2, 3, 7} {
		for _, spin := range []int{0, 1, spinRounds} {
			workers := make([]*scratch, threads)
			for i := range workers {
				workers[i] = &scratch{}
			}
			p := newPool(workers, spin)
			r := rand.New(rand.NewPCG(1, uint64(threads)))
			for i := range 4000 {
				n := r.IntN(20)
				c := &counting{make([]atomic.Int32, n)}
				var box task = c
				p.run(&box, n)
				for j := range c.runs {
					if got := c.runs[j].Load(); got != 1 {
						t.Fatalf("%d threads, task %d: piece %d ran %d times when run returned", threads, i, j, got)
					}
				}
				if i%500 == 0 { // the next task finds all helpers asleep
					for int(p.parked.Load()) < threads-1 {
						runtime.Gosched()
					}
				}
			}
			p.close()
		}
	}
}

// holding keeps its helper at work until the caller has gone to sleep.
type holding struct {
	pool    *pool
	started atomic.Bool
}

func (h *holding) run(w *scratch, _ int) {
	if w == h.pool.own {
		for !h.started.Load() {
			runtime.Gosched()
		}
		return
	}
	h.started.Store(true)
	for !h.pool.waiting.Load() {
		runtime.Gosched()
	}
}

func TestPoolWakesSleepers(t *testing.T) {
	b := open(t, Options{Threads: 2})
	for range 20 {
		for b.pool.parked.Load() < 1 { // so that the helper too must be woken
			runtime.Gosched()
		}
		h := &holding{pool: b.pool}
		var box task = h
		b.pool.run(&box, 2)
		if b.pool.waiting.Load() {
			t.Fatal("the caller is still marked as asleep")
		}
	}
}

// TestNoAllocation runs what a pass consists of; after the first time none of it may use the Go heap.
func TestNoAllocation(t *testing.T) {
	for _, threads := range []int{1, 2} {
		b := open(t, Options{Threads: threads})
		const rows, width = 40, 1024
		x, y := put(t, b, random(1, rows*width), width), put(t, b, random(1, rows*width), width)
		wt, _ := quantised(t, tensor.Q8_0, random(3, width*width), width, width)
		vt, _ := quantised(t, tensor.F32, random(3, width), width)
		w, v := load(t, b, wt), load(t, b, vt)
		rope, err := b.Rope(make([]float64, 32), 1, true, 100)
		if err != nil {
			t.Fatal(err)
		}
		kv := compute.KV{Blocks: 4, Layers: 1, Heads: 4, HeadDim: 64, BlockSize: 32, DType: tensor.BF16}
		if kv.Buf, err = b.Alloc(kv.Blocks * kv.BlockBytes()); err != nil {
			t.Fatal(err)
		}
		index := make([]int32, rows)
		for i := range index {
			index[i] = int32(i)
		}
		seqs := []compute.Sequence{{Rows: rows - 1, Blocks: []int32{1, 2}}, {Row: rows - 1, Rows: 1, Position: 5, Blocks: []int32{0}}}
		host := make([]float32, rows*width)
		pass := func() {
			b.Embed(x, w, 0, index)
			b.RMSNorm(y, x, v, 1e-5)
			b.MatMul(x, y, w, compute.Linear{Bias: v, Residual: true, Segments: 8})
			b.MatMul(x.Slice(0, 1), y.Slice(0, 1), w, compute.Linear{Segments: 8})
			b.RotateHeads(x, 64, rope, index)
			b.StoreKV(kv, 0, x.Columns(0, 256), x.Columns(256, 512), index)
			b.Attention(y, x, kv, 0, seqs, 0.1)
			b.SiLUMul(y, y, x)
			b.GatherRows(x.Slice(0, 2), y, index[:2])
			if err := b.Read(host, x); err != nil {
				t.Fatal(err)
			}
		}
		if n := testing.AllocsPerRun(10, pass); n != 0 {
			t.Error(fmt.Sprint(threads, " threads: a pass allocates ", n, " times"))
		}
	}
}
