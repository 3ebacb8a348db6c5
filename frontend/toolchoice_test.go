package frontend

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	"baton/text"
	"baton/wire"
)

const (
	twoTools = `"tools":[{"type":"function","function":{"name":"look"}},{"type":"function","function":{"name":"fetch","parameters":{"type":"object","properties":{"n":{"type":"integer"}}}}}]`

	required  = `,"tool_choice":"required"`
	choosesIt = `,"tool_choice":{"type":"function","function":{"name":"fetch"}}`

	someCall = "<tool_call>\n{\"name\": \""
	thatCall = someCall + "fetch\", \"arguments\": "
)

// TestForcedCalls: the prompt ends with the beginning of a call, and the answer is read as if it were its own.
func TestForcedCalls(t *testing.T) {
	call := func(name, arguments string) string {
		return fmt.Sprintf(`{"Index":null,"ID":"","Type":"function","Function":{"Name":%q,"Arguments":%q}}`, name, arguments)
	}
	const end = "}\n</tool_call>"
	for _, tt := range []struct {
		name, choice, opening, answer string // the answer ends with … where it is cut off
		content, calls, finish        string
	}{
		{"required", required, someCall, `look", "arguments": {"é": "日😀"}` + end, "", call("look", `{"é": "日😀"}`), "tool_calls"},
		{"several", required, someCall, `look", "arguments": {}` + end + "\n" + thatCall + `{"n": 1}` + end, "", call("look", `{}`) + "," + call("fetch", `{"n": 1}`), "tool_calls"},
		{"a function that does not exist", required, someCall, `dig", "arguments": {}` + end, "", call("dig", `{}`), "tool_calls"},
		{"this function", choosesIt, thatCall, `{"n": 1}` + end, "", call("fetch", `{"n": 1}`), "stop"},
		{"this one and another", choosesIt, thatCall, `{"n": 1}` + end + "\n" + someCall + `look", "arguments": {}` + end, "", call("fetch", `{"n": 1}`) + "," + call("look", `{}`), "stop"},
		{"text after it", choosesIt, thatCall, `{"n": 1}` + end + " and more", " and more", call("fetch", `{"n": 1}`), "stop"},
		{"without its end", choosesIt, thatCall, `{"n": 1}}`, "", call("fetch", `{"n": 1}`), "stop"},
		{"malformed", required, someCall, `look: 1` + end, someCall + `look: 1` + end, "", "stop"},
		{"arguments that are none", choosesIt, thatCall, `no` + end, thatCall + `no` + end, "", "stop"},
		{"nothing", required, someCall, ``, someCall, "", "stop"},
		{"cut off", choosesIt, thatCall, `{"n": …`, thatCall + `{"n": `, "", "length"},
		{"cut off after a call", required, someCall, `look", "arguments": {}` + end + "\n…", "", call("look", `{}`), "length"},
		{"thoughts are none", required, someCall, `look", "arguments": {}` + end + "<think>so</think>", "<think>so</think>", call("look", `{}`), "tool_calls"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := newTalk(t, nil)
			k.more = "," + twoTools + tt.choice
			k.messages = []string{`{"role":"user","content":"the question"}`}
			k.b.answers = []string{tt.answer, tt.answer}
			whole := withoutIDs(t, post(t, k.s.Handler(), chatPath, k.body()).decode(t))
			message := fmt.Sprintf(`{"Role":"assistant","Content":%s,"reasoning_content":"","tool_calls":[%s]}`, dump(tt.content), tt.calls)
			if got := whole.Choices[0]; dump(got.Message) != strings.Replace(message, "[]", "null", 1) || got.finish() != tt.finish {
				t.Errorf("got %s (%s)\nwant %s (%s)", dump(got.Message), got.finish(), message, tt.finish)
			}
			prompt := k.b.last()
			if shown := k.tok.Decode(prompt, false); !strings.HasSuffix(shown, "<|im_start|>assistant\n"+tt.opening) {
				t.Errorf("the prompt is %q", shown)
			}
			sampled := len(strings.TrimSuffix(tt.answer, "…"))
			if !strings.HasSuffix(tt.answer, "…") {
				sampled++
			}
			if u := whole.Usage; u.PromptTokens != len(prompt) || u.CompletionTokens != sampled {
				t.Errorf("usage %+v, want %d and %d", u, len(prompt), sampled)
			}
			plain := k.more
			k.more = "," + twoTools
			unforced := k.whole()
			if !slices.Equal(prompt[:len(unforced)], unforced) {
				t.Errorf("the prompt does not begin as it does without tool_choice")
			}
			k.more = plain + `,"stream":true,"stream_options":{"include_usage":true}`
			stream := withoutIDs(t, assemble(t, post(t, k.s.Handler(), chatPath, k.body())))
			stream.ID, stream.Created = whole.ID, whole.Created
			if !reflect.DeepEqual(stream, whole) {
				t.Errorf("stream %s\nwhole  %s", dump(stream), dump(whole))
			}
		})
	}
}

