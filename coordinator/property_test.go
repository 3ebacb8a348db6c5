package coordinator

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"baton/wire"
)

// world is a small fleet that plays the engines' and the clients' part of the protocol truthfully.
// Messages of one connection stay in order; everything else happens in any order that rapid thinks of,
// engines and clients come and go.
type world struct {
	t     *rapid.T
	core  *Core
	now   time.Time
	push  bool
	next  PeerID
	peers map[PeerID]*actor
	ends  map[[2]uint64]int // by client and request: how often it ended
	asked map[[2]uint64]bool
}

// actor is a peer. An engine's jobs are requests that it runs, exports those whose KV it keeps.
type actor struct {
	id      PeerID
	role    string // "" for a client
	toCore  []wire.Message
	jobs    map[uint64]*job
	exports map[uint64]bool
	reads   map[uint64]bool // decode: ended, but still reading
	sent    map[uint64]int  // client: tokens received
	open    map[uint64]bool
	lastID  uint64
	leaving bool
}

type job struct {
	start, left int
	reading     bool // decode: has not read all KV
	pushed      bool // a push was started (or needs none)
	ready       bool // KVTransferReady was sent
}

func (w *world) step(ev Event) {
	ev.At = w.now
	var closed []*actor
	for _, a := range w.core.Step(ev) {
		switch a.Kind {
		case Send:
			if p := w.peers[a.Peer]; p != nil {
				w.deliver(p, a.Message)
			}
		case Close:
			if p := w.peers[a.Peer]; p != nil {
				closed = append(closed, p)
			}
		}
	}
	for _, p := range closed {
		w.drop(p)
	}
	if d, ok := w.core.Deadline(); ok && d.Before(w.now) {
		w.t.Fatalf("the deadline passed %v ago", w.now.Sub(d))
	}
}

// drop ends a peer's connection; what it had not delivered is lost.
func (w *world) drop(p *actor) {
	delete(w.peers, p.id)
	w.step(Event{Peer: p.id})
}

func (w *world) end(p *actor, id uint64, how string) {
	if !p.open[id] {
		w.t.Fatalf("client %d: request %d ended by %s, but it was not open", p.id, id, how)
	}
	delete(p.open, id)
	w.ends[[2]uint64{uint64(p.id), id}]++
}

// deliver is what a peer does with a message.
func (w *world) deliver(p *actor, m wire.Message) {
	switch m := m.(type) {
	case *wire.SubmitRequest:
		if m.Handoff != (p.role == wire.RolePrefill) {
			w.t.Fatalf("%s got a request with handoff %v", p.role, m.Handoff)
		}
		p.jobs[m.ID] = &job{start: len(m.Resume), left: m.Sampling.MaxTokens - len(m.Resume)}
	case *wire.SubmitRequestWithKV:
		source := w.peers[PeerID(m.Source.Incarnation)]
		if source != nil && !source.exports[m.Source.Export.Handoff] {
			w.t.Fatalf("decode was told to read handoff %d, which its source does not keep", m.Source.Export.Handoff)
		}
		p.jobs[m.ID] = &job{start: len(m.Generated), left: m.Sampling.MaxTokens - len(m.Generated), reading: true, pushed: !w.push}
	case *wire.SendKV:
		if !p.exports[m.Handoff] {
			w.t.Fatalf("prefill was told to push handoff %d, which it does not keep", m.Handoff)
		}
		for _, d := range w.peers {
			if j := d.jobs[m.ID]; j != nil && d.role == wire.RoleDecode {
				j.pushed = true
			}
		}
	case *wire.ReleaseKV:
		if !p.exports[m.Handoff] {
			w.t.Fatalf("handoff %d was released twice", m.Handoff)
		}
		for _, d := range w.peers {
			if j := d.jobs[m.ID]; d.role == wire.RoleDecode && (j != nil && j.reading || d.reads[m.ID]) {
				w.t.Fatalf("request %d was released while decode reads it", m.ID)
			}
		}
		delete(p.exports, m.Handoff)
	case *wire.AbortRequest:
		if j := p.jobs[m.ID]; j != nil {
			delete(p.jobs, m.ID)
			p.reads[m.ID] = j.reading && rapid.Bool().Draw(w.t, "still reading")
			p.toCore = append(p.toCore, &wire.RequestAborted{ID: m.ID, SourceSafe: !p.reads[m.ID]})
			w.stopReading(p, m.ID, true)
		}
	case *wire.EngineReply:
		for _, r := range m.Results {
			w.receive(p, r)
			w.end(p, r.ID, r.Finish)
		}
	case *wire.EngineReplyPartial:
		for _, r := range m.Results {
			w.receive(p, r)
		}
	case *wire.RequestError:
		w.end(p, m.ID, m.Code)
	case *wire.RequestAborted:
		if !w.asked[[2]uint64{uint64(p.id), m.ID}] {
			w.t.Fatalf("request %d was aborted, but nobody asked", m.ID)
		}
		w.end(p, m.ID, "abort")
	case *wire.RegisterRoleAck:
		if m.Error != "" {
			w.t.Fatalf("refused: %s", m.Error)
		}
	}
}

