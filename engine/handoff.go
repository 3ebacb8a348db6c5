package engine

import (
	crand "crypto/rand"
	"errors"
	"net"
	"time"

	"baton/handoff"
	"baton/layout"
	"baton/transfer"
	"baton/transfer/backends"
	"baton/wire"
)

// openHandoff opens the transfer backend on the pool's memory and compiles the copy template. Peers have
// the same geometry (the coordinator checks it), so one template serves all of them.
func (e *Engine) openHandoff() error {
	c := e.config
	endpoint, err := backends.Open(c.Transport, e.memory, backends.Options{Listen: net.JoinHostPort(c.TransferHost, "0")})
	if err != nil {
		return err
	}
	e.endpoint = endpoint
	_, push := endpoint.(transfer.Pusher)
	if e.template, err = c.template(); err != nil {
		return err
	}
	e.handoff, err = handoff.New(handoff.Config{Pool: e.pool, BlockBytes: []int64{c.blockBytes()}, Push: push})
	return err
}

// template is the copy from one engine of this geometry to another.
func (c Config) template() (*layout.Template, error) {
	spec := c.Checkpoint.Spec
	g := layout.Geometry{
		BlockSize: c.BlockSize, Layers: spec.Layers, KVHeads: spec.KVHeads, HeadDim: spec.HeadDim,
		Planes: 2, ElementBytes: c.KVType.BlockBytes(),
	}
	holdings, err := g.Holdings(1, []int{spec.Layers})
	if err != nil {
		return nil, err
	}
	return layout.Compile(g, holdings, holdings)
}

// export retains a prompt whose first token is sampled. Its reply waits until the blocks can be read.
func (e *Engine) export(p Prefilled) {
	e.offers[p.ID] = p.Result
	capability := make([]byte, 16)
	_, _ = crand.Read(capability) // never fails: it ends the process instead
	e.step(handoff.Retain{ID: p.ID, Table: p.Table, Tokens: p.Tokens, Capability: capability})
}

// startImport begins the decode leg.
func (e *Engine) startImport(m *wire.SubmitRequestWithKV) {
	if e.config.Role != wire.RoleDecode {
		e.send(refusal(m.ID, "", "%s is a %s engine: it takes no handoffs", e.config.Name, e.config.Role))
		return
	}
	r, refused := newRequest(&wire.SubmitRequest{
		ID: m.ID, Prompt: m.Prompt, Sampling: m.Sampling, Session: m.Session, Salt: m.Salt,
	}, e.sched.limits(), time.Now())
	if refused != nil {
		e.send(refused)
		return
	}
	e.step(handoff.Import{Message: m, Version: weightVersion, Capacity: r.capacity(), Template: e.template})
}

// step gives the handoff one event and carries out what it orders.
func (e *Engine) step(event handoff.Event) {
	queue := e.handoff.Step(time.Now(), event)
	for len(queue) > 0 {
		action := queue[0]
		queue = queue[1:]
		if answer := e.act(action); answer != nil {
			queue = append(queue, e.handoff.Step(time.Now(), answer)...)
		}
	}
}

// act carries out one order. The answer, if it is known at once, is the next event.
func (e *Engine) act(action handoff.Action) handoff.Event {
	switch a := action.(type) {
	case handoff.OpenExport:
		return handoff.Opened{Handoff: a.Handoff, Rank: a.Rank, Err: e.puller().Export(a.Handoff, a.Capability, ranges(a.Ranges))}
	case handoff.Revoke:
		return handoff.Revoked{Handoff: a.Handoff, Rank: a.Rank, Quiesced: e.puller().Revoke(a.Handoff)}
	case handoff.Offer:
		e.offer(a)
	case handoff.StartPull:
		h, err := e.puller().Pull(e.lifetime, a.Peer, a.Handoff, a.Capability, copies(a.Copies))
		return e.started(a.Transfer, h, err)
	case handoff.StartPush:
		h, err := e.pusher().Push(e.lifetime, a.Peer, a.Tag, copies(a.Copies))
		return e.started(a.Transfer, h, err)
	case handoff.Expect:
		tag, h, err := e.pusher().Expect(e.lifetime, ranges(a.Ranges))
		if err == nil {
			e.started(a.Transfer, h, nil)
		}
		return handoff.Expected{Transfer: a.Transfer, Tag: tag, Err: err}
	case handoff.Cancel:
		if h := e.transfers[a.Transfer]; h != nil {
			h.Cancel()
		}
	case handoff.Recheck:
		if h := e.transfers[a.Transfer]; h != nil {
			return e.settlement(a.Transfer, h)
		}
	case handoff.Admit:
		e.admitting = append(e.admitting, a)
	case handoff.Send:
		e.relay(a.Message)
	}
	return nil
}

func (e *Engine) puller() transfer.Puller { return e.endpoint.(transfer.Puller) }
func (e *Engine) pusher() transfer.Pusher { return e.endpoint.(transfer.Pusher) }

