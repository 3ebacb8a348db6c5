// Package checkpoint turns what is on disk (a Hugging Face folder or a GGUF file) into a Spec and the
// weights of a decoder. It reads headers and maps files; it never copies or converts weights.
package checkpoint

import "baton/tensor"

// Spec describes a decoder-only transformer, whatever file format it came from.
type Spec struct {
	Family       string // "llama", "qwen2", "qwen3", "qwen3_moe"
	VocabSize    int
	HiddenSize   int
	Layers       int
	Heads        int // query heads
	KVHeads      int
	HeadDim      int // of one head; not always HiddenSize/Heads
	Intermediate int // width of the MLP, in the layers that have no experts
	NormEps      float32
	Rope         Rope
	MaxPositions int  // the longest sequence the model was made for
	QKNorm       bool // RMSNorm over each query and key head before RoPE (Qwen3)
	TiedHead     bool // the output head is the embedding table
	Experts      Experts

	BOS int32   // -1 when there is none
	EOS []int32 // ids that end a generation, all within the vocabulary; may be empty

	WeightType tensor.DType // the type of most weight bytes; tells --kv-dtype auto what to pick
}

// Sparse reports whether a layer has experts in the place of its MLP.
func (s *Spec) Sparse(layer int) bool {
	return layer < len(s.Experts.Layers) && s.Experts.Layers[layer]
}

// Experts describes the mixture-of-experts layers; it is zero for a dense model. The router gives each
// token a probability for every expert (softmax over all of them); the TopK likeliest compute, and their
// results are summed, weighed by probability.
type Experts struct {
	Count        int    // experts of a layer
	TopK         int    // of which a token goes to so many
	Intermediate int    // width of one expert
	Normalize    bool   // the weights of a token's experts are divided by their sum
	Layers       []bool // which layers have experts
}

// Rope holds the rotary embedding's constants. Frequencies already contain every scaling rule of the
// checkpoint (linear, llama3, yarn, GGUF rope factors): position p rotates pair i by p*Frequencies[i].
type Rope struct {
	Frequencies []float64 // HeadDim/2 (or fewer, when only part of a head rotates) radians a position
	Scale       float32   // multiplies cos and sin (yarn's attention factor); 1 otherwise
	Interleaved bool      // pairs are (2i, 2i+1), as GGUF llama stores them; else (i, i+n/2)
}

// Layer holds one block's weights. A bias that the model does not have is a zero Tensor (nil Data).
type Layer struct {
	InputNorm, PostNorm tensor.Tensor // RMSNorm before attention, before the MLP
	Q, K, V, O          tensor.Tensor // [heads*headDim, hidden], ..., [hidden, heads*headDim]
	QBias, KBias, VBias tensor.Tensor
	OBias               tensor.Tensor
	QNorm, KNorm        tensor.Tensor // [headDim], Qwen3
	Gate, Up, Down      tensor.Tensor // of an MLP; absent in a sparse layer
	GateBias, UpBias    tensor.Tensor
	DownBias            tensor.Tensor

	Router  tensor.Tensor // [experts, hidden]; absent, as Experts, in a layer with an MLP
	Experts []Expert
}

// Expert is one expert's MLP. All experts of a layer have the same shapes and types.
type Expert struct {
	Gate, Up, Down tensor.Tensor // [intermediate, hidden] twice, [hidden, intermediate]
}

// Weights are views into the checkpoint's memory maps, valid until Close.
type Weights struct {
	Embed  tensor.Tensor // [vocab, hidden]
	Layers []Layer
	Norm   tensor.Tensor
	Head   tensor.Tensor // [vocab, hidden]; equal to Embed when tied
}
