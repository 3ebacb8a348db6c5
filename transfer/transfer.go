// Package transfer moves bytes between the KV pools of two engines. Subpackages are backends; each is a
// Puller (the destination reads) or a Pusher (the source writes). A backend never decides when memory
// may be reused: it reports, and handoff decides.
//
// A Memory belongs to whoever made it and outlives the endpoints on it. A backend never touches a byte
// of it outside the copies and ranges that it was given.
package transfer

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Copy moves Len bytes from offset Src of the source's memory to offset Dst of the destination's. The
// copies of one transfer must not overlap at the destination.
type Copy struct {
	Src, Dst, Len int64
}

// State of a transfer. Only the first two say that nothing touches the memory any more.
type State uint8

// The states.
const (
	Done   State = iota + 1 // every byte arrived; nothing is in flight
	Failed                  // it failed, and nothing is in flight
	Unsafe                  // it failed or was cancelled, and bytes may still arrive: never reuse yet
	Running
)

// Status is what a poll of a transfer finds.
type Status struct {
	State State
	Err   error // why, for Failed and Unsafe
	Bytes int64 // moved so far
	Began time.Time
	Ended time.Time // zero while Running
}

// Handle is one transfer under way.
type Handle interface {
	// Poll never blocks. A handle that was Unsafe becomes Failed (or Done) once it is quiesced.
	Poll() Status
	// Settled is closed at the first of Done, Failed, Unsafe; a handle that was Unsafe is polled further.
	Settled() <-chan struct{}
	// Cancel asks it to stop; Poll tells when it has.
	Cancel()
}

// Endpoint is one rank's end of a backend, with its memory registered.
type Endpoint interface {
	// Describe is what a peer needs to reach this memory; it travels in RankInfo.Transport.
	Describe() []byte
	// Close ends all transfers and waits until none touches the memory.
	Close() error
}

// Puller is a backend whose destination reads.
type Puller interface {
	Endpoint
	// Export lets whoever shows the capability (1 to 256 bytes) read the given ranges, until Revoke.
	Export(handoff uint64, capability []byte, ranges []Range) error
	// Revoke refuses further reads and reports whether none is under way any more. While it reports false
	// the memory must stay; ask again.
	Revoke(handoff uint64) (quiesced bool)
	// Pull copies from the peer that peer describes. ctx bounds the whole transfer.
	Pull(ctx context.Context, peer []byte, handoff uint64, capability []byte, copies []Copy) (Handle, error)
}

// Pusher is a backend whose source writes.
type Pusher interface {
	Endpoint
	// Expect prepares to receive one push: only bytes that arrive under the returned tag land, only in ranges.
	Expect(ctx context.Context, ranges []Range) (tag []byte, h Handle, err error)
	// Push writes to the peer that peer describes, under its tag.
	Push(ctx context.Context, peer []byte, tag []byte, copies []Copy) (Handle, error)
}

// Range is a run of bytes of a Memory.
type Range struct{ Off, Len int64 }

// Errors that callers tell apart. Cancel and a cancelled context are context.Canceled.
var (
	ErrPeerLost = errors.New("transfer: peer lost")
	ErrRefused  = errors.New("transfer: peer refused")
	ErrTimeout  = errors.New("transfer: timed out")
	ErrClosed   = errors.New("transfer: endpoint closed")
)

// Error says which transfer failed. It wraps the reason, which may be one of the errors above.
type Error struct {
	Op   string // "tcp pull", "shm export": backend and operation
	Peer string // the other end's address; empty when there is none
	Err  error
}

func (e *Error) Error() string {
	if e.Peer == "" {
		return fmt.Sprintf("%s: %v", e.Op, e.Err)
	}
	return fmt.Sprintf("%s with %s: %v", e.Op, e.Peer, e.Err)
}

// Unwrap returns the reason.
func (e *Error) Unwrap() error { return e.Err }
