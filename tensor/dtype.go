// Package tensor names the element types and shapes of weights and caches, converts between them, and
// opens the two containers that weights come in (safetensors, GGUF) as memory maps. It never copies a
// tensor's bytes and never computes with them beyond conversion.
package tensor

import "fmt"

// DType is an element type. Block-quantised types keep several elements in one fixed-size block.
type DType uint8

// The element types. The quantised ones have GGML's block formats.
const (
	Invalid DType = iota
	F32
	F16
	BF16
	F64
	I8
	I16
	I32
	I64
	U8
	Bool
	Q4_0
	Q4_1
	Q5_0
	Q5_1
	Q8_0
)

type dtypeInfo struct {
	name               string
	elements, byteSize int
}

var dtypes = [...]dtypeInfo{
	Invalid: {"invalid", 1, 0},
	F32:     {"f32", 1, 4},
	F16:     {"f16", 1, 2},
	BF16:    {"bf16", 1, 2},
	F64:     {"f64", 1, 8},
	I8:      {"i8", 1, 1},
	I16:     {"i16", 1, 2},
	I32:     {"i32", 1, 4},
	I64:     {"i64", 1, 8},
	U8:      {"u8", 1, 1},
	Bool:    {"bool", 1, 1},
	Q4_0:    {"q4_0", 32, 18},
	Q4_1:    {"q4_1", 32, 20},
	Q5_0:    {"q5_0", 32, 22},
	Q5_1:    {"q5_1", 32, 24},
	Q8_0:    {"q8_0", 32, 34},
}

// String is the lower-case name that flags, logs and geometry use.
func (d DType) String() string {
	if int(d) < len(dtypes) {
		return dtypes[d].name
	}
	return fmt.Sprintf("dtype(%d)", uint8(d))
}

// BlockElements is the number of elements in one block: 1 for plain types.
func (d DType) BlockElements() int { return dtypes[d].elements }

// BlockBytes is the size of one block in bytes.
func (d DType) BlockBytes() int { return dtypes[d].byteSize }

// Quantised reports whether elements share a block scale.
func (d DType) Quantised() bool { return dtypes[d].elements > 1 }

// RowBytes is the size in bytes of n consecutive elements; n must be a multiple of BlockElements.
func (d DType) RowBytes(n int) int { return n / dtypes[d].elements * dtypes[d].byteSize }

// Tensor is a named view of bytes that somebody else owns (a file's memory map, or a test's slice).
// Shape is row-major, outermost first: a linear layer's weight is [out, in]. Data is little-endian and
// read-only; it need not be aligned to the element size, because old safetensors files are not.
type Tensor struct {
	Name  string
	DType DType
	Shape []int
	Data  []byte
	Pitch int // bytes from one row to the next; 0: each follows the last
}

// Elements is the product of all dimensions; 1 for a scalar, whose Shape is empty.
func (t Tensor) Elements() int { return t.Rows() * t.Cols() }

// Rows is the product of all dimensions but the last.
func (t Tensor) Rows() int {
	n := 1
	for i := 0; i < len(t.Shape)-1; i++ {
		n *= t.Shape[i]
	}
	return n
}

// Cols is the last dimension; 1 for a scalar.
func (t Tensor) Cols() int {
	if len(t.Shape) == 0 {
		return 1
	}
	return t.Shape[len(t.Shape)-1]
}
