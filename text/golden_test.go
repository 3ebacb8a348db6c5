package text

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"baton/tensor"
)

var vectorDir = flag.String("vectors", "testdata", "folder of the golden vectors that testdata/generate.py wrote")

// vectors are what Hugging Face tokenizers made of many ugly strings.
type vectors struct {
	Encode []encodeVector `json:"encode"`
	Plain  []plainVector  `json:"plain"` // with special tokens taken for text
	Decode []decodeVector `json:"decode"`
}

type encodeVector struct {
	text          string
	ids, withAdds []int32
}

func (v *encodeVector) UnmarshalJSON(b []byte) error {
	return unmarshalTuple(b, &v.text, &v.ids, &v.withAdds)
}

type plainVector struct {
	text string
	ids  []int32
}

func (v *plainVector) UnmarshalJSON(b []byte) error {
	return unmarshalTuple(b, &v.text, &v.ids)
}

type decodeVector struct {
	ids                  []int32
	text, withoutSpecial string
}

func (v *decodeVector) UnmarshalJSON(b []byte) error {
	return unmarshalTuple(b, &v.ids, &v.text, &v.withoutSpecial)
}

func unmarshalTuple(b []byte, into ...any) error {
	var raw []jsontext.Value
	if err := json.Unmarshal(b, &raw); err != nil {
		return err
	}
	if len(raw) != len(into) {
		return fmt.Errorf("%d values, want %d", len(raw), len(into))
	}
	for i := range raw {
		if err := json.Unmarshal(raw[i], into[i]); err != nil {
			return err
		}
	}
	return nil
}

func readVectors(t testing.TB, file string, into any) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.UnmarshalRead(z, into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

// check compares a tokenizer with its vectors.
func (v *vectors) check(t *testing.T, tok *Tokenizer) {
	t.Helper()
	if len(v.Encode) == 0 || len(v.Decode) == 0 {
		t.Fatal("no vectors")
	}
	bad := 0
	report := func(format string, args ...any) {
		if bad++; bad <= 5 {
			t.Errorf(format, args...)
		}
	}
	encode := func(text string, o EncodeOptions, want []int32) {
		got, err := tok.Encode(text, o)
		if err != nil || !slices.Equal(got, want) {
			report("Encode(%q, %+v)\n got %v %q, %v\nwant %v %q", text, o, got, pieces(tok, got), err, want, pieces(tok, want))
		}
	}
	for _, e := range v.Encode {
		encode(e.text, EncodeOptions{ParseSpecial: true}, e.ids)
		encode(e.text, EncodeOptions{AddSpecial: true, ParseSpecial: true}, e.withAdds)
	}
	for _, e := range v.Plain {
		if !controlInText(tok, e.text) {
			encode(e.text, EncodeOptions{}, e.ids)
		}
	}
	for _, d := range v.Decode {
		if !tok.model.byteLevel && strings.Contains(d.text, "\uFFFD") {
			continue // a run of byte tokens with a fault in it is all U+FFFD there, even its good characters
		}
		if got := tok.Decode(d.ids, false); got != d.text {
			report("Decode(%v) = %q, want %q", d.ids, got, d.text)
		}
		if got := tok.Decode(d.ids, true); got != d.withoutSpecial {
			report("Decode(%v, skip) = %q, want %q", d.ids, got, d.withoutSpecial)
		}
	}
	t.Logf("%d texts, %d of them with look-alikes, %d id lists: %d differ", len(v.Encode), len(v.Plain), len(v.Decode), bad)
}

// controlInText tells whether a text holds a token that is protected here although it is not special,
// which the oracle does not know.
func controlInText(tok *Tokenizer, text string) bool {
	for _, set := range []*addedSet{&tok.raw, &tok.normalized} {
		for i := range set.tokens {
			if a := &set.tokens[i]; a.protected() && !a.Special && strings.Contains(text, a.Content) {
				return true
			}
		}
	}
	return false
}

func pieces(tok *Tokenizer, ids []int32) []string {
	var out []string
	for _, id := range ids {
		out = append(out, string(tok.TokenBytes(id)))
	}
	return out
}

type tinyVectors map[string]struct {
	Tokenizer jsontext.Value `json:"tokenizer"`
	Vectors   vectors        `json:"vectors"`
}

func loadBytes(t testing.TB, tokenizerJSON []byte) *Tokenizer {
	t.Helper()
	tok, err := tryBytes(tokenizerJSON)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func tryBytes(tokenizerJSON []byte) (*Tokenizer, error) {
	s, err := parseTokenizer(tokenizerJSON)
	if err != nil {
		return nil, err
	}
	return s.build()
}

// tinyTokenizers are the small tokenizers of testdata, one for each feature.
var tinyTokenizers = sync.OnceValues(func() (v tinyVectors, err error) {
	f, err := os.Open(filepath.Join(*vectorDir, "tiny.json.gz"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	err = json.UnmarshalRead(z, &v)
	return v, err
})

func tinyTokenizer(t testing.TB, name string) *Tokenizer {
	t.Helper()
	tiny, err := tinyTokenizers()
	if err != nil {
		t.Fatal(err)
	}
	v, ok := tiny[name]
	if !ok {
		t.Fatalf("no tiny tokenizer %q", name)
	}
	return loadBytes(t, v.Tokenizer)
}

// TestTiny compares small tokenizers, one for each feature, with Hugging Face's.
func TestTiny(t *testing.T) {
	tiny, err := tinyTokenizers()
	if err != nil || len(tiny) < 20 {
		t.Fatalf("%d small tokenizers: %v", len(tiny), err)
	}
	for name, v := range tiny {
		t.Run(name, func(t *testing.T) { v.Vectors.check(t, loadBytes(t, v.Tokenizer)) })
	}
}

// TestReal compares the tokenizers of real models, as far as they are in the cache (scripts/fetch-tokenizers).
func TestReal(t *testing.T) {
	files, _ := filepath.Glob(filepath.Join(*vectorDir, "*.json.gz"))
	found := cachedTokenizers(t)
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".json.gz")
		if name == "tiny" || name == "templates" || name == "conversations" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			var v struct {
				SHA256  string       `json:"sha256"`
				Chats   []chatVector `json:"chats"`
				Vectors vectors      `json:"vectors"`
			}
			readVectors(t, file, &v)
			path, ok := found[v.SHA256]
			if !ok {
				t.Skipf("no tokenizer with SHA-256 %s in the cache: run scripts/fetch-tokenizers", v.SHA256)
			}
			tok := loadAny(t, path)
			v.Vectors.check(t, tok)
			if len(v.Chats) > 0 {
				checkChats(t, tok, v.Chats)
			}
		})
	}
}

