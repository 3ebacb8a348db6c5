package tcp

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"baton/mtls"
	"baton/transfer"
)

// identity makes one of an authority of its own.
func identity(tb testing.TB) *mtls.Identity {
	tb.Helper()
	a, _, err := mtls.OpenAuthority(tb.TempDir())
	if err != nil {
		tb.Fatal(err)
	}
	c, err := a.Issue("engine", nil)
	if err != nil {
		tb.Fatal(err)
	}
	id, err := mtls.Load(c.Files, nil)
	if err != nil {
		tb.Fatal(err)
	}
	return id
}

// bring moves the first n bytes from an endpoint with one identity to one with another.
func bring(t *testing.T, name string, source, dest *mtls.Identity, n int64) (err, expected error, same bool) {
	t.Helper()
	settled := func(h transfer.Handle) error {
		select {
		case <-h.Settled():
		case <-time.After(5 * time.Second):
			h.Cancel()
			<-h.Settled()
			return errors.New("hung")
		}
		return h.Poll().Err
	}
	from, to := Options{TLS: source, Timeout: time.Second}, Options{TLS: dest, Timeout: time.Second}
	copies := []transfer.Copy{{Len: n}}
	var src, dst *endpoint
	var h transfer.Handle
	switch name {
	case PullName:
		s, d := openPuller(t, n, from), openPuller(t, n, to)
		src, dst = s.endpoint, d.endpoint
		rand.NewChaCha8([32]byte{1}).Read(src.mem.Data)
		if err := s.Export(1, capability, []transfer.Range{{Len: n}}); err != nil {
			t.Fatal(err)
		}
		if h, err = d.Pull(t.Context(), s.Describe(), 1, capability, copies); err == nil {
			err = settled(h)
		}
	case PushName:
		s, d := openPusher(t, n, from), openPusher(t, n, to)
		src, dst = s.endpoint, d.endpoint
		rand.NewChaCha8([32]byte{1}).Read(src.mem.Data)
		tag, expectation, expectErr := d.Expect(t.Context(), []transfer.Range{{Len: n}})
		if expectErr != nil {
			t.Fatal(expectErr)
		}
		if h, err = s.Push(t.Context(), d.Describe(), tag, copies); err == nil {
			err = settled(h)
		}
		if err != nil {
			expectation.Cancel()
		}
		expected = settled(expectation)
	}
	return err, expected, bytes.Equal(src.mem.Data, dst.mem.Data)
}

func TestWhoMayTalk(t *testing.T) {
	a, b := identity(t), identity(t)
	for _, name := range []string{PullName, PushName} {
		for _, c := range []struct {
			name         string
			source, dest *mtls.Identity
			pull, push   string // the caller's error, empty for success
		}{
			{"one authority", a, a, "", ""},
			{"plain", nil, nil, "", ""},
			{"two authorities", a, b, "its certificate is not signed by --tls-ca", "its certificate is not signed by --tls-ca"},
			{"plain source", nil, a, "does not use TLS and this side does", "takes TLS only: start this engine with --tls-ca"},
			{"plain destination", a, nil, "takes TLS only: start this engine with --tls-ca", "does not use TLS and this side does"},
		} {
			t.Run(name+" "+c.name, func(t *testing.T) {
				want := c.pull
				if name == PushName {
					want = c.push
				}
				err, expected, same := bring(t, name, c.source, c.dest, 1<<20)
				if want == "" {
					if err != nil || expected != nil || !same {
						t.Fatalf("%v; %v; same bytes: %v", err, expected, same)
					}
					return
				}
				var typed *transfer.Error
				if !errors.As(err, &typed) || !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %q", err, want)
				}
				if same {
					t.Error("bytes moved")
				}
			})
		}
	}
}

// A client whose certificate the server does not accept learns it, though its own handshake went well.
func TestRefusedClientCertificate(t *testing.T) {
	id := identity(t)
	p := openPuller(t, 1<<20, Options{TLS: id})
	if err := p.Export(1, capability, []transfer.Range{{Len: 1 << 20}}); err != nil {
		t.Fatal(err)
	}
	nc, err := net.Dial("tcp", p.addr)
	if err != nil {
		t.Fatal(err)
	}
	anonymous := id.Client()
	anonymous.GetClientCertificate = nil
	secure, err := mtls.Client(t.Context(), nc, anonymous, p.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer secure.Close()
	secure.SetDeadline(time.Now().Add(5 * time.Second))
	request, err := appendRequest(append([]byte(magic), make([]byte, 8)...), append(make([]byte, 8), capability...), []transfer.Range{{Len: 1}})
	if err != nil {
		t.Fatal(err)
	}
	secure.Write(request) // may fail, if the refusal is faster
	got, err := io.ReadAll(secure)
	var refused *mtls.Error
	if len(got) > 0 || !errors.As(err, &refused) || !refused.Permanent || !strings.Contains(err.Error(), "it wants a certificate") {
		t.Errorf("got %x, %v", got, err)
	}
}

// Strangers at a port under TLS get nothing, hold nothing, and keep no engine out.
func TestStrangersUnderTLS(t *testing.T) {
	id := identity(t)
	src, dst := openPuller(t, 1<<20, Options{TLS: id}), openPuller(t, 1<<20, Options{TLS: id})
	if err := src.Export(1, capability, []transfer.Range{{Len: 1 << 20}}); err != nil {
		t.Fatal(err)
	}
	says := [][]byte{nil, {0x16}, {0x16, 3, 1, 2, 0, 1}, []byte("GET / HTTP/1.1\r\n\r\n"), append([]byte(magic), make([]byte, 8)...), make([]byte, 4096)}
	for i := range 300 {
		nc, err := net.Dial("tcp", src.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		nc.SetWriteDeadline(time.Now().Add(time.Second))
		nc.Write(says[i%len(says)]) // may fail: closed already
		if i%100 == 99 {
			h, err := dst.Pull(t.Context(), src.Describe(), 1, capability, []transfer.Copy{{Len: 1 << 20}})
			if err != nil {
				t.Fatal(err)
			}
			if <-h.Settled(); h.Poll().State != transfer.Done {
				t.Fatal(h.Poll().Err)
			}
			dst.pool.forget(peerKey{src.addr, src.id}) // the next pull connects anew
		}
	}
	src.Close() // does not wait for strangers
}

// Compare with the benchmarks of the same names without TLS.
func BenchmarkTLS(b *testing.B) {
	opt := Options{TLS: identity(b)}
	b.Run("Whole", func(b *testing.B) { bench(b, benchSize, []transfer.Copy{{Len: benchSize}}, opt) })
	b.Run("Fragments", func(b *testing.B) { bench(b, 30_000*4096, scattered(30_000, 4<<10), opt) })
	b.Run("OneBlock", func(b *testing.B) { bench(b, 256<<10, scattered(1, 256<<10), opt) })
}
