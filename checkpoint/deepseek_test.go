package checkpoint_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"baton/checkpoint"
	"baton/internal/modelfile"
	"baton/layout"
	"baton/tensor"
)

// deepSeekConfig is a model as DeepSeek spells it (transformers 4): two dense layers, two with experts.
func deepSeekConfig() config {
	return config{
		"model_type": "deepseek_v3", "architectures": []string{"DeepseekV3ForCausalLM"},
		"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
		"intermediate_size": 12, "rms_norm_eps": 1e-5, "max_position_embeddings": 640, "hidden_act": "silu",
		"bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000, "attention_bias": false,
		"q_lora_rank": 5, "kv_lora_rank": 7, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 2,
		"first_k_dense_replace": 2, "moe_layer_freq": 1, "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2,
		"moe_intermediate_size": 3, "n_group": 2, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
		"norm_topk_prob": true, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
		"rope_scaling": yarn.with(config{"type": "yarn"}),
	}
}

var yarn = config{
	"factor": 10, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 0.5,
}

// deepSeekTensors makes what deepSeekConfig describes. With "flat" queries have no latent, with "biases" what may
// have a bias does, with "mtp" a fifth layer predicts further tokens.
func deepSeekTensors(extras ...string) []tensor.Tensor {
	var out []tensor.Tensor
	seed := float32(0)
	add := func(name string, shape ...int) {
		values := make([]float32, shape[0]*append(shape, 1)[1])
		for i := range values {
			seed++
			values[i] = seed / 64
		}
		out = append(out, modelfile.Floats(name, tensor.F32, values, shape...))
	}
	has := func(what string) bool { return slices.Contains(extras, what) }
	layer := func(i int) {
		p := fmt.Sprintf("model.layers.%d.", i)
		add(p+"input_layernorm.weight", 8)
		add(p+"post_attention_layernorm.weight", 8)
		linear := func(name string, rows, cols int, bias bool) {
			add(p+name+".weight", rows, cols)
			if bias {
				add(p+name+".bias", rows)
			}
		}
		if has("flat") {
			linear("self_attn.q_proj", 14, 8, false)
		} else {
			linear("self_attn.q_a_proj", 5, 8, has("biases"))
			add(p+"self_attn.q_a_layernorm.weight", 5)
			linear("self_attn.q_b_proj", 14, 5, false)
		}
		linear("self_attn.kv_a_proj_with_mqa", 11, 8, has("biases"))
		add(p+"self_attn.kv_a_layernorm.weight", 7)
		linear("self_attn.kv_b_proj", 10, 7, false)
		linear("self_attn.o_proj", 8, 4, has("biases"))
		mlp := func(name string, width int) {
			linear(name+"gate_proj", width, 8, false)
			linear(name+"up_proj", width, 8, false)
			linear(name+"down_proj", 8, width, false)
		}
		if i < 2 {
			mlp("mlp.", 12)
			return
		}
		add(p+"mlp.gate.weight", 4, 8)
		add(p+"mlp.gate.e_score_correction_bias", 4)
		for e := range 4 {
			mlp(fmt.Sprintf("mlp.experts.%d.", e), 3)
		}
		mlp("mlp.shared_experts.", 6)
	}
	add("model.embed_tokens.weight", 10, 8)
	for i := range 4 {
		layer(i)
	}
	add("model.norm.weight", 8)
	add("lm_head.weight", 10, 8)
	if has("mtp") {
		layer(4)
		add("model.layers.4.eh_proj.weight", 8, 16)
		add("model.layers.4.enorm.weight", 8)
	}
	return out
}

