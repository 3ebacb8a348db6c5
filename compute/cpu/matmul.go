package cpu

import (
	"unsafe"

	"baton/compute"
	"baton/tensor"
)

// matmulTask is one MatMul. It is cut into pieces of weight rows × input rows; every product is computed
// inside one piece, in the order that docs/numerics.md fixes, so the cut cannot change a bit.
//
// Within a piece, four weight rows at a time are expanded to f32 (a panel of the inner dimension, in the
// first-level cache) and multiplied with every input row of the block. Products whose inner dimension
// spans several panels keep their eight accumulators in scratch.carry between panels. With Segments,
// each segment's products go to scratch.parts, which a binary tree adds up.
type matmulTask struct {
	k         *kernels
	w         *weight
	dst, src  *float32
	dstStride int // bytes
	srcStride int // bytes
	inputs    int
	bias      *float32
	residual  int
	segments  int
	length    int // of a segment
	pieceRows int // weight rows a piece
	rowPieces int
	fused     func(out *float32, outStride int, w *byte, wStride int, x *float32, groups, segments, k int)
}

// Products of fewer multiplications than smallProduct are not worth waking a worker for.
const smallProduct = 1 << 16

// A piece of a single-row product should take a few microseconds at least and keep all workers busy.
const (
	gemvPieceBytes = 96 << 10
	gemvRows       = 256 // most rows of a piece; bounded by scratch.parts
)

// MatMul implements compute.Backend. The inner dimension may be cut into at most 64 segments.
func (b *Backend) MatMul(dst, src compute.Mat, w compute.Weight, opt compute.Linear) {
	const op = "MatMul"
	if b.err != nil {
		return
	}
	t := &b.matmul
	defer func() { *t = matmulTask{} }() // no pointer to memory that may be unmapped later
	if !b.product(op, t, dst, src, w, opt) || src.Rows == 0 {
		return
	}
	t.fuse()
	t.cut(t.w.rows, b.pool.threads)
	pieces := t.rowPieces * ((t.inputs + blockInputs - 1) / blockInputs)
	if t.inputs*t.w.rows*t.w.cols < smallProduct {
		b.pool.alone(&b.boxes.matmul, pieces)
	} else {
		if t.inputs >= packInputs && t.srcStride%packStride == 0 {
			b.packInputs(t)
		}
		b.pool.run(&b.boxes.matmul, pieces)
	}
}

// product checks operands and fills t with everything but the pieces.
func (b *Backend) product(op string, t *matmulTask, dst, src compute.Mat, w compute.Weight, opt compute.Linear) bool {
	var ok bool
	if t.w, ok = b.weight(op, w, src.Cols, dst.Cols); !ok {
		return false
	}
	if t.dst, ok = b.mat(op, "dst", dst); !ok {
		return false
	}
	if t.src, ok = b.mat(op, "src", src); !ok {
		return false
	}
	if dst.Rows != src.Rows {
		b.fail(op, "dst has %d rows, src %d", dst.Rows, src.Rows)
		return false
	}
	t.segments = max(opt.Segments, 1)
	if t.segments > maxSegments || t.segments&(t.segments-1) != 0 || src.Cols%t.segments != 0 {
		b.fail(op, "%d segments; want a power of two up to %d that divides the inner dimension %d", opt.Segments, maxSegments, src.Cols)
		return false
	}
	if opt.Bias != nil {
		if t.bias, ok = b.vector(op, "bias", opt.Bias, dst.Cols); !ok {
			return false
		}
	}
	if opt.Residual {
		t.residual = 1
	}
	t.k = b.k
	t.dstStride, t.srcStride, t.inputs = 4*dst.Stride, 4*src.Stride, src.Rows
	t.length = src.Cols / t.segments
	return true
}

// fuse chooses the kernel that multiplies a single row with weights in their own type, if there is one.
func (t *matmulTask) fuse() {
	if t.inputs == 1 && t.length%32 == 0 {
		t.fused = t.k.gemv[t.w.dtype]
	}
}

// Rows that lie a multiple of packStride apart share a few sets of the caches and push each other out.
// From packInputs rows on, copying them further apart is cheaper.
const (
	packStride = 2048
	packInputs = 24
	packPad    = 64 // bytes
)

// packTask copies input rows.
type packTask struct {
	dst, src             *float32
	dstStride, srcStride int // bytes
	rows, n, piece       int
}

// packInputs replaces the inputs of t by a copy. Without memory for it, t stays as it is.
func (b *Backend) packInputs(t *matmulTask) {
	stride := 4*t.w.cols + packPad
	if need := t.inputs * stride; need > len(b.packed) {
		mem, err := mapMemory(need)
		if err != nil {
			return
		}
		if b.packed != nil {
			_ = unmapMemory(b.packed) // only fails for memory that was not mapped
		}
		b.packed = mem
	}
	dst := (*float32)(unsafe.Pointer(unsafe.SliceData(b.packed)))
	b.pack = packTask{dst, t.src, stride, t.srcStride, t.inputs, t.w.cols, rowsPiece(t.w.cols)}
	b.pool.run(&b.boxes.pack, pieces(t.inputs, b.pack.piece))
	b.pack = packTask{}
	t.src, t.srcStride = dst, stride
}

func (t *packTask) run(_ *scratch, piece int) {
	from := piece * t.piece
	for i := from; i < min(from+t.piece, t.rows); i++ {
		copy(floats(t.dst, i*t.dstStride, t.n), floats(t.src, i*t.srcStride, t.n))
	}
}

