//go:build unix

// Package chaos drills a fleet of real processes: while clients stream completions, it kills, stops, drains
// and restarts engines, and now and then the coordinator. Every stream must say exactly what a colocated,
// undisturbed server says, whoever died; and when it is over, nobody may hold anything on behalf of requests
// or processes that are gone.
//
// A client may be refused, in words that tell it to try again, only while the coordinator is down or when no
// engine of a role was left for longer than requests wait for one. Any other error, any other token, any
// process that ends of itself is a problem.
package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"baton/coordinator"
	"baton/internal/rig"
	"baton/wire"
)

// Config says what is drilled and how. Command and Model have no default.
type Config struct {
	Command    rig.Command
	Model      string
	Transports []string      // one fleet after the other; default shm, tcp, tcp-push
	Duration   time.Duration // of the disturbance, divided among the fleets; default 3 min
	Streams    int           // at a time; default 32
	Questions  int           // that the streams ask, over and over; default 64
	Prefill    int           // engines; default 2
	Decode     int           // engines; default 3
	Every      time.Duration // mean time between disturbances; default 800 ms
	Kinds      []string      // of disturbances, by the names in Kinds; default all
	Seed       uint64
	Thorough   bool     // wait until connections to processes that are gone are dropped, a minute for each fleet
	Flags      []string // more flags for engines
	Dir        string   // where the processes' logs go; empty for nowhere
	Progress   io.Writer
}

func (c *Config) setDefaults() {
	if len(c.Transports) == 0 {
		c.Transports = []string{"shm", "tcp", "tcp-push"}
	}
	if c.Duration <= 0 {
		c.Duration = 3 * time.Minute
	}
	if c.Every <= 0 {
		c.Every = 800 * time.Millisecond
	}
	for n, def := range map[*int]int{&c.Streams: 32, &c.Questions: 64, &c.Prefill: 2, &c.Decode: 3} {
		if *n <= 0 {
			*n = def
		}
	}
	if c.Progress == nil {
		c.Progress = io.Discard
	}
}

// Run drills one fleet for each transport. An error means that the drill could not be held; what it found
// is in the report.
func Run(ctx context.Context, c Config) (*Report, error) {
	c.setDefaults()
	kinds, err := chosen(c.Kinds)
	if err != nil {
		return nil, err
	}
	questions := ask(rand.New(rand.NewPCG(c.Seed, 1)), c.Questions)
	fmt.Fprintf(c.Progress, "%d answers of an undisturbed server\n", len(questions))
	if err := answerAll(ctx, c, questions); err != nil {
		return nil, fmt.Errorf("chaos: undisturbed answers: %w", err)
	}
	report := &Report{Seed: c.Seed}
	for i, transport := range c.Transports {
		d := &drill{
			cfg: c, kinds: kinds, questions: questions, transport: transport,
			havoc: c.Duration / time.Duration(len(c.Transports)), began: time.Now(),
			rng: rand.New(rand.NewPCG(c.Seed, uint64(2+i))),
			run: &Drill{Transport: transport, Disturbances: make(map[string]int)},
			http: &http.Client{Transport: &http.Transport{
				MaxIdleConnsPerHost: c.Streams, ResponseHeaderTimeout: time.Minute,
			}},
		}
		err := d.hold(ctx)
		report.Drills = append(report.Drills, d.run)
		if err != nil {
			return report, fmt.Errorf("chaos: %s: %w", transport, err)
		}
	}
	return report, nil
}

// answerAll lets a colocated server in one process answer all questions.
func answerAll(ctx context.Context, c Config, questions []*question) error {
	parts := &rig.Parts{Command: c.Command, Model: c.Model, Flags: c.Flags, Dir: c.Dir}
	defer parts.Close()
	server, err := parts.StartColocated(ctx)
	if err != nil {
		return err
	}
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for _, q := range questions {
		group.Go(func() (err error) {
			q.want, err = q.body.Stream(gctx, client, server.URL, func() {})
			return err
		})
	}
	return errors.Join(group.Wait(), server.Stop(10*time.Second))
}

// drill is one fleet and what is done to it.
type drill struct {
	cfg       Config
	kinds     []kind
	questions []*question
	transport string
	havoc     time.Duration
	began     time.Time
	http      *http.Client // of the streams
	rng       *rand.Rand   // of the one who disturbs

	parts    *rig.Parts
	frontend *rig.Server
	observer *coordinator.Client // sees the fleet as the coordinator does

	mu      sync.Mutex
	hub     *rig.Coordinator
	hubBusy bool
	members []*member
	outages []outage
	run     *Drill
}

// member is an engine of the fleet, through all its lives.
type member struct {
	name, role string

	// Guarded by the drill's mu.
	life *rig.Engine
	up   bool // it runs and was not stopped, as far as this drill did
	busy bool // somebody disturbs it
}

