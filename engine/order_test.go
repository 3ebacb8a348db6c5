package engine

import (
	"maps"
	"slices"
	"testing"

	"baton/wire"
)

// agents plays sessions that come by turns, each with the whole of what was said before, against a cache that holds a part of
// them, and returns the share of prompt tokens that were cached and the longest wait, in passes.
func agents(t *testing.T, overtake int) (share float64, longest int) {
	const sessions, turns, add = 12, 8, 8
	h := newHarness(t, SchedulerConfig{MaxRequests: 1, MaxTokens: 64, BlockSize: 4, Blocks: 80, MaxSeqLen: 200, Overtake: overtake})
	said := make([][]int32, sessions)
	since := map[uint64]int{}
	submit := func(s, turn int) {
		said[s] = append(said[s], ramp(add, 31*s+turn)...)
		id := uint64(s*100 + turn)
		since[id] = 0
		h.submit(wire.SubmitRequest{ID: id, Prompt: slices.Clone(said[s]), Sampling: wire.Sampling{MaxTokens: 1}})
	}
	for s := range sessions {
		said[s] = ramp(16, 100+s)
		submit(s, 0)
	}
	cached, prompts := 0, 0
	for len(since) > 0 {
		h.step()
		for _, id := range slices.Sorted(maps.Keys(since)) {
			since[id]++
			r, done := h.final[id]
			if !done {
				continue
			}
			longest = max(longest, since[id])
			delete(since, id)
			s, turn := int(id)/100, int(id)%100
			cached, prompts = cached+h.first[id].CachedTokens, prompts+len(said[s])
			if want := toyRun(said[s], 1); !slices.Equal(r.Tokens, want) && !slices.Equal(h.tokens[id], want) {
				t.Fatalf("session %d, turn %d: %v, want %v", s, turn, h.tokens[id], want)
			}
			said[s] = append(said[s], h.tokens[id]...)
			if turn+1 < turns {
				submit(s, turn+1)
			}
		}
	}
	h.drain()
	return float64(cached) / float64(prompts), longest
}

// In order of arrival a cache that is too small for all sessions loses each before its next turn. Those with less to compute
// may overtake, by a bounded number.
func TestOvertakeReusesMore(t *testing.T) {
	inOrder, _ := agents(t, 0)
	overtaking, longest := agents(t, 16)
	if inOrder > 0.35 || overtaking < 2*inOrder {
		t.Errorf("%.2f of the prompts were cached in order of arrival, %.2f with 16 overtaking", inOrder, overtaking)
	}
	if longest > 60 {
		t.Errorf("a request waited for %d passes", longest)
	}
}

// Nobody is overtaken more often than may be, whoever comes, and those that fit follow the order.
func TestOvertakeIsBounded(t *testing.T) {
	h := newHarness(t, SchedulerConfig{MaxRequests: 1, MaxTokens: 64, BlockSize: 4, Blocks: 80, MaxSeqLen: 200, Overtake: 3})
	h.submit(wire.SubmitRequest{ID: 1, Prompt: ramp(60, 1), Sampling: wire.Sampling{MaxTokens: 1}})
	h.submit(wire.SubmitRequest{ID: 2, Prompt: ramp(50, 2), Sampling: wire.Sampling{MaxTokens: 1}})
	var order []uint64
	for id := uint64(10); id < 20; id++ {
		h.submit(wire.SubmitRequest{ID: id, Prompt: ramp(8, int(id)), Sampling: wire.Sampling{MaxTokens: 1}})
		h.step()
		for done := range h.final {
			if !slices.Contains(order, done) {
				order = append(order, done)
			}
		}
	}
	h.drain()
	if want := []uint64{10, 11, 12, 1, 2, 13, 14, 15, 16, 17}; !slices.Equal(order, want) {
		t.Errorf("they ended in the order %v, want %v", order, want)
	}
}
