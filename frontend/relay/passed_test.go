package relay

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// Answers of other endpoints are counted with their status; HEAD is served; what calls itself JSON and is half of it is no
// answer.
func TestPassedAnswers(t *testing.T) {
	t.Parallel()
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/tokenize":
			w.Header().Set("Content-Type", "application/json; charset=utf-8")
			fmt.Fprint(w, `{"tokens":[1`)
		case "/detokenize":
			http.Error(w, "no such thing", http.StatusTeapot)
		case "/v1/models":
			fmt.Fprint(w, `{"data":[]}`)
		}
	}))
	t.Cleanup(worker.Close)
	r := relayTo(t, nil, nil, func(c *Config) { c.Engine, c.Decode, c.MaxRetries = "plain", []Worker{{URL: worker.URL}}, -1 })
	if got := r.post("/tokenize", simple); got.status != 500 || !strings.Contains(got.body, "engine_failed") {
		t.Errorf("half of an answer: %+v", got)
	}
	if got := r.post("/detokenize", simple); got.status != http.StatusTeapot || !strings.Contains(got.body, "no such thing") {
		t.Errorf("%+v", got)
	}
	req, _ := http.NewRequest(http.MethodHead, r.URL+"/v1/models", nil)
	if got := r.do(req); got.status != 200 || got.body != "" {
		t.Errorf("%+v", got)
	}
	if got := strings.Join(r.labels("requests_total"), " "); got != "/detokenize 418 /tokenize 500 /v1/models 200" {
		t.Errorf("requests: %s", got)
	}
}

// What is neither an answer nor a refusal is tried again.
func TestRedirectsAreNoAnswers(t *testing.T) {
	t.Parallel()
	for _, status := range []int{201, 204, 307} {
		r := newRelay(t, "vllm", func(c *Config) { c.MaxRetries = 1 })
		r.answers(fmt.Sprintf("HTTP/1.1 %d X\r\nLocation: /\r\n\r\n", status))
		if got := r.post(completionsPath, simple); got.status != 500 || len(r.decode.requests()) != 2 {
			t.Errorf("%d: %+v after %d tries", status, got, len(r.decode.requests()))
		}
	}
}
