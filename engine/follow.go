package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"baton/collective"
	"baton/handoff"
	"baton/layout"
	"baton/model"
	"baton/tensor"
	"baton/wire"
)

// Placement says which ranks of a shard run in this process, and where they meet those that run elsewhere.
type Placement struct {
	// Ranks are those of this process.
	Ranks []int
	// Leader is the address of the process that has rank 0, which schedules for all ranks. That process listens
	// there.
	Leader string
	// Host is the address at which other processes reach this one. Default 127.0.0.1.
	Host string
	// Dial and Accept are the options of connections between the processes; the mesh uses Config.TransferTLS.
	Dial, Accept wire.Options
}

// kindRank is how the process of a rank introduces itself.
const kindRank = "rank"

// rankSilence is how long nothing may be heard from another process of a shard.
const rankSilence = 5 * time.Second

// Leads reports whether this process schedules for the shard.
func (p *Placement) Leads() bool { return len(p.Ranks) > 0 && p.Ranks[0] == 0 }

// meshListener opens the port at which the ranks of other processes reach those of this one.
func (p *Placement) meshListener() (net.Listener, string, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(p.Host, "0"))
	if err != nil {
		return nil, "", fmt.Errorf("engine: ranks of other processes cannot reach this one: %w", err)
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return nil, "", errors.Join(err, l.Close())
	}
	return l, net.JoinHostPort(p.Host, port), nil
}

// LeaderError says that the process that leads a shard refused this one, or is gone.
type LeaderError struct {
	Leader string
	Ranks  []int
	Err    error
}

func (e *LeaderError) Error() string {
	return fmt.Sprintf("engine: ranks %v: the leader of the shard at %s: %v", e.Ranks, e.Leader, e.Err)
}

// Unwrap returns the cause.
func (e *LeaderError) Unwrap() error { return e.Err }

// follower runs ranks for a leader in another process.
type follower struct {
	config Config
	conn   *wire.Conn
	worlds []*collective.World
	ranks  map[[2]int]*follow // by engine and rank within it
	work   sync.WaitGroup
}

// follow is one rank, and the goroutine that computes its passes.
type follow struct {
	engine int
	rank   *rank
	world  *collective.World
	steps  chan *wire.TPBroadcast // at most one is under way
}

// Follow runs ranks of a shard that another process leads, until the leader says that it is over or the shard fails. When ctx ends,
// it asks the leader to come to that end: what runs needs these ranks. Of the config only the checkpoint, the threads, the transfer's host and TLS, the logger and the
// placement count: the leader says the rest.
func Follow(ctx context.Context, c Config) error {
	p := c.Placement
	fail := func(err error) error { return &LeaderError{p.Leader, p.Ranks, err} }
	conn, joined, err := join(ctx, &c)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fail(err)
	}
	defer conn.Close()
	if c, err = c.asToldBy(joined); err != nil {
		return fail(err)
	}
	f := &follower{config: c, conn: conn, ranks: map[[2]int]*follow{}}
	err = f.open(ctx, joined)
	ready := &wire.RanksReady{Error: words(err)}
	for key, r := range f.ranks {
		ready.Ranks = append(ready.Ranks, c.Shard.Group(key[0])[key[1]])
		ready.Infos = append(ready.Infos, r.rank.info())
	}
	if sendErr := conn.Send(ready); err == nil {
		err = sendErr
	}
	if err == nil {
		c.Logger.Info("ranks ready", "ranks", p.Ranks, "shard", c.Shard.String(), "leader", p.Leader)
		err = f.serve(ctx)
	}
	return errors.Join(err, f.close())
}

