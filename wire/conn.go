package wire

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Options bound a connection. The zero value is the default of each.
type Options struct {
	// MaxFrame is the longest frame in bytes that is sent or accepted. Default 64 MiB.
	MaxFrame int
	// MaxQueue is how many bytes may wait to be sent. A peer that lets the queue outgrow it is too slow
	// or stuck: the connection is closed with an OverflowError. Default 128 MiB, at least MaxFrame.
	MaxQueue int
	// WriteTimeout bounds a write of up to 1 MiB; a peer that accepts nothing for so long is given
	// up. Default 10 s.
	WriteTimeout time.Duration
	// IdleTimeout closes a connection on which nothing arrived for so long; negative is never. The peer's
	// KeepAlive should be a third of it or less. Default DefaultIdleTimeout.
	IdleTimeout time.Duration
	// KeepAlive sends an empty frame after so long without another; negative is never. Default
	// DefaultKeepAlive.
	KeepAlive time.Duration
	// HandshakeTimeout bounds Dial, and Accept from the arrival of the connection. Default 5 s.
	HandshakeTimeout time.Duration
	// Linger bounds how long Close waits to send what is queued. Default 1 s.
	Linger time.Duration
	// TLS, when set, encrypts: Dial as its client, Accept as its server. See mtls.Identity.
	TLS *tls.Config
}

// A peer that is stopped, or cut off, is found out after the idle timeout; one that runs says something more
// often, however loaded it is. Both ends of every connection of the control plane use these.
const (
	DefaultKeepAlive   = 300 * time.Millisecond
	DefaultIdleTimeout = 1200 * time.Millisecond
)

func (o Options) withDefaults() Options {
	if o.IdleTimeout == 0 {
		o.IdleTimeout = DefaultIdleTimeout
	}
	if o.KeepAlive == 0 {
		o.KeepAlive = DefaultKeepAlive
	}
	set(&o.MaxFrame, 64<<20)
	set(&o.MaxQueue, 128<<20)
	set(&o.WriteTimeout, 10*time.Second)
	set(&o.HandshakeTimeout, 5*time.Second)
	set(&o.Linger, time.Second)
	o.MaxQueue = max(o.MaxQueue, o.MaxFrame)
	return o
}

func set[T int | time.Duration](v *T, def T) {
	if *v <= 0 {
		*v = def
	}
}

// ErrClosed is the error of a Conn that this side closed.
var ErrClosed = errors.New("wire: connection closed")

// OverflowError closes a connection whose peer reads more slowly than this side sends.
type OverflowError struct {
	Peer          string
	Queued, Limit int // bytes
}

func (e *OverflowError) Error() string {
	return fmt.Sprintf("wire: %s is too slow: %d bytes would wait to be sent, the limit is %d", e.Peer, e.Queued, e.Limit)
}

// Counters say what a connection carried, framing included.
type Counters struct {
	BytesIn, BytesOut       int64
	MessagesIn, MessagesOut int64 // keepalives are not messages
	Queued                  int   // bytes that wait to be sent
}

// Conn carries messages over one connection. Send may be called by any goroutine; Recv by one at a
// time. It owns one goroutine, which writes; Close, a failure of the connection or its end stops it.
type Conn struct {
	nc   net.Conn
	opt  Options
	peer string

	mu      sync.Mutex
	pending []byte // frames for the writer to take
	taken   int    // bytes in the writer's hands
	closing time.Time
	err     error // why it closed
	wake    chan struct{}
	closed  chan struct{} // closed when err is set
	written chan struct{} // closed when the writer has left

	br    *bufio.Reader
	frame []byte // reused by Recv

	bytesIn, bytesOut, messagesIn, messagesOut atomic.Int64
}

// Buffers up to this size are kept for reuse; larger ones are given back to the collector.
const keepBuffer = 1 << 20

