package leg

import (
	"cmp"
	"container/list"
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"sort"
	"time"

	"baton/kvcache"
	"baton/wire"
)

// keptSessions is how many sessions are remembered, the last ones that had a job here.
const keptSessions = 1 << 16

// keptRemovals is how many of the last removals are remembered. A reader who has missed more begins anew.
const keptRemovals = 1 << 16

// maxChanges bounds what a reader is told at a time.
const maxChanges = 1 << 13

// digest names a prefix: its last block and all before.
type digest = [32]byte

// residency is what the engines of this process have cached, as a log that any number of readers follow at their own
// pace. A block stands in it once, by when it was stored, and the last removals by when they happened: a reader who begins at the
// start learns what is held, and one who goes on where it was, what has changed. So do sessions, each by when it last had a job:
// of a session's next prompt only the engines know the ids.
type residency struct {
	blocks   map[digest]*block
	sessions map[digest]*list.Element // of session
	recent   list.List                // of them, the last first
	log      []change                 // by number
	next     uint64                   // number of the next change
	floor    uint64                   // no removal from this number on is forgotten
	kept     int                      // removals
	most     int                      // sessions
}

// block is one that an engine has, or several.
type block struct {
	number  uint64 // of the change that says so
	parent  digest // zero for a first block
	holders []uint64
}

// session is one that had a job here.
type session struct {
	number uint64 // of the change that says so
	name   digest // SHA-256
	at     time.Time
}

// change is a block's coming, its going from the last engine, or a session's job. It is stale when the block or the session
// has another number by now.
type change struct {
	number uint64
	digest digest
	kind   uint8 // wire.KVStored, wire.KVRemoved, or seen
}

// seen is the kind of a session's change.
const seen uint8 = 255

func newResidency() residency {
	return residency{blocks: make(map[digest]*block), sessions: make(map[digest]*list.Element), next: 1, floor: 1, kept: keptRemovals, most: keptSessions}
}

func (r *residency) add(d digest, kind uint8) {
	r.log = append(r.log, change{r.next, d, kind})
	r.next++
	if len(r.log) > 2*(len(r.blocks)+len(r.sessions)+r.kept) {
		r.compact()
	}
}

// saw notes that a session has a job.
func (r *residency) saw(name string, now time.Time) {
	s := session{r.next, sha256.Sum256([]byte(name)), now}
	if e := r.sessions[s.name]; e != nil {
		e.Value = s
		r.recent.MoveToFront(e)
	} else {
		if len(r.sessions) == r.most {
			last := r.recent.Back()
			delete(r.sessions, last.Value.(session).name)
			r.recent.Remove(last)
		}
		r.sessions[s.name] = r.recent.PushFront(s)
	}
	r.add(s.name, seen)
}

// stored notes that a group's engine has a block.
func (r *residency) stored(group int, d, parent digest) {
	b := r.blocks[d]
	if b == nil {
		b = &block{number: r.next, parent: parent}
		r.blocks[d] = b
		r.add(d, wire.KVStored)
	}
	for len(b.holders) <= group/64 {
		b.holders = append(b.holders, 0)
	}
	b.holders[group/64] |= 1 << (group % 64)
}

// removed notes that it has it no more.
func (r *residency) removed(group int, d digest) {
	b := r.blocks[d]
	if b == nil || group/64 >= len(b.holders) {
		return
	}
	b.holders[group/64] &^= 1 << (group % 64)
	for _, w := range b.holders {
		if w != 0 {
			return
		}
	}
	delete(r.blocks, d)
	r.add(d, wire.KVRemoved)
}

// forget notes that a group's engine has nothing.
func (r *residency) forget(group int) {
	var held []digest
	for d, b := range r.blocks {
		if group/64 < len(b.holders) && b.holders[group/64]&(1<<(group%64)) != 0 {
			held = append(held, d)
		}
	}
	slices.SortFunc(held, func(a, b digest) int { return cmp.Compare(r.blocks[b].number, r.blocks[a].number) }) // children first
	for _, d := range held {
		r.removed(group, d)
	}
}

// held is how many of a chain's blocks, from the first on, a group's engine has.
func (r *residency) held(group int, chain []kvcache.Digest) int {
	return sort.Search(len(chain), func(i int) bool {
		b := r.blocks[digest(chain[i])]
		return b == nil || group/64 >= len(b.holders) || b.holders[group/64]&(1<<(group%64)) == 0 // nor any that follows
	})
}

// compact leaves out what is stale and all removals but the last.
func (r *residency) compact() {
	removals := 0
	for i := range r.log {
		if r.log[i].kind == wire.KVRemoved {
			removals++
		}
	}
	kept := r.log[:0]
	for _, e := range r.log {
		if e.kind == wire.KVRemoved {
			if removals--; removals >= r.kept {
				r.floor = e.number + 1
				continue
			}
		} else if r.stale(e) {
			continue
		}
		kept = append(kept, e)
	}
	r.log = kept
}

