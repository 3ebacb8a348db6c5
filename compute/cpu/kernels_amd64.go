package cpu

import (
	"golang.org/x/sys/cpu"

	"baton/tensor"
)

func bestKernels() *kernels {
	if cpu.X86.HasAVX2 && cpu.X86.HasFMA && cpu.X86.HasF16C {
		return &avx2Kernels
	}
	return &portableKernels
}

// The assembly works on whole vectors. What is left over of an element-wise operation, and every product
// or norm whose length is not a multiple of 8, goes to the portable kernels.
var avx2Kernels = kernels{
	name: "avx2",
	dots: func(out *float32, outStride int, w *float32, wStride int, x *float32, xStride, n, k int, carry *float32, mode int) {
		if k%lanes != 0 {
			dotsGo(out, outStride, w, wStride, x, xStride, n, k, carry, mode)
			return
		}
		dotsAVX2(out, outStride, w, wStride, x, xStride, n, k, carry, mode)
	},
	expand: [tensor.Q8_0 + 1]func(*float32, int, *byte, int, int, int){
		tensor.F32:  expandPlain(tensor.F32, expandF32AVX2),
		tensor.F16:  expandPlain(tensor.F16, expandF16AVX2),
		tensor.BF16: expandPlain(tensor.BF16, expandBF16AVX2),
		tensor.Q4_0: expandQ4_0AVX2,
		tensor.Q4_1: expandQ4_1AVX2,
		tensor.Q5_0: expandQ5_0AVX2,
		tensor.Q5_1: expandQ5_1AVX2,
		tensor.Q8_0: expandQ8_0AVX2,
	},
	gemv: [tensor.Q8_0 + 1]func(*float32, int, *byte, int, *float32, int, int, int){
		tensor.F32:  gemvF32AVX2,
		tensor.F16:  gemvF16AVX2,
		tensor.BF16: gemvBF16AVX2,
		tensor.Q4_0: gemvQ4_0AVX2,
		tensor.Q4_1: gemvQ4_1AVX2,
		tensor.Q5_0: gemvQ5_0AVX2,
		tensor.Q5_1: gemvQ5_1AVX2,
		tensor.Q8_0: gemvQ8_0AVX2,
	},
	finish: func(dst *float32, dstStride int, part *float32, partStride int, bias *float32, rows, n, residual int) {
		whole := n &^ (lanes - 1)
		finishAVX2(dst, dstStride, part, partStride, bias, rows, whole, residual)
		if whole < n {
			if bias != nil {
				bias = offset(bias, whole)
			}
			finishGo(offset(dst, whole), dstStride, offset(part, whole), partStride, bias, rows, n-whole, residual)
		}
	},
	fold: foldAVX2,
	weigh: func(acc, rescale, p, v *float32, vStride, n, dim, tokens int) {
		if dim%lanes != 0 {
			weighGo(acc, rescale, p, v, vStride, n, dim, tokens)
			return
		}
		weighAVX2(acc, rescale, p, v, vStride, n, dim, tokens)
	},
	norm: func(dst *float32, dstStride int, src *float32, srcStride int, w *float32, rows, n int, eps float32) {
		if n%lanes != 0 {
			normGo(dst, dstStride, src, srcStride, w, rows, n, eps)
			return
		}
		normAVX2(dst, dstStride, src, srcStride, w, rows, n, eps)
	},
	silu: func(dst, gate, up *float32, n int) {
		whole := n &^ (lanes - 1)
		siluAVX2(dst, gate, up, whole)
		if whole < n {
			siluGo(offset(dst, whole), offset(gate, whole), offset(up, whole), n-whole)
		}
	},
	rotateHalves: func(x, cos, sin *float32, pairs int) {
		if pairs%8 != 0 {
			rotateHalvesGo(x, cos, sin, pairs)
			return
		}
		rotateHalvesAVX2(x, cos, sin, pairs)
	},
	rotatePairs: func(x, cos, sin *float32, pairs int) {
		if pairs%4 != 0 {
			rotatePairsGo(x, cos, sin, pairs)
			return
		}
		rotatePairsAVX2(x, cos, sin, pairs)
	},
	toBF16: func(dst *uint16, src *float32, n int) {
		if n%8 != 0 {
			toBF16Go(dst, src, n)
			return
		}
		toBF16AVX2(dst, src, n)
	},
}

// expandPlain leaves the end of a row that is not a multiple of 8 to the portable kernel.
func expandPlain(t tensor.DType, fast func(*float32, int, *byte, int, int, int)) func(*float32, int, *byte, int, int, int) {
	slow := portableKernels.expand[t]
	return func(dst *float32, dstStride int, src *byte, srcStride, rows, n int) {
		whole := n &^ (lanes - 1)
		fast(dst, dstStride, src, srcStride, rows, whole)
		if whole < n {
			slow(offset(dst, whole), dstStride, byteOffset(src, t.RowBytes(whole)), srcStride, rows, n-whole)
		}
	}
}
