package engine

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"baton/collective"
	"baton/compute"
	"baton/model"
)

// unit is a set of engines that compute together: those that share experts, or just one. It owns a goroutine
// that runs their passes and one for each of their ranks but the only one of an engine alone.
type unit struct {
	crews  []*crew
	passes chan pass // from the engines; each has at most one under way
	ended  sync.WaitGroup
}

// crew is the ranks of one engine.
type crew struct {
	locals []*local
	mode   LogprobsMode
}

// local is a rank of this process as the unit sees it.
type local struct {
	rank  *rank
	world *collective.World // nil for the only rank of a shard
	work  chan work
}

// pass is one that an engine wants computed.
type pass struct {
	engine int // within the unit
	plan   *Plan
	done   chan<- passed
}

// passed is a pass that ended.
type passed struct {
	plan    *Plan
	outputs []Output
	took    time.Duration
	err     error
}

// work is a pass for one rank.
type work struct {
	batch  model.Batch
	each   func(i int, logits []float32)
	echoes chan<- echo
}

// echo is a rank's word that it has computed a pass. Ranks that split the same layers hold the same activations:
// a rank that computed something else shows, before its KV does harm.
type echo struct {
	rank  *rank
	state uint64
	err   error
}

// newUnit starts the goroutines.
func newUnit(crews []*crew) *unit {
	u := &unit{crews: crews, passes: make(chan pass, len(crews))}
	if !u.alone() {
		for _, c := range crews {
			for _, l := range c.locals {
				l.work = make(chan work)
				u.ended.Go(l.run)
			}
		}
	}
	u.ended.Go(u.run)
	return u
}

// alone reports whether there is only one rank, which the unit's own goroutine runs.
func (u *unit) alone() bool { return len(u.crews) == 1 && len(u.crews[0].locals) == 1 }

// close ends the goroutines. No engine has a pass under way.
func (u *unit) close() {
	close(u.passes)
	u.ended.Wait()
}

// run computes passes until close. Engines that share experts take part in each, also those with nothing to do.
func (u *unit) run() {
	defer func() {
		for _, c := range u.crews {
			for _, l := range c.locals {
				if l.work != nil {
					close(l.work)
				}
			}
		}
	}()
	for p := range u.passes {
		step := make([]*pass, len(u.crews))
		step[p.engine] = &p
		for more := true; more; { // engines that are ready step along
			select {
			case p, ok := <-u.passes:
				if more = ok; ok {
					step[p.engine] = &p
				}
			default:
				more = false
			}
		}
		u.step(step)
	}
}

// step computes one pass of each engine; those without one compute what the others need of them.
func (u *unit) step(step []*pass) {
	began := time.Now()
	var rows []int
	if len(u.crews) > 1 {
		for _, p := range step {
			n := 0
			if p != nil {
				n = len(p.plan.Batch.Tokens)
			}
			rows = append(rows, n)
		}
	}
	outputs := make([][]Output, len(step))
	works := make([]work, len(step))
	for i, p := range step {
		if p != nil {
			works[i].batch = p.plan.Batch
			outputs[i] = make([]Output, len(p.plan.Rows))
			works[i].each = func(row int, logits []float32) { outputs[i][row] = u.crews[i].sample(p.plan.Rows[row], logits) }
		}
		works[i].batch.Lockstep = rows
	}
	err := u.compute(works)
	for i, p := range step {
		if p != nil {
			p.done <- passed{p.plan, outputs[i], time.Since(began), err}
		}
	}
}

// compute has every rank run its part, and compares what they did.
func (u *unit) compute(works []work) error {
	if u.alone() {
		return u.crews[0].locals[0].rank.device.run(works[0].batch, works[0].each)
	}
	ranks := 0
	for _, c := range u.crews {
		ranks += len(c.locals)
	}
	echoes := make(chan echo, ranks)
	for i, c := range u.crews {
		works[i].echoes = echoes
		for n, l := range c.locals {
			w := works[i]
			if n > 0 {
				w.each = nil
			}
			l.work <- w
		}
	}
	var errs []error
	states := map[[2]int]echo{} // of an engine's stage, what the first rank has
	for range ranks {
		e := <-echoes
		if e.err != nil {
			errs = append(errs, e.err)
			continue
		}
		stage := [2]int{e.rank.device.engine, e.rank.holding.Layer}
		if first, ok := states[stage]; !ok {
			states[stage] = e
		} else if first.state != e.state {
			errs = append(errs, &DivergenceError{Ranks: [2]int{first.rank.number, e.rank.number}, Layer: e.rank.holding.Layer})
		}
	}
	return errors.Join(errs...)
}

// DivergenceError says that two ranks which split the same layers do not hold the same activations after a pass.
type DivergenceError struct {
	Ranks [2]int
	Layer int // the first one of their stage
}

func (e *DivergenceError) Error() string {
	return fmt.Sprintf("ranks %d and %d of the stage that begins with layer %d hold different activations after the same pass: they do not compute the same (other weights, or a faulty machine)",
		e.Ranks[0], e.Ranks[1], e.Layer)
}

// run computes a rank's passes until the unit closes. A failure ends those of all ranks.
func (l *local) run() {
	for w := range l.work {
		err := l.rank.device.run(w.batch, w.each)
		if err != nil && l.world != nil {
			l.world.Fail(err)
		}
		w.echoes <- echo{l.rank, l.rank.device.state(), err}
	}
}

func (c *crew) sample(row Row, logits []float32) Output {
	return c.locals[0].rank.device.output(row, logits)
}

// stateRows is of how many rows at most, the last ones, activations are compared.
const stateRows = 16

// digest is a fingerprint of a matrix in host memory; 0 where the host cannot read it.
func digest(m compute.Mat) uint64 {
	buf, ok := m.Buf.(compute.HostBuffer)
	if !ok || m.Rows == 0 || m.Cols == 0 {
		return 0
	}
	bytes := buf.Host()
	var sum uint64
	for i := max(m.Rows-stateRows, 0); i < m.Rows; i++ {
		at := 4 * (m.Off + i*m.Stride)
		sum = sum*math.MaxUint32 + xxhash.Sum64(bytes[at:at+4*m.Cols])
	}
	return sum
}
