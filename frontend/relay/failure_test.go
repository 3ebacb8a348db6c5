package relay

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

const (
	simple   = `{"model":"toy","prompt":[1,2,3],"max_tokens":3}`
	streamed = `{"model":"toy","prompt":[1,2,3],"max_tokens":3,"stream":true}`
)

// wire is what a test reads of a leg's disaggregated_params.
func wireOf(t *testing.T, s seen) trtWire {
	t.Helper()
	var body struct {
		Params trtWire `json:"disaggregated_params"`
	}
	d := json.NewDecoder(strings.NewReader(s.body))
	d.UseNumber()
	if err := d.Decode(&body); err != nil {
		t.Fatalf("%v in %s", err, s.body)
	}
	return body.Params
}

// Behaviours 28, 34 and 57: what an engine says of a bad request reaches the client with its status and text, from
// either leg, and is not sent again.
func TestEngineRefusals(t *testing.T) {
	for _, kind := range kinds {
		for _, leg := range []string{"prefill", "decode"} {
			t.Run(kind+"/"+leg, func(t *testing.T) {
				r := newRelay(t, kind, nil)
				f := map[string]*fake{"prefill": r.prefill, "decode": r.decode}[leg]
				const text = `{"error":"context length exceeded: 40 of 32"}`
				f.set(func() {
					f.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
						w.Header().Set("Content-Type", "application/problem+json")
						w.WriteHeader(400)
						io.WriteString(w, text)
						return true
					}
				})
				for _, body := range []string{simple, streamed} {
					before := len(f.requests())
					got := r.post(completionsPath, body)
					if got.status != 400 || got.body != text || got.header.Get("Content-Type") != "application/problem+json" {
						t.Errorf("%+v", got)
					}
					if n := len(f.requests()) - before; n != 1 {
						t.Errorf("sent %d times", n)
					}
				}
				r.await(func() bool { return r.metric("worker_requests") == 0 })
			})
		}
	}
	r := newRelay(t, "trtllm", nil)
	if got := r.post(chatPath, `{"model":"toy","messages":[],"nonsense":1}`); got.status != 400 || !strings.Contains(got.body, "nonsense") {
		t.Errorf("an unknown field: %+v", got)
	}
}

// Behaviour 35: a 5xx and a reset are tried again under a new id, and the decode leg has the id of the try that went well.
func TestRetries(t *testing.T) {
	fail := map[string]func(w http.ResponseWriter){
		"500": func(w http.ResponseWriter) { w.WriteHeader(500) },
		"503": func(w http.ResponseWriter) { w.WriteHeader(503) },
		"reset": func(w http.ResponseWriter) {
			c, _, _ := http.NewResponseController(w).Hijack()
			c.(*net.TCPConn).SetLinger(0)
			c.Close()
		},
		"half an answer": func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "1000")
			io.WriteString(w, `{"choices":`)
			panic(http.ErrAbortHandler)
		},
		"no JSON": func(w http.ResponseWriter) { io.WriteString(w, "<html>") },
	}
	for name, how := range fail {
		for _, leg := range []string{"prefill", "decode"} {
			t.Run(name+"/"+leg, func(t *testing.T) {
				r := newRelay(t, "trtllm", nil)
				f := map[string]*fake{"prefill": r.prefill, "decode": r.decode}[leg]
				f.set(func() {
					f.before = func(n int, w http.ResponseWriter, _ *http.Request) bool {
						if n == 1 {
							how(w)
						}
						return n == 1
					}
				})
				got := r.read(r.post(completionsPath, simple))
				if want := expected([]int{1, 2, 3}, 3); !slices.Equal(got.Choices[0].TokenIDs, want) {
					t.Errorf("%v, want %v", got.Choices[0].TokenIDs, want)
				}
				p, d := r.prefill.requests(), r.decode.requests()
				if len(p) != 2 || len(d) != map[string]int{"prefill": 1, "decode": 2}[leg] {
					t.Fatalf("%d prefill and %d decode legs", len(p), len(d))
				}
				first, second := wireOf(t, p[0]), wireOf(t, p[1])
				if first.ID == second.ID || wireOf(t, d[len(d)-1]).ID != second.ID {
					t.Errorf("ids %s, %s, decode %s", first.ID, second.ID, wireOf(t, d[len(d)-1]).ID)
				}
				if r.metric("retries_total") != 1 {
					t.Errorf("%v retries are counted", r.metric("retries_total"))
				}
			})
		}
	}
}

