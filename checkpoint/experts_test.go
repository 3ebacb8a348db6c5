package checkpoint_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"baton/checkpoint"
	"baton/internal/modelfile"
	"baton/tensor"
)

// moeConfig is tinyConfig with two experts to a token of three.
func moeConfig() config {
	return tinyConfig("qwen3_moe").with(config{"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5})
}

// moeTensors makes what moeConfig describes, experts one by one; layers named dense keep their MLP.
func moeTensors(dense ...int) []tensor.Tensor {
	var out []tensor.Tensor
	for _, t := range tinyTensors("norms", "head") {
		layer, rest := 0, ""
		if n, _ := fmt.Sscanf(t.Name, "model.layers.%d.%s", &layer, &rest); n < 2 || !strings.HasPrefix(rest, "mlp.") || slices.Contains(dense, layer) {
			out = append(out, t)
			continue
		}
		if rest != "mlp.gate_proj.weight" {
			continue
		}
		p := fmt.Sprintf("model.layers.%d.mlp.", layer)
		seed := float32(1000 * (layer + 1))
		add := func(name string, rows, cols int) {
			values := make([]float32, rows*cols)
			for i := range values {
				seed++
				values[i] = seed
			}
			out = append(out, modelfile.Floats(p+name+".weight", tensor.F32, values, rows, cols))
		}
		add("gate", 3, 8)
		for e := range 3 {
			add(fmt.Sprintf("experts.%d.gate_proj", e), 5, 8)
			add(fmt.Sprintf("experts.%d.up_proj", e), 5, 8)
			add(fmt.Sprintf("experts.%d.down_proj", e), 8, 5)
		}
	}
	return out
}

// fused puts all experts of a layer into two tensors, gate above up, as transformers 5 holds them.
func fused(tensors []tensor.Tensor) []tensor.Tensor {
	var out []tensor.Tensor
	data := map[string][]byte{}
	for _, t := range tensors {
		prefix, rest, ok := strings.Cut(t.Name, ".experts.")
		switch {
		case !ok:
			out = append(out, t)
		case strings.HasSuffix(rest, "down_proj.weight"):
			data[prefix+".experts.down_proj"] = append(data[prefix+".experts.down_proj"], t.Data...)
		default: // gate and up of an expert follow each other
			data[prefix+".experts.gate_up_proj"] = append(data[prefix+".experts.gate_up_proj"], t.Data...)
		}
	}
	for name, d := range data {
		shape := []int{3, 10, 8}
		if strings.HasSuffix(name, "down_proj") {
			shape = []int{3, 8, 5}
		}
		out = append(out, tensor.Tensor{Name: name, DType: tensor.F32, Shape: shape, Data: d})
	}
	return out
}

// However the file keeps them, the experts are the same.
func TestExpertSpellings(t *testing.T) {
	base := moeConfig()
	single := open(t, folder(t, base, moeTensors()))
	together := open(t, folder(t, base.with(config{"num_experts": nil, "num_local_experts": 3, "mlp_only_layers": []int{}, "decoder_sparse_step": 1}), fused(moeTensors())))
	if fmt.Sprintf("%+v", together.Spec) != fmt.Sprintf("%+v", single.Spec) {
		t.Errorf("spec is %+v, want %+v", together.Spec, single.Spec)
	}
	if together.Parameters() != single.Parameters() || together.Bytes() != single.Bytes() {
		t.Errorf("%d parameters, want %d", together.Parameters(), single.Parameters())
	}
	for i, l := range single.Weights.Layers {
		m := together.Weights.Layers[i]
		if len(l.Experts) != 3 || len(m.Experts) != 3 || !slices.Equal(l.Router.Data, m.Router.Data) {
			t.Fatalf("layer %d: %d and %d experts", i, len(l.Experts), len(m.Experts))
		}
		for e, x := range l.Experts {
			y := m.Experts[e]
			for _, p := range [][2]tensor.Tensor{{x.Gate, y.Gate}, {x.Up, y.Up}, {x.Down, y.Down}} {
				if !slices.Equal(p[0].Data, p[1].Data) || !slices.Equal(p[0].Shape, p[1].Shape) {
					t.Errorf("%s and %s differ", p[0].Name, p[1].Name)
				}
			}
		}
	}
}

func TestExpertChoices(t *testing.T) {
	for name, c := range map[string]struct {
		changes config
		dense   []int
		layers  []bool
		norm    bool
	}{
		"all layers":       {nil, nil, []bool{true, true}, false},
		"normalised":       {config{"norm_topk_prob": true}, nil, []bool{true, true}, true},
		"every second":     {config{"decoder_sparse_step": 2}, []int{0}, []bool{false, true}, false},
		"but the last":     {config{"mlp_only_layers": []int{1, 7, -1}}, []int{1}, []bool{true, false}, false},
		"neither of them":  {config{"mlp_only_layers": []int{1}, "decoder_sparse_step": 2}, []int{0, 1}, []bool{false, false}, false},
		"by architecture":  {config{"model_type": nil}, nil, []bool{true, true}, false},
		"null means none":  {config{"mlp_only_layers": []int(nil)}, nil, []bool{true, true}, false},
		"old and new name": {config{"num_local_experts": 3}, nil, []bool{true, true}, false},
	} {
		c2 := open(t, folder(t, moeConfig().with(c.changes), moeTensors(c.dense...)))
		want := checkpoint.Experts{Count: 3, TopK: 2, Intermediate: 5, Normalize: c.norm, Layers: c.layers}
		if fmt.Sprintf("%+v", c2.Spec.Experts) != fmt.Sprintf("%+v", want) {
			t.Errorf("%s: experts are %+v, want %+v", name, c2.Spec.Experts, want)
		}
	}
}

func TestExpertRefusals(t *testing.T) {
	const down = "model.layers.1.mlp.experts.2.down_proj.weight"
	without := func(name string) []tensor.Tensor {
		return slices.DeleteFunc(moeTensors(), func(t tensor.Tensor) bool { return t.Name == name })
	}
	misfused := fused(moeTensors())
	for i, x := range misfused {
		if strings.HasSuffix(x.Name, "gate_up_proj") {
			misfused[i].Shape = []int{3, 8, 10}
		}
	}
	for name, c := range map[string]struct {
		changes config
		tensors []tensor.Tensor
		kind    error
		want    string
	}{
		"no number":     {config{"num_experts": nil}, moeTensors(), tensor.ErrMalformed, "number of experts: is 0; it must lie in 1 to 16384"},
		"many":          {config{"num_experts": 1 << 40}, moeTensors(), tensor.ErrMalformed, "number of experts: is 1099511627776"},
		"none a token":  {config{"num_experts_per_tok": 0}, moeTensors(), tensor.ErrMalformed, "number of experts per token: is 0; it must lie in 1 to 3"},
		"more a token":  {config{"num_experts_per_tok": 4}, moeTensors(), tensor.ErrMalformed, "number of experts per token: is 4"},
		"no width":      {config{"moe_intermediate_size": nil}, moeTensors(), tensor.ErrMalformed, "intermediate size of an expert: is 0"},
		"no step":       {config{"decoder_sparse_step": 0}, moeTensors(), tensor.ErrMalformed, "decoder_sparse_step: is 0"},
		"text as layer": {config{"mlp_only_layers": []string{"1"}}, moeTensors(), tensor.ErrMalformed, "mlp_only_layers/0: is a string, expected an integer"},
		"many layers":   {config{"num_hidden_layers": 1 << 40}, moeTensors(), tensor.ErrMalformed, "number of layers: is 1099511627776"},
		"dense layer":   {config{"mlp_only_layers": []int{1}}, moeTensors(), tensor.ErrMissing, `"model.layers.1.mlp.gate_proj.weight"`},
		"sparse layer":  {nil, moeTensors(1), tensor.ErrMissing, `"model.layers.1.mlp.gate.weight": is not in the checkpoint; expected shape [3 8]`},
		"an expert":     {nil, without(down), tensor.ErrMissing, `"` + down + `": is not in the checkpoint; expected shape [8 5]`},
		"another type": {nil, append(without(down), modelfile.Floats(down, tensor.BF16, make([]float32, 40), 8, 5)), tensor.ErrUnsupported,
			`"` + down + `": is bf16 where that of expert 0 is f32`},
		"integers":       {nil, append(without(down), tensor.Tensor{Name: down, DType: tensor.I8, Shape: []int{8, 5}, Data: make([]byte, 40)}), tensor.ErrUnsupported, "is of type i8"},
		"turned":         {nil, misfused, tensor.ErrMalformed, `mlp.experts.gate_up_proj": has shape [3 8 10], expected [3 10 8]`},
		"half of it":     {nil, slices.DeleteFunc(fused(moeTensors()), func(t tensor.Tensor) bool { return strings.HasSuffix(t.Name, "experts.down_proj") }), tensor.ErrMissing, `mlp.experts.down_proj": is not in the checkpoint`},
		"no experts max": {config{"num_experts": -1}, moeTensors(), tensor.ErrMalformed, "number of experts: is -1"},
	} {
		_, err := checkpoint.Open(folder(t, moeConfig().with(c.changes), c.tensors))
		checkError(t, name, err, c.kind, c.want)
	}
}

// GGUF keeps quantised experts too, and may say whether weights are normalised.
func TestGGUFExperts(t *testing.T) {
	hf := open(t, goldens+"/qwen3_moe")
	c := open(t, asGGUF(t, hf, tensor.Q8_0, modelfile.KV{Key: "qwen3moe.expert_weights_norm", Value: false}))
	if e := c.Spec.Experts; e.Normalize || e.Count != 8 || !slices.Equal(e.Layers, []bool{false, true, true, true}) {
		t.Errorf("experts are %+v", e)
	}
	want := make([]float32, 48*64)
	if err := tensor.Dequantize(want, tensor.F32, hf.Weights.Layers[2].Experts[5].Up.Data); err != nil {
		t.Fatal(err)
	}
	up := c.Weights.Layers[2].Experts[5].Up
	if q := modelfile.Floats("", tensor.Q8_0, want, 48, 64); up.DType != tensor.Q8_0 || !slices.Equal(up.Data, q.Data) {
		t.Errorf("expert 5 has %s, %v of %v, or other bytes", up.Name, up.Shape, up.DType)
	}
	for name, x := range map[string]struct {
		kv   modelfile.KV
		want string
	}{
		"count": {modelfile.KV{Key: "qwen3moe.expert_count", Value: uint32(0)}, "number of experts: is 0"},
		"top":   {modelfile.KV{Key: "qwen3moe.expert_used_count", Value: uint32(9)}, "number of experts per token: is 9; it must lie in 1 to 8"},
		"norm":  {modelfile.KV{Key: "qwen3moe.expert_weights_norm", Value: uint32(1)}, "expert_weights_norm"},
		"width": {modelfile.KV{Key: "qwen3moe.expert_feed_forward_length", Value: uint32(64)}, `blk.1.ffn_gate_exps.weight": has shape [8 48 64], expected [8 64 64]`},
	} {
		_, err := checkpoint.Open(asGGUF(t, hf, tensor.F32, x.kv))
		checkError(t, name, err, tensor.ErrMalformed, x.want)
	}
}
