package frontend

import (
	"bytes"
	"context"
	"testing"
)

// FuzzKnownMessages: a body whose messages begin like others that are known is read as if they were not.
func FuzzKnownMessages(f *testing.F) {
	const first = `{"messages":[{"role":"user","content":"a question"}]}`
	for _, body := range []string{
		first,
		`{"messages":[{"role":"user","content":"a question"},{"role":"assistant","content":"b"}]}`,
		`{"messages":[{"role":"user","content":"a question"} , {"role":"user"}]}`,
		`{"tools":[{"messages":[{"role":"user","content":"a question"}]}],"messages":[{"role":"user","content":"a question"}]}`,
		`{"x":"\"messages\":[{","messages" : [{"role":"user","content":"a question"},]}`,
		`{"messages":[{"role":"user","content":"a question"}],"messages":[]}`,
		`{"messages":[{"role":"user","content":"a question"},{"role":"assistant","content":"b","prompt_token_ids":[97],"generation_token_ids":[98]}],"required_prefix_token_ids":[97]}`,
	} {
		f.Add([]byte(body))
	}
	tok := newTextTokenizer(f, agentTemplate)
	f.Fuzz(func(t *testing.T, body []byte) {
		prompter := func(entries int) *Prompter {
			p, err := NewPrompter(PrompterConfig{Tokenizer: tok, Conversations: ConversationLimits{Entries: entries}, Limits: Limits{VocabSize: 259}})
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		with, without := prompter(0), prompter(-1)
		if _, err := with.Prompt(context.Background(), []byte(first), ""); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			got, err := with.Prompt(context.Background(), bytes.Clone(body), "")
			want, wanted := without.Prompt(context.Background(), bytes.Clone(body), "")
			if (err == nil) != (wanted == nil) || err != nil && err.Error() != wanted.Error() {
				t.Fatalf("error %v, want %v", err, wanted)
			}
			if err == nil && tok.Decode(got, false) != tok.Decode(want, false) {
				t.Fatalf("%q, want %q", tok.Decode(got, false), tok.Decode(want, false))
			}
		}
	})
}
