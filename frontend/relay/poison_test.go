package relay

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

// poisoned makes an engine answer 500 to requests that say so.
func (f *fake) poisoned() {
	f.set(func() {
		f.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
			poison := strings.Contains(f.last().body, `"user":"poison"`)
			if poison {
				w.WriteHeader(http.StatusInternalServerError)
			}
			return poison
		}
	})
}

var poison = strings.Replace(simple, "{", `{"user":"poison",`, 1)

// One request that engines answer 500 to is one failure of each, however often it is sent, and does not keep others out.
func TestPoisonIsOneRequestsProblem(t *testing.T) {
	r := newRelay(t, "trtllm", nil)
	r.decode.poisoned()
	for range 2 {
		if got := r.post(completionsPath, poison); got.status != http.StatusInternalServerError {
			t.Fatalf("%+v", got)
		}
	}
	if n := r.metric("breaker_open"); n != 0 {
		t.Errorf("two requests opened %v breakers", n)
	}
	r.read(r.post(completionsPath, simple))
}

// Many requests that fail open a breaker, and the only worker of a leg serves the others all the same, at once.
func TestPoisonLeavesTheLastWorker(t *testing.T) {
	r := newRelay(t, "trtllm", nil)
	r.decode.poisoned()
	for range breakerFailures {
		r.post(completionsPath, poison)
	}
	if n := r.metric("breaker_open"); n == 0 {
		t.Error("no breaker is open")
	}
	start := time.Now()
	if got := r.get("/health"); got.status != http.StatusOK {
		t.Errorf("health: %s", got.body)
	}
	r.read(r.post(completionsPath, simple))
	if took := time.Since(start); took > breakerPause/2 {
		t.Errorf("it took %v", took)
	}
	if n := r.metric("breaker_open"); n != 0 {
		t.Errorf("%v breakers are open after a success", n)
	}
}
