package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"baton/internal/rig"
)

// freeAddress is one at which a process may listen in a moment.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// spread starts an engine of the fleet whose ranks run in several processes: those of ranks[0], which lead, and
// the followers. They are parts of the fleet by the engine's name and name+".1", ...
func (f *fleet) spread(t *testing.T, model, role, name, shard string, ranks []string, flags ...string) {
	t.Helper()
	hub := f.parts["coordinator"].await(t, `coordinator at (\S+)`)
	leader := freeAddress(t)
	for i, list := range ranks {
		args := []string{"engine", "--model=" + model, "--ranks=" + list, "--leader=" + leader, "--threads=1"}
		part := fmt.Sprintf("%s.%d", name, i)
		if i == 0 {
			part = name
			args = append(append(args, "--role="+role, "--name="+name, "--shard="+shard, "--coordinator="+hub), flags...)
		}
		f.parts[part] = start(t, args...)
	}
	f.parts[name].await(t, `(registered)`)
}

// Engines whose ranks are spread over processes give the bits of one rank, whatever is split and however the KV
// moves.
func TestRanksInProcesses(t *testing.T) {
	body := map[string]any{"prompt": prompt(70, 5), "max_tokens": 24, "temperature": 0.8, "seed": 7, "logprobs": 1}
	for _, tc := range []struct{ model, transfer, prefill, decode string }{
		{"qwen3", "tcp", "tp=2", "tp=4"},
		{"qwen3", "shm", "tp=2,pp=2", "pp=2"},
		{"qwen3_moe", "tcp-push", "dp=2,ep=2", "tp=2,ep=2,expt_tp=1"},
	} {
		t.Run(tc.model+" "+tc.prefill+" "+tc.decode, func(t *testing.T) {
			model := goldenPath(tc.model)
			want := serve(t, model, "--shards=tp=1", "--kv-memory=16MiB").complete(t, body)
			flags := []string{"--kv-memory=16MiB", "--transfer=" + tc.transfer}
			f := processesOf(t, model, nil, nil)
			f.spread(t, model, "prefill", "p", tc.prefill, halves(tc.prefill), flags...)
			f.spread(t, model, "decode", "d", tc.decode, halves(tc.decode), flags...)
			f.awaitHealth(t)
			for range 3 { // the second one finds the prompt cached; engines of dp=2 take turns
				got := f.complete(t, body)
				if !slices.Equal(got.Choices[0].TokenIDs, want.Choices[0].TokenIDs) || !slices.Equal(got.Choices[0].Logprobs.TokenLogprobs, want.Choices[0].Logprobs.TokenLogprobs) {
					t.Errorf("%v %v, on one rank %v %v", got.Choices[0].TokenIDs, got.Choices[0].Logprobs.TokenLogprobs,
						want.Choices[0].TokenIDs, want.Choices[0].Logprobs.TokenLogprobs)
				}
			}
			// Whoever is asked to stop lets the others go.
			f.parts["p"].end(t)
			if code := f.parts["p.1"].exit(t, 5*time.Second); code != 0 {
				t.Errorf("the other process ended with %d:\n%s", code, f.parts["p.1"].Log.Tail())
			}
		})
	}
}

// halves gives each of two processes half of a shard's ranks.
func halves(spec string) []string {
	f := rankFlags{Shard: spec}
	s, err := f.shape()
	if err != nil {
		panic(err)
	}
	n := s.Ranks()
	list := func(from, to int) string { return fmt.Sprintf("%d-%d", from, to-1) }
	return []string{list(0, n/2), list(n/2, n)}
}

