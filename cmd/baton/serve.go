package main

import (
	"context"
	"fmt"
	"io"

	"golang.org/x/sync/errgroup"

	"baton/coordinator"
	"baton/engine"
	"baton/frontend"
	"baton/layout"
	"baton/wire"
)

// serveCmd is everything in one process. The parts talk over the same connections as separate processes
// would, only that these are socket pairs.
type serveCmd struct {
	modelFlags
	engineFlags
	coordinatorFlags
	frontendFlags
	certFlags
	traceFlags
	Shards string `aliases:"inference-shards" default:"tp=1,dp=1,role=prefill+tp=1,dp=1,role=decode" help:"Engines, as in \"tp=1,dp=2,role=prefill+tp=1,dp=2,role=decode\"; without roles they are colocated."`
	Ask    string `placeholder:"QUESTION" help:"Ask the model a question once it is up, and show the answer."`
}

func (c *serveCmd) Run(env *environment) error {
	shards, err := layout.ParseShards(c.Shards)
	if err != nil {
		return fmt.Errorf("--shards: %w", err)
	}
	sec, err := c.secure(env.log)
	if err != nil {
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
	front, err := c.frontendConfig(model, env.log)
	if err != nil {
		return err
	}
	self := sec.selfClient(ownKey(&front.APIKeys))
	core, err := c.coordinatorFlags.config()
	if err != nil {
		return err
	}
	tracer, flush, err := c.tracer(env, "serve", listener.Addr().String())
	if err != nil {
		return err
	}
	defer flush()
	reg := newRegistry()
	hub, err := coordinator.NewServer(coordinator.ServerConfig{Core: core, Logger: env.log, Tracer: tracer})
	if err != nil {
		return err
	}
	defer hub.Close()
	reg.MustRegister(hub.Collector())
	base := c.engineFlags.config(c.modelFlags, model.Checkpoint)
	base.Logger, base.Metrics, base.Tracer = env.log, engine.NewMetrics(reg), tracer
	list, err := engines(env.ctx, shards, base)
	if err != nil {
		return err
	}
	env.started()
	group, ctx := errgroup.WithContext(env.ctx)
	fleet, stopFleet := context.WithCancel(context.WithoutCancel(env.ctx)) // ends after the frontend has drained
	defer stopFleet()
	group.Go(func() error {
		return runEngines(fleet, list, func(_ context.Context, hello wire.Connect) (*wire.Conn, error) { return hub.Connect(hello) })
	})
	client, err := hub.Client(coordinator.ClientConfig{Name: "frontend", Logger: env.log})
	if err != nil {
		return err
	}
	defer client.Close()
	front.Backend, front.Registry, front.Tracer = frontend.Native{Client: client}, reg, tracer
	server, err := frontend.New(front)
	if err != nil {
		return err
	}
	group.Go(func() error {
		defer stopFleet()
		return server.Run(ctx, listener)
	})
	group.Go(func() error {
		if err := awaitReady(ctx, client); err != nil {
			return err
		}
		return c.greet(ctx, env.stdout, self, url, model.tokenizer != nil)
	})
	return group.Wait()
}

// greet asks the first question, and says how to ask the next.
func (c *serveCmd) greet(ctx context.Context, out io.Writer, self selfClient, url string, chat bool) error {
	if c.Ask != "" {
		if err := ask(ctx, out, self, url, c.name(), c.Ask); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "\nServing %s at %s (OpenAI API; /metrics, /health). Stop with Ctrl-C.\n", c.name(), url)
	options := ""
	if c.TLSCert != "" {
		options += " --cacert certs/ca.crt"
	}
	if c.APIKeyFile != "" {
		options += " -H \"Authorization: Bearer $API_KEY\""
	}
	if chat {
		fmt.Fprintf(out, "\n  curl -sN%s %s/v1/chat/completions -H 'Content-Type: application/json' \\\n"+
			"    -d '{\"model\":\"%s\",\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"Tell me about the Moon.\"}]}'\n\n", options, url, c.name())
		return nil
	}
	fmt.Fprintf(out, "\n  curl -s%s %s/v1/completions -H 'Content-Type: application/json' \\\n"+
		"    -d '{\"model\":\"%s\",\"prompt\":[1,2,3],\"max_tokens\":16,\"return_token_ids\":true}'\n\n", options, url, c.name())
	return nil
}

// awaitReady waits until an engine of every role has registered.
func awaitReady(ctx context.Context, client *coordinator.Client) error {
	for {
		status, err := client.Status(ctx)
		if err != nil {
			return err
		}
		if status.Ready {
			return nil
		}
		if err := sleep(ctx); err != nil {
			return err
		}
	}
}
