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

	cached wire.KVReader // what it reports of its cache
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
	model     string // its served name, at the engine of
	transport string
	logprobs  string
	version   uint64
	maxSeqLen int    // the shortest of all engines
	change    uint64 // counts registrations and removals
}

// modelID is which model somebody serves.
type modelID struct{ name, fingerprint string }

// String is for people. Two models may well bear one name.
func (i modelID) String() string {
	return fmt.Sprintf("%s (fingerprint %.12s)", i.name, i.fingerprint)
}

func (f *fleet) modelID() modelID { return modelID{f.model, f.geometry.Model} }

// foreign says why a client is of no use to a fleet of this model, if so.
func (i modelID) foreign(hello *wire.Connect) string {
	client := modelID{hello.Model, hello.Fingerprint}
	if i.fingerprint == "" || client.fingerprint == "" || client.fingerprint == i.fingerprint {
		return ""
	}
	return fmt.Sprintf("the frontend's --model is %s and the engines' is %s; they must be the same", client, i)
}

// dismissForeign ends the connections of clients that came before there was an engine, and serve another model.
func (c *Core) dismissForeign() {
	for _, p := range sorted(c.peers) {
		if reason := c.fleet.modelID().foreign(&p.hello); reason != "" && p.hello.Kind == KindClient {
			c.turnAway(p.id, reason)
			c.disconnected(p.id)
		}
	}
}

// turnAway ends a connection whose peer would be refused if it came again.
func (c *Core) turnAway(id PeerID, reason string) {
	c.act(Action{Kind: Send, Peer: id, Message: &wire.Disconnect{Reason: reason}})
	c.act(Action{Kind: Close, Peer: id, Text: reason})
}

// remember keeps the incarnations that were admitted last, so that a process whose name was taken over
// meanwhile is known when it comes back. Older ones than that have long ended.
func (c *Core) remember(incarnation uint64) {
	const kept = 1024
	if slices.Contains(c.admitted, incarnation) {
		return
	}
	if len(c.admitted) == kept {
		c.admitted = slices.Delete(c.admitted, 0, 1)
	}
	c.admitted = append(c.admitted, incarnation)
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
	if old != nil && old.reg.Incarnation != m.Incarnation && slices.Contains(c.admitted, m.Incarnation) {
		c.refuse(p, fmt.Sprintf("%s is another process's name by now, which registered after this one had; %s", m.Name, differentNames))
		return
	}
	if reason := c.mismatch(m, old); reason != "" {
		c.refuse(p, reason)
		return
	}
	if old != nil {
		c.displace(old, m)
	}
	c.admit(p, m)
}

const differentNames = "engines of a fleet need different names (--name)"

// displace makes room for an engine that registers under a name which is taken. The process that comes last
// counts: it may be the successor of one that is stopped, or cut off and not yet known to be gone. A predecessor
// that runs after all is told to end, lest the two displace each other for ever.
func (c *Core) displace(old *engine, m *wire.RegisterRole) {
	another := old.reg.Incarnation != m.Incarnation
	if another {
		c.warn("engine %s: another process registered under the name; the one that had it is to end", m.Name)
		c.send(old.peer, &wire.Disconnect{Reason: fmt.Sprintf("another process registered as engine %s; %s", m.Name, differentNames)})
	}
	c.act(Action{Kind: Close, Peer: old.peer.id, Text: fmt.Sprintf("engine %s registered on a new connection", m.Name)})
	delete(c.peers, old.peer.id)
	c.remove(old, "it was replaced by a new connection", another)
}

func (c *Core) refuse(p *peer, reason string) {
	c.warn("refused to register %s: %s", p, reason)
	c.send(p, &wire.RegisterRoleAck{Error: reason})
}