// NewConn takes over nc, which is past any handshake of its own.
func NewConn(nc net.Conn, opt Options) *Conn {
	c := &Conn{
		nc: nc, opt: opt.withDefaults(), peer: peerName(nc),
		wake: make(chan struct{}, 1), closed: make(chan struct{}), written: make(chan struct{}),
	}
	c.br = bufio.NewReaderSize(idleReader{nc, c.opt.IdleTimeout}, 64<<10)
	go c.write()
	return c
}

// peerName says who is at the other end, for people. The ends of a socket pair have no address.
func peerName(nc net.Conn) string {
	if a := nc.RemoteAddr(); a != nil && a.String() != "" && a.String() != "@" {
		if c, ok := nc.(interface{ PeerName() string }); ok { // its certificate's
			return fmt.Sprintf("%s (%s)", a, c.PeerName())
		}
		return a.String()
	}
	return "the peer in this process"
}

// idleReader gives each read a deadline.
type idleReader struct {
	nc      net.Conn
	timeout time.Duration
}

func (r idleReader) Read(b []byte) (int, error) {
	if r.timeout <= 0 {
		return r.nc.Read(b)
	}
	n, err := r.readWithin(b, r.timeout)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// It may be this process that was stopped: then what the peer said meanwhile is there to be read.
		n, err = r.readWithin(b, time.Millisecond)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("wire: nothing from %s for %v: %w", peerName(r.nc), r.timeout, err)
	}
	return n, err
}

func (r idleReader) readWithin(b []byte, d time.Duration) (int, error) {
	if err := r.nc.SetReadDeadline(time.Now().Add(d)); err != nil {
		return 0, err
	}
	return r.nc.Read(b)
}

