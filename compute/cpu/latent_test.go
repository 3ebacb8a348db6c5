package cpu

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"baton/compute"
	"baton/tensor"
)

// headMatrices are loaded as the matrices of heads; their values come with them.
func headMatrices(t testing.TB, b *Backend, d tensor.DType, heads, rows, cols int) (compute.Experts, [][]float32) {
	t.Helper()
	var ts []tensor.Tensor
	var values [][]float32
	for h := range heads {
		w, v := quantised(t, d, random(uint64(100+h), rows*cols), rows, cols)
		ts, values = append(ts, w), append(values, v)
	}
	w, err := b.LoadExperts(0, ts)
	if err != nil {
		t.Fatal(err)
	}
	return w, values
}

// headsCase is a product of so many tokens' heads, which lie in rows wider than they are.
type headsCase struct {
	tokens, heads, inner, outer int
	dtype                       tensor.DType
	transposed                  bool
}

func (c headsCase) load(t testing.TB, b *Backend) (compute.Experts, [][]float32) {
	if c.transposed {
		return headMatrices(t, b, c.dtype, c.heads, c.inner, c.outer)
	}
	return headMatrices(t, b, c.dtype, c.heads, c.outer, c.inner)
}

// run multiplies so many tokens at a time.
func (c headsCase) run(t testing.TB, b *Backend, together int) []float32 {
	w, _ := c.load(t, b)
	rows := c.tokens * c.heads
	src, dst := put(t, b, random(1, rows*(c.inner+3)), c.inner+3).Columns(2, 2+c.inner), blank(t, b, rows, c.outer+5, c.outer+5).Columns(5, 5+c.outer)
	for from := 0; from < c.tokens; from += together {
		to := min(from+together, c.tokens)
		b.MatMulHeads(dst.Slice(from*c.heads, to*c.heads), src.Slice(from*c.heads, to*c.heads), w, c.transposed)
	}
	return get(t, b, dst)
}

// reference is the product in float64.
func (c headsCase) reference(t testing.TB, b *Backend) (want, scale []float64) {
	_, w := c.load(t, b)
	x := random(1, c.tokens*c.heads*(c.inner+3))
	for row := range c.tokens * c.heads {
		for o := range c.outer {
			sum, size := 0.0, 0.0
			for k := range c.inner {
				at := o*c.inner + k
				if c.transposed {
					at = k*c.outer + o
				}
				p := float64(x[row*(c.inner+3)+2+k]) * float64(w[row%c.heads][at])
				sum, size = sum+p, size+math.Abs(p)
			}
			want, scale = append(want, sum), append(scale, size)
		}
	}
	return want, scale
}

func TestMatMulHeads(t *testing.T) {
	skipUnderRace(t)
	for _, c := range []headsCase{
		{tokens: 5, heads: 4, inner: 24, outer: 32},
		{tokens: 130, heads: 3, inner: 64, outer: 40}, // over a block of inputs
		{tokens: 1, heads: 2, inner: 96, outer: 64},
		{tokens: 7, heads: 1, inner: 33, outer: 10},
		{tokens: 3, heads: 5, inner: 1344, outer: 17}, // over a panel
		{tokens: 2, heads: 2, inner: 128, outer: 512},
	} {
		for _, c.dtype = range weightTypes {
			for _, c.transposed = range []bool{false, true} {
				if cols := map[bool]int{false: c.inner, true: c.outer}[c.transposed]; cols%c.dtype.BlockElements() != 0 {
					continue
				}
				name := fmt.Sprintf("%+v", c)
				b := open(t, Options{Threads: 2})
				first := c.run(t, b, c.tokens)
				want, scale := c.reference(t, b)
				near(t, name, first, want, scale, 1e-6)
				sameBits(t, name+", one by one", c.run(t, b, 1), first)
				for _, o := range setups[:3] {
					if o.Portable && c.tokens*c.heads*c.inner*c.outer > 200_000 { // slow
						continue
					}
					sameBits(t, fmt.Sprint(name, ", ", o), c.run(t, open(t, o), 51), first)
				}
			}
		}
	}
}

