package relay

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// hostileAnswers are what a worker may send instead of an answer, byte for byte.
func hostileAnswers() map[string]string {
	const (
		events = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
		whole  = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
		event  = "data: {\"choices\":[]}\n\n"
		usage  = `data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}` + "\n\n"
	)
	chunk := func(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }
	return map[string]string{
		"nothing":                "",
		"another protocol":       "SSH-2.0-OpenSSH\r\n\r\n",
		"a redirect":             "HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n",
		"no content":             "HTTP/1.1 204 No Content\r\n\r\n",
		"an upgrade":             "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
		"interim answers only":   strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 20000),
		"headers without end":    "HTTP/1.1 200 OK\r\n" + strings.Repeat("X-Y: z\r\n", 20000),
		"two lengths":            whole + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
		"a negative length":      whole + "Content-Length: -2\r\n\r\n{}",
		"a huge length":          whole + "Content-Length: 9223372036854775807\r\n\r\n{}",
		"half a body":            whole + "Content-Length: 50\r\n\r\n{}",
		"a huge chunk":           events + "7fffffffffffffff\r\nx",
		"a chunk of no number":   events + "xyz\r\n",
		"a cut before any event": events,
		"a cut between events":   events + chunk(event) + chunk(event),
		"a cut inside an event":  events + chunk(event) + "50\r\ndata: {\"cho",
		"a cut inside a head":    events + chunk(event) + "5",
		"trailers without end":   events + chunk(usage) + "0\r\n" + strings.Repeat("X-T: "+strings.Repeat("y", 1000)+"\r\n", 3000),
		"an event without end":   events + strings.Repeat(chunk("data: "+strings.Repeat("x", 8000)), 200),
	}
}

// Whatever a worker sends: the client gets a status that it can live with or an end that shows, in time; it is never told that
// a stream is whole that is not; nothing is left of the request; and the next one is served.
func TestHostileWorkers(t *testing.T) {
	withUsage := strings.Replace(streamed, "{", `{"stream_options":{"include_usage":true},`, 1)
	for name, answer := range hostileAnswers() {
		for _, leg := range []legKind{prefillLeg, decodeLeg} {
			for _, kind := range []string{"trtllm", "vllm"} {
				r := newRelay(t, kind, func(c *Config) {
					c.MaxRetries, c.Timeouts.Leg, c.Timeouts.Stream = -1, time.Second, time.Second
				})
				f := []*fake{r.prefill, r.decode}[leg]
				for _, body := range []string{simple, streamed, withUsage} {
					f.set(func() {
						f.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
							c, _, err := http.NewResponseController(w).Hijack()
							if err != nil {
								t.Error(err)
								return true
							}
							_, _ = io.WriteString(c, answer)
							c.Close()
							return true
						}
					})
					where := fmt.Sprintf("%s, %v leg of %s, %.60s", name, leg, kind, body)
					req, _ := http.NewRequestWithContext(t.Context(), "POST", r.URL+completionsPath, strings.NewReader(body))
					start := time.Now()
					res, err := http.DefaultTransport.RoundTrip(req)
					if err != nil {
						t.Errorf("%s: %v", where, err)
						continue
					}
					got, err := io.ReadAll(res.Body)
					res.Body.Close()
					switch {
					case res.StatusCode == 500 && strings.Contains(string(got), `"error"`):
					case res.StatusCode == 200 && !strings.Contains(string(got), "[DONE]") && (err != nil || strings.Contains(string(got), `"code":"engine_lost"`)):
					default:
						t.Errorf("%s: %d, %v: %.300q", where, res.StatusCode, err, got)
					}
					if took := time.Since(start); took > 5*time.Second {
						t.Errorf("%s: it took %v", where, took)
					}
					r.await(func() bool { return r.metric("worker_requests") == 0 && r.metric("requests_in_flight") == 0 })
					f.set(func() { f.before = nil })
					r.read(r.post(completionsPath, simple))
				}
			}
		}
	}
}
