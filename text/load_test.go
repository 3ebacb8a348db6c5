package text

import (
	"bytes"
	"encoding/json/v2"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

const minimal = `{"added_tokens":%s,"normalizer":%s,"pre_tokenizer":%s,"post_processor":%s,"decoder":null,"model":{"type":"BPE",%s}}`

const (
	noTokens  = `[]`
	byteLevel = `{"type":"ByteLevel","use_regex":true}`
	abModel   = `"vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]`
)

func TestLoadErrors(t *testing.T) {
	file := func(added, normalizer, pre, post, model string) string {
		return fmt.Sprintf(minimal, added, normalizer, pre, post, model)
	}
	for _, c := range []struct {
		name, json  string
		field       string // of the FileError
		unsupported string // Name of the UnsupportedError
		limit       bool
	}{
		{name: "not JSON", json: `{"model":`},
		{name: "not an object", json: `[1]`},
		{name: "empty", json: ``},
		{name: "the model is a number", json: `{"model":5}`, field: "model"},
		{name: "added tokens are an object", json: file(`{"a":1}`, "null", byteLevel, "null", abModel), field: "added_tokens"},
		{name: "the normalizer is a list", json: file(noTokens, `[]`, byteLevel, "null", abModel), field: "normalizer"},
		{name: "no model", json: `{}`, field: "model.type", unsupported: ""},
		{name: "unigram", json: `{"model":{"type":"Unigram","vocab":[["a",0.5]],"unk_id":0}}`, field: "model.type", unsupported: "Unigram"},
		{name: "word piece", json: `{"model":{"type":"WordPiece","vocab":{"a":0}}}`, field: "model.type", unsupported: "WordPiece"},
		{name: "word level", json: `{"model":{"type":"WordLevel","vocab":{"a":0}}}`, field: "model.type", unsupported: "WordLevel"},
		{name: "subword prefix", json: file(noTokens, "null", byteLevel, "null", `"continuing_subword_prefix":"##",`+abModel), field: "model.continuing_subword_prefix", unsupported: "continuing_subword_prefix"},
		{name: "dropout", json: file(noTokens, "null", byteLevel, "null", `"dropout":0.1,`+abModel), field: "model.dropout", unsupported: "dropout"},
		{name: "merge of strangers", json: file(noTokens, "null", byteLevel, "null", `"vocab":{"a":0},"merges":["a b"]`), field: "model.merges"},
		{name: "merge without result", json: file(noTokens, "null", byteLevel, "null", `"vocab":{"a":0,"b":1},"merges":[["a","b"]]`), field: "model.merges"},
		{name: "merge of one", json: file(noTokens, "null", byteLevel, "null", `"vocab":{"a":0},"merges":["a"]`)},
		{name: "merge of three", json: file(noTokens, "null", byteLevel, "null", `"vocab":{"a":0},"merges":[["a","a","a"]]`)},
		{name: "merge outside the byte alphabet", json: file(noTokens, "null", byteLevel, "null", `"vocab":{"日":0,"本":1,"日本":2},"merges":["日 本"]`), field: "model.merges[0]"},
		{name: "vocabulary is a list", json: file(noTokens, "null", byteLevel, "null", `"vocab":["a"],"merges":[]`), field: "model.vocab"},
		{name: "id is text", json: file(noTokens, "null", byteLevel, "null", `"vocab":{"a":"0"},"merges":[]`), field: "model.vocab"},
		{name: "negative id", json: file(noTokens, "null", byteLevel, "null", `"vocab":{"a":-1},"merges":[]`), field: `model.vocab["a"]`, limit: true},
		{name: "huge id", json: file(noTokens, "null", byteLevel, "null", `"vocab":{"a":2147483647},"merges":[]`), field: `model.vocab["a"]`, limit: true},
		{name: "sparse ids", json: file(noTokens, "null", byteLevel, "null", `"vocab":{"a":1000000},"merges":[]`), field: "model.vocab", limit: true},
		{name: "huge added id", json: file(`[{"id":99999999,"content":"x"}]`, "null", byteLevel, "null", abModel), field: "added_tokens[0].id", limit: true},
		{name: "empty added token", json: file(`[{"id":3,"content":""}]`, "null", byteLevel, "null", abModel), field: "added_tokens[0].content"},
		{name: "unknown unk", json: file(noTokens, "null", byteLevel, "null", `"unk_token":"?",`+abModel), field: "model.unk_token"},
		{name: "normalizer", json: file(noTokens, `{"type":"BertNormalizer"}`, byteLevel, "null", abModel), field: "normalizer", unsupported: "BertNormalizer"},
		{name: "nested normalizer", json: file(noTokens, `{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Odd"}]}`, byteLevel, "null", abModel), field: "normalizer", unsupported: "Odd"},
		{name: "pre-tokenizer", json: file(noTokens, "null", `{"type":"Metaspace"}`, "null", abModel), field: "pre_tokenizer", unsupported: "Metaspace"},
		{name: "after byte level", json: file(noTokens, "null", `{"type":"Sequence","pretokenizers":[`+byteLevel+`,{"type":"Digits"}]}`, "null", abModel), field: "pre_tokenizer", unsupported: "a step after ByteLevel"},
		{name: "split behavior", json: file(noTokens, "null", `{"type":"Split","pattern":{"Regex":"a"},"behavior":"Chopped"}`, "null", abModel), field: "pre_tokenizer", unsupported: "Chopped"},
		{name: "split pattern", json: file(noTokens, "null", `{"type":"Split","pattern":{"Regex":"(a"},"behavior":"Isolated"}`, "null", abModel), field: "pre_tokenizer"},
		{name: "no split pattern", json: file(noTokens, "null", `{"type":"Split","behavior":"Isolated"}`, "null", abModel), field: "pre_tokenizer"},
		{name: "sequence in sequence", json: file(noTokens, "null", strings.Repeat(`{"type":"Sequence","pretokenizers":[`, 20)+byteLevel+strings.Repeat(`]}`, 20), "null", abModel), field: "pre_tokenizer", limit: true},
		{name: "deep JSON", json: file(noTokens, "null", strings.Repeat(`[`, 20000)+strings.Repeat(`]`, 20000), "null", abModel)},
		{name: "post-processor", json: file(noTokens, "null", byteLevel, `{"type":"Odd"}`, abModel), field: "post_processor", unsupported: "Odd"},
		{name: "post-processor's token", json: file(noTokens, "null", byteLevel, `{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}}],"special_tokens":{}}`, abModel), field: "post_processor"},
		{name: "post-processor's id", json: file(noTokens, "null", byteLevel, `{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}}],"special_tokens":{"<s>":{"ids":[77]}}}`, abModel), field: "post_processor"},
		{name: "decoder", json: `{"decoder":{"type":"WordPiece"},"model":{"type":"BPE",` + abModel + `}}`, field: "decoder", unsupported: "WordPiece"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "tokenizer.json")
			if err := os.WriteFile(path, []byte(c.json), 0o644); err != nil {
				t.Fatal(err)
			}
			_, err := Load(path)
			f, ok := errors.AsType[*FileError](err)
			if !ok {
				t.Fatalf("error %v, want a FileError", err)
			}
			if f.File != path || f.Field != c.field && c.field != "" || errors.Is(err, ErrLimit) != c.limit {
				t.Errorf("file %s, field %q, limit %v: %v", f.File, f.Field, errors.Is(err, ErrLimit), err)
			}
			u, ok := errors.AsType[*UnsupportedError](err)
			if ok != (c.unsupported != "" || c.name == "no model") || ok && u.Name != c.unsupported {
				t.Errorf("error %v, want it to name %q", err, c.unsupported)
			}
			if said := err.Error(); strings.Contains(said, "Go ") || strings.Contains(said, " json:") {
				t.Errorf("error %v speaks of the program", err)
			}
		})
	}
	if _, err := Load(t.TempDir()); !errors.Is(err, ErrNoTokenizer) {
		t.Errorf("empty folder: error %v, want ErrNoTokenizer", err)
	}
	if _, err := Load(filepath.Join(t.TempDir(), "absent")); !errors.Is(err, ErrNoTokenizer) {
		t.Errorf("absent folder: error %v, want ErrNoTokenizer", err)
	}
}

