package coordinator

import (
	"fmt"
	"maps"
	"slices"
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
	calm  bool // engines die, leave and evict, but report no failures: no request may fail
	next  PeerID
	peers map[PeerID]*actor
	ends  map[[2]uint64]int // by client and request: how often it ended
	asked map[[2]uint64]bool
}

// actor is a peer. An engine's jobs are requests that it runs, exports those whose KV it keeps.
type actor struct {
	id      PeerID
	role    string // "" for a client
	name    string
	inc     uint64
	toCore  []wire.Message
	jobs    map[uint64]*job
	exports map[uint64]bool
	reads   map[uint64]*job   // decode: ended, but still reading
	open    map[uint64]*asked // client
	lastID  uint64
	leaving bool
}

// asked is a request as its client sees it.
type asked struct {
	key    int32
	tokens int // it has, those it resumed from included
	max    int
}

// job is a request on an engine.
type job struct {
	key     int32
	prompt  int
	start   int
	left    int
	reading bool     // decode: has not read all KV
	pushed  bool     // a push was started (or needs none)
	ready   bool     // KVTransferReady was sent
	hung    bool     // waits for its source, which is gone, until it is told to stop
	source  [2]int64 // incarnation and handoff that it reads
}

// token is what every engine generates for a request at a position.
func token(key int32, position int) int32 { return key<<6 + int32(position) }

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
				delete(w.peers, p.id)
				closed = append(closed, p)
			}
		}
	}
	for _, p := range closed {
		w.step(Event{Peer: p.id})
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
	if p.open[id] == nil {
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
		w.run(p, m.ID, &job{key: m.Prompt[0], prompt: len(m.Prompt), start: len(m.Resume), left: m.Sampling.MaxTokens - len(m.Resume)}, m.Resume)
	case *wire.SubmitRequestWithKV:
		source := w.peers[PeerID(m.Source.Incarnation)]
		if source == nil || !source.exports[m.Source.Export.Handoff] {
			w.t.Fatalf("decode was told to read handoff %d, which its source does not keep", m.Source.Export.Handoff)
		}
		if n := len(m.Prompt) + len(m.Generated) - 1; m.Source.Export.Tokens != n {
			w.t.Fatalf("decode was told to read %d tokens for %d", m.Source.Export.Tokens, n)
		}
		w.run(p, m.ID, &job{
			key: m.Prompt[0], start: len(m.Generated), left: m.Sampling.MaxTokens - len(m.Generated), reading: true, pushed: !w.push,
			source: [2]int64{int64(m.Source.Incarnation), int64(m.Source.Export.Handoff)},
		}, m.Generated)
	case *wire.SendKV:
		if !p.exports[m.Handoff] {
			w.t.Fatalf("prefill was told to push handoff %d, which it does not keep", m.Handoff)
		}
		for _, d := range w.peers {
			if j := d.jobs[m.Reader]; j != nil && d.role == wire.RoleDecode {
				j.pushed = true
			}
		}
	case *wire.ReleaseKV:
		w.released(p, m)
	case *wire.AbortRequest:
		if j := p.jobs[m.ID]; j != nil {
			w.stop(p, m.ID, func(safe bool) wire.Message { return &wire.RequestAborted{ID: m.ID, SourceSafe: safe} })
		}
	case *wire.RegisterRoleAck:
		if m.Error != "" {
			w.t.Fatalf("refused: %s", m.Error)
		}
	default:
		w.toClient(p, m)
	}
}

// run begins a job. Nobody else may be at the same request, and its tokens are those that it would have.
func (w *world) run(p *actor, id uint64, j *job, before wire.Tokens) {
	for _, o := range w.peers {
		for other, k := range o.jobs {
			if k.key == j.key {
				w.t.Fatalf("engine %s was given what is %d on engine %s", p.name, other, o.name)
			}
		}
	}
	if p.jobs[id] != nil || p.reads[id] != nil {
		w.t.Fatalf("engine %s has a request %d already", p.name, id)
	}
	if j.left < 1 {
		w.t.Fatalf("engine %s was given a request that has all its tokens", p.name)
	}
	for i, tok := range before {
		if tok != token(j.key, i) {
			w.t.Fatalf("engine %s was told that token %d of %d is %d", p.name, i, j.key, tok)
		}
	}
	p.jobs[id] = j
}