// Send queues m and returns at once; it does not keep m. Its errors: a FrameSizeError or a failure to
// encode (the connection stays), and why the connection is closed.
func (c *Conn) Send(m Message) error {
	c.mu.Lock()
	if c.err != nil || !c.closing.IsZero() {
		defer c.mu.Unlock()
		return c.reason()
	}
	was := len(c.pending)
	b, err := appendFrame(c.pending, m, c.opt.MaxFrame)
	if err != nil {
		c.mu.Unlock()
		return err
	}
	if queued := len(b) + c.taken; queued > c.opt.MaxQueue {
		c.mu.Unlock()
		return c.fail(&OverflowError{Peer: c.peer, Queued: queued, Limit: c.opt.MaxQueue})
	}
	c.pending = b
	c.mu.Unlock()
	c.messagesOut.Add(1)
	if was == 0 {
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
	return nil
}

// reason is the error of a connection that is closed or closing; c.mu is held.
func (c *Conn) reason() error {
	if c.err == nil {
		return ErrClosed
	}
	return c.err
}

// fail closes the connection at once because of err and returns why it is closed, which is an earlier
// reason if there was one.
func (c *Conn) fail(err error) error {
	c.mu.Lock()
	if c.err != nil {
		defer c.mu.Unlock()
		return c.err
	}
	c.err = err
	c.pending = nil
	close(c.closed)
	c.mu.Unlock()
	c.nc.Close()
	return err
}

// write sends what is queued, everything at once, until the connection closes.
func (c *Conn) write() {
	defer close(c.written)
	var alive <-chan time.Time
	if c.opt.KeepAlive > 0 {
		t := time.NewTicker(c.opt.KeepAlive)
		defer t.Stop()
		alive = t.C
	}
	var spare []byte
	idle := false // nothing was sent since the last tick
	for {
		tick := false
		select {
		case <-c.wake:
		case <-alive:
			tick = true
		case <-c.closed:
			return
		}
		for {
			b, closing := c.take(spare)
			if len(b) == 0 && tick && idle {
				b = append(spare[:0], 0, 0, 0, 0)
			}
			if len(b) == 0 {
				if !closing.IsZero() {
					c.fail(ErrClosed)
					return
				}
				break
			}
			idle, tick = false, false
			if err := c.writeAll(b, closing); err != nil {
				c.fail(fmt.Errorf("wire: send to %s: %w", c.peer, err))
				return
			}
			if spare = b; cap(spare) > keepBuffer {
				spare = nil
			}
		}
		idle = idle || tick
	}
}

// take hands the queue to the writer, whose previous share is sent, and continues it in spare.
func (c *Conn) take(spare []byte) (b []byte, closing time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.taken = len(c.pending)
	if c.taken > 0 {
		b, c.pending = c.pending, spare[:0]
	}
	return b, c.closing
}

func (c *Conn) writeAll(b []byte, closing time.Time) error {
	for part := range slices.Chunk(b, 1<<20) {
		deadline := time.Now().Add(c.opt.WriteTimeout)
		if !closing.IsZero() && closing.Before(deadline) {
			deadline = closing
		}
		if err := c.nc.SetWriteDeadline(deadline); err != nil {
			return err
		}
		n, err := c.nc.Write(part)
		c.bytesOut.Add(int64(n))
		if err != nil {
			return err
		}
	}
	return nil
}

// Recv waits for the next message, which shares no memory with the connection. Its errors: io.EOF
// when the peer ended the connection between two messages; a *MalformedError, after which Recv may be
// called again; anything else closed the connection.
func (c *Conn) Recv() (Message, error) {
	b, err := c.readFrame(c.opt.MaxFrame)
	if err != nil {
		return nil, c.fail(err)
	}
	c.messagesIn.Add(1)
	m, err := decodeFrame(b)
	if cap(c.frame) > keepBuffer {
		c.frame = nil
	}
	return m, err
}

// readFrame returns the next frame that is not a keepalive, valid until the next call.
func (c *Conn) readFrame(limit int) ([]byte, error) {
	size := 0
	for size == 0 {
		head, err := c.br.Peek(lengthSize)
		if err != nil {
			if err == io.EOF && len(head) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		if n := binary.LittleEndian.Uint32(head); int64(n) > int64(limit) {
			return nil, &FrameSizeError{Size: int(n), Limit: limit}
		} else {
			size = int(n)
		}
		if _, err := c.br.Discard(lengthSize); err != nil {
			return nil, err
		}
		c.bytesIn.Add(lengthSize)
	}
	if err := c.readBody(size); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	c.bytesIn.Add(int64(size))
	return c.frame, nil
}

// readBody reads size bytes into c.frame, which grows only as they arrive.
func (c *Conn) readBody(size int) error {
	c.frame = c.frame[:0]
	for len(c.frame) < size {
		have := len(c.frame)
		step := min(size-have, max(have, 64<<10))
		c.frame = slices.Grow(c.frame, step)[:have+step]
		if _, err := io.ReadFull(c.br, c.frame[have:]); err != nil {
			return err
		}
	}
	return nil
}

// Close sends what is queued, for at most Options.Linger, and closes the connection. A Recv under way
// returns ErrClosed. It returns why the connection had failed, if it had.
func (c *Conn) Close() error {
	c.mu.Lock()
	if c.closing.IsZero() {
		c.closing = time.Now().Add(c.opt.Linger)
		// A write under way started with a later deadline.
		if c.err == nil && c.taken > 0 {
			c.nc.SetWriteDeadline(c.closing)
		}
	}
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
	<-c.written
	if err := c.Err(); err != ErrClosed && err != io.EOF {
		return err
	}
	return nil
}

// Done is closed when the connection is.
func (c *Conn) Done() <-chan struct{} { return c.closed }

// Err says why the connection is closed, nil while it is not.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Counters are the counts so far.
func (c *Conn) Counters() Counters {
	c.mu.Lock()
	queued := len(c.pending) + c.taken
	c.mu.Unlock()
	return Counters{
		BytesIn: c.bytesIn.Load(), BytesOut: c.bytesOut.Load(),
		MessagesIn: c.messagesIn.Load(), MessagesOut: c.messagesOut.Load(),
		Queued: queued,
	}
}

// Peer is the other end's address, for people.
func (c *Conn) Peer() string { return c.peer }
