package leg

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"baton/wire"
)

// The reader's side: generation legs, until they have their KV.

// read is the way of a generation leg's KV to this process's engine.
type read struct {
	source   *source
	begun    bool // the claim was granted, and the engine knows the request
	pushed   bool // the source was told to send
	lost     bool // the link is gone: nothing more can be said to the source
	lease    time.Duration
	renew    time.Time // when the lease is to begin anew; zero before the claim is granted
	deadline time.Time // of the source's answer, or of the engine's word about a copy whose source is gone
}

// source is an engine that this process reads from, at the other end of a link.
type source struct {
	address string
	reads   int
	idle    time.Time // since when there are none
}

// stateField names the field of clients that holds a state.
const stateField = "disaggregated_params.encoded_opaque_state"

// fieldOfState translates what an engine calls the source of an import.
func fieldOfState(field string) string {
	if field == "source" {
		return stateField
	}
	return field
}

// checkGeneration refuses a generation leg that can never work. One whose tokens are all there already needs no KV: it
// is done.
func (c *Core) checkGeneration(r *request) (done bool, err *RequestError) {
	job, reg := &r.job, r.group.reg
	first, sampling := &job.First, &job.Request.Sampling
	switch {
	case len(first.Tokens) == 0:
		return false, invalid("disaggregated_params.first_gen_tokens", "first_gen_tokens is empty; the context leg's answer has at least one")
	case sampling.MaxTokens > 0 && len(first.Tokens) >= sampling.MaxTokens:
		res := c.firstResult(r)
		res.Finish = wire.FinishLength
		c.act(Deliver{ID: r.id, Result: res, Group: r.group.number, End: true})
		return true, nil
	case job.State == nil:
		return false, invalid(stateField, "encoded_opaque_state is missing; the context leg's answer has it, unless the request ended with that leg")
	}
	return false, checkState(job, reg)
}

// checkState refuses a state that this engine cannot take over, or that is another request's.
func checkState(job *Job, reg *wire.RegisterRole) *RequestError {
	s := job.State
	prompt, tokens := len(job.Request.Prompt), len(job.Request.Prompt)+len(job.First.Tokens)-1
	if err := checkAddress(s); err != nil {
		return err
	}
	if field, theirs, ours := difference(s, reg); field != "" {
		return invalid(stateField, "%s is %v at the prefill engine %.40q and %v at this one; they must agree", field, theirs, s.Engine, ours)
	}
	switch {
	case s.WeightVersion != reg.WeightVersion:
		return gone("the KV was made by version %d of the weights, and this engine has version %d", s.WeightVersion, reg.WeightVersion)
	case s.Prompt != job.Prompt:
		return invalid("prompt", "the prompt, of %d tokens, or its cache_salt, is not the one whose KV the state names: send prompt_token_ids as the context leg returned them", prompt)
	case s.Export.Tokens != tokens:
		return invalid(stateField, "the state holds KV of %d tokens; the prompt and first_gen_tokens but for the last are %d", s.Export.Tokens, tokens)
	case job.Request.Sampling.PromptLogprobs && prompt > 1 && len(s.PromptLogprobs) != prompt-1:
		return invalid("prompt_logprobs", "the context leg was not asked for prompt_logprobs; both legs of a request must be")
	case len(s.Ranks) == 0 || len(s.Export.Blocks) > math.MaxInt32/max(reg.Geometry.BlockSize, 1):
		return invalid(stateField, "the state describes no memory")
	}
	return nil
}

// maxAddress bounds addresses and names, in bytes.
const maxAddress = 256

// difference says in what two engines differ that cannot hand over to each other, in words that a user can change.
func difference(s *wire.KVState, reg *wire.RegisterRole) (field string, theirs, ours any) {
	g, have := &s.Geometry, &reg.Geometry
	for _, x := range []struct {
		field        string
		theirs, ours any
	}{
		{"--model (its fingerprint)", fmt.Sprintf("%.12q", g.Model), fmt.Sprintf("%.12q", have.Model)},
		{"--block-size", g.BlockSize, have.BlockSize},
		{"the number of layers", g.Layers, have.Layers},
		{"the number of KV heads", g.KVHeads, have.KVHeads},
		{"the head dimension", g.HeadDim, have.HeadDim},
		{"the number of KV planes", g.Planes, have.Planes},
		{"--kv-dtype", fmt.Sprintf("%.12s", g.KVDType), have.KVDType},
		{"the vocabulary", g.VocabSize, have.VocabSize},
		{"--verify-handoff", fmt.Sprintf("%.12s", cmp.Or(g.VerifyHandoff, "off")), cmp.Or(have.VerifyHandoff, "off")},
		{"--transfer", fmt.Sprintf("%.12s", s.Transport), reg.Transport},
		{"--logprobs", fmt.Sprintf("%.12s", cmp.Or(s.Logprobs, "raw")), cmp.Or(reg.Logprobs, "raw")},
	} {
		if x.theirs != x.ours {
			return x.field, x.theirs, x.ours
		}
	}
	if g.Model != have.Model {
		return "--model (its fingerprint)", "another", have.Model
	}
	return "", nil, nil
}

