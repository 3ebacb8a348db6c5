package cpu

import (
	"cmp"
	"math"
	"math/bits"

	"baton/compute"
	"baton/tensor"
)

// The checks here cost nanoseconds an operation and turn a caller's mistake into an OpError instead of
// a write to foreign memory.

// mat checks that a matrix lies inside its buffer and returns the address of its first element.
func (b *Backend) mat(op, name string, m compute.Mat) (*float32, bool) {
	buf, ok := m.Buf.(*buffer)
	if !ok || buf == nil {
		b.fail(op, "%s is not in a buffer of this backend", name)
		return nil, false
	}
	if m.Rows < 0 || m.Cols <= 0 || m.Off < 0 || m.Stride < m.Cols && m.Rows > 1 || m.Stride < 0 ||
		!inside(m.Off, m.Rows, m.Stride, m.Cols, len(buf.data)/4) {
		b.fail(op, "%s [%d, %d] at %d, rows %d apart, is not inside its buffer of %d elements", name, m.Rows, m.Cols, m.Off, m.Stride, len(buf.data)/4)
		return nil, false
	}
	return buf.at(m.Off), true
}

// inside reports whether off + (rows-1)*stride + cols <= size, without overflow.
func inside(off, rows, stride, cols, size int) bool {
	if rows == 0 {
		return off <= size
	}
	hi, span := bits.Mul64(uint64(rows-1), uint64(stride))
	return hi == 0 && span <= uint64(size) && cols <= size && off <= size && uint64(off)+span+uint64(cols) <= uint64(size)
}

// weight checks a weight matrix against the shapes around it.
func (b *Backend) weight(op string, w compute.Weight, inner, outer int) (*weight, bool) {
	v, ok := w.(*weight)
	if !ok || v == nil {
		b.fail(op, "weight was not loaded by this backend")
		return nil, false
	}
	if v.cols != inner || v.rows != outer {
		b.fail(op, "weight is [%d, %d], operands need [%d, %d]", v.rows, v.cols, outer, inner)
		return nil, false
	}
	return v, true
}

// vector checks a one-dimensional weight and returns its f32 values.
func (b *Backend) vector(op, name string, w compute.Weight, n int) (*float32, bool) {
	v, ok := w.(*weight)
	if !ok || v == nil || v.vector == nil || v.cols != n {
		b.fail(op, "%s must be a loaded vector of %d elements", name, n)
		return nil, false
	}
	return &v.vector[0], true
}

// indices checks that every index is in [0, limit).
func (b *Backend) indices(op, name string, idx []int32, limit int) bool {
	for i, v := range idx {
		if v < 0 || int(v) >= limit {
			b.fail(op, "%s[%d] is %d, outside [0, %d)", name, i, v, limit)
			return false
		}
	}
	return true
}

// cache is a checked view of a KV pool.
type cache struct {
	data               []byte
	f32                bool
	size               int // bytes an element
	dim, block         int
	layers, heads      int
	layer, blocks      int
	planes             int
	headBytes, kvBytes int // one head of one plane; one plane
}

func (b *Backend) cache(op string, kv compute.KV, layer int) (c cache, ok bool) {
	buf, ok := kv.Buf.(*buffer)
	if !ok || buf == nil {
		b.fail(op, "the cache is not in a buffer of this backend")
		return c, false
	}
	if kv.DType != tensor.F32 && kv.DType != tensor.BF16 {
		b.fail(op, "a cache of %v is not supported, use f32 or bf16", kv.DType)
		return c, false
	}
	planes := cmp.Or(kv.Planes, 2)
	if planes != 1 && planes != 2 {
		b.fail(op, "a cache of %d planes; 2 are keys and values, 1 is a latent", kv.Planes)
		return c, false
	}
	if kv.Blocks < 0 || kv.Layers <= 0 || kv.Heads <= 0 || kv.HeadDim <= 0 || kv.BlockSize <= 0 || kv.BlockSize%compute.Tile != 0 ||
		max(kv.Blocks, kv.Layers, kv.Heads, kv.HeadDim, kv.BlockSize) > math.MaxInt32 {
		b.fail(op, "cache geometry %d blocks × %d layers × %d heads × %d tokens × %d is invalid; a block is a multiple of %d tokens",
			kv.Blocks, kv.Layers, kv.Heads, kv.BlockSize, kv.HeadDim, compute.Tile)
		return c, false
	}
	size := kv.DType.BlockBytes()
	total := uint64(kv.Blocks)
	for _, f := range [...]int{kv.Layers, planes, kv.Heads, kv.BlockSize, kv.HeadDim, size} {
		hi, lo := bits.Mul64(total, uint64(f))
		if hi != 0 {
			lo = math.MaxUint64
		}
		total = lo
	}
	if total > uint64(len(buf.data)) {
		b.fail(op, "the cache needs %d bytes, its buffer has %d", total, len(buf.data))
		return c, false
	}
	if layer < 0 || layer >= kv.Layers {
		b.fail(op, "layer %d of %d", layer, kv.Layers)
		return c, false
	}
	c = cache{
		data: buf.data, f32: kv.DType == tensor.F32, size: size, dim: kv.HeadDim, block: kv.BlockSize,
		layers: kv.Layers, heads: kv.Heads, layer: layer, blocks: kv.Blocks, planes: planes,
	}
	c.headBytes = kv.BlockSize * kv.HeadDim * size
	c.kvBytes = c.headBytes * kv.Heads
	return c, true
}

// at is the offset in bytes of a token's vector: plane 0 holds keys, 1 values.
func (c *cache) at(block, plane, head, token int) int {
	return ((block*c.layers+c.layer)*c.planes+plane)*c.kvBytes + head*c.headBytes + token*c.dim*c.size
}
