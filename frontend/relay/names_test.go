package relay

import (
	"net/http"
	"strings"
	"testing"
)

// A request has one name in the relay's log, its answer and the requests to engines of every kind: its client's, if that can
// stand there, or else its id. A try after a failure has a name of its own, which contains that one.
func TestRequestsHaveNames(t *testing.T) {
	for _, kind := range append([]string{"baton", "plain"}, kinds...) {
		for header, want := range map[string]string{
			"":                       "",
			"rollout/7:a":            "rollout/7:a",
			strings.Repeat("n", 128): strings.Repeat("n", 128),
			strings.Repeat("n", 129): "",
			"two words":              "",
			"caf\xe9":                "",
		} {
			var lines strings.Builder
			r := newRelay(t, kind, func(c *Config) {
				c.Logger = textLog(&lines)
				if kind == "plain" {
					c.Engine, c.Prefill = "plain", nil
				}
			})
			var headers []string
			if header != "" {
				headers = []string{"X-Request-Id: " + header}
			}
			got := r.post(completionsPath, simple, headers...)
			r.read(got)
			name := got.header.Get("X-Request-Id")
			if want != "" && name != want || want == "" && strings.Trim(name, "0123456789") != "" || name == "" {
				t.Errorf("%s: %q is called %q", kind, header, name)
			}
			for _, f := range []*fake{r.prefill, r.decode} {
				for _, s := range f.requests() {
					sent := s.header.Get("X-Request-Id")
					if sent != name && !(kind == "vllm" || kind == "mooncake") || !strings.HasPrefix(sent, name) {
						t.Errorf("%s: an engine is told %q of %q", kind, sent, name)
					}
				}
			}
			r.Close()
			r.s.Close()
			if text := lines.String(); !strings.Contains(text, "request_id="+name) || !strings.Contains(text, " id=") {
				t.Errorf("%s: the log has no request_id=%s: %s", kind, name, text)
			}
		}
	}
}

// Two requests of the same name, and two tries of one, are told apart by engines that need that.
func TestNamesOfTries(t *testing.T) {
	for _, kind := range []string{"trtllm", "vllm"} {
		r := newRelay(t, kind, nil)
		r.prefill.set(func() {
			r.prefill.before = func(n int, w http.ResponseWriter, _ *http.Request) bool {
				if n == 1 {
					w.WriteHeader(http.StatusInternalServerError)
				}
				return n == 1
			}
		})
		r.read(r.post(completionsPath, simple, "X-Request-Id: same"))
		r.read(r.post(completionsPath, simple, "X-Request-Id: same"))
		names := map[string]bool{}
		for _, s := range r.prefill.requests() {
			names[s.header.Get("X-Request-Id")] = true
		}
		if want := 3 - boolInt(kind == "trtllm"); len(names) != int(want) {
			t.Errorf("%s: %d names: %v", kind, len(names), names)
		}
	}
	r := newRelay(t, "trtllm", nil)
	if got := r.post(completionsPath, "{", "X-Request-Id: mine"); got.status != http.StatusBadRequest || got.header.Get("X-Request-Id") != "mine" {
		t.Errorf("an error: %+v", got)
	}
}
