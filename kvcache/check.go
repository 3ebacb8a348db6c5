package kvcache

import (
	"errors"
	"fmt"
)

// Check recomputes every count from first principles and reports all that does not hold, mistakes of
// callers included. It is for tests: it walks the whole pool.
func (p *Pool) Check() error {
	var c checker
	c.addIf(p.misuse)
	p.checkHolders(&c)
	p.checkStates(&c)
	p.checkChain(&c)
	p.checkPending(&c)
	return errors.Join(c...)
}

type checker []error

func (c *checker) addIf(err error) {
	if err != nil {
		*c = append(*c, err)
	}
}

func (c *checker) want(ok bool, format string, args ...any) {
	if !ok {
		*c = append(*c, fmt.Errorf("kvcache: "+format, args...))
	}
}

// checkHolders compares reference, pin and promise counts with the tables and pins there are.
func (p *Pool) checkHolders(c *checker) {
	refs, pins := make([]int32, len(p.blocks)), make([]int32, len(p.blocks))
	promised := 0
	for t := range p.tables {
		for _, id := range t.blocks {
			refs[id]++
		}
		for _, w := range t.twins {
			refs[w.id]++
		}
		promised += t.promised()
		c.want(t.promised() >= 0, "request %d took %d more blocks than promised", t.owner, -t.promised())
		c.want(t.reserved+len(t.twins) <= len(p.blocks) && t.reserved <= p.BlocksFor(t.capacity),
			"request %d reserves %d blocks and %d twins for %d tokens", t.owner, t.reserved, len(t.twins), t.capacity)
		c.addIf(t.Verify())
		p.checkPrefix(c, t)
		c.want(t.length%p.blockSize == len(t.tail), "request %d: %d tokens, %d in the tail", t.owner, t.length, len(t.tail))
	}
	pinned := 0
	for pin := range p.pins {
		for _, id := range pin.blocks {
			refs[id]++
			pins[id]++
		}
		for _, id := range pin.twins {
			refs[id]++
		}
		c.addIf(pin.Verify())
	}
	for id := range p.blocks {
		b := &p.blocks[id]
		c.want(b.refs == refs[id] && b.pins == pins[id], "block %d: %d references (%d pins), counted %d (%d)",
			id, b.refs, b.pins, refs[id], pins[id])
		if pins[id] > 0 {
			pinned++
		}
	}
	c.want(p.pinned == pinned, "%d pinned, counted %d", p.pinned, pinned)
	c.want(p.promised == promised, "%d promised, counted %d", p.promised, promised)
	c.want(promised <= len(p.free)+p.cached, "%d promised of %d free and %d cached", promised, len(p.free), p.cached)
}

// checkPrefix: a table that goes on registering holds the whole registered prefix, its own blocks or
// their twins.
func (p *Pool) checkPrefix(c *checker, t *Table) {
	if t.detached || t.registered != none && !p.blocks[t.registered].registered {
		return
	}
	id, twins := t.registered, t.twins
	for i := t.length/p.blockSize - 1; i >= 0; i-- {
		want := t.blocks[i]
		if n := len(twins); n > 0 && twins[n-1].position == i {
			want, twins = twins[n-1].id, twins[:n-1]
		}
		c.want(id == want, "request %d: position %d is registered as block %d, held is %d", t.owner, i, id, want)
		if id == none {
			return
		}
		id = p.blocks[id].parent
	}
	c.want(id == none && len(twins) == 0, "request %d: block %d precedes its first, %d twins are left", t.owner, id, len(twins))
}

// checkStates: every block is free, in use or cached, and the heap holds the cached leaves in order.
func (p *Pool) checkStates(c *checker) {
	free := make([]bool, len(p.blocks))
	for _, id := range p.free {
		c.want(!free[id], "block %d is free twice", id)
		free[id] = true
	}
	cached := 0
	for id := range p.blocks {
		b := &p.blocks[id]
		idle := b.refs == 0 && !b.registered
		c.want(free[id] == idle, "block %d: on the free stack %v, %d references, registered %v", id, free[id], b.refs, b.registered)
		evictable := b.refs == 0 && b.registered
		if evictable {
			cached++
		}
		c.want((b.leaf != none) == (evictable && b.children == 0), "block %d: heap place %d, %d references, %d children",
			id, b.leaf, b.refs, b.children)
	}
	c.want(p.cached == cached, "%d cached, counted %d", p.cached, cached)
	for i, id := range p.leaves {
		c.want(int(p.blocks[id].leaf) == i, "heap[%d] is block %d, which thinks it is at %d", i, id, p.blocks[id].leaf)
		c.want(i == 0 || !p.leaves.less(p, i, (i-1)/2), "heap order broken at %d", i)
	}
}

// checkChain: keys and blocks match one to one, parents are registered and held as long as children.
func (p *Pool) checkChain(c *checker) {
	children := make([]int32, len(p.blocks))
	registered := 0
	for id := range p.blocks {
		b := &p.blocks[id]
		if !b.registered {
			c.want(b.parent == none, "unregistered block %d has a parent", id)
			continue
		}
		registered++
		found, ok := p.byKey[b.key]
		c.want(ok && int(found) == id, "block %d is not found by its key", id)
		if b.parent != none {
			parent := &p.blocks[b.parent]
			children[b.parent]++
			c.want(parent.registered, "block %d has an unregistered parent", id)
			c.want(parent.refs > 0 || b.refs == 0, "block %d is held without its parent %d", id, b.parent)
		}
	}
	c.want(len(p.byKey) == registered, "%d keys for %d registered blocks", len(p.byKey), registered)
	for id := range p.blocks {
		c.want(p.blocks[id].children == children[id], "block %d: %d children, counted %d", id, p.blocks[id].children, children[id])
	}
}

func (p *Pool) checkPending(c *checker) {
	c.want(len(p.events) <= p.most, "%d events wait, at most %d may", len(p.events), p.most)
	for key, t := range p.pending {
		_, live := p.tables[t]
		c.want(live && !t.detached, "request %d claims a block that it will not register", t.owner)
		_, ok := p.byKey[key]
		c.want(!ok, "request %d claims a block that is cached", t.owner)
	}
}
