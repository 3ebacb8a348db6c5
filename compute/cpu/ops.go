package cpu

import (
	"math"
	"unsafe"

	"baton/compute"
)

// An element-wise operation is shared among workers only when it is long enough to be worth waking
// them; a piece is about this many elements.
const pieceElements = 16 << 10

// rowsPiece is how many rows of n elements make a piece.
func rowsPiece(n int) int { return max(1, pieceElements/n) }

func pieces(rows, piece int) int { return (rows + piece - 1) / piece }

// embedTask copies rows of a table, expanded.
type embedTask struct {
	k         *kernels
	w         *weight
	dst       *float32
	dstStride int
	first     int32
	ids       []int32
	piece     int
}

// Embed implements compute.Backend.
func (b *Backend) Embed(dst compute.Mat, table compute.Weight, first int32, ids []int32) {
	const op = "Embed"
	if b.err != nil {
		return
	}
	w, ok := table.(*weight)
	if !ok || w == nil {
		b.fail(op, "table was not loaded by this backend")
		return
	}
	p, ok := b.mat(op, "dst", dst)
	if !ok {
		return
	}
	if dst.Cols != w.cols || dst.Rows != len(ids) {
		b.fail(op, "dst is [%d, %d] for %d ids of %d elements", dst.Rows, dst.Cols, len(ids), w.cols)
		return
	}
	b.embed = embedTask{b.k, w, p, 4 * dst.Stride, first, ids, rowsPiece(w.cols)}
	b.pool.run(&b.boxes.embed, pieces(len(ids), b.embed.piece))
	b.embed = embedTask{}
}

func (t *embedTask) run(_ *scratch, piece int) {
	from := piece * t.piece
	for i := from; i < min(from+t.piece, len(t.ids)); i++ {
		dst := (*float32)(unsafe.Add(unsafe.Pointer(t.dst), i*t.dstStride))
		if id := int(t.ids[i]) - int(t.first); id >= 0 && id < t.w.rows {
			t.k.expand[t.w.dtype](dst, 0, t.w.row(id), 0, 1, t.w.cols)
		} else {
			negativeZeros(unsafe.Slice(dst, t.w.cols))
		}
	}
}

// negativeZeros makes a row the neutral element of sums: adding +0 would turn a -0 into a +0.
func negativeZeros(row []float32) {
	zero := math.Float32frombits(1 << 31)
	for i := range row {
		row[i] = zero
	}
}

// addTask adds rows to rows.
type addTask struct {
	k                    *kernels
	dst, src, bias       *float32
	dstStride, srcStride int // bytes
	rows, n, piece       int
}

// Add implements compute.Backend.
func (b *Backend) Add(dst, src compute.Mat, bias compute.Weight) {
	const op = "Add"
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
	var w *float32
	if bias != nil {
		if w, ok = b.vector(op, "bias", bias, dst.Cols); !ok {
			return
		}
	}
	b.add = addTask{b.k, d, s, w, 4 * dst.Stride, 4 * src.Stride, dst.Rows, dst.Cols, rowsPiece(dst.Cols)}
	b.pool.run(&b.boxes.add, pieces(dst.Rows, b.add.piece))
	b.add = addTask{}
}

func (t *addTask) run(_ *scratch, piece int) {
	from := piece * t.piece
	n := min(t.piece, t.rows-from)
	dst, src := (*float32)(unsafe.Add(unsafe.Pointer(t.dst), from*t.dstStride)), (*float32)(unsafe.Add(unsafe.Pointer(t.src), from*t.srcStride))
	t.k.finish(dst, t.dstStride, src, t.srcStride, t.bias, n, t.n, 1)
}

type normTask struct {
	k                    *kernels
	dst, src, w          *float32
	dstStride, srcStride int
	rows, n, piece       int
	eps                  float32
}

