// Package backend holds what the transfer backends share: the table of exports, the handle of a
// transfer, the request that a puller sends, and the server that faces strangers.
package backend

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"baton/transfer"
)

// Total is the sum of the lengths in bytes.
func Total(ranges []transfer.Range) int64 {
	var n int64
	for _, r := range ranges {
		n += r.Len
	}
	return n
}

// inside reports whether r lies within a memory of size bytes.
func inside(r transfer.Range, size int64) bool {
	return r.Off >= 0 && r.Len >= 0 && r.Off <= size && r.Len <= size-r.Off
}

// Split checks copies against the sizes of both memories and returns what is read and what is
// written, each in order with neighbours joined: byte i of the first list goes to byte i of the other.
func Split(copies []transfer.Copy, srcSize, dstSize int64) (src, dst []transfer.Range, err error) {
	src, dst = make([]transfer.Range, 0, len(copies)), make([]transfer.Range, 0, len(copies))
	var total int64
	for i, c := range copies {
		s, d := transfer.Range{Off: c.Src, Len: c.Len}, transfer.Range{Off: c.Dst, Len: c.Len}
		if !inside(s, srcSize) {
			return nil, nil, fmt.Errorf("copy %d reads %d bytes at %d of a memory of %d", i, c.Len, c.Src, srcSize)
		}
		if !inside(d, dstSize) {
			return nil, nil, fmt.Errorf("copy %d writes %d bytes at %d of a memory of %d", i, c.Len, c.Dst, dstSize)
		}
		src, dst = join(src, s), join(dst, d)
		if total += c.Len; total > maxTotal {
			return nil, nil, fmt.Errorf("the copies move more than %d bytes", int64(maxTotal))
		}
	}
	return src, dst, nil
}

// join appends r to ranges, or lengthens the last of them if r follows it.
func join(ranges []transfer.Range, r transfer.Range) []transfer.Range {
	if n := len(ranges); n > 0 && ranges[n-1].Off+ranges[n-1].Len == r.Off {
		ranges[n-1].Len += r.Len
		return ranges
	}
	if r.Len == 0 {
		return ranges
	}
	return append(ranges, r)
}

// Part returns size bytes of ranges from an offset into them, in a list of its own.
func Part(ranges []transfer.Range, off, size int64) []transfer.Range {
	for len(ranges) > 0 && off >= ranges[0].Len {
		off -= ranges[0].Len
		ranges = ranges[1:]
	}
	n, end := 0, int64(0)
	for n < len(ranges) && end < off+size {
		end += ranges[n].Len
		n++
	}
	part := slices.Clone(ranges[:n])
	if n > 0 {
		part[0].Off, part[0].Len = part[0].Off+off, part[0].Len-off
		part[n-1].Len -= max(0, end-off-size)
	}
	return part
}

// maxTotal keeps sums of lengths from overflowing.
const maxTotal = 1 << 50

// MaxRanges is the most that one request may name.
const MaxRanges = 4 << 20

// AppendRanges encodes ranges: the count, then for each the distance from the end of the one before
// and the difference in length, as varints. A range of a list of equal blocks takes two to four bytes.
func AppendRanges(b []byte, ranges []transfer.Range) []byte {
	b = binary.AppendUvarint(b, uint64(len(ranges)))
	var end, length int64
	for _, r := range ranges {
		b = binary.AppendVarint(b, r.Off-end)
		b = binary.AppendVarint(b, r.Len-length)
		end, length = r.Off+r.Len, r.Len
	}
	return b
}

var errBadRanges = errors.New("malformed list of ranges")

