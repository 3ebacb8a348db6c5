// Package coordinator owns every request between a client and the engines: it admits it, queues it,
// chooses its prefill and its decode engine, passes the handoff's messages between the two, forwards
// tokens, and cleans up after aborts and failures. It carries ids, tokens and verdicts; KV never passes
// through it.
//
// Core is the whole of the protocol as a plain value: an Event goes into Step, Actions come out. It has
// no goroutine, clock, socket or random source. Server runs a Core behind TCP and in-process connections;
// Client is the other end, for frontends.
//
// A request moves through these states, and leaves at any of them by abort or failure:
//
//	queued → prefilling → exported → decoding      disaggregated fleet
//	queued → decoding                              colocated fleet
//
// The prefill engine's share of a request is reserved from prefilling until RELEASE_KV is sent (decoding
// begins with reading the KV, and KV_READ_DONE ends that), the decode engine's until the request's end.
//
// An engine that fails a request, dies with it or gives it back sends it back in this order, and its client
// notices nothing but the time: the coordinator has the prompt and every token (see recovery.go).
package coordinator

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"baton/kvcache"
	"baton/route"
	"baton/wire"
)

// Config holds what can be chosen about a Core. The zero value is usable.
type Config struct {
	// Incarnation tells this coordinator's life from earlier ones; drawn at random by the shell.
	Incarnation uint64
	// Policy chooses engines for both legs. Default: route.Prefix with route.DefaultAffinity.
	Policy route.Policy
	// IndexEntries bounds the memory of which engine holds which prefix, in digests for each role.
	// Default: route.DefaultEntries.
	IndexEntries int
	// Queue is how many requests may wait for their first engine; more are refused. Default 8192.
	Queue int
	// MaxPrompt is the longest prompt accepted, in tokens, whatever the engines could take. Default 2^20.
	MaxPrompt int
	// HeldTokens bounds the tokens, of prompts and generated, of all requests that have not ended; each takes
	// 4 bytes. Beyond it requests are refused. Default 2^28.
	HeldTokens int
	// Wait is how long a request waits while the fleet lacks an engine that it needs. Default 10 s.
	Wait time.Duration
	// Attempts is how many failures in a row that engines report end a request, and how many deaths in a
	// row of engines that ran nothing else. Any other death is survived. Default 3.
	Attempts int
	// Verdict is how long a decode engine may take to say what became of a copy whose source is gone, before
	// the prompt runs again. Default 2 s.
	Verdict time.Duration
	// DrainWait is how long an engine that wants to leave may take to end its requests, before they move.
	// Default 30 s.
	DrainWait time.Duration
}

func (c *Config) validate() error {
	for _, f := range []struct {
		name  string
		value int64
	}{
		{"IndexEntries", int64(c.IndexEntries)}, {"Queue", int64(c.Queue)},
		{"MaxPrompt", int64(c.MaxPrompt)}, {"HeldTokens", int64(c.HeldTokens)}, {"Wait", int64(c.Wait)},
		{"Attempts", int64(c.Attempts)}, {"Verdict", int64(c.Verdict)}, {"DrainWait", int64(c.DrainWait)},
	} {
		if f.value < 0 {
			return fmt.Errorf("coordinator: %s is %d; it must be positive, or 0 for the default", f.name, f.value)
		}
	}
	if c.Policy == nil {
		c.Policy = route.Prefix{Affinity: route.DefaultAffinity}
	}
	c.Queue = cmp.Or(c.Queue, 8192)
	c.MaxPrompt = cmp.Or(c.MaxPrompt, 1<<20)
	c.HeldTokens = cmp.Or(c.HeldTokens, 1<<28)
	c.Wait = cmp.Or(c.Wait, 10*time.Second)
	c.Attempts = cmp.Or(c.Attempts, 3)
	c.Verdict = cmp.Or(c.Verdict, 2*time.Second)
	c.DrainWait = cmp.Or(c.DrainWait, 30*time.Second)
	return nil
}

// PeerID numbers a connection. 0 is nobody's: it stands for the coordinator's own process.
type PeerID uint64

// Event is something that happened: a message arrived (Message is set), a connection ended (Message is
// nil), or, with Peer 0 and no Message, time passed. Messages from Peer 0 are the operator's: Stop refuses
// new requests and lets the running ones end, Shutdown ends everything.
type Event struct {
	At      time.Time
	Peer    PeerID
	Message wire.Message
	// Digests may hold the hash chain of a SubmitRequest's prompt in blocks of BlockSize tokens, computed
	// by whoever has the time. Without it, or with another size than the fleet's, the core computes it.
	Digests   []kvcache.Digest
	BlockSize int
}

// ActionKind says what an Action asks for.
type ActionKind uint8

// The kinds of actions.
const (
	Send  ActionKind = iota + 1 // send Message to Peer
	Close                       // close Peer's connection, because of Text
	Note                        // tell people Text: something they may want to know
	Warn                        // tell people Text: a peer broke the protocol, or was late
	End                         // a request ended; Summary tells how. For logs and metrics
	Exit                        // a client asked the whole coordinator to stop
)

