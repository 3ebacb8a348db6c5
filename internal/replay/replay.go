//go:build unix

// Package replay plays agents' sessions against a fleet of real processes whose caches hold half of what the sessions
// need, kills a prefill engine on the way, restarts the frontend, and tells what the agents noticed: whether a trajectory was lost
// or changed, how much of the prompts was cached before and after, how long first tokens took.
package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"baton/internal/rig"
	"baton/loadgen"
	"baton/wire"
)

// Config says what is played. Command has no default.
type Config struct {
	Command  rig.Command
	Sessions int // default 64
	Turns    int // of each; default 20
	Prefix   int // tokens that all sessions begin with; default 3000
	New      int // tokens that each turn adds; default 336
	Output   int // tokens of each answer; default 64
	Think    time.Duration
	Relay    bool    // the frontend relays between engines that are called over HTTP; without it there is a coordinator
	Routing  string  // of the coordinator; default session
	Prefill  int     // engines; default 2
	Decode   int     // engines; default 2
	Share    float64 // of the working set that all prefill engines' caches hold together, and all decode engines' too; default 0.5
	KillAt   float64 // share of the turns after which a prefill engine is killed; default 0.4
	Restart  float64 // share of the turns after which the frontend is; default 0.6
	Overtake int     // the engines'
	Verify   bool    // let an undisturbed server of one engine say the same, and compare
	Seed     uint64
	Dir      string // for the model and the logs of the processes
	Progress io.Writer
}

func (c *Config) setDefaults() {
	for n, def := range map[*int]int{
		&c.Sessions: 64, &c.Turns: 20, &c.Prefix: 3000, &c.New: 336, &c.Output: 64, &c.Prefill: 2, &c.Decode: 2,
	} {
		if *n <= 0 {
			*n = def
		}
	}
	for f, def := range map[*float64]float64{&c.Share: 0.5, &c.KillAt: 0.4, &c.Restart: 0.6} {
		if *f <= 0 {
			*f = def
		}
	}
	c.Routing = cmp.Or(c.Routing, "session")
	if c.Progress == nil {
		c.Progress = io.Discard
	}
}

// WorkingSet is how many tokens all sessions have together when they end.
func (c *Config) WorkingSet() int { return c.Prefix + c.Sessions*c.Turns*(c.New+c.Output) }

// kvMemory is what one engine of n gets.
func (c *Config) kvMemory(n int) int {
	return int(c.Share * float64(c.WorkingSet()) * tokenBytes / float64(n))
}

// exportLease is how long engines that are called over HTTP keep what nobody comes for.
const exportLease = 3 * time.Second

// patience bounds what must happen soon.
const patience = time.Minute

// Run plays. An error means that it could not; what came of it is in the report.
func Run(ctx context.Context, c Config) (*Report, error) {
	c.setDefaults()
	if err := writeModel(c.Dir, c.Seed); err != nil {
		return nil, err
	}
	f := &fleet{cfg: &c, began: time.Now(), parts: &rig.Parts{
		Command: c.Command, Model: c.Dir, Transport: "shm", Dir: c.Dir,
		Flags: []string{"--threads=1", "--max-requests=" + fmt.Sprint(max(c.Sessions, 2))},
	}}
	defer f.parts.Close()
	report, err := f.play(ctx)
	if err != nil || !c.Verify {
		return report, err
	}
	return report, f.verify(ctx, report)
}

// fleet is what the sessions are played against.
type fleet struct {
	cfg      *Config
	parts    *rig.Parts
	began    time.Time
	hub      *rig.Process   // the coordinator; nil when the frontend relays
	address  string         // of it
	engines  []*rig.Process // those of prefill first
	workers  []string       // the frontend's flags that name them, when it relays
	frontend *rig.Server
	logs     []*os.File // of the processes that were launched here
}

func (f *fleet) say(format string, args ...any) {
	fmt.Fprintf(f.cfg.Progress, "%7.1fs %s\n", time.Since(f.began).Seconds(), fmt.Sprintf(format, args...))
}

// start starts all processes.
func (f *fleet) start(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if !f.cfg.Relay {
		if f.hub, f.address, err = f.launch(ctx, "coordinator", coordinatorAt, "coordinator", "--listen=127.0.0.1:0", "--routing="+f.cfg.Routing); err != nil {
			return err
		}
	}
	for _, kind := range []struct {
		role string
		n    int
	}{{wire.RolePrefill, f.cfg.Prefill}, {wire.RoleDecode, f.cfg.Decode}} {
		for i := range kind.n {
			if err := f.startEngine(ctx, fmt.Sprint(kind.role, i), kind.role, kind.n); err != nil {
				return err
			}
		}
	}
	return f.startFrontend(ctx, "127.0.0.1:0")
}

