package handoff

import (
	"errors"
	"slices"
	"testing"
	"time"

	"baton/kvcache"
	"baton/layout"
	"baton/wire"
)

// Every quarantine is told once, when it begins, with whose blocks they are.
func TestQuarantinesAreTold(t *testing.T) {
	pool, err := kvcache.New(kvcache.Config{Blocks: 8, BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	g := layout.Geometry{BlockSize: 4, Layers: 1, KVHeads: 1, HeadDim: 1, Planes: 2, ElementBytes: 1}
	whole := []layout.Holding{{Layers: 1, Heads: 1}}
	template, err := layout.Compile(g, whole, whole)
	if err != nil {
		t.Fatal(err)
	}
	c, err := New(Config{Pool: pool, BlockBytes: []int64{8}})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(0, 0)
	told := func(what string, want ...Quarantine) {
		t.Helper()
		if got := c.Quarantines(); !slices.Equal(got, want) {
			t.Errorf("%s: told %+v, want %+v", what, got, want)
		}
	}

	// A destination whose pull failed with bytes still in flight.
	import1 := &wire.SubmitRequestWithKV{
		ID: 7, Prompt: wire.Tokens{1, 2, 3, 4, 5}, Generated: wire.Tokens{6},
		Source: wire.Source{
			Engine: "p", Ranks: []wire.RankInfo{{}},
			Export: wire.Export{Handoff: 1, Tokens: 5, Blocks: wire.Tokens{0, 1}, Generations: wire.Tokens{1, 1}},
		},
	}
	c.Step(now, Import{Message: import1, Version: 1, Capacity: 6, Template: template})
	told("under way")
	c.Step(now, Settled{Transfer: 1, Err: errors.New("lost"), Safe: false})
	told("unsafe", Quarantine{ID: 7, Blocks: 2})
	c.Step(now, Settled{Transfer: 1, Err: errors.New("lost"), Safe: true})
	told("safe")

	// A source that is still being read when it is released.
	table, err := pool.Open(kvcache.OpenRequest{Version: 1, Prompt: []int32{9, 9, 9}})
	if err != nil {
		t.Fatal(err)
	}
	table.Commit([]int32{9, 9, 9})
	c.Step(now, Retain{ID: 8, Table: table, Tokens: 3, Capability: []byte("c")})
	c.Step(now, Opened{Handoff: 1})
	c.Step(now, Release{ID: 8, Handoff: 1})
	told("released")
	c.Step(now, Revoked{Handoff: 1})
	told("still read, as it may be for a moment")
	c.Step(now, Poll{})
	c.Step(now, Revoked{Handoff: 1})
	told("still read", Quarantine{ID: 8, Blocks: 1, Source: true})
	c.Step(now, Poll{})
	c.Step(now, Revoked{Handoff: 1})
	told("still read, again")
	c.Step(now, Revoked{Handoff: 1, Quiesced: true})
	if s := pool.Stats(); s.InUse != 0 {
		t.Errorf("the pool keeps %+v", s)
	}
}
