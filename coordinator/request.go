package coordinator

import (
	"fmt"
	"time"

	"baton/kvcache"
	"baton/route"
	"baton/wire"
)

// state is how far a request has come.
type state uint8

const (
	queued     state = iota // waits for its first engine
	prefilling              // its prompt runs on source
	exported                // waits for a decode engine; source holds its KV
	decoding                // runs on owner to its end, which reads its KV from source while that is set
)

// request is one request from its arrival until nothing of it is left on any engine.
type request struct {
	id       uint64
	client   *peer
	clientID uint64
	msg      *wire.SubmitRequest // nil once the decode engine has it

	state    state
	aborting bool // the engine that runs it was told to abort it
	closed   bool // the client was told how it ended
	failed   bool // owner reported its failure, but may still read from source
	pushed   bool // SEND_KV was sent

	source, owner             *engine // hold reservations; nil before and after
	sourceBlocks, ownerBlocks int
	export                    *wire.Export
	generated                 wire.Tokens // by the prefill leg, and before it
	sent                      int         // tokens that the client has, with those it resumed from

	prompt, context, maxTokens int // lengths of the prompt, of it and the resumed tokens; limit of new ones
	digests                    []kvcache.Digest
	digestSize                 int    // block size that digests are made for
	checked                    uint64 // fleet.change at the last validation
	accepted                   bool   // a complete fleet could have run it

	in         *queue
	prev, next *request
	queuedAt   time.Time
	summary    Summary
}

// submit takes a client's request.
func (c *Core) submit(p *peer, m *wire.SubmitRequest, ev *Event) {
	if p.requests[m.ID] != nil {
		c.warn("ignored SubmitRequest from %s: its request %d is still running", p, m.ID)
		return
	}
	c.nextID++
	r := &request{
		id: c.nextID, client: p, clientID: m.ID, msg: m,
		prompt: len(m.Prompt), context: len(m.Prompt) + len(m.Resume), maxTokens: m.Sampling.MaxTokens,
		generated: m.Resume, sent: len(m.Resume), digests: ev.Digests, digestSize: ev.BlockSize, queuedAt: c.now,
	}
	r.summary = Summary{ID: r.id, ClientID: r.clientID, Client: p.hello.Name, PromptTokens: r.prompt, Submitted: c.now}
	p.requests[m.ID] = r
	c.requests[r.id] = r
	if err := c.refusal(r); err != nil {
		c.fail(r, err)
		c.forget(r)
		return
	}
	r.checked, r.accepted = c.fleet.change, c.complete()
	m.ID = r.id
	c.entry.queue.push(r)
	c.dispatch()
}

// refusal says why a request cannot even wait, nil when it can.
func (c *Core) refusal(r *request) *wire.RequestError {
	n := len(r.msg.Prompt)
	switch {
	case c.phase == stopping:
		return unavailable("%v", errStopping)
	case n == 0:
		return invalid("prompt", "the prompt is empty")
	case n > c.cfg.MaxPrompt:
		return invalid("prompt", "the prompt has %d tokens; this deployment accepts up to %d", n, c.cfg.MaxPrompt)
	case c.entry.queue.length >= c.cfg.Queue:
		return unavailable("%d requests wait already, as many as may; try again later", c.cfg.Queue)
	}
	return c.check(r)
}

// check says why the fleet as it is now can never run a request; nil when it can, or when engines are
// lacking, which may still come.
func (c *Core) check(r *request) *wire.RequestError {
	if n := c.fleet.maxSeqLen; n > 0 && r.context > n {
		return invalid("prompt", "the prompt has %d tokens; the model serves up to %d", r.context, n)
	}
	for _, p := range [...]*pool{&c.entry, &c.decode} {
		if p == &c.entry && r.state != queued {
			continue
		}
		if err := c.checkRoom(r, p); err != nil {
			return err
		}
	}
	return nil
}

// checkRoom says that no engine of a pool has enough KV blocks for r, if so.
func (c *Core) checkRoom(r *request, p *pool) *wire.RequestError {
	var roomiest *engine
	for _, e := range p.engines {
		if e.draining {
			continue
		}
		if c.need(r, e) <= e.reg.Blocks {
			return nil
		}
		if roomiest == nil || e.reg.Blocks > roomiest.reg.Blocks {
			roomiest = e
		}
	}
	if roomiest == nil {
		return nil
	}
	field, size := "max_tokens", c.fleet.geometry.BlockSize
	if blocks(r.context, size) > roomiest.reg.Blocks {
		field = "prompt"
	}
	return invalid(field, "the request needs %d KV blocks of %d tokens (%d prompt tokens, up to %d new ones); no engine for it has more than %d",
		c.need(r, roomiest), size, r.prompt, max(r.maxTokens, 1), roomiest.reg.Blocks)
}

func blocks(tokens, size int) int { return (tokens + size - 1) / size }