// ReadRanges decodes what AppendRanges encoded, for a memory of size bytes, and returns the rest of b.
// Every range it returns lies inside the memory and is not empty.
func ReadRanges(b []byte, size int64) (ranges []transfer.Range, rest []byte, err error) {
	n, w := binary.Uvarint(b)
	if w <= 0 || n > uint64(len(b)-w)/2 { // two bytes a range at least
		return nil, nil, errBadRanges
	}
	if n > MaxRanges {
		return nil, nil, fmt.Errorf("%d ranges in one request, the limit is %d", n, MaxRanges)
	}
	b = b[w:]
	ranges = make([]transfer.Range, n)
	var end, length, total int64
	for i := range ranges {
		gap, w := binary.Varint(b)
		if w <= 0 {
			return nil, nil, errBadRanges
		}
		b = b[w:]
		more, w := binary.Varint(b)
		if w <= 0 {
			return nil, nil, errBadRanges
		}
		b = b[w:]
		// Sums that overflow turn negative or leave the memory; either is caught here.
		r := transfer.Range{Off: end + gap, Len: length + more}
		if !inside(r, size) || r.Len == 0 {
			return nil, nil, fmt.Errorf("range %d: %d bytes at %d of a memory of %d", i, r.Len, r.Off, size)
		}
		if total += r.Len; total > maxTotal {
			return nil, nil, fmt.Errorf("the ranges hold more than %d bytes", int64(maxTotal))
		}
		ranges[i] = r
		end, length = r.Off+r.Len, r.Len
	}
	return ranges, b, nil
}

// Set is a set of bytes of a memory: ranges in ascending order that neither touch nor overlap.
type Set []transfer.Range

// NewSet returns the union of ranges, which must lie in a memory of size bytes.
func NewSet(ranges []transfer.Range, size int64) (Set, error) {
	for i, r := range ranges {
		if !inside(r, size) {
			return nil, fmt.Errorf("range %d: %d bytes at %d of a memory of %d", i, r.Len, r.Off, size)
		}
	}
	sorted := sortedRanges(ranges)
	var set Set
	for _, r := range sorted {
		if n := len(set); n > 0 && r.Off <= set[n-1].Off+set[n-1].Len {
			set[n-1].Len = max(set[n-1].Len, r.Off+r.Len-set[n-1].Off)
		} else if r.Len > 0 {
			set = append(set, r)
		}
	}
	return set, nil
}

func byOffset(a, b transfer.Range) int {
	switch {
	case a.Off < b.Off:
		return -1
	case a.Off > b.Off:
		return 1
	}
	return 0
}

func sortedRanges(ranges []transfer.Range) []transfer.Range {
	if slices.IsSortedFunc(ranges, byOffset) {
		return ranges
	}
	ranges = slices.Clone(ranges)
	slices.SortFunc(ranges, byOffset)
	return ranges
}

// Contains reports whether every byte of ranges is in s.
func (s Set) Contains(ranges []transfer.Range) bool {
	i := 0 // most lists ascend: the next range is in the same run or the next
	for _, r := range ranges {
		if i >= len(s) || r.Off < s[i].Off || r.Off >= s[i].Off+s[i].Len {
			if i++; i >= len(s) || r.Off < s[i].Off || r.Off >= s[i].Off+s[i].Len {
				at, exact := slices.BinarySearchFunc(s, r, byOffset)
				if !exact {
					at--
				}
				if at < 0 {
					return false
				}
				i = at
			}
		}
		if r.Off < s[i].Off || r.Off+r.Len > s[i].Off+s[i].Len {
			return false
		}
	}
	return true
}

// Remove returns s without ranges, or false, if one of their bytes is not in s or named twice.
func (s Set) Remove(ranges []transfer.Range) (Set, bool) {
	left := make(Set, 0, len(s)+len(ranges))
	i := 0
	var have transfer.Range // what is left of s[i-1]
	for _, r := range sortedRanges(ranges) {
		for have.Off+have.Len <= r.Off || have.Len == 0 {
			if have.Len > 0 {
				left = append(left, have)
			}
			if i == len(s) {
				return nil, false
			}
			have = s[i]
			i++
		}
		if r.Off < have.Off || r.Off+r.Len > have.Off+have.Len {
			return nil, false
		}
		if r.Off > have.Off {
			left = append(left, transfer.Range{Off: have.Off, Len: r.Off - have.Off})
		}
		have = transfer.Range{Off: r.Off + r.Len, Len: have.Off + have.Len - r.Off - r.Len}
	}
	if have.Len > 0 {
		left = append(left, have)
	}
	return append(left, s[i:]...), true
}