// DeepSeek's own files and those that transformers 5 writes are the same model.
func TestDeepSeekSpellings(t *testing.T) {
	four := open(t, folder(t, deepSeekConfig(), deepSeekTensors("mtp")))
	five := open(t, folder(t, deepSeekConfig().with(config{
		"rope_theta": nil, "rope_scaling": nil, "scoring_func": nil, "topk_method": nil, "moe_layer_freq": nil,
		"head_dim": 4, "qk_head_dim": 7, "rope_interleave": true, "num_nextn_predict_layers": 0,
		"rope_parameters": yarn.with(config{"rope_type": "yarn", "rope_theta": 10000}),
	}), deepSeekTensors()))
	if fmt.Sprintf("%+v", five.Spec) != fmt.Sprintf("%+v", four.Spec) || five.Fingerprint() != four.Fingerprint() {
		t.Errorf("%+v\ndiffers from\n%+v", five.Spec, four.Spec)
	}
	s := four.Spec
	stretch := 0.1*math.Log(10)*0.5 + 1
	if got, want := float64(s.Latent.Scale), stretch*stretch/math.Sqrt(7); math.Abs(got/want-1) > 1e-6 {
		t.Errorf("scores are multiplied by %v, want %v", got, want)
	}
	if got, want := float64(s.Rope.Scale), (0.1*math.Log(10)+1)/stretch; math.Abs(got/want-1) > 1e-6 || len(s.Rope.Frequencies) != 2 || !s.Rope.Interleaved {
		t.Errorf("rope is %+v, want scale %v", s.Rope, want)
	}
	s.Rope, s.Latent.Scale = checkpoint.Rope{}, 0
	want := checkpoint.Spec{
		Family: "deepseek_v3", VocabSize: 10, HiddenSize: 8, Layers: 4, Heads: 2, KVHeads: 1, HeadDim: 7, Intermediate: 12,
		NormEps: 1e-5, MaxPositions: 640, BOS: 1, EOS: []int32{2}, WeightType: tensor.F32,
		Latent: checkpoint.Latent{Rank: 7, QueryRank: 5, Nope: 3, Rope: 4, Value: 2, NormEps: 1e-6},
		Experts: checkpoint.Experts{
			Count: 4, TopK: 2, Intermediate: 3, Normalize: true, Layers: []bool{false, false, true, true},
			Sigmoid: true, Groups: 2, TopGroups: 1, Scale: 2.5, Shared: 6,
		},
	}
	if fmt.Sprintf("%+v", s) != fmt.Sprintf("%+v", want) {
		t.Errorf("spec is\n%+v, want\n%+v", s, want)
	}
	if planes, heads, dim := s.Cache(); planes != 1 || heads != 1 || dim != 11 {
		t.Errorf("a token's cache is %d × %d × %d", planes, heads, dim)
	}
}

// The rows of kv_b_proj are, for each head, those that make its key and those that make its value; nothing that
// the model has is left out or counted twice.
func TestDeepSeekWeights(t *testing.T) {
	all := map[string]tensor.Tensor{}
	elements := 0
	for _, x := range deepSeekTensors() {
		all[x.Name] = x
		elements += x.Elements()
	}
	c := open(t, folder(t, deepSeekConfig(), deepSeekTensors("mtp")))
	if c.Parameters() != int64(elements) {
		t.Errorf("%d parameters, want %d", c.Parameters(), elements)
	}
	for i, l := range c.Weights.Layers {
		p := fmt.Sprintf("model.layers.%d.", i)
		rows := [][]tensor.Tensor{l.KUp, l.VUp}
		both := all[p+"self_attn.kv_b_proj.weight"]
		for at, head := 0, 0; head < 2; head++ {
			for which, n := range []int{3, 2} {
				got := rows[which][head]
				if want := both.Data[at*28 : (at+n)*28]; !slices.Equal(got.Shape, []int{n, 7}) || !slices.Equal(got.Data, want) {
					t.Errorf("layer %d, head %d, part %d is %v, not rows %d to %d", i, head, which, got.Shape, at, at+n)
				}
				at += n
			}
		}
		for name, got := range map[string]tensor.Tensor{
			"self_attn.q_a_proj.weight": l.QDown, "self_attn.q_a_layernorm.weight": l.QDownNorm, "self_attn.q_b_proj.weight": l.Q,
			"self_attn.kv_a_proj_with_mqa.weight": l.KVDown, "self_attn.kv_a_layernorm.weight": l.KVDownNorm, "self_attn.o_proj.weight": l.O,
			"mlp.gate.e_score_correction_bias": l.RouterBias, "mlp.shared_experts.gate_proj.weight": l.Shared.Gate,
			"mlp.shared_experts.up_proj.weight": l.Shared.Up, "mlp.shared_experts.down_proj.weight": l.Shared.Down,
		} {
			if !slices.Equal(got.Data, all[p+name].Data) {
				t.Errorf("layer %d: %s has other bytes", i, name)
			}
		}
		if l.K.Data != nil || l.V.Data != nil || l.QDownBias.Data != nil {
			t.Errorf("layer %d has what its model does not", i)
		}
	}
}

