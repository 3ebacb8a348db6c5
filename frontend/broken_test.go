package frontend

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"baton/wire"
)

// A client whose body does not come, or is no HTTP, is not told that all went well: it may still listen.
func TestBrokenBodies(t *testing.T) {
	s := httptest.NewServer(newTestServer(t, newToyBackend(), nil).Handler())
	defer s.Close()
	for _, c := range []struct{ name, request, want string }{
		{"bad chunks", "Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "400"},
		{"a cut in a chunk", "Transfer-Encoding: chunked\r\n\r\n20\r\n{", ""},
		{"half closed", "Content-Length: 100\r\n\r\n{", ""},
		{"no JSON", "Content-Length: 1\r\n\r\n{", "400"},
	} {
		for _, path := range []string{completionPath, chatPath, "/tokenize"} {
			conn, err := net.Dial("tcp", s.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.WriteString(conn, "POST "+path+" HTTP/1.1\r\nHost: x\r\n"+c.request)
			if c.want == "" {
				_ = conn.(*net.TCPConn).CloseWrite()
			}
			res, err := http.ReadResponse(bufio.NewReader(conn), nil)
			switch {
			case err != nil && c.want != "":
				t.Errorf("%s, %s: %v", path, c.name, err)
			case err == nil && res.StatusCode != http.StatusBadRequest:
				t.Errorf("%s, %s: %s", path, c.name, res.Status)
			}
			conn.Close()
		}
	}
}

// Whoever names a request finds it by that name in the answer and in the log, if it can stand there.
func TestRequestID(t *testing.T) {
	var log bytes.Buffer
	s := newTestServer(t, newToyBackend(), func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	for id, kept := range map[string]bool{
		"4611686018427387905": true, "trace-7/a:b": true, "": false, "two words": false, "new\nline": false, "ä": false, strings.Repeat("x", 129): false,
	} {
		log.Reset()
		r := httptest.NewRequest("POST", completionPath, strings.NewReader(`{"model":"toy","prompt":"a","max_tokens":1}`))
		r.Header["X-Request-Id"] = []string{id}
		w := httptest.NewRecorder()
		s.Handler().ServeHTTP(w, r)
		got := w.Header().Get("X-Request-Id")
		if w.Code != http.StatusOK || (got == id) != kept || got == "" || !strings.Contains(log.String(), "id="+got+" ") {
			t.Errorf("%q: %d, called %q; %s", id, w.Code, got, log.String())
		}
	}
}

// What a generation leg is told must agree with itself: no more first tokens than the answer may have, no more cached tokens
// than the prompt has.
func TestGenerationLegAgrees(t *testing.T) {
	p, _ := legServer(t, wire.RolePrefill)
	d, _ := legServer(t, wire.RoleDecode)
	b := body{"prompt": []int{5, 6, 7, 8}, "max_tokens": 4, "temperature": 0, "ignore_eos": true}
	a := contextLeg(t, p, completionPath, b, nil)
	g := a.goOn(completionPath, b)
	params := g["disaggregated_params"].(body)
	first := params["first_gen_tokens"]
	params["first_gen_tokens"] = []int{1, 2, 3, 4, 5}
	if r := post(t, d.Handler(), completionPath, g.String()); r.status != http.StatusBadRequest || !strings.Contains(string(r.body), "disaggregated_params.first_gen_tokens has 5 tokens, and max_tokens is 4") {
		t.Errorf("%d %s", r.status, r.body)
	}
	params["first_gen_tokens"] = first
	params["ctx_usage"] = body{"prompt_tokens_details": body{"cached_tokens": 1000}}
	r := post(t, d.Handler(), completionPath, g.String())
	var got struct {
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.Unmarshal(r.body, &got); err != nil || r.status != http.StatusOK || got.Usage.Details.Cached != 4 {
		t.Errorf("%d %s, %v", r.status, r.body, err)
	}
}

// What all bodies hold is bounded, counted as they arrive, and given back; what does not fit may come again.
func TestBodiesTogether(t *testing.T) {
	s := newTestServer(t, newToyBackend(), func(c *Config) { c.Limits = Limits{MaxBody: 1 << 20, MaxBodies: 1 << 20} })
	h := httptest.NewServer(s.Handler())
	defer h.Close()
	hold := func(held int64) net.Conn {
		conn, err := net.Dial("tcp", h.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(conn, "POST "+completionPath+" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"+strings.Repeat(" ", 400_000))
		await(t, func() bool { return s.bodies.Load() == held })
		return conn
	}
	a, b := hold(400_000), hold(800_000)
	big := `{"model":"toy","prompt":"a","max_tokens":1,"user":"` + strings.Repeat("x", 300_000) + `"}`
	if r := post(t, s.Handler(), completionPath, big); r.status != http.StatusServiceUnavailable || !strings.Contains(string(r.body), "memory") {
		t.Errorf("%d %s", r.status, r.body)
	}
	a.Close()
	await(t, func() bool { return s.bodies.Load() == 400_000 })
	if r := post(t, s.Handler(), completionPath, big); r.status != http.StatusOK {
		t.Errorf("%d %s", r.status, r.body)
	}
	b.Close()
	await(t, func() bool { return s.bodies.Load() == 0 })
}

func await(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not in time")
		}
	}
}
