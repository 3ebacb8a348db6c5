package coordinator

import (
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
	changed := false
	for i := range results {
		res := results[i]
		c.room = results[i:i]
		l := e.legs[res.ID]
		if l == nil || !l.runs() {
			c.stray("tokens", e, res.ID)
			continue
		}
		ended := replies || res.Finish != ""
		if l != l.r.run {
			c.late(l, &res, ended)
		} else {
			c.result(l, &res, ended)
		}
		changed = changed || ended
	}
	c.flush()
	c.room = nil
	if changed {
		c.dispatch()
	}
}

// flush sends the results that were collected, those that end requests last.
func (c *Core) flush() {
	for _, final := range [...]bool{false, true} {
		for _, b := range c.buckets {
			switch {
			case b.final != final || c.peers[b.client.id] != b.client:
			case final:
				c.send(b.client, &wire.EngineReply{Results: b.results})
			default:
				c.send(b.client, &wire.EngineReplyPartial{Results: b.results})
			}
		}
	}
	clear(c.buckets)
	c.buckets = c.buckets[:0]
}

// stray reports what an engine said of a request that it does not run, or not any more.
func (c *Core) stray(what string, e *engine, id uint64) {
	c.warn("ignored %s of request %d from engine %s: it does not run there (any more)", what, id, e.reg.Name)
}

// late takes a result of a leg that its request does not wait for any more.
func (c *Core) late(l *leg, res *wire.Result, ended bool) {
	switch {
	case ended && res.Export != nil:
		l.export = res.Export
		c.release(l)
	case ended:
		c.end(l)
	}
}

// result takes a result of the leg that a request runs on.
func (c *Core) result(l *leg, res *wire.Result, ended bool) {
	r, e := l.r, l.engine
	if have := len(r.tokens); !r.closed && len(res.Tokens) > 0 && res.Start > have {
		c.breach(l, ended, "engine %s sent tokens from index %d on where %d was due", e.reg.Name, res.Start, have)
		return
	}
	if ended && res.Finish == "" && (res.Export == nil || r.state != prefilling) {
		c.breach(l, ended, "engine %s ended its part of the request without saying how", e.reg.Name)
		return
	}
	switch res.Finish {
	case "", wire.FinishStop, wire.FinishLength, wire.FinishAbort, wire.FinishEvicted:
	default:
		c.breach(l, ended, "engine %s ended its part of the request by %.20q, which it cannot end by", e.reg.Name, res.Finish)
		return
	}
	c.trim(r, res)
	if e.reg.Role != wire.RoleDecode {
		c.settle(l)
	} else if len(res.Tokens) > 0 {
		r.progress()
	}
	switch {
	case !ended:
		c.forward(l, res)
	case res.Finish == "":
		c.exported(l, res)
	case r.aborting:
		c.ended(l, nil)
	case res.Finish == wire.FinishEvicted:
		c.evicted(l, res)
	default:
		c.forward(l, res)
		c.ended(l, res)
	}
}

// progress notes that a request got on: what happened to it before is no longer held against it.
func (r *request) progress() {
	r.failures, r.lost = 0, ""
	r.avoid, r.killed = r.avoid[:0], r.killed[:0]
}

// trim drops tokens that the client has already.
func (c *Core) trim(r *request, res *wire.Result) {
	n := len(res.Tokens)
	if r.closed || n == 0 {
		return
	}
	known := min(len(r.tokens)-res.Start, n)
	if known <= 0 {
		return
	}
	res.Start, res.Tokens = res.Start+known, res.Tokens[known:]
	if len(res.Logprobs) == n {
		res.Logprobs = res.Logprobs[known:]
	}
	if len(res.Top) == n {
		res.Top = res.Top[known:]
	}
}