func TestDeepSeekChoices(t *testing.T) {
	for name, c := range map[string]struct {
		changes config
		extras  string
		check   func(*checkpoint.Checkpoint) bool
	}{
		"queries without a latent": {config{"q_lora_rank": (*int)(nil)}, "flat", func(c *checkpoint.Checkpoint) bool {
			return c.Spec.Latent.QueryRank == 0 && c.Weights.Layers[1].QDown.Data == nil && len(c.Weights.Layers[1].Q.Data) == 4*14*8
		}},
		"key left out": {config{"q_lora_rank": nil}, "flat", func(c *checkpoint.Checkpoint) bool { return c.Spec.Latent.QueryRank == 0 }},
		"biases": {config{"attention_bias": true}, "biases", func(c *checkpoint.Checkpoint) bool {
			l := c.Weights.Layers[3]
			return len(l.QDownBias.Data) == 20 && len(l.KVDownBias.Data) == 44 && len(l.OBias.Data) == 32 && l.QBias.Data == nil
		}},
		"no scaling": {config{"rope_scaling": nil}, "", func(c *checkpoint.Checkpoint) bool {
			return c.Spec.Latent.Scale == float32(1/math.Sqrt(7)) && c.Spec.Rope.Scale == 1
		}},
		"halves": {config{"rope_interleave": false}, "", func(c *checkpoint.Checkpoint) bool { return !c.Spec.Rope.Interleaved }},
		"weights as they are": {config{"norm_topk_prob": false, "routed_scaling_factor": 1}, "", func(c *checkpoint.Checkpoint) bool {
			return !c.Spec.Experts.Normalize && c.Spec.Experts.Scale == 1
		}},
		"every second": {config{"moe_layer_freq": 2, "first_k_dense_replace": 2, "num_hidden_layers": 3}, "3", func(c *checkpoint.Checkpoint) bool {
			return slices.Equal(c.Spec.Experts.Layers, []bool{false, false, true})
		}},
		"by architecture": {config{"model_type": nil}, "", func(c *checkpoint.Checkpoint) bool { return c.Spec.Family == "deepseek_v3" }},
		"longer by yarn":  {config{"max_position_embeddings": 64}, "", func(c *checkpoint.Checkpoint) bool { return c.Spec.MaxPositions == 640 }},
	} {
		tensors := deepSeekTensors(strings.Fields(c.extras)...)
		if c.extras == "3" {
			tensors = slices.DeleteFunc(tensors, func(x tensor.Tensor) bool { return strings.HasPrefix(x.Name, "model.layers.3.") })
		}
		if got := open(t, folder(t, deepSeekConfig().with(c.changes), tensors)); !c.check(got) {
			t.Errorf("%s: got %+v", name, got.Spec)
		}
	}
}

