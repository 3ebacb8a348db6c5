package text

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Tokenizer turns text into token ids and back. It is immutable and safe for concurrent use.
type Tokenizer struct {
	model      bpe
	raw        addedSet // added tokens matched in the text as it comes
	normalized addedSet // added tokens matched in normalized text
	normalize  []normalizer
	steps      []splitter
	prefix     []int32 // put before and after a text with AddSpecial
	suffix     []int32

	tokens    []token // by id
	special   Special
	eos       []int32
	protected []string // texts of protected tokens
	stripLeft int      // spaces that decoding drops at the start of a text

	longestAdded int  // bytes of the longest added token that is matched in the text as it comes
	singleWords  bool // some of these stand alone only

	templates templateSet
}

// token is one id's text: the bytes it decodes to. Ids without a token have present false.
type token struct {
	bytes            string
	present, special bool
}

// Special holds the ids of tokens with a role; -1 where the model has none.
type Special struct{ BOS, EOS, UNK, PAD int32 }

// EncodeOptions of Encode.
type EncodeOptions struct {
	// AddSpecial adds what the tokenizer puts around a whole text, such as a beginning-of-sequence token.
	AddSpecial bool
	// ParseSpecial makes text that spells out a protected token that token. See the package comment.
	ParseSpecial bool
}

// Prompt is a rendered chat: text, and where in it protected tokens must not be matched because a
// client wrote them.
type Prompt struct {
	Text  string
	plain []int // ascending offsets that a protected token may not reach across
}

// Encode gives the ids of a text. Bytes that are not UTF-8 count as U+FFFD each.
func (t *Tokenizer) Encode(text string, o EncodeOptions) ([]int32, error) {
	return t.encode(Prompt{Text: validUTF8(text)}, o)
}

// EncodePrompt gives the ids of a rendered chat. Nothing is added around it: the template has written
// what belongs there.
func (t *Tokenizer) EncodePrompt(p Prompt) ([]int32, error) {
	return t.encode(p, EncodeOptions{ParseSpecial: true})
}

// validUTF8 replaces each byte that is not part of a character by U+FFFD.
func validUTF8(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	return string([]rune(s))
}

func (t *Tokenizer) encode(p Prompt, o EncodeOptions) ([]int32, error) {
	ids := make([]int32, 0, len(p.Text)/4+len(t.prefix)+len(t.suffix)+1)
	if o.AddSpecial {
		ids = append(ids, t.prefix...)
	}
	ids, err := t.encodeSegments(ids, p, o.ParseSpecial, func(int, []int32) {})
	if err != nil {
		return nil, err
	}
	if o.AddSpecial {
		ids = append(ids, t.suffix...)
	}
	return ids, nil
}

// encodeSegments appends the ids of a text. It calls sync behind each added token that is matched in the text as it
// comes: what precedes such a place and what follows it are encoded independently.
func (t *Tokenizer) encodeSegments(ids []int32, p Prompt, parse bool, sync func(text int, ids []int32)) ([]int32, error) {
	plain := p.plain
	for _, m := range t.raw.split(p.Text, parse, plain) {
		if m.token != nil {
			ids = append(ids, m.token.ID)
			sync(m.end, ids)
			continue
		}
		for len(plain) > 0 && plain[0] <= m.start {
			plain = plain[1:]
		}
		var err error
		if ids, err = t.encodeSegment(ids, p.Text[m.start:m.end], m.start, plain, parse); err != nil {
			return nil, fmt.Errorf("tokenizer: encode: %w", err)
		}
	}
	return ids, nil
}

// encodeSegment appends the ids of text between added tokens. It begins at offset start of the whole,
// which is where plain counts from.
func (t *Tokenizer) encodeSegment(ids []int32, segment string, start int, plain []int, parse bool) ([]int32, error) {
	text, err := t.normalizeText(segment)
	if err != nil {
		return nil, err
	}
	word := func(s string) error {
		ids = t.model.appendWord(ids, s)
		return nil
	}
	if len(t.normalized.tokens) > 0 {
		plain, err = t.movePlain(segment, text, start, plain)
		if err != nil {
			return nil, err
		}
	}
	for _, m := range t.normalized.split(text, parse, plain) {
		if m.token != nil {
			ids = append(ids, m.token.ID)
		} else if m.start < m.end {
			if err := splitAll(t.steps, text[m.start:m.end], word); err != nil {
				return nil, err
			}
		}
	}
	return ids, nil
}

