package frontend

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
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

// TestAppendOthers: rollout fields are gone, and everything else is as it was.
func TestAppendOthers(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{`{"a":1,"prompt_token_ids":[1,2],"b":{"prompt_token_ids":3}}`, `{"a":1,"b":{"prompt_token_ids":3}}`},
		{`{"generation_token_ids":[1,2] , "prompt_token_ids":null}`, `{}`},
		{`{ "b": 1.0 , "generation_log_probs" : [] , "c":"\"prompt_token_ids\":[1]" }`, `{"b":1.0,"c":"\"prompt_token_ids\":[1]"}`},
		{`{"prompt\u005ftoken_ids":[1],"\u0062":"\u0063"}`, `{"\u0062":"\u0063"}`},
		{`{"b" : 1}`, `{"b" : 1}`},
	} {
		var ids sampledIDs
		if err := (value{raw: []byte(c.in)}).members(func(name string, m value) error { ids.set(name, m); return nil }); err != nil {
			t.Fatal(err)
		}
		if got := string(ids.appendOthers(nil, []byte(c.in))); got != c.want {
			t.Errorf("%s became %s, want %s", c.in, got, c.want)
		}
	}
}

// TestCutIn: only what an earlier list began with is left out, and only where it stands for the same ids.
func TestCutIn(t *testing.T) {
	var ids []int32
	for i := range int32(30) {
		ids = append(ids, 1000+i)
	}
	raw := string(appendIDs(nil, ids))
	known, body := idList{[]byte(raw), ids}, func(list string) string { return `[{"prompt_token_ids" : ` + list + `}]` }
	open := raw[:len(raw)-1]
	for _, c := range []struct {
		name, list string
		want       bool
	}{
		{"the same", raw, true},
		{"more", open + ",7]", true},
		{"more digits", open + "5,7]", true},
		{"another last", open[:len(open)-1] + "0]", true},
		{"spaces behind it", open + " , 7 ]", true},
		{"one less", string(appendIDs(nil, ids[:29])), false},
		{"nothing behind the comma", open[:len(open)-4] + "]", false},
		{"something else behind the comma", open[:len(open)-4] + "-1]", false},
		{"another first", "[2" + raw[2:], false},
		{"spelled otherwise", strings.Replace(raw, ",", ", ", 1), false},
		{"cut short", open[:len(open)-4], false},
		{"none", "[]", false},
		{"no list", "5", false},
	} {
		text := body(c.list)
		got := known.cutIn([]byte(text))
		if got.size > 0 != c.want {
			t.Errorf("%s: %+v", c.name, got)
		}
		if got.size == 0 {
			continue
		}
		left := text[:got.at+1] + text[got.at+1+got.size:]
		var want, rest []struct {
			Prompt []int32 `json:"prompt_token_ids"`
		}
		if err := json.Unmarshal([]byte(text), &want); err != nil {
			t.Fatal(c.name, err)
		}
		if err := json.Unmarshal([]byte(left), &rest); err != nil || !slices.Equal(slices.Concat(got.ids, rest[0].Prompt), want[0].Prompt) {
			t.Errorf("%s: %v and %s are not %v (%v)", c.name, got.ids, left, want[0].Prompt, err)
		}
	}
}

// TestRolloutsAnyhow: rollouts whose lists are spelled anyhow, edited, damaged, in wrong places or missing get what a server
// gives them that remembers nothing: the same ids, or the same error.
func TestRolloutsAnyhow(t *testing.T) {
	tok := newTextTokenizer(t, agentTemplate, merges...)
	prompter := func(t interface{ Fatal(...any) }, entries int) *Prompter {
		p, err := NewPrompter(PrompterConfig{Tokenizer: tok, Conversations: ConversationLimits{Entries: entries}, Limits: Limits{VocabSize: 259 + len(merges)}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	cuts := 0
	rapid.Check(t, func(rt *rapid.T) {
		with, without := prompter(rt, 0), prompter(rt, -1)
		messages := []string{`{"role":"user","content":"a question that is long enough for its ids to be worth a look at them"}`}
		spell := func(ids []int32) string {
			s := string(appendIDs(nil, ids))
			return strings.ReplaceAll(s, ",", rapid.SampledFrom([]string{",", ",", ",", ", ", " ,\n"}).Draw(rt, "comma"))
		}
		for range rapid.IntRange(2, 8).Draw(rt, "turns") {
			body := `{"messages":[` + strings.Join(messages, ",") + `]}`
			if rapid.IntRange(0, 5).Draw(rt, "damaged") == 0 {
				// Mostly in the lists, and in what was there before.
				at := rapid.IntRange(0, len(body)-1).Draw(rt, "where")
				with := rapid.SampledFrom([]string{"", ",", "]", "1", "5,", " ", "-", `"`, "[", "{}"}).Draw(rt, "damage")
				body = body[:at] + with + body[at+rapid.IntRange(0, 1).Draw(rt, "instead"):]
			}
			if k := with.conversations.recall([]byte(body)); k.cut.size > 0 {
				cuts++
			}
			got, err := with.Prompt(rt.Context(), []byte(body), "")
			want, wanted := without.Prompt(rt.Context(), []byte(body), "")
			if (err == nil) != (wanted == nil) || err != nil && err.Error() != wanted.Error() {
				rt.Fatalf("%s\nerror %v\n want %v", body, err, wanted)
			}
			if !slices.Equal(got, want) {
				rt.Fatalf("%s\n got %v\nwant %v", body, got, want)
			}
			if err != nil {
				continue
			}
			sampled := []int32{'a', 'n', 's', 257}
			list := spell(got)
			fields := `,"prompt_token_ids":` + list + `,"generation_token_ids":` + spell(sampled)
			switch rapid.IntRange(0, 9).Draw(rt, "fields") {
			case 0:
				fields = ""
			case 1:
				fields = `,"tool_calls":[{"type":"function","function":{"name":"f","arguments":{"prompt_token_ids":` + list + `}}}]` + fields
			case 2:
				fields = `,"x\"prompt_token_ids":` + list + fields
			}
			messages = append(messages, `{"role":"assistant","content":"ans"`+fields+`}`, `{"role":"user","content":"more"}`)
		}
	})
	if cuts == 0 {
		t.Error("nothing was ever left out")
	}
}

// TestKnownListIsPrinted: the ids of an answer are the prompt's, also where they are copied from the request.
func TestKnownListIsPrinted(t *testing.T) {
	ids := []int32{1, 20, 300, 4000, 50000}
	for _, raw := range []string{`[1,20,300]`, `[1, 20, 300]`, "[1,20\n,300]", `[1]`, ``} {
		l := idList{[]byte(raw), ids[:strings.Count(raw, ",")+min(len(raw), 1)]}
		for n := len(l.ids); n <= len(ids); n++ {
			if got, want := string(l.appendAll([]byte("x"), ids[:n])), "x"+string(appendIDs(nil, ids[:n])); got != want {
				t.Errorf("%s: %s, want %s", raw, got, want)
			}
		}
	}
	other := []int32{9, 9, 9, 9}
	if got := string(idList{[]byte(`[1,20]`), ids[:2]}.appendAll(nil, other)); got != `[9,9,9,9]` {
		t.Error(got)
	}
}
