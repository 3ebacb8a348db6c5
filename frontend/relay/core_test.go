package relay

import (
	"sync"
	"testing"
	"time"
)

// Behaviours 23 and 26: the layout's vectors; node and counter can be read back; ids are at least 2^40.
func TestSnowflake(t *testing.T) {
	for _, c := range []struct {
		ms, node, process, counter uint64
		want                       int64
	}{
		{0, 0, 0, 0, 1099511627776},
		{1, 0, 0, 0, 1099528404992},
		{1000, 5, 0, 0, 1116289171456},
		{123456789, 255, 0, 1023, 2072360744059903},
		{123456789, 3, 7, 42, 2072360727551018},
		{1<<39 - 1, 255, 63, 1023, 2199023255552},
		{65536, 0, 0, 0, 2199023255552},
	} {
		got := Snowflake(c.ms, c.node, c.process, c.counter)
		if got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
		if c.ms < 1<<38 && (uint64(got)>>16&255 != c.node || uint64(got)>>10&63 != c.process || uint64(got)&1023 != c.counter || uint64(got-1<<40)>>24 != c.ms) {
			t.Errorf("%+v cannot be read back from %d", c, got)
		}
	}
}

// Behaviours 24 and 25: ids of different nodes differ, those of one node too, however many are made in a millisecond
// and after a restart within it.
func TestMinter(t *testing.T) {
	for _, node := range []int{-1, 256} {
		if _, err := NewMinter(node); err == nil {
			t.Errorf("node %d is taken", node)
		}
		if _, err := New(Config{NodeID: node}); err == nil {
			t.Errorf("a relay with node id %d is made", node)
		}
	}
	ids := make(map[int64]bool)
	var mu sync.Mutex
	var group sync.WaitGroup
	for _, node := range []int{0, 255} {
		m, err := NewMinter(node)
		if err != nil {
			t.Fatal(err)
		}
		frozen := time.Now()
		m.now = func() time.Time { return frozen }
		for range 4 {
			group.Go(func() {
				for range 3000 {
					id := m.Mint()
					mu.Lock()
					if ids[id] || id < 1<<40 || int(id>>16&255) != node {
						t.Errorf("node %d made %d", node, id)
					}
					ids[id] = true
					mu.Unlock()
				}
			})
		}
	}
	group.Wait()
	if len(ids) != 24000 {
		t.Errorf("%d ids", len(ids))
	}
	m, _ := NewMinter(1)
	before := m.Mint()
	time.Sleep(2 * time.Millisecond)
	again, _ := NewMinter(1)
	if after := again.Mint(); after <= before && after>>62 == before>>62 {
		t.Errorf("a restarted node made %d after %d", after, before)
	}
}

func TestBreaker(t *testing.T) {
	var b breaker
	now := time.Unix(1000, 0)
	at := func(seconds float64) time.Time { return now.Add(time.Duration(seconds * float64(time.Second))) }
	check := func(when string, seconds float64, allows bool, state string) {
		t.Helper()
		if b.allows(at(seconds)) != allows || b.state(at(seconds)) != state {
			t.Errorf("%s: allows %t, %s", when, b.allows(at(seconds)), b.state(at(seconds)))
		}
	}
	for i := range breakerFailures {
		check("before it opens", 0, true, "closed")
		if opened := b.failure(at(0), false); opened != (i == breakerFailures-1) {
			t.Errorf("failure %d opened it: %t", i, opened)
		}
	}
	check("open", 0.9, false, "open")
	if b.failure(at(0.9), false) {
		t.Error("a late failure opens it again")
	}
	check("after the pause", 1, true, "half-open")
	trial := b.begin(at(1))
	check("during the trial", 1, false, "half-open")
	b.failure(at(1.5), trial)
	check("after a failed trial", 3.4, false, "open")
	check("after twice the pause", 3.5, true, "half-open")
	b.cancel(b.begin(at(3.5)))
	check("after a trial that said nothing", 3.5, true, "half-open")
	for i := range 10 { // the pause has a limit
		b.failure(at(4+float64(40*i)), b.begin(at(4+float64(40*i))))
	}
	check("after many failed trials", 364+29, false, "open")
	if b.begin(at(364 + 29)) {
		t.Error("a request that is sent although the breaker is open is a trial")
	}
	check("after many failed trials", 364+30, true, "half-open")
	b.begin(at(364 + 30))
	b.success()
	check("after a success", 400, true, "closed")
	if b.begin(at(400)) {
		t.Error("a closed breaker has trials")
	}
	for range breakerFailures - 1 {
		b.failure(at(36), false)
	}
	b.success()
	b.failure(at(36), false)
	check("failures that are not in a row", 36, true, "closed")
}
