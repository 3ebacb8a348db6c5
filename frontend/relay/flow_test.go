package relay

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
)

var kinds = []string{"trtllm", "baton", "vllm", "mooncake", "sglang"}

func chatIDs(messages string) (ids []int) {
	for _, c := range []byte(messages) {
		ids = append(ids, int(c))
	}
	return ids
}

// Two legs give what one worker would give, at both endpoints, streamed or not, and the usage of the whole.
func TestTwoLegsAreOne(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			r := newRelay(t, kind, nil)
			const messages = `[{"role":"user","content":"hi \"you\" \u00e9"}]`
			for _, q := range []struct {
				path, prompt string
				ids          []int
			}{
				{chatPath, `"messages":` + messages, chatIDs(messages)},
				{completionsPath, `"prompt":[5,6,7,8]`, []int{5, 6, 7, 8}},
				{completionsPath, `"prompt":"text"`, chatIDs(`"text"`)},
			} {
				want := expected(q.ids, 5)
				body := fmt.Sprintf(`{"model":"toy", %s ,"max_tokens":5,"logprobs":1}`, q.prompt)
				got := r.read(r.post(q.path, body))
				if c := got.Choices[0]; !slices.Equal(c.TokenIDs, want) || len(c.Logprobs.Content) != len(want) {
					t.Errorf("%s: tokens %v with %d logprobs, want %v", q.path, c.TokenIDs, len(c.Logprobs.Content), want)
				}
				if u := got.Usage; u.Prompt != len(q.ids) || u.Completion != 5 || u.Total != len(q.ids)+5 || u.Details.Cached != 7 {
					t.Errorf("%s: usage %+v", q.path, u)
				}
				events := r.events(r.post(q.path, strings.Replace(body, "{", `{"stream":true,"stream_options":{"include_usage":true},`, 1)))
				var tokens []int
				var usage completion
				for _, e := range events {
					var c completion
					if err := json.Unmarshal([]byte(e), &c); err != nil {
						t.Fatalf("%v in %s", err, e)
					}
					for _, choice := range c.Choices {
						tokens = append(tokens, choice.TokenIDs...)
					}
					usage = c
				}
				if !slices.Equal(tokens, want) {
					t.Errorf("%s streamed: %v, want %v", q.path, tokens, want)
				}
				if u := usage.Usage; u.Prompt != len(q.ids) || u.Completion != 5 || u.Details.Cached != 7 {
					t.Errorf("%s streamed: usage %+v", q.path, u)
				}
			}
			if p, d := len(r.prefill.requests()), len(r.decode.requests()); p != 6 || d != 6 {
				t.Errorf("%d prefill and %d decode legs, want 6 each", p, d)
			}
			samples := map[string]float64{"prefill_seconds": 6, "transfer_seconds": 3, "decode_seconds": 3} // streams have events to measure between
			if kind == "mooncake" || kind == "sglang" {
				samples["transfer_seconds"] = 0 // the prompt is computed meanwhile
			}
			for name, want := range samples {
				if got := r.metric(name); got != want {
					t.Errorf("%s has %v samples, want %v", name, got, want)
				}
			}
			r.await(func() bool { return r.metric("worker_requests") == 0 && r.metric("requests_in_flight") == 0 })
		})
	}
}

// A request that one worker serves has no transfer.
func TestSingleLegsTransferNothing(t *testing.T) {
	r := newRelay(t, "plain", func(c *Config) { c.Engine = "plain" })
	r.events(r.post(completionsPath, streamed))
	if transfer, decode := r.metric("transfer_seconds"), r.metric("decode_seconds"); transfer != 0 || decode != 1 {
		t.Errorf("%v samples of transfers, %v of decoding", transfer, decode)
	}
}
