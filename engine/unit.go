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
	"baton/wire"
)

// unit is a set of engines that compute together: those that share experts, or just one. It owns a goroutine
// that runs their passes and one for each of their ranks in this process, but for the only one of an engine alone.
type unit struct {
	crews  []*crew
	passes chan pass // from the engines; each has at most one under way
	ended  sync.WaitGroup

	sequence uint64 // of the latest step
	echoes   chan echo
	dead     chan struct{} // closed by fail

	mu    sync.Mutex
	cause error  // of fail
	works []work // of the step under way
}

// crew is the ranks of one engine.
type crew struct {
	engine    int // within the shard
	locals    []*local
	processes []*process // that have others
	ranks     int        // in all
	tp        int        // of which so many split the layers of a stage
	sampler   sampler

	vocabulary int
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

// work is an engine's part of a step.
type work struct {
	batch model.Batch
	each  func(i int, logits []float32)
	echo  func(echo)
}

// echo is a rank's word that it has computed a step. Ranks that split the same layers hold the same activations:
// one that computed something else shows, before its KV does harm.
type echo struct {
	sequence uint64
	place    int // of the engine within the unit
	number   int // of the rank within the engine
	plan     uint64
	state    uint64
	err      error
}

// newUnit starts the goroutines.
func newUnit(crews []*crew) *unit {
	ranks := 0
	for _, c := range crews {
		ranks += c.ranks
	}
	u := &unit{crews: crews, passes: make(chan pass, len(crews)), echoes: make(chan echo, 2*ranks), dead: make(chan struct{})}
	if !u.alone() {
		for _, c := range crews {
			for _, l := range c.locals {
				l.work = make(chan work, 1)
				u.ended.Go(l.run)
			}
		}
	}
	u.ended.Go(u.run)
	return u
}

// alone reports whether there is only one rank, which the unit's own goroutine runs.
func (u *unit) alone() bool { return len(u.crews) == 1 && u.crews[0].ranks == 1 }

// close ends the goroutines. No engine has a pass under way.
func (u *unit) close() {
	close(u.passes)
	u.ended.Wait()
}

// fail ends the step under way and all later ones.
func (u *unit) fail(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.cause == nil {
		u.cause = err
		close(u.dead)
	}
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
		works[i].each = func(int, []float32) {}
		if p != nil {
			works[i].batch = p.plan.Batch
			outputs[i] = make([]Output, len(p.plan.Rows))
			works[i].each = func(row int, logits []float32) {
				outputs[i][row] = u.crews[i].sampler.output(p.plan.Rows[row], logits)
			}
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
	u.mu.Lock()
	u.works = works
	u.sequence++
	u.mu.Unlock()
	ranks := 0
	for i, c := range u.crews {
		ranks += c.ranks
		if err := u.start(i, c, works[i]); err != nil {
			return err
		}
	}
	plans := make([]uint64, len(works))
	for i, c := range u.crews {
		if len(c.processes) > 0 {
			plans[i] = fingerprint(&works[i].batch)
		}
	}
	var errs []error
	states := map[[2]int]echo{} // of an engine's stage, what the first rank has
	for ranks > 0 {
		var e echo
		select {
		case e = <-u.echoes:
		case <-u.dead:
			return u.cause
		}
		if e.sequence != u.sequence {
			continue // of a step that failed
		}
		ranks--
		c := u.crews[e.place]
		stage := [2]int{e.place, e.number / c.width()}
		first, seen := states[stage]
		switch {
		case e.err != nil:
			errs = append(errs, e.err)
		case e.plan != 0 && e.plan != plans[e.place]:
			errs = append(errs, &DivergenceError{Engine: c.engine, Ranks: []int{0, e.number}, What: "executed other plans"})
		case !seen:
			states[stage] = e
		case first.state != e.state:
			errs = append(errs, &DivergenceError{Engine: c.engine, Ranks: []int{min(first.number, e.number), max(first.number, e.number)}, What: "hold different activations"})
		}
	}
	return errors.Join(errs...)
}

// start gives an engine's part of a step to its ranks, wherever they are.
func (u *unit) start(place int, c *crew, w work) error {
	sequence := u.sequence
	for _, p := range c.processes {
		if err := p.conn.Send(encodeBatch(sequence, c.engine, &w.batch)); err != nil {
			return &RankError{p.ranks, p.addr, err}
		}
	}
	w.echo = func(e echo) {
		e.sequence, e.place = sequence, place
		u.echoes <- e
	}
	for _, l := range c.locals {
		l.work <- w
	}
	return nil
}

// echo takes in that of a rank in another process.
func (u *unit) echo(place int, m *wire.StepDone) {
	e := echo{sequence: m.Sequence, place: place, number: m.Rank, plan: m.Plan, state: m.State}
	if m.Error != "" {
		e.err = fmt.Errorf("engine: rank %d: %s", m.Rank, m.Error)
	}
	select {
	case u.echoes <- e:
	case <-u.dead:
	}
}

// deliver takes in a wanted row that a rank in another process computed.
func (u *unit) deliver(place int, m *wire.StepLogits) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if m.Sequence != u.sequence || m.Row < 0 || m.Row >= len(u.works[place].batch.Logits) || len(m.Values) != u.crews[place].vocabulary {
		return fmt.Errorf("%d logits of row %d of step %d come during step %d", len(m.Values), m.Row, m.Sequence, u.sequence)
	}
	u.works[place].each(m.Row, m.Values)
	return nil
}

// width is how many ranks split the layers of a stage.
func (c *crew) width() int { return c.tp }

// DivergenceError says that two ranks of an engine did not do the same in a step.
type DivergenceError struct {
	Engine int   // within the shard
	Ranks  []int // within the engine
	What   string
}

func (e *DivergenceError) Error() string {
	return fmt.Sprintf("engine %d: its ranks %d and %d %s after the same step: they do not compute the same (other weights, another release, or a faulty machine)",
		e.Engine, e.Ranks[0], e.Ranks[1], e.What)
}

// run computes a rank's part of steps until the unit closes. A failure ends those of all ranks.
func (l *local) run() {
	for w := range l.work {
		err := l.rank.device.run(w.batch, w.each)
		if err != nil && l.world != nil {
			l.world.Fail(err)
		}
		w.echo(echo{number: l.rank.number, state: l.rank.device.state(), err: err})
	}
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
	var all uint64
	for i := max(m.Rows-stateRows, 0); i < m.Rows; i++ {
		at := 4 * (m.Off + i*m.Stride)
		all = all*math.MaxUint32 + sum(bytes[at:at+4*m.Cols])
	}
	return all
}

func sum(b []byte) uint64 { return xxhash.Sum64(b) }
