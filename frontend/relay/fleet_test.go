package relay

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"baton/route"
)

// loneWorker is a fleet of one healthy decode worker.
func loneWorker() (*fleet, *worker) {
	f := newFleet(new(route.TurnRouter), new(route.TurnRouter))
	w, _, _ := f.add(Worker{URL: "http://w"}, []legKind{decodeLeg}, func() *endpoint { return nil }, "w")
	f.setHealth(w, w.roles, nil, 0)
	return f, w
}

func (f *fleet) tryAcquire(ctx context.Context, wait time.Duration) (*lease, error) {
	return f.acquire(ctx, decodeLeg, route.Request{}, 1, nil, wait)
}

// A worker whose breaker is open gets one request that tries it after each pause while there is another worker, and
// whatever comes while there is none: the last worker of a leg is not taken away.
func TestBreakersLeaveOneWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, bad := loneWorker()
		good, _, _ := f.add(Worker{URL: "http://good"}, []legKind{decodeLeg}, func() *endpoint { return nil }, "good")
		f.setHealth(good, good.roles, nil, 0)
		count := func(n int) (trials, others int) {
			for range n {
				l, err := f.tryAcquire(t.Context(), 0)
				switch {
				case err != nil:
					t.Fatal(err)
				case l.w == good:
					l.end(succeeded)
					continue
				case l.trial:
					trials++
				default:
					others++
				}
				l.end(failedLeg)
			}
			return trials, others
		}
		if trials, others := count(20); trials != 0 || others != breakerFailures {
			t.Errorf("before its breaker opened the worker that fails got %d requests, and %d trials", others, trials)
		}
		time.Sleep(breakerPause)
		if trials, others := count(20); trials != 1 || others != 0 {
			t.Errorf("after its pause it got %d trials, and %d more", trials, others)
		}
		f.setHealth(good, good.roles, failed(errDial, errors.New("refused")), 1)
		if trials, others := count(20); trials != 0 || others != 20 {
			t.Errorf("being the last it got %d trials, and %d more of 20", trials, others)
		}
		l, err := f.tryAcquire(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		l.end(succeeded)
		if bad.breaker.open {
			t.Error("a success left its breaker open")
		}
		f.setHealth(bad, bad.roles, failed(errDial, errors.New("refused")), 1)
		if _, err := f.tryAcquire(t.Context(), 0); !errors.As(err, new(*noWorkerError)) {
			t.Errorf("a worker that cannot be reached: %v", err)
		}
	})
}

// A wait ends with its time, with the request, or with a worker.
func TestAcquireWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, w := loneWorker()
		f.setHealth(w, w.roles, failed(errDial, errors.New("refused")), 1)
		start := time.Now()
		var none *noWorkerError
		if _, err := f.tryAcquire(t.Context(), 10*time.Second); !errors.As(err, &none) || time.Since(start) != 10*time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := f.tryAcquire(ctx, time.Minute); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		got := make(chan error)
		for range 3 {
			go func() {
				l, err := f.tryAcquire(t.Context(), time.Minute)
				if err == nil {
					l.end(succeeded)
				}
				got <- err
			}()
		}
		synctest.Wait()
		f.setHealth(w, w.roles, nil, 0)
		for range 3 {
			if err := <-got; err != nil {
				t.Error(err)
			}
		}
		if w.requests != [2]int{} || w.content != 0 {
			t.Errorf("%v requests of %d bytes stay counted", w.requests, w.content)
		}
		if got, idle := f.leave("http://w"); got != w || idle == nil {
			t.Error("it cannot leave")
		} else {
			<-idle
		}
	})
}

// What a probe found out of a worker for one leg does not count for another that it takes meanwhile.
func TestRoleComesDuringAProbe(t *testing.T) {
	f, w := loneWorker()
	f.setHealth(w, w.roles, failed(errDial, errors.New("refused")), 1)
	before := f.rolesOf(w)
	other := prefillLeg
	if before[prefillLeg] {
		other = decodeLeg
	}
	if again, isNew, err := f.add(w.Worker, []legKind{other}, nil, ""); again != w || isNew || err != nil {
		t.Fatal("another worker")
	}
	if f.setHealth(w, before, nil, 0) || f.hasJoined(w) {
		t.Error("it has joined")
	}
	if !f.setHealth(w, f.rolesOf(w), nil, 0) || !f.hasJoined(w) {
		t.Error("it has not joined")
	}
}
