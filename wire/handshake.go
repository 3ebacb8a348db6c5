package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"

	"baton/mtls"
)

// Version is this build's protocol version, major<<16 | minor. Peers of one major version understand
// each other; a minor one adds messages or fields.
const Version uint32 = 1 << 16

// maxHello bounds the frames of a handshake, which come from strangers.
const maxHello = 64 << 10

// RefusedError is the other side's refusal of a connection, in its words.
type RefusedError struct{ Reason string }

func (e *RefusedError) Error() string { return "wire: connection refused: " + e.Reason }

// HandshakeError is a peer that was reached and did not do its part of the introduction.
type HandshakeError struct {
	Peer string
	Hint string // what to look at, empty when the cause says it
	Err  error
}

func (e *HandshakeError) Error() string {
	if e.Hint == "" {
		return fmt.Sprintf("wire: handshake with %s: %v", e.Peer, e.Err)
	}
	return fmt.Sprintf("wire: handshake with %s: %s (%v)", e.Peer, e.Hint, e.Err)
}

// Unwrap returns the cause.
func (e *HandshakeError) Unwrap() error { return e.Err }

// Dial connects and introduces itself with hello; a zero hello.Version becomes this build's. It
// returns a *RefusedError when the other side does not want the connection, an *mtls.Error when TLS
// stands in the way, a *HandshakeError when the other side does not follow the protocol.
func Dial(ctx context.Context, network, addr string, hello Connect, opt Options) (*Conn, ConnectAck, error) {
	opt = opt.withDefaults()
	ctx, cancel := context.WithTimeout(ctx, opt.HandshakeTimeout)
	defer cancel()
	nc, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, ConnectAck{}, fmt.Errorf("wire: %w", err)
	}
	if opt.TLS != nil {
		if nc, err = asConn(mtls.Client(ctx, nc, opt.TLS, addr)); err != nil {
			return nil, ConnectAck{}, fmt.Errorf("wire: %w", err)
		}
	}
	if hello.Version == 0 {
		hello.Version = Version
	}
	c := NewConn(nc, opt)
	ack, err := c.introduce(ctx, hello)
	if err != nil {
		c.fail(err)
		<-c.written
		return nil, ack, err
	}
	return c, ack, nil
}

// asConn keeps a nil pointer from becoming an interface that is not nil.
func asConn(c *mtls.Conn, err error) (net.Conn, error) {
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Conn) introduce(ctx context.Context, hello Connect) (ConnectAck, error) {
	var ack ConnectAck
	if err := c.Send(&hello); err != nil {
		return ack, err
	}
	if err := c.handshake(ctx, &ack); err != nil {
		return ack, err
	}
	if ack.Error != "" {
		return ack, &RefusedError{ack.Error}
	}
	if err := checkVersion(ack.Version); err != nil {
		return ack, err
	}
	return ack, nil
}

// Accept answers the introduction on a connection that a listener accepted. admit, when not nil, may
// refuse it; its error's words go to the peer. ack is what a welcome carries; a zero ack.Version
// becomes this build's. Accept waits for the peer, so call it on a goroutine of the connection's own.
// On error nc is closed.
func Accept(ctx context.Context, nc net.Conn, ack ConnectAck, admit func(Connect) error, opt Options) (*Conn, Connect, error) {
	opt = opt.withDefaults()
	ctx, cancel := context.WithTimeout(ctx, opt.HandshakeTimeout)
	defer cancel()
	if opt.TLS != nil {
		var err error
		if nc, err = asConn(mtls.Server(ctx, nc, opt.TLS)); err != nil {
			return nil, Connect{}, fmt.Errorf("wire: %w", err)
		}
	}
	if ack.Version == 0 {
		ack.Version = Version
	}
	c := NewConn(nc, opt)
	var hello Connect
	err := c.handshake(ctx, &hello)
	if err != nil {
		c.fail(err)
		<-c.written
		return nil, hello, err
	}
	err = checkVersion(hello.Version)
	if err == nil && admit != nil {
		err = admit(hello)
	}
	if err != nil {
		ack.Error = err.Error()
	}
	if sendErr := c.Send(&ack); err == nil {
		err = sendErr
	}
	if err != nil {
		c.Close() // sends the refusal
		return nil, hello, err
	}
	return c, hello, nil
}

// handshake reads the one message that want is, from a peer that is still a stranger.
func (c *Conn) handshake(ctx context.Context, want Message) error {
	stop := context.AfterFunc(ctx, func() { c.nc.Close() })
	b, err := c.readFrame(maxHello)
	if !stop() || ctx.Err() != nil {
		return &HandshakeError{Peer: c.peer, Err: context.Cause(ctx)}
	}
	if err != nil {
		return c.handshakeError(err)
	}
	c.messagesIn.Add(1)
	m, err := decodeFrame(b)
	if err != nil {
		return err
	}
	switch m := m.(type) {
	case *Connect:
		if w, ok := want.(*Connect); ok {
			*w = *m
			return nil
		}
	case *ConnectAck:
		if w, ok := want.(*ConnectAck); ok {
			*w = *m
			return nil
		}
	}
	return &HandshakeError{Peer: c.peer, Err: fmt.Errorf("got %v where %v was due", m.Header(), want.Header())}
}

// handshakeError explains why the first frame did not come.
func (c *Conn) handshakeError(err error) error {
	var refused *mtls.Error
	var size *FrameSizeError
	const clientHello = 0x0316 // how the first bytes of a TLS connection begin a length
	switch {
	case errors.As(err, &refused):
		return fmt.Errorf("wire: %w", err)
	case errors.As(err, &size) && size.Size&0xffff == clientHello && c.opt.TLS == nil:
		return &HandshakeError{c.peer, "it uses TLS and this side does not: give this side --tls-ca, --tls-cert and --tls-key", err}
	case c.opt.TLS == nil && (err == io.EOF || errors.Is(err, syscall.ECONNRESET)):
		return &HandshakeError{c.peer, "it ended the connection without a word: it may want TLS (--tls-ca, --tls-cert and --tls-key), or be something else than meant", err}
	}
	return &HandshakeError{Peer: c.peer, Err: err}
}

// checkVersion wants the peer's major version to be ours.
func checkVersion(v uint32) error {
	if v>>16 == Version>>16 {
		return nil
	}
	return fmt.Errorf("wire: the peer speaks protocol version %d.%d, this side %d.%d: run the same release on both",
		v>>16, v&0xffff, Version>>16, Version&0xffff)
}