// A process of a shard that is told to stop, or all of them at once, end without a loss: what runs comes to its end first, over
// HTTP too, and nobody takes that for a failure.
func TestRanksStop(t *testing.T) {
	model := goldenPath("qwen3")
	want := goldenRun(t, serve(t, model, "--shards=tp=1", "--kv-memory=16MiB"), readGolden(t, "qwen3"))
	for name, told := range map[string][]int{"one": {1}, "all": {1, 0, 2}} {
		t.Run(name, func(t *testing.T) {
			leader := freeAddress(t)
			var parts []*part
			for i := range 3 {
				args := []string{"engine", "--model=" + model, "--ranks=" + strconv.Itoa(i), "--leader=" + leader, "--threads=1"}
				if i == 0 {
					args = append(args, "--role=both", "--shard=pp=3", "--http=127.0.0.1:0", "--served-model-name=m", "--kv-memory=16MiB")
				}
				parts = append(parts, start(t, args...))
			}
			f := &fleet{url: parts[0].await(t, `engine at (https?://\S+)`), model: "m", parts: map[string]*part{"both": parts[0]}}
			f.awaitHealth(t)
			sameBits(t, goldenRun(t, f, readGolden(t, "qwen3")), want)
			begun, ended := make(chan struct{}), make(chan error, 1)
			go func() {
				ids, err := f.streamFrom(t.Context(), map[string]any{"prompt": prompt(40, 1), "max_tokens": 200, "temperature": 0, "ignore_eos": true}, 1<<30, begun)
				if err == nil && len(ids) != 200 {
					err = fmt.Errorf("%d tokens", len(ids))
				}
				ended <- err
			}()
			<-begun
			for _, i := range told {
				if err := parts[i].Signal(syscall.SIGTERM); err != nil {
					t.Fatal(err)
				}
			}
			if err := <-ended; err != nil {
				t.Errorf("the stream that ran: %v", err)
			}
			for i, p := range parts {
				if code := p.exit(t, 20*time.Second); code != 0 {
					t.Errorf("process %d ended with %d:\n%s", i, code, p.Log.Tail())
				}
			}
		})
	}
}

// A rank that dies, or falls silent, ends its engine with words that name it. Streams go on elsewhere.
func TestRankDies(t *testing.T) {
	model := goldenPath("qwen3")
	flags := []string{"--kv-memory=64MiB"}
	f := processesOf(t, model, nil, nil)
	for _, role := range []string{"prefill", "decode"} {
		f.spread(t, model, role, role, "tp=2", []string{"0", "1"}, flags...)
	}
	f.awaitHealth(t)
	c := f.gather(t, 8, 300)
	hub := f.parts["coordinator"].await(t, `coordinator at (\S+)`)
	for _, role := range []string{"prefill", "decode"} { // what takes over
		f.parts[role+"2"] = start(t, append([]string{"engine", "--role=" + role, "--name=" + role + "2", "--coordinator=" + hub, "--model=" + model}, flags...)...)
		f.parts[role+"2"].await(t, `(registered)`)
	}
	silent := f.parts["prefill.1"]
	if err := silent.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Signal(syscall.SIGCONT) }() // whatever happens, it must be able to end
	if err := f.parts["decode.1"].Kill(); err != nil {
		t.Fatal(err)
	}
	for name, within := range map[string]time.Duration{"decode": 5 * time.Second, "prefill": 15 * time.Second} {
		leader := f.parts[name]
		if code := leader.exit(t, within); code == 0 || !strings.Contains(leader.Log.Tail(), "rank") {
			t.Errorf("%s ended with %d:\n%s", name, code, leader.Log.Tail())
		}
	}
	c.undisturbed("qwen3")
	if got := f.complete(t, map[string]any{"prompt": prompt(40, 3), "max_tokens": 4, "temperature": 0}); len(got.Choices[0].TokenIDs) != 4 {
		t.Errorf("afterwards: %+v", got)
	}
	if err := silent.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if code := silent.exit(t, 15*time.Second); code == 0 || !strings.Contains(silent.Log.Tail(), "leader") {
		t.Errorf("the silent one ended with %d:\n%s", code, silent.Log.Tail())
	}
}

// Processes that do not belong to a shard are told so.
func TestRanksRefused(t *testing.T) {
	leader := freeAddress(t)
	first := start(t, "engine", "--model="+goldenPath("qwen3"), "--shard=tp=4", "--ranks=0-1", "--leader="+leader, "--kv-memory=4MiB", "--threads=1")
	first.await(t, `(waiting for ranks)`)
	for _, tc := range []struct{ model, ranks, says string }{
		{"qwen3", "1-2", "rank 1 runs in another process already; missing are [2 3]"},
		{"qwen3", "3-4", "there is no rank 4: the shard"},
		{"qwen2", "2-3", "its --model is another one"},
	} {
		p := start(t, "engine", "--model="+goldenPath(tc.model), "--ranks="+tc.ranks, "--leader="+leader)
		if code := p.exit(t, 10*time.Second); code != 1 || !strings.Contains(p.Log.Tail(), tc.says) {
			t.Errorf("ranks %s of %s: code %d, want 1 and %q:\n%s", tc.ranks, tc.model, code, tc.says, p.Log.Tail())
		}
	}
	// One that came and went leaves room for another.
	gone := start(t, "engine", "--model="+goldenPath("qwen3"), "--ranks=2-3", "--leader="+leader)
	first.await(t, `(ranks joined)`)
	gone.end(t)
	if code := gone.exit(t, time.Second); code != 0 {
		t.Errorf("the one that went ended with %d:\n%s", code, gone.Log.Tail())
	}
}

