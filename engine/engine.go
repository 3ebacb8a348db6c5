// Package engine turns tokens into tokens: it batches requests, plans passes, runs them on a device,
// samples, and hands finished prompts over to a decode engine (or takes them in).
//
// The Scheduler and the handoff are plain values; an Engine is the shell that owns them in one goroutine
// (Run), with a second one that computes, so that aborts, handoffs and releases do not wait for a pass.
package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"baton/compute/cpu"
	"baton/handoff"
	"baton/kvcache"
	"baton/layout"
	"baton/transfer"
	"baton/wire"
)

// weightVersion is that of the weights an engine starts with.
const weightVersion = 1

// Engine is one data-parallel group: a scheduler, a KV pool, a device, one end of a transfer backend.
type Engine struct {
	config      Config
	incarnation uint64
	log         *slog.Logger
	metrics     engineMetrics

	device   *device
	memory   *transfer.Memory
	endpoint transfer.Endpoint
	pool     *kvcache.Pool
	sched    *Scheduler
	handoff  *handoff.Core    // nil on a colocated engine, as are endpoint and template
	template *layout.Template // from one engine of this geometry to another

	passes  chan *Plan  // to the computing goroutine
	done    chan passed // and back
	settled chan uint64 // numbers of transfers that came to an end
	workers sync.WaitGroup

	lifetime context.Context // of transfers; ended by Close
	end      context.CancelFunc

	// Owned by Run.
	conn      *wire.Conn
	passing   bool
	transfers map[uint64]transfer.Handle
	admitting []handoff.Admit        // imported, waiting for room in the batch
	offers    map[uint64]wire.Result // prefill replies that wait for their export
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
		transfers: map[uint64]transfer.Handle{},
		offers:    map[uint64]wire.Result{},
	}
	e.lifetime, e.end = context.WithCancel(context.Background())
	if err := e.open(); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	e.workers.Go(e.compute)
	return e, nil
}