// chatVector is a chat, its prompt by the model's own template, and the prompt's ids.
type chatVector struct {
	messages jsontext.Value
	text     string
	ids      []int32
}

func (v *chatVector) UnmarshalJSON(b []byte) error {
	return unmarshalTuple(b, &v.messages, &v.text, &v.ids)
}

func checkChats(t *testing.T, tok *Tokenizer, chats []chatVector) {
	tm, err := tok.Template("")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range chats {
		p, err := tm.Render(t.Context(), Chat{Messages: c.messages, AddGenerationPrompt: true})
		if err != nil || p.Text != c.text {
			t.Errorf("%s:\n got %q, %v\nwant %q", c.messages, p.Text, err, c.text)
			continue
		}
		if ids, err := tok.EncodePrompt(p); err != nil || !slices.Equal(ids, c.ids) {
			t.Errorf("%q:\n got %q, %v\nwant %q", p.Text, pieces(tok, ids), err, pieces(tok, c.ids))
		}
	}
	t.Logf("%d chats", len(chats))
}

func loadAny(t testing.TB, path string) *Tokenizer {
	t.Helper()
	if tok, ok := loaded[path]; ok {
		return tok
	}
	loaded[path] = loadNew(t, path)
	return loaded[path]
}

// loaded are real models' tokenizers, which take a second each; the tests that need them are not parallel.
var loaded = map[string]*Tokenizer{}

func loadNew(t testing.TB, path string) *Tokenizer {
	t.Helper()
	if filepath.Ext(path) != ".gguf" {
		tok, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		return tok
	}
	g, err := tensor.OpenGGUF(path)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	tok, err := FromGGUF(g)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// cachedTokenizers finds tokenizer.json and SmolLM2 GGUF files in the cache, by their digest.
func cachedTokenizers(t testing.TB) map[string]string {
	t.Helper()
	root := os.Getenv("BATON_CACHE")
	if root == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return nil
		}
		root = filepath.Join(home, ".cache", "baton")
	}
	found := map[string]string{}
	filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() != "tokenizer.json" && !(strings.Contains(d.Name(), "SmolLM2") && filepath.Ext(path) == ".gguf") {
			return nil
		}
		data, err := os.ReadFile(path)
		if err == nil {
			sum := sha256.Sum256(data)
			found[hex.EncodeToString(sum[:])] = path
		}
		return nil
	})
	return found
}

// TestLookAlikesAreText: only with ParseSpecial is a special token what spells it out.
func TestLookAlikesAreText(t *testing.T) {
	tok := tinyTokenizer(t, "llama")
	start, _ := tok.TokenID("<|im_start|>")
	parsed, _ := tok.Encode("a<|im_start|>b", EncodeOptions{ParseSpecial: true})
	plain, _ := tok.Encode("a<|im_start|>b", EncodeOptions{})
	if !slices.Contains(parsed, start) || slices.Contains(plain, start) {
		t.Errorf("parsed %v, plain %v; id of <|im_start|> is %d", parsed, plain, start)
	}
	if got := tok.Decode(plain, true); got != "a<|im_start|>b" {
		t.Errorf("look-alike decodes to %q", got)
	}
	if bytes.Contains(tok.TokenBytes(plain[1]), []byte("im_start")) {
		t.Errorf("look-alike is one token: %q", tok.TokenBytes(plain[1]))
	}
}

// TestConcurrentUse shares one tokenizer, its cache and a template among goroutines.
func TestConcurrentUse(t *testing.T) {
	tok := tinyTokenizer(t, "llama")
	tm, err := tok.NewTemplate("chat", chatML)
	if err != nil {
		t.Fatal(err)
	}
	tiny, _ := tinyTokenizers()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for _, e := range tiny["llama"].Vectors.Encode {
				got, err := tok.Encode(e.text, EncodeOptions{ParseSpecial: true})
				if err != nil || !slices.Equal(got, e.ids) {
					t.Errorf("Encode(%q) = %v, %v, want %v", e.text, got, err, e.ids)
				}
				content, _ := json.Marshal([]map[string]string{{"role": "user", "content": e.text}})
				p, err := tm.Render(t.Context(), Chat{Messages: content})
				if want := "<|im_start|>user\n" + e.text + "<|im_end|>\n"; err != nil || p.Text != want {
					t.Errorf("Render(%q) = %q, %v", e.text, p.Text, err)
				}
			}
		})
	}
	wg.Wait()
}