func (t *Tokenizer) normalizeText(s string) (string, error) {
	for _, n := range t.normalize {
		var err error
		if s, err = n(s); err != nil {
			return "", err
		}
	}
	return s, nil
}

// movePlain translates offsets of the whole text to offsets of a normalized segment of it.
func (t *Tokenizer) movePlain(segment, text string, start int, plain []int) ([]int, error) {
	var moved []int
	for _, at := range plain {
		if at -= start; at >= len(segment) {
			break
		}
		if text != segment {
			before, err := t.normalizeText(segment[:at])
			if err != nil {
				return nil, err
			}
			at = len(before)
		}
		moved = append(moved, at)
	}
	return moved, nil
}

// Decode gives the text of ids: their bytes together, with U+FFFD for what is not UTF-8. Ids without a
// token give nothing; skipSpecial leaves special tokens out.
func (t *Tokenizer) Decode(ids []int32, skipSpecial bool) string {
	d := t.NewDetokenizer(skipSpecial)
	d.strip = t.stripLeft
	return d.Push(ids...) + d.Flush()
}

// VocabSize is one more than the largest id. A model's embedding may have more rows.
func (t *Tokenizer) VocabSize() int { return len(t.tokens) }

// TokenBytes gives the bytes that an id decodes to, nil if it has none.
func (t *Tokenizer) TokenBytes(id int32) []byte {
	if id < 0 || int(id) >= len(t.tokens) || !t.tokens[id].present {
		return nil
	}
	return []byte(t.tokens[id].bytes)
}

// TokenString gives TokenBytes as text, with U+FFFD for bytes that are not UTF-8 by themselves.
func (t *Tokenizer) TokenString(id int32) string {
	return t.Decode([]int32{id}, false)
}

// TokenID finds the id of an added token by its text, or of a vocabulary entry by its bytes.
func (t *Tokenizer) TokenID(text string) (id int32, ok bool) {
	for _, set := range []*addedSet{&t.raw, &t.normalized} {
		for i := range set.tokens {
			if set.tokens[i].Content == text {
				return set.tokens[i].ID, true
			}
		}
	}
	id, ok = t.model.vocab[text]
	return id, ok
}

// IsSpecial tells whether an id is a special token, which skipSpecial leaves out of decoded text.
func (t *Tokenizer) IsSpecial(id int32) bool {
	return id >= 0 && int(id) < len(t.tokens) && t.tokens[id].special
}

// Special gives the ids of the tokens with a role.
func (t *Tokenizer) Special() Special { return t.special }

// EOS gives the ids that end a generation, ascending.
func (t *Tokenizer) EOS() []int32 { return slices.Clone(t.eos) }

// spec is what a tokenizer is built from, whichever file it was read from.
type spec struct {
	vocab     map[string]int32 // as the file spells it
	merges    [][2]string      // likewise
	byteLevel bool
	ignore    bool // ignore_merges
	fallback  bool // byte_fallback
	fuseUnk   bool
	unk       string // may be empty
	added     []addedToken
	normalize []normalizer
	steps     []splitter
	prefix    []int32
	suffix    []int32
	decode    decoding
}

// decoding of vocabulary entries that are not byte-level.
type decoding struct {
	replace    [][2]string // in every token
	byteTokens bool        // <0x41> is the byte 0x41
	stripLeft  int         // spaces dropped at the start of a text
}

const (
	maxVocab  = 1 << 21
	maxMerges = 1 << 22
	maxHoles  = 1 << 16 // ids without a token, beyond as many as there are tokens
)

// fieldError carries the field at fault up to who knows the file.
type fieldError struct {
	field string
	err   error
}

func (e *fieldError) Error() string { return e.field + ": " + e.err.Error() }
func (e *fieldError) Unwrap() error { return e.err }

// build makes the tokenizer.
func (s *spec) build() (*Tokenizer, error) {
	t := &Tokenizer{
		normalize: s.normalize, steps: s.steps, prefix: s.prefix, suffix: s.suffix,
		special: Special{-1, -1, -1, -1}, stripLeft: s.decode.stripLeft,
	}
	size, err := s.size()
	if err != nil {
		return nil, err
	}
	t.tokens = make([]token, size)
	if err := s.buildModel(t); err != nil {
		return nil, err
	}
	if err := s.buildAdded(t); err != nil {
		return nil, err
	}
	for _, id := range slices.Concat(s.prefix, s.suffix) {
		if id < 0 || int(id) >= size {
			return nil, &fieldError{"post_processor", fmt.Errorf("id %d is outside the vocabulary of %d", id, size)}
		}
	}
	return t, nil
}

