package main

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"baton/wire"
)

// bits is everything that must not depend on how a model is served, as text.
type bits struct{ greedy, sampled string }

// Every way of serving gives transformers' tokens, log-probabilities within 1e-3 of its own, and the same
// bits as every other way, sampled ones too.
func TestGoldensEveryWay(t *testing.T) {
	for _, model := range []string{"llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"} {
		t.Run(model, func(t *testing.T) {
			blocks, verified, transports := []string{"16", "64"}, []string{"16", "32", "64"}, []string{"shm", "tcp", "tcp-push"}
			switch model {
			case "qwen3_moe": // its cache is qwen3's; what it adds depends on who shares a batch
				blocks, verified, transports = blocks[:1], nil, transports[:2]
			case "deepseek_v3": // its cache has another shape, by every transport
				blocks, verified = blocks[:1], verified[2:]
			}
			g := readGolden(t, model)
			var want []bits
			var wantName string
			check := func(name string, f *fleet) {
				got := goldenRun(t, f, g)
				if want == nil {
					want, wantName = got, name
				}
				for i := range got {
					if got[i] != want[i] {
						t.Errorf("case %d: %s differs from %s:\n%+v\n%+v", i, name, wantName, got[i], want[i])
					}
				}
			}
			for _, block := range blocks {
				for _, chunk := range []string{"512", "64"} {
					flags := []string{"--block-size=" + block, "--max-tokens=" + chunk, "--threads=2", "--kv-memory=64MiB"}
					way := func(name string, start func(t *testing.T) *fleet) {
						name = fmt.Sprintf("%s, blocks of %s, chunks of %s", name, block, chunk)
						t.Run(strings.ReplaceAll(name, ", ", "_"), func(t *testing.T) { check(name, start(t)) })
					}
					way("colocated", func(t *testing.T) *fleet { return serve(t, goldenPath(model), append(flags, "--shards=tp=1")...) })
					for _, transport := range transports {
						with := append(slices.Clone(flags), "--transfer="+transport)
						way("one process "+transport, func(t *testing.T) *fleet { return serve(t, goldenPath(model), with...) })
						way("processes "+transport, func(t *testing.T) *fleet {
							return processes(t, goldenPath(model), []string{wire.RolePrefill, wire.RoleDecode}, with...)
						})
					}
				}
			}
			for _, block := range verified {
				for _, transport := range transports {
					name := fmt.Sprintf("verified %s, blocks of %s", transport, block)
					t.Run(strings.ReplaceAll(name, ", ", "_"), func(t *testing.T) {
						f := serve(t, goldenPath(model), "--verify-handoff=all", "--block-size="+block, "--transfer="+transport,
							"--threads=2", "--kv-memory=64MiB")
						check(name, f)
						if n := metric(t, f.url, "baton_handoff_corrupt_total"); n != 0 {
							t.Errorf("%v handoffs arrived damaged, and nobody damaged any", n)
						}
					})
				}
			}
		})
	}
}

// goldenRun asks a fleet for every case, greedy and sampled, all cases at the same time.
func goldenRun(t *testing.T, f *fleet, g golden) []bits {
	t.Helper()
	out := make([]bits, len(g.Cases))
	var cases sync.WaitGroup
	for i := range g.Cases {
		cases.Go(func() {
			var err error
			if out[i], err = goldenCase(t, f, g, i); err != nil {
				t.Errorf("case %d: %v", i, err)
			}
		})
	}
	cases.Wait()
	return out
}

func goldenCase(t *testing.T, f *fleet, g golden, i int) (bits, error) {
	c := g.Cases[i]
	first, err := f.tryComplete(t.Context(), map[string]any{
		"prompt": c.Prompt, "max_tokens": len(c.Generated), "temperature": 0, "ignore_eos": true, "logprobs": 3, "prompt_logprobs": 0,
	})
	if err != nil {
		return bits{}, err
	}
	got := first.Choices[0]
	if !slices.Equal(got.TokenIDs, c.Generated) {
		t.Errorf("case %d: ids %v, want %v", i, got.TokenIDs, c.Generated)
	}
	for j, lp := range got.Logprobs.TokenLogprobs {
		near(t, fmt.Sprintf("case %d: logprob %d", i, j), lp.String(), c.Logprobs[j])
	}
	if len(got.Logprobs.TokenLogprobs) != len(c.Generated) || len(got.PromptLogprobs) != len(c.Prompt) {
		return bits{}, fmt.Errorf("%d logprobs and %d prompt logprobs, want %d and %d",
			len(got.Logprobs.TokenLogprobs), len(got.PromptLogprobs), len(c.Generated), len(c.Prompt))
	}
	for j := 1; j < len(c.Prompt); j++ {
		lp := got.PromptLogprobs[j][strconv.Itoa(int(c.Prompt[j]))]
		near(t, fmt.Sprintf("case %d: prompt logprob %d", i, j), lp.Logprob.String(), c.PromptLogprobs[j-1])
	}
	second, err := f.tryComplete(t.Context(), map[string]any{
		"prompt": c.Prompt, "max_tokens": len(c.Generated), "temperature": 0.8, "seed": 1234 + i, "ignore_eos": true, "logprobs": 3,
	})
	if err != nil {
		return bits{}, err
	}
	sampled := second.Choices[0]
	return bits{
		greedy:  fmt.Sprint(got.TokenIDs, got.Logprobs, got.PromptLogprobs),
		sampled: fmt.Sprint(sampled.TokenIDs, sampled.Logprobs),
	}, nil
}

func near(t *testing.T, what, got string, want float64) {
	t.Helper()
	v, err := strconv.ParseFloat(got, 64)
	if err != nil || math.Abs(v-want) > 1e-3 {
		t.Errorf("%s is %q, want %v", what, got, want)
	}
}
