package cpu

import (
	"errors"
	"math"
	"testing"

	"baton/compute"
	"baton/tensor"
)

func TestRMSNorm(t *testing.T) {
	for _, n := range []int{1, 5, 8, 64, 100, 576} {
		const rows, eps = 40, 1e-5
		x := random(1, rows*n)
		wt, w := quantised(t, tensor.BF16, random(2, n), n)
		var want, scale []float64
		for r := range rows {
			sum := 0.0
			for _, v := range x[r*n : (r+1)*n] {
				sum += float64(v) * float64(v)
			}
			for i, v := range x[r*n : (r+1)*n] {
				y := float64(v) / math.Sqrt(sum/float64(n)+eps) * float64(w[i])
				want, scale = append(want, y), append(scale, math.Abs(y))
			}
		}
		var first []float32
		for _, o := range setups {
			b := open(t, o)
			src := put(t, b, x, n)
			dst := blank(t, b, rows, n, n+3)
			b.RMSNorm(dst, src, load(t, b, wt), eps)
			got := get(t, b, dst)
			if first == nil {
				first = got
				near(t, "norm", got, want, scale, 1e-6)
			}
			sameBits(t, o.String(), got, first)
			b.RMSNorm(src, src, load(t, b, wt), eps)
			sameBits(t, o.String()+" in place", get(t, b, src), first)
		}
	}
}

func TestRotateHeads(t *testing.T) {
	for _, pairs := range []int{1, 4, 8, 13, 32, 40} {
		for _, interleaved := range []bool{false, true} {
			const rows, heads, maxPositions = 5, 3, 90
			dim := 2*pairs + 6 // a part of each head stays as it is
			freq := make([]float64, pairs)
			for i := range freq {
				freq[i] = math.Pow(10000, -float64(i)/float64(pairs))
			}
			positions := []int32{0, 1, 89, 7, 7}
			x := random(4, rows*heads*dim)
			var want, scale []float64
			for i, v := range x {
				row, d := i/(heads*dim), i%dim
				first, second, pair := d, d+pairs, d
				if interleaved {
					first, second, pair = d&^1, d|1, d/2
				} else if d >= pairs {
					first, second, pair = d-pairs, d, d-pairs
				}
				y := float64(v)
				if d < 2*pairs {
					angle := float64(positions[row]) * freq[pair]
					a, b := float64(x[i-d+first]), float64(x[i-d+second])
					y = 1.5 * (a*math.Cos(angle) - b*math.Sin(angle))
					if d == second {
						y = 1.5 * (b*math.Cos(angle) + a*math.Sin(angle))
					}
				}
				want, scale = append(want, y), append(scale, 4)
			}
			var got0 []float32
			for _, o := range setups {
				b := open(t, o)
				table, err := b.Rope(freq, 1.5, interleaved, maxPositions)
				if err != nil {
					t.Fatal(err)
				}
				m := put(t, b, x, heads*dim)
				b.RotateHeads(m, dim, table, positions)
				got := get(t, b, m)
				if got0 == nil {
					got0 = got
					near(t, "rotate", got, want, scale, 1e-6)
				}
				sameBits(t, o.String(), got, got0)
				b.Free(table)
				b.RotateHeads(m, dim, table, positions)
				if err := b.Read(nil, compute.Mat{}); err == nil {
					t.Fatal("a freed table was used")
				}
			}
		}
	}
}

func TestSiLUMul(t *testing.T) {
	const rows, n = 17, 1003
	g, u := random(5, rows*n), random(6, rows*n)
	copy(g, []float32{0, float32(math.Copysign(0, -1)), 100, -100, 200, -200, float32(math.Inf(1)), 1e-30, -88, 88, 1e38, -1e38})
	for i := range g[12:] {
		g[12+i] *= 10
	}
	var want, scale []float64
	for i := range g {
		y := float64(g[i]) / (1 + math.Exp(-float64(g[i]))) * float64(u[i])
		want, scale = append(want, y), append(scale, math.Abs(y)+1e-30)
	}
	want[6] = math.Inf(1) * float64(u[6])
	var first []float32
	for _, o := range setups {
		b := open(t, o)
		gm, um := put(t, b, g, n), put(t, b, u, n)
		dst := blank(t, b, rows, n, n)
		b.SiLUMul(dst, gm, um)
		got := get(t, b, dst)
		if first == nil {
			first = got
			if float64(got[6]) != want[6] {
				t.Fatalf("silu(Inf) is %v, want %v", got[6], want[6])
			}
			got = append([]float32{}, got...)
			got[6], want[6] = 0, 0
			near(t, "silu", got, want, scale, 6e-7)
		}
		b.SiLUMul(gm, gm, um)
		sameBits(t, o.String(), get(t, b, gm), first)
	}
}