// RMSNorm implements compute.Backend.
func (b *Backend) RMSNorm(dst, src compute.Mat, w compute.Weight, eps float32) {
	const op = "RMSNorm"
	if b.err != nil {
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
	v, ok := b.vector(op, "weight", w, src.Cols)
	if !ok {
		return
	}
	if !b.sameShape(op, dst, src) {
		return
	}
	b.norm = normTask{b.k, d, s, v, 4 * dst.Stride, 4 * src.Stride, src.Rows, src.Cols, rowsPiece(src.Cols), eps}
	b.pool.run(&b.boxes.norm, pieces(src.Rows, b.norm.piece))
	b.norm = normTask{}
}

func (b *Backend) sameShape(op string, dst, src compute.Mat) bool {
	if dst.Rows != src.Rows || dst.Cols != src.Cols {
		b.fail(op, "dst is [%d, %d], src [%d, %d]", dst.Rows, dst.Cols, src.Rows, src.Cols)
		return false
	}
	return true
}

func (t *normTask) run(_ *scratch, piece int) {
	from := piece * t.piece
	rows := min(t.piece, t.rows-from)
	dst := (*float32)(unsafe.Add(unsafe.Pointer(t.dst), from*t.dstStride))
	src := (*float32)(unsafe.Add(unsafe.Pointer(t.src), from*t.srcStride))
	t.k.norm(dst, t.dstStride, src, t.srcStride, t.w, rows, t.n, t.eps)
}

type rotateTask struct {
	rotate    func(x, cos, sin *float32, pairs int)
	x, table  *float32
	stride    int
	heads     int
	dim       int
	pairs     int
	positions []int32
	each      int // rows of each position
	rows      int
	piece     int
}

// RotateHeads implements compute.Backend.
func (b *Backend) RotateHeads(x compute.Mat, dim int, rope compute.Buffer, positions []int32) {
	const op = "RotateHeads"
	if b.err != nil {
		return
	}
	p, ok := b.mat(op, "x", x)
	if !ok {
		return
	}
	table, ok := rope.(*buffer)
	if !ok || table == nil || table.rope == nil || table.data == nil {
		b.fail(op, "the table was not made by Rope")
		return
	}
	shape := table.rope
	each := 1
	if n := len(positions); n > 0 && x.Rows%n == 0 {
		each = x.Rows / n
	}
	if dim <= 0 || x.Cols%dim != 0 || 2*shape.pairs > dim || each*len(positions) != x.Rows {
		b.fail(op, "x [%d, %d] in heads of %d, %d rotated pairs, %d positions", x.Rows, x.Cols, dim, shape.pairs, len(positions))
		return
	}
	if !b.indices(op, "positions", positions, shape.positions) {
		return
	}
	t := &b.rotate
	*t = rotateTask{b.k.rotateHalves, p, table.at(0), 4 * x.Stride, x.Cols / dim, dim, shape.pairs, positions, each, x.Rows, rowsPiece(x.Cols)}
	if shape.interleaved {
		t.rotate = b.k.rotatePairs
	}
	b.pool.run(&b.boxes.rotate, pieces(x.Rows, t.piece))
	*t = rotateTask{}
}

func (t *rotateTask) run(_ *scratch, piece int) {
	from := piece * t.piece
	for i := from; i < min(from+t.piece, t.rows); i++ {
		row := (*float32)(unsafe.Add(unsafe.Pointer(t.x), i*t.stride))
		cos := offset(t.table, int(t.positions[i/t.each])*2*t.pairs)
		for h := range t.heads {
			t.rotate(offset(row, h*t.dim), cos, offset(cos, t.pairs), t.pairs)
		}
	}
}

type siluTask struct {
	k                               *kernels
	dst, gate, up                   *float32
	dstStride, gateStride, upStride int
	rows, n, piece                  int
}

// SiLUMul implements compute.Backend.
func (b *Backend) SiLUMul(dst, gate, up compute.Mat) {
	const op = "SiLUMul"
	if b.err != nil {
		return
	}
	d, ok := b.mat(op, "dst", dst)
	if !ok {
		return
	}
	g, ok := b.mat(op, "gate", gate)
	if !ok {
		return
	}
	u, ok := b.mat(op, "up", up)
	if !ok || !b.sameShape(op, dst, gate) || !b.sameShape(op, dst, up) {
		return
	}
	b.silu = siluTask{b.k, d, g, u, 4 * dst.Stride, 4 * gate.Stride, 4 * up.Stride, dst.Rows, dst.Cols, rowsPiece(dst.Cols)}
	b.pool.run(&b.boxes.silu, pieces(dst.Rows, b.silu.piece))
	b.silu = siluTask{}
}

func (t *siluTask) run(_ *scratch, piece int) {
	from := piece * t.piece
	for i := from; i < min(from+t.piece, t.rows); i++ {
		t.k.silu((*float32)(unsafe.Add(unsafe.Pointer(t.dst), i*t.dstStride)),
			(*float32)(unsafe.Add(unsafe.Pointer(t.gate), i*t.gateStride)),
			(*float32)(unsafe.Add(unsafe.Pointer(t.up), i*t.upStride)), t.n)
	}
}

// GatherRows implements compute.Backend.
func (b *Backend) GatherRows(dst, src compute.Mat, idx []int32) {
	const op = "GatherRows"
	if b.err != nil {
		return
	}
	d, ok := b.mat(op, "dst", dst)
	if !ok {
		return
	}
	s, ok := b.mat(op, "src", src)
	if !ok || !b.indices(op, "idx", idx, src.Rows) {
		return
	}
	if dst.Cols != src.Cols || dst.Rows != len(idx) {
		b.fail(op, "dst is [%d, %d] for %d rows of %d elements", dst.Rows, dst.Cols, len(idx), src.Cols)
		return
	}
	for i, r := range idx {
		copy(floats(d, 4*i*dst.Stride, dst.Cols), floats(s, 4*int(r)*src.Stride, src.Cols))
	}
}

// Read implements compute.Backend. dst receives Rows*Cols elements. It returns, once, the error of the
// first operation that failed since the last Read; nothing is copied then.
func (b *Backend) Read(dst []float32, src compute.Mat) error {
	const op = "Read"
	s, ok := (*float32)(nil), false
	if b.err == nil {
		s, ok = b.mat(op, "src", src)
	}
	if ok && len(dst) != src.Rows*src.Cols {
		b.fail(op, "%d elements into %d", src.Rows*src.Cols, len(dst))
	}
	if err := b.err; err != nil {
		if !b.closed {
			b.err = nil
		}
		return err
	}
	for i := range src.Rows {
		copy(dst[i*src.Cols:(i+1)*src.Cols], floats(s, 4*i*src.Stride, src.Cols))
	}
	return nil
}

// StoreKV implements compute.Backend.
func (b *Backend) StoreKV(kv compute.KV, layer int, k, v compute.Mat, slots []int32) {
	const op = "StoreKV"
	if b.err != nil {
		return
	}
	c, ok := b.cache(op, kv, layer)
	if !ok {
		return
	}
	keys, ok := b.mat(op, "k", k)
	if !ok {
		return
	}
	var values *float32
	if c.planes == 1 {
		if ok = v == (compute.Mat{}); !ok {
			b.fail(op, "v is [%d, %d] for a cache of one plane", v.Rows, v.Cols)
		}
	} else if values, ok = b.mat(op, "v", v); ok {
		ok = b.sameShape(op, k, v)
	}
	if !ok || !b.indices(op, "slots", slots, c.blocks*c.block) {
		return
	}
	if k.Cols != c.heads*c.dim || k.Rows != len(slots) {
		b.fail(op, "k is [%d, %d] for %d slots of %d heads × %d", k.Rows, k.Cols, len(slots), c.heads, c.dim)
		return
	}
	for i, slot := range slots {
		block, token := int(slot)/c.block, int(slot)%c.block
		for h := range c.heads {
			c.store(b.k, c.at(block, 0, h, token), offset(keys, i*k.Stride+h*c.dim))
			if values != nil {
				c.store(b.k, c.at(block, 1, h, token), offset(values, i*v.Stride+h*c.dim))
			}
		}
	}
}

// store writes one vector at an offset of the cache.
func (c *cache) store(k *kernels, at int, src *float32) {
	dst := unsafe.Pointer(&c.data[at])
	if c.f32 {
		copy(unsafe.Slice((*float32)(dst), c.dim), floats(src, 0, c.dim))
	} else {
		k.toBF16((*uint16)(dst), src, c.dim)
	}
}
