package frontend

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"baton/text"
	"baton/wire"
)

// script answers every request with the same tokens, cut into results of the sizes given (the last repeats).
type script struct {
	tokens []int32
	sizes  []int
	finish string

	mu       sync.Mutex
	requests []*wire.SubmitRequest
}

func (*script) Status(context.Context) (*wire.StatusReply, error) {
	return &wire.StatusReply{Ready: true}, nil
}

func (s *script) Submit(_ context.Context, req *wire.SubmitRequest) (Stream, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, req)
	return &scriptStream{script: s}, nil
}

type scriptStream struct {
	*script
	sent, results int
}

func (s *scriptStream) Next(context.Context) (wire.Result, error) {
	if s.sent == len(s.tokens) {
		return wire.Result{}, io.EOF
	}
	n := s.sizes[min(s.results, len(s.sizes)-1)]
	n = min(max(n, 1), len(s.tokens)-s.sent)
	res := wire.Result{Start: s.sent, Tokens: slices.Clone(s.tokens[s.sent : s.sent+n]), StopToken: -1}
	s.sent += n
	s.results++
	if s.sent == len(s.tokens) {
		if res.Finish = s.finish; s.finish == wire.FinishStop {
			res.StopToken = s.tokens[s.sent-1]
		}
	}
	return res, nil
}

func (*scriptStream) Close() {}

// says is a script in the toy language that ends by itself.
func says(answer string) *script {
	return &script{tokens: append(toyTokenizer{}.encode(answer, false), toyEnd), sizes: []int{3}, finish: wire.FinishStop}
}

func outputFormat(t testing.TB, tools, reasoning string) func(*Config) {
	t.Helper()
	f, err := text.NewOutputFormat(tools, reasoning, "")
	if err != nil {
		t.Fatal(err)
	}
	return func(c *Config) { c.Output = f }
}

const withTools = `"tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}]`

var callIDs = regexp.MustCompile(`"id":"call_[0-9a-f]{24}"`)

// withoutIDs replaces the random ids of calls, which must be there.
func withoutIDs(t testing.TB, a *answerJSON) *answerJSON {
	t.Helper()
	for i := range a.Choices {
		for k := range a.Choices[i].Message.ToolCalls {
			call := &a.Choices[i].Message.ToolCalls[k]
			if call.ID == "" || call.Type != "function" || call.Index != nil {
				t.Errorf("a call like %s", dump(call))
			}
			call.ID = ""
		}
	}
	return a
}

