package coordinator

import (
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"baton/kvcache"
	"baton/wire"
)

// Whatever was asked before, the answer is the chain; what is remembered stays within its bound.
func TestChainsAreThoseOfKVCache(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var c chains
		var before []wire.Tokens
		for range rapid.IntRange(1, 30).Draw(t, "prompts") {
			// Prompts extend the start of another, or are few tokens in many combinations.
			var prompt wire.Tokens
			if len(before) > 0 && rapid.Bool().Draw(t, "extends") {
				old := rapid.SampledFrom(before).Draw(t, "old")
				prompt = slices.Clone(old[:rapid.IntRange(0, len(old)).Draw(t, "shared")])
			}
			prompt = append(prompt, rapid.SliceOfN(rapid.Int32Range(-1, 1), 0, 40).Draw(t, "more")...)
			before = append(before, prompt)
			var root kvcache.Digest
			root[0] = rapid.Byte().Draw(t, "root") & 1
			size := rapid.SampledFrom([]int{1, 3, 4, 4, 4, 4}).Draw(t, "block size")
			if got, want := c.of(root, size, prompt), kvcache.Chain(root, size, prompt); !slices.Equal(got, want) {
				t.Fatalf("%v in blocks of %d after %x:\n got %x\nwant %x", prompt, size, root[:1], got, want)
			}
		}
	})
}

func ramp(n int, from int32) wire.Tokens {
	p := make(wire.Tokens, n)
	for i := range p {
		p[i] = from + int32(i)
	}
	return p
}

// found is how many digests of a prompt are remembered.
func found(c *chains, size int, prompt wire.Tokens) int {
	places := make([]int, 64)[:5] // prompts of these tests have 16 to 31 blocks
	hashStarts(places, kvcache.Digest{}, size, prompt)
	return len(c.longest(places, kvcache.Digest{}, size, prompt))
}

func TestChainsRememberTurns(t *testing.T) {
	var c chains
	system := ramp(20*32, 0)
	c.of(kvcache.Digest{}, 32, system)
	for turn := range 5 {
		prompt := append(slices.Clip(system), ramp((turn+1)*64, 5000)...)
		if got, want := found(&c, 32, prompt), 20+2*turn; got != want {
			t.Errorf("turn %d: %d blocks are known, want %d", turn, got, want)
		}
		c.of(kvcache.Digest{}, 32, prompt)
		if other := found(&c, 32, append(slices.Clip(system), ramp(200, 9000)...)); other != 20 {
			t.Errorf("turn %d: another conversation finds %d blocks, want the system prompt's 20", turn, other)
		}
	}
	again := c.of(kvcache.Digest{}, 32, slices.Clone(system))
	if n := testing.AllocsPerRun(10, func() { again = c.of(kvcache.Digest{}, 32, system) }); n != 0 || len(again) != 20 {
		t.Errorf("%v allocations for a prompt that is known", n)
	}
}

func TestChainsForget(t *testing.T) {
	var c chains
	first := ramp(1000, 0)
	c.of(kvcache.Digest{}, 32, first)
	for i := range int32(2 * chainTokens / 1000) {
		c.of(kvcache.Digest{}, 32, ramp(1000, 1000*(i+1)))
		if c.tokens > chainTokens || c.tokens < 900 {
			t.Fatalf("%d tokens are remembered", c.tokens)
		}
	}
	if n := found(&c, 32, first); n != 0 {
		t.Errorf("%d blocks of the oldest prompt are known", n)
	}
	total := 0
	for _, r := range c.recent {
		total += len(r.prompt)
	}
	if total != c.tokens || len(c.starts) != chainStarts {
		t.Errorf("%d tokens are remembered, counted as %d", total, c.tokens)
	}
	c.of(kvcache.Digest{}, 32, make(wire.Tokens, chainTokens)) // too long
	if c.tokens != total {
		t.Errorf("%d tokens after a long prompt, %d before it", c.tokens, total)
	}
}

func TestChainsOfManyConnections(t *testing.T) {
	var c chains
	var wg sync.WaitGroup
	for g := range int32(8) {
		wg.Go(func() {
			for i := range int32(200) {
				prompt := append(ramp(500, i%3), ramp(500, 100*g)...)
				if got := c.of(kvcache.Digest{}, 32, prompt); !slices.Equal(got, kvcache.Chain(kvcache.Digest{}, 32, prompt)) {
					t.Error("a wrong chain")
					return
				}
			}
		})
	}
	wg.Wait()
}

// A prompt of 1,000 tokens: hashed, known, and new.
func BenchmarkChains(b *testing.B) {
	var prompts []wire.Tokens
	for i := range int32(1024) {
		prompts = append(prompts, ramp(1000, i<<16))
	}
	var known, fresh chains
	root := kvcache.Digest{}
	for name, f := range map[string]func(wire.Tokens) []kvcache.Digest{
		"hashed": func(p wire.Tokens) []kvcache.Digest { return kvcache.Chain(kvcache.Digest{}, 32, p) },
		"known":  func(p wire.Tokens) []kvcache.Digest { return known.of(kvcache.Digest{}, 32, p) },
		"new": func(p wire.Tokens) []kvcache.Digest {
			d := fresh.of(root, 32, p)
			root = d[len(d)-1]
			return d
		},
	} {
		b.Run(name, func(b *testing.B) {
			i := 0
			for b.Loop() {
				f(prompts[i%len(prompts)])
				i++
			}
		})
	}
}
