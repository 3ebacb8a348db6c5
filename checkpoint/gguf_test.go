package checkpoint_test

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"baton/checkpoint"
	"baton/internal/modelfile"
	"baton/tensor"
)

func asGGUF(t *testing.T, c *checkpoint.Checkpoint, dtype tensor.DType, more ...modelfile.KV) string {
	t.Helper()
	data, err := modelfile.FromCheckpoint(c, dtype, more...)
	return write(t, filepath.Join(t.TempDir(), "m.gguf"), data, err)
}

// A checkpoint written as GGUF is the same model: equal numbers, equal weights but for the order of a
// llama's query and key rows.
func TestGGUFEqualsFolder(t *testing.T) {
	for _, name := range []string{"llama", "qwen2", "qwen3", "qwen3_moe"} {
		hf := open(t, filepath.Join(goldens, name))
		g := open(t, asGGUF(t, hf, tensor.F32))
		want, got := hf.Spec, g.Spec
		if got.Rope.Interleaved != (name == "llama") {
			t.Errorf("%s: interleaved is %v", name, got.Rope.Interleaved)
		}
		for i, f := range want.Rope.Frequencies {
			if math.Abs(got.Rope.Frequencies[i]/f-1) > 1e-7 {
				t.Errorf("%s: pair %d turns by %v, want %v", name, i, got.Rope.Frequencies[i], f)
			}
		}
		want.Rope, got.Rope = checkpoint.Rope{}, checkpoint.Rope{}
		if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
			t.Errorf("%s: spec is\n%+v, want\n%+v", name, got, want)
		}
		if g.Format() != checkpoint.GGUF || g.GGUF() == nil || g.Fingerprint() == hf.Fingerprint() {
			t.Errorf("%s: format %s", name, g.Format())
		}
		if name != "llama" && g.Parameters() != hf.Parameters() {
			t.Errorf("%s: %d parameters, want %d", name, g.Parameters(), hf.Parameters())
		}
		a, b := hf.Weights.Layers[1], g.Weights.Layers[1]
		pairs := [][2]tensor.Tensor{{a.V, b.V}, {a.O, b.O}, {a.Gate, b.Gate}, {a.Up, b.Up}, {a.Down, b.Down}, {a.InputNorm, b.InputNorm},
			{a.PostNorm, b.PostNorm}, {a.QNorm, b.QNorm}, {a.KNorm, b.KNorm}, {a.VBias, b.VBias}, {hf.Weights.Embed, g.Weights.Embed}, {hf.Weights.Head, g.Weights.Head}, {hf.Weights.Norm, g.Weights.Norm}}
		for e := range a.Experts {
			x, y := a.Experts[e], b.Experts[e]
			pairs = append(pairs, [2]tensor.Tensor{x.Gate, y.Gate}, [2]tensor.Tensor{x.Up, y.Up}, [2]tensor.Tensor{x.Down, y.Down})
		}
		if len(a.Experts) > 0 {
			pairs = append(pairs, [2]tensor.Tensor{a.Router, b.Router})
		}
		if name != "llama" {
			pairs = append(pairs, [2]tensor.Tensor{a.Q, b.Q}, [2]tensor.Tensor{a.KBias, b.KBias})
		}
		for _, p := range pairs {
			if !slices.Equal(p[0].Data, p[1].Data) || !slices.Equal(p[0].Shape, p[1].Shape) {
				t.Errorf("%s: %s and %s differ", name, p[0].Name, p[1].Name)
			}
		}
		if name == "llama" {
			checkInterleaved(t, a.K, b.K, hf.Spec.HeadDim)
		}
	}
}

// checkInterleaved wants row i of each half of a head at 2i and 2i+1.
func checkInterleaved(t *testing.T, halves, turns tensor.Tensor, headDim int) {
	t.Helper()
	width := halves.DType.RowBytes(halves.Cols())
	row := func(x tensor.Tensor, i int) []byte { return x.Data[i*width : (i+1)*width] }
	for r := range halves.Rows() {
		head, i := r/headDim*headDim, r%headDim
		to := head + 2*i
		if i >= headDim/2 {
			to = head + 2*(i-headDim/2) + 1
		}
		if !slices.Equal(row(halves, r), row(turns, to)) {
			t.Fatalf("row %d is not at %d", r, to)
		}
	}
}

