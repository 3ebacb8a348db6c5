package wire

//go:generate go tool msgp -io=false -tests=false -file=residency.go -o=residency_gen.go
//msgp:pointer
//msgp:ignore Header
//msgp:vartuple KVEvent KVEvents KVResync

// The headers of the engines' reports of what they have cached, which the reference system does not have.
const (
	HeaderKVEvents Header = 92 // engine -> coordinator
	HeaderKVResync Header = 93 // coordinator -> engine
)

// Kinds of a KVEvent.
const (
	KVStored  uint8 = 1 // a block can be matched from now on
	KVRemoved uint8 = 2 // it cannot any more
	KVCleared uint8 = 3 // nothing can
)

// KVEvent is one change of an engine's prefix cache.
type KVEvent struct {
	Kind    uint8
	Digest  [32]byte // of the block's chain; zero for KVCleared
	Parent  [32]byte // KVStored: of the chain one block shorter; zero for a first block
	Version uint64   // of the weights that made the block
}

// KVEvents reports changes in the order in which they happened. An engine sends what a pass changed before
// the replies of that pass, and, once it has registered, a snapshot.
//
// Events are numbered. The receiver must be at Sequence, the number of the first one here, and is at Next
// afterwards. When it is not, or is at no number yet, it asks for a snapshot with KVResync. A snapshot comes
// in one message or several: the first has Reset set and makes the receiver forget what it knows and be at
// Sequence; all of them have Sequence equal to Next.
type KVEvents struct {
	Sequence uint64
	Next     uint64
	Reset    bool
	Events   []KVEvent `msg:"Events,limit=1048576"`
}

// KVResync asks for a snapshot. Expected is the number that the sender was at, 0 for none.
type KVResync struct{ Expected uint64 }

// Header is HeaderKVEvents.
func (*KVEvents) Header() Header { return HeaderKVEvents }

// Header is HeaderKVResync.
func (*KVResync) Header() Header { return HeaderKVResync }