// TestConfigs: what the files beside tokenizer.json change.
func TestConfigs(t *testing.T) {
	tokenizer := fmt.Sprintf(minimal, `[{"id":3,"content":"<s>","special":true},{"id":4,"content":"</s>","special":true}]`, "null", byteLevel, "null", abModel)
	withBOS := fmt.Sprintf(minimal, `[{"id":3,"content":"<s>","special":true}]`, "null", byteLevel,
		`{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}],"special_tokens":{"<s>":{"ids":[3]}}}`, abModel)
	for _, c := range []struct {
		name    string
		files   map[string]string
		ids     []int32 // of "ab", with what is put around it
		special Special
		eos     []int32
	}{
		{"nothing else", map[string]string{"tokenizer.json": tokenizer}, []int32{2}, Special{-1, -1, -1, -1}, nil},
		{"roles", map[string]string{"tokenizer.json": tokenizer, "tokenizer_config.json": `{"bos_token":"<s>","eos_token":{"content":"</s>"},"pad_token":null,"unk_token":"absent"}`},
			[]int32{2}, Special{3, 4, -1, -1}, []int32{4}},
		{"roles in the map", map[string]string{"tokenizer.json": tokenizer, "special_tokens_map.json": `{"bos_token":{"content":"<s>"},"pad_token":"</s>"}`},
			[]int32{2}, Special{3, -1, -1, 4}, nil},
		{"ends", map[string]string{"tokenizer.json": tokenizer, "tokenizer_config.json": `{"eos_token":"</s>"}`, "generation_config.json": `{"eos_token_id":[2,4,99]}`, "config.json": `{"eos_token_id":1}`},
			[]int32{2}, Special{-1, 4, -1, -1}, []int32{2, 4, 99}},
		{"end of the model", map[string]string{"tokenizer.json": tokenizer, "config.json": `{"text_config":{"eos_token_id":1}}`}, []int32{2}, Special{-1, -1, -1, -1}, []int32{1}},
		{"add_bos_token", map[string]string{"tokenizer.json": tokenizer, "tokenizer_config.json": `{"bos_token":"<s>","eos_token":"</s>","add_bos_token":true,"add_eos_token":true}`},
			[]int32{3, 2, 4}, Special{3, 4, -1, -1}, []int32{4}},
		{"post-processor", map[string]string{"tokenizer.json": withBOS}, []int32{3, 2}, Special{-1, -1, -1, -1}, nil},
		{"add_bos_token twice", map[string]string{"tokenizer.json": withBOS, "tokenizer_config.json": `{"bos_token":"<s>","add_bos_token":true}`}, []int32{3, 2}, Special{3, -1, -1, -1}, nil},
		{"add_bos_token denied", map[string]string{"tokenizer.json": withBOS, "tokenizer_config.json": `{"bos_token":"<s>","add_bos_token":false}`}, []int32{2}, Special{3, -1, -1, -1}, nil},
		{"a token of the configuration", map[string]string{"tokenizer.json": tokenizer, "tokenizer_config.json": `{"bos_token":"<x>","add_bos_token":true,"added_tokens_decoder":{"7":{"content":"<x>","special":true}}}`},
			[]int32{7, 2}, Special{7, -1, -1, -1}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, content := range c.files {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			tok, err := Load(dir)
			if err != nil {
				t.Fatal(err)
			}
			ids, err := tok.Encode("ab", EncodeOptions{AddSpecial: true})
			if err != nil || !slices.Equal(ids, c.ids) {
				t.Errorf("ids %v, %v, want %v", ids, err, c.ids)
			}
			if tok.Special() != c.special || !slices.Equal(tok.EOS(), c.eos) {
				t.Errorf("special %v, ends %v; want %v, %v", tok.Special(), tok.EOS(), c.special, c.eos)
			}
		})
	}
	dir := t.TempDir()
	os.WriteFile(filepath.Join(dir, "tokenizer.json"), []byte(tokenizer), 0o644)
	os.WriteFile(filepath.Join(dir, "tokenizer_config.json"), []byte(`{"bos_token":3}`), 0o644)
	if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), "tokenizer_config.json") {
		t.Errorf("error %v, want one that names the file", err)
	}
}