func (w *world) released(p *actor, m *wire.ReleaseKV) {
	if !p.exports[m.Handoff] {
		w.t.Fatalf("handoff %d was released twice", m.Handoff)
	}
	key := [2]int64{int64(p.inc), int64(m.Handoff)}
	for _, d := range w.peers {
		for _, jobs := range []map[uint64]*job{d.jobs, d.reads} {
			for _, j := range jobs {
				if j.reading && j.source == key {
					w.t.Fatalf("handoff %d was released while decode reads it", m.Handoff)
				}
			}
		}
	}
	delete(p.exports, m.Handoff)
}

func (w *world) toClient(p *actor, m wire.Message) {
	switch m := m.(type) {
	case *wire.EngineReply:
		for _, r := range m.Results {
			w.receive(p, r)
			if r.Finish != wire.FinishLength || p.open[r.ID].tokens != p.open[r.ID].max {
				w.t.Fatalf("request %d ended by %q with %d tokens of %d", r.ID, r.Finish, p.open[r.ID].tokens, p.open[r.ID].max)
			}
			w.end(p, r.ID, r.Finish)
		}
	case *wire.EngineReplyPartial:
		for _, r := range m.Results {
			w.receive(p, r)
		}
	case *wire.RequestError:
		if w.calm && m.Code != wire.CodeInvalid && m.Message != "5 requests wait already, as many as may; try again later" {
			w.t.Fatalf("request %d failed: %s", m.ID, m.Message)
		}
		w.end(p, m.ID, m.Code)
	case *wire.RequestAborted:
		if !w.asked[[2]uint64{uint64(p.id), m.ID}] {
			w.t.Fatalf("request %d was aborted, but nobody asked", m.ID)
		}
		w.end(p, m.ID, "abort")
	}
}

// receive checks that a client gets every token once, in order, and that it is the right one.
func (w *world) receive(p *actor, r wire.Result) {
	a := p.open[r.ID]
	if a == nil {
		w.t.Fatalf("client %d got tokens of request %d, which is not open", p.id, r.ID)
	}
	if len(r.Tokens) > 0 && r.Start != a.tokens {
		w.t.Fatalf("request %d: tokens from %d on, %d were received", r.ID, r.Start, a.tokens)
	}
	for i, tok := range r.Tokens {
		if tok != token(a.key, a.tokens+i) {
			w.t.Fatalf("request %d: token %d is %d", r.ID, a.tokens+i, tok)
		}
	}
	a.tokens += len(r.Tokens)
}

func (w *world) join(role string) *actor {
	w.next++
	return w.register(role, fmt.Sprint(w.next))
}

// register connects a peer. An engine may have the name of one that is there: then it is that one, come back.
func (w *world) register(role, name string) *actor {
	if w.peers[w.next] != nil {
		w.next++
	}
	p := &actor{
		id: w.next, role: role, name: name, inc: uint64(w.next), jobs: map[uint64]*job{}, exports: map[uint64]bool{},
		reads: map[uint64]*job{}, open: map[uint64]*asked{},
	}
	w.peers[p.id] = p
	kind := KindEngine
	if role == "" {
		kind = KindClient
	}
	w.step(Event{Peer: p.id, Message: &wire.Connect{Kind: kind, Name: name, Incarnation: p.inc}})
	if role != "" {
		w.step(Event{Peer: p.id, Message: &wire.RegisterRole{
			Role: role, Name: name, Incarnation: p.inc, Ranks: []wire.RankInfo{{}},
			Geometry: wire.Geometry{BlockSize: 2, Layers: 1, KVHeads: 1, MaxSeqLen: 24},
			Requests: rapid.IntRange(1, 3).Draw(w.t, "requests"), Blocks: rapid.IntRange(9, 14).Draw(w.t, "blocks"),
		}})
	}
	return p
}

// pick chooses a live peer that satisfies ok.
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

// runnable lists the jobs that can get on.
func (p *actor) runnable() []uint64 {
	ids := slices.Sorted(maps.Keys(p.jobs))
	return slices.DeleteFunc(ids, func(id uint64) bool { return p.jobs[id].hung })
}

func busy(p *actor) bool { return len(p.runnable()) > 0 }