func TestDeepSeekRefusals(t *testing.T) {
	without := func(name string) []tensor.Tensor {
		return slices.DeleteFunc(deepSeekTensors(), func(x tensor.Tensor) bool { return x.Name == name })
	}
	for name, c := range map[string]struct {
		changes config
		tensors []tensor.Tensor
		kind    error
		want    string
	}{
		"fp8": {config{"quantization_config": config{"quant_method": "fp8", "weight_block_size": []int{128, 128}}}, nil, tensor.ErrUnsupported,
			"quantization_config: says that the weights are fp8, which is not supported; convert the checkpoint to bf16"},
		"older scoring":    {config{"scoring_func": "softmax"}, nil, tensor.ErrUnsupported, `scoring_func: "softmax" is not supported; sigmoid is`},
		"older choice":     {config{"topk_method": "greedy"}, nil, tensor.ErrUnsupported, `topk_method: "greedy" is not supported; noaux_tc is`},
		"KV heads":         {config{"num_key_value_heads": 1}, nil, tensor.ErrUnsupported, "num_key_value_heads: is 1; with latent attention it must be num_attention_heads, which is 2"},
		"no latent":        {config{"kv_lora_rank": nil}, nil, tensor.ErrMalformed, "kv_lora_rank: is 0"},
		"huge latent":      {config{"kv_lora_rank": 1 << 40}, nil, tensor.ErrMalformed, "rank of the latent: is 1099511627776"},
		"query latent":     {config{"q_lora_rank": 0}, nil, tensor.ErrMalformed, "q_lora_rank: is 0; it must be at least 1, or null"},
		"nothing rotates":  {config{"qk_rope_head_dim": 0}, nil, tensor.ErrMalformed, "rope dimensions: are 0"},
		"all rotates":      {config{"qk_nope_head_dim": 0}, nil, tensor.ErrMalformed, "dimensions of a head that do not rotate: is 0"},
		"negative":         {config{"qk_nope_head_dim": -1 << 62, "qk_rope_head_dim": 4}, nil, tensor.ErrMalformed, "is -4611686018427387900"},
		"no values":        {config{"v_head_dim": nil}, nil, tensor.ErrMalformed, "dimensions of a value: is 0"},
		"no experts":       {config{"n_routed_experts": nil}, nil, tensor.ErrMalformed, "n_routed_experts: is not given"},
		"many experts":     {config{"n_routed_experts": 1 << 40}, nil, tensor.ErrMalformed, "n_routed_experts: is 1099511627776; it must lie in 1 to 16384"},
		"shared not given": {config{"n_shared_experts": nil}, nil, tensor.ErrMalformed, "n_shared_experts: is not given"},
		"dense not given":  {config{"first_k_dense_replace": nil}, nil, tensor.ErrMalformed, "first_k_dense_replace: is not given"},
		"no groups":        {config{"n_group": nil}, nil, tensor.ErrMalformed, "n_group: is not given"},
		"odd groups":       {config{"n_group": 3}, nil, tensor.ErrMalformed, "number of expert groups: is 3, which does not divide the 4 experts"},
		"groups of one":    {config{"n_group": 4, "topk_group": 2}, nil, tensor.ErrMalformed, "number of expert groups: is 4 for 4 experts; a group must have two at least"},
		"more groups":      {config{"topk_group": 3}, nil, tensor.ErrMalformed, "number of expert groups per token: is 3; it must lie in 1 to 2"},
		"too few":          {config{"num_experts_per_tok": 3}, nil, tensor.ErrMalformed, "number of experts per token: is 3; 1 groups of 2 have fewer"},
		"norm not given":   {config{"norm_topk_prob": nil}, nil, tensor.ErrMalformed, "norm_topk_prob: is not given"},
		"scale not given":  {config{"routed_scaling_factor": nil}, nil, tensor.ErrMalformed, "routed_scaling_factor: is not given"},
		"scale":            {config{"routed_scaling_factor": -1}, nil, tensor.ErrMalformed, "routed scaling factor: is -1; it must be a positive number"},
		"huge scale":       {config{"routed_scaling_factor": 1e300}, nil, tensor.ErrMalformed, "routed scaling factor: is +Inf"},
		"frequency":        {config{"moe_layer_freq": 0}, nil, tensor.ErrMalformed, "moe_layer_freq: is 0"},
		"wide experts":     {config{"moe_intermediate_size": 1 << 40}, nil, tensor.ErrMalformed, "moe_intermediate_size: is 1099511627776"},
		"wide shared":      {config{"moe_intermediate_size": 1 << 24, "n_shared_experts": 1 << 14}, nil, tensor.ErrMalformed, "width of the shared experts: is 274877906944"},
		"no bias":          {nil, without("model.layers.2.mlp.gate.e_score_correction_bias"), tensor.ErrMissing, `"model.layers.2.mlp.gate.e_score_correction_bias": is not in the checkpoint; expected shape [4]`},
		"no kv_b":          {nil, without("model.layers.0.self_attn.kv_b_proj.weight"), tensor.ErrMissing, `"model.layers.0.self_attn.kv_b_proj.weight": is not in the checkpoint; expected shape [10 7]`},
		"no shared":        {nil, without("model.layers.3.mlp.shared_experts.up_proj.weight"), tensor.ErrMissing, `"model.layers.3.mlp.shared_experts.up_proj.weight"`},
		"infinite scores":  {config{"rope_scaling": yarn.with(config{"type": "yarn", "mscale_all_dim": 1e300})}, nil, tensor.ErrMalformed, "mscale_all_dim"},
	} {
		tensors := c.tensors
		if tensors == nil {
			tensors = deepSeekTensors()
		}
		_, err := checkpoint.Open(folder(t, deepSeekConfig().with(c.changes), tensors))
		checkError(t, name, err, c.kind, c.want)
	}
}

