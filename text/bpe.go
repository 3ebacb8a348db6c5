package text

import (
	"fmt"
	"hash/maphash"
	"math/bits"
	"strings"
	"sync/atomic"
	"unicode/utf8"
)

// bpe is byte-pair encoding of one word at a time. Its alphabet is bytes (byteLevel) or characters with
// bytes to fall back on.
type bpe struct {
	vocab        map[string]int32 // by the bytes (byteLevel) or the text that a token stands for
	merges       mergeTable
	byteLevel    bool
	ignoreMerges bool       // a word that is a token is that token, whatever the merges say
	bytes        [256]int32 // token of each byte, or -1
	unk          int32      // for what has no token, or -1: it is dropped
	fuseUnk      bool       // a run of unknown characters is one unk
	cache        wordCache
}

// Words up to directMerge symbols are merged by scanning for the best pair, longer ones with a heap.
const directMerge = 32

// appendWord appends the tokens of one word (a piece that pre-tokenization does not split further).
func (m *bpe) appendWord(ids []int32, word string) []int32 {
	if word == "" {
		return ids
	}
	if m.byteLevel && len(word) == 1 && m.bytes[word[0]] >= 0 {
		return append(ids, m.bytes[word[0]])
	}
	slot, cached := m.cache.lookup(word)
	if cached != nil {
		return append(ids, cached...)
	}
	start := len(ids)
	if id, ok := m.vocab[word]; ok && m.ignoreMerges {
		ids = append(ids, id)
	} else {
		ids = m.mergeWord(ids, word)
	}
	slot.store(word, ids[start:])
	return ids
}

// mergeWord splits a word into its alphabet's symbols and applies the merges.
func (m *bpe) mergeWord(ids []int32, word string) []int32 {
	start := len(ids)
	if m.byteLevel {
		for i := range len(word) {
			ids = m.appendByte(ids, start, word[i])
		}
	} else {
		for _, r := range word {
			ids = m.appendRune(ids, start, r)
		}
	}
	symbols := ids[start:]
	if len(symbols) <= directMerge {
		return ids[:start+m.mergeDirect(symbols)]
	}
	return ids[:start+m.mergeHeap(symbols)]
}

func (m *bpe) appendByte(ids []int32, start int, b byte) []int32 {
	if id := m.bytes[b]; id >= 0 {
		return append(ids, id)
	}
	return m.appendUnk(ids, start)
}

func (m *bpe) appendRune(ids []int32, start int, r rune) []int32 {
	var buf [utf8.UTFMax]byte
	char := buf[:utf8.EncodeRune(buf[:], r)]
	if id, ok := m.vocab[string(char)]; ok {
		return append(ids, id)
	}
	for _, b := range char {
		if m.bytes[b] < 0 {
			return m.appendUnk(ids, start)
		}
	}
	for _, b := range char {
		ids = append(ids, m.bytes[b])
	}
	return ids
}

func (m *bpe) appendUnk(ids []int32, start int) []int32 {
	if m.unk < 0 || m.fuseUnk && len(ids) > start && ids[len(ids)-1] == m.unk {
		return ids
	}
	return append(ids, m.unk)
}

// mergeDirect merges symbols in place and returns how many are left.
func (m *bpe) mergeDirect(symbols []int32) int {
	var ranks, results [directMerge]int32
	n := len(symbols)
	for i := 0; i+1 < n; i++ {
		ranks[i], results[i] = m.merges.find(symbols[i], symbols[i+1])
	}
	for n > 1 {
		best, at := noMerge, -1
		for i, r := range ranks[:n-1] {
			if r < best {
				best, at = r, i
			}
		}
		if at < 0 {
			break
		}
		symbols[at] = results[at]
		copy(symbols[at+1:n-1], symbols[at+2:n])
		copy(ranks[at:n-2], ranks[at+1:n-1])
		copy(results[at:n-2], results[at+1:n-1])
		n--
		if at > 0 {
			ranks[at-1], results[at-1] = m.merges.find(symbols[at-1], symbols[at])
		}
		if at+1 < n {
			ranks[at], results[at] = m.merges.find(symbols[at], symbols[at+1])
		}
	}
	return n
}

// candidate is a merge that may still be possible.
type candidate struct {
	order         uint64 // rank<<32 | position of the first symbol: the least comes first
	first, second int32  // the symbols when it was found: it is stale if they have changed
	result        int32
}

// candidates is a binary heap.
type candidates []candidate

func (c *candidates) push(x candidate) {
	h := append(*c, x)
	i := len(h) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if h[parent].order <= x.order {
			break
		}
		h[i] = h[parent]
		i = parent
	}
	h[i] = x
	*c = h
}

func (c *candidates) pop() candidate {
	h := *c
	least, last := h[0], h[len(h)-1]
	h = h[:len(h)-1]
	*c = h
	if len(h) > 0 {
		h.down(0, last)
	}
	return least
}

// down puts x at position i, or where it belongs below.
func (c candidates) down(i int, x candidate) {
	for {
		child := 2*i + 1
		if child >= len(c) {
			break
		}
		if child+1 < len(c) && c[child+1].order < c[child].order {
			child++
		}
		if x.order <= c[child].order {
			break
		}
		c[i] = c[child]
		i = child
	}
	c[i] = x
}

