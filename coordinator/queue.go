package coordinator

import (
	"fmt"
	"slices"
	"time"

	"baton/kvcache"
	"baton/route"
	"baton/wire"
)

// queue is a FIFO of requests, linked through them so that an abort leaves from the middle. Requests that
// ran before and have to run again come first, among themselves in the order in which they came back.
type queue struct {
	head, tail *request
	back       *request // the last of those that came back
	length     int
}

func (q *queue) push(r *request) { q.insert(r, q.tail) }

// pushFront puts a request before those that never ran.
func (q *queue) pushFront(r *request) {
	q.insert(r, q.back)
	q.back = r
}

func (q *queue) insert(r, after *request) {
	r.in, r.prev, r.next = q, after, q.head
	if after != nil {
		r.next = after.next
		after.next = r
	} else {
		q.head = r
	}
	if r.next != nil {
		r.next.prev = r
	} else {
		q.tail = r
	}
	q.length++
}

func (q *queue) remove(r *request) {
	if r == q.back {
		q.back = r.prev
	}
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

// oldest is the request that has waited longest.
func (q *queue) oldest() *request {
	r := q.head
	if q.back != nil && q.back.next != nil && q.back.next.queuedAt.Before(r.queuedAt) {
		r = q.back.next
	}
	return r
}

// lookahead bounds how far behind waiting requests the scan looks for work for engines on which those could
// never run, or to which they are not bound.
const lookahead = 256

// dispatch starts all waiting requests that can start now. Handoffs go first: they free prefill engines.
func (c *Core) dispatch() {
	if c.phase != running && c.phase != draining {
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
		if r.checked != c.fleet.change && !c.recheck(r) {
			r = next
			continue
		}
		if r.misfit.IsZero() && c.place(p, r) {
			r = next
			continue
		}
		passed++
		if r.misfit.IsZero() && !c.claim(p, r) {
			return
		}
		r = next
	}
}

// recheck validates a waiting request against a fleet that has changed, and ends it if it cannot run. One
// that could run before waits for an engine of the size to come back.
func (c *Core) recheck(r *request) bool {
	err := c.check(r)
	switch {
	case err == nil:
		r.misfit = time.Time{}
	case !r.accepted:
		r.in.remove(r)
		c.unsource(r)
		c.fail(r, err)
		return false
	case r.misfit.IsZero():
		r.misfit = c.now
		c.misfits = append(c.misfits, misfit{r, c.now.Add(c.cfg.Wait)})
	}
	r.checked, r.accepted = c.fleet.change, r.accepted || c.complete()
	return true
}

// misfit is a request that no engine is large enough for any more.
type misfit struct {
	r  *request
	by time.Time // when it gives up
}

// dismiss ends the misfits that waited in vain.
func (c *Core) dismiss() {
	n := 0
	for ; n < len(c.misfits) && !c.now.Before(c.misfits[n].by); n++ {
		r := c.misfits[n].r
		if r.in == nil || r.misfit.Add(c.cfg.Wait) != c.misfits[n].by {
			continue // it found an engine, or its end
		}
		err := c.check(r)
		if err == nil {
			continue
		}
		r.in.remove(r)
		c.unsource(r)
		err.Code, err.Field, err.Retryable = wire.CodeUnavailable, "", true
		c.fail(r, err)
	}
	c.misfits = slices.Delete(c.misfits, 0, n)
}

// suits tells whether r could ever run on e, and has no reason to prefer waiting for another engine.
func (c *Core) suits(r *request, e *engine) bool {
	if c.need(r, e) > e.reg.Blocks {
		return false
	}
	if !slices.Contains(r.avoid, e) {
		return true
	}
	return !slices.ContainsFunc(e.pool.engines, func(o *engine) bool {
		return !o.draining && c.need(r, o) <= o.reg.Blocks && !slices.Contains(r.avoid, o)
	})
}

// bound is the engine on which r's session is kept, if that still takes its requests.
func (c *Core) bound(p *pool, r *request) *engine {
	if p.pins == nil || r.msg.Session == "" {
		return nil
	}
	serial := p.pins.Get(r.msg.Session)
	i := slices.IndexFunc(p.engines, func(e *engine) bool { return e.serial == serial })
	if i < 0 || p.engines[i].draining || !c.suits(r, p.engines[i]) {
		return nil
	}
	return p.engines[i]
}

// claim reserves for r the engines that it waits for, and reports whether others are left.
func (c *Core) claim(p *pool, r *request) bool {
	left, bound := false, c.bound(p, r)
	for _, e := range p.engines {
		switch {
		case e.claimed == c.scan:
		case bound == e || bound == nil && c.suits(r, e):
			e.claimed = c.scan
		case e.canTake(0):
			left = true
		}
	}
	return left
}

// place starts r on the engine that the policy picks among those that can take it, if there is one.
func (c *Core) place(p *pool, r *request) bool {
	c.chosen, c.candidates = c.chosen[:0], c.candidates[:0]
	slots, bound := 0, c.bound(p, r)
	for _, e := range p.engines {
		if e.claimed != c.scan && e.canTake(c.reserve(r, e)) && (bound == e || bound == nil && c.suits(r, e)) {
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
			Match: c.depths[e.slot], Requests: len(e.legs), Free: e.free(), Last: e.last,
		})
	}
	d := c.cfg.Policy.Pick(len(r.digests), c.candidates)
	e := c.chosen[d.Index]
	if d.Pinned = bound != nil; p.pins != nil && r.msg.Session != "" {
		p.pins.Set(r.msg.Session, e.serial)
	}
	p.queue.remove(r)
	c.picks++
	e.last = c.picks
	c.start(r, e, d)
	return true
}

// hash makes sure that r has the digests of what it is to prefill, for the fleet's block size.
func (c *Core) hash(r *request) {
	size := c.fleet.geometry.BlockSize
	if r.digestSize != size {
		r.digests, r.digestSize = nil, size
	}
	done := len(r.digests) * size
	if r.digests != nil && r.state != queued || r.context-done < size {
		return
	}
	before := kvcache.Root(r.msg.Salt, "")
	if n := len(r.digests); n > 0 {
		before = r.digests[n-1]
	}
	rest := slices.Concat(r.msg.Prompt[min(done, r.prompt):], r.tokens[max(done-r.prompt, 0):])
	r.digests = append(slices.Clip(r.digests), kvcache.Chain(before, size, rest)...)
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
			r := p.queue.oldest()
			p.queue.remove(r)
			c.unsource(r)
			err := unavailable("%s for %v; start one or try again", c.lack(), c.cfg.Wait)
			if r.lost != "" {
				err.Code, err.Message = wire.CodeEngineLost, fmt.Sprintf("%s, and %s", r.lost, err.Message)
			}
			c.fail(r, err)
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
