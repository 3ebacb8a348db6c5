package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"baton/coordinator"
	"baton/engine"
	"baton/frontend"
	"baton/transfer/shm"
	"baton/wire"
)

// coordinatorCmd is the coordinator alone.
type coordinatorCmd struct {
	coordinatorFlags
	tlsFlags
	peerFlags
	traceFlags
	Listen  string `default:"127.0.0.1:7000" help:"Address for engines and frontends."`
	Metrics string `placeholder:"ADDR" help:"Also serve /metrics at this address."`
}

func (c *coordinatorCmd) Run(env *environment) error {
	sec, err := c.secure("coordinator", env.log)
	if err != nil {
		return err
	}
	listener, err := sec.listen("--listen", c.Listen)
	if err != nil {
		return err
	}
	defer listener.Close()
	core, err := c.config()
	if err != nil {
		return err
	}
	reg := newRegistry()
	tracer, flush, err := c.tracer(env, "coordinator", listener.Addr().String())
	if err != nil {
		return err
	}
	defer flush()
	hub, err := coordinator.NewServer(coordinator.ServerConfig{Core: core, Logger: env.log, Tracer: tracer, Wire: c.peers(sec.server())})
	if err != nil {
		return err
	}
	defer hub.Close()
	reg.MustRegister(hub.Collector())
	ctx, stop := context.WithCancel(env.ctx)
	defer stop()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return hub.Serve(ctx, listener) })
	group.Go(func() error { return serveMetrics(ctx, sec, c.Metrics, reg, env.log) })
	group.Go(func() error {
		select {
		case <-hub.Exit():
			stop() // a client asked for it
			return nil
		case <-ctx.Done():
		}
		env.log.Info("draining", "at_most", time.Duration(c.DrainWait))
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Duration(c.DrainWait))
		defer cancel()
		if err := hub.Shutdown(drain); err != nil {
			env.log.Warn("requests were cut off", "after", time.Duration(c.DrainWait))
		}
		env.log.Info("drained")
		return nil
	})
	env.started()
	fmt.Fprintf(env.stdout, "coordinator at %s\n", listener.Addr())
	return group.Wait()
}

// engineCmd is one shard's engines: one for each data-parallel group.
type engineCmd struct {
	modelFlags
	engineFlags
	tlsFlags
	peerFlags
	rankFlags
	legFlags
	traceFlags
	Role         string `enum:"prefill,decode,both" default:"both" help:"What the engine does: ${enum}."`
	Coordinator  string `placeholder:"ADDR" help:"Address of the coordinator. Default: 127.0.0.1:7000. Not with --http."`
	Name         string `placeholder:"NAME" help:"Name of the engine, unique at its coordinator. Default: the role and a random number."`
	TransferHost string `default:"127.0.0.1" placeholder:"HOST" help:"Address at which other hosts reach this one's KV (tcp, tcp-push) and ranks."`
	Metrics      string `placeholder:"ADDR" help:"Also serve /metrics at this address."`
}

