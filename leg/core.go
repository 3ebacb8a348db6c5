// Package leg lets engines serve single legs of requests over HTTP, without a coordinator: a request's first leg on a
// prefill engine, its second on a decode engine, and whoever carries the first leg's answer to the second engine is the
// only one who knows of both. The engines' handoff is the one that a coordinator would drive, over direct links.
//
// Core plays the coordinator's part for the engines of one shard as a plain value: an Event goes into Step, Actions come
// out. It has no goroutine, clock, socket or random source. Server runs a Core between an HTTP frontend, the engines of
// this process and the links to other processes.
//
// # The two legs
//
//	client → P   context leg          P's core        → engine  SubmitRequest (Handoff)
//	client ← P   first token, state   P's core        ← engine  EngineReply (Export), which has a lease
//	client → D   generation leg       D's core → P's  ClaimKV
//	                                  D's core ← P's  ClaimAck; P's engine ← RenewKV
//	                                  D's core        → engine  SubmitRequestWithKV; the KV moves
//	                                  D's core → P's  RenewKV, as long as it moves; with a push transport, SendKV
//	                                  D's core → P's  KVReadDone, when D's engine says so; P's engine ← ReleaseKV
//	client ← D   all tokens
//
// The state is a wire.KVState. Whoever carries it could change it, so the decode engine asks the one that made it, and
// that one compares digests. The state names the prompt too: KV of one prompt cannot be passed off as another's, which
// would put it into the prefix cache under a wrong name.
//
// # What ends an export
//
// A reader that is done, a client that leaves, whoever has its state and gives it up, or the lease. The lease is the engine's (handoff.Retain): a core mirrors
// it only so far that it renews it, and hears when it ends. When a link breaks, its claims end and leases run on.
package leg

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"baton/wire"
)

// Config says what a Core works with.
type Config struct {
	// Engines are the names of the shard's engines, by data-parallel group.
	Engines []string
	// Incarnation is of this process; states are good for one.
	Incarnation uint64
	// Address is where other engines reach this one's link. Only where KV is exported.
	Address string
	// Lease is how long an export waits for its reader: the engines' Config.ExportLease.
	Lease time.Duration
	// Requests is how many requests may be under way at once; more are refused. Default 8192.
	Requests int
	// HeldTokens bounds the tokens of their prompts. Default 2^28.
	HeldTokens int
	// ClaimWait bounds the wait for a source to grant a claim. Default 5 s.
	ClaimWait time.Duration
	// Verdict is how long an engine may take to say what became of a copy whose source is gone. Default 2 s.
	Verdict time.Duration
	// IdleLink is how long a link that nothing uses stays open. Default 60 s.
	IdleLink time.Duration
	// DrainWait is how long a drain waits for what engines still have. Default 30 s.
	DrainWait time.Duration
}

func (c *Config) validate() error {
	if len(c.Engines) == 0 {
		return errors.New("leg: Config.Engines is empty; it needs the name of an engine at least")
	}
	for _, f := range []struct {
		name  string
		value int64
	}{
		{"Lease", int64(c.Lease)}, {"Requests", int64(c.Requests)}, {"HeldTokens", int64(c.HeldTokens)},
		{"ClaimWait", int64(c.ClaimWait)}, {"Verdict", int64(c.Verdict)}, {"IdleLink", int64(c.IdleLink)}, {"DrainWait", int64(c.DrainWait)},
	} {
		if f.value < 0 {
			return fmt.Errorf("leg: Config.%s is %d; it must be positive, or 0 for the default", f.name, f.value)
		}
	}
	c.Requests = cmp.Or(c.Requests, 8192)
	c.HeldTokens = cmp.Or(c.HeldTokens, 1<<28)
	c.ClaimWait = cmp.Or(c.ClaimWait, 5*time.Second)
	c.Verdict = cmp.Or(c.Verdict, 2*time.Second)
	c.IdleLink = cmp.Or(c.IdleLink, time.Minute)
	c.DrainWait = cmp.Or(c.DrainWait, 30*time.Second)
	return nil
}

