package tensor

import "fmt"

// Slice is how the share of one of parts equal takers is cut from n things, as evenly as they go.
func Slice(n, parts, i int) (from, to int) { return i * n / parts, (i + 1) * n / parts }

// pitch is the distance in bytes from one row to the next.
func (t Tensor) pitch() int {
	if t.Pitch != 0 {
		return t.Pitch
	}
	return t.DType.RowBytes(t.Cols())
}

// SliceRows is the view of rows [from, to) of a matrix, or of those elements of a vector. A zero Tensor
// stays one.
func (t Tensor) SliceRows(from, to int) Tensor {
	if t.Data == nil {
		return t
	}
	if len(t.Shape) == 1 {
		size := t.DType.BlockBytes()
		return Tensor{Name: t.part(from, to), DType: t.DType, Shape: []int{to - from}, Data: t.Data[from*size : to*size]}
	}
	pitch, row := t.pitch(), t.DType.RowBytes(t.Cols())
	end := from * pitch
	if to > from {
		end = (to-1)*pitch + row
	}
	return Tensor{Name: t.part(from, to), DType: t.DType, Shape: []int{to - from, t.Cols()}, Data: t.Data[from*pitch : end], Pitch: t.Pitch}
}

// SliceColumns is the view of columns [from, to) of a matrix, of which both must lie between blocks of its
// type.
func (t Tensor) SliceColumns(from, to int) Tensor {
	if t.Data == nil {
		return t
	}
	pitch, first := t.pitch(), t.DType.RowBytes(from)
	end := (t.Rows()-1)*pitch + t.DType.RowBytes(to)
	return Tensor{Name: t.Name + "[:" + bounds(from, to), DType: t.DType, Shape: []int{t.Rows(), to - from}, Data: t.Data[first:end], Pitch: pitch}
}

func (t Tensor) part(from, to int) string { return t.Name + "[" + bounds(from, to) }

func bounds(from, to int) string { return fmt.Sprintf("%d:%d]", from, to) }
