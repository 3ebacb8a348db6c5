package main

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"baton/wire"
)

// crowd is some streams that go on while a test does something to their fleet.
type crowd struct {
	t       *testing.T
	f       *fleet
	bodies  []map[string]any
	streams [][]int32
	errs    []error
	done    sync.WaitGroup
}

// gather starts n streams of so many tokens and returns when all of them have begun.
func (f *fleet) gather(t *testing.T, n, tokens int) *crowd {
	t.Helper()
	c := &crowd{t: t, f: f, bodies: make([]map[string]any, n), streams: make([][]int32, n), errs: make([]error, n)}
	begun := make(chan struct{}, n)
	for i := range n {
		c.bodies[i] = map[string]any{
			"prompt": prompt(40+7*i, uint64(i)), "max_tokens": tokens, "temperature": 0.8, "seed": i, "ignore_eos": true,
		}
		c.done.Go(func() { c.streams[i], c.errs[i] = f.streamFrom(t.Context(), c.bodies[i], 1<<30, begun) })
	}
	for range n {
		select {
		case <-begun:
		case <-time.After(20 * time.Second):
			t.Fatal("not every stream began within 20 s")
		}
	}
	return c
}

// undisturbed waits for the streams and checks that each is what it would have been without the disturbance.
func (c *crowd) undisturbed(model string) {
	c.t.Helper()
	c.done.Wait()
	alone := serve(c.t, goldenPath(model), "--kv-memory=64MiB", "--shards=tp=1")
	for i, ids := range c.streams {
		if c.errs[i] != nil {
			c.t.Errorf("stream %d: %v", i, c.errs[i])
			continue
		}
		if want := alone.complete(c.t, c.bodies[i]).Choices[0].TokenIDs; !slices.Equal(ids, want) {
			c.t.Errorf("stream %d: %v, undisturbed %v", i, ids, want)
		}
	}
}

// exit waits for a part's end and returns its exit code.
func (p *part) exit(t *testing.T, within time.Duration) int {
	t.Helper()
	select {
	case <-p.Done():
		return p.ExitCode()
	case <-time.After(within):
		t.Fatalf("%v still runs after %v:\n%s", p.args, within, p.Log.Tail())
		return -1
	}
}

// An engine that is asked to stop takes nothing new; what it runs moves on when it has had its time.
func TestSigtermDrains(t *testing.T) {
	for _, tc := range []struct {
		name, wait string
		moves      bool
	}{{"finish", "30s", false}, {"move", "50ms", true}} {
		t.Run(tc.name, func(t *testing.T) {
			const patient = "--peer-timeout=10s" // on a loaded machine no engine shall be missed for another reason
			f := processesOf(t, goldenPath("qwen3"), []string{"--drain-wait=" + tc.wait, patient},
				[]string{wire.RolePrefill, wire.RoleDecode, wire.RoleDecode}, "--kv-memory=256MiB", patient)
			c := f.gather(t, 8, 400)
			leaving := f.parts["decode2"]
			if err := leaving.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if code := leaving.exit(t, 40*time.Second); code != 0 {
				t.Errorf("decode2 ended with %d:\n%s", code, leaving.Log.Tail())
			}
			c.undisturbed("qwen3")
			said := f.parts["coordinator"].Log.Tail()
			if moved := strings.Contains(said, "runs again"); moved != tc.moves {
				t.Errorf("streams moved: %v, want %v\n%s", moved, tc.moves, said)
			}
			departure := regexp.MustCompile(`(?m)^.*level=INFO msg="engine decode2 leaves`)
			if alarm := regexp.MustCompile(`(?m)^.*level=WARN.*decode2`); !departure.MatchString(said) || !tc.moves && (!strings.Contains(said, "engine decode2 has left") || alarm.MatchString(said)) {
				t.Errorf("a normal departure is told as\n%s", said)
			}
			if log := leaving.Log.Tail(); !strings.Contains(log, "level=INFO msg=draining") || !strings.Contains(log, "level=INFO msg=stopped") {
				t.Errorf("the one that left says\n%s", log)
			}
		})
	}
}

