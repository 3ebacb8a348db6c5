package kvcache

import (
	"errors"
	"fmt"
	"slices"
)

// Why Open refuses.
var (
	// ErrNeverFits: the request needs more blocks than the pool has. Waiting does not help.
	ErrNeverFits = errors.New("kvcache: larger than the whole cache")
	// ErrNoCapacity: too few blocks now; they come back when other tables and pins are closed.
	ErrNoCapacity = errors.New("kvcache: no capacity now")
	// ErrPending: another table is about to register the prompt's next block. Retry after its next Commit
	// or Close.
	ErrPending = errors.New("kvcache: the prefix is being computed")
)

// CapacityError carries the numbers behind ErrNeverFits or ErrNoCapacity.
type CapacityError struct {
	Err  error // one of the two
	Need int   // blocks beyond those matched
	Have int   // ErrNeverFits: blocks of the pool; ErrNoCapacity: those that can be promised
}

func (e *CapacityError) Error() string {
	return fmt.Sprintf("%v: needs %d blocks, %d available", e.Err, e.Need, e.Have)
}

// Unwrap returns the sentinel.
func (e *CapacityError) Unwrap() error { return e.Err }

// PendingError tells whom an Open waits for. It is an ErrPending.
type PendingError struct {
	Owner  uint64 // OpenRequest.Owner of the table that will register it
	Digest Digest
}

func (e *PendingError) Error() string {
	return fmt.Sprintf("%v by request %d (block %d)", ErrPending, e.Owner, e.Digest.Public())
}

// Unwrap returns ErrPending.
func (e *PendingError) Unwrap() error { return ErrPending }

// OpenRequest describes the sequence that a table will hold.
type OpenRequest struct {
	Version uint64  // of the weights
	Root    Digest  // from Root; zero without salt and adapter
	Prompt  []int32 // the pool keeps the slice; do not change it
	// Digests is Chain(Root, block size, Prompt) when the caller has it already; nil to compute it here.
	// Callers that retry an Open should pass it.
	Digests []Digest
	// Capacity is the most tokens whose KV the table will ever hold. Less than the prompt counts as the
	// prompt.
	Capacity int
	// NoMatch reuses nothing, for requests that need every prompt position computed. Their blocks can be
	// reused by others.
	NoMatch bool
	// WholePrompt lets every complete block of the prompt match. Without it at least one token stays to be
	// computed, since a prompt pass must yield logits; an import needs no such token.
	WholePrompt bool
	// Owner is the request's number, for PendingError.
	Owner uint64
}

// Table is one request's block table: the blocks of its positions in order.
type Table struct {
	pool     *Pool
	version  uint64
	owner    uint64
	prompt   []int32
	digests  []Digest // of the prompt's complete blocks
	capacity int

	blocks   []int32
	promised int
	cached   int     // leading tokens that were matched
	length   int     // tokens whose KV is written
	tail     []int32 // of those, the ones in the last, incomplete block
	chain    Digest  // of the complete blocks
	closed   bool
}

// Open matches, reserves and returns a table whose blocks for the prompt are allocated and whose other
// blocks, up to Capacity, are promised. On an error nothing has changed: a *CapacityError or a
// *PendingError.
func (p *Pool) Open(r OpenRequest) (*Table, error) {
	capacity := max(r.Capacity, len(r.Prompt))
	total := p.BlocksFor(capacity)
	if total > len(p.blocks) {
		return nil, &CapacityError{Err: ErrNeverFits, Need: total, Have: len(p.blocks)}
	}
	complete := len(r.Prompt) / p.blockSize
	digests := r.Digests
	if len(digests) < complete {
		digests = Chain(r.Root, p.blockSize, r.Prompt)
	}
	t := &Table{
		pool: p, version: r.Version, owner: r.Owner, prompt: r.Prompt, digests: digests[:complete],
		capacity: capacity, chain: r.Root,
	}
	revived, err := t.match(r)
	if err != nil {
		return nil, err
	}
	need := total - len(t.blocks)
	if have := len(p.free) + p.cached - p.promised - revived; need > have {
		return nil, &CapacityError{Err: ErrNoCapacity, Need: need, Have: max(have, 0)}
	}
	for _, id := range t.blocks {
		p.retain(id)
	}
	if n := len(t.blocks); n > 0 {
		t.chain = t.digests[n-1]
	}
	t.cached = len(t.blocks) * p.blockSize
	t.length = t.cached
	t.promised = need
	p.promised += need
	p.tables[t] = struct{}{}
	t.grow(len(r.Prompt))
	t.claim()
	return t, nil
}

// match finds the longest cached prefix without holding it yet, and how many of its blocks nobody uses.
// It fails when the next block is on its way and could be matched.
func (t *Table) match(r OpenRequest) (revived int, err error) {
	if r.NoMatch {
		return 0, nil
	}
	p := t.pool
	limit := len(t.digests)
	if !r.WholePrompt && limit*p.blockSize == len(r.Prompt) {
		limit = max(limit-1, 0)
	}
	for _, d := range t.digests[:limit] {
		key := Key{t.version, d}
		id, ok := p.byKey[key]
		if !ok {
			if other := p.pending[key]; other != nil {
				return 0, &PendingError{Owner: other.owner, Digest: d}
			}
			break
		}
		if p.blocks[id].refs == 0 {
			revived++
		}
		t.blocks = append(t.blocks, id)
	}
	return revived, nil
}

// claim announces the blocks that this table will register, so that others wait instead of computing
// them too. Nothing is claimed when the first of them exists or is claimed already: then it stays
// unregistered here, and so does all that follows.
func (t *Table) claim() {
	p := t.pool
	todo := t.digests[t.cached/p.blockSize:]
	if len(todo) == 0 {
		return
	}
	first := Key{t.version, todo[0]}
	if _, ok := p.byKey[first]; ok || p.pending[first] != nil {
		return
	}
	for _, d := range todo {
		p.pending[Key{t.version, d}] = t
	}
}

