package collective

import (
	"fmt"
	"slices"

	"baton/compute"
)

// queueDepth is how many messages of a lane may be under way: sent and not yet taken by the receiver.
const queueDepth = 4

// laneKey names a lane of a group: messages from one member to another. Those of Send and those that
// collective operations consist of have lanes of their own, so that their order among each other does not
// matter.
type laneKey struct {
	from, to int // in the group
	direct   bool
}

// lane is the queue of messages between two members, guarded by process.mu. Either end may be in another
// process: messages to there are only counted.
type lane struct {
	laneKey
	queue []message
	sent  uint64 // messages sent
	taken uint64 // messages that the receiver took, as far as is known here
	told  uint64 // of taken, what the sender in another process has been told
}

// message is a matrix under way.
type message struct {
	call   call
	shape  shape
	floats *[]float32 // dense, from the pool; nil when there are no elements
}

// free gives the message's memory back.
func (m *message) free() {
	putFloats(m.floats)
	m.floats = nil
}

// lane finds or makes a lane; process.mu is held.
func (g *group) lane(k laneKey) *lane {
	l := g.lanes[k]
	if l == nil {
		l = &lane{laneKey: k}
		g.lanes[k] = l
	}
	return l
}

// send gives v to the member at the other end of a lane. It waits while the lane is full.
func (m *member) send(k laneKey, c call, v view) error {
	p := m.p
	to := p.ranks[m.ranks[k.to]]
	if !to.here && v.elements() > maxElements {
		return m.reject(c.op, "%v is too large for a message to another process; %d elements are the limit", v.shape(), maxElements)
	}
	p.mu.Lock()
	l := m.lane(k)
	if k.direct {
		c.seq = l.sent
	}
	for l.sent-l.taken == queueDepth {
		if err := m.stuck(to, c); err != nil {
			p.mu.Unlock()
			return err
		}
		p.sleep(m.self, wait{kind: forRoom, group: m.group, lane: l, call: c})
		p.mu.Lock()
	}
	err := m.unreachable(to)
	back := m.lane(laneKey{k.to, k.from, k.direct})
	if err == nil {
		l.sent++
		back.told = back.taken
	}
	taken := back.told
	p.mu.Unlock()
	if err != nil {
		return err
	}
	if !to.here {
		return to.link.sendData(m.group, k, c, taken, v)
	}
	msg := message{call: c, shape: v.shape()}
	if n := v.elements(); n > 0 {
		msg.floats = getFloats(n)
		pack(*msg.floats, v)
	}
	p.mu.Lock()
	m.put(l, msg)
	p.mu.Unlock()
	return nil
}

// unreachable is why nothing can be sent to, or will come from, a rank; process.mu is held.
func (m *member) unreachable(s *seat) error {
	if err := m.p.failed(); err != nil {
		return err
	}
	if s.closed.Load() {
		return m.p.endLocked(s.rank, ErrClosed)
	}
	return nil
}

// stuck is why a member cannot wait for another one; process.mu is held.
func (m *member) stuck(s *seat, c call) error {
	if err := m.unreachable(s); err != nil {
		return err
	}
	if c.op == opSend {
		return nil
	}
	for i := range m.ranks {
		if l := m.lanes[laneKey{from: i, to: m.rank}]; l != nil && len(l.queue) > 0 {
			if err := m.conflict(l, l.queue[0], c); err != nil {
				return err
			}
		}
	}
	return nil
}

// conflict ends the world if a message belongs to another operation than the one that its receiver waits in,
// and not to a later one; process.mu is held.
func (g *group) conflict(l *lane, msg message, c call) error {
	if msg.call.seq > c.seq || msg.call == c {
		return nil
	}
	return g.p.endLocked(g.ranks[l.to], g.mismatch(l.from, l.to, "calls "+msg.call.String(), "calls "+c.String()))
}

// put queues a message for a receiver here; process.mu is held.
func (g *group) put(l *lane, msg message) {
	l.queue = append(l.queue, msg)
	s := g.p.ranks[g.ranks[l.to]]
	switch w := &s.wait; {
	case w.kind == forData && w.lane == l:
		g.p.rouse(s)
	case w.group == g && w.kind != awake && !l.direct && w.call.op != opSend:
		_ = g.conflict(l, msg, w.call) // wakes everybody if so
	}
}

// take waits for the next message of a lane and removes it. It must belong to c.
func (m *member) take(k laneKey, c call) (message, error) {
	p := m.p
	from := p.ranks[m.ranks[k.from]]
	p.mu.Lock()
	l := m.lane(k)
	if k.direct {
		c.seq = l.taken
	}
	for len(l.queue) == 0 {
		if err := m.stuck(from, c); err != nil {
			p.mu.Unlock()
			return message{}, err
		}
		p.sleep(m.self, wait{kind: forData, group: m.group, lane: l, call: c})
		p.mu.Lock()
	}
	msg := l.queue[0]
	l.queue = slices.Delete(l.queue, 0, 1)
	l.taken++
	if from.here && from.wait.kind == forRoom && from.wait.lane == l {
		p.rouse(from)
	}
	tell := !from.here && l.taken-l.told >= queueDepth/2
	if tell {
		l.told = l.taken
	}
	taken := l.told
	p.mu.Unlock()
	if tell {
		if err := from.link.sendTaken(m.group, k, taken); err != nil {
			return msg, err
		}
	}
	if msg.call != c {
		return msg, m.p.end(m.self.rank, m.mismatch(k.from, k.to, "calls "+msg.call.String(), "calls "+c.String()))
	}
	return msg, nil
}

// receive takes the next message of a lane, which must belong to c and have v's shape, and copies it to v, or adds
// it.
func (m *member) receive(k laneKey, c call, v view, use func(view, []float32)) error {
	msg, err := m.take(k, c)
	if err != nil {
		return err
	}
	if !msg.shape.same(v.shape()) {
		return m.misfit(k, msg, fmt.Sprint("expects ", v.shape()))
	}
	if msg.floats != nil {
		use(v, *msg.floats)
		msg.free()
	}
	return nil
}

// misfit ends the world because of a message whose shape is not what its receiver can use.
func (m *member) misfit(k laneKey, msg message, expects string) error {
	return m.p.end(m.self.rank, m.mismatch(k.from, k.to, fmt.Sprintf("calls %v and gives %v", msg.call, msg.shape), expects))
}

// Send implements Group.
func (m *member) Send(to int, mat compute.Mat) error {
	v, err := m.partner("Send", to, mat)
	if err != nil {
		return err
	}
	return m.send(laneKey{m.rank, to, true}, call{op: opSend}, v)
}

// Recv implements Group.
func (m *member) Recv(from int, mat compute.Mat) error {
	v, err := m.partner("Recv", from, mat)
	if err != nil {
		return err
	}
	return m.receive(laneKey{from, m.rank, true}, call{op: opSend}, v, unpack)
}

// partner checks the arguments of Send and Recv.
func (m *member) partner(name string, other int, mat compute.Mat) (view, error) {
	if err := m.p.usable(m.self.rank); err != nil {
		return view{}, err
	}
	v, problem := see(mat)
	switch {
	case other < 0 || other >= len(m.ranks):
		problem = fmt.Sprintf("member %d is not in a group of %d", other, len(m.ranks))
	case other == m.rank:
		problem = "a member cannot exchange messages with itself"
	}
	if problem != "" {
		return v, m.p.end(m.self.rank, &OperandError{m.name, name, problem})
	}
	return v, nil
}
