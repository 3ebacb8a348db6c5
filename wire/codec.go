package wire

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

// Message is a pointer to one of this package's message structs.
type Message interface {
	Header() Header
	msgp.Marshaler
	msgp.Unmarshaler
	msgp.Sizer
}

// Unknown is a message of a header that this version does not know. Raw is its field array in msgpack;
// sent again, it arrives as it came.
type Unknown struct {
	Of  Header
	Raw []byte
}

// MarshalMsg appends the field array as it came.
func (u *Unknown) MarshalMsg(b []byte) ([]byte, error) {
	if len(u.Raw) == 0 {
		return msgp.AppendArrayHeader(b, 0), nil
	}
	return append(b, u.Raw...), nil
}

// UnmarshalMsg copies the value that b starts with and returns the rest of b.
func (u *Unknown) UnmarshalMsg(b []byte) ([]byte, error) {
	rest, err := msgp.Skip(b)
	if err != nil {
		return b, err
	}
	u.Raw = append([]byte(nil), b[:len(b)-len(rest)]...)
	return rest, nil
}

// Msgsize is an upper bound of the encoded size in bytes.
func (u *Unknown) Msgsize() int { return len(u.Raw) + 1 }

// MalformedError reports a frame that does not hold what its header promises. The frame was consumed:
// the connection still works, and whether to keep it is the receiver's choice.
type MalformedError struct {
	Of  Header // HeaderUnread when the frame does not say
	Err error  // names the field
}

func (e *MalformedError) Error() string {
	return fmt.Sprintf("wire: malformed %v message: %v", e.Of, e.Err)
}

// Unwrap returns the decoder's error.
func (e *MalformedError) Unwrap() error { return e.Err }

// FrameSizeError reports a frame beyond the limit of the connection.
type FrameSizeError struct{ Size, Limit int }

func (e *FrameSizeError) Error() string {
	return fmt.Sprintf("wire: a frame of %d bytes; at most %d are sent or accepted", e.Size, e.Limit)
}

const lengthSize = 4 // of the prefix of a frame

// frameBound is an upper bound of the bytes that appendFrame appends for m.
func frameBound(m Message) int { return lengthSize + 3 + m.Msgsize() }

// appendFrame appends m as a frame. On error it returns b as it was.
func appendFrame(b []byte, m Message, limit int) ([]byte, error) {
	start := len(b)
	out := b
	out = append(out, 0, 0, 0, 0)
	out = msgp.AppendArrayHeader(out, 2)
	out = msgp.AppendUint8(out, uint8(m.Header()))
	out, err := m.MarshalMsg(out)
	if err != nil {
		return b, fmt.Errorf("wire: encode %v: %w", m.Header(), err)
	}
	size := len(out) - start - lengthSize
	if size > limit {
		return b, &FrameSizeError{Size: size, Limit: limit}
	}
	binary.LittleEndian.PutUint32(out[start:], uint32(size))
	return out, nil
}

// decodeFrame decodes what followed the length prefix. The message shares no memory with b.
func decodeFrame(b []byte) (Message, error) {
	of := HeaderUnread
	malformed := func(err error) (Message, error) { return nil, &MalformedError{Of: of, Err: err} }
	if err := checkFrame(b); err != nil {
		return malformed(err)
	}
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return malformed(err)
	}
	if n == 0 {
		return malformed(errors.New("no header"))
	}
	h, b, err := msgp.ReadUint8Bytes(b)
	if err != nil {
		return malformed(fmt.Errorf("header: %w", err))
	}
	of = Header(h)
	m := newMessage(of)
	if n == 1 {
		return m, nil
	}
	if _, err := m.UnmarshalMsg(b); err != nil {
		return malformed(err)
	}
	return m, nil
}

