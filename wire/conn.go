package wire

import (
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

// Conn carries messages over one connection. Send, Queue and Flush may be called by any goroutine; Recv and
// Buffered by one at a time. It owns one goroutine, which writes; Close, a failure of the connection or its
// end stops it.
type Conn struct {
	nc   net.Conn
	opt  Options
	peer string

	mu      sync.Mutex
	pending net.Buffers // frames for the writer to take, whole ones in each segment
	queued  int         // bytes of pending
	taken   int         // bytes in the writer's hands
	closing time.Time
	err     error // why it closed
	wake    chan struct{}
	closed  chan struct{} // closed when err is set
	written chan struct{} // closed when the writer has left

	in    readBuffer
	frame []byte // reused by Recv, for frames that are larger than in may become

	bytesIn, bytesOut, messagesIn, messagesOut atomic.Int64
}

// NewConn takes over nc, which is past any handshake of its own.
func NewConn(nc net.Conn, opt Options) *Conn {
	c := &Conn{
		nc: nc, opt: opt.withDefaults(), peer: peerName(nc),
		wake: make(chan struct{}, 1), closed: make(chan struct{}), written: make(chan struct{}),
	}
	c.in.src = idleReader{nc, c.opt.IdleTimeout}
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

// idleReader gives each read a deadline. It waits for that in parts: it may be this process that was stopped,
// or its host with every peer there, and a stop, however long, ends one part and not those that follow it.
type idleReader struct {
	nc      net.Conn
	timeout time.Duration
}

const idleParts = 4

func (r idleReader) Read(b []byte) (n int, err error) {
	if r.timeout <= 0 {
		return r.nc.Read(b)
	}
	for range idleParts {
		if n, err = r.readWithin(b, r.timeout/idleParts); !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
	}
	return n, fmt.Errorf("wire: nothing from %s for %v: %w", peerName(r.nc), r.timeout, err)
}

func (r idleReader) readWithin(b []byte, d time.Duration) (int, error) {
	if err := r.nc.SetReadDeadline(time.Now().Add(d)); err != nil {
		return 0, err
	}
	return r.nc.Read(b)
}

// Send queues m, wakes the writer and returns at once; it does not keep m. Its errors: a FrameSizeError or a
// failure to encode (the connection stays), and why the connection is closed.
func (c *Conn) Send(m Message) error {
	if err := c.Queue(m); err != nil {
		return err
	}
	c.Flush()
	return nil
}

// flushAt is how many bytes Queue lets gather before it wakes the writer by itself.
const flushAt = 4 * segmentSize

// Queue is Send for a message that others follow: it goes out with the next Send or Flush at the latest.
func (c *Conn) Queue(m Message) error {
	c.mu.Lock()
	if c.err != nil || !c.closing.IsZero() {
		defer c.mu.Unlock()
		return c.reason()
	}
	need := frameBound(m)
	last := len(c.pending) - 1
	fresh := last < 0 || cap(c.pending[last])-len(c.pending[last]) < need
	var segment []byte
	if fresh {
		segment = newSegment(need)
	} else {
		segment = c.pending[last]
	}
	b, err := appendFrame(segment, m, c.opt.MaxFrame)
	if err != nil {
		if fresh {
			recycle(net.Buffers{segment})
		}
		c.mu.Unlock()
		return err
	}
	c.queued += len(b) - len(segment)
	if fresh {
		c.pending = append(c.pending, b)
	} else {
		c.pending[last] = b
	}
	queued := c.queued
	if wait := queued + c.taken; wait > c.opt.MaxQueue {
		c.mu.Unlock()
		return c.fail(&OverflowError{Peer: c.peer, Queued: wait, Limit: c.opt.MaxQueue})
	}
	c.mu.Unlock()
	c.messagesOut.Add(1)
	if queued >= flushAt {
		c.Flush()
	}
	return nil
}

// Flush sends what Queue has gathered. It does not wait for that.
func (c *Conn) Flush() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
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
	recycle(c.pending)
	c.pending, c.queued = nil, 0
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
	idle := false // nothing was sent since the last tick
	var list net.Buffers
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
			var closing time.Time
			list, closing = c.take(list)
			if len(list) == 0 && tick && idle {
				list = append(list, append(newSegment(lengthSize), 0, 0, 0, 0))
			}
			if len(list) == 0 {
				if !closing.IsZero() {
					c.fail(ErrClosed)
					return
				}
				break
			}
			idle, tick = false, false
			if err := c.writeAll(list, closing); err != nil {
				c.fail(fmt.Errorf("wire: send to %s: %w", c.peer, err))
				return
			}
			recycle(list)
		}
		idle = idle || tick
	}
}

