package relay

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// Behaviour 24, the other way round: minters of one node make the same ids, so relays of the same engines need nodes of
// their own.
func TestOneNodeTwice(t *testing.T) {
	frozen := time.Now()
	minter := func(node int) *Minter {
		m, err := NewMinter(node)
		if err != nil {
			t.Fatal(err)
		}
		m.now = func() time.Time { return frozen }
		return m
	}
	a, b, other := minter(7), minter(7), minter(8)
	for range 2000 {
		one, two, third := a.Mint(), b.Mint(), other.Mint()
		if one != two || one == third {
			t.Fatalf("node 7 makes %d and %d, node 8 makes %d", one, two, third)
		}
	}
}

// Behaviour 27: other endpoints are left as they are: the worker gets a body's bytes with their length, and its answer comes
// back with its status and kind.
func TestOtherPathsAreLeftAlone(t *testing.T) {
	var mu sync.Mutex
	var got []string
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			return
		}
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		got = append(got, fmt.Sprintf("%s %s %d %s", r.Method, r.URL.Path, r.ContentLength, body))
		mu.Unlock()
		w.Header().Set("Content-Type", "application/x-odd")
		w.WriteHeader(http.StatusTeapot)
		fmt.Fprintf(w, "answer to %s", r.URL.Path)
	}))
	t.Cleanup(worker.Close)
	r := relayTo(t, nil, nil, func(c *Config) { c.Engine, c.Decode = "plain", []Worker{{URL: worker.URL}} })
	const odd = ` { "return_token_ids":true,"disaggregated_params": {} , "x":"é" }`
	var want []string
	for _, path := range []string{"/tokenize", "/detokenize"} {
		answer := r.post(path, odd)
		if answer.status != http.StatusTeapot || answer.body != "answer to "+path || answer.header.Get("Content-Type") != "application/x-odd" {
			t.Errorf("%s: %+v", path, answer)
		}
		want = append(want, fmt.Sprintf("POST %s %d %s", path, len(odd), odd))
	}
	if answer := r.get("/v1/models"); answer.status != http.StatusTeapot || answer.body != "answer to /v1/models" {
		t.Errorf("%+v", answer)
	}
	want = append(want, "GET /v1/models 0 ")
	mu.Lock()
	defer mu.Unlock()
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("the worker got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// Behaviour 35: the id of the decode leg is the one that the prefill leg's answer has. A worker may have given it another
// than it was sent.
func TestDecodeLegHasTheAnswersID(t *testing.T) {
	const id = "9007199254740995"
	for _, kind := range []string{"trtllm", "baton"} {
		r := newRelay(t, kind, nil)
		r.prefill.set(func() {
			r.prefill.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
				r.prefill.set(func() { r.prefill.exported[id] = []int{1, 2, 3, 4} })
				fmt.Fprintf(w, `{"choices":[{"index":0,"text":"","finish_reason":"length","disaggregated_params":{"request_type":"context_only","first_gen_tokens":[4],`+
					`"first_gen_log_probs":[[{"token_id":4,"logprob":-0.5,"rank":1}]],"ctx_request_id":%s,"encoded_opaque_state":"c3RhdGU=","disagg_request_id":%s}}],`+
					`"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4},"prompt_token_ids":[1,2,3]}`, bigID, id)
				return true
			}
		})
		if got := r.post(completionsPath, simple); got.status != 200 {
			t.Fatalf("%s: %+v", kind, got)
		}
		if sent, used := wireOf(t, r.prefill.last()).ID.String(), wireOf(t, r.decode.last()).ID.String(); sent == id || used != id {
			t.Errorf("%s: the prefill leg was sent %s and answered %s; the decode leg has %s", kind, sent, id, used)
		}
	}
}

// Behaviour 42: a conversation's id is the body's, or else the first header that is not blank, in this order, whatever the
// order and the case in which they come. What the engines are told is what counts.
func TestConversationIDsByPrecedence(t *testing.T) {
	const body = `"conversation_params":{"conversation_id":" from the body "},`
	all := []string{"x-multi-turn-session-id: fourth", "x-session-affinity: third", "x-correlation-id: second", "X-SESSION-ID: first"}
	blank := []string{"X-Session-Id:  \t", "X-Correlation-Id: ", "X-Session-Affinity:   "}
	for _, c := range []struct {
		body    string
		headers []string
		want    string
	}{
		{body, all, "from the body"},
		{"", all, "first"},
		{"", all[:3], "second"},
		{"", all[:2], "third"},
		{"", all[:1], "fourth"},
		{"", append(blank[:1:1], all[:3]...), "second"},
		{"", append(blank[:2:2], all[:2]...), "third"},
		{"", append(blank[:3:3], all[:1]...), "fourth"},
		{"", []string{"X-Session-Id:   padded\t"}, "padded"},
		{"", blank, ""},
		{`"conversation_params":null,`, all, "first"},
	} {
		r := newRelay(t, "trtllm", nil)
		r.read(r.post(chatPath, `{"model":"toy",`+c.body+`"messages":["x"]}`, c.headers...))
		for _, f := range []*fake{r.prefill, r.decode} {
			var sent struct {
				Params *struct {
					ID string `json:"conversation_id"`
				} `json:"conversation_params"`
			}
			if err := json.Unmarshal([]byte(f.last().body), &sent); err != nil {
				t.Fatal(err)
			}
			got := ""
			if sent.Params != nil {
				got = strings.TrimSpace(sent.Params.ID)
			}
			if got != c.want {
				t.Errorf("%q %q: an engine is told %q, want %q", c.body, c.headers, got, c.want)
			}
		}
		if pinned := strings.Contains(strings.Join(r.labels("routes_total"), " "), "conversation"); pinned {
			t.Errorf("%q: known at its first turn", c.headers)
		}
		// The pin is of the same id: the next turn names it in the body.
		if c.want != "" {
			r.read(r.post(chatPath, `{"model":"toy","conversation_params":{"conversation_id":"`+c.want+`"},"messages":["x"]}`))
			if pinned := strings.Contains(strings.Join(r.labels("routes_total"), " "), "conversation"); !pinned {
				t.Errorf("%q %q: %q is not pinned", c.body, c.headers, c.want)
			}
		}
	}
}

