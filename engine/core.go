package engine

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"

	"baton/handoff"
	"baton/kvcache"
	"baton/layout"
	"baton/wire"
)

// Core is an engine without its surroundings: the scheduler, the handoff, the KV pool's bookkeeping and
// the imports that wait for room in the batch, as one plain value without goroutine, clock, socket, device
// or random source. An Event goes into Step, Actions come out; Plan says what to compute next. It is used
// by one goroutine at a time. Engine runs a Core on real hardware, the simulator under virtual time.
type Core struct {
	config  CoreConfig
	pool    *kvcache.Pool
	sched   *Scheduler
	handoff *handoff.Core // nil on a colocated engine

	epoch        uint64                 // of the trainer's iteration, as the coordinator last said
	passing      bool                   // a pass is under way
	admitting    []handoff.Admit        // imported, waiting for room in the batch
	offers       map[uint64]wire.Result // prefill replies that wait for their export
	templates    templates
	capabilities uint64 // drawn so far
	returned     uint64 // imports given back before they were admitted
	actions      []Action
}

// CoreConfig sizes a Core. All fields count; none has a default.
type CoreConfig struct {
	Name string
	Role string // wire.RolePrefill, RoleDecode or RoleBoth

	MaxRequests int // at once in the batch
	MaxTokens   int // rows of one pass; at least MaxRequests
	MaxSeqLen   int
	Vocabulary  int
	EOS         []int32
	BlockSize   int    // tokens
	Blocks      int    // of the pool
	Version     uint64 // of the weights
	// Continuation and Overtake are SchedulerConfig's.
	Continuation, Overtake int

	// The rest is for engines that hand over.

	// Geometry is that of the whole model's KV, Holdings what the engine's ranks have of it, in order.
	Geometry layout.Geometry
	Holdings []layout.Holding
	// Verify says which blocks' checksums are compared; empty is handoff.VerifyOff. Where they are, Checksums is
	// where each rank keeps them, one for each tile of ChecksumTile tokens.
	Verify       handoff.Verification
	Checksums    []handoff.Checksums
	ChecksumTile int
	// Push says that sources write rather than destinations read.
	Push bool
	// Timeout bounds a transfer; 0 is handoff.DefaultTimeout.
	Timeout time.Duration
	// ExportLease is how long an export waits for its reader, from its offer and from each RenewKV; 0: for ever.
	ExportLease time.Duration
	// Secret is random; the capabilities of exports are derived from it.
	Secret []byte
}

// Event is what happened to an engine: one of the types below.
type Event interface{ event() }

// Received is a message from the coordinator.
type Received struct{ Message wire.Message }

// Computed ends the pass that Plan gave out: Outputs[i] belongs to Plan.Rows[i].
type Computed struct {
	Plan    *Plan
	Outputs []Output
}

// Moved answers a Transfer, or tells how one ended.
type Moved struct{ Event handoff.Event }

// Tick makes time pass: every few hundred milliseconds at least, more often the sooner quarantined blocks
// shall come back.
type Tick struct{}

// Registered says that a coordinator has accepted the engine: it is told what the engine has cached.
type Registered struct{}

// Disconnected says that the coordinator is gone, with all that it knew. Every request ends silently.
type Disconnected struct{}

func (Received) event()     {}
func (Computed) event()     {}
func (Moved) event()        {}
func (Tick) event()         {}
func (Registered) event()   {}
func (Disconnected) event() {}

// Action is something the caller of Step has to do, in order: one of the types below.
type Action interface{ action() }

// Send gives a message to the coordinator.
type Send struct{ Message wire.Message }

// Transfer is the handoff's order to the transfer backend, or to whoever makes and compares checksums. Those
// that ask for an answer are answered by a Moved, at once or later.
type Transfer struct{ Order handoff.Action }

// Handed tells, for metrics, that a handoff ended: "done" (with Stats), "failed" or "aborted".
type Handed struct {
	Result string
	Code   string // of a failure: wire.CodeUnavailable and so on
	Stats  wire.Stats
}

// Quarantined tells people that blocks are kept back because a transfer may still touch them.
type Quarantined struct{ handoff.Quarantine }

// Profile starts a profile of the process at Path, or, with an empty one, ends it.
type Profile struct{ Path string }

// Leave ends the engine's service: its coordinator said STOP or, with a Reason, that it does not want this
// engine any more.
type Leave struct{ Reason string }