func TestMerges(t *testing.T) {
	load := func(merges string) *Tokenizer {
		return loadBytes(t, fmt.Appendf(nil, minimal, noTokens, "null", byteLevel, "null", `"vocab":{"a":0,"b":1,"ab":2,"aa":3,"aab":4},"merges":`+merges))
	}
	for _, c := range []struct {
		merges, text string
		ids          []int32
	}{
		{`["a b","a a"]`, "aab", []int32{0, 2}},
		{`["a a","a b"]`, "aab", []int32{3, 1}},
		{`[["a","a"],["aa","b"]]`, "aab", []int32{4}},
		{`["a a","a b","a a"]`, "aab", []int32{0, 2}}, // the later of two equal merges counts
		{`[]`, "aab", []int32{0, 0, 1}},
		{`["a a"]`, "aaaaa", []int32{3, 3, 0}}, // leftmost first
		{`["a b"]`, "axb", []int32{2}},         // x has no token and there is no unk: as if it were not there
	} {
		ids, err := load(c.merges).Encode(c.text, EncodeOptions{})
		if err != nil || !slices.Equal(ids, c.ids) {
			t.Errorf("%s: %q is %v, %v, want %v", c.merges, c.text, ids, err, c.ids)
		}
	}
}

// TestHeapMerge: both ways to merge give the same.
func TestHeapMerge(t *testing.T) {
	tok := tinyTokenizer(t, "nothing")
	rapid.Check(t, func(t *rapid.T) {
		word := rapid.StringMatching(`[a-eE \n'<|_=-]{0,32}`).Draw(t, "word")
		var symbols []int32
		for i := range len(word) {
			symbols = append(symbols, tok.model.bytes[word[i]])
		}
		other := slices.Clone(symbols)
		symbols = symbols[:tok.model.mergeDirect(symbols)]
		other = other[:tok.model.mergeHeap(other)]
		if !slices.Equal(symbols, other) {
			t.Fatalf("%q: %v directly, %v with the heap", word, symbols, other)
		}
	})
}

