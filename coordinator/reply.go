package coordinator

import (
	"fmt"
	"slices"

	"baton/wire"
)

// bucket collects what one engine message says to one client.
type bucket struct {
	client  *peer
	final   bool
	results []wire.Result
}

// results passes an engine's news on to the clients, one message for each client.
func (c *Core) results(e *engine, results []wire.Result, replies bool) {
	c.buckets = c.buckets[:0]
	changed := false
	for i := range results {
		res := results[i]
		r := c.requests[res.ID]
		if r == nil || r.owner != e && (r.source != e || r.state != prefilling) || r.failed {
			c.warn("ignored tokens of request %d from engine %s: it does not run there (any more)", res.ID, e.reg.Name)
			continue
		}
		ended := c.result(r, e, &res, replies)
		changed = changed || ended
	}
	for _, b := range c.buckets {
		if c.peers[b.client.id] != b.client {
			continue
		}
		if b.final {
			c.send(b.client, &wire.EngineReply{Results: b.results})
		} else {
			c.send(b.client, &wire.EngineReplyPartial{Results: b.results})
		}
	}
	clear(c.buckets)
	if changed {
		c.dispatch()
	}
}

// result handles one result of a request that runs on e and reports whether its leg ended.
func (c *Core) result(r *request, e *engine, res *wire.Result, replies bool) bool {
	last := replies || res.Finish != ""
	if !r.closed && len(res.Tokens) > 0 && res.Start != r.sent {
		c.breach(r, last, internal("engine %s sent tokens from index %d on where %d was due", e.reg.Name, res.Start, r.sent))
		return last
	}
	if r.state == prefilling {
		r.generated = append(slices.Clip(r.generated), res.Tokens...)
		if res.Export != nil && res.Finish == "" {
			c.exported(r, res)
			return true
		}
	}
	if replies && res.Finish == "" {
		c.breach(r, last, internal("engine %s ended its part of the request without saying how", e.reg.Name))
		return true
	}
	c.forward(r, res)
	if res.Finish == "" {
		return false
	}
	c.endLegs(r)
	c.tell(r, res.Finish, "", nil)
	c.forget(r)
	return true
}

// forward puts a result into the client's bucket, unless the request is over for the client.
func (c *Core) forward(r *request, res *wire.Result) {
	if r.closed {
		return
	}
	s := &r.summary
	if s.Prefill == "" || r.owner == nil {
		s.CachedTokens += res.CachedTokens
	} else { // the prefill leg has reported these
		res.PromptTokens, res.CachedTokens, res.PromptLogprobs, res.PromptTop = 0, 0, nil, nil
	}
	if res.Stats != nil && r.owner != nil {
		s.Stats = *res.Stats
	}
	r.sent += len(res.Tokens)
	s.Generated += len(res.Tokens)
	res.ID, res.Export = r.clientID, nil
	final := res.Finish != ""
	i := slices.IndexFunc(c.buckets, func(b bucket) bool { return b.client == r.client && b.final == final })
	if i < 0 {
		i = len(c.buckets)
		c.buckets = append(c.buckets, bucket{client: r.client, final: final})
	}
	c.buckets[i].results = append(c.buckets[i].results, *res)
}

// exported takes the reply that ends a prefill leg: the client gets the first token at once, and the
// request waits for a decode engine.
func (c *Core) exported(r *request, res *wire.Result) {
	r.export = res.Export
	r.summary.Exported = c.now
	switch {
	case r.aborting || r.closed:
		c.releaseSource(r)
		c.finish(r, "")
	case len(r.generated) == 0:
		c.releaseSource(r)
		c.fail(r, internal("engine %s handed over a request without its first token", r.summary.Prefill))
	default:
		c.forward(r, res)
		r.state, r.queuedAt = exported, c.now
		c.decode.queue.push(r)
		return
	}
	c.forget(r)
}

// breach ends a request whose engine broke the protocol. Unless that was the engine's last word on it,
// the engine has to abort it.
func (c *Core) breach(r *request, last bool, err *wire.RequestError) {
	c.warn("request %d: %s", r.id, err.Message)
	if last {
		c.endLegs(r)
	} else {
		c.abort(r)
	}
	c.fail(r, err)
	c.forget(r)
}