// claim asks the source for its KV.
func (c *Core) claim(r *request) {
	s := r.job.State
	src := c.sources[s.Address]
	if src == nil {
		src = &source{address: s.Address}
		c.sources[s.Address] = src
	}
	src.reads++
	r.read = &read{source: src, deadline: c.now.Add(c.cfg.ClaimWait)}
	c.reading[r.id] = r
	c.ask(r, &wire.ClaimKV{ID: r.id, Incarnation: s.Incarnation, Request: s.Request, Capability: s.Export.Capability, State: r.job.Digest})
}

func (c *Core) ask(r *request, m wire.Message) {
	if !r.read.lost {
		c.act(Ask{r.read.source.address, m})
	}
}

// sourceSaid takes a message of an engine that this process reads from.
func (c *Core) sourceSaid(address string, m wire.Message) {
	var id uint64
	switch m := m.(type) {
	case *wire.ClaimAck:
		id = m.ID
	case *wire.RequestError:
		id = m.ID
	default:
		c.warn("ignored %v from %s", m.Header(), address)
		return
	}
	r := c.reading[id]
	if r == nil || r.read.source.address != address {
		return // it is over
	}
	switch m := m.(type) {
	case *wire.ClaimAck:
		c.granted(r, m)
	case *wire.RequestError:
		c.lostSource(r, &RequestError{Code: sourceCode(m.Code), Message: m.Message, Retryable: true})
	}
}

// sourceCode keeps to the codes that a source may end a read with.
func sourceCode(code string) string {
	switch code {
	case wire.CodeGone, wire.CodeUnavailable, wire.CodeInternal:
		return code
	}
	return wire.CodeUnavailable
}

// granted starts the import.
func (c *Core) granted(r *request, m *wire.ClaimAck) {
	if r.read.begun || r.closed {
		return
	}
	r.read.begun, r.read.deadline = true, time.Time{}
	r.read.lease = min(m.Lease, maxLease)
	c.renewLater(r)
	job := &r.job
	s := job.State
	c.tell(r.group, &wire.SubmitRequestWithKV{
		ID: r.id, Prompt: job.Request.Prompt, Sampling: job.Request.Sampling, Session: job.Request.Session, Salt: job.Request.Salt,
		Generated: job.First.Tokens,
		Source:    wire.Source{Engine: s.Engine, Incarnation: s.Incarnation, Ranks: s.Ranks, Export: s.Export},
		Trace:     job.Request.Trace,
	})
}

// Bounds of leases that a source may grant, for the times of renewals.
const (
	maxLease = 24 * time.Hour
	minRenew = 10 * time.Millisecond
)

// renewLater sets the next renewal: three a lease. A source without leases needs none.
func (c *Core) renewLater(r *request) {
	r.read.renew = time.Time{}
	if r.read.lease > 0 {
		r.read.renew = c.now.Add(max(r.read.lease/3, minRenew))
	}
}

// transferReady passes the engine's destinations on to the source, which pushes into them.
func (c *Core) transferReady(g *group, m *wire.KVTransferReady) {
	r := c.reading[m.ID]
	if r == nil || r.group != g || !r.read.begun || r.read.pushed || r.closed {
		return // it was told to abort
	}
	r.read.pushed = true
	if r.read.lost {
		c.lostSource(r, sourceUnreachable(r, nil))
		return
	}
	c.ask(r, &wire.SendKV{ID: r.id, CachedBlocks: m.CachedBlocks, Blocks: m.Blocks, Tag: m.Tag, Ranks: g.reg.Ranks})
}

// readDone takes the engine's word that it has everything: the client gets the first tokens, and the source may go.
func (c *Core) readDone(id uint64) {
	r := c.reading[id]
	if r == nil {
		return
	}
	c.stats.Read++
	c.release(r)
	if !r.closed {
		c.act(Deliver{ID: r.id, Result: c.firstResult(r), Group: r.group.number})
	}
}

