package leg

import (
	"crypto/sha256"
	"crypto/subtle"

	"baton/wire"
)

// The source's side: what context legs leave, and who reads it.

// export is a prompt's KV that an engine of this process holds for a reader.
type export struct {
	id      uint64 // of the request
	group   *group
	handoff uint64
	secret  []byte
	digest  [32]byte // of the state
	claims  int
	read    bool // somebody has all of it
}

// claim is a reader of an export. The engine knows it by its number.
type claim struct {
	claimKey
	number uint64
	export *export
}

// claimKey is how a reader names its claim.
type claimKey struct{ link, id uint64 }

// maxClaims bounds the readers of one export. One is the rule, and another when that one has trouble.
const maxClaims = 16

// MaxState bounds an encoded state, in bytes.
const MaxState = 8 << 20

// exported takes the reply that ends a context leg which left something.
func (c *Core) exported(r *request, res *wire.Result) {
	defer c.end(r)
	x := &export{id: r.id, group: r.group, handoff: res.Export.Handoff, secret: res.Export.Capability}
	if r.closed {
		c.tell(x.group, &wire.ReleaseKV{ID: x.id, Handoff: x.handoff})
		return
	}
	state, err := wire.Encode(c.state(r, res))
	if err != nil || len(state) > MaxState {
		c.tell(x.group, &wire.ReleaseKV{ID: x.id, Handoff: x.handoff})
		if err != nil {
			c.fail(r, &RequestError{Code: wire.CodeInternal, Message: err.Error()})
		} else {
			c.fail(r, invalid("prompt_logprobs", "what this leg would leave for the next takes %d bytes, of %d that it may; ask for fewer prompt_logprobs", len(state), MaxState))
		}
		return
	}
	x.digest = sha256.Sum256(state)
	c.exports[x.id] = x
	x.group.exports++
	c.stats.Exported++
	res.Export, res.Finish = nil, FinishNotFinished
	r.closed = true
	c.act(Deliver{ID: r.id, Result: *res, State: state, Group: x.group.number, End: true})
}

// state is what the generation leg needs.
func (c *Core) state(r *request, res *wire.Result) *wire.KVState {
	reg := r.group.reg
	return &wire.KVState{
		Format: wire.KVStateFormat, Address: c.cfg.Address, Engine: reg.Name, Incarnation: c.cfg.Incarnation, Request: r.id,
		Geometry: reg.Geometry, Transport: reg.Transport, WeightVersion: reg.WeightVersion, Logprobs: reg.Logprobs, Ranks: reg.Ranks,
		Export: *res.Export, Prompt: r.job.Prompt,
		CachedTokens: res.CachedTokens, PromptLogprobs: res.PromptLogprobs, PromptTop: res.PromptTop, Stats: res.Stats,
	}
}

// discard drops an export whose state nobody has.
func (c *Core) discard(id uint64) {
	if x := c.exports[id]; x != nil && x.claims == 0 {
		c.free(x)
	}
}

// unwanted drops an export whose state is shown by somebody who has it and gives it up. Who reads it goes on.
func (c *Core) unwanted(e Release) {
	s := e.State
	if x := c.named(s.Request, s.Incarnation, s.Export.Capability, e.Digest); x != nil && x.claims == 0 {
		c.free(x)
	}
}

// named is the export of a request if whoever asks knows all that its state says; nil otherwise.
func (c *Core) named(request, incarnation uint64, capability []byte, digest [32]byte) *export {
	x := c.exports[request]
	if x == nil || incarnation != c.cfg.Incarnation || subtle.ConstantTimeCompare(x.secret, capability) != 1 ||
		subtle.ConstantTimeCompare(x.digest[:], digest[:]) != 1 {
		return nil
	}
	return x
}

// free lets the engine have the blocks back, once nothing reads them.
func (c *Core) free(x *export) {
	c.tell(x.group, &wire.ReleaseKV{ID: x.id, Handoff: x.handoff})
	c.stats.Released++
	c.forget(x)
}