func (e *Engine) open() error {
	c := e.config
	blocks := c.blocks()
	pool, err := kvcache.New(kvcache.Config{Blocks: blocks, BlockSize: c.BlockSize})
	if err != nil {
		return err
	}
	e.pool = pool
	if e.memory, err = transfer.NewMemory(int64(blocks)*c.blockBytes(), "baton-kv-"+c.Name); err != nil {
		return fmt.Errorf("engine: KV pool of %d blocks: %w", blocks, err)
	}
	backend, err := cpu.New(cpu.Options{Threads: c.Threads})
	if err != nil {
		return err
	}
	if e.device, err = newDevice(c, backend, e.memory.Data); err != nil {
		return errors.Join(err, backend.Close())
	}
	if c.Role != wire.RoleBoth {
		if err := e.openHandoff(); err != nil {
			return err
		}
	}
	spec := c.Checkpoint.Spec
	e.sched = NewScheduler(SchedulerConfig{
		MaxRequests: c.MaxRequests, MaxTokens: c.MaxTokens, MaxSeqLen: c.MaxSeqLen, Vocabulary: spec.VocabSize,
		EOS: spec.EOS, BlockSize: c.BlockSize, Blocks: blocks, Version: weightVersion,
	}, pool)
	return nil
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

// Run serves a coordinator until ctx ends, and looks for it again when the connection breaks. It returns
// an error only when the engine itself cannot go on: a refused registration or a device fault.
func (e *Engine) Run(ctx context.Context, dial Dialer) error {
	const firstPause, longestPause = 50 * time.Millisecond, 2 * time.Second
	pause := firstPause
	for ctx.Err() == nil {
		err := e.session(ctx, dial, func() { pause = firstPause })
		var fatal fatalError
		if errors.As(err, &fatal) {
			return fatal.error
		}
		if ctx.Err() != nil {
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
		MaxTokens: c.MaxTokens, WeightVersion: weightVersion,
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
	return []wire.RankInfo{{Transport: e.endpoint.Describe()}}
}

// pollInterval is how often transfers that may still touch memory are looked at.
const pollInterval = 20 * time.Millisecond

// serve is the loop: one event at a time, and a pass whenever none is under way.
func (e *Engine) serve(ctx context.Context, inbox <-chan wire.Message, ended <-chan error) error {
	poll := time.NewTicker(pollInterval)
	defer poll.Stop()
	for {
		e.plan()
		select {
		case m := <-inbox:
			e.receive(m)
			for more := true; more; { // take what has arrived together before planning
				select {
				case m := <-inbox:
					e.receive(m)
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
		case <-poll.C:
			e.poll()
		case err := <-ended:
			return err
		case <-ctx.Done():
			_ = e.conn.Send(&wire.Disconnect{Reason: "the engine stops"}) // the coordinator sees the end either way
			return ctx.Err()
		}
	}
}

// plan starts the next pass if none is under way and there is one.
func (e *Engine) plan() {
	if e.passing {
		return
	}
	e.admit()
	plan, failed := e.sched.Plan(time.Now())
	for i := range failed {
		e.send(&failed[i])
	}
	if plan != nil {
		e.passing = true
		e.passes <- plan
	}
	e.gauge()
}

// passed takes in a pass. A device fault ends the engine: its memory cannot be trusted any more.
func (e *Engine) passed(p passed) error {
	e.passing = false
	if p.err != nil {
		return fmt.Errorf("engine: %s: a pass of %v failed: %w", e.config.Name, p.plan, p.err)
	}
	e.metrics.pass(p)
	e.publish(e.sched.Apply(time.Now(), p.plan, p.outputs))
	return nil
}

// publish sends what a pass, an abort or an admission changed.
func (e *Engine) publish(out Outcome) {
	for i := range out.Final {
		out.Final[i].Stats.Engine = e.config.Name
	}
	e.metrics.results(out.Final)
	e.metrics.results(out.Partial)
	if len(out.Partial) > 0 {
		e.send(&wire.EngineReplyPartial{Results: out.Partial})
	}
	if len(out.Final) > 0 {
		e.send(&wire.EngineReply{Results: out.Final})
	}
	for _, p := range out.Exports {
		p.Result.Stats.Engine = e.config.Name
		e.metrics.results([]wire.Result{p.Result})
		e.export(p)
	}
	for _, id := range out.Aborted {
		e.send(&wire.RequestAborted{ID: id, SourceSafe: true})
	}
}

// send gives a message to the connection. A failure shows as the end of the session.
func (e *Engine) send(m wire.Message) {
	if err := e.conn.Send(m); err != nil {
		e.log.Warn("message not sent", "message", m.Header(), "error", err)
	}
}

// receive acts on one message from the coordinator.
func (e *Engine) receive(m wire.Message) {
	switch m := m.(type) {
	case *wire.SubmitRequest:
		e.submit(m)
	case *wire.SubmitRequestWithKV:
		e.startImport(m)
	case *wire.SendKV:
		e.sendKV(m)
	case *wire.ReleaseKV:
		e.releaseKV(m)
	case *wire.AbortRequest:
		e.abort(m.ID)
	case *wire.Pause:
		e.sched.SetPaused(true)
	case *wire.Unpause:
		e.sched.SetPaused(false)
	default:
		e.log.Warn("message ignored", "message", m.Header())
	}
}

func (e *Engine) submit(m *wire.SubmitRequest) {
	if e.config.Role == wire.RoleDecode {
		e.send(refusal(m.ID, "", "%s is a decode engine: it never runs a prompt", e.config.Name))
		return
	}
	if m.Handoff && e.config.Role != wire.RolePrefill {
		e.send(refusal(m.ID, "", "%s has no transfer backend to hand a prompt over", e.config.Name))
		return
	}
	if refused := e.sched.Submit(time.Now(), m); refused != nil {
		e.send(refused)
	}
}

// abort cancels a request wherever it is. An unknown one has ended already: its reply is on the way.
func (e *Engine) abort(id uint64) {
	if out, known := e.sched.Abort(id); known {
		e.publish(out)
		return
	}
	e.abortHandoff(id)
}
