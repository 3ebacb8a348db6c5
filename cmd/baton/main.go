// Command baton serves large language models with prefill and decode on separate engines.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"
)

// cli is the whole command line; kong makes the help from the tags.
type cli struct {
	Serve       serveCmd       `cmd:"" help:"Serve a model: coordinator, engines and HTTP frontend in one process."`
	Coordinator coordinatorCmd `cmd:"" help:"Run the coordinator: it routes requests and carries their handoffs' messages."`
	Engine      engineCmd      `cmd:"" help:"Run one shard's engines: prefill, decode, or both."`
	Frontend    frontendCmd    `cmd:"" help:"Run the OpenAI-compatible HTTP frontend of a coordinator."`
	Bench       benchCmd       `cmd:"" help:"Put load on a server that speaks the OpenAI API, and measure what its clients see."`
	Doctor      doctorCmd      `cmd:"" help:"Look at servers: what runs there, how they hand KV over, and whether they do."`
	Inspect     inspectCmd     `cmd:"" help:"Show what a model file or folder holds and what an engine would make of it."`
	Certs       certsCmd       `cmd:"" help:"Make a local certificate authority and certificates for TLS between processes."`
	Version     versionCmd     `cmd:"" help:"Print the version."`

	LogLevel slog.Level `help:"Least severe log lines to show: debug, info, warn, error. Default: ${default}." default:"info" placeholder:"LEVEL"`
	LogJSON  bool       `name:"log-json" help:"Log lines as JSON."`
}

const description = `Serves large language models with prefill and decode on separate engines.

Everything in one process, with one prefill and one decode engine:

  baton serve --model model.gguf

The same pieces as separate processes, on one host or several:

  baton coordinator --listen 127.0.0.1:7000
  baton engine --role prefill --model model.gguf --coordinator 127.0.0.1:7000
  baton engine --role decode  --model model.gguf --coordinator 127.0.0.1:7000
  baton frontend --model model.gguf --coordinator 127.0.0.1:7000 --listen 127.0.0.1:8000

A model is a folder with config.json and safetensors files (and tokenizer.json), or a .gguf file.`

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run is main with its surroundings as arguments. Exit codes: 0 success (or a stop that was asked for),
// 1 failure, 2 a wrong command line.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal does not wait for what drains
	return runContext(ctx, args, stdout, stderr)
}

func runContext(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var c cli
	exit := -1
	parser, err := kong.New(&c,
		kong.Name("baton"), kong.Description(description), kong.Writers(stdout, stderr),
		kong.Exit(func(code int) { exit = code }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true}),
		kong.ValueFormatter(func(v *kong.Value) string { return kong.DefaultHelpValueFormatter(v) }),
	)
	if err != nil {
		fmt.Fprintln(stderr, "baton:", err)
		return 2
	}
	parsed, err := parser.Parse(args)
	if exit >= 0 { // --help was shown
		return exit
	}
	if err != nil {
		fmt.Fprintf(stderr, "baton: %v\nTry: baton --help\n", err)
		return 2
	}
	log, lines := newLogger(stderr, c.LogLevel, c.LogJSON)
	env := &environment{ctx: ctx, stdout: stdout, log: log, up: make(chan struct{})}
	err = env.run(parsed.Run)
	lines.Flush()
	if err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(stderr, "baton:", err)
		return 1
	}
	return 0
}

// environment is what commands get from main.
type environment struct {
	ctx    context.Context
	stdout io.Writer
	log    *slog.Logger
	up     chan struct{} // closed by started
}

// started says that others may know of this process now: from here on it does not end without taking leave.
func (env *environment) started() { close(env.up) }

// run runs a command. One that is interrupted before it has started is not waited for: loading a model takes
// long, and nothing is lost.
func (env *environment) run(command func(...any) error) error {
	ended := make(chan error, 1)
	go func() { ended <- command(env) }()
	select {
	case err := <-ended:
		return err
	case <-env.up:
	case <-env.ctx.Done():
		select {
		case <-env.up:
		default:
			return env.ctx.Err()
		}
	}
	return <-ended
}
