package relay

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

// setWell makes an engine's health checks fail, or succeed again, and waits until the relay has seen it.
func (r *relayed) setWell(f *fake, well bool) {
	r.t.Helper()
	f.set(func() { f.healthy = well })
	r.await(func() bool {
		for _, w := range r.s.fleet.all() {
			if w.URL == f.URL {
				w.probeNow()
			}
		}
		for _, info := range r.s.fleet.snapshot(time.Now()) {
			if info.URL == f.URL {
				return info.Healthy == well
			}
		}
		return false
	})
}

// While no decode worker takes requests no prompt is computed for nothing, by any way that legs take; once there is one, the
// requests that wait go on.
func TestNoPrefillWithoutDecode(t *testing.T) {
	for _, kind := range []string{"trtllm", "baton", "vllm", "sglang"} {
		t.Run(kind, func(t *testing.T) {
			r := newRelay(t, kind, func(c *Config) { c.WorkerWait = 20 * time.Millisecond })
			r.setWell(r.decode, false)
			got := r.post(completionsPath, simple)
			if got.status != http.StatusServiceUnavailable || got.header.Get("Retry-After") == "" || !strings.Contains(got.body, "no decode worker") {
				t.Errorf("%+v", got)
			}
			if n := len(r.prefill.requests()); n != 0 {
				t.Errorf("%d prompts were computed", n)
			}
			r.s.cfg.WorkerWait = 5 * time.Second // no request runs
			done := make(chan result, 1)
			go func() { done <- r.post(completionsPath, simple) }()
			r.await(func() bool { return r.metric("requests_in_flight") == 1 })
			r.setWell(r.decode, true)
			r.read(<-done)
		})
	}
}

// Prefill workers that serve whole requests need no decode worker.
func TestWholePrefillWorkersNeedNoDecode(t *testing.T) {
	prefill := newFake(t, "baton", nil)
	prefill.info = `{"engine":"baton","role":"both"}`
	decode := newFake(t, "baton", prefill)
	r := relayTo(t, []*fake{prefill}, []*fake{decode}, func(c *Config) { c.WorkerWait = 20 * time.Millisecond })
	r.setWell(decode, false)
	r.read(r.post(completionsPath, simple))
}
