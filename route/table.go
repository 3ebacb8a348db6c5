package route

import (
	"encoding/binary"

	"baton/kvcache"
)

// table finds an Index's nodes by their digests: open addressing with linear probing, at most half full. A
// digest is random already, so parts of it serve as hash and as tag; slots hold no pointers. A peer that
// chooses digests can make its own slow to find, by as many as it chose.
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

// split returns where a digest's slot is at best, and its tag.
func (t *table) split(d *kvcache.Digest) (home int, tag uint32) {
	return int(binary.LittleEndian.Uint64(d[:8]) & uint64(len(t.slots)-1)), binary.LittleEndian.Uint32(d[8:12])
}

// find returns the slot of a digest, or the empty one where it would be.
func (t *table) find(d *kvcache.Digest, nodes []node) int {
	i, tag := t.split(d)
	for {
		s := t.slots[i]
		if s.node == none || s.tag == tag && nodes[s.node].digest == *d {
			return i
		}
		i = (i + 1) & (len(t.slots) - 1)
	}
}

func (t *table) get(d *kvcache.Digest, nodes []node) (n int32, ok bool) {
	if t.used == 0 {
		return none, false
	}
	n = t.slots[t.find(d, nodes)].node
	return n, n != none
}

// add notes a node whose digest is not in the table.
func (t *table) add(n int32, nodes []node) {
	if 2*(t.used+1) > len(t.slots) {
		old := t.slots
		t.slots = make([]slot, max(minSlots, 2*len(old)))
		for i := range t.slots {
			t.slots[i].node = none
		}
		for _, s := range old {
			if s.node != none {
				t.slots[t.find(&nodes[s.node].digest, nodes)] = s
			}
		}
	}
	d := &nodes[n].digest
	_, tag := t.split(d)
	t.slots[t.find(d, nodes)] = slot{tag, n}
	t.used++
}

// remove drops a digest that is in the table. Those behind it move up, so that no search ends too early.
func (t *table) remove(d *kvcache.Digest, nodes []node) {
	mask := len(t.slots) - 1
	hole := t.find(d, nodes)
	for i := (hole + 1) & mask; t.slots[i].node != none; i = (i + 1) & mask {
		home, _ := t.split(&nodes[t.slots[i].node].digest)
		if (i-home)&mask >= (i-hole)&mask { // its search passes the hole
			t.slots[hole] = t.slots[i]
			hole = i
		}
	}
	t.slots[hole] = slot{node: none}
	t.used--
}