var (
	coordinatorAt = regexp.MustCompile(`^coordinator at (\S+)`)
	engineAt      = regexp.MustCompile(`^engine at (\S+)`)
	frontendAt    = regexp.MustCompile(`^frontend at (\S+)`)
	registered    = regexp.MustCompile(`msg=(registered)`)
)

// startEngine starts one of n of its role.
func (f *fleet) startEngine(ctx context.Context, name, role string, n int) error {
	args := append([]string{
		"engine", "--role=" + role, "--model=" + f.cfg.Dir, "--served-model-name=" + rig.ServedModel, fmt.Sprintf("--kv-memory=%d", f.cfg.kvMemory(n)),
		fmt.Sprintf("--overtake=%d", f.cfg.Overtake),
	}, f.parts.Flags...)
	if !f.cfg.Relay {
		p, _, err := f.launch(ctx, name, registered, append(args, "--name="+name, "--coordinator="+f.address)...)
		f.engines = append(f.engines, p)
		return err
	}
	// What a frontend had prefilled when it was killed waits for nobody until its lease ends.
	p, url, err := f.launch(ctx, name, engineAt, append(args, "--http=127.0.0.1:0", "--export-lease="+exportLease.String())...)
	f.engines = append(f.engines, p)
	f.workers = append(f.workers, "--"+role+"="+url)
	return err
}

