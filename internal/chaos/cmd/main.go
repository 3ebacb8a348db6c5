//go:build unix

// Command cmd drills fleets of real processes; see package chaos.
//
//	go run ./internal/chaos/cmd -seconds 180
//	go run ./internal/chaos/cmd -seconds 30 -transport shm -kind kill,stop -seed 7 -v -logs /tmp/drill
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"baton/internal/chaos"
	"baton/internal/rig"
)

func main() {
	binary := flag.String("binary", "bin/baton", "the program that is drilled")
	model := flag.String("model", "testdata/goldens/qwen3", "its model; token ids of prompts are below 633")
	seconds := flag.Float64("seconds", 180, "how long to disturb, in all")
	transports := flag.String("transport", "shm,tcp,tcp-push", "transfer backends, one fleet each")
	streams := flag.Int("streams", 32, "streams at a time")
	prefill := flag.Int("prefill", 2, "prefill engines")
	decode := flag.Int("decode", 3, "decode engines")
	every := flag.Duration("every", 800*time.Millisecond, "mean time between disturbances")
	only := flag.String("kind", "", "kinds of disturbances, of: "+strings.Join(chaos.Kinds(), ", ")+" (default all)")
	seed := flag.Uint64("seed", 1, "decides what is asked, and what is done to whom")
	logs := flag.String("logs", "", "folder for the processes' logs (default: a temporary one, kept after problems)")
	quick := flag.Bool("quick", false, "do not wait until connections to processes that are gone are dropped")
	verbose := flag.Bool("v", false, "print what happens as it does")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	c := chaos.Config{
		Command: rig.Command{Path: *binary}, Model: *model, Transports: strings.Split(*transports, ","),
		Duration: time.Duration(*seconds * float64(time.Second)), Streams: *streams, Prefill: *prefill, Decode: *decode,
		Every: *every, Seed: *seed, Dir: *logs, Thorough: !*quick, Progress: io.Discard,
		Flags: []string{"--kv-memory=64MiB", "--threads=1"},
	}
	if *only != "" {
		c.Kinds = strings.Split(*only, ",")
	}
	if *verbose {
		c.Progress = os.Stdout
	}
	if err := run(ctx, c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, c chaos.Config) (err error) {
	if c.Dir == "" {
		if c.Dir, err = os.MkdirTemp("", "baton-chaos-"); err != nil {
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
	began := time.Now()
	report, err := chaos.Run(ctx, c)
	if report != nil {
		fmt.Printf("seed %d, %v\n", c.Seed, time.Since(began).Round(time.Second))
		if err := report.Write(os.Stdout); err != nil {
			return err
		}
	}
	if err == nil && !report.OK() {
		err = fmt.Errorf("chaos: there were problems; the logs are in %s", c.Dir)
	}
	return err
}
