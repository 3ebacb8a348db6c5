package checkpoint

import (
	"errors"
	"slices"

	"baton/tensor"
)

// openGGUF opens a file whose metadata names a supported architecture.
func openGGUF(path string) (*Checkpoint, error) {
	g, err := tensor.OpenGGUF(path)
	if err != nil {
		return nil, err
	}
	c := &Checkpoint{Path: path, gguf: g, source: g}
	if err := c.fromGGUF(); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return c, nil
}

func (c *Checkpoint) fromGGUF() error {
	architecture, err := c.gguf.String("general.architecture")
	if err != nil {
		return err
	}
	f, err := findFamily("general.architecture", architecture, ggufName)
	if err != nil {
		return c.problem("", err)
	}
	m := ggufMetadata{g: c.gguf, prefix: architecture + "."}
	m.refuse(f)
	embed, ok := c.gguf.Tensor(ggufNames.embed + ".weight")
	if !ok {
		return problemf(tensor.ErrMissing, c.Path, "tensor \""+ggufNames.embed+".weight\"", "is not in the file; is this a language model?")
	}
	s := Spec{
		Family: f.name, VocabSize: embed.Rows(), QKNorm: f.qkNorm,
		HiddenSize: m.uniform("embedding_length", nil), Layers: m.uniform("block_count", nil),
		Heads: m.uniform("attention.head_count", nil), Intermediate: m.uniform("feed_forward_length", nil),
		MaxPositions: m.uniform("context_length", nil),
		NormEps:      float32(m.number("attention.layer_norm_rms_epsilon", nil)),
	}
	if m.err == nil && s.Heads < 1 {
		m.err = malformed(m.prefix+"attention.head_count", "is %d", s.Heads)
	}
	if m.err != nil {
		return c.problem("", m.err)
	}
	_, hasHead := c.gguf.Tensor(ggufNames.head + ".weight")
	derived := s.HiddenSize / s.Heads
	s.TiedHead = !hasHead
	s.KVHeads = m.uniform("attention.head_count_kv", &s.Heads)
	s.HeadDim = m.uniform("attention.key_length", &derived)
	if v := m.uniform("attention.value_length", &derived); m.err == nil && v != s.HeadDim {
		m.err = unsupported(m.prefix+"attention.value_length", "is %d where keys have %d; they must be equal", v, s.HeadDim)
	}
	if f.experts {
		s.Experts = m.experts(s.Layers)
	}
	rope := m.rope(s.HeadDim, s.MaxPositions)
	if rope.kind == "yarn" {
		s.MaxPositions = stretched(s.MaxPositions, rope)
	}
	s.keepIDs(m.id("bos"), m.id("eos"), m.id("eot"), m.id("eom"), m.enders())
	if m.err != nil {
		return c.problem("", m.err)
	}
	s.Rope.Interleaved = f.interleaved
	c.Spec = s
	return c.finish(rope, ggufNames, optional{qkvBias: perhaps, outBias: perhaps, mlpBias: perhaps})
}

// ggufMetadata reads the keys of one architecture; the first problem sticks.
type ggufMetadata struct {
	g      *tensor.GGUF
	prefix string
	err    error
}

func (m *ggufMetadata) keep(err error) {
	if m.err == nil {
		m.err = err
	}
}

// uniform is an integer that may be written once or once a layer, if all layers agree. An absent key
// gives *byDefault, or an error when that is nil.
func (m *ggufMetadata) uniform(key string, byDefault *int) int {
	key = m.prefix + key
	if byDefault != nil && !m.g.Has(key) {
		return *byDefault
	}
	if n, err := m.g.Int(key); err == nil {
		return int(n)
	}
	ns, err := m.g.Int32s(key)
	switch {
	case err != nil:
		m.keep(err)
	case len(ns) == 0:
		m.keep(malformed(key, "is an empty array"))
	case slices.ContainsFunc(ns, func(n int32) bool { return n != ns[0] }):
		m.keep(unsupported(key, "differs from layer to layer, which is not supported"))
	default:
		return int(ns[0])
	}
	return 0
}

func (m *ggufMetadata) number(key string, byDefault *float64) float64 {
	key = m.prefix + key
	if byDefault != nil && !m.g.Has(key) {
		return *byDefault
	}
	f, err := m.g.Float(key)
	m.keep(err)
	return f
}

