package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"baton/layout"
)

// What inspect says of attention and of experts is what the family has.
func TestInspect(t *testing.T) {
	for model, lines := range map[string][]string{
		"qwen2":     {"attention     4 heads, 2 KV heads, head dimension 16"},
		"qwen3_moe": {"attention     8 heads, 4 KV heads, head dimension 16", "experts       2 of 8 a token, MLP 48\n"},
		"deepseek_v3": {
			"attention     8 heads of dimension 40, values 16, over a latent of 32; 48 numbers a token and layer in the cache",
			"experts       2 of 8 a token, MLP 48, shared MLP 48\n",
		},
	} {
		var out, log bytes.Buffer
		if code := runContext(t.Context(), []string{"inspect", goldenPath(model)}, &out, &log); code != 0 {
			t.Fatalf("%s: code %d, %s", model, code, &log)
		}
		for _, line := range lines {
			if !strings.Contains(out.String(), line) {
				t.Errorf("%s: no %q in\n%s", model, line, &out)
			}
		}
	}
}

// inspectJSON is what inspect says of a golden model.
func inspectJSON(t *testing.T, model string, flags ...string) inspection {
	t.Helper()
	var out, log bytes.Buffer
	if code := runContext(t.Context(), append([]string{"inspect", goldenPath(model), "--json"}, flags...), &out, &log); code != 0 {
		t.Fatalf("%s %v: code %d, %s", model, flags, code, &log)
	}
	var got inspection
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	return got
}

// The ranks that hold all of a model together hold every weight: matrices and biases that are split once, the rest
// (norms, routers, biases of sums, latents, KV heads of which there are fewer than ranks) once a rank.
func TestInspectShards(t *testing.T) {
	for _, tt := range []struct{ model, shards string }{
		{"llama", "tp=1"}, {"qwen2", "tp=2"}, {"qwen2", "tp=4,pp=4"}, {"qwen3", "tp=8"}, {"qwen3", "pp=3,stages=1/2/1"},
		{"qwen3_moe", "tp=2,dp=4,ep=4,expt_tp=2"}, {"qwen3_moe", "dp=2,ep=2,pp=2"}, {"deepseek_v3", "tp=8"}, {"deepseek_v3", "tp=2,dp=4,ep=4,expt_tp=2"},
	} {
		got := inspectJSON(t, tt.model, "--shards="+tt.shards)
		p := got.Shards[0]
		shards, err := layout.ParseShards(tt.shards)
		if err != nil {
			t.Fatal(err)
		}
		s := shards[0]
		held := map[string]int{}
		var weights int64
		for i, r := range p.Ranks {
			if r.Rank != i || r.Engine != s.Place(i).DP {
				t.Errorf("%s %s: rank %d is called %d of engine %d", tt.model, tt.shards, i, r.Rank, r.Engine)
			}
			each := func(what string, layers span, of *span) {
				for l := layers[0]; of != nil && l < layers[1]; l++ {
					for x := of[0]; x < of[1]; x++ {
						held[fmt.Sprintf("%s %d of layer %d", what, x, l)]++
					}
				}
			}
			each("head", r.Layers, &r.Heads)
			if i < s.TP || got.KVHeads >= s.TP {
				each("KV head", r.Layers, &r.KVHeads)
			}
			if r.Vocabulary != nil {
				end := span{r.Layers[0], r.Layers[0] + 1}
				if s.PP > 1 && r.Layers[1] == got.Layers {
					end = span{got.Layers, got.Layers + 1}
				}
				each("word", end, r.Vocabulary)
			}
			if r.KVBytes != int64(p.Blocks)*r.KVBlockBytes {
				t.Errorf("%s %s: rank %d: %d bytes of KV for %d blocks of %d", tt.model, tt.shards, i, r.KVBytes, p.Blocks, r.KVBlockBytes)
			}
			weights += r.WeightBytes
		}
		for l := range got.Layers {
			for h := range got.Heads {
				if n := held[fmt.Sprintf("head %d of layer %d", h, l)]; n != s.DP {
					t.Errorf("%s %s: head %d of layer %d is held %d times by %d engines", tt.model, tt.shards, h, l, n, s.DP)
				}
			}
			for h := range got.KVHeads {
				if held[fmt.Sprintf("KV head %d of layer %d", h, l)] == 0 && got.KVHeads >= s.TP {
					t.Errorf("%s %s: nobody holds KV head %d of layer %d", tt.model, tt.shards, h, l)
				}
			}
		}
		for word := range got.Vocabulary {
			if n := held[fmt.Sprintf("word %d of layer 0", word)]; n != s.DP {
				t.Errorf("%s %s: word %d is held %d times by %d engines", tt.model, tt.shards, word, n, s.DP)
			}
		}
		if weights < got.Bytes || s.Ranks() == 1 && weights != got.Bytes || weights > got.Bytes*int64(s.DP)*int64(s.TP)*2 {
			t.Errorf("%s %s: the ranks hold %d bytes of a model of %d", tt.model, tt.shards, weights, got.Bytes)
		}
	}
}

// inspect sizes KV caches as engines do.
func TestInspectSaysWhatServeDoes(t *testing.T) {
	for _, flags := range [][]string{
		{"--shards=tp=2,role=prefill+tp=8,dp=2,role=decode", "--kv-memory=3MiB"},
		{"--shards=pp=2,role=prefill+tp=4,pp=2,role=decode", "--block-size=16", "--kv-memory=1MB", "--kv-dtype=bf16"},
		{"--shards=tp=2", "--max-requests=3", "--max-seq-len=500"},
	} {
		f := serve(t, goldenPath("qwen3"), flags...)
		for i, s := range inspectJSON(t, "qwen3", flags...).Shards {
			for dp := range s.Engines {
				name := fmt.Sprintf("%s_s%d_dp%d", s.Role, i, dp)
				if got := metric(t, f.url, "baton_engine_kv_blocks", `engine="`+name+`"`); got != float64(s.Blocks) {
					t.Errorf("%v: %s has %v blocks; inspect says %d", flags, name, got, s.Blocks)
				}
			}
		}
	}
}

// inspect refuses what serve refuses, in the same words.
func TestInspectRefusesWhatServeDoes(t *testing.T) {
	for _, flags := range [][]string{
		{"--shards=tp=3"}, {"--shards=tp=16"}, {"--shards=pp=9"}, {"--shards=stages=1/2"}, {"--shards=dp=16,ep=16"}, {"--shards=tp=2,cp=2"},
		{"--shards=tp=2", "--kv-memory=100"}, {"--shards=tp=2", "--block-size=24"}, {"--shards=tp=2", "--max-seq-len=5000"}, {"--shards=tp=2", "--max-seq-len=1"},
	} {
		refusal := func(args ...string) string {
			var out, log bytes.Buffer
			if code := runContext(t.Context(), append([]string{"--log-level=error"}, append(args, flags...)...), &out, &log); code != 1 {
				t.Errorf("%v %v: code %d, %s", args, flags, code, &log)
			}
			return strings.ReplaceAll(log.String(), "engine: ", "")
		}
		model := goldenPath("qwen3_moe")
		inspected, served := refusal("inspect", model), refusal("serve", "--listen=127.0.0.1:0", "--model="+model)
		if inspected != served {
			t.Errorf("%v:\ninspect: %sserve:   %s", flags, inspected, served)
		}
	}
}
