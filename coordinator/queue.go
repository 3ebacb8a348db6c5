package coordinator

import (
	"baton/kvcache"
	"baton/route"
	"baton/wire"
)

// queue is a FIFO of requests, linked through them so that an abort leaves from the middle.
type queue struct {
	head, tail *request
	length     int
}

func (q *queue) push(r *request) {
	r.in, r.prev, r.next = q, q.tail, nil
	if q.tail == nil {
		q.head = r
	} else {
		q.tail.next = r
	}
	q.tail = r
	q.length++
}

func (q *queue) remove(r *request) {
	if r.prev == nil {
		q.head = r.next
	} else {
		r.prev.next = r.next
	}
	if r.next == nil {
		q.tail = r.prev
	} else {
		r.next.prev = r.prev
	}
	r.in, r.prev, r.next = nil, nil, nil
	q.length--
}

// lookahead bounds how far behind a waiting request the scan looks for work for an engine on which that
// request could never run.
const lookahead = 64

// dispatch starts all waiting requests that can start now. Handoffs go first: they free prefill engines.
func (c *Core) dispatch() {
	if c.phase != running {
		return
	}
	c.scanQueue(&c.decode)
	if c.complete() {
		c.scanQueue(&c.entry)
	}
}

// scanQueue binds waiting requests of one role to engines, first come, first served: a request that
// cannot start claims every engine on which it could run once there is room, so that no later one
// takes the room away from it.
func (c *Core) scanQueue(p *pool) {
	c.scan++
	r := p.queue.head
	for passed := 0; r != nil && passed < lookahead; {
		next := r.next
		if r.checked != c.fleet.change {
			if !c.recheck(r) {
				r = next
				continue
			}
		}
		if !c.place(p, r) {
			passed++
			if !c.claim(p, r) {
				return
			}
		}
		r = next
	}
}

// recheck validates a waiting request against a fleet that has changed, and ends it if it cannot run.
func (c *Core) recheck(r *request) bool {
	if err := c.check(r); err != nil {
		if r.accepted {
			err.Code, err.Field, err.Retryable = wire.CodeUnavailable, "", true
		}
		r.in.remove(r)
		c.releaseSource(r)
		c.fail(r, err)
		c.forget(r)
		return false
	}
	r.checked, r.accepted = c.fleet.change, r.accepted || c.complete()
	return true
}

// claim reserves for r the engines that it could ever run on and reports whether others are left.
func (c *Core) claim(p *pool, r *request) bool {
	left := false
	for _, e := range p.engines {
		if e.claimed == c.scan {
			continue
		}
		if c.need(r, e) <= e.reg.Blocks {
			e.claimed = c.scan
		} else if e.canTake(0) {
			left = true
		}
	}
	return left
}

// place starts r on the engine that the policy picks among those that can take it, if there is one.
func (c *Core) place(p *pool, r *request) bool {
	c.chosen, c.candidates = c.chosen[:0], c.candidates[:0]
	slots := 0
	for _, e := range p.engines {
		if e.claimed != c.scan && e.canTake(c.need(r, e)) {
			c.chosen = append(c.chosen, e)
			slots = max(slots, e.slot+1)
		}
	}
	if len(c.chosen) == 0 {
		return false
	}
	c.hash(r)
	if cap(c.depths) < slots {
		c.depths = make([]int, slots)
	}
	c.depths = c.depths[:slots]
	p.index.Match(r.digests, c.depths)
	for _, e := range c.chosen {
		c.candidates = append(c.candidates, route.Candidate{
			Match: c.depths[e.slot], Requests: e.requests, Free: e.free(), Last: e.last,
		})
	}
	d := c.cfg.Policy.Pick(len(r.digests), c.candidates)
	e := c.chosen[d.Index]
	p.queue.remove(r)
	p.index.Record(e.slot, r.digests)
	c.picks++
	e.last = c.picks
	c.start(r, e, d)
	return true
}

// hash makes sure that r has the digests of its prompt for the fleet's block size.
func (c *Core) hash(r *request) {
	size := c.fleet.geometry.BlockSize
	if r.digestSize == size {
		return
	}
	r.digests = kvcache.Chain(kvcache.Root(r.msg.Salt, ""), size, r.msg.Prompt)
	r.digestSize = size
}

// expire ends the requests that have waited too long for an engine that is not there.
func (c *Core) expire() {
	for _, p := range [...]*pool{&c.decode, &c.entry} {
		for p.queue.head != nil {
			served := c.complete()
			if p == &c.decode {
				served = p.open() > 0
			}
			at, waits := p.deadline(c.cfg.Wait, served)
			if !waits || c.now.Before(at) {
				break
			}
			r := p.queue.head
			p.queue.remove(r)
			c.releaseSource(r)
			c.fail(r, unavailable("%s for %v; start one or try again", c.lack(), c.cfg.Wait))
			c.forget(r)
		}
	}
}

// lack says which engines are missing for a request to be served; "" when none is.
func (c *Core) lack() string {
	switch {
	case len(c.order) == 0:
		return "no engine is connected"
	case c.entry.open() == 0 && c.fleet.colocated:
		return "no colocated engine takes requests"
	case c.entry.open() == 0:
		return "no prefill engine takes requests"
	case !c.fleet.colocated && c.decode.open() == 0:
		return "no decode engine takes requests"
	}
	return ""
}
