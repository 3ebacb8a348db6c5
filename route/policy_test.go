package route

import (
	"strings"
	"testing"
)

func TestPrefixWeighsMatchAgainstCapacity(t *testing.T) {
	held := Candidate{Match: 10, Free: 0.25, Last: 1}
	idle := Candidate{Free: 1, Last: 2}
	shallow := Candidate{Match: 5, Free: 0.5}
	for _, c := range []struct {
		name       string
		affinity   float64
		blocks     int
		candidates []Candidate
		want       int
	}{
		{"affinity alone", 1, 10, []Candidate{idle, held}, 1},
		{"capacity alone", 0, 10, []Candidate{held, idle}, 1},
		{"mixed, the holder is worth it", 0.5, 10, []Candidate{idle, held}, 1},
		{"mixed, a quarter of the prefix is not", 0.5, 40, []Candidate{idle, held}, 0},
		{"a shallower owner counts for its part", 1, 10, []Candidate{idle, shallow}, 1},
		{"no complete block: capacity decides", 0.5, 0, []Candidate{held, idle}, 1},
		{"tie: the most recent", 0.5, 10, []Candidate{{Free: 1, Last: 3}, {Free: 1, Last: 7}, {Free: 1, Last: 5}}, 1},
		{"full tie: the first", 0.5, 10, []Candidate{{Free: 1}, {Free: 1}}, 0},
		{"overfull engines do not score below zero", 0.5, 0, []Candidate{{Free: 0, Last: 2}, {Free: -1, Last: 1}}, 0},
	} {
		if got := (Prefix{c.affinity}).Pick(c.blocks, c.candidates); got.Index != c.want {
			t.Errorf("%s: picked %d (%v), want %d", c.name, got.Index, got, c.want)
		}
	}
}

// assign gives n requests without a known prefix to engines of capacity slots each.
func assign(p Policy, n, engines, slots int) []int {
	load := make([]int, engines)
	last := make([]uint64, engines)
	for i := range n {
		c := make([]Candidate, engines)
		for e := range c {
			c[e] = Candidate{Requests: load[e], Free: float64(slots-load[e]) / float64(slots), Last: last[e]}
		}
		e := p.Pick(0, c).Index
		load[e]++
		last[e] = uint64(i + 1)
	}
	return load
}

func TestPoliciesSpreadStrangers(t *testing.T) {
	for _, name := range Names() {
		p, err := ByName(name)
		if err != nil {
			t.Fatal(err)
		}
		for e, n := range assign(p, 6, 3, 8) {
			if n != 2 {
				t.Errorf("%s: engine %d got %d of 6 requests, want 2", name, e, n)
			}
		}
	}
}

func TestLeastLoadedAndRoundRobin(t *testing.T) {
	c := []Candidate{{Requests: 2, Last: 1, Match: 9}, {Requests: 1, Last: 9}, {Requests: 1, Last: 5}}
	if got := (LeastLoaded{}).Pick(9, c); got.Index != 1 {
		t.Errorf("least-loaded: %v", got)
	}
	if got := (RoundRobin{}).Pick(9, c); got.Index != 0 || got.Match != 9 {
		t.Errorf("round-robin: %v", got)
	}
}

func TestByName(t *testing.T) {
	if p, err := ByName(""); err != nil || p.Name() != "prefix" {
		t.Errorf("the default is %v, %v", p, err)
	}
	if _, err := ByName("random"); err == nil || !strings.Contains(err.Error(), "least-loaded, round-robin") {
		t.Errorf("unknown policy: %v", err)
	}
}

func TestDecisionExplainsItself(t *testing.T) {
	d := Prefix{0.5}.Pick(31, []Candidate{{Match: 12, Free: 0.75}, {Free: 0.5}})
	if got, want := d.String(), "prefix of 2: 12/31 blocks held, 75% free, score 0.569"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	d = Session{Prefix: Prefix{0.5}}.Pick(31, []Candidate{{Match: 12, Free: 0.75}})
	d.Pinned = true
	if got, want := d.String(), "session of 1: 12/31 blocks held, 75% free, the session's engine"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	d = LeastLoaded{}.Pick(0, []Candidate{{Free: 1}})
	if got, want := d.String(), "least-loaded of 1: 0/0 blocks held, 100% free"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