// A process that was stopped is taken for dead; when it wakes, it finds that it was, and starts anew.
func TestStoppedEngineIsFenced(t *testing.T) {
	f := processes(t, goldenPath("qwen3"), []string{wire.RolePrefill, wire.RoleDecode, wire.RoleDecode}, "--kv-memory=256MiB")
	c := f.gather(t, 8, 600)
	sleeper := f.parts["decode2"]
	if err := sleeper.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sleeper.Signal(syscall.SIGCONT) }() // whatever happens, it must be able to end
	f.parts["coordinator"].await(t, `(decode2 is gone)`)
	if err := sleeper.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	c.undisturbed("qwen3")
	for deadline := time.Now().Add(30 * time.Second); strings.Count(sleeper.Log.Tail(), "msg=registered") < 2; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("it did not register again:\n%s", sleeper.Log.Tail())
		}
	}
}

// The death of the only prefill engine delays what is not computed yet; a new one takes it up.
func TestPrefillEngineDiesAndReturns(t *testing.T) {
	f := processes(t, goldenPath("qwen3"), []string{wire.RolePrefill, wire.RoleDecode}, "--kv-memory=256MiB", "--max-tokens=64")
	running := f.gather(t, 4, 300)
	late := make(chan error, 1)
	body := map[string]any{"prompt": prompt(3000, 99), "max_tokens": 8, "temperature": 0}
	var ids []int32
	go func() {
		c, err := f.tryComplete(t.Context(), body)
		if err == nil {
			ids = c.Choices[0].TokenIDs
		}
		late <- err
	}()
	victim := f.parts["prefill1"]
	time.Sleep(100 * time.Millisecond) // about the middle of the long prompt; any moment will do
	if err := victim.Kill(); err != nil {
		t.Fatal(err)
	}
	victim.exit(t, 5*time.Second)
	start(t, victim.args...)
	running.undisturbed("qwen3")
	if err := <-late; err != nil {
		t.Fatalf("the prompt that was being computed: %v", err)
	}
	alone := serve(t, goldenPath("qwen3"), "--kv-memory=64MiB", "--shards=tp=1")
	if want := alone.complete(t, body).Choices[0].TokenIDs; !slices.Equal(ids, want) {
		t.Errorf("%v, undisturbed %v", ids, want)
	}
}

// The coordinator's death ends what it carried with an error that says to try again; engines and frontends
// find the next one, and hold nothing of the past.
func TestCoordinatorDiesAndReturns(t *testing.T) {
	f := processes(t, goldenPath("qwen3"), []string{wire.RolePrefill, wire.RoleDecode}, "--kv-memory=256MiB")
	c := f.gather(t, 4, 3000)
	hub := f.parts["coordinator"]
	addr := hub.await(t, `coordinator at (\S+)`)
	if err := hub.Kill(); err != nil {
		t.Fatal(err)
	}
	hub.exit(t, 5*time.Second)
	c.done.Wait()
	for i, err := range c.errs {
		if err == nil || !strings.Contains(err.Error(), "again") {
			t.Errorf("stream %d: %v; want an error that says to try again", i, err)
		}
	}
	start(t, "coordinator", "--listen="+addr)
	f.awaitHealth(t)
	if got := f.complete(t, map[string]any{"prompt": prompt(40, 0), "max_tokens": 5, "ignore_eos": true}); len(got.Choices[0].TokenIDs) != 5 {
		t.Errorf("after the return: %+v", got)
	}
	for name, p := range f.parts {
		if strings.HasPrefix(name, "coordinator") || name == "frontend" {
			continue
		}
		url := strings.TrimSuffix(p.await(t, `address=(\S+)`), "/metrics")
		awaitZero(t, url, name)
	}
}

// awaitZero waits until an engine holds no block and no request.
func awaitZero(t *testing.T, url, name string) {
	t.Helper()
	var held float64
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		held = metric(t, url, "baton_engine_kv_blocks", `state="used"`) + metric(t, url, "baton_engine_requests")
		if held == 0 {
			return
		}
	}
	t.Errorf("%s still holds %v blocks and requests", name, held)
}

// A frontend's death aborts its requests, and a client's its own.
func TestFrontendDies(t *testing.T) {
	f := processes(t, goldenPath("qwen3"), []string{wire.RolePrefill, wire.RoleDecode}, "--kv-memory=256MiB")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	begun := make(chan struct{}, 4)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			body := map[string]any{"prompt": prompt(100, uint64(i)), "max_tokens": 3500, "ignore_eos": true}
			_, _ = f.streamFrom(ctx, body, 1<<30, begun) // it breaks off, as it must
		})
	}
	for range 4 {
		<-begun
	}
	if err := f.parts["frontend"].Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	for _, name := range []string{"prefill1", "decode2"} {
		p := f.parts[name]
		awaitZero(t, strings.TrimSuffix(p.await(t, `address=(\S+)`), "/metrics"), name)
	}
}
