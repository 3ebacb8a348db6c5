package coordinator

import "baton/wire"

// residency takes in what an engine says that it has cached.
func (c *Core) residency(e *engine, m *wire.KVEvents) {
	x := e.pool.index
	switch {
	case m.Reset:
		e.reports, e.resyncing = true, false
		x.Forget(e.slot)
	case e.resyncing:
		return // the snapshot has it
	case !e.reports || m.Sequence != e.next:
		if e.reports {
			c.warn("engine %s reports cached prefixes from number %d on where %d was due; asked for all of them", e.reg.Name, m.Sequence, e.next)
		}
		e.resyncing = true
		c.send(e.peer, &wire.KVResync{Expected: e.next})
		return
	}
	e.next = m.Next
	if e.draining {
		return // it gets no new work
	}
	for i := range m.Events {
		ev := &m.Events[i]
		switch {
		case ev.Kind == wire.KVCleared:
			x.Forget(e.slot)
		case ev.Kind == wire.KVRemoved:
			if ev.Version == e.reg.WeightVersion {
				x.Remove(e.slot, ev.Digest)
			}
		case ev.Kind == wire.KVStored && ev.Version == e.reg.WeightVersion:
			x.Store(e.slot, ev.Digest, ev.Parent)
		}
	}
}
