package collective

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestBarrierGivesUp(t *testing.T) {
	b := barrier{size: 2}
	r, last, ok := b.arrive()
	if r != 0 || last || !ok {
		t.Fatal("the first to come:", r, last, ok)
	}
	if r, last, ok = b.arrive(); r != 0 || !last || !ok {
		t.Fatal("the last to come:", r, last, ok)
	}
	if b.giveUp(0) {
		t.Fatal("a round to which all have come was given up")
	}
	b.release(0)
	if !b.released(0) || b.released(1) || b.giveUp(0) {
		t.Fatal("after the first round")
	}
	if r, last, ok = b.arrive(); r != 1 || last || !ok {
		t.Fatal("the first to come to the second round:", r, last, ok)
	}
	for range 2 {
		if !b.giveUp(1) {
			t.Fatal("a round that waits cannot be given up")
		}
	}
	if r, last, ok = b.arrive(); r != 1 || last || ok {
		t.Fatal("whoever comes after that:", r, last, ok)
	}
}

// TestBarrierHolds counts rounds with members that are late at random.
func TestBarrierHolds(t *testing.T) {
	const members, rounds = 5, 2000
	b := barrier{size: members}
	var inside [2]atomic.Int32 // of even and odd rounds
	var wg sync.WaitGroup
	for i := range members {
		wg.Go(func() {
			r := newRand(i)
			for round := range uint32(rounds) {
				for range r.IntN(3) {
					runtime.Gosched()
				}
				inside[round%2].Add(1)
				if got, last, _ := b.arrive(); got != round {
					t.Errorf("round %d is %d", round, got)
				} else if last {
					b.release(round)
				}
				for !b.poll(round) {
				}
				if n := inside[round%2].Load(); n != int32(members*(round/2+1)) {
					t.Errorf("%d had come to round %d when it ended", n, round)
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestCompleteRoundsAreKept fails the world when all have come to a barrier whose last has not yet released
// it: the others use each other's memory next, so nobody may leave.
func TestCompleteRoundsAreKept(t *testing.T) {
	ws := Local(2)
	defer shut(t, ws)
	var ms []shared
	for _, w := range ws {
		g, err := w.Group("all", []int{0, 1})
		if err != nil {
			t.Fatal(err)
		}
		ms = append(ms, g.(shared))
		ms[len(ms)-1].slot().come.Add(1)
		ms[0].s.barrier.arrive()
	}
	ws[1].Fail(errors.New("smoke"))
	left := make(chan error)
	go func() { left <- ms[0].await(0, false) }()
	select {
	case err := <-left:
		t.Fatalf("it left: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	ms[1].release(0)
	if err := <-left; err != nil {
		t.Fatal(err)
	}
}