func TestToolCalls(t *testing.T) {
	const call = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"é😀\"}}\n</tool_call>"
	const parsed = `{"Index":null,"ID":"","Type":"function","Function":{"Name":"get_weather","Arguments":"{\"city\": \"é😀\"}"}}`
	for _, tt := range []struct {
		name, answer, fields, message, finish string
		backend                               func(*script)
	}{
		{"call", call, withTools, `{"Role":"assistant","Content":"","reasoning_content":"","tool_calls":[` + parsed + `]}`, "tool_calls", nil},
		{
			"everything", "<think>\nI look the\n</think>\n\nthe cat\n" + call + "\n" + call, withTools,
			`{"Role":"assistant","Content":"the cat","reasoning_content":"I look the","tool_calls":[` + parsed + `,` + parsed + `]}`, "tool_calls", nil,
		},
		{"tool_choice auto", call, withTools + `,"tool_choice":"auto"`, `{"Role":"assistant","Content":"","reasoning_content":"","tool_calls":[` + parsed + `]}`, "tool_calls", nil},
		{"tool_choice none", "a" + call, withTools + `,"tool_choice":"none"`, `{"Role":"assistant","Content":` + dump("a"+call) + `,"reasoning_content":"","tool_calls":null}`, "stop", nil},
		{"no tools", call, `"n":1`, `{"Role":"assistant","Content":` + dump(call) + `,"reasoning_content":"","tool_calls":null}`, "stop", nil},
		{"malformed", "<tool_call>{city</tool_call>", withTools, `{"Role":"assistant","Content":"\u003ctool_call\u003e{city\u003c/tool_call\u003e","reasoning_content":"","tool_calls":null}`, "stop", nil},
		{
			"cut off", call[:40], withTools, `{"Role":"assistant","Content":` + dump(call[:40]) + `,"reasoning_content":"","tool_calls":null}`, "length",
			func(s *script) { s.tokens, s.finish = s.tokens[:len(s.tokens)-1], wire.FinishLength },
		},
		{
			"cut off after a call", call + " the", withTools, `{"Role":"assistant","Content":" the","reasoning_content":"","tool_calls":[` + parsed + `]}`, "length",
			func(s *script) { s.tokens, s.finish = s.tokens[:len(s.tokens)-1], wire.FinishLength },
		},
		{"stop string", "the STOP" + call, withTools + `,"stop":"STOP"`, `{"Role":"assistant","Content":"the ","reasoning_content":"","tool_calls":null}`, "stop", nil},
		{"stop string after a call", call + "STOP the", withTools + `,"stop":"STOP"`, `{"Role":"assistant","Content":"","reasoning_content":"","tool_calls":[` + parsed + `]}`, "tool_calls", nil},
		{"only reasoning", "<think>\nso", withTools, `{"Role":"assistant","Content":"","reasoning_content":"so","tool_calls":null}`, "stop", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := says(tt.answer)
			if tt.backend != nil {
				tt.backend(b)
			}
			s := newTestServer(t, b, outputFormat(t, "hermes", "think"))
			request := `{"messages":[{"role":"user","content":"hi"}],` + tt.fields
			raw := post(t, s.Handler(), chatPath, request+`}`)
			whole := withoutIDs(t, raw.decode(t))
			if c := whole.Choices[0]; dump(c.Message) != tt.message || c.finish() != tt.finish {
				t.Errorf("got %s (%s)\nwant %s (%s)", dump(c.Message), c.finish(), tt.message, tt.finish)
			}
			if n := len(whole.Choices[0].Message.ToolCalls); (n > 0 && whole.Choices[0].Message.Content == "") != strings.Contains(string(raw.body), `"content":null`) {
				t.Errorf("content beside %d calls: %s", n, raw.body)
			}
			if whole.Usage.CompletionTokens == 0 || whole.Usage.CompletionTokens > len(b.tokens) {
				t.Errorf("%d tokens are counted", whole.Usage.CompletionTokens)
			}
			stream := withoutIDs(t, assemble(t, post(t, s.Handler(), chatPath, request+`,"stream":true,"stream_options":{"include_usage":true}}`)))
			stream.ID, stream.Created = whole.ID, whole.Created
			if !reflect.DeepEqual(stream, whole) {
				t.Errorf("stream %s\nwhole  %s", dump(stream), dump(whole))
			}
		})
	}
}

// TestOutputStreamEqualsWhole: as TestStreamEqualsWhole, for answers of the pieces that parsers look for.
func TestOutputStreamEqualsWhole(t *testing.T) {
	pieces := []string{
		"<think>", "</think>", "\n", " the", "é", "\xf0\x9f", "STOP", "<tool_call>", "</tool_call>", `{"name": "f", "arguments": {"s": "é😀 the"}}`, `{"name": "f"`, "<",
	}
	rapid.Check(t, func(rt *rapid.T) {
		answer := strings.Join(rapid.SliceOfN(rapid.SampledFrom(pieces), 0, 12).Draw(rt, "answer"), "")
		request := `{"messages":[{"role":"user","content":"hi"}],` + withTools + rapid.SampledFrom([]string{"", `,"stop":["STOP"]`, `,"n":2`, `,"return_token_ids":true`}).Draw(rt, "more")
		ask := func(more string, sizes ...int) reply {
			b := says(answer)
			b.sizes = sizes
			return post(t, newTestServer(t, b, outputFormat(t, "hermes", "think")).Handler(), chatPath, request+more+`}`)
		}
		whole := withoutIDs(t, ask("", len(answer)).decode(t))
		stream := withoutIDs(t, assemble(t, ask(`,"stream":true,"stream_options":{"include_usage":true}`, rapid.SliceOfN(rapid.IntRange(1, 9), 1, 8).Draw(rt, "sizes")...)))
		stream.ID, stream.Created = whole.ID, whole.Created
		if !reflect.DeepEqual(stream, whole) {
			rt.Fatalf("%q\nstream %s\nwhole  %s", answer, dump(stream), dump(whole))
		}
	})
}

