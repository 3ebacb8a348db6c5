package engine

import (
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"

	"baton/collective"
	"baton/handoff"
	"baton/model"
	"baton/transfer"
	"baton/wire"
)

// Shard is the engines of one shard and the ranks with which they compute.
type Shard struct {
	config  Config
	engines []*Engine
	ranks   []*rank // of this process
	worlds  []*collective.World
	units   []*unit
}

// eventQueue is how many events of ranks may wait for an engine's loop.
const eventQueue = 64

// Open loads the model onto all ranks, allocates the KV pools and opens the transfer backend. Whatever it
// opened it closes again when it fails.
func Open(c Config) (*Shard, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	s := &Shard{config: c}
	if err := s.open(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Shard) open() error {
	shape := s.config.Shard
	s.worlds = make([]*collective.World, shape.Ranks())
	if shape.Ranks() > 1 {
		s.worlds = collective.Local(shape.Ranks())
	}
	crews := make([]*crew, shape.DP)
	for dp := range crews {
		c := s.engineConfig(dp)
		e := newEngine(c)
		s.engines = append(s.engines, e)
		crews[dp] = &crew{}
		if err := s.openRanks(e, dp, crews[dp]); err != nil {
			return err
		}
		if err := e.open(); err != nil {
			return err
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
	return nil
}

// engineConfig is that of one of the engines.
func (s *Shard) engineConfig(dp int) Config {
	c := s.config
	if c.Shard.DP > 1 {
		c.Name = fmt.Sprintf("%s_dp%d", c.Name, dp)
	}
	c.Threads = max(c.Threads/(c.Shard.TP*c.Shard.PP), 1)
	return c
}

// openRanks opens an engine's ranks, at the same time: each reads its part of the checkpoint.
func (s *Shard) openRanks(e *Engine, dp int, c *crew) error {
	group := s.config.Shard.Group(dp)
	ranks, errs := make([]*rank, len(group)), make([]error, len(group))
	var opening sync.WaitGroup
	for i, number := range group {
		opening.Go(func() {
			var place model.Ranks
			if world := s.worlds[number]; world == nil {
				place = model.Solo(s.config.Checkpoint.Spec.Layers)
			} else if place, errs[i] = model.Join(world, s.config.Shard, s.config.Checkpoint.Spec.Layers); errs[i] != nil {
				return
			}
			ranks[i], errs[i] = openRank(e.config, i, place, e.events)
		})
	}
	opening.Wait()
	for i, r := range ranks {
		if r == nil {
			continue
		}
		r.device.engine = dp
		s.ranks = append(s.ranks, r)
		c.locals = append(c.locals, &local{rank: r, world: s.worlds[group[i]]})
		e.ranks = append(e.ranks, r)
	}
	return errors.Join(errs...)
}

// Engines are one a data-parallel group.
func (s *Shard) Engines() []*Engine { return s.engines }

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

// open makes the engine's core, once its ranks are there.
func (e *Engine) open() (err error) {
	c := e.config.core()
	if e.config.Role != wire.RoleBoth {
		_, c.Push = e.ranks[0].endpoint.(transfer.Pusher)
		c.Secret = make([]byte, 32)
		_, _ = crand.Read(c.Secret) // never fails: it ends the process instead
		if e.config.verifies() {
			c.Verify = e.config.VerifyHandoff
			for _, r := range e.ranks {
				c.Checksums = append(c.Checksums, handoff.Checksums{Off: r.kvBytes(), BlockBytes: e.config.checksumLayout().BlockBytes(r.holding)})
			}
		}
	}
	e.core, err = NewCore(c)
	return err
}
