// Package engine turns tokens into tokens: it batches requests, plans passes, runs them on a device,
// samples, and hands finished prompts over to a decode engine (or takes them in).
//
// All decisions are a Core's, a plain value. An Engine is the shell that owns one in one goroutine (Run),
// with a second one that computes, so that aborts, handoffs and releases do not wait for a pass.
package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"baton/handoff"
	"baton/wire"
)

// weightVersion is that of the weights an engine starts with.
const weightVersion = 1

// Engine is one data-parallel group of a Shard: a Core and the ranks that compute for it.
type Engine struct {
	config      Config
	incarnation uint64
	log         *slog.Logger
	metrics     engineMetrics

	ranks  []member
	unit   *unit // that computes
	place  int   // of the engine in it
	core   *Core
	done   chan passed // from the unit
	events *mailbox    // from the ranks
	broken chan error  // why the shard cannot go on

	workers sync.WaitGroup // that read from connections

	// Owned by Run.
	conn      *wire.Conn
	passing   bool
	traces    *traces
	leaving   error          // why, once the coordinator said that the engine is to: errStopped or an *awayError
	profile   *profile       // being written
	transfers map[uint64]int // the rank of each that is under way
}

func newEngine(c Config) *Engine {
	return &Engine{
		config: c, incarnation: newIncarnation(),
		log:       c.Logger.With("engine", c.Name),
		metrics:   c.Metrics.engine(c.Name),
		done:      make(chan passed, 1),
		events:    newMailbox(),
		broken:    make(chan error, 1),
		traces:    newTraces(c.Tracer, c.Name),
		transfers: map[uint64]int{},
	}
}

// Name is how the engine registers.
func (e *Engine) Name() string { return e.config.Name }

// Dialer connects to the coordinator: hello has been sent and acknowledged when it returns.
type Dialer func(ctx context.Context, hello wire.Connect) (*wire.Conn, error)

// Run serves a coordinator until ctx ends or it says STOP, and looks for it again when the connection
// breaks. When ctx ends the engine drains: it takes no new work, and returns when the coordinator has let it
// go, because its requests have ended or moved elsewhere. It returns an error only when the engine itself
// cannot go on: a refused registration, another engine in its place, or a device fault.
func (e *Engine) Run(ctx context.Context, dial Dialer) error {
	const firstPause, longestPause = 50 * time.Millisecond, 2 * time.Second
	pause, told := firstPause, ""
	for ctx.Err() == nil {
		err := e.session(ctx, dial, func() { pause, told = firstPause, "" })
		var fatal fatalError
		if errors.As(err, &fatal) {
			return fatal.error
		}
		var away *awayError
		if errors.As(err, &away) && ctx.Err() == nil {
			e.log.Error("the engine ends", "error", away)
			return away
		}
		if ctx.Err() != nil || errors.Is(err, errStopped) {
			e.log.Info("stopped")
			break
		}
		level := slog.LevelDebug // it was said already
		if why := err.Error(); why != told {
			level, told = slog.LevelWarn, why
		}
		e.log.Log(ctx, level, "no coordinator; looking for it", "error", err, "retry_in", pause)
		select {
		case <-ctx.Done():
		case err := <-e.broken:
			return err
		case <-time.After(pause):
		}
		pause = min(2*pause, longestPause)
	}
	return nil
}

// errStopped ends a session, and Run, because the coordinator said STOP.
var errStopped = errors.New("engine: stopped by the coordinator")

// awayError ends a session, and Run, because the coordinator does not want this engine any more.
type awayError struct{ name, reason string }

func (e *awayError) Error() string {
	return fmt.Sprintf("engine: the coordinator sent %s away: %s", e.name, e.reason)
}

// drainLimit is how long an engine waits, after ctx has ended, for the coordinator to let it go. The
// coordinator's own limit is shorter.
const drainLimit = 45 * time.Second

// fatalError is one that another connection cannot mend.
type fatalError struct{ error }

// session is the life of one connection.
func (e *Engine) session(ctx context.Context, dial Dialer, registered func()) error {
	conn, err := dial(ctx, wire.Connect{Version: wire.Version, Kind: "engine", Name: e.config.Name, Incarnation: e.incarnation})
	if err != nil {
		return err
	}
	e.conn = conn
	inbox := make(chan wire.Message, 256)
	ended := make(chan error, 1)
	stop := make(chan struct{})
	e.workers.Go(func() { ended <- receive(conn, inbox, stop) })
	defer func() {
		conn.Close()
		close(stop)
		e.abandon()
	}()
	if err := e.register(ctx, inbox, ended); err != nil {
		return err
	}
	registered()
	e.step(Registered{})
	e.log.Info("registered", "role", e.config.Role, "transport", e.config.Transport, "blocks", e.config.blocks())
	return e.serve(ctx, inbox, ended)
}

