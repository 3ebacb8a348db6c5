package coordinator

import (
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"baton/wire"
)

func TestRandomInterleavings(t *testing.T) {
	for range 15 { // of 100 runs, a millisecond each
		rapid.Check(t, func(t *rapid.T) { interleave(t, false) })
	}
}

// While engines only die, leave and evict, no request fails, as long as others are there or come in time.
func TestNoRequestFailsBecauseEnginesGo(t *testing.T) {
	for range 15 {
		rapid.Check(t, func(t *rapid.T) { interleave(t, true) })
	}
}

func interleave(t *rapid.T, calm bool) {
	cfg := Config{Queue: 5}
	if calm {
		cfg.Attempts, cfg.Wait = 1000, 1000*time.Hour
	}
	core, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{
		t: t, core: core, now: time.Unix(0, 0), push: rapid.Bool().Draw(t, "push"), calm: calm,
		peers: map[PeerID]*actor{}, ends: map[[2]uint64]int{}, asked: map[[2]uint64]bool{},
	}
	roles := []string{wire.RolePrefill, wire.RoleDecode}
	if rapid.IntRange(0, 3).Draw(t, "fleet") == 0 {
		roles = []string{wire.RoleBoth}
	}
	for _, r := range roles {
		w.join(r)
	}
	w.join("")
	for range rapid.IntRange(0, 150).Draw(t, "steps") {
		w.act(roles)
	}
	w.settle(roles)
}

// act lets one thing happen. Most are progress, or requests would not get far enough to be disturbed.
func (w *world) act(roles []string) {
	switch n := rapid.IntRange(0, 19).Draw(w.t, "act"); {
	case n < 8:
		for range rapid.IntRange(1, 3).Draw(w.t, "messages") {
			w.deliverOne()
		}
	case n < 14:
		if p := w.pick(busy); p != nil {
			w.work(p)
		}
	case n < 16:
		if p := w.pick(isClient); p != nil {
			w.submit(p)
		}
	case n < 18:
		w.change(roles)
	case rapid.Bool().Draw(w.t, "abort"):
		if p := w.pick(func(p *actor) bool { return len(p.open) > 0 }); p != nil {
			id := rapid.SampledFrom(slices.Sorted(maps.Keys(p.open))).Draw(w.t, "request")
			w.asked[[2]uint64{uint64(p.id), id}] = true
			p.toCore = append(p.toCore, &wire.AbortRequest{ID: id})
		}
	case !w.calm:
		if p := w.pick(func(p *actor) bool { return len(p.exports) > 0 }); p != nil { // one of them is lost
			id := rapid.SampledFrom(slices.Sorted(maps.Keys(p.exports))).Draw(w.t, "export")
			p.toCore = append(p.toCore, &wire.RequestError{ID: id, Code: wire.CodeInternal, Retryable: rapid.Bool().Draw(w.t, "retryable")})
		}
	}
}

// change does something to the fleet.
func (w *world) change(roles []string) {
	switch rapid.IntRange(0, 8).Draw(w.t, "change") {
	case 0:
		if p := w.pick(func(p *actor) bool { return true }); p != nil {
			w.drop(p)
		}
	case 1:
		if p := w.pick(func(p *actor) bool { return p.role != "" && !p.leaving }); p != nil {
			p.leaving = true
			p.toCore = append(p.toCore, &wire.Disconnect{})
		}
	case 2:
		w.join("")
	case 3:
		w.now = w.now.Add(time.Duration(rapid.IntRange(1, 20).Draw(w.t, "seconds")) * time.Second)
		w.step(Event{})
	case 4:
		if p := w.pick(isClient); p != nil {
			p.toCore = append(p.toCore, &wire.Pause{})
		}
	case 5:
		w.resume()
	case 6: // it was cut off, and is back before anybody noticed
		if p := w.pick(func(p *actor) bool { return p.role != "" }); p != nil {
			w.next++
			w.register(p.role, p.name)
		}
	default:
		if len(w.peers) < 8 {
			w.join(rapid.SampledFrom(roles).Draw(w.t, "role"))
		}
	}
}

// settle lets everything that can still happen happen, and checks that nothing is left.
func (w *world) settle(roles []string) {
	if w.pick(isClient) == nil {
		w.join("")
	}
	for slices.ContainsFunc(slices.Collect(maps.Values(w.peers)), waiting) {
		w.deliverOne()
	}
	w.resume() // after all that could pause it again
	if w.calm {
		for _, r := range roles {
			p := w.join(r)
			p.leaving = true // it is not to be told to leave
		}
	}
	for range 10_000 {
		if p := w.pick(waiting); p != nil {
			w.deliverOne()
		} else if p := w.pick(busy); p != nil {
			w.work(p)
		} else if d, ok := w.core.Deadline(); ok {
			w.now = d
			w.step(Event{})
		} else {
			break
		}
	}
	if err := checkIdle(w.core); err != nil {
		w.t.Fatal(err)
	}
	for _, p := range w.peers {
		if len(p.jobs) > 0 || len(p.open) > 0 {
			w.t.Fatalf("peer %d still has jobs %v, requests %v", p.id, p.jobs, p.open)
		}
		if len(p.exports) > 0 {
			w.t.Fatalf("engine %d still keeps exports %v", p.id, p.exports)
		}
	}
}
