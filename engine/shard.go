package engine

import (
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"baton/collective"
	"baton/handoff"
	"baton/model"
	"baton/transfer/tcp"
	"baton/wire"
)

// Shard is the engines of one shard and the ranks with which they compute. The process that has rank 0 holds it;
// where other processes have ranks, they Follow.
type Shard struct {
	config    Config
	engines   []*Engine
	ranks     []*rank             // of this process
	worlds    []*collective.World // of each rank here; nil for others, and for the only rank of a shard
	units     []*unit
	processes []*process // the other ones
	listening sync.WaitGroup
	leaving   chan struct{} // closed when one of those is told to stop
	leave     sync.Once
}

// member is a rank of an engine, here or in another process.
type member interface {
	// info is what peers have to know of the rank.
	info() wire.RankInfo
	// order carries out one of the handoff's orders. The answer, if it is known at once, is its next event; else
	// it comes through the engine's mailbox.
	order(handoff.Action) handoff.Event
}

// Open loads the model onto all ranks, allocates the KV pools and opens the transfer backend. Where ranks run in
// other processes it waits for them, until ctx ends. Whatever it opened it closes again when it fails.
func Open(ctx context.Context, c Config) (*Shard, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	s := &Shard{config: c, worlds: make([]*collective.World, c.Shard.Ranks()), leaving: make(chan struct{})}
	if err := s.open(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Shard) open(ctx context.Context) error {
	shape := s.config.Shard
	for dp := range shape.DP {
		e := newEngine(s.config.engineConfig(dp, s.config.here()))
		e.ranks = make([]member, shape.TP*shape.PP)
		s.engines = append(s.engines, e)
	}
	if s.config.Placement != nil {
		if err := s.gather(ctx); err != nil {
			return err
		}
		if err := s.meet(ctx); err != nil {
			return err
		}
	} else if shape.Ranks() > 1 {
		copy(s.worlds, collective.Local(shape.Ranks()))
	}
	if err := s.openRanks(); err != nil {
		return err
	}
	if err := s.await(ctx); err != nil {
		return err
	}
	for _, e := range s.engines {
		if err := e.open(); err != nil {
			return err
		}
	}
	s.unite()
	for _, p := range s.processes {
		s.listening.Go(func() { s.listen(p) })
	}
	return nil
}

// unite makes a unit of the engines that share experts, or of each.
func (s *Shard) unite() {
	shape := s.config.Shard
	crews := make([]*crew, shape.DP)
	for dp := range crews {
		crews[dp] = &crew{
			engine: dp, ranks: shape.TP * shape.PP, tp: shape.TP,
			sampler: sampler{mode: s.config.Logprobs}, vocabulary: s.config.Checkpoint.Spec.VocabSize,
		}
		for _, m := range s.engines[dp].ranks {
			switch m := m.(type) {
			case *rank:
				crews[dp].locals = append(crews[dp].locals, &local{rank: m, world: s.worlds[shape.Group(dp)[m.number]]})
			case *distant:
				if !slices.Contains(crews[dp].processes, m.process) {
					crews[dp].processes = append(crews[dp].processes, m.process)
				}
			}
		}
	}
	together := 1 // engines a unit
	if shape.Lockstep() {
		engines, _ := shape.ExpertEngines(0)
		together = len(engines)
	}
	for first := 0; first < shape.DP; first += together {
		u := newUnit(crews[first : first+together])
		s.units = append(s.units, u)
		for i, e := range s.engines[first : first+together] {
			e.unit, e.place = u, i
		}
	}
}

// openRanks opens the ranks of this process, at the same time: each reads its part of the checkpoint.
func (s *Shard) openRanks() error {
	here := s.config.here()
	ranks, errs := make([]*rank, len(here)), make([]error, len(here))
	var opening sync.WaitGroup
	for i, number := range here {
		opening.Go(func() {
			place := model.Solo(s.config.Checkpoint.Spec.Layers)
			if world := s.worlds[number]; world != nil {
				if place, errs[i] = model.Join(world, s.config.Shard, s.config.Checkpoint.Spec.Layers); errs[i] != nil {
					return
				}
			}
			engine, within := s.config.within(number)
			e := s.engines[engine]
			ranks[i], errs[i] = openRank(e.config, within, place, e.events.put)
		})
	}
	opening.Wait()
	for i, r := range ranks {
		if r != nil {
			engine, within := s.config.within(here[i])
			s.ranks = append(s.ranks, r)
			s.engines[engine].ranks[within] = r
		}
	}
	return errors.Join(errs...)
}

// Engines are one a data-parallel group.
func (s *Shard) Engines() []*Engine { return s.engines }

// Leaving is closed when another process of the shard is told to stop: the shard ends without it, so whoever runs this one ends
// Run's context, once nothing is lost by that.
func (s *Shard) Leaving() <-chan struct{} { return s.leaving }

// Run serves a coordinator until ctx ends or one of the engines fails.
func (s *Shard) Run(ctx context.Context, dial Dialer) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, e := range s.engines {
		group.Go(func() error { return e.Run(ctx, dial) })
	}
	return group.Wait()
}

// Close frees everything. Call it after Run has returned.
func (s *Shard) Close() error {
	s.dismiss()
	for _, u := range s.units {
		u.close()
	}
	var errs []error
	for _, r := range s.ranks {
		errs = append(errs, r.close())
	}
	for _, w := range s.worlds {
		if w != nil {
			errs = append(errs, w.Close())
		}
	}
	return errors.Join(errs...)
}

// here lists the ranks of this process.
func (c Config) here() []int {
	if c.Placement != nil {
		return c.Placement.Ranks
	}
	all := make([]int, c.Shard.Ranks())
	for i := range all {
		all[i] = i
	}
	return all
}

// within is the engine that a rank of the shard belongs to, and its number there.
func (c Config) within(rank int) (engine, number int) {
	at := c.Shard.Place(rank)
	return at.DP, at.PP*c.Shard.TP + at.TP
}

// engineConfig is that of one of the engines, of which this process has some of the listed ranks.
func (c Config) engineConfig(dp int, here []int) Config {
	if c.Shard.DP > 1 {
		c.Name = fmt.Sprintf("%s_dp%d", c.Name, dp)
	}
	sharing := 0 // of the threads
	for _, rank := range here {
		if engine, _ := c.within(rank); engine == dp {
			sharing++
		}
	}
	c.Threads = max(c.Threads/max(sharing, 1), 1)
	return c
}

// open makes the engine's core, once its ranks are there.
func (e *Engine) open() (err error) {
	c := e.config.core()
	if e.config.Role != wire.RoleBoth {
		c.Push = e.config.Transport == tcp.PushName
		c.Secret = make([]byte, 32)
		_, _ = crand.Read(c.Secret) // never fails: it ends the process instead
		if e.config.verifies() {
			c.Verify = e.config.VerifyHandoff
			for rank, h := range c.Holdings {
				c.Checksums = append(c.Checksums, handoff.Checksums{Off: e.ranks[rank].info().Checksums, BlockBytes: e.config.checksumLayout().BlockBytes(h)})
			}
		}
	}
	e.core, err = NewCore(c)
	return err
}
