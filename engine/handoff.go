package engine

import (
	"time"

	"baton/handoff"
	"baton/wire"
)

// step gives the handoff one event and passes on what it orders.
func (c *Core) step(now time.Time, event handoff.Event) {
	if c.handoff == nil {
		return
	}
	for _, action := range c.handoff.Step(now, event) {
		switch a := action.(type) {
		case handoff.Offer:
			c.offer(a)
		case handoff.Admit:
			c.admitting = append(c.admitting, a)
		case handoff.Send:
			c.relay(a.Message)
		default:
			c.act(Transfer{action})
		}
	}
	for _, q := range c.handoff.Quarantines() {
		c.act(Quarantined{q})
	}
}

// export retains a prompt whose first token is sampled. Its reply waits until the blocks can be read.
func (c *Core) export(now time.Time, p Prefilled) {
	c.offers[p.ID] = p.Result
	c.step(now, handoff.Retain{ID: p.ID, Table: p.Table, Tokens: p.Tokens, Capability: c.capability(), Lease: c.config.ExportLease})
}

// offer sends the reply that ends a prefill leg.
func (c *Core) offer(o handoff.Offer) {
	result := c.offers[o.ID]
	delete(c.offers, o.ID)
	result.Export = o.Export
	c.send(&wire.EngineReply{Results: []wire.Result{result}})
}

// relay sends a message of the handoff.
func (c *Core) relay(m wire.Message) {
	switch m := m.(type) {
	case *wire.RequestError:
		delete(c.offers, m.ID)
		c.act(Handed{Result: "failed", Code: m.Code})
		if m.Code == wire.CodeCorrupt {
			c.warn("%s", m.Message)
		}
	case *wire.RequestAborted:
		delete(c.offers, m.ID)
		c.act(Handed{Result: "aborted"})
	}
	c.send(m)
}

// startImport begins the decode leg.
func (c *Core) startImport(now time.Time, m *wire.SubmitRequestWithKV) {
	if c.config.Role != wire.RoleDecode {
		c.send(refusal(m.ID, "", "%s is a %s engine: it takes no handoffs", c.config.Name, c.config.Role))
		return
	}
	if c.holds(m.ID) {
		c.warn("request %d arrived again while it runs", m.ID)
		return
	}
	r, refused := newRequest(&wire.SubmitRequest{
		ID: m.ID, Prompt: m.Prompt, Sampling: m.Sampling, Session: m.Session, Salt: m.Salt,
	}, c.sched.limits(), now)
	if refused != nil {
		c.send(refused)
		return
	}
	t, err := c.templates.from(m.Source.Ranks)
	if err != nil {
		c.send(refusal(m.ID, "source", "the KV at %s cannot be copied: %v", m.Source.Engine, err))
		return
	}
	c.step(now, handoff.Import{
		Message: m, Version: c.config.Version, Capacity: r.capacity(),
		Reserve:  c.sched.config.reserve(len(m.Prompt) + len(m.Generated)),
		Template: t.blocks, Checksums: t.checksums,
	})
}

// holds reports whether a request runs or waits for admission. The handoff knows those before that.
func (c *Core) holds(id uint64) bool {
	for _, a := range c.admitting {
		if a.Message.ID == id {
			return true
		}
	}
	return c.sched.Has(id)
}

// admit puts imported requests into the batch as far as it has room.
func (c *Core) admit(now time.Time) {
	for len(c.admitting) > 0 && c.sched.CanAdmit() {
		a := c.admitting[0]
		c.admitting = c.admitting[1:]
		a.Stats.Handoff = now.Sub(a.Arrived).Seconds()
		c.act(Handed{Result: "done", Stats: a.Stats})
		out, refused := c.sched.Admit(now, Import{Submit: a.Message, Table: a.Table, Stats: a.Stats, Arrived: a.Arrived})
		if refused != nil {
			c.send(refused)
			continue
		}
		c.publish(now, out)
	}
}

// giveBack returns the last of the imports that wait for admission, to make room for a running request.
func (c *Core) giveBack() {
	last := len(c.admitting) - 1
	a := c.admitting[last]
	c.admitting = c.admitting[:last]
	a.Table.Close()
	c.returned++
	a.Stats.Engine, a.Stats.Evictions = c.config.Name, 1
	c.send(&wire.EngineReply{Results: []wire.Result{{
		ID: a.Message.ID, Start: len(a.Message.Generated), Finish: wire.FinishEvicted, StopToken: -1, Stats: &a.Stats,
	}}})
}