// An engine that fails every time: 500, which clients repeat a few times only; one that says 503: 503.
func TestLastingFailures(t *testing.T) {
	for status, want := range map[int]int{500: 500, 502: 500, 503: 503} {
		r := newRelay(t, "vllm", func(c *Config) { c.MaxRetries = 1 })
		r.prefill.set(func() {
			r.prefill.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
				w.WriteHeader(status)
				io.WriteString(w, "the GPU is on fire")
				return true
			}
		})
		got := r.post(completionsPath, simple)
		if got.status != want || !strings.Contains(got.body, "the GPU is on fire") {
			t.Errorf("%d became %d: %s", status, got.status, got.body)
		}
		if n := len(r.prefill.requests()); n != 2 {
			t.Errorf("sent %d times, want 2", n)
		}
		if (got.header.Get("Retry-After") != "") != (want == 503) {
			t.Errorf("%d has Retry-After %q", want, got.header.Get("Retry-After"))
		}
	}
}

// Another worker gets what one could not do, and the one that fails is left alone after a while.
func TestFailover(t *testing.T) {
	bad, good := newFake(t, "vllm", nil), newFake(t, "vllm", nil)
	decode := newFake(t, "vllm", good)
	decode.more = []*fake{bad}
	bad.set(func() {
		bad.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(500)
			return true
		}
	})
	r := relayTo(t, []*fake{bad, good}, []*fake{decode}, func(c *Config) { c.PrefillRouter = "round_robin" })
	r.await(func() bool { return strings.Contains(r.get("/health").body, `"prefill":"2 of 2"`) })
	for range 10 {
		r.read(r.post(completionsPath, simple))
	}
	if n := len(bad.requests()); n < breakerFailures || n > breakerFailures+2 { // a slow machine lives to see trials
		t.Errorf("the failing worker got %d requests, want %d", n, breakerFailures)
	}
	if got := r.get("/health").body; !strings.Contains(got, `"prefill":"1 of 2"`) {
		t.Error(got)
	}
	if got := r.metric("breaker_open"); got != 1 {
		t.Errorf("breaker_open is %v", got)
	}
	bad.set(func() { bad.before = nil }) // once its pause is over it is tried again
	r.await(func() bool {
		r.post(completionsPath, simple)
		return r.metric("breaker_open") == 0
	})
}

// Behaviour 36: nothing is sent again once a byte has reached the client; it learns that the answer is not whole.
func TestBrokenStream(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			r := newRelay(t, kind, nil)
			r.decode.set(func() {
				r.decode.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
					w.Header().Set("Content-Type", "text/event-stream")
					io.WriteString(w, "data: {\"first\":1}\n\n")
					w.(http.Flusher).Flush()
					panic(http.ErrAbortHandler)
				}
			})
			got := r.post(completionsPath, streamed)
			if got.status != 200 || !strings.HasPrefix(got.body, "data: {\"first\":1}\n\n") || !strings.Contains(got.body, `"code":"engine_lost"`) || strings.Contains(got.body, "[DONE]") {
				t.Errorf("%+v", got)
			}
			if n := len(r.decode.requests()); n != 1 {
				t.Errorf("sent %d times", n)
			}
			r.await(func() bool { return r.metric("worker_requests") == 0 })
		})
	}
	// Headers alone are not a byte of the answer.
	r := newRelay(t, "trtllm", nil)
	r.decode.set(func() {
		r.decode.before = func(n int, w http.ResponseWriter, _ *http.Request) bool {
			if n == 1 {
				w.Header().Set("Content-Type", "text/event-stream")
				w.(http.Flusher).Flush()
				panic(http.ErrAbortHandler)
			}
			return false
		}
	})
	if events := r.events(r.post(completionsPath, streamed)); len(events) != 3 {
		t.Errorf("%q", events)
	}
}

