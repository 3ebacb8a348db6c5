// Package checkpoint turns what is on disk (a Hugging Face folder or a GGUF file) into a Spec and the
// weights of a decoder. It reads headers and maps files; it never copies or converts weights.
package checkpoint

import "baton/tensor"

// Spec describes a decoder-only transformer, whatever file format it came from.
type Spec struct {
	Family       string // "llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"
	VocabSize    int
	HiddenSize   int
	Layers       int
	Heads        int // query heads
	KVHeads      int
	HeadDim      int // of one query head; not always HiddenSize/Heads
	Intermediate int // width of the MLP, in the layers that have no experts
	NormEps      float32
	Rope         Rope
	MaxPositions int  // the longest sequence the model was made for
	QKNorm       bool // RMSNorm over each query and key head before RoPE (Qwen3)
	TiedHead     bool // the output head is the embedding table
	Latent       Latent
	Experts      Experts

	BOS int32   // -1 when there is none
	EOS []int32 // ids that end a generation, all within the vocabulary; may be empty

	WeightType tensor.DType // the type of most weight bytes; tells --kv-dtype auto what to pick
}

// Cache is what attention keeps of a token in each layer: planes × heads × dim numbers. Two planes are keys
// and values; one is a latent cache, of one head.
func (s *Spec) Cache() (planes, heads, dim int) {
	if s.Latent.Rank > 0 {
		return 1, 1, s.Latent.Rank + s.Latent.Rope
	}
	return 2, s.KVHeads, s.HeadDim
}

// Latent describes multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); it is zero for a
// model without. Of a token the cache holds one vector for all heads: a normed latent of Rank numbers, from
// which any head's key and value could be made, and Rope numbers, rotated, that end every head's key. KVHeads
// is 1 and HeadDim is Nope+Rope.
type Latent struct {
	Rank      int     // width of the latent; 0 without latent attention
	QueryRank int     // width of the latent that queries are made from; 0 where they come from the hidden state
	Nope      int     // numbers of a query head that do not rotate
	Rope      int     // numbers of a query head, behind those, that do
	Value     int     // numbers of a head's value
	NormEps   float32 // of the latents' norms, which is not the layers' NormEps
	Scale     float32 // multiplies scores: 1/√HeadDim, corrected for yarn
}

// Sparse reports whether a layer has experts in the place of its MLP.
func (s *Spec) Sparse(layer int) bool {
	return layer < len(s.Experts.Layers) && s.Experts.Layers[layer]
}

// Experts describes the mixture-of-experts layers; it is zero for a dense model. The router gives each
// token a score for every expert; the TopK best compute, and their results are summed, weighed by score.
type Experts struct {
	Count        int    // experts of a layer
	TopK         int    // of which a token goes to so many
	Intermediate int    // width of one expert
	Normalize    bool   // the weights of a token's experts are divided by their sum
	Layers       []bool // which layers have experts

	Sigmoid           bool    // scores are sigmoids, and a bias takes part in the choice; else a softmax over all experts
	Groups, TopGroups int     // neighbours form so many groups, and only experts of the best TopGroups are chosen; 0 for none
	Scale             float32 // multiplies the weights in the end; 0 means 1
	Shared            int     // width of an MLP that every token goes through as well; 0 for none
}

// Rope holds the rotary embedding's constants. Frequencies already contain every scaling rule of the
// checkpoint (linear, llama3, yarn, GGUF rope factors): position p rotates pair i by p*Frequencies[i].
type Rope struct {
	Frequencies []float64 // HeadDim/2 (or fewer, when only part of a head rotates) radians a position
	Scale       float32   // multiplies cos and sin (yarn's attention factor); 1 otherwise
	Interleaved bool      // pairs are (2i, 2i+1), as GGUF llama stores them; else (i, i+n/2)
}

// Layer holds one block's weights. What the model does not have is a zero Tensor (nil Data).
type Layer struct {
	InputNorm, PostNorm tensor.Tensor // RMSNorm before attention, before the MLP
	Q, K, V, O          tensor.Tensor // [heads*headDim, hidden], ..., [hidden, heads*headDim]; with Latent see below
	QBias, KBias, VBias tensor.Tensor
	OBias               tensor.Tensor
	QNorm, KNorm        tensor.Tensor // [headDim], Qwen3
	Gate, Up, Down      tensor.Tensor // of an MLP; absent in a sparse layer
	GateBias, UpBias    tensor.Tensor
	DownBias            tensor.Tensor

	// Latent attention has these in the place of K and V. Its Q is [heads*(nope+rope), queryRank], or hidden for
	// the latter where there is no QDown, and its O [hidden, heads*value].
	QDown, QDownBias, QDownNorm    tensor.Tensor   // [queryRank, hidden]; vectors
	KVDown, KVDownBias, KVDownNorm tensor.Tensor   // [rank+rope, hidden], latent first; the norm is of the latent
	KUp, VUp                       []tensor.Tensor // by head: [nope, rank] and [value, rank]

	Router     tensor.Tensor // [experts, hidden]; absent, as Experts, in a layer with an MLP
	RouterBias tensor.Tensor // [experts], added to sigmoid scores for the choice alone
	Experts    []Expert
	Shared     Expert // the MLP of all tokens
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