// Row by row, the product is MatMul's; transposed, it is the sum that docs/numerics.md states.
func TestMatMulHeadsOrder(t *testing.T) {
	for _, o := range setups {
		b := open(t, o)
		c := headsCase{tokens: 3, heads: 2, inner: 100, outer: 24, dtype: tensor.BF16}
		w, _ := c.load(t, b)
		x := put(t, b, random(1, c.tokens*c.heads*c.inner), c.inner)
		got, want := blank(t, b, x.Rows, c.outer, c.outer), blank(t, b, x.Rows, c.outer, c.outer)
		b.MatMulHeads(got, x, w, false)
		for row := range x.Rows {
			b.MatMul(want.Slice(row, row+1), x.Slice(row, row+1), w.(*experts).of[row%c.heads], compute.Linear{})
		}
		sameBits(t, "product", get(t, b, got), get(t, b, want))

		c.transposed = true
		w, values := c.load(t, b)
		b.MatMulHeads(got, x, w, true)
		var sums []float32
		in := random(1, c.tokens*c.heads*c.inner)
		for row := range x.Rows {
			for o := range c.outer {
				sum := float32(0)
				for k := range c.inner {
					sum = fma32(in[row*c.inner+k], values[row%c.heads][k*c.outer+o], sum)
				}
				sums = append(sums, sum)
			}
		}
		sameBits(t, "transposed", get(t, b, got), sums)
	}
}

// A latent cache gives the bits of one that holds each latent twice, as key and as value, whose results are cut
// to the value's length: whatever the heads, which may be split over ranks, chunks, blocks and threads.
func TestLatentAttention(t *testing.T) {
	for _, c := range []struct {
		attentionCase
		values int
	}{
		{attentionCase{heads: 1, group: 8, dim: 48, lengths: []int{37, 1, 70}}, 32},
		{attentionCase{heads: 1, group: 33, dim: 72, lengths: []int{20, 33}}, 64},
		{attentionCase{heads: 1, group: 17, dim: 30, lengths: []int{18}}, 20},
		{attentionCase{heads: 1, group: 1, dim: 16, lengths: []int{35}}, 16},
	} {
		for _, c.dtype = range []tensor.DType{tensor.F32, tensor.BF16} {
			name := fmt.Sprintf("%d heads of %d and %d, %v", c.group, c.dim, c.values, c.dtype)
			want := c.twice(t, open(t, setups[1]), c.values)
			for i, o := range setups {
				blockSize, chunk := []int{16, 32, 64}[i%3], []int{1000, 1, 5, 16}[i%4]
				if o.Portable {
					chunk = 1000 // slow
				}
				got := c.latent(t, open(t, o), c.values, blockSize, chunk, []int{c.group, 1 + c.group/2}[i%2])
				sameBits(t, fmt.Sprintf("%s, blocks of %d, chunks of %d, %v", name, blockSize, chunk, o), got, want)
			}
		}
	}
}

// sequence is the queries and the latents of the n tokens of sequence i.
func (c attentionCase) sequence(i, n int) (q, k []float32) {
	return random(uint64(2*i), n*c.group*c.dim), random(uint64(2*i+1), n*c.dim)
}

// twice is the result of a cache with two planes, cut to so many numbers a head.
func (c attentionCase) twice(t testing.TB, b *Backend, values int) (out []float32) {
	for i, n := range c.lengths {
		kv := compute.KV{Blocks: n/16 + 1, Layers: 1, Heads: 1, HeadDim: c.dim, BlockSize: 16, DType: c.dtype}
		var err error
		if kv.Buf, err = b.Alloc(kv.Blocks * kv.BlockBytes()); err != nil {
			t.Fatal(err)
		}
		var table, slots []int32
		for p := range n {
			slots = append(slots, int32(p))
		}
		for p := range kv.Blocks {
			table = append(table, int32(p))
		}
		q, k := c.sequence(i, n)
		b.StoreKV(kv, 0, put(t, b, k, c.dim), put(t, b, k, c.dim), slots)
		dst := blank(t, b, n, c.group*c.dim, c.group*c.dim)
		b.Attention(dst, put(t, b, q, c.group*c.dim), kv, 0, []compute.Sequence{{Rows: n, Blocks: table}}, 0.2)
		for head := range slices.Chunk(get(t, b, dst), c.dim) {
			out = append(out, head[:values]...)
		}
	}
	return out
}

// latent is the result of a cache with one plane, full of NaN besides. Queries of up to share heads are given at a
// time, as ranks would.
func (c attentionCase) latent(t *testing.T, b *Backend, values, blockSize, chunk, share int) (out []float32) {
	kv, tables := c.cache(t, b, blockSize)
	kv.Planes = 1
	const layer = 1
	for i, n := range c.lengths {
		q, k := c.sequence(i, n)
		queries, keys := put(t, b, q, c.group*c.dim), put(t, b, k, c.dim)
		dst := blank(t, b, n, c.group*values, c.group*values+1)
		for from := 0; from < n; from += chunk {
			to := min(from+chunk, n)
			var slots []int32
			for p := from; p < to; p++ {
				slots = append(slots, tables[i][p/blockSize]*int32(blockSize)+int32(p%blockSize))
			}
			b.StoreKV(kv, layer, keys.Slice(from, to), compute.Mat{}, slots)
			for head := 0; head < c.group; head += share {
				end := min(head+share, c.group)
				b.Attention(dst.Slice(from, to).Columns(head*values, end*values), queries.Slice(from, to).Columns(head*c.dim, end*c.dim),
					kv, layer, []compute.Sequence{{Rows: to - from, Position: from, Blocks: tables[i]}}, 0.2)
			}
		}
		out = append(out, get(t, b, dst)...)
	}
	return out
}