// forward puts a result into the client's bucket, unless the request is over for the client.
func (c *Core) forward(l *leg, res *wire.Result) {
	r := l.r
	if r.closed {
		return
	}
	s := &r.summary
	switch {
	case r.announced || l.engine.reg.Role == wire.RoleDecode:
		res.PromptTokens, res.CachedTokens, res.PromptLogprobs, res.PromptTop = 0, 0, nil, nil
	default:
		r.announced = true
		s.CachedTokens, s.PredictedTokens = res.CachedTokens, min(l.predicted, r.prompt)
	}
	if res.Stats != nil && l.engine.reg.Role != wire.RolePrefill {
		s.addStats(res.Stats)
	}
	if len(r.tokens) == cap(r.tokens) && len(r.tokens) < 64 { // spares short requests the steps in between
		r.tokens = slices.Grow(r.tokens, min(max(r.maxTokens-len(r.tokens), 1), 64))
	}
	r.tokens = append(r.tokens, res.Tokens...)
	r.context += len(res.Tokens)
	c.widen(l)
	c.held += len(res.Tokens)
	s.Generated += len(res.Tokens)
	res.ID, res.Export = r.clientID, nil
	final := res.Finish != ""
	i := slices.IndexFunc(c.buckets, func(b bucket) bool { return b.client == r.client && b.final == final })
	if i < 0 {
		b := bucket{client: r.client, final: final}
		if i = len(c.buckets); i == 0 {
			b.results = c.room // it grows no faster than the engine's message is read
		}
		c.buckets = append(c.buckets, b)
	}
	c.buckets[i].results = append(c.buckets[i].results, *res)
}

// addStats keeps the last leg's stats, with the moves of all.
func (s *Summary) addStats(last *wire.Stats) {
	before := s.Stats
	s.Stats = *last
	s.Stats.BlocksMoved += before.BlocksMoved
	s.Stats.BlocksReused += before.BlocksReused
	s.Stats.BytesMoved += before.BytesMoved
}

// exported takes the reply that ends a prefill leg: the client gets the first token at once, and the
// request waits for a decode engine.
func (c *Core) exported(l *leg, res *wire.Result) {
	r := l.r
	l.export = res.Export
	c.settle(l)
	r.run = nil
	if r.summary.Exported.IsZero() {
		r.summary.Exported = c.now
	}
	switch {
	case r.aborting:
		c.release(l)
		c.finish(r, "")
	case len(r.tokens)+len(res.Tokens) == 0 || len(res.Tokens) == 0:
		c.release(l)
		c.failure(r, l.engine, internal("engine %s handed over a request without its next token", l.engine.reg.Name))
	default:
		c.forward(l, res)
		l.tokens = len(r.tokens)
		r.source = l
		r.state, r.queuedAt = exported, c.now
		c.decode.queue.push(r)
	}
}

// evicted takes a request back that its engine had no more room for: it goes on with another prefill.
func (c *Core) evicted(l *leg, res *wire.Result) {
	r := l.r
	res.Finish, res.Stats = "", nil
	if len(res.Tokens) > 0 {
		c.forward(l, res)
	}
	r.summary.Evictions++
	r.run = nil
	c.end(l)
	c.again(r, "engine %s evicted it", l.engine.reg.Name)
}

// ended takes the end of the leg that a request ran on, and of the request: as res says, or by abort.
func (c *Core) ended(l *leg, res *wire.Result) {
	r := l.r
	r.run = nil
	c.unsource(r)
	c.end(l)
	if res == nil {
		c.finish(r, "")
	} else {
		c.tell(r, res.Finish, "", nil)
	}
}

// breach gives up a leg whose engine broke the protocol. Unless that was the engine's last word on it, the
// engine has to abort it.
func (c *Core) breach(l *leg, last bool, format string, args ...any) {
	r := l.r
	err := internal(format, args...)
	if last {
		r.run = nil
		c.end(l)
	} else {
		c.abandon(r)
	}
	c.failure(r, l.engine, err)
}