// Warn tells people of something that should not happen: the coordinator sent what makes no sense here, or
// KV arrived damaged.
type Warn struct{ Text string }

func (Send) action()        {}
func (Transfer) action()    {}
func (Handed) action()      {}
func (Warn) action()        {}
func (Quarantined) action() {}
func (Profile) action()     {}
func (Leave) action()       {}

// NewCore makes an idle engine with an empty pool.
func NewCore(c CoreConfig) (*Core, error) {
	pool, err := kvcache.New(kvcache.Config{Blocks: c.Blocks, BlockSize: c.BlockSize, Events: keptEvents})
	if err != nil {
		return nil, err
	}
	core := &Core{config: c, pool: pool, offers: map[uint64]wire.Result{}}
	if c.Role != wire.RoleBoth {
		core.templates = templates{config: c, known: map[string]copyTemplates{}}
		core.handoff, err = handoff.New(handoff.Config{
			Pool: pool, BlockBytes: core.templates.blockBytes(), Push: c.Push, Timeout: c.Timeout, Verify: c.Verify, Checksums: c.Checksums,
		})
		if err != nil {
			return nil, err
		}
	}
	core.sched = NewScheduler(SchedulerConfig{
		MaxRequests: c.MaxRequests, MaxTokens: c.MaxTokens, MaxSeqLen: c.MaxSeqLen, Vocabulary: c.Vocabulary,
		EOS: c.EOS, BlockSize: c.BlockSize, Blocks: c.Blocks, Version: c.Version,
		Continuation: c.Continuation, Overtake: c.Overtake, Return: c.Role == wire.RoleDecode,
	}, pool)
	return core, nil
}

// Step takes one event and returns what has to be done about it. It never starts a pass: the caller gives
// it what has arrived together, then calls Plan.
func (c *Core) Step(now time.Time, event Event) []Action {
	c.actions = nil
	switch e := event.(type) {
	case Received:
		c.received(now, e.Message)
	case Computed:
		c.passing = false
		out := c.sched.Apply(now, e.Plan, e.Outputs)
		c.tell() // whoever reads a reply finds its blocks in the index already
		c.publish(now, out)
	case Moved:
		c.step(now, e.Event)
	case Tick:
		c.step(now, handoff.Poll{})
	case Registered:
		c.tellAll()
	case Disconnected:
		c.disconnected(now)
	}
	return c.take()
}

// Plan starts the next pass, unless one is under way or there is nothing to compute; then it is nil. The
// actions are to be carried out first. A Computed ends the pass.
func (c *Core) Plan(now time.Time) (*Plan, []Action) {
	if c.passing {
		return nil, nil
	}
	c.actions = nil
	c.admit(now)
	for len(c.admitting) > 0 && c.sched.Starved() {
		c.giveBack()
	}
	plan, out := c.sched.Plan(now)
	c.publish(now, out)
	c.passing = plan != nil
	return plan, c.take()
}

func (c *Core) take() []Action {
	c.tell()
	actions := c.actions
	c.actions = nil
	return actions
}

func (c *Core) act(a Action) { c.actions = append(c.actions, a) }

func (c *Core) send(m wire.Message) { c.act(Send{m}) }

func (c *Core) warn(format string, args ...any) { c.act(Warn{fmt.Sprintf(format, args...)}) }

func (c *Core) received(now time.Time, m wire.Message) {
	switch m := m.(type) {
	case *wire.SubmitRequest:
		c.submit(now, m)
	case *wire.SubmitRequestWithKV:
		c.startImport(now, m)
	case *wire.SendKV:
		t, err := c.templates.to(m.Ranks)
		if err != nil {
			c.warn("request %d: %v", m.ID, err) // the coordinator has compared the layouts; the reader will give up
			return
		}
		c.step(now, handoff.Push{Message: m, Template: t.blocks, Checksums: t.checksums})
	case *wire.ReleaseKV:
		if m.Corrupt {
			c.warn("request %d: what a decode engine read is not what was sealed; the blocks of handoff %d are forgotten", m.ID, m.Handoff)
		}
		c.step(now, handoff.Release{ID: m.ID, Handoff: m.Handoff, Corrupt: m.Corrupt})
	case *wire.RenewKV:
		c.step(now, handoff.Renew{ID: m.ID, Handoff: m.Handoff})
	case *wire.AbortRequest:
		c.abort(now, m.ID)
	case *wire.Pause:
		c.sched.SetPaused(true)
	case *wire.Unpause:
		c.sched.SetPaused(false)
	case *wire.Suspend, *wire.Resume:
		// An engine of this version keeps its weights and KV in memory; it is paused before and after.
	case *wire.SetGenerationEpoch:
		c.epoch = m.Epoch
	case *wire.KVResync:
		c.tellAll()
	case *wire.StartProfiler:
		c.act(Profile{m.Path})
	case *wire.StopProfiler:
		c.act(Profile{})
	case *wire.Stop:
		c.act(Leave{})
	case *wire.Disconnect:
		c.act(Leave{m.Reason})
	default:
		c.warn("%s ignored", m.Header())
	}
}

