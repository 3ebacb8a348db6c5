package frontend

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"baton/wire"
)

// TestConcurrentStreams runs many streams over TCP, a third of which their clients leave midway. Those
// that stay get what they get alone, and nothing is left upstream.
func TestConcurrentStreams(t *testing.T) {
	b := newToyBackend()
	s := newTestServer(t, b, nil)
	ts := listen(t, s)
	request := func(i int) string {
		return fmt.Sprintf(`{"prompt":"p%d","seed":%d,"max_tokens":%d,"ignore_eos":true,"n":%d,"logprobs":1,"return_token_ids":true,"stream":true`, i, i, 8+i, 1+i%3)
	}
	var wg sync.WaitGroup
	for i := range 33 {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			resp, err := send(ctx, t, ts, completionPath, request(i)+`}`)
			if err != nil {
				t.Error(err)
				return
			}
			if i%3 == 0 {
				_, _ = bufio.NewReader(resp.Body).ReadString('\n')
				cancel()
				_ = resp.Body.Close()
				return
			}
			got := assemble(t, reply{resp.StatusCode, resp.Header, readAll(t, resp)})
			alone := post(t, newTestServer(t, newToyBackend(), nil).Handler(), completionPath, strings.Replace(request(i), `,"stream":true`, "", 1)+`}`).decode(t)
			if dump(got.Choices) != dump(alone.Choices) {
				t.Errorf("stream %d differs from the request alone", i)
			}
		})
	}
	wg.Wait()
	if err := s.Shutdown(t.Context()); err != nil { // waits for the handlers of clients that left
		t.Error(err)
	}
	b.idle(t)
}

// TestClientLeaves: a request whose client goes away is cancelled upstream, streaming or not.
func TestClientLeaves(t *testing.T) {
	for _, stream := range []bool{true, false} {
		b := newToyBackend()
		b.stall, b.endless = 3, true
		s := newTestServer(t, b, nil)
		ts := listen(t, s)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			resp, err := send(ctx, t, ts, chatPath, fmt.Sprintf(`{"messages":[{"role":"user","content":"a"}],"n":2,"stream":%v}`, stream))
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
			done <- err
		}()
		for len(b.submitted()) < 2 {
			time.Sleep(time.Millisecond)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("the client got %v", err)
		}
		if err := s.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		b.idle(t)
	}
}

func TestBackendErrors(t *testing.T) {
	tests := []struct {
		err                     error
		status                  int
		kind, param, code, says string
		retry                   bool
	}{
		{&RequestError{Code: wire.CodeInvalid, Field: "prompt", Message: "too long"}, 400, typeInvalid, "prompt", "invalid_request", "too long", false},
		{&RequestError{Code: wire.CodeUnavailable, Message: "no decode engine", Retryable: true}, 503, typeUnavailable, "", "unavailable", "no decode engine", true},
		{&RequestError{Code: wire.CodeEngineLost, Message: "the engine died"}, 503, typeUnavailable, "", "engine_lost", "the engine died", true},
		{&RequestError{Code: wire.CodeInternal, Message: "it broke", Retryable: true}, 500, typeServer, "", "internal", "it broke", true},
		{fmt.Errorf("wrapped: %w", &RequestError{Code: wire.CodeUnavailable, Message: "queue is full"}), 503, typeUnavailable, "", "unavailable", "queue is full", true},
		{fmt.Errorf("dial %T: broken", s0), 500, typeServer, "", "internal", "log says more", false},
		{io.EOF, 500, typeServer, "", "internal", "log says more", false},
	}
	for _, tt := range tests {
		for _, after := range []int{0, 4} { // at submission, or when tokens have been sent
			for _, stream := range []bool{false, true} {
				b := newToyBackend()
				b.endless = true
				b.fail = func(_ *wire.SubmitRequest, made int) error {
					if made >= after {
						return tt.err
					}
					return nil
				}
				s := newTestServer(t, b, nil)
				r := post(t, s.Handler(), completionPath, fmt.Sprintf(`{"prompt":"a","n":2,"max_tokens":50,"stream":%v}`, stream))
				name := fmt.Sprintf("%v after %d tokens, stream %v", tt.err, after, stream)
				b.idle(t)
				body := r.body
				if stream && after > 0 {
					list, done := events(t, r.body)
					if r.status != http.StatusOK || done || len(list) < 2 {
						t.Fatalf("%s: status %d, done %v, %s", name, r.status, done, r.body)
					}
					body = list[len(list)-1]
				} else if r.status != tt.status || (r.header.Get("Retry-After") != "") != tt.retry {
					t.Errorf("%s: status %d, headers %v", name, r.status, r.header)
				}
				e := reply{r.status, r.header, body}.failure(t)
				if e.Type != tt.kind || deref(e.Param) != tt.param || deref(e.Code) != tt.code || !strings.Contains(e.Message, tt.says) || strings.Contains(e.Message, "Server") {
					t.Errorf("%s: %s", name, body)
				}
			}
		}
	}
}