// work lets an engine do something for one of its requests.
func (w *world) work(p *actor) {
	id := rapid.SampledFrom(p.runnable()).Draw(w.t, "job")
	j := p.jobs[id]
	luck := rapid.IntRange(0, 9).Draw(w.t, "luck")
	switch {
	case luck == 0 && !w.calm:
		w.stop(p, id, func(safe bool) wire.Message {
			return &wire.RequestError{ID: id, Code: wire.CodeUnavailable, Retryable: rapid.Bool().Draw(w.t, "retryable"), SourceSafe: safe}
		})
	case p.role == wire.RolePrefill:
		w.prefill(p, id, j)
	case j.reading && !j.pushed:
		if !j.ready {
			j.ready = true
			p.toCore = append(p.toCore, &wire.KVTransferReady{ID: id})
		}
	case j.reading && luck < 5 && w.gone(j):
		j.hung = true
	case j.reading && luck < 7 && w.gone(j):
		w.stop(p, id, func(safe bool) wire.Message {
			return &wire.RequestError{ID: id, Code: wire.CodeUnavailable, Retryable: true, SourceSafe: safe}
		})
	case j.reading:
		j.reading = false
		p.toCore = append(p.toCore, &wire.KVReadDone{ID: id})
	default:
		w.generate(p, id, j, luck == 2 && p.role == wire.RoleDecode)
	}
}

// gone tells whether the engine that a job reads from is.
func (w *world) gone(j *job) bool { return w.peers[PeerID(j.source[0])] == nil }

func (w *world) prefill(p *actor, id uint64, j *job) {
	delete(p.jobs, id)
	res := wire.Result{ID: id, Start: j.start, Tokens: wire.Tokens{token(j.key, j.start)}}
	if j.left > 1 {
		res.Export = &wire.Export{Handoff: id, Tokens: j.prompt + j.start}
		p.exports[id] = true
	} else {
		res.Finish = wire.FinishLength
	}
	p.toCore = append(p.toCore, &wire.EngineReply{Results: []wire.Result{res}})
}

// generate makes some tokens, or none and gives the request back.
func (w *world) generate(p *actor, id uint64, j *job, evict bool) {
	n := rapid.IntRange(1, j.left).Draw(w.t, "tokens")
	if evict {
		n = rapid.IntRange(0, j.left-1).Draw(w.t, "last tokens")
	}
	res := wire.Result{ID: id, Start: j.start}
	for i := range n {
		res.Tokens = append(res.Tokens, token(j.key, j.start+i))
	}
	j.start, j.left = j.start+n, j.left-n
	switch {
	case evict:
		res.Finish = wire.FinishEvicted
	case j.left == 0:
		res.Finish = wire.FinishLength
	default:
		p.toCore = append(p.toCore, &wire.EngineReplyPartial{Results: []wire.Result{res}})
		return
	}
	delete(p.jobs, id)
	p.toCore = append(p.toCore, &wire.EngineReply{Results: []wire.Result{res}})
}

// stop ends a job: safely, or while it may still read. In the second case another message says later that
// it reads no more.
func (w *world) stop(p *actor, id uint64, message func(safe bool) wire.Message) {
	j := p.jobs[id]
	delete(p.jobs, id)
	safe := !j.reading || rapid.Bool().Draw(w.t, "safe")
	p.toCore = append(p.toCore, message(safe))
	switch {
	case safe:
	case rapid.Bool().Draw(w.t, "says it again"):
		p.reads[id] = j
		p.toCore = append(p.toCore, message(true))
	default:
		p.reads[id] = j
		p.toCore = append(p.toCore, &wire.KVReadDone{ID: id})
	}
}

func (w *world) submit(p *actor) {
	p.lastID++
	a := &asked{key: int32(p.id)<<10 + int32(p.lastID), max: rapid.IntRange(1, 5).Draw(w.t, "max")}
	m := &wire.SubmitRequest{
		ID: p.lastID, Prompt: make(wire.Tokens, rapid.IntRange(0, 12).Draw(w.t, "prompt")), Sampling: wire.Sampling{MaxTokens: a.max},
	}
	for i := range m.Prompt {
		m.Prompt[i] = a.key
	}
	if rapid.IntRange(0, 3).Draw(w.t, "resume") == 0 {
		for i := range a.max - 1 {
			m.Resume = append(m.Resume, token(a.key, i))
		}
	}
	a.tokens = len(m.Resume)
	p.open[m.ID] = a
	p.toCore = append(p.toCore, m)
}

func waiting(p *actor) bool { return len(p.toCore) > 0 }

func isClient(p *actor) bool { return p.role == "" }

// deliverOne gives the core one message of a peer.
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
		case *wire.RequestError:
			if m.SourceSafe {
				delete(p.reads, m.ID)
			}
		}
		w.step(Event{Peer: p.id, Message: m})
	}
}

// resume ends a pause.
func (w *world) resume() {
	if p := w.pick(isClient); p != nil {
		p.toCore = append(p.toCore, &wire.Unpause{})
	}
}
