package route

import (
	"encoding/binary"

	"baton/kvcache"
)

// table finds an Index's nodes by their digests: open addressing with linear probing, at most half full. A
// digest is random already, so four of its bytes are its tag and, with a mask, its place; slots hold no
// pointers. A peer that chooses digests can make its own slow to find, by as many as it chose.
type table struct {
	slots []slot // a power of two of them
	used  int
}

type slot struct {
	tag  uint32 // of the digest
	node int32  // none: the slot is empty
}

const minSlots = 64

func (t *table) len() int { return t.used }

func tagOf(d *kvcache.Digest) uint32 { return binary.LittleEndian.Uint32(d[:]) }

// home is where a tag's slot is at best.
func (t *table) home(tag uint32) int { return int(tag) & (len(t.slots) - 1) }

// find returns the slot of a digest, or the empty one where it would be.
func (t *table) find(d *kvcache.Digest, nodes []node) int {
	tag := tagOf(d)
	for i := t.home(tag); ; i = (i + 1) & (len(t.slots) - 1) {
		s := t.slots[i]
		if s.node == none || s.tag == tag && nodes[s.node].digest == *d {
			return i
		}
	}
}

// peek reads where a digest would be.
func (t *table) peek(d *kvcache.Digest) uint32 {
	if len(t.slots) == 0 {
		return 0
	}
	return t.slots[t.home(tagOf(d))].tag
}

func (t *table) get(d *kvcache.Digest, nodes []node) (n int32, ok bool) {
	if t.used == 0 {
		return none, false
	}
	n = t.slots[t.find(d, nodes)].node
	return n, n != none
}

// add notes a node whose digest is not in the table.
func (t *table) add(n int32, d *kvcache.Digest) {
	if 2*(t.used+1) > len(t.slots) {
		old := t.slots
		t.slots = make([]slot, max(minSlots, 2*len(old)))
		for i := range t.slots {
			t.slots[i].node = none
		}
		for _, s := range old {
			if s.node != none {
				t.put(s)
			}
		}
	}
	t.put(slot{tagOf(d), n})
	t.used++
}

func (t *table) put(s slot) {
	i := t.home(s.tag)
	for t.slots[i].node != none {
		i = (i + 1) & (len(t.slots) - 1)
	}
	t.slots[i] = s
}

// remove drops a digest that is in the table. Those behind it move up, so that no search ends too early.
func (t *table) remove(d *kvcache.Digest, nodes []node) {
	mask := len(t.slots) - 1
	hole := t.find(d, nodes)
	for i := (hole + 1) & mask; t.slots[i].node != none; i = (i + 1) & mask {
		if (i-t.home(t.slots[i].tag))&mask >= (i-hole)&mask { // its search passes the hole
			t.slots[hole] = t.slots[i]
			hole = i
		}
	}
	t.slots[hole] = slot{node: none}
	t.used--
}
