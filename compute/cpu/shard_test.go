package cpu

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"baton/compute"
	"baton/tensor"
)

// What tensor-parallel ranks make of their slices of a weight is, bit for bit, what one rank makes of all of it:
// columns of a product side by side, partial sums of rows in the binary tree.
func TestShardedProducts(t *testing.T) {
	const rows, cols, segments = 24, 512, 8
	b := open(t, Options{Threads: 2})
	for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16, tensor.Q8_0, tensor.Q4_1} {
		w, _ := quantised(t, dtype, random(1, rows*cols), rows, cols)
		bias, _ := quantised(t, tensor.F32, random(2, rows), rows)
		for _, n := range []int{1, 5, 70} {
			x, before := random(3, n*cols), random(4, n*rows)
			src := put(t, b, x, cols)
			whole, plain := put(t, b, before, rows), put(t, b, before, rows)
			b.MatMul(whole, src, load(t, b, w), compute.Linear{Bias: load(t, b, bias), Residual: true, Segments: segments})
			b.MatMul(plain, src, load(t, b, w), compute.Linear{Bias: load(t, b, bias)})
			for _, tp := range []int{2, 4, 8} {
				name := fmt.Sprintf("%v, %d rows, tp=%d", dtype, n, tp)
				var parts [][]float32
				columns := put(t, b, before, rows)
				for rank := range tp {
					from, to := tensor.Slice(cols, tp, rank)
					part := put(t, b, random(5, n*rows), rows)
					b.MatMul(part, src.Columns(from, to), load(t, b, w.SliceColumns(from, to)), compute.Linear{Segments: segments / tp})
					parts = append(parts, get(t, b, part))
					from, to = tensor.Slice(rows, tp, rank)
					b.MatMul(columns.Columns(from, to), src, load(t, b, w.SliceRows(from, to)), compute.Linear{Bias: load(t, b, bias.SliceRows(from, to))})
				}
				for step := 1; step < tp; step *= 2 {
					for i := 0; i < tp; i += 2 * step {
						for j, v := range parts[i+step] {
							parts[i][j] += v
						}
					}
				}
				out := put(t, b, before, rows)
				b.Add(out, put(t, b, parts[0], rows), load(t, b, bias))
				sameBits(t, name+": rows", get(t, b, out), get(t, b, whole))
				sameBits(t, name+": columns", get(t, b, columns), get(t, b, plain))
			}
		}
	}
}

// A rank that lacks an id, or an expert, contributes the neutral element.
func TestAbsentParts(t *testing.T) {
	b := open(t, Options{Threads: 2})
	minus := math.Float32frombits(1 << 31)
	table, values := quantised(t, tensor.F32, random(1, 6*8), 6, 8)
	x := put(t, b, random(2, 4*8), 8)
	b.Embed(x, load(t, b, table.SliceRows(2, 5)), 2, []int32{1, 2, 4, 5})
	none := slices.Repeat([]float32{minus}, 8)
	sameBits(t, "embedding", get(t, b, x), slices.Concat(none, values[2*8:3*8], values[4*8:5*8], none))

	const experts, hidden, width = 6, 16, 8
	var ts []tensor.Tensor
	for i := range experts {
		m, _ := quantised(t, tensor.F32, random(uint64(10+i), width*hidden), width, hidden)
		ts = append(ts, m)
	}
	const tokens, topK = 5, 2
	mem, err := b.Routing(tokens, experts, topK)
	if err != nil {
		t.Fatal(err)
	}
	b.Route(mem, put(t, b, random(3, tokens*experts), experts), compute.Router{})
	rows := put(t, b, random(4, tokens*topK*hidden), hidden)
	sum := make([]float32, tokens*topK*width)
	for i := range sum {
		sum[i] = minus
	}
	for _, part := range [][2]int{{0, 1}, {1, 4}, {4, 6}} {
		w, err := b.LoadExperts(part[0], ts[part[0]:part[1]])
		if err != nil {
			t.Fatal(err)
		}
		out := put(t, b, random(5, tokens*topK*width), width)
		b.MatMulExperts(out, rows, w, mem, compute.Linear{})
		for i, v := range get(t, b, out) {
			sum[i] += v
		}
	}
	all, err := b.LoadExperts(0, ts)
	if err != nil {
		t.Fatal(err)
	}
	out := put(t, b, random(6, tokens*topK*width), width)
	b.MatMulExperts(out, rows, all, mem, compute.Linear{})
	sameBits(t, "experts", sum, get(t, b, out))

	whole, part := put(t, b, random(7, tokens*width), width), put(t, b, random(7, tokens*width), width)
	b.Combine(whole, out, mem, 0)
	b.Combine(part.Slice(2, 4), out, mem, 2)
	sameBits(t, "tokens in the middle", get(t, b, part)[2*width:4*width], get(t, b, whole)[2*width:4*width])
}
