package sim

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"baton/wire"
)

// client is a frontend.
type client struct {
	w       *world
	name    string
	birth   uint64 // counts its lives
	gone    bool   // between two lives
	link    *link
	lastID  uint64
	running map[uint64]*attempt // by its own ids
	pending []wire.Message      // until there is a connection
}

// attempt is one submission of a request, from when the client means to send it until it ended.
type attempt struct {
	number  uint64 // travels as the sampling seed, to know the request again anywhere
	request Request
	client  *client
	id      uint64 // by which the client knows it
	link    *link
	prompt  []int32
	stop    int32 // the token that ends it early; -1: none
	try     int
	probe   bool // sent when all was quiet

	tokens  []int32
	version uint64  // of the weights that explain the tokens so far
	context reading // of prompt and tokens under version
	ended   bool
	aborted bool // the client asked for it
	first   bool // the first result came

	// What the coordinator did with it.
	coord   *coordinatorLife
	owner   *life
	legs    []leg
	resumed int  // tokens that its latest prefill began with
	deaths  int  // of engines while they owned it
	choosy  bool // it failed somewhere, and would rather go elsewhere
}

// leg is what an attempt is on one engine, and by which number that engine knows it.
type leg struct {
	life *life
	id   uint64
}

func (a *attempt) String() string {
	return fmt.Sprintf("request %d (%s, try %d)", a.number, a.client.name, a.try)
}

// leaving reports whether the attempt may already be out of the coordinator's queues.
func (a *attempt) leaving() bool { return a.aborted || !a.link.coordOpen }

// pinned reports whether the attempt may wait for the engine of its session while others are free.
func (a *attempt) pinned() bool {
	return a.request.Session > 0 && a.client.w.script.Fleet.Policy == "session"
}

// named finds the attempt that a client knows under a number.
func (w *world) named(client string, id uint64) *attempt {
	for _, a := range w.attempts {
		if a.id == id && a.client.name == client {
			return a
		}
	}
	return nil
}

// asked finds the attempt that came over a connection under a number.
func (w *world) asked(k *link, id uint64) *attempt {
	for _, a := range w.attempts {
		if a.link == k && a.id == id {
			return a
		}
	}
	return nil
}

func (w *world) attempt(number uint64) *attempt { return w.attempts[number-1] }

func (w *world) newClient(name string) *client {
	return &client{w: w, name: name, running: map[uint64]*attempt{}}
}

func (c *client) String() string { return c.name }

func (c *client) dial() {
	c.w.connect(&visit{c, c.birth}, nil, wire.Connect{Version: wire.Version, Kind: "client", Name: c.name, Incarnation: c.birth + 1})
}

// visit is a life of a client as an end of its connections.
type visit struct {
	c     *client
	birth uint64
}

func (v *visit) String() string { return v.c.name }

func (v *visit) over() bool { return v.c.gone || v.c.birth != v.birth }

func (v *visit) refused() {
	v.c.w.after(2*time.Millisecond+v.c.w.within(10*time.Millisecond), func() {
		if !v.over() {
			v.c.dial()
		}
	})
}

func (v *visit) connected(k *link) {
	if v.over() {
		k.peerCloses(false)
		return
	}
	v.c.link = k
	for id := v.c.lastID - min(v.c.lastID, 2); id < v.c.lastID; id++ {
		if v.c.running[id+1] == nil {
			k.up(&wire.AbortRequest{ID: id + 1}) // of an earlier connection
		}
	}
	for _, m := range v.c.pending {
		v.c.send(m)
	}
	v.c.pending = nil
}

func (v *visit) receive(k *link, m wire.Message) {
	if !v.over() && k == v.c.link {
		v.c.receive(m)
	}
}

func (v *visit) lost(k *link) {
	if v.over() || k != v.c.link {
		return
	}
	v.c.w.log("%s: its connection ended", v.c.name)
	v.c.link = nil
	v.c.dropAll(true)
	v.refused()
}

// send gives a message to the connection, or keeps it until there is one.
func (c *client) send(m wire.Message) {
	if c.link == nil {
		c.pending = append(c.pending, m)
		return
	}
	if s, ok := m.(*wire.SubmitRequest); ok {
		c.running[s.ID].link = c.link
	}
	c.link.up(m)
	if m, ok := m.(*wire.AbortRequest); ok && c.w.chance(100) {
		c.link.up(m) // a duplicate
	}
}

