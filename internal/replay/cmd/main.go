//go:build unix

// Command cmd plays agents' sessions against a fleet that is disturbed; see package replay.
//
//	go run ./internal/replay/cmd
//	go run ./internal/replay/cmd -sessions 8 -turns 5 -verify -v
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"baton/internal/replay"
)

func main() {
	var c replay.Config
	flag.StringVar(&c.Command.Path, "binary", "bin/baton", "the program that is played against")
	flag.IntVar(&c.Sessions, "sessions", 64, "agents, all at once")
	flag.IntVar(&c.Turns, "turns", 20, "turns of each")
	flag.IntVar(&c.Prefix, "prefix", 3000, "tokens that all sessions begin with")
	flag.IntVar(&c.New, "new", 336, "tokens that each turn adds")
	flag.IntVar(&c.Output, "output", 64, "tokens of each answer")
	flag.DurationVar(&c.Think, "think", 0, "time between an answer and the next turn")
	flag.BoolVar(&c.Relay, "relay", false, "the frontend relays between engines that are called over HTTP, without a coordinator")
	flag.StringVar(&c.Routing, "routing", "session", "the coordinator's, when there is one")
	flag.IntVar(&c.Prefill, "prefill", 2, "prefill engines")
	flag.IntVar(&c.Decode, "decode", 2, "decode engines")
	flag.Float64Var(&c.Share, "share", 0.5, "share of the working set that the caches of a role hold together")
	flag.Float64Var(&c.KillAt, "kill", 0.4, "share of the turns after which a prefill engine is killed")
	flag.Float64Var(&c.Restart, "restart", 0.6, "share of the turns after which the frontend is")
	flag.IntVar(&c.Overtake, "overtake", 0, "how many requests may begin before an earlier one, because more of theirs is cached")
	flag.BoolVar(&c.Verify, "verify", false, "compare every answer with an undisturbed server's")
	flag.Uint64Var(&c.Seed, "seed", 1, "decides the model and what is asked")
	flag.StringVar(&c.Dir, "logs", "", "folder for the model and the processes' logs (default: a temporary one, kept after problems)")
	verbose := flag.Bool("v", false, "print what happens as it does")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	c.Progress = io.Discard
	if *verbose {
		c.Progress = os.Stdout
	}
	if err := run(ctx, c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, c replay.Config) (err error) {
	if c.Dir == "" {
		if c.Dir, err = replay.TempDir(); err != nil {
			return err
		}
		defer func() {
			if err == nil {
				err = os.RemoveAll(c.Dir)
			}
		}()
	} else if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return err
	}
	report, err := replay.Run(ctx, c)
	if report != nil {
		if err := report.Write(os.Stdout); err != nil {
			return err
		}
	}
	if err == nil {
		err = report.Err()
	}
	if err != nil {
		err = fmt.Errorf("%w; the logs are in %s", err, c.Dir)
	}
	return err
}