// TestOutputShapes: the members of deltas and messages, byte for byte but for ids.
func TestOutputShapes(t *testing.T) {
	b := says("<think>a</think>the <tool_call>{\"name\":\"f\"}</tool_call>")
	b.sizes = []int{1}
	s := newTestServer(t, b, outputFormat(t, "hermes", "think"))
	request := `{"messages":[{"role":"user","content":"hi"}],` + withTools
	list, _ := events(t, post(t, s.Handler(), chatPath, request+`,"stream":true}`).body)
	var deltas []string
	for _, e := range list {
		var chunk struct {
			Choices []struct{ Delta json.RawMessage }
		}
		if err := json.Unmarshal(e, &chunk); err != nil {
			t.Fatal(err)
		}
		deltas = append(deltas, callIDs.ReplaceAllString(string(chunk.Choices[0].Delta), `"id":"ID"`))
	}
	want := []string{
		`{"role":"assistant","content":""}`, `{"reasoning_content":"a"}`, `{"content":"the"}`,
		`{"tool_calls":[{"index":0,"id":"ID","type":"function","function":{"name":"f","arguments":"{}"}}]}`, `{}`,
	}
	if !slices.Equal(deltas, want) {
		t.Errorf("deltas %q\nwant   %q", deltas, want)
	}
	body := callIDs.ReplaceAllString(string(post(t, s.Handler(), chatPath, request+`}`).body), `"id":"ID"`)
	message := `"message":{"role":"assistant","reasoning_content":"a","content":"the","tool_calls":[{"id":"ID","type":"function","function":{"name":"f","arguments":"{}"}}],"refusal":null}`
	if !strings.Contains(body, message) || !strings.Contains(body, `"finish_reason":"tool_calls","stop_reason":null`) {
		t.Errorf("got  %s\nwant %s", body, message)
	}
}

// TestReasoningThatThePromptOpened: by the template, or by the message that is to be continued.
func TestReasoningThatThePromptOpened(t *testing.T) {
	const template = `{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}{% endif %}`
	tok := newTextTokenizer(t, template)
	for _, tt := range []struct{ fields, content, reasoning string }{
		{`"messages":[{"role":"user","content":"a"}]`, "b", "so"},
		{`"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"enable_thinking":false}`, "so</think>\n\nb", ""},
		{`"messages":[{"role":"user","content":"a <think>"},{"role":"assistant","content":"<think>\nI"}],"continue_final_message":true`, "b", "so"},
		{`"messages":[{"role":"user","content":"a <think>"},{"role":"assistant","content":"<think>\nI</think>"}],"continue_final_message":true`, "so</think>\n\nb", ""},
	} {
		b := says("")
		for _, c := range []byte("so</think>\n\nb") {
			b.tokens = append(b.tokens, int32(c))
		}
		b.tokens = append(b.tokens[1:], 257)
		s := newTestServer(t, b, func(c *Config) {
			outputFormat(t, "none", "think")(c)
			c.Tokenizer, c.Limits.VocabSize = tok, 259
		})
		m := post(t, s.Handler(), chatPath, `{`+tt.fields+`}`).decode(t).Choices[0].Message
		if m.Content != tt.content || m.Reasoning != tt.reasoning {
			t.Errorf("%s: %s", tt.fields, dump(m))
		}
	}
}

