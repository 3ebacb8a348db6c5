package coordinator

import "baton/wire"

// residency takes in what an engine says that it has cached.
func (c *Core) residency(e *engine, m *wire.KVEvents) {
	x := e.pool.index
	apply, ask := e.cached.Take(m)
	if !apply {
		if ask != nil {
			if e.cached.Reports {
				c.warn("engine %s reports cached prefixes from number %d on where %d was due; asked for all of them", e.reg.Name, m.Sequence, ask.Expected)
			}
			c.send(e.peer, ask)
		}
		return
	}
	if m.Reset {
		x.Forget(e.slot)
	}
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
