package kvcache

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sort"
)

// MaxSlots is the largest pool in tokens: slots are int32.
const MaxSlots = 1<<31 - 1

// Config sizes a Pool.
type Config struct {
	// Blocks is how many blocks there are; their ids are 0..Blocks-1. At least 1.
	Blocks int
	// BlockSize is how many tokens a block holds. At least 1.
	BlockSize int
	// Events is how many events may wait for DrainEvents. When more come, those that wait are lost, which
	// shows as a gap in the sequence. 0: none are recorded.
	Events int
}

func (c Config) validate() error {
	if c.BlockSize < 1 || c.BlockSize > MaxSlots {
		return fmt.Errorf("kvcache: BlockSize is %d; it must be in [1, %d]", c.BlockSize, MaxSlots)
	}
	if most := MaxSlots / c.BlockSize; c.Blocks < 1 || c.Blocks > most {
		return fmt.Errorf("kvcache: Blocks is %d; with blocks of %d tokens it must be in [1, %d]", c.Blocks, c.BlockSize, most)
	}
	if c.Events < 0 {
		return fmt.Errorf("kvcache: Events is %d; it must not be negative", c.Events)
	}
	return nil
}

const none = -1 // no block, no place in the heap

// block is the state of one block. It is free (no references, not registered), in use (references), or
// cached (registered without references, so evictable).
type block struct {
	key        Key
	registered bool
	refs       int32 // tables and pins that hold it
	pins       int32 // of those, pins
	parent     int32 // the registered block of the prefix one block shorter
	children   int32 // registered blocks whose parent this is
	leaf       int32 // place in the heap of evictable leaves
	generation uint32
	used       uint64 // tick of the last use
}

// Pool owns the blocks of one engine.
//
// Whoever holds a registered block holds its whole prefix, so a cached block has only cached
// descendants and every cached block can be evicted, leaves first. That is why free + cached blocks can
// be promised as if they were all free.
type Pool struct {
	blockSize int
	blocks    []block
	free      []int32 // a stack
	leaves    leafHeap
	byKey     map[Key]int32
	pending   map[Key]*Table // who is about to register a key
	tables    map[*Table]struct{}
	pins      map[*Pin]struct{}

	tick     uint64
	cached   int // registered blocks without references
	pinned   int // blocks with pins
	promised int // blocks that tables may still take
	withheld int // blocks that Open must leave
	evicted  uint64

	events   []Event // not drained yet
	most     int     // of them
	sequence uint64  // of the last one

	misuse error // the first mistake of a caller; Check reports it
}

// New makes a pool of free blocks.
func New(c Config) (*Pool, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	p := &Pool{
		blockSize: c.BlockSize,
		blocks:    make([]block, c.Blocks),
		free:      make([]int32, c.Blocks),
		byKey:     make(map[Key]int32),
		pending:   make(map[Key]*Table),
		tables:    make(map[*Table]struct{}),
		pins:      make(map[*Pin]struct{}),
		most:      c.Events,
	}
	for i := range p.blocks {
		p.blocks[i].parent, p.blocks[i].leaf = none, none
		p.free[i] = int32(c.Blocks - 1 - i)
	}
	return p, nil
}

// BlockSize is how many tokens a block holds.
func (p *Pool) BlockSize() int { return p.blockSize }

// BlocksFor is how many blocks hold n tokens.
func (p *Pool) BlocksFor(n int) int {
	if n <= 0 {
		return 0
	}
	return (n-1)/p.blockSize + 1
}

// Tick advances the clock by which the least recently used block is found: once an engine step.
func (p *Pool) Tick() { p.tick++ }

// Generation counts how often a block was handed out, modulo 2^32; it tells two uses of one id apart.
func (p *Pool) Generation(id int32) uint32 { return p.blocks[id].generation }

// Withhold makes Open leave n blocks alone: they are for open tables that lack them, which come first. It
// holds until the next Withhold.
func (p *Pool) Withhold(n int) { p.withheld = n }

func (p *Pool) verify(blocks []int32, generations []uint32) error {
	for i, id := range blocks {
		if now := p.blocks[id].generation; now != generations[i] {
			return &StaleError{Block: id, Held: generations[i], Now: now}
		}
	}
	return nil
}

// Stats counts blocks by state. Total = Free + Cached + InUse; Pinned blocks are in use too.
type Stats struct {
	Total    int
	Free     int
	Cached   int // hold a prefix, nobody uses them: evictable
	InUse    int
	Pinned   int
	Promised int // of Free + Cached, those that open tables may still take
	Evicted  uint64
}

// available is how many more blocks can be promised.
func (p *Pool) available() int { return len(p.free) + p.cached - p.promised }

// Available is how many more blocks can be promised.
func (s Stats) Available() int { return s.Free + s.Cached - s.Promised }