func TestEmbedAndGather(t *testing.T) {
	for _, d := range weightTypes {
		for _, o := range setups {
			b := open(t, o)
			const vocab, n = 50, 352
			wt, w := quantised(t, d, random(7, vocab*n), vocab, n)
			ids := make([]int32, 200)
			var want []float32
			for i := range ids {
				ids[i] = int32(i * 7 % vocab)
				want = append(want, w[int(ids[i])*n:][:n]...)
			}
			m := blank(t, b, len(ids), n, n+5)
			b.Embed(m, load(t, b, wt), 0, ids)
			sameBits(t, d.String(), get(t, b, m), want)
			g := blank(t, b, 3, n, n)
			b.GatherRows(g, m, []int32{199, 0, 8})
			sameBits(t, "gather", get(t, b, g), append(append(append([]float32{}, want[199*n:]...), want[:n]...), want[8*n:9*n]...))
		}
	}
}

// TestMistakes checks that operands that do not fit give an error from the next Read, once, and that
// nothing after them is executed.
func TestMistakes(t *testing.T) {
	b := open(t, Options{Threads: 2})
	other := open(t, Options{Threads: 1})
	wt, _ := quantised(t, tensor.F32, random(1, 32*16), 16, 32)
	vt, _ := quantised(t, tensor.F32, random(1, 32), 32)
	w, v := load(t, b, wt), load(t, b, vt)
	x, y := put(t, b, random(1, 3*32), 32), put(t, b, random(1, 3*16), 16)
	table, err := b.Rope([]float64{1, 2}, 1, false, 10)
	if err != nil {
		t.Fatal(err)
	}
	pool, err := b.Alloc(1 << 16)
	if err != nil {
		t.Fatal(err)
	}
	freed := put(t, b, random(1, 96), 32)
	b.Free(freed.Buf)
	b.Free(freed.Buf)
	b.Free(nil)
	kv := compute.KV{Buf: pool, Blocks: 4, Layers: 1, Heads: 1, HeadDim: 32, BlockSize: 16, DType: tensor.F32}
	big := kv
	big.Blocks = 400
	huge := kv
	huge.Blocks, huge.Layers, huge.Heads, huge.HeadDim = 1<<30, 1<<30, 1<<30, 1<<30
	odd := kv
	odd.BlockSize = 8
	outside := x
	outside.Off = 20
	far := x
	far.Rows, far.Stride = 1<<40, 1<<40
	attend := func(s ...compute.Sequence) func() {
		return func() { b.Attention(x, x, kv, 0, s, 1) }
	}
	for name, f := range map[string]func(){
		"MatMul shapes":       func() { b.MatMul(x, y, w, compute.Linear{}) },
		"MatMul rows":         func() { b.MatMul(y.Slice(0, 2), x, w, compute.Linear{}) },
		"MatMul segments":     func() { b.MatMul(y, x, w, compute.Linear{Segments: 3}) },
		"MatMul bias":         func() { b.MatMul(y, x, w, compute.Linear{Bias: v}) },
		"MatMul bias matrix":  func() { b.MatMul(y, x, w, compute.Linear{Bias: w}) },
		"MatMul nil weight":   func() { b.MatMul(y, x, nil, compute.Linear{}) },
		"MatMul outside":      func() { b.MatMul(y, outside, w, compute.Linear{}) },
		"MatMul freed":        func() { b.MatMul(y, freed, w, compute.Linear{}) },
		"MatMul overflow":     func() { b.MatMul(y, far, w, compute.Linear{}) },
		"MatMul no buffer":    func() { b.MatMul(y, compute.Mat{Rows: 3, Cols: 32, Stride: 32}, w, compute.Linear{}) },
		"RMSNorm weight":      func() { b.RMSNorm(y, y, v, 1) },
		"RMSNorm shapes":      func() { b.RMSNorm(y, x, v, 1) },
		"RotateHeads table":   func() { b.RotateHeads(x, 32, pool, []int32{0, 1, 2}) },
		"RotateHeads dim":     func() { b.RotateHeads(x, 2, table, []int32{0, 1, 2}) },
		"RotateHeads rows":    func() { b.RotateHeads(x, 32, table, []int32{0, 1}) },
		"RotateHeads far":     func() { b.RotateHeads(x, 32, table, []int32{0, 1, 10}) },
		"Add shapes":          func() { b.Add(x, y, nil) },
		"Add bias":            func() { b.Add(x, x, w) },
		"Embed rows":          func() { b.Embed(x, w, 0, []int32{0}) },
		"Gather":              func() { b.GatherRows(x, x, []int32{0, 3, 1}) },
		"SiLUMul":             func() { b.SiLUMul(x, x, y) },
		"StoreKV slot":        func() { b.StoreKV(kv, 0, x, x, []int32{0, 64, 1}) },
		"StoreKV layer":       func() { b.StoreKV(kv, 1, x, x, []int32{0, 2, 1}) },
		"StoreKV heads":       func() { b.StoreKV(kv, 0, y, y, []int32{0, 2, 1}) },
		"StoreKV pool":        func() { b.StoreKV(big, 0, x, x, []int32{0, 2, 1}) },
		"StoreKV huge":        func() { b.StoreKV(huge, 0, x, x, []int32{0, 2, 1}) },
		"StoreKV block":       func() { b.StoreKV(odd, 0, x, x, []int32{0, 2, 1}) },
		"Attention rows":      attend(compute.Sequence{Row: 2, Rows: 2, Blocks: []int32{0}}),
		"Attention table":     attend(compute.Sequence{Rows: 3, Position: 14, Blocks: []int32{0}}),
		"Attention block":     attend(compute.Sequence{Rows: 3, Position: 14, Blocks: []int32{0, 4}}),
		"Attention position":  attend(compute.Sequence{Rows: 3, Position: -14, Blocks: []int32{0, 1}}),
		"Attention far":       attend(compute.Sequence{Rows: 3, Position: math.MaxInt, Blocks: []int32{0, 1}}),
		"Attention heads":     func() { b.Attention(y, y, kv, 0, nil, 1) },
		"other backend table": func() { b.RotateHeads(x, 32, compute.Mat{}.Buf, []int32{0, 1, 2}) },
	} {
		before := get(t, b, x)
		f()
		b.SiLUMul(x, x, x) // must not run
		var op *OpError
		if err := b.Read(make([]float32, 96), x); !errors.As(err, &op) || op.Op == "" {
			t.Errorf("%s: error is %v", name, err)
		}
		sameBits(t, name, get(t, b, x), before)
	}
	if err := b.Read(make([]float32, 5), x); err == nil {
		t.Error("a Read into a short slice gave no error")
	}
	_ = other
}

