// Package handoff decides how the KV of a prompt gets from the engine that computed it to the engine that
// continues it: what a prefill engine retains and until when, what a decode engine reserves, reads and
// admits, and which blocks nobody may reuse because a transfer may still touch them.
//
// A Core is a plain value without goroutine, clock or socket. Its engine gives it events, one at a time,
// and carries out the actions that come back, in order: it runs transfers on its backend and sends
// messages to the other side, whatever the link is. One Core serves one engine; the leader of a rank group
// holds it and runs the actions of each rank there.
//
// The walk of a request, seen from the two Cores:
//
//	prefill                                      decode
//	Retain      -> Seal
//	Sealed      -> OpenExport
//	Opened      -> Offer
//	                                             Import      -> StartPull (or Expect)
//	                                             Expected    -> Send(KVTransferReady)
//	Push        -> StartPush
//	Settled                                      Settled     -> Verify
//	                                             Verified    -> Send(KVReadDone), Admit
//	Release     -> Revoke
//	Revoked
//
// Source blocks stay pinned until the export is released and the backend says that nothing reads them any
// more. Destination blocks of a transfer that ended badly stay in quarantine until it says that nothing
// writes them any more. Neither ever depends on a timeout. Should a block be given to somebody else all
// the same, its generation tells, and the request fails rather than using it. Seal and Verify are steps only
// where handoffs are verified: the source makes checksums of its blocks, which move along with them.
package handoff

import (
	"fmt"
	"time"

	"baton/kvcache"
)

// DefaultTimeout bounds a transfer when Config does not.
const DefaultTimeout = 30 * time.Second

// Config says what a Core works with.
type Config struct {
	// Pool is the engine's. The Core shares it with the engine's scheduler, on one goroutine.
	Pool *kvcache.Pool
	// BlockBytes is the size of a block on each rank of the engine, in rank order.
	BlockBytes []int64
	// Push says that sources write (transfer.Pusher) rather than destinations read (transfer.Puller).
	Push bool
	// Timeout bounds a transfer, from its start. 0 means DefaultTimeout.
	Timeout time.Duration
	// Verify says which blocks are compared with their checksums after a transfer; empty is VerifyOff. Both
	// sides must agree.
	Verify Verification
	// Checksums is where each rank keeps those of its blocks, in rank order. Only with verification.
	Checksums []Checksums
}

func (c Config) validate() error {
	if c.Pool == nil {
		return fmt.Errorf("handoff: Config.Pool is missing")
	}
	if len(c.BlockBytes) == 0 {
		return fmt.Errorf("handoff: Config.BlockBytes is empty; it needs a size for each rank")
	}
	for rank, n := range c.BlockBytes {
		if n <= 0 {
			return fmt.Errorf("handoff: Config.BlockBytes[%d] is %d; it must be positive", rank, n)
		}
	}
	if c.Timeout < 0 {
		return fmt.Errorf("handoff: Config.Timeout is %v; it must not be negative", c.Timeout)
	}
	return c.validateChecksums()
}

// Core is one engine's side of all its handoffs.
type Core struct {
	config Config
	pool   *kvcache.Pool

	lastHandoff  uint64
	exports      []*export          // by number
	aborted      [256]abortedExport // the last ones, by number modulo that
	queue        []*importing
	moving       []*importing
	quarantined  []*importing
	lastTransfer uint64
	transfers    map[uint64]*leg
	retry        bool         // something changed that the queue may have waited for
	kept         []Quarantine // not told yet
	sealed       []uint32     // of each block, the generation that has checksums or is about to

	stats   Stats
	now     time.Time
	actions []Action
}

// New makes an idle Core.
func New(c Config) (*Core, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	core := &Core{config: c, pool: c.Pool, transfers: map[uint64]*leg{}}
	core.config.Verify, _ = ParseVerification(string(c.Verify)) // validated
	if core.verifies() {
		core.sealed = make([]uint32, c.Pool.Stats().Total)
	}
	return core, nil
}

// leg is one transfer, or the verification of what it brought, on one rank, from the order to start it until nothing of it is in flight.
type leg struct {
	transfer uint64
	rank     int
	export   *export    // one of the two is set
	imported *importing //
	part     int        // of an import that is pushed to: which of the template's legs it is
	reader   uint64     // of a push: who receives it
	deadline time.Time  // of a push; an import has its own
	failed   bool       // the failure was reported
	unsafe   bool       // it failed, and may still touch memory
}

func (c *Core) newLeg(l leg) *leg {
	c.lastTransfer++
	l.transfer = c.lastTransfer
	c.transfers[l.transfer] = &l
	return &l
}

