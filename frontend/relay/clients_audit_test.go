package relay

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// flood makes the decode worker's answer one that does not end by itself; left counts the requests that were given up.
func (r *relayed) flood() (left *atomic.Int32) {
	left = new(atomic.Int32)
	event := "data: {\"choices\":[{\"index\":0,\"text\":\"" + strings.Repeat("x", 8000) + "\"}]}\n\n"
	r.decode.set(func() {
		r.decode.before = func(_ int, w http.ResponseWriter, q *http.Request) bool {
			defer left.Add(1)
			w.Header().Set("Content-Type", "text/event-stream")
			for q.Context().Err() == nil {
				if _, err := io.WriteString(w, event); err != nil {
					break
				}
				w.(http.Flusher).Flush()
			}
			return true
		}
	})
	return left
}

// dialRaw sends a request by hand.
func (r *relayed) dialRaw(request string) net.Conn {
	r.t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(r.URL, "http://"))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	if _, err := io.WriteString(c, request); err != nil {
		r.t.Fatal(err)
	}
	return c
}

func rawPost(version, body string) string {
	return fmt.Sprintf("POST %s HTTP/%s\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", completionsPath, version, len(body), body)
}

// A client that reads nothing holds a worker for Timeouts.Write, no longer, whichever way its stream is copied.
func TestStalledClients(t *testing.T) {
	for name, c := range map[string]struct{ kind, version, body string }{
		"chunks":      {"trtllm", "1.1", streamed},
		"with usage":  {"vllm", "1.1", strings.Replace(streamed, "{", `{"stream_options":{"include_usage":true},`, 1)},
		"an old http": {"vllm", "1.0", streamed},
	} {
		r := newRelay(t, c.kind, func(cfg *Config) { cfg.Timeouts.Write = 300 * time.Millisecond })
		left := r.flood()
		start := time.Now()
		r.dialRaw(rawPost(c.version, c.body))
		r.await(func() bool { return len(r.decode.requests()) == 1 })
		r.await(func() bool {
			return left.Load() == 1 && r.metric("worker_requests") == 0 && r.metric("requests_in_flight") == 0
		})
		if waited := time.Since(start); waited < 200*time.Millisecond {
			t.Errorf("%s: it was cut off after %v", name, waited)
		}
		if r.metric("breaker_open") != 0 {
			t.Errorf("%s: it counts against the worker", name)
		}
	}
}

// Clients of all manners at once: some leave before their body has come, some before the answer, some in the middle of a
// stream, some stay. Those that stay get all of their answer, and nothing is left of the others.
func TestClientsComeAndGo(t *testing.T) {
	for _, kind := range []string{"trtllm", "vllm", "sglang"} {
		r := newRelay(t, kind, func(c *Config) { c.MaxRetries = -1 })
		body := strings.Replace(streamed, "{", `{"stream_options":{"include_usage":true},`, 1)
		want := strings.Count(r.post(completionsPath, body).body, "data: ")
		var clients sync.WaitGroup
		for i := range 200 {
			clients.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(i), 1))
				c, err := net.Dial("tcp", strings.TrimPrefix(r.URL, "http://"))
				if err != nil {
					t.Error(err)
					return
				}
				defer c.Close()
				request := strings.Replace(rawPost("1.1", body), "\r\nHost", "\r\nConnection: close\r\nHost", 1)
				switch i % 4 {
				case 0:
					request = request[:rng.IntN(len(request))]
				case 1:
					_ = c.(*net.TCPConn).SetLinger(0) // a reset
				}
				if _, err := io.WriteString(c, request); err != nil {
					t.Error(err)
				}
				in := bufio.NewReader(c)
				switch i % 4 {
				case 1:
					time.Sleep(time.Duration(rng.IntN(3000)) * time.Microsecond)
				case 2:
					_, _ = io.CopyN(io.Discard, in, int64(rng.IntN(900)))
				case 3:
					res, err := http.ReadResponse(in, nil)
					if err != nil {
						t.Error(err)
						return
					}
					all, err := io.ReadAll(res.Body)
					if n := strings.Count(string(all), "data: "); err != nil || res.StatusCode != 200 || n != want || !strings.HasSuffix(string(all), "data: [DONE]\n\n") {
						t.Errorf("%s: %d, %v, %d of %d events: %.300q", kind, res.StatusCode, err, n, want, all)
					}
				}
			})
		}
		clients.Wait()
		r.await(func() bool { return r.metric("requests_in_flight") == 0 && r.metric("worker_requests") == 0 })
		if r.metric("breaker_open") != 0 || r.metric("worker_healthy") != 2 {
			t.Errorf("%s: clients that leave count against workers: %s", kind, r.get("/workers").body)
		}
	}
}
