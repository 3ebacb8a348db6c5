//go:build linux

// Command cmd measures the handoff; see package bench.
//
//	go run ./internal/bench/cmd
//	go run ./internal/bench/cmd -only coordinator -soak 1000000 -json
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"baton/internal/bench"
	"baton/internal/rig"
	"baton/transfer/backends"
)

var parts = []string{"data", "path", "coordinator"}

func main() {
	binary := flag.String("binary", "bin/baton", "the program")
	models := flag.String("models", "", "paths of models for the path, separated by commas (default: a small one that comes along, and SmolLM2 if it is in the cache)")
	only := flag.String("only", "", "measure only these of "+strings.Join(parts, ", "))
	seconds := flag.Float64("seconds", 8, "how long each shape of the data phase is measured")
	requests := flag.Int("requests", 40, "requests for each model and transport of the path")
	load := flag.Int("load", 60_000, "requests through the coordinator, each variant")
	soak := flag.Int("soak", 0, "requests of a run in which the coordinator's memory is watched")
	asJSON := flag.Bool("json", false, "print JSON")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	m := &measurement{
		command: rig.Command{Path: *binary}, wanted: parts,
		data: bench.DataConfig{
			Threads: min(4, runtime.GOMAXPROCS(0)), Streams: 4, For: time.Duration(*seconds * float64(time.Second)),
		},
		models: named(*models), requests: *requests,
		load: bench.LoadConfig{Command: rig.Command{Path: *binary}, Requests: *load, Soak: *soak},
	}
	if *only != "" {
		m.wanted = strings.Split(*only, ",")
	}
	report, err := m.run(ctx)
	if *asJSON {
		err = errors.Join(err, json.NewEncoder(os.Stdout).Encode(report))
	} else {
		err = errors.Join(err, report.Write(os.Stdout))
	}
	if err == nil && slices.ContainsFunc(report.Checks, func(c bench.Check) bool { return !c.OK() }) {
		err = fmt.Errorf("bench: targets were missed; on a machine that others use, see whether they are missed again")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// named are models by the last element of their path.
func named(list string) map[string]string {
	models := make(map[string]string)
	for path := range strings.SplitSeq(list, ",") {
		if path != "" {
			models[filepath.Base(path)] = path
		}
	}
	if len(models) > 0 {
		return models
	}
	models["qwen3"] = filepath.Join("testdata", "goldens", "qwen3")
	cache := os.Getenv("BATON_CACHE")
	if home, err := os.UserHomeDir(); cache == "" && err == nil {
		cache = filepath.Join(home, ".cache", "baton")
	}
	if path := filepath.Join(cache, "SmolLM2-135M-Instruct.Q4_1.gguf"); exists(path) {
		models["SmolLM2-135M"] = path
	}
	return models
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

type measurement struct {
	command  rig.Command
	wanted   []string
	data     bench.DataConfig
	models   map[string]string
	requests int
	load     bench.LoadConfig
}

// run measures what is wanted. After a failure the report holds what was measured before it.
func (m *measurement) run(ctx context.Context) (*bench.Report, error) {
	r := new(bench.Report)
	var checks []bench.Check
	var err error
	want := func(part string) bool { return slices.Contains(m.wanted, part) }
	if want("data") || want("path") {
		if r.Data, checks, err = bench.Data(ctx, m.data); want("data") {
			r.Checks = append(r.Checks, checks...)
		}
		if err != nil {
			return r, err
		}
	}
	if want("path") {
		r.Path, checks, err = bench.Handoff(ctx, bench.PathConfig{
			Command: m.command, Models: m.models, Transports: backends.Names, Requests: m.requests, Rates: bench.BoundRates(r.Data),
		})
		r.Checks = append(r.Checks, checks...)
		if err != nil {
			return r, err
		}
	}
	if want("coordinator") {
		r.Coordinator, checks, err = bench.Coordinator(ctx, m.load)
		r.Checks = append(r.Checks, checks...)
	}
	return r, err
}
