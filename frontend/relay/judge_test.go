package relay

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// whole is an answer of 200 with a length.
func whole(kind, body string, header ...string) string {
	return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s\r\n%s", kind, len(body), strings.Join(append(header, ""), "\r\n"), body)
}

const (
	asJSON     = "application/json"
	goodAnswer = `{"choices":[]}`
	goodEvents = "data: {\"choices\":[]}\n\n" + lastEvent
)

// A decode worker's 200 that is no completion, or not of the kind that was asked for, is an answer that is none: it is tried
// again, then 500.
func TestAnswersThatAreNone(t *testing.T) {
	t.Parallel()
	inChunks := func(events ...string) string {
		text := eventsHead + "Transfer-Encoding: chunked\r\n\r\n"
		for _, e := range events {
			text += chunk(e)
		}
		return text + "0\r\n\r\n"
	}
	for name, c := range map[string]struct{ answer, body string }{
		"a page":                    {whole("text/html", "<html></html>"), simple},
		"a page for a stream":       {whole("text/html", "<html></html>"), streamed},
		"nothing":                   {whole(asJSON, ""), simple},
		"nothing for a stream":      {whole(asJSON, ""), streamed},
		"half":                      {whole(asJSON, `{"choices":[{"text":"`), simple},
		"half until it closes":      {"HTTP/1.0 200 OK\r\n\r\n" + `{"choices":[{"text":"`, simple},
		"no choices":                {whole(asJSON, `{"id":"x"}`), simple},
		"choices that are null":     {whole(asJSON, `{"choices":null}`), simple},
		"compressed":                {whole(asJSON, goodAnswer, "Content-Encoding: gzip"), simple},
		"a compressed stream":       {whole("text/event-stream", goodEvents, "Content-Encoding: br"), streamed},
		"an error":                  {whole(asJSON, `{"error":{"code":5}}`), simple},
		"an error of 502":           {whole(asJSON, `{"error":{"code":502}}`), simple},
		"an error for a stream":     {whole(asJSON, `{"object":"error","message":"x","code":500}`), streamed},
		"a stream unasked":          {whole("text/event-stream", goodEvents), simple},
		"no stream":                 {whole(asJSON, goodAnswer), streamed},
		"an error as event":         {inChunks("data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n", lastEvent), streamed},
		"an error in two chunks":    {inChunks("data: {\"error\":", "\"x\"}\r\n\r\n", lastEvent), streamed},
		"an error as event, length": {whole("text/event-stream", "event: error\ndata: {\"error\":\"x\"}\n\n"), streamed},
		"a large page":              {whole("text/html", strings.Repeat("x", maxError+1)), streamed},
		"an event that is no JSON":  {inChunks("data: <html>\n\n", lastEvent), streamed},
		"no event but the end":      {inChunks(lastEvent), streamed},
		"no event":                  {inChunks(), streamed},
		"half an event":             {inChunks("data: {"), streamed},
		"half an event, length":     {whole("text/event-stream", "data: {\"choices\":"), streamed},
	} {
		r := newRelay(t, "trtllm", func(c *Config) { c.MaxRetries = 1 })
		r.answers(c.answer)
		if got := r.post(completionsPath, c.body); got.status != 500 || !strings.Contains(got.body, `"error"`) || len(r.decode.requests()) != 2 {
			t.Errorf("%s: %d %q after %d tries", name, got.status, got.body, len(r.decode.requests()))
		}
		if labels := strings.Join(r.labels("legs_total"), " "); !strings.Contains(labels, "failed") {
			t.Errorf("%s: it is not counted as failed: %s", name, labels)
		}
	}
}

// An error in an answer of 200 that names the client's fault is the client's, and not sent again.
func TestRefusalsInAnswers(t *testing.T) {
	t.Parallel()
	const text = `{"error":{"message":"too long","code":400}}`
	for _, kind := range []string{"trtllm", "sglang"} {
		for answer, body := range map[string]string{
			whole(asJSON, text): simple,
			whole("text/event-stream", "data: "+text+"\n\n"+lastEvent):                                              streamed,
			eventsHead + "Transfer-Encoding: chunked\r\n\r\n" + chunk("data: "+text+"\n\n"+lastEvent) + "0\r\n\r\n": streamed,
		} {
			r := newRelay(t, kind, nil)
			r.answers(answer)
			if got := r.post(completionsPath, body); got.status != 400 || got.body != text || got.header.Get("Content-Type") != asJSON || len(r.decode.requests()) != 1 {
				t.Errorf("%s: %+v after %d tries", kind, got, len(r.decode.requests()))
			}
		}
	}
}

// What an engine says of an error is passed on if it is not too much; its status in any case.
func TestLongRefusals(t *testing.T) {
	t.Parallel()
	r := newRelay(t, "vllm", nil)
	long := strings.Repeat("x", maxError+1)
	r.answers(fmt.Sprintf("HTTP/1.1 422 X\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s", len(long), long))
	if got := r.post(completionsPath, simple); got.status != 422 || !strings.Contains(got.body, `{"error":{"message":"the engine answers 422;`) || got.header.Get("Content-Type") != asJSON {
		t.Errorf("%d, %v, %.300s", got.status, got.header, got.body)
	}
}

