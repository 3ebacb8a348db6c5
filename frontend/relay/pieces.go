package relay

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"strconv"
)

// pieces is a text made of slices of others, which must not change while it is used.
type pieces [][]byte

func (p pieces) size() (n int) {
	for _, b := range p {
		n += len(b)
	}
	return n
}

func (p pieces) join() []byte { return bytes.Join(p, nil) }

// edit makes an object of another's fields.
type edit struct {
	drop []string // fields that are left out
	set  []assignment
}

type assignment struct {
	name  string
	value []byte
}

// put adds a field, instead of what the object has under that name.
func (e *edit) put(name string, value []byte) { e.set = append(e.set, assignment{name, value}) }

func (e *edit) remove(names ...string) { e.drop = append(e.drop, names...) }

func (e *edit) drops(name []byte) bool {
	for _, d := range e.drop {
		if string(name) == d {
			return true
		}
	}
	for i := range e.set {
		if string(name) == e.set[i].name {
			return true
		}
	}
	return false
}

// apply makes the new text: runs of fields that stay, then what was put.
func (e *edit) apply(o *object) pieces {
	list := make(pieces, 1, 4*len(e.set)+6)
	list[0] = []byte{'{'}
	comma := func() {
		if len(list) > 1 {
			list = append(list, []byte{','})
		}
	}
	for i := 0; i < len(o.fields); {
		if e.drops(o.fields[i].name) {
			i++
			continue
		}
		from := i
		for i < len(o.fields) && !e.drops(o.fields[i].name) {
			i++
		}
		comma()
		list = append(list, o.raw[o.fields[from].start:o.fields[i-1].end])
	}
	for i := range e.set {
		comma()
		list = append(list, append(appendString(nil, e.set[i].name), ':'), e.set[i].value)
	}
	return append(list, []byte{'}'})
}

// appendString appends s as a JSON string.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	for _, r := range s { // bytes that are no UTF-8 become U+FFFD
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r < ' ':
			b = fmt.Appendf(b, `\u%04x`, r)
		default:
			b = append(b, string(r)...)
		}
	}
	return append(b, '"')
}

// EncodeIDs is how ids cross between engines: base64 of little-endian int32 values.
func EncodeIDs(ids []int32) string {
	b := make([]byte, 4*len(ids))
	for i, id := range ids {
		binary.LittleEndian.PutUint32(b[4*i:], uint32(id))
	}
	return base64.StdEncoding.EncodeToString(b)
}

// DecodeIDs reads what EncodeIDs writes.
func DecodeIDs(text string) ([]int32, error) {
	b, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, fmt.Errorf("relay: token ids are not base64: %w", err)
	}
	if len(b)%4 != 0 {
		return nil, fmt.Errorf("relay: %d bytes of token ids; each takes four", len(b))
	}
	ids := make([]int32, len(b)/4)
	for i := range ids {
		ids[i] = int32(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return ids, nil
}

// parseIDs reads a JSON array of token ids.
func parseIDs(raw []byte) ([]int32, error) {
	if len(raw) < 2 || raw[0] != '[' || raw[len(raw)-1] != ']' {
		return nil, errNotIDs
	}
	raw = bytes.TrimSpace(raw[1 : len(raw)-1])
	ids := make([]int32, 0, len(raw)/6+1)
	for len(raw) > 0 {
		n := bytes.IndexByte(raw, ',')
		if n < 0 {
			n = len(raw)
		}
		id, err := strconv.ParseInt(string(bytes.TrimSpace(raw[:n])), 10, 32)
		if err != nil {
			return nil, errNotIDs
		}
		ids = append(ids, int32(id))
		if n == len(raw) {
			return ids, nil
		}
		if raw = raw[n+1:]; len(bytes.TrimSpace(raw)) == 0 {
			return nil, errNotIDs
		}
	}
	return ids, nil
}

var errNotIDs = fmt.Errorf("relay: not an array of token ids")
