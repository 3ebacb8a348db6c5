package kvcache

import (
	"errors"
	"slices"
	"testing"
)

func newPool(t testing.TB, blocks, blockSize int) *Pool {
	t.Helper()
	p, err := New(Config{Blocks: blocks, BlockSize: blockSize, Events: 1 << 10})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func check(t testing.TB, p *Pool) {
	t.Helper()
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
}

func open(t testing.TB, p *Pool, r OpenRequest) *Table {
	t.Helper()
	table, err := p.Open(r)
	if err != nil {
		t.Fatal(err)
	}
	check(t, p)
	return table
}

// serve opens a prompt, computes what is missing and returns the open table.
func serve(t testing.TB, p *Pool, prompt []int32) *Table {
	t.Helper()
	table := open(t, p, OpenRequest{Prompt: prompt})
	table.Commit(prompt[table.Cached():])
	check(t, p)
	return table
}

func TestConfig(t *testing.T) {
	for _, c := range []Config{{}, {Blocks: 1}, {BlockSize: 1}, {Blocks: -1, BlockSize: 16}, {Blocks: 1 << 30, BlockSize: 16}, {Blocks: 1, BlockSize: 1, Events: -1}} {
		if _, err := New(c); err == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
}

func TestTenIdenticalPromptsShare(t *testing.T) {
	p := newPool(t, 32, 4)
	prompt := sequence(9)
	var tables []*Table
	for range 10 {
		table := serve(t, p, prompt)
		tables = append(tables, table)
		if !slices.Equal(table.Blocks()[:2], tables[0].Blocks()[:2]) {
			t.Fatalf("blocks %v, want the prefix of %v", table.Blocks(), tables[0].Blocks())
		}
		p.Tick()
	}
	for _, id := range tables[0].Blocks()[:2] {
		if got := p.blocks[id].refs; got != 10 {
			t.Errorf("block %d has %d references, want 10", id, got)
		}
	}
	if got := p.Stats().InUse; got != 2+10 {
		t.Errorf("%d blocks in use, want 2 shared and 10 tails", got)
	}
	for _, table := range tables {
		table.Close()
	}
	check(t, p)
	if s := p.Stats(); s.Free != 30 || s.Cached != 2 {
		t.Errorf("after closing all: %+v", s)
	}
}

func TestDivergence(t *testing.T) {
	p := newPool(t, 32, 4)
	first := serve(t, p, []int32{1, 2, 3, 4, 5, 6, 7, 8, 9})
	later := serve(t, p, []int32{1, 2, 3, 4, 5, 6, 7, 0, 9})
	if later.Cached() != 4 || later.Blocks()[0] != first.Blocks()[0] || later.Blocks()[1] == first.Blocks()[1] {
		t.Errorf("cached %d, blocks %v and %v", later.Cached(), first.Blocks(), later.Blocks())
	}
	other := serve(t, p, []int32{0, 2, 3, 4, 5, 6, 7, 8, 9})
	if other.Cached() != 0 {
		t.Errorf("a difference in the first block still shares %d tokens", other.Cached())
	}
	salted := open(t, p, OpenRequest{Root: Root("s", ""), Prompt: []int32{1, 2, 3, 4, 5}})
	newer := open(t, p, OpenRequest{Version: 1, Prompt: []int32{1, 2, 3, 4, 5}})
	if salted.Cached() != 0 || newer.Cached() != 0 {
		t.Errorf("another salt shares %d tokens, other weights %d", salted.Cached(), newer.Cached())
	}
}

func TestWholePrompt(t *testing.T) {
	tests := []struct {
		tokens        int
		prompt, whole int // cached tokens without and with WholePrompt
	}{{0, 0, 0}, {1, 0, 0}, {3, 0, 0}, {4, 0, 4}, {5, 4, 4}, {7, 4, 4}, {8, 4, 8}, {9, 8, 8}}
	for _, tt := range tests {
		p := newPool(t, 8, 4)
		serve(t, p, sequence(9)).Close()
		a := open(t, p, OpenRequest{Prompt: sequence(tt.tokens)})
		b := open(t, p, OpenRequest{Prompt: sequence(tt.tokens), WholePrompt: true})
		if a.Cached() != tt.prompt || b.Cached() != tt.whole {
			t.Errorf("%d tokens: cached %d and %d, want %d and %d", tt.tokens, a.Cached(), b.Cached(), tt.prompt, tt.whole)
		}
	}
}

func TestGeneratedBlocksJoinTheChain(t *testing.T) {
	p := newPool(t, 8, 4)
	first := open(t, p, OpenRequest{Prompt: []int32{1, 2, 3}, Capacity: 10})
	first.Commit([]int32{1, 2, 3})
	for i := range int32(6) {
		if err := first.EnsureTokens(first.Len() + 1); err != nil {
			t.Fatal(err)
		}
		first.Commit([]int32{10 + i})
		check(t, p)
	}
	if first.Len() != 9 || len(first.Blocks()) != 3 {
		t.Fatalf("%d tokens in %v", first.Len(), first.Blocks())
	}
	next := open(t, p, OpenRequest{Prompt: []int32{1, 2, 3, 10, 11, 12, 13, 14, 15, 99}})
	if next.Cached() != 8 {
		t.Errorf("the next turn finds %d tokens, want 8", next.Cached())
	}
	// The ninth token's block is incomplete: never registered.
	if got := p.blocks[first.Blocks()[2]]; got.registered {
		t.Error("a partial block is registered")
	}
}

func TestIncompleteBlocksAreNotCached(t *testing.T) {
	p := newPool(t, 4, 4)
	serve(t, p, sequence(3)).Close()
	if s := p.Stats(); s.Free != 4 {
		t.Errorf("after a prompt shorter than a block: %+v", s)
	}
	table := open(t, p, OpenRequest{Prompt: sequence(8)})
	table.Commit(sequence(7)) // the forward of the last token failed
	table.Close()
	check(t, p)
	if s := p.Stats(); s.Cached != 1 || s.Free != 3 {
		t.Errorf("after 7 of 8 tokens: %+v", s)
	}
}

func TestRevival(t *testing.T) {
	p := newPool(t, 4, 4)
	first := serve(t, p, sequence(9))
	ids := slices.Clone(first.Blocks())
	first.Close()
	again := serve(t, p, sequence(9))
	if again.Cached() != 8 || !slices.Equal(again.Blocks()[:2], ids[:2]) {
		t.Fatalf("cached %d, blocks %v, want %v", again.Cached(), again.Blocks(), ids)
	}
	if got := p.blocks[ids[0]].refs; got != 1 {
		t.Errorf("a revived block has %d references", got)
	}
}

// build registers a tree of prefixes: name -> (parent, tick of last use).
func build(t *testing.T, p *Pool, nodes []struct {
	name, parent string
	used         uint64
}) map[string]int32 {
	t.Helper()
	paths := map[string][]int32{}
	ids := map[string]int32{}
	for _, n := range nodes {
		path := append(slices.Clone(paths[n.parent]), int32(n.name[0]))
		paths[n.name] = path
		table := open(t, p, OpenRequest{Prompt: path, WholePrompt: true})
		table.Commit(path[table.Cached():])
		ids[n.name] = table.Blocks()[len(path)-1]
		table.Close()
	}
	for _, n := range nodes {
		p.blocks[ids[n.name]].used = n.used
	}
	// Times were set behind the heap's back.
	leaves := slices.Clone(p.leaves)
	for _, id := range leaves {
		p.leaves.remove(p, id)
	}
	for _, id := range leaves {
		p.leaves.add(p, id)
	}
	check(t, p)
	return ids
}

func TestEvictionOrder(t *testing.T) {
	p := newPool(t, 6, 1)
	ids := build(t, p, []struct {
		name, parent string
		used         uint64
	}{{"A", "", 1}, {"B", "A", 2}, {"C", "B", 5}, {"D", "", 3}, {"E", "D", 5}, {"F", "B", 3}})
	names := map[Key]string{}
	for name, id := range ids {
		names[p.blocks[id].key] = name
	}
	p.DrainEvents(nil)
	open(t, p, OpenRequest{Prompt: []int32{1, 2, 3}, NoMatch: true})
	var got []string
	for _, e := range p.DrainEvents(nil) {
		if e.Kind != Removed {
			t.Errorf("unexpected event %+v", e)
		}
		got = append(got, names[e.Key])
	}
	if want := []string{"F", "C", "B"}; !slices.Equal(got, want) {
		t.Errorf("evicted %v, want %v", got, want)
	}
	if p.Stats().Evicted != 3 {
		t.Errorf("stats count %d evictions", p.Stats().Evicted)
	}
}

func TestRefusalsChangeNothing(t *testing.T) {
	p := newPool(t, 6, 4)
	serve(t, p, sequence(8)).Close() // 2 cached
	running := open(t, p, OpenRequest{Prompt: []int32{90, 91, 92, 93, 94}, Capacity: 9, Owner: 7})
	before := dump(p)

	var capacity *CapacityError
	_, err := p.Open(OpenRequest{Prompt: sequence(5), Capacity: 25})
	if !errors.Is(err, ErrNeverFits) || !errors.As(err, &capacity) || capacity.Need != 7 || capacity.Have != 6 {
		t.Errorf("7 of 6 blocks: %v", err)
	}
	// Free 1 + cached 2 - promised: the matched one may not count as evictable.
	_, err = p.Open(OpenRequest{Prompt: sequence(5), Capacity: 16})
	if !errors.Is(err, ErrNoCapacity) || !errors.As(err, &capacity) || capacity.Need != 3 || capacity.Have != 2 {
		t.Errorf("3 more blocks beside the matched one: %v", err)
	}
	var pending *PendingError
	_, err = p.Open(OpenRequest{Prompt: []int32{90, 91, 92, 93, 94}})
	if !errors.Is(err, ErrPending) || !errors.As(err, &pending) || pending.Owner != 7 {
		t.Errorf("a prefix being computed: %v", err)
	}
	if after := dump(p); after != before {
		t.Errorf("a refused Open changed the pool:\n%s\n%s", before, after)
	}
	check(t, p)

	fits := open(t, p, OpenRequest{Prompt: sequence(5), Capacity: 12})
	if err := fits.EnsureTokens(12); err != nil {
		t.Error(err)
	}
	if err := fits.EnsureTokens(13); err == nil {
		t.Error("room beyond the reservation")
	}
	if err := running.EnsureTokens(9); err != nil {
		t.Error(err)
	}
	check(t, p)
	if s := p.Stats(); s.Available() != 0 || s.InUse != 6 {
		t.Errorf("full pool: %+v", s)
	}
}

func TestMatchSurvivesOwnAllocation(t *testing.T) {
	p := newPool(t, 4, 4)
	first := serve(t, p, sequence(9))
	kept := slices.Clone(first.Blocks()[:2])
	first.Close()
	serve(t, p, []int32{50, 51, 52, 53}).Close() // 3 cached, 1 free; the matched ones are older
	table := open(t, p, OpenRequest{Prompt: append(sequence(8), 60, 61, 62, 63, 64)})
	if !slices.Equal(table.Blocks()[:2], kept) {
		t.Errorf("matched %v, got %v", kept, table.Blocks())
	}
	if p.Stats().Evicted != 1 {
		t.Errorf("%+v", p.Stats())
	}
}

func TestPromisesAreKept(t *testing.T) {
	p := newPool(t, 8, 4)
	serve(t, p, sequence(16)).Close()                              // 4 cached
	a := open(t, p, OpenRequest{Prompt: []int32{9}, Capacity: 20}) // takes 1, is promised 4 of 3 + 4
	for _, prompt := range [][]int32{sequence(13), {8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8}} {
		// Both would leave a with too little: by reviving 3 and taking 1, or by taking 4.
		if _, err := p.Open(OpenRequest{Prompt: prompt}); !errors.Is(err, ErrNoCapacity) {
			t.Fatalf("promised blocks are given away: %v", err)
		}
	}
	b := open(t, p, OpenRequest{Prompt: sequence(9)}) // revives 2, takes 1: just enough is left
	if b.Cached() != 8 || p.Stats().Available() != 0 {
		t.Fatalf("cached %d, %+v", b.Cached(), p.Stats())
	}
	if err := a.EnsureTokens(20); err != nil {
		t.Fatal(err)
	}
	check(t, p)
	if s := p.Stats(); s.InUse != 8 || s.Evicted != 2 {
		t.Errorf("%+v", s)
	}
}

func TestPendingPromptIsComputedOnce(t *testing.T) {
	p := newPool(t, 64, 4)
	prompt := sequence(14)
	owner := open(t, p, OpenRequest{Prompt: prompt, Owner: 1})
	waits := func() {
		t.Helper()
		if _, err := p.Open(OpenRequest{Prompt: prompt, Owner: 2}); !errors.Is(err, ErrPending) {
			t.Fatalf("want ErrPending, got %v", err)
		}
	}
	waits()
	owner.Commit(prompt[:6]) // a chunk: the first block is there, the next is on its way
	waits()
	// Who shares only what is there, or cannot use what is coming, does not wait.
	if got := open(t, p, OpenRequest{Prompt: []int32{0, 1, 2, 3, 77}}).Cached(); got != 4 {
		t.Errorf("cached %d", got)
	}
	if got := open(t, p, OpenRequest{Prompt: prompt[:8]}).Cached(); got != 4 {
		t.Errorf("a prompt that ends with the pending block: cached %d", got)
	}
	owner.Commit(prompt[6:])
	for range 15 {
		if got := open(t, p, OpenRequest{Prompt: prompt}).Cached(); got != 12 {
			t.Fatalf("cached %d, want 12", got)
		}
	}
}

func TestPendingOwnerLeaves(t *testing.T) {
	p := newPool(t, 16, 4)
	prompt := sequence(14)
	owner := open(t, p, OpenRequest{Prompt: prompt})
	owner.Commit(prompt[:5])
	owner.Close()
	next := open(t, p, OpenRequest{Prompt: prompt, Owner: 2})
	if next.Cached() != 4 {
		t.Errorf("cached %d", next.Cached())
	}
	if _, err := p.Open(OpenRequest{Prompt: prompt}); !errors.Is(err, ErrPending) {
		t.Errorf("the next owner should be waited for: %v", err)
	}
}

func TestDuplicateKeepsItsTwin(t *testing.T) {
	p := newPool(t, 16, 4)
	prompt := sequence(9)
	a := open(t, p, OpenRequest{Prompt: prompt, Owner: 1})
	b := open(t, p, OpenRequest{Prompt: prompt, NoMatch: true, Owner: 2, Capacity: 16})
	b.Commit(prompt) // faster than the one that announced it
	check(t, p)
	own := slices.Clone(a.Blocks())
	a.Commit(prompt)
	check(t, p)
	if a.Blocks()[0] == b.Blocks()[0] || !slices.Equal(a.Blocks(), own) {
		t.Errorf("blocks changed or are shared: %v, %v, were %v", a.Blocks(), b.Blocks(), own)
	}
	for i, id := range a.Blocks() {
		if p.blocks[id].registered {
			t.Errorf("block %d of the later one is registered", i)
		}
	}
	b.Close()
	check(t, p)
	if s := p.Stats(); s.Cached != 0 || s.InUse != 3+2 {
		t.Errorf("the twins are not held: %+v", s)
	}
	a.Close()
	check(t, p)
	if s := p.Stats(); s.Cached != 2 || s.InUse != 0 || s.Promised != 0 {
		t.Errorf("%+v", s)
	}
	if got := open(t, p, OpenRequest{Prompt: prompt}).Cached(); got != 8 {
		t.Errorf("cached %d", got)
	}
}

// turn serves a prompt, then generates n tokens from first on.
func turn(t *testing.T, p *Pool, r OpenRequest, n int, first int32) *Table {
	t.Helper()
	r.Capacity = len(r.Prompt) + n
	table := open(t, p, r)
	table.Commit(r.Prompt[table.Cached():])
	check(t, p)
	for i := range int32(n) {
		if err := table.EnsureTokens(table.Len() + 1); err != nil {
			t.Fatal(err)
		}
		table.Commit([]int32{first + i})
		check(t, p)
	}
	return table
}

func TestReplyAfterARepeatedPromptIsCached(t *testing.T) {
	for _, noMatch := range []bool{false, true} {
		p := newPool(t, 16, 4)
		prompt := sequence(8) // its last block is computed again, as a prompt pass must yield logits
		turn(t, p, OpenRequest{Prompt: prompt}, 5, 100).Close()
		p.Tick()
		again := turn(t, p, OpenRequest{Prompt: prompt, NoMatch: noMatch}, 9, 200) // another reply
		next := append(slices.Clone(prompt), 200, 201, 202, 203, 204, 205, 206, 207, 208, 0)
		finds := func(when string) {
			table := open(t, p, OpenRequest{Prompt: next})
			if table.Cached() != 16 {
				t.Errorf("NoMatch %v, %s: the next turn finds %d tokens, want 16", noMatch, when, table.Cached())
			}
			table.Close()
		}
		finds("while it runs")
		again.Close()
		finds("after it")
		check(t, p)
	}
}

func TestNoRoomForATwin(t *testing.T) {
	prompt := sequence(8)
	t.Run("now", func(t *testing.T) {
		p := newPool(t, 5, 4)
		serve(t, p, prompt).Close()
		again := open(t, p, OpenRequest{Prompt: prompt})                            // 1 matched, 1 own; its twin is cached
		other := open(t, p, OpenRequest{Prompt: []int32{9, 9, 9, 9}, Capacity: 12}) // all that is left is promised
		again.Commit(prompt[4:])
		check(t, p)
		if len(again.twins) != 0 {
			t.Error("a promised block is held as a twin")
		}
		if err := other.EnsureTokens(12); err != nil {
			t.Error(err)
		}
		check(t, p)
	})
	t.Run("nothing follows", func(t *testing.T) {
		p := newPool(t, 5, 4)
		serve(t, p, prompt).Close()
		again := open(t, p, OpenRequest{Prompt: prompt, Capacity: 20})
		again.Commit(prompt[4:])
		if err := again.EnsureTokens(12); err != nil {
			t.Fatal(err)
		}
		again.Commit([]int32{100, 101, 102, 103})
		check(t, p)
		if id := again.Blocks()[2]; p.blocks[id].registered {
			t.Error("a block is registered under a prefix that its table does not hold")
		}
	})
	t.Run("alone at its largest", func(t *testing.T) {
		p := newPool(t, 5, 4)
		serve(t, p, prompt).Close()
		again := open(t, p, OpenRequest{Prompt: prompt, Capacity: 20, Reserve: 8})
		again.Commit(prompt[4:])
		check(t, p)
		if err := again.EnsureTokens(20); err != nil {
			t.Errorf("its own twin is in the way: %v", err)
		}
		check(t, p)
	})
}

func TestPinHoldsTwins(t *testing.T) {
	p := newPool(t, 8, 4)
	prompt := sequence(8)
	serve(t, p, prompt).Close()
	again := turn(t, p, OpenRequest{Prompt: prompt, NoMatch: true}, 5, 100)
	pin := again.Pin(4)
	again.Close()
	check(t, p)
	if s := p.Stats(); s.InUse != 6 || s.Pinned != 4 {
		t.Errorf("4 pinned blocks and the twins of 2: %+v", s)
	}
	table := open(t, p, OpenRequest{Prompt: append(slices.Clone(prompt), 100, 101, 102, 103, 0)})
	if table.Cached() != 12 {
		t.Errorf("cached %d", table.Cached())
	}
	table.Close()
	pin.Release()
	check(t, p)
	if s := p.Stats(); s.InUse != 0 || s.Cached != 3 {
		t.Errorf("%+v", s)
	}
}

func TestClaimGoesOnAfterADuplicate(t *testing.T) {
	p := newPool(t, 16, 4)
	prompt := sequence(13)
	a := open(t, p, OpenRequest{Prompt: prompt, Owner: 1})
	b := open(t, p, OpenRequest{Prompt: prompt, NoMatch: true, Owner: 2})
	b.Commit(prompt[:4])
	waits := func() {
		t.Helper()
		var pending *PendingError
		if _, err := p.Open(OpenRequest{Prompt: prompt}); !errors.As(err, &pending) || pending.Owner != 1 {
			t.Fatalf("want to wait for request 1: %v", err)
		}
	}
	waits()
	a.Commit(prompt[:4])
	check(t, p)
	waits()
	a.Commit(prompt[4:])
	check(t, p)
	if got := open(t, p, OpenRequest{Prompt: prompt}).Cached(); got != 12 {
		t.Errorf("cached %d", got)
	}
}

func TestCommitOfOtherTokens(t *testing.T) {
	p := newPool(t, 8, 4)
	table := open(t, p, OpenRequest{Prompt: sequence(9)})
	table.Commit([]int32{7, 7, 7, 7, 4, 5, 6, 7})
	table.Close()
	if got := open(t, p, OpenRequest{Prompt: sequence(9)}).Cached(); got != 0 {
		t.Errorf("a prompt that was never written is found: %d", got)
	}
	if got := open(t, p, OpenRequest{Prompt: []int32{7, 7, 7, 7, 4, 5, 6, 7, 0}}).Cached(); got != 8 {
		t.Errorf("what was written is not found: %d", got)
	}
}

func TestPinOutlivesTable(t *testing.T) {
	p := newPool(t, 4, 4)
	table := serve(t, p, sequence(10))
	pin := table.Pin(3)
	held := slices.Clone(pin.Blocks())
	table.Close()
	check(t, p)
	if s := p.Stats(); s.Pinned != 3 || s.InUse != 3 || s.Free != 1 {
		t.Fatalf("%+v", s)
	}
	// Pressure cannot touch it.
	if _, err := p.Open(OpenRequest{Prompt: []int32{50, 51, 52, 53, 54}}); !errors.Is(err, ErrNoCapacity) {
		t.Fatalf("pinned blocks are handed out: %v", err)
	}
	// A pinned prefix can still be shared.
	again := open(t, p, OpenRequest{Prompt: sequence(10)})
	if again.Cached() != 8 || !slices.Equal(again.Blocks()[:2], held[:2]) {
		t.Errorf("cached %d in %v", again.Cached(), again.Blocks())
	}
	again.Close()
	pin.Release()
	check(t, p)
	if s := p.Stats(); s.Pinned != 0 || s.Cached != 2 || s.Free != 2 {
		t.Errorf("%+v", s)
	}
}

func TestMisuseIsReportedAndHarmless(t *testing.T) {
	prompt := sequence(6)
	for name, mistake := range map[string]func(*Pool, *Table){
		"double close":          func(_ *Pool, t *Table) { t.Close(); t.Close() },
		"double release":        func(_ *Pool, t *Table) { p := t.Pin(1); p.Release(); p.Release() },
		"commit without room":   func(_ *Pool, t *Table) { t.Commit(sequence(9)) },
		"commit after close":    func(_ *Pool, t *Table) { t.Close(); t.Commit(prompt) },
		"pin more than is held": func(_ *Pool, t *Table) { t.Pin(3).Release() },
	} {
		p := newPool(t, 4, 4)
		table := open(t, p, OpenRequest{Prompt: prompt})
		mistake(p, table)
		if p.misuse == nil || p.Check() == nil {
			t.Errorf("%s is not reported", name)
		}
		p.misuse = nil
		if err := p.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestClear(t *testing.T) {
	p := newPool(t, 16, 4)
	serve(t, p, []int32{50, 51, 52, 53, 54}).Close()
	running := open(t, p, OpenRequest{Prompt: sequence(13), Capacity: 16})
	running.Commit(sequence(6))
	p.DrainEvents(nil)
	p.Clear()
	check(t, p)
	if events := p.DrainEvents(nil); len(events) != 1 || events[0].Kind != Cleared {
		t.Errorf("events %+v", events)
	}
	running.Commit(sequence(13)[6:])
	check(t, p)
	if got := open(t, p, OpenRequest{Prompt: sequence(13)}).Cached(); got != 0 {
		t.Errorf("a cleared prefix is matched: %d", got)
	}
	running.Close()
	check(t, p)
}

// A damaged block goes with what is cached behind it; what only shares the prefix before it stays, and so does
// whoever uses it.
func TestForget(t *testing.T) {
	p := newPool(t, 16, 4)
	long := sequence(16)
	serve(t, p, long).Close()
	fork := append(slices.Clone(long[:8]), 90, 91, 92, 93)
	serve(t, p, fork).Close()
	running := open(t, p, OpenRequest{Prompt: long, Capacity: 24, WholePrompt: true})
	damaged := slices.Clone(running.Blocks()[2:3])
	p.DrainEvents(nil)
	if n := p.Forget(damaged); n != 2 {
		t.Errorf("%d blocks are forgotten, want the third and the fourth", n)
	}
	check(t, p)
	chain := Chain(Digest{}, 4, long)
	events := p.DrainEvents(nil)
	if len(events) != 2 || events[0].Kind != Removed || events[0].Key.Digest != chain[3] || events[1].Key.Digest != chain[2] {
		t.Errorf("events %+v", events)
	}
	for _, c := range []struct {
		prompt []int32
		cached int
	}{{long, 8}, {fork, 12}} {
		again := open(t, p, OpenRequest{Prompt: c.prompt, WholePrompt: true})
		if got := again.Cached(); got != c.cached {
			t.Errorf("%v: %d tokens are cached, want %d", c.prompt, got, c.cached)
		}
		again.Close()
	}
	if err := running.EnsureTokens(24); err != nil {
		t.Fatal(err)
	}
	running.Commit(sequence(24)[16:]) // not findable: its prefix is not
	running.Close()
	check(t, p)
	if n := p.Forget(damaged); n != 0 {
		t.Errorf("%d blocks are forgotten twice", n)
	}
	if s := p.Stats(); s.InUse != 0 || s.Cached != 3 {
		t.Errorf("at the end %+v", s)
	}
}

func TestEvents(t *testing.T) {
	p := newPool(t, 2, 4)
	prompt := sequence(8)
	chain := Chain(Digest{}, 4, prompt)
	serve(t, p, prompt).Close()
	serve(t, p, []int32{9, 9, 9, 9}).Close()
	other := Chain(Digest{}, 4, []int32{9, 9, 9, 9})
	want := []Event{
		{Sequence: 1, Kind: Stored, Key: Key{Digest: chain[0]}},
		{Sequence: 2, Kind: Stored, Key: Key{Digest: chain[1]}, Parent: chain[0]},
		{Sequence: 3, Kind: Removed, Key: Key{Digest: chain[1]}},
		{Sequence: 4, Kind: Stored, Key: Key{Digest: other[0]}},
	}
	if got := p.DrainEvents(nil); !slices.Equal(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	if got := p.DrainEvents(nil); len(got) != 0 {
		t.Errorf("drained twice: %+v", got)
	}
}

func TestEventsThatNobodyDrains(t *testing.T) {
	p, err := New(Config{Blocks: 4, BlockSize: 1, Events: 3})
	if err != nil {
		t.Fatal(err)
	}
	for i := range int32(5) {
		serve(t, p, []int32{i}).Close() // stores one; the fifth removes one first
	}
	events := p.DrainEvents(nil)
	if len(events) > 3 || events[0].Sequence == 1 || events[len(events)-1].Sequence != 6 {
		t.Errorf("after a gap: %+v", events)
	}
}

func TestSnapshot(t *testing.T) {
	p := newPool(t, 8, 1)
	holder := open(t, p, OpenRequest{Prompt: []int32{9, 9}})
	serve(t, p, []int32{1, 2}).Close()
	holder.Close()
	last := serve(t, p, []int32{1, 2, 3, 4})
	if blocks := last.Blocks(); blocks[2] > blocks[1] {
		t.Fatalf("the ids of %v follow the chain, which makes it easy", blocks)
	}
	last.Close()
	serve(t, p, []int32{6}).Close()
	before := dump(p)
	events := p.DrainEvents(nil)
	if p.DrainEvents(nil) != nil || dump(p) == before {
		t.Error("events stay after a drain")
	}
	serve(t, p, []int32{7}).Close()
	got := p.Snapshot(nil)
	if len(p.DrainEvents(nil)) != 0 {
		t.Error("a snapshot leaves older events")
	}
	if got[0] != (Event{Sequence: 6, Kind: Cleared}) || len(got) != len(events)+2 {
		t.Fatalf("got %+v", got)
	}
	known := map[Digest]bool{{}: true}
	for _, e := range got[1:] {
		if e.Sequence != 6 || e.Kind != Stored || !known[e.Parent] {
			t.Errorf("unexpected %+v", e)
		}
		known[e.Key.Digest] = true
	}
	for _, e := range events {
		if !known[e.Key.Digest] {
			t.Errorf("%+v is missing", e)
		}
	}
}

func TestGenerationAndOrder(t *testing.T) {
	p := newPool(t, 4, 4)
	a := open(t, p, OpenRequest{Prompt: sequence(15)})
	if want := []int32{0, 1, 2, 3}; !slices.Equal(a.Blocks(), want) {
		t.Errorf("first table has %v, want ascending ids, which transfers coalesce", a.Blocks())
	}
	if got := a.Slot(6); got != 1*4+2 {
		t.Errorf("slot of position 6 is %d", got)
	}
	if err := a.Verify(); err != nil {
		t.Error(err)
	}
	pin := a.Pin(2)
	a.Close()
	pin.Release()
	if a.Verify() == nil {
		t.Error("a closed table holds its blocks")
	}
	b := open(t, p, OpenRequest{Prompt: sequence(15)})
	var stale *StaleError
	if err := pin.Verify(); !errors.As(err, &stale) || *stale != (StaleError{Block: 0, Held: 1, Now: 2}) {
		t.Errorf("a pin that was released: %v", err)
	}
	if !slices.Equal(pin.Generations(), []uint32{1, 1}) {
		t.Errorf("generations %v", pin.Generations())
	}
	if !slices.Equal(b.Blocks(), []int32{0, 1, 2, 3}) || p.Generation(0) != 2 {
		t.Errorf("second table has %v, generation %d", b.Blocks(), p.Generation(0))
	}
}

func BenchmarkOpenWarm32k(b *testing.B) {
	for _, given := range []bool{true, false} {
		name := "digests-given"
		if !given {
			name = "digests-computed"
		}
		b.Run(name, func(b *testing.B) {
			p := newPool(b, 4096, 32)
			prompt := sequence(32 << 10)
			r := OpenRequest{Prompt: prompt, Capacity: len(prompt) + 512}
			if given {
				r.Digests = Chain(Digest{}, 32, prompt)
			}
			serve(b, p, prompt).Close()
			b.ReportAllocs()
			for b.Loop() {
				table, err := p.Open(r)
				if err != nil || table.Cached() != len(prompt)-32 {
					b.Fatal(err, table.Cached())
				}
				table.Close()
			}
		})
	}
}

func BenchmarkCommitToken(b *testing.B) {
	p := newPool(b, 1<<16, 32)
	table := open(b, p, OpenRequest{Capacity: 1 << 20})
	one := []int32{7}
	b.ReportAllocs()
	for b.Loop() {
		if table.Len() == 1<<20 {
			b.StopTimer()
			table.Close()
			p.Clear()
			table = open(b, p, OpenRequest{Capacity: 1 << 20})
			b.StartTimer()
		}
		if err := table.EnsureTokens(table.Len() + 1); err != nil {
			b.Fatal(err)
		}
		table.Commit(one)
	}
}