// TestLongWord: a text that is one word takes no quadratic time.
func TestLongWord(t *testing.T) {
	for _, name := range []string{"nothing", "fallback", "gpt2", "o200k", "possessive"} {
		tok := tinyTokenizer(t, name)
		for _, unit := range []string{"a", "ab", " ", "<", "\u0301"} {
			text := strings.Repeat(unit, (1<<16)/len(unit))
			ids, err := tok.Encode(text, EncodeOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if got := tok.Decode(ids, false); got != text && name != "fallback" {
				t.Errorf("%s: %d times %q does not come back", name, len(text), unit)
			}
		}
	}
}

func TestGGUFErrors(t *testing.T) {
	good := func() *ggufVocab {
		return &ggufVocab{model: "gpt2", pre: "gpt-2", tokens: []string{"a", "b", "ab", "<s>"}, types: []int32{1, 1, 1, 3}, merges: []string{"a b"}, bos: 3, eos: 3, unk: -1, pad: -1}
	}
	tok, err := good().build()
	if err != nil {
		t.Fatal(err)
	}
	if ids, _ := tok.Encode("ab<s>", EncodeOptions{ParseSpecial: true}); !slices.Equal(ids, []int32{2, 3}) {
		t.Errorf("ids %v", ids)
	}
	yes := true
	for _, c := range []struct {
		name        string
		change      func(*ggufVocab)
		field       string
		unsupported string
	}{
		{"model", func(v *ggufVocab) { v.model = "llama" }, "tokenizer.ggml.model", "llama"},
		{"pre", func(v *ggufVocab) { v.pre = "novel" }, "tokenizer.ggml.pre", "novel"},
		{"no tokens", func(v *ggufVocab) { v.tokens = nil }, "tokenizer.ggml.tokens", ""},
		{"types", func(v *ggufVocab) { v.types = v.types[:2] }, "tokenizer.ggml.token_type", ""},
		{"merge", func(v *ggufVocab) { v.merges = []string{"ab"} }, "tokenizer.ggml.merges[0]", ""},
		{"strange merge", func(v *ggufVocab) { v.merges = []string{"b a"} }, "model.merges", ""},
		{"empty control token", func(v *ggufVocab) { v.tokens[3] = "" }, "tokenizer.ggml.tokens[3]", ""},
		{"bos outside", func(v *ggufVocab) { v.bos = 9; v.addBOS = &yes }, "tokenizer.ggml.bos_token_id", ""},
	} {
		v := good()
		c.change(v)
		_, err := v.build()
		f, ok := errors.AsType[*FileError](err)
		if !ok || f.Field != c.field {
			t.Errorf("%s: error %v, want field %s", c.name, err, c.field)
		}
		u, ok := errors.AsType[*UnsupportedError](err)
		if ok != (c.unsupported != "") || ok && u.Name != c.unsupported {
			t.Errorf("%s: error %v, want it to name %q", c.name, err, c.unsupported)
		}
	}
	for name := range preSpecs {
		v := good()
		v.pre, v.addPrefix, v.addBOS = name, true, &yes
		tok, err := v.build()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if ids, err := tok.Encode("ab", EncodeOptions{AddSpecial: true}); err != nil || !slices.Equal(ids, []int32{3, 2}) {
			t.Errorf("%s: ids %v, %v", name, ids, err)
		}
	}
}

// FuzzTokenizerJSON: no file makes loading or using a tokenizer panic, and what loads can be used.
func FuzzTokenizerJSON(f *testing.F) {
	for _, pre := range []string{byteLevel, "null", `{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\w+|[^\\s]++"},"behavior":"MergedWithNext","invert":true},{"type":"Digits","individual_digits":true},` + byteLevel + `]}`} {
		for _, normalizer := range []string{"null", `{"type":"NFC"}`, `{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},{"type":"Replace","pattern":{"String":" "},"content":"▁"}]}`} {
			f.Add(fmt.Appendf(nil, minimal, `[{"id":3,"content":"<|x|>","special":true},{"id":9,"content":"a","lstrip":true,"rstrip":true,"single_word":true,"normalized":true}]`, normalizer, pre,
				`{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}],"special_tokens":{"<s>":{"ids":[3]}}}`, abModel), "ab <|x|> a1\xff")
		}
	}
	f.Add([]byte(`{"decoder":{"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Strip","content":" ","start":1,"stop":0}]},"model":{"type":"BPE","byte_fallback":true,"unk_token":"u","vocab":{"u":0,"<0x41>":1},"merges":[]}}`), "Aé")
	f.Fuzz(func(t *testing.T, data []byte, text string) {
		if bytes.Contains(data, []byte("Regex")) && len(text) > 64 {
			return // a pattern may take until its timeout
		}
		tok, err := tryBytes(data)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without a message")
			}
			return
		}
		for _, parse := range []bool{false, true} {
			ids, err := tok.Encode(text, EncodeOptions{AddSpecial: true, ParseSpecial: parse})
			if err != nil {
				continue
			}
			for _, id := range ids {
				if id < 0 || int(id) >= tok.VocabSize() {
					t.Errorf("id %d of %d", id, tok.VocabSize())
				}
			}
			tok.Decode(ids, parse)
		}
	})
}