// Event is what happened: one of the types below.
type Event interface{ event() }

// Submit brings a client's job. ID is new.
type Submit struct {
	ID  uint64
	Job Job
}

// Cancel says that a job's client is gone. Nothing more is delivered.
type Cancel struct{ ID uint64 }

// Discard says that the client never got the state which a context leg ended with.
type Discard struct{ ID uint64 }

// Renew begins the lease of what a context leg left anew: its client does not have the state yet.
type Renew struct{ ID uint64 }

// Release says that nobody will read what a context leg left, as its state names it. Digest is that of the state's bytes.
type Release struct {
	State  *wire.KVState
	Digest [32]byte
}

// EngineSaid brings a message of an engine, by its name.
type EngineSaid struct {
	Engine  string
	Message wire.Message
}

// EngineGone says that an engine's connection has ended.
type EngineGone struct{ Engine string }

// ReaderSaid brings a message of another engine, over a link that it opened.
type ReaderSaid struct {
	Link    uint64
	Message wire.Message
}

// ReaderGone says that such a link has ended.
type ReaderGone struct{ Link uint64 }

// SourceSaid brings a message over the link to an address that this side opened.
type SourceSaid struct {
	Address string
	Message wire.Message
}

// SourceGone says that such a link has ended, or could not be opened.
type SourceGone struct {
	Address string
	Err     error
}

// Tick makes time pass: see Deadline.
type Tick struct{}

// Drain begins the end: jobs are refused from now on.
type Drain struct{}

func (Submit) event()     {}
func (Cancel) event()     {}
func (Discard) event()    {}
func (Renew) event()      {}
func (Release) event()    {}
func (EngineSaid) event() {}
func (EngineGone) event() {}
func (ReaderSaid) event() {}
func (ReaderGone) event() {}
func (SourceSaid) event() {}
func (SourceGone) event() {}
func (Tick) event()       {}
func (Drain) event()      {}

// Action is something the caller of Step has to do, in order: one of the types below.
type Action interface{ action() }

// Tell sends a message to an engine of this process.
type Tell struct {
	Engine  string
	Message wire.Message
}

// Answer sends a message over a link that another engine opened.
type Answer struct {
	Link    uint64
	Message wire.Message
}

// Ask sends a message to the source at an address, over a link that is opened if there is none.
type Ask struct {
	Address string
	Message wire.Message
}

// HangUp closes the link to an address.
type HangUp struct{ Address string }

// Deliver gives a client news of its job. End says that it is the last.
type Deliver struct {
	ID     uint64
	Result wire.Result
	// State is what a context leg leaves for the generation leg; nil when there is nothing to go on with.
	State []byte
	Group int // of the engine that ran it; of a last one
	End   bool
}

// Fail ends a client's job with an error.
type Fail struct {
	ID    uint64
	Error RequestError
}

// Close ends the connection of an engine that has left.
type Close struct{ Engine string }

// Warn tells people of something that should not happen.
type Warn struct{ Text string }

func (Tell) action()    {}
func (Answer) action()  {}
func (Ask) action()     {}
func (HangUp) action()  {}
func (Deliver) action() {}
func (Fail) action()    {}
func (Close) action()   {}
func (Warn) action()    {}

// Core is the coordinator's part, without its surroundings. It is used by one goroutine at a time.
type Core struct {
	cfg      Config
	groups   []*group
	requests map[uint64]*request
	held     int // tokens of their prompts
	turn     int // of the groups

	exports map[uint64]*export // by number of the request
	claims  map[claimKey]*claim
	readers uint64 // numbers claims, for engines

	sources map[string]*source
	reading map[uint64]*request // with a claim, or the wish for one

	cache residency // of all engines

	drained time.Time // when a drain gives up; zero before
	stats   Stats
	now     time.Time
	actions []Action
}