// TestTagsThatAreSpecial: a tag that is a special token reaches the parser, but nobody else.
func TestTagsThatAreSpecial(t *testing.T) {
	tok := newTextTokenizer(t, chatML)
	b := &script{sizes: []int{2}, finish: wire.FinishStop, tokens: []int32{'a', 256, 258}}
	for _, c := range []byte(`f{"x": 1}`) {
		b.tokens = append(b.tokens, int32(c))
	}
	b.tokens = append(b.tokens, 257)
	s := newTestServer(t, b, func(c *Config) {
		outputFormat(t, "mistral", "none")(c)
		c.Tokenizer, c.Limits.VocabSize = tok, 259
	})
	for fields, want := range map[string]string{
		withTools: `{"Role":"assistant","Content":"a","reasoning_content":"","tool_calls":[{"Index":null,"ID":"","Type":"function","Function":{"Name":"f","Arguments":"{\"x\": 1}"}}]}`,
		`"n":1`:   `{"Role":"assistant","Content":"af{\"x\": 1}","reasoning_content":"","tool_calls":null}`,
	} {
		a := withoutIDs(t, post(t, s.Handler(), chatPath, `{"messages":[{"role":"user","content":"a"}],`+fields+`}`).decode(t))
		if got := dump(a.Choices[0].Message); got != want {
			t.Errorf("%s:\n got %s\nwant %s", fields, got, want)
		}
	}
}

// TestToolChoiceNone: the model does not see the tools.
func TestToolChoiceNone(t *testing.T) {
	b := says("a")
	s := newTestServer(t, b, outputFormat(t, "hermes", "none"))
	for _, choice := range []string{"none", "auto"} {
		post(t, s.Handler(), chatPath, fmt.Sprintf(`{"messages":[{"role":"user","content":"a"}],%s,"tool_choice":%q}`, withTools, choice)).decode(t)
	}
	for i, want := range []bool{false, true} {
		if prompt := (toyTokenizer{}).Decode(b.requests[i].Prompt, false); strings.Contains(prompt, "get_weather") != want {
			t.Errorf("request %d has the prompt %q", i, prompt)
		}
	}
}

// TestSecondTurnExtendsTheFirst: a client that returns the message as it got it gets a prompt that begins with the first
// prompt and the ids that were sampled, also where the arguments are spelled in another way than a JSON writer would.
func TestSecondTurnExtendsTheFirst(t *testing.T) {
	const template = `{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls %}{{ '\n' if m.content or not loop.first }}{{ '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}`
	tok := newTextTokenizer(t, template)
	const call = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\":\"Z\\u00fcrich\",  \"x\": 1.50}}\n</tool_call>"
	for _, answer := range []string{call, "Hm.\n" + call + "\n" + call, "<think>\nWhere?\n</think>\n\n" + call, "No call: <tool_call>\n{"} {
		b := &script{sizes: []int{7}, finish: wire.FinishStop}
		for _, c := range []byte(answer) {
			b.tokens = append(b.tokens, int32(c))
		}
		b.tokens = append(b.tokens, 257)
		s := newTestServer(t, b, func(c *Config) {
			outputFormat(t, "hermes", "think")(c)
			c.Tokenizer, c.Limits.VocabSize = tok, 259
		})
		ask := func(messages string) json.RawMessage {
			t.Helper()
			var a struct {
				Choices []struct{ Message json.RawMessage }
			}
			if err := json.Unmarshal(post(t, s.Handler(), chatPath, `{`+withTools+`,"messages":[`+messages+`]}`).body, &a); err != nil || len(a.Choices) != 1 {
				t.Fatal(err)
			}
			return a.Choices[0].Message
		}
		message := ask(`{"role":"user","content":"a"}`)
		ask(`{"role":"user","content":"a"},` + string(message) + `,{"role":"tool","content":"b"}`)
		sampled := slices.Concat(b.requests[0].Prompt, b.tokens)
		if got := b.requests[1].Prompt; len(got) <= len(sampled) || !slices.Equal(got[:len(sampled)], sampled) {
			t.Errorf("sampled %q\nreturned %s\nrendered %q", tok.Decode(sampled, false), message, tok.Decode(got, false))
		}
	}
}
