package checkpoint_test

import (
	"encoding/json/v2"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"baton/checkpoint"
	"baton/internal/modelfile"
	"baton/tensor"
)

// openAny opens a path that may hold anything: a *tensor.FileError or a usable model must come out.
func openAny(t *testing.T, path string) {
	t.Helper()
	c, err := checkpoint.Open(path)
	var fe *tensor.FileError
	if err != nil {
		if !errors.As(err, &fe) {
			t.Fatalf("%v is no FileError", err)
		}
		return
	}
	s := c.Spec
	if s.Latent.Rank > 0 && (len(c.Weights.Layers[0].KUp) != s.Heads || c.Weights.Layers[0].VUp[s.Heads-1].Cols() != s.Latent.Rank) {
		t.Fatalf("latent attention does not match %+v", s)
	}
	if len(c.Weights.Layers) != s.Layers || c.Weights.Layers[0].Q.Rows() != s.Heads*s.HeadDim || c.Weights.Head.Rows() != s.VocabSize {
		t.Fatalf("weights do not match %+v", s)
	}
	for i, l := range c.Weights.Layers {
		if s.Sparse(i) && (len(l.Experts) != s.Experts.Count || l.Experts[s.Experts.TopK-1].Down.Cols() != s.Experts.Intermediate) {
			t.Fatalf("experts do not match %+v", s)
		}
	}
	for _, f := range s.Rope.Frequencies {
		if !(f > 0) {
			t.Fatalf("frequencies are %v", s.Rope.Frequencies)
		}
	}
	c.Fingerprint()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

func FuzzConfig(f *testing.F) {
	for _, family := range []string{"llama", "qwen2", "qwen3", "qwen3_moe"} {
		c := moeConfig().with(tinyConfig(family)).with(config{"attention_bias": true, "rope_scaling": config{"type": "yarn", "factor": 4, "mscale": 1}})
		text, err := json.Marshal(map[string]any(c))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	for _, name := range []string{"llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"} {
		text, err := os.ReadFile(filepath.Join(goldens, name, "config.json"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	tensors := tinyTensors("qkv", "out", "norms", "head")
	for _, x := range moeTensors() { // both an MLP and experts in each layer
		if strings.Contains(x.Name, ".experts.") || strings.HasSuffix(x.Name, ".mlp.gate.weight") {
			tensors = append(tensors, x)
		}
	}
	fuzzConfig(f, tensors)
}

func FuzzDeepSeekConfig(f *testing.F) {
	for _, changes := range []config{nil, {"num_hidden_layers": 2}, {"attention_bias": true, "rope_interleave": false}} {
		text, err := json.Marshal(map[string]any(deepSeekConfig().with(changes)))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	fuzzConfig(f, deepSeekTensors("mtp", "biases"))
}

// fuzzConfig opens the tensors with any config.
func fuzzConfig(f *testing.F, tensors []tensor.Tensor) {
	weights, err := modelfile.Safetensors(tensors, nil)
	if err != nil {
		f.Fatal(err)
	}
	dir := f.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "model.safetensors"), weights, 0o644); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		write(t, filepath.Join(dir, "config.json"), text, nil)
		openAny(t, dir)
	})
}

func FuzzGGUFModel(f *testing.F) {
	hf, err := checkpoint.Open(folder(f, tinyConfig("llama"), tinyTensors("head")))
	if err != nil {
		f.Fatal(err)
	}
	defer hf.Close()
	data, err := modelfile.FromCheckpoint(hf, tensor.F16, modelfile.KV{Key: "llama.rope.scaling.type", Value: "yarn"},
		modelfile.KV{Key: "tokenizer.ggml.tokens", Value: []string{"a", "<|im_end|>"}}, modelfile.KV{Key: "tokenizer.ggml.token_type", Value: []int32{1, 3}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	moe, err := checkpoint.Open(folder(f, moeConfig().with(config{"mlp_only_layers": []int{0}}), moeTensors(0)))
	if err == nil {
		defer moe.Close()
		data, err = modelfile.FromCheckpoint(moe, tensor.F32)
	}
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	path := filepath.Join(f.TempDir(), "m.gguf")
	f.Fuzz(func(t *testing.T, data []byte) {
		write(t, path, data, nil)
		openAny(t, path)
	})
}
