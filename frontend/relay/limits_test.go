package relay

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// Limits hold against clients.
func TestClientLimits(t *testing.T) {
	r := newRelay(t, "trtllm", func(c *Config) { c.Limits.MaxBody, c.Timeouts.Read = 1000, 300*time.Millisecond })
	long := `{"model":"toy","prompt":"` + strings.Repeat("x", 1000) + `"}`
	if got := r.post(completionsPath, long); got.status != 413 || !strings.Contains(got.body, "--max-body") {
		t.Errorf("%+v", got)
	}
	req, _ := http.NewRequest("POST", r.URL+completionsPath, io.MultiReader(strings.NewReader(long))) // of unknown length
	if got := r.do(req); got.status != 413 {
		t.Errorf("%+v", got)
	}
	for body, param := range map[string]string{
		``: "", `[]`: "", `{"prompt":1`: "", `{"prompt":"x","stream":1}`: "stream", `{"prompt":"x","stream":true,"stream_options":1}`: "stream_options",
		`{"model":"x"}`: "prompt", `{"prompt":null}`: "prompt", `{"prompt":"x","conversation_params":3}`: "conversation_params",
	} {
		want := `"param":null`
		if param != "" {
			want = `"param":"` + param + `"`
		}
		if got := r.post(completionsPath, body); got.status != 400 || !strings.Contains(got.body, want) {
			t.Errorf("%s: %+v", body, got)
		}
	}
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", completionsPath)
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(line, "408") {
		t.Errorf("a slow body: %q, %v", line, err)
	}
	if n := len(r.prefill.requests()); n != 0 {
		t.Errorf("the worker got %d requests", n)
	}
	if got := r.get("/nothing"); got.status != 404 || !strings.Contains(got.body, "unknown_url") {
		t.Errorf("%+v", got)
	}
}

// Limits hold against engines.
func TestEngineLimits(t *testing.T) {
	for name, answer := range map[string]func(w http.ResponseWriter){
		"a long answer":                func(w http.ResponseWriter) { w.Header().Set("Content-Length", "1000000000"); w.WriteHeader(200) },
		"a long answer without length": func(w http.ResponseWriter) { io.WriteString(w, strings.Repeat("x", 5000)) },
		"long headers":                 func(w http.ResponseWriter) { w.Header().Set("X-Long", strings.Repeat("x", maxHead)) },
		"no HTTP": func(w http.ResponseWriter) {
			c, _, _ := http.NewResponseController(w).Hijack()
			io.WriteString(c, "SSH-2.0-OpenSSH\r\n\r\n")
			c.Close()
		},
		"bad chunks": func(w http.ResponseWriter) {
			c, _, _ := http.NewResponseController(w).Hijack()
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n")
			c.Close()
		},
		"an empty stream": func(w http.ResponseWriter) { w.Header().Set("Content-Type", "text/event-stream") },
	} {
		for _, body := range []string{simple, streamed} {
			if body == simple && (name == "bad chunks" || name == "an empty stream") {
				continue
			}
			r := newRelay(t, "vllm", func(c *Config) { c.Limits.MaxAnswer, c.MaxRetries = 4000, -1 })
			r.decode.set(func() {
				r.decode.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool { answer(w); return true }
			})
			got := r.post(completionsPath, body)
			if got.status != 500 || !strings.Contains(got.body, "the decode worker "+r.decode.URL+" failed") {
				t.Errorf("%s: %+v", name, got)
			}
			r.await(func() bool { return r.metric("worker_requests") == 0 })
		}
	}
}

