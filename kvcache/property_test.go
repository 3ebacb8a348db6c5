package kvcache

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// dump shows everything in a pool that an operation could change.
func dump(p *Pool) string {
	return fmt.Sprint(p.blocks, p.free, p.leaves, p.byKey, p.pending, len(p.tables), len(p.pins), p.Stats(), len(p.events), p.sequence, p.misuse)
}

// world drives a pool like an engine with a memory, and knows what every block must contain.
type world struct {
	p      *Pool
	memory [][]written // what the last writes left in each block
	tables []*sequenceState
	pins   []*pinState
	owner  uint64

	known    map[Key]Digest // what the events told
	sequence uint64
}

// written is one token's KV: it depends on everything before it and on the weights.
type written struct {
	version, salt uint64
	prefix        string
}

type sequenceState struct {
	table         *Table
	version, salt uint64
	tokens        []int32 // prompt, then generated
	written       int
}

type pinState struct {
	pin    *Pin
	memory [][]written
}

func (w *world) kv(s *sequenceState, position int) written {
	return written{s.version, s.salt, fmt.Sprint(s.tokens[:position+1])}
}

// write runs the forward pass for the next n tokens, which have room, then commits them.
func (w *world) write(s *sequenceState, n int) {
	for i := s.written; i < s.written+n; i++ {
		slot := int(s.table.Slot(i))
		w.memory[slot/w.p.blockSize][slot%w.p.blockSize] = w.kv(s, i)
	}
	s.table.Commit(s.tokens[s.written : s.written+n])
	s.written += n
}

func (w *world) verify(t *rapid.T) {
	if err := w.p.Check(); err != nil {
		t.Fatal(err)
	}
	for _, s := range w.tables {
		if s.table.Len() != s.written {
			t.Fatalf("length %d, wrote %d", s.table.Len(), s.written)
		}
		for i := range s.written {
			slot := int(s.table.Slot(i))
			if got := w.memory[slot/w.p.blockSize][slot%w.p.blockSize]; got != w.kv(s, i) {
				t.Fatalf("position %d of %v holds %+v", i, s.tokens, got)
			}
		}
	}
	for _, s := range w.tables {
		w.verifyChain(t, s)
	}
	for _, s := range w.pins {
		for i, id := range s.pin.Blocks() {
			if !slices.Equal(w.memory[id], s.memory[i]) {
				t.Fatalf("pinned block %d changed from %v to %v", id, s.memory[i], w.memory[id])
			}
		}
	}
}

// verifyChain: a block is registered as what it holds, under the prefix before it.
func (w *world) verifyChain(t *rapid.T, s *sequenceState) {
	root := Digest{}
	if s.salt == 1 {
		root = Root("s", "")
	}
	var parent Digest
	for i, d := range Chain(root, w.p.blockSize, s.tokens[:s.written]) {
		id := s.table.Blocks()[i]
		if b := w.p.blocks[id]; b.registered && (b.key != Key{s.version, d} || w.p.parentDigest(id) != parent) {
			t.Fatalf("block %d at %d of %v is registered wrongly: %+v", id, i, s.tokens, b)
		}
		parent = d
	}
}

func TestRandomOperations(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		blocks := rapid.IntRange(1, 14).Draw(t, "blocks")
		size := rapid.IntRange(1, 3).Draw(t, "block size")
		p, err := New(Config{Blocks: blocks, BlockSize: size, Events: rapid.IntRange(1, 20).Draw(t, "events")})
		if err != nil {
			t.Fatal(err)
		}
		w := &world{p: p, memory: make([][]written, blocks), known: map[Key]Digest{}}
		for i := range w.memory {
			w.memory[i] = make([]written, size)
		}
		t.Repeat(map[string]func(*rapid.T){
			"":       w.verify,
			"open":   w.open,
			"step":   w.step,
			"fit":    w.fit,
			"close":  w.close,
			"pin":    w.pin,
			"unpin":  w.unpin,
			"tick":   func(*rapid.T) { p.Tick() },
			"clear":  func(t *rapid.T) { w.rarely(t); p.Clear() },
			"forget": w.forget,
			"events": w.events,
		})
		for len(w.tables) > 0 {
			w.remove(0).table.Close()
		}
		for _, s := range w.pins {
			s.pin.Release()
		}
		w.pins = nil
		w.verify(t)
		if s := p.Stats(); s.Free+s.Cached != s.Total || s.Promised != 0 || s.Pinned != 0 || len(p.pending) != 0 {
			t.Fatalf("not everything came back: %+v", s)
		}
	})
}

func TestHeapOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, err := New(Config{Blocks: 40, BlockSize: 1})
		if err != nil {
			t.Fatal(err)
		}
		in := map[int32]bool{}
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				var least int32 = none
				for id := range in {
					a, b := &p.blocks[id], &p.blocks[max(least, 0)]
					if least == none || a.used < b.used || a.used == b.used && id < least {
						least = id
					}
				}
				if len(p.leaves) != len(in) || least != none && p.leaves.min() != least {
					t.Fatalf("heap %v of %v: least is %d", p.leaves, in, least)
				}
			},
			"add": func(t *rapid.T) {
				id := rapid.Int32Range(0, 39).Draw(t, "id")
				if !in[id] {
					in[id] = true
					p.blocks[id].used = rapid.Uint64Range(0, 9).Draw(t, "used")
					p.leaves.add(p, id)
				}
			},
			"remove": func(t *rapid.T) {
				id := rapid.Int32Range(0, 39).Draw(t, "id")
				delete(in, id)
				p.leaves.remove(p, id)
			},
		})
	})
}

func (w *world) rarely(t *rapid.T) {
	if rapid.IntRange(0, 9).Draw(t, "rarely") != 0 {
		t.Skip("not now")
	}
}

func (w *world) open(t *rapid.T) {
	prompt := rapid.SliceOfN(rapid.Int32Range(0, 1), 0, 10).Draw(t, "prompt")
	w.owner++
	r := OpenRequest{
		Version: uint64(rapid.IntRange(0, 1).Draw(t, "version")), Prompt: prompt, Owner: w.owner,
		Capacity: len(prompt) + rapid.IntRange(0, 6).Draw(t, "more"), Reserve: rapid.IntRange(0, 12).Draw(t, "reserve"),
		NoMatch: rapid.IntRange(0, 3).Draw(t, "no match") == 0, WholePrompt: rapid.Bool().Draw(t, "whole"),
	}
	salt := uint64(rapid.IntRange(0, 1).Draw(t, "salt"))
	if salt == 1 {
		r.Root = Root("s", "")
	}
	before := dump(w.p)
	table, err := w.p.Open(r)
	if err == nil {
		s := &sequenceState{table: table, version: r.Version, salt: salt, tokens: slices.Clone(prompt), written: table.Cached()}
		w.tables = append(w.tables, s)
		return
	}
	if dump(w.p) != before {
		t.Fatalf("Open failed with %v and changed the pool", err)
	}
	var pending *PendingError
	switch {
	case errors.Is(err, ErrNeverFits):
		if w.p.BlocksFor(r.Capacity) <= w.p.Stats().Total {
			t.Fatalf("it could fit: %v", err)
		}
	case errors.Is(err, ErrNoCapacity):
		if w.p.Stats().Available() >= w.p.BlocksFor(r.Capacity) {
			t.Fatalf("there is room for all of it: %v", err)
		}
	case errors.As(err, &pending):
		alive := slices.ContainsFunc(w.tables, func(s *sequenceState) bool { return s.table.owner == pending.Owner })
		if !alive {
			t.Fatalf("waits for nobody: %v", err)
		}
	default:
		t.Fatal(err)
	}
}

func (w *world) pick(t *rapid.T) int {
	if len(w.tables) == 0 {
		t.Skip("no table")
	}
	return rapid.IntRange(0, len(w.tables)-1).Draw(t, "table")
}

func (w *world) remove(i int) *sequenceState {
	s := w.tables[i]
	w.tables = slices.Delete(w.tables, i, i+1)
	return s
}

func (w *world) step(t *rapid.T) {
	s := w.tables[w.pick(t)]
	room := s.table.Capacity() - s.written
	if room == 0 {
		t.Skip("full")
	}
	n := rapid.IntRange(1, room).Draw(t, "tokens")
	for len(s.tokens) < s.written+n {
		s.tokens = append(s.tokens, rapid.Int32Range(0, 1).Draw(t, "generated"))
	}
	if w.ensure(t, Want{s.table, s.written + n}) {
		w.write(s, n)
	}
}

// ensure makes room, which can fail beyond what is reserved only.
func (w *world) ensure(t *rapid.T, want Want) bool {
	before, lacking := dump(w.p), want.Table.Shortage(want.Tokens) > w.p.Stats().Available()
	err := want.Table.EnsureTokens(want.Tokens)
	if lacking != errors.Is(err, ErrNoCapacity) || !lacking && err != nil {
		t.Fatalf("lacks blocks %v: %v", lacking, err)
	}
	if err != nil && dump(w.p) != before {
		t.Fatal("a refusal changed the pool")
	}
	return err == nil
}

