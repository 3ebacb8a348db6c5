package frontend

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

// drawRequest draws the members of a request whose answer depends on nothing random.
func drawRequest(t *rapid.T, path string) string {
	m := map[string]any{"seed": rapid.Int64().Draw(t, "seed"), "n": rapid.IntRange(1, 3).Draw(t, "n")}
	maybe := func(name string, v any) {
		if rapid.Bool().Draw(t, "has "+name) {
			m[name] = v
		}
	}
	maybe("temperature", rapid.SampledFrom([]float64{0, 0.5, 1, 2}).Draw(t, "temperature"))
	maybe("stop", rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"a", "the", "STOP", "é", "aab", "😀", ", ", "ab\n", "sat"}), 1, 4, rapid.ID[string]).Draw(t, "stop"))
	maybe("stop_token_ids", []int{rapid.IntRange(256, 280).Draw(t, "stop id")})
	maybe("include_stop_str_in_output", true)
	maybe("min_tokens", rapid.IntRange(0, 10).Draw(t, "min"))
	maybe("ignore_eos", true)
	maybe("skip_special_tokens", false)
	maybe("return_token_ids", true)
	// With stop strings, the figures of the last leg depend on when it ended; with several choices, those of
	// the first one on which of them came first.
	if m["stop"] == nil && m["n"] == 1 {
		maybe("return_handoff", true)
	}
	maybe("return_tokens_as_token_ids", true)
	maybe("prompt_logprobs", rapid.IntRange(0, 2).Draw(t, "prompt_logprobs"))
	m["max_tokens"] = rapid.IntRange(10, 40).Draw(t, "max")
	if path == chatPath {
		m["messages"] = []any{map[string]any{"role": "user", "content": rapid.String().Draw(t, "content")}}
		if rapid.Bool().Draw(t, "logprobs") {
			m["logprobs"] = true
			maybe("top_logprobs", rapid.IntRange(0, 3).Draw(t, "top"))
		}
	} else {
		m["prompt"] = rapid.SampledFrom([]any{"the cat", []int{1, 2, 300 - 20}, []string{"a", "é"}, [][]int{{1, 0xc3}, {5}}}).Draw(t, "prompt")
		maybe("logprobs", rapid.IntRange(0, 3).Draw(t, "top"))
		maybe("echo", true)
	}
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:len(b)-1])
}

// TestStreamEqualsWhole: a stream, put together, is the answer without streaming, whatever pieces the
// backend's results came in.
func TestStreamEqualsWhole(t *testing.T) {
	for _, path := range []string{chatPath, completionPath} {
		t.Run(path[4:], func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				request := drawRequest(rt, path)
				whole := post(t, newTestServer(t, newToyBackend(), nil).Handler(), path, request+`}`).decode(t)
				b := newToyBackend()
				b.chunkSeed = rapid.Uint64().Draw(rt, "chunks")
				stream := post(t, newTestServer(t, b, nil).Handler(), path,
					request+`,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`)
				got := assemble(t, stream)
				b.idle(t)
				got.ID, got.Created = whole.ID, whole.Created
				if !reflect.DeepEqual(got, whole) {
					rt.Fatalf("%s\nstream %s\nwhole  %s", request, dump(got), dump(whole))
				}
				for _, c := range whole.Choices {
					if !utf8.ValidString(c.content()) {
						rt.Fatalf("%q is not UTF-8", c.content())
					}
				}
			})
		})
	}
}

func dump(v any) string {
	b, _ := json.Marshal(v)
	return string(b)
}

// TestChoicesAreIndependent: each of n choices of several prompts is what a request for it alone gives.
func TestChoicesAreIndependent(t *testing.T) {
	s := newTestServer(t, newToyBackend(), nil)
	ask := func(prompt string, n int) []choiceJSON {
		return post(t, s.Handler(), completionPath, fmt.Sprintf(
			`{"prompt":%s,"n":%d,"seed":5,"max_tokens":30,"ignore_eos":true,"return_token_ids":true,"logprobs":1}`, prompt, n)).decode(t).Choices
	}
	all := ask(`["the cat","a"]`, 3)
	for p, prompt := range []string{`"the cat"`, `"a"`} {
		for n := 1; n <= 3; n++ {
			got, want := ask(prompt, n)[n-1], all[p*3+n-1]
			got.Index, want.Index = 0, 0
			if !reflect.DeepEqual(got, want) {
				t.Errorf("prompt %s choice %d: alone %s, among others %s", prompt, n-1, dump(got), dump(want))
			}
		}
	}
	if all[0].Text == all[1].Text {
		t.Error("two choices are the same")
	}
}

// TestSeeds: without a seed, requests differ, and so do equal prompts of one request.
func TestSeeds(t *testing.T) {
	b := newToyBackend()
	s := newTestServer(t, b, nil)
	for range 2 {
		post(t, s.Handler(), completionPath, `{"prompt":["a","a"],"n":2}`).decode(t)
	}
	seeds := map[uint64][]int{}
	for _, r := range b.submitted() {
		seeds[r.Sampling.Seed] = append(seeds[r.Sampling.Seed], r.Sampling.Choice)
	}
	if len(seeds) != 4 {
		t.Errorf("%d seeds for 4 prompts", len(seeds))
	}
	for seed, choices := range seeds {
		if len(choices) != 2 || choices[0]+choices[1] != 1 {
			t.Errorf("seed %d has choices %v", seed, choices)
		}
	}
}

