//go:build linux

// Command relay measures what a request costs a relay that stands before a pair of stub engines: ours, a bare relay of
// the standard library's that does the same two calls, and others: aiohttp's by itself, the rest by hand.
package main

import (
	"fmt"
	"os"
)

func main() {
	if len(os.Args) < 2 {
		usage()
	}
	commands := map[string]func([]string) error{"stub": stub, "null": null, "baton": baton, "run": run, "compare": compare}
	command, ok := commands[os.Args[1]]
	if !ok {
		usage()
	}
	if err := command(os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "relay:", err)
		os.Exit(1)
	}
}

func usage() {
	fmt.Fprintln(os.Stderr, "usage: relay run|compare|stub|null|baton [flags]; run measures, compare measures what make bench-relay shows, the others are what they start")
	os.Exit(2)
}
