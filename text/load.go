package text

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"baton/tensor"
)

const (
	maxTokenizerFile = 256 << 20
	maxConfigFile    = 16 << 20
)

// Load reads the tokenizer of a model folder: tokenizer.json and, where they are, tokenizer_config.json,
// special_tokens_map.json, generation_config.json, config.json and the chat templates. path may also be
// that of the tokenizer.json itself. A folder without one gives ErrNoTokenizer; a kind of tokenizer that is
// not implemented an UnsupportedError; a faulty file a FileError.
func Load(path string) (*Tokenizer, error) {
	dir, file := path, filepath.Join(path, "tokenizer.json")
	if info, err := os.Stat(path); err == nil && !info.IsDir() {
		dir, file = filepath.Dir(path), path
	}
	data, err := readLimited(file, maxTokenizerFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("tokenizer: %s: %w", path, ErrNoTokenizer)
	} else if err != nil {
		return nil, &FileError{file, "", err}
	}
	c, err := readConfigs(dir)
	if err != nil {
		return nil, err
	}
	s, err := parseTokenizer(data)
	if err != nil {
		return nil, inFile(file, err)
	}
	c.tokenizer.addTokens(s)
	t, err := s.build()
	if err != nil {
		return nil, inFile(file, err)
	}
	c.apply(t)
	if t.templates, err = c.loadTemplates(dir, t); err != nil {
		return nil, err
	}
	return t, nil
}

// inFile says in which file, and field if that is known, an error lies.
func inFile(file string, err error) error {
	if f, ok := errors.AsType[*fieldError](err); ok {
		return &FileError{file, f.field, f.err}
	}
	return &FileError{file, "", err}
}

func readLimited(file string, limit int64) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("larger than %d MiB: %w", limit>>20, ErrLimit)
	}
	return data, nil
}

// tokenizerJSON is the part of tokenizer.json that is used. Steps are decoded once their type is known.
type tokenizerJSON struct {
	AddedTokens   []addedToken   `json:"added_tokens"`
	Normalizer    jsontext.Value `json:"normalizer"`
	PreTokenizer  jsontext.Value `json:"pre_tokenizer"`
	PostProcessor jsontext.Value `json:"post_processor"`
	Decoder       jsontext.Value `json:"decoder"`
	Model         struct {
		Type         string         `json:"type"`
		Dropout      *float64       `json:"dropout"`
		UnkToken     *string        `json:"unk_token"`
		Prefix       *string        `json:"continuing_subword_prefix"`
		Suffix       *string        `json:"end_of_word_suffix"`
		FuseUnk      bool           `json:"fuse_unk"`
		ByteFallback bool           `json:"byte_fallback"`
		IgnoreMerges bool           `json:"ignore_merges"`
		Vocab        jsontext.Value `json:"vocab"`
		Merges       mergeList      `json:"merges"`
	} `json:"model"`
}

// mergeList reads merges in both spellings: "a b" and ["a", "b"].
type mergeList [][2]string

func (l *mergeList) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	if d.PeekKind() == 'n' {
		_, err := d.ReadToken()
		return err
	}
	if k := d.PeekKind(); k != '[' {
		return fmt.Errorf("merges: want a list, have %v", k)
	}
	if _, err := d.ReadToken(); err != nil {
		return err
	}
	for d.PeekKind() != ']' {
		if len(*l) >= maxMerges {
			return fmt.Errorf("more than %d merges: %w", maxMerges, ErrLimit)
		}
		pair, err := readMerge(d, len(*l))
		if err != nil {
			return err
		}
		*l = append(*l, pair)
	}
	_, err := d.ReadToken()
	return err
}

func readMerge(d *jsontext.Decoder, n int) (pair [2]string, err error) {
	if d.PeekKind() == '[' {
		var parts []string
		if err := json.UnmarshalDecode(d, &parts); err != nil {
			return pair, err
		}
		if len(parts) != 2 {
			return pair, fmt.Errorf("merge %d has %d parts, want 2", n, len(parts))
		}
		return [2]string{parts[0], parts[1]}, nil
	}
	var both string
	if err := json.UnmarshalDecode(d, &both); err != nil {
		return pair, err
	}
	left, right, ok := strings.Cut(both, " ")
	if !ok || strings.Contains(right, " ") {
		return pair, fmt.Errorf("merge %d (%q): want two parts with a space between", n, clip(both))
	}
	return [2]string{left, right}, nil
}

