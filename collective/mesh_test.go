package collective

import (
	"context"
	"net"
	"slices"
	"testing"
	"time"
)

// mesh joins processes, each with the ranks that it is given, over loopback. It returns Worlds by rank.
func mesh(tb testing.TB, processes ...[]int) []*World {
	tb.Helper()
	return meshWith(tb, MeshConfig{}, processes...)
}

func meshWith(tb testing.TB, cfg MeshConfig, processes ...[]int) []*World {
	tb.Helper()
	cfg.Secret, cfg.Silence = []byte("s"), patience // tests share busy machines
	for _, ranks := range processes {
		cfg.Size += len(ranks)
	}
	listeners := make([]net.Listener, len(processes))
	for i, ranks := range processes {
		listeners[i] = listen(tb)
		if slices.Contains(ranks, 0) {
			cfg.Peers = []string{listeners[i].Addr().String()}
		}
	}
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	results := make([]<-chan joined, len(processes))
	for i, ranks := range processes {
		cfg.Local, cfg.Listener = ranks, listeners[i]
		results[i] = join(ctx, cfg)
	}
	all := make([]*World, cfg.Size)
	for _, result := range results {
		r := <-result
		if r.err != nil {
			tb.Fatal(r.err)
		}
		for _, w := range r.ws {
			all[w.Rank()] = w
		}
	}
	return all
}

func listen(tb testing.TB) net.Listener {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	return ln
}

// joined is what Join returned.
type joined struct {
	ws  []*World
	err error
}

// join runs Join on a goroutine of its own.
func join(ctx context.Context, cfg MeshConfig) <-chan joined {
	result := make(chan joined, 1)
	go func() {
		ws, err := Join(ctx, cfg)
		result <- joined{ws, err}
	}()
	return result
}

// piped makes two processes of a rank each, connected without a network. Without both, the second one is as if
// stopped: it neither reads nor writes.
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
