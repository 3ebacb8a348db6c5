package coordinator

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"baton/route"
	"baton/wire"
)

// engine is a registered engine: one data-parallel group of a shard.
type engine struct {
	peer     *peer
	reg      *wire.RegisterRole
	pool     *pool
	serial   uint64 // of the registration; never used again
	slot     int    // its number in the pool's index, while it is registered
	legs     map[uint64]*leg
	blocks   int // reserved KV blocks
	draining bool
	leaveBy  time.Time // of one that drains
	last     uint64    // when it last got work
	claimed  uint64    // the queue scan in which an earlier request waits for this engine

	reports   bool   // what it has cached, from its first snapshot on
	next      uint64 // number of the event that is due
	resyncing bool   // it was asked for a snapshot
}

// canTake tells whether one more request with so many KV blocks could start now.
func (e *engine) canTake(blocks int) bool {
	return !e.draining && len(e.legs) < e.reg.Requests && e.blocks+blocks <= e.reg.Blocks
}

// free is the smaller of the free parts of its request slots and of its KV blocks.
func (e *engine) free() float64 {
	return min(1-float64(len(e.legs))/float64(e.reg.Requests), 1-float64(e.blocks)/float64(e.reg.Blocks))
}

// pool is the engines of one role and the requests that wait for one of them.
type pool struct {
	engines []*engine
	index   *route.Index
	pins    *route.Pins // nil: sessions are not bound to engines
	queue   queue
	// lacking is since when the pool's requests cannot be served for want of an engine.
	lacking time.Time
}

// open is the number of engines that take new work.
func (p *pool) open() int {
	n := 0
	for _, e := range p.engines {
		if !e.draining {
			n++
		}
	}
	return n
}

// deadline is when the longest waiting request gives up, if an engine that it needs is lacking.
func (p *pool) deadline(wait time.Duration, served bool) (time.Time, bool) {
	if served || p.queue.head == nil {
		return time.Time{}, false
	}
	since := p.queue.oldest().queuedAt
	if p.lacking.After(since) {
		since = p.lacking
	}
	return since.Add(wait), true
}

func (p *pool) freeSlot() int {
	for slot := 0; ; slot++ {
		if !slices.ContainsFunc(p.engines, func(e *engine) bool { return e.slot == slot }) {
			return slot
		}
	}
}

// fleet is what all engines have in common; zero while there is none.
type fleet struct {
	colocated bool
	of        string // the engine that set it
	geometry  wire.Geometry
	transport string
	version   uint64
	maxSeqLen int    // the shortest of all engines
	change    uint64 // counts registrations and removals
}

// complete tells whether a new request could run to its end.
func (c *Core) complete() bool {
	return c.entry.open() > 0 && (c.fleet.colocated || c.decode.open() > 0)
}

// register admits an engine to its role or refuses it with the reason.
func (c *Core) register(p *peer, m *wire.RegisterRole) {
	if p.hello.Incarnation != m.Incarnation {
		c.refuse(p, fmt.Sprintf("Incarnation is %d, but the connection was opened by %d", m.Incarnation, p.hello.Incarnation))
		return
	}
	if reason := wrong(m); reason != "" {
		c.refuse(p, reason)
		return
	}
	old := c.byName[m.Name]
	if reason := c.mismatch(m, old); reason != "" {
		c.refuse(p, reason)
		return
	}
	if old != nil {
		c.act(Action{Kind: Close, Peer: old.peer.id, Text: fmt.Sprintf("engine %s registered on a new connection", m.Name)})
		delete(c.peers, old.peer.id)
		c.remove(old, "it was replaced by a new connection", old.reg.Incarnation != m.Incarnation)
	}
	c.admit(p, m)
}

func (c *Core) refuse(p *peer, reason string) {
	c.warn("refused to register %s: %s", p, reason)
	c.send(p, &wire.RegisterRoleAck{Error: reason})
}

// wrong says what makes a registration invalid on its own.
func wrong(m *wire.RegisterRole) string {
	if m.Role != wire.RolePrefill && m.Role != wire.RoleDecode && m.Role != wire.RoleBoth {
		return fmt.Sprintf("Role is %q, want %s, %s or %s", m.Role, wire.RolePrefill, wire.RoleDecode, wire.RoleBoth)
	}
	if m.Name == "" {
		return "Name is empty; engines of a fleet need different names"
	}
	if m.Role != wire.RoleBoth && len(m.Ranks) == 0 {
		return "Ranks is empty; the other role could not reach this engine's KV"
	}
	for _, f := range []struct {
		name  string
		value int
	}{
		{"Requests", m.Requests}, {"Blocks", m.Blocks},
		{"Geometry.BlockSize", m.Geometry.BlockSize}, {"Geometry.MaxSeqLen", m.Geometry.MaxSeqLen},
	} {
		if f.value < 1 || f.value > 1<<40 {
			return fmt.Sprintf("%s is %d, want 1 to 2^40", f.name, f.value)
		}
	}
	return ""
}

