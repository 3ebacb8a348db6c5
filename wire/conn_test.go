package wire

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func pair(t *testing.T, opt Options) (*Conn, *Conn) {
	t.Helper()
	a, b, err := Pair(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func TestMessagesArriveInOrder(t *testing.T) {
	a, b := pair(t, Options{})
	const n = 5000
	var wg sync.WaitGroup
	for _, c := range []*Conn{a, b} {
		wg.Go(func() {
			for i := range uint64(n) {
				// Every hundredth is larger than any buffer on the way.
				m := &SubmitRequest{ID: i}
				if i%100 == 0 {
					m.Prompt = make(Tokens, 50_000)
				}
				if err := c.Send(m); err != nil {
					t.Error(err)
					return
				}
			}
		})
		wg.Go(func() {
			for i := range uint64(n) {
				m, err := c.Recv()
				if err != nil {
					t.Error(err)
					return
				}
				if got := m.(*SubmitRequest).ID; got != i {
					t.Errorf("message %d arrived where %d was due", got, i)
					return
				}
			}
		})
	}
	wg.Wait()
	in, out := a.Counters(), b.Counters()
	if in.MessagesIn != n || out.MessagesOut != n || in.BytesIn != out.BytesOut || in.BytesIn < 50*200_000 {
		t.Errorf("counters: %+v and %+v", in, out)
	}
}

func TestCloseDeliversWhatWasSent(t *testing.T) {
	a, b := pair(t, Options{})
	for i := range uint64(1000) {
		a.Send(&AbortRequest{ID: i})
	}
	a.Send(&Disconnect{Reason: "bye"})
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := a.Send(&Pause{}); err != ErrClosed {
		t.Errorf("Send after Close: %v", err)
	}
	for range 1000 {
		if _, err := b.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	if m, err := b.Recv(); err != nil || !reflect.DeepEqual(m, &Disconnect{Reason: "bye"}) {
		t.Fatalf("got %v, %v", m, err)
	}
	if m, err := b.Recv(); err != io.EOF {
		t.Fatalf("got %v, %v; want io.EOF", m, err)
	}
}

func TestCloseEndsRecv(t *testing.T) {
	a, _ := pair(t, Options{})
	got := make(chan error)
	go func() {
		_, err := a.Recv()
		got <- err
	}()
	a.Close()
	if err := <-got; err != ErrClosed {
		t.Fatalf("Recv: %v", err)
	}
	<-a.Done()
	if err := a.Close(); err != nil {
		t.Fatalf("second Close: %v", err)
	}
}

func TestSlowPeerOverflows(t *testing.T) {
	a, b := pair(t, Options{MaxFrame: 1 << 16, MaxQueue: 1 << 20})
	m := &RankOrder{Peer: make([]byte, 1<<15)}
	var err error
	for range 1000 { // b reads nothing; the sockets take a few hundred KiB
		if err = a.Send(m); err != nil {
			break
		}
	}
	var over *OverflowError
	if !errors.As(err, &over) || over.Queued <= over.Limit {
		t.Fatalf("got %v, want an OverflowError", err)
	}
	if _, err := a.Recv(); !errors.As(err, &over) {
		t.Errorf("Recv: %v", err)
	}
	if err := a.Close(); !errors.As(err, &over) {
		t.Errorf("Close: %v", err)
	}
	for err = nil; err == nil; {
		_, err = b.Recv()
	}
	if err != io.ErrUnexpectedEOF && err != io.EOF {
		t.Errorf("the slow peer sees %v", err)
	}
}

func TestStuckPeerTimesOut(t *testing.T) {
	a, _ := pair(t, Options{WriteTimeout: 50 * time.Millisecond})
	a.Send(&RankOrder{Peer: make([]byte, 32<<20)})
	<-a.Done()
	if err := a.Err(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
}

func TestFrameLimit(t *testing.T) {
	a, b := pair(t, Options{MaxFrame: 1000})
	var size *FrameSizeError
	if err := a.Send(&RankOrder{Peer: make([]byte, 1000)}); !errors.As(err, &size) || size.Limit != 1000 {
		t.Fatalf("got %v, want a FrameSizeError", err)
	}
	// The connection is unharmed.
	a.Send(&AbortRequest{ID: 3})
	if m, err := b.Recv(); err != nil || m.(*AbortRequest).ID != 3 {
		t.Fatalf("got %v, %v", m, err)
	}
}

// stranger is one end of a Conn, spoken to in bytes.
func stranger(t *testing.T, opt Options) (*Conn, net.Conn) {
	listener, err := net.Listen("tcp", "127.0.0.1:0") // a net.Pipe refuses deadlines once its other end is closed
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	far, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	near, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c := NewConn(near, opt)
	t.Cleanup(func() { c.Close(); far.Close() })
	return c, far
}

func TestReceivedFrames(t *testing.T) {
	ok := binary.LittleEndian.AppendUint32(nil, 4)
	ok = append(ok, 0x92, byte(HeaderAbortRequest), 0x91, 0x05)
	for name, c := range map[string]struct {
		bytes []byte
		want  func(error) bool
	}{
		"too long":      {[]byte{0xff, 0xff, 0xff, 0xff}, func(err error) bool { var e *FrameSizeError; return errors.As(err, &e) }},
		"cut in length": {[]byte{1, 0}, func(err error) bool { return err == io.ErrUnexpectedEOF }},
		"cut in body":   {ok[:6], func(err error) bool { return err == io.ErrUnexpectedEOF }},
		"lying length":  {[]byte{0, 0, 0, 3, 0x92}, func(err error) bool { return err == io.ErrUnexpectedEOF }},
		"end":           {nil, func(err error) bool { return err == io.EOF }},
		"keepalives":    {make([]byte, 400), func(err error) bool { return err == io.EOF }},
	} {
		conn, far := stranger(t, Options{})
		go func() {
			far.Write(c.bytes)
			far.Close()
		}()
		m, err := conn.Recv()
		if m != nil || !c.want(err) {
			t.Errorf("%s: got %v, %v", name, m, err)
		}
		if cap(conn.frame) > 1<<20 {
			t.Errorf("%s: %d bytes allocated", name, cap(conn.frame))
		}
	}
	// A malformed message does not end the connection.
	conn, far := stranger(t, Options{})
	go far.Write(append([]byte{3, 0, 0, 0, 0x92, byte(HeaderAbortRequest), 0x05}, ok...))
	var bad *MalformedError
	if _, err := conn.Recv(); !errors.As(err, &bad) || bad.Of != HeaderAbortRequest {
		t.Fatalf("got %v", err)
	}
	if m, err := conn.Recv(); err != nil || m.(*AbortRequest).ID != 5 {
		t.Fatalf("got %v, %v", m, err)
	}
}

func TestKeepAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		a := NewConn(near, Options{KeepAlive: time.Second})
		b := NewConn(far, Options{IdleTimeout: 3 * time.Second})
		defer a.Close()
		defer b.Close()
		got := make(chan error, 1)
		go func() {
			_, err := a.Recv()
			got <- err
		}()
		time.AfterFunc(time.Hour, func() { a.Send(&Pause{}) })
		// An hour without messages is bridged by keepalives, which are not messages.
		if _, err := b.Recv(); err != nil {
			t.Fatal(err)
		}
		if n := b.Counters().MessagesIn; n != 1 {
			t.Errorf("%d messages", n)
		}
		// Without them b gives up, and a learns of it.
		a.Close()
		<-got
		c, d := net.Pipe()
		silent := NewConn(c, Options{KeepAlive: -1})
		defer silent.Close()
		idle := NewConn(d, Options{IdleTimeout: 3 * time.Second})
		defer idle.Close()
		began := time.Now()
		if _, err := idle.Recv(); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		if took := time.Since(began); took < 3*time.Second || took > 3100*time.Millisecond {
			t.Errorf("gave up after %v", took)
		}
	})
}

// A process that was stopped hears what its peer said meanwhile, or says once it runs again as well, before it
// judges it.
func TestStoppedReaderDoesNotBlameItsPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer near.Close()
		defer far.Close()
		r := idleReader{&stopped{Conn: far}, 1200 * time.Millisecond}
		go func() {
			time.Sleep(500 * time.Millisecond) // the peer was stopped too
			near.Write([]byte("alive"))
		}()
		b := make([]byte, 8)
		if n, err := r.Read(b); err != nil || string(b[:n]) != "alive" {
			t.Fatalf("got %q, %v", b[:n], err)
		}
		began := time.Now()
		if _, err := r.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) != r.timeout {
			t.Fatalf("of a peer that says nothing: %v after %v", err, time.Since(began))
		}
	})
}

