package cpu

import (
	"fmt"
	"math"
	"testing"

	"baton/compute"
	"baton/tensor"
)

var weightTypes = []tensor.DType{tensor.F32, tensor.F16, tensor.BF16, tensor.Q8_0, tensor.Q4_0, tensor.Q4_1, tensor.Q5_0, tensor.Q5_1}

// product is a MatMul with everything that it takes.
type product struct {
	dtype                    tensor.DType
	inputs, inner, outer     int
	segments                 int
	bias, residual, oneByOne bool
	dense                    bool // rows of src without padding
}

func (p product) String() string {
	return fmt.Sprintf("%v %dx%dx%d segments=%d bias=%v residual=%v", p.dtype, p.inputs, p.inner, p.outer, p.segments, p.bias, p.residual)
}

// run multiplies on one setup and returns the result.
func (p product) run(t *testing.T, b *Backend) []float32 {
	x := put(t, b, random(1, p.inputs*p.inner), p.inner)
	if p.dense {
		d := blank(t, b, p.inputs, p.inner, p.inner)
		for i := range p.inputs * p.inner {
			*d.Buf.(*buffer).at(i) = *x.Buf.(*buffer).at(i/p.inner*x.Stride + i%p.inner)
		}
		x = d
	}
	dst := put(t, b, random(2, p.inputs*p.outer), p.outer)
	wt, _ := quantised(t, p.dtype, random(3, p.outer*p.inner), p.outer, p.inner)
	opt := compute.Linear{Residual: p.residual, Segments: p.segments}
	if p.bias {
		bt, _ := quantised(t, tensor.F32, random(4, p.outer), p.outer)
		opt.Bias = load(t, b, bt)
	}
	w := load(t, b, wt)
	if p.oneByOne {
		for i := range p.inputs {
			b.MatMul(dst.Slice(i, i+1), x.Slice(i, i+1), w, opt)
		}
	} else {
		b.MatMul(dst, x, w, opt)
	}
	return get(t, b, dst)
}

// reference is the product in float64.
func (p product) reference(t *testing.T) (sum, scale []float64) {
	x, old := random(1, p.inputs*p.inner), random(2, p.inputs*p.outer)
	_, w := quantised(t, p.dtype, random(3, p.outer*p.inner), p.outer, p.inner)
	bias := random(4, p.outer)
	for i := range p.inputs {
		for o := range p.outer {
			s, a := 0.0, 0.0
			for k := range p.inner {
				v := float64(x[i*p.inner+k]) * float64(w[o*p.inner+k])
				s, a = s+v, a+math.Abs(v)
			}
			if p.bias {
				s, a = s+float64(bias[o]), a+math.Abs(float64(bias[o]))
			}
			if p.residual {
				s, a = s+float64(old[i*p.outer+o]), a+math.Abs(float64(old[i*p.outer+o]))
			}
			sum, scale = append(sum, s), append(scale, a)
		}
	}
	return sum, scale
}

func products() []product {
	var all []product
	for _, d := range weightTypes {
		all = append(all,
			product{dtype: d, inputs: 1, inner: 64, outer: 8},
			product{dtype: d, inputs: 1, inner: 192, outer: 37, bias: true},
			product{dtype: d, inputs: 7, inner: 576, outer: 18, segments: 8, residual: true},
			product{dtype: d, inputs: 1, inner: 512, outer: 21, segments: 8, bias: true, residual: true},
			product{dtype: d, inputs: 4, inner: 1344, outer: 17},
			product{dtype: d, inputs: 2, inner: 2880, outer: 5, segments: 8}, // segments start inside blocks
			product{dtype: d, inputs: 25, inner: 1024, outer: 3, dense: true},
			product{dtype: d, inputs: 2, inner: 2816, outer: 9, segments: 4},
		)
	}
	for _, d := range weightTypes[:3] {
		all = append(all,
			product{dtype: d, inputs: 3, inner: 1, outer: 1},
			product{dtype: d, inputs: 4, inner: 7, outer: 5, bias: true},
			product{dtype: d, inputs: 2, inner: 700, outer: 6, segments: 4},
			product{dtype: d, inputs: 1, inner: 691, outer: 11},
			product{dtype: d, inputs: 199, inner: 33, outer: 19, residual: true},
			product{dtype: d, inputs: 6, inner: 24, outer: 4, segments: 8},
		)
	}
	return all
}

