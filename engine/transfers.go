package engine

import (
	crand "crypto/rand"
	"errors"
	"net"

	"baton/compute"
	"baton/handoff"
	"baton/layout"
	"baton/transfer"
	"baton/transfer/backends"
)

// openTransfers opens the transfer backend on the pool's memory and compiles the copy templates. Peers have
// the same geometry (the coordinator checks it), so they serve all of them.
func (e *Engine) openTransfers(core *CoreConfig) error {
	c := e.config
	endpoint, err := backends.Open(c.Transport, e.memory, backends.Options{
		// Peers call the host as it was given: that is what the certificate is for.
		Listen: net.JoinHostPort(c.TransferHost, "0"), Advertise: advertise(c.TransferHost), TLS: c.TransferTLS,
	})
	if err != nil {
		return err
	}
	e.endpoint = endpoint
	_, core.Push = endpoint.(transfer.Pusher)
	core.BlockBytes = []int64{c.blockBytes()}
	core.Secret = make([]byte, 32)
	_, _ = crand.Read(core.Secret) // never fails: it ends the process instead
	if core.Template, err = c.template(c.layout()); err != nil || !c.verifies() {
		return err
	}
	e.checksums = c.newChecksums(e.memory.Data)
	core.Verify = c.VerifyHandoff
	core.Checksums = []handoff.Checksums{{Off: c.kvBytes(), BlockBytes: c.checksumBlockBytes()}}
	core.ChecksumTemplate, err = c.template(c.layout().Checksums(compute.Tile))
	return err
}

// advertise is the name of a host that has one. An address is known from the listener.
func advertise(host string) string {
	if net.ParseIP(host) != nil {
		return ""
	}
	return host
}

func (c Config) layout() layout.Geometry {
	spec := c.Checkpoint.Spec
	return layout.Geometry{
		BlockSize: c.BlockSize, Layers: spec.Layers, KVHeads: spec.KVHeads, HeadDim: spec.HeadDim,
		Planes: 2, ElementBytes: c.KVType.BlockBytes(),
	}
}

// template is the copy from one engine of a geometry to another.
func (c Config) template(g layout.Geometry) (*layout.Template, error) {
	holdings, err := g.Holdings(1, []int{g.Layers})
	if err != nil {
		return nil, err
	}
	return layout.Compile(g, holdings, holdings)
}

// transfer carries out one order of the handoff. The answer, if it is known at once, is its next event.
func (e *Engine) transfer(order handoff.Action) handoff.Event {
	switch a := order.(type) {
	case handoff.Seal:
		e.queueCheck(func() handoff.Event {
			e.checksums.seal(a.Blocks)
			return handoff.Sealed{Handoff: a.Handoff, Rank: a.Rank}
		})
	case handoff.Verify:
		e.queueCheck(func() handoff.Event {
			return handoff.Verified{Transfer: a.Transfer, Err: e.checksums.verify(a.Blocks)}
		})
	case handoff.OpenExport:
		return handoff.Opened{Handoff: a.Handoff, Rank: a.Rank, Err: e.puller().Export(a.Handoff, a.Capability, ranges(a.Ranges))}
	case handoff.Revoke:
		return handoff.Revoked{Handoff: a.Handoff, Rank: a.Rank, Quiesced: e.puller().Revoke(a.Handoff)}
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
	}
	return nil
}

func (e *Engine) puller() transfer.Puller { return e.endpoint.(transfer.Puller) }
func (e *Engine) pusher() transfer.Pusher { return e.endpoint.(transfer.Pusher) }

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

// transferSettled reports the end of a transfer to the core.
func (e *Engine) transferSettled(id uint64) {
	if h := e.transfers[id]; h != nil {
		if event := e.settlement(id, h); event != nil {
			e.step(Moved{event})
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