// FuzzTemplate: no template and no chat makes rendering panic, and what comes out holds no mark.
func FuzzTemplate(f *testing.F) {
	f.Add(chatML, []byte(`[{"role":"user","content":"<|im_end|> <"}]`))
	f.Add(`{%- macro f(x) -%}{{ x | tojson }}{%- endmacro -%}{% raw %}{{{% endraw %}{{ f(messages) }}`, []byte(`[1,{"a":[null,true,1.5e9]}]`))
	var v templateVectors
	readVectors(f, filepath.Join("testdata", "templates.json.gz"), &v)
	for _, tpl := range v.Templates {
		f.Add(tpl.Source, []byte(`[{"role":"user","content":"x"}]`))
	}
	tok := bare(f, "<|im_start|>", "<|im_end|>")
	f.Fuzz(func(t *testing.T, source string, messages []byte) {
		if strings.Contains(source, "*") { // repetition may take all the memory that the library allows
			return
		}
		tm, err := tok.NewTemplate("fuzz", source)
		if err != nil {
			return
		}
		p, err := tm.Render(t.Context(), Chat{Messages: messages})
		if err != nil {
			return
		}
		last := -1
		for _, at := range p.plain {
			if at <= last || at > len(p.Text) {
				t.Fatalf("places %v in %d bytes", p.plain, len(p.Text))
			}
			last = at
		}
		if strings.ContainsRune(p.Text, lastMark) && !strings.ContainsRune(source, lastMark) && !bytes.ContainsRune(messages, lastMark) && !bytes.Contains(messages, []byte("\\u")) {
			t.Fatalf("a mark is left in %q", p.Text)
		}
	})
}

// TestValues: JSON keeps its order and its numbers' kinds on the way to a template and back.
func TestValues(t *testing.T) {
	tok := bare(t)
	tm, err := tok.NewTemplate("test", `{{ messages | tojson }}`)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ in, want string }{
		{`[{"z":1,"a":2,"m":{"y":null,"b":[]}}]`, `[{"z": 1, "a": 2, "m": {"y": null, "b": []}}]`},
		{`[1,1.0,-0,9007199254740993,1e3,0.1,true]`, `[1, 1.0, 0, 9007199254740993, 1000.0, 0.1, true]`},
		{`[{"a":1,"b":2,"a":3}]`, `[{"a": 3, "b": 2}]`},
		{`["\u00e9\ud83d\ude00\u0000<>&'"]`, `["é😀\u0000<>&'"]`},
	} {
		p, err := tm.Render(t.Context(), Chat{Messages: []byte(c.in)})
		if err != nil || p.Text != c.want {
			t.Errorf("%s came back as %s, %v; want %s", c.in, p.Text, err, c.want)
		}
		var v any
		if err := json.Unmarshal([]byte(p.Text), &v); err != nil {
			t.Errorf("%s is no JSON: %v", p.Text, err)
		}
	}
}