// stopped is a connection whose first deadline has passed before anybody reads.
type stopped struct {
	net.Conn
	once sync.Once
}

func (s *stopped) SetReadDeadline(at time.Time) error {
	s.once.Do(func() { at = time.Now().Add(-time.Hour) })
	return s.Conn.SetReadDeadline(at)
}

func TestHandshake(t *testing.T) {
	hello := Connect{Kind: "engine", Name: "prefill_s0_dp0", Incarnation: 42}
	for name, c := range map[string]struct {
		version uint32
		admit   func(Connect) error
		refusal string // words of the refusal that reach the client
	}{
		"welcome":       {},
		"minor version": {version: Version + 7},
		"major version": {version: 9<<16 | 3, refusal: "version 9.3"},
		"not admitted":  {admit: func(Connect) error { return errors.New("no more engines") }, refusal: "no more engines"},
	} {
		t.Run(name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			var got Connect
			accepted := make(chan error, 1)
			go func() {
				nc, err := ln.Accept()
				if err == nil {
					var conn *Conn
					conn, got, err = Accept(t.Context(), nc, ConnectAck{Incarnation: 7}, c.admit, Options{})
					if err == nil {
						conn.Close()
					}
				}
				accepted <- err
			}()
			hello := hello
			hello.Version = c.version
			conn, ack, err := Dial(t.Context(), "tcp", ln.Addr().String(), hello, Options{})
			acceptErr := <-accepted
			if c.refusal == "" {
				if err != nil || acceptErr != nil {
					t.Fatal(err, acceptErr)
				}
				conn.Close()
				if hello.Version == 0 {
					hello.Version = Version
				}
				if got != hello || ack.Incarnation != 7 || ack.Version != Version {
					t.Fatalf("got %+v and %+v", got, ack)
				}
				return
			}
			var refused *RefusedError
			if !errors.As(err, &refused) || !strings.Contains(err.Error(), c.refusal) || acceptErr == nil {
				t.Fatalf("got %v and %v", err, acceptErr)
			}
		})
	}
}