// Behaviour 46: a client that leaves ends both legs, and no load stays counted.
func TestCancel(t *testing.T) {
	for _, kind := range kinds {
		for _, leg := range []string{"prefill", "decode"} {
			t.Run(kind+"/"+leg, func(t *testing.T) {
				r := newRelay(t, kind, nil)
				var left atomic.Int32
				hang := func(_ int, w http.ResponseWriter, q *http.Request) bool {
					<-q.Context().Done()
					left.Add(1)
					return true
				}
				want := int32(1)
				f := r.prefill
				if leg == "decode" {
					f = r.decode
				}
				f.set(func() { f.before = hang })
				if kind == "mooncake" || kind == "sglang" {
					r.decode.set(func() { r.decode.before = hang })
					r.prefill.set(func() { r.prefill.before = hang })
					want = 2
				}
				ctx, cancel := context.WithCancel(t.Context())
				req, _ := http.NewRequestWithContext(ctx, "POST", r.URL+completionsPath, strings.NewReader(streamed))
				done := make(chan error, 1)
				go func() {
					res, err := http.DefaultClient.Do(req)
					if err == nil {
						res.Body.Close()
					}
					done <- err
				}()
				r.await(func() bool { return len(f.requests()) > 0 })
				cancel()
				if err := <-done; err == nil {
					t.Error("the request went well")
				}
				r.await(func() bool {
					return left.Load() >= want-boolInt(kind == "sglang" || kind == "mooncake") && r.metric("worker_requests") == 0 && r.metric("requests_in_flight") == 0
				})
				if r.metric("breaker_open") != 0 {
					t.Error("a client that leaves counts against the worker")
				}
			})
		}
	}
}

func boolInt(b bool) int32 {
	if b {
		return 1
	}
	return 0
}

// A client that leaves in the middle of a stream ends the decode leg.
func TestCancelStream(t *testing.T) {
	r := newRelay(t, "trtllm", nil)
	r.decode.gap = make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, "POST", r.URL+completionsPath, strings.NewReader(streamed))
	var res *http.Response
	first := make(chan error, 1)
	go func() {
		var err error
		res, err = http.DefaultClient.Do(req)
		first <- err
	}()
	r.decode.gap <- struct{}{}
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if line, err := bufio.NewReader(res.Body).ReadString('\n'); err != nil || !strings.Contains(line, "token_ids") {
		t.Fatalf("%q, %v", line, err)
	}
	cancel()
	r.await(func() bool { return r.metric("worker_requests") == 0 && r.metric("requests_in_flight") == 0 })
}

// When one of two legs at once fails, the other is ended and the request tried again.
func TestTogetherFails(t *testing.T) {
	for _, kind := range []string{"mooncake", "sglang"} {
		t.Run(kind, func(t *testing.T) {
			r := newRelay(t, kind, nil)
			r.prefill.set(func() {
				r.prefill.before = func(n int, w http.ResponseWriter, _ *http.Request) bool {
					if n == 1 {
						w.WriteHeader(500) // the decode worker waits for it
					}
					return n == 1
				}
			})
			got := r.read(r.post(completionsPath, simple))
			if want := expected([]int{1, 2, 3}, 3); !slices.Equal(got.Choices[0].TokenIDs, want) {
				t.Errorf("%v, want %v", got.Choices[0].TokenIDs, want)
			}
			if p, d := len(r.prefill.requests()), len(r.decode.requests()); p != 2 || d != 2 {
				t.Errorf("%d prefill and %d decode legs", p, d)
			}
			r.await(func() bool { return r.metric("worker_requests") == 0 })
			if got := r.metric("breaker_open"); got != 0 {
				t.Error("a breaker is open")
			}
		})
	}
}

// Behaviours 58 and 59: without a worker the answer is 503 with Retry-After after a wait, and well again once there is one;
// a client that repeats comes through.
func TestNoWorker(t *testing.T) {
	r := newRelay(t, "trtllm", func(c *Config) { c.WorkerWait = 50 * time.Millisecond })
	r.decode.set(func() { r.decode.healthy = false })
	r.s.fleet.all()[1].probeNow()
	r.await(func() bool { return r.get("/health").status == 503 })
	if got := r.get("/health"); !strings.Contains(got.body, r.decode.URL+" is not healthy: /health answers 503") {
		t.Error(got.body)
	}
	got := r.post(completionsPath, simple)
	if got.status != 503 || got.header.Get("Retry-After") == "" || !strings.Contains(got.body, "no decode worker: "+r.decode.URL) {
		t.Errorf("%+v", got)
	}
	r.decode.set(func() { r.decode.healthy = true })
	r.await(func() bool {
		got := r.post(completionsPath, simple)
		if got.status != 200 && got.status != 503 {
			t.Errorf("%+v", got)
		}
		return got.status == 200
	})
}