func TestMatMul(t *testing.T) {
	backends := make([]*Backend, len(setups))
	for i, o := range setups {
		backends[i] = open(t, o)
	}
	for n, p := range products() {
		if raceDetector && n%4 != 1 {
			continue
		}
		want, scale := p.reference(t)
		var first []float32
		for i, b := range backends {
			got := p.run(t, b)
			if first == nil {
				first = got
				near(t, p.String(), got, want, scale, 3e-7)
			}
			sameBits(t, fmt.Sprint(p, " ", setups[i]), got, first)
			if setups[i].Portable && b.pool.threads > 1 {
				continue
			}
			single := p
			single.oneByOne = true
			sameBits(t, fmt.Sprint(p, " ", setups[i], " row by row"), single.run(t, b), first)
		}
	}
}

// TestSegments checks the binary tree: the parts, computed as products of their own (what a rank of a
// tensor-parallel group does), add up to the same bits.
func TestSegments(t *testing.T) {
	const inner, outer, inputs, segments = 1536, 12, 3, 8
	for _, d := range []tensor.DType{tensor.F32, tensor.Q8_0} {
		b := open(t, Options{Threads: 2})
		x, w := random(1, inputs*inner), random(3, outer*inner)
		parts := make([][]float32, segments)
		const length = inner / segments
		for s := range parts {
			var xs, ws []float32
			for i := range inputs {
				xs = append(xs, x[i*inner+s*length:][:length]...)
			}
			for o := range outer {
				ws = append(ws, w[o*inner+s*length:][:length]...)
			}
			wt, _ := quantised(t, d, ws, outer, length)
			dst := blank(t, b, inputs, outer, outer)
			b.MatMul(dst, put(t, b, xs, length), load(t, b, wt), compute.Linear{})
			parts[s] = get(t, b, dst)
		}
		for n := segments; n > 1; n /= 2 {
			for s := range n / 2 {
				for i := range parts[s] {
					parts[s][i] = parts[2*s][i] + parts[2*s+1][i]
				}
			}
		}
		p := product{dtype: d, inputs: inputs, inner: inner, outer: outer, segments: segments}
		sameBits(t, d.String(), p.run(t, b), parts[0])
	}
}

// TestQuantisedEqualsExpanded: a product with quantised weights has the bits of one with the same weights
// expanded to f32 beforehand.
func TestQuantisedEqualsExpanded(t *testing.T) {
	const inner, outer = 352, 10
	for _, o := range setups {
		b := open(t, o)
		for _, inputs := range []int{1, 5} {
			x := put(t, b, random(1, inputs*inner), inner)
			for _, d := range weightTypes {
				stored, values := quantised(t, d, random(2, outer*inner), outer, inner)
				expanded, _ := quantised(t, tensor.F32, values, outer, inner)
				got, want := blank(t, b, inputs, outer, outer), blank(t, b, inputs, outer, outer)
				b.MatMul(got, x, load(t, b, stored), compute.Linear{})
				b.MatMul(want, x, load(t, b, expanded), compute.Linear{})
				sameBits(t, fmt.Sprint(d, " ", o), get(t, b, got), get(t, b, want))
			}
		}
	}
}

// TestUnalignedWeights multiplies with matrices that start at an odd address, as a file may have them.
func TestUnalignedWeights(t *testing.T) {
	const inner, outer, inputs = 64, 12, 3
	for _, o := range setups {
		b := open(t, o)
		x := put(t, b, random(1, inputs*inner), inner)
		for _, d := range weightTypes {
			even, _ := quantised(t, d, random(2, outer*inner), outer, inner)
			odd := even
			odd.Data = append(make([]byte, 1, 1+len(even.Data)), even.Data...)[1:]
			got, want := blank(t, b, inputs, outer, outer), blank(t, b, inputs, outer, outer)
			for _, rows := range []int{1, inputs} {
				b.MatMul(got.Slice(0, rows), x.Slice(0, rows), load(t, b, odd), compute.Linear{})
				b.MatMul(want.Slice(0, rows), x.Slice(0, rows), load(t, b, even), compute.Linear{})
				sameBits(t, fmt.Sprint(d, " ", o), get(t, b, got), get(t, b, want))
			}
		}
	}
}
