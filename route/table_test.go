package route

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"baton/kvcache"
)

// The table is a map from digests to nodes, however badly the digests are distributed.
func TestTableIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var x table
		var nodes []node
		want := make(map[kvcache.Digest]int32)
		// Few values in few places: equal tags, equal homes, homes at the end of the slots.
		digest := rapid.Custom(func(t *rapid.T) (d kvcache.Digest) {
			d[0] = rapid.SampledFrom([]byte{0, 1, 60, 61, 62, 63, 127}).Draw(t, "home")
			d[3] = rapid.Byte().Draw(t, "tag") & 1
			d[31] = rapid.Byte().Draw(t, "rest") & 15
			return d
		})
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				d := digest.Draw(t, "digest")
				if _, ok := want[d]; ok {
					return
				}
				nodes = append(nodes, node{digest: d})
				want[d] = int32(len(nodes) - 1)
				x.add(want[d], &d)
			},
			"remove": func(t *rapid.T) {
				d := digest.Draw(t, "digest")
				if _, ok := want[d]; ok {
					delete(want, d)
					x.remove(&d, nodes)
				}
			},
			"": func(t *rapid.T) {
				if x.len() != len(want) {
					t.Fatalf("%d entries, want %d", x.len(), len(want))
				}
				for i := range nodes {
					d := nodes[i].digest
					n, ok := x.get(&d, nodes)
					if w, has := want[d]; ok != has || has && n != w {
						t.Fatalf("%x: %d, %v; want %d, %v", d, n, ok, w, has)
					}
				}
			},
		})
	})
}

// Reports that contradict the chain's order mislead nobody but those who ask for that engine.
func TestDeepDigestReportedAsAFirst(t *testing.T) {
	x := NewIndex(100)
	c := chain(1, 2, 3, 4)
	x.Record(0, c[:1])
	x.Store(1, c[3], kvcache.Digest{}) // known by bisection with a hole before it
	x.Store(1, c[1], c[0])
	if got := depths(x, 2, c); got[0] > 1 {
		t.Errorf("depths %v: engine 0 holds one", got)
	}
	x.Forget(1)
	if got := depths(x, 2, c); got[0] != 1 || got[1] != 0 || x.Len() != 1 {
		t.Errorf("depths %v of %d digests", got, x.Len())
	}
}

// A full index forgets a chain for each that it records.
func BenchmarkRecordNewChains(b *testing.B) {
	x := NewIndex(0)
	random := rand.New(rand.NewPCG(1, 2))
	chain := make([]kvcache.Digest, 32)
	record := func() {
		for i := range chain {
			for at := 0; at < len(chain[i]); at += 8 {
				binary.LittleEndian.PutUint64(chain[i][at:], random.Uint64())
			}
		}
		x.Record(0, chain)
	}
	for range DefaultEntries/len(chain) + 1 {
		record()
	}
	b.ResetTimer()
	for b.Loop() {
		record()
	}
}
