package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"baton/engine"
	"baton/frontend"
	"baton/leg"
	"baton/tracing"
	"baton/wire"
)

// legFlags let an engine take its requests over HTTP.
type legFlags struct {
	outputFlags
	keyFlags
	HTTP        string        `name:"http" placeholder:"ADDR" help:"Take requests over HTTP at this address instead of from a coordinator: single legs (disaggregated_params) with --role prefill and decode, whole ones with --role both."`
	ExportLease time.Duration `default:"60s" help:"With --http: how long the KV of a prompt waits for a decode engine that asks for it."`
}

// defaultCoordinator is where engines look for theirs.
const defaultCoordinator = "127.0.0.1:7000"

// settle checks what an engine takes its requests from, and returns the coordinator's address; empty with --http.
func (f legFlags) settle(coordinator string) (string, error) {
	switch {
	case f.HTTP == "":
		return cmp.Or(coordinator, defaultCoordinator), nil
	case coordinator != "":
		return "", errors.New("--http and --coordinator exclude each other: an engine takes its requests over HTTP or from a coordinator, which each know only their own of its load")
	case f.ExportLease < time.Second:
		return "", fmt.Errorf("--export-lease %v: it must be 1s or more, for decode engines to renew it", f.ExportLease)
	}
	return "", nil
}

// apply sizes an engine that is served over HTTP.
func (f legFlags) apply(c *engine.Config) {
	if f.HTTP == "" {
		return
	}
	c.ExportLease = f.ExportLease
	if c.Role == wire.RoleDecode && c.Continuation == 0 {
		// Nobody would compute a request that it gave back again.
		c.Continuation = -1
	}
}

// httpEngine is a shard's engines behind HTTP.
type httpEngine struct {
	*engineCmd
	env     *environment
	sec     *security
	url     string
	http    net.Listener
	links   net.Listener // of decode engines that claim what a prefill engine exports; nil for others
	address string       // of links
	model   *loaded
	shard   *engine.Shard
	tracer  *tracing.Tracer
}

// overHTTP opens the ports.
func (c *engineCmd) overHTTP(env *environment, sec *security) (h *httpEngine, err error) {
	h = &httpEngine{engineCmd: c, env: env, sec: sec}
	if h.http, h.url, err = sec.listenHTTP("--http", c.HTTP); err != nil {
		return nil, err
	}
	if err := h.listenLinks(); err != nil {
		h.close()
		return nil, err
	}
	return h, nil
}