func (c *Core) submit(now time.Time, m *wire.SubmitRequest) {
	if c.config.Role == wire.RoleDecode {
		c.send(refusal(m.ID, "", "%s is a decode engine: it never runs a prompt", c.config.Name))
		return
	}
	if m.Handoff && c.config.Role != wire.RolePrefill {
		c.send(refusal(m.ID, "", "%s has no transfer backend to hand a prompt over", c.config.Name))
		return
	}
	if refused := c.sched.Submit(now, m); refused != nil {
		c.send(refused)
	}
}

// abort cancels a request wherever it is. An unknown one has ended already: its reply is on the way.
func (c *Core) abort(now time.Time, id uint64) {
	if out, known := c.sched.Abort(id); known {
		c.publish(now, out)
		return
	}
	for i, a := range c.admitting {
		if a.Message.ID == id {
			a.Table.Close()
			c.admitting = append(c.admitting[:i:i], c.admitting[i+1:]...)
			c.send(&wire.RequestAborted{ID: id, SourceSafe: true})
			return
		}
	}
	c.step(now, handoff.Abort{ID: id})
}

// publish sends what a pass, its planning, an abort or an admission changed.
func (c *Core) publish(now time.Time, out Outcome) {
	for i := range out.Failed {
		c.send(&out.Failed[i])
	}
	for i := range out.Final {
		out.Final[i].Stats.Engine = c.config.Name
	}
	if len(out.Partial) > 0 {
		c.send(&wire.EngineReplyPartial{Results: out.Partial})
	}
	if len(out.Final) > 0 {
		c.send(&wire.EngineReply{Results: out.Final})
	}
	for _, p := range out.Exports {
		p.Result.Stats.Engine = c.config.Name
		c.export(now, p)
	}
	for _, id := range out.Aborted {
		c.send(&wire.RequestAborted{ID: id, SourceSafe: true})
	}
}

// disconnected drops everything: nobody is left to tell.
func (c *Core) disconnected(now time.Time) {
	for _, a := range c.admitting {
		a.Table.Close()
	}
	c.admitting = nil
	clear(c.offers)
	c.sched.Abandon()
	c.sched.SetPaused(false) // the next coordinator says what holds
	c.step(now, handoff.Abandon{})
}

// capability draws the secret of one export.
func (c *Core) capability() []byte {
	c.capabilities++
	mac := hmac.New(sha256.New, c.config.Secret)
	mac.Write(binary.LittleEndian.AppendUint64(nil, c.capabilities))
	return mac.Sum(nil)[:16]
}

// Pool is the engine's. Only the Core changes it.
func (c *Core) Pool() *kvcache.Pool { return c.pool }

// Epoch is the generation epoch that the coordinator last set; 0 before.
func (c *Core) Epoch() uint64 { return c.epoch }

// Load is what an engine has to do.
type Load struct {
	Waiting   int // not begun
	Prefill   int // prompt under way
	Admission int // imported, waiting for room in the batch
	Decode    int
	Short     int           // of those in decode, how many lack a KV block in the latest pass
	Evicted   uint64        // requests that had to give up their KV, since the start
	Handoff   handoff.Stats // zero on a colocated engine
}

// Load counts the engine's requests by state.
func (c *Core) Load() Load {
	var l Load
	l.Waiting, l.Prefill, l.Decode = c.sched.Loads()
	l.Admission = len(c.admitting)
	l.Short, l.Evicted = c.sched.Pressure()
	l.Evicted += c.returned
	if c.handoff != nil {
		l.Handoff = c.handoff.Stats()
	}
	return l
}
