package wire

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/tinylib/msgp/msgp"
)

// Msgsize is an upper bound of the encoded size in bytes.
func (t *Tokens) Msgsize() int { return msgp.BytesPrefixSize + 4*len(*t) }

// MarshalMsg appends t as one binary string.
func (t *Tokens) MarshalMsg(b []byte) ([]byte, error) {
	b = msgp.AppendBytesHeader(b, uint32(4*len(*t)))
	return appendWords(b, *t), nil
}

// UnmarshalMsg sets t to a copy of what b starts with and returns the rest of b.
func (t *Tokens) UnmarshalMsg(b []byte) ([]byte, error) {
	raw, rest, err := readWords(b)
	if err != nil {
		return b, err
	}
	*t = nil
	if len(raw) > 0 {
		*t = make(Tokens, len(raw)/4)
	}
	setWords(*t, raw)
	return rest, nil
}

// Msgsize is an upper bound of the encoded size in bytes.
func (f *Floats) Msgsize() int { return msgp.BytesPrefixSize + 4*len(*f) }

// MarshalMsg appends f as one binary string.
func (f *Floats) MarshalMsg(b []byte) ([]byte, error) {
	b = msgp.AppendBytesHeader(b, uint32(4*len(*f)))
	return appendWords(b, *f), nil
}

// UnmarshalMsg sets f to a copy of what b starts with and returns the rest of b.
func (f *Floats) UnmarshalMsg(b []byte) ([]byte, error) {
	raw, rest, err := readWords(b)
	if err != nil {
		return b, err
	}
	*f = nil
	if len(raw) > 0 {
		*f = make(Floats, len(raw)/4)
	}
	setWords(*f, raw)
	return rest, nil
}

// readWords reads a binary string of 4-byte words without copying it.
func readWords(b []byte) (raw, rest []byte, err error) {
	raw, rest, err = msgp.ReadBytesZC(b)
	if err == nil && len(raw)%4 != 0 {
		err = fmt.Errorf("a list of 4-byte values has %d bytes", len(raw))
	}
	return raw, rest, err
}

// A long prompt is mostly words, so where memory has the wire's order they are copied as they are.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// appendWords appends 4-byte values in little-endian order.
func appendWords[T int32 | float32](b []byte, words []T) []byte {
	at := len(b)
	b = append(b, memory(words)...)
	if !littleEndian {
		swap(b[at:])
	}
	return b
}

// setWords is the inverse: words has a quarter of raw's length.
func setWords[T int32 | float32](words []T, raw []byte) {
	b := memory(words)
	copy(b, raw)
	if !littleEndian {
		swap(b)
	}
}

// memory is where words lie.
func memory[T int32 | float32](words []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), 4*len(words))
}

// swap turns the bytes of each word around.
func swap(b []byte) {
	for ; len(b) >= 4; b = b[4:] {
		binary.LittleEndian.PutUint32(b, binary.BigEndian.Uint32(b))
	}
}