// One plane of a latent cache follows the other layer's, and nothing else is written.
func TestStoreLatent(t *testing.T) {
	for _, d := range []tensor.DType{tensor.F32, tensor.BF16} {
		b := open(t, Options{Threads: 1})
		kv := compute.KV{Blocks: 3, Layers: 2, Planes: 1, Heads: 1, HeadDim: 20, BlockSize: 16, DType: d}
		buf, err := b.Alloc(kv.Blocks * kv.BlockBytes())
		if err != nil {
			t.Fatal(err)
		}
		if want := 3 * 2 * 16 * 20 * d.BlockBytes(); buf.Bytes() != want {
			t.Fatalf("%d bytes, want %d", buf.Bytes(), want)
		}
		kv.Buf = buf
		k := random(5, 20)
		b.StoreKV(kv, 1, put(t, b, k, 20), compute.Mat{}, []int32{2*16 + 5})
		get(t, b, put(t, b, k, 20))
		data, want := buf.(*buffer).data, make([]byte, d.RowBytes(20))
		if err := tensor.Quantize(want, d, k); err != nil {
			t.Fatal(err)
		}
		at := d.RowBytes(((2*2+1)*16 + 5) * 20)
		if got := data[at : at+len(want)]; !slices.Equal(got, want) {
			t.Errorf("%v: the cache holds %x, want %x", d, got, want)
		}
		clear(data[at : at+len(want)])
		if i := slices.IndexFunc(data, func(x byte) bool { return x != 0 }); i >= 0 {
			t.Errorf("%v: byte %d was written", d, i)
		}
	}
}

// A position may have several rows, those of heads, of which parts rotate.
func TestRotateRowsOfHeads(t *testing.T) {
	const tokens, heads, still, turns = 5, 3, 6, 8
	b := open(t, Options{Threads: 2})
	rope, err := b.Rope([]float64{1, 0.1, 0.01, 0.001}, 1, true, 100)
	if err != nil {
		t.Fatal(err)
	}
	x, positions := random(1, tokens*heads*(still+turns)), []int32{7, 0, 99, 3, 7}
	m := blank(t, b, tokens, heads*(still+turns), heads*(still+turns))
	b.Copy(m, put(t, b, x, heads*(still+turns)))
	b.RotateHeads(m.Heads(heads).Columns(still, still+turns), turns, rope, positions)
	got := get(t, b, m)
	for i := range tokens {
		for h := range heads {
			at := (i*heads + h) * (still + turns)
			one := put(t, b, x[at+still:at+still+turns], turns)
			b.RotateHeads(one, turns, rope, positions[i:i+1])
			sameBits(t, fmt.Sprintf("token %d, head %d", i, h), got[at:at+still+turns], append(slices.Clone(x[at:at+still]), get(t, b, one)...))
		}
	}
}