// need is how many KV blocks to reserve for r on e, as if nothing of its prompt were cached there: on a
// prefill engine the prompt, elsewhere also what it may generate, but for the last token, whose KV is
// never written. A request without a limit takes what the engine has.
func (c *Core) need(r *request, e *engine) int {
	size := e.reg.Geometry.BlockSize
	prompt := blocks(r.context, size)
	if e.reg.Role == wire.RolePrefill {
		return prompt
	}
	longest := e.reg.Geometry.MaxSeqLen
	if r.maxTokens <= 0 || r.maxTokens >= longest {
		return max(prompt, min(blocks(longest-1, size), e.reg.Blocks))
	}
	total := min(r.prompt+r.maxTokens, longest)
	return max(prompt, blocks(total-1, size))
}

// start sends a request to the engine that was chosen for its next leg.
func (c *Core) start(r *request, e *engine, d route.Decision) {
	n := c.need(r, e)
	e.requests++
	e.blocks += n
	switch {
	case r.state == exported:
		r.state, r.owner, r.ownerBlocks = decoding, e, n
		r.summary.Decode, r.summary.DecodeRoute, r.summary.Bound = e.reg.Name, d, c.now
		c.sendWithKV(r)
	case e.reg.Role == wire.RoleBoth:
		r.state, r.owner, r.ownerBlocks = decoding, e, n
		r.summary.Decode, r.summary.DecodeRoute, r.summary.Dispatched = e.reg.Name, d, c.now
		r.msg.Handoff = false
		c.send(e.peer, r.msg)
		r.msg = nil
	default:
		r.state, r.source, r.sourceBlocks = prefilling, e, n
		r.summary.Prefill, r.summary.PrefillRoute, r.summary.Dispatched = e.reg.Name, d, c.now
		r.msg.Handoff = true
		c.send(e.peer, r.msg)
	}
}

func (c *Core) sendWithKV(r *request) {
	source := r.source.reg
	c.send(r.owner.peer, &wire.SubmitRequestWithKV{
		ID: r.id, Prompt: r.msg.Prompt, Sampling: r.msg.Sampling, Session: r.msg.Session, Salt: r.msg.Salt,
		Generated: r.generated,
		Source: wire.Source{
			Engine: source.Name, Incarnation: source.Incarnation, Ranks: source.Ranks, Export: *r.export,
		},
	})
	r.msg, r.generated = nil, nil
}

// releaseSource gives back what the prefill engine holds for a request, if it still does.
func (c *Core) releaseSource(r *request) {
	e := r.source
	if e == nil {
		return
	}
	if r.export != nil {
		c.send(e.peer, &wire.ReleaseKV{ID: r.id, Handoff: r.export.Handoff})
	}
	c.freeSource(r)
}

func (c *Core) freeSource(r *request) {
	if e := r.source; e != nil {
		r.source = nil
		c.free(e, r.sourceBlocks)
	}
}

func (c *Core) freeOwner(r *request) {
	if e := r.owner; e != nil {
		r.owner = nil
		c.free(e, r.ownerBlocks)
	}
}

func (c *Core) free(e *engine, blocks int) {
	e.requests--
	e.blocks -= blocks
	c.closeDrained(e)
}

// tell ends a request for its client with m, whose ID is the client's. Nothing is sent when m is nil
// (the results of a reply are sent together) or the client has left.
func (c *Core) tell(r *request, outcome, message string, m wire.Message) {
	if r.closed {
		return
	}
	r.closed = true
	delete(r.client.requests, r.clientID)
	if m != nil && c.peers[r.client.id] == r.client {
		c.send(r.client, m)
	}
	s := &r.summary
	s.Outcome, s.Message, s.Ended = outcome, message, c.now
	c.act(Action{Kind: End, Summary: s})
}

// finish ends a request that was aborted.
func (c *Core) finish(r *request, message string) {
	c.tell(r, wire.FinishAbort, message, &wire.RequestAborted{ID: r.clientID, SourceSafe: true})
}

// fail ends a request with an error.
func (c *Core) fail(r *request, err *wire.RequestError) {
	err.ID = r.clientID
	c.tell(r, err.Code, err.Message, err)
}

// forget drops a request once its client knows its end and no engine holds anything of it.
func (c *Core) forget(r *request) {
	if r.closed && r.source == nil && r.owner == nil {
		delete(c.requests, r.id)
	}
}

func invalid(field, format string, args ...any) *wire.RequestError {
	return &wire.RequestError{Code: wire.CodeInvalid, Field: field, Message: fmt.Sprintf(format, args...), SourceSafe: true}
}

func unavailable(format string, args ...any) *wire.RequestError {
	return &wire.RequestError{Code: wire.CodeUnavailable, Message: fmt.Sprintf(format, args...), Retryable: true, SourceSafe: true}
}

func internal(format string, args ...any) *wire.RequestError {
	return &wire.RequestError{Code: wire.CodeInternal, Message: fmt.Sprintf(format, args...), SourceSafe: true}
}
