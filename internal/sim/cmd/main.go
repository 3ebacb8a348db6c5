// Command cmd runs the simulator over many seeds, or plays one script.
//
//	go run ./internal/sim/cmd -seeds 2000
//	go run ./internal/sim/cmd -seed 17 -seeds 1 -v
//	go run ./internal/sim/cmd -script failing.txt -v
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"baton/internal/sim"
)

func main() {
	first := flag.Uint64("seed", 1, "the first seed")
	seeds := flag.Uint64("seeds", 2000, "how many seeds to run, from -seed on")
	script := flag.String("script", "", "play the script in this file instead")
	verbose := flag.Bool("v", false, "print everything that happens")
	workers := flag.Int("workers", runtime.GOMAXPROCS(0), "how many seeds to run at once")
	shrink := flag.Int("shrink", 500, "how many runs may be spent on making a failing script smaller")
	flag.Parse()
	var err error
	if *script != "" {
		err = playFile(*script, *verbose)
	} else {
		err = search(*first, *seeds, *workers, *shrink, *verbose)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func options(verbose bool) sim.Options {
	if verbose {
		return sim.Options{Trace: os.Stdout}
	}
	return sim.Options{}
}

func playFile(path string, verbose bool) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	s, err := sim.Parse(string(text))
	if err != nil {
		return err
	}
	counts, err := sim.Run(s, options(verbose))
	fmt.Printf("%+v\n", counts)
	return err
}

// search runs seeds until one fails.
func search(first, seeds uint64, workers, shrink int, verbose bool) error {
	began := time.Now()
	if verbose {
		workers = 1
	}
	var (
		next   atomic.Uint64
		mu     sync.Mutex
		failed *sim.Script
		why    error
		total  sim.Counts
		group  sync.WaitGroup
	)
	next.Store(first)
	for range workers {
		group.Go(func() {
			for {
				seed := next.Add(1) - 1
				if seed >= first+seeds {
					return
				}
				s := sim.Generate(seed)
				counts, err := sim.Run(s, options(verbose))
				mu.Lock()
				total.Add(counts)
				if err != nil && (failed == nil || seed < failed.Seed) {
					failed, why = &s, err
					next.Store(first + seeds)
				}
				mu.Unlock()
			}
		})
	}
	group.Wait()
	if failed == nil {
		took := time.Since(began)
		fmt.Printf("%d seeds from %d on without a fault in %v, %v each\n%+v\n", seeds, first, took.Round(time.Millisecond),
			(took * time.Duration(workers) / time.Duration(seeds)).Round(time.Microsecond), total)
		return nil
	}
	report(os.Stdout, *failed, why, shrink)
	return fmt.Errorf("seed %d fails", failed.Seed)
}

func report(w io.Writer, s sim.Script, why error, budget int) {
	fmt.Fprintf(w, "seed %d fails %v\n", s.Seed, why)
	small, why := sim.Shrink(s, why, budget)
	fmt.Fprintf(w, "\nIts script, made smaller, fails %v\nPlay it with: go run ./internal/sim/cmd -v -script FILE\n\n%s", why, small)
}