// transferReady passes decode's destinations on to the prefill engine, which pushes into them.
func (c *Core) transferReady(e *engine, m *wire.KVTransferReady) {
	l := e.legs[m.ID]
	if l == nil || l.source == nil || l.pushed || l.ended {
		c.warn("ignored KVTransferReady for request %d from engine %s: no such transfer is due", m.ID, e.reg.Name)
		return
	}
	s := l.source
	switch {
	case l != l.r.run || l.r.aborting: // it was told to abort
		return
	case s.gone: // nobody will push
		c.orphaned(l, l.r.lost)
		c.dispatch()
		return
	}
	l.pushed = true
	c.send(s.engine.peer, &wire.SendKV{
		ID: s.id, Handoff: s.export.Handoff, CachedBlocks: m.CachedBlocks, Blocks: m.Blocks, Tag: m.Tag, Ranks: e.reg.Ranks,
		Reader: l.id,
	})
}

// readDone lets go of the source of a handoff: the decode engine has everything.
func (c *Core) readDone(e *engine, m *wire.KVReadDone) {
	l := e.legs[m.ID]
	if l == nil || l.source == nil {
		c.warn("ignored KVReadDone for request %d from engine %s: it is not reading", m.ID, e.reg.Name)
		return
	}
	r := l.r
	if l == r.run {
		r.source = nil
		r.summary.Read = c.now
		c.settle(l)
	}
	c.endRead(l)
	if l.ended {
		c.letGo(l)
	}
	c.dispatch()
}

// letGo ends a leg whose engine had reported its end before and now holds nothing of it any more.
func (c *Core) letGo(l *leg) {
	if r := l.r; l == r.run { // the client waits for just that
		c.ended(l, nil)
	} else {
		c.end(l)
	}
}

// abort ends a request at its client's wish, wherever it is. One that no engine runs ends at once; otherwise
// the engine that runs it is asked, and the request ends with its answer.
func (c *Core) abort(r *request) {
	if r.aborting {
		return
	}
	r.aborting = true
	if r.run != nil {
		c.send(r.run.engine.peer, &wire.AbortRequest{ID: r.run.id})
		return
	}
	if r.in != nil {
		r.in.remove(r)
	}
	c.unsource(r)
	c.finish(r, "")
	c.dispatch() // those behind it may fit where it did not
}

// aborted takes an engine's confirmation of an abort.
func (c *Core) aborted(e *engine, m *wire.RequestAborted) {
	l := e.legs[m.ID]
	if l == nil || l.export != nil {
		c.stray("RequestAborted", e, m.ID)
		return
	}
	r := l.r
	switch {
	case l == r.run && !r.aborting:
		c.failed(e, &wire.RequestError{
			ID: m.ID, Code: wire.CodeUnavailable, Message: "engine " + e.reg.Name + " gave the request up",
			Retryable: true, SourceSafe: m.SourceSafe,
		})
		return
	case !m.SourceSafe && l.source != nil:
		l.ended = true
		return
	}
	c.letGo(l)
	c.dispatch()
}

// failed takes an engine's report that a request cannot go on there.
func (c *Core) failed(e *engine, m *wire.RequestError) {
	l := e.legs[m.ID]
	if l == nil {
		c.stray("RequestError", e, m.ID)
		return
	}
	r := l.r
	switch m.Code {
	case wire.CodeInvalid, wire.CodeUnavailable, wire.CodeEngineLost, wire.CodeInternal, wire.CodeCorrupt:
	default:
		m.Code = wire.CodeInternal // clients, and metrics, know just these
	}
	if l.source != nil && m.Code == wire.CodeCorrupt {
		l.source.corrupt = true
	}
	switch {
	case l.export != nil:
		c.sourceFailed(l, m)
	case !m.SourceSafe && l.source != nil:
		if l.ended = true; l == r.run && !r.aborting {
			c.runFailed(l, m)
		}
	case l == r.run && !r.aborting:
		c.runFailed(l, m)
		c.end(l)
	default:
		c.letGo(l)
	}
	c.dispatch()
}
