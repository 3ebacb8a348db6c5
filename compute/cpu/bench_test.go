package cpu

import (
	"fmt"
	"testing"

	"baton/compute"
	"baton/tensor"
)

// shapes of SmolLM2-135M and of a layer 4096 wide: [outer, inner].
var benchShapes = [][2]int{{576, 576}, {1536, 576}, {576, 1536}, {49152, 576}, {4096, 4096}}

func BenchmarkMatMul(b *testing.B) {
	for _, threads := range []int{1, 2} {
		for _, inputs := range []int{1, 4, 32, 512} {
			for _, d := range weightTypes {
				for _, s := range benchShapes {
					if inputs == 512 && s[0] == 49152 {
						continue
					}
					b.Run(fmt.Sprintf("threads=%d/inputs=%d/%v/%dx%d", threads, inputs, d, s[0], s[1]), func(b *testing.B) {
						benchMatMul(b, threads, inputs, d, s[0], s[1], 0)
					})
				}
			}
		}
	}
}

func benchMatMul(b *testing.B, threads, inputs int, d tensor.DType, outer, inner, segments int) {
	be := open(b, Options{Threads: threads})
	// Enough copies of the weight that it comes from memory, as in a pass over a whole model.
	size := outer * d.RowBytes(inner)
	copies := min(1+64<<20/size, 64)
	if inputs > 16 {
		copies = 2
	}
	var ws []compute.Weight
	for range copies {
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(i*7) & 0x3b
		}
		ws = append(ws, load(b, be, tensor.Tensor{DType: d, Shape: []int{outer, inner}, Data: data}))
	}
	x := put(b, be, random(1, inputs*inner), inner)
	x.Stride, x.Buf = inner, put(b, be, random(1, inputs*inner), inputs*inner).Buf
	dst := blank(b, be, inputs, outer, outer)
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		be.MatMul(dst, x, ws[n%copies], compute.Linear{Segments: segments})
		n++
	}
	seconds := b.Elapsed().Seconds()
	b.ReportMetric(float64(size)*float64(n)/seconds/1e9, "GB/s")
	b.ReportMetric(2*float64(inputs)*float64(outer)*float64(inner)*float64(n)/seconds/1e9, "GFLOP/s")
}

