package kvcache

// EventKind says what happened to a cached prefix.
type EventKind uint8

// The kinds of events.
const (
	Stored  EventKind = iota + 1 // a block was written and can be matched
	Removed                      // it was evicted, or forgotten
	Cleared                      // all were forgotten
)

// Event tells an observer (a router's residency index) what the pool caches.
type Event struct {
	Sequence uint64 // 1, 2, ...: after a gap events are lost, and a Snapshot mends that
	Kind     EventKind
	Key      Key    // zero for Cleared
	Parent   Digest // Stored: of the prefix one block shorter; zero for a first block
}

func (p *Pool) emit(e Event) {
	if p.most == 0 {
		return
	}
	p.sequence++
	e.Sequence = p.sequence
	if len(p.events) == p.most {
		p.events = p.events[:0]
	}
	p.events = append(p.events, e)
}

// DrainEvents appends what happened since the last call, in order.
func (p *Pool) DrainEvents(to []Event) []Event {
	to = append(to, p.events...)
	p.events = p.events[:0]
	return to
}

// Snapshot appends events that tell an observer who knows nothing, or the wrong things, what is cached: a
// Cleared, then a Stored for each block, parents first. All bear the sequence number of the last event,
// with which the observer goes on; events not drained yet are dropped, as the snapshot contains them.
func (p *Pool) Snapshot(to []Event) []Event {
	p.events = p.events[:0]
	to = append(to, Event{Sequence: p.sequence, Kind: Cleared})
	told := make([]bool, len(p.blocks))
	var path []int32
	for id := range p.blocks {
		path = path[:0]
		for up := int32(id); up != none && p.blocks[up].registered && !told[up]; up = p.blocks[up].parent {
			path = append(path, up)
			told[up] = true
		}
		for i := len(path) - 1; i >= 0; i-- {
			to = append(to, Event{Sequence: p.sequence, Kind: Stored, Key: p.blocks[path[i]].key, Parent: p.parentDigest(path[i])})
		}
	}
	return to
}

// parentDigest is that of the prefix one block shorter than a registered block's; zero for a first one.
func (p *Pool) parentDigest(id int32) Digest {
	if up := p.blocks[id].parent; up != none {
		return p.blocks[up].key.Digest
	}
	return Digest{}
}