func TestHandshakeWithStrangers(t *testing.T) {
	for name, say := range map[string]string{
		"http":          "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"other message": "\x03\x00\x00\x00\x92\x28\x90",
		"nothing":       "",
		"big frame":     "\x00\x00\x01\x01",
	} {
		near, far := net.Pipe()
		go io.Copy(io.Discard, far)
		go far.Write([]byte(say))
		_, _, err := Accept(t.Context(), near, ConnectAck{}, nil, Options{HandshakeTimeout: 100 * time.Millisecond})
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
		far.Close()
	}
	// A server that never answers.
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, _, err := Dial(ctx, "tcp", ln.Addr().String(), Connect{}, Options{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("silent server: %v", err)
	}
}

func TestTLS(t *testing.T) {
	server, client := certificate(t)
	ln, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		nc, err := ln.Accept()
		if err != nil {
			return
		}
		c, _, err := Accept(context.Background(), nc, ConnectAck{}, nil, Options{TLS: server})
		if err != nil {
			t.Error(err)
			return
		}
		m, _ := c.Recv()
		c.Send(m)
		c.Recv()
		c.Close()
	}()
	c, _, err := Dial(t.Context(), "unix", ln.Addr().String(), Connect{Kind: "client"}, Options{TLS: client})
	if err != nil {
		t.Fatal(err)
	}
	want := &RankOrder{Peer: bytes.Repeat([]byte("x"), 100_000)}
	c.Send(want)
	if got, err := c.Recv(); err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("got %v", err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

func certificate(t *testing.T) (server, client *tls.Config) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"baton"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}},
		&tls.Config{RootCAs: roots, ServerName: "baton"}
}

func FuzzRecv(f *testing.F) {
	b, _ := appendFrame(nil, partial(), 1<<20)
	f.Add(append(b, b...))
	f.Add([]byte{0, 0, 0, 0, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, stream []byte) {
		near, far := net.Pipe()
		c := NewConn(near, Options{MaxFrame: 1 << 20})
		go func() {
			far.Write(stream)
			far.Close()
		}()
		for n := 0; ; n++ {
			_, err := c.Recv()
			var bad *MalformedError
			if err != nil && !errors.As(err, &bad) {
				break
			}
			if n > len(stream) {
				t.Fatal("more messages than bytes")
			}
		}
		if cap(c.frame) > 4*len(stream)+1<<17 {
			t.Fatalf("a buffer of %d for %d bytes", cap(c.frame), len(stream))
		}
		c.Close()
	})
}
