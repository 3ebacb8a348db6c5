package engine

import (
	"bytes"
	"testing"
	"time"

	"baton/handoff"
	"baton/layout"
	"baton/wire"
)

// coreKit drives a Core by hand.
type coreKit struct {
	*Core
	t     *testing.T
	model *toyModel
	now   time.Time
}

func newCoreKit(t *testing.T, role string, secret byte) *coreKit {
	t.Helper()
	const blocks, size = 32, 4
	g := layout.Geometry{BlockSize: size, Layers: 1, KVHeads: 1, HeadDim: 1, Planes: 1, ElementBytes: 4}
	holdings, err := g.Holdings(1, []int{1})
	if err != nil {
		t.Fatal(err)
	}
	core, err := NewCore(CoreConfig{
		Name: "e", Role: role, MaxRequests: 4, MaxTokens: 64, MaxSeqLen: 100, Vocabulary: toyVocabulary,
		BlockSize: size, Blocks: blocks, Version: 1, Geometry: g, Holdings: holdings, Secret: []byte{secret},
	})
	if err != nil {
		t.Fatal(err)
	}
	return &coreKit{Core: core, t: t, model: newToyModel(t, blocks, size), now: time.Unix(0, 0)}
}

// step gives the core an event and returns what it sends, but for residency events, and what it orders.
func (k *coreKit) step(e Event) (sent []wire.Message, orders []handoff.Action) {
	k.t.Helper()
	k.now = k.now.Add(time.Millisecond)
	actions := k.Step(k.now, e)
	for len(actions) > 0 {
		a := actions[0]
		actions = actions[1:]
		switch a := a.(type) {
		case Send:
			if _, ok := a.Message.(*wire.KVEvents); !ok {
				sent = append(sent, a.Message)
			}
		case Transfer:
			orders = append(orders, a.Order)
			if o, ok := a.Order.(handoff.OpenExport); ok {
				actions = append(actions, k.Step(k.now, Moved{handoff.Opened{Handoff: o.Handoff, Rank: o.Rank}})...)
			}
		}
	}
	if err := k.Pool().Check(); err != nil {
		k.t.Fatal(err)
	}
	return sent, orders
}

// pass runs one pass and returns what it sent; nothing when none was due.
func (k *coreKit) pass() (sent []wire.Message, ran bool) {
	k.t.Helper()
	plan, _ := k.Plan(k.now)
	if plan == nil {
		return nil, false
	}
	sent, _ = k.step(Computed{plan, k.model.forward(plan)})
	return sent, true
}

func TestCoreRefusesTheWorkOfOtherRoles(t *testing.T) {
	prompt := ramp(5, 1)
	for _, tc := range []struct {
		name, role string
		m          wire.Message
	}{
		{"a prompt on a decode engine", wire.RoleDecode, &wire.SubmitRequest{ID: 7, Prompt: prompt}},
		{"a handoff from a colocated engine", wire.RoleBoth, &wire.SubmitRequest{ID: 7, Prompt: prompt, Handoff: true}},
		{"an import on a prefill engine", wire.RolePrefill, &wire.SubmitRequestWithKV{ID: 7, Prompt: prompt}},
		{"an import on a colocated engine", wire.RoleBoth, &wire.SubmitRequestWithKV{ID: 7, Prompt: prompt}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			sent, _ := newCoreKit(t, tc.role, 1).step(Received{tc.m})
			if len(sent) != 1 {
				t.Fatalf("sent %v, want one refusal", sent)
			}
			e, ok := sent[0].(*wire.RequestError)
			if !ok || e.ID != 7 || e.Code != wire.CodeInvalid || e.Retryable || !e.SourceSafe {
				t.Errorf("sent %+v, want a refusal of request 7 for good", sent[0])
			}
		})
	}
}