// receive hands messages to the loop until the connection or the session ends.
func receive(conn *wire.Conn, inbox chan<- wire.Message, stop <-chan struct{}) error {
	for {
		m, err := conn.Recv()
		if err != nil {
			return err
		}
		select {
		case inbox <- m:
		case <-stop:
			return nil
		}
	}
}

func (e *Engine) register(ctx context.Context, inbox <-chan wire.Message, ended <-chan error) error {
	c := e.config
	if err := e.conn.Send(&wire.RegisterRole{
		Role: c.Role, Name: c.Name, Incarnation: e.incarnation, Model: c.ServedModel, Geometry: c.geometry(),
		Transport: c.Transport, Ranks: e.infos(), Requests: c.MaxRequests, Blocks: c.blocks(),
		MaxTokens: c.MaxTokens, WeightVersion: weightVersion, Continuation: max(c.Continuation, 0),
		Logprobs: string(c.Logprobs),
	}); err != nil {
		return err
	}
	const patience = 30 * time.Second
	select {
	case m := <-inbox:
		ack, ok := m.(*wire.RegisterRoleAck)
		if !ok {
			return fmt.Errorf("engine: %s instead of an answer to the registration", m.Header())
		}
		if ack.Error != "" {
			return fatalError{fmt.Errorf("engine: the coordinator refused %s: %s", c.Name, ack.Error)}
		}
		return nil
	case err := <-ended:
		return err
	case <-time.After(patience):
		return fmt.Errorf("engine: no answer to the registration within %v", patience)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *Engine) infos() []wire.RankInfo {
	infos := make([]wire.RankInfo, len(e.ranks))
	for i, r := range e.ranks {
		infos[i] = r.info()
	}
	return infos
}

// pollInterval is how often transfers that may still touch memory are looked at.
const pollInterval = 20 * time.Millisecond

// serve is the loop: one event at a time, and a pass whenever none is under way.
func (e *Engine) serve(ctx context.Context, inbox <-chan wire.Message, ended <-chan error) error {
	poll := time.NewTicker(pollInterval)
	defer poll.Stop()
	stopping := ctx.Done()
	var drained <-chan time.Time
	for {
		e.plan()
		if e.leaving != nil {
			return e.leaving
		}
		select {
		case m := <-inbox:
			e.received(m)
			for more := true; more; { // take what has arrived together before planning
				select {
				case m := <-inbox:
					e.received(m)
				default:
					more = false
				}
			}
		case p := <-e.done:
			if err := e.passed(p); err != nil {
				return fatalError{err}
			}
		case <-e.events.ready:
			e.happened()
		case err := <-e.broken:
			return fatalError{err}
		case <-poll.C:
			e.step(Tick{})
		case err := <-ended:
			return cmp.Or(e.lastWord(inbox), err)
		case <-stopping:
			stopping, drained = nil, time.After(drainLimit)
			e.log.Info("draining")
			e.send(&wire.Disconnect{Reason: "the engine stops"})
		case <-drained:
			return fmt.Errorf("engine: %s: not let go within %v", e.config.Name, drainLimit)
		}
	}
}

// lastWord is why the engine is to leave, if that is among the messages that came before the connection ended.
func (e *Engine) lastWord(inbox <-chan wire.Message) error {
	for {
		select {
		case m := <-inbox:
			switch m.(type) {
			case *wire.Stop, *wire.Disconnect:
				e.step(Received{m})
			}
		default:
			return e.leaving
		}
	}
}

func (e *Engine) received(m wire.Message) {
	e.traces.received(m)
	e.step(Received{m})
}

// plan starts the next pass if none is under way and there is one.
func (e *Engine) plan() {
	plan, actions := e.core.Plan(time.Now())
	e.carryOut(actions)
	if plan != nil {
		e.passing = true
		e.unit.passes <- pass{e.place, plan, e.done}
	}
	e.metrics.gauge(e.core)
}

// passed takes in a pass. A device fault ends the engine: its memory cannot be trusted any more.
func (e *Engine) passed(p passed) error {
	e.passing = false
	if p.err != nil {
		return fmt.Errorf("engine: %s: a pass of %v failed: %w", e.config.Name, p.plan, p.err)
	}
	e.metrics.pass(p)
	e.step(Computed{p.plan, p.outputs})
	return nil
}

// step gives the core one event and does what it orders.
func (e *Engine) step(event Event) { e.carryOut(e.core.Step(time.Now(), event)) }

// carryOut does what the core orders. What is known at once about a transfer goes back to the core.
func (e *Engine) carryOut(actions []Action) {
	for len(actions) > 0 {
		action := actions[0]
		actions = actions[1:]
		switch a := action.(type) {
		case Send:
			e.send(a.Message)
		case Transfer:
			if answer := e.order(a.Order); answer != nil {
				actions = append(actions, e.core.Step(time.Now(), Moved{answer})...)
			}
		case Handed:
			e.metrics.handed(a)
		case Quarantined:
			e.metrics.quarantined()
			e.log.Warn("blocks in quarantine until their transfer is quiesced", "request", a.ID, "blocks", a.Blocks, "source", a.Source)
		case Profile:
			e.profiler(a.Path)
		case Leave:
			e.leaving = errStopped
			if a.Reason != "" {
				e.leaving = &awayError{e.config.Name, a.Reason}
			}
		case Warn:
			e.log.Warn(a.Text)
		}
	}
}

// order gives one of the handoff's orders to the rank that it concerns. The answer, if it is known at once, is its
// next event.
func (e *Engine) order(order handoff.Action) handoff.Event {
	on := func(rank int, transfer uint64) handoff.Event {
		if transfer != 0 {
			e.transfers[transfer] = rank
		}
		event := e.ranks[rank].order(order)
		e.forget(event)
		return event
	}
	switch a := order.(type) {
	case handoff.Seal:
		return on(a.Rank, 0)
	case handoff.OpenExport:
		return on(a.Rank, 0)
	case handoff.Revoke:
		return on(a.Rank, 0)
	case handoff.Verify:
		return on(a.Rank, 0)
	case handoff.StartPull:
		return on(a.Rank, a.Transfer)
	case handoff.StartPush:
		return on(a.Rank, a.Transfer)
	case handoff.Expect:
		return on(a.Rank, a.Transfer)
	case handoff.Cancel:
		if rank, ok := e.transfers[a.Transfer]; ok {
			return on(rank, 0)
		}
	case handoff.Recheck:
		if rank, ok := e.transfers[a.Transfer]; ok {
			return on(rank, 0)
		}
	}
	return nil
}

// happened takes in what orders came to.
func (e *Engine) happened() {
	for _, event := range e.events.take() {
		e.forget(event)
		e.step(Moved{event})
	}
}

// forget drops a transfer that has come to an end, or never began.
func (e *Engine) forget(event handoff.Event) {
	switch v := event.(type) {
	case handoff.Settled:
		if v.Safe {
			delete(e.transfers, v.Transfer)
		}
	case handoff.Expected:
		if v.Err != nil {
			delete(e.transfers, v.Transfer)
		}
	}
}

// profiler starts or ends the profile that the coordinator asked for.
func (e *Engine) profiler(path string) {
	var err error
	if e.profile != nil {
		err = e.profile.stop()
		e.profile = nil
	}
	if path != "" && err == nil {
		e.profile, err = startProfile(path + "." + e.config.Name)
	}
	if err != nil {
		e.log.Warn("profiler", "error", err)
	}
}

// send gives a message to the connection. A failure shows as the end of the session.
func (e *Engine) send(m wire.Message) {
	e.traces.sent(m)
	switch m := m.(type) {
	case *wire.EngineReply:
		e.metrics.results(m.Results)
	case *wire.EngineReplyPartial:
		e.metrics.results(m.Results)
	}
	if err := e.conn.Send(m); err != nil {
		e.log.Warn("message not sent", "message", m.Header(), "error", err)
	}
}

// abandon drops everything when the connection is gone, and waits for the pass that may still be under way.
func (e *Engine) abandon() {
	e.traces.drop()
	e.profiler("")
	e.step(Disconnected{})
	if e.passing {
		if p := <-e.done; p.err == nil {
			e.step(Computed{p.plan, p.outputs})
		}
		e.passing = false
	}
	e.metrics.gauge(e.core)
}
