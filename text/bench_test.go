package text

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// benchText is prose, code, digits and other scripts, none of it repeated word for word too often.
func benchText(b *testing.B) string {
	tiny, err := tinyTokenizers()
	if err != nil {
		b.Fatal(err)
	}
	var all strings.Builder
	files, _ := filepath.Glob("*.go")
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			b.Fatal(err)
		}
		all.Write(data)
	}
	for _, e := range tiny["gpt2"].Vectors.Encode {
		all.WriteString(e.text)
	}
	return all.String()
}

func benchTokenizers(b *testing.B, run func(b *testing.B, tok *Tokenizer, text string)) {
	text := benchText(b)
	for name, path := range cachedTokenizers(b) {
		label := filepath.Base(filepath.Dir(path))
		if filepath.Ext(path) == ".gguf" {
			label = "smollm2"
		}
		tok := loadAny(b, path)
		b.Run(label+"-"+name[:4], func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			run(b, tok, text)
		})
	}
}

// BenchmarkEncodeCold forgets all words before each text.
func BenchmarkEncodeCold(b *testing.B) {
	benchTokenizers(b, func(b *testing.B, tok *Tokenizer, text string) {
		for b.Loop() {
			tok.model.cache = newWordCache()
			if _, err := tok.Encode(text, EncodeOptions{ParseSpecial: true}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkEncodeWarm(b *testing.B) {
	benchTokenizers(b, func(b *testing.B, tok *Tokenizer, text string) {
		for b.Loop() {
			if _, err := tok.Encode(text, EncodeOptions{ParseSpecial: true}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkDecode(b *testing.B) {
	benchTokenizers(b, func(b *testing.B, tok *Tokenizer, text string) {
		ids, err := tok.Encode(text, EncodeOptions{ParseSpecial: true})
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			d := tok.NewDetokenizer(true)
			for _, id := range ids {
				d.Push(id)
			}
		}
	})
}

// BenchmarkSplit is pre-tokenization alone.
func BenchmarkSplit(b *testing.B) {
	text := benchText(b)
	for _, name := range []string{"gpt2", "llama", "o200k", "deepseek", "possessive"} {
		tok := tinyTokenizer(b, name)
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				if err := splitAll(tok.steps, text, func(string) error { return nil }); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkRender(b *testing.B) {
	var v templateVectors
	readVectors(b, filepath.Join("testdata", "templates.json.gz"), &v)
	tok := bare(b, "<|im_start|>", "<|im_end|>")
	tok.templates.tokens = v.Special
	for _, tpl := range v.Templates {
		if tpl.Name != "indented" {
			continue
		}
		tm, err := tok.NewTemplate(tpl.Name, tpl.Source)
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if _, err := tm.Render(b.Context(), Chat{Messages: []byte(`[{"role":"system","content":"Use tools."},{"role":"user","content":"Weather in Zürich?"},{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":{"a":1}}}]}]`)}); err != nil {
				b.Fatal(err)
			}
		}
	}
}