// Stats returns the current counts.
func (p *Pool) Stats() Stats {
	return Stats{
		Total: len(p.blocks), Free: len(p.free), Cached: p.cached,
		InUse:  len(p.blocks) - len(p.free) - p.cached,
		Pinned: p.pinned, Promised: p.promised, Evicted: p.evicted,
	}
}

// Clear forgets every cached prefix. Blocks in use stay with their tables and pins, but nobody can match
// them any more.
func (p *Pool) Clear() {
	for id := len(p.blocks) - 1; id >= 0; id-- {
		b := &p.blocks[id]
		if !b.registered {
			continue
		}
		p.leaves.remove(p, int32(id))
		b.registered, b.key, b.parent, b.children = false, Key{}, none, 0
		if b.refs == 0 {
			p.free = append(p.free, int32(id))
		}
	}
	p.cached = 0
	clear(p.byKey)
	clear(p.pending)
	p.emit(Event{Kind: Cleared})
}

// Held is how many of a chain's digests, from the first on, Open would find cached under some weights.
func (p *Pool) Held(version uint64, chain []Digest) int {
	return sort.Search(len(chain), func(i int) bool {
		_, ok := p.byKey[Key{version, chain[i]}]
		return !ok // nor is any that follows
	})
}

// take hands out one block with one reference, evicting the least recently used leaf when none is free.
// The caller has made sure that there is one.
func (p *Pool) take() int32 {
	if len(p.free) == 0 {
		p.evict()
	}
	id := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	b := &p.blocks[id]
	b.refs, b.used = 1, p.tick
	b.generation++
	return id
}

func (p *Pool) evict() {
	p.unregister(p.leaves.min())
	p.evicted++
}

// unregister makes a registered block without children unfindable, and free if nobody uses it.
func (p *Pool) unregister(id int32) {
	b := &p.blocks[id]
	key := b.key
	p.leaves.remove(p, id)
	delete(p.byKey, key)
	if b.parent != none {
		parent := &p.blocks[b.parent]
		parent.children--
		if parent.refs == 0 && parent.children == 0 {
			p.leaves.add(p, b.parent)
		}
	}
	b.registered, b.key, b.parent = false, Key{}, none
	if b.refs == 0 {
		p.cached--
		p.free = append(p.free, id)
	}
	p.emit(Event{Kind: Removed, Key: key})
}

// Forget makes nobody match these blocks any more, nor what is cached behind them: they do not hold what they
// should. Those in use stay with their tables and pins. It returns how many were forgotten.
func (p *Pool) Forget(blocks []int32) int {
	doomed := p.behind(blocks)
	for _, id := range doomed {
		p.unregister(id)
	}
	return len(doomed)
}

// behind lists the registered ones among blocks and all whose prefix includes one of them, children before
// their parents.
func (p *Pool) behind(blocks []int32) []int32 {
	type place struct {
		depth  int // from 1 on; 0: not known yet
		doomed bool
	}
	places := make([]place, len(p.blocks))
	for _, id := range blocks {
		places[id].doomed = true
	}
	var list, path []int32
	for id := range p.blocks {
		path = path[:0]
		up := int32(id)
		for ; up != none && p.blocks[up].registered && places[up].depth == 0; up = p.blocks[up].parent {
			path = append(path, up)
		}
		var above place
		if up != none {
			above = places[up]
		}
		for _, below := range slices.Backward(path) {
			above = place{above.depth + 1, above.doomed || places[below].doomed}
			places[below] = above
			if above.doomed {
				list = append(list, below)
			}
		}
	}
	slices.SortFunc(list, func(a, b int32) int {
		return cmp.Or(cmp.Compare(places[b].depth, places[a].depth), cmp.Compare(a, b))
	})
	return list
}

func (p *Pool) retain(id int32) {
	b := &p.blocks[id]
	if b.refs == 0 {
		p.cached--
		p.leaves.remove(p, id)
	}
	b.refs++
	b.used = p.tick
}

func (p *Pool) release(id int32) {
	b := &p.blocks[id]
	b.refs--
	b.used = p.tick
	switch {
	case b.refs > 0:
	case b.registered:
		p.cached++
		if b.children == 0 {
			p.leaves.add(p, id)
		}
	default:
		p.free = append(p.free, id)
	}
}

// releaseAll releases from the deepest block up, so that children go before their parents and the free
// stack hands the blocks out in the same order again.
func (p *Pool) releaseAll(ids []int32) {
	for i := len(ids) - 1; i >= 0; i-- {
		p.release(ids[i])
	}
}

// register makes a block in use findable. parent is the registered block before it, or none.
func (p *Pool) register(id int32, key Key, parent int32) {
	b := &p.blocks[id]
	b.registered, b.key, b.parent = true, key, parent
	if parent != none {
		p.blocks[parent].children++
	}
	p.byKey[key] = id
	delete(p.pending, key)
	p.emit(Event{Kind: Stored, Key: key, Parent: p.parentDigest(id)})
}

func (p *Pool) fault(what string) {
	if p.misuse == nil {
		p.misuse = errors.New("kvcache: " + what)
	}
}