// mergeHeap does what mergeDirect does, in O(n log n).
func (m *bpe) mergeHeap(symbols []int32) int {
	n := int32(len(symbols))
	next, prev := make([]int32, n), make([]int32, n)
	queue := make(candidates, 0, n)
	consider := func(left, right int32) (c candidate, ok bool) {
		rank, result := m.merges.find(symbols[left], symbols[right])
		return candidate{uint64(rank)<<32 | uint64(left), symbols[left], symbols[right], result}, rank != noMerge
	}
	for i := range n {
		next[i], prev[i] = i+1, i-1
		if i+1 < n {
			if c, ok := consider(i, i+1); ok {
				queue = append(queue, c)
			}
		}
	}
	for i := len(queue)/2 - 1; i >= 0; i-- {
		queue.down(i, queue[i])
	}
	for len(queue) > 0 {
		c := queue.pop()
		left := int32(uint32(c.order))
		right := next[left]
		if right >= n || symbols[left] != c.first || symbols[right] != c.second {
			continue
		}
		symbols[left], symbols[right] = c.result, -1
		after, before := next[right], prev[left]
		next[left] = after
		if after < n {
			prev[after] = left
			if c, ok := consider(left, after); ok {
				queue.push(c)
			}
		}
		if before >= 0 {
			if c, ok := consider(before, left); ok {
				queue.push(c)
			}
		}
	}
	kept := 0
	for i := int32(0); i < n; i = next[i] {
		symbols[kept] = symbols[i]
		kept++
	}
	return kept
}

const noMerge = int32(1<<31 - 1)

// mergeTable maps a pair of tokens to the rank of its merge and the token it makes: open addressing,
// at most half full.
type mergeTable struct {
	slots []mergeSlot
	shift uint
}

type mergeSlot struct {
	pair         uint64 // left<<32 | right, plus 1 so that zero is an empty slot
	rank, result int32
}

func newMergeTable(n int) mergeTable {
	size := max(16, 2*n)
	log := uint(bits.Len(uint(size - 1)))
	return mergeTable{make([]mergeSlot, 1<<log), 64 - log}
}

func (t *mergeTable) slot(left, right int32) *mergeSlot {
	pair := uint64(uint32(left))<<32 | uint64(uint32(right)) + 1
	i := pair * 0x9e3779b97f4a7c15 >> t.shift
	for {
		s := &t.slots[i&uint64(len(t.slots)-1)]
		if s.pair == pair || s.pair == 0 {
			return s
		}
		i++
	}
}

// add records a merge; a later one of the same pair replaces it. At most n of newMergeTable may be added.
func (t *mergeTable) add(left, right, rank, result int32) {
	s := t.slot(left, right)
	s.pair = uint64(uint32(left))<<32 | uint64(uint32(right)) + 1
	s.rank, s.result = rank, result
}

// find gives noMerge if the pair has none.
func (t *mergeTable) find(left, right int32) (rank, result int32) {
	s := t.slot(left, right)
	if s.pair == 0 {
		return noMerge, 0
	}
	return s.rank, s.result
}

// addMerges adds the merges, each two vocabulary entries in order of rank, whose concatenation is a third.
func (m *bpe) addMerges(merges [][2]string) error {
	m.merges = newMergeTable(len(merges))
	for rank, pair := range merges {
		left, ok1 := m.vocab[pair[0]]
		right, ok2 := m.vocab[pair[1]]
		result, ok3 := m.vocab[pair[0]+pair[1]]
		if !ok1 || !ok2 || !ok3 {
			return fmt.Errorf("merge %d (%q + %q): a part or the result is not in the vocabulary", rank, pair[0], pair[1])
		}
		m.merges.add(left, right, int32(rank), result)
	}
	return nil
}

// wordCache remembers the tokens of recent words. It has a fixed number of slots, a word has one place,
// and a new word evicts the one before: no locks, no growth.
type wordCache struct {
	slots []cacheSlot
	seed  maphash.Seed
}

const (
	cacheSlots   = 1 << 14
	cacheMaxWord = 48 // bytes; longer words are rarely repeated
)

type cacheSlot struct{ atomic.Pointer[cachedWord] }

type cachedWord struct {
	word string
	ids  []int32
}

func newWordCache() wordCache {
	return wordCache{make([]cacheSlot, cacheSlots), maphash.MakeSeed()}
}

// lookup gives the word's slot (nil if it is not to be cached) and its tokens if they are known.
func (c *wordCache) lookup(word string) (*cacheSlot, []int32) {
	if len(word) > cacheMaxWord || len(c.slots) == 0 {
		return nil, nil
	}
	slot := &c.slots[maphash.String(c.seed, word)%cacheSlots]
	if w := slot.Load(); w != nil && w.word == word {
		return slot, w.ids
	}
	return slot, nil
}

func (s *cacheSlot) store(word string, ids []int32) {
	if s != nil && len(ids) > 0 {
		s.Store(&cachedWord{strings.Clone(word), append([]int32(nil), ids...)})
	}
}