// BenchmarkAttention has the heads of SmolLM2-135M: 9 query heads over 3 KV heads of 64.
func BenchmarkAttention(b *testing.B) {
	for _, threads := range []int{1, 2} {
		for _, d := range []tensor.DType{tensor.F32, tensor.BF16} {
			for _, c := range []struct{ rows, position int }{{512, 0}, {512, 1536}, {1, 128}, {1, 2000}} {
				b.Run(fmt.Sprintf("threads=%d/%v/rows=%d/position=%d", threads, d, c.rows, c.position), func(b *testing.B) {
					be := open(b, Options{Threads: threads})
					kv := compute.KV{Blocks: 64, Layers: 1, Heads: 3, HeadDim: 64, BlockSize: 32, DType: d}
					buf, err := be.Alloc(kv.Blocks * kv.BlockBytes())
					if err != nil {
						b.Fatal(err)
					}
					kv.Buf = buf
					table := make([]int32, kv.Blocks)
					for i := range table {
						table[i] = int32(i)
					}
					q := put(b, be, random(1, c.rows*576), 576)
					dst := blank(b, be, c.rows, 576, 576)
					seqs := []compute.Sequence{{Rows: c.rows, Position: c.position, Blocks: table}}
					b.ReportAllocs()
					for b.Loop() {
						be.Attention(dst, q, kv, 0, seqs, 0.125)
					}
					tokens := float64(c.rows) * (float64(c.position) + float64(c.rows+1)/2)
					b.ReportMetric(tokens*4*64*9*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
				})
			}
		}
	}
}

func BenchmarkElementwise(b *testing.B) {
	for _, rows := range []int{1, 512} {
		be := open(b, Options{Threads: 1})
		x := put(b, be, random(1, rows*1536), 1536)
		h := put(b, be, random(1, rows*576), 576)
		wt, _ := quantised(b, tensor.F32, random(2, 576), 576)
		w := load(b, be, wt)
		positions := make([]int32, rows)
		dst := blank(b, be, rows, 1536, 1536)
		b.Run(fmt.Sprintf("silu/rows=%d", rows), func(b *testing.B) {
			for b.Loop() {
				be.SiLUMul(dst, x, x)
			}
		})
		b.Run(fmt.Sprintf("norm/rows=%d", rows), func(b *testing.B) {
			for b.Loop() {
				be.RMSNorm(h, h, w, 1e-5)
			}
		})
		for _, interleaved := range []bool{false, true} {
			table, err := be.Rope(make([]float64, 32), 1, interleaved, 16)
			if err != nil {
				b.Fatal(err)
			}
			b.Run(fmt.Sprintf("rotate/interleaved=%v/rows=%d", interleaved, rows), func(b *testing.B) {
				for b.Loop() {
					be.RotateHeads(h, 64, table, positions)
				}
			})
		}
	}
}

// BenchmarkDispatch is what sharing an operation among the workers costs.
func BenchmarkDispatch(b *testing.B) {
	for _, threads := range []int{1, 2} {
		be := open(b, Options{Threads: threads})
		var t task = nothing{}
		b.Run(fmt.Sprintf("threads=%d", threads), func(b *testing.B) {
			for b.Loop() {
				be.pool.run(&t, 8)
			}
		})
	}
}

type nothing struct{}

func (nothing) run(*scratch, int) {}

// A layer of 64 experts, 8 a token, against the same multiplications as one dense product.
func BenchmarkExperts(b *testing.B) {
	const count, topK, hidden, inner = 64, 8, 1024, 512
	for _, tokens := range []int{1, 16, 512} {
		for _, d := range []tensor.DType{tensor.BF16, tensor.Q8_0} {
			be := open(b, Options{Threads: 1})
			all := make([]byte, count*inner*d.RowBytes(hidden))
			for i := range all {
				all[i] = byte(i*7) & 0x3b
			}
			size := len(all) / count
			var ts []tensor.Tensor
			for e := range count {
				ts = append(ts, tensor.Tensor{DType: d, Shape: []int{inner, hidden}, Data: all[e*size : (e+1)*size]})
			}
			w, err := be.LoadExperts(0, ts)
			if err != nil {
				b.Fatal(err)
			}
			mem, err := be.Routing(tokens, count, topK)
			if err != nil {
				b.Fatal(err)
			}
			logits := put(b, be, random(1, tokens*count), count)
			x, rows, out := blank(b, be, tokens, hidden, hidden), blank(b, be, tokens*topK, hidden, hidden), blank(b, be, tokens*topK, inner, inner)
			measure := func(name string, f func()) {
				b.Run(fmt.Sprintf("tokens=%d/%v/%s", tokens, d, name), func(b *testing.B) {
					for b.Loop() {
						f()
					}
					b.ReportMetric(2*float64(tokens*topK*inner*hidden)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
				})
			}
			be.Route(mem, logits, compute.Router{})
			measure("route", func() { be.Route(mem, logits, compute.Router{}) })
			measure("dispatch", func() { be.Dispatch(rows, x, mem) })
			measure("product", func() { be.MatMulExperts(out, rows, w, mem, compute.Linear{}) })
			measure("combine", func() { be.Combine(x, rows, mem, 0) })
			dense := load(b, be, tensor.Tensor{DType: d, Shape: []int{topK * inner, hidden}, Data: all[:topK*size]})
			wide := blank(b, be, tokens, topK*inner, topK*inner)
			measure("dense", func() { be.MatMul(wide, x, dense, compute.Linear{}) })
		}
	}
}

// BenchmarkLatent has the heads of DeepSeek-V3 that a rank of eight holds: 16 of 128 and 64 numbers, values of 128,
// over a latent of 512.
func BenchmarkLatent(b *testing.B) {
	const heads, nope, rope, value, rank, blocks = 16, 128, 64, 128, 512, 64
	for _, d := range []tensor.DType{tensor.F32, tensor.BF16} {
		be := open(b, Options{Threads: 1})
		keys, _ := headMatrices(b, be, d, heads, nope, rank)
		values, _ := headMatrices(b, be, d, heads, value, rank)
		kv := compute.KV{Blocks: blocks, Layers: 1, Planes: 1, Heads: 1, HeadDim: rank + rope, BlockSize: 32, DType: d}
		buf, err := be.Alloc(kv.Blocks * kv.BlockBytes())
		if err != nil {
			b.Fatal(err)
		}
		kv.Buf = buf
		var table []int32
		for i := range int32(blocks) {
			table = append(table, i)
		}
		for _, c := range []struct{ rows, position int }{{1, 2000}, {8, 2000}, {256, 1024}} {
			q, attn := put(b, be, random(1, c.rows*heads*(nope+rope)), nope+rope), blank(b, be, c.rows*heads, value, value)
			folded, mixed := blank(b, be, c.rows, heads*(rank+rope), heads*(rank+rope)), blank(b, be, c.rows, heads*rank, heads*rank)
			seqs := []compute.Sequence{{Rows: c.rows, Position: c.position, Blocks: table}}
			tokens := float64(c.rows) * (float64(c.position) + float64(c.rows+1)/2)
			for _, op := range []struct {
				name  string
				run   func()
				flops float64
			}{
				{"keys", func() { be.MatMulHeads(folded.Heads(heads).Columns(0, rank), q.Columns(0, nope), keys, true) }, float64(2 * c.rows * heads * nope * rank)},
				{"attention", func() { be.Attention(mixed, folded, kv, 0, seqs, 0.1) }, tokens * 2 * heads * (2*rank + rope)},
				{"values", func() { be.MatMulHeads(attn, mixed.Heads(heads), values, false) }, float64(2 * c.rows * heads * value * rank)},
			} {
				b.Run(fmt.Sprintf("%v/rows=%d/position=%d/%s", d, c.rows, c.position, op.name), func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						op.run()
					}
					b.ReportMetric(op.flops*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
				})
			}
			if err := be.Read(nil, attn.Slice(0, 0)); err != nil {
				b.Fatal(err)
			}
		}
	}
}
