package backend

import (
	"slices"
	"testing"

	"baton/transfer"

	"pgregory.net/rapid"
)

const space = 200 // bytes of the memory in these tests

func drawRanges(t *rapid.T, label string) []transfer.Range {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) transfer.Range {
		off := rapid.Int64Range(0, space-1).Draw(t, "off")
		return transfer.Range{Off: off, Len: rapid.Int64Range(1, min(space-off, 20)).Draw(t, "len")}
	}), 0, 12).Draw(t, label)
}

// count says how often each byte is in ranges.
func count(ranges []transfer.Range) (n [space]int) {
	for _, r := range ranges {
		for i := r.Off; i < r.Off+r.Len; i++ {
			n[i]++
		}
	}
	return n
}

// Sets behave as sets of bytes.
func TestSet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		members, asked := drawRanges(t, "members"), drawRanges(t, "asked")
		set, err := NewSet(members, space)
		if err != nil {
			t.Fatal(err)
		}
		in, want := count(members), count(asked)
		for i := range in {
			in[i] = min(in[i], 1)
		}
		if count(set) != in {
			t.Fatalf("set %v of %v", set, members)
		}
		for i := 1; i < len(set); i++ {
			if set[i].Off <= set[i-1].Off+set[i-1].Len {
				t.Fatalf("%v is not disjoint and ascending", set)
			}
		}
		contained, removable, rest := true, true, in
		for i := range want {
			contained = contained && (want[i] == 0 || in[i] == 1)
			removable = removable && want[i] <= in[i]
			rest[i] -= want[i]
		}
		before := slices.Clone(asked)
		if got := set.Contains(asked); got != contained {
			t.Fatalf("%v contains %v: %v", set, asked, got)
		}
		left, ok := set.Remove(asked)
		if ok != removable {
			t.Fatalf("%v removable from %v: %v", asked, set, ok)
		}
		if ok && count(left) != rest {
			t.Fatalf("%v without %v is %v", set, asked, left)
		}
		if !slices.Equal(before, asked) {
			t.Fatal("the argument was reordered")
		}
	})
}

func TestRangesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := drawRanges(t, "ranges")
		b := AppendRanges([]byte("head"), want)[4:]
		got, rest, err := ReadRanges(append(b, "tail"...), space)
		if err != nil || string(rest) != "tail" || !slices.Equal(got, want) {
			t.Fatalf("got %v, %q, %v; want %v", got, rest, err, want)
		}
		for n := range b {
			if got, _, err := ReadRanges(b[:n], space); err == nil {
				t.Fatalf("%d of %d bytes decode to %v", n, len(b), got)
			}
		}
	})
}

// Blocks of equal size, as most transfers have them, take few bytes.
func TestRangesAreCompact(t *testing.T) {
	blocks := make([]transfer.Range, 40_000)
	for i := range blocks {
		blocks[i] = transfer.Range{Off: int64(i) * 3 << 18, Len: 1 << 18}
	}
	if n := len(AppendRanges(nil, blocks)); n > 5*len(blocks) {
		t.Errorf("%d bytes for %d blocks", n, len(blocks))
	}
}

func TestReadRangesRefuses(t *testing.T) {
	for name, ranges := range map[string][]transfer.Range{
		"beyond":   {{Off: 90, Len: 11}},
		"negative": {{Off: -1, Len: 5}},
		"empty":    {{Off: 3, Len: 0}},
		"overflow": {{Off: 1<<63 - 1, Len: 1<<63 - 1}},
		"wrap":     {{Off: 1, Len: 5}, {Off: -1 << 63, Len: 7}},
	} {
		if got, _, err := ReadRanges(AppendRanges(nil, ranges), 100); err == nil {
			t.Errorf("%s: got %v", name, got)
		}
	}
	if _, _, err := ReadRanges([]byte{0xff, 0xff, 0xff, 0xff, 0x7f, 0, 0}, 100); err == nil {
		t.Error("a count beyond the bytes that are there was accepted")
	}
	all := slices.Repeat([]transfer.Range{{Len: 1 << 46}}, 20)
	if _, _, err := ReadRanges(AppendRanges(nil, all), 1<<46); err == nil {
		t.Error("a sum that could overflow was accepted")
	}
}

// Both lists of Split, and every Part of them, name the bytes of the copies in order.
func TestSplitAndPart(t *testing.T) {
	flat := func(ranges []transfer.Range) (bytes []int64) {
		for _, r := range ranges {
			for i := range r.Len {
				bytes = append(bytes, r.Off+i)
			}
		}
		return bytes
	}
	rapid.Check(t, func(t *rapid.T) {
		var copies []transfer.Copy
		var wantSrc, wantDst []int64
		for _, r := range drawRanges(t, "sources") {
			if rapid.Bool().Draw(t, "follows") && len(copies) > 0 {
				last := copies[len(copies)-1]
				r.Off = min(last.Src+last.Len, space-r.Len)
			}
			c := transfer.Copy{Src: r.Off, Dst: rapid.Int64Range(0, space-r.Len).Draw(t, "dst"), Len: r.Len}
			copies = append(copies, c, transfer.Copy{Src: 5, Dst: 7})
			for i := range c.Len {
				wantSrc, wantDst = append(wantSrc, c.Src+i), append(wantDst, c.Dst+i)
			}
		}
		src, dst, err := Split(copies, space, space)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(flat(src), wantSrc) || !slices.Equal(flat(dst), wantDst) {
			t.Fatalf("%v became %v and %v", copies, src, dst)
		}
		off := rapid.IntRange(0, len(wantSrc)).Draw(t, "off")
		size := rapid.IntRange(0, len(wantSrc)-off).Draw(t, "size")
		before := slices.Clone(src)
		part := Part(src, int64(off), int64(size))
		if !slices.Equal(flat(part), wantSrc[off:off+size]) {
			t.Fatalf("bytes %d to %d of %v are %v", off, off+size, src, part)
		}
		for i := range part {
			part[i] = transfer.Range{}
		}
		if !slices.Equal(before, src) {
			t.Fatal("a part shares memory with the whole")
		}
	})
	joined, _, err := Split([]transfer.Copy{{Src: 0, Dst: 8, Len: 4}, {Src: 4, Dst: 0, Len: 4}}, 16, 16)
	if err != nil || !slices.Equal(joined, []transfer.Range{{Off: 0, Len: 8}}) {
		t.Errorf("neighbours are not joined: %v, %v", joined, err)
	}
}

func FuzzReadRanges(f *testing.F) {
	f.Add(AppendRanges(nil, []transfer.Range{{Off: 0, Len: 10}, {Off: 20, Len: 10}, {Off: 5, Len: 1}}), int64(100))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		ranges, _, err := ReadRanges(b, size)
		if err != nil {
			return
		}
		for _, r := range ranges {
			if r.Off < 0 || r.Len <= 0 || r.Off+r.Len > size || r.Off+r.Len < 0 {
				t.Fatalf("%v is not in %d bytes", r, size)
			}
		}
		again, rest, err := ReadRanges(AppendRanges(nil, ranges), size)
		if err != nil || len(rest) > 0 || !slices.Equal(again, ranges) {
			t.Fatalf("%v came back as %v, %v", ranges, again, err)
		}
	})
}
