package checkpoint

import "baton/tensor"

// hfDeepSeek is what DeepSeek-V3's config.json has beyond that of other families. DeepSeek's own files name
// scoring_func, topk_method and moe_layer_freq, which transformers leaves out: it knows one value of each.
type hfDeepSeek struct {
	QLoraRank     *int `json:"q_lora_rank"`
	KVLoraRank    int  `json:"kv_lora_rank"`
	QKNopeHeadDim int  `json:"qk_nope_head_dim"`
	QKRopeHeadDim int  `json:"qk_rope_head_dim"`
	VHeadDim      int  `json:"v_head_dim"`

	NumRoutedExperts    *int     `json:"n_routed_experts"`
	NumSharedExperts    *int     `json:"n_shared_experts"`
	FirstKDenseReplace  *int     `json:"first_k_dense_replace"`
	MoELayerFreq        *int     `json:"moe_layer_freq"`
	NumGroups           *int     `json:"n_group"`
	TopKGroup           *int     `json:"topk_group"`
	ScoringFunc         string   `json:"scoring_func"`
	TopKMethod          string   `json:"topk_method"`
	RoutedScalingFactor *float64 `json:"routed_scaling_factor"`
	RopeInterleave      *bool    `json:"rope_interleave"`
}

// latentNormEps is the epsilon of the latents' norms: the model's code has it, no config does.
const latentNormEps = 1e-6

// deepSeek reads heads and experts. head_dim, where transformers writes it, is qk_rope_head_dim again.
func (h *hfConfig) deepSeek(_ family, s *Spec) error {
	if n := h.NumKeyValueHeads; n != nil && *n != s.Heads {
		return unsupported("num_key_value_heads", "is %d; with latent attention it must be num_attention_heads, which is %d", *n, s.Heads)
	}
	s.KVHeads, s.HeadDim = 1, h.QKNopeHeadDim+h.QKRopeHeadDim
	s.Latent = Latent{
		Rank: h.KVLoraRank, Nope: h.QKNopeHeadDim, Rope: h.QKRopeHeadDim, Value: h.VHeadDim, NormEps: latentNormEps,
	}
	if s.Latent.Rank < 1 {
		return malformed("kv_lora_rank", "is %d; it must be at least 1", s.Latent.Rank)
	}
	if h.QLoraRank != nil {
		if s.Latent.QueryRank = *h.QLoraRank; s.Latent.QueryRank < 1 {
			return malformed("q_lora_rank", "is %d; it must be at least 1, or null", s.Latent.QueryRank)
		}
	}
	s.Rope.Interleaved = h.RopeInterleave == nil || *h.RopeInterleave
	var err error
	s.Experts, err = h.deepSeekExperts()
	return err
}

// deepSeekExperts reads the router's rule. Where a config leaves a number out, transformers takes that of the
// 671-billion model; a model to which it does not apply would compute nonsense in silence, so this does not.
func (h *hfConfig) deepSeekExperts() (Experts, error) {
	e := Experts{TopK: h.NumExpertsPerTok, Intermediate: h.MoEIntermediateSize, Sigmoid: true}
	if h.ScoringFunc != "" && h.ScoringFunc != "sigmoid" {
		return e, unsupported("scoring_func", "%q is not supported; sigmoid is", h.ScoringFunc)
	}
	if h.TopKMethod != "" && h.TopKMethod != "noaux_tc" {
		return e, unsupported("topk_method", "%q is not supported; noaux_tc is", h.TopKMethod)
	}
	shared, dense := 0, 0
	for _, f := range []struct {
		field string
		from  *int
		to    *int
		least int
	}{
		{"n_routed_experts", h.NumRoutedExperts, &e.Count, 1},
		{"n_shared_experts", h.NumSharedExperts, &shared, 0},
		{"first_k_dense_replace", h.FirstKDenseReplace, &dense, 0},
		{"n_group", h.NumGroups, &e.Groups, 1},
		{"topk_group", h.TopKGroup, &e.TopGroups, 1},
	} {
		switch {
		case f.from == nil:
			return e, malformed(f.field, "is not given")
		case *f.from < f.least || *f.from > maxExperts:
			return e, malformed(f.field, "is %d; it must lie in %d to %d", *f.from, f.least, maxExperts)
		}
		*f.to = *f.from
	}
	switch {
	case h.NormTopKProb == nil:
		return e, malformed("norm_topk_prob", "is not given")
	case h.RoutedScalingFactor == nil:
		return e, malformed("routed_scaling_factor", "is not given")
	}
	e.Normalize, e.Scale = *h.NormTopKProb, float32(*h.RoutedScalingFactor)
	if e.Intermediate > maxWidth {
		return e, malformed("moe_intermediate_size", "is %d; it must lie in 1 to %d", e.Intermediate, maxWidth)
	}
	e.Shared = shared * e.Intermediate
	every := 1
	if h.MoELayerFreq != nil {
		every = *h.MoELayerFreq
	}
	if every < 1 {
		return e, malformed("moe_layer_freq", "is %d; it must be at least 1", every)
	}
	e.Layers = sparseLayers(h.NumHiddenLayers, func(i int) bool { return i >= dense && i%every == 0 })
	return e, nil
}