func (c *Core) forget(x *export) {
	if c.exports[x.id] == x {
		delete(c.exports, x.id)
		x.group.exports--
	}
}

// exportFailed takes an engine's report about an export: a push that failed, or its end.
func (c *Core) exportFailed(x *export, m *wire.RequestError) {
	if m.Reader == 0 {
		if m.Code == wire.CodeGone {
			c.stats.Expired++
		}
		c.lose(x, m.Code, m.Message)
		return
	}
	for _, l := range c.claimsOf(x) {
		if l.number == m.Reader {
			c.act(Answer{l.link, &wire.RequestError{ID: l.id, Code: m.Code, Message: m.Message, Retryable: m.Retryable, SourceSafe: true}})
		}
	}
}

// lose forgets an export that is not there any more, and tells its readers.
func (c *Core) lose(x *export, code, message string) {
	for _, l := range c.claimsOf(x) {
		c.act(Answer{l.link, &wire.RequestError{ID: l.id, Code: code, Message: message, Retryable: true, SourceSafe: true}})
		delete(c.claims, l.claimKey)
	}
	c.forget(x)
}

// claimsOf lists an export's claims, in order of their numbers.
func (c *Core) claimsOf(x *export) []*claim {
	of := map[uint64]*claim{}
	for _, l := range c.claims {
		if l.export == x {
			of[l.number] = l
		}
	}
	return sorted(of)
}

// readerSaid takes a message of an engine that reads, or wants to.
func (c *Core) readerSaid(link uint64, m wire.Message) {
	switch m := m.(type) {
	case *wire.ClaimKV:
		c.claimed(link, m)
	case *wire.RenewKV:
		if l := c.claims[claimKey{link, m.ID}]; l != nil {
			c.tell(l.export.group, &wire.RenewKV{ID: l.export.id, Handoff: l.export.handoff})
		}
	case *wire.SendKV:
		if l := c.claims[claimKey{link, m.ID}]; l != nil {
			m.ID, m.Handoff, m.Reader = l.export.id, l.export.handoff, l.number
			c.tell(l.export.group, m)
		}
	case *wire.KVReadDone:
		c.endClaim(claimKey{link, m.ID}, true)
	case *wire.AbortRequest:
		c.endClaim(claimKey{link, m.ID}, false)
	default:
		c.warn("ignored %v over a link", m.Header())
	}
}

// claimed grants a claim or refuses it. A refusal does not tell which exports there are.
func (c *Core) claimed(link uint64, m *wire.ClaimKV) {
	x := c.named(m.Request, m.Incarnation, m.Capability, m.State)
	if key := (claimKey{link, m.ID}); x != nil && x.claims < maxClaims && c.claims[key] == nil {
		c.readers++
		c.claims[key] = &claim{claimKey: key, number: c.readers, export: x}
		x.claims++
		c.tell(x.group, &wire.RenewKV{ID: x.id, Handoff: x.handoff})
		c.act(Answer{link, &wire.ClaimAck{ID: m.ID, Lease: c.cfg.Lease}})
		return
	}
	c.stats.Refused++
	c.act(Answer{link, &wire.RequestError{
		ID: m.ID, Code: wire.CodeGone, Retryable: true, SourceSafe: true,
		Message: "the engine that the state is from does not hold that KV any more, or never held it as the state says",
	}})
}

// endClaim takes the end of a read. An export that was read is needed no more once nobody else reads it.
func (c *Core) endClaim(key claimKey, done bool) {
	l := c.claims[key]
	if l == nil {
		return
	}
	delete(c.claims, key)
	x := l.export
	x.claims--
	x.read = x.read || done
	if x.read && x.claims == 0 {
		c.free(x)
	}
}

// readerGone ends the claims of a link. What they read waits for others, or for the end of its lease.
func (c *Core) readerGone(link uint64) {
	of := map[uint64]claimKey{}
	for key := range c.claims {
		if key.link == link {
			of[key.id] = key
		}
	}
	for _, key := range sorted(of) {
		c.endClaim(key, false)
	}
}
