package relay

import (
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) { http.DefaultClient.CloseIdleConnections() }))
}

// relayed is a relay and the engines behind it.
type relayed struct {
	*httptest.Server
	t               *testing.T
	s               *Server
	reg             *prometheus.Registry
	prefill, decode *fake
}

// newRelay starts a pair of engines of a kind and a relay before them, and waits until it is ready.
func newRelay(t *testing.T, kind string, change func(*Config)) *relayed {
	t.Helper()
	prefill := newFake(t, kind, nil)
	decode := newFake(t, kind, prefill)
	r := relayTo(t, []*fake{prefill}, []*fake{decode}, change)
	r.prefill, r.decode = prefill, decode
	return r
}

func relayTo(t *testing.T, prefill, decode []*fake, change func(*Config)) *relayed {
	t.Helper()
	r := &relayed{t: t, reg: prometheus.NewRegistry()}
	c := Config{Registry: r.reg, WorkerWait: 5 * time.Second}
	for _, f := range prefill {
		f.set(func() {}) // what tests have changed happens before the relay's first request
		c.Prefill = append(c.Prefill, f.worker())
	}
	for _, f := range decode {
		f.set(func() {})
		c.Decode = append(c.Decode, f.worker())
	}
	if change != nil {
		change(&c)
	}
	var err error
	if r.s, err = New(c); err != nil {
		t.Fatal(err)
	}
	r.Server = httptest.NewUnstartedServer(r.s.Handler())
	r.Server.Config.ConnContext = r.s.ConnContext
	r.Server.Start()
	t.Cleanup(func() {
		r.Server.Close()
		r.s.Close()
	})
	r.await(func() bool { return r.get("/health").status == http.StatusOK })
	return r
}

func (f *fake) worker() Worker {
	w := Worker{URL: f.URL}
	if f.kind == "mooncake" || f.kind == "vllm" { // nobody else's bootstrap server is looked for
		u, _ := parseBase(f.URL)
		w.BootstrapPort = atoi(u.Port())
	}
	return w
}

func atoi(s string) (n int) {
	for _, c := range s {
		n = 10*n + int(c-'0')
	}
	return n
}

func (r *relayed) await(ok func() bool) {
	r.t.Helper()
	for end := time.Now().Add(5 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("not in time; health: %s", r.get("/health").body)
		}
	}
}

type result struct {
	status int
	header http.Header
	body   string
}

func (r *relayed) do(req *http.Request) result {
	r.t.Helper()
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatalf("%v after %q", err, body)
	}
	return result{res.StatusCode, res.Header, string(body)}
}

func (r *relayed) get(path string) result {
	r.t.Helper()
	req, _ := http.NewRequest("GET", r.URL+path, nil)
	return r.do(req)
}

// post sends a body, with headers as "Name: value".
func (r *relayed) post(path, body string, header ...string) result {
	r.t.Helper()
	req, _ := http.NewRequest("POST", r.URL+path, strings.NewReader(body))
	req.Header.Set("Content-Type", "application/json")
	for _, h := range header {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Set(name, value)
	}
	return r.do(req)
}

// metric is the sum of a metric's series.
func (r *relayed) metric(name string) (sum float64) {
	r.t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "baton_relay_"+name {
			continue
		}
		for _, m := range f.Metric {
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

// completion is what a client reads of an answer.
type completion struct {
	Object  string
	Choices []struct {
		Text, Finish string
		Message      struct{ Content string }
		TokenIDs     []int           `json:"token_ids"`
		Params       json.RawMessage `json:"disaggregated_params"`
		Logprobs     struct{ Content []any }
	}
	Usage struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Total      int `json:"total_tokens"`
		Details    struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

func (r *relayed) read(got result) completion {
	r.t.Helper()
	if got.status != http.StatusOK {
		r.t.Fatalf("status %d: %s", got.status, got.body)
	}
	var c completion
	d := json.NewDecoder(bytes.NewReader([]byte(got.body)))
	if err := d.Decode(&c); err != nil {
		r.t.Fatalf("%v in %s", err, got.body)
	}
	return c
}

// events are the data of a stream; the last must be [DONE].
func (r *relayed) events(got result) (list []string) {
	r.t.Helper()
	if got.status != http.StatusOK {
		r.t.Fatalf("status %d: %s", got.status, got.body)
	}
	for event := range strings.SplitSeq(got.body, "\n\n") {
		if event != "" {
			list = append(list, strings.TrimPrefix(event, "data: "))
		}
	}
	if len(list) == 0 || list[len(list)-1] != "[DONE]" {
		r.t.Fatalf("the stream has no end: %q", got.body)
	}
	return list[:len(list)-1]
}

// expected is what the toy model answers to ids.
func expected(ids []int, n int) []int {
	all := append([]int(nil), ids...)
	for range n {
		all = append(all, next(all))
	}
	return all[len(ids):]
}

// textLog writes lines to b, which may be read when nothing runs any more.
func textLog(b *strings.Builder) *slog.Logger {
	return slog.New(slog.NewTextHandler(&locked{b: b}, nil))
}

type locked struct {
	mu sync.Mutex
	b  *strings.Builder
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}
