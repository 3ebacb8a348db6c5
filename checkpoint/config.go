package checkpoint

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"

	"baton/tensor"
)

// maxConfigBytes bounds a config file; the longest in use are some hundred kilobytes.
const maxConfigBytes = 16 << 20

// hfConfig is what this program needs of config.json. Pointers tell "absent or null" from zero.
type hfConfig struct {
	ModelType     string   `json:"model_type"`
	Architectures []string `json:"architectures"`

	VocabSize             int      `json:"vocab_size"`
	HiddenSize            int      `json:"hidden_size"`
	NumHiddenLayers       int      `json:"num_hidden_layers"`
	NumAttentionHeads     int      `json:"num_attention_heads"`
	NumKeyValueHeads      *int     `json:"num_key_value_heads"`
	HeadDim               *int     `json:"head_dim"`
	IntermediateSize      int      `json:"intermediate_size"`
	RMSNormEps            *float64 `json:"rms_norm_eps"`
	MaxPositionEmbeddings int      `json:"max_position_embeddings"`
	HiddenAct             string   `json:"hidden_act"`
	AttentionBias         bool     `json:"attention_bias"`
	MLPBias               bool     `json:"mlp_bias"`
	TieWordEmbeddings     bool     `json:"tie_word_embeddings"`
	BOS                   idList   `json:"bos_token_id"`
	EOS                   idList   `json:"eos_token_id"`

	// Qwen3-MoE. transformers 4 writes num_experts, 5 num_local_experts.
	NumExperts          *int  `json:"num_experts"`
	NumLocalExperts     *int  `json:"num_local_experts"`
	NumExpertsPerTok    int   `json:"num_experts_per_tok"`
	MoEIntermediateSize int   `json:"moe_intermediate_size"`
	NormTopKProb        *bool `json:"norm_topk_prob"`
	DecoderSparseStep   *int  `json:"decoder_sparse_step"`
	MLPOnlyLayers       []int `json:"mlp_only_layers"`

	hfDeepSeek

	// transformers 5 has rope_parameters, theta included; 4 has rope_theta beside rope_scaling.
	RopeParameters      *hfRope  `json:"rope_parameters"`
	RopeScaling         *hfRope  `json:"rope_scaling"`
	RopeTheta           *float64 `json:"rope_theta"`
	PartialRotaryFactor *float64 `json:"partial_rotary_factor"`
	OriginalPositions   *float64 `json:"original_max_position_embeddings"`

	UseSlidingWindow bool     `json:"use_sliding_window"`
	MaxWindowLayers  *int     `json:"max_window_layers"`
	LayerTypes       []string `json:"layer_types"`

	Quantization *struct {
		Method string `json:"quant_method"`
	} `json:"quantization_config"`
}

type hfRope struct {
	RopeType            string   `json:"rope_type"`
	Type                string   `json:"type"` // the older spelling of rope_type
	RopeTheta           *float64 `json:"rope_theta"`
	Factor              *float64 `json:"factor"`
	OriginalPositions   *float64 `json:"original_max_position_embeddings"`
	LowFreqFactor       float64  `json:"low_freq_factor"`
	HighFreqFactor      float64  `json:"high_freq_factor"`
	AttentionFactor     *float64 `json:"attention_factor"`
	BetaFast            float64  `json:"beta_fast"`
	BetaSlow            float64  `json:"beta_slow"`
	MScale              float64  `json:"mscale"`
	MScaleAllDim        float64  `json:"mscale_all_dim"`
	Truncate            *bool    `json:"truncate"`
	PartialRotaryFactor *float64 `json:"partial_rotary_factor"`

	FullAttention jsontext.Value `json:"full_attention"` // there when each layer type has its own rope
}

// idList is a token id, a list of them, or null.
type idList []int64

func (l *idList) UnmarshalJSONFrom(dec *jsontext.Decoder) error {
	if dec.PeekKind() == '[' {
		return json.UnmarshalDecode(dec, (*[]int64)(l))
	}
	var id *int64
	if err := json.UnmarshalDecode(dec, &id); err != nil {
		return err
	}
	*l = nil
	if id != nil {
		*l = idList{*id}
	}
	return nil
}

// readJSON reads a small JSON file into v.
func readJSON(path string, v any) error {
	f, err := os.Open(path)
	if err != nil {
		return &tensor.FileError{Path: path, Problem: "cannot be read: " + reason(err), Err: err}
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConfigBytes+1))
	if err != nil {
		return &tensor.FileError{Path: path, Problem: "cannot be read: " + reason(err), Err: err}
	}
	if len(data) > maxConfigBytes {
		return problemf(tensor.ErrMalformed, path, "", "is over %d bytes, too long for a config", maxConfigBytes)
	}
	if err := json.Unmarshal(data, v); err != nil {
		member, problem := tensor.JSONProblem(err)
		return problemf(tensor.ErrMalformed, path, member, "%s", problem)
	}
	return nil
}

