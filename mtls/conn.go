package mtls

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"time"
)

// Conn is a TLS connection past its handshake. Its protocols frame what they send, so that a connection
// cut short shows: Close closes the connection beneath at once and never waits for the peer, as a TLS
// goodbye could.
type Conn struct {
	*tls.Conn
	raw net.Conn
}

// Close closes the connection beneath.
func (c *Conn) Close() error { return c.raw.Close() }

// Read explains a refusal. That of a server comes after the client's handshake, with its first read.
func (c *Conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil && err != io.EOF {
		if problem, permanent, ok := explainAlert(err); ok {
			err = &Error{Peer: c.raw.RemoteAddr().String(), Problem: problem, Permanent: permanent, Err: err}
		}
	}
	return n, err
}

// PeerName is the common name of the other side's certificate.
func (c *Conn) PeerName() string {
	if certs := c.ConnectionState().PeerCertificates; len(certs) > 0 {
		return certs[0].Subject.CommonName
	}
	return ""
}

// Client makes nc a TLS connection to the server at addr (host:port), whose certificate must be for that
// host unless cfg.ServerName says another. ctx bounds the handshake. On error, an *Error, nc is closed.
func Client(ctx context.Context, nc net.Conn, cfg *tls.Config, addr string) (*Conn, error) {
	if cfg.ServerName == "" {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			host = addr
		}
		cfg = cfg.Clone()
		cfg.ServerName = host
	}
	c := tls.Client(nc, cfg)
	if err := c.HandshakeContext(ctx); err != nil {
		nc.Close()
		return nil, explain(addr, cfg.ServerName, because(ctx, err))
	}
	return &Conn{c, nc}, nil
}

// Server makes nc, which a listener accepted, a TLS connection. ctx bounds the handshake. On error, an
// *Error, nc is closed.
func Server(ctx context.Context, nc net.Conn, cfg *tls.Config) (*Conn, error) {
	peer := nc.RemoteAddr().String()
	first, err := sniff(ctx, nc)
	if err != nil {
		linger(nc)
		return nil, explain(peer, "", because(ctx, err))
	}
	c := tls.Server(&sniffed{Conn: nc, first: first}, cfg)
	if err := c.HandshakeContext(ctx); err != nil {
		linger(nc)
		return nil, explain(peer, "", because(ctx, err))
	}
	return &Conn{c, nc}, nil
}

// because prefers the reason of ctx over what its end did to the connection.
func because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// errNoTLS is a client that begins with something else than a TLS handshake.
var errNoTLS = errors.New("its first bytes are not a TLS handshake")

// sniffSize is how many bytes tell TLS from the protocols that run over it.
const sniffSize = 3

// sniff reads a client's first bytes. crypto/tls would take some plain messages for the beginning of a
// long record, and wait for its end.
func sniff(ctx context.Context, nc net.Conn) ([]byte, error) {
	defer context.AfterFunc(ctx, func() { nc.Close() })()
	first := make([]byte, sniffSize)
	if _, err := io.ReadFull(nc, first); err != nil {
		return nil, err
	}
	const handshake, major = 22, 3
	if first[0] != handshake || first[1] != major {
		return nil, errNoTLS
	}
	return first, nil
}

// sniffed is a connection whose first bytes have been read.
type sniffed struct {
	net.Conn
	first []byte
}

func (s *sniffed) Read(b []byte) (int, error) {
	if len(s.first) == 0 {
		return s.Conn.Read(b)
	}
	n := copy(b, s.first)
	s.first = s.first[n:]
	return n, nil
}

const (
	lingerTime  = 500 * time.Millisecond
	lingerBytes = 64 << 10
)

// linger closes a connection of a refused client in a way that lets it read why: closed with bytes
// unread, the system would reset it.
func linger(nc net.Conn) {
	defer nc.Close()
	// What fails here has been closed already, by its peer or by the end of a context.
	half, ok := nc.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil || nc.SetDeadline(time.Now().Add(lingerTime)) != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, nc, lingerBytes) // it ends one way or the other
}

// timedOut reports whether err is the end of a deadline, of the context's or the connection's.
func timedOut(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
}