func TestGGUFWeightTypes(t *testing.T) {
	hf := open(t, filepath.Join(goldens, "llama"))
	// The down projections' rows are no whole blocks, so they stay f32, and outweigh the rest below Q8_0.
	for dtype, most := range map[tensor.DType]tensor.DType{
		tensor.F16: tensor.F16, tensor.BF16: tensor.BF16, tensor.Q4_0: tensor.F32, tensor.Q4_1: tensor.F32,
		tensor.Q5_0: tensor.F32, tensor.Q5_1: tensor.F32, tensor.Q8_0: tensor.Q8_0,
	} {
		c := open(t, asGGUF(t, hf, dtype))
		if got := c.Weights.Layers[0].Q.DType; got != dtype {
			t.Errorf("%v: query matrix is %v", dtype, got)
		}
		if c.Spec.WeightType != most {
			t.Errorf("%v: weight type is %v, want %v", dtype, c.Spec.WeightType, most)
		}
	}
}

// ggufModel is a tiny llama in GGUF, its metadata changed: a nil value drops the key.
func ggufModel(t *testing.T, changes map[string]any, drop ...string) string {
	t.Helper()
	metadata := []modelfile.KV{
		{Key: "general.architecture", Value: "llama"}, {Key: "llama.block_count", Value: uint32(1)}, {Key: "llama.context_length", Value: uint32(4096)},
		{Key: "llama.embedding_length", Value: uint32(32)}, {Key: "llama.feed_forward_length", Value: uint32(32)}, {Key: "llama.attention.head_count", Value: uint32(2)},
		{Key: "llama.attention.layer_norm_rms_epsilon", Value: float32(1e-5)},
	}
	metadata = slices.DeleteFunc(metadata, func(kv modelfile.KV) bool { _, changed := changes[kv.Key]; return changed })
	for key, value := range changes {
		if value != nil {
			metadata = append(metadata, modelfile.KV{Key: key, Value: value})
		}
	}
	var tensors []tensor.Tensor
	add := func(name string, shape ...int) {
		if slices.Contains(drop, name) {
			return
		}
		n := 1
		for _, d := range shape {
			n *= d
		}
		tensors = append(tensors, modelfile.Floats(name, tensor.F32, make([]float32, n), shape...))
	}
	add("token_embd.weight", 6, 32)
	add("output_norm.weight", 32)
	add("blk.0.attn_norm.weight", 32)
	add("blk.0.ffn_norm.weight", 32)
	for _, name := range []string{"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"} {
		add("blk.0."+name+".weight", 32, 32)
	}
	data, err := modelfile.GGUF(metadata, tensors)
	return write(t, filepath.Join(t.TempDir(), "m.gguf"), data, err)
}

func TestGGUFChoices(t *testing.T) {
	tokens := map[string]any{
		"tokenizer.ggml.tokens":     []string{"<|endoftext|>", "a", "<|im_end|>", "<|eot_id|>", "b", "c"},
		"tokenizer.ggml.token_type": []int32{3, 1, 3, 1, 1, 3},
	}
	for name, c := range map[string]struct {
		changes map[string]any
		check   func(checkpoint.Spec) bool
	}{
		"defaults": {nil, func(s checkpoint.Spec) bool {
			return s.KVHeads == 2 && s.HeadDim == 16 && s.VocabSize == 6 && s.TiedHead && s.BOS == -1 && s.EOS == nil && s.Rope.Interleaved && s.Rope.Scale == 1 &&
				math.Abs(s.Rope.Frequencies[1]-math.Pow(10000, -1.0/8)) < 1e-15
		}},
		"numbers a layer":         {map[string]any{"llama.attention.head_count": []uint32{2}, "llama.feed_forward_length": []int32{32}}, func(s checkpoint.Spec) bool { return s.Heads == 2 && s.Intermediate == 32 }},
		"linear, no type":         {map[string]any{"llama.rope.scaling.factor": float32(4)}, func(s checkpoint.Spec) bool { return s.Rope.Frequencies[0] == 0.25 }},
		"linear, old key":         {map[string]any{"llama.rope.scale_linear": float32(2)}, func(s checkpoint.Spec) bool { return s.Rope.Frequencies[0] == 0.5 }},
		"no scaling":              {map[string]any{"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": float32(4)}, func(s checkpoint.Spec) bool { return s.Rope.Frequencies[0] == 1 }},
		"attention factor":        {map[string]any{"llama.rope.scaling.attn_factor": float32(1.25)}, func(s checkpoint.Spec) bool { return s.Rope.Scale == 1.25 }},
		"part of a head":          {map[string]any{"llama.rope.dimension_count": uint32(8)}, func(s checkpoint.Spec) bool { return len(s.Rope.Frequencies) == 4 }},
		"special ids":             {map[string]any{"tokenizer.ggml.bos_token_id": uint32(1), "tokenizer.ggml.eos_token_id": uint32(4), "tokenizer.ggml.eot_token_id": uint32(5)}, func(s checkpoint.Spec) bool { return s.BOS == 1 && slices.Equal(s.EOS, []int32{4, 5}) }},
		"control tokens that end": {tokens, func(s checkpoint.Spec) bool { return slices.Equal(s.EOS, []int32{0, 2}) }},
		"yarn": {map[string]any{"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": float32(8), "llama.rope.scaling.original_context_length": uint32(2048)}, func(s checkpoint.Spec) bool {
			return s.Rope.Frequencies[0] == 1 && s.Rope.Frequencies[7] < math.Pow(10000, -14.0/16)/7.9 && math.Abs(float64(s.Rope.Scale)-1.2079442) < 1e-6 && s.MaxPositions == 16384
		}},
		"yarn, more keys": {map[string]any{"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": float32(40), "llama.rope.scaling.yarn_log_multiplier": float32(0.707), "llama.rope.scaling.yarn_ext_factor": float32(1)}, func(s checkpoint.Spec) bool { return math.Abs(float64(s.Rope.Scale)-1.0857264) < 1e-6 }},
	} {
		if s := open(t, ggufModel(t, c.changes)).Spec; !c.check(s) {
			t.Errorf("%s: got %+v", name, s)
		}
	}
}

