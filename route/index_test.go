package route

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"baton/kvcache"
)

// chain spells a prefix: equal leading arguments give equal leading digests.
func chain(blocks ...int) []kvcache.Digest {
	out := make([]kvcache.Digest, len(blocks))
	h := uint64(1)
	for i, b := range blocks {
		h = h*1_000_003 + uint64(b) + 1
		binary.LittleEndian.PutUint64(out[i][:], h)
		out[i][31] = byte(i)
	}
	return out
}

func depths(x *Index, engines int, c []kvcache.Digest) []int {
	d := make([]int, engines)
	x.Match(c, d)
	return d
}

func TestMatchFindsEachEnginesOwnDepth(t *testing.T) {
	x := NewIndex(100)
	x.Record(0, chain(1, 2, 3, 4))
	x.Record(1, chain(1, 2, 9))
	x.Record(70, chain(1))
	for _, c := range []struct {
		prompt       []kvcache.Digest
		zero, one, z int
	}{
		{chain(1, 2, 3, 4, 5), 4, 2, 1},
		{chain(1, 2, 9, 9), 2, 3, 1},
		{chain(1, 7), 1, 1, 1},
		{chain(7), 0, 0, 0},
		{nil, 0, 0, 0},
	} {
		if d := depths(x, 71, c.prompt); d[0] != c.zero || d[1] != c.one || d[70] != c.z || d[2] != 0 {
			t.Errorf("%d blocks: depths %d %d %d, want %d %d %d", len(c.prompt), d[0], d[1], d[70], c.zero, c.one, c.z)
		}
	}
	if d := depths(x, 1, chain(1, 2, 9)); d[0] != 2 {
		t.Errorf("asked for one engine: %v", d)
	}
}

func TestForgetRemovesAnEngineEntirely(t *testing.T) {
	x := NewIndex(100)
	x.Record(0, chain(1, 2, 3))
	x.Record(65, chain(1, 2))
	x.Forget(0)
	if got := depths(x, 66, chain(1, 2, 3)); got[0] != 0 || got[65] != 2 {
		t.Errorf("depths after forgetting engine 0: %d, %d", got[0], got[65])
	}
	if x.Len() != 2 {
		t.Errorf("%d digests left, want the two that engine 65 holds", x.Len())
	}
	x.Forget(65)
	x.Forget(500)
	if x.Len() != 0 {
		t.Errorf("%d digests left of no engine", x.Len())
	}
	x.Record(0, chain(1))
	if got := depths(x, 66, chain(1)); got[0] != 1 || got[65] != 0 {
		t.Errorf("a reused entry kept its owners: %v", got)
	}
}

func TestLeastRecentIsForgottenFromTheEnd(t *testing.T) {
	x := NewIndex(6)
	x.Record(0, chain(1, 2, 3))
	x.Record(0, chain(5, 6, 7))
	x.Record(0, chain(1, 2)) // now 3 is the oldest, then 7, 6, 5
	x.Record(0, chain(9, 9))
	for _, c := range []struct {
		prompt []kvcache.Digest
		want   int
	}{{chain(1, 2, 3), 2}, {chain(5, 6, 7), 2}, {chain(9, 9), 2}} {
		if got := depths(x, 1, c.prompt)[0]; got != c.want {
			t.Errorf("depth %d, want %d", got, c.want)
		}
	}
	x.Record(0, chain(1, 2, 3, 4, 5, 6, 7, 8))
	if got := depths(x, 1, chain(1, 2, 3, 4, 5, 6, 7, 8))[0]; got != 6 || x.Len() != 6 {
		t.Errorf("of a chain longer than the limit %d are kept (%d in all), want the first 6", got, x.Len())
	}
}

// model is the index written the obvious way: a list of digests by recency.
type model struct {
	limit  int
	recent []kvcache.Digest // most recent first
	owners map[kvcache.Digest]map[int]bool
}

func (m *model) record(e int, c []kvcache.Digest) {
	c = c[:min(len(c), m.limit)]
	for _, d := range slices.Backward(c) {
		m.recent = slices.DeleteFunc(m.recent, func(o kvcache.Digest) bool { return o == d })
		m.recent = slices.Insert(m.recent, 0, d)
		if m.owners[d] == nil {
			m.owners[d] = map[int]bool{}
		}
		m.owners[d][e] = true
	}
	for len(m.recent) > m.limit {
		last := len(m.recent) - 1
		delete(m.owners, m.recent[last])
		m.recent = m.recent[:last]
	}
}

func (m *model) forget(e int) {
	for d, o := range m.owners {
		if delete(o, e); len(o) == 0 {
			delete(m.owners, d)
			m.recent = slices.DeleteFunc(m.recent, func(x kvcache.Digest) bool { return x == d })
		}
	}
}

func (m *model) depth(e int, c []kvcache.Digest) int {
	for i, d := range c {
		if !m.owners[d][e] {
			return i
		}
	}
	return len(c)
}

func TestIndexAgreesWithItsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 12).Draw(t, "limit")
		x, m := NewIndex(limit), &model{limit: limit, owners: map[kvcache.Digest]map[int]bool{}}
		engines := []int{0, 1, 63, 64, 130}
		prompt := rapid.Map(rapid.SliceOfN(rapid.IntRange(0, 2), 0, 5), func(b []int) []kvcache.Digest { return chain(b...) })
		t.Repeat(map[string]func(*rapid.T){
			"record": func(t *rapid.T) {
				e, c := rapid.SampledFrom(engines).Draw(t, "engine"), prompt.Draw(t, "prompt")
				x.Record(e, c)
				m.record(e, c)
			},
			"forget": func(t *rapid.T) {
				e := rapid.SampledFrom(engines).Draw(t, "engine")
				x.Forget(e)
				m.forget(e)
			},
			"": func(t *rapid.T) {
				if x.Len() != len(m.recent) {
					t.Fatalf("%d digests, want %d", x.Len(), len(m.recent))
				}
				c := prompt.Draw(t, "asked")
				got := depths(x, 131, c)
				for _, e := range engines {
					if want := m.depth(e, c); got[e] != want {
						t.Fatalf("engine %d holds %d of %d, want %d", e, got[e], len(c), want)
					}
				}
			},
		})
	})
}

func BenchmarkIndex(b *testing.B) {
	for _, blocks := range []int{32, 1024} {
		x := NewIndex(1 << 18)
		prompts := make([][]kvcache.Digest, 4096/blocks*8)
		for i := range prompts {
			ids := make([]int, blocks)
			for j := range ids {
				ids[j] = j
				if j >= blocks/2 {
					ids[j] += i << 20 // half of every prompt is shared
				}
			}
			prompts[i] = chain(ids...)
			x.Record(i%8, prompts[i])
		}
		depths := make([]int, 8)
		b.Run(fmt.Sprintf("match/%d", blocks), func(b *testing.B) {
			for i := range b.N {
				x.Match(prompts[i%len(prompts)], depths)
			}
		})
		b.Run(fmt.Sprintf("record/%d", blocks), func(b *testing.B) {
			for i := range b.N {
				x.Record(i%8, prompts[i%len(prompts)])
			}
		})
	}
}
