package tensor

import (
	"encoding/binary"
	"math"
	"slices"
)

// ggufKind is the type of a metadata value.
type ggufKind uint32

const (
	kindU8 ggufKind = iota
	kindI8
	kindU16
	kindI16
	kindU32
	kindI32
	kindF32
	kindBool
	kindString
	kindArray
	kindU64
	kindI64
	kindF64
)

// size is that of a fixed-size kind in bytes; 0 for the others.
func (k ggufKind) size() uint64 {
	switch k {
	case kindU8, kindI8, kindBool:
		return 1
	case kindU16, kindI16:
		return 2
	case kindU32, kindI32, kindF32:
		return 4
	case kindU64, kindI64, kindF64:
		return 8
	}
	return 0
}

// minBytes is the least that one element takes: a string's length for strings.
func (k ggufKind) minBytes() uint64 {
	if s := k.size(); s > 0 {
		return s
	}
	return 8
}

// ggufValue is a metadata value still in the file's bytes, which are known to hold count elements.
type ggufValue struct {
	kind, element ggufKind
	count         int
	data          []byte
}

// Keys returns every metadata key in the file's order.
func (g *GGUF) Keys() []string { return slices.Clone(g.keys) }

// Has says whether the metadata holds the key.
func (g *GGUF) Has(key string) bool {
	_, ok := g.values[key]
	return ok
}

// String returns a string value. Like all getters it gives a *FileError that wraps ErrMissing when the
// key is absent, ErrMalformed when its value has another type.
func (g *GGUF) String(key string) (string, error) {
	v, err := g.scalar(key, "a string", kindString)
	if err != nil {
		return "", err
	}
	return string(v.data[8:]), nil
}

// Bool returns a truth value.
func (g *GGUF) Bool(key string) (bool, error) {
	v, err := g.scalar(key, "a bool", kindBool)
	if err != nil {
		return false, err
	}
	return v.data[0] != 0, nil
}

// Int returns an integer of any width and sign.
func (g *GGUF) Int(key string) (int64, error) {
	v, err := g.scalar(key, "an integer", integerKinds...)
	if err != nil {
		return 0, err
	}
	n, ok := v.integer(0)
	if !ok {
		return 0, g.wrongType(key, "an integer that 64 signed bits hold")
	}
	return n, nil
}

// Float returns a number of any type.
func (g *GGUF) Float(key string) (float64, error) {
	v, err := g.scalar(key, "a number", numberKinds...)
	if err != nil {
		return 0, err
	}
	return v.float(0), nil
}

// Strings returns an array of strings, copied out of the file.
func (g *GGUF) Strings(key string) ([]string, error) {
	v, err := g.array(key, "an array of strings", kindString)
	if err != nil {
		return nil, err
	}
	// One copy for all strings instead of one each: vocabularies have a hundred thousand short ones.
	text := string(v.data)
	out := make([]string, v.count)
	for i, pos := 0, 0; i < v.count; i++ {
		n := int(binary.LittleEndian.Uint64(v.data[pos:]))
		out[i] = text[pos+8 : pos+8+n]
		pos += 8 + n
	}
	return out, nil
}

// Int32s returns an array of integers of any type whose values 32 signed bits hold.
func (g *GGUF) Int32s(key string) ([]int32, error) {
	const want = "an array of 32-bit integers"
	v, err := g.array(key, want, integerKinds...)
	if err != nil {
		return nil, err
	}
	out := make([]int32, v.count)
	for i := range out {
		n, ok := v.integer(i)
		if !ok || n < math.MinInt32 || n > math.MaxInt32 {
			return nil, g.wrongType(key, want)
		}
		out[i] = int32(n)
	}
	return out, nil
}

// Float32s returns an array of numbers of any type.
func (g *GGUF) Float32s(key string) ([]float32, error) {
	v, err := g.array(key, "an array of numbers", numberKinds...)
	if err != nil {
		return nil, err
	}
	out := make([]float32, v.count)
	for i := range out {
		out[i] = float32(v.float(i))
	}
	return out, nil
}

var (
	integerKinds = []ggufKind{kindU8, kindI8, kindU16, kindI16, kindU32, kindI32, kindU64, kindI64}
	numberKinds  = append([]ggufKind{kindF32, kindF64}, integerKinds...)
)

func (g *GGUF) scalar(key, want string, kinds ...ggufKind) (ggufValue, error) {
	v, ok := g.values[key]
	if !ok {
		return v, g.missing(key)
	}
	if !slices.Contains(kinds, v.kind) {
		return v, g.wrongType(key, want)
	}
	return v, nil
}

func (g *GGUF) array(key, want string, elements ...ggufKind) (ggufValue, error) {
	v, ok := g.values[key]
	if !ok {
		return v, g.missing(key)
	}
	if v.kind != kindArray || !slices.Contains(elements, v.element) {
		return v, g.wrongType(key, want)
	}
	return v, nil
}

func (g *GGUF) missing(key string) error {
	return fileErrorf(ErrMissing, g.Path, quoteName("key", key), "is not in the metadata")
}

func (g *GGUF) wrongType(key, want string) error {
	return fileErrorf(ErrMalformed, g.Path, quoteName("key", key), "is not %s", want)
}

// integer returns element i of an integer value; false when an int64 cannot hold it.
func (v ggufValue) integer(i int) (int64, bool) {
	b := v.data[i*int(v.element.size()):]
	switch v.element {
	case kindU8:
		return int64(b[0]), true
	case kindI8:
		return int64(int8(b[0])), true
	case kindU16:
		return int64(binary.LittleEndian.Uint16(b)), true
	case kindI16:
		return int64(int16(binary.LittleEndian.Uint16(b))), true
	case kindU32:
		return int64(binary.LittleEndian.Uint32(b)), true
	case kindI32:
		return int64(int32(binary.LittleEndian.Uint32(b))), true
	case kindU64:
		n := binary.LittleEndian.Uint64(b)
		return int64(n), n <= math.MaxInt64
	}
	return int64(binary.LittleEndian.Uint64(b)), true
}

// float returns element i of a numeric value.
func (v ggufValue) float(i int) float64 {
	b := v.data[i*int(v.element.size()):]
	switch v.element {
	case kindF32:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
	case kindF64:
		return math.Float64frombits(binary.LittleEndian.Uint64(b))
	case kindU64:
		return float64(binary.LittleEndian.Uint64(b))
	}
	n, _ := v.integer(i)
	return float64(n)
}
