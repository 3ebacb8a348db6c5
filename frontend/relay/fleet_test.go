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
	w, _ := f.add(Worker{URL: "http://w"}, decodeLeg, func() *endpoint { return nil }, "w")
	f.setHealth(w, w.roles, nil, 0)
	return f, w
}

func (f *fleet) tryAcquire(ctx context.Context, wait time.Duration) (*lease, error) {
	return f.acquire(ctx, decodeLeg, route.Request{}, 1, nil, wait)
}

// Requests that wait for the only worker while its breaker lets one try get it when the next may, not before.
func TestWaitingForATrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _ := loneWorker()
		for range breakerFailures {
			l, err := f.tryAcquire(t.Context(), 0)
			if err != nil {
				t.Fatal(err)
			}
			l.end(failedLeg)
		}
		start := time.Now()
		trial, err := f.tryAcquire(t.Context(), time.Minute)
		if err != nil || time.Since(start) != breakerPause || !trial.trial {
			t.Fatalf("a trial after %v: %+v, %v", time.Since(start), trial, err)
		}
		done := make(chan time.Duration)
		go func() {
			l, err := f.tryAcquire(t.Context(), time.Minute)
			if err != nil || !l.trial {
				t.Errorf("%+v, %v", l, err)
				close(done)
				return
			}
			l.end(succeeded)
			done <- time.Since(start)
		}()
		time.Sleep(5 * time.Second) // the trial takes its time
		trial.end(failedLeg)
		if took := <-done; took != breakerPause+5*time.Second+2*breakerPause {
			t.Errorf("the next trial was after %v", took)
		}
		if l, err := f.tryAcquire(t.Context(), 0); err != nil || l.trial {
			t.Errorf("after a success: %+v, %v", l, err)
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
	if again, isNew := f.add(w.Worker, other, nil, ""); again != w || isNew {
		t.Fatal("another worker")
	}
	if f.setHealth(w, before, nil, 0) || f.hasJoined(w) {
		t.Error("it has joined")
	}
	if !f.setHealth(w, f.rolesOf(w), nil, 0) || !f.hasJoined(w) {
		t.Error("it has not joined")
	}
}
