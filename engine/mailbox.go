package engine

import (
	"sync"

	"baton/handoff"
)

// mailbox carries events of ranks to an engine's loop. Who puts one in never waits: there are no more than orders
// under way.
type mailbox struct {
	mu    sync.Mutex
	list  []handoff.Event
	ready chan struct{} // holds something when the list may
}

func newMailbox() *mailbox { return &mailbox{ready: make(chan struct{}, 1)} }

func (m *mailbox) put(e handoff.Event) {
	m.mu.Lock()
	m.list = append(m.list, e)
	m.mu.Unlock()
	select {
	case m.ready <- struct{}{}:
	default:
	}
}

// take empties the mailbox.
func (m *mailbox) take() []handoff.Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := m.list
	m.list = nil
	return list
}