// want submits a request.
func (c *client) want(r Request, try int) {
	c.w.counts.Requests++
	a := &attempt{number: uint64(len(c.w.attempts) + 1), request: r, client: c, prompt: r.prompt(), try: try, version: 1}
	a.context = a.read(a.version)
	a.stop = a.stopToken()
	c.w.attempts = append(c.w.attempts, a)
	if c.gone {
		a.ended = true // nobody is there to ask
		return
	}
	c.lastID++
	id := c.lastID
	c.running[id], a.id = a, id
	m := &wire.SubmitRequest{
		ID: id, Prompt: a.prompt, Salt: []string{"", "salt"}[r.Salt%2],
		Sampling: wire.Sampling{Seed: a.number, MaxTokens: r.Max, PromptLogprobs: r.Logprobs},
	}
	if r.Session > 0 {
		m.Session = "session" + strconv.Itoa(r.Session)
	}
	if a.stop >= 0 {
		m.Sampling.StopTokenIDs = wire.Tokens{a.stop}
	}
	c.send(m)
	if r.Abort > 0 {
		c.w.after(r.Abort, func() { c.abort(id, a) })
	}
}

func (c *client) abort(id uint64, a *attempt) {
	if a.ended || c.running[id] != a {
		return
	}
	a.aborted = true
	c.send(&wire.AbortRequest{ID: id})
}

// read folds in the prompt and the tokens so far as they are under some weights.
func (a *attempt) read(version uint64) reading {
	var r reading
	for _, id := range slices.Concat(a.prompt, a.tokens) {
		r.follow(version, id)
	}
	return r
}

// stopToken is what an undisturbed run under the first weights has at the place where the request is to
// stop.
func (a *attempt) stopToken() int32 {
	if a.request.Stop == 0 {
		return -1
	}
	r := a.read(1)
	for i := 1; ; i++ {
		id := r.next(1)
		if i >= a.request.Stop {
			return id
		}
		r.follow(1, id)
	}
}

func (c *client) receive(m wire.Message) {
	switch m := m.(type) {
	case *wire.EngineReply:
		c.results(m.Results, true)
	case *wire.EngineReplyPartial:
		c.results(m.Results, false)
	case *wire.RequestAborted:
		a := c.end(m.ID, "RequestAborted")
		if a == nil {
			return
		}
		c.w.counts.Aborted++
		if !a.aborted {
			c.w.fail("%v was aborted, which nobody had asked for", a)
		}
	case *wire.RequestError:
		a := c.end(m.ID, m.Message)
		if a == nil {
			return
		}
		c.w.counts.Failed++
		if !c.w.disturbed && !a.aborted || m.Code == wire.CodeInvalid || m.Code == wire.CodeInternal {
			c.w.fail("%v failed: %+v", a, m)
			return
		}
		c.again(a)
	default:
		c.w.fail("%s got %s", c.name, told{m})
	}
}

// end is the one end that an attempt may have.
func (c *client) end(id uint64, how string) *attempt {
	a := c.running[id]
	if a == nil {
		c.w.fail("%s: its request %d ended again (or never began): %s", c.name, id, how)
		return nil
	}
	delete(c.running, id)
	a.ended = true
	return a
}

// again submits a request that failed once more, unless it was tried often enough.
func (c *client) again(a *attempt) {
	const tries = 3
	if a.aborted || a.try+1 >= tries {
		return
	}
	c.w.counts.Retried++
	r := a.request
	r.Abort = 0
	c.w.after(time.Millisecond+c.w.within(10*time.Millisecond), func() { c.want(r, a.try+1) })
}

func (c *client) results(list []wire.Result, replies bool) {
	for i := range list {
		r := &list[i]
		a := c.running[r.ID]
		if a == nil {
			c.w.fail("%s got tokens of its request %d, which has ended: %+v", c.name, r.ID, r)
			return
		}
		if replies != (r.Finish != "") {
			c.w.fail("%v: a reply (%t) with finish %q", a, replies, r.Finish)
		}
		a.accept(c.w, r)
		if r.Finish != "" {
			c.end(r.ID, r.Finish)
			c.w.counts.Finished++
			a.checkFinish(c.w, r)
		}
	}
}

