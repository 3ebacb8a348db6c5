package sim

import (
	"reflect"
	"runtime/debug"
	"time"

	"baton/coordinator"
	"baton/wire"
)

// endpoint is an engine's or a client's end of a connection.
type endpoint interface {
	connected(*link)
	refused() // nobody answered
	receive(*link, wire.Message)
	lost(*link) // the connection ended
	String() string
}

// link is a connection to the coordinator. Each direction keeps its order; the two, and different links,
// do not. Each end notices in its own time that the connection broke, and what was under way then arrives
// up to some point.
type link struct {
	w     *world
	id    coordinator.PeerID
	peer  endpoint
	coord *coordinatorLife
	life  *life // of an engine

	coordOpen, peerOpen bool
	upAt, downAt        int64 // when the last message of a direction arrives
	cut                 bool
	mourned             bool  // the coordinator has noticed that the engine is gone
	upEnd, downEnd      int64 // after a cut: what arrives later is lost
}

// hop is how long a message travels.
func (w *world) hop() time.Duration {
	d := 20*time.Microsecond + w.within(200*time.Microsecond)
	if w.chance(40) {
		d += w.within(5 * time.Millisecond)
	}
	return d
}

// connect opens a connection for a peer.
func (w *world) connect(peer endpoint, l *life, hello wire.Connect) {
	w.after(w.hop(), func() {
		coord := w.coordinator
		if coord == nil {
			w.after(w.hop(), peer.refused)
			return
		}
		w.links++
		k := &link{w: w, id: coordinator.PeerID(w.links), peer: peer, coord: coord, life: l, coordOpen: true, peerOpen: true}
		coord.links[k.id] = k
		coord.step(k, coordinator.Event{Peer: k.id, Message: &hello})
		k.downAt = w.now + int64(w.hop())
		w.at(k.downAt, func() {
			if k.peerOpen {
				peer.connected(k)
			}
		})
	})
}

// up sends to the coordinator.
func (k *link) up(m wire.Message) {
	if !k.peerOpen {
		return
	}
	m = k.w.travel(m)
	k.upAt = max(k.upAt, k.w.now+int64(k.w.hop()))
	k.w.at(k.upAt, func() {
		if m != nil && k.coordOpen && !(k.cut && k.w.now > k.upEnd) {
			k.w.log("%v -> coordinator: %s", k.peer, told{m})
			k.coord.receive(k, m)
		}
	})
}

// down sends to the peer.
func (k *link) down(m wire.Message) {
	if !k.coordOpen {
		return
	}
	m = k.w.travel(m)
	k.downAt = max(k.downAt, k.w.now+int64(k.w.hop()))
	k.w.at(k.downAt, func() {
		if m != nil && k.peerOpen && !(k.cut && k.w.now > k.downEnd) {
			k.w.log("coordinator -> %v: %s", k.peer, told{m})
			k.peer.receive(k, m)
		}
	})
}

// travel is what a message is once it went through the codec.
func (w *world) travel(m wire.Message) wire.Message {
	b, err := m.MarshalMsg(w.buffer[:0])
	if err != nil {
		w.fail("%s cannot be encoded: %v", told{m}, err)
		return nil
	}
	w.buffer = b
	arrived := reflect.New(reflect.TypeOf(m).Elem()).Interface().(wire.Message)
	if _, err := arrived.UnmarshalMsg(b); err != nil {
		w.fail("%s cannot be decoded: %v", told{m}, err)
		return nil
	}
	return arrived
}

// sever breaks the connection: both ends are alive and notice sooner or later.
func (k *link) sever() {
	if k.cut {
		return
	}
	k.cut = true
	k.upEnd = k.w.now + int64(k.w.within(2*time.Millisecond))
	k.downEnd = k.w.now + int64(k.w.within(2*time.Millisecond))
	k.w.at(k.upEnd+int64(k.w.within(20*time.Millisecond)), k.coordLoses)
	k.w.at(k.downEnd+int64(k.w.within(20*time.Millisecond)), k.peerLoses)
}

// coordLoses ends the connection for the coordinator.
func (k *link) coordLoses() {
	if !k.coordOpen {
		return
	}
	k.coordOpen = false
	k.coord.disconnected(k)
}

// peerLoses ends the connection for the peer.
func (k *link) peerLoses() {
	if !k.peerOpen {
		return
	}
	k.peerOpen = false
	k.peer.lost(k)
}

// peerCloses is the peer's own end, or its death: what it sent last may be lost then.
func (k *link) peerCloses(died bool) {
	if !k.peerOpen {
		return
	}
	k.peerOpen = false
	if died && !k.cut {
		k.cut = true
		k.upEnd = k.w.now + int64(k.w.within(time.Millisecond))
	}
	k.upAt = max(k.upAt, k.w.now+int64(k.w.hop()))
	k.w.at(k.upAt, k.coordLoses)
}

// coordCloses is the coordinator's own end: what the peer sends is read a moment longer.
func (k *link) coordCloses() {
	k.downAt = max(k.downAt, k.w.now+int64(k.w.hop()))
	k.w.at(k.downAt, k.peerLoses)
	k.w.after(k.w.within(time.Millisecond), k.coordLoses)
}

// coordDies takes the connection with it.
func (k *link) coordDies() {
	k.coordOpen = false
	if !k.cut {
		k.cut = true
		k.downEnd = k.w.now + int64(k.w.within(time.Millisecond))
	}
	k.downAt = max(k.downAt, k.w.now+int64(k.w.hop()))
	k.w.at(k.downAt, k.peerLoses)
}

func stack() string {
	const longest = 6000
	s := debug.Stack()
	return string(s[:min(len(s), longest)])
}
