package frontend

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// rolloutJSON is a message with rollout fields.
type rolloutJSON struct {
	Content    *string
	Prompt     []int32   `json:"prompt_token_ids"`
	Generation []int32   `json:"generation_token_ids"`
	Logprobs   []float32 `json:"generation_log_probs"`
}

// TestRolloutFields: an answer's message carries its ids and log-probabilities, all or none (38, 60).
func TestRolloutFields(t *testing.T) {
	for _, c := range []struct {
		more string
		want bool
	}{
		{`,"logprobs":true,"top_logprobs":0,"return_tokens_as_token_ids":true`, true},
		{`,"logprobs":true,"return_token_ids":true`, false},
		{`,"logprobs":true`, false},
		{`,"return_tokens_as_token_ids":true`, false},
		{``, false},
	} {
		s := newTestServer(t, newToyBackend(), nil)
		r := post(t, s.Handler(), chatPath, `{"messages":[{"role":"user","content":"hi"}],"max_tokens":5,"return_token_ids":true`+strings.Replace(c.more, `,"return_token_ids":true`, "", 1)+`}`)
		var a struct {
			Choices []struct {
				Message  rolloutJSON
				TokenIDs []int32 `json:"token_ids"`
				Logprobs struct{ Content []struct{ Logprob float32 } }
			}
			Prompt []int32 `json:"prompt_token_ids"`
		}
		if err := json.Unmarshal(r.body, &a); err != nil || r.status != 200 {
			t.Fatalf("%d %s", r.status, r.body)
		}
		m := a.Choices[0].Message
		if !c.want {
			if m.Prompt != nil || m.Generation != nil || m.Logprobs != nil {
				t.Errorf("%s: %s", c.more, r.body)
			}
			continue
		}
		if !slices.Equal(m.Prompt, a.Prompt) || !slices.Equal(m.Generation, a.Choices[0].TokenIDs) || len(m.Logprobs) != len(m.Generation) || len(m.Generation) == 0 {
			t.Errorf("%s: %s", c.more, r.body)
		}
		for i, l := range a.Choices[0].Logprobs.Content {
			if l.Logprob != m.Logprobs[i] {
				t.Errorf("log-probability %d is %v and %v", i, l.Logprob, m.Logprobs[i])
			}
		}
	}
}

// TestRolloutTurns: a rollout that carries its ids along is contiguous: each prompt begins with all ids that were seen, on
// a server that remembers, one that does not, and one that was started anew at each turn; and /tokenize agrees (51, 60).
func TestRolloutTurns(t *testing.T) {
	for _, name := range []string{"remembers", "does not", "started anew", "lost the thoughts"} {
		change := func(c *Config) {
			if name == "does not" {
				c.Conversations.Entries = -1
			}
		}
		k := newTalk(t, change)
		k.more = `,` + withTools
		k.messages = []string{`{"role":"user","content":"the question"}`}
		var seen []int32
		for turn := range 12 {
			if name == "started anew" {
				fresh := newTalk(t, change)
				k.s, fresh.s.cfg.Tokenizer = fresh.s, k.tok
				k.b, k.tok = fresh.b, fresh.tok
			}
			answer := []string{toolCall, "<think>\nthe thought\n</think>\n\nthe answer", "cut off in the…"}[turn%3]
			k.b.next(answer)
			_, ids := k.ask()
			if len(ids) <= len(seen) || !slices.Equal(ids[:len(seen)], seen) {
				t.Fatalf("%s, turn %d:\n got %q\nafter %q", name, turn, k.tok.Decode(ids, false), k.tok.Decode(seen, false))
			}
			var tokens struct{ Tokens []int32 }
			if err := json.Unmarshal(post(t, k.s.Handler(), "/tokenize", k.body()).body, &tokens); err != nil || !slices.Equal(tokens.Tokens, ids) {
				t.Errorf("%s, turn %d: /tokenize gives %q", name, turn, k.tok.Decode(tokens.Tokens, false))
			}
			spoken, cut := strings.CutSuffix(answer, "…")
			var sampled []int32
			for _, c := range []byte(spoken) {
				sampled = append(sampled, int32(c))
			}
			if !cut {
				sampled = append(sampled, 257)
			}
			seen = append(slices.Clone(ids), sampled...)
			shown := spoken
			if name == "lost the thoughts" {
				shown = shown[strings.LastIndex(shown, "\n")+1:]
			}
			content, _ := json.Marshal(shown)
			k.messages = append(k.messages,
				fmt.Sprintf(`{"role":"assistant","content":%s,"prompt_token_ids":%s,"generation_token_ids":%s,"generation_log_probs":[-0.5]}`, content, appendIDs(nil, ids), appendIDs(nil, sampled)),
				`{"role":"user","content":"and the next"}`)
		}
	}
}

