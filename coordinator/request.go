package coordinator

import (
	"fmt"
	"slices"
	"time"

	"baton/kvcache"
	"baton/route"
	"baton/wire"
)

// state is how far a request has come.
type state uint8

const (
	queued     state = iota // waits for an engine that runs its prompt
	prefilling              // its prompt runs
	exported                // waits for a decode engine, which takes its KV from source
	decoding                // runs to its end, after reading its KV while source is set
)

// request is one request from its arrival until its client knows its end and nothing of it is left on any
// engine.
type request struct {
	id       uint64
	client   *peer
	clientID uint64
	msg      *wire.SubmitRequest // the client's; nil once it is closed
	tokens   wire.Tokens         // that the client has, those it resumed from included

	state     state
	aborting  bool // to end, at the client's wish, as soon as its engine confirms
	closed    bool // the client was told how it ended
	announced bool // the client has what is reported once, of the prompt

	run    *leg // the leg that computes, or is about to
	source *leg // the leg whose KV run reads, or a later leg would
	legs   int  // all of them

	prefilled, decoded bool // legs of the role have begun

	avoid    []*engine // that failed it
	failures int       // in a row, reported by engines
	killed   []uint64  // in a row, incarnations of engines that died while they ran nothing else
	lost     string    // the engine that died with it, and why

	prompt, context, maxTokens int // lengths of the prompt, of it and tokens; limit of new ones
	digests                    []kvcache.Digest
	digestSize                 int       // block size that digests are made for
	checked                    uint64    // fleet.change at the last validation
	accepted                   bool      // a complete fleet could have run it
	misfit                     time.Time // since when no engine is large enough; zero when one is

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
		id: c.nextID, client: p, clientID: m.ID, msg: m, tokens: slices.Clip(m.Resume),
		prompt: len(m.Prompt), context: len(m.Prompt) + len(m.Resume), maxTokens: m.Sampling.MaxTokens,
		queuedAt: c.now,
	}
	if len(m.Resume) == 0 { // the digests are the prompt's alone
		r.digests, r.digestSize = ev.Digests, ev.BlockSize
	}
	r.summary = Summary{ID: r.id, ClientID: r.clientID, Client: p.hello.Name, PromptTokens: r.prompt, Submitted: c.now, Trace: r.msg.Trace}
	p.requests[m.ID] = r
	c.requests[r.id] = r
	c.held += r.context
	if err := c.refusal(r); err != nil {
		c.fail(r, err)
		return
	}
	r.checked, r.accepted = c.fleet.change, c.complete()
	c.entry.queue.push(r)
	c.dispatch()
}

// refusal says why a request cannot even wait, nil when it can.
func (c *Core) refusal(r *request) *wire.RequestError {
	n := len(r.msg.Prompt)
	switch {
	case c.phase >= draining:
		return unavailable("%v", errStopping)
	case n == 0:
		return invalid("prompt", "the prompt is empty")
	case n > c.cfg.MaxPrompt:
		return invalid("prompt", "the prompt has %d tokens; this deployment accepts up to %d", n, c.cfg.MaxPrompt)
	case c.entry.queue.length >= c.cfg.Queue:
		return unavailable("%d requests wait already, as many as may; try again later", c.cfg.Queue)
	case c.held > c.cfg.HeldTokens:
		return unavailable("running requests have %d tokens already, of %d that may be held; try again later",
			c.held-r.context, c.cfg.HeldTokens)
	}
	return c.check(r)
}

