package relay

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// A call that is refused changes nothing, and one for the other leg is not.
func TestRefusedWorkersChangeNothing(t *testing.T) {
	r := newRelay(t, "trtllm", nil)
	before := r.get("/workers").body
	if got := r.post("/workers", fmt.Sprintf(`{"url":%q,"role":"both"}`, r.decode.URL)); got.status != http.StatusConflict || !strings.Contains(got.body, "decode worker already") {
		t.Errorf("%+v", got)
	}
	for _, body := range []string{
		`{"url":"http://10.255.255.1:8000","role":"decode"}`, `{"url":"http://example.com","role":"both"}`,
	} {
		if got := r.post("/workers", body); got.status != http.StatusBadRequest || !strings.Contains(got.body, "--insecure") {
			t.Errorf("%s: %+v", body, got)
		}
	}
	if after := r.get("/workers").body; after != before {
		t.Errorf("%s became %s", before, after)
	}
	if got := r.post("/workers", fmt.Sprintf(`{"url":%q,"role":"prefill"}`, r.decode.URL)); got.status != http.StatusAccepted {
		t.Errorf("%+v", got)
	}
	if after := r.get("/workers").body; !strings.Contains(after, `"roles":["prefill","decode"]`) {
		t.Error(after)
	}
}

// Workers of plain HTTP beyond this host take --insecure, wherever they are named.
func TestPlainWorkers(t *testing.T) {
	const far = "http://10.255.255.1:8000"
	if _, err := New(Config{Decode: []Worker{{URL: far}}}); err == nil || !strings.Contains(err.Error(), "--insecure") {
		t.Errorf("%v", err)
	}
	for _, c := range []Config{{Decode: []Worker{{URL: "https://10.255.255.1:8000"}}}, {Decode: []Worker{{URL: far}}, Insecure: true}, {Decode: []Worker{{URL: "http://[::1]:1"}, {URL: "http://localhost:1"}}}} {
		s, err := New(c)
		if err != nil {
			t.Errorf("%v: %v", c.Decode, err)
			continue
		}
		s.Close()
	}
}

// Without an admin key the pools are for this host's processes: not for what a proxy or a browser here is asked for by others.
func TestWhoMayChangeThePools(t *testing.T) {
	for _, c := range []struct {
		from, host, header string
		may                bool
	}{
		{"127.0.0.1:9", "127.0.0.1:8000", "", true},
		{"[::1]:9", "[::1]:8000", "", true},
		{"127.0.0.1:9", "localhost", "", true},
		{"127.0.0.1:9", "[::1]", "", true},
		{"10.0.0.9:9", "localhost:8000", "", false},
		{"127.0.0.1:9", "evil.example:8000", "", false}, // a name that was made to point here
		{"127.0.0.1:9", "10.0.0.1:8000", "", false},
		{"127.0.0.1:9", "", "", false},
		{"127.0.0.1:9", "localhost:8000", "Origin: http://evil.example", false},
		{"127.0.0.1:9", "localhost:8000", "Origin: null", false},
		{"127.0.0.1:9", "localhost:8000", "X-Forwarded-For: 10.0.0.9", false},
		{"127.0.0.1:9", "localhost:8000", "Forwarded: for=10.0.0.9", false},
		{"127.0.0.1:9", "localhost:8000", "Via: 1.1 x", false},
		{"127.0.0.1:9", "localhost:8000", "X-Request-Id: 1", true},
	} {
		for _, method := range []string{"GET", "POST", "DELETE"} {
			for _, key := range []bool{false, true} {
				s := &Server{fleet: newFleet(nil, nil)}
				if key {
					s.cfg.AuthorizeAdmin = func(*http.Request) bool { return true }
				}
				q := httptest.NewRequest(method, "/workers", strings.NewReader(`{}`))
				q.RemoteAddr, q.Host = c.from, c.host
				if name, value, ok := strings.Cut(c.header, ": "); ok {
					q.Header.Set(name, value)
				}
				got := httptest.NewRecorder()
				map[string]http.HandlerFunc{"GET": s.listWorkers, "POST": s.postWorker, "DELETE": s.deleteWorker}[method](got, q)
				if refused := got.Code == http.StatusForbidden; refused == (c.may || key) || refused && !strings.Contains(got.Body.String(), "--admin-key-file") {
					t.Errorf("%s %+v, key %t: %d %s", method, c, key, got.Code, got.Body)
				}
			}
		}
	}
}

// A worker that is named by its API's URL never joins, and says why.
func TestBaseURLsAreNotOfTheAPI(t *testing.T) {
	f := newFake(t, "plain", nil)
	s, err := New(Config{Decode: []Worker{{URL: f.URL + "/v1"}}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		state := s.fleet.snapshot(time.Now())[0].State
		if strings.Contains(state, "name it without /v1") {
			return
		}
		if time.Now().After(end) {
			t.Fatal(state)
		}
	}
}

// Errors of a configuration name its field, and a negative wait is none.
func TestConfigErrors(t *testing.T) {
	for field, c := range map[string]Config{
		"ShadowRate": {ShadowRate: 2}, "NodeID": {NodeID: Nodes}, "Timeouts.Leg": {Timeouts: Timeouts{Leg: -1}}, "Engine": {Engine: "x"},
		"Limits.MaxBodies": {Limits: Limits{MaxBodies: 1}}, "Decode": {Decode: []Worker{{URL: "http://127.0.0.1:1"}, {URL: "http://127.0.0.1:1"}}},
	} {
		var e *ConfigError
		if _, err := New(c); !errors.As(err, &e) || e.Field != field || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
	for wait, want := range map[time.Duration]time.Duration{0: 10 * time.Second, -1: 0, time.Second: time.Second} {
		c := Config{WorkerWait: wait}
		if err := c.setDefaults(); err != nil || c.WorkerWait != want {
			t.Errorf("%v: %v, %v", wait, c.WorkerWait, err)
		}
	}
}
