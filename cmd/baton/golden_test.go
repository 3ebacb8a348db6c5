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

// Engines in processes of their own give transformers' tokens, log-probabilities within 1e-3 of its own, and the bits
// of one engine in this one, sampled ones too. TestLayouts has all the ways of one process.
func TestGoldensInProcesses(t *testing.T) {
	for _, family := range []struct{ model, transports string }{
		{"llama", "shm tcp tcp-push"}, {"qwen2", "tcp"}, {"qwen3", "shm"}, {"qwen3_moe", "tcp-push"},
		{"deepseek_v3", "shm tcp tcp-push"}, // its cache has another shape
	} {
		g := readGolden(t, family.model)
		want := goldenRun(t, serve(t, goldenPath(family.model), "--shards=tp=1", "--kv-memory=64MiB"), g)
		for i, transport := range strings.Fields(family.transports) {
			block, chunk := []string{"16", "64", "32"}[i], []string{"64", "512", "100"}[i]
			t.Run(family.model+"/"+transport, func(t *testing.T) {
				got := goldenRun(t, processes(t, goldenPath(family.model), []string{wire.RolePrefill, wire.RoleDecode},
					"--transfer="+transport, "--block-size="+block, "--max-tokens="+chunk, "--threads=2", "--kv-memory=64MiB"), g)
				sameBits(t, got, want)
			})
		}
	}
}

func sameBits(t *testing.T, got, want []bits) {
	t.Helper()
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("case %d differs from one engine of one rank:\n%+v\n%+v", i, got[i], want[i])
		}
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