// Shared experts are split over the ranks that split a layer, and what they sum must come out even.
func TestSharedExpertsOverRanks(t *testing.T) {
	tensors := deepSeekTensors()
	for i, x := range tensors {
		if shape := slices.Clone(x.Shape); strings.Contains(x.Name, "shared_experts") {
			shape[slices.Index(shape, 6)] = 3
			tensors[i] = modelfile.Floats(x.Name, tensor.F32, make([]float32, 24), shape...)
		}
	}
	c := open(t, folder(t, deepSeekConfig().with(config{"n_shared_experts": 1}), tensors))
	for spec, want := range map[string]string{
		"tp=2,ep=2,expt_tp=1": "tp: layer 2: the shared experts' 3 columns (f32) are summed in 1 parts, which 2 ranks cannot share",
		"dp=2,ep=2":           "",
	} {
		shards, err := layout.ParseShards(spec)
		if err != nil {
			t.Fatal(err)
		}
		err = c.CheckShard(shards[0])
		var e *checkpoint.ShardError
		if (err == nil) != (want == "") || err != nil && (!errors.As(err, &e) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", spec, err, want)
		}
	}
}

// A config that knows fewer layers than the file has does not belong to it. Layers that predict further tokens
// are another thing, where the family has them.
func TestStrayLayers(t *testing.T) {
	const first = `"model.layers.3.input_layernorm.weight": is of layer 3, but the number of layers is said to be 3`
	for name, c := range map[string]struct {
		config  config
		tensors []tensor.Tensor
		want    string
	}{
		"deepseek":           {deepSeekConfig().with(config{"num_hidden_layers": 3}), deepSeekTensors(), first},
		"deepseek, with mtp": {deepSeekConfig().with(config{"num_hidden_layers": 3}), deepSeekTensors("mtp"), first},
		"llama":              {tinyConfig("llama").with(config{"num_hidden_layers": 1}), tinyTensors(), `"model.layers.1.input_layernorm.weight": is of layer 1, but the number of layers is said to be 1`},
		"llama has no mtp": {tinyConfig("llama"), append(tinyTensors(), modelfile.Floats("model.layers.2.eh_proj.weight", tensor.F32, make([]float32, 2), 2)),
			`"model.layers.2.eh_proj.weight": is of layer 2`},
	} {
		_, err := checkpoint.Open(folder(t, c.config, c.tensors))
		checkError(t, name, err, tensor.ErrMalformed, c.want)
	}
	odd := append(tinyTensors(), modelfile.Floats("model.layers.x.weight", tensor.F32, make([]float32, 2), 2),
		modelfile.Floats("model.layers.7", tensor.F32, make([]float32, 2), 2), modelfile.Floats("vision.layers.7.weight", tensor.F32, make([]float32, 2), 2))
	open(t, folder(t, tinyConfig("llama"), odd)) // names of no layer
	c := open(t, goldens+"/llama")
	_, err := checkpoint.Open(asGGUF(t, c, tensor.F32, modelfile.KV{Key: "llama.block_count", Value: uint32(2)}))
	checkError(t, "gguf", err, tensor.ErrMalformed, `"blk.2.attn_k.weight": is of layer 2, but the number of layers is said to be 2`)
}
