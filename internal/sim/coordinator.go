package sim

import (
	"slices"
	"time"

	"baton/coordinator"
	"baton/route"
	"baton/wire"
)

// coordinatorLife is the coordinator from its start to its death.
type coordinatorLife struct {
	w     *world
	core  *coordinator.Core
	links map[coordinator.PeerID]*link
	timer int64 // when it is woken next; 0: not at all
	dead  bool

	// What the simulator knows of the two queues: attempts that arrived and were not dispatched.
	entry, handoffs []*attempt
	overtaken       []overtaking // in this step

	ready    bool
	unready  int64 // since when it is not
	stopping bool  // it takes no new requests
}

// overtaking is a dispatch past somebody who, as far as the simulator knows, could have gone instead.
type overtaking struct {
	later, earlier *attempt
	to             *life
}

// What the coordinator is told to bear: how long requests wait for an engine that is not there, how many
// failures and deaths in a row end one, how long a reader of a dead source may take to say what it has, how
// long an engine may take to leave.
const (
	wait    = 150 * time.Millisecond
	bears   = 3
	verdict = 100 * time.Millisecond
	drain   = 60 * time.Millisecond
)

func (w *world) startCoordinator() error {
	policy, err := route.ByName(w.script.Fleet.Policy)
	if err != nil {
		return err
	}
	core, err := coordinator.New(coordinator.Config{
		Incarnation: w.rng.Uint64() | 1, Policy: policy, IndexEntries: 4096, Wait: wait, Attempts: bears, Verdict: verdict, DrainWait: drain,
	})
	if err != nil {
		return err
	}
	w.coordinator = &coordinatorLife{w: w, core: core, links: map[coordinator.PeerID]*link{}}
	return nil
}

func (w *world) crashCoordinator(d time.Duration) {
	c := w.coordinator
	if c == nil {
		return
	}
	w.coordinator, c.dead = nil, true
	for _, id := range sortedKeys(c.links) {
		c.links[id].coordDies()
	}
	w.after(d, func() {
		if err := w.startCoordinator(); err != nil {
			w.fail("%v", err)
		}
	})
}

// leaveCoordinator lets the coordinator end in an orderly way: it brings what runs to an end, as long as it may
// take. Another one starts after d.
func (w *world) leaveCoordinator(d time.Duration) {
	c := w.coordinator
	if c == nil || c.stopping {
		return
	}
	const patience = 200 * time.Millisecond
	until := w.now + int64(patience)
	c.stopping = true
	c.step(nil, coordinator.Event{Message: &wire.Stop{}})
	var look func()
	look = func() {
		switch {
		case w.coordinator != c:
		case c.core.Requests() > 0 && w.now < until:
			w.after(5*time.Millisecond, look)
		default:
			c.step(nil, coordinator.Event{Message: &wire.Shutdown{}})
			w.crashCoordinator(d)
		}
	}
	look()
}

func (c *coordinatorLife) receive(k *link, m wire.Message) {
	c.step(k, coordinator.Event{Peer: k.id, Message: m})
}

func (c *coordinatorLife) disconnected(k *link) {
	delete(c.links, k.id)
	for _, a := range c.w.attempts {
		if a.link == k {
			c.leave(a)
		}
	}
	c.mourn(k, true)
	if !c.dead {
		c.w.log("coordinator: the connection of %v ended", k.peer)
		c.step(k, coordinator.Event{Peer: k.id})
	}
}

// mourn notes what an engine took with it whose connection is gone for the coordinator.
func (c *coordinatorLife) mourn(k *link, died bool) {
	if k.life == nil || k.mourned {
		return
	}
	k.mourned = true
	for _, a := range c.w.attempts {
		if a.owner == k.life {
			if died {
				a.deaths++
			}
			c.leave(a)
		}
	}
}

// step gives the core one event; k is whose it is, nil when only time passed.
func (c *coordinatorLife) step(k *link, ev coordinator.Event) {
	if c.dead {
		return
	}
	c.arrived(k, ev.Message)
	ev.At = c.w.time()
	var from *life
	if k != nil {
		from = k.life
	}
	for _, a := range c.core.Step(ev) {
		switch a.Kind {
		case coordinator.Send:
			to := c.links[a.Peer]
			if to == nil {
				c.w.log("coordinator: %s for a connection that ended", told{a.Message})
				continue
			}
			c.sends(from, to, a.Message)
			to.down(a.Message)
		case coordinator.Close:
			c.w.log("coordinator closes connection %d: %s", a.Peer, a.Text)
			if to := c.links[a.Peer]; to != nil {
				to.coordCloses()
			}
		case coordinator.End:
			c.ended(a.Summary)
		case coordinator.Warn:
			c.w.log("coordinator: %s", a.Text)
		}
	}
	c.checkQueues(c.core.Status())
	c.arm()
}

