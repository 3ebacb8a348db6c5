package frontend

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newTestServer serves the toy language. change may adapt the configuration.
func newTestServer(t testing.TB, b Backend, change func(*Config)) *Server {
	t.Helper()
	cfg := Config{
		Backend: b, Tokenizer: toyTokenizer{}, Model: "toy",
		Limits: Limits{VocabSize: toyVocab, MaxModelLen: 4096},
	}
	if change != nil {
		change(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// reply is an answer as a client got it.
type reply struct {
	status int
	header http.Header
	body   []byte
}

func post(t testing.TB, h http.Handler, path, body string, headers ...string) reply {
	t.Helper()
	return do(t, h, "POST", path, body, headers...)
}

func do(t testing.TB, h http.Handler, method, path, body string, headers ...string) reply {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return reply{w.Code, w.Header(), w.Body.Bytes()}
}

// answerJSON is every member of either endpoint's answers and chunks that tests look at.
type answerJSON struct {
	ID, Object, Model string
	Created           int64
	Choices           []choiceJSON
	Usage             *usageJSON
	PromptTokenIDs    []int32                    `json:"prompt_token_ids"`
	PromptLogprobs    []map[string]promptLogprob `json:"prompt_logprobs"`
	Error             *errorJSON
}

type choiceJSON struct {
	Index          int
	Text           string
	Message, Delta messageJSON
	Logprobs       *struct {
		Content       []chatTokenJSON
		Tokens        []string
		TokenLogprobs []*float32           `json:"token_logprobs"`
		TopLogprobs   []map[string]float32 `json:"top_logprobs"`
		TextOffset    []int                `json:"text_offset"`
	}
	FinishReason   *string                    `json:"finish_reason"`
	StopReason     any                        `json:"stop_reason"`
	TokenIDs       []int32                    `json:"token_ids"`
	PromptTokenIDs []int32                    `json:"prompt_token_ids"`
	PromptLogprobs []map[string]promptLogprob `json:"prompt_logprobs"`
	Handoff        map[string]any
}

type messageJSON struct {
	Role, Content string
	Reasoning     string         `json:"reasoning_content"`
	ToolCalls     []toolCallJSON `json:"tool_calls"`
}

type toolCallJSON struct {
	Index    *int
	ID, Type string
	Function struct{ Name, Arguments string }
}

type chatTokenJSON struct {
	Token       string
	Logprob     float32
	Bytes       []int
	TopLogprobs []chatTokenJSON `json:"top_logprobs"`
}

type promptLogprob struct {
	Logprob float32
	Rank    *int
	Decoded string `json:"decoded_token"`
}

type usageJSON struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
	Details          struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

type errorJSON struct {
	Message, Type string
	Param, Code   *string
}

func (c *choiceJSON) content() string { return c.Text + c.Message.Content + c.Delta.Content }

func (c *choiceJSON) finish() string {
	if c.FinishReason == nil {
		return ""
	}
	return *c.FinishReason
}

// decode reads a 200 answer.
func (r reply) decode(t testing.TB) *answerJSON {
	t.Helper()
	if r.status != http.StatusOK {
		t.Fatalf("status %d: %s", r.status, r.body)
	}
	return decodeAnswer(t, r.body)
}

func decodeAnswer(t testing.TB, body []byte) *answerJSON {
	t.Helper()
	a := new(answerJSON)
	if err := json.Unmarshal(body, a); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	return a
}

// failure reads an error answer.
func (r reply) failure(t testing.TB) *errorJSON {
	t.Helper()
	a := decodeAnswer(t, r.body)
	if a.Error == nil || a.Error.Message == "" || a.Error.Type == "" {
		t.Fatalf("status %d, but no error: %s", r.status, r.body)
	}
	return a.Error
}

// events splits a stream; done says that it ended with [DONE].
func events(t testing.TB, body []byte) (list [][]byte, done bool) {
	t.Helper()
	for part := range bytes.SplitSeq(body, []byte("\n\n")) {
		if len(part) == 0 {
			continue
		}
		data, ok := bytes.CutPrefix(part, []byte("data: "))
		switch {
		case !ok || done:
			t.Fatalf("unexpected event %q", part)
		case string(data) == "[DONE]":
			done = true
		default:
			list = append(list, data)
		}
	}
	return list, done
}

// assemble puts a stream together to the answer that the same request gives without streaming.
func assemble(t testing.TB, r reply) *answerJSON {
	t.Helper()
	if r.status != http.StatusOK {
		t.Fatalf("status %d: %s", r.status, r.body)
	}
	if ct := r.header.Get("Content-Type"); ct != "text/event-stream" {
		t.Fatalf("content type %q", ct)
	}
	list, done := events(t, r.body)
	if !done {
		t.Fatalf("no [DONE]: %s", r.body)
	}
	var whole *answerJSON
	for _, data := range list {
		chunk := decodeAnswer(t, data)
		if chunk.Error != nil {
			t.Fatalf("error in stream: %s", data)
		}
		if whole == nil {
			whole = &answerJSON{ID: chunk.ID, Object: strings.TrimSuffix(chunk.Object, ".chunk"), Model: chunk.Model, Created: chunk.Created}
		}
		whole.add(t, chunk)
	}
	return whole
}

func (a *answerJSON) add(t testing.TB, chunk *answerJSON) {
	t.Helper()
	if chunk.ID != a.ID || chunk.Created != a.Created {
		t.Fatalf("chunk of %s in a stream of %s", chunk.ID, a.ID)
	}
	if chunk.Usage != nil {
		a.Usage = chunk.Usage
	}
	if chunk.PromptTokenIDs != nil {
		a.PromptTokenIDs = chunk.PromptTokenIDs
	}
	if chunk.PromptLogprobs != nil {
		a.PromptLogprobs = chunk.PromptLogprobs
	}
	for i := range chunk.Choices {
		c := &chunk.Choices[i]
		for len(a.Choices) <= c.Index {
			a.Choices = append(a.Choices, choiceJSON{Index: len(a.Choices)})
		}
		a.Choices[c.Index].add(t, c)
	}
}

func (c *choiceJSON) add(t testing.TB, d *choiceJSON) {
	t.Helper()
	if c.FinishReason != nil {
		t.Fatalf("choice %d goes on after its end", c.Index)
	}
	if (d.Delta.Role != "") != (d.Delta.Role == "assistant" && c.Message.Role == "" && c.Message.Content == "") {
		t.Fatalf("choice %d: role %q out of place", c.Index, d.Delta.Role)
	}
	c.Text += d.Text
	c.Message.Role += d.Delta.Role
	c.Message.Content += d.Delta.Content
	c.Message.Reasoning += d.Delta.Reasoning
	for _, call := range d.Delta.ToolCalls {
		if call.Index == nil || *call.Index != len(c.Message.ToolCalls) {
			t.Fatalf("choice %d: call %d has the index %v", c.Index, len(c.Message.ToolCalls), call.Index)
		}
		call.Index = nil // only deltas have it
		c.Message.ToolCalls = append(c.Message.ToolCalls, call)
	}
	c.FinishReason, c.StopReason = d.FinishReason, d.StopReason
	c.TokenIDs = append(c.TokenIDs, d.TokenIDs...)
	if d.PromptTokenIDs != nil {
		c.PromptTokenIDs = d.PromptTokenIDs
	}
	if d.PromptLogprobs != nil {
		c.PromptLogprobs = d.PromptLogprobs
	}
	if d.Handoff != nil {
		c.Handoff = d.Handoff
	}
	switch {
	case d.Logprobs == nil:
	case c.Logprobs == nil:
		c.Logprobs = d.Logprobs
	default:
		l, m := c.Logprobs, d.Logprobs
		l.Content = append(l.Content, m.Content...)
		l.Tokens = append(l.Tokens, m.Tokens...)
		l.TokenLogprobs = append(l.TokenLogprobs, m.TokenLogprobs...)
		l.TopLogprobs = append(l.TopLogprobs, m.TopLogprobs...)
		l.TextOffset = append(l.TextOffset, m.TextOffset...)
	}
}

// listen serves s over TCP until the test ends.
func listen(t testing.TB, s *Server) *httptest.Server {
	t.Helper()
	ts := httptest.NewServer(s.Handler())
	t.Cleanup(func() {
		ts.CloseClientConnections()
		ts.Close()
	})
	return ts
}

// send posts over TCP and returns the response, whose body the caller closes.
func send(ctx context.Context, t testing.TB, ts *httptest.Server, path, body string) (*http.Response, error) {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, "POST", ts.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	return ts.Client().Do(r)
}

func readAll(t testing.TB, resp *http.Response) []byte {
	t.Helper()
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
