package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"baton/frontend/relay"
)

// Flags of a frontend that a relay has no use for, and those that it needs only to make prompts.
var (
	noRelayFlags  = []string{"coordinator", "peer-timeout", "seed", "served-model-name", "tool-parser", "reasoning-parser"}
	tokenizeFlags = []string{"model", "conversations", "conversation-memory", "shadow-rate"}
)

// relayPrefix begins the help of flags that only relays have.
const relayPrefix = "Relay: "

// AfterApply refuses flags that would do nothing.
func (c *frontendCmd) AfterApply(line *kong.Context) error {
	if err := c.outputFlags.AfterApply(); err != nil { // which this one hides
		return err
	}
	for _, p := range line.Path {
		if p.Flag == nil {
			continue
		}
		name := p.Flag.Name
		switch {
		case !c.relaying() && strings.HasPrefix(p.Flag.Help, relayPrefix):
			return fmt.Errorf("--%s is for relays: it takes --decode URL, and --prefill URL for two legs", name)
		case c.relaying() && slices.Contains(noRelayFlags, name):
			return fmt.Errorf("--%s does nothing before engines that are called over HTTP (--prefill, --decode): leave it out", name)
		case c.relaying() && !c.Tokenize && slices.Contains(tokenizeFlags, name):
			return fmt.Errorf("--%s takes --frontend-tokenize in a relay: otherwise engines make the prompts", name)
		}
		if err := c.suits(name); err != nil {
			return err
		}
	}
	return c.check()
}

// engineOnly says which engines a flag of a relay is for.
var engineOnly = map[string][]string{
	"connector": {"vllm"}, "schedule": {"trtllm"}, "strip-history": {"trtllm", "baton"}, "frontend-tokenize": {"trtllm", "baton"},
	"local-prefill-below": {"vllm", "trtllm"},
}

// suits refuses a flag that the engines have no use for.
func (f *relayFlags) suits(flag string) error {
	if of := engineOnly[flag]; of != nil && f.Engine != "auto" && !slices.Contains(of, f.Engine) {
		return fmt.Errorf("--%s is for engines of %s, and --engine is %s", flag, strings.Join(of, " and "), f.Engine)
	}
	return nil
}

// check refuses values that a relay cannot have.
func (f *relayFlags) check() error {
	switch {
	case len(f.Prefill) > 0 && len(f.Decode) == 0:
		return errors.New("--prefill without --decode serves nothing: name decode workers too, or workers that serve whole requests by --decode alone")
	case f.WorkerWait < 0:
		return fmt.Errorf("--worker-wait is %v; it is a time to wait, or 0 for none", f.WorkerWait)
	case f.MaxRetries < 0:
		return fmt.Errorf("--max-retries is %d; it is a number of tries, or 0 for none", f.MaxRetries)
	case f.LocalBelow < 0:
		return fmt.Errorf("--local-prefill-below is %d; it is a number of tokens", f.LocalBelow)
	case f.NodeID < 0 || f.NodeID >= relay.Nodes:
		return fmt.Errorf("--node-id is %d; it is from 0 to %d", f.NodeID, relay.Nodes-1)
	case f.MaxBodies != 0 && f.MaxBodies < f.MaxBody:
		return fmt.Errorf("--max-bodies is less than --max-body, which one request may have: %d and %d bytes", f.MaxBodies, f.MaxBody)
	}
	return nil
}

// configFlags are the flags behind fields of a relay's configuration that only the relay can judge.
var configFlags = map[string]string{"Prefill": "--prefill", "Decode": "--decode"}

// namesFlag makes an error of a relay's configuration speak of flags.
func namesFlag(err error) error {
	var c *relay.ConfigError
	if errors.As(err, &c) && configFlags[c.Field] != "" {
		return fmt.Errorf("%s %w", configFlags[c.Field], c.Err)
	}
	return err
}
