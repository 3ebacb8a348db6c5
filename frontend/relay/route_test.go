package relay

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// fleetOf is several prefill workers and one decode worker that fetches from all.
func fleetOf(t *testing.T, kind string, n int, change func(*Config)) (r *relayed, prefill []*fake) {
	t.Helper()
	for range n {
		prefill = append(prefill, newFake(t, kind, nil))
	}
	decode := newFake(t, kind, prefill[0])
	decode.more = prefill[1:]
	r = relayTo(t, prefill, []*fake{decode}, change)
	r.decode = decode
	r.await(func() bool { return strings.Contains(r.get("/health").body, fmt.Sprintf(`"prefill":"%d of %d"`, n, n)) })
	return r, prefill
}

// counts are the requests of each since the last call.
func counts(list []*fake) (n []int) {
	for _, f := range list {
		f.mu.Lock()
		n = append(n, len(f.seen))
		f.seen = nil
		f.mu.Unlock()
	}
	return n
}

func used(n []int) (workers int) {
	for _, one := range n {
		if one > 0 {
			workers++
		}
	}
	return workers
}

// Behaviours 41, 42 and 47: turns of a conversation go to one worker, whichever of the places its id comes in, and the
// id reaches both workers.
func TestConversationIDs(t *testing.T) {
	for _, kind := range []string{"trtllm", "vllm", "sglang"} {
		r, prefill := fleetOf(t, kind, 3, nil)
		for i, send := range []func(turn int) result{
			func(turn int) result {
				return r.post(chatPath, fmt.Sprintf(`{"model":"toy","messages":["%d"],"conversation_params":{"conversation_id":" one "}}`, turn))
			},
			func(turn int) result {
				return r.post(chatPath, fmt.Sprintf(`{"model":"toy","messages":["%d"]}`, turn), "X-Session-Id: one")
			},
			func(turn int) result {
				return r.post(chatPath, fmt.Sprintf(`{"model":"toy","messages":["%d"]}`, turn), "x-session-id:  ", "x-correlation-id: one", "X-Session-Affinity: other")
			},
			func(turn int) result {
				return r.post(chatPath, fmt.Sprintf(`{"model":"toy","messages":["%d"],"conversation_params":{"conversation_id":"one"}}`, turn), "X-Multi-Turn-Session-Id: other")
			},
		} {
			for turn := range 4 {
				r.read(send(turn))
			}
			if n := counts(prefill); used(n) != 1 {
				t.Errorf("%s, place %d: %v", kind, i, n)
			}
			for _, s := range r.decode.requests() {
				if !strings.Contains(s.body+strings.Join(s.header.Values("X-Session-Id"), "")+s.header.Get("X-Correlation-Id"), "one") {
					t.Errorf("%s, place %d: the id does not reach the decode worker: %s %v", kind, i, s.body, s.header)
				}
				if kind == "trtllm" && !strings.Contains(s.body, `"conversation_params":{"conversation_id":"`) {
					t.Errorf("place %d: %s", i, s.body)
				}
			}
			counts([]*fake{r.decode})
		}
		for i := range 6 {
			r.read(r.post(chatPath, `{"model":"toy","messages":["x"]}`, fmt.Sprintf("X-Session-Id: session %d", i)))
		}
		if n := counts(prefill); used(n) != 3 {
			t.Errorf("%s: six conversations went to %v", kind, n)
		}
	}
	r := newRelay(t, "trtllm", nil)
	for _, id := range []string{`null`, `""`, `"  "`, `[]`, `{}`} {
		got := r.post(chatPath, `{"model":"toy","messages":["x"],"conversation_params":{"conversation_id":`+id+`}}`)
		if got.status != 400 || !strings.Contains(got.body, "conversation_id") {
			t.Errorf("%s: %+v", id, got)
		}
	}
	r.read(r.post(chatPath, `{"model":"toy","messages":["x"],"conversation_params":{"conversation_id":9007199254740993}}`))
}

// Without an id, a request that goes on from another goes to where that went.
func TestConversationByText(t *testing.T) {
	r, prefill := fleetOf(t, "vllm", 3, nil)
	for c := range 3 {
		messages := ""
		for turn := range 4 {
			messages += fmt.Sprintf(`{"role":"user","content":"%d %s"},`, c, strings.Repeat(fmt.Sprint(c, turn), 3000/(turn*3+1)))
			r.read(r.post(chatPath, `{"model":"toy","messages":[`+strings.TrimSuffix(messages, ",")+`]}`))
			if n := counts(prefill); n[c] != 1 {
				t.Errorf("conversation %d, turn %d: %v", c, turn, n)
			}
		}
	}
	if n := r.metric("predicted_cached_tokens_total"); n == 0 || n > 12*12000 {
		t.Errorf("%v tokens are predicted", n)
	}
}

