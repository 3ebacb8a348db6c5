package leg

import (
	"crypto/sha256"
	"testing"
	"time"

	"baton/engine"
	"baton/handoff"
	"baton/layout"
	"baton/wire"
)

// fuzzState is an honest one, for an engine as fuzzEngine makes it.
func fuzzState(prompt []int32) *wire.KVState {
	return &wire.KVState{
		Format: wire.KVStateFormat, Address: "p:1", Engine: "p0", Incarnation: 7, Request: 1, Geometry: fuzzGeometry, Transport: "tcp", WeightVersion: 1,
		Logprobs: "raw", Prompt: PromptDigest("", prompt), Stats: &wire.Stats{Engine: "p0"},
		Ranks:  []wire.RankInfo{{Transport: []byte("P"), Layers: 2, Heads: 2, Checksums: 4096}, {Rank: 1, Transport: []byte("Q"), Layers: 2, Head: 2, Heads: 2, Checksums: 4096}},
		Export: wire.Export{Handoff: 3, Capability: []byte("secret"), Blocks: wire.Tokens{5, 6, 9}, Generations: wire.Tokens{1, 1, 2}, Tokens: len(prompt)},
	}
}

var fuzzGeometry = wire.Geometry{Model: "f00d", BlockSize: 4, Layers: 2, KVHeads: 4, HeadDim: 8, Planes: 2, KVDType: "f32", VocabSize: 100, MaxSeqLen: 64, VerifyHandoff: "all"}

// fuzzEngine is the core of a decode engine.
func fuzzEngine(t *testing.T) *engine.Core {
	g := layout.Geometry{BlockSize: 4, Layers: 2, KVHeads: 4, HeadDim: 8, Planes: 2, ElementBytes: 4}
	core, err := engine.NewCore(engine.CoreConfig{
		Name: "d0", Role: wire.RoleDecode, MaxRequests: 4, MaxTokens: 16, MaxSeqLen: 64, Vocabulary: 100, EOS: []int32{2}, BlockSize: 4, Blocks: 32,
		Version: 1, Geometry: g, Holdings: []layout.Holding{g.Whole()}, Verify: handoff.VerifyAll, ChecksumTile: 4,
		Checksums: []handoff.Checksums{{Off: 1 << 20, BlockBytes: g.Checksums(4).BlockBytes(g.Whole())}}, Secret: []byte("s"),
	})
	if err != nil {
		t.Fatal(err)
	}
	return core
}

// A state is what a client sends, and a source that grants a claim may be anybody's: whatever they say, the cores refuse it
// or start a copy, and the books stay right.
func FuzzState(f *testing.F) {
	ids := make([]int32, 10)
	for i := range ids {
		ids[i] = int32(10 + i)
	}
	for _, change := range []func(*wire.KVState){
		func(*wire.KVState) {},
		func(s *wire.KVState) { s.Export.Blocks[1] = -5 },
		func(s *wire.KVState) { s.Export.Blocks = wire.Tokens{1 << 30, 1<<31 - 1, 0} },
		func(s *wire.KVState) { s.Export.Generations = nil },
		func(s *wire.KVState) { s.Ranks[0].Layers, s.Ranks[1].Head = 1<<60, -1 },
		func(s *wire.KVState) { s.Ranks[1] = s.Ranks[0] },
		func(s *wire.KVState) { s.Ranks = nil },
		func(s *wire.KVState) { s.Ranks[0].Checksums = -1 },
		func(s *wire.KVState) { s.Geometry.BlockSize = 0 },
		func(s *wire.KVState) { s.Address = "" },
	} {
		s := fuzzState(ids)
		change(s)
		raw, err := wire.Encode(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw, uint8(1))
	}
	f.Add([]byte{0x92, 97, 0xdd, 0xff, 0xff, 0xff, 0xff}, uint8(1))
	f.Fuzz(func(t *testing.T, raw []byte, first uint8) {
		m, err := wire.Decode(raw)
		if err != nil {
			return
		}
		state, ok := m.(*wire.KVState)
		if !ok {
			return
		}
		now := time.Unix(1000, 0)
		job := Job{
			Kind: Generation, Group: -1, State: state, Digest: sha256.Sum256(raw), First: wire.Result{Tokens: make(wire.Tokens, first%4)},
			Request: &wire.SubmitRequest{Prompt: ids, Sampling: wire.Sampling{MaxTokens: 8}},
		}
		core, err := New(Config{Engines: []string{"d0"}})
		if err != nil {
			t.Fatal(err)
		}
		core.Step(now, EngineSaid{"d0", &wire.RegisterRole{
			Role: wire.RoleDecode, Name: "d0", Transport: "tcp", Requests: 4, Blocks: 32, Geometry: fuzzGeometry, WeightVersion: 1, Ranks: []wire.RankInfo{{}},
		}})
		claimed := core.Step(now, Submit{1, job})
		if len(claimed) != 1 {
			t.Fatalf("a job led to %v", claimed)
		}
		d := fuzzEngine(t)
		submitted := false
		for _, a := range core.Step(now, SourceSaid{state.Address, &wire.ClaimAck{ID: 1}}) {
			if tell, ok := a.(Tell); ok {
				submitted = true
				d.Step(now, engine.Received{Message: tell.Message})
			}
		}
		if !submitted { // the engine does not depend on the checks before it
			d.Step(now, engine.Received{Message: &wire.SubmitRequestWithKV{
				ID: 1, Prompt: ids, Generated: job.First.Tokens, Sampling: job.Request.Sampling,
				Source: wire.Source{Engine: state.Engine, Ranks: state.Ranks, Export: state.Export},
			}})
		}
		d.Plan(now)
		d.Step(now, engine.Received{Message: &wire.AbortRequest{ID: 1}})
		if err := d.Pool().Check(); err != nil {
			t.Fatal(err)
		}
	})
}
