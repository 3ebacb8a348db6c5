//go:build unix

package rig

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// Completion is a body for /v1/completions.
type Completion struct {
	Model       string  `json:"model"`
	Prompt      []int32 `json:"prompt"`
	MaxTokens   int     `json:"max_tokens"`
	Temperature float64 `json:"temperature"`
	Seed        uint64  `json:"seed"`
	Logprobs    *int    `json:"logprobs,omitempty"`
	IgnoreEOS   bool    `json:"ignore_eos,omitempty"`
}

// Answer is all that a stream said. Numbers stay as they were printed, so that answers can be compared bit
// for bit.
type Answer struct {
	Text     string
	IDs      []int32
	Logprobs []json.Number
	Finish   string
}

// HTTPError is a frontend's refusal, or the error event that ended its stream.
type HTTPError struct {
	Status     int // of the answer: 200 when the error came in the stream
	Message    string
	Type, Code string
	RetryAfter string
}

func (e *HTTPError) Error() string {
	return fmt.Sprintf("status %d, type %s, code %s: %s", e.Status, e.Type, e.Code, e.Message)
}

// Retryable tells whether the error says that the same request may succeed later.
func (e *HTTPError) Retryable() bool {
	return e.Type == "service_unavailable_error" || e.RetryAfter != ""
}

// Stream asks url for a streamed completion and reads it to its end, as the function of that name does.
func (c Completion) Stream(ctx context.Context, client *http.Client, url string, news func()) (Answer, error) {
	body := struct {
		Completion
		Stream    bool `json:"stream"`
		ReturnIDs bool `json:"return_token_ids"`
	}{c, true, true}
	return Stream(ctx, client, url, body, func(*Answer) { news() })
}

// Stream posts body to url's completions and reads the answer to its end; body asks for a stream, and for token
// ids. news is called after every event that brought tokens, with all that came so far. The errors are an
// *HTTPError when the frontend said what failed, anything else when the stream broke.
func Stream(ctx context.Context, client *http.Client, url string, body any, news func(*Answer)) (Answer, error) {
	raw, err := json.Marshal(body)
	var a Answer
	if err != nil {
		return a, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", bytes.NewReader(raw))
	if err != nil {
		return a, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		line := lines.Text()
		if resp.StatusCode != http.StatusOK {
			return a, refusal(resp, line)
		}
		data, ok := strings.CutPrefix(line, "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return a, nil
		}
		brought, err := a.event(data)
		if err != nil {
			return a, err
		}
		if brought {
			news(&a)
		}
	}
	if err := lines.Err(); err != nil {
		return a, err
	}
	return a, fmt.Errorf("rig: the stream ended without [DONE] (status %d)", resp.StatusCode)
}

type errorBody struct {
	Message string `json:"message"`
	Type    string `json:"type"`
	Code    string `json:"code"`
}

func refusal(resp *http.Response, body string) error {
	var e struct {
		Error errorBody `json:"error"`
	}
	if err := json.Unmarshal([]byte(body), &e); err != nil {
		return fmt.Errorf("rig: status %d: %s", resp.StatusCode, body)
	}
	return &HTTPError{
		Status: resp.StatusCode, Message: e.Error.Message, Type: e.Error.Type, Code: e.Error.Code,
		RetryAfter: resp.Header.Get("Retry-After"),
	}
}

// event adds an event's news to the answer, and tells whether it brought tokens.
func (a *Answer) event(data string) (bool, error) {
	var chunk struct {
		Choices []struct {
			Text         string  `json:"text"`
			TokenIDs     []int32 `json:"token_ids"`
			FinishReason string  `json:"finish_reason"`
			Logprobs     *struct {
				TokenLogprobs []json.Number `json:"token_logprobs"`
			} `json:"logprobs"`
		} `json:"choices"`
		Error *errorBody `json:"error"`
	}
	if err := json.Unmarshal([]byte(data), &chunk); err != nil {
		return false, fmt.Errorf("rig: event %s: %w", data, err)
	}
	if e := chunk.Error; e != nil {
		return false, &HTTPError{Status: http.StatusOK, Message: e.Message, Type: e.Type, Code: e.Code}
	}
	brought := false
	for _, c := range chunk.Choices {
		a.Text += c.Text
		a.IDs = append(a.IDs, c.TokenIDs...)
		brought = brought || len(c.TokenIDs) > 0
		if c.Logprobs != nil {
			a.Logprobs = append(a.Logprobs, c.Logprobs.TokenLogprobs...)
		}
		if c.FinishReason != "" {
			a.Finish = c.FinishReason
		}
	}
	return brought, nil
}
