package coordinator

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"baton/route"
	"baton/wire"
)

// Peers that send anything at any time cannot upset a core, nor leave anything behind once they have left.
func TestLawlessPeers(t *testing.T) {
	for range 5 {
		rapid.Check(t, lawless)
	}
}

func lawless(t *rapid.T) {
	cfg := Config{Queue: 3, IndexEntries: 5}
	if rapid.Bool().Draw(t, "sticky") {
		cfg.Policy = route.Session{Sessions: 1}
	}
	core, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	small := func(label string) int { return rapid.IntRange(-1, 6).Draw(t, label) }
	tokens := func(label string) wire.Tokens { return make(wire.Tokens, max(0, small(label))) }
	id := func() uint64 {
		if live := slices.Sorted(maps.Keys(core.requests)); len(live) > 0 && rapid.IntRange(0, 9).Draw(t, "luck") > 0 {
			return rapid.SampledFrom(live).Draw(t, "live id")
		}
		return uint64(rapid.IntRange(0, 8).Draw(t, "id"))
	}
	result := func() wire.Result {
		r := wire.Result{
			ID: id(), Start: rapid.IntRange(0, 2).Draw(t, "start"), Tokens: tokens("tokens"), PromptTokens: small("prompt"), CachedTokens: small("cached"),
			Finish: rapid.SampledFrom([]string{"", "", wire.FinishStop, wire.FinishEvicted, "?"}).Draw(t, "finish"),
		}
		if rapid.Bool().Draw(t, "export") {
			r.Export = &wire.Export{Handoff: id(), Blocks: tokens("blocks"), Tokens: small("tokens")}
		}
		return r
	}
	results := func() []wire.Result {
		var out []wire.Result
		for range max(0, small("results")) {
			out = append(out, result())
		}
		return out
	}
	messages := []func() wire.Message{
		func() wire.Message {
			m := &wire.SubmitRequest{ID: id(), Prompt: tokens("prompt"), Resume: tokens("resume"), Handoff: true}
			m.Session = rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "session")
			m.Sampling.MaxTokens = rapid.SampledFrom([]int{-1, 0, 1, 3, 1 << 62}).Draw(t, "max")
			return m
		},
		func() wire.Message { return &wire.AbortRequest{ID: id()} },
		func() wire.Message { return &wire.EngineReply{Results: results()} },
		func() wire.Message { return &wire.EngineReplyPartial{Results: results()} },
		func() wire.Message { return &wire.RequestAborted{ID: id(), SourceSafe: rapid.Bool().Draw(t, "safe")} },
		func() wire.Message {
			return &wire.RequestError{
				ID: id(), Code: rapid.SampledFrom([]string{wire.CodeInternal, wire.CodeInvalid, wire.CodeCorrupt, "?"}).Draw(t, "code"),
				Retryable: rapid.Bool().Draw(t, "retryable"), SourceSafe: rapid.Bool().Draw(t, "safe"),
				Reader: rapid.SampledFrom([]uint64{0, 0, id()}).Draw(t, "reader"),
			}
		},
		func() wire.Message { return &wire.KVReadDone{ID: id()} },
		func() wire.Message { return &wire.KVTransferReady{ID: id(), CachedBlocks: small("cached")} },
		func() wire.Message {
			m := &wire.KVEvents{Sequence: uint64(small("sequence")), Next: uint64(small("next")), Reset: rapid.Bool().Draw(t, "reset")}
			for range max(0, small("events")) {
				ev := wire.KVEvent{Kind: uint8(rapid.IntRange(0, 4).Draw(t, "kind"))}
				ev.Digest[0], ev.Parent[0] = byte(small("digest")), byte(max(0, small("parent")))
				m.Events = append(m.Events, ev)
			}
			return m
		},
		func() wire.Message {
			return &wire.RegisterRole{
				Role: rapid.SampledFrom([]string{wire.RolePrefill, wire.RoleDecode, wire.RoleBoth, "?"}).Draw(t, "role"),
				Name: fmt.Sprint(small("name")), Requests: small("requests"), Blocks: small("blocks"), Ranks: []wire.RankInfo{{}, {Layer: small("layer"), Layers: small("layers"), Heads: small("heads")}},
				Geometry: wire.Geometry{BlockSize: 2, Layers: 1, KVHeads: 1, MaxSeqLen: rapid.SampledFrom([]int{0, 4, 1 << 40}).Draw(t, "longest")},
			}
		},
		func() wire.Message { return &wire.Pause{} },
		func() wire.Message { return &wire.Unpause{} },
		func() wire.Message { return &wire.Disconnect{} },
		func() wire.Message { return &wire.StatusRequest{} },
		func() wire.Message { return &wire.Unknown{Of: 200} },
		func() wire.Message {
			return &wire.Connect{Kind: rapid.SampledFrom([]string{KindClient, KindEngine, "?"}).Draw(t, "kind")}
		},
	}
	now := time.Unix(0, 0)
	step := func(ev Event) {
		now = now.Add(time.Duration(rapid.IntRange(0, 3).Draw(t, "seconds")) * time.Second)
		ev.At = now
		for _, a := range core.Step(ev) {
			if a.Kind == Send && core.peers[a.Peer] == nil {
				t.Fatalf("%s was sent to peer %d, which is gone", name(a.Message), a.Peer)
			}
		}
	}
	const peers = 6
	roles := [][]string{{wire.RolePrefill, wire.RoleDecode}, {wire.RoleBoth, wire.RoleBoth}}[rapid.IntRange(0, 1).Draw(t, "fleet")]
	for p := range PeerID(peers - 1) { // the last one may introduce itself later
		step(Event{Peer: p + 1, Message: &wire.Connect{Kind: []string{KindClient, KindEngine}[min(p, 1)]}})
		if p == 1 || p == 2 {
			step(Event{Peer: p + 1, Message: &wire.RegisterRole{
				Role: roles[p-1], Name: fmt.Sprint(p), Requests: 3, Blocks: 9, Ranks: []wire.RankInfo{{}},
				Geometry: wire.Geometry{BlockSize: 2, Layers: 1, KVHeads: 1, MaxSeqLen: 16},
			}})
		}
	}
	for range rapid.IntRange(0, 120).Draw(t, "events") {
		p := PeerID(rapid.IntRange(1, peers).Draw(t, "from"))
		if rapid.IntRange(0, 30).Draw(t, "leave") == 0 {
			step(Event{Peer: p})
			continue
		}
		some := messages
		if rapid.IntRange(0, 9).Draw(t, "sense") > 0 { // what such a peer may send
			some = messages[2:11]
			if p == 1 {
				some = messages[:2]
			}
		}
		step(Event{Peer: p, Message: rapid.SampledFrom(some).Draw(t, "message")()})
	}
	for p := range PeerID(peers) {
		step(Event{Peer: p + 1})
	}
	if err := checkIdle(core); err != nil {
		t.Fatal(err)
	}
	if len(core.peers) > 0 || len(core.order) > 0 || len(core.byName) > 0 || core.entry.index.Len() > 0 || core.decode.index.Len() > 0 {
		t.Fatalf("left behind: peers %v, engines %v, index entries %d and %d",
			core.peers, core.order, core.entry.index.Len(), core.decode.index.Len())
	}
}