// labels are the values of the labels of a metric's series.
func (r *relayed) labels(name string) (list []string) {
	r.t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "baton_relay_"+name {
			for _, m := range f.Metric {
				for _, l := range m.Label {
					list = append(list, l.GetValue())
				}
			}
		}
	}
	return list
}

// Behaviour 46: what a worker is counted to have, requests and bytes of text, is nothing again after a success, a refusal, an
// error that lasts, a broken stream, a client that leaves, and a body that is none.
func TestLoadReturnsToNothing(t *testing.T) {
	for _, kind := range kinds {
		r := newRelay(t, kind, func(c *Config) { c.MaxRetries = -1 })
		settle := func(name string) {
			t.Helper()
			r.await(func() bool { return r.metric("requests_in_flight") == 0 && r.metric("worker_requests") == 0 })
			r.s.fleet.mu.Lock()
			defer r.s.fleet.mu.Unlock()
			for _, w := range r.s.fleet.workers {
				if w.content != 0 || w.requests != [2]int{} {
					t.Errorf("%s, %s: %v has %d bytes in %v requests", kind, name, w.roles, w.content, w.requests)
				}
			}
		}
		answer := func(f func(w http.ResponseWriter, q *http.Request)) func() {
			return func() {
				r.decode.before = func(_ int, w http.ResponseWriter, q *http.Request) bool {
					if f != nil {
						f(w, q)
					}
					return f != nil
				}
			}
		}
		long := strings.Replace(simple, "{", `{"user":"`+strings.Repeat("u", 5000)+`",`, 1)
		r.read(r.post(completionsPath, long))
		settle("a success")
		r.post(completionsPath, `{"prompt":`)
		settle("no JSON")
		for name, f := range map[string]func(w http.ResponseWriter, q *http.Request){
			"refused": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(400) },
			"failed":  func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) },
			"broken": func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				io.WriteString(w, "data: {}\n\n")
				w.(http.Flusher).Flush()
				panic(http.ErrAbortHandler)
			},
		} {
			r.decode.set(answer(f))
			r.post(completionsPath, streamed)
			settle(name)
		}
		hung := make(chan struct{}, 1)
		r.decode.set(answer(func(_ http.ResponseWriter, q *http.Request) { hung <- struct{}{}; <-q.Context().Done() }))
		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-hung; cancel() }()
		req, _ := http.NewRequestWithContext(ctx, "POST", r.URL+completionsPath, strings.NewReader(simple))
		if res, err := http.DefaultClient.Do(req); err == nil {
			res.Body.Close()
			t.Errorf("%s: an answer of %d", kind, res.StatusCode)
		}
		settle("a client that leaves")
	}
}

// Behaviour 46, of kv_cache_aware: what a worker was expected to hold of a prompt counts while its request runs, not
// afterwards, if the worker never says that it holds it.
func TestExpectationsEndWithTheirRequests(t *testing.T) {
	prefill := []*fake{newFake(t, "trtllm", nil), newFake(t, "trtllm", nil)}
	decode := newFake(t, "trtllm", prefill[0])
	decode.more = prefill[1:]
	r := relayTo(t, prefill, []*fake{decode}, func(c *Config) {
		c.PrefillRouter, c.MaxRetries = "kv_cache_aware", -1
		for i := range c.Prefill {
			c.Prefill[i].Events = "http"
		}
	})
	r.await(func() bool { return strings.Contains(r.get("/health").body, `"prefill":"2 of 2"`) })
	_, other := idPrompt(9, 1)
	for _, f := range prefill { // so that all are known to report
		done := make(chan struct{})
		f.set(func() { f.events, f.told = append(f.events, "["+cacheEvent(1, other)+"]", "[]"), done })
		<-done
	}
	body, _ := idPrompt(1, 10)
	for _, status := range []int{200, 400, 500} {
		decode.set(func() {
			decode.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
				if status != 200 {
					w.WriteHeader(status)
				}
				return status != 200
			}
		})
		for range 3 {
			if got := r.post(completionsPath, body); got.status != status {
				t.Errorf("%+v, want %d", got, status)
			}
		}
		if n := r.metric("predicted_cached_tokens_total"); n != 0 {
			t.Fatalf("after requests that ended with %d, %v tokens are thought to be held", status, n)
		}
	}
}