// unmarshal reads JSON. Its errors name the member at fault, and no type of this program.
func unmarshal(data []byte, into any, options ...json.Options) error {
	return jsonProblem(json.Unmarshal(data, into, options...))
}

func jsonProblem(err error) error {
	if err == nil {
		return nil
	}
	member, problem := tensor.JSONProblem(err)
	err = &jsonError{problem, err}
	if member != "" {
		err = &fieldError{strings.ReplaceAll(member, "/", "."), err}
	}
	return err
}

// jsonError words a decoder's error.
type jsonError struct {
	problem string
	err     error
}

func (e *jsonError) Error() string { return e.problem }
func (e *jsonError) Unwrap() error { return e.err }

var readOptions = json.JoinOptions(jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))

// parseTokenizer reads a tokenizer.json.
func parseTokenizer(data []byte) (*spec, error) {
	var j tokenizerJSON
	if err := unmarshal(data, &j, readOptions); err != nil {
		return nil, err
	}
	m := &j.Model
	if m.Type == "" && len(m.Merges) > 0 {
		m.Type = "BPE"
	}
	if m.Type != "BPE" {
		return nil, &fieldError{"model.type", &UnsupportedError{"model type", m.Type, "BPE is what this reads"}}
	}
	s := &spec{
		merges: m.Merges, ignore: m.IgnoreMerges, fallback: m.ByteFallback, fuseUnk: m.FuseUnk, added: j.AddedTokens,
	}
	for field, affix := range map[string]*string{"continuing_subword_prefix": m.Prefix, "end_of_word_suffix": m.Suffix} {
		if affix != nil && *affix != "" {
			return nil, &fieldError{"model." + field, &UnsupportedError{"BPE option", field, "only empty ones are read"}}
		}
	}
	if m.Dropout != nil && *m.Dropout > 0 {
		return nil, &fieldError{"model.dropout", &UnsupportedError{"BPE option", "dropout", "ids would be random"}}
	}
	if m.UnkToken != nil {
		s.unk = *m.UnkToken
	}
	var err error
	if s.vocab, err = parseVocab(m.Vocab); err != nil {
		return nil, &fieldError{"model.vocab", err}
	}
	if s.normalize, err = parseNormalizer(j.Normalizer, 0); err != nil {
		return nil, &fieldError{"normalizer", err}
	}
	if s.steps, s.byteLevel, err = parsePreTokenizer(j.PreTokenizer, 0); err != nil {
		return nil, &fieldError{"pre_tokenizer", err}
	}
	if s.prefix, s.suffix, err = parsePostProcessor(j.PostProcessor, 0); err != nil {
		return nil, &fieldError{"post_processor", err}
	}
	if s.byteLevel {
		return s, nil
	}
	if s.decode, err = parseDecoder(j.Decoder, 0); err != nil {
		return nil, &fieldError{"decoder", err}
	}
	return s, nil
}

func parseVocab(raw jsontext.Value) (map[string]int32, error) {
	vocab := map[string]int32{}
	d := jsontext.NewDecoder(strings.NewReader(string(raw)), readOptions)
	if d.PeekKind() != '{' {
		return nil, errors.New("want an object from token to id")
	}
	if _, err := d.ReadToken(); err != nil {
		return nil, err
	}
	for d.PeekKind() != '}' {
		if len(vocab) >= maxVocab {
			return nil, fmt.Errorf("more than %d entries: %w", maxVocab, ErrLimit)
		}
		name, err := d.ReadToken()
		if err != nil {
			return nil, err
		}
		token := name.String()
		var id int32
		if err := json.UnmarshalDecode(d, &id); err != nil {
			return nil, jsonProblem(err)
		}
		vocab[token] = id
	}
	return vocab, nil
}