// accept checks tokens against what an undisturbed run gives.
func (a *attempt) accept(w *world, r *wire.Result) {
	if r.Start != len(a.tokens) && len(r.Tokens) > 0 {
		w.fail("%v: tokens from index %d on where %d was due", a, r.Start, len(a.tokens))
		return
	}
	if !a.first {
		a.first = true
		a.checkFirst(w, r)
	}
	for _, id := range r.Tokens {
		for id != a.context.next(a.version) && a.version < w.version {
			a.version++
			a.context = a.read(a.version)
		}
		if want := a.context.next(a.version); id != want {
			w.fail("%v: token %d is %d, an undisturbed run has %d", a, len(a.tokens), id, want)
			return
		}
		a.tokens = append(a.tokens, id)
		a.context.follow(a.version, id)
	}
}

// checkFirst checks what is reported once.
func (a *attempt) checkFirst(w *world, r *wire.Result) {
	if r.PromptTokens != len(a.prompt) || r.CachedTokens < 0 || r.CachedTokens >= len(a.prompt) {
		w.fail("%v: %d prompt tokens reported, %d of them cached; it has %d", a, r.PromptTokens, r.CachedTokens, len(a.prompt))
	}
	if most := a.shared(w); r.CachedTokens > most && len(a.legs) < 2 {
		w.fail("%v: %d tokens cached; with others of its salt it has %d in common", a, r.CachedTokens, most)
	}
	if !a.request.Logprobs {
		return
	}
	if len(r.PromptLogprobs) != len(a.prompt)-1 {
		w.fail("%v: %d prompt logprobs for %d tokens", a, len(r.PromptLogprobs), len(a.prompt))
		return
	}
	explained := func(version uint64) bool {
		var context reading
		for i, got := range r.PromptLogprobs {
			context.follow(version, a.prompt[i])
			if got != context.logprob(a.prompt[i+1]) {
				return false
			}
		}
		return true
	}
	for v := uint64(1); v <= w.version; v++ {
		if explained(v) {
			return
		}
	}
	w.fail("%v: its prompt logprobs are not those of an undisturbed run", a)
}

// shared is the longest prefix that a prompt has in common with another one of the same salt.
func (a *attempt) shared(w *world) int {
	longest := 0
	for _, o := range w.attempts {
		if o == a || o.request.Salt%2 != a.request.Salt%2 {
			continue
		}
		n := 0
		for n < min(len(a.prompt), len(o.prompt)) && a.prompt[n] == o.prompt[n] {
			n++
		}
		longest = max(longest, n)
	}
	return longest
}

func (a *attempt) checkFinish(w *world, r *wire.Result) {
	n := len(a.tokens)
	switch {
	case r.Finish == wire.FinishLength && n == a.request.Max && (a.stop < 0 || a.version > 1):
	case r.Finish == wire.FinishStop && n > 0 && a.tokens[n-1] == a.stop && r.StopToken == a.stop:
	default:
		w.fail("%v ended with %q after %d of %d tokens", a, r.Finish, n, a.request.Max)
	}
}

// dropAll ends everything with the connection.
func (c *client) dropAll(retry bool) {
	for _, id := range sortedKeys(c.running) {
		a := c.running[id]
		if a.link == nil && retry {
			continue // not sent yet
		}
		delete(c.running, id)
		a.ended = true
		c.w.counts.Failed++
		if retry {
			c.again(a)
		}
	}
}

// crash ends the client; another one of its name comes after d.
func (c *client) crash(d time.Duration) {
	if c.gone {
		return
	}
	c.gone = true
	c.pending = nil
	c.dropAll(false)
	if c.link != nil {
		c.link.peerCloses(true)
		c.link = nil
	}
	c.w.after(d, func() {
		c.birth++
		c.gone = false
		c.dial()
	})
}

func (c *client) cut() {
	if c.link != nil {
		c.link.sever()
	}
}

// pause stops the fleet for d, and suspends it in between if asked to.
func (c *client) pause(d time.Duration, suspend bool) {
	c.send(&wire.Pause{})
	if suspend {
		c.w.after(d/4, func() { c.send(&wire.Suspend{}) })
		c.w.after(d/2, func() { c.send(&wire.Resume{}) })
	}
	c.w.after(d, func() { c.send(&wire.Unpause{}) })
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