// take hands the queue to the writer, whose previous share is sent, and continues it in the spare list.
func (c *Conn) take(spare net.Buffers) (list net.Buffers, closing time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list, c.pending = c.pending, spare[:0]
	c.taken, c.queued = c.queued, 0
	return list, c.closing
}

// writeAll writes all segments, at most writeStep bytes at a time.
func (c *Conn) writeAll(list net.Buffers, closing time.Time) error {
	for len(list) > 0 {
		n, size := 0, 0
		for n < len(list) && size+len(list[n]) <= writeStep {
			size += len(list[n])
			n++
		}
		var err error
		if n > 0 {
			err = c.writeSome(list[:n], closing)
		} else { // one long frame
			for part := range slices.Chunk(list[0], writeStep) {
				if err = c.writeSome(net.Buffers{part}, closing); err != nil {
					break
				}
			}
			n = 1
		}
		if err != nil {
			return err
		}
		list = list[n:]
	}
	return nil
}

// writeStep is what Options.WriteTimeout bounds.
const writeStep = 1 << 20

func (c *Conn) writeSome(list net.Buffers, closing time.Time) error {
	deadline := time.Now().Add(c.opt.WriteTimeout)
	if !closing.IsZero() && closing.Before(deadline) {
		deadline = closing
	}
	if err := c.nc.SetWriteDeadline(deadline); err != nil {
		return err
	}
	if len(list) == 1 {
		n, err := c.nc.Write(list[0])
		c.bytesOut.Add(int64(n))
		return err
	}
	vector := slices.Clone(list) // WriteTo empties it
	n, err := vector.WriteTo(c.nc)
	c.bytesOut.Add(n)
	return err
}

// Buffers up to this size are kept for reuse; larger ones are given back to the collector.
const keepBuffer = 1 << 20

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

// Buffered tells whether the next message has arrived already: Recv will not wait.
func (c *Conn) Buffered() bool {
	for c.in.buffered() >= lengthSize {
		b := c.in.unread()
		if size := binary.LittleEndian.Uint32(b); size > 0 {
			return uint64(len(b)-lengthSize) >= uint64(size)
		}
		c.in.discard(lengthSize) // a keepalive
		c.bytesIn.Add(lengthSize)
	}
	return false
}

// readFrame returns the next frame that is not a keepalive, valid until the next call.
func (c *Conn) readFrame(limit int) ([]byte, error) {
	size := 0
	for size == 0 {
		head, err := c.in.peek(lengthSize)
		if err != nil {
			if err == io.EOF && len(head) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		n := binary.LittleEndian.Uint32(head)
		if int64(n) > int64(limit) {
			return nil, &FrameSizeError{Size: int(n), Limit: limit}
		}
		size = int(n)
		c.in.discard(lengthSize)
		c.bytesIn.Add(lengthSize)
	}
	b, err := c.readBody(size)
	if err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	c.bytesIn.Add(int64(size))
	return b, nil
}

// readBody returns the next size bytes, where they arrived if there is room.
func (c *Conn) readBody(size int) ([]byte, error) {
	if size <= maxBuffer {
		b, err := c.in.peek(size)
		if err == nil {
			c.in.discard(size)
		}
		return b, err
	}
	c.frame = c.frame[:0] // grows only as they arrive
	for len(c.frame) < size {
		have := len(c.frame)
		step := min(size-have, max(have, maxBuffer))
		c.frame = slices.Grow(c.frame, step)[:have+step]
		if _, err := io.ReadFull(&c.in, c.frame[have:]); err != nil {
			return nil, err
		}
	}
	return c.frame, nil
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
	c.Flush()
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
	queued := c.queued + c.taken
	c.mu.Unlock()
	return Counters{
		BytesIn: c.bytesIn.Load(), BytesOut: c.bytesOut.Load(),
		MessagesIn: c.messagesIn.Load(), MessagesOut: c.messagesOut.Load(),
		Queued: queued,
	}
}

// Peer is the other end's address, for people.
func (c *Conn) Peer() string { return c.peer }
