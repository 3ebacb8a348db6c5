package text

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
)

// configs are the files beside tokenizer.json that say more about it. Each may be missing.
type configs struct {
	tokenizer  tokenizerConfig
	specialMap tokenizerConfig // special_tokens_map.json has a subset of the same fields
	generation modelConfig
	model      modelConfig
}

type modelConfig struct {
	EOS        idList `json:"eos_token_id"`
	TextConfig struct {
		EOS idList `json:"eos_token_id"`
	} `json:"text_config"`
}

// idList reads an id, a list of ids, or null.
type idList []int32

func (l *idList) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	if k := d.PeekKind(); k != '0' {
		return json.UnmarshalDecode(d, (*[]int32)(l))
	}
	var id int32
	err := json.UnmarshalDecode(d, &id)
	*l = idList{id}
	return err
}

// tokenText reads a special token's text, plain or as {"content": ...}; null is empty.
type tokenText string

func (t *tokenText) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	if d.PeekKind() != '{' {
		return json.UnmarshalDecode(d, (*string)(t))
	}
	var added struct {
		Content string `json:"content"`
	}
	err := json.UnmarshalDecode(d, &added)
	*t = tokenText(added.Content)
	return err
}

type tokenizerConfig struct {
	BOS          tokenText             `json:"bos_token"`
	EOS          tokenText             `json:"eos_token"`
	UNK          tokenText             `json:"unk_token"`
	SEP          tokenText             `json:"sep_token"`
	PAD          tokenText             `json:"pad_token"`
	CLS          tokenText             `json:"cls_token"`
	Mask         tokenText             `json:"mask_token"`
	AddBOS       *bool                 `json:"add_bos_token"`
	AddEOS       *bool                 `json:"add_eos_token"`
	Added        map[string]addedToken `json:"added_tokens_decoder"`
	ChatTemplate jsontext.Value        `json:"chat_template"` // a template, or [{"name", "template"}]
}

// roles lists the special tokens by the names that templates use.
func (c *tokenizerConfig) roles() []struct {
	name string
	text *tokenText
} {
	return []struct {
		name string
		text *tokenText
	}{
		{"bos_token", &c.BOS}, {"eos_token", &c.EOS}, {"unk_token", &c.UNK}, {"sep_token", &c.SEP},
		{"pad_token", &c.PAD}, {"cls_token", &c.CLS}, {"mask_token", &c.Mask},
	}
}

func readConfigs(dir string) (*configs, error) {
	c := &configs{}
	for _, f := range []struct {
		name string
		into any
	}{
		{"tokenizer_config.json", &c.tokenizer},
		{"special_tokens_map.json", &c.specialMap},
		{"generation_config.json", &c.generation},
		{"config.json", &c.model},
	} {
		if err := readConfig(filepath.Join(dir, f.name), f.into); err != nil {
			return nil, err
		}
	}
	mapped := c.specialMap.roles()
	for i, role := range c.tokenizer.roles() {
		if *role.text == "" {
			*role.text = *mapped[i].text
		}
	}
	return c, nil
}

func readConfig(file string, into any) error {
	data, err := readLimited(file, maxConfigFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = unmarshal(data, into, readOptions)
	}
	if err != nil {
		return &FileError{file, "", err}
	}
	return nil
}

// addTokens adds the tokens that only tokenizer_config.json lists.
func (c *tokenizerConfig) addTokens(s *spec) {
	known := make(map[string]bool, len(s.added))
	for _, a := range s.added {
		known[a.Content] = true
	}
	var more []addedToken
	for key, a := range c.Added {
		id, err := strconv.ParseInt(key, 10, 32)
		if err == nil && a.Content != "" && !known[a.Content] {
			a.ID = int32(id)
			more = append(more, a)
		}
	}
	slices.SortFunc(more, func(a, b addedToken) int { return int(a.ID) - int(b.ID) })
	s.added = append(s.added, more...)
}

// apply sets the special tokens, the ends of generation, and what is put around a text.
func (c *configs) apply(t *Tokenizer) {
	id := func(text tokenText) int32 {
		if id, ok := t.TokenID(string(text)); ok && text != "" {
			return id
		}
		return -1
	}
	t.special = Special{BOS: id(c.tokenizer.BOS), EOS: id(c.tokenizer.EOS), UNK: id(c.tokenizer.UNK), PAD: id(c.tokenizer.PAD)}
	ends := c.generation.EOS
	if len(ends) == 0 {
		ends = append(c.model.EOS, c.model.TextConfig.EOS...)
	}
	t.setEOS(append(ends, t.special.EOS))
	t.surround(t.special.BOS, c.tokenizer.AddBOS, &t.prefix)
	t.surround(t.special.EOS, c.tokenizer.AddEOS, &t.suffix)
}

// surround adds or removes a token that a configuration says, or denies, is put at one end of a text.
func (t *Tokenizer) surround(id int32, want *bool, at *[]int32) {
	if id < 0 || want == nil {
		return
	}
	switch has := slices.Contains(*at, id); {
	case *want && !has:
		*at = append([]int32{id}, *at...)
	case !*want && has:
		*at = slices.DeleteFunc(*at, func(x int32) bool { return x == id })
	}
}

func (t *Tokenizer) setEOS(ids []int32) {
	t.eos = nil
	for _, id := range ids {
		if id >= 0 {
			t.eos = append(t.eos, id)
		}
	}
	slices.Sort(t.eos)
	t.eos = slices.Compact(t.eos)
}