// fit closes the tables that Fit names: the others get what they want, and one more would not.
func (w *world) fit(t *rapid.T) {
	var wants []Want
	for _, s := range w.tables {
		wants = append(wants, Want{s.table, rapid.IntRange(0, s.table.Capacity()).Draw(t, "want")})
	}
	n := w.p.Fit(wants)
	if n < len(wants) {
		if need, have := w.naive(wants, n+1); need <= have {
			t.Fatalf("%d of %d fit, but one more needs %d and has %d", n, len(wants), need, have)
		}
	}
	for len(w.tables) > n {
		w.remove(n).table.Close()
	}
	for _, want := range wants[:n] {
		if !w.ensure(t, want) {
			t.Fatalf("%d of %d were to fit", n, len(wants))
		}
	}
}

// naive counts the blocks that the first n lack, and those to be had when the others are closed.
func (w *world) naive(wants []Want, n int) (need, have int) {
	kept := map[int32]bool{}
	for pin := range w.p.pins {
		for _, id := range append(slices.Clone(pin.blocks), pin.twins...) {
			kept[id] = true
		}
	}
	have = w.p.Stats().Total
	for _, want := range wants[:n] {
		t := want.Table
		need += t.Shortage(want.Tokens)
		have -= t.promised()
		for _, id := range t.blocks {
			kept[id] = true
		}
		for _, w := range t.twins {
			kept[w.id] = true
		}
	}
	return need, have - len(kept)
}

// forget takes blocks for damaged: neither they nor what is behind them may be matched, all others can be.
func (w *world) forget(t *rapid.T) {
	w.rarely(t)
	ids := rapid.SliceOfN(rapid.Int32Range(0, int32(w.p.Stats().Total-1)), 1, 3).Draw(t, "damaged")
	doomed := map[Key]bool{}
	for id := range w.p.blocks {
		for up := int32(id); up != none && w.p.blocks[up].registered; up = w.p.blocks[up].parent {
			if slices.Contains(ids, up) {
				doomed[w.p.blocks[id].key] = true
			}
		}
	}
	before := len(w.p.byKey)
	if n := w.p.Forget(ids); n != len(doomed) || len(w.p.byKey) != before-n {
		t.Fatalf("%d forgotten of %d findable; %d were to be", n, before, len(doomed))
	}
	for key := range doomed {
		if _, found := w.p.byKey[key]; found {
			t.Fatalf("%v can still be found", key)
		}
	}
}

func (w *world) close(t *rapid.T) { w.remove(w.pick(t)).table.Close() }

func (w *world) pin(t *rapid.T) {
	s := w.tables[w.pick(t)]
	// Only complete pinned blocks must stay as they are while the table lives on.
	pin := s.table.Pin(s.written / w.p.blockSize)
	state := &pinState{pin: pin}
	for _, id := range pin.Blocks() {
		state.memory = append(state.memory, slices.Clone(w.memory[id]))
	}
	w.pins = append(w.pins, state)
}

func (w *world) unpin(t *rapid.T) {
	if len(w.pins) == 0 {
		t.Skip("no pin")
	}
	i := rapid.IntRange(0, len(w.pins)-1).Draw(t, "pin")
	w.pins[i].pin.Release()
	w.pins = slices.Delete(w.pins, i, i+1)
}

// events replays what the pool told, after a gap with a snapshot, and compares that with what it can find.
func (w *world) events(t *rapid.T) {
	events := w.p.DrainEvents(nil)
	if len(events) > 0 && events[0].Sequence != w.sequence+1 || rapid.IntRange(0, 9).Draw(t, "resync") == 0 {
		events = w.p.Snapshot(nil)
		w.sequence = events[0].Sequence
	} else {
		for _, e := range events {
			if w.sequence++; e.Sequence != w.sequence {
				t.Fatalf("event %d, want %d", e.Sequence, w.sequence)
			}
		}
	}
	for _, e := range events {
		switch e.Kind {
		case Stored:
			if _, ok := w.known[Key{e.Key.Version, e.Parent}]; !ok && e.Parent != (Digest{}) {
				t.Fatal("a block is told before its parent")
			}
			w.known[e.Key] = e.Parent
		case Removed:
			delete(w.known, e.Key)
		case Cleared:
			clear(w.known)
		}
	}
	if len(w.known) != len(w.p.byKey) {
		t.Fatalf("%d keys told, %d there", len(w.known), len(w.p.byKey))
	}
	for key, id := range w.p.byKey {
		var parent Digest
		if up := w.p.blocks[id].parent; up != none {
			parent = w.p.blocks[up].key.Digest
		}
		if told, ok := w.known[key]; !ok || told != parent {
			t.Fatalf("block %d was not told rightly", id)
		}
	}
}
