//go:build unix

package cpu

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"
	"unsafe"

	"baton/compute"
	"baton/tensor"
)

// The tests here compare the assembly with the portable kernels on operands that end where a page that
// cannot be touched begins, so that reading or writing too far is a fault.

func assembly(t *testing.T) *kernels {
	k := bestKernels()
	if k == &portableKernels {
		t.Skip("this processor has no assembly kernels")
	}
	return k
}

// guarded copies values to memory that ends at a page without access. It is unmapped with the test.
func guarded[T any](t *testing.T, values []T) *T {
	t.Helper()
	var zero T
	size := max(len(values), 1) * int(unsafe.Sizeof(zero))
	page := syscall.Getpagesize()
	whole := (size + page - 1) / page * page
	mem, err := syscall.Mmap(-1, 0, whole+page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Munmap(mem); err != nil {
			t.Error(err)
		}
	})
	if err := syscall.Mprotect(mem[whole:], syscall.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	p := (*T)(unsafe.Pointer(&mem[whole-size]))
	copy(unsafe.Slice(p, len(values)), values)
	return p
}

// draw is n values, mostly normal, some adversarial when wild.
func draw(r *rand.Rand, n int, wild bool) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64())
		if wild && r.IntN(4) == 0 {
			v[i] = adversarial(r)
		}
	}
	return v
}

// twice runs a kernel of both implementations on copies of the same memory and compares the memory.
func twice(t *testing.T, what string, values []float32, run func(k *kernels, p *float32)) {
	t.Helper()
	a, b := guarded(t, values), guarded(t, values)
	run(&portableKernels, a)
	run(assembly(t), b)
	sameBits(t, what, unsafe.Slice(b, len(values)), unsafe.Slice(a, len(values)))
}

// TestFMAAgainstHardware compares fma32 with the instruction: a product of eight elements with carried
// accumulators is one FMA each.
func TestFMAAgainstHardware(t *testing.T) {
	skipUnderRace(t)
	k := assembly(t)
	r := rand.New(rand.NewPCG(3, 4))
	var w, carry, want [tileRows * lanes]float32
	var x [lanes]float32
	for range 40_000 {
		for i := range x {
			x[i] = adversarial(r)
		}
		for i := range w {
			w[i], carry[i] = adversarial(r), adversarial(r)
			if r.IntN(3) == 0 { // almost cancelling
				carry[i] = -w[i] * x[i%lanes]
			}
		}
		for i := range x {
			if r.IntN(4) == 0 {
				x[i], w[i], carry[i] = nearHalfway(r)
			}
		}
		for i := range w {
			want[i] = fma32(w[i], x[i%lanes], carry[i])
		}
		k.dots(nil, 0, &w[0], 4*lanes, &x[0], 0, 1, lanes, &carry[0], carryIn|carryOut)
		sameBits(t, "fma", carry[:], want[:])
	}
}

func TestDotsKernel(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for n := range 9 {
		for _, length := range []int{1, 7, 8, 16, 24, 40, 64, 72, 100, 576} {
			for mode := range 4 {
				if mode&carryOut != 0 && length%lanes != 0 {
					continue
				}
				wild := r.IntN(2) == 0
				x, w := guarded(t, draw(r, max(0, n*(length+3)-3), wild)), guarded(t, draw(r, tileRows*(length+1)-1, wild))
				carry := draw(r, max(n, 1)*tileRows*lanes, wild)
				twice(t, fmt.Sprintf("dots n=%d k=%d mode=%d: out", n, length, mode), make([]float32, max(n*6-2, 1)), func(k *kernels, out *float32) {
					k.dots(out, 24, w, 4*(length+1), x, 4*(length+3), n, length, guarded(t, carry), mode)
				})
				twice(t, fmt.Sprintf("dots n=%d k=%d mode=%d: carry", n, length, mode), carry, func(k *kernels, p *float32) {
					k.dots(guarded(t, make([]float32, max(4*n, 1))), 16, w, 4*(length+1), x, 4*(length+3), n, length, p, mode)
				})
			}
		}
	}
}

func TestExpandKernels(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for _, d := range weightTypes {
		lengths := []int{32, 64, 96, 352}
		if !d.Quantised() {
			lengths = []int{1, 3, 8, 17, 64, 100}
		}
		for _, n := range lengths {
			for rows := range 5 {
				stride := d.RowBytes(n) + 6
				src := make([]byte, max(rows*stride-6, 1))
				for i := range src {
					src[i] = byte(r.Uint32()) // every kind of scale, NaN and infinity too
				}
				from := guarded(t, src)
				twice(t, fmt.Sprint("expand ", d, " ", rows, "x", n), make([]float32, max(rows*(n+2)-2, 1)), func(k *kernels, dst *float32) {
					k.expand[d](dst, 4*(n+2), from, stride, rows, n)
				})
			}
		}
	}
	// Every half and every bfloat16.
	for _, d := range []tensor.DType{tensor.F16, tensor.BF16} {
		all := make([]uint16, 1<<16)
		for i := range all {
			all[i] = uint16(i)
		}
		twice(t, d.String(), make([]float32, 1<<16), func(k *kernels, dst *float32) {
			k.expand[d](dst, 0, (*byte)(unsafe.Pointer(&all[0])), 0, 1, 1<<16)
		})
	}
}

