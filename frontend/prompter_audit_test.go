package frontend

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

// TestPrompterMakesTheServersIDs: whoever makes a prompt, a relay's Prompter or the server that is asked, its ids are the
// same: with tools and their results, thoughts that the template leaves out of old turns, answers that were cut off, other
// arguments of the template, and with the sampled ids carried along or not (49).
func TestPrompterMakesTheServersIDs(t *testing.T) {
	const carry = `,"logprobs":true,"return_tokens_as_token_ids":true`
	for _, more := range []string{"", `,` + withTools, carry, `,` + withTools + carry} {
		k := newTalk(t, func(c *Config) { c.Conversations.Entries = -1 })
		p, err := NewPrompter(PrompterConfig{Tokenizer: k.tok, Limits: Limits{VocabSize: 259 + len(merges)}})
		if err != nil {
			t.Fatal(err)
		}
		carried := false
		for turn := range 12 {
			k.more = more
			if turn == 7 {
				k.more += `,"chat_template_kwargs":{"enable_thinking":false}`
			}
			question := `{"role":"user","content":"a question, the one before an answer"}`
			if turn%4 == 1 {
				question = `{"role":"tool","content":"the result"}`
			}
			k.b.next([]string{toolCall, "<think>\nthe thought\n</think>\n\nthe answer", "cut off in the…", "an answer"}[turn%4])
			answer, want := k.ask(question)
			got, err := p.Prompt(t.Context(), []byte(k.body()), "one")
			if err != nil || !slices.Equal(got, want) {
				t.Fatalf("%q, turn %d: %v\n got %q\nwant %q", more, turn, err, k.tok.Decode(got, false), k.tok.Decode(want, false))
			}
			var message map[string]json.RawMessage
			if err := json.Unmarshal(answer, &message); err != nil {
				t.Fatal(err)
			}
			carried = carried || message["generation_token_ids"] != nil
			k.messages = append(k.messages, string(answer))
		}
		if carried != strings.Contains(more, carry) {
			t.Errorf("%q: messages have sampled ids: %t", more, carried)
		}
	}
}
