package frontend

import (
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"baton/coordinator"
	"baton/text"
)

// newTextTokenizer writes a byte-level tokenizer and a template, and loads them. Merges are of ASCII letters.
func newTextTokenizer(t testing.TB, template string, merges ...string) Tokenizer {
	t.Helper()
	vocab := map[string]int{}
	for i, m := range merges {
		vocab[strings.ReplaceAll(m, " ", "")] = 259 + i
	}
	// GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 and up.
	next := rune(0x100)
	for b := range rune(256) {
		c := b
		if b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			c = next
			next++
		}
		vocab[string(c)] = int(b)
	}
	special := func(id int, name string) map[string]any {
		return map[string]any{"id": id, "content": name, "special": true, "normalized": false, "lstrip": false, "rstrip": false, "single_word": false}
	}
	files := map[string]any{
		"tokenizer.json": map[string]any{
			"added_tokens":  []any{special(256, "<|im_start|>"), special(257, "<|im_end|>"), special(258, "[TOOL_CALLS]")},
			"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
			"decoder":       map[string]any{"type": "ByteLevel"},
			"model":         map[string]any{"type": "BPE", "vocab": vocab, "merges": append([]string{}, merges...)},
		},
		"tokenizer_config.json": map[string]any{"eos_token": "<|im_end|>", "chat_template": template},
	}
	if template == "" {
		delete(files, "tokenizer_config.json")
	}
	dir := t.TempDir()
	for name, content := range files {
		b, err := json.Marshal(content)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	tok, err := text.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	return NewTokenizer(tok)
}

const chatML = `{%- if messages[0].role == 'robot' %}{{ raise_exception('no robots') }}{% endif -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') | trim + '<|im_end|>\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + mode | default('') }}{% endif %}`

func TestModelTokenizer(t *testing.T) {
	tok := newTextTokenizer(t, chatML)
	tests := []struct{ body, want, says string }{
		{`{"messages":[{"role":"user","content":"hi é"}]}`, "<|im_start|>user\nhi é<|im_end|>\n<|im_start|>assistant\n", ""},
		{`{"messages":[{"role":"user","content":"a"}],"add_generation_prompt":false}`, "<|im_start|>user\na<|im_end|>\n", ""},
		{
			`{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}],"chat_template_kwargs":{"mode":"x"}}`,
			"<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nx", "",
		},
		{`{"messages":[{"role":"user","content":"a"}],"tools":[{"z":1,"a":2}],"add_generation_prompt":false}`, `[{"z": 1, "a": 2}]<|im_start|>user` + "\na<|im_end|>\n", ""},
		{
			`{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":" so a "}],"continue_final_message":true}`,
			"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nso a", "",
		},
		{`{"messages":[{"role":"assistant","content":[{"type":"text","text":"so"}]}],"continue_final_message":true}`, "<|im_start|>assistant\nso", ""},
		{`{"messages":[{"role":"assistant","content":" "}],"continue_final_message":true}`, "", "the last message has no text to continue"},
		{ // the last message's text stands elsewhere as well, and white space around it is its own
			`{"messages":[{"role":"user","content":"so"},{"role":"assistant","content":"so"}],"continue_final_message":true}`,
			"<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\nso", "",
		},
		{`{"messages":[{"role":"assistant","content":"im"}],"continue_final_message":true}`, "<|im_start|>assistant\nim", ""},
		{`{"messages":[{"role":"robot","content":"a"}]}`, "", "refuses these messages: no robots"},
	}
	for _, tt := range tests {
		b := newToyBackend()
		b.stall = 0
		s := newTestServer(t, b, func(c *Config) { c.Tokenizer, c.Limits.VocabSize = tok, 258 })
		r := post(t, s.Handler(), "/tokenize", tt.body)
		if tt.says != "" {
			if e := r.failure(t); r.status != 400 || deref(e.Param) != "messages" || !strings.Contains(e.Message, tt.says) {
				t.Errorf("%s: %d %s", tt.body, r.status, r.body)
			}
			continue
		}
		var got struct{ Tokens []int32 }
		if err := json.Unmarshal(r.body, &got); err != nil || r.status != 200 {
			t.Fatalf("%s: %d %s", tt.body, r.status, r.body)
		}
		if text := tok.Decode(got.Tokens, false); text != tt.want {
			t.Errorf("%s:\n got %q\nwant %q", tt.body, text, tt.want)
		}
		if got.Tokens[0] != 256 && got.Tokens[0] != '[' {
			t.Errorf("%s: the template's control token is %d", tt.body, got.Tokens[0])
		}
	}
}

// TestLookAlikes: a control token spelled out in a message stays text; in a raw prompt it is the token.
func TestLookAlikes(t *testing.T) {
	tok := newTextTokenizer(t, chatML)
	count := func(ids []int32) (n int) {
		for _, id := range ids {
			if id >= 256 {
				n++
			}
		}
		return n
	}
	ids, err := tok.RenderChat(t.Context(), &Chat{Messages: []byte(`[{"role":"user","content":"a<|im_end|>b"}]`)})
	if err != nil || count(ids) != 2 {
		t.Errorf("chat: %v, %v", ids, err)
	}
	ids, err = tok.Encode("a<|im_end|>b", true)
	if err != nil || count(ids) != 1 {
		t.Errorf("prompt: %v, %v", ids, err)
	}
}

func TestNoTemplate(t *testing.T) {
	tok := newTextTokenizer(t, "")
	_, err := tok.RenderChat(t.Context(), &Chat{Messages: []byte(`[{"role":"user","content":"a"}]`)})
	if !errors.Is(err, errNoTemplate) {
		t.Errorf("got %v", err)
	}
}

// TestNativeWithoutEngines runs against a real coordinator that no engine has joined.
func TestNativeWithoutEngines(t *testing.T) {
	quiet := slog.New(slog.DiscardHandler)
	c, err := coordinator.NewServer(coordinator.ServerConfig{Core: coordinator.Config{Wait: 30 * time.Millisecond}, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	client, err := c.Client(coordinator.ClientConfig{Name: "test", Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	s := newTestServer(t, Native{Client: client}, nil)
	if r := do(t, s.Handler(), "GET", "/health", ""); r.status != 503 || !strings.Contains(string(r.body), "reason") {
		t.Errorf("health: %d %s", r.status, r.body)
	}
	for _, stream := range []string{"false", "true"} {
		r := post(t, s.Handler(), completionPath, `{"prompt":"a","stream":`+stream+`}`)
		if e := r.failure(t); r.status != 503 || deref(e.Code) != "unavailable" || r.header.Get("Retry-After") == "" {
			t.Errorf("completion: %d %s", r.status, r.body)
		}
	}
	client.Close()
	if r := post(t, s.Handler(), completionPath, `{"prompt":"a"}`); r.status != 503 && r.status != 500 {
		t.Errorf("completion after the client's end: %d %s", r.status, r.body)
	}
}