// Behaviour 45: a conversation whose worker is removed gets another, and stays there.
func TestPinnedWorkerLeaves(t *testing.T) {
	r, prefill := fleetOf(t, "vllm", 2, nil)
	send := func() { r.read(r.post(chatPath, `{"model":"toy","messages":["x"]}`, "X-Session-Id: s")) }
	send()
	n := counts(prefill)
	at := 0
	if n[1] > 0 {
		at = 1
	}
	if got := r.delete(prefill[at].URL); got.status != http.StatusOK {
		t.Fatalf("%+v", got)
	}
	send()
	if n := counts(prefill); n[1-at] != 1 {
		t.Errorf("%v", n)
	}
	if got := r.post("/workers", fmt.Sprintf(`{"url":%q,"role":"prefill"}`, prefill[at].URL)); got.status != http.StatusAccepted {
		t.Fatalf("%+v", got)
	}
	r.await(func() bool { return strings.Contains(r.get("/health").body, `"prefill":"2 of 2"`) })
	send()
	if n := counts(prefill); n[1-at] != 1 {
		t.Errorf("after it has come back: %v", n)
	}
}

func (r *relayed) delete(url string) result {
	r.t.Helper()
	req, _ := http.NewRequest("DELETE", r.URL+"/workers?wait=true&url="+url, nil)
	return r.do(req)
}

// Pools change at run time.
func TestWorkers(t *testing.T) {
	r := newRelay(t, "trtllm", nil)
	more := newFake(t, "trtllm", r.prefill)
	more.set(func() { more.healthy = false })
	if got := r.post("/workers", fmt.Sprintf(`{"url":"%s/","role":"decode"}`, more.URL)); got.status != http.StatusAccepted {
		t.Fatalf("%+v", got)
	}
	if got := r.post("/workers", fmt.Sprintf(`{"url":%q,"role":"decode"}`, more.URL)); got.status != http.StatusConflict {
		t.Errorf("a second time: %+v", got)
	}
	for range 4 {
		r.read(r.post(completionsPath, simple))
	}
	if n := len(more.requests()); n != 0 {
		t.Errorf("a worker that is not healthy got %d requests", n)
	}
	more.set(func() { more.healthy = true })
	r.await(func() bool { return strings.Contains(r.get("/health").body, `"decode":"2 of 2"`) })
	for range 4 {
		r.read(r.post(completionsPath, simple))
	}
	if n := len(more.requests()); n != 2 {
		t.Errorf("a worker that has joined got %d of 4 requests", n)
	}
	var list struct {
		Workers []struct {
			URL, State, Breaker string
			Roles               []string
			Healthy             bool
		}
	}
	if err := json.Unmarshal([]byte(r.get("/workers").body), &list); err != nil || len(list.Workers) != 3 {
		t.Fatalf("%v, %+v", err, list)
	}
	if w := list.Workers[2]; w.URL != more.URL || !w.Healthy || w.State != "is healthy" || w.Breaker != "closed" || len(w.Roles) != 1 || w.Roles[0] != "decode" {
		t.Errorf("%+v", w)
	}
	if got := r.delete(more.URL); got.status != http.StatusOK {
		t.Errorf("%+v", got)
	}
	if got := r.delete(more.URL); got.status != http.StatusNotFound {
		t.Errorf("again: %+v", got)
	}
	for range 3 {
		r.read(r.post(completionsPath, simple))
	}
	if n := len(more.requests()); n != 2 {
		t.Errorf("a worker that has left got %d requests", n)
	}
	for _, body := range []string{`{}`, `{"url":"ftp://x","role":"decode"}`, `{"url":"http://x","role":"cook"}`, `{"url":"http://x","role":"decode","x":1}`, `x`, `{"url":"http://x","role":"decode","bootstrap_port":70000}`} {
		if got := r.post("/workers", body); got.status != 400 {
			t.Errorf("%s: %+v", body, got)
		}
	}
}

// A running request survives the removal of its worker, which ends after it.
func TestRemoveBusyWorker(t *testing.T) {
	r := newRelay(t, "trtllm", nil)
	r.decode.gap = make(chan struct{})
	answers := make(chan result, 1)
	go func() { answers <- r.post(completionsPath, streamed) }()
	r.await(func() bool { return len(r.decode.requests()) == 1 })
	removed := make(chan result, 1)
	go func() { removed <- r.delete(r.decode.URL) }()
	r.await(func() bool { return strings.Contains(r.get("/workers").body, "is leaving") })
	select {
	case got := <-removed:
		t.Errorf("removed before its request ended: %+v", got)
	default:
	}
	close(r.decode.gap)
	if events := r.events(<-answers); len(events) != 3 {
		t.Errorf("%q", events)
	}
	if got := <-removed; got.status != http.StatusOK {
		t.Errorf("%+v", got)
	}
	r.await(func() bool { return !strings.Contains(r.get("/workers").body, r.decode.URL) })
}

