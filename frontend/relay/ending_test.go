package relay

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// However it comes, the end of a stream is known.
func TestEnding(t *testing.T) {
	long := "data: " + strings.Repeat("x", 3*endingKept) + "\n\n"
	for _, c := range []struct {
		stream        string
		done, between bool
	}{
		{"", false, true},
		{"data: 1\n\ndata: [DONE]\n\n", true, true},
		{"data: 1\r\n\r\ndata:[DONE]\r\n\r\n", true, true},
		{"data: 1\r\rid: 1\rdata: [DONE]\rretry: 1\r\r", true, true},
		{"data: [DONE]\n\n\n\n", true, true},
		{"data: [DONE]", true, false},
		{"data: [DONE]\n", true, false},
		{long + "data: [DONE]\n\n", true, true},
		{"data: [DONE]\n\n" + long, false, true},
		{"data: [DONE]\n\ndata: 1\n\n", false, true},
		{"data: [DONE]\n\ndata: {", false, false},
		{"data: [DONE] \n\n", false, true},
		{": [DONE]\n\n", false, true},
		{`data: "data: [DONE]` + "\n\n", false, true},
		{"data: 1\n", false, false},
		{long[:len(long)-1], false, false},
	} {
		for n := 1; n <= max(1, len(c.stream)); n = n*3/2 + 1 {
			var e ending
			for b := []byte(c.stream); len(b) > 0; {
				m := min(n, len(b))
				e.add(b[:m])
				b = b[m:]
			}
			if done := e.check() == nil; done != c.done || e.between() != c.between {
				t.Errorf("%.40q, %d bytes, in pieces of %d: done %t, between events %t", c.stream, len(c.stream), n, done, e.between())
			}
		}
	}
}

// answers makes the decode worker send something, byte for byte.
func (r *relayed) answers(text string) { r.decode.sends(text) }

func (f *fake) sends(text string) {
	f.set(func() {
		f.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
			c, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				f.t.Error(err)
				return true
			}
			_, _ = c.Write([]byte(text))
			c.Close()
			return true
		}
	})
}

const eventsHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"

// A stream that ends without [DONE], whatever the framing, is not whole: the client learns it, and so do the metrics. What is
// there of an event that is cut does not reach the client.
func TestStreamsWithoutEnd(t *testing.T) {
	t.Parallel()
	const event = "data: {\"choices\":[]}\n\n"
	withUsage := strings.Replace(streamed, "{", `{"stream_options":{"include_usage":true},`, 1)
	for name, text := range map[string]string{
		"chunks":          eventsHead + "Transfer-Encoding: chunked\r\n\r\n" + chunk(event) + "0\r\n\r\n",
		"a length":        eventsHead + fmt.Sprintf("Content-Length: %d\r\n\r\n", len(event)) + event,
		"until it closes": eventsHead + "Connection: close\r\n\r\n" + event + "data: {\"cho",
	} {
		for _, kind := range []string{"trtllm", "vllm"} {
			for _, body := range []string{streamed, withUsage} {
				r := newRelay(t, kind, nil)
				r.answers(text)
				if got := r.post(completionsPath, body); got.status != 200 || !strings.HasPrefix(got.body, event+`data: {"error":`) || !strings.Contains(got.body, "ends without [DONE]") {
					t.Errorf("%s, %s: %d %q", kind, name, got.status, got.body)
				}
				if labels := strings.Join(r.labels("legs_total"), " "); !strings.Contains(labels, "failed") {
					t.Errorf("%s, %s: the decode leg is not counted as failed: %s", kind, name, labels)
				}
			}
		}
	}
	r := newRelay(t, "vllm", nil) // an empty line at the end is not missed
	r.answers(eventsHead + "Connection: close\r\n\r\n" + event + "data: [DONE]")
	if got := r.post(completionsPath, streamed); got.body != event+"data: [DONE]" {
		t.Errorf("%q", got.body)
	}
}