// wrong says what makes a registration invalid on its own.
func wrong(m *wire.RegisterRole) string {
	if m.Role != wire.RolePrefill && m.Role != wire.RoleDecode && m.Role != wire.RoleBoth {
		return fmt.Sprintf("--role is %.20q; it must be %s, %s or %s", m.Role, wire.RolePrefill, wire.RoleDecode, wire.RoleBoth)
	}
	if n := len(m.Name); n == 0 || n > maxName {
		return fmt.Sprintf("--name has %d bytes; it must have 1 to %d", n, maxName)
	}
	if m.Role != wire.RoleBoth && len(m.Ranks) == 0 {
		return "it describes no rank; the other role could not reach its KV"
	}
	for _, f := range []struct {
		what  string
		value int
	}{
		{"--max-requests is", m.Requests}, {"the number of KV blocks (--kv-memory) is", m.Blocks},
		{"--block-size is", m.Geometry.BlockSize}, {"--max-seq-len is", m.Geometry.MaxSeqLen},
	} {
		if f.value < 1 || f.value > 1<<40 {
			return fmt.Sprintf("%s %d; it must be from 1 to 2^40", f.what, f.value)
		}
	}
	if len(m.Ranks) == 0 {
		return ""
	}
	for _, f := range []struct {
		what        string
		value, most int
	}{
		{"the number of layers is", m.Geometry.Layers, maxLayers}, {"the number of KV heads is", m.Geometry.KVHeads, maxKVHeads},
		{"the number of ranks is", len(m.Ranks), maxRanks},
	} {
		if f.value < 1 || f.value > f.most {
			return fmt.Sprintf("%s %d; it must be from 1 to %d", f.what, f.value, f.most)
		}
	}
	return uncovered(m)
}

// maxName bounds the names of engines, in bytes: they are repeated in logs and replies.
const maxName = 256

// mismatch says how a registration disagrees with the engines that are there already, apart from the
// one that it replaces. It names what a user can change.
func (c *Core) mismatch(m *wire.RegisterRole, replaced *engine) string {
	if len(c.order) == 0 || len(c.order) == 1 && c.order[0] == replaced {
		return ""
	}
	f := &c.fleet
	if colocated := m.Role == wire.RoleBoth; colocated != f.colocated {
		return fmt.Sprintf("--role is %s here and %s at %s; colocated engines (%s) cannot be mixed with %s and %s ones",
			m.Role, c.byName[f.of].reg.Role, f.of, wire.RoleBoth, wire.RolePrefill, wire.RoleDecode)
	}
	g, have := &m.Geometry, &f.geometry
	if ours, theirs := (modelID{m.Model, g.Model}), f.modelID(); ours.fingerprint != theirs.fingerprint {
		return fmt.Sprintf("--model is %s here and %s at %s; engines of a fleet must serve the same one", ours, theirs, f.of)
	}
	for _, x := range []struct {
		what     string
		new, old any
	}{
		{"--block-size", g.BlockSize, have.BlockSize},
		{"the number of layers", g.Layers, have.Layers},
		{"the number of KV heads", g.KVHeads, have.KVHeads},
		{"the head dimension", g.HeadDim, have.HeadDim},
		{"the number of KV planes", g.Planes, have.Planes},
		{"--kv-dtype", g.KVDType, have.KVDType},
		{"the vocabulary", g.VocabSize, have.VocabSize},
		{"--verify-handoff", cmp.Or(g.VerifyHandoff, "off"), cmp.Or(have.VerifyHandoff, "off")},
		{"--transfer", m.Transport, f.transport},
		{"--logprobs", cmp.Or(m.Logprobs, "raw"), cmp.Or(f.logprobs, "raw")},
		{"the version of the weights", m.WeightVersion, f.version},
	} {
		if x.new != x.old {
			return fmt.Sprintf("%s is %v here and %v at %s; engines of a fleet must agree on it", x.what, x.new, x.old, f.of)
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
			colocated: m.Role == wire.RoleBoth, of: m.Name, geometry: m.Geometry, model: m.Model, transport: m.Transport,
			logprobs: m.Logprobs, version: m.WeightVersion, change: c.fleet.change,
		}
		c.dismissForeign()
	}
	c.serial++
	e := &engine{peer: p, reg: m, pool: pool, serial: c.serial, slot: pool.freeSlot(), legs: make(map[uint64]*leg)}
	pool.engines = append(pool.engines, e)
	c.order = append(c.order, e)
	c.byName[m.Name] = e
	p.engine = e
	c.remember(m.Incarnation)
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
	c.note("engine %s leaves (%s): its %d requests end or move within %v", e.reg.Name, reason, len(e.legs), c.cfg.DrainWait)
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
