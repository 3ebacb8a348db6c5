package relay

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// hang makes an engine keep what it gets, after it has said something if that is not empty.
func (f *fake) hang(say string) { f.hangs(say != "", say) }

// hangs is hang, after the head of a stream.
func (f *fake) hangs(head bool, say string) {
	f.set(func() {
		f.before = func(_ int, w http.ResponseWriter, r *http.Request) bool {
			if head {
				w.Header().Set("Content-Type", "text/event-stream")
				io.WriteString(w, say)
				w.(http.Flusher).Flush()
			}
			select {
			case <-r.Context().Done():
			case <-f.closed:
			}
			return true
		}
	})
}

// unheard is what a watcher does when probes of a worker get no answer.
func (r *relayed) unheard(f *fake, err error) {
	r.t.Helper()
	for _, w := range r.s.fleet.all() {
		if w.URL == f.URL {
			for n := range probeFailures {
				r.s.fleet.setHealth(w, r.s.fleet.rolesOf(w), err, n+1)
			}
			return
		}
	}
	r.t.Fatal("no such worker")
}

var errUnheard = failed(errTimeout, errors.New("/health"))

// Requests of a worker that is found to hang, though its socket is open, go to another one.
func TestLegsLeaveWorkersThatHang(t *testing.T) {
	for _, kind := range []string{"trtllm", "sglang", "plain"} {
		for l := prefillLeg; l <= decodeLeg; l++ {
			if kind == "plain" && l == prefillLeg {
				continue
			}
			prefill := []*fake{newFake(t, kind, nil), newFake(t, kind, nil)}
			decode := []*fake{newFake(t, kind, prefill[0]), newFake(t, kind, prefill[0])}
			for _, d := range decode {
				d.more = prefill[1:]
			}
			if kind == "plain" {
				prefill = nil
			}
			r := relayTo(t, prefill, decode, func(c *Config) { c.PrefillRouter, c.DecodeRouter = "round_robin", "round_robin" })
			pool := [][]*fake{prefill, decode}[l]
			r.await(func() bool { return r.metric("worker_healthy") == float64(len(prefill)+len(decode)) })
			pool[0].hang("")
			pool[1].hang("")
			got := make(chan result, 1)
			go func() { got <- r.post(completionsPath, simple) }()
			stuck := 0
			r.await(func() bool {
				stuck = len(pool[1].requests())
				return stuck+len(pool[0].requests()) == 1
			})
			pool[1-stuck].set(func() { pool[1-stuck].before = nil })
			r.unheard(pool[stuck], errUnheard)
			select {
			case got := <-got:
				r.read(got)
			case <-time.After(5 * time.Second):
				t.Fatalf("%s: the request waits for a %v worker that is known to hang", kind, l)
			}
			r.await(func() bool { return r.metric("worker_requests") == 0 })
		}
	}
}

// A stream that has begun ends with an error when its worker hangs, and not while anything comes of it.
func TestStreamsOfWorkersThatHang(t *testing.T) {
	r := newRelay(t, "trtllm", nil)
	r.decode.hang("data: {\"choices\":[]}\n\n")
	req, _ := http.NewRequestWithContext(t.Context(), "POST", r.URL+completionsPath, strings.NewReader(streamed))
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	begun := make([]byte, 5)
	if _, err := io.ReadFull(res.Body, begun); err != nil {
		t.Fatal(err)
	}
	r.unheard(r.decode, errUnheard) // a token came a moment ago
	if n := r.metric("worker_requests"); n != 1 {
		t.Fatalf("%v legs run", n)
	}
	r.s.fleet.mu.Lock()
	r.s.fleet.quiet = 0
	r.s.fleet.mu.Unlock()
	r.unheard(r.decode, errUnheard)
	rest, err := io.ReadAll(res.Body)
	if err == nil && (!strings.Contains(string(rest), `"code":"engine_lost"`) || strings.Contains(string(rest), "[DONE]")) {
		t.Errorf("%q", rest)
	}
	if n := len(r.prefill.requests()); n != 1 {
		t.Errorf("%d prefill legs", n)
	}
}

// A worker that says that it is not well, or takes no new connections, ends what it has.
func TestLegsStayWithWorkersThatLeave(t *testing.T) {
	r := newRelay(t, "trtllm", nil)
	done := make(chan struct{})
	r.decode.set(func() {
		r.decode.before = func(int, http.ResponseWriter, *http.Request) bool {
			<-done
			return false
		}
	})
	got := make(chan result, 1)
	go func() { got <- r.post(completionsPath, simple) }()
	r.await(func() bool { return len(r.decode.requests()) == 1 })
	r.unheard(r.decode, &statusError{"/health", 503})
	r.unheard(r.decode, failed(errDial, &net.OpError{Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}))
	close(done)
	r.read(<-got)
	if n := len(r.decode.requests()); n != 1 {
		t.Errorf("sent %d times", n)
	}
}

