package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"baton/wire"
)

// textModel is a golden checkpoint with a tokenizer of bytes, a few merges and a chat template. The template begins each
// message by mark.
func textModel(t *testing.T, mark string) string {
	t.Helper()
	dir := t.TempDir()
	from, err := filepath.Abs(goldenPath("qwen3"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"config.json", "model.safetensors"} {
		if err := os.Symlink(filepath.Join(from, name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	// GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 and up. Ids begin at 3.
	vocab, next := map[string]int{}, rune(0x100)
	for b := range rune(256) {
		c := b
		if b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			c = next
			next++
		}
		vocab[string(c)] = int(b) + 3
	}
	merges := []string{"t h", "th e", "a n", "e r", "o u"}
	for i, m := range merges {
		vocab[strings.ReplaceAll(m, " ", "")] = 300 + i
	}
	special := func(id int, name string) map[string]any {
		return map[string]any{"id": id, "content": name, "special": true, "normalized": false, "lstrip": false, "rstrip": false, "single_word": false}
	}
	for name, content := range map[string]any{
		"tokenizer.json": map[string]any{
			"added_tokens":  []any{special(1, "<s>"), special(2, "</s>")},
			"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
			"decoder":       map[string]any{"type": "ByteLevel"},
			"model":         map[string]any{"type": "BPE", "vocab": vocab, "merges": merges},
		},
		"tokenizer_config.json": map[string]any{
			"eos_token":     "</s>",
			"chat_template": "{% for m in messages %}<s>" + mark + "{{ m.role + ':' + m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>" + mark + "assistant:{% endif %}",
		},
	} {
		raw, err := json.Marshal(content)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// rolloutChat is what a rollout reads of an answer.
type rolloutChat struct {
	Choices []struct {
		Message map[string]json.RawMessage `json:"message"`
	} `json:"choices"`
}

// rollout runs a conversation that carries its ids along and returns all that it has seen.
func (f *fleet) rollout(t *testing.T, turns int) (seen []int32) {
	t.Helper()
	var messages []any
	for turn := range turns {
		messages = append(messages, map[string]any{"role": "user", "content": fmt.Sprintf("and the other question number %d", turn)})
		status, raw, err := f.post(t.Context(), "/v1/chat/completions", map[string]any{
			"model": f.model, "messages": messages, "max_tokens": 24, "seed": turn, "logprobs": true, "return_tokens_as_token_ids": true,
			"conversation_params": map[string]any{"conversation_id": "rollout"},
		})
		if err != nil || status != 200 {
			t.Fatalf("turn %d: %d %s %v", turn, status, raw, err)
		}
		var a rolloutChat
		if err := json.Unmarshal(raw, &a); err != nil {
			t.Fatal(err)
		}
		m := a.Choices[0].Message
		var ids, sampled []int32
		var logprobs []float64
		for name, into := range map[string]any{"prompt_token_ids": &ids, "generation_token_ids": &sampled, "generation_log_probs": &logprobs} {
			if err := json.Unmarshal(m[name], into); err != nil {
				t.Fatalf("turn %d: %s of %s: %v", turn, name, raw, err)
			}
		}
		if len(ids) <= len(seen) || !slices.Equal(ids[:len(seen)], seen) || len(logprobs) != len(sampled) || len(sampled) == 0 {
			t.Fatalf("turn %d: prompt %v and %d log-probabilities for %d ids, after %v", turn, ids, len(logprobs), len(sampled), seen)
		}
		seen = append(ids, sampled...)
		messages = append(messages, m)
	}
	return seen
}

// TestRelayTokenizes: a relay makes the prompts, engines take them, and both agree, whether the ids are sent or compared; a
// relay with another template is told of, and the engine's word counts (29, 49, 50, 51).
func TestRelayTokenizes(t *testing.T) {
	model, other := textModel(t, ""), textModel(t, "!")
	prefill := httpPart(t, nil, model, wire.RolePrefill, "--kv-memory=32MiB")
	decode := httpPart(t, nil, model, wire.RoleDecode, "--kv-memory=32MiB")
	var want []int32
	for _, c := range []struct {
		name     string
		flags    []string
		outcome  string
		mismatch bool
	}{
		{"the engines do it", nil, "", false},
		{"the relay does", []string{"--frontend-tokenize", "--model=" + model}, "", false},
		{"both do", []string{"--frontend-tokenize", "--model=" + model, "--shadow-rate=1"}, "same", false},
		{"another template", []string{"--frontend-tokenize", "--model=" + other, "--shadow-rate=1"}, "mismatch", true},
	} {
		f := relayed(t, nil, prefill, decode, c.flags...)
		const turns = 6
		seen := f.rollout(t, turns)
		if want == nil {
			want = seen
		}
		if !slices.Equal(seen, want) {
			t.Errorf("%s: %v, want %v", c.name, seen, want)
		}
		if c.outcome != "" {
			if n := metric(t, f.url, "baton_relay_shadow_checks_total", `outcome="`+c.outcome+`"`); n != turns {
				t.Errorf("%s: %v of %d prompts were %s", c.name, n, turns, c.outcome)
			}
		}
		log := f.parts["frontend"].Log.Tail()
		if loud := strings.Contains(log, "level=ERROR"); loud != c.mismatch {
			t.Errorf("%s: log\n%s", c.name, log)
		}
	}
}

func TestRelayTokenizeFlags(t *testing.T) {
	for flags, want := range map[string]string{
		"--frontend-tokenize":                                "needs --model",
		"--frontend-tokenize --model /nowhere":               "/nowhere",
		"--frontend-tokenize --model " + goldenPath("qwen3"): "tokenizer.json",
		"--frontend-tokenize --shadow-rate 2":                "from 0 to 1",
	} {
		p := start(t, append([]string{"frontend", "--prefill=http://127.0.0.1:1", "--decode=http://127.0.0.1:2", "--listen=127.0.0.1:0"}, strings.Fields(flags)...)...)
		<-p.Done()
		if p.ExitCode() == 0 || !strings.Contains(p.Log.Tail(), want) {
			t.Errorf("%s: %d %s", flags, p.ExitCode(), p.Log.Tail())
		}
	}
}
