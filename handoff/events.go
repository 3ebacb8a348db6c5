package handoff

import (
	"time"

	"baton/kvcache"
	"baton/layout"
	"baton/wire"
)

// Event is what happened: one of the types below.
type Event interface{ event() }

// Retain keeps a prompt's KV for a decode engine. The Core owns the table from now on.
type Retain struct {
	ID         uint64 // of the request
	Table      *kvcache.Table
	Tokens     int    // whose KV the export offers; at most Table.Len()
	Capability []byte // shown by whoever reads; drawn at random by the engine
	// Lease bounds how long an export waits, from its offer and from each Renew, for its Release; 0: for ever. It does
	// not end while a push is under way. Then the export is released, and the other side told so by a RequestError with
	// wire.CodeGone: nobody reads it any more, and its blocks are free once nobody does.
	Lease time.Duration
}

// Sealed answers one Seal.
type Sealed struct {
	Handoff uint64
	Rank    int
}

// Opened answers one OpenExport.
type Opened struct {
	Handoff uint64
	Rank    int
	Err     error // nil: the rank's blocks can be read
}

// Push starts sending to a decode engine that is ready. Template leads from this engine's layout to
// that engine's; Checksums does for the blocks' checksums, where handoffs are verified.
type Push struct {
	Message   *wire.SendKV
	Template  *layout.Template
	Checksums *layout.Template
}

// Release ends an export: its reader is done, or will never come. Unknown ones are ignored, so it may be
// repeated. Corrupt says that the reader did not get what was sealed: the pool forgets the blocks, and what it has
// cached behind them, so that nobody meets them again.
type Release struct {
	ID, Handoff uint64
	Corrupt     bool
}

// Renew begins an export's lease anew. Unknown ones are ignored.
type Renew struct{ ID, Handoff uint64 }

// Revoked answers one Revoke.
type Revoked struct {
	Handoff  uint64
	Rank     int
	Quiesced bool // nothing reads the blocks any more
}

// Import brings a request whose KV lies on another engine. One whose ID is being imported already is
// ignored.
type Import struct {
	Message *wire.SubmitRequestWithKV
	// Version is that of the weights that made the KV.
	Version uint64
	// Capacity is the most tokens whose KV the request will ever hold here.
	Capacity int
	// Reserve is for how many of those tokens blocks are set aside; 0 is all of Capacity.
	Reserve int
	// Template leads from the source's layout to this engine's; Checksums does for the blocks' checksums,
	// where handoffs are verified.
	Template  *layout.Template
	Checksums *layout.Template
}

// Expected answers one Expect.
type Expected struct {
	Transfer uint64
	Tag      []byte
	Err      error // nil: the rank's receive is prepared
}

// Settled tells how a transfer ended: well (no Err), badly with nothing in flight any more (Err and Safe),
// or badly with bytes that may still be read or written (Err alone). The last kind is settled a second
// time, once it is safe.
type Settled struct {
	Transfer uint64
	Err      error
	Safe     bool
	Bytes    int64 // moved
}

// Verified answers one Verify. An Err says what differs.
type Verified struct {
	Transfer uint64
	Err      error // nil: the blocks are what the source sealed
}

// Abort cancels a request, whatever its state here. Unknown ones are ignored.
type Abort struct{ ID uint64 }

// Abandon aborts everything, with nobody left to tell: the link to the other side is gone for good.
type Abandon struct{}

// Poll makes time pass. Step it every few hundred milliseconds at least, and whenever tables were closed
// outside the Core, since an import may have waited for their blocks.
type Poll struct{}

func (Retain) event()   {}
func (Sealed) event()   {}
func (Opened) event()   {}
func (Push) event()     {}
func (Release) event()  {}
func (Renew) event()    {}
func (Revoked) event()  {}
func (Import) event()   {}
func (Expected) event() {}
func (Settled) event()  {}
func (Verified) event() {}
func (Abort) event()    {}
func (Abandon) event()  {}
func (Poll) event()     {}

// Action is an order to the engine: one of the types below. Transfers have numbers, under which their
// events come back. An order about a rank is carried out on that rank, after all earlier ones about it.
type Action interface{ action() }

// Range is a run of bytes of a rank's pool.
type Range struct{ Off, Len int64 }

// Seal makes the checksums of blocks on a rank, whose bytes do not change meanwhile. Answer with Sealed, in the
// order of the Seals; there may be no block at all, which waits for the earlier ones.
type Seal struct {
	Handoff uint64
	Rank    int
	Blocks  []int32
}

// OpenExport lets whoever shows the capability read the ranges of a rank. Answer with Opened.
type OpenExport struct {
	Handoff    uint64
	Rank       int
	Capability []byte
	Ranges     []Range
}

// Offer ends the prefill leg: the request's reply carries the export.
type Offer struct {
	ID     uint64
	Export *wire.Export
}

// StartPush writes copies from a rank to the peer. Its end is a Settled.
type StartPush struct {
	Transfer uint64
	Rank     int
	Peer     []byte // the peer rank's transport description
	Tag      []byte
	Copies   []layout.Copy
}

// Revoke stops an export on a rank. Answer with Revoked.
type Revoke struct {
	Handoff uint64
	Rank    int
}

// StartPull reads copies from the peer into a rank. Its end is a Settled.
type StartPull struct {
	Transfer   uint64
	Rank       int
	Peer       []byte // the peer rank's transport description
	Handoff    uint64
	Capability []byte
	Copies     []layout.Copy
}

// Expect prepares a rank to receive into the ranges, by one push. Answer with Expected; its end is a Settled.
type Expect struct {
	Transfer uint64
	Rank     int
	Ranges   []Range
}

// Verify compares blocks on a rank with their checksums, which came along. Neither changes meanwhile. Answer with
// Verified.
type Verify struct {
	Transfer uint64
	Rank     int
	Blocks   []int32
}

// Cancel asks a transfer to stop. Its end is a Settled all the same.
type Cancel struct{ Transfer uint64 }

// Recheck asks whether a transfer that settled unsafely has become safe. If so, answer with Settled.
type Recheck struct{ Transfer uint64 }

// Admit gives a request whose KV is complete to the scheduler, which owns the table from now on.
type Admit struct {
	Message *wire.SubmitRequestWithKV
	Table   *kvcache.Table
	Arrived time.Time
	// Stats has Transfer, BlocksMoved, BlocksReused and BytesMoved; Handoff is the time until now.
	Stats wire.Stats
}

// Send gives the other side a message: KVTransferReady, KVReadDone, RequestError or RequestAborted.
type Send struct{ Message wire.Message }

func (Seal) action()       {}
func (OpenExport) action() {}
func (Offer) action()      {}
func (StartPush) action()  {}
func (Revoke) action()     {}
func (StartPull) action()  {}
func (Expect) action()     {}
func (Verify) action()     {}
func (Cancel) action()     {}
func (Recheck) action()    {}
func (Admit) action()      {}
func (Send) action()       {}
