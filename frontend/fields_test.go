package frontend

import (
	"errors"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"baton/wire"
)

const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
)

// withField is a valid request with one more member.
func withField(path, field string) string {
	base := `{"model":"toy","prompt":"the cat","max_tokens":4`
	if path == chatPath {
		base = `{"model":"toy","messages":[{"role":"user","content":"hi"}],"max_completion_tokens":4`
	}
	return base + "," + field + "}"
}

func TestFieldsAreRefused(t *testing.T) {
	const both = ""
	tests := []struct {
		path, field, param, says string
	}{
		{both, `"temperature":-0.1`, "temperature", "must be 0 or more"},
		{both, `"temperature":"hot"`, "temperature", "must be a number, not a string"},
		{both, `"temperature":1e39`, "temperature", "too large"},
		{both, `"top_p":0`, "top_p", "more than 0 and at most 1"},
		{both, `"top_p":1e-60`, "top_p", "more than 0"},
		{both, `"top_p":1.01`, "top_p", "at most 1"},
		{both, `"top_k":-2`, "top_k", "from -1"},
		{both, `"top_k":1.5`, "top_k", "integer"},
		{both, `"min_p":-0.5`, "min_p", "from 0 to 1"},
		{both, `"presence_penalty":2.5`, "presence_penalty", "from -2 to 2"},
		{both, `"frequency_penalty":-3`, "frequency_penalty", "from -2 to 2"},
		{both, `"repetition_penalty":0`, "repetition_penalty", "more than 0"},
		{both, `"seed":1e30`, "seed", "integer"},
		{both, `"seed":true`, "seed", "not a boolean"},
		{both, `"n":0`, "n", "from 1 to"},
		{both, `"n":1025`, "n", "from 1 to 1024"},
		{both, `"max_tokens":-1`, "max_tokens", "from 0"},
		{both, `"max_tokens":3,"max_completion_tokens":5`, "max_tokens", "contradict"},
		{both, `"max_tokens":99999`, "max_tokens", ""},
		{both, `"min_tokens":-1`, "min_tokens", "from 0"},
		{chatPath, `"min_tokens":5`, "min_tokens", "must not exceed max_completion_tokens (4)"},
		{completionPath, `"min_tokens":5`, "min_tokens", "must not exceed max_tokens (4)"},
		{both, `"stop":7`, "stop", "a string or an array of strings, not a number"},
		{both, `"stop":["a",7]`, "stop[1]", "must be a string"},
		{both, `"stop":[""]`, "stop", "empty"},
		{both, `"stop":["` + strings.Repeat(`a","`, 16) + `b"]`, "stop", "more than 16"},
		{both, `"stop":"` + strings.Repeat("a", maxStopBytes+1) + `"`, "stop", "longer than"},
		{both, `"stop_token_ids":[-1]`, "stop_token_ids", "not a token id"},
		{both, `"stop_token_ids":[9999]`, "stop_token_ids", "from 0 to"},
		{both, `"stop_token_ids":"a"`, "stop_token_ids", "array of token ids"},
		{both, `"ignore_eos":1`, "ignore_eos", "must be a boolean"},
		{both, `"stream":"yes"`, "stream", "must be a boolean"},
		{both, `"stream_options":{"include_usage":true}`, "stream_options", "needs stream"},
		{both, `"stream":true,"stream_options":{"include_usage":3}`, "stream_options.include_usage", "boolean"},
		{both, `"stream":true,"stream_options":[]`, "stream_options", "object"},
		{both, `"prompt_logprobs":-1`, "prompt_logprobs", "from 0 to 20"},
		{both, `"prompt_logprobs":21`, "prompt_logprobs", "from 0 to 20"},
		{both, `"cache_salt":5`, "cache_salt", "string"},
		{both, `"conversation_params":{"conversation_id":"  "}`, "conversation_params.conversation_id", "blank"},
		{both, `"conversation_params":7`, "conversation_params", "object"},
		{both, `"conversation_params":{}`, "conversation_params", "needs a conversation_id"},
		{both, `"conversation_params":{"conversation_id":null}`, "conversation_params.conversation_id", "a string or an integer, not null"},
		{both, `"conversation_params":{"conversation_id":1.5}`, "conversation_params.conversation_id", "must be an integer"},
		{both, `"conversation_params":{"conversation_id":[1]}`, "conversation_params.conversation_id", "not an array"},
		{both, `"priority":1`, "priority", "not supported"},
		{both, `"priority":"high"`, "priority", "not supported"},
		{both, `"max_completion_tokens":99999`, "max_completion_tokens", ""},
		{both, `"logit_bias":{"5":1}`, "logit_bias", "not supported"},
		{both, `"response_format":{"type":"json_object"}`, "response_format", "not supported"},
		{both, `"response_format":"json"`, "response_format", "not supported"},
		{both, `"guided_json":{"type":"object"}`, "guided_json", "not supported"},
		{both, `"bad_words":["x"]`, "bad_words", "not supported"},
		{both, `"functions":[{"name":"f"}]`, "functions", "use tools"},
		{both, `"truncate_prompt_tokens":5`, "truncate_prompt_tokens", "not supported"},
		{both, `"use_beam_search":true`, "use_beam_search", "not supported"},
		{both, `"chat_template":"{{ x }}"`, "chat_template", "not supported"},

		{completionPath, `"prompt":"again"`, "", "duplicate"},
		{completionPath, `"logprobs":true`, "logprobs", "integer, not a boolean"},
		{completionPath, `"logprobs":21`, "logprobs", "from 0 to 20"},
		{completionPath, `"best_of":2`, "best_of", "not supported"},
		{completionPath, `"suffix":"x"`, "suffix", "not supported"},
		{completionPath, `"max_completion_tokens":0,"echo":false`, "max_completion_tokens", "max_completion_tokens must"},
		{completionPath, `"max_tokens":0`, "max_tokens", "max_tokens must"},
		{completionPath, `"echo":"yes"`, "echo", "boolean"},

		{chatPath, `"logprobs":5`, "logprobs", "boolean"},
		{chatPath, `"top_logprobs":5`, "top_logprobs", "needs logprobs"},
		{chatPath, `"logprobs":true,"top_logprobs":21`, "top_logprobs", "from 0 to 20"},
		{chatPath, `"tools":{}`, "tools", "array of objects"},
		{chatPath, `"tools":[1]`, "tools[0]", "object"},
		{chatPath, `"tool_choice":"required"`, "tool_choice", "no tools"},
		{chatPath, `"tool_choice":"required","tools":[]`, "tool_choice", "no tools"},
		{chatPath, `"tool_choice":"always"`, "tool_choice", `must be "none"`},
		{chatPath, `"tool_choice":1`, "tool_choice", "object"},
		{chatPath, `"tool_choice":{"type":"function"}`, "tool_choice.function.name", "missing"},
		{chatPath, `"tool_choice":{"type":"allowed_tools"}`, "tool_choice.type", "only"},
		{chatPath, `"tool_choice":{"function":{"name":1}}`, "tool_choice.function.name", "string"},
		{chatPath, `"tool_choice":{"function":{"name":"f"}}`, "tool_choice", "no tools"},
		{chatPath, `"tool_choice":{"function":{"name":"f"}},"tools":[{"function":{"name":"g"}}]`, "tool_choice.function.name", "no such function"},
		{chatPath, `"tool_choice":"required","tools":[{"function":{"name":"g"}}],"add_generation_prompt":false`, "tool_choice", "begins an answer"},
		{chatPath, `"tool_choice":"required","tools":[{"function":{"name":"g"}}]`, "tool_choice", "tokenizer"},
		{chatPath, `"chat_template_kwargs":[]`, "chat_template_kwargs", "object"},
		{chatPath, `"continue_final_message":true,"add_generation_prompt":true`, "continue_final_message", "exclude"},
		{chatPath, `"max_tokens":0`, "max_tokens", "max_tokens must"},
		{chatPath, `"max_completion_tokens":0`, "max_completion_tokens", "max_completion_tokens must"},
	}
	s := newTestServer(t, newToyBackend(), nil)
	for _, tt := range tests {
		for _, path := range []string{chatPath, completionPath} {
			if tt.path != both && tt.path != path {
				continue
			}
			body := withField(path, tt.field)
			if strings.Contains(tt.field, `"max_`) { // the base's own limit is in the way
				body = strings.Replace(strings.Replace(body, `,"max_tokens":4`, "", 1), `,"max_completion_tokens":4`, "", 1)
			}
			r := post(t, s.Handler(), path, body)
			e := r.failure(t)
			if r.status != http.StatusBadRequest || e.Type != "invalid_request_error" {
				t.Errorf("%s %s: status %d, type %s", path, tt.field, r.status, e.Type)
			}
			if got := deref(e.Param); got != tt.param {
				t.Errorf("%s %s: param %q, want %q (%s)", path, tt.field, got, tt.param, e.Message)
			}
			if !strings.Contains(e.Message, tt.says) {
				t.Errorf("%s %s: message %q does not say %q", path, tt.field, e.Message, tt.says)
			}
		}
	}
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func TestBodiesAreRefused(t *testing.T) {
	tests := []struct {
		name, path, body string
		status           int
		param, code      string
	}{
		{"empty", chatPath, ``, 400, "", ""},
		{"no JSON", chatPath, `hello`, 400, "", ""},
		{"cut short", chatPath, `{"model":"toy","messages":[`, 400, "", ""},
		{"an array", completionPath, `[]`, 400, "", ""},
		{"two values", completionPath, `{"prompt":"a"}{}`, 400, "", ""},
		{"duplicate member", completionPath, `{"prompt":"a","prompt":"b"}`, 400, "", ""},
		{"lone surrogate", completionPath, `{"prompt":"\ud800"}`, 400, "", ""},
		{"not UTF-8", completionPath, "{\"prompt\":\"\xff\"}", 400, "", ""},
		{"too deep", completionPath, `{"prompt":"a","x":` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + `}`, 400, "", ""},
		{"too large", completionPath, `{"prompt":"` + strings.Repeat("a", 1<<16) + `"}`, 413, "", "request_too_large"},
		{"no prompt", completionPath, `{}`, 400, "prompt", ""},
		{"null prompt", completionPath, `{"prompt":null}`, 400, "prompt", ""},
		{"number prompt", completionPath, `{"prompt":3}`, 400, "prompt", ""},
		{"empty list", completionPath, `{"prompt":[]}`, 400, "prompt", ""},
		{"empty ids", completionPath, `{"prompt":[[]]}`, 400, "prompt[0]", ""},
		{"mixed list", completionPath, `{"prompt":["a",[1],3]}`, 400, "prompt[2]", ""},
		{"ids and text", completionPath, `{"prompt":[1,"a"]}`, 400, "prompt", ""},
		{"negative id", completionPath, `{"prompt":[1,-2]}`, 400, "prompt", ""},
		{"id past the vocabulary", completionPath, `{"prompt":[[1],[100000]]}`, 400, "prompt[1]", ""},
		{"enormous id", completionPath, `{"prompt":[99999999999999999999]}`, 400, "prompt", ""},
		{"fractional id", completionPath, `{"prompt":[1.5]}`, 400, "prompt", ""},
		{"too many answers", completionPath, `{"prompt":["a","b","c"],"n":1000}`, 400, "n", ""},
		{"too long", completionPath, `{"prompt":"` + strings.Repeat("z", 5000) + `"}`, 400, "prompt", "context_length_exceeded"},
		{"no room", completionPath, `{"prompt":"` + strings.Repeat("z", 4000) + `","max_tokens":200}`, 400, "max_tokens", "context_length_exceeded"},
		{"no messages", chatPath, `{}`, 400, "messages", ""},
		{"empty messages", chatPath, `{"messages":[]}`, 400, "messages", ""},
		{"messages of another type", chatPath, `{"messages":"hi"}`, 400, "messages", ""},
		{"a message of another type", chatPath, `{"messages":["hi"]}`, 400, "messages[0]", ""},
		{"no role", chatPath, `{"messages":[{"content":"a"}]}`, 400, "messages[0].role", ""},
		{"empty message", chatPath, `{"messages":[{}]}`, 400, "messages[0].role", ""},
		{"unknown role", chatPath, `{"messages":[{"role":"pirate","content":"a"}]}`, 400, "messages", ""},
		{"content of another type", chatPath, `{"messages":[{"role":"user","content":4}]}`, 400, "messages[0].content", ""},
		{"image", chatPath, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`, 400, "messages[0].content[0].type", ""},
		{"part without text", chatPath, `{"messages":[{"role":"user","content":[{"type":"text"}]}]}`, 400, "messages[0].content[0]", ""},
		{"model of another type", chatPath, `{"model":5,"messages":[{"role":"user","content":"a"}]}`, 400, "model", ""},
		{"part of another type", chatPath, `{"messages":[{"role":"user","content":["a"]}]}`, 400, "messages[0].content[0]", ""},
		{"tool calls of another type", chatPath, `{"messages":[{"role":"assistant","tool_calls":["a"]}]}`, 400, "messages[0].tool_calls[0]", ""},
		{"another model", chatPath, `{"model":"gpt","messages":[{"role":"user","content":"a"}]}`, 404, "model", "model_not_found"},
	}
	s := newTestServer(t, newToyBackend(), func(c *Config) { c.Limits.MaxBody = 1 << 16 })
	for _, tt := range tests {
		r := post(t, s.Handler(), tt.path, tt.body)
		e := r.failure(t)
		if r.status != tt.status || deref(e.Param) != tt.param || deref(e.Code) != tt.code {
			t.Errorf("%s: status %d, param %q, code %q; want %d, %q, %q (%s)", tt.name,
				r.status, deref(e.Param), deref(e.Code), tt.status, tt.param, tt.code, e.Message)
		}
		if strings.Contains(e.Message, "jsontext") || strings.Contains(e.Message, "0x") {
			t.Errorf("%s: a Go name in %q", tt.name, e.Message)
		}
	}
}

// TestFieldsArrive checks what the backend is asked for.
func TestFieldsArrive(t *testing.T) {
	base := wire.Sampling{Temperature: 1, MaxTokens: 4, Seed: 7}
	with := func(f func(*wire.Sampling)) wire.Sampling {
		s := base
		f(&s)
		return s
	}
	tests := []struct {
		path, field string
		want        wire.Sampling
	}{
		{"", `"user":"u","metadata":{"x":[1]},"unknown":5`, base},
		{"", `"temperature":null,"stop":null,"logit_bias":{},"response_format":{"type":"text"},"tools2":null`, base},
		{"", `"temperature":0`, with(func(s *wire.Sampling) { s.Temperature = 0 })},
		{"", `"temperature":0.7,"top_p":0.9,"top_k":40,"min_p":0.05`, with(func(s *wire.Sampling) {
			s.Temperature, s.TopP, s.TopK, s.MinP = 0.7, 0.9, 40, 0.05
		})},
		{"", `"top_p":1,"top_k":-1`, with(func(s *wire.Sampling) { s.TopP = 1 })},
		{"", `"presence_penalty":-2,"frequency_penalty":0.5,"repetition_penalty":1.1`, with(func(s *wire.Sampling) {
			s.PresencePenalty, s.FrequencyPenalty, s.RepetitionPenalty = -2, 0.5, 1.1
		})},
		{"", `"min_tokens":3,"ignore_eos":true,"stop_token_ids":[5, 6]`, with(func(s *wire.Sampling) {
			s.MinTokens, s.IgnoreEOS, s.StopTokenIDs = 3, true, wire.Tokens{5, 6}
		})},
		{"", `"min_tokens":2.0`, with(func(s *wire.Sampling) { s.MinTokens = 2 })},
		{"", `"prompt_logprobs":2`, with(func(s *wire.Sampling) { s.PromptLogprobs, s.PromptTopLogprobs = true, 2 })},
		{"", `"prompt_logprobs":0`, with(func(s *wire.Sampling) { s.PromptLogprobs = true })},
		{chatPath, `"logprobs":true`, with(func(s *wire.Sampling) { s.Logprobs = true })},
		{chatPath, `"logprobs":false,"top_logprobs":0`, base},
		{chatPath, `"logprobs":true,"top_logprobs":3`, with(func(s *wire.Sampling) { s.Logprobs, s.TopLogprobs = true, 3 })},
		{completionPath, `"logprobs":0`, with(func(s *wire.Sampling) { s.Logprobs = true })},
		{completionPath, `"logprobs":3`, with(func(s *wire.Sampling) { s.Logprobs, s.TopLogprobs = true, 3 })},
		{completionPath, `"logprobs":3,"echo":true,"prompt_logprobs":1`, with(func(s *wire.Sampling) {
			s.Logprobs, s.TopLogprobs, s.PromptLogprobs, s.PromptTopLogprobs = true, 3, true, 3
		})},
	}
	for _, tt := range tests {
		for _, path := range []string{chatPath, completionPath} {
			if tt.path != "" && tt.path != path {
				continue
			}
			b := newToyBackend()
			s := newTestServer(t, b, nil)
			post(t, s.Handler(), path, withField(path, `"seed":7,`+tt.field)).decode(t)
			if got := b.submitted()[0].Sampling; !reflect.DeepEqual(got, tt.want) {
				t.Errorf("%s %s:\n got %+v\nwant %+v", path, tt.field, got, tt.want)
			}
		}
	}
}

func TestDefaults(t *testing.T) {
	b := newToyBackend()
	s := newTestServer(t, b, nil)
	post(t, s.Handler(), completionPath, `{"prompt":"a"}`).decode(t)
	post(t, s.Handler(), chatPath, `{"messages":[{"role":"user","content":"a"}]}`).decode(t)
	post(t, s.Handler(), completionPath, `{"prompt":"a","seed":-1}`).decode(t)
	reqs := b.submitted()
	for i, want := range []wire.Sampling{{Temperature: 1, MaxTokens: 16}, {Temperature: 1}} {
		got := reqs[i].Sampling
		if got.Seed == 0 {
			t.Error("no seed was drawn")
		}
		got.Seed = 0
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	if got := reqs[2].Sampling.Seed; got != 1<<64-1 {
		t.Errorf("seed -1 became %d", got)
	}
}

// TestSeedSequence: with Config.Seed, a server repeats another's seeds.
func TestSeedSequence(t *testing.T) {
	run := func(seed uint64) (got []uint64) {
		b := newToyBackend()
		s := newTestServer(t, b, func(c *Config) { c.Seed = &seed })
		for range 3 {
			post(t, s.Handler(), completionPath, `{"prompt":"a"}`).decode(t)
		}
		for _, r := range b.submitted() {
			got = append(got, r.Sampling.Seed)
		}
		return got
	}
	if a, b := run(7), run(7); !reflect.DeepEqual(a, b) || a[0] == a[1] {
		t.Errorf("seeds %v, then %v", a, b)
	}
	if a, b := run(7), run(8); reflect.DeepEqual(a, b) {
		t.Errorf("two seeds give the sequence %v", a)
	}
}

func TestMaxModelLenIsTheEngines(t *testing.T) {
	b := newToyBackend()
	s := newTestServer(t, b, func(c *Config) { c.Limits.MaxModelLen = 0 })
	for _, want := range []string{`"max_model_len":null`, `"max_model_len":777`} {
		if r := do(t, s.Handler(), "GET", "/v1/models", ""); !strings.Contains(string(r.body), want) {
			t.Errorf("no %s in %s", want, r.body)
		}
		b.status.Geometry.MaxSeqLen = 777
	}
}

func TestSessionAndSalt(t *testing.T) {
	tests := []struct {
		field   string
		headers []string
		session string
	}{
		{`"cache_salt":"s"`, nil, ""},
		{`"cache_salt":"s"`, []string{"x-session-id", " abc "}, "abc"},
		{`"cache_salt":"s"`, []string{"x-session-id", "  ", "x-correlation-id", "c"}, "c"},
		{`"cache_salt":"s","conversation_params":{"conversation_id":" conv "}`, []string{"x-session-id", "abc"}, "conv"},
		{`"cache_salt":"s","conversation_params":{"conversation_id":42}`, nil, "42"},
	}
	for _, tt := range tests {
		b := newToyBackend()
		s := newTestServer(t, b, nil)
		post(t, s.Handler(), chatPath, withField(chatPath, tt.field), tt.headers...).decode(t)
		if r := b.submitted()[0]; r.Session != tt.session || r.Salt != "s" {
			t.Errorf("%s %v: session %q, salt %q", tt.field, tt.headers, r.Session, r.Salt)
		}
	}
}

func TestPromptShapes(t *testing.T) {
	tok := toyTokenizer{}
	encode := func(s string) wire.Tokens { ids, _ := tok.Encode(s, true); return ids }
	tests := []struct {
		prompt string
		want   []wire.Tokens
	}{
		{`"the cat"`, []wire.Tokens{encode("the cat")}},
		{`"a<|end|>b"`, []wire.Tokens{{toySystem, 'a', toyEnd, 'b'}}},
		{`[1, 2 ,3]`, []wire.Tokens{{1, 2, 3}}},
		{`["a","b"]`, []wire.Tokens{encode("a"), encode("b")}},
		{`[[1,2],[3]]`, []wire.Tokens{{1, 2}, {3}}},
		{`["a",[3]]`, []wire.Tokens{encode("a"), {3}}},
	}
	for _, tt := range tests {
		b := newToyBackend()
		s := newTestServer(t, b, nil)
		a := post(t, s.Handler(), completionPath, `{"temperature":0,"n":2,"return_token_ids":true,"prompt":`+tt.prompt+`}`).decode(t)
		if len(a.Choices) != 2*len(tt.want) {
			t.Fatalf("%s: %d choices", tt.prompt, len(a.Choices))
		}
		total := 0
		for i, c := range a.Choices {
			if want := tt.want[i/2]; c.Index != i || !reflect.DeepEqual(wire.Tokens(c.PromptTokenIDs), want) {
				t.Errorf("%s: choice %d has index %d and prompt %v, want %v", tt.prompt, i, c.Index, c.PromptTokenIDs, want)
			}
			if i%2 == 0 {
				total += len(tt.want[i/2])
			}
		}
		if a.Usage.PromptTokens != total {
			t.Errorf("%s: %d prompt tokens, want %d", tt.prompt, a.Usage.PromptTokens, total)
		}
		if single := tt.prompt[0] == '"' || tt.prompt[1] == '1'; single != (a.PromptTokenIDs != nil) {
			t.Errorf("%s: top-level prompt_token_ids %v", tt.prompt, a.PromptTokenIDs)
		}
	}
}

// TestModelsByName: only the served model's name answers.
func TestModelsByName(t *testing.T) {
	s := newTestServer(t, newToyBackend(), nil)
	for path, status := range map[string]int{"/v1/models/toy": 200, "/v1/models/": 404, "/v1/models/other": 404, "/v1/models/toy/x": 404} {
		r := do(t, s.Handler(), "GET", path, "")
		if r.status != status || len(r.body) == 0 {
			t.Errorf("%s: %d %q, want %d", path, r.status, r.body, status)
		} else if status != 200 && deref(r.failure(t).Code) != "model_not_found" {
			t.Errorf("%s: %s", path, r.body)
		}
	}
}

// TestContextLengthIsNamed: NeMo Gym ends a rollout, and does not fail it, when a 400 speaks of the context length (57).
func TestContextLengthIsNamed(t *testing.T) {
	s := newTestServer(t, newToyBackend(), nil)
	long := strings.Repeat("z", 5000)
	for _, body := range []string{
		`{"messages":[{"role":"user","content":"` + long + `"}]}`,
		`{"messages":[{"role":"user","content":"` + long[:4000] + `"}],"max_tokens":200}`,
		`{"messages":[{"role":"user","content":"` + long[:4000] + `"}],"max_completion_tokens":200}`,
		`{"messages":[{"role":"user","content":"` + long[:4000] + `"}],"min_tokens":200}`,
	} {
		if r := post(t, s.Handler(), chatPath, body); r.status != 400 || !strings.Contains(string(r.body), "context length") {
			t.Errorf("%d %s", r.status, r.body)
		}
	}
}

// TestMinTokensMustFit: what no context holds is refused by name, not cut short.
func TestMinTokensMustFit(t *testing.T) {
	s := newTestServer(t, newToyBackend(), func(c *Config) { c.Limits.MaxModelLen = 100 })
	for _, path := range []string{chatPath, completionPath} {
		body := strings.Replace(strings.Replace(withField(path, `"min_tokens":100`), `,"max_tokens":4`, "", 1), `,"max_completion_tokens":4`, "", 1)
		e := post(t, s.Handler(), path, body).failure(t)
		if !strings.Contains(e.Message, "100") || deref(e.Param) != "min_tokens" {
			t.Errorf("%s: %s of %q", path, e.Message, deref(e.Param))
		}
	}
}

func TestMessagesAreChecked(t *testing.T) {
	for _, ok := range []string{
		`[{"name":"z","role":"user","content":"\u00e9"}]`,
		`[{"role":"user","content":[{"type":"text","text":"a"},{"text":"b","type":"text"}]},{"role":"user","content":[]}]`,
		`[{"role":"assistant","content":null,"tool_calls":null},{"role":"assistant"}]`,
		`[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{\"b\":1}"}}]}]`,
	} {
		c := newChat(&Limits{}, nil)
		if err := c.setMessages(value{path: "messages", raw: []byte(ok)}); err != nil || string(c.Messages) != ok {
			t.Errorf("%s became %s (%v)", ok, c.Messages, err)
		}
	}
	for wrong, param := range map[string]string{
		`[{"role":"user"}]`:                                "messages[0].content",
		`[{"content":null,"role":"user"}]`:                 "messages[0].content",
		`[{"role":"assistant"},{"role":"tool"}]`:           "messages[1].content",
		`[{"role":"user","content":"a","name":5}]`:         "messages[0].name",
		`[{"role":"tool","content":"a","tool_call_id":5}]`: "messages[0].tool_call_id",
		`[{"role":"assistant","reasoning_content":[]}]`:    "messages[0].reasoning_content",
		`[{"role":"user","content":{"text":"a"}}]`:         "messages[0].content",
	} {
		c := newChat(&Limits{}, nil)
		err := c.setMessages(value{path: "messages", raw: []byte(wrong)})
		var e *apiError
		if !errors.As(err, &e) || e.param != param {
			t.Errorf("%s: %v (%+v), want %s to be at fault", wrong, err, e, param)
		}
	}
}

// TestTemplateInputs checks that tools, documents and extra arguments reach the template as they were
// written.
func TestTemplateInputs(t *testing.T) {
	tests := []struct{ field, prefix, suffix string }{
		{`"tools":[{"z":1,"a":{"y":2,"b":3}}]`, `[{"z":1,"a":{"y":2,"b":3}}]`, "<|end|><|assistant|>"},
		{`"tools":[{"z":1}],"tool_choice":"auto"`, `[{"z":1}]`, "<|end|><|assistant|>"},
		{`"tool_choice":"none","tools":[{"z":1}]`, "", "<|end|><|assistant|>"},
		{`"tools":[]`, "", "<|end|><|assistant|>"},
		{`"documents":[{"z":1,"a":2}]`, `[{"z":1,"a":2}]`, "<|end|><|assistant|>"},
		{`"chat_template_kwargs":{"enable_thinking":false}`, `{"enable_thinking":false}`, "<|end|><|assistant|>"},
		{`"add_generation_prompt":false`, "", "<|end|>"},
		{`"continue_final_message":true`, "", ""},
		{`"continue_final_message":true,"add_generation_prompt":false`, "", ""},
	}
	for _, tt := range tests {
		b := newToyBackend()
		s := newTestServer(t, b, nil)
		post(t, s.Handler(), chatPath, withField(chatPath, tt.field)).decode(t)
		want := tt.prefix + "<|user|>hi" + tt.suffix
		if got := (toyTokenizer{}).Decode(b.submitted()[0].Prompt, false); got != want {
			t.Errorf("%s:\n got %s\nwant %s", tt.field, got, want)
		}
	}
	b := newToyBackend()
	post(t, newTestServer(t, b, nil).Handler(), chatPath, `{"messages":[{"role":"user","content":"a<|end|>b"}]}`).decode(t)
	for _, id := range b.submitted()[0].Prompt[1:6] {
		if id >= 256 && id < toyWords {
			t.Error("a look-alike in a message became a control token")
		}
	}
}
