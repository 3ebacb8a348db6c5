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
		Limits: frontend.Limits{VocabSize: m.Spec.VocabSize}, Conversations: f.limits(), ShadowRate: f.shadowRate(0),
	}
	if m.tokenizer != nil {
		c.Tokenizer = frontend.NewTokenizer(m.tokenizer)
	}
	return c, nil
}

// maxRanks bounds the ranks of one process: each has threads, a part of a KV pool and workspaces of its own.
const maxRanks = 64

// checkShards says why a process could not serve a model in shards like these.
func checkShards(ck *checkpoint.Checkpoint, shards []layout.Shard) error {
	total := 0
	for i, s := range shards {
		if err := ck.CheckShard(s); err != nil {
			return fmt.Errorf("--shards: shard %d: %w", i, err)
		}
		total += s.Ranks()
	}
	if total > maxRanks {
		return fmt.Errorf("--shards: %d ranks (tp·pp·dp, over all shards) in one process; at most %d", total, maxRanks)
	}
	return nil
}

// engines opens every shard's engines, one a data-parallel group.
func engines(ctx context.Context, shards []layout.Shard, base engine.Config) (list []*engine.Shard, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, closeAll(list))
			list = nil
		}
	}()
	if err := checkShards(base.Checkpoint, shards); err != nil {
		return nil, err
	}
	for i, s := range shards {
		c := base
		c.Shard, c.Role = s, cmp.Or(s.Role, wire.RoleBoth)
		c.Name = fmt.Sprintf("%s_s%d", c.Role, i)
		if s.DP == 1 {
			c.Name += "_dp0"
		}
		shard, err := engine.Open(ctx, c)
		if err != nil {
			return list, fmt.Errorf("--shards: shard %d: %w", i, err)
		}
		list = append(list, shard)
	}
	return list, nil
}

// runEngines runs engines until ctx ends or one of them fails, and closes them.
func runEngines(ctx context.Context, list []*engine.Shard, dial engine.Dialer) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, s := range list {
		group.Go(func() error { return s.Run(ctx, dial) })
	}
	return errors.Join(group.Wait(), closeAll(list))
}

func closeAll(list []*engine.Shard) error {
	var errs []error
	for _, s := range list {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
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
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug), // strangers' failed handshakes, mostly
	}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	log.Info("metrics", "address", url+"/metrics")
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