// launch starts a process and waits for a line of it. The process is nil if it could not be started.
func (f *fleet) launch(ctx context.Context, name string, pattern *regexp.Regexp, args ...string) (*rig.Process, string, error) {
	log, err := os.OpenFile(filepath.Join(f.cfg.Dir, name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, "", err
	}
	f.logs = append(f.logs, log)
	p, err := f.cfg.Command.Start(name, rig.NewLog(log, nil), args...)
	if err != nil {
		return nil, "", err
	}
	found, err := p.Await(ctx, pattern)
	return p, found, err
}

// startFrontend starts one that listens at an address, the one before it being gone.
func (f *fleet) startFrontend(ctx context.Context, listen string) error {
	args := []string{"frontend", "--listen=" + listen}
	if f.cfg.Relay {
		args = append(args, f.workers...)
	} else {
		args = append(args, "--coordinator="+f.address, "--model="+f.cfg.Dir, "--served-model-name="+rig.ServedModel)
	}
	p, url, err := f.launch(ctx, "frontend", frontendAt, args...)
	f.frontend = &rig.Server{Process: p, URL: url}
	if err != nil {
		return err
	}
	client := newClient()
	defer client.CloseIdleConnections()
	return f.frontend.AwaitHealth(ctx, client)
}

// stop ends all processes.
func (f *fleet) stop() {
	var list []*rig.Process
	if f.frontend != nil {
		list = append(list, f.frontend.Process)
	}
	list = append(list, f.engines...)
	if f.hub != nil {
		list = append(list, f.hub)
	}
	for _, p := range list {
		if p != nil && p.Alive() {
			_ = p.Stop(10 * time.Second) // it is over, one way or the other
		}
	}
	for _, log := range f.logs {
		log.Close()
	}
}

// play lets the sessions run and disturbs them.
func (f *fleet) play(ctx context.Context) (*Report, error) {
	defer f.stop()
	f.say("working set %d tokens, %.1f MiB of KV; a prefill engine's cache holds %.1f MiB, a decode engine's %.1f MiB",
		f.cfg.WorkingSet(), mebi(f.cfg.WorkingSet()*tokenBytes), mebi(f.cfg.kvMemory(f.cfg.Prefill)), mebi(f.cfg.kvMemory(f.cfg.Decode)))
	if err := f.start(ctx); err != nil {
		return nil, err
	}
	f.say("the fleet is up")
	w := newWatcher(f.cfg)
	var havoc sync.WaitGroup
	var havocErr error
	havoc.Go(func() { havocErr = f.disturb(ctx, w) })
	url := f.frontend.URL
	client := newClient()
	defer client.CloseIdleConnections()
	plan := f.plan()
	result, err := loadgen.Run(ctx, loadgen.Config{
		Targets: []loadgen.Target{{URL: url, Client: client}}, Plan: plan, Load: loadgen.Load{Concurrency: f.cfg.Sessions},
		Request: f.request(), RetryFor: 2 * patience, Observe: w.observe, Every: 5 * time.Second,
		Progress: func(s loadgen.Snapshot) { f.say("%s", s) },
	})
	w.end()
	havoc.Wait()
	if err = errors.Join(err, havocErr); err != nil {
		return nil, err
	}
	return w.report(result), nil
}

func (f *fleet) plan() *loadgen.Synthetic {
	c := f.cfg
	return &loadgen.Synthetic{
		Sessions: c.Sessions, Turns: c.Turns, Prefix: c.Prefix, New: loadgen.Exactly(c.New), Output: loadgen.Exactly(c.Output), Think: c.Think,
		Burstiness: 1, Seed: c.Seed,
	}
}

func (f *fleet) request() loadgen.Request {
	return loadgen.Request{VocabSize: vocabulary, Seed: f.cfg.Seed}
}

// disturb kills and restarts when it is time.
func (f *fleet) disturb(ctx context.Context, w *watcher) error {
	if !w.await(ctx, w.kill) {
		return nil
	}
	victim := f.engines[0]
	if err := victim.Kill(); err != nil {
		return err
	}
	w.enter(1)
	f.say("%s is killed", victim.Name)
	if !w.await(ctx, w.restart) {
		return nil
	}
	w.enter(2)
	if err := f.frontend.Kill(); err != nil {
		return err
	}
	f.say("the frontend is killed")
	at := f.frontend.URL[len("http://"):]
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := f.startFrontend(ctx, at); err != nil {
		return fmt.Errorf("replay: the frontend did not come back: %w", err)
	}
	f.say("the frontend is back")
	return nil
}

// verify plays the sessions against one engine that has room for all, and compares what it says.
func (f *fleet) verify(ctx context.Context, report *Report) error {
	f.say("comparing with a server that nobody disturbs")
	started, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	f.parts.Flags = append(f.parts.Flags, fmt.Sprintf("--kv-memory=%d", 2*f.cfg.WorkingSet()*tokenBytes))
	server, err := f.parts.StartColocated(started)
	if err != nil {
		return err
	}
	defer func() { _ = server.Stop(10 * time.Second) }() // it has served its purpose
	client := newClient()
	defer client.CloseIdleConnections()
	w := newWatcher(f.cfg)
	result, err := loadgen.Run(ctx, loadgen.Config{
		Targets: []loadgen.Target{{URL: server.URL, Client: client}}, Plan: f.plan(), Load: loadgen.Load{Concurrency: f.cfg.Sessions},
		Request: f.request(), Observe: w.observe, Every: 5 * time.Second, Progress: func(s loadgen.Snapshot) { f.say("%s", s) },
	})
	if err != nil {
		return err
	}
	if n := result.Failed(); n > 0 {
		return fmt.Errorf("replay: %d requests of the undisturbed server failed", n)
	}
	report.Verified = true
	for id, digest := range w.digests {
		if report.digests[id] != digest {
			report.Changed++
		}
	}
	return nil
}

// watcher follows the results. Its methods are safe for concurrent use.
type watcher struct {
	cfg           *Config
	began         time.Time
	kill, restart chan struct{} // closed when it is time
	over          chan struct{}

	mu      sync.Mutex
	done    int
	phase   int
	phases  [3]phase
	digests map[string]uint64 // of the answers of each session so far
}

func newWatcher(c *Config) *watcher {
	return &watcher{
		cfg: c, began: time.Now(), kill: make(chan struct{}), restart: make(chan struct{}), over: make(chan struct{}), digests: make(map[string]uint64),
	}
}

// await waits for the moment, and tells whether it came before the end.
func (w *watcher) await(ctx context.Context, moment <-chan struct{}) bool {
	select {
	case <-moment:
		return true
	case <-w.over:
	case <-ctx.Done():
	}
	return false
}

func (w *watcher) end() { close(w.over) }

func (w *watcher) enter(phase int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.phase = phase
	w.phases[phase].began = time.Since(w.began)
}

func (w *watcher) observe(r *loadgen.Result) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.phases[w.phase].add(r)
	w.phases[w.phase].ideal += w.ideal(r)
	if r.Err == nil {
		h := fnv.New64a()
		fmt.Fprint(h, w.digests[r.Session.ID], r.Turn, r.IDs)
		w.digests[r.Session.ID] = h.Sum64()
	}
	w.done++
	total := float64(w.cfg.Sessions * w.cfg.Turns)
	if w.done == int(w.cfg.KillAt*total) {
		close(w.kill)
	}
	if w.done == int(w.cfg.Restart*total) {
		close(w.restart)
	}
}

// ideal is how many of a prompt's tokens prefill engines with room for everything would have had cached: the whole blocks of the
// prompt before. The answer between the two was computed by a decode engine.
func (w *watcher) ideal(r *loadgen.Result) int {
	if r.Err != nil {
		return 0
	}
	common := r.Reusable // of a first turn
	if r.Turn > 0 {
		common = r.PromptTokens - w.cfg.New - w.cfg.Output
	}
	return common / blockSize * blockSize
}

// blockSize is the engines' default.
const blockSize = 32

func mebi(n int) float64 { return float64(n) / (1 << 20) }

// TempDir is a new folder for Config.Dir.
func TempDir() (string, error) { return os.MkdirTemp("", "baton-replay-") }
