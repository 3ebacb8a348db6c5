package cpu

import "unsafe"

// Blocking of a matrix product; see matmul.go. The sizes keep a panel of four weight rows and three
// input rows in a 32 KB first-level cache and a block's input panel, expanded weights, unfinished
// accumulators and parts in a 512 KB second-level cache.
const (
	blockInputs  = 96  // rows of src a block
	blockWeights = 16  // rows of w a block
	panel        = 640 // elements of the inner dimension a call of dots
	panelSlack   = 64  // a panel may start and end inside a quantised block
	maxSegments  = 64

	expandedStride = panel + panelSlack + 16 // floats; not a multiple of the cache's 4 KB period
)

// scratch is the memory of one worker, off the Go heap.
type scratch struct {
	mem      []byte
	expanded *float32 // [blockWeights][expandedStride]
	carry    *float32 // [blockWeights/tileRows][blockInputs][tileRows][lanes]
	parts    *float32 // [maxSegments][blockInputs][blockWeights], or [maxSegments][gemvRows]

	attend attendScratch
	pieces uint // that it ran so far
}

const (
	expandedFloats = blockWeights * expandedStride
	carryFloats    = blockWeights * blockInputs * lanes
	partFloats     = maxSegments * blockInputs * blockWeights
)

func newScratch() (*scratch, error) {
	mem, err := mapMemory(4 * (expandedFloats + carryFloats + partFloats))
	if err != nil {
		return nil, err
	}
	w := &scratch{mem: mem}
	base := unsafe.Pointer(unsafe.SliceData(mem))
	w.expanded = (*float32)(base)
	w.carry = (*float32)(unsafe.Add(base, 4*expandedFloats))
	w.parts = (*float32)(unsafe.Add(base, 4*(expandedFloats+carryFloats)))
	return w, nil
}

func (w *scratch) free() {
	w.attend.free()
	if w.mem != nil {
		_ = unmapMemory(w.mem) // only fails for memory that was not mapped
		w.mem = nil
	}
}

// offset is the address n floats after p.
func offset(p *float32, n int) *float32 {
	return (*float32)(unsafe.Add(unsafe.Pointer(p), 4*n))
}

func byteOffset(p *byte, n int) *byte { return (*byte)(unsafe.Add(unsafe.Pointer(p), n)) }
