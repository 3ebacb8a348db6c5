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
	var out []uint32
	n := parts[0].Rows * parts[0].Cols
	all := make([][]uint32, len(parts))
	for i := range parts {
		all[i] = values(parts[i])
	}
	for i := range n {
		var add func(p [][]uint32) float32
		add = func(p [][]uint32) float32 {
			if len(p) == 1 {
				return math.Float32frombits(p[0][i])
			}
			return add(p[:len(p)/2]) + add(p[len(p)/2:])
		}
		out = append(out, math.Float32bits(add(all)))
	}
	return out
}
