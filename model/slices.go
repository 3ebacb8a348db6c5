package model

import (
	"fmt"

	"baton/compute"
	"baton/tensor"
)

// whole returns ts with slices of columns put together from their rows, in memory of the backend. In the file a
// page holds columns of several ranks: a rank that read its slices there would have much of the others' in its
// memory. What the file's mapping took for it is given back. A backend with memory of its own copies by itself.
func (l *loader) whole(ts []tensor.Tensor) []tensor.Tensor {
	size := 0
	for _, t := range ts {
		if apart(t) {
			size += t.Rows() * t.DType.RowBytes(t.Cols())
		}
	}
	if size == 0 || l.err != nil {
		return ts
	}
	buf, err := l.backend.Alloc(size)
	if err != nil {
		l.err = fmt.Errorf("model: %d bytes for slices of weights such as %s: %w", size, ts[0].Name, err)
		return ts
	}
	host, ok := buf.(compute.HostBuffer)
	if !ok {
		l.backend.Free(buf)
		return ts
	}
	room := host.Host()
	out := make([]tensor.Tensor, len(ts))
	for i, t := range ts {
		if out[i] = t; !apart(t) {
			continue
		}
		row, rows := t.DType.RowBytes(t.Cols()), t.Rows()
		data := room[: rows*row : rows*row]
		room = room[rows*row:]
		for r := range rows {
			copy(data[r*row:(r+1)*row], t.Data[r*t.Pitch:])
		}
		l.forget(t)
		out[i].Data, out[i].Pitch = data, 0
	}
	return out
}

// apart reports whether a tensor's rows do not follow each other in memory.
func apart(t tensor.Tensor) bool { return t.Pitch > t.DType.RowBytes(t.Cols()) }
