package engine

import (
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"baton/collective"
	"baton/handoff"
	"baton/wire"
)

// process is another process of the shard, as its leader sees it.
type process struct {
	ranks []int
	conn  *wire.Conn
	addr  string
}

// distant is a rank in another process.
type distant struct {
	process        *process
	engine, number int
	about          wire.RankInfo
}

func (d *distant) info() wire.RankInfo { return d.about }

// order passes on one of the handoff's orders. What it comes to arrives with the process's messages; a failure to
// send shows as the end of its connection.
func (d *distant) order(order handoff.Action) handoff.Event {
	_ = d.process.conn.Send(encodeOrder(d.engine, d.number, order))
	return nil
}

// RankError says which ranks in another process ended a shard, and why.
type RankError struct {
	Ranks   []int
	Process string // its address
	Err     error
}

func (e *RankError) Error() string {
	return fmt.Sprintf("engine: ranks %v at %s: %v", e.Ranks, e.Process, e.Err)
}

// Unwrap returns the cause.
func (e *RankError) Unwrap() error { return e.Err }

// maxJoining bounds the strangers that are heard at a time.
const maxJoining = 64

// gather waits until every rank that is not here has been offered by some process.
func (s *Shard) gather(ctx context.Context) error {
	p := s.config.Placement
	listener, err := net.Listen("tcp", p.Leader)
	if err != nil {
		return fmt.Errorf("engine: the ranks of other processes cannot be met: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var hearing sync.WaitGroup
	arrivals := make(chan *process)
	hearing.Go(func() { s.hear(ctx, listener, arrivals, &hearing) })
	defer func() {
		cancel()
		listener.Close()
		hearing.Wait()
	}()
	for {
		missing := s.missing()
		if len(missing) == 0 {
			return nil
		}
		s.config.Logger.Info("waiting for ranks", "missing", missing, "at", listener.Addr())
		select {
		case a := <-arrivals:
			s.admit(a)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// missing lists the ranks that nobody has yet. A process that left gives its ranks back.
func (s *Shard) missing() []int {
	s.processes = slices.DeleteFunc(s.processes, func(p *process) bool {
		select {
		case <-p.conn.Done():
			p.conn.Close()
			return true
		default:
			return false
		}
	})
	have := slices.Clone(s.config.Placement.Ranks)
	for _, p := range s.processes {
		have = append(have, p.ranks...)
	}
	var missing []int
	for rank := range s.config.Shard.Ranks() {
		if !slices.Contains(have, rank) {
			missing = append(missing, rank)
		}
	}
	return missing
}

// admit takes a process that offers ranks, or refuses it with the reason.
func (s *Shard) admit(p *process) {
	missing := s.missing()
	for _, r := range p.ranks {
		if !slices.Contains(missing, r) {
			reason := fmt.Sprintf("rank %d runs in another process already; missing are %v", r, missing)
			if r < 0 || r >= s.config.Shard.Ranks() {
				reason = fmt.Sprintf("there is no rank %d: the shard %v has ranks 0 to %d", r, s.config.Shard, s.config.Shard.Ranks()-1)
			}
			_ = p.conn.Send(&wire.ShardJoined{Error: reason}) // or it has left already
			p.conn.Close()
			return
		}
	}
	s.config.Logger.Info("ranks joined", "ranks", p.ranks, "process", p.addr)
	s.processes = append(s.processes, p)
}

// hear accepts connections until the listener closes.
func (s *Shard) hear(ctx context.Context, listener net.Listener, arrivals chan<- *process, hearing *sync.WaitGroup) {
	slots := make(chan struct{}, maxJoining)
	for {
		nc, err := listener.Accept()
		if err != nil {
			return
		}
		select {
		case slots <- struct{}{}:
		default:
			nc.Close()
			continue
		}
		hearing.Go(func() {
			defer func() { <-slots }()
			p, err := s.introduce(ctx, nc)
			if err != nil {
				s.config.Logger.Warn("a connection that brings no ranks", "from", nc.RemoteAddr(), "error", err)
				return
			}
			select {
			case arrivals <- p:
			case <-ctx.Done():
				p.conn.Close()
			}
		})
	}
}

// introduce hears what a process offers.
func (s *Shard) introduce(ctx context.Context, nc net.Conn) (*process, error) {
	opt := s.config.Placement.Accept
	opt.IdleTimeout = rankSilence
	conn, _, err := wire.Accept(ctx, nc, wire.ConnectAck{}, func(hello wire.Connect) error {
		if hello.Kind != kindRank {
			return fmt.Errorf("this is the leader of a shard, for its ranks; a %.20s has no business here", hello.Kind)
		}
		return nil
	}, opt)
	if err != nil {
		return nil, err
	}
	refuse := func(err error) (*process, error) {
		_ = conn.Send(&wire.ShardJoined{Error: err.Error()}) // or it has left already
		conn.Close()
		return nil, err
	}
	late := time.AfterFunc(rankSilence, func() { conn.Close() })
	m, err := conn.Recv()
	if !late.Stop() || err != nil {
		conn.Close()
		return nil, errors.Join(errors.New("it offers nothing"), err)
	}
	offer, ok := m.(*wire.JoinShard)
	if !ok || len(offer.Ranks) == 0 {
		return refuse(fmt.Errorf("%s instead of an offer of ranks", m.Header()))
	}
	if ours := s.config.Checkpoint.Fingerprint(); offer.Model != ours {
		return refuse(fmt.Errorf("its --model is another one: its fingerprint is %.16s there and %.16s here", offer.Model, ours))
	}
	return &process{ranks: offer.Ranks, conn: conn, addr: nc.RemoteAddr().String()}, nil
}

// meet tells the other processes how to run their ranks, and connects the ranks of all.
func (s *Shard) meet(ctx context.Context) error {
	c, p := s.config, s.config.Placement
	listener, address, err := p.meshListener()
	if err != nil {
		return err
	}
	secret := make([]byte, 32)
	_, _ = crand.Read(secret) // never fails: it ends the process instead
	for _, other := range s.processes {
		if err := other.conn.Send(c.told(address, secret)); err != nil {
			return errors.Join(&RankError{other.ranks, other.addr, err}, listener.Close())
		}
	}
	worlds, err := collective.Join(ctx, collective.MeshConfig{
		Size: c.Shard.Ranks(), Local: p.Ranks, Listener: listener, Advertise: address, Secret: secret,
		TLS: c.TransferTLS, Silence: rankSilence,
	})
	if err != nil {
		return err
	}
	for i, w := range worlds {
		s.worlds[p.Ranks[i]] = w
	}
	return nil
}

// await hears from every process that its ranks are ready.
func (s *Shard) await(ctx context.Context) error {
	for _, p := range s.processes {
		stop := context.AfterFunc(ctx, func() { p.conn.Close() })
		m, err := p.conn.Recv()
		stop()
		if err == nil {
			err = s.seat(p, m)
		}
		if err != nil {
			return &RankError{p.ranks, p.addr, err}
		}
	}
	return nil
}

// seat takes in what a process says of its ranks.
func (s *Shard) seat(p *process, m wire.Message) error {
	ready, ok := m.(*wire.RanksReady)
	if !ok {
		return fmt.Errorf("%s while its ranks were to load the model", m.Header())
	}
	if ready.Error != "" {
		return errors.New(ready.Error)
	}
	if len(ready.Infos) != len(ready.Ranks) || len(ready.Ranks) != len(p.ranks) {
		return fmt.Errorf("it describes %d of its ranks %v", len(ready.Infos), p.ranks)
	}
	for i, rank := range ready.Ranks {
		if !slices.Contains(p.ranks, rank) {
			return fmt.Errorf("it describes rank %d, which it did not offer", rank)
		}
		engine, within := s.config.within(rank)
		s.engines[engine].ranks[within] = &distant{p, engine, within, ready.Infos[i]}
	}
	return nil
}

// listen takes in what a process says, until its connection ends. That ends the shard.
func (s *Shard) listen(p *process) {
	for {
		m, err := p.conn.Recv()
		if err == nil {
			err = s.said(p, m)
		}
		if err != nil {
			s.fail(&RankError{p.ranks, p.addr, err})
			return
		}
	}
}

func (s *Shard) said(p *process, message wire.Message) error {
	engine := -1
	switch m := message.(type) {
	case *wire.StepDone:
		engine = m.Engine
	case *wire.StepLogits:
		engine = m.Engine
	case *wire.KVHandoffComplete:
		engine = m.Engine
	case *wire.RankEvent:
		engine = m.Engine
	case *wire.Disconnect:
		s.config.Logger.Warn("another process of the shard stops, so this one does", "ranks", p.ranks, "from", p.addr, "reason", m.Reason)
		s.leave.Do(func() { close(s.leaving) })
		return nil
	default:
		s.config.Logger.Warn("ignored", "message", message.Header())
		return nil
	}
	if engine < 0 || engine >= len(s.engines) {
		return fmt.Errorf("%s of engine %d, of %d", message.Header(), engine, len(s.engines))
	}
	e := s.engines[engine]
	switch m := message.(type) {
	case *wire.StepDone:
		e.unit.echo(e.place, m)
	case *wire.StepLogits:
		return e.unit.deliver(e.place, m)
	default:
		if event := decodeEvent(message); event != nil {
			e.events.put(event)
		}
	}
	return nil
}

// fail ends all that the shard does: the ranks of it cannot compute without each other.
func (s *Shard) fail(err error) {
	for _, w := range s.worlds {
		if w != nil {
			w.Fail(err)
		}
	}
	for _, u := range s.units {
		u.fail(err)
	}
	for _, e := range s.engines {
		select {
		case e.broken <- err:
		default:
		}
	}
}

// dismiss lets the other processes go.
func (s *Shard) dismiss() {
	for _, p := range s.processes {
		_ = p.conn.Send(&wire.Stop{}) // or it has left already
		p.conn.Close()
	}
	s.listening.Wait()
}