// openFolder opens a Hugging Face checkpoint.
func openFolder(path string) (*Checkpoint, error) {
	configPath := filepath.Join(path, "config.json")
	if _, err := os.Stat(configPath); errors.Is(err, os.ErrNotExist) {
		return nil, problemf(tensor.ErrMissing, path, "config.json", "is not in the folder%s", suggestGGUF(path))
	}
	var config hfConfig
	if err := readJSON(configPath, &config); err != nil {
		return nil, err
	}
	generationEOS, generationBOS, err := generationIDs(path)
	if err != nil {
		return nil, err
	}
	c := &Checkpoint{Path: path}
	f, err := config.family()
	if err != nil {
		return nil, c.problem(configPath, err)
	}
	spec, rope, err := config.spec(f)
	if err != nil {
		return nil, c.problem(configPath, err)
	}
	c.Spec = spec
	bos := config.BOS
	if len(bos) == 0 {
		bos = generationBOS
	}
	c.Spec.keepIDs(bos, config.EOS, generationEOS)

	weights, err := openWeights(path)
	if err != nil {
		return nil, err
	}
	c.source = weights
	has := optional{qkvBias: never, outBias: never, mlpBias: never}
	if f.qkvBias || config.AttentionBias {
		has.qkvBias = always
	}
	if config.AttentionBias && !f.qkvBias {
		has.outBias = always
	}
	if config.MLPBias {
		has.mlpBias = always
	}
	n := hfNames
	n.config = configPath
	if f.latent {
		has.routerBias, has.mtp = always, true
	}
	if err := c.finish(rope, n, has); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// suggestGGUF helps whoever named the folder of a .gguf file instead of the file.
func suggestGGUF(folder string) string {
	if found, err := filepath.Glob(filepath.Join(folder, "*.gguf")); err == nil && len(found) > 0 {
		return "; to serve the GGUF file in it, name that: " + found[0]
	}
	return ""
}

// generationIDs returns the eos and bos ids of generation_config.json, which may be absent.
func generationIDs(folder string) (eos, bos idList, err error) {
	var g struct {
		BOS idList `json:"bos_token_id"`
		EOS idList `json:"eos_token_id"`
	}
	err = readJSON(filepath.Join(folder, "generation_config.json"), &g)
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return g.EOS, g.BOS, err
}

// openWeights prefers the single file, as transformers does.
func openWeights(folder string) (*tensor.Safetensors, error) {
	single := filepath.Join(folder, "model.safetensors")
	if _, err := os.Stat(single); err == nil {
		return tensor.OpenSafetensors(single)
	}
	index := single + ".index.json"
	if _, err := os.Stat(index); err == nil {
		return tensor.OpenSafetensorsIndex(index)
	}
	if found, err := filepath.Glob(filepath.Join(folder, "*.bin")); err == nil && len(found) > 0 {
		return nil, problemf(tensor.ErrUnsupported, folder, "", "has its weights in %s; convert them to safetensors", filepath.Base(found[0]))
	}
	return nil, problemf(tensor.ErrMissing, folder, "model.safetensors", "is not in the folder, and no model.safetensors.index.json either")
}

func hfName(f family) string   { return f.name }
func ggufName(f family) string { return f.gguf }

// family names the family, by model_type or, in a config without one, by architecture.
func (h *hfConfig) family() (family, error) {
	if h.ModelType == "" && len(h.Architectures) > 0 {
		for _, f := range families {
			if f.architecture == h.Architectures[0] {
				return f, nil
			}
		}
		return findFamily("architectures", h.Architectures[0], hfName)
	}
	f, err := findFamily("model_type", h.ModelType, hfName)
	if err == nil && len(h.Architectures) > 0 && !slices.Contains(h.Architectures, f.architecture) {
		return f, unsupported("architectures", "%q does not generate text; %s is supported", h.Architectures[0], f.architecture)
	}
	return f, err
}

// spec translates the numbers. Bounds are Spec.check's business.
func (h *hfConfig) spec(f family) (Spec, ropeParams, error) {
	if err := h.refuse(); err != nil {
		return Spec{}, ropeParams{}, err
	}
	s := Spec{
		Family: f.name, VocabSize: h.VocabSize, HiddenSize: h.HiddenSize, Layers: h.NumHiddenLayers,
		Heads: h.NumAttentionHeads, KVHeads: h.NumAttentionHeads, HeadDim: f.headDim,
		Intermediate: h.IntermediateSize, NormEps: 1e-6, MaxPositions: h.MaxPositionEmbeddings,
		QKNorm: f.qkNorm, TiedHead: h.TieWordEmbeddings,
	}
	if h.RMSNormEps != nil {
		s.NormEps = float32(*h.RMSNormEps)
	}
	read, rotated := h.ordinary, &s.HeadDim
	if f.latent {
		read, rotated = h.deepSeek, &s.Latent.Rope
	}
	if err := read(f, &s); err != nil {
		return s, ropeParams{}, err
	}
	rope, err := h.rope(*rotated)
	if rope.kind == "yarn" { // some configs keep the length before stretching
		s.MaxPositions = stretched(s.MaxPositions, rope)
	}
	return s, rope, err
}

// ordinary reads the heads and experts of the families before DeepSeek's.
func (h *hfConfig) ordinary(f family, s *Spec) (err error) {
	if h.NumKeyValueHeads != nil {
		s.KVHeads = *h.NumKeyValueHeads
	}
	switch {
	case h.HeadDim != nil:
		s.HeadDim = *h.HeadDim
	case s.HeadDim == 0 && (s.Heads < 1 || s.HiddenSize%s.Heads != 0):
		return malformed("num_attention_heads", "is %d, which does not divide hidden_size %d, and head_dim is not given", s.Heads, s.HiddenSize)
	case s.HeadDim == 0:
		s.HeadDim = s.HiddenSize / s.Heads
	}
	if f.experts {
		s.Experts, err = h.experts()
	}
	return err
}

// stretched is how long a sequence yarn makes possible, where the file's own limit may be from before.
func stretched(positions int, rope ropeParams) int {
	if longer := rope.original * rope.factor; longer > float64(positions) && longer <= maxPositions {
		return int(longer)
	}
	return positions
}

// defaultWindowLayers is max_window_layers where a config has none.
const defaultWindowLayers = 28

// refuse names what a supported family can have in its config but this program does not do.
func (h *hfConfig) refuse() error {
	if h.Quantization != nil && h.Quantization.Method == "fp8" {
		return unsupported("quantization_config", "says that the weights are fp8, which is not supported; convert the checkpoint to bf16")
	}
	if h.Quantization != nil {
		return unsupported("quantization_config", "method %q is not supported; use the unquantised checkpoint or a GGUF file", h.Quantization.Method)
	}
	if h.HiddenAct != "silu" && h.HiddenAct != "swish" && h.HiddenAct != "" {
		return unsupported("hidden_act", "%q is not supported; silu is", h.HiddenAct)
	}
	for _, kind := range h.LayerTypes {
		if kind != "full_attention" {
			return unsupported("layer_types", "%q is not supported; full_attention is", kind)
		}
	}
	full := defaultWindowLayers // so many layers at the start do not slide
	if h.MaxWindowLayers != nil {
		full = *h.MaxWindowLayers
	}
	if h.UseSlidingWindow && h.LayerTypes == nil && full < h.NumHiddenLayers {
		return unsupported("use_sliding_window", "is true; sliding-window attention is not supported")
	}
	return nil
}

// rope reads both spellings. Where a config has both, transformers lets rope_scaling win.
func (h *hfConfig) rope(headDim int) (ropeParams, error) {
	r, where := h.RopeParameters, "rope_parameters"
	if h.RopeScaling != nil {
		r, where = h.RopeScaling, "rope_scaling"
	}
	if r == nil {
		r = &hfRope{}
	}
	if r.FullAttention != nil {
		return ropeParams{}, unsupported("rope_parameters", "differ by layer type, which is not supported")
	}
	p := ropeParams{
		kind: "default", base: 10000, dims: headDim, attention: 1, scores: 1, original: float64(h.MaxPositionEmbeddings),
		lowFactor: r.LowFreqFactor, highFactor: r.HighFreqFactor, betaFast: 32, betaSlow: 1, truncate: true,
	}
	for _, kind := range []string{r.Type, r.RopeType} {
		if kind != "" {
			p.kind = kind
		}
	}
	for _, theta := range []*float64{h.RopeTheta, r.RopeTheta} {
		set(&p.base, theta)
	}
	if !(p.base > 1) {
		return p, malformed("rope_theta", "is %g; it must be over 1", p.base)
	}
	for _, part := range []*float64{h.PartialRotaryFactor, r.PartialRotaryFactor} {
		if part != nil && *part != 1 {
			return p, unsupported("partial_rotary_factor", "is %g; this family rotates whole heads", *part)
		}
	}
	for _, original := range []*float64{r.OriginalPositions, h.OriginalPositions} {
		set(&p.original, original)
	}
	set(&p.factor, r.Factor)
	if p.kind == "yarn" {
		if r.Factor != nil && !(*r.Factor >= 1) {
			return p, malformed(where+".factor", "is %g; yarn stretches, so it must be at least 1", *r.Factor)
		}
		h.yarn(&p, r)
	}
	if p.kind != "default" && r.MScaleAllDim != 0 {
		m := yarnAttention(p.factor, r.MScaleAllDim)
		p.scores = m * m
	}
	return p, nil
}

func (h *hfConfig) yarn(p *ropeParams, r *hfRope) {
	if r.Factor == nil {
		p.factor = float64(h.MaxPositionEmbeddings) / p.original
	}
	if r.BetaFast != 0 {
		p.betaFast = r.BetaFast
	}
	if r.BetaSlow != 0 {
		p.betaSlow = r.BetaSlow
	}
	if r.Truncate != nil {
		p.truncate = *r.Truncate
	}
	p.attention = yarnAttention(p.factor, 1)
	if r.MScale != 0 && r.MScaleAllDim != 0 {
		p.attention = yarnAttention(p.factor, r.MScale) / yarnAttention(p.factor, r.MScaleAllDim)
	}
	set(&p.attention, r.AttentionFactor)
}

// set stores *value when there is one.
func set(to, value *float64) {
	if value != nil {
		*to = *value
	}
}