// cut chooses the pieces of weight rows. work is the number of weight rows that all products of the
// operation have together.
func (t *matmulTask) cut(work, threads int) {
	if t.inputs <= 4 {
		t.pieceRows = min(max(gemvPieceBytes/t.w.rowBytes, 8), work/(4*threads)+tileRows, gemvRows) &^ (tileRows - 1)
	} else {
		t.pieceRows = blockWeights
	}
	t.pieceRows = max(t.pieceRows, tileRows)
	t.rowPieces = (t.w.rows + t.pieceRows - 1) / t.pieceRows
}

func (t *matmulTask) run(w *scratch, piece int) {
	from := piece % t.rowPieces * t.pieceRows
	to := min(from+t.pieceRows, t.w.rows)
	first := piece / t.rowPieces * blockInputs
	inputs := min(blockInputs, t.inputs-first)
	if t.fused != nil {
		full := from + (to-from)&^(tileRows-1)
		t.single(w, from, full)
		from = full
	}
	for ; from < to; from += blockWeights {
		t.block(w, from, min(from+blockWeights, to), first, inputs)
	}
}

// single multiplies weight rows [from, to), a multiple of 4, with the only input row.
func (t *matmulTask) single(w *scratch, from, to int) {
	n := to - from
	if n == 0 {
		return
	}
	dst := offset(t.dst, from)
	direct := t.segments == 1 && t.bias == nil && t.residual == 0
	out := w.parts
	if direct {
		out = dst
	}
	t.fused(out, 4*n, t.w.row(from), t.w.rowBytes, t.src, n/tileRows, t.segments, t.length)
	if !direct {
		t.tree(w, n)
		t.finish(dst, w.parts, n, from, 1, n)
	}
}

// block multiplies at most blockWeights weight rows [from, to) with at most blockInputs input rows.
func (t *matmulTask) block(w *scratch, from, to, first, inputs int) {
	n := to - from
	dst := offset((*float32)(unsafe.Add(unsafe.Pointer(t.dst), first*t.dstStride)), from)
	src := (*float32)(unsafe.Add(unsafe.Pointer(t.src), first*t.srcStride))
	direct := t.segments == 1 && t.bias == nil && t.residual == 0 && n%tileRows == 0
	out, outStride := w.parts, 4*blockWeights
	if direct {
		out, outStride = dst, t.dstStride
	}
	size := inputs * blockWeights
	if t.length <= panel {
		whole := panel / t.length // segments that fit one panel
		for s := 0; s < t.segments; s += whole {
			count := min(whole, t.segments-s)
			rows, stride := t.expand(w, from, to, s*t.length, count*t.length)
			for i := range count {
				t.tiles(w, offset(out, (s+i)*size), outStride, offset(rows, i*t.length), stride, offset(src, (s+i)*t.length), n, inputs, t.length, 0)
			}
		}
	} else {
		for s := range t.segments {
			for k := 0; k < t.length; k += panel {
				mode := 0
				if k > 0 {
					mode |= carryIn
				}
				if k+panel < t.length {
					mode |= carryOut
				}
				length := min(panel, t.length-k)
				rows, stride := t.expand(w, from, to, s*t.length+k, length)
				t.tiles(w, offset(out, s*size), outStride, rows, stride, offset(src, s*t.length+k), n, inputs, length, mode)
			}
		}
	}
	if !direct {
		t.tree(w, size)
		t.finish(dst, w.parts, blockWeights, from, inputs, n)
	}
}

// expand makes columns [k, k+length) of weight rows [from, to) available as f32 and returns where the
// first one is and how far rows are apart. Whole f32 tiles stay where they are, if they are aligned.
func (t *matmulTask) expand(w *scratch, from, to, k, length int) (rows *float32, stride int) {
	if first := unsafe.Pointer(t.w.row(from)); t.w.dtype == tensor.F32 && (to-from)%tileRows == 0 && uintptr(first)%4 == 0 {
		return (*float32)(unsafe.Add(first, 4*k)), t.w.rowBytes
	}
	unit := t.w.dtype.BlockElements()
	start := k / unit * unit
	n := (k+length+unit-1)/unit*unit - start
	src := (*byte)(unsafe.Add(unsafe.Pointer(t.w.row(from)), t.w.dtype.RowBytes(start)))
	t.k.expand[t.w.dtype](w.expanded, 4*expandedStride, src, t.w.rowBytes, to-from, n)
	return offset(w.expanded, k-start), 4 * expandedStride
}

// tiles multiplies n weight rows, four at a time, with all input rows of the block.
func (t *matmulTask) tiles(w *scratch, out *float32, outStride int, rows *float32, stride int, src *float32, n, inputs, k, mode int) {
	for j := 0; j < n; j += tileRows {
		tile := (*float32)(unsafe.Add(unsafe.Pointer(rows), j*stride))
		t.k.dots(offset(out, j), outStride, tile, stride, src, t.srcStride, inputs, k, offset(w.carry, j*blockInputs*lanes), mode)
	}
}

// tree adds the segments' parts, each size floats long, pairwise into the first one.
func (t *matmulTask) tree(w *scratch, size int) {
	for step := 1; step < t.segments; step *= 2 {
		for s := 0; s < t.segments; s += 2 * step {
			t.k.finish(offset(w.parts, s*size), 0, offset(w.parts, (s+step)*size), 0, nil, 1, size, 1)
		}
	}
}

// finish moves sums from parts to dst, with bias and residual.
func (t *matmulTask) finish(dst, parts *float32, partStride, from, rows, n int) {
	bias := t.bias
	if bias != nil {
		bias = offset(bias, from)
	}
	t.k.finish(dst, t.dstStride, parts, 4*partStride, bias, rows, n, t.residual)
}