// TestRequiredPrefix: the ids may come beside the messages.
func TestRequiredPrefix(t *testing.T) {
	k := newTalk(t, nil)
	k.b.next("the answer")
	a, ids := k.ask(`{"role":"user","content":"the question"}`)
	seen := slices.Clone(ids)
	for _, c := range []byte("the answer") {
		seen = append(seen, int32(c))
	}
	k.more = `,"required_prefix_token_ids":` + string(appendIDs(nil, append(seen, 257)))
	for _, more := range []string{`{"role":"user","content":"more"}`, `{"role":"user","content":"and more"}`} { // the second time the answer is known
		_, got := k.ask(strings.Replace(string(a), "the answer", "spelled otherwise", 1), more)
		if len(got) <= len(seen) || !slices.Equal(got[:len(seen)], seen) {
			t.Errorf("got %q", k.tok.Decode(got, false))
		}
		a = json.RawMessage(`{"role":"assistant","content":"again"}`)
		k.messages = k.messages[:len(k.messages)-1]
	}
}

// TestRolloutFaults: what cannot be meant is refused with the field's name (52).
func TestRolloutFaults(t *testing.T) {
	const question, more = `{"role":"user","content":"a"}`, `{"role":"user","content":"b"}`
	message := func(fields string) string { return `{"role":"assistant","content":"x"` + fields + `}` }
	for _, c := range []struct{ message, more, param, says string }{
		{message(`,"prompt_token_ids":[97]`), "", "messages[1].generation_token_ids", "send both"},
		{message(`,"prompt_token_ids":[97],"generation_token_ids":null`), "", "messages[1].generation_token_ids", "send both"},
		{message(`,"generation_token_ids":[97]`), "", "messages[1].prompt_token_ids", "send both"},
		{message(`,"prompt_token_ids":[],"generation_token_ids":[97]`), "", "messages[1].prompt_token_ids", "empty"},
		{message(`,"prompt_token_ids":[97],"generation_token_ids":[99999]`), "", "messages[1].generation_token_ids", "not a token id"},
		{message(`,"prompt_token_ids":"97","generation_token_ids":[1]`), "", "messages[1].prompt_token_ids", "array"},
		{`{"role":"user","content":"a"}`, `,"required_prefix_token_ids":[97]`, "required_prefix_token_ids", "message of the assistant"},
		{message(""), `,"required_prefix_token_ids":[-1]`, "required_prefix_token_ids", "not a token id"},
	} {
		k := newTalk(t, nil)
		for range 2 {
			e := post(t, k.s.Handler(), chatPath, `{"messages":[`+question+`,`+c.message+`,`+more+`]`+c.more+`}`)
			f := e.failure(t)
			if e.status != 400 || deref(f.Param) != c.param || !strings.Contains(f.Message, c.says) {
				t.Errorf("%s%s: %d %s", c.message, c.more, e.status, e.body)
			}
			post(t, k.s.Handler(), chatPath, `{"messages":[`+question+`]}`) // known the second time
		}
	}
	// A template that does not end its messages by an end of sequence cannot be fitted.
	b := &speaker{}
	s := newTestServer(t, b, func(c *Config) {
		c.Tokenizer = newTextTokenizer(t, `{% for m in messages %}{{ m.content + '|' }}{% endfor %}`)
		c.Limits.VocabSize = 259
	})
	e := post(t, s.Handler(), chatPath, `{"messages":[`+question+`,`+message(`,"prompt_token_ids":[97],"generation_token_ids":[98]`)+`,`+more+`]}`)
	if f := e.failure(t); e.status != 400 || deref(f.Param) != "messages[1].generation_token_ids" || !strings.Contains(f.Message, "end-of-sequence") {
		t.Errorf("%d %s", e.status, e.body)
	}
}
