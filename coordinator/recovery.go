package coordinator

import (
	"fmt"
	"slices"

	"baton/wire"
)

// What happens to a request whose leg came to a bad end. Its source holds KV for exactly the tokens it had
// at the export; while it has no more than those, another decode engine can take over from there. Otherwise
// its prompt and its tokens are prefilled again, at the front of the queue. Sampling depends on the position
// alone, so either way the stream goes on with the token that was due.

// again finds a way on for a request that no engine runs, and says why that was necessary.
func (c *Core) again(r *request, format string, args ...any) {
	why := fmt.Sprintf(format, args...)
	if r.closed || r.aborting {
		c.unsource(r)
		c.finish(r, "")
		return
	}
	if c.phase == stopping {
		c.unsource(r)
		c.fail(r, unavailable("%v", errStopping))
		return
	}
	r.queuedAt = c.now
	if s := r.source; s != nil && !s.gone && s.tokens == len(r.tokens) {
		r.state = exported
		r.summary.Takeovers++
		c.warn("request %d: %s; another decode engine takes over", r.id, why)
		c.decode.queue.pushFront(r)
		return
	}
	c.unsource(r)
	if c.spent(r) {
		return
	}
	r.state = queued
	r.summary.Reruns++
	c.warn("request %d: %s; its prompt runs again with %d tokens", r.id, why, len(r.tokens))
	c.entry.queue.pushFront(r)
}

// spent ends a request that has all the tokens it may get, and only lacks the word that it has.
func (c *Core) spent(r *request) bool {
	longest := c.fleet.maxSeqLen
	if (r.maxTokens <= 0 || len(r.tokens) < r.maxTokens) && (longest == 0 || r.context < longest) {
		return false
	}
	c.tell(r, wire.FinishLength, "", &wire.EngineReply{Results: []wire.Result{{
		ID: r.clientID, Start: len(r.tokens), Finish: wire.FinishLength, StopToken: -1,
	}}})
	return true
}

// failure counts an engine's failure of a request that it does not run any more, and lets the request go on
// elsewhere unless it has failed too often, or could not do better.
func (c *Core) failure(r *request, e *engine, err *wire.RequestError) {
	r.failures++
	r.summary.Failures++
	switch {
	case r.closed || r.aborting:
	case err.Code == wire.CodeInvalid || !err.Retryable:
		c.unsource(r)
		c.fail(r, err)
		return
	case r.failures >= c.cfg.Attempts:
		c.unsource(r)
		err.Message = fmt.Sprintf("%s (given up after %d failures)", err.Message, r.failures)
		c.fail(r, err)
		return
	}
	r.avoid = append(r.avoid, e)
	c.again(r, "%s", err.Message)
}

// runFailed takes the failure of the leg that a request runs on.
func (c *Core) runFailed(l *leg, err *wire.RequestError) {
	r := l.r
	r.run = nil
	if s := r.source; s != nil && l.source == s {
		if s.gone { // it had to fail, and that was nobody's fault
			r.source = nil
			c.again(r, "%s", err.Message)
			return
		}
		// Twice is unlikely to be the readers' fault.
		if s.errors++; s.errors > 1 || err.Code == wire.CodeCorrupt {
			c.unsource(r)
		}
	}
	c.failure(r, l.engine, err)
}

// sourceFailed takes a prefill engine's report that it cannot deliver what it exported.
func (c *Core) sourceFailed(s *leg, err *wire.RequestError) {
	r := s.r
	if r.source != s || err.Reader != 0 && (r.run == nil || r.run.id != err.Reader) {
		return // it is about a reader that is not waited for any more
	}
	if r.aborting {
		return // its reader confirms
	}
	if r.in != nil {
		r.in.remove(r)
	}
	if r.run != nil {
		c.abandon(r)
	}
	c.unsource(r)
	c.failure(r, s.engine, err)
}

// lose takes a leg off an engine that is gone. died tells a death from a departure, alone whether the engine
// ran nothing else.
func (c *Core) lose(l *leg, why string, died, alone bool) {
	r := l.r
	c.settle(l)
	delete(l.engine.legs, l.id)
	r.legs--
	switch l {
	case r.run:
		r.run = nil
		r.lost = why
		c.endRead(l)
		if died && alone {
			r.killed = append(r.killed, l.engine.reg.Incarnation)
		}
		if len(r.killed) >= c.cfg.Attempts && !r.aborting {
			c.unsource(r)
			c.fail(r, &wire.RequestError{
				Code: wire.CodeEngineLost, SourceSafe: true,
				Message: fmt.Sprintf("%d engines died one after the other while they ran nothing but this request (the last: %s); it is given up", len(r.killed), why),
			})
			break
		}
		c.again(r, "%s", why)
	case r.source:
		l.gone = true
		r.lost = why
		c.loseSource(r, why)
	default:
		l.gone = true
		c.endRead(l)
	}
	c.forget(r)
}

// loseSource goes on without the engine that holds a request's KV. A decode engine that reads it is left to
// say how that ended: the copy may be complete, or complete all the same.
func (c *Core) loseSource(r *request, why string) {
	l := r.run
	if l == nil {
		r.in.remove(r)
		r.source = nil
		c.again(r, "%s", why)
		return
	}
	if r.aborting {
		r.source = nil
		return
	}
	l.verdict = c.now.Add(c.cfg.Verdict)
	c.orphans = append(c.orphans, l)
}

// orphaned gives up a leg that reads from an engine which is gone.
func (c *Core) orphaned(l *leg, why string) {
	r := l.r
	r.source = nil
	c.abandon(r)
	c.again(r, "%s", why)
}

// judge gives up the orphans that have had their time.
func (c *Core) judge() {
	n := 0
	for ; n < len(c.orphans) && !c.now.Before(c.orphans[n].verdict); n++ {
		if l := c.orphans[n]; l == l.r.run && l.source != nil && !l.r.aborting {
			c.orphaned(l, fmt.Sprintf("%s, and its KV did not arrive within %v", l.r.lost, c.cfg.Verdict))
		}
	}
	if n > 0 {
		c.orphans = slices.Delete(c.orphans, 0, n)
		c.dispatch()
	}
}

// acquit forgets the deaths of an engine that was only cut off or stopped, and is back.
func (c *Core) acquit(incarnation uint64) {
	for _, r := range c.requests {
		r.killed = slices.DeleteFunc(r.killed, func(i uint64) bool { return i == incarnation })
	}
}
