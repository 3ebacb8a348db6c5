//go:build linux

package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"baton/coordinator"
	"baton/internal/rig"
	"baton/wire"
)

// Path is the way of a request from the end of its prefill to its first decode step, through a coordinator, a
// prefill and a decode engine that are processes of their own.
//
// Every request asks for two tokens: prefill samples the first, and the decode engine runs one step, whose
// length it reports. So the time between the tokens at the client is the whole way and that step; the first
// token's travel to the client is left out, which the second one's makes up for.
type Path struct {
	Model     string `json:"model"`
	Transport string `json:"transport"`
	Prompt    int    `json:"prompt_tokens"`
	Requests  int    `json:"requests"`
	Bytes     int64  `json:"bytes"` // of KV, each
	// Medians in milliseconds.
	Between   float64 `json:"between_tokens_ms"` // from the first token to the second
	Step      float64 `json:"decode_step_ms"`
	ByteTime  float64 `json:"byte_time_ms"` // Bytes at the rate of the bare bound
	Transfer  float64 `json:"transfer_ms"`  // what the decode engine says of its copy, with the wait for it
	Handoff   float64 `json:"handoff_ms"`   // what it says of the time from the request's arrival to admission
	Overhead  float64 `json:"overhead_ms"`  // Between without Step and ByteTime
	Overhead1 float64 `json:"overhead_p10_ms"`
	Overhead9 float64 `json:"overhead_p90_ms"`
}

// PathConfig says what is sent which way.
type PathConfig struct {
	Command    rig.Command
	Models     map[string]string // paths, by name
	Transports []string
	Prompt     int // tokens; 256 by default
	Requests   int // measured, for each model and transport
	// Rates are those of the bare ways in bytes a second, by transport: see BoundRates.
	Rates map[string]float64
}

// pathTarget is how much the way may take beyond the bytes, in milliseconds.
const pathTarget = 2

// Handoff measures the path for every model and transport.
func Handoff(ctx context.Context, c PathConfig) (paths []Path, checks []Check, err error) {
	if c.Prompt <= 0 {
		c.Prompt = 256
	}
	for _, name := range slices.Sorted(maps.Keys(c.Models)) {
		for _, transport := range c.Transports {
			p, err := c.measure(ctx, name, c.Models[name], transport)
			if err != nil {
				return paths, checks, fmt.Errorf("bench: %s by %s: %w", name, transport, err)
			}
			paths = append(paths, *p)
			checks = append(checks, Check{
				What: fmt.Sprintf("%s, %s: ms from prefill to decode without bytes and step", name, transport),
				Got:  p.Overhead, Target: pathTarget, AtMost: true,
			})
		}
	}
	return paths, checks, nil
}

var quiet = slog.New(slog.DiscardHandler)

// fleet is one engine of each role and a client of their coordinator.
type fleet struct {
	parts     *rig.Parts
	processes []*rig.Process
	client    *coordinator.Client
	decode    *rig.Engine
}

func (f *fleet) close() error {
	if f.client != nil {
		f.client.Close()
	}
	var errs []error
	for i := len(f.processes) - 1; i >= 0; i-- {
		errs = append(errs, f.processes[i].Stop(10*time.Second))
	}
	f.parts.Close()
	return errors.Join(errs...)
}

func (f *fleet) tails() (s string) {
	for _, p := range f.processes {
		lines := strings.Split(p.Log.Tail(), "\n")
		s += p.Name + ":\n" + strings.Join(lines[max(0, len(lines)-10):], "\n")
	}
	return s
}

func (f *fleet) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	hub, err := f.parts.StartCoordinator(ctx, "127.0.0.1:0")
	if err != nil {
		return err
	}
	f.processes = append(f.processes, hub.Process)
	for _, role := range []string{wire.RolePrefill, wire.RoleDecode} {
		e, err := f.parts.StartEngine(ctx, role, role, hub.Addr)
		if err != nil {
			return err
		}
		f.processes = append(f.processes, e.Process)
		f.decode = e
	}
	f.client, err = coordinator.Dial(ctx, hub.Addr, coordinator.ClientConfig{Name: "bench", Logger: quiet})
	return err
}