func (s *spec) size() (int, error) {
	last := int32(-1)
	check := func(field string, id int32) error {
		if id < 0 || id >= maxVocab {
			return &fieldError{field, fmt.Errorf("id %d is outside 0..%d: %w", id, maxVocab-1, ErrLimit)}
		}
		last = max(last, id)
		return nil
	}
	for content, id := range s.vocab {
		if err := check(fmt.Sprintf("model.vocab[%q]", clip(content)), id); err != nil {
			return 0, err
		}
	}
	for i := range s.added {
		if err := check(fmt.Sprintf("added_tokens[%d].id", i), s.added[i].ID); err != nil {
			return 0, err
		}
	}
	if entries := len(s.vocab) + len(s.added); int(last) >= 2*entries+maxHoles {
		return 0, &fieldError{"model.vocab", fmt.Errorf("%d tokens with ids up to %d leave too many ids unused: %w", entries, last, ErrLimit)}
	}
	return int(last) + 1, nil
}

func clip(s string) string {
	if len(s) > 40 {
		return s[:40] + "..."
	}
	return s
}

func (s *spec) buildModel(t *Tokenizer) error {
	m := &t.model
	*m = bpe{
		vocab: make(map[string]int32, len(s.vocab)), byteLevel: s.byteLevel, ignoreMerges: s.ignore,
		unk: -1, fuseUnk: s.fuseUnk, cache: newWordCache(),
	}
	for i := range m.bytes {
		m.bytes[i] = -1
	}
	for content, id := range s.vocab {
		text := content
		if s.byteLevel {
			bytes, ok := byteLevelDecode(content)
			if !ok {
				// It holds characters that no text is turned into: only decoding meets it.
				t.tokens[id] = token{bytes: content, present: true}
				continue
			}
			text = bytes
			if len(bytes) == 1 {
				m.bytes[bytes[0]] = id
			}
		}
		m.vocab[text] = id
		t.tokens[id] = token{bytes: s.decoded(text), present: true}
	}
	for b := range 256 {
		id, ok := s.vocab[fmt.Sprintf("<0x%02X>", b)]
		if ok && s.fallback {
			m.bytes[b] = id
		}
		if ok && s.decode.byteTokens {
			t.tokens[id].bytes = string([]byte{byte(b)})
		}
	}
	if s.unk != "" {
		id, ok := s.vocab[s.unk]
		if !ok {
			return &fieldError{"model.unk_token", fmt.Errorf("%q is not in the vocabulary", clip(s.unk))}
		}
		m.unk = id
	}
	return s.buildMerges(m)
}

// decoded applies the decoder's replacements to a vocabulary entry.
func (s *spec) decoded(text string) string {
	for _, r := range s.decode.replace {
		text = strings.ReplaceAll(text, r[0], r[1])
	}
	return text
}

func (s *spec) buildMerges(m *bpe) error {
	merges := s.merges
	if s.byteLevel {
		merges = make([][2]string, len(s.merges))
		for i, pair := range s.merges {
			left, ok1 := byteLevelDecode(pair[0])
			right, ok2 := byteLevelDecode(pair[1])
			if !ok1 || !ok2 {
				return &fieldError{fmt.Sprintf("model.merges[%d]", i), fmt.Errorf("%q %q is not in the byte alphabet", clip(pair[0]), clip(pair[1]))}
			}
			merges[i] = [2]string{left, right}
		}
	}
	if err := m.addMerges(merges); err != nil {
		return &fieldError{"model.merges", err}
	}
	return nil
}

func (s *spec) buildAdded(t *Tokenizer) error {
	for i, a := range s.added {
		if a.Content == "" {
			return &fieldError{fmt.Sprintf("added_tokens[%d].content", i), fmt.Errorf("is empty")}
		}
		if id, ok := s.vocab[a.Content]; ok {
			a.ID = id
		}
		pattern, set := a.Content, &t.raw
		if a.Normalized {
			var err error
			if pattern, err = t.normalizeText(a.Content); err != nil {
				return &fieldError{fmt.Sprintf("added_tokens[%d].content", i), err}
			}
			set = &t.normalized
		}
		set.add(pattern, a)
		if set == &t.raw {
			t.longestAdded = max(t.longestAdded, len(pattern))
			t.singleWords = t.singleWords || a.SingleWord
		}
		t.tokens[a.ID] = token{bytes: s.decoded(pattern), present: true, special: a.Special}
		if a.protected() {
			t.protected = append(t.protected, a.Content)
		}
	}
	return nil
}
