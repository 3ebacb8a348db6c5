//go:build unix

package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"baton/wire"
)

// kind is a kind of disturbance.
type kind struct {
	name   string
	weight float64
	// several tells that it needs a fleet that nobody else disturbs.
	several bool
	// choose picks whom it befalls, none when that is not possible now.
	choose func(d *drill, rng *rand.Rand) []*member
	run    func(ctx context.Context, d *drill, rng *rand.Rand, m *member) error
}

// The kinds. Those of one engine leave another of its role in peace.
var kinds = []kind{
	{"kill", 4, false, one, kill},
	{"stop briefly", 2, false, one, stopFor(50*time.Millisecond, 800*time.Millisecond)},
	{"stop", 2, false, one, stopFor(1500*time.Millisecond, 4*time.Second)}, // longer than the idle timeout: declared dead
	{"stop and kill", 1, false, one, stopAndKill},
	{"drain", 1.5, false, one, drain},
	{"kill a role", .4, true, role, kill},
	{"kill all engines", .3, true, everybody, kill},
	{"kill the coordinator", .3, true, hub, nil},
}

// Kinds are the names of the disturbances.
func Kinds() (names []string) {
	for _, k := range kinds {
		names = append(names, k.name)
	}
	return names
}

func chosen(names []string) ([]kind, error) {
	if len(names) == 0 {
		return kinds, nil
	}
	var list []kind
	for _, name := range names {
		i := slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })
		if i < 0 {
			return nil, fmt.Errorf("chaos: no disturbance is called %q: choose from %q", name, Kinds())
		}
		list = append(list, kinds[i])
	}
	return list, nil
}

// wreak disturbs the fleet for its time, and returns when everybody is up again.
func (d *drill) wreak(ctx context.Context) error {
	havoc, cancel := context.WithTimeout(ctx, d.havoc)
	defer cancel()
	group := new(errgroup.Group)
	for pause(havoc, between(d.rng, d.cfg.Every/5, 9*d.cfg.Every/5)) {
		k := pick(d.kinds, d.rng)
		rng := rand.New(rand.NewPCG(d.rng.Uint64(), 0))
		victims := d.seize(k, rng)
		for quiet := 0; victims == nil && quiet < 300 && k.several && pause(havoc, 20*time.Millisecond); quiet++ {
			victims = d.seize(k, rng) // once the others are done
		}
		if victims == nil {
			continue
		}
		d.count(func(r *Drill) { r.Disturbances[k.name]++ })
		if k.run == nil {
			d.say("%s", k.name)
			group.Go(func() error { return d.restartHub(havoc, ctx, rng) })
			continue
		}
		d.say("%s: %s", k.name, names(victims))
		group.Go(func() error {
			defer d.letGo(victims)
			var errs [16]error
			var all sync.WaitGroup
			for i, m := range victims {
				rng := rand.New(rand.NewPCG(rng.Uint64(), 0))
				all.Go(func() {
					errs[i%len(errs)] = errors.Join(k.run(havoc, d, rng, m), d.back(ctx, m))
				})
			}
			all.Wait()
			return errors.Join(errs[:]...)
		})
	}
	return group.Wait()
}

func names(list []*member) (names []string) {
	for _, m := range list {
		names = append(names, m.name)
	}
	return names
}

func pick(list []kind, rng *rand.Rand) kind {
	sum := 0.0
	for _, k := range list {
		sum += k.weight
	}
	at := rng.Float64() * sum
	for _, k := range list {
		if at -= k.weight; at < 0 {
			return k
		}
	}
	return list[len(list)-1]
}

// pause waits, and reports false when the time of disturbance is over.
func pause(havoc context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-havoc.Done():
		return false
	}
}

func between(rng *rand.Rand, from, to time.Duration) time.Duration { return from + rng.N(to-from) }

// seize picks the victims of a disturbance and keeps others away from them; nil when there are none.
func (d *drill) seize(k kind, rng *rand.Rand) []*member {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.hubBusy { // then nobody could see who is up
		return nil
	}
	victims := k.choose(d, rng)
	for _, m := range victims {
		m.busy = true
	}
	return victims
}