func (c PathConfig) measure(ctx context.Context, name, model, transport string) (p *Path, err error) {
	f := &fleet{parts: &rig.Parts{Command: c.Command, Model: model, Transport: transport, Flags: []string{"--kv-memory=16MiB", "--max-seq-len=512"}}}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w; the processes said last:\n%s", err, f.tails())
		}
		err = errors.Join(err, f.close())
	}()
	if err := f.start(ctx); err != nil {
		return nil, err
	}
	status, err := f.client.Status(ctx)
	if err != nil {
		return nil, err
	}
	p = &Path{Model: name, Transport: transport, Prompt: c.Prompt, Requests: c.Requests}
	scraper := &http.Client{Transport: &http.Transport{}}
	defer scraper.CloseIdleConnections()
	const warmUp = 20 // by then every block of the small pool was used once, and its pages are there
	var between, step, move, handoff, overhead []float64
	before := 0.0 // seconds of all the decode engine's steps
	rng := rand.New(rand.NewPCG(1, 1))
	spoilt := 0
	for i := 0; i < warmUp+c.Requests; i++ {
		one, err := c.request(ctx, f.client, rng, status.Geometry.VocabSize)
		var failed *coordinator.RequestError
		if again := errors.Is(err, errSpoilt) || errors.As(err, &failed) && failed.Retryable; again && spoilt < c.Requests/4 && sleep(ctx, time.Second) {
			spoilt++
			i--
			continue
		}
		if err != nil {
			return nil, err
		}
		m, err := rig.Scrape(ctx, scraper, f.decode.Metrics)
		if err != nil {
			return nil, err
		}
		after, ok := m.Sum("baton_engine_step_seconds_sum")
		if !ok {
			return nil, errors.New("the decode engine does not tell how long its steps took")
		}
		stepped := 1e3 * (after - before)
		before = after
		if i < warmUp {
			continue
		}
		p.Bytes = one.stats.BytesMoved
		p.ByteTime = 1e3 * float64(p.Bytes) / c.Rates[transport]
		between, step = append(between, one.between), append(step, stepped)
		move, handoff = append(move, 1e3*one.stats.Transfer), append(handoff, 1e3*one.stats.Handoff)
		overhead = append(overhead, one.between-stepped-p.ByteTime)
	}
	p.Between, p.Step, p.Transfer, p.Handoff = median(between), median(step), median(move), median(handoff)
	p.Overhead, p.Overhead1, p.Overhead9 = median(overhead), quantile(overhead, 0.1), quantile(overhead, 0.9)
	return p, nil
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// errSpoilt is a request that did not go the way that is measured. On a machine that stands still for more than
// a second an engine looks dead, and another leg is run.
var errSpoilt = errors.New("not one handoff")

// sample is one request's.
type sample struct {
	between float64 // milliseconds
	stats   *wire.Stats
}

// request sends a prompt that no engine has seen and takes the time between its two tokens.
func (c PathConfig) request(ctx context.Context, client *coordinator.Client, rng *rand.Rand, vocabulary int) (s sample, err error) {
	prompt := make(wire.Tokens, c.Prompt)
	for i := range prompt {
		prompt[i] = rng.Int32N(int32(vocabulary))
	}
	stream, err := client.Submit(ctx, &wire.SubmitRequest{Prompt: prompt, Sampling: wire.Sampling{MaxTokens: 2, IgnoreEOS: true}})
	if err != nil {
		return s, err
	}
	defer stream.Close()
	var at []time.Time
	for {
		r, err := stream.Next(ctx)
		if err == io.EOF {
			break
		}
		if err != nil {
			return s, err
		}
		for range r.Tokens {
			at = append(at, time.Now())
		}
		if r.Stats != nil {
			s.stats = r.Stats // the last leg's counts
		}
	}
	if len(at) != 2 || s.stats == nil || s.stats.BytesMoved == 0 {
		return s, fmt.Errorf("%w: %d tokens, stats %+v; want two tokens and a handoff", errSpoilt, len(at), s.stats)
	}
	s.between = milliseconds(at[1].Sub(at[0]))
	return s, nil
}
