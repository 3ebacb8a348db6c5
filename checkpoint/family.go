package checkpoint

import "strings"

// family is what sets one line of models apart from the others, beyond its numbers.
type family struct {
	name         string // also config.json's model_type
	gguf         string // GGUF's general.architecture; empty where only folders are read
	architecture string // the class that config.json names
	qkvBias      bool   // query, key and value have biases whatever attention_bias says
	qkNorm       bool
	headDim      int  // when config.json has none; 0 derives it from the hidden size
	interleaved  bool // GGUF stores query and key rows for interleaved RoPE
	experts      bool // some layers are mixtures of experts
	latent       bool // multi-head latent attention, and experts as DeepSeek-V3 has them
}

var families = []family{
	{name: "llama", gguf: "llama", architecture: "LlamaForCausalLM", interleaved: true},
	{name: "qwen2", gguf: "qwen2", architecture: "Qwen2ForCausalLM", qkvBias: true},
	{name: "qwen3", gguf: "qwen3", architecture: "Qwen3ForCausalLM", qkNorm: true, headDim: 128},
	{name: "qwen3_moe", gguf: "qwen3moe", architecture: "Qwen3MoeForCausalLM", qkNorm: true, headDim: 128, experts: true},
	{name: "deepseek_v3", architecture: "DeepseekV3ForCausalLM", experts: true, latent: true},
}

// findFamily looks a family up by the name that field holds; called says how the format calls a family.
func findFamily(field, name string, called func(family) string) (family, error) {
	var known []string
	for _, f := range families {
		if called(f) == "" {
			continue
		}
		if known = append(known, called(f)); called(f) == name {
			return f, nil
		}
	}
	return family{}, unsupported(field, "family %q is not supported; supported: %s", name, strings.Join(known, ", "))
}

// The most that a checkpoint may claim of itself: well over any model, well under where products overflow.
const (
	maxLayers    = 1 << 12
	maxHeads     = 1 << 14
	maxHeadDim   = 1 << 14
	maxWidth     = 1 << 24
	maxVocab     = 1 << 26
	maxPositions = 1 << 30
	maxExperts   = 1 << 14
)

// check holds every number against its bounds, so that later code may multiply them.
func (s *Spec) check() error {
	for _, f := range []struct {
		what       string
		value, max int
	}{
		{"vocabulary size", s.VocabSize, maxVocab},
		{"hidden size", s.HiddenSize, maxWidth},
		{"number of layers", s.Layers, maxLayers},
		{"number of attention heads", s.Heads, maxHeads},
		{"number of key/value heads", s.KVHeads, maxHeads},
		{"head dimension", s.HeadDim, maxHeadDim},
		{"intermediate size", s.Intermediate, maxWidth},
		{"longest sequence", s.MaxPositions, maxPositions},
	} {
		if f.value < 1 || f.value > f.max {
			return malformed(f.what, "is %d; it must lie in 1 to %d", f.value, f.max)
		}
	}
	if s.Heads%s.KVHeads != 0 {
		return malformed("number of key/value heads", "is %d, which does not divide the %d attention heads", s.KVHeads, s.Heads)
	}
	if err := s.Latent.check(); err != nil {
		return err
	}
	if err := s.Experts.check(); err != nil {
		return err
	}
	if !(s.NormEps > 0 && s.NormEps < 1) {
		return malformed("RMSNorm epsilon", "is %g; it must lie between 0 and 1", s.NormEps)
	}
	return nil
}

// keepIDs sets the special ids, dropping those outside the vocabulary: no step could produce them.
func (s *Spec) keepIDs(bos []int64, eos ...[]int64) {
	s.BOS, s.EOS = -1, nil
	inside := func(id int64) bool { return id >= 0 && id < int64(s.VocabSize) }
	if len(bos) > 0 && inside(bos[0]) {
		s.BOS = int32(bos[0])
	}
	seen := make(map[int64]bool)
	for _, ids := range eos {
		for _, id := range ids {
			if inside(id) && !seen[id] {
				seen[id] = true
				s.EOS = append(s.EOS, int32(id))
			}
		}
	}
}
