package collective

import (
	"math/bits"
	"sync"

	"baton/compute/cpu"
)

// pools keep memory of messages for reuse, by power of two.
var pools [bits.UintSize]sync.Pool

// smallest is the least memory of a message, in floats, as a power of two.
const smallest = 6

// getFloats returns memory for n floats with any contents.
func getFloats(n int) *[]float32 {
	class := max(bits.Len(uint(n-1)), smallest)
	b, ok := pools[class].Get().(*[]float32)
	if !ok {
		s := make([]float32, 1<<class)
		b = &s
	}
	*b = (*b)[:n]
	return b
}

// putFloats gives memory from getFloats back. nil is fine.
func putFloats(b *[]float32) {
	if b != nil {
		pools[bits.Len(uint(cap(*b)-1))].Put(b)
	}
}

// pack copies a matrix to dense memory.
func pack(dst []float32, v view) {
	if v.dense() {
		v = v.flat()
	}
	for i := range v.rows {
		copy(dst[i*v.cols:], v.row(i))
	}
}

// unpack copies dense memory to a matrix with elements.
func unpack(v view, src []float32) {
	if v.dense() {
		v = v.flat()
	}
	for i := range v.rows {
		copy(v.row(i), src[i*v.cols:])
	}
}

// addTo adds dense memory to a matrix with elements.
func addTo(v view, src []float32) {
	if v.dense() {
		v = v.flat()
	}
	for i := range v.rows {
		cpu.Add(v.row(i), src[i*v.cols:(i+1)*v.cols])
	}
}