// Action is something the caller of Step has to do, in order.
type Action struct {
	Kind    ActionKind
	Peer    PeerID
	Message wire.Message
	Text    string
	Summary *Summary
}

// Summary is the story of one request, for people.
type Summary struct {
	ID, ClientID              uint64
	Client                    string
	Trace                     string // the traceparent that it came with
	Prefill, Decode           string // engine names; a colocated engine is named as Decode
	PrefillRoute, DecodeRoute route.Decision
	Outcome                   string // a wire.Finish… or a wire.Code…
	Message                   string // of a failure
	PromptTokens              int
	CachedTokens              int        // as the engine reported that ran the prompt first
	PredictedTokens           int        // that its choice counted on
	Generated                 int        // tokens sent to the client
	Stats                     wire.Stats // of the last decode leg, or of the only one; moves are those of all

	// What had to be done for it to go on.
	Takeovers int // another decode engine began with the KV of the same source
	Reruns    int // prompt and tokens ran again
	Evictions int // a decode engine gave it back
	Failures  int // an engine reported one

	// When it reached each step; zero where it never did.
	Submitted, Dispatched, Exported, Bound, Read, Ended time.Time
}

// recovery counts one kind of what had to be done for a request.
type recovery struct {
	what  string
	count int
}

func (s *Summary) recoveries() [4]recovery {
	return [...]recovery{
		{"takeovers", s.Takeovers}, {"reruns", s.Reruns}, {"evictions", s.Evictions}, {"failures", s.Failures},
	}
}

// Core is the coordinator without its surroundings. It is used by one goroutine at a time.
type Core struct {
	cfg      Config
	peers    map[PeerID]*peer
	byName   map[string]*engine
	order    []*engine // all engines in order of registration
	entry    pool      // prefill engines, or colocated ones
	decode   pool
	fleet    fleet
	phase    phase
	epoch    *wire.SetGenerationEpoch
	nextID   uint64   // of requests and legs
	serial   uint64   // of engines
	held     int      // tokens of requests that have not ended
	leaving  int      // engines that drain
	admitted []uint64 // incarnations of engines
	misfits  []misfit // by the time when they give up
	orphans  []*leg   // that read from engines which are gone, by verdict
	picks    uint64   // counts dispatches; stamps engine.last
	scan     uint64   // counts passes over a queue; stamps engine.claimed
	now      time.Time
	actions  []Action

	requests   map[uint64]*request
	buckets    []bucket
	room       []wire.Result // the part of an engine's message that has been read, and is free for what is forwarded
	depths     []int
	candidates []route.Candidate
	chosen     []*engine
}

// peer is one open connection.
type peer struct {
	id       PeerID
	hello    wire.Connect
	engine   *engine             // of an engine that registered
	requests map[uint64]*request // of a client, by its own ids
}

// Kinds of peers, as wire.Connect spells them.
const (
	KindClient = "client"
	KindEngine = "engine"
)

// New makes a Core without peers.
func New(cfg Config) (*Core, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	c := &Core{
		cfg:      cfg,
		peers:    make(map[PeerID]*peer),
		byName:   make(map[string]*engine),
		requests: make(map[uint64]*request),
	}
	sessions, sticky := cfg.Policy.(route.Session)
	for _, p := range [...]*pool{&c.entry, &c.decode} {
		p.index = route.NewIndex(cfg.IndexEntries)
		if sticky {
			p.pins = route.NewPins(sessions.Sessions)
		}
	}
	return c, nil
}

// Step takes one event and returns what has to be done about it. The slice is valid until the next Step;
// a message in it belongs to the caller, and the event's message to the core.
func (c *Core) Step(ev Event) []Action {
	clear(c.actions)
	c.actions = c.actions[:0]
	c.now = ev.At
	switch {
	case ev.Message == nil && ev.Peer != 0:
		c.disconnected(ev.Peer)
	case ev.Message != nil && ev.Peer == 0:
		c.operator(ev.Message)
	case ev.Message != nil:
		c.received(&ev)
	}
	c.expel()
	c.judge()
	c.dismiss()
	c.expire()
	return c.actions
}

func (c *Core) received(ev *Event) {
	p := c.peers[ev.Peer]
	hello, isHello := ev.Message.(*wire.Connect)
	switch {
	case p == nil && isHello:
		c.connected(ev.Peer, hello)
	case p == nil:
		c.warn("ignored %s from connection %d, which never said CONNECT", name(ev.Message), ev.Peer)
	case isHello:
		c.warn("ignored a second CONNECT from %s", p)
	case p.hello.Kind == KindClient:
		c.fromClient(p, ev)
	case p.engine != nil:
		c.fromEngine(p.engine, ev.Message)
	default:
		if m, ok := ev.Message.(*wire.RegisterRole); ok {
			c.register(p, m)
			return
		}
		c.warn("ignored %s from %s, which has not registered a role", name(ev.Message), p)
	}
}