// An engine over two network namespaces, each with an address of its own.
func TestRanksInNetworkNamespaces(t *testing.T) {
	const inside = "BATON_TEST_IN_NAMESPACE"
	if os.Getenv(inside) == "" {
		if err := exec.Command("unshare", "--net", "ip", "netns").Run(); err != nil {
			t.Skip("network namespaces cannot be made here: ", err)
		}
		cmd := exec.Command("unshare", "--net", os.Args[0], "-test.run=^TestRanksInNetworkNamespaces$", "-test.v")
		cmd.Env = append(os.Environ(), inside+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	sh := func(line string) {
		t.Helper()
		if out, err := exec.Command("sh", "-ec", line).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", line, err, out)
		}
	}
	sh("ip link set lo up; ip link add br0 type bridge; ip addr add 10.77.0.1/24 dev br0; ip link set br0 up")
	spaces := []string{fmt.Sprintf("baton-a-%d", os.Getpid()), fmt.Sprintf("baton-b-%d", os.Getpid())}
	for i, s := range spaces {
		sh("ip netns add " + s)
		t.Cleanup(func() { sh("ip netns del " + s) })
		sh(fmt.Sprintf("ip link add v%d type veth peer name eth0 netns %s; ip link set v%d master br0 up", i, s, i))
		sh(fmt.Sprintf("ip -n %s link set lo up; ip -n %s link set eth0 up; ip -n %s addr add 10.77.0.%d/24 dev eth0", s, s, s, i+2))
	}
	within := func(space string, args ...string) *part {
		return startAs(t, rig.Command{Path: "ip", Env: theTest.Env}, append([]string{"netns", "exec", space, theTest.Path}, args...)...)
	}
	model := goldenPath("qwen3")
	hub := start(t, "coordinator", "--listen=10.77.0.1:7000", "--insecure")
	hub.await(t, `coordinator at (\S+)`)
	common := []string{"engine", "--model=" + model, "--insecure", "--threads=1", "--leader=10.77.0.2:7100"}
	lead := within(spaces[0], append(slices.Clone(common), "--role=prefill", "--shard=tp=2", "--ranks=0", "--transfer-host=10.77.0.2",
		"--coordinator=10.77.0.1:7000", "--transfer=tcp", "--kv-memory=16MiB")...)
	follow := within(spaces[1], append(slices.Clone(common), "--ranks=1", "--transfer-host=10.77.0.3")...)
	start(t, "engine", "--model="+model, "--role=decode", "--insecure", "--transfer=tcp", "--transfer-host=10.77.0.1", "--coordinator=10.77.0.1:7000", "--kv-memory=16MiB")
	front := start(t, "frontend", "--listen=10.77.0.1:8000", "--insecure", "--coordinator=10.77.0.1:7000", "--model="+model, "--served-model-name=m")
	f := &fleet{model: "m", url: front.await(t, `frontend at (\S+)`)}
	f.awaitHealth(t)
	body := map[string]any{"prompt": prompt(70, 5), "max_tokens": 24, "temperature": 0}
	want := serve(t, model, "--shards=tp=1", "--kv-memory=16MiB").complete(t, body).Choices[0].TokenIDs
	if got := f.complete(t, body).Choices[0].TokenIDs; !slices.Equal(got, want) {
		t.Errorf("%v, on one rank %v", got, want)
	}
	// Cut the cable: nobody says goodbye.
	sh("ip link set v1 down")
	for name, p := range map[string]*part{"leader": lead, "follower": follow} {
		if code := p.exit(t, 15*time.Second); code == 0 {
			t.Errorf("the %s ended with %d:\n%s", name, code, p.Log.Tail())
		}
	}
}