func (w *world) receive(p *actor, r wire.Result) {
	if len(r.Tokens) > 0 && r.Start != p.sent[r.ID] {
		w.t.Fatalf("request %d: tokens from %d on, %d were received", r.ID, r.Start, p.sent[r.ID])
	}
	p.sent[r.ID] += len(r.Tokens)
}

func (w *world) join(role string) *actor {
	w.next++
	p := &actor{id: w.next, role: role, jobs: map[uint64]*job{}, exports: map[uint64]bool{}, reads: map[uint64]bool{}, sent: map[uint64]int{}, open: map[uint64]bool{}}
	w.peers[p.id] = p
	kind := KindEngine
	if role == "" {
		kind = KindClient
	}
	inc := uint64(p.id)
	w.step(Event{Peer: p.id, Message: &wire.Connect{Kind: kind, Name: fmt.Sprint(p.id), Incarnation: inc}})
	if role != "" {
		w.step(Event{Peer: p.id, Message: &wire.RegisterRole{
			Role: role, Name: fmt.Sprint(p.id), Incarnation: inc, Ranks: []wire.RankInfo{{}},
			Geometry: wire.Geometry{BlockSize: 2, MaxSeqLen: 24},
			Requests: rapid.IntRange(1, 3).Draw(w.t, "requests"), Blocks: rapid.IntRange(6, 14).Draw(w.t, "blocks"),
		}})
	}
	return p
}

// pick chooses a live peer of a role that satisfies ok.
func (w *world) pick(ok func(*actor) bool) *actor {
	var fit []PeerID
	for _, id := range slices.Sorted(maps.Keys(w.peers)) {
		if ok(w.peers[id]) {
			fit = append(fit, id)
		}
	}
	if len(fit) == 0 {
		return nil
	}
	return w.peers[rapid.SampledFrom(fit).Draw(w.t, "peer")]
}

// work lets an engine do something for one of its requests.
func (w *world) work(p *actor) {
	id := rapid.SampledFrom(slices.Sorted(maps.Keys(p.jobs))).Draw(w.t, "job")
	j := p.jobs[id]
	if w.fails(p, id, j) {
		return
	}
	res := wire.Result{ID: id, Start: j.start}
	switch {
	case p.role == wire.RolePrefill:
		res.Tokens = wire.Tokens{1}
		delete(p.jobs, id)
		if j.left > 1 {
			res.Export = &wire.Export{Handoff: id}
			p.exports[id] = true
		} else {
			res.Finish = wire.FinishLength
		}
		p.toCore = append(p.toCore, &wire.EngineReply{Results: []wire.Result{res}})
	case j.reading && !j.pushed:
		if !j.ready {
			j.ready = true
			p.toCore = append(p.toCore, &wire.KVTransferReady{ID: id})
		}
	case j.reading:
		j.reading = false
		p.toCore = append(p.toCore, &wire.KVReadDone{ID: id})
	default:
		n := rapid.IntRange(1, j.left).Draw(w.t, "tokens")
		res.Tokens = make(wire.Tokens, n)
		j.start, j.left = j.start+n, j.left-n
		if j.left == 0 {
			res.Finish = wire.FinishLength
			delete(p.jobs, id)
			p.toCore = append(p.toCore, &wire.EngineReply{Results: []wire.Result{res}})
		} else {
			p.toCore = append(p.toCore, &wire.EngineReplyPartial{Results: []wire.Result{res}})
		}
	}
}

// fails lets an engine fail a request now and then: safely, or while it may still read.
func (w *world) fails(p *actor, id uint64, j *job) bool {
	if rapid.IntRange(0, 9).Draw(w.t, "luck") > 0 {
		return false
	}
	delete(p.jobs, id)
	p.reads[id] = j.reading && rapid.Bool().Draw(w.t, "still reading")
	p.toCore = append(p.toCore, &wire.RequestError{ID: id, Code: wire.CodeInternal, SourceSafe: !p.reads[id]})
	w.stopReading(p, id, false)
	return true
}

