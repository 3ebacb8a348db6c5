package model_test

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"baton/checkpoint"
	"baton/compute"
	"baton/compute/cpu"
	"baton/layout"
	"baton/model"
)

// golden is what Hugging Face transformers computed in f32 for a tiny checkpoint.
type golden struct {
	Cases []struct {
		Prompt         []int32   `json:"prompt"`
		Generated      []int32   `json:"generated"`
		Logprobs       []float32 `json:"logprobs"`
		PromptLogprobs []float32 `json:"prompt_logprobs"`
	} `json:"cases"`
}

func loadGolden(t *testing.T, name string) (*checkpoint.Checkpoint, golden) {
	t.Helper()
	folder := filepath.Join("..", "testdata", "goldens", name)
	raw, err := os.ReadFile(filepath.Join(folder, "golden.json"))
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.Unmarshal(raw, &g); err != nil {
		t.Fatal(err)
	}
	ck, err := checkpoint.Open(folder)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ck.Close() })
	return ck, g
}

func logprob(logits []float32, id int32) float32 {
	sum, largest := 0.0, slices.Max(logits)
	for _, v := range logits {
		sum += math.Exp(float64(v - largest))
	}
	return float32(float64(logits[id]-largest) - math.Log(sum))
}

// The decoder alone, one sequence in one scattered block table, against transformers.
func TestGoldens(t *testing.T) {
	const blockSize = 16
	for _, name := range []string{"llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v3_plain"} {
		t.Run(name, func(t *testing.T) {
			ck, g := loadGolden(t, name)
			backend, err := cpu.New(cpu.Options{Threads: 2})
			if err != nil {
				t.Fatal(err)
			}
			defer backend.Close()
			weights, err := model.LoadWeights(backend, ck, layout.Whole(ck.Spec.Layers))
			if err != nil {
				t.Fatal(err)
			}
			decoder, err := model.NewDecoder(backend, ck.Spec, model.Solo(ck.Spec.Layers), 512, 512)
			if err != nil {
				t.Fatal(err)
			}
			defer decoder.Close()
			kv := compute.KV{
				Blocks: 32, Layers: ck.Spec.Layers, BlockSize: blockSize, DType: ck.Spec.WeightType,
			}
			kv.Planes, kv.Heads, kv.HeadDim = ck.Spec.Cache()
			if kv.Buf, err = backend.Alloc(kv.Blocks * kv.BlockBytes()); err != nil {
				t.Fatal(err)
			}
			table := make([]int32, kv.Blocks)
			for i := range table {
				table[i] = int32((i*13 + 5) % kv.Blocks)
			}
			pass := func(tokens []int32, from int, each func(i int, logits []float32)) {
				t.Helper()
				b := model.Batch{Tokens: tokens[from:]}
				for i := from; i < len(tokens); i++ {
					b.Positions = append(b.Positions, int32(i))
					b.Slots = append(b.Slots, table[i/blockSize]*blockSize+int32(i%blockSize))
					b.Logits = append(b.Logits, int32(i-from))
				}
				b.Sequences = []compute.Sequence{{Rows: len(b.Tokens), Position: from, Blocks: table}}
				if err := decoder.Forward(weights, kv, b, each); err != nil {
					t.Fatal(err)
				}
			}
			for _, c := range g.Cases {
				tokens, next := slices.Clone(c.Prompt), int32(0)
				pass(tokens, 0, func(i int, logits []float32) {
					if i < len(c.PromptLogprobs) {
						if got := logprob(logits, tokens[i+1]); math.Abs(float64(got-c.PromptLogprobs[i])) > 1e-3 {
							t.Errorf("prompt of %d: logprob of token %d is %v, want %v", len(c.Prompt), i+1, got, c.PromptLogprobs[i])
						}
					}
					next = int32(slices.Index(logits, slices.Max(logits)))
					if i == len(tokens)-1 {
						checkNext(t, c.Generated[0], c.Logprobs[0], next, logits)
					}
				})
				for i := 1; i < len(c.Generated); i++ {
					tokens = append(tokens, next)
					pass(tokens, len(tokens)-1, func(_ int, logits []float32) {
						next = int32(slices.Index(logits, slices.Max(logits)))
						checkNext(t, c.Generated[i], c.Logprobs[i], next, logits)
					})
				}
			}
		})
	}
}

func checkNext(t *testing.T, want int32, wantLogprob float32, got int32, logits []float32) {
	t.Helper()
	if got != want {
		t.Fatalf("token %d, want %d", got, want)
	}
	if lp := logprob(logits, got); math.Abs(float64(lp-wantLogprob)) > 1e-3 {
		t.Errorf("logprob %v, want %v", lp, wantLogprob)
	}
}

// More tokens than the experts' workspace holds are computed in turns, which no bit shows.
func TestExpertsTakeTurns(t *testing.T) {
	const tokens, vocabulary = 1200, 640
	ck, _ := loadGolden(t, "qwen3_moe")
	backend, err := cpu.New(cpu.Options{Threads: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer backend.Close()
	weights, err := model.LoadWeights(backend, ck, layout.Whole(ck.Spec.Layers))
	if err != nil {
		t.Fatal(err)
	}
	run := func(chunk int) []float32 {
		decoder, err := model.NewDecoder(backend, ck.Spec, model.Solo(ck.Spec.Layers), chunk, tokens)
		if err != nil {
			t.Fatal(err)
		}
		defer decoder.Close()
		kv := compute.KV{Blocks: tokens / 16, Layers: ck.Spec.Layers, Heads: ck.Spec.KVHeads, HeadDim: ck.Spec.HeadDim, BlockSize: 16, DType: ck.Spec.WeightType}
		if kv.Buf, err = backend.Alloc(kv.Blocks * kv.BlockBytes()); err != nil {
			t.Fatal(err)
		}
		defer backend.Free(kv.Buf)
		var table []int32
		for i := range kv.Blocks {
			table = append(table, int32(i))
		}
		var last []float32
		for from := 0; from < tokens; from += chunk {
			var b model.Batch
			for i := from; i < min(from+chunk, tokens); i++ {
				b.Tokens = append(b.Tokens, int32(i*i%vocabulary))
				b.Positions, b.Slots = append(b.Positions, int32(i)), append(b.Slots, int32(i))
			}
			n := len(b.Tokens)
			b.Sequences, b.Logits = []compute.Sequence{{Rows: n, Position: from, Blocks: table}}, []int32{int32(n - 1)}
			if err := decoder.Forward(weights, kv, b, func(_ int, logits []float32) { last = slices.Clone(logits) }); err != nil {
				t.Fatal(err)
			}
		}
		return last
	}
	if whole, parts := run(tokens), run(500); !slices.Equal(whole, parts) {
		t.Error("a pass of 1200 tokens gives other logits than passes of 500")
	}
}
