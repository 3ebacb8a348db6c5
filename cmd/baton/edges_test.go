package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"baton/internal/rig"
	"baton/wire"
)

// An engine whose name another process takes ends, with the reason and a code that says so; whether it ran, or
// was stopped and comes back later. A successor of one that is dead simply takes its place.
func TestOneNameTwoEngines(t *testing.T) {
	f := processes(t, goldenPath("qwen3"), []string{wire.RolePrefill, wire.RoleDecode}, "--kv-memory=64MiB")
	ask := func() {
		t.Helper()
		if got := f.complete(t, map[string]any{"prompt": prompt(40, 0), "max_tokens": 5, "ignore_eos": true}); len(got.Choices[0].TokenIDs) != 5 {
			t.Fatalf("%+v", got)
		}
	}
	displaced := func(p *part) {
		t.Helper()
		if code := p.exit(t, 10*time.Second); code != 1 || !strings.Contains(p.Log.Tail(), "--name") {
			t.Errorf("it ended with %d:\n%s", code, p.Log.Tail())
		}
	}
	first := f.parts["decode2"]
	again := func() *part {
		t.Helper()
		p := start(t, first.args...)
		p.await(t, `msg=(registered)`)
		return p
	}
	second := again()
	displaced(first)
	ask()

	if err := second.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	third := again() // before or after the coordinator has noticed the silence
	if err := second.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	displaced(second)
	ask()

	if err := third.Kill(); err != nil {
		t.Fatal(err)
	}
	again()
	ask()
}

// A frontend that renders for another model is told which two there are.
func TestFrontendOfAnotherModel(t *testing.T) {
	f := processes(t, goldenPath("qwen3"), []string{wire.RoleBoth}, "--kv-memory=64MiB")
	hub := f.parts["coordinator"].await(t, `coordinator at (\S+)`)
	other := start(t, "frontend", "--listen=127.0.0.1:0", "--coordinator="+hub, "--model="+goldenPath("llama"))
	if code := other.exit(t, 20*time.Second); code != 1 {
		t.Errorf("it ended with %d:\n%s", code, other.Log.Tail())
	}
	if said := other.Log.Tail(); !strings.Contains(said, "--model is llama (fingerprint") || !strings.Contains(said, "qwen3 (fingerprint") {
		t.Errorf("it says:\n%s", said)
	}
	misfit := start(t, "engine", "--name=misfit", "--coordinator="+hub, "--model="+goldenPath("qwen3"), "--logprobs=processed", "--kv-memory=64MiB")
	if code := misfit.exit(t, 20*time.Second); code != 1 || !strings.Contains(misfit.Log.Tail(), "--logprobs is processed here and raw at") {
		t.Errorf("it ended with %d:\n%s", code, misfit.Log.Tail())
	}
}

// A frontend that comes first says where it is, refuses requests at once, and serves once there are others.
func TestFrontendComesFirst(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	front := start(t, "frontend", "--listen=127.0.0.1:0", "--coordinator="+addr, "--model="+goldenPath("qwen3"), "--served-model-name=m")
	f := &fleet{model: "m", url: front.await(t, `frontend at (\S+)`)}
	began := time.Now()
	_, err = rig.Stream(t.Context(), f.http(), f.url, map[string]any{"prompt": []int{1}, "stream": true}, func(*rig.Answer) {})
	if refused, ok := err.(*rig.HTTPError); !ok || refused.Status != http.StatusServiceUnavailable || refused.RetryAfter == "" {
		t.Errorf("without a coordinator: %v", err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("the refusal took %v", took)
	}
	resp, err := http.Get(f.url + "/health")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("health is %s", resp.Status)
	}
	start(t, "coordinator", "--listen="+addr).await(t, `coordinator at (\S+)`)
	start(t, "engine", "--name=e", "--coordinator="+addr, "--model="+goldenPath("qwen3"), "--kv-memory=64MiB")
	f.awaitHealth(t)
	f.complete(t, map[string]any{"prompt": prompt(40, 0), "max_tokens": 5, "ignore_eos": true})
	if log := front.Log.Tail(); strings.Count(log, "level=WARN msg=\"no coordinator") != 1 || strings.Count(log, "coordinator connected") != 1 {
		t.Errorf("it says:\n%s", log)
	}
}

// A process that is told to stop while it loads does not finish loading first.
func TestStopWhileLoading(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "endless.gguf")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Skip(err)
	}
	for _, command := range []string{"serve --listen=127.0.0.1:0", "engine", "frontend --listen=127.0.0.1:0"} {
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan string, 1)
		go func() {
			log := rig.NewLog(nil, nil)
			code := runContext(ctx, append(strings.Fields(command), "--model="+pipe), log, log)
			ended <- fmt.Sprintf("code %d %s", code, log.Tail())
		}()
		writer, err := os.OpenFile(pipe, os.O_WRONLY, 0) // it returns when somebody reads: the model is being loaded
		if err != nil {
			t.Fatal(err)
		}
		stop()
		select {
		case how := <-ended:
			if how != "code 0 " {
				t.Errorf("baton %s: %s", command, how)
			}
		case <-time.After(5 * time.Second):
			t.Errorf("baton %s goes on", command)
		}
		writer.Close() // lets go what still reads
	}
}