func (c *engineCmd) Run(env *environment) error {
	shape, err := c.shape()
	if err != nil {
		return err
	}
	placement, err := c.placement(shape.Ranks())
	if err != nil {
		return err
	}
	sec, err := c.secure("engine", env.log)
	if err != nil {
		return err
	}
	if c.Coordinator, err = c.settle(c.Coordinator); err != nil {
		return err
	}
	if c.Coordinator != "" {
		if err := sec.reach("--coordinator", c.Coordinator); err != nil {
			return err
		}
	}
	if c.Transfer != shm.Name && c.Role != wire.RoleBoth {
		if err := sec.transfer("--transfer-host", c.TransferHost); err != nil {
			return err
		}
	}
	open := c.open
	var over *httpEngine
	if c.HTTP != "" && (placement == nil || placement.Ranks[0] == 0) {
		if over, err = c.overHTTP(env, sec); err != nil {
			return err
		}
		defer over.close()
		open = c.openText
	}
	model, err := open(env.log)
	if err != nil {
		return err
	}
	defer model.Close()
	reg := newRegistry()
	base := c.config(c.modelFlags, model.Checkpoint)
	name := c.engineName()
	tracer, flush, err := c.tracer(env, "engine", name)
	if err != nil {
		return err
	}
	defer flush()
	if over != nil {
		over.tracer = tracer
	}
	base.Logger, base.Metrics, base.Tracer, base.TransferHost = env.log, engine.NewMetrics(reg), tracer, c.TransferHost
	base.TransferTLS = sec.id
	base.Role, base.Name, base.Shard, base.Placement = c.Role, name, shape, placement
	c.apply(&base)
	reg.MustRegister(base.Metrics.Aliases(c.name()))
	if placement != nil {
		if err := c.secureRanks(sec, placement); err != nil {
			return err
		}
		if !placement.Leads() {
			return c.follow(env, sec, base, reg)
		}
	}
	shard, err := engine.Open(env.ctx, base)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(env.ctx)
	defer stop()
	go func() {
		select {
		case <-shard.Leaving():
			stop()
		case <-ctx.Done():
		}
	}()
	if over != nil {
		return over.run(ctx, model, shard, reg)
	}
	env.started()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return runEngines(ctx, []*engine.Shard{shard}, func(ctx context.Context, hello wire.Connect) (*wire.Conn, error) {
			conn, _, err := wire.Dial(ctx, "tcp", c.Coordinator, hello, c.peers(sec.client()))
			return conn, err
		})
	})
	group.Go(func() error { return serveMetrics(ctx, sec, c.Metrics, reg, env.log) })
	return group.Wait()
}

func (c *engineCmd) engineName() string {
	if c.Name != "" {
		return c.Name
	}
	return fmt.Sprintf("%s_%06x", c.Role, coordinator.Incarnation()>>40)
}

// frontendCmd is the HTTP frontend alone.
type frontendCmd struct {
	frontendModelFlags
	relayFlags
	frontendFlags
	tlsFlags
	peerFlags
	traceFlags
	Coordinator string `default:"127.0.0.1:7000" placeholder:"ADDR" help:"Address of the coordinator. Default: ${default}."`
}

func (c *frontendCmd) Run(env *environment) error {
	sec, err := c.secure("frontend", env.log)
	if err != nil {
		return err
	}
	if c.relaying() {
		tracer, flush, err := c.tracer(env, "relay", c.Listen)
		if err != nil {
			return err
		}
		defer flush()
		return c.relay(env, sec, tracer, c.Model, c.frontendFlags)
	}
	if c.Model == "" {
		return errNoModel
	}
	if err := sec.reach("--coordinator", c.Coordinator); err != nil {
		return err
	}
	listener, url, err := sec.listenHTTP("--listen", c.Listen)
	if err != nil {
		return err
	}
	defer listener.Close()
	model, err := c.openText(env.log)
	if err != nil {
		return err
	}
	defer model.Close()
	config, err := c.frontendConfig(model, env.log)
	if err != nil {
		return err
	}
	tracer, flush, err := c.tracer(env, "frontend", listener.Addr().String())
	if err != nil {
		return err
	}
	defer flush()
	client := coordinator.Open(c.Coordinator, coordinator.ClientConfig{
		Name: "frontend " + listener.Addr().String(), Logger: env.log, Wire: c.peers(sec.client()),
		Model: model.name, Fingerprint: model.Fingerprint(),
	})
	defer client.Close()
	config.Backend, config.Registry, config.Tracer = frontend.Native{Client: client}, newRegistry(), tracer
	server, err := frontend.New(config)
	if err != nil {
		return err
	}
	env.started()
	fmt.Fprintf(env.stdout, "frontend at %s\n", url)
	group, ctx := errgroup.WithContext(env.ctx)
	ctx, stop := context.WithCancel(ctx)
	group.Go(func() error {
		defer stop()
		return server.Run(ctx, listener)
	})
	group.Go(func() error { // a refusal of the first connection is final
		select {
		case <-client.Done():
			return client.Err()
		case <-ctx.Done():
			return nil
		}
	})
	return group.Wait()
}

// sleep waits a moment between two looks at something.
func sleep(ctx context.Context) error {
	select {
	case <-time.After(20 * time.Millisecond):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// versionCmd prints what this binary is.
type versionCmd struct{}

func (versionCmd) Run(env *environment) error {
	fmt.Fprintln(env.stdout, version())
	return nil
}