func (d *drill) letGo(victims []*member) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, m := range victims {
		m.busy = false
	}
}

// one is an engine of a role of which another is left alone.
func one(d *drill, rng *rand.Rand) []*member {
	left := make(map[string]int)
	for _, m := range d.members {
		if !m.busy {
			left[m.role]++
		}
	}
	var can []*member
	for _, m := range d.members {
		if !m.busy && left[m.role] > 1 {
			can = append(can, m)
		}
	}
	if can == nil {
		return nil
	}
	return []*member{can[rng.IntN(len(can))]}
}

// role is all engines of a role, everybody all engines; none when one of them is disturbed already.
func role(d *drill, rng *rand.Rand) []*member {
	role := []string{wire.RolePrefill, wire.RoleDecode}[rng.IntN(2)]
	return idle(d, func(m *member) bool { return m.role == role })
}

func everybody(d *drill, _ *rand.Rand) []*member {
	return idle(d, func(*member) bool { return true })
}

func idle(d *drill, of func(*member) bool) (list []*member) {
	for _, m := range d.members {
		if !of(m) {
			continue
		}
		if m.busy {
			return nil
		}
		list = append(list, m)
	}
	return list
}

// hub marks the coordinator as disturbed. It is no member, so the list is only not nil.
func hub(d *drill, _ *rand.Rand) []*member {
	if idle(d, func(*member) bool { return true }) == nil {
		return nil
	}
	d.hubBusy = true
	d.note("coordinator", time.Now(), true)
	return []*member{}
}

// down and upAgain note what this drill does to a member.
func (d *drill) down(m *member) {
	d.mu.Lock()
	defer d.mu.Unlock()
	m.up = false
}

func (d *drill) upAgain(m *member) {
	d.mu.Lock()
	defer d.mu.Unlock()
	m.up = true
}

// back starts a member again that has ended.
func (d *drill) back(ctx context.Context, m *member) error {
	if m.life.Alive() {
		return nil
	}
	return d.raise(ctx, m)
}

func kill(havoc context.Context, d *drill, rng *rand.Rand, m *member) error {
	d.down(m)
	if err := m.life.Kill(); err != nil {
		return err
	}
	pause(havoc, between(rng, 0, 2*time.Second))
	return nil
}

func stopFor(from, to time.Duration) func(context.Context, *drill, *rand.Rand, *member) error {
	return func(havoc context.Context, d *drill, rng *rand.Rand, m *member) error {
		d.down(m)
		if err := m.life.Signal(syscall.SIGSTOP); err != nil {
			return err
		}
		pause(havoc, between(rng, from, to))
		if err := m.life.Signal(syscall.SIGCONT); err != nil {
			return err
		}
		d.upAgain(m)
		return nil
	}
}

func stopAndKill(havoc context.Context, d *drill, rng *rand.Rand, m *member) error {
	d.down(m)
	if err := m.life.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	pause(havoc, between(rng, 100*time.Millisecond, 3*time.Second))
	return kill(havoc, d, rng, m)
}

// drain asks an engine to leave. It has half a minute for its requests, then they move; its end is clean.
func drain(havoc context.Context, d *drill, rng *rand.Rand, m *member) error {
	d.down(m)
	if err := m.life.Stop(40 * time.Second); err != nil {
		d.problem("drain: %v", err)
	}
	pause(havoc, between(rng, 0, time.Second))
	return nil
}

// restartHub kills the coordinator and starts another at its address.
func (d *drill) restartHub(havoc, ctx context.Context, rng *rand.Rand) error {
	if err := d.hub.Kill(); err != nil {
		return err
	}
	pause(havoc, between(rng, 0, time.Second))
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	next, err := d.parts.StartCoordinator(ctx, d.hub.Addr)
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.hub = next
	d.mu.Unlock()
	// It is whole again when everybody has found it.
	for {
		status, err := d.observer.Status(ctx)
		if err == nil && len(status.Engines) == len(d.members) {
			break
		}
		if !pause(ctx, 20*time.Millisecond) {
			d.problem("engines do not find the coordinator again: %v, %v", status, err)
			break
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hubBusy = false
	return nil
}