// TestStopStrings checks the rule of the package comment against the unstopped answer.
func TestStopStrings(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		seed := rapid.IntRange(0, 1<<30).Draw(rt, "seed")
		minTokens := rapid.SampledFrom([]int{0, 0, 5}).Draw(rt, "min")
		include := rapid.Bool().Draw(rt, "include")
		ask := func(more string) choiceJSON {
			b := newToyBackend()
			b.chunkSeed = uint64(seed)
			c := post(t, newTestServer(t, b, nil).Handler(), completionPath, fmt.Sprintf(
				`{"prompt":"x","seed":%d,"max_tokens":40,"ignore_eos":true,"return_token_ids":true,"logprobs":0,"min_tokens":%d%s}`, seed, minTokens, more)).decode(t).Choices[0]
			b.idle(t)
			return c
		}
		free := ask("")
		// Stop strings out of the answer itself, and one that is not in it.
		runes := []rune(free.Text)
		from := rapid.IntRange(0, len(runes)-1).Draw(rt, "from")
		to := min(len(runes), from+rapid.IntRange(1, 6).Draw(rt, "length"))
		stops := []string{string(runes[from:to]), "absent from it"}
		if strings.ContainsRune(stops[0], utf8.RuneError) {
			return // a replaced byte: not text that a client would stop at
		}
		quoted, _ := json.Marshal(stops)
		got := ask(fmt.Sprintf(`,"stop":%s,"include_stop_str_in_output":%v`, quoted, include))

		want := stoppedBy(free, stops[0], minTokens, include)
		if got.Text != want.Text || !reflect.DeepEqual(got.TokenIDs, want.TokenIDs) || got.finish() != want.finish() || got.StopReason != want.StopReason {
			rt.Fatalf("stop %q (min %d, include %v)\n got %s\nwant %s\nfree %s", stops[0], minTokens, include, dump(got), dump(want), dump(free))
		}
		if n := len(got.Logprobs.Tokens); n != len(got.TokenIDs) || !reflect.DeepEqual(got.Logprobs.TokenLogprobs, free.Logprobs.TokenLogprobs[:n]) {
			rt.Fatalf("%d logprobs of %d tokens", n, len(got.TokenIDs))
		}
	})
}

// stoppedBy cuts an unstopped answer where the stop string first ends after the first minTokens tokens.
func stoppedBy(free choiceJSON, stop string, minTokens int, include bool) choiceJSON {
	d := toyTokenizer{}.NewDetokenizer(true)
	shown, watched := "", ""
	for i, id := range free.TokenIDs {
		text := d.Push(id)
		if i == len(free.TokenIDs)-1 {
			text += d.Flush()
		}
		if i < minTokens {
			shown += text
			continue
		}
		watched += text
		if at := strings.Index(watched, stop); at >= 0 {
			shown += watched[:at]
			if include {
				shown += stop
			}
			reason := "stop"
			return choiceJSON{Text: shown, TokenIDs: free.TokenIDs[:i+1], FinishReason: &reason, StopReason: stop}
		}
	}
	return free
}

// TestStopTokens: a stop id is reported and counted, its text is shown only on request.
func TestStopTokens(t *testing.T) {
	s := newTestServer(t, newToyBackend(), nil)
	ask := func(more string) (*answerJSON, choiceJSON) {
		a := post(t, s.Handler(), completionPath, `{"prompt":"x","seed":3,"max_tokens":200,"skip_special_tokens":false,"return_token_ids":true`+more+`}`).decode(t)
		return a, a.Choices[0]
	}
	a, c := ask("")
	last := c.TokenIDs[len(c.TokenIDs)-1]
	if c.finish() != "stop" || c.StopReason != nil || last != toyEnd || strings.Contains(c.Text, "<|end|>") || a.Usage.CompletionTokens != len(c.TokenIDs) {
		t.Errorf("end of sequence: %s", dump(c))
	}
	if _, c := ask(`,"include_stop_str_in_output":true`); !strings.HasSuffix(c.Text, "<|end|>") {
		t.Errorf("the end token's text was asked for: %q", c.Text)
	}
	id := c.TokenIDs[2]
	a, c = ask(fmt.Sprintf(`,"stop_token_ids":[%d]`, id))
	if c.finish() != "stop" || c.StopReason != float64(id) || c.TokenIDs[len(c.TokenIDs)-1] != id || a.Usage.CompletionTokens != len(c.TokenIDs) {
		t.Errorf("stop id %d: %s", id, dump(c))
	}
	if want := (toyTokenizer{}).Decode(c.TokenIDs[:len(c.TokenIDs)-1], false); c.Text != want {
		t.Errorf("stop id %d: text %q, want %q", id, c.Text, want)
	}
}
