package frontend

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func writeKeys(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReadAPIKeys(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		keys []string
		says string // an error
	}{
		"one":             {"sk-one", []string{"sk-one"}, ""},
		"comments":        {"# team a\nsk-one\n\n  sk-two  # bob\r\n\tsk#three\n#sk-four\n", []string{"sk-one", "sk-two", "sk#three"}, ""},
		"none":            {"# nothing\n\n", nil, "no key in it"},
		"empty":           {"", nil, "no key in it"},
		"two on a line":   {"sk-one\nsk-two sk-three\n", nil, "line 2"},
		"not ASCII":       {"schlüssel\n", nil, "line 1"},
		"another file":    {strings.Repeat("x", maxKeyFile+1), nil, "right file"},
		"hash in the key": {"a#b", []string{"a#b"}, ""},
	} {
		keys, err := ReadAPIKeys(writeKeys(t, c.text))
		if c.says != "" {
			if err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "sk-") || keys.Required() {
				t.Errorf("%s: %v, want %q and no key", name, err, c.says)
			}
			continue
		}
		if err != nil || len(keys.digests) != len(c.keys) {
			t.Errorf("%s: %d keys, %v", name, len(keys.digests), err)
		}
		for _, key := range c.keys {
			if !keys.has(key) || keys.has(key+"x") || keys.has(key[1:]) || keys.has("") || keys.has("#sk-four") {
				t.Errorf("%s: %q", name, key)
			}
		}
	}
	if _, err := ReadAPIKeys(filepath.Join(t.TempDir(), "missing")); err == nil || !strings.Contains(err.Error(), "missing") {
		t.Errorf("no file: %v", err)
	}
}

// Every endpoint but two wants a key, before it looks at anything else of the request.
func TestAuthorization(t *testing.T) {
	keys, err := ReadAPIKeys(writeKeys(t, "sk-alice-0123456789\nsk-bob-0123456789\n"))
	if err != nil {
		t.Fatal(err)
	}
	h := newTestServer(t, newToyBackend(), func(c *Config) { c.APIKeys = keys }).Handler()
	for _, e := range []struct{ method, path, body string }{
		{"POST", "/v1/chat/completions", `{"messages":[{"role":"user","content":"hi"}],"max_tokens":1}`},
		{"POST", "/v1/completions", `{"prompt":"hi","max_tokens":1}`},
		{"POST", "/v1/completions", "not JSON"},
		{"POST", "/tokenize", `{"prompt":"hi"}`},
		{"POST", "/detokenize", `{"tokens":[1]}`},
		{"GET", "/v1/models", ""},
		{"GET", "/v1/models/toy", ""},
		{"DELETE", "/v1/models", ""},
		{"GET", "/secret", ""},
	} {
		for _, c := range []struct {
			header, code string
			ok           bool
		}{
			{"", "", false},
			{"Bearer", "", false},
			{"Bearer ", "", false},
			{"Basic sk-alice-0123456789", "", false},
			{"sk-alice-0123456789", "", false},
			{"Bearer sk-alice", "invalid_api_key", false},
			{"Bearer sk-alice-0123456789x", "invalid_api_key", false},
			{"Bearer sk-alice-0123456789 sk-bob-0123456789", "invalid_api_key", false},
			{"Bearer sk-alice-0123456789", "", true},
			{"bearer  sk-bob-0123456789", "", true},
		} {
			r := do(t, h, e.method, e.path, e.body, "Authorization", c.header)
			if c.ok != (r.status != http.StatusUnauthorized) {
				t.Errorf("%s %s with %q: %d %s", e.method, e.path, c.header, r.status, r.body)
				continue
			}
			if c.ok {
				continue
			}
			f := r.failure(t)
			code := ""
			if f.Code != nil {
				code = *f.Code
			}
			if f.Type != "invalid_request_error" || code != c.code || r.header.Get("WWW-Authenticate") != "Bearer" || strings.Contains(string(r.body), "sk-") {
				t.Errorf("%s %s with %q: %s", e.method, e.path, c.header, r.body)
			}
		}
	}
	if r := do(t, h, "POST", "/v1/completions", `{"prompt":"hi","max_tokens":1}`, "Authorization", "Bearer sk-bob-0123456789"); r.status != http.StatusOK {
		t.Errorf("with a key: %d %s", r.status, r.body)
	}
	for _, path := range []string{"/health", "/metrics"} {
		if r := do(t, h, "GET", path, ""); r.status != http.StatusOK {
			t.Errorf("%s: %d %s", path, r.status, r.body)
		}
	}
	if r := do(t, h, "GET", "/metrics", ""); !strings.Contains(string(r.body), `status="401"`) && !strings.Contains(string(r.body), `code="401"`) {
		t.Errorf("refusals are not counted: %s", r.body)
	}
}