// group is the engine of a data-parallel group.
type group struct {
	number   int
	name     string
	reg      *wire.RegisterRole // nil while it is not there
	requests int
	exports  int
	leaving  bool
	cached   wire.KVReader // what it reports of its cache
}

// Stats are gauges of now, then totals since the start.
type Stats struct {
	Requests int // that have not ended
	Exports  int // that wait for a reader, or are being read
	Claims   int // readers of these exports
	Reading  int // requests that wait for, or read, another engine's export
	Cached   int // blocks in prefix caches, each counted once

	Exported uint64 // context legs that ended with a state
	Released uint64 // exports whose KV was read, or whose client left
	Expired  uint64 // exports whose lease ended
	Refused  uint64 // claims of exports that are not there, or not as they were
	Read     uint64 // generation legs that have their KV
	Lost     uint64 // generation legs whose KV was not to be had
}

// New makes a Core without engines.
func New(cfg Config) (*Core, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	c := &Core{
		cfg: cfg, requests: make(map[uint64]*request), exports: make(map[uint64]*export),
		claims: make(map[claimKey]*claim), sources: make(map[string]*source), reading: make(map[uint64]*request), cache: newResidency(),
	}
	for i, name := range cfg.Engines {
		c.groups = append(c.groups, &group{number: i, name: name})
	}
	return c, nil
}

// Step takes one event and returns what has to be done about it. A message in an action belongs to the caller, and the
// event's message to the core.
func (c *Core) Step(now time.Time, event Event) []Action {
	c.now, c.actions = now, nil
	switch e := event.(type) {
	case Submit:
		c.submit(e.ID, e.Job)
	case Cancel:
		c.cancel(e.ID)
	case Discard:
		c.discard(e.ID)
	case Renew:
		if x := c.exports[e.ID]; x != nil {
			c.tell(x.group, &wire.RenewKV{ID: x.id, Handoff: x.handoff})
		}
	case Release:
		c.unwanted(e)
	case EngineSaid:
		c.engineSaid(e)
	case EngineGone:
		c.engineGone(e.Engine)
	case ReaderSaid:
		c.readerSaid(e.Link, e.Message)
	case ReaderGone:
		c.readerGone(e.Link)
	case SourceSaid:
		c.sourceSaid(e.Address, e.Message)
	case SourceGone:
		c.sourceGone(e.Address, e.Err)
	case Drain:
		c.drain()
	}
	c.watch()
	c.letGo()
	return c.actions
}

func (c *Core) act(a Action) { c.actions = append(c.actions, a) }

func (c *Core) tell(g *group, m wire.Message) { c.act(Tell{g.name, m}) }

func (c *Core) warn(format string, args ...any) { c.act(Warn{fmt.Sprintf(format, args...)}) }

func (c *Core) group(engine string) *group {
	for _, g := range c.groups {
		if g.name == engine {
			return g
		}
	}
	return nil
}

func (c *Core) engineSaid(e EngineSaid) {
	g := c.group(e.Engine)
	if m, ok := e.Message.(*wire.RegisterRole); ok {
		c.register(g, m)
		return
	}
	if g == nil || g.reg == nil {
		c.warn("ignored %v from %s, which has not registered", e.Message.Header(), e.Engine)
		return
	}
	switch m := e.Message.(type) {
	case *wire.EngineReplyPartial:
		c.results(g, m.Results)
	case *wire.EngineReply:
		c.results(g, m.Results)
	case *wire.RequestError:
		c.failed(g, m)
	case *wire.RequestAborted:
		c.aborted(g, m)
	case *wire.KVTransferReady:
		c.transferReady(g, m)
	case *wire.KVReadDone:
		c.readDone(m.ID)
	case *wire.Disconnect:
		g.leaving = true
	case *wire.KVEvents:
		c.cached(g, m)
	default:
		c.warn("ignored %v from %s", e.Message.Header(), e.Engine)
	}
}

