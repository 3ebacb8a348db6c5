package collective

import (
	"runtime"
	"sync/atomic"
)

// barrier holds members until all have come. It counts rounds, so that it can be used again at once.
//
// state is the number of the round in the high half and how many have come in the low half. Once all have
// come the round cannot be broken any more; before, whoever gives up sets broken, and no round ends from
// then on.
type barrier struct {
	state  atomic.Uint64
	_      [56]byte // what is polled has a cache line of its own
	parked atomic.Int32
	size   uint32
}

const broken = 1 << 31

func came(state uint64) uint32  { return uint32(state) &^ broken }
func round(state uint64) uint32 { return uint32(state >> 32) }

// arrive counts the caller. It returns the round, and whether the caller is its last and must release it.
func (b *barrier) arrive() (r uint32, last, ok bool) {
	s := b.state.Add(1)
	return round(s), came(s) == b.size && s&broken == 0, s&broken == 0
}

// release lets the others go; only the last to come may.
func (b *barrier) release(r uint32) { b.state.Store(uint64(r+1) << 32) }

func (b *barrier) released(r uint32) bool { return round(b.state.Load()) != r }

// giveUp breaks the barrier, unless all have come to round r: then it reports false.
func (b *barrier) giveUp(r uint32) bool {
	for {
		s := b.state.Load()
		if round(s) != r || came(s) == b.size && s&broken == 0 {
			return false
		}
		if s&broken != 0 || b.state.CompareAndSwap(s, s|broken) {
			return true
		}
	}
}

// A member that waits first polls, because the others are usually at most some microseconds behind and waking
// a thread costs more; then it parks.
const (
	pollRounds = 128
	pollLoads  = 100
)

// poll waits a little for the end of a round. With more members than processors it lets the others run.
func (b *barrier) poll(r uint32) bool {
	loads := pollLoads
	if int(b.size) > runtime.GOMAXPROCS(0) {
		loads = 1
	}
	for range pollRounds {
		for range loads {
			if b.released(r) {
				return true
			}
		}
		runtime.Gosched()
	}
	return b.released(r)
}
