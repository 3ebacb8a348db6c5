package cpu

import "baton/tensor"

// Bits of the mode argument of kernels.dots.
const (
	carryIn  = 1 // accumulators start from carry instead of zero
	carryOut = 2 // accumulators go to carry and out is not written
)

// lanes is the number of accumulators of a dot product; tileRows the weight rows that one call of dots
// multiplies at a time.
const (
	lanes    = 8
	tileRows = 4
)

// kernels is one implementation of the inner loops. Strides are in bytes; counts are in elements.
// Pointers reach as far as counts and strides say; nothing is read or written beyond.
type kernels struct {
	name string

	// dots computes the n×4 dot products of n rows of x (xStride apart) with 4 rows of w (wStride
	// apart), k elements each. Product (i, j) goes to element j of the row of out at i*outStride. carry
	// holds [n][4][lanes] unfinished accumulators, for products that are cut into several calls; every
	// call but the last must have k divisible by lanes.
	dots func(out *float32, outStride int, w *float32, wStride int, x *float32, xStride, n, k int, carry *float32, mode int)

	// expand converts rows of weights to f32; n is a multiple of the type's block.
	expand [tensor.Q8_0 + 1]func(dst *float32, dstStride int, src *byte, srcStride, rows, n int)

	// gemv multiplies 4*groups rows of weights in their own type by one vector. A row has segments of k
	// elements, a multiple of 32, each with a product of its own: those of segment s go to the
	// 4*groups elements of out at s*outStride. nil where the type has no fused kernel.
	gemv [tensor.Q8_0 + 1]func(out *float32, outStride int, w *byte, wStride int, x *float32, groups, segments, k int)

	// finish writes part (+ bias, unless nil) to dst, or adds that to dst when residual is not 0.
	finish func(dst *float32, dstStride int, part *float32, partStride int, bias *float32, rows, n, residual int)

	// fold updates n running softmaxes with 16 scores each: scales them, takes only the first valid[i],
	// replaces scores by exp(score - max), and leaves in rescale what older sums must be multiplied by.
	fold func(scores, maximum, sum, rescale *float32, valid *int32, scale float32, n int)

	// weigh adds to each of n accumulators of dim elements, after rescaling it, the first tokens rows of
	// v (vStride apart) weighed by its row of p (16 elements apart).
	weigh func(acc, rescale, p, v *float32, vStride, n, dim, tokens int)

	// norm is RMSNorm of rows of n elements.
	norm func(dst *float32, dstStride int, src *float32, srcStride int, w *float32, rows, n int, eps float32)

	// silu writes gate/(1+exp(-gate)) * up.
	silu func(dst, gate, up *float32, n int)

	// rotateHalves and rotatePairs turn the pairs (i, i+pairs) and (2i, 2i+1) of one head.
	rotateHalves, rotatePairs func(x, cos, sin *float32, pairs int)

	// toBF16 rounds to nearest even.
	toBF16 func(dst *uint16, src *float32, n int)
}
