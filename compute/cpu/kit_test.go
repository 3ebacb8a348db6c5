package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"baton/compute"
	"baton/tensor"
)

// setups are the ways to run that must agree to the last bit.
var setups = []Options{
	{Threads: 1, Portable: true},
	{Threads: 1},
	{Threads: 2},
	{Threads: 3, Portable: true},
	{Threads: 3},
}

func (o Options) String() string { return fmt.Sprintf("threads=%d,portable=%v", o.Threads, o.Portable) }

// raceDetector says that memory accesses cost a hundred times more. Tests that look at numbers only, not
// at who touches what, are left to runs without it.
var raceDetector bool

func skipUnderRace(t *testing.T) {
	if raceDetector {
		t.Skip("numbers only")
	}
}

func open(t testing.TB, o Options) *Backend {
	t.Helper()
	b, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func random(seed uint64, n int) []float32 {
	r := rand.New(rand.NewPCG(seed, 1))
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64())
	}
	return v
}

// put uploads rows of cols values, with two columns of padding that hold NaN.
func put(t testing.TB, b *Backend, v []float32, cols int) compute.Mat {
	t.Helper()
	rows, stride := len(v)/cols, cols+2
	m := blank(t, b, rows, cols, stride)
	data := m.Buf.(*buffer).data
	for i := range rows * stride {
		x := float32(math.NaN())
		if i%stride < cols {
			x = v[i/stride*cols+i%stride]
		}
		*(*float32)(unsafe.Pointer(&data[4*i])) = x
	}
	return m
}

func blank(t testing.TB, b *Backend, rows, cols, stride int) compute.Mat {
	t.Helper()
	buf, err := b.Alloc(4 * rows * stride)
	if err != nil {
		t.Fatal(err)
	}
	return compute.Mat{Buf: buf, Rows: rows, Cols: cols, Stride: stride}
}

func get(t testing.TB, b *Backend, m compute.Mat) []float32 {
	t.Helper()
	out := make([]float32, m.Rows*m.Cols)
	if err := b.Read(out, m); err != nil {
		t.Fatal(err)
	}
	return out
}

// quantised returns a tensor of the type nearest to the values, and what it holds.
func quantised(t testing.TB, d tensor.DType, v []float32, shape ...int) (tensor.Tensor, []float32) {
	t.Helper()
	data := make([]byte, d.RowBytes(len(v)))
	if err := tensor.Quantize(data, d, v); err != nil {
		t.Fatal(err)
	}
	w := make([]float32, len(v))
	if err := tensor.Dequantize(w, d, data); err != nil {
		t.Fatal(err)
	}
	return tensor.Tensor{Name: "w", DType: d, Shape: shape, Data: data}, w
}

func load(t testing.TB, b *Backend, w tensor.Tensor) compute.Weight {
	t.Helper()
	l, err := b.Load(w)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// near compares with a float64 reference; scale is what the terms that were summed amount to.
func near(t testing.TB, what string, got []float32, want, scale []float64, tolerance float64) {
	t.Helper()
	for i := range got {
		if !(math.Abs(float64(got[i])-want[i]) <= tolerance*(scale[i]+1e-30)) {
			t.Fatalf("%s: element %d is %v, want %v (scale %v)", what, i, got[i], want[i], scale[i])
		}
	}
}

// fatal is what sameBits needs of a test.
type fatal interface {
	Helper()
	Fatalf(format string, args ...any)
}

// sameBits compares exactly. Two NaNs are equal.
func sameBits(t fatal, what string, got, want []float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d elements, want %d", what, len(got), len(want))
	}
	for i := range got {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) && (got[i] == got[i] || want[i] == want[i]) {
			t.Fatalf("%s: element %d is %v (%#x), want %v (%#x)", what, i, got[i], math.Float32bits(got[i]), want[i], math.Float32bits(want[i]))
		}
	}
}
