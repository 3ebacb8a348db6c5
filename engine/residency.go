package engine

import (
	"baton/kvcache"
	"baton/wire"
)

// keptEvents bounds the residency events that wait to be sent. A coordinator notices a gap and asks for a
// snapshot.
const keptEvents = 1 << 16

// snapshotPart is how many events of a snapshot go into one message.
const snapshotPart = 1 << 13

// tell reports what the pool has cached or forgotten since the last time.
func (c *Core) tell() {
	if events := c.pool.DrainEvents(nil); len(events) > 0 {
		c.send(&wire.KVEvents{
			Sequence: events[0].Sequence, Next: events[len(events)-1].Sequence + 1, Events: wireEvents(events),
		})
	}
}

// tellAll reports everything that the pool has cached.
func (c *Core) tellAll() {
	events := c.pool.Snapshot(nil)
	next := events[0].Sequence + 1
	events = events[1:] // the Cleared is what Reset says
	for reset := true; reset || len(events) > 0; reset = false {
		n := min(len(events), snapshotPart)
		c.send(&wire.KVEvents{Sequence: next, Next: next, Reset: reset, Events: wireEvents(events[:n])})
		events = events[n:]
	}
}

func wireEvents(events []kvcache.Event) []wire.KVEvent {
	out := make([]wire.KVEvent, len(events))
	for i, e := range events {
		kind := [...]uint8{kvcache.Stored: wire.KVStored, kvcache.Removed: wire.KVRemoved, kvcache.Cleared: wire.KVCleared}[e.Kind]
		out[i] = wire.KVEvent{Kind: kind, Digest: e.Key.Digest, Parent: e.Parent, Version: e.Key.Version}
	}
	return out
}