// A request that came while a worker was away waits for it.
func TestWaitForWorker(t *testing.T) {
	r := newRelay(t, "trtllm", nil)
	r.prefill.set(func() { r.prefill.healthy = false })
	r.s.fleet.all()[0].probeNow()
	r.await(func() bool { return r.get("/health").status == 503 })
	done := make(chan result, 1)
	go func() { done <- r.post(completionsPath, simple) }()
	r.await(func() bool { return r.metric("requests_in_flight") == 1 })
	r.prefill.set(func() { r.prefill.healthy = true })
	r.s.fleet.all()[0].probeNow()
	if got := <-done; got.status != 200 {
		t.Errorf("%+v", got)
	}
}

// Silent re-prefills are counted and said, and served or refused.
func TestSilentReprefill(t *testing.T) {
	for _, kind := range []string{"trtllm", "baton", "vllm"} {
		for _, policy := range []SilentPolicy{Serve, Refuse} {
			t.Run(kind+"/"+string(policy), func(t *testing.T) {
				var log strings.Builder
				r := newRelay(t, kind, func(c *Config) { c.SilentReprefill, c.Logger = policy, textLog(&log) })
				r.prefill.set(func() { r.prefill.noParams = true })
				got := r.post(completionsPath, simple)
				switch policy {
				case Serve:
					if c := r.read(got); !slices.Equal(c.Choices[0].TokenIDs, expected([]int{1, 2, 3}, 3)) {
						t.Errorf("%s", got.body)
					}
					if got.header.Get("X-Baton-Silent-Reprefill") != r.prefill.URL {
						t.Errorf("headers %v", got.header)
					}
				case Refuse:
					if got.status != 500 || !strings.Contains(got.body, "handed nothing over") || len(r.decode.requests()) != 0 {
						t.Errorf("%+v", got)
					}
				}
				if r.metric("silent_reprefills_total") != 1 {
					t.Error("it is not counted")
				}
				advice := map[string]string{"trtllm": "cache_transceiver_config", "baton": "--role prefill", "vllm": "--kv-transfer-config"}[kind]
				if r.Server.Close(); !strings.Contains(log.String(), advice) {
					t.Errorf("no word of %s in the log: %s", advice, log.String())
				}
			})
		}
	}
}

// Behaviour 33: a request that ends with its first token has no decode leg, and its stream has content and an end.
func TestEarlyFinish(t *testing.T) {
	for _, kind := range []string{"trtllm", "baton"} {
		r := newRelay(t, kind, nil)
		r.prefill.set(func() { r.prefill.finish = "stop" })
		first := fmt.Sprintf("t%d ", expected([]int{1, 2, 3}, 1)[0])
		got := r.post(completionsPath, simple)
		c := r.read(got)
		if c.Choices[0].Text != first || c.Choices[0].Params != nil || strings.Contains(got.body, "prompt_token_ids") || c.Usage.Completion != 1 {
			t.Errorf("%s", got.body)
		}
		events := r.events(r.post(completionsPath, strings.Replace(streamed, "{", `{"stream_options":{"include_usage":true},`, 1)))
		if len(events) != 2 || !strings.Contains(events[0], `"text":"`+first) || !strings.Contains(events[1], `"choices":[],"usage":{"prompt_tokens":3`) {
			t.Errorf("%q", events)
		}
		events = r.events(r.post(chatPath, `{"model":"toy","messages":[{"role":"user","content":"x"}],"stream":true}`))
		if len(events) != 1 || !strings.Contains(events[0], `"delta":{"role":"assistant","content":"t`) || !strings.Contains(events[0], `"object":"chat.completion.chunk"`) || strings.Contains(events[0], "usage") {
			t.Errorf("%q", events)
		}
		if n := len(r.decode.requests()); n != 0 {
			t.Errorf("%d decode legs", n)
		}
		if r.metric("early_finishes_total") != 3 {
			t.Error("they are not counted")
		}
	}
}

// A tool call that the prefill worker answers has an index in the stream.
func TestDelta(t *testing.T) {
	o, err := scanObject([]byte(`{"index":0,"message":{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f"}},{"id":"b"}]},"finish_reason":"tool_calls","disaggregated_params":{"x":1}}`))
	if err != nil {
		t.Fatal(err)
	}
	got, err := asDelta(&o)
	want := `{"index":0,"finish_reason":"tool_calls","delta":{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f"},"index":0},{"id":"b","index":1}]}}`
	if err != nil || string(got) != want {
		t.Errorf("%s, %v", got, err)
	}
}
