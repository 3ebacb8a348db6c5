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

	"baton/compute/cpu"
	"baton/handoff"
	"baton/transfer"
	"baton/wire"
)

// weightVersion is that of the weights an engine starts with.
const weightVersion = 1

// Engine is one data-parallel group: a Core, the memory of its KV pool, a device, one end of a transfer
// backend.
type Engine struct {
	config      Config
	incarnation uint64
	log         *slog.Logger
	metrics     engineMetrics

	device    *device
	memory    *transfer.Memory
	endpoint  transfer.Endpoint // nil on a colocated engine
	checksums checksums         // of the pool's blocks, where handoffs are verified
	core      *Core

	passes  chan *Plan         // to the computing goroutine
	done    chan passed        // and back
	settled chan uint64        // numbers of transfers that came to an end
	checked chan handoff.Event // of the check that ended
	workers sync.WaitGroup

	lifetime context.Context // of transfers; ended by Close
	end      context.CancelFunc

	// Owned by Run.
	conn      *wire.Conn
	passing   bool
	leaving   error    // why, once the coordinator said that the engine is to: errStopped or an *awayError
	profile   *profile // being written
	transfers map[uint64]transfer.Handle
	checks    []func() handoff.Event // of blocks and their checksums; the first is under way
}

// passed is a pass that ended.
type passed struct {
	plan    *Plan
	outputs []Output
	took    time.Duration
	err     error
}

// New loads the model, allocates the pool and opens the transfer backend.
func New(c Config) (*Engine, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	e := &Engine{
		config: c, incarnation: newIncarnation(),
		log:       c.Logger.With("engine", c.Name),
		metrics:   c.Metrics.engine(c.Name),
		passes:    make(chan *Plan),
		done:      make(chan passed, 1),
		settled:   make(chan uint64, 64),
		checked:   make(chan handoff.Event, 1),
		transfers: map[uint64]transfer.Handle{},
	}
	e.lifetime, e.end = context.WithCancel(context.Background())
	if err := e.open(); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	e.workers.Go(e.compute)
	return e, nil
}

func (e *Engine) open() (err error) {
	c := e.config
	blocks := c.blocks()
	if e.memory, err = transfer.NewMemory(c.memoryBytes(), "baton-kv-"+c.Name); err != nil {
		return fmt.Errorf("engine: KV pool of %d blocks: %w", blocks, err)
	}
	backend, err := cpu.New(cpu.Options{Threads: c.Threads})
	if err != nil {
		return err
	}
	if e.device, err = newDevice(c, backend, e.memory.Data[:c.kvBytes():c.kvBytes()]); err != nil {
		return errors.Join(err, backend.Close())
	}
	core := c.core()
	if c.Role != wire.RoleBoth {
		if err := e.openTransfers(&core); err != nil {
			return err
		}
	}
	e.core, err = NewCore(core)
	return err
}

// Close stops the computing goroutine and frees everything. Call it after Run has returned.
func (e *Engine) Close() error {
	close(e.passes)
	var errs []error
	if e.endpoint != nil {
		errs = append(errs, e.endpoint.Close()) // waits until no transfer touches the pool
	}
	e.end()
	e.workers.Wait()
	if e.device != nil {
		errs = append(errs, e.device.close())
	}
	if e.memory != nil {
		errs = append(errs, e.memory.Close())
	}
	return errors.Join(errs...)
}

// compute runs passes until Close.
func (e *Engine) compute() {
	for plan := range e.passes {
		began := time.Now()
		outputs, err := e.device.run(plan)
		e.done <- passed{plan, outputs, time.Since(began), err}
	}
}

// Dialer connects to the coordinator: hello has been sent and acknowledged when it returns.
type Dialer func(ctx context.Context, hello wire.Connect) (*wire.Conn, error)

// Run serves a coordinator until ctx ends or it says STOP, and looks for it again when the connection
// breaks. When ctx ends the engine drains: it takes no new work, and returns when the coordinator has let it
// go, because its requests have ended or moved elsewhere. It returns an error only when the engine itself
// cannot go on: a refused registration, another engine in its place, or a device fault.
func (e *Engine) Run(ctx context.Context, dial Dialer) error {
	const firstPause, longestPause = 50 * time.Millisecond, 2 * time.Second
	pause := firstPause
	for ctx.Err() == nil {
		err := e.session(ctx, dial, func() { pause = firstPause })
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
		e.log.Warn("coordinator not reachable", "error", err, "retry_in", pause)
		select {
		case <-ctx.Done():
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
		Transport: c.Transport, Ranks: e.ranks(), Requests: c.MaxRequests, Blocks: c.blocks(),
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

func (e *Engine) ranks() []wire.RankInfo {
	if e.endpoint == nil {
		return []wire.RankInfo{{}}
	}
	rank := wire.RankInfo{Transport: e.endpoint.Describe()}
	if e.config.verifies() {
		rank.Checksums = e.config.kvBytes()
	}
	return []wire.RankInfo{rank}
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
			e.step(Received{m})
			for more := true; more; { // take what has arrived together before planning
				select {
				case m := <-inbox:
					e.step(Received{m})
				default:
					more = false
				}
			}
		case p := <-e.done:
			if err := e.passed(p); err != nil {
				return fatalError{err}
			}
		case id := <-e.settled:
			e.transferSettled(id)
		case event := <-e.checked:
			e.checkEnded(event)
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

// plan starts the next pass if none is under way and there is one.
func (e *Engine) plan() {
	plan, actions := e.core.Plan(time.Now())
	e.carryOut(actions)
	if plan != nil {
		e.passing = true
		e.passes <- plan
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
			if answer := e.transfer(a.Order); answer != nil {
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