// TestForcedChoices: each of several answers goes on with the same beginning.
func TestForcedChoices(t *testing.T) {
	k := newTalk(t, nil)
	k.more = "," + twoTools + required + `,"n":2`
	k.messages = []string{`{"role":"user","content":"the question"}`}
	k.b.answers = []string{`look", "arguments": {}}`, `look", "arguments": {}}`}
	a := post(t, k.s.Handler(), chatPath, k.body()).decode(t)
	if len(a.Choices) != 2 || a.Usage.PromptTokens != len(k.b.last()) {
		t.Fatalf("got %s", dump(a))
	}
	for _, c := range a.Choices {
		if len(c.Message.ToolCalls) != 1 || c.Message.ToolCalls[0].Function.Name != "look" || c.Message.Content != "" {
			t.Errorf("choice %d: %s", c.Index, dump(c.Message))
		}
	}
}

// thinkingTemplate lets its model think unless it is told not to.
const thinkingTemplate = `{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls %}{{ '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments|tojson + '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' if enable_thinking }}{% endif %}`

// TestForcedTurns: what the model was given, the beginning of the call with it, and what it sampled are what the next turn begins
// with: remembered, or carried along by a rollout, or both.
func TestForcedTurns(t *testing.T) {
	const rollout = `,"logprobs":true,"return_tokens_as_token_ids":true`
	for _, template := range []string{agentTemplate, thinkingTemplate} {
		for _, choice := range []string{required, choosesIt} {
			for _, name := range []string{"remembered", "carried", "carried to another server", "thinking"} {
				extra := ""
				if name == "thinking" {
					extra = `,"chat_template_kwargs":{"enable_thinking":true}`
				}
				newOne := func() *talk {
					k := newTalk(t, nil)
					k.tok = newTextTokenizer(t, template, merges...)
					k.s = newTestServer(t, logging{k.b}, func(c *Config) {
						outputFormat(t, "hermes", "think")(c)
						c.Tokenizer, c.Limits = k.tok, Limits{VocabSize: 259 + len(merges)}
					})
					k.more = "," + twoTools + extra
					return k
				}
				k := newOne()
				always := k.more
				k.messages = []string{`{"role":"user","content":"the question"}`}
				var seen []int32
				for turn := range 5 {
					k.more = always + rollout
					answer := "the answer"
					free := turn == 2 && name != "thinking" // its thoughts would not be shown again
					if !free {
						k.more += choice
						if answer = `{"n":  1}}` + "\n</tool_call>"; choice == required {
							answer = `fetch", "arguments": ` + answer
						}
					}
					k.b.answers = []string{answer}
					message, ids := k.ask()
					if turn > 0 && !slices.Equal(ids[:min(len(ids), len(seen))], seen) {
						t.Fatalf("%s, turn %d:\n got %q\nafter %q", name, turn, k.tok.Decode(ids, false), k.tok.Decode(seen, false))
					}
					var m struct {
						Prompt     []int32   `json:"prompt_token_ids"`
						Generation []int32   `json:"generation_token_ids"`
						Logprobs   []float64 `json:"generation_log_probs"`
						Calls      []any     `json:"tool_calls"`
					}
					if err := json.Unmarshal(message, &m); err != nil {
						t.Fatal(err)
					}
					if !slices.Equal(m.Prompt, ids) || len(m.Generation) != len(answer)+1 || len(m.Logprobs) != len(m.Generation) || len(m.Calls) > 0 == free {
						t.Fatalf("%s, turn %d: %s", name, turn, message)
					}
					seen = slices.Concat(ids, m.Generation)
					if name == "remembered" || name == "thinking" { // without what a rollout carries
						var fields map[string]any
						_ = json.Unmarshal(message, &fields)
						for _, f := range rolloutFields {
							delete(fields, f)
						}
						message = json.RawMessage(dump(fields))
					}
					next := `{"role":"user","content":"and now?"}`
					if !free {
						next = `{"role":"tool","content":"the result"}`
					}
					k.messages = append(k.messages, string(message), next)
					if name == "carried to another server" {
						messages := k.messages
						k = newOne()
						k.messages = messages
					}
				}
			}
		}
	}
}

