package collective

import (
	"context"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"baton/compute"
)

// mesh joins processes, each with the ranks that it is given, over loopback. It returns Worlds by rank.
func mesh(tb testing.TB, silence time.Duration, processes ...[]int) []*World {
	tb.Helper()
	size := 0
	for _, ranks := range processes {
		size += len(ranks)
	}
	listeners := make([]net.Listener, len(processes))
	leader := ""
	for i, ranks := range processes {
		var err error
		if listeners[i], err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			tb.Fatal(err)
		}
		if slices.Contains(ranks, 0) {
			leader = listeners[i].Addr().String()
		}
	}
	type result struct {
		ws  []*World
		err error
	}
	results := make(chan result, len(processes))
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	for i, ranks := range processes {
		go func() {
			ws, err := Join(ctx, MeshConfig{
				Size: size, Local: ranks, Listener: listeners[i], Peers: []string{leader}, Secret: []byte("s"), Silence: silence,
			})
			results <- result{ws, err}
		}()
	}
	all := make([]*World, size)
	for range processes {
		r := <-results
		if r.err != nil {
			tb.Fatal(r.err)
		}
		for _, w := range r.ws {
			all[w.Rank()] = w
		}
	}
	return all
}

func TestMesh(t *testing.T) {
	for _, processes := range [][][]int{{{0}, {1}}, {{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}, {{3}, {2}, {1}, {0}}} {
		t.Run(fmt.Sprint(processes), func(t *testing.T) {
			ws := mesh(t, 0, processes...)
			r := newRand(1)
			n := len(ws)
			for range 10 {
				parts := make([]compute.Mat, n)
				for i := range parts {
					parts[i] = random(r, 3, 700)
				}
				want := tree(parts)
				all(t, ws, func(w *World, g Group) error { return g.AllReduce(parts[w.Rank()]) })
				for i := range parts {
					if !slices.Equal(values(parts[i]), want) {
						t.Fatalf("rank %d differs from the binary tree", i)
					}
				}
			}
			shut(t, ws)
		})
	}
}

// piped makes two processes of a rank each, connected without a network. Without both, the second one is as if stopped:
// it neither reads nor writes.
func piped(tb testing.TB, silence time.Duration, both bool) []*World {
	a, b := net.Pipe()
	tb.Cleanup(func() { b.Close() })
	p, q := newProcess(2, []int{0}), newProcess(2, []int{1})
	newLink(p, a, "q", []int{1}, silence).start()
	ws := p.worlds()
	if both {
		newLink(q, b, "p", []int{0}, silence).start()
		ws = append(ws, q.worlds()...)
	}
	return ws
}