// TestGemvKernels compares the fused kernels with expanding and multiplying.
func TestGemvKernels(t *testing.T) {
	k := assembly(t)
	r := rand.New(rand.NewPCG(9, 10))
	for _, d := range weightTypes {
		for _, n := range []int{32, 64, 96, 352} {
			for groups := range 4 {
				segments := 1 + r.IntN(3)
				stride := d.RowBytes(n*segments) + 6
				src := make([]byte, max(groups*tileRows*stride-6, 1))
				for i := range src {
					src[i] = byte(r.Uint32()) &^ 0x40 // finite scales
				}
				w, x := guarded(t, src), guarded(t, draw(r, n*segments, false))
				rows := make([]float32, max(1, groups*tileRows*n*segments))
				outputs := groups * tileRows
				want := make([]float32, segments*(outputs+3)-3)
				for g := range groups {
					at := &rows[g*tileRows*n*segments]
					portableKernels.expand[d](at, 4*n*segments, byteOffset(w, g*tileRows*stride), stride, tileRows, n*segments)
					for s := range segments {
						portableKernels.dots(&want[g*tileRows+s*(outputs+3)], 0, offset(at, s*n), 4*n*segments, offset(x, s*n), 0, 1, n, nil, 0)
					}
				}
				got := guarded(t, make([]float32, len(want)))
				k.gemv[d](got, 4*(outputs+3), w, stride, x, groups, segments, n)
				sameBits(t, fmt.Sprint("gemv ", d, " ", groups, " groups of ", segments, "x", n), unsafe.Slice(got, len(want)), want)
			}
		}
	}
}

func TestElementwiseKernels(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	for n := 1; n < 70; n += 1 + n/9 {
		for rows := range 3 {
			part, bias := guarded(t, draw(r, max(1, rows*n), true)), guarded(t, draw(r, n, true))
			for residual := range 2 {
				for _, b := range []*float32{nil, bias} {
					twice(t, fmt.Sprint("finish ", rows, "x", n), draw(r, max(1, rows*n), true), func(k *kernels, dst *float32) {
						k.finish(dst, 4*n, part, 4*n, b, rows, n, residual)
					})
				}
			}
			twice(t, fmt.Sprint("norm ", rows, "x", n), draw(r, max(1, rows*n), true), func(k *kernels, x *float32) {
				k.norm(x, 4*n, x, 4*n, bias, rows, n, 1e-5)
			})
		}
		cos, sin := guarded(t, draw(r, n, true)), guarded(t, draw(r, n, true))
		twice(t, fmt.Sprint("rotateHalves ", n), draw(r, 2*n, true), func(k *kernels, x *float32) { k.rotateHalves(x, cos, sin, n) })
		twice(t, fmt.Sprint("rotatePairs ", n), draw(r, 2*n, true), func(k *kernels, x *float32) { k.rotatePairs(x, cos, sin, n) })
		src := guarded(t, draw(r, n, true))
		twice(t, fmt.Sprint("toBF16 ", n), make([]float32, (n+1)/2), func(k *kernels, dst *float32) {
			k.toBF16((*uint16)(unsafe.Pointer(dst)), src, n)
		})
	}
	// The exponential, over every kind of argument.
	up := make([]float32, 1<<16)
	for i := range up {
		up[i] = 1
	}
	for range 4 {
		gate := make([]float32, len(up))
		for i := range gate {
			gate[i] = math.Float32frombits(r.Uint32())
			if i%2 == 0 {
				gate[i] = float32(r.NormFloat64() * 40)
			}
		}
		twice(t, "silu", gate, func(k *kernels, x *float32) { k.silu(x, x, &up[0], len(up)) })
	}
}

func TestAttentionKernels(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	for n := range 9 {
		for range 30 {
			scores := draw(r, max(1, n*compute.Tile), false)
			state := make([]float32, 3*max(1, n)) // maximum, sum, rescale
			valid := make([]int32, max(1, n))
			for i := range valid {
				valid[i] = int32(1 + r.IntN(compute.Tile))
				state[i], state[n+i] = float32(math.Inf(-1)), 0
				if r.IntN(3) > 0 {
					state[i], state[n+i] = float32(r.NormFloat64()*3), float32(r.ExpFloat64())
				}
			}
			counts := guarded(t, valid)
			both := append(append([]float32{}, scores...), state...)
			twice(t, fmt.Sprint("fold ", n), both, func(k *kernels, p *float32) {
				s := offset(p, len(scores))
				k.fold(p, s, offset(s, n), offset(s, 2*n), counts, 0.7, n)
			})
		}
		for _, dim := range []int{8, 10, 16, 64, 72, 80, 96, 120, 128, 256} {
			tokens, apart := 1+r.IntN(compute.Tile), dim+r.IntN(2)*(1+r.IntN(40))
			p, v, c := guarded(t, draw(r, max(1, n*compute.Tile), true)), guarded(t, draw(r, (tokens-1)*apart+dim, true)), guarded(t, draw(r, max(1, n), true))
			twice(t, fmt.Sprint("weigh ", n, "x", dim), draw(r, max(1, n*dim), true), func(k *kernels, acc *float32) {
				k.weigh(acc, c, p, v, 4*apart, n, dim, tokens)
			})
		}
	}
}

// TestRegisters guards the assembly against instructions of later processors: the generator reaches for
// registers 16 to 31, which only AVX-512 has, when a kernel uses more than there are.
func TestRegisters(t *testing.T) {
	files, err := filepath.Glob("*_amd64.s")
	if err != nil || len(files) != 4 {
		t.Fatal(files, err)
	}
	later := regexp.MustCompile(`\b(Z\d+|K\d|[XY](1[6-9]|2\d|3[01]))\b`)
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if m := later.Find(text); m != nil {
			t.Errorf("%s uses register %s", name, m)
		}
		if !bytes.Contains(text, []byte("Y1")) {
			t.Errorf("%s uses no vector register at all", name)
		}
	}
}
