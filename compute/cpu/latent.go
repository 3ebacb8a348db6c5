package cpu

import (
	"unsafe"

	"baton/compute"
	"baton/tensor"
)

// headsTask is one MatMulHeads. A piece is some rows of one head, for all rows of its matrix.
//
// A row is multiplied as MatMul does. Transposed, it is a sum of the matrix's rows, each weighed by one
// element: they are added in order, 16 at a time, by the kernel that attention has for values.
type headsTask struct {
	k                    *kernels
	of                   []*weight
	dst, src             *float32
	dstStride, srcStride int // bytes, from a row to the next of all heads
	inner, outer         int
	transposed           bool
	inputs               int // rows of a head
	rows                 int // of them a piece
	blocks               int // pieces a head
}

// MatMulHeads implements compute.Backend.
func (b *Backend) MatMulHeads(dst, src compute.Mat, w compute.Experts, transposed bool) {
	const op = "MatMulHeads"
	if b.err != nil {
		return
	}
	ws, ok := w.(*experts)
	if !ok || ws == nil {
		b.fail(op, "the heads were not loaded by this backend")
		return
	}
	d, ok := b.mat(op, "dst", dst)
	if !ok {
		return
	}
	s, ok := b.mat(op, "src", src)
	if !ok {
		return
	}
	outer, inner := ws.Rows(), ws.Cols()
	if transposed {
		outer, inner = inner, outer
	}
	if src.Cols != inner || dst.Cols != outer || dst.Rows != src.Rows || src.Rows%len(ws.of) != 0 {
		b.fail(op, "dst is [%d, %d], src [%d, %d]; operands of %d heads need [n, %d] and [n, %d]", dst.Rows, dst.Cols, src.Rows, src.Cols, len(ws.of), outer, inner)
		return
	}
	if src.Rows == 0 {
		return
	}
	t := &b.heads
	defer func() { *t = headsTask{} }() // no pointer to memory that may be unmapped later
	*t = headsTask{
		k: b.k, of: ws.of, dst: d, src: s, dstStride: 4 * dst.Stride, srcStride: 4 * src.Stride,
		inner: inner, outer: outer, transposed: transposed, inputs: src.Rows / len(ws.of), rows: blockInputs,
	}
	if transposed {
		t.rows = groupVectors
	}
	t.blocks = pieces(t.inputs, t.rows)
	t.rows = pieces(t.inputs, t.blocks)
	for _, w := range b.workers {
		if err := w.attend.fit(t.rows, max(t.packed(), outer)); err != nil {
			b.fail(op, "workspace: %v", err)
			return
		}
	}
	if src.Rows*inner*outer < smallProduct {
		b.pool.alone(&b.boxes.heads, len(t.of)*t.blocks)
	} else {
		b.pool.run(&b.boxes.heads, len(t.of)*t.blocks)
	}
}

// packed is how many floats the copies of input rows lie apart; see packStride.
func (t *headsTask) packed() int { return t.inner + packPad/4 }

// row is where row i of a head begins in a matrix whose rows of all heads are stride bytes apart.
func (t *headsTask) row(p *float32, head, i, stride int) *float32 {
	return (*float32)(unsafe.Add(unsafe.Pointer(p), (i*len(t.of)+head)*stride))
}

func (t *headsTask) run(w *scratch, piece int) {
	head, first := piece/t.blocks, piece%t.blocks*t.rows
	n := min(t.rows, t.inputs-first)
	if t.transposed {
		t.sum(w, head, first, n)
	} else {
		t.multiply(w, head, first, n)
	}
}

func (t *headsTask) multiply(w *scratch, head, first, n int) {
	for i := range n {
		copy(floats(w.attend.q, 4*i*t.packed(), t.inner), floats(t.row(t.src, head, first+i, t.srcStride), 0, t.inner))
	}
	p := matmulTask{
		k: t.k, w: t.of[head], dst: t.row(t.dst, head, first, t.dstStride), dstStride: t.dstStride * len(t.of),
		src: w.attend.q, srcStride: 4 * t.packed(), inputs: n, segments: 1, length: t.inner, pieceRows: t.outer, rowPieces: 1,
	}
	p.fuse()
	p.run(w, 0)
}

func (t *headsTask) sum(w *scratch, head, first, n int) {
	a, of := &w.attend, t.of[head]
	clear(floats(a.acc, 0, n*t.outer))
	for i := range n {
		*offset(a.rescale, i) = 1
	}
	for k := 0; k < t.inner; k += compute.Tile {
		tile := min(compute.Tile, t.inner-k)
		for i := range n {
			copy(floats(a.scores, 4*i*compute.Tile, tile), floats(t.row(t.src, head, first+i, t.srcStride), 4*k, tile))
		}
		rows, stride := (*float32)(unsafe.Pointer(of.row(k))), of.rowBytes
		if of.dtype != tensor.F32 || uintptr(unsafe.Pointer(rows))%4 != 0 || stride%4 != 0 {
			t.k.expand[of.dtype](a.keys, 4*t.outer, of.row(k), of.rowBytes, tile, t.outer)
			rows, stride = a.keys, 4*t.outer
		}
		t.k.weigh(a.acc, a.rescale, a.scores, rows, stride, n, t.outer, tile)
	}
	for i := range n {
		copy(floats(t.row(t.dst, head, first+i, t.dstStride), 0, t.outer), floats(a.acc, 4*i*t.outer, t.outer))
	}
}

// Copy implements compute.Backend.
func (b *Backend) Copy(dst, src compute.Mat) {
	const op = "Copy"
	if b.err != nil || !b.sameShape(op, dst, src) {
		return
	}
	d, ok := b.mat(op, "dst", dst)
	if !ok {
		return
	}
	s, ok := b.mat(op, "src", src)
	if !ok {
		return
	}
	b.pack = packTask{d, s, 4 * dst.Stride, 4 * src.Stride, src.Rows, src.Cols, rowsPiece(src.Cols)}
	b.pool.run(&b.boxes.pack, pieces(src.Rows, b.pack.piece))
	b.pack = packTask{}
}