// Timeouts end legs and streams that stall; nothing that took so long is repeated.
func TestTimeouts(t *testing.T) {
	r := newRelay(t, "vllm", func(c *Config) { c.Timeouts.Leg, c.Timeouts.Stream = 100*time.Millisecond, 100*time.Millisecond })
	r.decode.set(func() {
		r.decode.before = func(_ int, w http.ResponseWriter, q *http.Request) bool { <-q.Context().Done(); return true }
	})
	if got := r.post(completionsPath, simple); got.status != 500 || !strings.Contains(got.body, "engine_timeout") || len(r.decode.requests()) != 1 {
		t.Errorf("%+v", got)
	}
	r.decode.set(func() {
		r.decode.before = func(_ int, w http.ResponseWriter, q *http.Request) bool {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "data: {}\n\n")
			w.(http.Flusher).Flush()
			<-q.Context().Done()
			return true
		}
	})
	if got := r.post(completionsPath, streamed); got.status != 200 || !strings.Contains(got.body, "engine_timeout") {
		t.Errorf("%+v", got)
	}
}

// Interim answers and bodies that end with the connection are HTTP as well.
func TestOddAnswers(t *testing.T) {
	for _, head := range []string{
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n",
		"HTTP/1.0 200 OK\r\nContent-Type: Text/Event-Stream ; charset=utf-8\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 24\r\n\r\n",
	} {
		r := newRelay(t, "vllm", nil)
		r.decode.set(func() {
			r.decode.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
				c, _, _ := http.NewResponseController(w).Hijack()
				io.WriteString(c, head+"data: {}\n\ndata: [DONE]\n\n")
				c.Close()
				return true
			}
		})
		if events := r.events(r.post(completionsPath, streamed)); len(events) != 1 {
			t.Errorf("%q: %q", head, events)
		}
	}
}

// A connection that the engine closed while it was idle costs nothing but another one.
func TestIdleConnections(t *testing.T) {
	r := newRelay(t, "trtllm", func(c *Config) { c.Timeouts.Idle = time.Minute })
	for range 3 {
		r.read(r.post(completionsPath, simple))
		r.prefill.CloseClientConnections()
		r.decode.CloseClientConnections()
	}
	r.read(r.post(completionsPath, simple))
	if p, d := len(r.prefill.requests()), len(r.decode.requests()); p != 4 || d != 4 || r.metric("retries_total") != 0 {
		t.Errorf("%d prefill and %d decode legs, %v retries", p, d, r.metric("retries_total"))
	}
	e := r.s.fleet.all()[0].endpoint
	idle := func() int {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.idle)
	}
	if n := idle(); n != 1 {
		t.Errorf("%d idle connections after four requests in turn", n)
	}
	e.expire(time.Now().Add(2 * time.Minute))
	if n := idle(); n != 0 {
		t.Errorf("%d idle connections after they have expired", n)
	}
}

// Keys: clients', engines' and those of who may change the pools.
func TestKeys(t *testing.T) {
	r := newRelay(t, "trtllm", func(c *Config) {
		has := func(key string) func(*http.Request) bool {
			return func(r *http.Request) bool { return r.Header.Get("Authorization") == "Bearer "+key }
		}
		c.Authorize, c.AuthorizeAdmin, c.EngineKey = has("client"), has("admin"), "engine"
	})
	for _, path := range []string{completionsPath, "/tokenize"} {
		if got := r.post(path, simple); got.status != 401 || got.header.Get("WWW-Authenticate") == "" {
			t.Errorf("%s: %+v", path, got)
		}
	}
	r.read(r.post(completionsPath, simple, "Authorization: Bearer client"))
	for _, f := range []*fake{r.prefill, r.decode} {
		if got := f.last().header.Get("Authorization"); got != "Bearer engine" {
			t.Errorf("an engine got %q", got)
		}
	}
	if got := r.post("/workers", `{}`, "Authorization: Bearer client"); got.status != 401 {
		t.Errorf("%+v", got)
	}
	if got := r.post("/workers", `{}`, "Authorization: Bearer admin"); got.status != 400 {
		t.Errorf("%+v", got)
	}
	r = newRelay(t, "trtllm", nil)
	r.read(r.post(completionsPath, simple, "Authorization: Bearer own", "Traceparent: 00-1-2-01"))
	if got := r.decode.last().header; got.Get("Authorization") != "Bearer own" || got.Get("Traceparent") != "00-1-2-01" {
		t.Errorf("the client's headers: %v", got)
	}
}