// Step takes one event and returns what to do, in order.
func (c *Core) Step(now time.Time, event Event) []Action {
	c.now, c.actions = now, nil
	switch e := event.(type) {
	case Retain:
		c.retain(e)
	case Sealed:
		c.sealedBy(e)
	case Opened:
		c.opened(e)
	case Push:
		c.push(e)
	case Release:
		c.released(e)
	case Renew:
		c.renew(e)
	case Revoked:
		c.revoked(e)
	case Import:
		c.submit(e)
	case Expected:
		c.expected(e)
	case Settled:
		c.settled(e)
	case Verified:
		c.verified(e)
	case Abort:
		c.abort(e.ID)
	case Abandon:
		c.abandon()
	case Poll:
		c.poll()
	}
	for c.retry {
		c.retry = false
		c.startQueued()
	}
	actions := c.actions
	c.actions = nil
	return actions
}

func (c *Core) act(a Action) { c.actions = append(c.actions, a) }

// settled takes in the end of a transfer, or of the danger that a failed one still was.
func (c *Core) settled(e Settled) {
	l := c.transfers[e.Transfer]
	if l == nil {
		return
	}
	if e.Err != nil && !e.Safe {
		l.unsafe = true
	} else {
		delete(c.transfers, e.Transfer)
	}
	if l.export != nil {
		c.pushSettled(l, e)
	} else {
		c.importSettled(l, e)
	}
}

func (c *Core) abort(id uint64) {
	c.abortExports(id)
	c.abortImport(id)
}

// abandon is an abort of everything, with nobody left to be told.
func (c *Core) abandon() {
	for _, x := range append([]*export(nil), c.exports...) {
		x.silent = true
		c.release(x)
	}
	queue, moving := c.queue, append([]*importing(nil), c.moving...)
	c.queue = nil
	for _, m := range append(queue, moving...) {
		m.silent = true
		c.drop(m)
	}
	for _, m := range c.quarantined {
		m.silent = true
	}
}

func (c *Core) poll() {
	c.pollExports()
	c.pollImports()
	c.retry = true
}

// Quarantine says that blocks which nobody uses any more are kept, since a transfer may still touch them.
type Quarantine struct {
	ID     uint64 // of the request that they were for
	Blocks int
	Source bool // they were being read or sent, not written
}

// Quarantines returns those that began since the last call.
func (c *Core) Quarantines() []Quarantine {
	kept := c.kept
	c.kept = nil
	return kept
}

// BusyError says why a Reset is refused.
type BusyError struct{ Exports, Imports, Quarantined int }

func (e *BusyError) Error() string {
	return fmt.Sprintf("handoff: cannot reset: %d exports are retained, %d imports under way, %d in quarantine; wait until they end",
		e.Exports, e.Imports, e.Quarantined)
}

// Reset forgets the pool's cached prefixes. While anything is pinned or in flight it refuses, with a
// *BusyError, and changes nothing.
func (c *Core) Reset() error {
	if len(c.exports)+len(c.queue)+len(c.moving)+len(c.quarantined) > 0 {
		return &BusyError{len(c.exports), len(c.queue) + len(c.moving), len(c.quarantined)}
	}
	c.pool.Clear()
	return nil
}

// Stats are gauges of now, then totals since the start.
type Stats struct {
	Exports     int // retained, those being released included
	Queued      int // imports that wait for blocks or for a prefix on its way
	Moving      int // imports whose transfer, or its verification, is under way
	Quarantined int // failed imports whose blocks a transfer may still touch
	// QuarantinedBlocks counts blocks of those, and of released exports that are not quiesced yet.
	QuarantinedBlocks int

	Exported     uint64 // offers made
	Imported     uint64 // imports admitted
	Failed       uint64 // exports and imports that failed; aborted ones do not count
	BlocksMoved  uint64
	BlocksReused uint64 // blocks of imported prompts that were cached already
	BytesMoved   uint64 // as the backend counted them
	// Stale counts exports and imports that failed since a block of theirs had been given to somebody else:
	// always 0, unless this engine is at fault.
	Stale uint64
	// Corrupt counts imports that failed since what arrived does not have the checksums that its source made.
	Corrupt uint64
}

// Stats returns the counts.
func (c *Core) Stats() Stats {
	s := c.stats
	s.Exports, s.Queued, s.Moving, s.Quarantined = len(c.exports), len(c.queue), len(c.moving), len(c.quarantined)
	for _, x := range c.exports {
		if x.releasing {
			s.QuarantinedBlocks += len(x.pin.Blocks())
		}
	}
	for _, m := range c.quarantined {
		s.QuarantinedBlocks += len(m.pin.Blocks())
	}
	return s
}