// refuse names what a supported architecture can have in its metadata but this program does not do.
func (m *ggufMetadata) refuse(f family) {
	zero := 0
	if m.g.Has("split.count") {
		if n, err := m.g.Int("split.count"); err != nil || n > 1 {
			m.keep(unsupported("split.count", "says that this is one part of a split file; merge the parts first"))
		}
	}
	if !f.experts && m.uniform("expert_count", &zero) > 0 {
		m.keep(unsupported(m.prefix+"expert_count", "says that this is a mixture of experts, which is not supported"))
	}
	if m.uniform("attention.sliding_window", &zero) > 0 {
		m.keep(unsupported(m.prefix+"attention.sliding_window", "is set; sliding-window attention is not supported"))
	}
	for _, name := range []string{"rope_factors_long.weight", "rope_factors_short.weight"} {
		if _, ok := m.g.Tensor(name); ok {
			m.keep(unsupported(name, "is there; rope type \"longrope\" is not supported"))
		}
	}
}

// rope follows llama.cpp: a scaling factor without a type is linear; rope_freqs divide the frequencies;
// attn_factor multiplies whatever attention factor the type has.
func (m *ggufMetadata) rope(headDim, positions int) ropeParams {
	zero, one, base := 0.0, 1.0, 10000.0
	original, fast, slow := float64(positions), 32.0, 1.0
	p := ropeParams{
		kind: "linear", base: m.number("rope.freq_base", &base), dims: m.uniform("rope.dimension_count", &headDim),
		original: m.number("rope.scaling.original_context_length", &original), truncate: true,
		betaFast: m.number("rope.scaling.yarn_beta_fast", &fast), betaSlow: m.number("rope.scaling.yarn_beta_slow", &slow),
		attention: m.number("rope.scaling.attn_factor", &one), scores: 1,
	}
	scale := m.number("rope.scale_linear", &zero) // the key that factor replaced
	if p.factor = m.number("rope.scaling.factor", &scale); p.factor == 0 {
		p.factor = 1
	}
	if key := m.prefix + "rope.scaling.type"; m.g.Has(key) {
		kind, err := m.g.String(key)
		m.keep(err)
		if p.kind = kind; kind == "none" {
			p.kind = "default"
		}
	}
	if p.dims > headDim {
		m.keep(malformed(m.prefix+"rope.dimension_count", "is %d where a head has %d", p.dims, headDim))
	}
	if p.kind == "yarn" {
		if ext := m.number("rope.scaling.yarn_ext_factor", &one); ext >= 0 && ext != 1 {
			m.keep(unsupported(m.prefix+"rope.scaling.yarn_ext_factor", "is %g; only 1 is supported", ext))
		}
		a := yarnAttention(p.factor, 1)
		if mul := m.number("rope.scaling.yarn_log_multiplier", &zero); mul != 0 {
			a /= yarnAttention(p.factor, mul)
		}
		p.attention *= a
	}
	p.divisors = m.ropeFreqs()
	return p
}

func (m *ggufMetadata) ropeFreqs() []float32 {
	t, ok := m.g.Tensor("rope_freqs.weight")
	if !ok {
		return nil
	}
	if t.Elements() > maxHeadDim {
		m.keep(malformed("tensor \"rope_freqs.weight\"", "has %d elements", t.Elements()))
		return nil
	}
	out := make([]float32, t.Elements())
	if err := tensor.Dequantize(out, t.DType, t.Data); err != nil {
		m.keep(malformed("tensor \"rope_freqs.weight\"", "%v", err))
	}
	return out
}

// id is a special token's id, if the tokenizer names one.
func (m *ggufMetadata) id(which string) []int64 {
	key := "tokenizer.ggml." + which + "_token_id"
	if !m.g.Has(key) {
		return nil
	}
	n, err := m.g.Int(key)
	m.keep(err)
	return []int64{n}
}

// Control tokens that end a turn in these families. GGUF has room for one id of each role, where
// generation_config.json lists several; llama.cpp goes by the same texts.
var turnEnders = []string{"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"}

const ggufControlToken = 3

func (m *ggufMetadata) enders() []int64 {
	if !m.g.Has("tokenizer.ggml.tokens") || !m.g.Has("tokenizer.ggml.token_type") {
		return nil
	}
	tokens, err := m.g.Strings("tokenizer.ggml.tokens")
	m.keep(err)
	types, err := m.g.Int32s("tokenizer.ggml.token_type")
	m.keep(err)
	var ids []int64
	for id := range min(len(tokens), len(types)) {
		if types[id] == ggufControlToken && slices.Contains(turnEnders, tokens[id]) {
			ids = append(ids, int64(id))
		}
	}
	return ids
}
