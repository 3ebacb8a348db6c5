package coordinator

import (
	"fmt"

	"baton/wire"
)

// phase is the fleet's, as clients set it. What is legal:
//
//	running -PAUSE-> paused -UNPAUSE-> running
//	paused -SUSPEND-> suspended -RESUME-> paused
//	paused or suspended -STOP-> stopping
//
// Outside running, requests wait in the coordinator, and each engine keeps the ones it has. A coordinator
// whose own process is to end is draining: it takes no new requests, and brings the others to their end.
type phase uint8

const (
	running phase = iota
	paused
	suspended
	draining
	stopping
)

func (p phase) String() string {
	return [...]string{"running", "paused", "suspended", "stopping", "stopping"}[p]
}

// control applies a client's lifecycle message to the whole fleet.
func (c *Core) control(p *peer, m wire.Message) {
	switch m := m.(type) {
	case *wire.SetGenerationEpoch:
		c.epoch = m
		c.broadcast(m)
		return
	case *wire.StartProfiler, *wire.StopProfiler:
		c.broadcast(m)
		return
	}
	next, legal := c.phase, false
	switch m.(type) {
	case *wire.Pause:
		if c.phase == paused || c.phase == suspended {
			return
		}
		next, legal = paused, c.phase == running
	case *wire.Unpause:
		next, legal = running, c.phase == paused
	case *wire.Suspend:
		next, legal = suspended, c.phase == paused
	case *wire.Resume:
		next, legal = paused, c.phase == suspended
	case *wire.Stop:
		next, legal = stopping, c.phase == paused || c.phase == suspended
	}
	if !legal {
		c.warn("ignored %s from %s: the fleet is %s", name(m), p, c.phase)
		return
	}
	c.phase = next
	c.broadcast(m)
	if next == stopping {
		c.failQueued(&c.entry.queue, &c.decode.queue)
	}
	c.dispatch()
}

func (c *Core) broadcast(m wire.Message) {
	for _, e := range c.order {
		c.send(e.peer, m)
	}
}

// bringUp tells a new engine what the others were told.
func (c *Core) bringUp(e *engine) {
	if c.epoch != nil {
		c.send(e.peer, c.epoch)
	}
	if c.phase == paused || c.phase == suspended {
		c.send(e.peer, &wire.Pause{})
	}
	if c.phase == suspended {
		c.send(e.peer, &wire.Suspend{})
	}
	if c.phase == stopping {
		c.send(e.peer, &wire.Stop{})
	}
}

// operator obeys the coordinator's own process.
func (c *Core) operator(m wire.Message) {
	switch m.(type) {
	case *wire.Stop:
		if c.phase < draining {
			c.phase = draining
			c.failQueued(&c.entry.queue)
			c.dispatch()
		}
	case *wire.Shutdown:
		c.shutdown()
	}
}

// shutdown ends every request and stops the engines.
func (c *Core) shutdown() {
	c.phase = stopping
	c.failQueued(&c.entry.queue, &c.decode.queue)
	for _, r := range sorted(c.requests) {
		c.abort(r)
		c.fail(r, unavailable("%v", errStopping))
	}
	c.broadcast(&wire.Stop{})
}

func (c *Core) failQueued(queues ...*queue) {
	for _, q := range queues {
		for r := q.head; r != nil; r = q.head {
			q.remove(r)
			c.unsource(r)
			c.fail(r, unavailable("%v", errStopping))
		}
	}
}

// Status describes the fleet.
func (c *Core) Status() *wire.StatusReply {
	g := c.fleet.geometry
	g.MaxSeqLen = c.fleet.maxSeqLen
	s := &wire.StatusReply{
		Ready: c.phase == running && c.complete(), Reason: c.lack(), Phase: c.phase.String(),
		Geometry: g, Colocated: c.fleet.colocated, Transport: c.fleet.transport, WeightVersion: c.fleet.version,
		Policy: c.cfg.Policy.Name(), Requests: len(c.requests),
	}
	if s.Reason == "" && c.phase != running {
		s.Reason = fmt.Sprintf("the fleet is %s", c.phase)
	}
	if c.fleet.colocated {
		s.Queues = []wire.QueueStatus{{Role: wire.RoleBoth, Length: c.entry.queue.length}}
	} else {
		s.Queues = []wire.QueueStatus{
			{Role: wire.RolePrefill, Length: c.entry.queue.length}, {Role: wire.RoleDecode, Length: c.decode.queue.length},
		}
	}
	for _, e := range c.order {
		if s.Model == "" {
			s.Model = e.reg.Model
		}
		s.Engines = append(s.Engines, wire.EngineStatus{
			Name: e.reg.Name, Role: e.reg.Role, Model: e.reg.Model, Draining: e.draining,
			Requests: e.reg.Requests, RequestsInUse: len(e.legs), Blocks: e.reg.Blocks, BlocksReserved: e.blocks,
		})
	}
	return s
}

func name(m wire.Message) string { return m.Header().String() }
