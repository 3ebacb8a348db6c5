package cpu

import (
	"math"
	"unsafe"

	"baton/compute"
	"baton/tensor"
)

// The portable kernels define the numbers: the assembly must give the same bits. Products that are
// rounded on their own are written float32(a*b), since Go may otherwise fuse them with a sum.

var portableKernels = kernels{
	name: "portable",
	dots: dotsGo,
	expand: [tensor.Q8_0 + 1]func(*float32, int, *byte, int, int, int){
		tensor.F32:  expandGo(tensor.F32),
		tensor.F16:  expandGo(tensor.F16),
		tensor.BF16: expandGo(tensor.BF16),
		tensor.Q4_0: expandGo(tensor.Q4_0),
		tensor.Q4_1: expandGo(tensor.Q4_1),
		tensor.Q5_0: expandGo(tensor.Q5_0),
		tensor.Q5_1: expandGo(tensor.Q5_1),
		tensor.Q8_0: expandGo(tensor.Q8_0),
	},
	finish:       finishGo,
	fold:         foldGo,
	weigh:        weighGo,
	norm:         normGo,
	silu:         siluGo,
	rotateHalves: rotateHalvesGo,
	rotatePairs:  rotatePairsGo,
	toBF16:       toBF16Go,
}

// floats views n floats, offset bytes after p.
func floats(p *float32, offset, n int) []float32 {
	return unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(p), offset)), n)
}

// sum8 is the fixed tree that ends every 8-lane reduction.
func sum8(a *[lanes]float32) float32 {
	return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
}

// dot8 adds w·x to 8 accumulators, element k to accumulator k mod 8. The tail is padded with zeros.
func dot8(acc *[lanes]float32, w, x []float32) {
	x = x[:len(w)]
	for len(w) >= lanes {
		a, b := (*[lanes]float32)(w), (*[lanes]float32)(x)
		for j := range lanes { // fma32, spelled out because it is too long to be inlined
			p, z := float64(a[j])*float64(b[j]), float64(acc[j])
			if s := p + z; delicate(s) {
				acc[j] = fmaExact(p, z)
			} else {
				acc[j] = float32(s)
			}
		}
		w, x = w[lanes:], x[lanes:]
	}
	if len(w) == 0 {
		return
	}
	var a, b [lanes]float32
	copy(a[:], w)
	copy(b[:], x)
	for j := range lanes {
		acc[j] = fma32(a[j], b[j], acc[j])
	}
}

func dotsGo(out *float32, outStride int, w *float32, wStride int, x *float32, xStride, n, k int, carry *float32, mode int) {
	for i := range n {
		row := floats(x, i*xStride, k)
		for j := range tileRows {
			var acc [lanes]float32
			if mode&carryIn != 0 {
				acc = [lanes]float32(floats(carry, (i*tileRows+j)*lanes*4, lanes))
			}
			dot8(&acc, floats(w, j*wStride, k), row)
			if mode&carryOut != 0 {
				copy(floats(carry, (i*tileRows+j)*lanes*4, lanes), acc[:])
			} else {
				floats(out, i*outStride, tileRows)[j] = sum8(&acc)
			}
		}
	}
}

// expandGo is tensor.Dequantize over rows. The scale of a block has 11 significant bits and a quant at
// most 8, so their product is exact, and the assembly may fuse it with the addition of a minimum.
func expandGo(t tensor.DType) func(*float32, int, *byte, int, int, int) {
	return func(dst *float32, dstStride int, src *byte, srcStride, rows, n int) {
		for i := range rows {
			row := unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(src), i*srcStride)), t.RowBytes(n))
			if err := tensor.Dequantize(floats(dst, i*dstStride, n), t, row); err != nil {
				panic(err) // Load checked the type, and callers cut rows at blocks
			}
		}
	}
}

func finishGo(dst *float32, dstStride int, part *float32, partStride int, bias *float32, rows, n, residual int) {
	for r := range rows {
		d, p := floats(dst, r*dstStride, n), floats(part, r*partStride, n)
		for i, v := range p {
			if bias != nil {
				v += floats(bias, 0, n)[i]
			}
			if residual != 0 {
				v = d[i] + v
			}
			d[i] = v
		}
	}
}

// larger is MAXPS: b when either is NaN.
func larger(a, b float32) float32 {
	if a > b {
		return a
	}
	return b
}

func foldGo(scores, maximum, sum, rescale *float32, valid *int32, scale float32, n int) {
	ms, ls, cs := floats(maximum, 0, n), floats(sum, 0, n), floats(rescale, 0, n)
	for i, count := range unsafe.Slice(valid, n) {
		s := floats(scores, i*compute.Tile*4, compute.Tile)
		for t := range s {
			if t < int(count) {
				s[t] = float32(s[t] * scale)
			} else {
				s[t] = float32(math.Inf(-1))
			}
		}
		m := ms[i]
		for _, v := range s {
			m = larger(m, v)
		}
		c := exp32(ms[i] - m)
		var pair [lanes]float32
		for t := range s {
			s[t] = exp32(s[t] - m)
			pair[t%lanes] += s[t]
		}
		ms[i], cs[i] = m, c
		ls[i] = fma32(ls[i], c, sum8(&pair))
	}
}

func weighGo(acc, rescale, p, v *float32, vStride, n, dim, tokens int) {
	for i := range n {
		a, c := floats(acc, i*dim*4, dim), floats(rescale, i*4, 1)[0]
		weights := floats(p, i*compute.Tile*4, tokens)
		for d := range a {
			a[d] = float32(a[d] * c)
		}
		for t, w := range weights {
			for d, x := range floats(v, t*vStride, dim) {
				a[d] = fma32(w, x, a[d])
			}
		}
	}
}

func normGo(dst *float32, dstStride int, src *float32, srcStride int, w *float32, rows, n int, eps float32) {
	weights := floats(w, 0, n)
	for r := range rows {
		d, s := floats(dst, r*dstStride, n), floats(src, r*srcStride, n)
		var acc [lanes]float32
		dot8(&acc, s, s)
		mean := sum8(&acc) / float32(n)
		scale := 1 / float32(math.Sqrt(float64(mean+eps)))
		for i, v := range s {
			d[i] = float32(v*scale) * weights[i]
		}
	}
}

func siluGo(dst, gate, up *float32, n int) {
	d, g, u := floats(dst, 0, n), floats(gate, 0, n), floats(up, 0, n)
	for i := range d {
		d[i] = g[i] / (1 + exp32(-g[i])) * u[i]
	}
}

func rotateHalvesGo(x, cos, sin *float32, pairs int) {
	a, b := floats(x, 0, pairs), floats(x, pairs*4, pairs)
	c, s := floats(cos, 0, pairs), floats(sin, 0, pairs)
	for i := range a {
		a[i], b[i] = float32(a[i]*c[i])-float32(b[i]*s[i]), float32(b[i]*c[i])+float32(a[i]*s[i])
	}
}

func rotatePairsGo(x, cos, sin *float32, pairs int) {
	v := floats(x, 0, 2*pairs)
	c, s := floats(cos, 0, pairs), floats(sin, 0, pairs)
	for i := range c {
		a, b := v[2*i], v[2*i+1]
		v[2*i], v[2*i+1] = float32(a*c[i])-float32(b*s[i]), float32(b*c[i])+float32(a*s[i])
	}
}

func toBF16Go(dst *uint16, src *float32, n int) {
	d := unsafe.Slice(dst, n)
	for i, v := range floats(src, 0, n) {
		d[i] = tensor.F32ToBF16(v)
	}
}