// stopReading lets a decode engine that ended a request while it read report that it reads no more.
func (w *world) stopReading(p *actor, id uint64, aborted bool) {
	switch {
	case !p.reads[id]:
	case aborted && rapid.Bool().Draw(w.t, "aborted again"):
		p.toCore = append(p.toCore, &wire.RequestAborted{ID: id, SourceSafe: true})
	default:
		p.toCore = append(p.toCore, &wire.KVReadDone{ID: id})
	}
}

func (w *world) submit(p *actor) {
	p.lastID++
	m := &wire.SubmitRequest{
		ID: p.lastID, Prompt: make(wire.Tokens, rapid.IntRange(0, 12).Draw(w.t, "prompt")),
		Sampling: wire.Sampling{MaxTokens: rapid.IntRange(1, 5).Draw(w.t, "max")},
	}
	if rapid.IntRange(0, 3).Draw(w.t, "resume") == 0 {
		m.Resume = make(wire.Tokens, m.Sampling.MaxTokens-1)
	}
	p.open[m.ID], p.sent[m.ID] = true, len(m.Resume)
	p.toCore = append(p.toCore, m)
}

func waiting(p *actor) bool { return len(p.toCore) > 0 }

func isClient(p *actor) bool { return p.role == "" }

func TestRandomInterleavings(t *testing.T) {
	for range 10 { // a run takes well under a millisecond, and the default is 100
		rapid.Check(t, interleave)
	}
}

func interleave(t *rapid.T) {
	core, err := New(Config{Queue: 5})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{
		t: t, core: core, now: time.Unix(0, 0), push: rapid.Bool().Draw(t, "push"),
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
	t.Repeat(map[string]func(*rapid.T){
		"work": func(t *rapid.T) {
			if p := w.pick(func(p *actor) bool { return len(p.jobs) > 0 }); p != nil {
				w.work(p)
			}
		},
		"deliver": func(t *rapid.T) {
			for range rapid.IntRange(1, 3).Draw(t, "messages") {
				w.deliverOne()
			}
		},
		"submit": func(t *rapid.T) {
			if p := w.pick(isClient); p != nil {
				w.submit(p)
			}
		},
		"abort": func(t *rapid.T) {
			if p := w.pick(func(p *actor) bool { return len(p.open) > 0 }); p != nil {
				id := rapid.SampledFrom(slices.Sorted(maps.Keys(p.open))).Draw(t, "request")
				w.asked[[2]uint64{uint64(p.id), id}] = true
				p.toCore = append(p.toCore, &wire.AbortRequest{ID: id})
			}
		},
		"lose an export": func(t *rapid.T) {
			if p := w.pick(func(p *actor) bool { return len(p.exports) > 0 }); p != nil {
				id := rapid.SampledFrom(slices.Sorted(maps.Keys(p.exports))).Draw(t, "export")
				p.toCore = append(p.toCore, &wire.RequestError{ID: id, Code: wire.CodeInternal})
			}
		},
		"change": func(t *rapid.T) {
			switch rapid.IntRange(0, 7).Draw(t, "change") {
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
				w.now = w.now.Add(3 * time.Second)
				w.step(Event{})
			case 4:
				if p := w.pick(isClient); p != nil {
					p.toCore = append(p.toCore, &wire.Pause{})
				}
			case 5:
				w.resume()
			default:
				if len(w.peers) < 8 {
					w.join(rapid.SampledFrom(roles).Draw(t, "role"))
				}
			}
		},
	})
	w.settle()
}

// resume ends a pause.
func (w *world) resume() {
	if p := w.pick(isClient); p != nil {
		p.toCore = append(p.toCore, &wire.Unpause{})
	}
}

func (w *world) deliverOne() {
	if p := w.pick(waiting); p != nil {
		m := p.toCore[0]
		p.toCore = p.toCore[1:]
		switch m := m.(type) {
		case *wire.KVReadDone:
			delete(p.reads, m.ID)
		case *wire.RequestAborted:
			if m.SourceSafe {
				delete(p.reads, m.ID)
			}
		}
		w.step(Event{Peer: p.id, Message: m})
	}
}

// settle lets everything that can still happen happen, and checks that nothing is left.
func (w *world) settle() {
	if w.pick(isClient) == nil {
		w.join("")
	}
	for slices.ContainsFunc(slices.Collect(maps.Values(w.peers)), waiting) {
		w.deliverOne()
	}
	w.resume() // after all that could pause it again
	for range 10_000 {
		if p := w.pick(waiting); p != nil {
			w.deliverOne()
		} else if p := w.pick(func(p *actor) bool { return len(p.jobs) > 0 }); p != nil {
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