// stale reports whether a block that came, or a session, is not there any more, or came again.
func (r *residency) stale(e change) bool {
	if e.kind == seen {
		s := r.sessions[e.digest]
		return s == nil || s.Value.(session).number != e.number
	}
	b := r.blocks[e.digest]
	return b == nil || b.number != e.number
}

// place is how far a reader has come. It has seen what was held when the next change was to be number since, as far as
// that stands before next.
type place struct{ next, since uint64 }

// read is what a reader has to learn, up to limit changes, and where it is then. It begins anew, knowing nothing, when
// it was nowhere or has missed too much.
func (r *residency) read(at place, limit int) (events []CacheEvent, after place, reset bool) {
	if at.next == 0 || at.next > r.next || at.since > r.next || max(at.next, at.since) < r.floor {
		at, reset = place{next: 1, since: r.next}, true
	}
	from, _ := slices.BinarySearchFunc(r.log, at.next, func(e change, n uint64) int { return cmp.Compare(e.number, n) })
	for _, e := range r.log[from:] {
		if len(events) == limit {
			return events, place{e.number, at.since}, reset
		}
		switch {
		case e.kind == wire.KVRemoved:
			if e.number >= at.since {
				events = append(events, CacheEvent{Kind: Removed, Digest: e.digest})
			}
		case r.stale(e):
		case e.kind == seen:
			events = append(events, CacheEvent{Kind: SessionSeen, Digest: e.digest, At: r.sessions[e.digest].Value.(session).at})
		default:
			events = append(events, CacheEvent{Kind: Stored, Digest: e.digest, Parent: r.blocks[e.digest].parent})
		}
	}
	return events, place{r.next, r.next}, reset
}

// cached takes in what an engine says that it has cached, as a coordinator does.
func (c *Core) cached(g *group, m *wire.KVEvents) {
	apply, ask := g.cached.Take(m)
	if ask != nil {
		c.tell(g, ask)
	}
	if !apply {
		return
	}
	if m.Reset {
		c.cache.forget(g.number)
	}
	for i := range m.Events {
		e := &m.Events[i]
		switch current := e.Version == g.reg.WeightVersion; {
		case e.Kind == wire.KVCleared:
			c.cache.forget(g.number)
		case e.Kind == wire.KVRemoved && current:
			c.cache.removed(g.number, e.Digest)
		case e.Kind == wire.KVStored && current:
			c.cache.stored(g.number, e.Digest, e.Parent)
		}
	}
}

// CacheEventKind is what a CacheEvent tells.
type CacheEventKind uint8

// The kinds.
const (
	Stored      CacheEventKind = iota + 1 // a block can be matched from now on
	Removed                               // it cannot any more
	SessionSeen                           // a session has a job here
)

// CacheEvent is one thing that a reader learns.
type CacheEvent struct {
	Kind   CacheEventKind
	Digest [32]byte  // of the block's chain, or SHA-256 of the session's name
	Parent [32]byte  // Stored: of the chain one block shorter; zero for a first block
	At     time.Time // SessionSeen: when
}

// Cached is what a reader learns of the prefixes that this process's engines have cached.
type Cached struct {
	Cursor    string // what to ask with the next time
	Reset     bool   // what the reader knew so far does not hold
	More      bool   // there is more to be had at once
	BlockSize int    // tokens a block; 0 while no engine is there
	// Events are in order: the block before another first.
	Events []CacheEvent
}

// cursor writes a place as readers carry it; it is good for one process.
func (c *Core) cursor(at place) string {
	return fmt.Sprintf("%x.%d.%d", c.cfg.Incarnation, at.next, at.since)
}

// place reads a cursor. One of another process, or that is none, is the beginning.
func (c *Core) place(cursor string) (at place) {
	var incarnation uint64
	if n, err := fmt.Sscanf(cursor, "%x.%d.%d", &incarnation, &at.next, &at.since); n != 3 || err != nil || incarnation != c.cfg.Incarnation {
		return place{}
	}
	return at
}

// Cached returns what a reader with a cursor has to learn; "" is a new one's.
func (c *Core) Cached(cursor string) Cached {
	events, at, reset := c.cache.read(c.place(cursor), maxChanges)
	return Cached{Cursor: c.cursor(at), Reset: reset, More: at.next != c.cache.next, BlockSize: c.blockSize(), Events: events}
}

// blockSize is the engines', 0 while there is none.
func (c *Core) blockSize() int {
	for _, g := range c.groups {
		if g.reg != nil {
			return g.reg.Geometry.BlockSize
		}
	}
	return 0
}

// Cached is what a reader with a cursor has to learn of what the engines have cached. When there is nothing it waits for
// news, for so long at most.
func (s *Server) Cached(ctx context.Context, cursor string, wait time.Duration) (Cached, error) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for last := wait <= 0; ; {
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			return Cached{}, ErrClosed
		}
		c, news := s.core.Cached(cursor), s.news
		s.mu.Unlock()
		if last || c.Reset || len(c.Events) > 0 {
			return c, nil
		}
		select {
		case <-news:
		case <-timer.C:
			last = true
		case <-ctx.Done():
			return Cached{}, context.Cause(ctx)
		}
	}
}