// ended checks that a request which failed could not have been saved.
func (c *coordinatorLife) ended(s *coordinator.Summary) {
	a := c.w.named(s.Client, s.ClientID)
	c.leave(a)
	if a.probe {
		c.checkProbe(a, s)
	}
	c.w.counts.Takeovers += s.Takeovers
	c.w.counts.Reruns += s.Reruns
	c.w.counts.Evictions += s.Evictions
	switch s.Outcome {
	case wire.FinishAbort, wire.FinishLength, wire.FinishStop:
		return
	}
	lacking := !c.ready && c.w.now-c.unready >= int64(wait)
	broken := s.Failures >= bears && c.w.counts.BrokenTransfers >= bears
	killed := s.Outcome == wire.CodeEngineLost && a.deaths >= bears
	if !a.aborted && !lacking && !broken && !killed && !c.stopping {
		c.w.fail("%v failed, though there was a way on: %+v", a, s)
	}
}

// arm wakes the core when it wants to hear of the time.
func (c *coordinatorLife) arm() {
	at, ok := c.core.Deadline()
	if !ok {
		return
	}
	t := int64(at.Sub(epoch))
	if c.timer != 0 && c.timer <= t {
		return
	}
	c.timer = t
	c.w.at(t, func() {
		if !c.dead && c.timer == t {
			c.timer = 0
			c.step(nil, coordinator.Event{})
		}
	})
}

// arrived notes what joins a queue.
func (c *coordinatorLife) arrived(k *link, m wire.Message) {
	switch m := m.(type) {
	case *wire.RegisterRole:
		for _, id := range sortedKeys(c.links) {
			if old := c.links[id]; old != k && old.life != nil && old.life.name == m.Name {
				c.mourn(old, old.life != k.life)
			}
		}
	case *wire.SubmitRequest:
		if a := c.w.attempt(m.Sampling.Seed); a.coord == nil { // not a duplicate
			a.coord, a.owner, a.legs, a.deaths, a.choosy = c, nil, nil, 0, false
			c.entry = append(c.entry, a)
		}
	case *wire.EngineReply:
		for i := range m.Results {
			if a := c.on(k.life, m.Results[i].ID); a != nil && m.Results[i].Export != nil && a.link.coordOpen {
				c.handoffs = append(c.handoffs, a)
			}
		}
	case *wire.RequestError:
		for _, a := range c.w.attempts {
			if a.coord == c && slices.Contains(a.legs, leg{k.life, m.ID}) {
				a.choosy = true
				c.leave(a)
			}
		}
	}
}

// on finds the attempt whose latest leg an engine knows under a number.
func (c *coordinatorLife) on(l *life, id uint64) *attempt {
	for _, a := range c.w.attempts {
		if a.coord == c && len(a.legs) > 0 && a.legs[len(a.legs)-1] == (leg{l, id}) {
			return a
		}
	}
	return nil
}

// sends checks what the coordinator is about to tell somebody because of a message from an engine.
func (c *coordinatorLife) sends(from *life, to *link, m wire.Message) {
	switch m := m.(type) {
	case *wire.SubmitRequest:
		c.dispatch(&c.entry, m.Sampling.Seed, m.ID, to.life)
		c.w.attempt(m.Sampling.Seed).resumed = len(m.Resume)
	case *wire.SubmitRequestWithKV:
		c.dispatch(&c.handoffs, m.Sampling.Seed, m.ID, to.life)
	case *wire.EngineReply:
		c.checkOwner(from, to, m.Results)
	case *wire.EngineReplyPartial:
		c.checkOwner(from, to, m.Results)
	case *wire.RequestError:
		c.over(to, m.ID)
	case *wire.RequestAborted:
		c.over(to, m.ID)
	}
}

// dispatch checks that an attempt overtakes nobody who could have gone to the same engine.
func (c *coordinatorLife) dispatch(queue *[]*attempt, number, id uint64, to *life) {
	a := c.w.attempt(number)
	if queue == &c.entry {
		c.handoffs = slices.DeleteFunc(c.handoffs, func(x *attempt) bool { return x == a }) // its KV is lost
	}
	i := slices.Index(*queue, a)
	for _, earlier := range (*queue)[:max(i, 0)] {
		if !earlier.choosy && !earlier.pinned() && c.need(earlier, to) <= c.need(a, to) {
			c.overtaken = append(c.overtaken, overtaking{a, earlier, to})
		}
	}
	if i >= 0 {
		*queue = slices.Delete(*queue, i, i+1)
	}
	a.owner, a.legs = to, append(a.legs, leg{to, id})
}