// mismatch says how a registration disagrees with the engines that are there already, apart from the
// one that it replaces.
func (c *Core) mismatch(m *wire.RegisterRole, replaced *engine) string {
	if len(c.order) == 0 || len(c.order) == 1 && c.order[0] == replaced {
		return ""
	}
	f := &c.fleet
	if colocated := m.Role == wire.RoleBoth; colocated != f.colocated {
		return fmt.Sprintf("Role is %s, but %s is %s; colocated engines (%s) cannot be mixed with %s and %s ones",
			m.Role, f.of, c.byName[f.of].reg.Role, wire.RoleBoth, wire.RolePrefill, wire.RoleDecode)
	}
	g, have := &m.Geometry, &f.geometry
	for _, x := range []struct {
		name     string
		new, old any
	}{
		{"Geometry.Model", g.Model, have.Model},
		{"Geometry.BlockSize", g.BlockSize, have.BlockSize},
		{"Geometry.Layers", g.Layers, have.Layers},
		{"Geometry.KVHeads", g.KVHeads, have.KVHeads},
		{"Geometry.HeadDim", g.HeadDim, have.HeadDim},
		{"Geometry.Planes", g.Planes, have.Planes},
		{"Geometry.KVDType", g.KVDType, have.KVDType},
		{"Geometry.VocabSize", g.VocabSize, have.VocabSize},
		{"Geometry.VerifyHandoff", cmp.Or(g.VerifyHandoff, "off"), cmp.Or(have.VerifyHandoff, "off")},
		{"Transport", m.Transport, f.transport},
		{"WeightVersion", m.WeightVersion, f.version},
	} {
		if x.new != x.old {
			return fmt.Sprintf("%s is %v, but %s has %v; engines of a fleet must agree on it", x.name, x.new, f.of, x.old)
		}
	}
	return ""
}

func (c *Core) admit(p *peer, m *wire.RegisterRole) {
	pool := &c.entry
	if m.Role == wire.RoleDecode {
		pool = &c.decode
	}
	if len(c.order) == 0 {
		c.fleet = fleet{
			colocated: m.Role == wire.RoleBoth, of: m.Name, geometry: m.Geometry, transport: m.Transport,
			version: m.WeightVersion, change: c.fleet.change,
		}
	}
	c.serial++
	e := &engine{peer: p, reg: m, pool: pool, serial: c.serial, slot: pool.freeSlot(), legs: make(map[uint64]*leg)}
	pool.engines = append(pool.engines, e)
	c.order = append(c.order, e)
	c.byName[m.Name] = e
	p.engine = e
	c.acquit(m.Incarnation)
	c.fleetChanged()
	c.send(p, &wire.RegisterRoleAck{})
	c.bringUp(e)
	c.dispatch()
}

// remove forgets an engine, which died or, if not, left. Its requests go on without it.
func (c *Core) remove(e *engine, why string, died bool) {
	served, decodes := c.complete(), c.decode.open() > 0
	if e.draining {
		c.leaving--
	}
	e.draining = true
	e.peer.engine = nil
	delete(c.byName, e.reg.Name)
	is := func(x *engine) bool { return x == e }
	e.pool.engines = slices.DeleteFunc(e.pool.engines, is)
	c.order = slices.DeleteFunc(c.order, is)
	if c.fleet.of == e.reg.Name && len(c.order) > 0 {
		c.fleet.of = c.order[0].reg.Name
	}
	c.fleetChanged()
	why = fmt.Sprintf("engine %s is gone: %s", e.reg.Name, why)
	suspects := 0
	for _, l := range e.legs {
		if l.runs() {
			suspects++
		}
	}
	for _, l := range sorted(e.legs) {
		if e.legs[l.id] == l {
			c.lose(l, why, died, suspects == 1)
		}
	}
	e.pool.index.Forget(e.slot)
	c.noteLack(served, decodes)
	c.dispatch()
}

// drain gives an engine no new work. Its connection is closed when it has none left, or after a while.
func (c *Core) drain(e *engine, reason string) {
	if e.draining {
		return
	}
	served, decodes := c.complete(), c.decode.open() > 0
	c.warn("engine %s leaves: %s", e.reg.Name, reason)
	e.draining, e.leaveBy = true, c.now.Add(c.cfg.DrainWait)
	c.leaving++
	e.pool.index.Forget(e.slot)
	c.fleetChanged()
	c.noteLack(served, decodes)
	c.closeDrained(e)
	c.dispatch()
}

func (c *Core) closeDrained(e *engine) {
	if e.draining && len(e.legs) == 0 && e.peer.engine == e {
		c.act(Action{Kind: Close, Peer: e.peer.id, Text: fmt.Sprintf("engine %s has left", e.reg.Name)})
	}
}

// expel closes the engines that wanted to leave and still run requests when their time is up.
func (c *Core) expel() {
	if c.leaving == 0 {
		return
	}
	for _, e := range slices.Clone(c.order) {
		if !e.draining || len(e.legs) == 0 || c.now.Before(e.leaveBy) {
			continue
		}
		why := fmt.Sprintf("it was to leave, and still had %d requests after %v", len(e.legs), c.cfg.DrainWait)
		c.act(Action{Kind: Close, Peer: e.peer.id, Text: fmt.Sprintf("engine %s: %s", e.reg.Name, why)})
		c.remove(e, why, false)
	}
}

// noteLack remembers since when requests wait for an engine that is not there.
func (c *Core) noteLack(served, decodes bool) {
	if served && !c.complete() {
		c.entry.lacking = c.now
	}
	if decodes && c.decode.open() == 0 {
		c.decode.lacking = c.now
	}
}

func (c *Core) fleetChanged() {
	c.fleet.change++
	c.fleet.maxSeqLen = 0
	for _, e := range c.order {
		if n := e.reg.Geometry.MaxSeqLen; !e.draining && (c.fleet.maxSeqLen == 0 || n < c.fleet.maxSeqLen) {
			c.fleet.maxSeqLen = n
		}
	}
	if len(c.order) == 0 {
		c.fleet = fleet{change: c.fleet.change}
	}
}

// sorted lists a map's values in order of their keys: the same events give the same actions.
func sorted[K cmp.Ordered, V any](m map[K]V) []V {
	values := make([]V, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		values = append(values, m[k])
	}
	return values
}