// connected notes a peer whose handshake the shell has completed.
func (c *Core) connected(id PeerID, hello *wire.Connect) {
	if hello.Kind != KindClient && hello.Kind != KindEngine {
		c.act(Action{Kind: Close, Peer: id, Text: fmt.Sprintf("kind is %q, want %q or %q", hello.Kind, KindClient, KindEngine)})
		return
	}
	if reason := c.fleet.modelID().foreign(hello); reason != "" && hello.Kind == KindClient {
		c.turnAway(id, reason)
		return
	}
	p := &peer{id: id, hello: *hello}
	if hello.Kind == KindClient {
		p.requests = make(map[uint64]*request)
	}
	c.peers[id] = p
}

func (c *Core) disconnected(id PeerID) {
	p := c.peers[id]
	if p == nil {
		return
	}
	delete(c.peers, id)
	if p.engine != nil {
		c.remove(p.engine, "its connection ended", true)
	}
	for _, r := range sorted(p.requests) {
		c.abort(r)
		c.finish(r, "the client's connection ended")
	}
}

func (c *Core) fromClient(p *peer, ev *Event) {
	switch m := ev.Message.(type) {
	case *wire.SubmitRequest:
		c.submit(p, m, ev)
	case *wire.AbortRequest:
		if r := p.requests[m.ID]; r != nil {
			c.abort(r)
		}
	case *wire.StatusRequest:
		status := c.Status()
		status.ID = m.ID
		c.send(p, status)
	case *wire.Pause, *wire.Unpause, *wire.Suspend, *wire.Resume, *wire.Stop,
		*wire.SetGenerationEpoch, *wire.StartProfiler, *wire.StopProfiler:
		c.control(p, m)
	case *wire.Shutdown:
		c.shutdown()
		c.act(Action{Kind: Exit, Text: fmt.Sprintf("asked by %s", p)})
	default:
		c.warn("ignored %s from %s", name(m), p)
	}
}

func (c *Core) fromEngine(e *engine, m wire.Message) {
	switch m := m.(type) {
	case *wire.EngineReply:
		c.results(e, m.Results, true)
	case *wire.EngineReplyPartial:
		c.results(e, m.Results, false)
	case *wire.KVTransferReady:
		c.transferReady(e, m)
	case *wire.KVReadDone:
		c.readDone(e, m)
	case *wire.RequestAborted:
		c.aborted(e, m)
	case *wire.RequestError:
		c.failed(e, m)
	case *wire.KVEvents:
		c.residency(e, m)
	case *wire.Disconnect:
		c.drain(e, m.Reason)
	case *wire.RegisterRole:
		c.send(e.peer, &wire.RegisterRoleAck{Error: fmt.Sprintf("%s has registered on this connection already; connect anew to change its role", e.reg.Name)})
	default:
		c.warn("ignored %s from %s", name(m), e.peer)
	}
}

// Requests is the number of requests of which anything is left.
func (c *Core) Requests() int { return len(c.requests) }

// Deadline is when the core next wants to hear of the time (an Event with Peer 0 and no Message), if
// nothing else happens before.
func (c *Core) Deadline() (at time.Time, ok bool) {
	earlier := func(t time.Time) {
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	if t, waits := c.entry.deadline(c.cfg.Wait, c.complete()); waits {
		earlier(t)
	}
	if t, waits := c.decode.deadline(c.cfg.Wait, c.decode.open() > 0); waits {
		earlier(t)
	}
	if len(c.misfits) > 0 {
		earlier(c.misfits[0].by)
	}
	if len(c.orphans) > 0 {
		earlier(c.orphans[0].verdict)
	}
	if c.leaving > 0 {
		for _, e := range c.order {
			if e.draining && len(e.legs) > 0 {
				earlier(e.leaveBy)
			}
		}
	}
	return at, ok
}

// BlockSize is the fleet's tokens a KV block, 0 while there is no engine: what Event.Digests is made for.
func (c *Core) BlockSize() int { return c.fleet.geometry.BlockSize }

func (c *Core) act(a Action) { c.actions = append(c.actions, a) }

func (c *Core) send(p *peer, m wire.Message) { c.act(Action{Kind: Send, Peer: p.id, Message: m}) }

func (c *Core) note(format string, args ...any) {
	c.act(Action{Kind: Note, Text: fmt.Sprintf(format, args...)})
}

func (c *Core) warn(format string, args ...any) {
	c.act(Action{Kind: Warn, Text: fmt.Sprintf(format, args...)})
}

// String names a peer in logs.
func (p *peer) String() string {
	if p.engine != nil {
		return fmt.Sprintf("engine %s", p.engine.reg.Name)
	}
	return fmt.Sprintf("%s %q (connection %d)", p.hello.Kind, p.hello.Name, p.id)
}

var errStopping = errors.New("the coordinator is stopping")