func (l *Latent) check() error {
	if l.Rank == 0 {
		return nil
	}
	for _, f := range []struct {
		what       string
		value, max int
	}{
		{"rank of the latent", l.Rank, maxHeadDim - maxHeadDim/4},
		{"rank of the queries' latent", max(l.QueryRank, 1), maxWidth},
		{"dimensions of a head that do not rotate", l.Nope, maxHeadDim},
		{"dimensions of a head that rotate", l.Rope, maxHeadDim / 4},
		{"dimensions of a value", l.Value, maxHeadDim},
	} {
		if f.value < 1 || f.value > f.max {
			return malformed(f.what, "is %d; it must lie in 1 to %d", f.value, f.max)
		}
	}
	return nil
}

// latentNames is how a format calls the tensors of latent attention; q is that of queries made from a latent.
type latentNames struct{ qDown, qDownNorm, q, kvDown, kvDownNorm, kvUp string }

// latent finds the tensors of latent attention. The file has what makes keys and what makes values in one
// matrix, head by head.
func (l *loader) latent(out *Layer, s *Spec, n names, at func(string) string, has optional) {
	m := s.Latent
	queries := s.Heads * s.HeadDim
	if m.QueryRank > 0 {
		out.QDown = l.matrix(at(n.latent.qDown), m.QueryRank, s.HiddenSize)
		out.QDownBias = l.bias(at(n.latent.qDown), m.QueryRank, has.qkvBias)
		out.QDownNorm = l.vector(at(n.latent.qDownNorm), m.QueryRank, always)
		out.Q = l.matrix(at(n.latent.q), queries, m.QueryRank)
	} else {
		out.Q = l.matrix(at(n.q), queries, s.HiddenSize)
	}
	out.KVDown = l.matrix(at(n.latent.kvDown), m.Rank+m.Rope, s.HiddenSize)
	out.KVDownBias = l.bias(at(n.latent.kvDown), m.Rank+m.Rope, has.qkvBias)
	out.KVDownNorm = l.vector(at(n.latent.kvDownNorm), m.Rank, always)
	up := l.matrix(at(n.latent.kvUp), s.Heads*(m.Nope+m.Value), m.Rank)
	out.O = l.matrix(at(n.o), s.HiddenSize, s.Heads*m.Value)
	out.OBias = l.bias(at(n.o), s.HiddenSize, has.outBias)
	if l.err != nil {
		return
	}
	out.KUp, out.VUp = make([]tensor.Tensor, s.Heads), make([]tensor.Tensor, s.Heads)
	for i := range s.Heads {
		from := i * (m.Nope + m.Value)
		out.KUp[i], out.VUp[i] = up.SliceRows(from, from+m.Nope), up.SliceRows(from+m.Nope, from+m.Nope+m.Value)
	}
}

// shared finds the MLP that every token of a sparse layer goes through.
func (l *loader) shared(s *Spec, n names, at func(string) string) Expert {
	width := s.Experts.Shared
	if width == 0 {
		return Expert{}
	}
	p := n.experts.shared
	return Expert{
		Gate: l.matrix(at(p+"gate_proj"), width, s.HiddenSize),
		Up:   l.matrix(at(p+"up_proj"), width, s.HiddenSize),
		Down: l.matrix(at(p+"down_proj"), s.HiddenSize, width),
	}
}