func TestLoadRefusals(t *testing.T) {
	b := open(t, Options{Threads: 1})
	for name, w := range map[string]tensor.Tensor{
		"type":     {DType: tensor.I32, Shape: []int{2}, Data: make([]byte, 8)},
		"no type":  {DType: 200, Shape: []int{2}, Data: make([]byte, 8)},
		"short":    {DType: tensor.F32, Shape: []int{2, 2}, Data: make([]byte, 12)},
		"long":     {DType: tensor.F32, Shape: []int{2, 2}, Data: make([]byte, 20)},
		"scalar":   {DType: tensor.F32, Data: make([]byte, 4)},
		"empty":    {DType: tensor.F32, Shape: []int{0, 4}},
		"negative": {DType: tensor.F32, Shape: []int{-1, -1}, Data: make([]byte, 4)},
		"huge":     {DType: tensor.F32, Shape: []int{1 << 31, 1 << 31, 1 << 31}, Data: make([]byte, 4)},
		"product":  {DType: tensor.F32, Shape: []int{1<<31 - 1, 1<<31 - 1, 4}, Data: make([]byte, 16)},
		"wraps":    {DType: tensor.F32, Shape: []int{1 << 16, 1 << 16, 1 << 16, 1 << 14}},
		"blocks":   {DType: tensor.Q8_0, Shape: []int{2, 16}, Data: make([]byte, 34)},
	} {
		var e *LoadError
		if _, err := b.Load(w); !errors.As(err, &e) {
			t.Errorf("%s: error is %v", name, err)
		}
	}
}

func TestClosed(t *testing.T) {
	b, err := New(Options{Threads: 2})
	if err != nil {
		t.Fatal(err)
	}
	x := put(t, b, random(1, 64), 32)
	for range 2 {
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
	}
	b.SiLUMul(x, x, x)
	if err := b.Read(make([]float32, 64), x); !errors.Is(err, ErrClosed) {
		t.Errorf("Read after Close: %v", err)
	}
	if _, err := b.Alloc(8); !errors.Is(err, ErrClosed) {
		t.Errorf("Alloc after Close: %v", err)
	}
	if _, err := New(Options{Threads: -1}); err == nil {
		t.Error("negative Threads accepted")
	}
}