// TestBlame: in chat, what the backend calls the prompt is the messages.
func TestBlame(t *testing.T) {
	b := newToyBackend()
	b.maxLen = 1
	s := newTestServer(t, b, nil)
	for path, want := range map[string]string{chatPath: "messages", completionPath: "prompt"} {
		if e := post(t, s.Handler(), path, withField(path, `"n":1`)).failure(t); deref(e.Param) != want {
			t.Errorf("%s: param %q", path, deref(e.Param))
		}
	}
}

// leaky is a backend that loses a token on the way.
type leaky struct{ *toyBackend }

type leakyStream struct{ Stream }

func (b leaky) Submit(ctx context.Context, req *wire.SubmitRequest) (Stream, error) {
	s, err := b.toyBackend.Submit(ctx, req)
	return leakyStream{s}, err
}

func (s leakyStream) Next(ctx context.Context) (wire.Result, error) {
	res, err := s.Stream.Next(ctx)
	if res.Start > 4 {
		res.Start++
	}
	return res, err
}

// TestLostTokens: an answer with a hole in it is an error, not an answer.
func TestLostTokens(t *testing.T) {
	b := newToyBackend()
	s := newTestServer(t, leaky{b}, nil)
	if r := post(t, s.Handler(), completionPath, `{"prompt":"a","max_tokens":30,"ignore_eos":true}`); r.status != 500 {
		t.Errorf("%d %s", r.status, r.body)
	}
	b.idle(t)
}

var s0 *Server // for its type's name

// panicky is a tokenizer with a defect.
type panicky struct{ toyTokenizer }

func (panicky) Encode(string, bool) ([]int32, error) { panic("defect") }

