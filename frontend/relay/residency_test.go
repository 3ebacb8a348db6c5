package relay

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"baton/frontend/relay/kvevents"
	"baton/kvcache"
)

// prompt is a request of n blocks of 16 ids that begins as others of its kind do.
func idPrompt(kind, blocks int) (body string, ids []int) {
	for i := range 16 * blocks {
		ids = append(ids, 1000*kind+i)
	}
	return fmt.Sprintf(`{"model":"toy","prompt":%s,"max_tokens":2}`, ints(ids)), ids
}

// cacheEvent is a stored event for the blocks of 16 of ids.
func cacheEvent(id int, ids []int) string {
	var blocks []string
	for at := 0; at+16 <= len(ids); at += 16 {
		var tokens []string
		for _, t := range ids[at : at+16] {
			tokens = append(tokens, fmt.Sprintf(`{"token_id":%d,"token_extra_id":0}`, t))
		}
		blocks = append(blocks, fmt.Sprintf(`{"block_hash":%d,"tokens":[%s]}`, 1<<62+ids[0]+at, strings.Join(tokens, ",")))
	}
	return fmt.Sprintf(`{"event_id":%d,"data":{"type":"stored","parent_hash":null,"blocks":[%s]}}`, id, strings.Join(blocks, ","))
}

// kv_cache_aware sends a prompt to the worker that says it holds it, until it says otherwise or events are lost.
func TestResidencyFromEvents(t *testing.T) {
	var prefill []*fake
	for range 3 {
		prefill = append(prefill, newFake(t, "trtllm", nil))
	}
	decode := newFake(t, "trtllm", prefill[0])
	decode.more = prefill[1:]
	r := relayTo(t, prefill, []*fake{decode}, func(c *Config) {
		c.PrefillRouter = "kv_cache_aware"
		for i := range c.Prefill {
			c.Prefill[i].Events = "http"
		}
	})
	r.await(func() bool { return strings.Contains(r.get("/health").body, `"prefill":"3 of 3"`) })
	tell := func(i int, events ...string) {
		done := make(chan struct{})
		prefill[i].set(func() {
			prefill[i].events = append(prefill[i].events, "["+strings.Join(events, ",")+"]", "[]")
			prefill[i].told = done
		})
		<-done
	}
	held := func() int {
		r.s.fleet.mu.Lock()
		defer r.s.fleet.mu.Unlock()
		return r.s.held.index.Len()
	}
	body, ids := idPrompt(1, 10)
	tell(2, cacheEvent(1, ids))
	tell(0)
	tell(1)
	if n := held(); n != 10 {
		t.Fatalf("%d blocks are known, want 10", n)
	}
	for range 3 {
		r.read(r.post(completionsPath, body))
	}
	if n := counts(prefill); n[2] != 3 {
		t.Errorf("a prompt that worker 2 holds went to %v", n)
	}
	if n := r.metric("predicted_cached_tokens_total"); n != float64(3*len(ids)) {
		t.Errorf("%v tokens are predicted", n)
	}
	tell(2, fmt.Sprintf(`{"event_id":2,"data":{"type":"removed","block_hashes":[%d]}}`, 1<<62+ids[0]+9*16))
	if n := held(); n != 9 {
		t.Errorf("%d blocks are known after one is gone", n)
	}
	tell(2, `{"event_id":7,"data":{"type":"updated"}}`)
	if n := held(); n != 0 {
		t.Errorf("%d blocks are known after events were lost", n)
	}
	if got := r.delete(prefill[2].URL); got.status != http.StatusOK {
		t.Errorf("%+v", got)
	}
}

// Without events, what was sent to a worker counts for it.
func TestResidencyByGuess(t *testing.T) {
	r, prefill := fleetOf(t, "vllm", 3, func(c *Config) { c.PrefillRouter = "kv_cache_aware" })
	for kind := range 3 {
		for blocks := 8; blocks < 24; blocks += 4 {
			body, _ := idPrompt(kind, blocks)
			r.read(r.post(completionsPath, body))
		}
		if n := counts(prefill); used(n) != 1 {
			t.Errorf("kind %d went to %v", kind, n)
		}
	}
	if got := r.post("/workers", `{"url":"http://127.0.0.1:1","role":"prefill","events":"127.0.0.1:5557"}`); got.status != 400 || !strings.Contains(got.body, "tcp://HOST:PORT") {
		t.Errorf("%+v", got)
	}
}

func TestParseWorker(t *testing.T) {
	w, err := ParseWorker("http://h:1/base/#bootstrap=9000&events=tcp://h:5557&replay=none&ranks=2")
	if want := (Worker{URL: "http://h:1/base", BootstrapPort: 9000, Events: "tcp://h:5557", Replay: "none", Ranks: 2}); err != nil || w != want {
		t.Errorf("%+v, %v", w, err)
	}
	for _, bad := range []string{"", "h:1", "ftp://h", "http://", "http://u@h", "http://h?x=1", "http://h#bootstrap=0", "http://h#x=1", "http://h#%zz"} {
		if w, err := ParseWorker(bad); err == nil {
			t.Errorf("%q is taken for %+v", bad, w)
		}
	}
}

// A worker's ranks publish one stream each: it holds what any of them holds.
func TestResidencyOfRanks(t *testing.T) {
	s, err := New(Config{DecodeRouter: "kv_cache_aware"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	w := &worker{Worker: Worker{URL: "http://w"}, copies: map[kvcache.Digest]int{}}
	var ranks [2]*cacheView
	for i := range ranks {
		ranks[i] = &cacheView{s: s, w: w, names: map[string]kvcache.Digest{}}
	}
	stored := func(name string, parent string, token int32) kvevents.Event {
		return kvevents.Event{Kind: kvevents.Stored, Blocks: []string{name}, Parent: parent, Tokens: []int32{token}, BlockSize: 1}
	}
	check := func(reports, blocks int) {
		t.Helper()
		if w.reports != reports || s.held.index.Len() != blocks {
			t.Errorf("%d ranks report %d blocks, want %d and %d", w.reports, s.held.index.Len(), reports, blocks)
		}
	}
	ranks[0].handle([]kvevents.Event{stored("a", "", 1), stored("b", "a", 2), stored("b", "a", 2)})
	check(1, 2)
	ranks[1].handle([]kvevents.Event{stored("x", "", 1)})
	check(2, 2)
	ranks[0].handle([]kvevents.Event{{Kind: kvevents.Removed, Blocks: []string{"b"}}, {Kind: kvevents.Removed, Blocks: []string{"a", "a", "z"}}})
	check(2, 1) // the other rank has it
	ranks[0].handle([]kvevents.Event{stored("a", "", 1), stored("b", "a", 2)})
	ranks[0].reset("test")
	check(1, 1)
	ranks[1].handle([]kvevents.Event{{Kind: kvevents.Cleared}})
	check(1, 0)
	ranks[1].reset("")
	check(0, 0)
	if len(w.copies) != 0 {
		t.Errorf("%d blocks are counted", len(w.copies))
	}
	for _, bad := range []Worker{
		{Ranks: -1}, {Ranks: 2}, {Events: "http", Ranks: 2}, {Events: "http", Replay: "tcp://h:1"}, {Events: "tcp://h:65535", Ranks: 2},
		{Events: "tcp://h:1", Replay: "tcp://h:65535", Ranks: 2}, {Events: "tcp://h:5557", Ranks: maxRanks + 1},
	} {
		if err := checkEvents(&bad); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
	if ok := (Worker{Events: "tcp://h:5557", Ranks: 4}); checkEvents(&ok) != nil || ok.Replay != "" {
		t.Errorf("%+v", ok)
	}
}
