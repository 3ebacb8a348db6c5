package frontend

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
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

// TestChain: what goes on from messages has their keys, and the key that a turn is listed under is among them.
func TestChain(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	whole := make([]byte, chainFirst+20*chainBehind)
	for i := range whole {
		whole[i] = byte(rng.Uint32())
	}
	keys := chain(whole)
	for _, n := range []int{0, 1, chainBlock - 1, chainBlock, chainFirst - 1, chainFirst, chainFirst + 1, chainFirst + chainBehind - 1, chainFirst + chainBehind, len(whole)} {
		part := chain(whole[:n])
		if !slices.Equal(part, keys[:len(part)]) {
			t.Errorf("%d bytes have other keys", n)
		}
		last := part[len(part)-1]
		if lastKey(keys, n) != last || last.end > n || n-last.end >= chainBehind || n <= chainFirst && n-last.end >= chainBlock {
			t.Errorf("the last key of %d bytes is %+v, want %+v", n, lastKey(keys, n), last)
		}
	}
	for _, at := range []int{0, chainBlock - 1, chainBlock, chainFirst - 1, chainFirst + chainBehind - chainEnd, len(whole) - 1} {
		other := bytes.Clone(whole)
		other[at]++
		for i, key := range chain(other) {
			if (key != keys[i]) != (key.end > at) {
				t.Errorf("byte %d is another: key %d is %+v, was %+v", at, i, key, keys[i])
			}
		}
	}
}