func TestPanicIsOneRequestsProblem(t *testing.T) {
	s := newTestServer(t, newToyBackend(), func(c *Config) { c.Tokenizer = panicky{} })
	r := post(t, s.Handler(), completionPath, `{"prompt":"a"}`)
	if e := r.failure(t); r.status != 500 || strings.Contains(e.Message, "defect") {
		t.Errorf("status %d: %s", r.status, r.body)
	}
	post(t, s.Handler(), completionPath, `{"prompt":[1]}`).decode(t)
	if err := s.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestHealth(t *testing.T) {
	b := newToyBackend()
	s := newTestServer(t, b, nil)
	b.status = wire.StatusReply{Reason: "no decode engine is registered", Engines: []wire.EngineStatus{{Role: "prefill"}, {Role: "decode", Draining: true}}}
	r := do(t, s.Handler(), "GET", "/health", "")
	if want := `{"status":"unavailable","reason":"no decode engine is registered","engines":{"prefill":1}}`; r.status != 503 || string(r.body) != want {
		t.Errorf("%d %s", r.status, r.body)
	}
	s = newTestServer(t, lost{b}, nil)
	r = do(t, s.Handler(), "GET", "/health", "")
	if r.status != 503 || !strings.Contains(string(r.body), "does not answer") || strings.Contains(string(r.body), "secret") {
		t.Errorf("%d %s", r.status, r.body)
	}
}

// lost is a backend whose coordinator is gone.
type lost struct{ *toyBackend }

func (lost) Status(context.Context) (*wire.StatusReply, error) {
	return nil, errors.New("secret address refused")
}

// TestDrain: a server that stops lets running streams finish, and takes no new ones.
func TestDrain(t *testing.T) {
	gate := make(chan struct{})
	b := newToyBackend()
	b.endless = true
	b.fail = func(_ *wire.SubmitRequest, made int) error {
		if made > 0 {
			<-gate
		}
		return nil
	}
	s := newTestServer(t, b, nil)
	ctx, stop := context.WithCancel(t.Context())
	ln, served := run(t, s, ctx)
	resp := firstByte(t, ln)
	stop()
	for !s.isDraining() {
		time.Sleep(time.Millisecond)
	}
	if r := post(t, s.Handler(), completionPath, `{"prompt":"b"}`); r.status != 503 || deref(r.failure(t).Code) != "shutting_down" {
		t.Errorf("a new request got %d %s", r.status, r.body)
	}
	if r := do(t, s.Handler(), "GET", "/health", ""); r.status != 503 {
		t.Errorf("health is %d while shutting down", r.status)
	}
	close(gate)
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil || !strings.HasSuffix(string(body), "data: [DONE]\n\n") {
		t.Errorf("the running stream ended with %v: %s", err, body)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	b.idle(t)
}

// TestDrainDeadline: streams that do not finish in time are ended with an error.
func TestDrainDeadline(t *testing.T) {
	b := newToyBackend()
	b.stall, b.endless = 5, true
	s := newTestServer(t, b, func(c *Config) { c.DrainTimeout = 50 * time.Millisecond })
	ctx, stop := context.WithCancel(t.Context())
	ln, served := run(t, s, ctx)
	resp := firstByte(t, ln)
	stop()
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil || !strings.Contains(string(body), `"code":"shutting_down"`) || strings.Contains(string(body), "[DONE]") {
		t.Errorf("the stream ended with %v: %s", err, body)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	b.idle(t)
}

// TestIdleServerStopsAtOnce: connections without a request, used before or never, are not waited for.
func TestIdleServerStopsAtOnce(t *testing.T) {
	s := newTestServer(t, newToyBackend(), nil)
	ctx, stop := context.WithCancel(t.Context())
	ln, served := run(t, s, ctx)
	unused, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer unused.Close()
	var idle http.Transport
	defer idle.CloseIdleConnections()
	resp, err := (&http.Client{Transport: &idle}).Get("http://" + ln.Addr().String() + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	began := time.Now()
	stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 300*time.Millisecond {
		t.Errorf("it took %v", took)
	}
	if _, err := unused.Read(make([]byte, 1)); err == nil {
		t.Error("the unused connection is open")
	}
}

// run serves s on a loopback port until ctx ends.
func run(t *testing.T, s *Server, ctx context.Context) (net.Listener, <-chan error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Run(ctx, ln) }()
	return ln, served
}

// firstByte starts a stream and returns when it has begun.
func firstByte(t *testing.T, ln net.Listener) *http.Response {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post("http://"+ln.Addr().String()+completionPath, "application/json",
		strings.NewReader(`{"prompt":"a","stream":true,"max_tokens":20}`))
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// TestServeFails: a listener that breaks ends Run with an error.
func TestServeFails(t *testing.T) {
	s := newTestServer(t, newToyBackend(), nil)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = ln.Close()
	if err := s.Run(t.Context(), ln); err == nil {
		t.Error("no error")
	}
}

// TestSlowBody: a client that stops in the middle of its request is let go.
func TestSlowBody(t *testing.T) {
	s := newTestServer(t, newToyBackend(), func(c *Config) { c.ReadTimeout = 30 * time.Millisecond })
	ts := listen(t, s)
	conn, err := net.Dial("tcp", ts.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, _ = io.WriteString(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	if body := readAll(t, resp); resp.StatusCode != http.StatusRequestTimeout || !strings.Contains(string(body), "did not arrive") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

// TestReadDeadlineEndsWithTheBody: a stream may last longer than a client may take to send a request.
func TestReadDeadlineEndsWithTheBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newToyBackend()
		b.endless = true
		b.fail = func(*wire.SubmitRequest, int) error { time.Sleep(time.Second); return nil }
		s := newTestServer(t, b, func(c *Config) { c.ReadTimeout = 5 * time.Second; c.WriteTimeout = 3 * time.Second })
		client, server := net.Pipe()
		srv := &http.Server{Handler: s.Handler()}
		go func() { _ = srv.Serve(&oneConn{conn: server, closed: make(chan struct{})}) }()
		body := `{"prompt":"a","stream":true,"max_tokens":50}`
		go fmt.Fprintf(client, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		resp, err := http.ReadResponse(bufio.NewReader(client), nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := string(readAll(t, resp)); !strings.HasSuffix(got, "data: [DONE]\n\n") {
			t.Errorf("the stream ended with %q", got[max(0, len(got)-200):])
		}
		_ = client.Close()
		_ = srv.Close()
	})
}

// TestDeadlinesAreEachRequestsOwn: a connection may be used again long after an answer, and an answer may
// begin long after its request.
func TestDeadlinesAreEachRequestsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newToyBackend()
		b.fail = func(*wire.SubmitRequest, int) error {
			time.Sleep(10 * time.Second)
			return &RequestError{Code: wire.CodeUnavailable, Message: "nobody came"}
		}
		s := newTestServer(t, b, func(c *Config) { c.ReadTimeout, c.WriteTimeout = 2*time.Second, 2*time.Second })
		client, server := net.Pipe()
		srv := &http.Server{Handler: s.Handler()}
		go func() { _ = srv.Serve(&oneConn{conn: server, closed: make(chan struct{})}) }()
		body := `{"prompt":"a"}`
		completion := fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		in := bufio.NewReader(client)
		for i, request := range []string{completion, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n", completion, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"} {
			go func() { _, _ = io.WriteString(client, request) }()
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatalf("request %d: %v", i, err)
			}
			_ = readAll(t, resp)
			if want := 200 + (i+1)%2*303; resp.StatusCode != want {
				t.Errorf("request %d: status %d, want %d", i, resp.StatusCode, want)
			}
			time.Sleep(10 * time.Second)
		}
		_ = client.Close()
		_ = srv.Close()
	})
}

// oneConn is a listener with one connection.
type oneConn struct {
	conn   net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *oneConn) Accept() (net.Conn, error) {
	if c := l.conn; c != nil {
		l.conn = nil
		return c, nil
	}
	<-l.closed
	return nil, net.ErrClosed
}

func (l *oneConn) Close() error   { l.once.Do(func() { close(l.closed) }); return nil }
func (l *oneConn) Addr() net.Addr { return &net.TCPAddr{} }

// TestStalledReader: a client that reads nothing is let go, and its request is cancelled.
func TestStalledReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newToyBackend()
		b.endless = true
		s := newTestServer(t, b, func(c *Config) { c.WriteTimeout = time.Second })
		client, server := net.Pipe() // nothing is buffered
		srv := &http.Server{Handler: s.Handler()}
		go func() { _ = srv.Serve(&oneConn{conn: server, closed: make(chan struct{})}) }()
		body := `{"prompt":"a","stream":true,"max_tokens":50}`
		fmt.Fprintf(client, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		time.Sleep(10 * time.Second)
		if err := s.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		b.idle(t)
		_ = client.Close()
		_ = srv.Close()
	})
}