// check says why the fleet as it is now can never run a request; nil when it can, or when engines are
// lacking, which may still come.
func (c *Core) check(r *request) *wire.RequestError {
	if n := c.fleet.maxSeqLen; n > 0 && r.context > n {
		return invalid("prompt", "the prompt has %d tokens; the context length is %d", r.context, n)
	} else if least := r.msg.Sampling.MinTokens; n > 0 && r.prompt+least > n {
		return invalid("min_tokens", "the prompt has %d tokens and min_tokens asks for %d more; the context length is %d", r.prompt, least, n)
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

// reserve is how many of them to set aside when a leg begins there: no more than the engine itself does.
func (c *Core) reserve(r *request, e *engine) int {
	n := c.need(r, e)
	if k := e.reg.Continuation; k > 0 && e.reg.Role != wire.RolePrefill {
		n = min(n, blocks(r.context, e.reg.Geometry.BlockSize)+k)
	}
	return n
}

// widen lets what is set aside for a leg follow the tokens that came, as far as the engine has blocks.
// Beyond that the engine itself makes its requests wait, or gives some back.
func (c *Core) widen(l *leg) {
	if e := l.engine; e.reg.Continuation > 0 {
		more := min(c.reserve(l.r, e)-l.blocks, e.reg.Blocks-e.blocks)
		if more > 0 && e.reg.Role != wire.RolePrefill {
			l.blocks += more
			e.blocks += more
		}
	}
}

// start sends a request to the engine that was chosen for its next leg.
func (c *Core) start(r *request, e *engine, d route.Decision) {
	l := c.begin(r, e, d)
	r.run = l
	s := &r.summary
	if r.state == exported {
		r.state = decoding
		l.source = r.source
		r.source.readers++
		s.Decode, s.DecodeRoute, s.Bound = e.reg.Name, d, c.now
		c.sendWithKV(r)
		return
	}
	handoff := e.reg.Role == wire.RolePrefill
	if handoff {
		r.state = prefilling
		s.Prefill, s.PrefillRoute = e.reg.Name, d
	} else {
		r.state = decoding
		s.Decode, s.DecodeRoute = e.reg.Name, d
	}
	if s.Dispatched.IsZero() {
		s.Dispatched = c.now
	}
	m := &wire.SubmitRequest{
		ID: l.id, Prompt: r.msg.Prompt, Sampling: r.msg.Sampling, Session: r.msg.Session, Salt: r.msg.Salt,
		Handoff: handoff, Resume: slices.Clip(r.tokens), Trace: r.msg.Trace,
	}
	if r.announced {
		m.Sampling.PromptLogprobs, m.Sampling.PromptTopLogprobs = false, 0
	}
	c.send(e.peer, m)
}

func (c *Core) sendWithKV(r *request) {
	source := r.source.engine.reg
	c.send(r.run.engine.peer, &wire.SubmitRequestWithKV{
		ID: r.run.id, Prompt: r.msg.Prompt, Sampling: r.msg.Sampling, Session: r.msg.Session, Salt: r.msg.Salt,
		Generated: slices.Clip(r.tokens),
		Source: wire.Source{
			Engine: source.Name, Incarnation: source.Incarnation, Ranks: source.Ranks, Export: *r.source.export,
		},
		Trace: r.msg.Trace,
	})
}

// tell ends a request for its client with m, whose ID is the client's. Nothing is sent when m is nil
// (the results of a reply are sent together) or the client has left.
func (c *Core) tell(r *request, outcome, message string, m wire.Message) {
	if r.closed {
		return
	}
	r.closed = true
	delete(r.client.requests, r.clientID)
	if m != nil {
		c.flush() // tokens come before the end
		if c.peers[r.client.id] == r.client {
			c.send(r.client, m)
		}
	}
	s := &r.summary
	s.Outcome, s.Message, s.Ended = outcome, message, c.now
	c.act(Action{Kind: End, Summary: s})
	c.held -= r.context
	r.msg, r.tokens, r.digests, r.avoid = nil, nil, nil, nil
	c.forget(r)
}

// finish ends a request that was aborted.
func (c *Core) finish(r *request, message string) {
	c.tell(r, wire.FinishAbort, message, &wire.RequestAborted{ID: r.clientID, SourceSafe: true})
}

// fail ends a request with an error.
func (c *Core) fail(r *request, err *wire.RequestError) {
	err.ID, err.Reader = r.clientID, 0
	c.tell(r, err.Code, err.Message, err)
}

// forget drops a request once its client knows its end and no engine holds anything of it.
func (c *Core) forget(r *request) {
	if r.closed && r.legs == 0 {
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
	return &wire.RequestError{Code: wire.CodeInternal, Message: fmt.Sprintf(format, args...), Retryable: true, SourceSafe: true}
}
