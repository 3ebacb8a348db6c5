package modelfile

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"baton/checkpoint"
	"baton/tensor"
)

// FromCheckpoint writes a Hugging Face checkpoint as a GGUF file the way llama.cpp's converter lays it
// out: its tensor names, a llama's query and key rows permuted for interleaved RoPE. Matrices get the
// given type, or stay f32 where their rows are no whole number of its blocks; vectors stay f32. The file
// has no tokenizer beyond its special ids. Entries of more are added, or replace those of the same key.
func FromCheckpoint(c *checkpoint.Checkpoint, matrices tensor.DType, more ...KV) ([]byte, error) {
	s := c.Spec
	e := exporter{spec: s, matrices: matrices}
	e.add("token_embd.weight", c.Weights.Embed, 0)
	for i, l := range c.Weights.Layers {
		e.layer(fmt.Sprintf("blk.%d.", i), l)
	}
	e.add("output_norm.weight", c.Weights.Norm, 0)
	if !s.TiedHead {
		e.add("output.weight", c.Weights.Head, 0)
	}
	// GGUF has no field for most rules of scaling: what they change goes into rope_freqs, as the converter
	// does for llama3.
	const base = 10000
	divisors := make([]float32, len(s.Rope.Frequencies))
	for i, f := range s.Rope.Frequencies {
		divisors[i] = float32(math.Pow(base, -2*float64(i)/float64(s.HeadDim)) / f)
	}
	e.tensors = append(e.tensors, Floats("rope_freqs.weight", tensor.F32, divisors, len(divisors)))
	if e.err != nil {
		return nil, e.err
	}
	architecture := strings.ReplaceAll(s.Family, "_", "")
	p := architecture + "."
	metadata := []KV{
		{Key: "general.architecture", Value: architecture},
		{Key: p + "block_count", Value: uint32(s.Layers)},
		{Key: p + "context_length", Value: uint32(s.MaxPositions)},
		{Key: p + "embedding_length", Value: uint32(s.HiddenSize)},
		{Key: p + "feed_forward_length", Value: uint32(s.Intermediate)},
		{Key: p + "attention.head_count", Value: uint32(s.Heads)},
		{Key: p + "attention.head_count_kv", Value: uint32(s.KVHeads)},
		{Key: p + "attention.key_length", Value: uint32(s.HeadDim)},
		{Key: p + "attention.value_length", Value: uint32(s.HeadDim)},
		{Key: p + "attention.layer_norm_rms_epsilon", Value: s.NormEps},
		{Key: p + "rope.freq_base", Value: float32(base)},
		{Key: p + "rope.scaling.attn_factor", Value: s.Rope.Scale},
	}
	if s.Experts.Count > 0 {
		metadata = append(metadata,
			KV{Key: p + "expert_count", Value: uint32(s.Experts.Count)},
			KV{Key: p + "expert_used_count", Value: uint32(s.Experts.TopK)},
			KV{Key: p + "expert_feed_forward_length", Value: uint32(s.Experts.Intermediate)})
	}
	if s.BOS >= 0 {
		metadata = append(metadata, KV{Key: "tokenizer.ggml.bos_token_id", Value: uint32(s.BOS)})
	}
	if len(s.EOS) > 0 {
		metadata = append(metadata, KV{Key: "tokenizer.ggml.eos_token_id", Value: uint32(s.EOS[0])})
	}
	metadata = slices.DeleteFunc(metadata, func(kv KV) bool {
		return slices.ContainsFunc(more, func(m KV) bool { return m.Key == kv.Key })
	})
	return GGUF(append(metadata, more...), e.tensors)
}

type exporter struct {
	spec     checkpoint.Spec
	matrices tensor.DType
	tensors  []tensor.Tensor
	err      error
}

func (e *exporter) layer(prefix string, l checkpoint.Layer) {
	queryHeads, keyHeads := 0, 0
	if e.spec.Family == "llama" {
		queryHeads, keyHeads = e.spec.Heads, e.spec.KVHeads
	}
	for _, p := range []struct {
		name  string
		t     tensor.Tensor
		heads int
	}{
		{"attn_norm.weight", l.InputNorm, 0}, {"ffn_norm.weight", l.PostNorm, 0},
		{"attn_q.weight", l.Q, queryHeads}, {"attn_k.weight", l.K, keyHeads},
		{"attn_v.weight", l.V, 0}, {"attn_output.weight", l.O, 0},
		{"attn_q.bias", l.QBias, queryHeads}, {"attn_k.bias", l.KBias, keyHeads},
		{"attn_v.bias", l.VBias, 0}, {"attn_output.bias", l.OBias, 0},
		{"attn_q_norm.weight", l.QNorm, 0}, {"attn_k_norm.weight", l.KNorm, 0},
		{"ffn_gate.weight", l.Gate, 0}, {"ffn_up.weight", l.Up, 0}, {"ffn_down.weight", l.Down, 0},
		{"ffn_gate.bias", l.GateBias, 0}, {"ffn_up.bias", l.UpBias, 0}, {"ffn_down.bias", l.DownBias, 0},
	} {
		e.add(prefix+p.name, p.t, p.heads)
	}
	e.add(prefix+"ffn_gate_inp.weight", l.Router, 0)
	var gate, up, down []tensor.Tensor
	for _, x := range l.Experts {
		gate, up, down = append(gate, x.Gate), append(up, x.Up), append(down, x.Down)
	}
	e.add(prefix+"ffn_gate_exps.weight", stacked(gate), 0)
	e.add(prefix+"ffn_up_exps.weight", stacked(up), 0)
	e.add(prefix+"ffn_down_exps.weight", stacked(down), 0)
}

// stacked puts matrices of one shape and type into one tensor, [matrices, rows, cols].
func stacked(matrices []tensor.Tensor) tensor.Tensor {
	if len(matrices) == 0 {
		return tensor.Tensor{}
	}
	out := tensor.Tensor{DType: matrices[0].DType, Shape: append([]int{len(matrices)}, matrices[0].Shape...)}
	for _, m := range matrices {
		out.Data = append(out.Data, m.Data...)
	}
	return out
}

// add converts one tensor; with heads, it brings the two halves of each head's rows into turns.
func (e *exporter) add(name string, t tensor.Tensor, heads int) {
	if t.Data == nil || e.err != nil {
		return
	}
	values := make([]float32, t.Elements())
	if e.err = tensor.Dequantize(values, t.DType, t.Data); e.err != nil {
		return
	}
	if heads > 0 {
		values = interleave(values, heads, e.spec.HeadDim)
	}
	dtype := tensor.F32
	if len(t.Shape) > 1 && t.Cols()%e.matrices.BlockElements() == 0 {
		dtype = e.matrices
	}
	e.tensors = append(e.tensors, Floats(name, dtype, values, t.Shape...))
}

// interleave takes the rows (single values, for a bias) of each head from a0 a1 … b0 b1 … to a0 b0 a1 b1 ….
func interleave(values []float32, heads, headDim int) []float32 {
	row := len(values) / (heads * headDim)
	out := make([]float32, 0, len(values))
	for head := range slices.Chunk(values, headDim*row) {
		for a := 0; a < headDim/2; a++ {
			b := a + headDim/2
			out = append(out, head[a*row:(a+1)*row]...)
			out = append(out, head[b*row:(b+1)*row]...)
		}
	}
	return out
}