// join waits for the leader, offers the ranks, and waits for those of the others.
func join(ctx context.Context, c *Config) (*wire.Conn, *wire.ShardJoined, error) {
	p := c.Placement
	opt := p.Dial
	opt.IdleTimeout = rankSilence
	told := false
	for {
		conn, _, err := wire.Dial(ctx, "tcp", p.Leader, wire.Connect{Kind: kindRank, Name: fmt.Sprint("ranks ", p.Ranks)}, opt)
		if err == nil {
			joined, err := offer(ctx, conn, p.Ranks, c.Checkpoint.Fingerprint())
			if err != nil {
				conn.Close()
			}
			return conn, joined, err
		}
		var refused *wire.RefusedError
		if ctx.Err() != nil || errors.As(err, &refused) {
			return nil, nil, err
		}
		if !told {
			told = true
			c.Logger.Warn("waiting for the process that has rank 0", "leader", p.Leader, "error", err)
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}

// offer says which ranks this process has. The answer comes once all ranks are there.
func offer(ctx context.Context, conn *wire.Conn, ranks []int, model string) (*wire.ShardJoined, error) {
	if err := conn.Send(&wire.JoinShard{Ranks: ranks, Model: model}); err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	m, err := conn.Recv()
	if err != nil {
		return nil, err
	}
	joined, ok := m.(*wire.ShardJoined)
	if !ok {
		return nil, fmt.Errorf("%s instead of an answer", m.Header())
	}
	if joined.Error != "" {
		return nil, &wire.RefusedError{Reason: joined.Error}
	}
	return joined, nil
}

// told is what a leader tells the other processes of its shard.
func (c Config) told(mesh string, secret []byte) *wire.ShardJoined {
	return &wire.ShardJoined{
		Mesh: mesh, Secret: secret, Shard: c.Shard.String(), Role: c.Role, Name: c.Name, BlockSize: c.BlockSize,
		KVBytes: c.KVBytes, KVDType: c.KVType.String(), MaxRequests: c.MaxRequests, MaxTokens: c.MaxTokens,
		MaxSeqLen: c.MaxSeqLen, Logprobs: string(c.Logprobs), Transport: c.Transport, VerifyHandoff: string(c.VerifyHandoff),
	}
}

// asToldBy is the config that the leader wants.
func (c Config) asToldBy(m *wire.ShardJoined) (Config, error) {
	shards, err := layout.ParseShards(m.Shard)
	if err != nil {
		return c, err
	}
	c.Shard, c.Role, c.Name, c.BlockSize, c.KVBytes = shards[0], m.Role, m.Name, m.BlockSize, m.KVBytes
	c.MaxRequests, c.MaxTokens, c.MaxSeqLen = m.MaxRequests, m.MaxTokens, m.MaxSeqLen
	c.Logprobs, c.Transport, c.VerifyHandoff = LogprobsMode(m.Logprobs), m.Transport, handoff.Verification(m.VerifyHandoff)
	switch m.KVDType {
	case tensor.F32.String():
		c.KVType = tensor.F32
	case tensor.BF16.String():
		c.KVType = tensor.BF16
	default:
		return c, fmt.Errorf("the KV cache is to be of %.20q, which this release does not know", m.KVDType)
	}
	return c.withDefaults()
}

func (f *follower) open(ctx context.Context, joined *wire.ShardJoined) error {
	c, p := f.config, f.config.Placement
	listener, address, err := p.meshListener()
	if err != nil {
		return err
	}
	f.worlds, err = collective.Join(ctx, collective.MeshConfig{
		Size: c.Shard.Ranks(), Local: p.Ranks, Listener: listener, Advertise: address, Peers: []string{joined.Mesh},
		Secret: joined.Secret, TLS: c.TransferTLS, Silence: rankSilence,
	})
	if err != nil {
		return err
	}
	errs := make([]error, len(p.Ranks))
	var opening sync.WaitGroup
	var mu sync.Mutex
	for i, number := range p.Ranks {
		opening.Go(func() {
			var place model.Ranks
			if place, errs[i] = model.Join(f.worlds[i], c.Shard, c.Checkpoint.Spec.Layers); errs[i] != nil {
				return
			}
			engine, within := c.within(number)
			r, err := openRank(c.engineConfig(engine, p.Ranks), within, place, func(e handoff.Event) { f.send(encodeEvent(engine, within, e)) })
			if errs[i] = err; err != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			f.ranks[[2]int{engine, within}] = &follow{engine: engine, rank: r, world: f.worlds[i], steps: make(chan *wire.TPBroadcast, 1)}
		})
	}
	opening.Wait()
	for _, r := range f.ranks {
		f.work.Go(func() { f.run(r) })
	}
	return errors.Join(errs...)
}

// close ends the ranks.
func (f *follower) close() error {
	for _, w := range f.worlds {
		w.Fail(errors.New("the process leaves the shard")) // ends a pass that is under way
	}
	var errs []error
	for _, r := range f.ranks {
		close(r.steps)
	}
	f.work.Wait()
	for _, r := range f.ranks {
		errs = append(errs, r.rank.close())
	}
	for _, w := range f.worlds {
		errs = append(errs, w.Close())
	}
	return errors.Join(errs...)
}

// send tells the leader something. A failure shows as the end of the connection.
func (f *follower) send(m wire.Message) { _ = f.conn.Send(m) }

// leaveWait is how long a leader may take to end what runs, once a process of its shard is told to stop.
const leaveWait = time.Minute

// serve does what the leader says.
func (f *follower) serve(ctx context.Context) error {
	late := time.AfterFunc(time.Hour, func() { f.conn.Close() })
	late.Stop()
	defer late.Stop()
	leaving := context.AfterFunc(ctx, func() {
		f.send(&wire.Disconnect{Reason: "it is told to stop"})
		late.Reset(leaveWait)
	})
	defer leaving()
	for {
		m, err := f.conn.Recv()
		if err != nil {
			return &LeaderError{f.config.Placement.Leader, f.config.Placement.Ranks, fmt.Errorf("gone: %w", err)}
		}
		switch m := m.(type) {
		case *wire.TPBroadcast:
			err = f.step(m)
		case *wire.RankOrder:
			err = f.order(m)
		case *wire.Stop:
			return nil
		default:
			f.config.Logger.Warn("ignored", "message", m.Header())
		}
		if err != nil {
			return &LeaderError{f.config.Placement.Leader, f.config.Placement.Ranks, err}
		}
	}
}

// step gives an engine's pass to each of its ranks here.
func (f *follower) step(m *wire.TPBroadcast) error {
	for _, r := range f.ranks {
		if r.engine != m.Engine {
			continue
		}
		select {
		case r.steps <- m:
		default:
			return fmt.Errorf("step %d comes before the previous one is done", m.Sequence)
		}
	}
	return nil
}

// run computes a rank's steps.
func (f *follower) run(r *follow) {
	for m := range r.steps {
		done := &wire.StepDone{Sequence: m.Sequence, Engine: r.engine, Rank: r.rank.number}
		batch, err := decodeBatch(m)
		if err == nil {
			done.Plan = fingerprint(&batch)
			err = r.rank.device.run(batch, func(row int, logits []float32) {
				f.send(&wire.StepLogits{Sequence: m.Sequence, Engine: r.engine, Row: row, Values: logits})
			})
		}
		if done.Error = words(err); err != nil {
			r.world.Fail(err)
		}
		done.State = r.rank.device.state()
		f.send(done)
	}
}

// order carries out one of the handoff's orders.
func (f *follower) order(m *wire.RankOrder) error {
	r := f.ranks[[2]int{m.Engine, m.Rank}]
	if r == nil {
		return fmt.Errorf("an order for rank %d of engine %d, which is not here", m.Rank, m.Engine)
	}
	order, err := decodeOrder(m)
	if err != nil {
		return err
	}
	if event := r.rank.order(order); event != nil {
		f.send(encodeEvent(m.Engine, m.Rank, event))
	}
	return nil
}
