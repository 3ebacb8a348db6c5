package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"

	"baton/checkpoint"
	"baton/engine"
	"baton/frontend"
	"baton/layout"
	"baton/text"
	"baton/wire"
)

// loaded is a model that is open.
type loaded struct {
	*checkpoint.Checkpoint
	name      string          // by which clients ask for it
	tokenizer *text.Tokenizer // nil when the model has none
}

// open maps a model and reads its tokenizer.
func (f modelFlags) open(log *slog.Logger) (*loaded, error) {
	ck, err := checkpoint.Open(f.Model)
	if err != nil {
		return nil, err
	}
	log.Info("model opened", "name", f.name(), "what", ck.String())
	return &loaded{Checkpoint: ck, name: f.name()}, nil
}

// openText is open with the tokenizer, for frontends.
func (f modelFlags) openText(log *slog.Logger) (*loaded, error) {
	m, err := f.open(log)
	if err != nil {
		return nil, err
	}
	if g := m.GGUF(); g != nil {
		m.tokenizer, err = text.FromGGUF(g)
	} else {
		m.tokenizer, err = text.Load(f.Model)
	}
	if errors.Is(err, text.ErrNoTokenizer) {
		log.Warn("the model has no tokenizer: only prompts of token ids are served", "model", f.Model)
		return m, nil
	}
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// frontendConfig is an HTTP server's configuration but for its backend and its metrics.
func (f frontendFlags) frontendConfig(m *loaded, log *slog.Logger) (frontend.Config, error) {
	keys, err := f.keys()
	if err != nil {
		return frontend.Config{}, err
	}
	format, err := f.format(m.tokenizer)
	if err != nil {
		return frontend.Config{}, err
	}
	log.Info("answers are read", "tool_parser", format.Tools(), "reasoning_parser", format.Reasoning())
	c := frontend.Config{
		Output: format, Model: m.name, Seed: f.Seed, Logger: log, APIKeys: keys,
		Limits: frontend.Limits{VocabSize: m.Spec.VocabSize},
	}
	if m.tokenizer != nil {
		c.Tokenizer = frontend.NewTokenizer(m.tokenizer)
	}
	return c, nil
}

// maxEngines bounds the engines of one process: each has threads, a KV pool and a connection of its own.
const maxEngines = 64

// engines makes one engine for each data-parallel group of each shard.
func engines(shards []layout.Shard, base engine.Config) (list []*engine.Engine, err error) {
	defer func() {
		if err != nil {
			for _, e := range list {
				err = errors.Join(err, e.Close())
			}
			list = nil
		}
	}()
	total := 0
	for _, s := range shards {
		total += s.DP
	}
	if total > maxEngines {
		return nil, fmt.Errorf("--shards: %d engines (the sum of dp) in one process; at most %d", total, maxEngines)
	}
	for i, s := range shards {
		if s.TP*s.PP*s.EP != 1 {
			return list, fmt.Errorf("--shards: shard %d is %v; this version runs tp=1, pp=1, ep=1 (dp as you like)", i, s)
		}
		for dp := range s.DP {
			c := base
			c.Role = cmp.Or(s.Role, wire.RoleBoth)
			c.Name = fmt.Sprintf("%s_s%d_dp%d", c.Role, i, dp)
			e, err := engine.New(c)
			if err != nil {
				return list, err
			}
			list = append(list, e)
		}
	}
	return list, nil
}

// runEngines runs engines until ctx ends or one of them fails, and closes them.
func runEngines(ctx context.Context, list []*engine.Engine, dial engine.Dialer) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, e := range list {
		group.Go(func() error { return e.Run(ctx, dial) })
	}
	err := group.Wait()
	for _, e := range list {
		err = errors.Join(err, e.Close())
	}
	return err
}

// newRegistry is a registry with the process's own series.
func newRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// serveMetrics answers /metrics and /health on addr until ctx ends. An empty addr serves nothing.
func serveMetrics(ctx context.Context, sec *security, addr string, reg *prometheus.Registry, log *slog.Logger) error {
	if addr == "" {
		return nil
	}
	l, url, err := sec.listenHTTP("--metrics", addr)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	log.Info("metrics", "address", url+"/metrics")
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
