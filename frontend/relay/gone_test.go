package relay

import (
	"io"
	"net/http"
	"slices"
	"testing"
)

// A decode worker that finds the prompt's KV gone gets another, and is not held to be at fault.
func TestKVThatIsGoneIsMadeAgain(t *testing.T) {
	r := newRelay(t, "baton", nil)
	r.decode.set(func() {
		r.decode.before = func(n int, w http.ResponseWriter, _ *http.Request) bool {
			if n == 1 {
				w.WriteHeader(http.StatusGone)
				io.WriteString(w, `{"error":{"message":"nobody holds it","code":"kv_gone"}}`)
			}
			return n == 1
		}
	})
	got := r.read(r.post(completionsPath, simple))
	if want := expected([]int{1, 2, 3}, 3); !slices.Equal(got.Choices[0].TokenIDs, want) {
		t.Errorf("%v, want %v", got.Choices[0].TokenIDs, want)
	}
	p, d := r.prefill.requests(), r.decode.requests()
	if len(p) != 2 || len(d) != 2 || wireOf(t, p[0]).ID == wireOf(t, p[1]).ID {
		t.Errorf("%d prefill and %d decode legs", len(p), len(d))
	}
	if n := r.metric("retries_total"); n != 1 {
		t.Errorf("%v retries are counted", n)
	}
}
