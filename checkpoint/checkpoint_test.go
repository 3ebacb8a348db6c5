package checkpoint_test

import (
	"cmp"
	"encoding/json/v2"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"baton/checkpoint"
	"baton/internal/modelfile"
	"baton/tensor"
)

const goldens = "../testdata/goldens"

func open(t *testing.T, path string) *checkpoint.Checkpoint {
	t.Helper()
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func write(t testing.TB, path string, data []byte, err error) string {
	t.Helper()
	if err == nil {
		err = os.WriteFile(path, data, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// config is a config.json in the making.
type config map[string]any

// with returns a copy with changes; a nil value removes the key.
func (c config) with(changes config) config {
	out := maps.Clone(c)
	for k, v := range changes {
		if out[k] = v; v == nil {
			delete(out, k)
		}
	}
	return out
}

func tinyConfig(family string) config {
	class := map[string]string{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
	return config{
		"model_type": family, "architectures": []string{class[family]},
		"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
		"head_dim": 6, "intermediate_size": 12, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "hidden_act": "silu",
		"bos_token_id": 1, "eos_token_id": 2,
	}
}

// tinyTensors makes what tinyConfig describes; extras names the optional parts.
func tinyTensors(extras ...string) []tensor.Tensor {
	seed := float32(0)
	var out []tensor.Tensor
	add := func(name string, shape ...int) {
		n := 1
		for _, d := range shape {
			n *= d
		}
		values := make([]float32, n)
		for i := range values {
			seed++
			values[i] = seed / 64
		}
		out = append(out, modelfile.Floats(name, tensor.F32, values, shape...))
	}
	has := func(what string) bool { return slices.Contains(extras, what) }
	add("model.embed_tokens.weight", 10, 8)
	for i := range 2 {
		p := fmt.Sprintf("model.layers.%d.", i)
		add(p+"input_layernorm.weight", 8)
		add(p+"post_attention_layernorm.weight", 8)
		for _, l := range []struct {
			name, bias string
			out, in    int
		}{
			{"self_attn.q_proj", "qkv", 24, 8}, {"self_attn.k_proj", "qkv", 12, 8}, {"self_attn.v_proj", "qkv", 12, 8},
			{"self_attn.o_proj", "out", 8, 24},
			{"mlp.gate_proj", "mlp", 12, 8}, {"mlp.up_proj", "mlp", 12, 8}, {"mlp.down_proj", "mlp", 8, 12},
		} {
			add(p+l.name+".weight", l.out, l.in)
			if has(l.bias) {
				add(p+l.name+".bias", l.out)
			}
		}
		if has("norms") {
			add(p+"self_attn.q_norm.weight", 6)
			add(p+"self_attn.k_norm.weight", 6)
		}
	}
	add("model.norm.weight", 8)
	if has("head") {
		add("lm_head.weight", 10, 8)
	}
	return out
}

// folder writes a checkpoint folder. Maps of weights go into one file.
func folder(t testing.TB, c config, tensors []tensor.Tensor) string {
	t.Helper()
	dir := t.TempDir()
	text, err := json.Marshal(map[string]any(c))
	write(t, filepath.Join(dir, "config.json"), text, err)
	weights, err := modelfile.Safetensors(tensors, nil)
	write(t, filepath.Join(dir, "model.safetensors"), weights, err)
	return dir
}

func TestGoldens(t *testing.T) {
	for name, want := range map[string]checkpoint.Spec{
		"llama": {Family: "llama", VocabSize: 640, HiddenSize: 96, Layers: 3, Heads: 6, KVHeads: 2, HeadDim: 16, Intermediate: 208, NormEps: 1e-5, MaxPositions: 4096, BOS: 1},
		"qwen2": {Family: "qwen2", VocabSize: 640, HiddenSize: 64, Layers: 4, Heads: 4, KVHeads: 2, HeadDim: 16, Intermediate: 176, NormEps: 1e-6, MaxPositions: 4096, BOS: 1, TiedHead: true},
		"qwen3": {Family: "qwen3", VocabSize: 640, HiddenSize: 80, Layers: 4, Heads: 8, KVHeads: 4, HeadDim: 32, Intermediate: 144, NormEps: 1e-6, MaxPositions: 4096, BOS: 1, TiedHead: true, QKNorm: true},
		"qwen3_moe": {Family: "qwen3_moe", VocabSize: 640, HiddenSize: 64, Layers: 4, Heads: 8, KVHeads: 4, HeadDim: 16, Intermediate: 128, NormEps: 1e-6, MaxPositions: 4096, BOS: 1, QKNorm: true, Experts: checkpoint.Experts{
			Count: 8, TopK: 2, Intermediate: 48, Normalize: true, Layers: []bool{false, true, true, true},
		}},
		"deepseek_v3": {Family: "deepseek_v3", VocabSize: 640, HiddenSize: 64, Layers: 4, Heads: 8, KVHeads: 1, HeadDim: 40, Intermediate: 128, NormEps: 1e-5, MaxPositions: 4096, BOS: 1,
			Latent: checkpoint.Latent{Rank: 32, QueryRank: 40, Nope: 24, Rope: 16, Value: 16, NormEps: 1e-6, Scale: 0.24413709},
			Experts: checkpoint.Experts{
				Count: 8, TopK: 2, Intermediate: 48, Normalize: true, Layers: []bool{false, true, true, true},
				Sigmoid: true, Groups: 4, TopGroups: 2, Scale: 2.5, Shared: 48,
			}},
	} {
		c := open(t, filepath.Join(goldens, name))
		got := c.Spec
		latent := want.Latent.Rank > 0
		if rotated := cmp.Or(want.Latent.Rope, want.HeadDim); len(got.Rope.Frequencies) != rotated/2 || (got.Rope.Scale != 1) != latent || got.Rope.Interleaved != latent {
			t.Errorf("%s: rope %+v", name, got.Rope)
		}
		got.Rope, want.EOS, want.WeightType = checkpoint.Rope{}, []int32{2}, tensor.F32
		if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
			t.Errorf("%s: spec is\n%+v, want\n%+v", name, got, want)
		}
		l, qkv := c.Weights.Layers[0], name == "qwen2"
		if (l.QBias.Data != nil) != qkv || (l.KBias.Data != nil) != qkv || (l.VBias.Data != nil) != qkv || l.OBias.Data != nil || l.GateBias.Data != nil {
			t.Errorf("%s: biases are wrong", name)
		}
		if norms := want.QKNorm; (l.QNorm.Data != nil) != norms || (l.KNorm.Data != nil) != norms {
			t.Errorf("%s: query and key norms are wrong", name)
		}
		if tied := c.Weights.Head.Name == c.Weights.Embed.Name; tied != want.TiedHead {
			t.Errorf("%s: head is %s", name, c.Weights.Head.Name)
		}
		for i, l := range c.Weights.Layers {
			sparse := i < len(want.Experts.Layers) && want.Experts.Layers[i]
			if got.Sparse(i) != sparse || (l.Router.Data != nil) != sparse || (l.Gate.Data == nil) != sparse || len(l.Experts) > 0 != sparse {
				t.Errorf("%s: layer %d has an MLP: %v, experts: %d, router: %v", name, i, l.Gate.Data != nil, len(l.Experts), l.Router.Shape)
			}
		}
		if c.Format() != checkpoint.Safetensors || c.GGUF() != nil || c.Bytes() != 4*c.Parameters() {
			t.Errorf("%s: format %s, %d bytes, %d parameters", name, c.Format(), c.Bytes(), c.Parameters())
		}
	}
}

// transformers 4 and 5 write the same model differently.
func TestConfigSpellings(t *testing.T) {
	rope := config{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
	base := tinyConfig("llama")
	weights := tinyTensors("head")
	four := open(t, folder(t, base.with(config{"torch_dtype": "float32", "rope_theta": 5e5, "rope_scaling": rope.with(config{"rope_type": "llama3"})}), weights))
	older := open(t, folder(t, base.with(config{"rope_theta": 5e5, "rope_scaling": rope.with(config{"type": "llama3"}), "rope_parameters": config{"rope_type": "default"}}), weights))
	five := open(t, folder(t, base.with(config{"dtype": "float32", "rope_parameters": rope.with(config{"rope_type": "llama3", "rope_theta": 5e5})}), weights))
	other := open(t, folder(t, base.with(config{"rope_parameters": rope.with(config{"rope_type": "llama3", "rope_theta": 1e4})}), weights))
	for _, c := range []*checkpoint.Checkpoint{older, five} {
		if fmt.Sprint(c.Spec) != fmt.Sprint(four.Spec) || c.Fingerprint() != four.Fingerprint() {
			t.Errorf("%+v\ndiffers from\n%+v", c.Spec, four.Spec)
		}
	}
	if slices.Equal(other.Spec.Rope.Frequencies, four.Spec.Rope.Frequencies) || other.Fingerprint() == four.Fingerprint() {
		t.Error("rope_theta does not matter")
	}
}

func TestConfigChoices(t *testing.T) {
	for name, c := range map[string]struct {
		family  string
		changes config
		extras  string
		check   func(*checkpoint.Checkpoint) bool
	}{
		"tied by config": {"llama", config{"tie_word_embeddings": true}, "", func(c *checkpoint.Checkpoint) bool {
			return c.Spec.TiedHead && c.Weights.Head.Name == "model.embed_tokens.weight"
		}},
		"tied for want": {"llama", config{"tie_word_embeddings": false}, "", func(c *checkpoint.Checkpoint) bool { return c.Spec.TiedHead && c.Weights.Head.Data != nil }},
		"not tied, it says": {"qwen2", nil, "qkv head", func(c *checkpoint.Checkpoint) bool {
			return !c.Spec.TiedHead && c.Weights.Head.Name == "lm_head.weight"
		}},
		"tied, it lies": {"llama", config{"tie_word_embeddings": true}, "head", func(c *checkpoint.Checkpoint) bool {
			return !c.Spec.TiedHead && c.Weights.Head.Name == "lm_head.weight"
		}},
		"llama with biases": {"llama", config{"attention_bias": true, "mlp_bias": true}, "qkv out mlp", func(c *checkpoint.Checkpoint) bool {
			l := c.Weights.Layers[1]
			return len(l.QBias.Data) == 96 && len(l.VBias.Data) == 48 && len(l.OBias.Data) == 32 && len(l.GateBias.Data) == 48 && len(l.UpBias.Data) == 48 && len(l.DownBias.Data) == 32
		}},
		"qwen3 with biases": {"qwen3", config{"attention_bias": true}, "qkv out norms", func(c *checkpoint.Checkpoint) bool {
			l := c.Weights.Layers[0]
			return l.QBias.Data != nil && l.OBias.Data != nil && l.QNorm.Data != nil && l.UpBias.Data == nil
		}},
		"biases not used":     {"llama", nil, "qkv out mlp", func(c *checkpoint.Checkpoint) bool { return c.Weights.Layers[0].QBias.Data == nil }},
		"eos list":            {"llama", config{"eos_token_id": []int{5, 3, 5}}, "", func(c *checkpoint.Checkpoint) bool { return slices.Equal(c.Spec.EOS, []int32{5, 3}) }},
		"no special ids":      {"llama", config{"eos_token_id": nil, "bos_token_id": nil}, "", func(c *checkpoint.Checkpoint) bool { return c.Spec.EOS == nil && c.Spec.BOS == -1 }},
		"ids out of range":    {"llama", config{"eos_token_id": []int{-1, 10, 9}, "bos_token_id": 1 << 40}, "", func(c *checkpoint.Checkpoint) bool { return slices.Equal(c.Spec.EOS, []int32{9}) && c.Spec.BOS == -1 }},
		"derived head_dim":    {"llama", config{"head_dim": nil, "hidden_size": 24, "_": 0}, "wide", func(c *checkpoint.Checkpoint) bool { return c.Spec.HeadDim == 6 }},
		"unused window":       {"qwen2", config{"use_sliding_window": false, "sliding_window": 16}, "qkv", func(c *checkpoint.Checkpoint) bool { return c.Spec.Family == "qwen2" }},
		"window of no layer":  {"qwen2", config{"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 2}, "qkv", func(c *checkpoint.Checkpoint) bool { return c.Spec.Family == "qwen2" }},
		"only full attention": {"qwen2", config{"use_sliding_window": true, "layer_types": []string{"full_attention", "full_attention"}}, "qkv", func(c *checkpoint.Checkpoint) bool { return c.Spec.Family == "qwen2" }},
		"by architecture":     {"qwen3", config{"model_type": nil}, "norms", func(c *checkpoint.Checkpoint) bool { return c.Spec.Family == "qwen3" }},
		"longer by yarn": {"llama", config{"rope_scaling": config{"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}}, "", func(c *checkpoint.Checkpoint) bool {
			return c.Spec.MaxPositions == 256 && math.Abs(float64(c.Spec.Rope.Scale)-1.1386294) < 1e-6
		}},
	} {
		weights := tinyTensors(strings.Fields(c.extras)...)
		if c.extras == "wide" {
			weights = widen(weights)
		}
		if got := open(t, folder(t, tinyConfig(c.family).with(c.changes), weights)); !c.check(got) {
			t.Errorf("%s: got %+v, head %s", name, got.Spec, got.Weights.Head.Name)
		}
	}
}

// widen makes the hidden size 24 instead of 8.
func widen(tensors []tensor.Tensor) []tensor.Tensor {
	for i, t := range tensors {
		shape := slices.Clone(t.Shape)
		for d := range shape {
			if shape[d] == 8 {
				shape[d] = 24
			}
		}
		n := 1
		for _, d := range shape {
			n *= d
		}
		tensors[i] = modelfile.Floats(t.Name, tensor.F32, make([]float32, n), shape...)
	}
	return tensors
}

func TestGenerationConfig(t *testing.T) {
	dir := folder(t, tinyConfig("llama").with(config{"bos_token_id": nil}), tinyTensors())
	path := filepath.Join(dir, "generation_config.json")
	write(t, path, []byte(`{"bos_token_id": 4, "eos_token_id": [7, 2, 3], "temperature": 0.6}`), nil)
	if s := open(t, dir).Spec; s.BOS != 4 || !slices.Equal(s.EOS, []int32{2, 7, 3}) {
		t.Errorf("bos %d, eos %v", s.BOS, s.EOS)
	}
	write(t, path, []byte(`{"eos_token_id": "2"}`), nil)
	_, err := checkpoint.Open(dir)
	checkError(t, "text as id", err, tensor.ErrMalformed, "generation_config.json: eos_token_id: is a string, expected an integer")
}

func checkError(t *testing.T, name string, err, kind error, want string) {
	t.Helper()
	var fe *tensor.FileError
	if !errors.As(err, &fe) || !errors.Is(err, kind) {
		t.Errorf("%s: error is %v, want a FileError that wraps %v", name, err, kind)
	} else if !strings.Contains(err.Error(), want) {
		t.Errorf("%s: error %q does not say %q", name, err, want)
	}
}

func TestConfigRefusals(t *testing.T) {
	scaling := func(r config) config { return config{"rope_scaling": r} }
	for name, c := range map[string]struct {
		changes config
		kind    error
		want    string
	}{
		"family":            {config{"model_type": "mamba2"}, tensor.ErrUnsupported, `config.json: model_type: family "mamba2" is not supported; supported: llama, qwen2, qwen3`},
		"no family":         {config{"model_type": nil, "architectures": nil}, tensor.ErrUnsupported, `family "" is not supported`},
		"architecture only": {config{"model_type": nil, "architectures": []string{"GPT2LMHeadModel"}}, tensor.ErrUnsupported, `architectures: family "GPT2LMHeadModel"`},
		"classifier":        {config{"architectures": []string{"LlamaForSequenceClassification"}}, tensor.ErrUnsupported, `"LlamaForSequenceClassification" does not generate text`},
		"activation":        {config{"hidden_act": "gelu"}, tensor.ErrUnsupported, `hidden_act: "gelu" is not supported`},
		"window":            {config{"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1}, tensor.ErrUnsupported, "use_sliding_window: is true"},
		"sliding layers":    {config{"layer_types": []string{"full_attention", "sliding_attention"}}, tensor.ErrUnsupported, `layer_types: "sliding_attention"`},
		"quantised":         {config{"quantization_config": config{"quant_method": "awq"}}, tensor.ErrUnsupported, `quantization_config: method "awq"`},
		"dynamic rope":      {scaling(config{"type": "dynamic", "factor": 2}), tensor.ErrUnsupported, `rope type: "dynamic" is not supported; supported: default, linear, llama3, yarn`},
		"longrope":          {config{"rope_parameters": config{"rope_type": "longrope", "short_factor": []float64{1}}}, tensor.ErrUnsupported, `"longrope"`},
		"rope by layer":     {config{"rope_parameters": config{"full_attention": config{"rope_type": "default"}}}, tensor.ErrUnsupported, "differ by layer type"},
		"partial rope":      {config{"partial_rotary_factor": 0.5}, tensor.ErrUnsupported, "partial_rotary_factor: is 0.5"},
		"linear, no factor": {scaling(config{"type": "linear"}), tensor.ErrMalformed, "rope factor: is 0"},
		"llama3 factors":    {scaling(config{"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}), tensor.ErrMalformed, "high_freq_factor: is 4"},
		"yarn shrinks":      {scaling(config{"rope_type": "yarn", "factor": 0.5}), tensor.ErrMalformed, "rope_scaling.factor: is 0.5; yarn stretches, so it must be at least 1"},
		"yarn by nothing":   {scaling(config{"rope_type": "yarn", "factor": 0}), tensor.ErrMalformed, "rope_scaling.factor: is 0"},
		"yarn backwards":    {config{"rope_parameters": config{"rope_type": "yarn", "factor": -4}}, tensor.ErrMalformed, "rope_parameters.factor: is -4"},
		"yarn derived":      {scaling(config{"rope_type": "yarn", "original_max_position_embeddings": 128}), tensor.ErrMalformed, "rope factor: is 0.5; yarn stretches"},
		"yarn betas":        {scaling(config{"rope_type": "yarn", "factor": 8, "beta_fast": 1, "beta_slow": 2}), tensor.ErrMalformed, "beta_fast: is 1"},
		"yarn original":     {scaling(config{"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": -1}), tensor.ErrMalformed, "rope original: is -1"},
		"attention factor":  {scaling(config{"rope_type": "yarn", "factor": 8, "attention_factor": -1}), tensor.ErrMalformed, "rope attention factor: is -1"},
		"theta":             {config{"rope_theta": 1}, tensor.ErrMalformed, "rope_theta: is 1; it must be over 1"},
		"no theta":          {config{"rope_theta": 0}, tensor.ErrMalformed, "rope_theta: is 0"},
		"negative theta":    {config{"rope_parameters": config{"rope_theta": -1e4}}, tensor.ErrMalformed, "rope_theta: is -10000"},
		"vanishing":         {scaling(config{"type": "linear", "factor": 1e300}).with(config{"rope_theta": 1e300}), tensor.ErrMalformed, "gets frequency 0"},
		"odd head":          {config{"head_dim": 7}, tensor.ErrMalformed, "rope dimensions: are 7"},
		"head not given":    {config{"head_dim": nil, "hidden_size": 9}, tensor.ErrMalformed, "num_attention_heads: is 4, which does not divide hidden_size 9"},
		"no heads":          {config{"head_dim": nil, "num_attention_heads": 0}, tensor.ErrMalformed, "num_attention_heads: is 0"},
		"no vocabulary":     {config{"vocab_size": nil}, tensor.ErrMalformed, "vocabulary size: is 0"},
		"many layers":       {config{"num_hidden_layers": 1 << 40}, tensor.ErrMalformed, "number of layers: is 1099511627776"},
		"huge head":         {config{"head_dim": 1 << 40}, tensor.ErrMalformed, "rope dimensions"},
		"groups":            {config{"num_key_value_heads": 3}, tensor.ErrMalformed, "is 3, which does not divide the 4"},
		"no groups":         {config{"num_key_value_heads": 0}, tensor.ErrMalformed, "number of key/value heads: is 0"},
		"epsilon":           {config{"rms_norm_eps": 0}, tensor.ErrMalformed, "RMSNorm epsilon: is 0"},
		"text as size":      {config{"hidden_size": "8"}, tensor.ErrMalformed, "hidden_size: is a string, expected an integer"},
		"fraction as size":  {config{"hidden_size": 8.5}, tensor.ErrMalformed, "hidden_size: is 8.5, expected an integer"},
		"list as rope":      {config{"rope_scaling": []int{1}}, tensor.ErrMalformed, "rope_scaling: is an array, expected an object"},
		"text as factor":    {scaling(config{"type": "linear", "factor": "two"}), tensor.ErrMalformed, "rope_scaling/factor: is a string, expected a number"},
		"object as eos":     {config{"eos_token_id": config{}}, tensor.ErrMalformed, "eos_token_id: is an object, expected an integer"},
	} {
		_, err := checkpoint.Open(folder(t, tinyConfig("llama").with(c.changes), tinyTensors()))
		checkError(t, name, err, c.kind, c.want)
	}
}

func TestTensorRefusals(t *testing.T) {
	replace := func(name string, by ...tensor.Tensor) []tensor.Tensor {
		var out []tensor.Tensor
		for _, x := range tinyTensors() {
			if x.Name == name {
				out = append(out, by...)
			} else {
				out = append(out, x)
			}
		}
		return out
	}
	const q = "model.layers.1.self_attn.q_proj.weight"
	const norm = "model.layers.0.input_layernorm.weight"
	for name, c := range map[string]struct {
		tensors []tensor.Tensor
		changes config
		kind    error
		want    string
	}{
		"missing":         {replace(q), nil, tensor.ErrMissing, `tensor "` + q + `": is not in the checkpoint; expected shape [24 8]`},
		"misshapen":       {replace(q, modelfile.Floats(q, tensor.F32, make([]float32, 192), 8, 24)), nil, tensor.ErrMalformed, `"` + q + `": has shape [8 24], expected [24 8]`},
		"flat":            {replace(q, modelfile.Floats(q, tensor.F32, make([]float32, 192), 192)), nil, tensor.ErrMalformed, "has shape [192], expected [24 8]"},
		"integer matrix":  {replace(q, tensor.Tensor{Name: q, DType: tensor.I8, Shape: []int{24, 8}, Data: make([]byte, 192)}), nil, tensor.ErrUnsupported, `"` + q + `": is of type i8`},
		"double norm":     {replace(norm, tensor.Tensor{Name: norm, DType: tensor.F64, Shape: []int{8}, Data: make([]byte, 64)}), nil, tensor.ErrUnsupported, `"` + norm + `": is of type f64`},
		"promised bias":   {tinyTensors("qkv"), config{"attention_bias": true}, tensor.ErrMissing, `"model.layers.0.self_attn.o_proj.bias": is not in the checkpoint`},
		"more vocabulary": {tinyTensors(), config{"vocab_size": 11}, tensor.ErrMalformed, "has shape [10 8], expected [11 8]"},
		"more layers":     {tinyTensors(), config{"num_hidden_layers": 3}, tensor.ErrMissing, `"model.layers.2.input_layernorm.weight"`},
	} {
		_, err := checkpoint.Open(folder(t, tinyConfig("llama").with(c.changes), c.tensors))
		checkError(t, name, err, c.kind, c.want)
	}
	_, err := checkpoint.Open(folder(t, tinyConfig("qwen2"), tinyTensors()))
	checkError(t, "qwen2 without biases", err, tensor.ErrMissing, `"model.layers.0.self_attn.q_proj.bias"`)
	_, err = checkpoint.Open(folder(t, tinyConfig("qwen3"), tinyTensors()))
	checkError(t, "qwen3 without norms", err, tensor.ErrMissing, `"model.layers.0.self_attn.q_norm.weight"`)
}

func TestPathRefusals(t *testing.T) {
	dir := t.TempDir()
	sub := func(name string, files map[string]string) string {
		for file, text := range files {
			path := filepath.Join(dir, name, file)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			write(t, path, []byte(text), nil)
		}
		return filepath.Join(dir, name)
	}
	text, err := json.Marshal(map[string]any(tinyConfig("llama")))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		path string
		kind error
		want string
	}{
		"absent":         {filepath.Join(dir, "absent"), os.ErrNotExist, "absent: cannot be opened: no such file"},
		"lone weights":   {filepath.Join(goldens, "llama", "model.safetensors"), tensor.ErrUnsupported, "name the folder that also holds config.json (" + filepath.Join(goldens, "llama") + ")"},
		"other file":     {sub("f", map[string]string{"x": "G"}) + "/x", tensor.ErrUnsupported, "neither a folder with config.json nor a .gguf file"},
		"empty folder":   {t.TempDir(), tensor.ErrMissing, "config.json: is not in the folder"},
		"folder of GGUF": {sub("g", map[string]string{"m.gguf": "GGUF"}), tensor.ErrMissing, filepath.Join(dir, "g", "m.gguf")},
		"no weights":     {sub("c", map[string]string{"config.json": string(text)}), tensor.ErrMissing, "model.safetensors: is not in the folder"},
		"pickle weights": {sub("p", map[string]string{"config.json": string(text), "pytorch_model.bin": "x"}), tensor.ErrUnsupported, "pytorch_model.bin; convert them to safetensors"},
		"broken config":  {sub("b", map[string]string{"config.json": "{"}), tensor.ErrMalformed, "config.json: is no valid JSON"},
		"cut GGUF":       {sub("h", map[string]string{"m.gguf": "GGUF\x03"}) + "/m.gguf", tensor.ErrMalformed, "m.gguf: version"},
		"not GGUF":       {sub("i", map[string]string{"m.gguf": "????????"}) + "/m.gguf", tensor.ErrMalformed, "this is no GGUF file"},
		"cut weights":    {sub("w", map[string]string{"config.json": string(text), "model.safetensors": "\x10\x00\x00\x00\x00\x00\x00\x00{}"}), tensor.ErrMalformed, "model.safetensors: header length"},
	} {
		_, err := checkpoint.Open(c.path)
		checkError(t, name, err, c.kind, c.want)
	}
}

// The same weights in two shards are the same checkpoint.
func TestShardedFolder(t *testing.T) {
	tensors := tinyTensors("head")
	whole := open(t, folder(t, tinyConfig("llama"), tensors))
	dir := folder(t, tinyConfig("llama"), nil)
	if err := os.Remove(filepath.Join(dir, "model.safetensors")); err != nil {
		t.Fatal(err)
	}
	weightMap := map[string]string{}
	for i, part := range [][]tensor.Tensor{tensors[:9], tensors[9:]} {
		name := fmt.Sprintf("model-%05d-of-00002.safetensors", i+1)
		data, err := modelfile.Safetensors(part, nil)
		write(t, filepath.Join(dir, name), data, err)
		for _, x := range part {
			weightMap[x.Name] = name
		}
	}
	index, err := json.Marshal(map[string]any{"metadata": map[string]int{"total_size": 1}, "weight_map": weightMap})
	write(t, filepath.Join(dir, "model.safetensors.index.json"), index, err)
	if got := open(t, dir).Fingerprint(); got != whole.Fingerprint() {
		t.Errorf("fingerprint %s of shards, %s of one file", got, whole.Fingerprint())
	}
}

func TestFingerprint(t *testing.T) {
	base := open(t, folder(t, tinyConfig("llama"), tinyTensors("head"))).Fingerprint()
	if again := open(t, folder(t, tinyConfig("llama"), tinyTensors("head"))).Fingerprint(); again != base || len(base) != 64 {
		t.Errorf("two copies give %s and %s", base, again)
	}
	seen := map[string]string{base: "base"}
	for name, c := range map[string]struct {
		changes config
		extras  []string
		edit    func([]tensor.Tensor)
	}{
		"epsilon":      {changes: config{"rms_norm_eps": 1e-6}, extras: []string{"head"}},
		"theta":        {changes: config{"rope_theta": 5e5}, extras: []string{"head"}},
		"eos":          {changes: config{"eos_token_id": 3}, extras: []string{"head"}},
		"tied":         {},
		"first weight": {extras: []string{"head"}, edit: func(ts []tensor.Tensor) { ts[0].Data[0] ^= 1 }},
		"last weight":  {extras: []string{"head"}, edit: func(ts []tensor.Tensor) { d := ts[len(ts)-1].Data; d[len(d)-1] ^= 1 }},
		"a norm":       {extras: []string{"head"}, edit: func(ts []tensor.Tensor) { ts[1].Data[9] ^= 1 }},
	} {
		tensors := tinyTensors(c.extras...)
		if c.edit != nil {
			c.edit(tensors)
		}
		f := open(t, folder(t, tinyConfig("llama").with(c.changes), tensors)).Fingerprint()
		if other, same := seen[f]; same {
			t.Errorf("%s and %s have the same fingerprint", name, other)
		}
		seen[f] = name
	}
}

// testdata/rope.json holds what transformers 5.17's own functions compute, in float32.
func TestRopeFrequencies(t *testing.T) {
	data, err := os.ReadFile("testdata/rope.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name        string    `json:"name"`
		Config      config    `json:"config"`
		Frequencies []float64 `json:"frequencies"`
		Scale       float64   `json:"scale"`
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		headDim := int(c.Config["head_dim"].(float64))
		dir := folder(t, tinyConfig("llama").with(c.Config).with(config{"num_attention_heads": 1, "num_key_value_heads": 1}), oneHead(headDim))
		rope := open(t, dir).Spec.Rope
		if math.Abs(float64(rope.Scale)/c.Scale-1) > 1e-6 {
			t.Errorf("%s: scale %v, want %v", c.Name, rope.Scale, c.Scale)
		}
		if len(rope.Frequencies) != len(c.Frequencies) {
			t.Fatalf("%s: %d frequencies, want %d", c.Name, len(rope.Frequencies), len(c.Frequencies))
		}
		for i, want := range c.Frequencies {
			// llama3's blend subtracts nearly equal float32 numbers, so a few units in the last place add up.
			if math.Abs(rope.Frequencies[i]/want-1) > 2e-6 {
				t.Errorf("%s: pair %d turns by %v, want %v", c.Name, i, rope.Frequencies[i], want)
			}
		}
	}
}

// oneHead is tinyTensors with a single head of the given size.
func oneHead(headDim int) []tensor.Tensor {
	tensors := tinyTensors()
	for i, t := range tensors {
		shape := slices.Clone(t.Shape)
		switch {
		case strings.Contains(t.Name, "o_proj"):
			shape[1] = headDim
		case strings.Contains(t.Name, "self_attn"):
			shape[0] = headDim
		default:
			continue
		}
		tensors[i] = modelfile.Floats(t.Name, tensor.F32, make([]float32, 8*headDim), shape...)
	}
	return tensors
}
