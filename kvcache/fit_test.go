package kvcache

import (
	"errors"
	"testing"
)

// overcommitted opens a table that reserves its prompt only.
func overcommitted(t *testing.T, p *Pool, prompt []int32, capacity int) *Table {
	t.Helper()
	table := open(t, p, OpenRequest{Prompt: prompt, Capacity: capacity, Reserve: 1})
	table.Commit(prompt[table.Cached():])
	check(t, p)
	return table
}

func TestReserve(t *testing.T) {
	for _, tt := range []struct{ reserve, want int }{{0, 4}, {1, 2}, {8, 2}, {9, 3}, {12, 3}, {16, 4}, {99, 4}} {
		p := newPool(t, 8, 4)
		table := open(t, p, OpenRequest{Prompt: sequence(6), Capacity: 15, Reserve: tt.reserve})
		if s := p.Stats(); s.InUse != 2 || s.InUse+s.Promised != tt.want {
			t.Errorf("reserving for %d tokens: %+v, want %d", tt.reserve, s, tt.want)
		}
		if err := table.EnsureTokens(15); err != nil {
			t.Error(err)
		}
		if err := table.EnsureTokens(16); err == nil || errors.Is(err, ErrNoCapacity) {
			t.Errorf("room beyond the capacity: %v", err)
		}
		check(t, p)
	}
}

func TestEnsureTokensFindsThePoolUsedUp(t *testing.T) {
	p := newPool(t, 4, 4)
	a := overcommitted(t, p, sequence(4), 12)
	b := open(t, p, OpenRequest{Prompt: []int32{7}, Capacity: 8}) // is promised one more
	before := dump(p)
	var capacity *CapacityError
	err := a.EnsureTokens(12)
	if !errors.Is(err, ErrNoCapacity) || !errors.As(err, &capacity) || capacity.Need != 2 || capacity.Have != 1 {
		t.Errorf("2 of 1 blocks: %v", err)
	}
	if after := dump(p); after != before {
		t.Errorf("a refusal changed the pool:\n%s\n%s", before, after)
	}
	if err := a.EnsureTokens(8); err != nil {
		t.Error(err)
	}
	if err := b.EnsureTokens(8); err != nil {
		t.Errorf("what was promised is gone: %v", err)
	}
	check(t, p)
	b.Close()
	if err := a.EnsureTokens(12); err != nil {
		t.Error(err)
	}
	check(t, p)
}

func TestWithheldBlocksAreForOpenTables(t *testing.T) {
	p := newPool(t, 4, 4)
	a := overcommitted(t, p, sequence(4), 16)
	p.Withhold(2)
	if _, err := p.Open(OpenRequest{Prompt: []int32{7, 7, 7, 7, 7}}); !errors.Is(err, ErrNoCapacity) {
		t.Errorf("2 of 3 blocks, of which 2 are withheld: %v", err)
	}
	b := open(t, p, OpenRequest{Prompt: []int32{7}})
	if err := a.EnsureTokens(12); err != nil {
		t.Errorf("an open table does not get what is withheld for it: %v", err)
	}
	b.Close()
	p.Withhold(0)
	open(t, p, OpenRequest{Prompt: []int32{8}})
}

// The reference's example: rows that need 0, 1 and 1 more blocks, with one that can be evicted.
func TestFitWithOneEvictableBlock(t *testing.T) {
	p := newPool(t, 5, 4)
	first := open(t, p, OpenRequest{Prompt: []int32{1}, Capacity: 4})
	second := overcommitted(t, p, []int32{2, 2, 2, 2}, 8)
	third := overcommitted(t, p, []int32{3, 3, 3, 3}, 8)
	serve(t, p, []int32{4, 4, 4, 4}).Close()
	fourth := open(t, p, OpenRequest{Prompt: []int32{5}})
	if s := p.Stats(); s.Free != 0 || s.Cached != 1 {
		t.Fatalf("%+v", s)
	}
	wants := []Want{{first, 2}, {second, 5}, {third, 5}}
	// Closing the third wins its block as well, but the two others go on without it.
	if got := p.Fit(wants); got != 2 {
		t.Errorf("%d can go on, want 2", got)
	}
	resumed := 0
	for _, w := range wants {
		if w.Table.EnsureTokens(w.Tokens) == nil {
			resumed++
		}
	}
	if resumed != 2 {
		t.Errorf("%d resumed, want 2", resumed)
	}
	check(t, p)
	fourth.Close()
	if got := p.Fit(wants); got != 3 {
		t.Errorf("%d can go on when a block is free, want 3", got)
	}
}

func TestFitCreditsSharedBlocksOnce(t *testing.T) {
	prompt := sequence(8)
	build := func(t *testing.T) (p *Pool, a, b, c *Table) {
		p = newPool(t, 5, 4)
		a = overcommitted(t, p, []int32{9, 9, 9, 9}, 20)
		b = overcommitted(t, p, append(prompt[:8:8], 50), 12) // two blocks that c shares, one of its own
		c = overcommitted(t, p, append(prompt[:8:8], 60), 12)
		if s := p.Stats(); s.Free+s.Cached != 0 {
			t.Fatalf("%+v", s)
		}
		return p, a, b, c
	}
	t.Run("one block is enough", func(t *testing.T) {
		p, a, b, c := build(t)
		if got := p.Fit([]Want{{a, 8}, {b, 12}, {c, 12}}); got != 2 {
			t.Errorf("%d, want 2: closing the last wins its own block", got)
		}
	})
	t.Run("two are not", func(t *testing.T) {
		p, a, b, c := build(t)
		if got := p.Fit([]Want{{a, 12}, {b, 12}, {c, 12}}); got != 1 {
			t.Errorf("%d, want 1: the shared blocks are won only with both", got)
		}
		b.Close()
		c.Close()
		if err := a.EnsureTokens(20); err != nil {
			t.Error(err)
		}
	})
	t.Run("pinned blocks are not won", func(t *testing.T) {
		p, a, b, c := build(t)
		b.Pin(3)
		if got := p.Fit([]Want{{a, 16}, {b, 12}, {c, 12}}); got != 0 {
			t.Errorf("%d, want 0: only one block can be won", got)
		}
	})
	t.Run("promises are won", func(t *testing.T) {
		p := newPool(t, 4, 4)
		a := overcommitted(t, p, []int32{9, 9, 9, 9}, 16)
		b := open(t, p, OpenRequest{Prompt: []int32{5}, Capacity: 12})
		if got := p.Fit([]Want{{a, 16}, {b, 4}}); got != 1 {
			t.Errorf("%d, want 1", got)
		}
	})
	t.Run("twins are won", func(t *testing.T) {
		p := newPool(t, 8, 4)
		serve(t, p, prompt).Close()
		a := overcommitted(t, p, []int32{9, 9, 9, 9}, 32)
		b := open(t, p, OpenRequest{Prompt: prompt, NoMatch: true})
		b.Commit(prompt)
		if got, s := p.Fit([]Want{{a, 32}, {b, 8}}), p.Stats(); got != 1 || s.InUse != 5 {
			t.Errorf("%d, want 1: %+v", got, s)
		}
	})
}