// offer sends the reply that ends a prefill leg.
func (e *Engine) offer(o handoff.Offer) {
	result := e.offers[o.ID]
	delete(e.offers, o.ID)
	result.Export = o.Export
	e.send(&wire.EngineReply{Results: []wire.Result{result}})
}

// relay sends a message of the handoff and counts how handoffs end.
func (e *Engine) relay(m wire.Message) {
	switch m := m.(type) {
	case *wire.RequestError:
		delete(e.offers, m.ID)
		e.metrics.handoffEnded("failed")
	case *wire.RequestAborted:
		delete(e.offers, m.ID)
		e.metrics.handoffEnded("aborted")
	}
	e.send(m)
}

// started follows a transfer until it settles. It answers only when it could not start.
func (e *Engine) started(id uint64, h transfer.Handle, err error) handoff.Event {
	if err != nil {
		return handoff.Settled{Transfer: id, Err: err, Safe: true}
	}
	e.transfers[id] = h
	e.workers.Go(func() {
		<-h.Settled()
		select {
		case e.settled <- id:
		case <-e.lifetime.Done():
		}
	})
	return nil
}

// transferSettled reports the end of a transfer to the handoff.
func (e *Engine) transferSettled(id uint64) {
	if h := e.transfers[id]; h != nil {
		if event := e.settlement(id, h); event != nil {
			e.step(event)
		}
	}
}

// settlement is what a poll of a transfer means to the handoff; nil while it runs.
func (e *Engine) settlement(id uint64, h transfer.Handle) handoff.Event {
	s := h.Poll()
	if s.State == transfer.Running {
		return nil
	}
	event := handoff.Settled{Transfer: id, Bytes: s.Bytes, Safe: s.State != transfer.Unsafe}
	if s.State != transfer.Done {
		event.Err = s.Err
		if event.Err == nil {
			event.Err = errors.New("the transfer was cancelled")
		}
	}
	if event.Safe {
		delete(e.transfers, id)
	}
	return event
}

// poll makes time pass for the handoff.
func (e *Engine) poll() {
	if e.handoff != nil {
		e.step(handoff.Poll{})
	}
}

// admit puts imported requests into the batch as far as it has room.
func (e *Engine) admit() {
	for len(e.admitting) > 0 && e.sched.CanAdmit() {
		a := e.admitting[0]
		e.admitting = e.admitting[1:]
		now := time.Now()
		a.Stats.Handoff = now.Sub(a.Arrived).Seconds()
		e.metrics.handedOff(a.Stats)
		out, refused := e.sched.Admit(now, Import{Submit: a.Message, Table: a.Table, Stats: a.Stats, Arrived: a.Arrived})
		if refused != nil {
			e.send(refused)
			continue
		}
		e.publish(out)
	}
}

// sendKV starts a push to a decode engine that is ready.
func (e *Engine) sendKV(m *wire.SendKV) {
	if e.handoff != nil {
		e.step(handoff.Push{Message: m, Template: e.template})
	}
}

// releaseKV ends an export.
func (e *Engine) releaseKV(m *wire.ReleaseKV) {
	if e.handoff != nil {
		e.step(handoff.Release{ID: m.ID, Handoff: m.Handoff})
	}
}

// abortHandoff cancels a request that the handoff or the admission queue holds.
func (e *Engine) abortHandoff(id uint64) {
	if e.handoff == nil {
		return
	}
	for i, a := range e.admitting {
		if a.Message.ID == id {
			a.Table.Close()
			e.admitting = append(e.admitting[:i:i], e.admitting[i+1:]...)
			e.send(&wire.RequestAborted{ID: id, SourceSafe: true})
			return
		}
	}
	e.step(handoff.Abort{ID: id})
}

// abandon drops everything when the connection is gone: nobody is left to tell.
func (e *Engine) abandon() {
	for _, a := range e.admitting {
		a.Table.Close()
	}
	e.admitting = nil
	for _, id := range e.sched.IDs() {
		e.sched.Abort(id)
	}
	if e.passing {
		p := <-e.done
		e.passing = false
		if p.err == nil {
			e.drop(e.sched.Apply(time.Now(), p.plan, p.outputs))
		}
	}
	if e.handoff != nil {
		e.step(handoff.Abandon{})
	}
	clear(e.offers)
	e.gauge()
}

// drop gives back the tables of prompts that finished with nobody left to take them.
func (e *Engine) drop(out Outcome) {
	for _, p := range out.Exports {
		p.Table.Close()
	}
}

func copies(from []layout.Copy) []transfer.Copy {
	to := make([]transfer.Copy, len(from))
	for i, c := range from {
		to[i] = transfer.Copy(c)
	}
	return to
}

func ranges(from []handoff.Range) []transfer.Range {
	to := make([]transfer.Range, len(from))
	for i, r := range from {
		to[i] = transfer.Range(r)
	}
	return to
}
