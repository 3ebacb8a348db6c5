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
	// ErrNoCapacity: too few blocks now; they come back when other tables and pins are closed. Fit tells
	// which ones would have to.
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

// StaleError says that a block is not what its holder takes it for: it was handed out again meanwhile.
type StaleError struct {
	Block     int32
	Held, Now uint32 // generations
}

func (e *StaleError) Error() string {
	return fmt.Sprintf("kvcache: block %d is held in generation %d, but has been handed out again as %d", e.Block, e.Held, e.Now)
}

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
	// Reserve is for how many of those tokens blocks are set aside now, at least for the prompt's; beyond
	// them EnsureTokens can find the pool used up. 0 is all of Capacity.
	Reserve int
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

	blocks      []int32
	generations []uint32 // of blocks, from when they joined
	reserved    int      // blocks held or promised
	cached      int      // leading tokens that were matched
	length      int      // tokens whose KV is written
	tail        []int32  // of those, the ones in the last, incomplete block
	chain       Digest   // of the complete blocks
	registered  int32    // the block that chain is registered as, held here: the last complete one, or its twin
	twins       []twin   // by position
	detached    bool     // what completes from now on cannot be registered
	closed      bool
}

// twin is the registered block with the same content as a table's own block of the position. Holding it
// lets the blocks that follow be registered.
type twin struct {
	position int
	id       int32
}

// Open matches, reserves and returns a table whose blocks for the prompt are allocated and whose other
// blocks, up to what is to be reserved, are promised. On an error nothing has changed: a *CapacityError
// or a *PendingError.
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
		capacity: capacity, chain: r.Root, registered: none,
	}
	revived, err := t.match(r)
	if err != nil {
		return nil, err
	}
	t.reserved = total
	if r.Reserve > 0 {
		t.reserved = p.BlocksFor(min(max(r.Reserve, len(r.Prompt)), capacity))
	}
	need := t.reserved - len(t.blocks)
	if have := p.available() - p.withheld - revived; need > have {
		return nil, &CapacityError{Err: ErrNoCapacity, Need: need, Have: max(have, 0)}
	}
	t.blocks, t.generations = slices.Grow(t.blocks, need), make([]uint32, 0, t.reserved)
	for _, id := range t.blocks {
		p.retain(id)
		t.generations = append(t.generations, p.blocks[id].generation)
	}
	if n := len(t.blocks); n > 0 {
		t.chain, t.registered = t.digests[n-1], t.blocks[n-1]
	}
	t.cached = len(t.blocks) * p.blockSize
	t.length = t.cached
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
// them too.
func (t *Table) claim() {
	p := t.pool
	for _, d := range t.digests[t.cached/p.blockSize:] {
		key := Key{t.version, d}
		if _, ok := p.byKey[key]; !ok && p.pending[key] == nil {
			p.pending[key] = t
		}
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

// promised is how many blocks the table may still take.
func (t *Table) promised() int { return t.reserved - len(t.blocks) }

// grow takes promised blocks until n tokens have room.
func (t *Table) grow(n int) {
	p := t.pool
	for len(t.blocks) < p.BlocksFor(n) {
		id := p.take()
		t.blocks = append(t.blocks, id)
		t.generations = append(t.generations, p.blocks[id].generation)
		p.promised--
	}
}

// Shortage is how many blocks beyond those reserved n tokens need. EnsureTokens finds them if the pool's
// Stats say that so many are Available.
func (t *Table) Shortage(n int) int { return max(0, t.pool.BlocksFor(n)-t.reserved) }

// EnsureTokens makes room for n tokens in all. Up to what is reserved it never fails; beyond that it
// reserves more, or changes nothing and returns a *CapacityError that is an ErrNoCapacity.
func (t *Table) EnsureTokens(n int) error {
	if t.closed {
		return errors.New("kvcache: EnsureTokens on a closed table")
	}
	if n > t.capacity {
		return fmt.Errorf("kvcache: request %d wants room for %d tokens; its capacity is %d", t.owner, n, t.capacity)
	}
	p, more := t.pool, t.Shortage(n)
	if have := p.available(); more > have {
		return &CapacityError{Err: ErrNoCapacity, Need: more, Have: have}
	}
	t.reserved += more
	p.promised += more
	t.grow(n)
	return nil
}

// Commit says that the KV of the next tokens is in place: call it after a successful forward or
// transfer, never before. Blocks that are now complete can be matched by others. The tokens need room
// from Open or EnsureTokens.
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
	if t.detached || t.registered != none && !p.blocks[t.registered].registered {
		t.detach()
		return
	}
	key := Key{t.version, t.chain}
	id, exists := p.byKey[key]
	switch {
	case !exists:
		p.register(t.blocks[i], key, t.registered)
		t.registered = t.blocks[i]
	case t.adopt(i, id):
		t.registered = id
	default:
		t.detach()
	}
}

// adopt holds the twin of block i, if there is room for both: now, and in the worst case, when the table
// is alone and grows to its capacity.
func (t *Table) adopt(i int, id int32) bool {
	p := t.pool
	if p.BlocksFor(t.capacity)+len(t.twins) >= len(p.blocks) || p.blocks[id].refs == 0 && p.available() < 1 {
		return false
	}
	p.retain(id)
	t.twins = append(t.twins, twin{i, id})
	return true
}

// detach gives up registering: a later block would be cached under a prefix that this table does not
// hold.
func (t *Table) detach() {
	t.detached = true
	t.unclaim()
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

// Verify makes sure that no block was handed out again since the table got it; otherwise it returns a
// *StaleError. It cannot fail while everybody keeps to the rules, so it guards against those who do not.
func (t *Table) Verify() error {
	if t.closed {
		return fmt.Errorf("kvcache: the table of request %d is closed: it holds nothing", t.owner)
	}
	return t.pool.verify(t.blocks, t.generations)
}

// Pin holds the first n allocated blocks beyond the table's life.
func (t *Table) Pin(n int) *Pin {
	p := t.pool
	if t.closed || n < 0 || n > len(t.blocks) {
		p.fault(fmt.Sprintf("request %d pins %d of %d blocks", t.owner, n, len(t.blocks)))
		n = min(max(n, 0), len(t.blocks))
	}
	pin := &Pin{pool: p, blocks: slices.Clone(t.blocks[:n]), generations: slices.Clone(t.generations[:n])}
	for _, id := range pin.blocks {
		p.retain(id)
		if p.blocks[id].pins++; p.blocks[id].pins == 1 {
			p.pinned++
		}
	}
	for _, w := range t.twins {
		if w.position < n {
			p.retain(w.id)
			pin.twins = append(pin.twins, w.id)
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
	p.promised -= t.promised()
	p.releaseAll(t.blocks)
	for _, w := range slices.Backward(t.twins) {
		p.release(w.id)
	}
	t.blocks, t.generations, t.twins, t.reserved = nil, nil, nil, 0
	delete(p.tables, t)
}

// Pin keeps blocks from being reused while something outside may touch them.
type Pin struct {
	pool        *Pool
	blocks      []int32
	generations []uint32
	twins       []int32 // that the registered ones among blocks need as their prefix
	released    bool
}

// Blocks are the pinned blocks in order.
func (p *Pin) Blocks() []int32 { return p.blocks }

// Generations are those of Blocks, from when their table got them.
func (p *Pin) Generations() []uint32 { return p.generations }

// Verify is Table.Verify for the pinned blocks.
func (p *Pin) Verify() error { return p.pool.verify(p.blocks, p.generations) }

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
	p.pool.releaseAll(p.twins)
	delete(p.pool.pins, p)
}