// A coordinator that comes back numbers its requests anew, perhaps while a pass still runs for the old ones.
func TestCoreForgetsItsCoordinator(t *testing.T) {
	k := newCoreKit(t, wire.RolePrefill, 1)
	old := &wire.SubmitRequest{ID: 1, Prompt: ramp(9, 1), Handoff: true, Sampling: wire.Sampling{MaxTokens: 5}}
	k.step(Received{old})
	plan, _ := k.Plan(k.now)
	if plan == nil {
		t.Fatal("no pass for the first request")
	}
	if sent, _ := k.step(Disconnected{}); len(sent) > 0 {
		t.Errorf("sent %v with nobody there", sent)
	}
	prompt := ramp(6, 50)
	if sent, _ := k.step(Received{&wire.SubmitRequest{ID: 1, Prompt: prompt, Handoff: true, Sampling: wire.Sampling{MaxTokens: 5}}}); len(sent) > 0 {
		t.Fatalf("the new request 1 was answered with %+v", sent[0])
	}
	if again, _ := k.Plan(k.now); again != nil {
		t.Fatal("a second pass while one is under way")
	}
	if sent, orders := k.step(Computed{plan, k.model.forward(plan)}); len(sent)+len(orders) > 0 {
		t.Errorf("the pass for the old request led to %v and %v", sent, orders)
	}
	sent, _ := k.pass()
	if len(sent) != 1 {
		t.Fatalf("sent %v, want the reply of the new request", sent)
	}
	r := sent[0].(*wire.EngineReply).Results[0]
	if r.Export == nil || r.Tokens[0] != toyNext(prompt) {
		t.Errorf("got %+v, want an export and token %d", r, toyNext(prompt))
	}
	_, orders := k.step(Received{&wire.ReleaseKV{ID: 1, Handoff: r.Export.Handoff}})
	if len(orders) != 1 {
		t.Fatalf("ordered %v, want a Revoke", orders)
	}
	k.step(Moved{handoff.Revoked{Handoff: r.Export.Handoff, Quiesced: true}})
	if s := k.Pool().Stats(); s.InUse != 0 || s.Pinned != 0 || s.Promised != 0 {
		t.Errorf("left with %+v", s)
	}
}

func TestCorePauseEndsWithTheCoordinator(t *testing.T) {
	k := newCoreKit(t, wire.RoleBoth, 1)
	submit := func() {
		k.step(Received{&wire.SubmitRequest{ID: 1, Prompt: ramp(5, 1), Sampling: wire.Sampling{MaxTokens: 1}}})
	}
	k.step(Received{&wire.Pause{}})
	submit()
	if _, ran := k.pass(); ran {
		t.Error("a pass while paused")
	}
	k.step(Disconnected{})
	k.step(Registered{})
	submit()
	if _, ran := k.pass(); !ran {
		t.Error("no pass though nobody paused it since")
	}
}

func TestCoreDrawsCapabilities(t *testing.T) {
	var seen [][]byte
	for secret := range byte(2) {
		k := newCoreKit(t, wire.RolePrefill, secret)
		for id := range uint64(2) {
			k.step(Received{&wire.SubmitRequest{ID: id, Prompt: ramp(5, int(id)), Handoff: true, Sampling: wire.Sampling{MaxTokens: 5}}})
			sent, _ := k.pass()
			c := sent[0].(*wire.EngineReply).Results[0].Export.Capability
			for _, other := range seen {
				if len(c) != 16 || bytes.Equal(c, other) {
					t.Errorf("capability %x after %x", c, other)
				}
			}
			seen = append(seen, c)
		}
	}
}

// What arrives twice must not run twice, and must not fail what runs.
func TestCoreIgnoresARepeatedImport(t *testing.T) {
	k := newCoreKit(t, wire.RoleDecode, 1)
	m := &wire.SubmitRequestWithKV{
		ID: 3, Prompt: ramp(5, 1), Generated: wire.Tokens{9}, Sampling: wire.Sampling{MaxTokens: 6},
		Source: wire.Source{Ranks: []wire.RankInfo{{}}, Export: wire.Export{Handoff: 1, Blocks: wire.Tokens{0, 1}, Generations: wire.Tokens{1, 1}, Tokens: 5}},
	}
	_, orders := k.step(Received{m})
	if len(orders) != 1 {
		t.Fatalf("ordered %v, want a pull", orders)
	}
	pull := orders[0].(handoff.StartPull)
	for _, when := range []string{"moving", "waiting for admission", "running"} {
		if sent, orders := k.step(Received{m}); len(sent)+len(orders) > 0 {
			t.Errorf("%s: the repeated import led to %v and %v", when, sent, orders)
		}
		switch when {
		case "moving":
			k.step(Moved{handoff.Settled{Transfer: pull.Transfer}})
		case "waiting for admission":
			k.Plan(k.now)
		}
	}
	if l := k.Load(); l.Decode != 1 || l.Admission != 0 || l.Handoff.Moving != 0 {
		t.Errorf("left with %+v, want one request in decode", l)
	}
}