func (h *httpEngine) listenLinks() error {
	if h.Role != wire.RolePrefill {
		return nil
	}
	if err := h.sec.transfer("--transfer-host", h.TransferHost); err != nil {
		return err
	}
	l, err := net.Listen("tcp", net.JoinHostPort(h.TransferHost, "0"))
	if err != nil {
		return fmt.Errorf("--transfer-host %s: %w", h.TransferHost, err)
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	// Others call the host as it was given: that is what the certificate is for.
	h.links, h.address = l, net.JoinHostPort(h.TransferHost, port)
	return err
}

// close closes the ports. Whoever served them has done so already.
func (h *httpEngine) close() {
	_ = h.http.Close()
	if h.links != nil {
		_ = h.links.Close()
	}
}

// run serves until ctx ends: then requests and exports come to their end first. It closes the shard.
func (h *httpEngine) run(ctx context.Context, model *loaded, shard *engine.Shard, reg *prometheus.Registry) error {
	h.model, h.shard = model, shard
	server, err := h.legs()
	if err != nil {
		return errors.Join(err, shard.Close())
	}
	defer server.Close()
	reg.MustRegister(server.Collector())
	front, err := h.frontend(server, reg)
	if err != nil {
		return errors.Join(err, shard.Close())
	}
	h.env.started()
	fmt.Fprintf(h.env.stdout, "engine at %s\n", h.url)

	group, ctx := errgroup.WithContext(ctx)
	// Engines outlive the requests, and links the engines.
	fleet, stopFleet := context.WithCancel(context.WithoutCancel(ctx))
	linked, stopLinks := context.WithCancel(context.WithoutCancel(ctx))
	defer stopFleet()
	defer stopLinks()
	group.Go(func() error {
		defer stopLinks()
		return runEngines(fleet, []*engine.Shard{shard}, func(_ context.Context, hello wire.Connect) (*wire.Conn, error) { return server.Connect(hello) })
	})
	if h.links != nil {
		group.Go(func() error { return server.Serve(linked, h.links) })
	}
	group.Go(func() error { return serveMetrics(ctx, h.sec, h.Metrics, reg, h.env.log) })
	group.Go(func() error {
		defer stopFleet()
		defer server.Drain()
		return front.Run(ctx, h.http)
	})
	return group.Wait()
}

func (h *httpEngine) legs() (*leg.Server, error) {
	c := leg.ServerConfig{
		Core:   leg.Config{Address: h.address, Lease: h.ExportLease},
		Accept: h.peers(h.sec.server()), Dial: h.peers(h.sec.client()),
		Permit: func(address string) error { return h.sec.permit("a prefill engine's address", address) },
		Logger: h.env.log,
	}
	for _, e := range h.shard.Engines() {
		c.Core.Engines = append(c.Core.Engines, e.Name())
	}
	return leg.NewServer(c)
}

func (h *httpEngine) frontend(server *leg.Server, reg *prometheus.Registry) (*frontend.Server, error) {
	c, err := frontendFlags{outputFlags: h.outputFlags, keyFlags: h.keyFlags}.frontendConfig(h.model, h.env.log)
	if err != nil {
		return nil, err
	}
	c.Backend, c.Registry, c.Tracer = frontend.Legs{Server: server}, reg, h.tracer
	c.ServerInfo = func() any { return h.info(server) }
	return frontend.New(c)
}

// serverInfo is /server_info.
type serverInfo struct {
	Engine        string       `json:"engine"`
	Version       string       `json:"version"`
	Role          string       `json:"role"`
	Model         string       `json:"model"`
	Fingerprint   string       `json:"fingerprint"`
	Shard         string       `json:"shard"`
	Transport     string       `json:"transport,omitempty"`
	WeightVersion uint64       `json:"weight_version"`
	StateFormat   int          `json:"state_format"`
	BlockSize     int          `json:"block_size"`
	KVDType       string       `json:"kv_dtype"`
	MaxModelLen   int          `json:"max_model_len"`
	MaxRequests   int          `json:"max_requests"`
	ExportLease   float64      `json:"export_lease_seconds,omitempty"`
	Engines       []engineInfo `json:"engines"`
	// As TensorRT-LLM's engines describe themselves.
	Disaggregated disaggregatedInfo `json:"disaggregated_params"`
}

// engineInfo is one data-parallel group's engine.
type engineInfo struct {
	Name     string `json:"name"`
	Requests int    `json:"requests"`
	KVBlocks int    `json:"kv_blocks"`
}

type disaggregatedInfo struct {
	DPSize   int      `json:"ctx_dp_size"`
	Endpoint []string `json:"ctx_info_endpoint"`
}

func (h *httpEngine) info(server *leg.Server) serverInfo {
	shape, _ := h.shape() // it was good at the start
	i := serverInfo{
		Engine: "baton", Version: version(), Role: h.Role, Model: h.model.name, Fingerprint: h.model.Fingerprint(),
		Shard: shape.String(), StateFormat: wire.KVStateFormat, MaxRequests: h.MaxRequests, Engines: []engineInfo{},
		Disaggregated: disaggregatedInfo{DPSize: len(h.shard.Engines()), Endpoint: []string{}},
	}
	if h.Role != wire.RoleBoth {
		i.Transport = h.Transfer
	}
	if h.Role == wire.RolePrefill {
		i.ExportLease = h.ExportLease.Seconds()
		i.Disaggregated.Endpoint = append(i.Disaggregated.Endpoint, server.Address())
	}
	status, err := server.Status(h.env.ctx)
	if err != nil {
		return i // it is closing
	}
	i.WeightVersion, i.BlockSize, i.KVDType, i.MaxModelLen = status.WeightVersion, status.Geometry.BlockSize, status.Geometry.KVDType, status.Geometry.MaxSeqLen
	for _, e := range status.Engines {
		i.Engines = append(i.Engines, engineInfo{Name: e.Name, Requests: e.RequestsInUse, KVBlocks: e.Blocks})
	}
	return i
}
