package relay

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// Bodies that have not ended yet count against --max-bodies as they arrive, not as they are announced; what does not fit is
// refused in a way that clients repeat, and all is given back.
func TestBodiesOfAllRequestsAreBounded(t *testing.T) {
	const part = 300 << 10
	r := newRelay(t, "trtllm", func(c *Config) { c.Limits.MaxBody, c.Limits.MaxBodies = 1<<20, 1<<20 })
	begin := func(bytes int) func() {
		c := r.dialRaw(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", completionsPath, 1<<20, strings.Repeat(" ", bytes)))
		return func() { c.Close() }
	}
	var ends []func()
	for i := range 3 {
		ends = append(ends, begin(part))
		r.await(func() bool { return r.metric("body_bytes") == float64((i+1)*part) })
	}
	big := strings.Replace(simple, "{", fmt.Sprintf(`{"user":%q,`, strings.Repeat("u", part)), 1)
	got := r.post(completionsPath, big)
	if got.status != http.StatusServiceUnavailable || got.header.Get("Retry-After") == "" || !strings.Contains(got.body, "--max-bodies") {
		t.Errorf("%+v", got)
	}
	r.read(r.post(completionsPath, simple)) // a small one fits
	ends[0]()
	r.await(func() bool { return r.metric("body_bytes") == 2*part })
	r.read(r.post(completionsPath, big))
	for _, end := range ends[1:] {
		end()
	}
	r.await(func() bool { return r.metric("body_bytes") == 0 })
}

// Answers that are read whole count too, those of tries that failed no more; a worker is not to blame for what does not fit.
func TestAnswersAreBoundedTogether(t *testing.T) {
	const size = 300 << 10
	for _, kind := range []string{"trtllm", "vllm", "sglang"} {
		for l, name := range []string{"prefill", "decode"} {
			if name == "prefill" && kind != "trtllm" {
				continue // its answer is none that a decode leg could follow
			}
			r := newRelay(t, kind, func(c *Config) { c.Limits.MaxBody, c.Limits.MaxBodies = 4<<10, size+(8<<10) })
			f := []*fake{r.prefill, r.decode}[l]
			answer := func(size int) {
				f.set(func() {
					f.before = func(n int, w http.ResponseWriter, _ *http.Request) bool {
						w.Header().Set("Content-Type", "application/json")
						if n%2 == 1 {
							w.Header().Set("Content-Length", fmt.Sprint(2*size)) // and breaks off
						}
						fmt.Fprintf(w, `{"choices":[{"finish_reason":"stop","text":"","disaggregated_params":{"ctx_request_id":1,"disagg_request_id":2}}],"kv_transfer_params":{"remote_engine_id":"e"},"x":%q}`,
							strings.Repeat("x", size-300))
						return true
					}
				})
			}
			answer(size)
			if got := r.post(completionsPath, simple); got.status != http.StatusOK {
				t.Errorf("%s, %s: %d %.200s", kind, name, got.status, got.body)
			}
			f.set(func() { f.seen = nil })
			answer(size + 10<<10)
			got := r.post(completionsPath, simple)
			if got.status != http.StatusServiceUnavailable || !strings.Contains(got.body, "--max-bodies") {
				t.Errorf("%s, %s: %d %.200s", kind, name, got.status, got.body)
			}
			if n := r.metric("breaker_open"); n != 0 {
				t.Errorf("%s, %s: %v breakers are open", kind, name, n)
			}
			r.await(func() bool { return r.metric("body_bytes") == 0 && r.metric("worker_requests") == 0 })
		}
	}
}

func TestBudget(t *testing.T) {
	for _, c := range []struct {
		limits Limits
		want   int64
	}{
		{Limits{}, 2 << 30},
		{Limits{MaxBody: 3 << 30}, 3 << 30},
		{Limits{MaxBody: 5, MaxBodies: 4}, -1},
	} {
		config := Config{Limits: c.limits}
		if err := config.setDefaults(); (err != nil) != (c.want < 0) || err == nil && config.Limits.MaxBodies != c.want {
			t.Errorf("%+v: %d, %v", c.limits, config.Limits.MaxBodies, err)
		}
	}
}
