package coordinator

import (
	"time"

	"baton/route"
	"baton/wire"
)

// leg is a request's stay on one engine, from the message that begins it until nothing of it is left there.
// Its id is what the engine knows the request by: the request's own for the first leg on either role, a new
// number for each later one, so that what an engine says of one leg is never taken for news of another.
//
// A leg counts for its request while it is the one that runs or the source. One that does not (the request
// goes on elsewhere) stays until its engine has let go.
type leg struct {
	id     uint64
	r      *request
	engine *engine
	blocks int // reserved there

	// Of a leg that prefilled.
	export  *wire.Export // set by its reply: from then on it only holds KV
	tokens  int          // how many the request had then, the last without KV
	readers int          // legs that may still read the KV
	errors  int          // readers that failed
	gone    bool         // its engine is
	corrupt bool         // a reader got something else than was exported

	// Of a leg that reads KV.
	source  *leg      // until the reading ended
	pushed  bool      // SEND_KV was sent
	verdict time.Time // when the wait for a copy from a source that is gone ends

	ended     bool // its engine reported its end, but it may still read
	predicted int  // prompt tokens that were thought to be cached
	expected  *route.Expectation
}

// runs tells whether the engine computes for a leg, as far as the coordinator knows.
func (l *leg) runs() bool { return l.export == nil && !l.ended }

// begin reserves room for a request on an engine.
func (c *Core) begin(r *request, e *engine, d route.Decision) *leg {
	l := &leg{id: r.id, r: r, engine: e, blocks: c.reserve(r, e), predicted: d.Match * c.fleet.geometry.BlockSize}
	first := &r.prefilled
	if r.state == exported {
		first = &r.decoded
	}
	if *first {
		c.nextID++
		l.id = c.nextID
	}
	*first = true
	e.legs[l.id] = l
	e.blocks += l.blocks
	r.legs++
	if e.cached.Reports {
		e.pool.index.Touch(r.digests)
		l.expected = e.pool.index.Expect(e.slot, r.digests)
	} else {
		e.pool.index.Record(e.slot, r.digests)
	}
	return l
}

// end forgets a leg of which nothing is left on its engine.
func (c *Core) end(l *leg) {
	e := l.engine
	if e.legs[l.id] != l {
		return
	}
	delete(e.legs, l.id)
	e.blocks -= l.blocks
	c.settle(l)
	l.r.legs--
	c.endRead(l)
	c.forget(l.r)
	c.closeDrained(e)
}

// settle notes that what the engine has cached because of a leg is known.
func (c *Core) settle(l *leg) {
	l.engine.pool.index.Settle(l.expected)
	l.expected = nil
}

// endRead notes that a leg does not read its source any more.
func (c *Core) endRead(l *leg) {
	s := l.source
	if s == nil {
		return
	}
	l.source = nil
	s.readers--
	c.release(s)
}

// release gives back what a source holds, if it is nobody's source any more and nobody reads it.
func (c *Core) release(s *leg) {
	if s.gone || s.readers > 0 || s.r.source == s {
		return
	}
	c.send(s.engine.peer, &wire.ReleaseKV{ID: s.id, Handoff: s.export.Handoff, Corrupt: s.corrupt})
	c.end(s)
}

// unsource makes a request independent of its source.
func (c *Core) unsource(r *request) {
	if s := r.source; s != nil {
		r.source = nil
		c.release(s)
	}
}

// abandon leaves the leg that a request runs on to end by itself.
func (c *Core) abandon(r *request) {
	l := r.run
	r.run = nil
	c.send(l.engine.peer, &wire.AbortRequest{ID: l.id})
}
