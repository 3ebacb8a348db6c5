package coordinator

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"baton/kvcache"
	"baton/wire"
)

// fleetOf makes a core with n prefill and n decode engines, or 2n colocated ones, and one client.
// Connection 1 is the client, then the engines follow.
func fleetOf(tb testing.TB, n int, colocated bool) *Core {
	c, err := New(Config{})
	if err != nil {
		tb.Fatal(err)
	}
	c.Step(Event{Peer: 1, Message: &wire.Connect{Kind: KindClient, Name: "u"}})
	for i := range 2 * n {
		role := wire.RolePrefill
		if colocated {
			role = wire.RoleBoth
		} else if i >= n {
			role = wire.RoleDecode
		}
		id := PeerID(2 + i)
		c.Step(Event{Peer: id, Message: &wire.Connect{Kind: KindEngine}})
		c.Step(Event{Peer: id, Message: &wire.RegisterRole{
			Role: role, Name: fmt.Sprint(id), Ranks: []wire.RankInfo{{}},
			Geometry: wire.Geometry{BlockSize: 32, Layers: 1, KVHeads: 1, MaxSeqLen: 8192}, Requests: 64, Blocks: 8192,
		}})
	}
	if !c.complete() {
		tb.Fatal("the fleet is not complete")
	}
	return c
}

// load sends requests through a core and plays the engines: every request makes six events (submission,
// prefill reply, end of the read, two partial replies, the final one) with up to inFlight at once.
type load struct {
	tb       testing.TB
	core     *Core
	now      time.Time
	prompts  [][]kvcache.Digest
	prompt   wire.Tokens
	todo     []Event
	events   int
	ended    int
	clientID uint64
}

func newLoad(tb testing.TB, c *Core) *load {
	l := &load{tb: tb, core: c, now: time.Unix(0, 0), prompt: make(wire.Tokens, 1024)}
	for i := range 256 { // every fourth prompt starts like another
		p := make(wire.Tokens, 1024)
		for j := range p {
			p[j] = int32(i/4*1000 + j)
			if j >= 512 {
				p[j] += int32(i) << 20
			}
		}
		l.prompts = append(l.prompts, kvcache.Chain(kvcache.Digest{}, 32, p))
	}
	return l
}

func (l *load) submit() {
	l.clientID++
	l.step(Event{
		Peer: 1, Digests: l.prompts[l.clientID%uint64(len(l.prompts))], BlockSize: 32,
		Message: &wire.SubmitRequest{ID: l.clientID, Prompt: l.prompt, Sampling: wire.Sampling{MaxTokens: 4}},
	})
}

func (l *load) step(ev Event) {
	ev.At = l.now
	l.events++
	for _, a := range l.core.Step(ev) {
		switch a.Kind {
		case Send:
			l.answer(a.Peer, a.Message)
		case Warn:
			l.tb.Fatal(a.Text)
		case End:
			l.ended++
		}
	}
}

func (l *load) answer(p PeerID, m wire.Message) {
	result := func(id uint64, start int, finish string) []wire.Result {
		return []wire.Result{{ID: id, Start: start, Tokens: wire.Tokens{1}, Finish: finish}}
	}
	add := func(m wire.Message) { l.todo = append(l.todo, Event{Peer: p, Message: m}) }
	decode := func(id uint64, from int) {
		add(&wire.EngineReplyPartial{Results: result(id, from, "")})
		add(&wire.EngineReplyPartial{Results: result(id, from+1, "")})
		add(&wire.EngineReply{Results: result(id, from+2, wire.FinishLength)})
	}
	switch m := m.(type) {
	case *wire.SubmitRequest:
		if !m.Handoff {
			decode(m.ID, 0)
			return
		}
		r := result(m.ID, 0, "")
		r[0].Export = &wire.Export{Handoff: m.ID}
		add(&wire.EngineReply{Results: r})
	case *wire.SubmitRequestWithKV:
		add(&wire.KVReadDone{ID: m.ID})
		decode(m.ID, 1)
	}
}

// run sends n requests, inFlight at a time.
func (l *load) run(n, inFlight int) {
	for sent := 0; l.ended < n; {
		for ; sent < n && sent-l.ended < inFlight; sent++ {
			l.submit()
		}
		ev := l.todo[0]
		l.todo = l.todo[1:]
		l.step(ev)
	}
	l.ended = 0
}

func BenchmarkCore(b *testing.B) {
	for _, engines := range []int{1, 4, 32} {
		for _, colocated := range []bool{false, true} {
			name := fmt.Sprintf("disaggregated/%d+%d", engines, engines)
			if colocated {
				name = fmt.Sprintf("colocated/%d", 2*engines)
			}
			b.Run(name, func(b *testing.B) {
				l := newLoad(b, fleetOf(b, engines, colocated))
				l.run(1000, 50)
				l.events = 0
				b.ReportAllocs()
				b.ResetTimer()
				l.run(b.N, 50)
				b.ReportMetric(float64(l.events)/b.Elapsed().Seconds(), "events/s")
				b.ReportMetric(float64(l.events)/float64(b.N), "events/op")
			})
		}
	}
}

var memoryRequests = 100_000

// Nothing of a request outlives it.
func TestMemoryStaysFlat(t *testing.T) {
	requests := memoryRequests
	for _, colocated := range []bool{false, true} {
		c := fleetOf(t, 2, colocated)
		l := newLoad(t, c)
		l.run(requests/10, 100)
		before := heap()
		l.run(requests, 100)
		after := heap()
		if err := checkIdle(c); err != nil {
			t.Fatal(err)
		}
		if grown := int64(after) - int64(before); grown > 1<<20 {
			t.Errorf("colocated %v: the heap grew by %d bytes over %d requests", colocated, grown, requests)
		}
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