func TestGGUFRefusals(t *testing.T) {
	type kv = map[string]any
	for name, c := range map[string]struct {
		changes kv
		drop    string
		kind    error
		want    string
	}{
		"family":          {kv{"general.architecture": "mamba2"}, "", tensor.ErrUnsupported, `general.architecture: family "mamba2" is not supported; supported: llama, qwen2, qwen3`},
		"no architecture": {kv{"general.architecture": nil}, "", tensor.ErrMissing, `key "general.architecture": is not in the metadata`},
		"no layers":       {kv{"llama.block_count": nil}, "", tensor.ErrMissing, `key "llama.block_count": is not in the metadata`},
		"negative layers": {kv{"llama.block_count": int32(-1)}, "", tensor.ErrMalformed, "number of layers: is -1"},
		"many layers":     {kv{"llama.block_count": uint64(1 << 62)}, "", tensor.ErrMalformed, "number of layers: is 4611686018427387904"},
		"text as layers":  {kv{"llama.block_count": "one"}, "", tensor.ErrMalformed, `"llama.block_count": is not an array of 32-bit integers`},
		"no heads":        {kv{"llama.attention.head_count": uint32(0)}, "", tensor.ErrMalformed, "llama.attention.head_count: is 0"},
		"heads by layer":  {kv{"llama.attention.head_count_kv": []uint32{1, 2}}, "", tensor.ErrUnsupported, "llama.attention.head_count_kv: differs from layer to layer"},
		"heads of none":   {kv{"llama.attention.head_count_kv": []uint32{}}, "", tensor.ErrMalformed, "is an empty array"},
		"value length":    {kv{"llama.attention.value_length": uint32(8)}, "", tensor.ErrUnsupported, "llama.attention.value_length: is 8 where keys have 16"},
		"experts":         {kv{"llama.expert_count": uint32(8)}, "", tensor.ErrUnsupported, "llama.expert_count: says that this is a mixture of experts"},
		"window":          {kv{"llama.attention.sliding_window": uint32(512)}, "", tensor.ErrUnsupported, "sliding-window attention is not supported"},
		"split":           {kv{"split.count": uint16(2)}, "", tensor.ErrUnsupported, "split.count: says that this is one part"},
		"rope type":       {kv{"llama.rope.scaling.type": "longrope"}, "", tensor.ErrUnsupported, `rope type: "longrope" is not supported`},
		"rope dimensions": {kv{"llama.rope.dimension_count": uint32(18)}, "", tensor.ErrMalformed, "llama.rope.dimension_count: is 18 where a head has 16"},
		"rope base":       {kv{"llama.rope.freq_base": float32(math.NaN())}, "", tensor.ErrMalformed, "rope base (theta): is NaN"},
		"ext factor":      {kv{"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": float32(0.5)}, "", tensor.ErrUnsupported, "yarn_ext_factor: is 0.5"},
		"epsilon":         {kv{"llama.attention.layer_norm_rms_epsilon": float32(math.Inf(1))}, "", tensor.ErrMalformed, "RMSNorm epsilon: is +Inf"},
		"shape":           {kv{"llama.feed_forward_length": uint32(64)}, "", tensor.ErrMalformed, `"blk.0.ffn_gate.weight": has shape [32 32], expected [64 32]`},
		"no embedding":    {nil, "token_embd.weight", tensor.ErrMissing, `"token_embd.weight": is not in the file`},
		"no matrix":       {nil, "blk.0.ffn_up.weight", tensor.ErrMissing, `"blk.0.ffn_up.weight": is not in the checkpoint; expected shape [32 32]`},
	} {
		_, err := checkpoint.Open(ggufModel(t, c.changes, c.drop))
		checkError(t, name, err, c.kind, c.want)
	}
}