// need is the number of blocks to reserve for an attempt on an engine.
func (c *coordinatorLife) need(a *attempt, l *life) int {
	f := c.w.script.Fleet
	blocks := func(tokens int) int { return (tokens + f.BlockSize - 1) / f.BlockSize }
	context := len(a.prompt) + a.resumed
	switch l.role {
	case wire.RolePrefill:
		return blocks(context)
	case wire.RoleDecode:
		context++ // that prefill sampled
	}
	n := max(blocks(context), blocks(len(a.prompt)+a.request.Max-1))
	if f.Continuation > 0 {
		n = min(n, blocks(context)+f.Continuation)
	}
	return n
}

// checkOwner makes sure that tokens come from the engine that the stream was given to last.
func (c *coordinatorLife) checkOwner(from *life, to *link, results []wire.Result) {
	for i := range results {
		r := &results[i]
		a := c.w.asked(to, r.ID)
		if a == nil || a.owner == nil {
			continue
		}
		if len(r.Tokens) > 0 && from != a.owner {
			c.w.fail("tokens of %v came from %v, but %v owns the stream", a, from, a.owner)
		}
		if r.Finish != "" {
			c.leave(a)
		}
	}
}

// over takes a request that ended for its client out of the queues.
func (c *coordinatorLife) over(to *link, id uint64) {
	if a := c.w.asked(to, id); a != nil {
		c.leave(a)
	}
}

// checkProbe makes sure that the coordinator knew what the engine of its choice had cached. When that is the
// whole prompt, the engine still computes its last block.
func (c *coordinatorLife) checkProbe(a *attempt, s *coordinator.Summary) {
	cached := s.PredictedTokens
	if size := c.w.script.Fleet.BlockSize; cached == len(a.prompt) {
		cached -= size
	}
	if s.Outcome != wire.FinishLength && s.Outcome != wire.FinishStop || s.CachedTokens != cached {
		c.w.fail("%v, asked when all was quiet, was predicted to find %d of %d tokens cached: %+v", a, s.PredictedTokens, len(a.prompt), s)
	}
}

func (c *coordinatorLife) leave(a *attempt) {
	same := func(x *attempt) bool { return x == a }
	c.entry = slices.DeleteFunc(c.entry, same)
	c.handoffs = slices.DeleteFunc(c.handoffs, same)
}

// checkQueues makes sure that nobody waits who could run, and that no engine was promised more than it has.
func (c *coordinatorLife) checkQueues(s *wire.StatusReply) {
	if c.ready && !s.Ready {
		c.unready = c.w.now
	}
	c.ready = s.Ready
	overtaken := c.overtaken
	c.overtaken = nil
	if len(c.entry)+len(c.handoffs) == 0 {
		return
	}
	for i := range s.Engines {
		e := &s.Engines[i]
		if e.RequestsInUse > e.Requests || e.BlocksReserved > e.Blocks {
			c.w.fail("engine %s was promised %d requests and %d blocks; it has %d and %d",
				e.Name, e.RequestsInUse, e.BlocksReserved, e.Requests, e.Blocks)
		}
	}
	for _, q := range s.Queues {
		queue := c.entry
		if q.Role == wire.RoleDecode {
			queue = c.handoffs
		}
		if q.Length != len(queue) {
			continue // a request came back, or went from one queue to the other
		}
		for _, x := range overtaken {
			if x.to.role == q.Role && slices.Contains(queue, x.earlier) {
				c.w.fail("%v was sent to %v while %v, which came earlier and needs no more blocks, waits", x.later, x.to, x.earlier)
			}
		}
		if s.Ready {
			c.checkHead(s, queue, q.Role)
		}
	}
}

// checkHead makes sure that the first of a queue could not start now.
func (c *coordinatorLife) checkHead(s *wire.StatusReply, queue []*attempt, role string) {
	if len(queue) == 0 || queue[0].leaving() || queue[0].choosy || queue[0].pinned() {
		return
	}
	for i := range s.Engines {
		e := &s.Engines[i]
		if e.Draining || e.Role != role {
			continue
		}
		l := c.w.seat(e.Name).life
		if l == nil || e.RequestsInUse >= e.Requests {
			continue
		}
		if n := c.need(queue[0], l); e.BlocksReserved+n <= e.Blocks {
			c.w.fail("%v waits, though it needs %d blocks and %s has %d of %d reserved", queue[0], n, e.Name, e.BlocksReserved, e.Blocks)
		}
	}
}