// TestHangs: which errors of probes mean that nothing more is to be expected.
func TestHangs(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{errUnheard, true},
		{failed(errDial, &net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}), true},
		{failed(errDial, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EHOSTUNREACH)}), true},
		{failed(errDial, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}), false},
		{failed(errReset, io.EOF), false},
		{&statusError{"/health", 503}, false},
	} {
		if got := hangs(c.err); got != c.want {
			t.Errorf("%v: %t", c.err, got)
		}
	}
}

// A decode leg whose KV cannot come any more, since the prefill worker is gone, is not waited for: engines would take minutes.
// One whose answer has begun has the KV.
func TestLegsLeaveWhenTheirSourceIsGone(t *testing.T) {
	gone := failed(errDial, syscall.ECONNREFUSED)
	for _, kind := range []string{"trtllm", "vllm", "mooncake", "sglang"} {
		for _, begun := range []bool{false, true} {
			prefill := []*fake{newFake(t, kind, nil), newFake(t, kind, nil)}
			decode := newFake(t, kind, prefill[0])
			decode.more = prefill[1:]
			r := relayTo(t, prefill, []*fake{decode}, func(c *Config) { c.PrefillRouter = "round_robin" })
			r.await(func() bool { return r.metric("worker_healthy") == 3 })
			if kind == "mooncake" || kind == "sglang" {
				for _, p := range prefill { // it has said all that it has to say, but the decode worker got nothing of it
					p.set(func() {
						p.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
							w.Header().Set("Content-Type", "application/json")
							io.WriteString(w, `{"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}`)
							return true
						}
					})
				}
			}
			say := "" // but the head: vLLM sends it at once
			if begun {
				say = "data: {\"choices\":[]}\n\n"
			}
			decode.hangs(true, say)
			got := make(chan result, 1)
			go func() { got <- r.post(completionsPath, streamed) }()
			r.await(func() bool {
				return len(decode.requests()) == 1 && len(prefill[0].requests())+len(prefill[1].requests()) == 1
			})
			source := prefill[0]
			if len(source.requests()) == 0 {
				source = prefill[1]
			}
			if begun {
				time.Sleep(20 * time.Millisecond) // until its head is here
				r.unheard(source, gone)
				select {
				case got := <-got:
					t.Errorf("%s: %+v", kind, got)
				case <-time.After(50 * time.Millisecond):
				}
				decode.CloseClientConnections()
				<-got
				continue
			}
			decode.set(func() { decode.before = nil })
			for _, p := range prefill {
				p.set(func() { p.before = nil })
			}
			r.unheard(source, gone)
			select {
			case got := <-got:
				r.events(got)
			case <-time.After(5 * time.Second):
				t.Fatalf("%s: the request still waits", kind)
			}
			if n := r.metric("breaker_open"); n != 0 {
				t.Errorf("%s: the decode worker is blamed", kind)
			}
		}
	}
}

// Mooncake's prefill legs come to their end when the decode worker has refused, or the client has left: the decode worker's
// sender waits for that. SGLang's end at once.
func TestMooncakePrefillEndsByItself(t *testing.T) {
	for _, kind := range []string{"mooncake", "sglang"} {
		for _, why := range []string{"refused", "failed", "left"} {
			r := newRelay(t, kind, func(c *Config) { c.MaxRetries = -1 })
			release, ended := make(chan struct{}), make(chan bool, 1)
			r.prefill.set(func() {
				r.prefill.before = func(_ int, w http.ResponseWriter, q *http.Request) bool {
					select {
					case <-q.Context().Done():
						ended <- false
					case <-release:
						w.Header().Set("Content-Type", "application/json")
						io.WriteString(w, `{"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}`)
						ended <- true
					}
					return true
				}
			})
			r.decode.set(func() {
				r.decode.before = func(_ int, w http.ResponseWriter, q *http.Request) bool {
					for len(r.prefill.requests()) == 0 {
						time.Sleep(time.Millisecond)
					}
					switch why {
					case "left":
						<-q.Context().Done()
					case "refused":
						w.WriteHeader(http.StatusBadRequest)
					default:
						w.WriteHeader(http.StatusInternalServerError)
					}
					return true
				}
			})
			ctx, leave := context.WithCancel(t.Context())
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				req, _ := http.NewRequestWithContext(ctx, http.MethodPost, r.URL+completionsPath, strings.NewReader(simple))
				if res, err := http.DefaultClient.Do(req); err == nil {
					res.Body.Close()
				}
			}()
			if why == "left" {
				r.await(func() bool { return len(r.prefill.requests()) == 1 && len(r.decode.requests()) == 1 })
				leave()
			}
			<-gone
			leave()
			if kind == "sglang" {
				if <-ended {
					t.Errorf("%s, %s: the prefill leg went on", kind, why)
				}
				continue
			}
			select {
			case <-ended:
				t.Errorf("%s, %s: the prefill leg was ended", kind, why)
			case <-time.After(50 * time.Millisecond):
			}
			close(release)
			if !<-ended {
				t.Errorf("%s, %s: the prefill leg was ended", kind, why)
			}
			r.await(func() bool { return r.metric("worker_requests") == 0 && r.metric("requests_in_flight") == 0 })
		}
	}
}
