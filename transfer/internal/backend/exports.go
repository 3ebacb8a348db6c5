package backend

import (
	"bytes"
	"crypto/subtle"
	"fmt"
	"sync"

	"baton/transfer"
)

// Exports is a source's table of what may be read, and by whom it is being read.
type Exports struct {
	mu   sync.Mutex
	open map[uint64]*export
}

type export struct {
	capability []byte
	set        Set
	readers    int
	revoked    bool
}

// maxCapability bounds a capability in bytes.
const maxCapability = 256

// CheckCapability bounds the length.
func CheckCapability(capability []byte) error {
	if len(capability) == 0 || len(capability) > maxCapability {
		return fmt.Errorf("a capability of %d bytes, want 1 to %d", len(capability), maxCapability)
	}
	return nil
}

// Add opens an export of ranges in a memory of size bytes.
func (e *Exports) Add(handoff uint64, capability []byte, ranges []transfer.Range, size int64) error {
	if err := CheckCapability(capability); err != nil {
		return fmt.Errorf("handoff %d: %w", handoff, err)
	}
	set, err := NewSet(ranges, size)
	if err != nil {
		return fmt.Errorf("handoff %d: %w", handoff, err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.open[handoff] != nil {
		return fmt.Errorf("handoff %d is exported already: revoke it until it is quiesced, or take another number", handoff)
	}
	if e.open == nil {
		e.open = make(map[uint64]*export)
	}
	e.open[handoff] = &export{capability: bytes.Clone(capability), set: set}
	return nil
}

// Revoke refuses further readers and reports whether none is left. A handoff that is not exported has none.
func (e *Exports) Revoke(handoff uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.open[handoff]
	if x == nil {
		return true
	}
	x.revoked = true
	if x.readers > 0 {
		return false
	}
	delete(e.open, handoff)
	return true
}

// Check tells whether the capability opens the export now. The error wraps transfer.ErrRefused and does
// not tell a stranger which handoffs exist.
func (e *Exports) Check(handoff uint64, capability []byte) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, err := e.find(handoff, capability)
	return err
}

func (e *Exports) find(handoff uint64, capability []byte) (*export, error) {
	x := e.open[handoff]
	if x == nil || x.revoked || subtle.ConstantTimeCompare(x.capability, capability) != 1 {
		return nil, fmt.Errorf("%w: handoff %d is not exported, was revoked, or has another capability", transfer.ErrRefused, handoff)
	}
	return x, nil
}

// Begin admits a reader of ranges; end must be called once when it will read no more. The error wraps
// transfer.ErrRefused.
func (e *Exports) Begin(handoff uint64, capability []byte, ranges []transfer.Range) (end func(), err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	x, err := e.find(handoff, capability)
	if err != nil {
		return nil, err
	}
	if !x.set.Contains(ranges) {
		return nil, fmt.Errorf("%w: handoff %d does not export every range that was asked for", transfer.ErrRefused, handoff)
	}
	x.readers++
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		x.readers--
	}, nil
}
