package loadgen

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memory is a listener whose connections are pipes, so that servers and clients share a bubble of virtual time.
type memory struct {
	accept chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (m *memory) Accept() (net.Conn, error) {
	select {
	case c := <-m.accept:
		return c, nil
	case <-m.closed:
		return nil, net.ErrClosed
	}
}

func (m *memory) Close() error {
	m.once.Do(func() { close(m.closed) })
	return nil
}

func (m *memory) Addr() net.Addr { return &net.TCPAddr{} }

func (m *memory) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case m.accept <- theirs:
		return ours, nil
	case <-m.closed:
		return nil, errors.New("connection refused")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// ask is what the stub server reads of a request.
type ask struct {
	Model       string            `json:"model"`
	Prompt      json.RawMessage   `json:"prompt"`
	Messages    []json.RawMessage `json:"messages"`
	MaxTokens   int               `json:"max_tokens"`
	IgnoreEOS   bool              `json:"ignore_eos"`
	ReturnIDs   bool              `json:"return_token_ids"`
	Temperature float64           `json:"temperature"`
	Params      struct {
		ID string `json:"conversation_id"`
	} `json:"conversation_params"`
	Handoff bool `json:"return_handoff"`

	header http.Header
	path   string
	number int // of the request at its server, from 0
}

func (a *ask) ids() []int32 {
	var ids []int32
	_ = json.Unmarshal(a.Prompt, &ids)
	return ids
}

// stub is a server with a model that answers token i of a prompt of n tokens with id n+i, after first and then each step.
type stub struct {
	owner       string // default baton
	first, step time.Duration
	cached      int                                             // tokens of every prompt but the first
	script      func(a *ask, w http.ResponseWriter) (done bool) // may answer instead

	mu   sync.Mutex
	asks []*ask
	at   []time.Time
}

// start serves until the test ends; the target reaches it.
func (s *stub) start(t *testing.T) Target {
	t.Helper()
	m := &memory{accept: make(chan net.Conn), closed: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		owner := s.owner
		if owner == "" {
			owner = "baton"
		}
		fmt.Fprintf(w, `{"object":"list","data":[{"id":"m","object":"model","owned_by":%q}]}`, owner)
	})
	mux.HandleFunc("POST /v1/completions", s.complete)
	mux.HandleFunc("POST /v1/chat/completions", s.complete)
	server := &http.Server{Handler: mux}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(m)
	}()
	client := &http.Client{Transport: &http.Transport{DialContext: m.dial, MaxIdleConnsPerHost: 1000, DisableCompression: true}}
	t.Cleanup(func() {
		client.CloseIdleConnections()
		_ = server.Shutdown(context.Background()) // waits for handlers, which costs no real time
		<-served
	})
	return Target{URL: "http://stub", Client: client}
}

func (s *stub) complete(w http.ResponseWriter, r *http.Request) {
	a := &ask{header: r.Header, path: r.URL.Path}
	body, _ := io.ReadAll(r.Body)
	if err := json.Unmarshal(body, a); err != nil {
		http.Error(w, fmt.Sprintf(`{"error":{"message":%q}}`, err), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	a.number = len(s.asks)
	s.asks = append(s.asks, a)
	s.at = append(s.at, time.Now())
	s.mu.Unlock()
	if s.script != nil && s.script(a, w) {
		return
	}
	n := len(a.ids())
	time.Sleep(s.first)
	w.Header().Set("Content-Type", "text/event-stream")
	if a.path == "/v1/chat/completions" {
		emit(w, `{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}`)
	}
	for i := range a.MaxTokens {
		if i > 0 {
			time.Sleep(s.step)
		}
		s.token(w, a, n+i, i == a.MaxTokens-1)
	}
	emit(w, fmt.Sprintf(`{"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}`,
		n, a.MaxTokens, s.cached*min(a.number, 1)))
	emit(w, "[DONE]")
}

func (s *stub) token(w http.ResponseWriter, a *ask, id int, last bool) {
	var b bytes.Buffer
	finish := "null"
	if last {
		finish = `"length"`
	}
	if a.path == "/v1/chat/completions" {
		fmt.Fprintf(&b, `{"choices":[{"index":0,"delta":{"content":" w%d"},"finish_reason":%s`, id, finish)
	} else {
		fmt.Fprintf(&b, `{"choices":[{"index":0,"text":" w%d","logprobs":null,"finish_reason":%s`, id, finish)
	}
	if a.ReturnIDs {
		fmt.Fprintf(&b, `,"token_ids":[%d]`, id)
	}
	b.WriteString("}]}")
	emit(w, b.String())
}

func emit(w http.ResponseWriter, data string) {
	fmt.Fprintf(w, "data: %s\n\n", data)
	_ = http.NewResponseController(w).Flush()
}
