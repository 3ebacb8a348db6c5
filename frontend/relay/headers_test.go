package relay

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// What an engine says about when to come back, and other headers that clients go by, reach the client.
func TestEnginesHeaders(t *testing.T) {
	t.Parallel()
	for _, status := range []int{401, 405, 429, 503} {
		r := newRelay(t, "vllm", func(c *Config) { c.MaxRetries = -1 })
		r.answers(fmt.Sprintf("HTTP/1.1 %d X\r\nRetry-After: 7\r\nWWW-Authenticate: Bearer\r\nAllow: PUT\r\nServer: x\r\nSet-Cookie: a=b\r\n"+
			"Content-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", status))
		got := r.post(completionsPath, simple, "Accept-Encoding: gzip")
		if got.status != status || got.body != "{}" {
			t.Errorf("%+v", got)
		}
		for name, want := range map[string]string{
			"Retry-After": "7", "WWW-Authenticate": "Bearer", "Allow": "PUT", "Content-Type": asJSON, "Content-Encoding": "gzip", "Server": "", "Set-Cookie": "",
		} {
			if v := got.header.Get(name); v != want {
				t.Errorf("%d: %s is %q, want %q", status, name, v, want)
			}
		}
	}
}

// An answer that goes on in another protocol is none, at the endpoints that are passed on as well.
func TestOtherProtocols(t *testing.T) {
	t.Parallel()
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			return
		}
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")
	}))
	t.Cleanup(worker.Close)
	r := relayTo(t, nil, nil, func(c *Config) { c.Engine, c.Decode, c.MaxRetries = "plain", []Worker{{URL: worker.URL}}, -1 })
	for _, path := range []string{"/tokenize", completionsPath} {
		if got := r.post(path, simple); got.status != 500 {
			t.Errorf("%s: %+v", path, got)
		}
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for text, want := range map[string]int{
		"": 0, "7": 7, " 7 ": 7, "0": 1, "-1": 0, "x": 0, "1.5": 0, "3600": 3600, "86400": 3600, "99999999999999999999": 0,
		now.Add(90 * time.Second).Format(http.TimeFormat):  90,
		now.Add(-90 * time.Second).Format(http.TimeFormat): 1,
		now.AddDate(1000, 0, 0).Format(http.TimeFormat):    3600,
	} {
		if got := retryAfter(http.Header{"Retry-After": {text}}, now); got != want {
			t.Errorf("%q is %d seconds, want %d", text, got, want)
		}
	}
}