// Other endpoints of engines are to be had as well.
func TestPassedEndpoints(t *testing.T) {
	r := newRelay(t, "trtllm", nil)
	if got := r.get("/v1/models"); got.status != 200 || !strings.Contains(got.body, "tensorrt_llm") {
		t.Errorf("%+v", got)
	}
	if got := r.post("/tokenize", `{"prompt":"x"}`); got.status != 404 { // as the engine says
		t.Errorf("%+v", got)
	}
}

// A relay that is told to stop ends what runs, refuses what comes, and says so; a client that repeats finds its successor
// at the same address (behaviour 59).
func TestStop(t *testing.T) {
	prefill := newFake(t, "trtllm", nil)
	decode := newFake(t, "trtllm", prefill)
	decode.gap = make(chan struct{})
	config := Config{Prefill: []Worker{prefill.worker()}, Decode: []Worker{decode.worker()}}
	start := func(addr string) (at string, stop func() error) {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		s, err := New(config)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx, l) }()
		return l.Addr().String(), func() error { cancel(); return <-done }
	}
	at, stop := start("127.0.0.1:0")
	r := &relayed{t: t}
	post := func() result {
		req, _ := http.NewRequest("POST", "http://"+at+completionsPath, strings.NewReader(streamed))
		return r.do(req)
	}
	answers := make(chan result, 1)
	go func() { answers <- post() }()
	decode.gap <- struct{}{}
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	health := func() string {
		res, err := http.Get("http://" + at + "/health")
		if err != nil {
			return err.Error()
		}
		defer res.Body.Close()
		body, _ := io.ReadAll(res.Body)
		return string(body)
	}
	for end := time.Now().Add(5 * time.Second); !strings.Contains(health(), "the relay is shutting down"); {
		if time.Now().After(end) {
			t.Fatal("it does not say that it is shutting down")
		}
	}
	if got := post(); got.status != 503 || got.header.Get("Retry-After") == "" {
		t.Errorf("a request that comes late: %+v", got)
	}
	close(decode.gap)
	if events := r.events(<-answers); len(events) != 3 {
		t.Errorf("%q", events)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections() // to the old one
	_, stop = start(at)
	if got := post(); got.status != 200 {
		t.Errorf("the successor: %+v", got)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// Workers may be called by https.
func TestTLSWorkers(t *testing.T) {
	roots := x509.NewCertPool()
	secure := func(f *fake) *httptest.Server {
		s := httptest.NewUnstartedServer(f)
		s.Config.ErrorLog = log.New(io.Discard, "", 0) // of a handshake that is to fail
		s.StartTLS()
		t.Cleanup(s.Close)
		roots.AddCert(s.Certificate())
		return s
	}
	prefill := newFake(t, "trtllm", nil)
	decode := newFake(t, "trtllm", prefill)
	p, d := secure(prefill), secure(decode)
	r := relayTo(t, nil, nil, func(c *Config) {
		c.Prefill, c.Decode, c.TLS = []Worker{{URL: p.URL}}, []Worker{{URL: d.URL}}, &tls.Config{RootCAs: roots}
	})
	for range 2 {
		r.read(r.post(completionsPath, simple))
		if events := r.events(r.post(completionsPath, streamed)); len(events) != 3 {
			t.Errorf("%q", events)
		}
	}
	r = &relayed{t: t}
	var err error
	if r.s, err = New(Config{Decode: []Worker{{URL: d.URL}}}); err != nil {
		t.Fatal(err)
	}
	r.Server = httptest.NewServer(r.s.Handler())
	t.Cleanup(func() {
		r.Server.Close()
		r.s.Close()
	})
	r.await(func() bool { return strings.Contains(r.get("/health").body, "certificate") })
}
