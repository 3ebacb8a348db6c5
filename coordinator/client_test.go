package coordinator

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"baton/wire"
)

// freeAddr is a loopback address where nobody listens.
func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// lines is a log that tests read while it is written.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A client that was opened before there is a coordinator refuses requests at once, says so in the log one
// time, and serves as soon as there is one.
func TestClientBeforeTheCoordinator(t *testing.T) {
	addr := freeAddr(t)
	var log lines
	c := Open(addr, ClientConfig{Logger: slog.New(slog.NewTextHandler(&log, nil)), Wait: time.Hour})
	defer c.Close()
	began := time.Now()
	for strings.Count(log.String(), "level=WARN") == 0 { // the first attempt has failed
		if time.Sleep(time.Millisecond); time.Since(began) > 5*time.Second {
			t.Fatalf("nothing is logged:\n%s", &log)
		}
	}
	_, err := c.Submit(t.Context(), &wire.SubmitRequest{Prompt: wire.Tokens{1}})
	var failed *RequestError
	if !errors.As(err, &failed) || !failed.Retryable || failed.Code != wire.CodeUnavailable {
		t.Errorf("a request without a coordinator: %v", err)
	}
	if _, err = c.Status(t.Context()); err == nil || !strings.Contains(errors.Unwrap(err).Error(), "refused") || !strings.Contains(errors.Unwrap(err).Error(), addr) {
		t.Errorf("the status without a coordinator: %v, since %v", err, errors.Unwrap(err))
	}
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("the refusals took %v", took)
	}
	s := newServer(t, ServerConfig{})
	listen(t, s, addr)
	for ; ; time.Sleep(time.Millisecond) {
		if _, err := c.Status(t.Context()); err == nil {
			break
		} else if time.Since(began) > 20*time.Second {
			t.Fatalf("not connected: %v", err)
		}
	}
	if err := c.Err(); err != nil {
		t.Errorf("connected, and Err is %v", err)
	}
	if out := log.String(); strings.Count(out, "level=WARN") != 1 || strings.Count(out, "coordinator connected") != 1 {
		t.Errorf("want one warning and one line about the connection:\n%s", out)
	}
}

// The model decides whether a client may come: at CONNECT when there are engines, otherwise with the first one.
func TestClientOfAnotherModel(t *testing.T) {
	s := newServer(t, ServerConfig{})
	addr := listen(t, s, "127.0.0.1:0")
	open := func(fingerprint string) (*Client, *lines) {
		var log lines
		c := Open(addr, ClientConfig{Logger: slog.New(slog.NewTextHandler(&log, nil)), Model: "chatty", Fingerprint: fingerprint})
		t.Cleanup(c.Close)
		return c, &log
	}
	early, log := open("c0de")
	if _, err := early.Status(t.Context()); err != nil {
		<-early.met
	}
	st, err := early.Submit(t.Context(), &wire.SubmitRequest{Prompt: wire.Tokens{1}})
	if err != nil {
		t.Fatal(err)
	}
	dialEngine(t, addr, "e0", wire.RoleBoth, nil)
	if _, err := st.Next(t.Context()); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a request to a model that came to be another: %v", err)
	}
	for began := time.Now(); strings.Count(log.String(), "chatty (fingerprint c0de)") < 2; time.Sleep(time.Millisecond) {
		if time.Since(began) > 5*time.Second {
			t.Fatalf("the log names no models:\n%s", log)
		}
	}
	late, _ := open("c0de")
	<-late.Done()
	var refused *wire.RefusedError
	if err := late.Err(); !errors.As(err, &refused) || !strings.Contains(err.Error(), "chatty (fingerprint c0de)") || !strings.Contains(err.Error(), "toy (fingerprint toy)") {
		t.Errorf("refused with %v", err)
	}
	for _, fingerprint := range []string{"", "toy"} {
		c, _ := open(fingerprint)
		<-c.met
		if _, err := c.Status(t.Context()); err != nil {
			t.Errorf("a client of model %q: %v", fingerprint, err)
		}
	}
}

// A prompt that no message can carry is refused in the client's terms, and the connection stays.
func TestPromptThatNoMessageCarries(t *testing.T) {
	s := newServer(t, ServerConfig{})
	c, err := Dial(t.Context(), listen(t, s, "127.0.0.1:0"), ClientConfig{Logger: quiet(), Wire: wire.Options{MaxFrame: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Submit(t.Context(), &wire.SubmitRequest{Prompt: make(wire.Tokens, 1<<19)})
	var failed *RequestError
	if !errors.As(err, &failed) || failed.Code != wire.CodeInvalid || failed.Field != "prompt" || failed.Retryable {
		t.Fatalf("got %+v", err)
	}
	if said := failed.Error(); !strings.Contains(said, "524288 tokens") || !strings.Contains(said, "1 MiB") || strings.Contains(said, "wire") || strings.Contains(said, "Options") {
		t.Errorf("it says %q", said)
	}
	if _, err := c.Status(t.Context()); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}