// logging gives each token of a speaker's answers a log-probability.
type logging struct{ *speaker }

func (b logging) Submit(ctx context.Context, req *wire.SubmitRequest) (Stream, error) {
	s, err := b.speaker.Submit(ctx, req)
	return loggingStream{s}, err
}

type loggingStream struct{ Stream }

func (s loggingStream) Next(ctx context.Context) (wire.Result, error) {
	r, err := s.Stream.Next(ctx)
	r.Logprobs = slices.Repeat([]float32{-0.5}, len(r.Tokens))
	return r, err
}

// TestForcedThinking: a model that would think is told that it has, as its template does.
func TestForcedThinking(t *testing.T) {
	const none = "<think>\n\n</think>\n\n"
	for _, tt := range []struct{ template, kwargs, ends, says string }{
		{thinkingTemplate, `{}`, "assistant\n" + none + someCall, ""},
		{thinkingTemplate, `{"enable_thinking":true}`, "assistant\n" + none + someCall, ""},
		{thinkingTemplate, `{"enable_thinking":false}`, "assistant\n" + none + someCall, ""},
		{agentTemplate, `{}`, "assistant\n" + someCall, ""},
		{agentTemplate, `{"mode":"<think>\n"}`, "", "cannot be told not to"},
		{strings.ReplaceAll(agentTemplate, "c.function", "c.fun"), `{}`, "", "shows no call"},
		{chatML, `{}`, "", "shows no call"},
		{`{{ raise_exception('no') if tools }}`, `{}`, "", "shows no call"},
	} {
		k := newTalk(t, func(c *Config) { c.Tokenizer = newTextTokenizer(t, tt.template) })
		r := post(t, k.s.Handler(), chatPath, `{"messages":[{"role":"user","content":"a"}],`+twoTools+required+`,"chat_template_kwargs":`+tt.kwargs+`}`)
		if tt.says != "" {
			if e := r.failure(t); r.status != http.StatusBadRequest || !strings.Contains(e.Message, tt.says) && !strings.Contains(e.Message, "refuses") {
				t.Errorf("%s: %d %s", tt.kwargs, r.status, e.Message)
			}
			continue
		}
		r.decode(t)
		if shown := k.tok.Decode(k.b.last(), false); !strings.HasSuffix(shown, tt.ends) {
			t.Errorf("%s: the prompt is %q", tt.kwargs, shown)
		}
	}
	k := newTalk(t, outputFormat(t, "none", "think"))
	if e := post(t, k.s.Handler(), chatPath, `{"messages":[{"role":"user","content":"a"}],`+twoTools+required+`}`).failure(t); *e.Param != "tool_choice" || !strings.Contains(e.Message, "--tool-parser") {
		t.Errorf("without a parser: %s", dump(e))
	}
}

