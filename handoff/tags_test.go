package handoff

import (
	"bytes"
	"slices"
	"testing"
)

func TestTags(t *testing.T) {
	tests := [][][]byte{nil, {[]byte("a")}, {{}}, {[]byte("a"), {}, bytes.Repeat([]byte{7}, 300)}}
	for _, tags := range tests {
		got, err := unpackTags(packTags(tags))
		if err != nil || !slices.EqualFunc(got, tags, bytes.Equal) {
			t.Errorf("%q: %q, %v", tags, got, err)
		}
	}
	for _, bad := range [][]byte{{1}, {0x80}, {2, 'a'}, bytes.Repeat([]byte{0xff}, 11), make([]byte, maxTags+1)} {
		if got, err := unpackTags(bad); err == nil {
			t.Errorf("% x: %q", bad, got)
		}
	}
}

func FuzzUnpackTags(f *testing.F) {
	f.Add(packTags([][]byte{[]byte("a"), {}, []byte("bcd")}))
	f.Fuzz(func(t *testing.T, packed []byte) {
		tags, err := unpackTags(packed)
		if err != nil {
			return
		}
		again, err := unpackTags(packTags(tags))
		if err != nil || !slices.EqualFunc(again, tags, bytes.Equal) {
			t.Errorf("%q becomes %q, %v", tags, again, err)
		}
	})
}
