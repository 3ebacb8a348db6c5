package wire

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"baton/mtls"
)

// identity makes one of an authority of its own.
func identity(t testing.TB) *mtls.Identity {
	t.Helper()
	a, _, err := mtls.OpenAuthority(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.Issue("engine", nil)
	if err != nil {
		t.Fatal(err)
	}
	id, err := mtls.Load(c.Files, nil)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// introduce lets a client dial a server over loopback and returns both errors.
func introduce(t *testing.T, server, client *tls.Config) (serverErr, clientErr error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	served := make(chan error, 1)
	go func() {
		nc, err := ln.Accept()
		if err != nil {
			served <- err
			return
		}
		c, _, err := Accept(context.Background(), nc, ConnectAck{}, nil, Options{TLS: server})
		if err == nil {
			if server != nil && !strings.Contains(c.Peer(), "(engine)") {
				t.Errorf("the peer is %q", c.Peer())
			}
			c.Recv()
			c.Close()
		}
		served <- err
	}()
	c, _, err := Dial(t.Context(), "tcp", ln.Addr().String(), Connect{Kind: "engine"}, Options{TLS: client})
	if err == nil {
		c.Close()
	}
	return <-served, err
}

func TestMutualTLS(t *testing.T) {
	a, b := identity(t), identity(t)
	anonymous := a.Client()
	anonymous.GetClientCertificate = nil
	for _, c := range []struct {
		name                   string
		server, client         *tls.Config
		serverSays, clientSays string
	}{
		{"both plain", nil, nil, "", ""},
		{"one authority", a.Server(), a.Client(), "", ""},
		{"two authorities", a.Server(), b.Client(), "does not accept this side's certificate", "its certificate is not signed by --tls-ca"},
		{"no client certificate", a.Server(), anonymous, "it shows no certificate", "it wants a certificate and this side shows none"},
		{"plain client", a.Server(), nil, "it does not use TLS and this side does", "it may want TLS (--tls-ca"},
		{"plain server", nil, a.Client(), "it uses TLS and this side does not", "it does not use TLS (give it --tls-ca"},
	} {
		t.Run(c.name, func(t *testing.T) {
			began := time.Now()
			serverErr, clientErr := introduce(t, c.server, c.client)
			for side, got := range map[string]struct {
				err  error
				says string
			}{"server": {serverErr, c.serverSays}, "client": {clientErr, c.clientSays}} {
				switch {
				case got.says == "" && got.err != nil, got.says != "" && (got.err == nil || !strings.Contains(got.err.Error(), got.says)):
					t.Errorf("the %s says %v, want %q", side, got.err, got.says)
				case got.err != nil:
					var tlsErr *mtls.Error
					var handshake *HandshakeError
					if !errors.As(got.err, &tlsErr) && !errors.As(got.err, &handshake) {
						t.Errorf("the %s's error has no type: %v", side, got.err)
					}
				}
			}
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("took %v", took)
			}
		})
	}
}

// A handshake under TLS that stops anywhere ends with the time allowed.
func TestSlowTLSHandshake(t *testing.T) {
	id := identity(t)
	for name, say := range map[string]string{"silence": "", "a byte": "\x16", "half a hello": "\x16\x03\x01\x02\x00\x01\x00"} {
		near, far := net.Pipe()
		go io.Copy(io.Discard, far)
		go far.Write([]byte(say))
		began := time.Now()
		_, _, err := Accept(t.Context(), near, ConnectAck{}, nil, Options{TLS: id.Server(), HandshakeTimeout: 50 * time.Millisecond})
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > 2*time.Second {
			t.Errorf("%s: %v after %v", name, err, time.Since(began))
		}
		far.Close()
	}
}

// Whatever a stranger says first, Accept ends, lets only a Connect in and keeps nothing.
func FuzzAccept(f *testing.F) {
	hello, err := appendFrame(nil, &Connect{Version: Version, Kind: "client", Name: "x", Incarnation: 7}, 1<<20)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(hello)
	f.Add(append([]byte{0, 0, 0, 0}, hello...))
	f.Add([]byte("\x03\x00\x00\x00\x92\x28\x90"))
	f.Add([]byte("\x16\x03\x01\x02\x00\x01\x00"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		near, far := net.Pipe()
		answer := make(chan []byte, 1)
		go func() {
			b, _ := io.ReadAll(far)
			answer <- b
		}()
		go func() {
			far.Write(stream)
			far.Close()
		}()
		c, got, err := Accept(t.Context(), near, ConnectAck{Incarnation: 9}, nil, Options{HandshakeTimeout: 5 * time.Second})
		if err == nil {
			if got.Version>>16 != Version>>16 {
				t.Errorf("let in %+v", got)
			}
			if cap(c.frame) > maxHello {
				t.Errorf("%d bytes kept", cap(c.frame))
			}
			c.Close()
		}
		if errors.Is(err, context.DeadlineExceeded) {
			t.Error("it hung")
		}
		if b := <-answer; err != nil && len(b) > 0 {
			if n := binary.LittleEndian.Uint32(b); int(n)+lengthSize != len(b) {
				t.Errorf("a stranger got %x", b)
			}
		}
	})
}
