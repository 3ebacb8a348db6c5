//go:build linux

package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

//go:embed aiohttp_relay.py
var aiohttpRelay []byte

// compare measures our relay, a bare one of Go's and one of aiohttp's: events as fast as they are taken, and one every
// 20 ms.
func compare(args []string) error {
	flags := flag.NewFlagSet("compare", flag.ExitOnError)
	asJSON := flags.Bool("json", false, "print JSON")
	concurrency := flags.String("concurrency", "16,64,256", "requests at a time, in a closed loop")
	_ = flags.Parse(args)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "bench-relay-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	targets := slices.DeleteFunc(ours(self), func(t target) bool { return t.name == "direct" })
	if other, err := aiohttp(dir); err == nil {
		targets = append(targets, other)
	} else {
		fmt.Fprintln(os.Stderr, "without aiohttp:", err)
	}
	fast := &load{path: "/v1/completions", tokens: 512, prompt: 32768, concurrency: *concurrency, requests: 512}
	figures, err := measure(self, targets, fast)
	if err != nil {
		return err
	}
	// The way of a request decides little when its events are paced: one of our engines' will do.
	targets = slices.DeleteFunc(targets, func(t target) bool { return t.name == "baton-trtllm" || t.name == "baton-vllm" })
	paced := &load{path: "/v1/chat/completions", tokens: 256, prompt: 32768, step: 20 * time.Millisecond, concurrency: *concurrency}
	more, err := measure(self, targets, paced)
	if err != nil {
		return err
	}
	return show(append(figures, more...), *asJSON)
}

// aiohttp is the relay in Python, run by the python3 that is there if it has aiohttp, otherwise by one in dir that gets
// it from PyPI.
func aiohttp(dir string) (target, error) {
	script := filepath.Join(dir, "aiohttp_relay.py")
	if err := os.WriteFile(script, aiohttpRelay, 0o600); err != nil {
		return target{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	python, err := exec.LookPath("python3")
	if err != nil {
		return target{}, err
	}
	if exec.CommandContext(ctx, python, "-c", "import aiohttp").Run() != nil {
		fmt.Fprintln(os.Stderr, "python3 has no aiohttp: getting it from PyPI, for this run")
		venv := filepath.Join(dir, "venv")
		for _, command := range [][]string{
			{python, "-m", "venv", venv},
			{filepath.Join(venv, "bin", "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "aiohttp>=3.14,<4"},
		} {
			c := exec.CommandContext(ctx, command[0], command[1:]...)
			c.WaitDelay = time.Second
			if out, err := c.CombinedOutput(); err != nil {
				return target{}, fmt.Errorf("%q: %w", command[1:], errors.Join(err, errors.New(string(out))))
			}
		}
		python = filepath.Join(venv, "bin", "python")
	}
	return target{name: "aiohttp", url: "http://127.0.0.1:9220", args: []string{python, script, "9220"}}, nil
}