// A stream whose first event begins and does not end is not waited for as long as for a prompt.
func TestFirstEventStalls(t *testing.T) {
	t.Parallel()
	r := newRelay(t, "vllm", func(c *Config) { c.Timeouts.Stream = 100 * time.Millisecond })
	r.decode.set(func() {
		r.decode.before = func(_ int, w http.ResponseWriter, q *http.Request) bool {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = w.Write([]byte("data: {"))
			_ = http.NewResponseController(w).Flush()
			<-q.Context().Done()
			return true
		}
	})
	if got := r.post(completionsPath, streamed); got.status != 500 || !strings.Contains(got.body, "engine_timeout") {
		t.Errorf("%+v", got)
	}
}

// An engine's own error in the middle of a stream is the only one that the client gets; the leg counts as failed.
func TestErrorsInStreams(t *testing.T) {
	t.Parallel()
	const good, bad = "data: {\"choices\":[]}\n\n", "data: {\"error\":{\"message\":\"out of memory\",\"code\":null}}\n\n"
	for _, end := range []string{"", lastEvent} {
		for name, answer := range map[string]string{
			"chunks":          eventsHead + "Transfer-Encoding: chunked\r\n\r\n" + chunk(good) + chunk(bad+end) + "0\r\n\r\n",
			"broken chunks":   eventsHead + "Transfer-Encoding: chunked\r\n\r\n" + chunk(good) + chunk(bad+end),
			"until it closes": eventsHead + "\r\n" + good + bad + end,
		} {
			r := newRelay(t, "vllm", nil)
			r.answers(answer)
			if got := r.post(completionsPath, streamed); got.status != 200 || got.body != good+bad+end {
				t.Errorf("%s, %q: %d %q", name, end, got.status, got.body)
			}
			if labels := strings.Join(r.labels("legs_total"), " "); !strings.Contains(labels, "failed") {
				t.Errorf("%s, %q: the leg is not counted as failed: %s", name, end, labels)
			}
		}
	}
}

// What is a completion reaches the client, whatever stands around it.
func TestAnswersThatAreSome(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ answer, body, want string }{
		"an object":      {whole(asJSON, " "+goodAnswer+"\n", "Content-Encoding: identity"), simple, " " + goodAnswer + "\n"},
		"a null error":   {whole(asJSON, `{"error":null,"choices":[]}`), simple, `{"error":null,"choices":[]}`},
		"comments":       {whole("text/event-stream", ": wait\n\n"+goodEvents), streamed, ": wait\n\n" + goodEvents},
		"a large event":  {eventsHead + "Transfer-Encoding: chunked\r\n\r\n" + chunk("data: {\"x\":\""+strings.Repeat("x", 2*readBuffer)+"\"}\n\n"+lastEvent) + "0\r\n\r\n", streamed, "data: {\"x\":\"" + strings.Repeat("x", 2*readBuffer) + "\"}\n\n" + lastEvent},
		"a kind of JSON": {whole("application/vnd.x+json", goodAnswer), simple, goodAnswer},
	} {
		r := newRelay(t, "vllm", nil)
		r.answers(c.answer)
		if got := r.post(completionsPath, c.body); got.status != http.StatusOK || got.body != c.want || len(r.decode.requests()) != 1 {
			t.Errorf("%s: %d %.300q", name, got.status, got.body)
		}
	}
}

// A prefill leg's answer is judged as a decode leg's is, also where the client never sees it.
func TestPrefillAnswersThatAreNone(t *testing.T) {
	t.Parallel()
	good := `{"choices":[{"finish_reason":"length"}]}`
	for name, c := range map[string]struct {
		kind, body, answer string
		status, tries      int
	}{
		"compressed":             {"vllm", simple, whole(asJSON, good, "Content-Encoding: gzip"), 500, 2},
		"an error":               {"trtllm", simple, whole(asJSON, `{"error":{"code":500}}`), 500, 2},
		"a refusal":              {"trtllm", streamed, whole(asJSON, `{"error":{"code":400}}`), 400, 1},
		"a stream that is cut":   {"sglang", streamed, whole("text/event-stream", "data: {\"choices\":[]}\n\n"), 500, 2},
		"an error in a stream":   {"sglang", streamed, whole("text/event-stream", "data: {\"error\":{\"code\":null}}\n\n"+lastEvent), 500, 2},
		"a refusal in a stream":  {"sglang", streamed, whole("text/event-stream", "data: {\"error\":{\"code\":400}}\n\n"+lastEvent), 400, 1},
		"half of a whole answer": {"sglang", simple, "HTTP/1.0 200 OK\r\n\r\n" + good[:20], 500, 2},
	} {
		r := newRelay(t, c.kind, func(c *Config) { c.MaxRetries = 1 })
		r.prefill.sends(c.answer)
		hang := func(_ int, _ http.ResponseWriter, q *http.Request) bool { <-q.Context().Done(); return true }
		r.decode.set(func() { r.decode.before = hang })
		if got := r.post(completionsPath, c.body); got.status != c.status || len(r.prefill.requests()) != c.tries {
			t.Errorf("%s: %d %q after %d tries", name, got.status, got.body, len(r.prefill.requests()))
		}
	}
}