func TestGGUFRopeFactors(t *testing.T) {
	hf := open(t, folder(t, tinyConfig("llama"), tinyTensors()))
	data, err := modelfile.FromCheckpoint(hf, tensor.F32)
	path := write(t, filepath.Join(t.TempDir(), "m.gguf"), data, err)
	for name, want := range map[string]string{
		"none of them": "", "a zero": "pair 2 of 3 gets frequency +Inf", "of another head": "rope_freqs: has 3 factors for 2 pairs",
	} {
		changed := slices.Clone(data)
		switch name {
		case "a zero": // the factors are the file's last tensor: three f32, then padding
			copy(changed[len(changed)-32+8:], []byte{0, 0, 0, 0})
		case "of another head":
			changed, err = modelfile.FromCheckpoint(hf, tensor.F32, modelfile.KV{Key: "llama.rope.dimension_count", Value: uint32(4)})
		}
		write(t, path, changed, err)
		c, err := checkpoint.Open(path)
		if want == "" && err == nil {
			err = c.Close()
		}
		if want != "" {
			checkError(t, name, err, tensor.ErrMalformed, want)
		} else if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSummary(t *testing.T) {
	c := open(t, ggufModel(t, nil))
	if got := c.String(); got != "llama, 1 layers, 0.0M parameters, f32 (gguf, 0.0 MB)" {
		t.Errorf("summary is %q", got)
	}
}

// smolLM2 is the real model, when this machine has it: where $BATON_SMOLLM2 says, or in the cache folder.
func smolLM2(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("BATON_SMOLLM2"); path != "" {
		return path
	}
	cache := os.Getenv("BATON_CACHE")
	if user, err := os.UserCacheDir(); cache == "" && err == nil {
		cache = filepath.Join(user, "baton")
	}
	for _, depth := range []string{"", "*"} {
		if found, err := filepath.Glob(filepath.Join(cache, depth, "SmolLM2-135M-Instruct*.gguf")); err == nil && len(found) > 0 {
			return found[0]
		}
	}
	t.Skip("SmolLM2 is not here; BATON_SMOLLM2 may name the file")
	return ""
}

// The checksums are those of the first 65,536 float32 values that the Python package gguf makes of a tensor.
func TestSmolLM2(t *testing.T) {
	c := open(t, smolLM2(t))
	s := c.Spec
	if s.Family != "llama" || s.Layers != 30 || s.Heads != 9 || s.KVHeads != 3 || s.HeadDim != 64 || s.VocabSize != 49152 || !s.TiedHead ||
		s.WeightType != tensor.Q4_1 || s.MaxPositions != 8192 || s.BOS != 1 || !slices.Equal(s.EOS, []int32{2, 0}) || !s.Rope.Interleaved {
		t.Errorf("spec is %+v", s)
	}
	if c.Parameters() != 134515008 {
		t.Errorf("%d parameters", c.Parameters())
	}
	tokens, err := c.GGUF().Strings("tokenizer.ggml.tokens")
	if err != nil || len(tokens) != 49152 || tokens[2] != "<|im_end|>" {
		t.Errorf("%d tokens: %v", len(tokens), err)
	}
	for name, want := range map[string]string{
		"token_embd.weight":      "ca9ddffef2860533f2d5b724666a321bfa2e121e554bbb569ad06aa064e93cd8",
		"blk.0.attn_q.weight":    "11556707aa51943542c753d1adb71f057624dc35d67dfe2e3690f333c84d0208",
		"blk.29.ffn_down.weight": "8b43da745c311203ed745f3a5caf09baaccfca60f58992d9c6078d227d6bb08a",
		"output_norm.weight":     "3b87f8e27335e67fc08f159cabfd2d18f205d6c5b225a6f978153552bf01d559",
	} {
		x, _ := c.GGUF().Tensor(name)
		values := make([]float32, min(x.Elements(), 1<<16))
		if err := tensor.Dequantize(values, x.DType, x.Data[:x.DType.RowBytes(len(values))]); err != nil {
			t.Fatal(err)
		}
		raw := make([]byte, 4*len(values))
		for i, v := range values {
			binary.LittleEndian.PutUint32(raw[4*i:], math.Float32bits(v))
		}
		sum := sha256.Sum256(raw)
		if got := hex.EncodeToString(sum[:]); got != want {
			t.Errorf("%s: checksum %s, want %s", name, got, want)
		}
	}
}