// A worker of both pools prefers to hand over to another.
func TestBothRoles(t *testing.T) {
	prefill := newFake(t, "vllm", nil)
	both := newFake(t, "vllm", prefill)
	prefill.peer, prefill.more = prefill, []*fake{both}
	both.more = []*fake{both}
	r := relayTo(t, []*fake{prefill, both}, []*fake{prefill, both}, func(c *Config) { c.PrefillRouter = "round_robin" })
	r.await(func() bool { return strings.Contains(r.get("/health").body, `"prefill":"2 of 2"`) })
	for range 4 {
		r.read(r.post(completionsPath, simple))
	}
	for i, f := range []*fake{prefill, both} {
		var legs [2]int
		for _, s := range f.requests() {
			if strings.Contains(s.body, `"do_remote_prefill":true`) {
				legs[1]++
			} else {
				legs[0]++
			}
		}
		if legs != [2]int{2, 2} {
			t.Errorf("worker %d: %v legs", i, legs)
		}
	}
}

// Engines tell what they are; one that is another is refused, one that says nothing too.
func TestDetect(t *testing.T) {
	for _, kind := range kinds {
		r := newRelay(t, kind, nil)
		want := map[string]string{"mooncake": "vllm"}[kind]
		if want == "" {
			want = kind
		}
		if got := r.s.Engine(); got != want {
			t.Errorf("%s is taken for %q", kind, got)
		}
	}
	for info, want := range map[string]string{
		`{"engine":"baton"}`: "baton", `{"disaggregated_params":{"ctx_info_endpoint":[]}}`: "trtllm", `{"disaggregation_mode":"prefill"}`: "sglang",
	} {
		f, d := newFake(t, "plain", nil), newFake(t, "plain", nil)
		for _, f := range []*fake{f, d} {
			f.set(func() { f.owner, f.info = "", info })
		}
		r := relayTo(t, []*fake{f}, []*fake{d}, nil)
		if got := r.s.Engine(); got != want {
			t.Errorf("%s is taken for %q", info, got)
		}
	}
	r := newRelay(t, "trtllm", nil)
	other := newFake(t, "sglang", nil)
	unknown := newFake(t, "plain", nil)
	for _, f := range []*fake{other, unknown} {
		r.post("/workers", fmt.Sprintf(`{"url":%q,"role":"decode"}`, f.URL))
	}
	r.await(func() bool {
		body := r.get("/workers").body
		return strings.Contains(body, "it is sglang, but the other workers are trtllm") && strings.Contains(body, "name it with --engine")
	})
}

// Without prefill workers the others serve whole requests, whatever they are.
func TestAggregated(t *testing.T) {
	a, b := newFake(t, "plain", nil), newFake(t, "plain", nil)
	r := relayTo(t, nil, []*fake{a, b}, func(c *Config) { c.DecodeRouter = "round_robin" })
	r.await(func() bool { return strings.Contains(r.get("/health").body, `"decode":"2 of 2"`) })
	for range 4 {
		c := r.read(r.post(completionsPath, `{"prompt":[1,2,3],"max_tokens":3,"unknown":9007199254740993,"kv_transfer_params":{"x":1}}`))
		if fmt.Sprint(c.Choices[0].TokenIDs) != fmt.Sprint(expected([]int{1, 2, 3}, 3)) {
			t.Errorf("%+v", c)
		}
	}
	for _, f := range []*fake{a, b} {
		if n := len(f.requests()); n != 2 {
			t.Errorf("%d requests", n)
		}
		if body := f.last().body; body != `{"prompt":[1,2,3],"max_tokens":3,"unknown":9007199254740993}` {
			t.Error(body)
		}
	}
	// A prefill worker that comes makes two legs of them.
	p := newFake(t, "vllm", nil)
	c, d := newFake(t, "vllm", p), newFake(t, "vllm", p)
	r = relayTo(t, nil, []*fake{c, d}, nil)
	r.read(r.post(completionsPath, simple))
	r.post("/workers", fmt.Sprintf(`{"url":%q,"role":"prefill","bootstrap_port":%d}`, p.URL, p.worker().BootstrapPort))
	r.await(func() bool { return strings.Contains(r.get("/health").body, `"prefill":"1 of 1"`) })
	r.read(r.post(completionsPath, simple))
	if n := len(p.requests()); n != 1 {
		t.Errorf("%d prefill legs", n)
	}
}
