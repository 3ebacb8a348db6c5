package route

import (
	"container/list"
	"crypto/sha256"
)

// Pins remembers which engine each session is bound to: a bounded number of sessions, the least recently
// used of which is forgotten. Engines are numbers that are never used again.
type Pins struct {
	limit  int
	table  map[SessionKey]*list.Element
	recent *list.List // of *pin, the most recently used first
}

// SessionKey is the SHA-256 of a session's name: names may be long.
type SessionKey [sha256.Size]byte

type pin struct {
	session SessionKey
	engine  uint64
	at      int64 // when that was learned
}

// DefaultSessions bounds Pins to some 15 MB.
const DefaultSessions = 1 << 16

// NewPins makes room for limit sessions; DefaultSessions when limit is not positive.
func NewPins(limit int) *Pins {
	if limit <= 0 {
		limit = DefaultSessions
	}
	return &Pins{limit: limit, table: make(map[SessionKey]*list.Element), recent: list.New()}
}

// Get returns the engine that a session is bound to, 0 for none. It does not count as use.
func (p *Pins) Get(session string) uint64 {
	if e := p.table[sha256.Sum256([]byte(session))]; e != nil {
		return e.Value.(*pin).engine
	}
	return 0
}

// Set binds a session to an engine.
func (p *Pins) Set(session string, engine uint64) { p.set(sha256.Sum256([]byte(session)), engine, 0) }

// Learn binds a session to an engine unless something newer is known of it.
func (p *Pins) Learn(session SessionKey, engine uint64, at int64) {
	if e := p.table[session]; e == nil || e.Value.(*pin).at <= at {
		p.set(session, engine, at)
	}
}

func (p *Pins) set(session SessionKey, engine uint64, at int64) {
	if e := p.table[session]; e != nil {
		*e.Value.(*pin) = pin{session, engine, at}
		p.recent.MoveToFront(e)
		return
	}
	if p.recent.Len() >= p.limit {
		last := p.recent.Back()
		delete(p.table, last.Value.(*pin).session)
		p.recent.Remove(last)
	}
	p.table[session] = p.recent.PushFront(&pin{session, engine, at})
}

// Len is the number of sessions remembered.
func (p *Pins) Len() int { return p.recent.Len() }
