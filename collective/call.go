package collective

import (
	"fmt"
	"math/bits"
	"unsafe"

	"baton/compute"
)

// op is an operation's number, also on the wire.
type op uint8

const (
	opAllReduce op = iota + 1
	opAllGatherRows
	opAllGatherColumns
	opGatherColumns
	opBroadcast
	opAllToAll
	opBarrier
	opSend // and Recv, its other side
	opEnd
)

var opNames = [opEnd]string{
	opAllReduce: "AllReduce", opAllGatherRows: "AllGatherRows", opAllGatherColumns: "AllGatherColumns",
	opGatherColumns: "GatherColumns", opBroadcast: "Broadcast", opAllToAll: "AllToAll", opBarrier: "Barrier", opSend: "Send",
}

func (o op) String() string { return opNames[o] }

// call is what members of an operation must agree on. Collective operations of a group are numbered from 0,
// and so are the messages of a pair in each direction.
type call struct {
	op   op
	root int // GatherColumns and Broadcast; else 0
	seq  uint64
}

func (c call) String() string {
	switch c.op {
	case opGatherColumns, opBroadcast:
		return fmt.Sprintf("%v (root %d, operation %d)", c.op, c.root, c.seq)
	case opSend:
		return fmt.Sprintf("message %d", c.seq)
	}
	return fmt.Sprintf("%v (operation %d)", c.op, c.seq)
}

// view is a matrix in host memory.
type view struct {
	p                  unsafe.Pointer // of element (0, 0)
	rows, cols, stride int
}

// see makes a view of m, or says why there is none. Without elements any buffer will do, also nil.
func see(m compute.Mat) (view, string) {
	v := view{rows: m.Rows, cols: m.Cols, stride: m.Stride}
	if m.Rows < 0 || m.Cols < 0 || m.Off < 0 {
		return v, fmt.Sprintf("%v has negative dimensions", shape{m.Rows, m.Cols})
	}
	if m.Rows == 0 || m.Cols == 0 {
		return v, ""
	}
	if m.Rows == 1 {
		v.stride = m.Cols
	} else if m.Stride < m.Cols {
		return v, fmt.Sprintf("%v has rows only %d elements apart", shape{m.Rows, m.Cols}, m.Stride)
	}
	buf, ok := m.Buf.(compute.HostBuffer)
	if !ok {
		return v, fmt.Sprintf("a matrix is in a %T; the host can read and write only a compute.HostBuffer", m.Buf)
	}
	host := buf.Host()
	p := unsafe.Pointer(unsafe.SliceData(host))
	size := len(host) / 4
	hi, span := bits.Mul64(uint64(m.Rows-1), uint64(v.stride))
	if hi != 0 || span > uint64(size) || m.Cols > size || m.Off > size || uint64(m.Off)+span+uint64(m.Cols) > uint64(size) {
		return v, fmt.Sprintf("%v at %d, rows %d apart, is not inside its buffer of %d elements", shape{m.Rows, m.Cols}, m.Off, m.Stride, size)
	}
	if uintptr(p)%4 != 0 {
		return v, "a buffer is not aligned for f32"
	}
	v.p = unsafe.Add(p, 4*m.Off)
	return v, ""
}

// shape prints as [rows, cols].
type shape struct{ rows, cols int }

func (s shape) String() string { return fmt.Sprintf("[%d, %d]", s.rows, s.cols) }

func (s shape) empty() bool { return s.rows == 0 || s.cols == 0 }

// same reports whether a matrix of one shape can be copied to one of the other.
func (s shape) same(o shape) bool { return s == o || s.empty() && o.empty() }

// extend puts o below s, or beside it, as the gathering operation does. It reports whether that fits.
func (s *shape) extend(o shape, by op) bool {
	switch {
	case o.empty():
	case s.empty():
		*s = o
	case by == opAllGatherRows && s.cols == o.cols:
		s.rows += o.rows
	case by != opAllGatherRows && s.rows == o.rows:
		s.cols += o.cols
	default:
		return false
	}
	return true
}

func (v view) shape() shape { return shape{v.rows, v.cols} }

func (v view) elements() int { return v.rows * v.cols }

func (v view) dense() bool { return v.stride == v.cols }

// run is n elements of row i from column j; of a dense matrix it may go on into later rows.
func (v view) run(i, j, n int) []float32 {
	return unsafe.Slice((*float32)(unsafe.Add(v.p, 4*(i*v.stride+j))), n)
}

func (v view) row(i int) []float32 { return v.run(i, 0, v.cols) }

// flat makes one row of a dense matrix.
func (v view) flat() view {
	v.rows, v.cols = 1, v.rows*v.cols
	v.stride = v.cols
	return v
}

func (v view) sliceRows(from, n int) view {
	if n > 0 && v.cols > 0 {
		v.p = unsafe.Add(v.p, 4*from*v.stride)
	}
	v.rows = n
	return v
}

func (v view) sliceColumns(from, n int) view {
	if n > 0 && v.rows > 0 {
		v.p = unsafe.Add(v.p, 4*from)
	}
	v.cols = n
	return v
}

// copyView copies src to dst, of the same shape. Nothing happens when they are the same matrix.
func copyView(dst, src view) {
	if dst.elements() == 0 || dst.p == src.p {
		return
	}
	if dst.dense() && src.dense() {
		dst, src = dst.flat(), src.flat()
	}
	for i := range dst.rows {
		copy(dst.row(i), src.row(i))
	}
}