func (c *Core) register(g *group, m *wire.RegisterRole) {
	if g == nil || g.reg != nil {
		c.act(Tell{m.Name, &wire.RegisterRoleAck{Error: fmt.Sprintf("%s is no engine of this process, or is here already", m.Name)}})
		return
	}
	g.reg, g.leaving, g.cached = m, false, wire.KVReader{}
	c.tell(g, &wire.RegisterRoleAck{})
}

// engineGone ends all that ran there.
func (c *Core) engineGone(engine string) {
	g := c.group(engine)
	if g == nil || g.reg == nil {
		return
	}
	g.reg = nil
	c.cache.forget(g.number)
	for _, r := range sorted(c.requests) {
		if r.group == g {
			c.leaveSource(r, false)
			c.fail(r, &RequestError{Code: wire.CodeEngineLost, Message: "engine " + engine + " is gone", Retryable: true})
			c.end(r)
		}
	}
	for _, x := range sorted(c.exports) {
		if x.group == g {
			c.lose(x, wire.CodeGone, "the engine that held it is gone")
		}
	}
}

// drain refuses jobs from now on. Engines leave by themselves.
func (c *Core) drain() {
	if c.drained.IsZero() {
		c.drained = c.now.Add(c.cfg.DrainWait)
	}
}

// letGo closes the connections of engines that want to leave and have nothing any more.
func (c *Core) letGo() {
	for _, g := range c.groups {
		if g.reg == nil || !g.leaving {
			continue
		}
		if c.drained.IsZero() {
			c.drained = c.now.Add(c.cfg.DrainWait)
		}
		if late := !c.now.Before(c.drained); g.requests+g.exports == 0 || late {
			if late {
				c.warn("engine %s leaves with %d requests and %d exports", g.name, g.requests, g.exports)
			}
			c.act(Close{g.name})
			c.engineGone(g.name)
		}
	}
}

// Deadline is when the core next wants a Tick, if nothing else happens before.
func (c *Core) Deadline() (at time.Time, ok bool) {
	earlier := func(t time.Time) {
		if !t.IsZero() && (!ok || t.Before(at)) {
			at, ok = t, true
		}
	}
	for _, r := range c.reading {
		earlier(r.read.deadline)
		earlier(r.read.renew)
	}
	for _, s := range c.sources {
		if s.reads == 0 {
			earlier(s.idle.Add(c.cfg.IdleLink))
		}
	}
	for _, g := range c.groups {
		if g.reg != nil && g.leaving {
			earlier(c.drained)
		}
	}
	return at, ok
}

// Stats returns the counts.
func (c *Core) Stats() Stats {
	s := c.stats
	s.Requests, s.Exports, s.Claims, s.Reading = len(c.requests), len(c.exports), len(c.claims), len(c.reading)
	s.Cached = len(c.cache.blocks)
	return s
}

// Status describes the engines as a coordinator does its fleet.
func (c *Core) Status() *wire.StatusReply {
	s := &wire.StatusReply{Ready: true, Phase: "running", Policy: "session", Requests: len(c.requests)}
	for _, g := range c.groups {
		if g.reg == nil {
			s.Ready, s.Reason = false, "engine "+g.name+" is not up"
			continue
		}
		r := g.reg
		s.Model, s.Geometry, s.Transport, s.WeightVersion, s.Colocated = r.Model, r.Geometry, r.Transport, r.WeightVersion, r.Role == wire.RoleBoth
		s.Engines = append(s.Engines, wire.EngineStatus{
			Name: g.name, Role: r.Role, Model: r.Model, Draining: g.leaving, Requests: r.Requests, RequestsInUse: g.requests, Blocks: r.Blocks,
		})
	}
	if !c.drained.IsZero() {
		s.Ready, s.Reason, s.Phase = false, "the engine is stopping", "stopping"
	}
	return s
}