// patience bounds what must happen soon: a start, the end of a stream without disturbance.
const patience = time.Minute

// hold starts the fleet, disturbs it under load, and looks at what is left.
func (d *drill) hold(ctx context.Context) error {
	defer d.http.CloseIdleConnections()
	d.parts = &rig.Parts{
		Command: d.cfg.Command, Model: d.cfg.Model, Transport: d.transport, Flags: d.cfg.Flags, Dir: d.cfg.Dir, Line: d.line,
	}
	defer d.parts.Close()
	defer d.end()
	if err := d.start(ctx); err != nil {
		return err
	}
	d.say("the fleet is up")
	d.round(ctx)
	before := d.rest(ctx)
	if err := d.disturb(ctx); err != nil {
		return err
	}
	d.say("the disturbance is over")
	d.round(ctx) // as before, so that the same connections are open
	d.compare(ctx, before)
	return context.Cause(ctx)
}

// start starts the processes of the fleet.
func (d *drill) start(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if d.hub, err = d.parts.StartCoordinator(ctx, "127.0.0.1:0"); err != nil {
		return err
	}
	for i := range d.cfg.Prefill {
		d.members = append(d.members, &member{name: fmt.Sprint(wire.RolePrefill, i), role: wire.RolePrefill})
	}
	for i := range d.cfg.Decode {
		d.members = append(d.members, &member{name: fmt.Sprint(wire.RoleDecode, i), role: wire.RoleDecode})
	}
	group, gctx := errgroup.WithContext(ctx)
	for _, m := range d.members {
		group.Go(func() error { return d.raise(gctx, m) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if d.frontend, err = d.parts.StartFrontend(ctx, d.hub.Addr); err != nil {
		return err
	}
	d.observer, err = coordinator.Dial(ctx, d.hub.Addr, coordinator.ClientConfig{Name: "chaos", Logger: quiet, Wait: 200 * time.Millisecond})
	if err != nil {
		return err
	}
	return d.frontend.AwaitHealth(ctx, d.http)
}

// raise starts a member's next life.
func (d *drill) raise(ctx context.Context, m *member) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	e, err := d.parts.StartEngine(ctx, m.name, m.role, d.hub.Addr)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	m.life, m.up = e, true
	return nil
}

// end stops everything, and finds out who does not stop as it should.
func (d *drill) end() {
	if d.observer != nil {
		d.observer.Close()
	}
	stop := func(p *rig.Process) {
		if !p.Alive() {
			return
		}
		if err := p.Stop(40 * time.Second); err != nil {
			d.problem("at the end: %v", err)
		}
	}
	if d.frontend != nil {
		stop(d.frontend.Process)
	}
	var group sync.WaitGroup
	for _, m := range d.members {
		if m.life != nil {
			group.Go(func() { stop(m.life.Process) })
		}
	}
	group.Wait()
	if d.hub != nil {
		stop(d.hub.Process)
	}
}

// round sends as many questions at a time as there will be streams, while nobody disturbs.
func (d *drill) round(ctx context.Context) {
	var group sync.WaitGroup
	for i := range d.cfg.Streams {
		group.Go(func() { d.stream(ctx, d.questions[i%len(d.questions)]) })
	}
	group.Wait()
}

// disturb lets clients stream and disturbs the fleet meanwhile, until everybody is up again and every
// stream has ended.
func (d *drill) disturb(ctx context.Context) error {
	watching, stopWatching := context.WithCancel(ctx)
	var watchers sync.WaitGroup
	watchers.Go(func() { d.watch(watching) })
	defer watchers.Wait()
	defer stopWatching()

	streaming, stopStreaming := context.WithCancel(ctx)
	defer stopStreaming()
	var clients sync.WaitGroup
	for i := range d.cfg.Streams {
		rng := rand.New(rand.NewPCG(d.rng.Uint64(), uint64(i)))
		clients.Go(func() {
			for streaming.Err() == nil {
				q := d.questions[rng.IntN(len(d.questions))]
				if rng.IntN(8) == 0 {
					d.hangUp(ctx, q, rng.N(3*time.Second))
					continue
				}
				d.stream(ctx, q)
			}
		})
	}
	err := d.wreak(ctx)
	stopStreaming()
	clients.Wait()
	return err
}

func (d *drill) say(format string, args ...any) {
	fmt.Fprintf(d.cfg.Progress, "%8.3fs %s: %s\n", time.Since(d.began).Seconds(), d.transport, fmt.Sprintf(format, args...))
}

// problem notes that something was not as it must be.
func (d *drill) problem(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	d.say("PROBLEM %s", text)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.run.Problems = append(d.run.Problems, text)
}
