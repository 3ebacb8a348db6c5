package route

import (
	"math/bits"

	"baton/kvcache"
)

// Index remembers which prefixes each engine holds. A prefix is its chain of digests; engines are small
// numbers that the caller assigns and may reuse after Forget.
//
// Of an engine that reports what it stores and removes (Store, Remove), the index holds just that, and
// for as long as a request's prompt is on its way into the engine's cache, what it will add (Expect, Settle).
// Of an engine that reports nothing it holds what the engine was given (Record).
//
// Two facts keep it fast. Of one chain the deeper digest is always the less recently used, and engines
// forget the deeper ones first, so what is known of a chain is a leading part of it and so is what one
// engine owns: both ends are found by bisection. And entries are numbers in slices, which the garbage
// collector need not walk. An engine whose reports break the second fact gets a wrong guess, nothing worse.
type Index struct {
	limit   int
	table   table
	nodes   []node
	owners  []uint64 // words bits a node: the engines that hold it
	words   int
	free    int32   // first unused node, linked through next
	scratch []int32 // the chain being recorded
	seen    []uint64
	ahead   uint32 // of no meaning; see approach

	expected map[kvcache.Digest][]*Expectation // by the first digest
}

type node struct {
	digest     kvcache.Digest
	parent     int32 // the digest before it; none for the first
	children   int32 // how many nodes have it as their parent
	prev, next int32 // by recency, towards the more and the less recent
}

const (
	none = -1
	root = 0 // the node that closes the recency ring: next is the most recent entry, prev the least
)

// DefaultEntries bounds an Index to some 100 MB: 32 M tokens of distinct prefixes in blocks of 32.
const DefaultEntries = 1 << 20

// NewIndex makes an empty index of at most limit digests; DefaultEntries when limit is not positive.
func NewIndex(limit int) *Index {
	if limit <= 0 {
		limit = DefaultEntries
	}
	x := &Index{
		limit: limit, words: 1, free: none,
		expected: make(map[kvcache.Digest][]*Expectation),
	}
	x.nodes = append(x.nodes, node{parent: none, prev: root, next: root})
	x.owners = append(x.owners, 0)
	return x
}

// Len is the number of digests remembered, at most the limit.
func (x *Index) Len() int { return x.table.len() }

// Match sets depths[e] to the number of leading digests of chain that engine e holds or soon will, for every
// e in [0, len(depths)).
func (x *Index) Match(chain []kvcache.Digest, depths []int) {
	clear(depths)
	if len(chain) == 0 {
		return
	}
	x.matchExpected(chain, depths)
	deepest := x.known(chain)
	if deepest == 0 || len(depths) == 0 {
		return
	}
	x.seen = append(x.seen[:0], make([]uint64, x.words)...)
	for at := deepest; at > 0; at = x.newcomer(chain[:at-1]) {
		for w, owners := range x.ownersOf(x.node(&chain[at-1])) {
			for fresh := owners &^ x.seen[w]; fresh != 0; fresh &= fresh - 1 {
				if e := w*64 + bits.TrailingZeros64(fresh); e < len(depths) {
					depths[e] = max(depths[e], at)
				}
			}
			x.seen[w] |= owners
		}
	}
}

// node is that of a digest. One that the index does not hold, in the middle of a chain of which it holds more,
// is an engine's fault: it gets the root, which nobody owns.
func (x *Index) node(d *kvcache.Digest) int32 {
	if n, ok := x.table.get(d, x.nodes); ok {
		return n
	}
	return root
}

// known is the length of the leading part of chain that the index holds.
func (x *Index) known(chain []kvcache.Digest) int {
	low, high := 0, len(chain)
	for low < high {
		mid := int(uint(low+high+1) / 2)
		if _, ok := x.table.get(&chain[mid-1], x.nodes); ok {
			low = mid
		} else {
			high = mid - 1
		}
	}
	return low
}

// newcomer is the length of the longest part of chain, all of it known, whose end is owned by an engine
// that was not seen yet; 0 when there is none.
func (x *Index) newcomer(chain []kvcache.Digest) int {
	low, high := 0, len(chain)
	for low < high {
		mid := int(uint(low+high+1) / 2)
		if x.unseen(x.node(&chain[mid-1])) {
			low = mid
		} else {
			high = mid - 1
		}
	}
	return low
}

func (x *Index) unseen(n int32) bool {
	for w, owners := range x.ownersOf(n) {
		if owners&^x.seen[w] != 0 {
			return true
		}
	}
	return false
}

func (x *Index) ownersOf(n int32) []uint64 {
	return x.owners[int(n)*x.words : (int(n)+1)*x.words]
}

// Record notes that engine was given the prefix that chain spells. It forgets the least recently
// used digests beyond the limit, and of a chain longer than the limit it keeps the start.
func (x *Index) Record(engine int, chain []kvcache.Digest) {
	x.widen(engine/64 + 1)
	chain = chain[:min(len(chain), x.limit)]
	known := x.Touch(chain)
	for _, n := range x.scratch {
		x.own(n, engine)
	}
	parent, after := int32(none), int32(root)
	if known > 0 {
		parent = x.scratch[0]
		after = parent
	}
	x.approach(chain[known:])
	for _, d := range chain[known:] {
		n := x.add(d, parent, after)
		x.own(n, engine)
		parent, after = n, n
	}
}

// approach reads the places in the table that adding digests is about to need, one after the other but
// waiting for none: of a large table they come from memory, which takes as long for all as for one.
func (x *Index) approach(digests []kvcache.Digest) {
	last := x.nodes[root].prev
	for i := range digests {
		x.ahead += x.table.peek(&digests[i])
		if x.table.len() >= x.limit { // and those of what makes room
			x.ahead += x.table.peek(&x.nodes[last].digest)
			last = x.nodes[last].prev
		}
	}
}

