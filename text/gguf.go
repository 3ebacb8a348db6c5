package text

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"baton/tensor"

	"golang.org/x/text/unicode/norm"
)

// ggufVocab is the part of a GGUF file's metadata that describes a tokenizer (keys "tokenizer.ggml.*").
type ggufVocab struct {
	model     string // "gpt2": byte-level BPE
	pre       string // names the pre-tokenizer
	tokens    []string
	types     []int32
	merges    []string
	bos       int32 // ids are -1 where absent
	eos       int32
	unk       int32
	pad       int32
	ends      []int32 // further ids that end a generation
	addBOS    *bool
	addEOS    *bool
	addPrefix bool // a space before the text
	templates map[string]string
}

// GGUF's token types.
const (
	ggufControl     = 3
	ggufUserDefined = 4
)

// FromGGUF makes the tokenizer that a GGUF file's metadata describes, and reads its chat templates. A
// file without one gives ErrNoTokenizer.
func FromGGUF(g *tensor.GGUF) (*Tokenizer, error) {
	v, err := readGGUF(g)
	if err != nil {
		return nil, err
	}
	return v.build()
}

func readGGUF(g *tensor.GGUF) (*ggufVocab, error) {
	const prefix = "tokenizer.ggml."
	if !g.Has(prefix + "model") {
		return nil, fmt.Errorf("tokenizer: gguf: no %smodel: %w", prefix, ErrNoTokenizer)
	}
	r := ggufReader{g: g}
	v := &ggufVocab{
		model:  r.text(prefix + "model"),
		pre:    r.text(prefix + "pre"),
		bos:    r.id(prefix + "bos_token_id"),
		eos:    r.id(prefix + "eos_token_id"),
		unk:    r.id(prefix + "unknown_token_id"),
		pad:    r.id(prefix + "padding_token_id"),
		ends:   []int32{r.id(prefix + "eot_token_id"), r.id(prefix + "eom_token_id")},
		addBOS: r.flag(prefix + "add_bos_token"),
		addEOS: r.flag(prefix + "add_eos_token"),
	}
	if f := r.flag(prefix + "add_space_prefix"); f != nil {
		v.addPrefix = *f
	}
	v.tokens = r.texts(prefix + "tokens")
	v.merges = r.texts(prefix + "merges")
	if g.Has(prefix + "token_type") {
		var err error
		v.types, err = g.Int32s(prefix + "token_type")
		r.err = errors.Join(r.err, err)
	}
	v.templates = map[string]string{}
	for _, key := range g.Keys() {
		switch name, ok := strings.CutPrefix(key, "tokenizer.chat_template"); {
		case !ok || name == "s":
		case name == "":
			v.templates[DefaultTemplate] = r.text(key)
		case name[0] == '.':
			v.templates[name[1:]] = r.text(key)
		}
	}
	if r.err != nil {
		return nil, fmt.Errorf("tokenizer: gguf: %w", r.err)
	}
	return v, nil
}

// ggufReader reads optional keys and keeps the first error.
type ggufReader struct {
	g   *tensor.GGUF
	err error
}

func optional[T any](r *ggufReader, key string, get func(string) (T, error), missing T) T {
	if r.err != nil || !r.g.Has(key) {
		return missing
	}
	v, err := get(key)
	if err != nil {
		r.err = err
		return missing
	}
	return v
}

func (r *ggufReader) text(key string) string    { return optional(r, key, r.g.String, "") }
func (r *ggufReader) texts(key string) []string { return optional(r, key, r.g.Strings, nil) }
func (r *ggufReader) id(key string) int32 {
	if id := optional(r, key, r.g.Int, -1); id >= 0 && id < maxVocab {
		return int32(id)
	}
	return -1
}

func (r *ggufReader) flag(key string) *bool {
	return optional(r, key, func(key string) (*bool, error) {
		b, err := r.g.Bool(key)
		return &b, err
	}, nil)
}

// preSpec is what a GGUF pre-tokenizer name stands for.
type preSpec struct {
	patterns     []string // applied one after the other; the last one's pieces are words
	nfc          bool
	ignoreMerges bool
}

const (
	patternDigit  = `\p{N}`
	patternPunct  = `[\p{P}\$\+<=>\^~\|` + "`" + `]+`
	patternThree  = `[0-9][0-9][0-9]`
	patternHanzi  = `[一-龥ࠀ-一가-퟿]+`
	patternDigits = `\p{N}+`
)

var preSpecs = map[string]preSpec{}

