package main

import (
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"baton/layout"
)

var (
	layoutPairs = flag.Int("pairs", pairsARound, "how many pairs of layouts TestLayouts runs")
	layoutSeed  = flag.Uint64("layout-seed", 1, "from which seed on")
)

// splits are the layouts of a family, and how many pairs of them, of which so many colocated, are played a round.
type splits struct {
	family           string
	pairs, colocated int
	layouts          []string
}

// pairsARound is the sum of the families' pairs. A round has every layout at least once.
const pairsARound = 20

var (
	mixed     = []string{"tp=1", "tp=2", "tp=4", "tp=8", "pp=2", "pp=3,stages=1/2/1", "tp=2,pp=2"}
	sparse    = append(slices.Clone(mixed), "dp=2,ep=2", "tp=2,ep=2,expt_tp=1", "tp=2,dp=4,ep=4,expt_tp=2")
	allSplits = []splits{
		{"llama", 2, 0, []string{"tp=1", "tp=2", "pp=2,stages=1/2"}},
		{"qwen2", 2, 0, []string{"tp=1", "tp=2", "tp=4", "tp=4,pp=2"}},
		{"qwen3", 4, 1, mixed},
		{"qwen3_moe", 6, 2, sparse},
		{"deepseek_v3", 6, 2, sparse},
	}
)

// pair is one way to serve a family.
type pair struct{ family, shards, transport, block, chunk, verify string }

func (p pair) String() string {
	return fmt.Sprintf("%s/%s/%s/block=%s/chunk=%s/verify=%s", p.family, p.shards, p.transport, p.block, p.chunk, p.verify)
}

func (p pair) flags() []string {
	return []string{
		"--shards=" + p.shards, "--transfer=" + p.transport, "--block-size=" + p.block, "--max-tokens=" + p.chunk,
		"--verify-handoff=" + p.verify, "--max-requests=16", "--threads=2", "--kv-memory=32MiB",
	}
}

// deal makes a round of pairs.
func deal(seed uint64) (pairs []pair) {
	rng := rand.New(rand.NewPCG(seed, 0xdea1))
	one := func(of ...string) string { return of[rng.IntN(len(of))] }
	transports := []string{"shm", "tcp", "tcp-push"}
	rng.Shuffle(3, func(i, j int) { transports[i], transports[j] = transports[j], transports[i] })
	for _, s := range allSplits {
		var deck []string
		draw := func() string {
			if len(deck) == 0 {
				for _, i := range rng.Perm(len(s.layouts)) {
					deck = append(deck, s.layouts[i])
				}
			}
			last := len(deck) - 1
			top := deck[last]
			deck = deck[:last]
			return top
		}
		for i := range s.pairs {
			p := pair{
				family: s.family, transport: transports[len(pairs)%3], block: one("16", "32", "64"),
				chunk: one("16", "80", "512"), verify: one("off", "off", "all"),
			}
			if i < s.colocated {
				p.shards = draw()
			} else {
				p.shards = draw() + ",role=prefill+" + draw() + ",role=decode"
			}
			pairs = append(pairs, p)
		}
	}
	return pairs
}

// Whatever layout a prompt is computed in, and in whichever it goes on, transformers' tokens come out, and the bits
// of one rank.
func TestLayouts(t *testing.T) {
	goldens, want := map[string]golden{}, map[string][]bits{}
	for _, s := range allSplits {
		g := readGolden(t, s.family)
		goldens[s.family] = g
		t.Run(s.family+"/one rank", func(t *testing.T) {
			want[s.family] = goldenRun(t, serve(t, goldenPath(s.family), "--shards=tp=1", "--kv-memory=32MiB"), g)
		})
	}
	var pairs []pair
	for seed := *layoutSeed; len(pairs) < *layoutPairs; seed++ {
		pairs = append(pairs, deal(seed)...)
	}
	for _, p := range pairs[:*layoutPairs] {
		t.Run(p.String(), func(t *testing.T) {
			f := serve(t, goldenPath(p.family), p.flags()...)
			sameBits(t, goldenRun(t, f, goldens[p.family]), want[p.family])
			if n := metric(t, f.url, "baton_handoff_corrupt_total"); n != 0 {
				t.Errorf("%v handoffs arrived damaged, and nobody damaged any", n)
			}
			f.awaitRest(t)
		})
	}
}

