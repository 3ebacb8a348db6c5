package collective

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"baton/compute"
)

func TestAllReduceIsTheBinaryTree(t *testing.T) {
	for _, n := range []int{1, 2, 4, 8} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			ws := Local(n)
			defer shut(t, ws)
			r := newRand(n)
			for _, s := range []shape{{1, 1}, {1, 2048}, {3, 17}, {5, 700}, {0, 4}} {
				parts := make([]compute.Mat, n)
				for i := range parts {
					parts[i] = random(r, s.rows, s.cols)
				}
				want := tree(parts)
				all(t, ws, func(w *World, g Group) error { return g.AllReduce(parts[w.Rank()]) })
				for i := range parts {
					if !slices.Equal(values(parts[i]), want) {
						t.Fatalf("%v: rank %d differs from the binary tree", s, i)
					}
				}
			}
		})
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