func TestLatentMistakes(t *testing.T) {
	b := open(t, Options{Threads: 2})
	w, _ := headMatrices(t, b, tensor.F32, 2, 8, 16)
	in, out := put(t, b, random(1, 4*16), 16), blank(t, b, 4, 8, 8)
	kv := compute.KV{Blocks: 2, Layers: 1, Planes: 1, Heads: 1, HeadDim: 16, BlockSize: 16, DType: tensor.F32}
	var err error
	if kv.Buf, err = b.Alloc(kv.Blocks * kv.BlockBytes()); err != nil {
		t.Fatal(err)
	}
	planes := func(n int) compute.KV { kv := kv; kv.Planes = n; return kv }
	wide := put(t, b, random(2, 4*32), 32)
	seqs := []compute.Sequence{{Rows: 4, Blocks: []int32{0}}}
	rope, err := b.Rope([]float64{1}, 1, false, 10)
	if err != nil {
		t.Fatal(err)
	}
	router := func(r compute.Router) func() {
		return func() {
			mem, err := b.Routing(4, 16, 4)
			if err != nil {
				t.Fatal(err)
			}
			b.Route(mem, in, r)
		}
	}
	bias := load(t, b, tensor.Tensor{DType: tensor.F32, Shape: []int{8}, Data: make([]byte, 32)})
	for name, mistake := range map[string]func(){
		"nil heads":         func() { b.MatMulHeads(out, in, nil, false) },
		"freed":             func() { b.MatMulHeads(out, compute.Mat{Rows: 4, Cols: 16, Stride: 16}, w, false) },
		"turned":            func() { b.MatMulHeads(out, in, w, true) },
		"columns":           func() { b.MatMulHeads(out, in.Columns(0, 8), w, false) },
		"rows":              func() { b.MatMulHeads(out, in.Slice(0, 2), w, false) },
		"rows of no head":   func() { b.MatMulHeads(out.Slice(0, 3), in.Slice(0, 3), w, false) },
		"beyond its buffer": func() { b.MatMulHeads(out, compute.Mat{Buf: in.Buf, Rows: 4, Cols: 16, Stride: 100}, w, false) },
		"Copy shape":        func() { b.Copy(out, in) },
		"Copy of nothing":   func() { b.Copy(out, compute.Mat{Rows: 4, Cols: 8, Stride: 8}) },
		"three planes":      func() { b.StoreKV(planes(3), 0, in, in, make([]int32, 4)) },
		"negative planes":   func() { b.StoreKV(planes(-1), 0, in, in, make([]int32, 4)) },
		"two in one's room": func() { b.StoreKV(planes(2), 0, in, in, make([]int32, 4)) },
		"values as well":    func() { b.StoreKV(kv, 0, in, in, make([]int32, 4)) },
		"long values":       func() { b.Attention(wide, in, kv, 0, seqs, 1) },
		"odd values":        func() { b.Attention(wide.Columns(0, 9), wide, kv, 0, seqs, 1) },
		"fewer results":     func() { b.Attention(wide.Columns(0, 16).Slice(0, 3), wide, kv, 0, seqs, 1) },
		"uneven positions":  func() { b.RotateHeads(in, 16, rope, make([]int32, 3)) },
		"no positions":      func() { b.RotateHeads(in, 16, rope, nil) },
		"bias of others":    router(compute.Router{Sigmoid: true, Bias: bias}),
		"odd groups":        router(compute.Router{Groups: 3, TopGroups: 2}),
		"negative groups":   router(compute.Router{Groups: -2, TopGroups: 2}),
		"groups of one":     router(compute.Router{Groups: 16, TopGroups: 8}),
		"more groups":       router(compute.Router{Groups: 4, TopGroups: 5}),
		"few experts":       router(compute.Router{Groups: 8, TopGroups: 1}),
	} {
		mistake()
		if err := b.Read(nil, in.Slice(0, 0)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	b.MatMulHeads(out.Slice(0, 0), in.Slice(0, 0), w, false)
	b.Copy(out.Slice(0, 0), out.Slice(0, 0))
	if err := b.Read(nil, in.Slice(0, 0)); err != nil {
		t.Errorf("nothing to do: %v", err)
	}
}

func TestLatentAllocatesNothing(t *testing.T) {
	b := open(t, Options{Threads: 2})
	const tokens, heads, rank, rope, nope = 40, 20, 64, 16, 32
	w, _ := headMatrices(t, b, tensor.BF16, heads, nope, rank)
	kv := compute.KV{Blocks: 2, Layers: 1, Planes: 1, Heads: 1, HeadDim: rank + rope, BlockSize: 32, DType: tensor.BF16}
	var err error
	if kv.Buf, err = b.Alloc(kv.Blocks * kv.BlockBytes()); err != nil {
		t.Fatal(err)
	}
	width := func(n int) compute.Mat { return blank(t, b, tokens, heads*n, heads*n) }
	q, folded, mixed, key := width(nope+rope), width(rank+rope), width(rank), blank(t, b, tokens, rank+rope, rank+rope)
	slots := make([]int32, tokens)
	for i := range slots {
		slots[i] = int32(i)
	}
	seqs := []compute.Sequence{{Rows: tokens, Blocks: []int32{0, 1}}}
	if got := testing.AllocsPerRun(10, func() {
		b.StoreKV(kv, 0, key, compute.Mat{}, slots)
		b.MatMulHeads(folded.Heads(heads).Columns(0, rank), q.Heads(heads).Columns(0, nope), w, true)
		b.Copy(folded.Heads(heads).Columns(rank, rank+rope), q.Heads(heads).Columns(nope, nope+rope))
		b.Attention(mixed, folded, kv, 0, seqs, 1)
		b.MatMulHeads(q.Heads(heads).Columns(0, nope), mixed.Heads(heads), w, false)
	}); got != 0 {
		t.Errorf("%v allocations", got)
	}
	if err := b.Read(nil, q.Slice(0, 0)); err != nil {
		t.Fatal(err)
	}
}
