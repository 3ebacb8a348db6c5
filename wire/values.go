package wire

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tinylib/msgp/msgp"
)

// Msgsize is an upper bound of the encoded size in bytes.
func (t *Tokens) Msgsize() int { return msgp.BytesPrefixSize + 4*len(*t) }

// MarshalMsg appends t as one binary string.
func (t *Tokens) MarshalMsg(b []byte) ([]byte, error) {
	b = msgp.AppendBytesHeader(b, uint32(4*len(*t)))
	for _, v := range *t {
		b = binary.LittleEndian.AppendUint32(b, uint32(v))
	}
	return b, nil
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
	for i := range *t {
		(*t)[i] = int32(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return rest, nil
}

// Msgsize is an upper bound of the encoded size in bytes.
func (f *Floats) Msgsize() int { return msgp.BytesPrefixSize + 4*len(*f) }

// MarshalMsg appends f as one binary string.
func (f *Floats) MarshalMsg(b []byte) ([]byte, error) {
	b = msgp.AppendBytesHeader(b, uint32(4*len(*f)))
	for _, v := range *f {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	return b, nil
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
	for i := range *f {
		(*f)[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}
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
