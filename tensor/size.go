package tensor

import (
	"math"
	"math/bits"
	"slices"
	"strings"
)

// maxRank bounds the dimensions of one tensor; no format in use needs more than a handful.
const maxRank = 16

// maxEntries bounds the tensors of one file, and a GGUF file's metadata keys. The largest models have a
// tenth of it; what a header of tiny entries can make us allocate stays below a gigabyte.
const maxEntries = 1 << 20

// byteSize multiplies a shape out. It reports false when the size overflows an int, or when rows are no
// whole number of blocks.
func byteSize(t DType, shape []uint64) (int, bool) {
	elements := uint64(1)
	for _, d := range shape {
		high, low := bits.Mul64(elements, d)
		if high != 0 {
			return 0, false
		}
		elements = low
	}
	block := uint64(t.BlockElements())
	if block > 1 && (len(shape) == 0 || shape[len(shape)-1]%block != 0) {
		return 0, false
	}
	high, size := bits.Mul64(elements/block, uint64(t.BlockBytes()))
	return int(size), high == 0 && size <= math.MaxInt
}

// toInts converts a shape that byteSize accepted. A zero dimension lets the others be anything.
func toInts(shape []uint64) ([]int, bool) {
	out := make([]int, len(shape))
	for i, d := range shape {
		if d > math.MaxInt {
			return nil, false
		}
		out[i] = int(d)
	}
	return out, true
}

// extent is where one tensor lies in a file's data section.
type extent struct {
	name       string
	begin, end int
}

// sortExtents orders extents by position and returns the first two that share bytes, if any do.
func sortExtents(extents []extent) (a, b *extent) {
	slices.SortFunc(extents, func(x, y extent) int {
		if x.begin != y.begin {
			return x.begin - y.begin
		}
		return x.end - y.end
	})
	reach := -1
	for i := range extents {
		if extents[i].begin == extents[i].end {
			continue
		}
		if reach >= 0 && extents[i].begin < extents[reach].end {
			return &extents[reach], &extents[i]
		}
		reach = i
	}
	return nil, nil
}

func sortedByName(byName map[string]Tensor) []Tensor {
	out := make([]Tensor, 0, len(byName))
	for _, t := range byName {
		out = append(out, t)
	}
	slices.SortFunc(out, func(a, b Tensor) int { return strings.Compare(a.Name, b.Name) })
	return out
}