// A round plays every layout of every family, and every transport.
func TestDealCoversEveryLayout(t *testing.T) {
	for seed := range uint64(50) {
		played := map[string]int{}
		pairs := deal(seed)
		if len(pairs) != pairsARound {
			t.Fatalf("seed %d: %d pairs", seed, len(pairs))
		}
		for _, p := range pairs {
			played[p.transport]++
			shards, err := layout.ParseShards(p.shards)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range shards {
				s.Role = ""
				played[p.family+" "+s.String()]++
			}
		}
		for _, transport := range []string{"shm", "tcp", "tcp-push"} {
			if played[transport] < pairsARound/3 {
				t.Errorf("seed %d: %d pairs over %s", seed, played[transport], transport)
			}
		}
		for _, s := range allSplits {
			for _, spec := range s.layouts {
				shards, err := layout.ParseShards(spec)
				if err != nil {
					t.Fatal(err)
				}
				if played[s.family+" "+shards[0].String()] == 0 {
					t.Errorf("seed %d: %s is not played with %s", seed, s.family, spec)
				}
			}
		}
	}
}

// Engines that share experts compute together, also when all of 16 streams are bound to one of them, and when the
// others' streams have ended: nobody waits for an engine that has nothing to do, and the bits are those of one rank.
func TestUnevenLoad(t *testing.T) {
	const streams = 16
	body := func(i int, session string) map[string]any {
		return map[string]any{
			"prompt": prompt(1+(i*53)%300, uint64(i%5)), "max_tokens": 4 + (i%4)*(i%4)*4, "temperature": 0.8, "seed": i, "ignore_eos": true,
			"conversation_params": map[string]any{"conversation_id": session},
		}
	}
	ask := func(t *testing.T, f *fleet, sessions int) (got [streams][]int32) {
		var all sync.WaitGroup
		for i := range streams {
			all.Go(func() {
				var err error
				if got[i], err = f.stream(t.Context(), body(i, fmt.Sprint(i%sessions)), 1<<30); err != nil {
					t.Errorf("stream %d: %v", i, err)
				}
			})
		}
		all.Wait()
		return got
	}
	want := map[string][streams][]int32{}
	for _, family := range []string{"qwen3_moe", "deepseek_v3"} {
		want[family] = ask(t, serve(t, goldenPath(family), "--shards=tp=1", "--kv-memory=32MiB"), 1)
	}
	for _, tt := range []struct {
		family, shards string
		sessions       int
		busy           int // engines that have anything to do; 0: it depends
	}{
		{"qwen3_moe", "dp=2,ep=2", 1, 1},
		{"qwen3_moe", "dp=2,ep=2,role=prefill+dp=2,ep=2,role=decode", 1, 2},
		{"qwen3_moe", "tp=2,dp=4,ep=4,expt_tp=2", 2, 0},
		{"deepseek_v3", "dp=2,ep=2,role=prefill+dp=2,ep=2,role=decode", 3, 0},
	} {
		t.Run(fmt.Sprintf("%s/%s/sessions=%d", tt.family, tt.shards, tt.sessions), func(t *testing.T) {
			f := serve(t, goldenPath(tt.family), "--shards="+tt.shards, "--routing=session", "--max-requests=16", "--threads=2", "--kv-memory=32MiB")
			for i, got := range ask(t, f, tt.sessions) {
				if alone := want[tt.family][i]; !slices.Equal(got, alone) {
					t.Errorf("stream %d: %v, from one rank %v", i, got, alone)
				}
			}
			f.awaitRest(t)
			busy := 0
			for _, role := range []string{"both_s0", "prefill_s0", "decode_s1"} {
				for dp := range 4 {
					if f.passes(t, fmt.Sprintf("%s_dp%d", role, dp)) > 0 {
						busy++
					}
				}
			}
			if tt.busy > 0 && busy != tt.busy {
				t.Errorf("%d engines had something to do, want %d", busy, tt.busy)
			}
		})
	}
}

// passes is how many an engine has computed; 0 where there is no such engine.
func (f *fleet) passes(t *testing.T, engine string) float64 {
	t.Helper()
	resp, err := f.http().Get(f.url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	n := 0.0
	if _, after, ok := strings.Cut(string(text), `baton_engine_step_seconds_count{engine="`+engine+`"} `); ok {
		if _, err := fmt.Sscan(after, &n); err != nil {
			t.Fatal(err)
		}
	}
	return n
}
