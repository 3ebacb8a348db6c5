package engine

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"baton/wire"
)

// The known-answer vectors published with Random123.
func TestPhiloxKnownAnswers(t *testing.T) {
	ones := uint32(math.MaxUint32)
	for _, tc := range []struct {
		counter [4]uint32
		key     [2]uint32
		want    [4]uint32
	}{
		{[4]uint32{}, [2]uint32{}, [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
		{[4]uint32{ones, ones, ones, ones}, [2]uint32{ones, ones}, [4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
		{
			[4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [2]uint32{0xa4093822, 0x299f31d0},
			[4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
		},
	} {
		if got := philox(tc.counter, tc.key); got != tc.want {
			t.Errorf("philox(%x, %x) = %x, want %x", tc.counter, tc.key, got, tc.want)
		}
	}
}

func TestUniformDependsOnEachPart(t *testing.T) {
	seen := map[float64]bool{}
	for seed := range uint64(10) {
		for choice := range 10 {
			for position := range 100 {
				u := uniform(seed, choice, position)
				if u < 0 || u >= 1 || seen[u] {
					t.Fatalf("uniform(%d, %d, %d) = %v: out of range or repeated", seed, choice, position, u)
				}
				seen[u] = true
			}
		}
	}
}

func logitsOf(probabilities ...float64) []float32 {
	out := make([]float32, len(probabilities))
	for i, p := range probabilities {
		out[i] = float32(math.Log(p))
	}
	return out
}

// support samples many times and returns how often each id came.
func support(t *testing.T, logits []float32, p wire.Sampling) []float64 {
	t.Helper()
	const n = 20000
	var s sampler
	before := slices.Clone(logits)
	counts := make([]float64, len(logits))
	for seed := range uint64(n) {
		p.Seed = seed
		counts[s.sample(logits, draw{params: &p, prompt: []int32{0}}).Token] += 1.0 / n
	}
	if !slices.Equal(before, logits) {
		t.Fatal("sample changed its input")
	}
	return counts
}

func TestDistributions(t *testing.T) {
	base := []float64{0.4, 0.3, 0.2, 0.06, 0.04}
	for _, tc := range []struct {
		name string
		p    wire.Sampling
		want []float64
	}{
		{"plain", wire.Sampling{Temperature: 1}, base},
		{"greedy", wire.Sampling{}, []float64{1, 0, 0, 0, 0}},
		{"top-k 2", wire.Sampling{Temperature: 1, TopK: 2}, []float64{4. / 7, 3. / 7, 0, 0, 0}},
		{"top-k 1", wire.Sampling{Temperature: 2, TopK: 1}, []float64{1, 0, 0, 0, 0}},
		{"top-p 0.65 keeps the token that crosses", wire.Sampling{Temperature: 1, TopP: 0.65}, []float64{4. / 7, 3. / 7, 0, 0, 0}},
		{"top-p 0.75", wire.Sampling{Temperature: 1, TopP: 0.75}, []float64{4. / 9, 3. / 9, 2. / 9, 0, 0}},
		{"min-p 0.4", wire.Sampling{Temperature: 1, MinP: 0.4}, []float64{4. / 9, 3. / 9, 2. / 9, 0, 0}},
		{"top-p after top-k is over what top-k left", wire.Sampling{Temperature: 1, TopK: 3, TopP: 0.7}, []float64{4. / 7, 3. / 7, 0, 0, 0}},
		{"temperature 0.5 squares", wire.Sampling{Temperature: 0.5}, func() []float64 {
			out, sum := make([]float64, 5), 0.0
			for i, p := range base {
				out[i] = p * p
				sum += p * p
			}
			for i := range out {
				out[i] /= sum
			}
			return out
		}()},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := support(t, logitsOf(base...), tc.p)
			for i := range got {
				if math.Abs(got[i]-tc.want[i]) > 0.015 || (tc.want[i] == 0) != (got[i] == 0) {
					t.Errorf("id %d came with frequency %.3f, want %.3f", i, got[i], tc.want[i])
				}
			}
		})
	}
}

func TestPenalties(t *testing.T) {
	var s sampler
	logits := []float32{2, 1, -1, 0}
	for _, tc := range []struct {
		name              string
		p                 wire.Sampling
		prompt, generated []int32
		want              []float32
	}{
		{"presence", wire.Sampling{PresencePenalty: 0.5}, []int32{1}, []int32{0, 0}, []float32{1.5, 1, -1, 0}},
		{"frequency", wire.Sampling{FrequencyPenalty: 0.5}, []int32{1}, []int32{0, 0, 3}, []float32{1, 1, -1, -0.5}},
		{"repetition counts the prompt", wire.Sampling{RepetitionPenalty: 2}, []int32{1, 2}, []int32{0, 0}, []float32{1, 0.5, -2, 0}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := s.process(logits, draw{params: &tc.p, prompt: tc.prompt, generated: tc.generated})
			if !slices.Equal(got, tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}

func TestBannedIDsAreNeverChosen(t *testing.T) {
	p := wire.Sampling{Temperature: 1}
	var s sampler
	for seed := range uint64(500) {
		p.Seed = seed
		if id := s.sample(logitsOf(0.9, 0.05, 0.05), draw{params: &p, banned: []int32{0}}).Token; id == 0 {
			t.Fatalf("seed %d chose a banned id", seed)
		}
	}
}

// Large vocabularies take the partial ranking; it must keep what a full sort keeps.
func TestTruncationOfLargeVocabularies(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 30 {
		n := 3000
		logits := make([]float32, n)
		for i := range logits {
			logits[i] = float32(rng.NormFloat64() * float64(1+round%5))
		}
		p := wire.Sampling{Temperature: 1, TopP: float32(0.3 + 0.69*rng.Float64())}
		ids := make([]int32, n)
		for i := range ids {
			ids[i] = int32(i)
		}
		slices.SortStableFunc(ids, func(a, b int32) int {
			switch {
			case logits[a] > logits[b]:
				return -1
			case logits[a] < logits[b]:
				return 1
			}
			return int(a - b)
		})
		norm, total, want := logSumExp(logits), 0.0, map[int32]bool{}
		for _, id := range ids {
			want[id] = true
			total += math.Exp(float64(logits[id] - norm))
			if total >= float64(p.TopP) {
				break
			}
		}
		var s sampler
		got := s.process(logits, draw{params: &p})
		for id, v := range got {
			if kept := !math.IsInf(float64(v), -1); kept != want[int32(id)] {
				t.Fatalf("round %d: id %d kept=%v, want %v (top-p %v keeps %d)", round, id, kept, want[int32(id)], p.TopP, len(want))
			}
		}
	}
}

func TestLogprobModes(t *testing.T) {
	logits := logitsOf(0.5, 0.3, 0.2)
	p := wire.Sampling{Temperature: 0.5, Logprobs: true, TopLogprobs: 2, TopK: 1}
	raw := sampler{mode: LogprobsRaw}
	got := raw.sample(logits, draw{params: &p})
	if got.Token != 0 || math.Abs(float64(got.Logprob)-math.Log(0.5)) > 1e-6 {
		t.Errorf("raw: token %d logprob %v, want 0 and log 0.5", got.Token, got.Logprob)
	}
	if !slices.Equal(got.Top.IDs, []int32{0, 1}) || math.Abs(float64(got.Top.Logprobs[1])-math.Log(0.3)) > 1e-6 {
		t.Errorf("raw: top %v", got.Top)
	}
	processed := sampler{mode: LogprobsProcessed}
	if got := processed.sample(logits, draw{params: &p}); got.Logprob != 0 {
		t.Errorf("processed: logprob %v of the only token left, want 0", got.Logprob)
	}
}