// unclaim lets waiters go on: this table will not register what it has not yet.
func (t *Table) unclaim() {
	for _, d := range t.digests[min(t.length/t.pool.blockSize, len(t.digests)):] {
		if key := (Key{t.version, d}); t.pool.pending[key] == t {
			delete(t.pool.pending, key)
		}
	}
}

// grow takes promised blocks until n tokens have room.
func (t *Table) grow(n int) {
	p := t.pool
	for len(t.blocks) < p.BlocksFor(n) {
		t.blocks = append(t.blocks, p.take())
		t.promised--
		p.promised--
	}
}

// EnsureTokens makes room for n tokens in all. Up to the table's capacity it never fails.
func (t *Table) EnsureTokens(n int) error {
	if t.closed {
		return errors.New("kvcache: EnsureTokens on a closed table")
	}
	if n > t.capacity {
		return fmt.Errorf("kvcache: request %d wants room for %d tokens; it reserved %d", t.owner, n, t.capacity)
	}
	t.grow(n)
	return nil
}

// Commit says that the KV of the next tokens is in place: call it after a successful forward or
// transfer, never before. Blocks that are now complete can be matched by others, unless the same prefix
// is cached already. The tokens need room from Open or EnsureTokens.
func (t *Table) Commit(tokens []int32) {
	size := t.pool.blockSize
	if t.closed || t.length+len(tokens) > len(t.blocks)*size {
		t.pool.fault(fmt.Sprintf("request %d commits %d tokens after %d without room", t.owner, len(tokens), t.length))
		return
	}
	for len(tokens) > 0 {
		n := min(size-len(t.tail), len(tokens))
		t.tail = append(t.tail, tokens[:n]...)
		tokens = tokens[n:]
		if len(t.tail) == size {
			t.complete(t.length / size)
			t.tail = t.tail[:0]
			t.length = (t.length/size + 1) * size
		} else {
			t.length += n
		}
	}
}

// complete registers block i, whose tokens are in tail.
func (t *Table) complete(i int) {
	p := t.pool
	if i < len(t.digests) && slices.Equal(t.tail, t.prompt[i*p.blockSize:(i+1)*p.blockSize]) {
		t.chain = t.digests[i]
	} else {
		t.unclaim() // past the prompt there is nothing to take back; within it, what was announced is not what came
		t.digests = t.digests[:min(i, len(t.digests))]
		t.chain = extend(nil, t.chain, t.tail)
	}
	key := Key{t.version, t.chain}
	parent := int32(none)
	if i > 0 {
		parent = t.blocks[i-1]
	}
	_, exists := p.byKey[key]
	if exists || parent != none && !p.blocks[parent].registered {
		// Registering a later block would cache it under a prefix that this table does not hold.
		t.unclaim()
		return
	}
	p.register(t.blocks[i], key, parent)
}

// Cached is how many leading tokens were matched at Open: a multiple of the block size.
func (t *Table) Cached() int { return t.cached }

// Len is how many tokens have their KV in place, matched ones included.
func (t *Table) Len() int { return t.length }

// Capacity is how many tokens the table may ever hold.
func (t *Table) Capacity() int { return t.capacity }

// Blocks are the allocated blocks in order of position. The slice is the table's own: read it, and only
// until the next EnsureTokens or Close.
func (t *Table) Blocks() []int32 { return t.blocks }

// Slot is where the KV of a position goes: block*BlockSize + offset. The position needs room.
func (t *Table) Slot(position int) int32 {
	size := t.pool.blockSize
	return t.blocks[position/size]*int32(size) + int32(position%size)
}

// Pin holds the first n allocated blocks beyond the table's life.
func (t *Table) Pin(n int) *Pin {
	p := t.pool
	if t.closed || n < 0 || n > len(t.blocks) {
		p.fault(fmt.Sprintf("request %d pins %d of %d blocks", t.owner, n, len(t.blocks)))
		n = min(max(n, 0), len(t.blocks))
	}
	pin := &Pin{pool: p, blocks: slices.Clone(t.blocks[:n])}
	for _, id := range pin.blocks {
		p.retain(id)
		if p.blocks[id].pins++; p.blocks[id].pins == 1 {
			p.pinned++
		}
	}
	p.pins[pin] = struct{}{}
	return pin
}

// Close gives everything back. Complete blocks stay cached. A second Close does nothing, but Check
// reports it.
func (t *Table) Close() {
	p := t.pool
	if t.closed {
		p.fault(fmt.Sprintf("the table of request %d is closed twice", t.owner))
		return
	}
	t.closed = true
	t.unclaim()
	p.promised -= t.promised
	t.promised = 0
	p.releaseAll(t.blocks)
	t.blocks = nil
	delete(p.tables, t)
}

// Pin keeps blocks from being reused while something outside may touch them.
type Pin struct {
	pool     *Pool
	blocks   []int32
	released bool
}

// Blocks are the pinned blocks in order.
func (p *Pin) Blocks() []int32 { return p.blocks }

// Release gives them back. A second Release does nothing, but Check reports it.
func (p *Pin) Release() {
	if p.released {
		p.pool.fault("a pin is released twice")
		return
	}
	p.released = true
	for _, id := range p.blocks {
		if p.pool.blocks[id].pins--; p.pool.blocks[id].pins == 0 {
			p.pool.pinned--
		}
	}
	p.pool.releaseAll(p.blocks)
	delete(p.pool.pins, p)
}
