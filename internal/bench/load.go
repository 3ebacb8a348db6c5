//go:build linux

package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"baton/internal/rig"
)

// Load is what a coordinator process did with requests of stub engines.
type Load struct {
	What     string `json:"what"`
	Requests int    `json:"requests"`
	Prompt   int    `json:"prompt_tokens"`
	Tokens   int    `json:"tokens"` // generated, each
	// CPUSeconds are the coordinator's, in all its threads.
	CPUSeconds float64 `json:"cpu_seconds"`
	Rate       float64 `json:"requests_per_cpu_second"`
	Wall       float64 `json:"wall_seconds"`
	RSS        []int64 `json:"rss_bytes,omitempty"` // at even distances
}

// LoadConfig says how much is asked of the coordinator.
type LoadConfig struct {
	Command  rig.Command
	Requests int // for each variant
	Soak     int // requests of a longer run whose memory is watched; 0 for none
	Prompt   int // tokens; 1000 by default
}

// loadTarget is how many requests a second of CPU must do.
const loadTarget = 20_000

// memoryTarget is by how much the memory of a soak's second half may exceed that of its second quarter.
const memoryTarget = 1.1

// Coordinator measures a coordinator process between a client and stub engines.
func Coordinator(ctx context.Context, c LoadConfig) (loads []Load, checks []Check, err error) {
	if c.Prompt <= 0 {
		c.Prompt = 1000
	}
	variants := []struct {
		name    string
		level   string // of the coordinator's log
		traffic traffic
		target  bool
	}{
		{"one prefill, one decode engine", "warn", traffic{tokens: 4}, true},
		{"with prompts that have nothing in common", "warn", traffic{tokens: 4, fresh: true}, false},
		{"with a log line a request", "info", traffic{tokens: 4}, false},
		{"with residency events", "warn", traffic{tokens: 4, events: true}, false},
		{"64 tokens a request", "warn", traffic{tokens: 64}, false},
	}
	for _, v := range variants {
		l, err := c.run(ctx, v.level, v.traffic, c.Requests, 0)
		if err != nil {
			return loads, checks, fmt.Errorf("bench: coordinator, %s: %w", v.name, err)
		}
		l.What = v.name
		loads = append(loads, *l)
		if v.target {
			checks = append(checks, Check{What: "coordinator process: requests a CPU-second", Got: l.Rate, Target: loadTarget})
		}
	}
	if c.Soak == 0 {
		return loads, checks, nil
	}
	const samples = 40
	l, err := c.run(ctx, "warn", traffic{tokens: 4, events: true}, c.Soak, samples)
	if err != nil {
		return loads, checks, fmt.Errorf("bench: soak: %w", err)
	}
	l.What = "soak, with residency events"
	loads = append(loads, *l)
	quarter := slices.Clone(l.RSS[samples/4 : samples/2])
	half := slices.Clone(l.RSS[samples/2:])
	checks = append(checks, Check{
		What: "memory of a soak's second half to that of its second quarter", AtMost: true,
		Got: float64(median(half)) / float64(median(quarter)), Target: memoryTarget,
	})
	return loads, checks, nil
}

// run starts a coordinator and sends requests through it. The first tenth is not measured.
func (c LoadConfig) run(ctx context.Context, logLevel string, t traffic, requests, samples int) (l *Load, err error) {
	parts := &rig.Parts{Command: c.Command}
	defer parts.Close()
	starting, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	hub, err := parts.StartBareCoordinator(starting, logLevel)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, hub.Stop(10*time.Second)) }()
	t.prompt = c.Prompt
	w, err := connect(ctx, hub.Addr, t)
	if err != nil {
		return nil, err
	}
	defer w.close()
	if err := w.run(ctx, requests/10); err != nil {
		return nil, err
	}
	before, err := hub.Resources()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	l = &Load{Requests: requests, Prompt: t.prompt, Tokens: t.tokens}
	for i := range max(samples, 1) {
		n := max(samples, 1)
		if err := w.run(ctx, requests*(i+1)/n-requests*i/n); err != nil {
			return nil, err
		}
		now, err := hub.Resources()
		if err != nil {
			return nil, err
		}
		if samples > 0 {
			l.RSS = append(l.RSS, now.RSS)
		}
		l.CPUSeconds = (now.CPU - before.CPU).Seconds()
	}
	l.Wall = time.Since(began).Seconds()
	l.Rate = float64(requests) / l.CPUSeconds
	return l, nil
}