// Touch makes what is known of a chain the most recently used, and returns how long that part is.
func (x *Index) Touch(chain []kvcache.Digest) int {
	known := x.known(chain)
	x.scratch = x.scratch[:0]
	if known > 0 {
		x.touch(x.node(&chain[known-1]))
	}
	return known
}

// touch makes the chain that ends with a node the most recently used. scratch holds it then, from the end.
func (x *Index) touch(last int32) {
	x.scratch = x.scratch[:0]
	for n := last; n != none; n = x.nodes[n].parent {
		x.scratch = append(x.scratch, n)
	}
	// Deepest first, so that the start of the chain ends up the most recent.
	for _, n := range x.scratch {
		x.unlink(n)
		x.linkAfter(root, n)
	}
}

// Store notes that engine holds a block whose chain is digest, after the one whose chain is parent (zero for
// a first block). One whose parent the engine does not hold, as far as the index remembers, could never be
// matched: it is not noted.
func (x *Index) Store(engine int, digest, parent kvcache.Digest) {
	x.widen(engine/64 + 1)
	before, after := int32(none), int32(root)
	if parent != (kvcache.Digest{}) {
		p, ok := x.table.get(&parent, x.nodes)
		if !ok || !x.owns(p, engine) {
			return
		}
		before, after = p, p
	}
	n, ok := x.table.get(&digest, x.nodes)
	if !ok {
		if x.table.len() >= x.limit && x.nodes[root].prev == before {
			x.touch(before) // or it would make room for its own child
			if x.nodes[root].prev == before {
				return
			}
		}
		n = x.add(digest, before, after)
	}
	x.own(n, engine)
}

// Remove notes that engine does not hold a block any more.
func (x *Index) Remove(engine int, digest kvcache.Digest) {
	n, ok := x.table.get(&digest, x.nodes)
	if !ok || !x.owns(n, engine) {
		return
	}
	x.ownersOf(n)[engine/64] &^= 1 << (engine % 64)
	x.prune(n)
}

// prune removes a node that nobody owns and nothing follows, and then the one before it if the same is true
// of that.
func (x *Index) prune(n int32) {
	for n != none && x.nodes[n].children == 0 && allZero(x.ownersOf(n)) {
		parent := x.nodes[n].parent
		x.remove(n)
		n = parent
	}
}

// Forget removes everything that engine was recorded or reported to hold.
func (x *Index) Forget(engine int) {
	word, mask := engine/64, uint64(1)<<(engine%64)
	if word >= x.words {
		return
	}
	for n := x.nodes[root].next; n != root; {
		next := x.nodes[n].next // deeper, or of another chain: pruning n leaves it
		if owners := x.ownersOf(n); owners[word]&mask != 0 {
			owners[word] &^= mask
			x.prune(n)
		}
		n = next
	}
}

func allZero(words []uint64) bool {
	for _, w := range words {
		if w != 0 {
			return false
		}
	}
	return true
}

func (x *Index) own(n int32, engine int) {
	x.owners[int(n)*x.words+engine/64] |= 1 << (engine % 64)
}

func (x *Index) owns(n int32, engine int) bool {
	return engine/64 < x.words && x.ownersOf(n)[engine/64]&(1<<(engine%64)) != 0
}

// widen makes room for engines up to 64*words.
func (x *Index) widen(words int) {
	if words <= x.words {
		return
	}
	owners := make([]uint64, len(x.nodes)*words)
	for n := range x.nodes {
		copy(owners[n*words:], x.ownersOf(int32(n)))
	}
	x.owners, x.words = owners, words
}

// add makes a node without owners for a digest that has none, behind the given one in order of use.
func (x *Index) add(d kvcache.Digest, parent, after int32) int32 {
	n := x.allocate()
	x.nodes[n].digest, x.nodes[n].parent, x.nodes[n].children = d, parent, 0
	if parent != none {
		x.nodes[parent].children++
	}
	x.table.add(n, &d)
	x.linkAfter(after, n)
	return n
}

// allocate returns an unused node without owners, taking it from the least recent entry when the index is
// full. Nothing follows that one. It is never an ancestor of what is being recorded: those were just made
// the most recent.
func (x *Index) allocate() int32 {
	if x.table.len() >= x.limit {
		last := x.nodes[root].prev
		parent := x.nodes[last].parent
		x.remove(last)
		x.prune(parent)
	}
	if n := x.free; n != none {
		x.free = x.nodes[n].next
		clear(x.ownersOf(n))
		return n
	}
	x.nodes = append(x.nodes, node{})
	x.owners = append(x.owners, make([]uint64, x.words)...)
	return int32(len(x.nodes) - 1)
}

func (x *Index) remove(n int32) {
	if p := x.nodes[n].parent; p != none {
		x.nodes[p].children--
	}
	x.table.remove(&x.nodes[n].digest, x.nodes)
	x.unlink(n)
	x.nodes[n].next = x.free
	x.free = n
}

func (x *Index) unlink(n int32) {
	prev, next := x.nodes[n].prev, x.nodes[n].next
	x.nodes[prev].next = next
	x.nodes[next].prev = prev
}

func (x *Index) linkAfter(at, n int32) {
	next := x.nodes[at].next
	x.nodes[n].prev, x.nodes[n].next = at, next
	x.nodes[at].next = n
	x.nodes[next].prev = n
}