// Bounds that keep what a frame decodes to in proportion to its size. An array of more than
// denseArray elements needs at least minElement bytes for each, and there may be no more than
// denseArray + size/minElement arrays in all: every list of structs that this package encodes has
// longer elements (lists of numbers are binary strings, not arrays), while a small frame that
// claims a long list, or consists of empty ones, would make the decoder allocate many times its size.
const (
	denseArray = 64
	minElement = 4
	maxDepth   = 16
)

var (
	errDeep  = fmt.Errorf("nested deeper than %d", maxDepth)
	errDense = errors.New("lists with more elements than the frame has room for")
)

// checkFrame walks b, which must hold exactly one complete value within the bounds.
func checkFrame(b []byte) error {
	arrays := denseArray + len(b)/minElement
	var left [maxDepth]uint64 // elements to come of the arrays that are open
	depth, at := 0, 0
	for {
		size, elements := valueSize(b[at:])
		if size > uint64(len(b)-at) {
			return fmt.Errorf("cut short: byte %d of %d begins a value of %d bytes", at, len(b), size)
		}
		if size == 0 {
			return fmt.Errorf("byte %d begins no value", at)
		}
		at += int(size)
		if elements >= 0 {
			n := uint64(elements)
			if depth == maxDepth-1 {
				return errDeep
			}
			if arrays--; arrays < 0 || n > denseArray && n*minElement > uint64(len(b)-at) {
				return errDense
			}
			if n > 0 {
				left[depth] = n
				depth++
				continue
			}
		}
		for depth > 0 {
			if left[depth-1]--; left[depth-1] > 0 {
				break
			}
			depth--
		}
		if depth == 0 {
			break
		}
	}
	if at < len(b) {
		return fmt.Errorf("%d bytes after the message", len(b)-at)
	}
	return nil
}

// valueSize is how many bytes the value that b begins with has, for arrays and maps without their elements,
// whose number it tells; that is negative for others. A size beyond b is what is missing, 0 that there is no
// such value.
func valueSize(b []byte) (size uint64, elements int64) {
	if len(b) == 0 {
		return 1, -1
	}
	lead := b[0]
	switch {
	case lead < 0x80 || lead >= 0xe0: // small integers
		return 1, -1
	case lead < 0x90:
		return 1, 2 * int64(lead&0x0f)
	case lead < 0xa0:
		return 1, int64(lead & 0x0f)
	case lead < 0xc0: // short strings
		return 1 + uint64(lead&0x1f), -1
	}
	f := formats[lead-0xc0]
	size = uint64(f.fixed) + uint64(f.length)
	if f.length == 0 || size > uint64(len(b)) {
		return size, -1
	}
	var n uint64
	for _, c := range b[1 : 1+f.length] {
		n = n<<8 | uint64(c)
	}
	if f.each > 0 {
		return size, int64(f.each) * int64(n)
	}
	return size + n, -1
}

// formats are msgpack's for the lead bytes 0xc0 to 0xdf: how many bytes a value has beside a length, how many
// a length has, and for arrays and maps how many elements each counts for.
var formats = [32]struct{ fixed, length, each uint8 }{
	{1, 0, 0}, {}, {1, 0, 0}, {1, 0, 0}, // nil, none, false, true
	{1, 1, 0}, {1, 2, 0}, {1, 4, 0}, // bin
	{2, 1, 0}, {2, 2, 0}, {2, 4, 0}, // ext
	{5, 0, 0}, {9, 0, 0}, // float
	{2, 0, 0}, {3, 0, 0}, {5, 0, 0}, {9, 0, 0}, // uint
	{2, 0, 0}, {3, 0, 0}, {5, 0, 0}, {9, 0, 0}, // int
	{3, 0, 0}, {4, 0, 0}, {6, 0, 0}, {10, 0, 0}, {18, 0, 0}, // fixext
	{1, 1, 0}, {1, 2, 0}, {1, 4, 0}, // str
	{1, 2, 1}, {1, 4, 1}, // array
	{1, 2, 2}, {1, 4, 2}, // map
}
