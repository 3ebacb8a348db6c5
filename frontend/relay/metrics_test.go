package relay

import (
	"strings"
	"testing"
)

// Counters whose labels are known are 0 before anything has happened, so that a rate of them has a beginning, and cached
// tokens are predicted in what they are counted in.
func TestCountersExistFromTheStart(t *testing.T) {
	r := newRelay(t, "trtllm", nil)
	text := r.get("/metrics").body
	for _, want := range []string{
		`baton_relay_retries_total{leg="prefill"} 0`, `baton_relay_retries_total{leg="decode"} 0`,
		`baton_relay_silent_reprefills_total{worker="` + r.prefill.URL + `"} 0`, "baton_relay_predicted_cached_tokens_total 0", "baton_relay_cached_tokens_total 0",
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("no %s", want)
		}
	}
	for _, reason := range singleReasons {
		if !strings.Contains(text, `baton_relay_single_leg_total{reason="`+reason+`"} 0`) {
			t.Errorf("no %q", reason)
		}
	}
	for _, unknown := range []string{`{"model":"toy","prompt":["a","b"],"max_tokens":1}`, `{"model":"toy","prompt":"a","n":2,"max_tokens":1}`} {
		r.post(completionsPath, unknown)
	}
	text = r.get("/metrics").body
	if n := strings.Count(text, "baton_relay_single_leg_total{"); n != len(singleReasons) {
		t.Errorf("%d reasons, of which %d are known", n, len(singleReasons))
	}
}