// transferReady passes decode's destinations on to the prefill engine, which pushes into them.
func (c *Core) transferReady(e *engine, m *wire.KVTransferReady) {
	r := c.requests[m.ID]
	if r == nil || r.owner != e || r.source == nil || r.pushed {
		c.warn("ignored KVTransferReady for request %d from engine %s: no such transfer is due", m.ID, e.reg.Name)
		return
	}
	if r.aborting {
		return
	}
	r.pushed = true
	c.send(r.source.peer, &wire.SendKV{
		ID: r.id, Handoff: r.export.Handoff, CachedBlocks: m.CachedBlocks, Blocks: m.Blocks, Tag: m.Tag, Ranks: e.reg.Ranks,
	})
}

// readDone releases the source of a handoff: the decode engine has everything.
func (c *Core) readDone(e *engine, m *wire.KVReadDone) {
	r := c.requests[m.ID]
	if r == nil || r.owner != e || r.source == nil {
		c.warn("ignored KVReadDone for request %d from engine %s: it is not reading", m.ID, e.reg.Name)
		return
	}
	r.summary.Read = c.now
	c.releaseSource(r)
	if r.failed {
		c.freeOwner(r)
		c.finish(r, "")
	}
	c.forget(r)
	c.dispatch()
}

// abort stops a request wherever it is. One that no engine runs ends at once; otherwise the engine that
// runs it is asked, and the request ends with its answer.
func (c *Core) abort(r *request) {
	if r.aborting {
		return
	}
	r.aborting = true
	switch {
	case r.in != nil:
		r.in.remove(r)
		waited := r.source != nil
		c.releaseSource(r)
		c.finish(r, "")
		if waited {
			c.dispatch()
		}
	case r.owner != nil:
		c.send(r.owner.peer, &wire.AbortRequest{ID: r.id})
	case r.source != nil:
		c.send(r.source.peer, &wire.AbortRequest{ID: r.id})
	}
}

// aborted takes an engine's confirmation of an abort.
func (c *Core) aborted(e *engine, m *wire.RequestAborted) {
	r := c.requests[m.ID]
	if r == nil || r.owner != e && (r.source != e || r.state != prefilling) {
		c.warn("ignored RequestAborted for request %d from engine %s: it does not run there (any more)", m.ID, e.reg.Name)
		return
	}
	if !m.SourceSafe && r.source != nil {
		r.failed, r.aborting = true, true
		return
	}
	c.endLegs(r)
	c.finish(r, "")
	c.forget(r)
	c.dispatch()
}

// failed takes an engine's report that a request cannot go on.
func (c *Core) failed(e *engine, m *wire.RequestError) {
	r := c.requests[m.ID]
	if r == nil || r.owner != e && r.source != e {
		c.warn("ignored RequestError for request %d from engine %s: it does not run there (any more)", m.ID, e.reg.Name)
		return
	}
	switch {
	case r.owner != nil && r.owner != e: // the source cannot deliver: the decode engine must let go first
		c.abort(r)
	case r.in != nil: // the export was lost before a decode engine was found
		r.in.remove(r)
		c.releaseSource(r)
	case m.SourceSafe || r.source == nil || r.owner == nil:
		c.endLegs(r)
	default:
		r.failed, r.aborting = true, true
	}
	c.fail(r, m)
	c.forget(r)
	c.dispatch()
}

// endLegs returns what both engines held for a request that neither runs any more.
func (c *Core) endLegs(r *request) {
	c.releaseSource(r)
	c.freeOwner(r)
}

// lost ends a request that cannot go on without an engine that is gone. Others are left alone: so is a
// request that e prefilled, once its KV was read.
func (c *Core) lost(r *request, e *engine, why string) {
	wanted := r.aborting
	switch {
	case r.owner == e:
		r.owner = nil
		c.releaseSource(r)
	case r.source == e:
		r.source, r.export = nil, nil
		if r.in != nil {
			r.in.remove(r)
		}
		if r.owner != nil { // wait for its confirmation
			c.abort(r)
			if r.failed {
				c.freeOwner(r)
			}
		}
	default:
		return
	}
	if wanted {
		c.finish(r, "") // the client wanted it gone, and it is
	}
	c.fail(r, &wire.RequestError{
		Code: wire.CodeEngineLost, Message: fmt.Sprintf("engine %s is gone: %s; try again", e.reg.Name, why),
		Retryable: true, SourceSafe: true,
	})
	c.forget(r)
}
