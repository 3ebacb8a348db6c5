package collective

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"baton/compute"
)

// TestAllReduceIsTheBinaryTree adds matrices of all sizes: some that are summed in one piece, in many, or by
// halves.
func TestAllReduceIsTheBinaryTree(t *testing.T) {
	shapes := []shape{{0, 4}, {1, 1}, {3, 17}, {1, 2048}, {5, 700}, {3, halveElements/3 + 1}, {9, halveElements/9 + 1}}
	for _, n := range []int{2, 4, 8} {
		for where, start := range layouts(n) {
			t.Run(fmt.Sprint(n, " ", where), func(t *testing.T) {
				t.Parallel()
				ws := start(t)
				defer shut(t, ws)
				r := newRand(n)
				for _, s := range shapes {
					parts := make([]compute.Mat, n)
					for i := range parts {
						parts[i] = random(r, s.rows, s.cols)
					}
					want := tree(parts)
					all(t, ws, func(w *World, g Group) error { return g.AllReduce(parts[w.Rank()]) })
					if t.Failed() {
						return
					}
					for i := range parts {
						if !slices.Equal(values(parts[i]), want) {
							t.Fatalf("%v: rank %d differs from the binary tree", s, i)
						}
					}
				}
			})
		}
	}
}

// tree adds matrices in the order that is promised.
func tree(parts []compute.Mat) []uint32 {
	if len(parts) == 1 {
		return values(parts[0])
	}
	a, b := tree(parts[:len(parts)/2]), tree(parts[len(parts)/2:])
	for i := range a {
		a[i] = math.Float32bits(math.Float32frombits(a[i]) + math.Float32frombits(b[i]))
	}
	return a
}