// parsePostProcessor gives what is put before and after a single text.
func parsePostProcessor(raw jsontext.Value, depth int) (prefix, suffix []int32, err error) {
	if isNull(raw) {
		return nil, nil, nil
	}
	var p struct {
		Type       string           `json:"type"`
		Processors []jsontext.Value `json:"processors"`
		Single     []struct {
			SpecialToken *struct {
				ID string `json:"id"`
			} `json:"SpecialToken"`
			Sequence *struct {
				ID string `json:"id"`
			} `json:"Sequence"`
		} `json:"single"`
		SpecialTokens map[string]struct {
			IDs []int32 `json:"ids"`
		} `json:"special_tokens"`
		Sep jsontext.Value `json:"sep"` // ["</s>", 2]
		Cls jsontext.Value `json:"cls"`
	}
	if err := unmarshal(raw, &p); err != nil {
		return nil, nil, err
	}
	switch p.Type {
	case "ByteLevel":
		return nil, nil, nil
	case "RobertaProcessing", "BertProcessing":
		cls, err1 := tokenPair(p.Cls)
		sep, err2 := tokenPair(p.Sep)
		return []int32{cls}, []int32{sep}, errors.Join(err1, err2)
	case "Sequence":
		if depth >= maxNested || len(p.Processors) > maxSteps {
			return nil, nil, fmt.Errorf("more than %d steps or %d levels: %w", maxSteps, maxNested, ErrLimit)
		}
		for i, raw := range p.Processors {
			before, after, err := parsePostProcessor(raw, depth+1)
			if err != nil {
				return nil, nil, fmt.Errorf("processors[%d]: %w", i, err)
			}
			prefix, suffix = append(before, prefix...), append(suffix, after...)
		}
		return prefix, suffix, nil
	case "TemplateProcessing":
		seen := false
		for i, part := range p.Single {
			if part.SpecialToken == nil {
				seen = true
				continue
			}
			special, ok := p.SpecialTokens[part.SpecialToken.ID]
			if !ok {
				return nil, nil, fmt.Errorf("single[%d]: special token %q is not among special_tokens", i, clip(part.SpecialToken.ID))
			}
			if seen {
				suffix = append(suffix, special.IDs...)
			} else {
				prefix = append(prefix, special.IDs...)
			}
		}
		return prefix, suffix, nil
	}
	return nil, nil, &UnsupportedError{Part: "post-processor", Name: p.Type}
}

// tokenPair gives the id of ["text", id].
func tokenPair(raw jsontext.Value) (int32, error) {
	var pair []jsontext.Value
	if err := unmarshal(raw, &pair); err != nil {
		return 0, err
	}
	if len(pair) != 2 {
		return 0, fmt.Errorf("want a token and its id, have %d values", len(pair))
	}
	var id int32
	err := unmarshal(pair[1], &id)
	return id, err
}

// parseDecoder reads the decoder of a vocabulary that is not byte-level.
func parseDecoder(raw jsontext.Value, depth int) (d decoding, err error) {
	if isNull(raw) {
		return d, nil
	}
	var p struct {
		Type     string           `json:"type"`
		Decoders []jsontext.Value `json:"decoders"`
		Pattern  pattern          `json:"pattern"`
		Content  string           `json:"content"`
		Start    int              `json:"start"`
		Stop     int              `json:"stop"`
	}
	if err := unmarshal(raw, &p); err != nil {
		return d, err
	}
	switch {
	case p.Type == "Fuse":
		return d, nil
	case p.Type == "ByteFallback":
		d.byteTokens = true
		return d, nil
	case p.Type == "Replace" && p.Pattern.String != "":
		d.replace = [][2]string{{p.Pattern.String, p.Content}}
		return d, nil
	case p.Type == "Strip" && p.Content == " " && p.Stop == 0 && p.Start >= 0:
		d.stripLeft = p.Start
		return d, nil
	case p.Type == "Sequence":
		if depth >= maxNested || len(p.Decoders) > maxSteps {
			return d, fmt.Errorf("more than %d steps or %d levels: %w", maxSteps, maxNested, ErrLimit)
		}
		for i, raw := range p.Decoders {
			step, err := parseDecoder(raw, depth+1)
			if err != nil {
				return d, fmt.Errorf("decoders[%d]: %w", i, err)
			}
			d.replace = append(d.replace, step.replace...)
			d.byteTokens = d.byteTokens || step.byteTokens
			d.stripLeft += step.stripLeft
		}
		return d, nil
	}
	return d, &UnsupportedError{Part: "decoder", Name: p.Type}
}
