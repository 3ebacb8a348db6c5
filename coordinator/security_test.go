package coordinator

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"baton/mtls"
	"baton/wire"
)

func identity(t *testing.T) *mtls.Identity {
	t.Helper()
	a, _, err := mtls.OpenAuthority(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.Issue("test", nil)
	if err != nil {
		t.Fatal(err)
	}
	id, err := mtls.Load(c.Files, nil)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// lockedBuffer is a log that several goroutines write.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A client with the wrong certificates is told so at once; it does not try forever.
func TestClientsWithoutTheRightCertificate(t *testing.T) {
	id, other := identity(t), identity(t)
	s := newServer(t, ServerConfig{Wire: wire.Options{TLS: id.Server()}})
	addr := listen(t, s, "127.0.0.1:0")
	c, err := Dial(t.Context(), addr, ClientConfig{Logger: quiet(), Wire: wire.Options{TLS: id.Client()}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Status(t.Context()); err != nil {
		t.Error(err)
	}
	anonymous := id.Client()
	anonymous.GetClientCertificate = nil
	for name, opt := range map[string]struct {
		wire wire.Options
		says string
	}{
		"another authority": {wire.Options{TLS: other.Client()}, "its certificate is not signed by --tls-ca"},
		"no certificate":    {wire.Options{TLS: anonymous}, "it wants a certificate"},
	} {
		began := time.Now()
		_, err := Dial(t.Context(), addr, ClientConfig{Logger: quiet(), Wire: opt.wire})
		var typed *mtls.Error
		if !errors.As(err, &typed) || !strings.Contains(err.Error(), opt.says) || time.Since(began) > 2*time.Second {
			t.Errorf("%s: %v after %v", name, err, time.Since(began))
		}
	}
	// Who does not use TLS cannot know why; it goes on trying, and says what may be.
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	var log lockedBuffer
	if _, err = Dial(ctx, addr, ClientConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}); err == nil || !strings.Contains(log.String(), "it may want TLS") {
		t.Errorf("a plain client: %v; log: %s", err, &log)
	}
}

// strangersSay is what connections that are no peers begin with.
var strangersSay = [][]byte{
	nil, // and then nothing
	[]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
	{0xff, 0xff, 0xff, 0xff}, // a frame of 4 GiB
	{0, 0, 1, 0},             // the longest frame a stranger may send, never finished
	{0, 0, 0, 0, 0, 0, 0, 0}, // keepalives
	{0x16, 3, 1, 2, 0, 1, 0}, // the beginning of a TLS handshake
	bytes.Repeat([]byte{0xc1}, 1<<16),
}

// A flood of strangers, of every kind and as many as the system lets in, keeps no peer out and costs
// those that are in nothing.
func TestFloodOfStrangers(t *testing.T) {
	id := identity(t)
	for name, opt := range map[string]struct{ server, client wire.Options }{
		"plain": {},
		"TLS":   {wire.Options{TLS: id.Server()}, wire.Options{TLS: id.Client()}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, ServerConfig{MaxStrangers: 32, MaxConnections: 8, Wire: opt.server})
			addr := listen(t, s, "127.0.0.1:0")
			dial := func() *Client {
				t.Helper()
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				c, err := Dial(ctx, addr, ClientConfig{Logger: quiet(), Wire: opt.client})
				if err != nil {
					t.Fatal(err)
				}
				return c
			}
			early := dial()
			defer early.Close()
			var held []net.Conn
			for i := range 400 {
				nc, err := net.Dial("tcp", addr)
				if err != nil {
					t.Fatal(err)
				}
				defer nc.Close()
				nc.SetWriteDeadline(time.Now().Add(time.Second))
				nc.Write(strangersSay[i%len(strangersSay)]) // may fail: closed already
				held = append(held, nc)
				if i%100 == 99 {
					late := dial()
					if _, err := late.Status(t.Context()); err != nil {
						t.Error(err)
					}
					late.Close()
				}
			}
			n := s.strangers.Len()
			if n > 32 {
				t.Errorf("%d strangers", n)
			}
			if _, err := early.Status(t.Context()); err != nil {
				t.Errorf("a peer from before: %v", err)
			}
			// The oldest are gone, and got nothing but a TLS alert.
			held[0].SetReadDeadline(time.Now().Add(5 * time.Second))
			if got, err := io.ReadAll(held[0]); len(got) > 0 || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("a stranger got %x, %v", got, err)
			}
		})
	}
}

// A stranger that sends its introduction byte by byte has no more time than the others.
func TestSlowIntroduction(t *testing.T) {
	s := newServer(t, ServerConfig{Wire: wire.Options{HandshakeTimeout: 200 * time.Millisecond}})
	nc, err := net.Dial("tcp", listen(t, s, "127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	began := time.Now()
	for err == nil && time.Since(began) < 5*time.Second {
		_, err = nc.Write([]byte{1})
		time.Sleep(10 * time.Millisecond) // the attack, not a wait
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("kept for %v", took)
	}
}
