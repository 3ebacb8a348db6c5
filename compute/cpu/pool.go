package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// task is one operation cut into independent pieces. Pieces write disjoint memory, so who runs which
// piece, and when, cannot change a bit.
type task interface {
	run(w *scratch, piece int)
}

// pool runs the pieces of one task at a time on the calling goroutine and its helpers.
//
// state holds a task's number in its high half and the next unclaimed piece in its low half. A claim is
// a compare-and-swap of the whole word, so that a helper that woke late can never claim a piece of a
// later task with what it read about an earlier one.
type pool struct {
	state   atomic.Uint64
	task    atomic.Pointer[task]
	pieces  atomic.Uint32
	done    atomic.Uint32
	waiting atomic.Bool   // the caller sleeps until the last piece is done
	wake    chan struct{} // to the caller, one token
	parked  atomic.Int32  // helpers that sleep, or are about to
	work    chan struct{} // to parked helpers
	stop    chan struct{}
	helpers sync.WaitGroup
	own     *scratch // the caller's
	number  uint32
	threads int
	spin    int // rounds of polling before a goroutine parks
}

// A waiting goroutine first polls, because the next operation of a pass usually follows within
// microseconds and waking a parked thread costs about as much; then it parks.
const (
	spinRounds = 60
	spinPauses = 40 // a round is roughly half a microsecond
)

const allClaimed = 1<<32 - 1

func newPool(workers []*scratch, spin int) *pool {
	p := &pool{
		wake:    make(chan struct{}, 1),
		work:    make(chan struct{}, len(workers)),
		stop:    make(chan struct{}),
		own:     workers[0],
		threads: len(workers),
		spin:    spin,
	}
	for _, w := range workers[1:] {
		p.helpers.Go(func() { p.help(w) })
	}
	return p
}

// run returns when every piece of t has run. t must point to memory that lives as long as the pool.
func (p *pool) run(t *task, pieces int) {
	if pieces <= 1 || p.threads == 1 {
		p.alone(t, pieces)
		return
	}
	// Close the old task before its fields change: else a helper that holds the old word could take the
	// new number of pieces for the old one's and claim a piece that the new task will run again.
	p.number++
	p.state.Store(uint64(p.number)<<32 | allClaimed)
	p.done.Store(0)
	p.task.Store(t)
	p.pieces.Store(uint32(pieces))
	p.state.Store(uint64(p.number) << 32)
	for n := min(int(p.parked.Load()), pieces-1); n > 0; n-- {
		select {
		case p.work <- struct{}{}:
		default:
		}
	}
	p.claim(p.own)
	p.finish(uint32(pieces))
}

// alone runs every piece of t on the calling goroutine.
func (p *pool) alone(t *task, pieces int) {
	for i := range pieces {
		(*t).run(p.own, i)
		p.own.rest()
	}
}

// claim runs pieces of the current task until none is left.
func (p *pool) claim(w *scratch) {
	for {
		s := p.state.Load()
		n := p.pieces.Load()
		t := p.task.Load()
		if uint32(s) >= n {
			return
		}
		if !p.state.CompareAndSwap(s, s+1) {
			continue
		}
		(*t).run(w, int(uint32(s)))
		if p.done.Add(1) == n && p.waiting.CompareAndSwap(true, false) {
			p.wake <- struct{}{}
		}
		w.rest()
	}
}

// restPieces is how many pieces, of some microseconds each, a worker runs before it rests.
const restPieces = 32

// rest lets other goroutines have the processor now and then: a long pass would otherwise keep them
// waiting until the runtime preempts it, which takes many milliseconds. No piece is held meanwhile.
func (w *scratch) rest() {
	if w.pieces++; w.pieces%restPieces == 0 {
		runtime.Gosched()
	}
}

// finish waits until all pieces are done.
func (p *pool) finish(n uint32) {
	for round := range p.spin {
		if p.done.Load() == n {
			return
		}
		pause(spinPauses)
		if round%16 == 15 {
			runtime.Gosched()
		}
	}
	p.waiting.Store(true)
	if p.done.Load() == n && p.waiting.CompareAndSwap(true, false) {
		return
	}
	<-p.wake
}

func (p *pool) idle() bool { return uint32(p.state.Load()) >= p.pieces.Load() }

// help is a helper's life.
func (p *pool) help(w *scratch) {
	for {
		for round := 0; round < p.spin && p.idle(); round++ {
			pause(spinPauses)
			if round%16 == 15 {
				runtime.Gosched()
			}
		}
		if !p.idle() {
			p.claim(w)
			continue
		}
		p.parked.Add(1)
		if p.idle() {
			select {
			case <-p.work:
			case <-p.stop:
				p.parked.Add(-1)
				return
			}
		}
		p.parked.Add(-1)
		select {
		case <-p.stop:
			return
		default:
		}
	}
}

// close stops the helpers and waits for them.
func (p *pool) close() {
	close(p.stop)
	p.helpers.Wait()
}