func TestMetrics(t *testing.T) {
	b := newToyBackend()
	s := newTestServer(t, b, nil)
	post(t, s.Handler(), completionPath, `{"prompt":"`+strings.Repeat("z", 39)+`","n":2,"max_tokens":10,"ignore_eos":true}`).decode(t)
	post(t, s.Handler(), completionPath, `{"prompt":"`+strings.Repeat("z", 39)+`","max_tokens":10,"ignore_eos":true}`).decode(t)
	post(t, s.Handler(), completionPath, `{}`)
	post(t, s.Handler(), "/nowhere", `{}`)
	text := string(do(t, s.Handler(), "GET", "/metrics", "").body)
	for _, want := range []string{
		`baton_http_requests_total{endpoint="/v1/completions",status="200"} 2`,
		`baton_http_requests_total{endpoint="/v1/completions",status="400"} 1`,
		`baton_http_requests_total{endpoint="other",status="404"} 1`,
		`baton_http_requests_in_flight{endpoint="/v1/completions"} 0`,
		`baton_prompt_tokens_total 80`,
		`baton_cached_prompt_tokens_total 32`,
		`baton_generation_tokens_total 30`,
		`baton_choices_finished_total{reason="length"} 3`,
		`baton_time_to_first_token_seconds_count 3`,
		`baton_inter_token_seconds_count 27`,
		`baton_request_seconds_count 2`,
		`baton_request_queue_seconds_count 3`,
		`baton_request_prefill_seconds_sum 0.75`,
		`baton_request_transfer_seconds_count 3`,
		`baton_request_handoff_seconds_count 3`,
		`baton_request_decode_seconds_sum 1.5`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
	if _, err := New(Config{Backend: b, Model: "again", Registry: s.cfg.Registry}); err == nil {
		t.Error("two servers share a registry")
	}
}

func TestConfigIsChecked(t *testing.T) {
	b := newToyBackend()
	for _, c := range []Config{
		{}, {Backend: b}, {Model: "m"},
		{Backend: b, Model: "m", Limits: Limits{MaxBody: -1}},
		{Backend: b, Model: "m", DrainTimeout: -1},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
}

// TestWithoutTokenizer: ids in, ids out.
func TestWithoutTokenizer(t *testing.T) {
	s := newTestServer(t, newToyBackend(), func(c *Config) { c.Tokenizer = nil })
	a := post(t, s.Handler(), completionPath, `{"prompt":[5,6],"max_tokens":3,"seed":1,"ignore_eos":true,"echo":true,"logprobs":1,"return_token_ids":true}`).decode(t)
	c := a.Choices[0]
	text := "token_id:5token_id:6"
	for _, id := range c.TokenIDs {
		text += fmt.Sprintf("token_id:%d", id)
	}
	if c.Text != text || strings.Join(c.Logprobs.Tokens, "") != text {
		t.Errorf("text %q, tokens %q, want %q", c.Text, c.Logprobs.Tokens, text)
	}
	for i, at := range c.Logprobs.TextOffset {
		if !strings.HasPrefix(c.Text[at:], c.Logprobs.Tokens[i]) {
			t.Errorf("token %d is not at %d", i, at)
		}
	}
	for path, body := range map[string]string{
		chatPath:       `{"messages":[{"role":"user","content":"a"}]}`,
		completionPath: `{"prompt":"a"}`,
		"/tokenize":    `{"prompt":"a"}`,
	} {
		if r := post(t, s.Handler(), path, body); r.status != 400 || !strings.Contains(r.failure(t).Message, "without a tokenizer") {
			t.Errorf("%s: %d %s", path, r.status, r.body)
		}
	}
	if r := post(t, s.Handler(), completionPath, `{"prompt":[1],"stop":"a"}`); r.status != 400 || deref(r.failure(t).Param) != "stop" {
		t.Errorf("stop: %d %s", r.status, r.body)
	}
}
