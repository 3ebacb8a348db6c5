package wire

import (
	"errors"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

// checkFrame and msgp agree on where values begin and end; beyond that it only knows bounds.
func FuzzCheckFrame(f *testing.F) {
	b, err := appendFrame(nil, partial(), 1<<20)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b[lengthSize:])
	for _, frame := range [][]byte{
		{}, {0xc1}, {0x7f}, {0xe0}, {0x80}, {0x90}, {0xa0},
		{0x95, 0xc0, 0xc2, 0xc3, 0xa1, 'x', 0x81, 1, 2},
		{0x92, 0xc4, 1, 9, 0xc5, 0, 1, 9}, {0xc6, 0, 0, 0, 1, 9}, {0xd9, 1, 'x'}, {0xda, 0, 1, 'x'}, {0xdb, 0, 0, 0, 1, 'x'},
		{0xc7, 1, 5, 9}, {0xc8, 0, 1, 5, 9}, {0xc9, 0, 0, 0, 1, 5, 9},
		{0xd4, 5, 9}, {0xd5, 5, 9, 9}, {0xd6, 5, 9, 9, 9, 9}, append([]byte{0xd7, 5}, make([]byte, 8)...), append([]byte{0xd8, 5}, make([]byte, 16)...),
		append([]byte{0xca}, make([]byte, 4)...), append([]byte{0xcb}, make([]byte, 8)...),
		{0xcc, 1}, {0xcd, 1, 1}, {0xce, 1, 1, 1, 1}, append([]byte{0xcf}, make([]byte, 8)...),
		{0xd0, 1}, {0xd1, 1, 1}, {0xd2, 1, 1, 1, 1}, append([]byte{0xd3}, make([]byte, 8)...),
		{0xdc, 0, 1, 7}, {0xdd, 0, 0, 0, 1, 7}, {0xde, 0, 1, 7, 7}, {0xdf, 0, 0, 0, 1, 7, 7},
		{0xc6, 0xff, 0xff, 0xff, 0xff}, {0xdf, 0xff, 0xff, 0xff, 0xff}, {0xd9},
	} {
		f.Add(frame)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		rest, skipErr := msgp.Skip(b)
		whole := skipErr == nil && len(rest) == 0
		err := checkFrame(b)
		if err == nil && !whole {
			t.Fatalf("accepted; msgp says %v, %d bytes left", skipErr, len(rest))
		}
		if err != nil && whole && !errors.Is(err, errDeep) && !errors.Is(err, errDense) {
			t.Fatal(err)
		}
	})
}