func init() {
	for names, s := range map[string]preSpec{
		"gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum": {patterns: []string{patternGPT2}},
		"smollm starcoder refact command-r codeshell exaone minerva-7b":              {patterns: []string{patternDigit, patternGPT2}},
		"llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2":          {patterns: []string{patternLlama}, ignoreMerges: true},
		"dbrx smaug-bpe":                      {patterns: []string{patternLlama}},
		"qwen2 deepseek-r1-qwen kormo megrez": {patterns: []string{patternQwen}, nfc: true},
		"stablelm2 hunyuan solar-open":        {patterns: []string{patternQwen}},
		"qwen35":                              {patterns: []string{patternQwenMarks}, nfc: true},
		"gpt-4o llama4":                       {patterns: []string{patternO200k}, ignoreMerges: true},
		"tekken":                              {patterns: []string{patternTekken}, ignoreMerges: true},
		"deepseek-v3 hunyuan-dense":           {patterns: []string{patternDigits3, patternCJK, patternDeepSeek}},
		"deepseek-coder":                      {patterns: []string{`[\r\n]`, `\s?\p{L}+`, `\s?\p{P}+`, patternHanzi, patternDigit}},
		"falcon":                              {patterns: []string{patternPunct, patternGPT2, patternThree}},
		"default":                             {patterns: []string{patternPunct, patternGPT2, patternDigits, patternThree}},
	} {
		for name := range strings.FieldsSeq(names) {
			preSpecs[name] = s
		}
	}
}

func (v *ggufVocab) build() (*Tokenizer, error) {
	s, err := v.spec()
	if err != nil {
		return nil, inFile("gguf", err)
	}
	t, err := s.build()
	if err != nil {
		return nil, inFile("gguf", err)
	}
	t.special = Special{BOS: v.bos, EOS: v.eos, UNK: v.unk, PAD: v.pad}
	t.setEOS(append(v.ends, v.eos))
	t.surround(v.bos, v.addBOS, &t.prefix)
	t.surround(v.eos, v.addEOS, &t.suffix)
	texts := map[string]string{}
	for name, id := range map[string]int32{"bos_token": v.bos, "eos_token": v.eos, "unk_token": v.unk, "pad_token": v.pad} {
		if id >= 0 && int(id) < len(v.tokens) {
			texts[name] = v.tokens[id]
		}
	}
	t.templates, err = newTemplateSet(v.templates, texts, t)
	return t, err
}

func (v *ggufVocab) spec() (*spec, error) {
	if v.model != "gpt2" {
		return nil, &fieldError{"tokenizer.ggml.model", &UnsupportedError{"model type", v.model, "gpt2, which is byte-level BPE, is what this reads"}}
	}
	if len(v.tokens) == 0 || len(v.tokens) > maxVocab {
		return nil, &fieldError{"tokenizer.ggml.tokens", fmt.Errorf("%d tokens, want 1..%d", len(v.tokens), maxVocab)}
	}
	if len(v.merges) > maxMerges {
		return nil, &fieldError{"tokenizer.ggml.merges", fmt.Errorf("more than %d: %w", maxMerges, ErrLimit)}
	}
	if v.types != nil && len(v.types) != len(v.tokens) {
		return nil, &fieldError{"tokenizer.ggml.token_type", fmt.Errorf("%d types for %d tokens", len(v.types), len(v.tokens))}
	}
	name := v.pre
	if name == "" {
		name = "default"
	}
	pre, ok := preSpecs[name]
	if !ok {
		return nil, &fieldError{"tokenizer.ggml.pre", &UnsupportedError{Part: "pre-tokenizer", Name: v.pre}}
	}
	for key, id := range map[string]int32{"bos_token_id": v.bos, "eos_token_id": v.eos} {
		if int(id) >= len(v.tokens) {
			return nil, &fieldError{"tokenizer.ggml." + key, fmt.Errorf("%d is outside the vocabulary of %d", id, len(v.tokens))}
		}
	}
	s := &spec{vocab: make(map[string]int32, len(v.tokens)), byteLevel: true, ignore: pre.ignoreMerges}
	if err := v.addTokens(s); err != nil {
		return nil, err
	}
	for i, m := range v.merges {
		left, right, ok := strings.Cut(m, " ")
		if !ok {
			return nil, &fieldError{fmt.Sprintf("tokenizer.ggml.merges[%d]", i), fmt.Errorf("%q: want two parts with a space between", clip(m))}
		}
		s.merges = append(s.merges, [2]string{left, right})
	}
	if pre.nfc {
		s.normalize = []normalizer{simple(normalizeForm(norm.NFC))}
	}
	if v.addPrefix {
		s.steps = append(s.steps, prefixSpace{})
	}
	for _, p := range pre.patterns {
		step, err := newSplit(pattern{Regex: p}, isolated, false)
		if err != nil {
			return nil, &fieldError{"tokenizer.ggml.pre", err}
		}
		s.steps = append(s.steps, step)
	}
	return s, nil
}

// addTokens fills the vocabulary, and sets control and user-defined tokens apart as added ones.
func (v *ggufVocab) addTokens(s *spec) error {
	for i, content := range v.tokens {
		kind := int32(1)
		if v.types != nil {
			kind = v.types[i]
		}
		if kind == ggufControl || kind == ggufUserDefined {
			if content == "" {
				return &fieldError{fmt.Sprintf("tokenizer.ggml.tokens[%d]", i), errors.New("an added token is empty")}
			}
			s.added = append(s.added, addedToken{ID: int32(i), Content: content, Special: kind == ggufControl})
		}
		if _, dup := s.vocab[content]; !dup {
			s.vocab[content] = int32(i)
		}
	}
	slices.SortStableFunc(s.added, func(a, b addedToken) int { return int(a.ID) - int(b.ID) })
	return nil
}
