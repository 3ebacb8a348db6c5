package relay

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// gym repeats requests by NeMo-Gym's rules: without end after a refused or lost connection and after what says that a proxy
// is not ready, three times after 500, never otherwise. That an engine's context is full ends a rollout well.
type gym struct {
	t     *testing.T
	pause time.Duration
	tries map[int]int // by status; 0 is no answer
}

func (g *gym) ask(url, body string) (finish string) {
	g.t.Helper()
	g.tries = map[int]int{}
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(g.pause) {
		res, err := http.Post(url+chatPath, "application/json", strings.NewReader(body))
		if err != nil {
			g.tries[0]++
			continue
		}
		raw, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil {
			g.tries[0]++
			continue
		}
		g.tries[res.StatusCode]++
		switch res.StatusCode {
		case 429, 502, 503, 504, 520:
			continue
		case 500:
			if g.tries[500] < 3 {
				continue
			}
		case 400:
			if strings.Contains(string(raw), "context length") || strings.Contains(string(raw), "max_tokens") {
				return "length"
			}
		case 200:
			var a struct {
				Choices []struct {
					Finish string `json:"finish_reason"`
				}
			}
			if err := json.Unmarshal(raw, &a); err != nil || len(a.Choices) != 1 {
				g.t.Errorf("%v in %s", err, raw)
				return "nothing"
			}
			return a.Choices[0].Finish
		}
		return http.StatusText(res.StatusCode)
	}
	return "no end"
}

// Behaviours 57, 58 and 59, as a client of that kind meets them: what heals by itself is asked for until it has healed,
// what never will ends soon, and what the request is at fault for ends at once.
func TestGymClients(t *testing.T) {
	const body = `{"model":"toy","messages":["x"],"max_tokens":3}`
	g := &gym{t: t, pause: 5 * time.Millisecond}
	t.Run("an engine that always fails", func(t *testing.T) {
		r := newRelay(t, "trtllm", func(c *Config) { c.MaxRetries = -1 })
		r.decode.set(func() {
			r.decode.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(502); return true }
		})
		if got := g.ask(r.URL, body); got != "Internal Server Error" || g.tries[500] != 3 || len(g.tries) != 1 {
			t.Errorf("%s after %v", got, g.tries)
		}
		if n := len(r.decode.requests()); n != 3 {
			t.Errorf("the engine got %d requests", n)
		}
	})
	t.Run("a full context", func(t *testing.T) {
		r := newRelay(t, "baton", nil)
		r.prefill.set(func() {
			r.prefill.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
				w.WriteHeader(400)
				io.WriteString(w, `{"error":"context length exceeded: 40 of 32"}`)
				return true
			}
		})
		if got := g.ask(r.URL, body); got != "length" || g.tries[400] != 1 || len(g.tries) != 1 {
			t.Errorf("%s after %v", got, g.tries)
		}
	})
	t.Run("a status that is not to be repeated", func(t *testing.T) {
		r := newRelay(t, "vllm", nil)
		r.prefill.set(func() {
			r.prefill.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(409); return true }
		})
		if got := g.ask(r.URL, body); got != "Conflict" || g.tries[409] != 1 || len(g.tries) != 1 || len(r.prefill.requests()) != 1 {
			t.Errorf("%s after %v, %d requests", got, g.tries, len(r.prefill.requests()))
		}
	})
	t.Run("a worker that is away for a while", func(t *testing.T) {
		r := newRelay(t, "vllm", func(c *Config) { c.WorkerWait = time.Millisecond })
		r.decode.set(func() { r.decode.healthy = false })
		r.s.fleet.all()[1].probeNow()
		r.await(func() bool { return r.get("/health").status == 503 })
		go func() {
			time.Sleep(50 * time.Millisecond)
			r.decode.set(func() { r.decode.healthy = true })
			r.s.fleet.all()[1].probeNow()
		}()
		if got := g.ask(r.URL, body); got != "length" || g.tries[503] == 0 || len(g.tries) != 2 {
			t.Errorf("%s after %v", got, g.tries)
		}
	})
	t.Run("a relay that is away for a while", func(t *testing.T) {
		worker := newFake(t, "plain", nil)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr := l.Addr().String()
		l.Close()
		started := make(chan *relayed)
		go func() {
			defer close(started)
			time.Sleep(50 * time.Millisecond)
			l, err := net.Listen("tcp", addr)
			if err != nil {
				t.Error(err)
				return
			}
			s, err := New(Config{Engine: "plain", Decode: []Worker{worker.worker()}})
			if err != nil {
				t.Error(err)
				return
			}
			server := &httptest.Server{Listener: l, Config: &http.Server{Handler: s.Handler(), ConnContext: s.ConnContext}}
			server.Start()
			started <- &relayed{Server: server, s: s}
		}()
		if got := g.ask("http://"+addr, body); got != "length" || g.tries[0] == 0 || g.tries[200] != 1 {
			t.Errorf("%s after %v", got, g.tries)
		}
		if r := <-started; r != nil {
			r.Server.Close()
			r.s.Close()
		}
	})
}
