//go:build unix

package replay

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"

	"baton/internal/modelfile"
	"baton/tensor"
)

// The model is a Llama with random weights: small enough that long prompts are cheap on any machine, and with a context that is
// long enough for them.
const (
	vocabulary   = 512
	hidden       = 32
	intermediate = 64
	heads        = 2
	headDim      = 16
	positions    = 32768

	// tokenBytes is the KV of a token: one layer, keys and values, one head, f32.
	tokenBytes = 2 * headDim * 4
)

// writeModel puts a checkpoint into dir.
func writeModel(dir string, seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 11))
	var list []tensor.Tensor
	add := func(name string, shape ...int) {
		n := 1
		for _, d := range shape {
			n *= d
		}
		values := make([]float32, n)
		for i := range values {
			values[i] = 1 // of a norm
			if len(shape) > 1 {
				values[i] = float32(rng.NormFloat64() / math.Sqrt(float64(shape[1])))
			}
		}
		list = append(list, modelfile.Floats(name, tensor.F32, values, shape...))
	}
	add("model.embed_tokens.weight", vocabulary, hidden)
	add("model.norm.weight", hidden)
	add("lm_head.weight", vocabulary, hidden)
	const layer = "model.layers.0."
	add(layer+"input_layernorm.weight", hidden)
	add(layer+"post_attention_layernorm.weight", hidden)
	add(layer+"self_attn.q_proj.weight", heads*headDim, hidden)
	add(layer+"self_attn.k_proj.weight", headDim, hidden)
	add(layer+"self_attn.v_proj.weight", headDim, hidden)
	add(layer+"self_attn.o_proj.weight", hidden, heads*headDim)
	add(layer+"mlp.gate_proj.weight", intermediate, hidden)
	add(layer+"mlp.up_proj.weight", intermediate, hidden)
	add(layer+"mlp.down_proj.weight", hidden, intermediate)
	weights, err := modelfile.Safetensors(list, nil)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "model.safetensors"), weights, 0o644); err != nil {
		return err
	}
	config := fmt.Sprintf(`{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":%d,"intermediate_size":%d,"num_attention_heads":%d,`+
		`"num_key_value_heads":1,"head_dim":%d,"num_hidden_layers":1,"vocab_size":%d,"max_position_embeddings":%d,"rms_norm_eps":1e-5,"rope_theta":10000.0,`+
		`"hidden_act":"silu","tie_word_embeddings":false,"torch_dtype":"float32","bos_token_id":1,"eos_token_id":2}`,
		hidden, intermediate, heads, headDim, vocabulary, positions)
	return os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o644)
}
