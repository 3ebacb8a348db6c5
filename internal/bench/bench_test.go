//go:build linux

package bench

import (
	"bytes"
	"context"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"baton/coordinator"
	"baton/transfer"
	"baton/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Every way moves the bytes of every shape: a benchmark that skips some would be a fast one.
func TestEveryWayMovesEverything(t *testing.T) {
	const size = 16 * mebi
	s, err := newStand(DataConfig{Threads: 2, Streams: 4}, size)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	for _, w := range s.ways {
		if w.name == "memcpy, anonymous memory" {
			continue // between memories of its own
		}
		for _, sh := range []shape{{name: "whole", copies: []transfer.Copy{{Len: size}}}, {name: "blocks", copies: blocks(32, 256<<10)}} {
			clear(s.to)
			if err := w.move(t.Context(), sh.copies); err != nil {
				t.Fatalf("%s, %s: %v", w.name, sh.name, err)
			}
			for _, c := range sh.copies {
				if !bytes.Equal(s.to[c.Dst:c.Dst+c.Len], s.from[c.Src:c.Src+c.Len]) {
					t.Errorf("%s, %s: %+v did not arrive", w.name, sh.name, c)
				}
			}
		}
	}
}

func TestDivide(t *testing.T) {
	for _, s := range []shape{
		{copies: []transfer.Copy{{Src: 5, Dst: 7, Len: 10}}},
		{copies: []transfer.Copy{{Src: 0, Dst: 3, Len: 1}, {Src: 9, Dst: 5, Len: 1}}},
		{copies: blocks(9, 7)},
	} {
		for n := 1; n <= 4; n++ {
			shares := divide(s.copies, n)
			var got, want [][2]int64 // every byte's way
			for _, c := range slices.Concat(shares...) {
				for i := range c.Len {
					got = append(got, [2]int64{c.Src + i, c.Dst + i})
				}
			}
			for _, c := range s.copies {
				for i := range c.Len {
					want = append(want, [2]int64{c.Src + i, c.Dst + i})
				}
			}
			if len(shares) != n || !slices.Equal(got, want) {
				t.Errorf("%v among %d: %v", s.copies, n, shares)
			}
			each := (s.bytes() + int64(n) - 1) / int64(n)
			for _, share := range shares {
				if got := (shape{copies: share}).bytes(); got > each {
					t.Errorf("%v among %d: one has %d bytes of at most %d", s.copies, n, got, each)
				}
			}
		}
	}
}

// The ratio is that of the bound's time to the way's, whichever goes first.
func TestMeasure(t *testing.T) {
	sleep := func(d time.Duration) func(context.Context, []transfer.Copy) error {
		return func(context.Context, []transfer.Copy) error { time.Sleep(d); return nil }
	}
	bound := &way{name: "bound", move: sleep(5 * time.Millisecond)}
	slow := &way{name: "slow", bound: bound, move: sleep(20 * time.Millisecond)}
	got, err := measure(t.Context(), shape{copies: []transfer.Copy{{Len: 1e6}}}, []*way{bound, slow}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if r := got[1]; r.Of != "bound" || r.Ratio < 0.15 || r.Ratio > 0.5 || r.GBps > 0.05 || got[0].Ratio != 0 || got[0].GBps < r.GBps {
		t.Errorf("%+v", got)
	}
}

func TestQuantile(t *testing.T) {
	list := []float64{5, 1, 4, 2, 3}
	for q, want := range map[float64]float64{0: 1, 0.5: 3, 0.9: 5, 1: 5} {
		if got := quantile(list, q); got != want {
			t.Errorf("%v: %v, want %v", q, got, want)
		}
	}
}

func TestReport(t *testing.T) {
	r := Report{Checks: []Check{
		{What: "a", Got: 1, Target: 1}, {What: "b", Got: 0.9, Target: 1}, {What: "c", Got: 2, Target: 2, AtMost: true}, {What: "d", Got: 3, Target: 2, AtMost: true},
	}}
	var b strings.Builder
	if err := r.Write(&b); err != nil {
		t.Fatal(err)
	}
	var verdicts []string
	for line := range strings.Lines(strings.TrimSpace(b.String())) {
		verdicts = append(verdicts, strings.Fields(line)[0])
	}
	if want := []string{"ok", "MISSED", "ok", "MISSED"}; !slices.Equal(verdicts, want) {
		t.Errorf("%v, want %v", verdicts, want)
	}
}

// The stubs follow the protocol: a real coordinator takes all they say, hands over every request, and is empty
// afterwards.
func TestStubsSpeakTheProtocol(t *testing.T) {
	for _, traffic := range []traffic{{prompt: 100, tokens: 2}, {prompt: 100, tokens: 5, events: true}} {
		hub, err := coordinator.NewServer(coordinator.ServerConfig{Logger: quiet})
		if err != nil {
			t.Fatal(err)
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan error, 1)
		go func() { served <- hub.Serve(t.Context(), l) }()
		w, err := connect(t.Context(), l.Addr().String(), traffic)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.run(t.Context(), 600); err != nil {
			t.Error(err)
		}
		status, err := hub.Status(t.Context())
		if err != nil || status.Requests != 0 || len(status.Engines) != 2 {
			t.Errorf("%+v, %v", status, err)
		}
		for _, e := range status.Engines {
			if e.RequestsInUse != 0 || e.BlocksReserved != 0 {
				t.Errorf("%+v", e)
			}
			if e.Role != wire.RolePrefill && e.Role != wire.RoleDecode {
				t.Errorf("an engine of role %s", e.Role)
			}
		}
		w.close()
		hub.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}