// TestForcedLegs: both legs of a request, and an engine that serves it whole, are given the same ids, and give the same answer; ids that
// come along with the messages get the beginning of the call once.
func TestForcedLegs(t *testing.T) {
	tok := newTextTokenizer(t, agentTemplate, merges...)
	server := func(role string) *Server {
		s, _ := legServer(t, role)
		format, err := text.NewOutputFormat("hermes", "none", "")
		if err != nil {
			t.Fatal(err)
		}
		return newTestServer(t, s.backend, func(c *Config) {
			c.Tokenizer, c.Limits, c.Output = tok, Limits{VocabSize: legVocab}, format
		})
	}
	alone, p, d := server(wire.RoleBoth), server(wire.RolePrefill), server(wire.RoleDecode)
	for _, choice := range []any{"required", map[string]any{"type": "function", "function": map[string]any{"name": "fetch"}}} {
		var tools any
		if err := json.Unmarshal([]byte(strings.TrimPrefix(twoTools, `"tools":`)), &tools); err != nil {
			t.Fatal(err)
		}
		b := body{
			"messages": []any{body{"role": "user", "content": "the question"}}, "tools": tools, "tool_choice": choice, "max_tokens": 12, "temperature": 0, "return_token_ids": true,
		}
		want := post(t, alone.Handler(), chatPath, b.String()).decode(t)
		if shown := tok.Decode(want.PromptTokenIDs, false); !strings.Contains(shown, "assistant\n"+someCall) {
			t.Fatalf("the prompt is %q", shown)
		}
		plain := b.with(body{"tool_choice": "auto"})
		made := post(t, alone.Handler(), chatPath, plain.String()).decode(t).PromptTokenIDs
		for _, given := range []body{{}, {"prompt_token_ids": made}, {"prompt_token_ids": want.PromptTokenIDs}} {
			left := contextLeg(t, p, chatPath, b.with(given), nil)
			got := post(t, d.Handler(), chatPath, left.goOn(chatPath, b).String()).decode(t)
			if !slices.Equal(got.PromptTokenIDs, want.PromptTokenIDs) || !slices.Equal(got.Choices[0].TokenIDs, want.Choices[0].TokenIDs) || got.Choices[0].Message.Content != want.Choices[0].Message.Content {
				t.Errorf("got %s\nwant %s", dump(got), dump(want))
			}
			if !strings.HasPrefix(got.Choices[0].Message.Content, someCall) {
				t.Errorf("a call that is cut off is %q", got.Choices[0].Message.Content)
			}
		}
		left := contextLeg(t, p, chatPath, b, nil)
		again := left.goOn(chatPath, b)
		delete(again, "prompt_token_ids") // it renders them itself
		if got := post(t, d.Handler(), chatPath, again.String()).decode(t); !slices.Equal(got.Choices[0].TokenIDs, want.Choices[0].TokenIDs) {
			t.Errorf("without ids: %s", dump(got))
		}
	}
}

// TestPrompterForcesNothing: what is made for engines leaves it to them.
func TestPrompterForcesNothing(t *testing.T) {
	p, err := NewPrompter(PrompterConfig{Tokenizer: newTextTokenizer(t, agentTemplate)})
	if err != nil {
		t.Fatal(err)
	}
	var ids [][]int32
	for _, choice := range []string{"", required, choosesIt} {
		one, err := p.Prompt(t.Context(), []byte(`{"messages":[{"role":"user","content":"a"}],`+twoTools+choice+`}`), "")
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, one)
	}
	if !slices.Equal(ids[0], ids[1]) || !slices.Equal(ids[0], ids[2]) {
		t.Errorf("got %v", ids)
	}
}
