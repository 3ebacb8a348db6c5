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

// next is the digest that follows those of c when block b does.
func next(c []kvcache.Digest, b int) kvcache.Digest {
	h := binary.LittleEndian.Uint64(c[len(c)-1][:])*1_000_003 + uint64(b) + 1
	var d kvcache.Digest
	binary.LittleEndian.PutUint64(d[:], h)
	d[31] = byte(len(c))
	return d
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

func TestStoreNeedsItsParent(t *testing.T) {
	x := NewIndex(100)
	c := chain(1, 2, 3)
	x.Store(0, c[1], c[0])
	x.Store(1, c[0], kvcache.Digest{})
	x.Store(0, c[1], c[0]) // another engine's parent does not help
	if got := depths(x, 2, c); got[0] != 0 || got[1] != 1 || x.Len() != 1 {
		t.Errorf("depths %v of %d digests", got, x.Len())
	}
	x.Store(1, c[1], c[0])
	x.Store(1, c[1], c[0])
	x.Store(1, c[2], c[1])
	x.Remove(0, c[2])
	x.Remove(1, kvcache.Digest{9})
	if got := depths(x, 2, c); got[1] != 3 || x.Len() != 3 {
		t.Errorf("depths %v of %d digests", got, x.Len())
	}
}

func TestReportsOutOfOrderLeaveNothingBehind(t *testing.T) {
	x := NewIndex(100)
	c := chain(1, 2, 3)
	x.Record(0, c)
	x.Record(1, c[:1])
	x.Remove(0, c[0])
	x.Remove(0, c[1]) // the middle before the end: it stays until then, owned by nobody
	if x.Len() != 3 {
		t.Errorf("%d digests, want 3", x.Len())
	}
	x.Remove(0, c[2])
	if got := depths(x, 2, c); got[0] != 0 || got[1] != 1 || x.Len() != 1 {
		t.Errorf("depths %v of %d digests", got, x.Len())
	}
}

func TestExpectations(t *testing.T) {
	x := NewIndex(100)
	x.Record(0, chain(1))
	a := x.Expect(0, chain(1, 2, 3))
	b := x.Expect(1, chain(1, 2, 9))
	c := x.Expect(1, chain(1, 2))
	if got := depths(x, 2, chain(1, 2, 3, 4)); got[0] != 3 || got[1] != 2 {
		t.Errorf("depths %v", got)
	}
	if got := depths(x, 1, chain(1, 2, 9)); got[0] != 2 {
		t.Errorf("depths of the first engine %v", got)
	}
	x.Settle(a)
	if got := depths(x, 2, chain(1, 2, 3, 4)); got[0] != 1 || got[1] != 2 {
		t.Errorf("depths after one is settled: %v", got)
	}
	x.Settle(c)
	x.Settle(b)
	x.Settle(nil)
	if got := depths(x, 2, chain(1, 2, 3, 4)); got[0] != 1 || got[1] != 0 || len(x.expected) != 0 {
		t.Errorf("depths after all are settled: %v, %d left", got, len(x.expected))
	}
	if x.Expect(0, nil) != nil {
		t.Error("nothing is expected of a short prompt")
	}
}

// model is the index written the obvious way: a list of digests by recency.
type model struct {
	limit  int
	recent []kvcache.Digest // most recent first
	owners map[kvcache.Digest]map[int]bool
}

func (m *model) touch(c []kvcache.Digest) {
	for _, d := range slices.Backward(c) {
		if m.owners[d] != nil {
			m.recent = slices.DeleteFunc(m.recent, func(o kvcache.Digest) bool { return o == d })
			m.recent = slices.Insert(m.recent, 0, d)
		}
	}
}

func (m *model) record(e int, c []kvcache.Digest) {
	c = c[:min(len(c), m.limit)]
	for _, d := range c {
		if m.owners[d] == nil {
			m.owners[d] = map[int]bool{}
		}
		m.owners[d][e] = true
	}
	m.touch(c)
	m.trim()
}

func (m *model) trim() {
	for len(m.recent) > m.limit {
		last := len(m.recent) - 1
		delete(m.owners, m.recent[last])
		m.recent = m.recent[:last]
	}
}

// store notes the last block of a chain.
func (m *model) store(e int, c []kvcache.Digest) {
	d, at := c[len(c)-1], 0
	if len(c) > 1 {
		parent := c[len(c)-2]
		if !m.owners[parent][e] {
			return
		}
		at = slices.Index(m.recent, parent) + 1
		if m.owners[d] == nil && len(m.recent) == m.limit && at == m.limit {
			m.touch(c[:len(c)-1])
			if at = slices.Index(m.recent, parent) + 1; at == m.limit {
				return
			}
		}
	}
	if m.owners[d] == nil {
		m.owners[d] = map[int]bool{}
		m.recent = slices.Insert(m.recent, at, d)
	}
	m.owners[d][e] = true
	m.trim()
}

func (m *model) remove(e int, d kvcache.Digest) {
	if o := m.owners[d]; o[e] {
		if delete(o, e); len(o) == 0 {
			delete(m.owners, d)
			m.recent = slices.DeleteFunc(m.recent, func(x kvcache.Digest) bool { return x == d })
		}
	}
}

func (m *model) forget(e int) {
	for d := range m.owners {
		m.remove(e, d)
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
		engine := rapid.SampledFrom(engines)
		t.Repeat(map[string]func(*rapid.T){
			"record": func(t *rapid.T) {
				e, c := engine.Draw(t, "engine"), prompt.Draw(t, "prompt")
				x.Record(e, c)
				m.record(e, c)
			},
			"store": func(t *rapid.T) {
				e, c := engine.Draw(t, "engine"), prompt.Draw(t, "prompt")
				for i := range c { // as an engine that computes a prompt reports it
					parent := kvcache.Digest{}
					if i > 0 {
						parent = c[i-1]
					}
					x.Store(e, c[i], parent)
					m.store(e, c[:i+1])
				}
			},
			"remove": func(t *rapid.T) { // the deepest first
				e, c := engine.Draw(t, "engine"), prompt.Draw(t, "prompt")
				n := m.depth(e, c)
				if n == 0 || slices.ContainsFunc([]int{0, 1, 2}, func(b int) bool { return m.owners[next(c[:n], b)][e] }) {
					return // not a leaf
				}
				x.Remove(e, c[n-1])
				m.remove(e, c[n-1])
			},
			"touch": func(t *rapid.T) {
				c := prompt.Draw(t, "prompt")
				known := x.Touch(c)
				m.touch(c)
				if known < len(c) && m.owners[c[known]] != nil || known > 0 && m.owners[c[known-1]] == nil {
					t.Fatalf("%d of %d digests are known", known, len(c))
				}
			},
			"forget": func(t *rapid.T) {
				e := engine.Draw(t, "engine")
				x.Forget(e)
				m.forget(e)
			},
			"": func(t *rapid.T) {
				if x.Len() != len(m.recent) {
					t.Fatalf("%d digests, want %d", x.Len(), len(m.recent))
				}
				for n, i := x.nodes[root].next, 0; n != root; n, i = x.nodes[n].next, i+1 {
					if x.nodes[n].digest != m.recent[i] {
						t.Fatalf("the digest at place %d by recency is another one", i)
					}
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
		b.Run(fmt.Sprintf("expect/%d", blocks), func(b *testing.B) {
			for i := range b.N {
				x.Touch(prompts[i%len(prompts)])
				x.Settle(x.Expect(i%8, prompts[i%len(prompts)]))
			}
		})
		b.Run(fmt.Sprintf("report/%d", blocks), func(b *testing.B) { // a block stored and removed
			for i := range b.N {
				c := prompts[i%len(prompts)]
				x.Store(i%8, kvcache.Digest{30: byte(i), 31: 200}, c[len(c)-1])
				x.Remove(i%8, kvcache.Digest{30: byte(i), 31: 200})
			}
		})
		b.Run(fmt.Sprintf("record/%d", blocks), func(b *testing.B) {
			for i := range b.N {
				x.Record(i%8, prompts[i%len(prompts)])
			}
		})
	}
}