// firstResult is what the context leg found out.
func (c *Core) firstResult(r *request) wire.Result {
	res := r.job.First
	res.ID, res.Start, res.StopToken, res.PromptTokens = r.id, 0, -1, r.tokens
	if s := r.job.State; s != nil {
		res.PromptLogprobs, res.PromptTop, res.Stats = s.PromptLogprobs, s.PromptTop, s.Stats
	}
	return res
}

// release ends a read whose source nobody needs any more, because the KV is here or the client is gone.
func (c *Core) release(r *request) { c.endRead(r, &wire.KVReadDone{ID: r.id}) }

// leaveSource ends a read that failed: the source is left to its lease, and to another try. If there will be none, and
// nothing touches its memory any more, it is released.
func (c *Core) leaveSource(r *request, safe bool) {
	if r.job.Once && safe {
		c.release(r)
		return
	}
	c.endRead(r, &wire.AbortRequest{ID: r.id})
}

// giveUp releases the source of a generation leg that was refused, if nobody will try again. Links that are not there are
// opened for so many only.
func (c *Core) giveUp(id uint64, job Job) {
	s := job.State
	if job.Kind != Generation || !job.Once || s == nil || checkAddress(s) != nil || c.sources[s.Address] == nil && len(c.sources) >= c.cfg.Requests {
		return
	}
	r := &request{id: id, job: job}
	c.claim(r)
	c.release(r)
}

// checkAddress refuses a state that does not say which engine to ask.
func checkAddress(s *wire.KVState) *RequestError {
	switch {
	case s.Format != wire.KVStateFormat:
		return invalid(stateField, "the state has format %d, and this engine reads %d: run the same release on both", s.Format, wire.KVStateFormat)
	case len(s.Address) == 0 || len(s.Address) > maxAddress || len(s.Engine) > maxAddress:
		return invalid(stateField, "the state does not say where its KV is")
	}
	return nil
}

func (c *Core) endRead(r *request, say wire.Message) {
	if r.read == nil {
		return
	}
	c.ask(r, say)
	delete(c.reading, r.id)
	s := r.read.source
	r.read = nil
	if s.reads--; s.reads == 0 {
		s.idle = c.now
	}
}

// lostSource ends a generation leg whose KV is not to be had.
func (c *Core) lostSource(r *request, err *RequestError) {
	c.stats.Lost++
	begun := r.read.begun
	c.leaveSource(r, !begun)
	c.fail(r, err)
	if begun {
		c.tell(r.group, &wire.AbortRequest{ID: r.id})
	} else {
		c.end(r)
	}
}

func sourceUnreachable(r *request, err error) *RequestError {
	why := ""
	if err != nil {
		why = fmt.Sprintf(" (%v)", err)
	}
	return unavailable("the prefill engine %.80q at %s is not reached%s: prefill again", r.job.State.Engine, r.job.State.Address, why)
}

// sourceGone takes the loss of a link. A copy under way may still come to its end: the engine says.
func (c *Core) sourceGone(address string, err error) {
	if s := c.sources[address]; s == nil {
		return
	}
	for _, r := range sorted(c.reading) {
		if r.read.source.address != address || r.read.lost {
			continue
		}
		r.read.lost, r.read.renew = true, time.Time{}
		if !r.read.begun {
			c.lostSource(r, sourceUnreachable(r, err))
		} else {
			r.read.deadline = c.now.Add(c.cfg.Verdict)
		}
	}
	delete(c.sources, address)
}

// watch does what is due: renewals, the ends of waits, closing links that nothing uses.
func (c *Core) watch() {
	if at, ok := c.Deadline(); !ok || c.now.Before(at) {
		return
	}
	for _, r := range sorted(c.reading) {
		switch at := r.read; {
		case !at.deadline.IsZero() && !c.now.Before(at.deadline):
			c.lostSource(r, sourceUnreachable(r, nil))
		case !at.renew.IsZero() && !c.now.Before(at.renew):
			c.ask(r, &wire.RenewKV{ID: r.id})
			c.renewLater(r)
		}
	}
	for _, s := range sorted(c.sources) {
		if s.reads == 0 && !c.now.Before(s.idle.Add(c.cfg.IdleLink)) {
			delete(c.sources, s.address)
			c.act(HangUp{s.address})
		}
	}
}
