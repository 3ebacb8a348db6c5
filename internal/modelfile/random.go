package modelfile

import (
	"bufio"
	"encoding/binary"
	"encoding/json/v2"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"

	"baton/tensor"
)

// Random describes a checkpoint of random weights: a Qwen3, or, with Experts, a Qwen3-MoE that has them in all
// layers. Its size is for the caller to choose; what it says is noise, and the same for the same seed.
type Random struct {
	Layers, Hidden, Intermediate, Vocab int
	Heads, KVHeads, HeadDim             int
	Experts, TopK, ExpertWidth          int // 0 for a model without
	Positions                           int
	BF16                                bool // else f32
	Seed                                uint64
}

// Write makes the folder, with config.json and model.safetensors. It streams: memory does not grow with the model.
func (r Random) Write(folder string) error {
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return err
	}
	config, err := json.Marshal(r.config(), json.Deterministic(true))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(folder, "config.json"), config, 0o666); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(folder, "model.safetensors"))
	if err != nil {
		return err
	}
	return errors.Join(r.writeWeights(f), f.Close())
}

func (r Random) config() map[string]any {
	c := map[string]any{
		"architectures": []string{"Qwen3ForCausalLM"}, "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
		"hidden_size": r.Hidden, "intermediate_size": r.Intermediate, "vocab_size": r.Vocab, "num_hidden_layers": r.Layers,
		"num_attention_heads": r.Heads, "num_key_value_heads": r.KVHeads, "head_dim": r.HeadDim, "max_position_embeddings": r.Positions,
		"rope_parameters": map[string]any{"rope_theta": 1e6, "rope_type": "default"}, "tie_word_embeddings": false,
		"bos_token_id": 1, "eos_token_id": 2,
	}
	if r.Experts > 0 {
		c["architectures"], c["model_type"] = []string{"Qwen3MoeForCausalLM"}, "qwen3_moe"
		c["num_experts"], c["num_experts_per_tok"], c["moe_intermediate_size"] = r.Experts, r.TopK, r.ExpertWidth
		c["norm_topk_prob"], c["decoder_sparse_step"], c["mlp_only_layers"] = true, 1, []int{}
	}
	return c
}

// weight is a matrix, or, with one row, a norm.
type weight struct {
	name       string
	rows, cols int
}

func (r Random) weights() []weight {
	queries, keys := r.Heads*r.HeadDim, r.KVHeads*r.HeadDim
	list := []weight{{"model.embed_tokens", r.Vocab, r.Hidden}}
	for i := range r.Layers {
		at := func(name string, rows, cols int) {
			list = append(list, weight{fmt.Sprintf("model.layers.%d.%s", i, name), rows, cols})
		}
		mlp := func(prefix string, width int) {
			at(prefix+"gate_proj", width, r.Hidden)
			at(prefix+"up_proj", width, r.Hidden)
			at(prefix+"down_proj", r.Hidden, width)
		}
		at("input_layernorm", 1, r.Hidden)
		at("self_attn.q_proj", queries, r.Hidden)
		at("self_attn.k_proj", keys, r.Hidden)
		at("self_attn.v_proj", keys, r.Hidden)
		at("self_attn.o_proj", r.Hidden, queries)
		at("self_attn.q_norm", 1, r.HeadDim)
		at("self_attn.k_norm", 1, r.HeadDim)
		at("post_attention_layernorm", 1, r.Hidden)
		if r.Experts == 0 {
			mlp("mlp.", r.Intermediate)
			continue
		}
		at("mlp.gate", r.Experts, r.Hidden)
		for e := range r.Experts {
			mlp(fmt.Sprintf("mlp.experts.%d.", e), r.ExpertWidth)
		}
	}
	return append(list, weight{"model.norm", 1, r.Hidden}, weight{"lm_head", r.Vocab, r.Hidden})
}

// writeWeights writes the header of the data first, then the data.
func (r Random) writeWeights(f *os.File) error {
	dtype := tensor.F32
	if r.BF16 {
		dtype = tensor.BF16
	}
	type entry struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	list, entries, end := r.weights(), map[string]entry{}, 0
	for _, w := range list {
		e := entry{DType: map[bool]string{true: "BF16", false: "F32"}[r.BF16], Shape: []int{w.rows, w.cols}}
		if w.rows == 1 {
			e.Shape = []int{w.cols}
		}
		e.Offsets = [2]int{end, end + dtype.RowBytes(w.rows*w.cols)}
		end = e.Offsets[1]
		entries[w.name+".weight"] = e
	}
	header, err := json.Marshal(entries, json.Deterministic(true))
	if err != nil {
		return err
	}
	for len(header)%8 != 0 {
		header = append(header, ' ')
	}
	out := bufio.NewWriterSize(f, 64<<10)
	_, err = out.Write(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...))
	for i, w := range list {
		rng := rand.New(rand.NewPCG(r.Seed, uint64(i)))
		for left := w.rows * w.cols; left > 0 && err == nil; {
			n := min(left, 1<<10)
			_, err = out.Write(r.values(rng, w, n))
			left -= n
		}
	}
	return errors.Join(err, out.Flush())
}

// values makes n numbers of a weight: uniform ones of a variance that keeps the size of activations from matrix to
// matrix; norms are 1.
func (r Random) values(rng *rand.Rand, w weight, n int) []byte {
	data := make([]byte, 0, 4*n)
	size := float32(math.Sqrt(3/float64(w.cols))) / (1 << 15)
	var noise uint64
	for i := range n {
		if i%4 == 0 {
			noise = rng.Uint64()
		}
		v := float32(int16(noise)) * size
		noise >>= 16
		if w.rows == 1 {
			v = 1
		}
		if bits := math.Float32bits(v); r.BF16 {
			data = binary.LittleEndian.AppendUint16(data, uint16(bits>>16))
		} else {
			data = binary.LittleEndian.AppendUint32(data, bits)
		}
	}
	return data
}
