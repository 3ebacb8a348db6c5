package relay

import (
	"net/http"
	"testing"
	"time"
)

// What one worker does not answer another one does, once.
func TestPassedToAnother(t *testing.T) {
	prefill := newFake(t, "trtllm", nil)
	decode := []*fake{newFake(t, "trtllm", prefill), newFake(t, "trtllm", prefill)}
	r := relayTo(t, []*fake{prefill}, decode, func(c *Config) { c.DecodeRouter = "round_robin" })
	r.await(func() bool { return r.metric("worker_healthy") == 3 })
	decode[0].set(func() { decode[0].cut = true })
	for range 4 {
		if got := r.post("/tokenize", `{}`, "X-Request-Id: mine"); got.status != http.StatusNotFound || got.header.Get("X-Request-Id") != "mine" { // as the other one says
			t.Errorf("%+v", got)
		}
	}
}

// A prefill worker that takes its time to have something taken back does not delay the client's error.
func TestGivingBackDelaysNobody(t *testing.T) {
	r := newRelay(t, "baton", func(c *Config) { c.MaxRetries = -1 })
	slow := make(chan struct{})
	r.prefill.set(func() { r.prefill.slow = slow })
	r.decode.answers(http.StatusBadRequest, `{"error":{"message":"no"}}`)
	start := time.Now()
	if got := r.post(completionsPath, simple); got.status != http.StatusBadRequest {
		t.Errorf("%+v", got)
	}
	if took := time.Since(start); took > giveBackTimeout/2 {
		t.Errorf("the answer came after %v", took)
	}
	close(slow)
	r.await(func() (done bool) {
		r.prefill.set(func() { done = len(r.prefill.released) == 1 })
		return done
	})
}
