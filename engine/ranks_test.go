package engine

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"baton/checkpoint"
	"baton/compute"
	"baton/handoff"
	"baton/layout"
	"baton/model"
	"baton/wire"
)

// Orders and events mean the same in the other process.
func TestOrdersAndEventsRoundTrip(t *testing.T) {
	ranges, copies := []handoff.Range{{Off: 3, Len: 1 << 40}, {Off: 7, Len: 2}}, []layout.Copy{{Src: 1, Dst: 1 << 50, Len: 9}, {Src: 4}}
	for _, order := range []handoff.Action{
		handoff.Seal{Handoff: 4, Rank: 2, Blocks: []int32{5, 1}},
		handoff.Verify{Transfer: 9, Rank: 2, Blocks: []int32{1}},
		handoff.OpenExport{Handoff: 4, Rank: 2, Capability: []byte("c"), Ranges: ranges},
		handoff.Revoke{Handoff: 4, Rank: 2},
		handoff.StartPull{Transfer: 9, Rank: 2, Peer: []byte("p"), Handoff: 4, Capability: []byte("c"), Copies: copies},
		handoff.StartPush{Transfer: 9, Rank: 2, Peer: []byte("p"), Tag: []byte("t"), Copies: copies},
		handoff.Expect{Transfer: 9, Rank: 2, Ranges: ranges},
		handoff.Cancel{Transfer: 9},
		handoff.Recheck{Transfer: 9},
	} {
		if got, err := decodeOrder(reread(t, encodeOrder(1, 2, order)).(*wire.RankOrder)); err != nil || !reflect.DeepEqual(got, order) {
			t.Errorf("%#v arrives as %#v, %v", order, got, err)
		}
	}
	for _, event := range []handoff.Event{
		handoff.Sealed{Handoff: 4, Rank: 2},
		handoff.Verified{Transfer: 9},
		handoff.Verified{Transfer: 9, Err: errors.New("why")},
		handoff.Opened{Handoff: 4, Rank: 2, Err: errors.New("why")},
		handoff.Revoked{Handoff: 4, Rank: 2, Quiesced: true},
		handoff.Revoked{Handoff: 4, Rank: 2},
		handoff.Expected{Transfer: 9, Tag: []byte("t")},
		handoff.Expected{Transfer: 9, Err: errors.New("why")},
		handoff.Settled{Transfer: 9, Safe: true, Bytes: 1 << 40},
	} {
		if got := decodeEvent(reread(t, encodeEvent(1, 2, event))); !reflect.DeepEqual(got, event) {
			t.Errorf("%#v arrives as %#v", event, got)
		}
	}
	if e, ok := decodeEvent(encodeEvent(1, 2, handoff.Settled{Transfer: 9, Err: errors.New("why")})).(handoff.Settled); !ok || e.Safe || e.Err == nil || e.Err.Error() != "rank 2: why" {
		t.Errorf("%#v", e)
	}
	if _, err := decodeOrder(&wire.RankOrder{Kind: "dance"}); err == nil {
		t.Error("an order of an unknown kind is carried out")
	}
}

// reread is a message as the other side decodes it.
func reread(t *testing.T, m wire.Message) wire.Message {
	t.Helper()
	raw, err := m.MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	out := reflect.New(reflect.TypeOf(m).Elem()).Interface().(wire.Message)
	if rest, err := out.UnmarshalMsg(raw); err != nil || len(rest) > 0 {
		t.Fatalf("%d bytes left, %v", len(rest), err)
	}
	return out
}

// A step plan is the same batch in the other process, with the same fingerprint; another one has another.
func TestPlansRoundTrip(t *testing.T) {
	ids := func(t *rapid.T, name string) []int32 {
		return rapid.SliceOfN(rapid.Int32Range(0, 99), 0, 5).Draw(t, name)
	}
	rapid.Check(t, func(t *rapid.T) {
		b := model.Batch{Tokens: ids(t, "tokens"), Positions: ids(t, "positions"), Slots: ids(t, "slots"), Logits: ids(t, "logits")}
		for range rapid.IntRange(0, 3).Draw(t, "sequences") {
			b.Sequences = append(b.Sequences, compute.Sequence{Row: 1, Rows: 2, Position: 3, Blocks: ids(t, "blocks")})
		}
		for _, n := range ids(t, "lockstep") {
			b.Lockstep = append(b.Lockstep, int(n))
		}
		raw, err := encodeBatch(7, 1, &b).MarshalMsg(nil)
		if err != nil {
			t.Fatal(err)
		}
		var m wire.TPBroadcast
		if _, err := m.UnmarshalMsg(raw); err != nil || m.Sequence != 7 || m.Engine != 1 {
			t.Fatal(err)
		}
		got, err := decodeBatch(&m)
		if err != nil || fingerprint(&got) != fingerprint(&b) || len(got.Sequences) != len(b.Sequences) {
			t.Fatalf("%+v arrives as %+v, %v", b, got, err)
		}
		for i, s := range got.Sequences {
			if w := b.Sequences[i]; !slices.Equal(s.Blocks, w.Blocks) || s.Row != w.Row || s.Rows != w.Rows || s.Position != w.Position {
				t.Fatalf("sequence %d: %+v, want %+v", i, s, w)
			}
		}
		got.Tokens = append(slices.Clone(got.Tokens), 1)
		if fingerprint(&got) == fingerprint(&b) {
			t.Fatal("another plan has the same fingerprint")
		}
	})
	if _, err := decodeBatch(&wire.TPBroadcast{Sequences: wire.Tokens{0, 1, 0, 3}, Blocks: wire.Tokens{1, 2}}); err == nil {
		t.Error("a sequence takes blocks that are not there")
	}
}

// Ranks that do not tell of the same activations end the pass with words that name them.
func TestDivergence(t *testing.T) {
	ck, err := checkpoint.Open("../testdata/goldens/qwen3")
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	s, err := Open(t.Context(), Config{Checkpoint: ck, Shard: layout.Shard{TP: 2}, KVBytes: 4 << 20, BlockSize: 16, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	run := func(token int32) error {
		plan := &Plan{Batch: model.Batch{
			Tokens: []int32{token}, Positions: []int32{0}, Slots: []int32{0}, Sequences: []compute.Sequence{{Rows: 1, Blocks: []int32{0}}},
		}}
		done := make(chan passed, 1)
		s.units[0].passes <- pass{0, plan, done}
		select {
		case p := <-done:
			return p.err
		case <-time.After(10 * time.Second):
			t.Fatal("no end of a pass")
			return nil
		}
	}
	if err := run(3); err != nil {
		t.Fatal(err)
	}
	s.ranks[1].device.split = false // it tells another state than it has
	var d *DivergenceError
	if err := run(3); !errors.As(err, &d) || !slices.Equal(d.Ranks, []int{0, 1}) || !strings.Contains(err.Error(), "activations") {
		t.Errorf("%v", err)
	}
}
