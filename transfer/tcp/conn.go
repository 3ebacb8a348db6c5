package tcp

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"baton/mtls"
	"baton/transfer"
	"baton/transfer/internal/backend"
)

// conn is one connection with its deadlines: a peer that lets bytes pause for longer than timeout is lost.
type conn struct {
	net.Conn
	timeout time.Duration
	extends *deadlines
	gather  *bufio.Writer // under TLS: makes whole records of small pieces
}

// deadlines remembers when the connection's were set, for setting them costs as much as a small read.
type deadlines struct{ read, write time.Time }

// newConn is a connection over nc, through secure if that is not nil.
func newConn(nc net.Conn, secure *mtls.Conn, opt Options) conn {
	if tc, ok := nc.(*net.TCPConn); ok && opt.SocketBuffer > 0 {
		tc.SetReadBuffer(opt.SocketBuffer)
		tc.SetWriteBuffer(opt.SocketBuffer)
	}
	c := conn{Conn: nc, timeout: opt.Timeout, extends: new(deadlines)}
	if secure != nil {
		c.Conn, c.gather = secure, bufio.NewWriterSize(secure, 64<<10)
	}
	return c
}

// awaitRead allows the next reads a pause of at least three quarters of the timeout.
func (c conn) awaitRead() error {
	now := time.Now()
	if now.Sub(c.extends.read) < c.timeout/4 {
		return nil
	}
	c.extends.read = now
	return c.SetReadDeadline(now.Add(c.timeout))
}

func (c conn) awaitWrite() error {
	now := time.Now()
	if now.Sub(c.extends.write) < c.timeout/4 {
		return nil
	}
	c.extends.write = now
	return c.SetWriteDeadline(now.Add(c.timeout))
}

// awaitNothing lets the connection be idle.
func (c conn) awaitNothing() error {
	*c.extends = deadlines{}
	return c.SetDeadline(time.Time{})
}

// write sends a few bytes of protocol.
func (c conn) write(b []byte) error {
	if err := c.awaitWrite(); err != nil {
		return err
	}
	_, err := c.Write(b)
	return err
}

// verdict waits for an answer.
func (c conn) verdict() error {
	if err := c.awaitRead(); err != nil {
		return err
	}
	b, err := backend.ReadVerdict(c)
	if err != nil {
		return &lostError{err}
	}
	return backend.ParseVerdict(b)
}

func (c conn) answer(err error) error {
	return c.write(backend.EndFrame(backend.AppendVerdict(backend.BeginFrame(nil), err), 0))
}

// lostError is a connection that broke or fell silent, as opposed to a peer that said no.
type lostError struct{ err error }

func (e *lostError) Error() string { return e.Unwrap()[0].Error() + ": " + e.err.Error() }

func (e *lostError) Unwrap() []error {
	if errors.Is(e.err, os.ErrDeadlineExceeded) {
		return []error{transfer.ErrTimeout, transfer.ErrPeerLost, e.err}
	}
	return []error{transfer.ErrPeerLost, e.err}
}

// appendRequest encodes a claim and the ranges that it is for.
func appendRequest(b, claim []byte, ranges []transfer.Range) ([]byte, error) {
	start := len(b)
	b = backend.EndFrame(append(backend.BeginFrame(b), claim...), start)
	start = len(b)
	b = backend.EndFrame(backend.AppendRanges(backend.BeginFrame(b), ranges), start)
	if len(b)-start > backend.MaxFrame || len(ranges) > backend.MaxRanges {
		return nil, fmt.Errorf("%d fragments in one transfer are too many: use larger blocks or split it", len(ranges))
	}
	return b, nil
}

// pool keeps idle connections for each peer.
type pool struct {
	opt    Options
	mu     sync.Mutex
	idle   map[peerKey][]idleConn
	closed bool
}

type peerKey struct {
	addr        string
	incarnation uint64
}

type idleConn struct {
	conn
	since time.Time
}

const (
	maxIdle     = 16 // connections for one peer
	maxIdleTime = time.Minute
)

// take returns an idle connection, if there is one.
func (p *pool) take(key peerKey) (conn, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sweep()
	list := p.idle[key]
	if len(list) == 0 {
		return conn{}, false
	}
	c := list[len(list)-1]
	if p.idle[key] = list[:len(list)-1]; len(list) == 1 {
		delete(p.idle, key)
	}
	return c.conn, true
}

// sweep closes what has been idle for too long, also towards peers that are gone; p.mu is held.
func (p *pool) sweep() {
	for key, list := range p.idle { // oldest first
		n := 0
		for n < len(list) && time.Since(list[n].since) > maxIdleTime {
			list[n].Close()
			n++
		}
		if p.idle[key] = list[n:]; n == len(list) {
			delete(p.idle, key)
		}
	}
}

// keep returns a connection between two requests to the pool.
func (p *pool) keep(key peerKey, c conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle[key]) >= maxIdle || c.awaitNothing() != nil {
		c.Close()
		return
	}
	if p.idle == nil {
		p.idle = make(map[peerKey][]idleConn)
	}
	p.idle[key] = append(p.idle[key], idleConn{c, time.Now()})
}

// forget closes the idle connections to a peer, of which one turned out to be lost.
func (p *pool) forget(key peerKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.idle[key] {
		c.Close()
	}
	delete(p.idle, key)
}

func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, list := range p.idle {
		for _, c := range list {
			c.Close()
		}
	}
	p.idle = nil
}

// dial opens a connection and says hello.
func (p *pool) dial(ctx context.Context, key peerKey) (conn, error) {
	d := net.Dialer{Timeout: p.opt.Timeout}
	nc, err := d.DialContext(ctx, "tcp", key.addr)
	if err != nil {
		return conn{}, &lostError{err}
	}
	var secure *mtls.Conn
	if p.opt.TLS != nil {
		ctx, cancel := context.WithTimeout(ctx, p.opt.Timeout)
		defer cancel()
		if secure, err = mtls.Client(ctx, nc, p.opt.TLS.Client(), key.addr); err != nil {
			return conn{}, &lostError{err}
		}
	}
	c := newConn(nc, secure, p.opt)
	if err := c.write(binary.LittleEndian.AppendUint64([]byte(magic), key.incarnation)); err != nil {
		c.Close()
		return conn{}, &lostError{err}
	}
	return c, nil
}

// do makes one request of a peer and, after a yes, moves the bytes. A kept connection that turns out to
// be lost before it answers is replaced by a new one. The end of ctx ends the connection.
func (p *pool) do(ctx context.Context, key peerKey, request []byte, move func(conn) error) error {
	for {
		c, kept := p.take(key)
		if !kept {
			var err error
			if c, err = p.dial(ctx, key); err != nil {
				return err
			}
		}
		answered, err := exchange(ctx, c, request, move)
		if err == nil {
			p.keep(key, c)
			return nil
		}
		c.Close()
		if !kept || answered || ctx.Err() != nil {
			return err
		}
		p.forget(key)
	}
}

// exchange is one request on one connection. On error the connection is of no more use.
func exchange(ctx context.Context, c conn, request []byte, move func(conn) error) (answered bool, err error) {
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer func() {
		if !stop() && err == nil {
			err = ctx.Err() // too late, but the connection is gone
		}
	}()
	if err := c.write(request); err != nil {
		return false, &lostError{err}
	}
	if err := c.verdict(); err != nil {
		var lost *lostError
		return !errors.As(err, &lost), err
	}
	return true, move(c)
}

// sendWindow is how many bytes are handed to the kernel at once, in sendPieces pieces at most.
const (
	sendWindow = 4 << 20
	sendPieces = 1024
)

// send writes head and then the ranges of mem, straight from there. When it returns the kernel has
// copied what was sent: the memory is not read any more.
func (c conn) send(head, mem []byte, ranges []transfer.Range, moved func(int64)) error {
	pieces := make(net.Buffers, 0, min(len(ranges)+2, sendPieces))
	var have int64
	if len(head) > 0 {
		pieces = append(pieces, head)
	}
	flush := func() error {
		if err := c.awaitWrite(); err != nil {
			return err
		}
		if err := c.writeAll(pieces); err != nil {
			return &lostError{err}
		}
		moved(have)
		pieces, have = pieces[:0], 0
		return nil
	}
	for _, r := range ranges {
		for r.Len > 0 {
			n := min(r.Len, sendWindow-have)
			pieces = append(pieces, mem[r.Off:r.Off+n])
			r.Off, r.Len, have = r.Off+n, r.Len-n, have+n
			if have == sendWindow || len(pieces) == sendPieces {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	if len(pieces) == 0 {
		return nil
	}
	return flush()
}

// writeAll sends pieces, in as few system calls as it takes.
func (c conn) writeAll(pieces net.Buffers) error {
	if c.gather == nil {
		_, err := pieces.WriteTo(c.Conn) // it consumes its receiver, here a copy
		return err
	}
	for _, p := range pieces {
		if _, err := c.gather.Write(p); err != nil {
			return err
		}
	}
	return c.gather.Flush()
}

// receive reads the ranges of mem from the connection, straight to there.
func (c conn) receive(mem []byte, ranges []transfer.Range, moved func(int64)) error {
	var window [64][]byte
	in := newScatter(c.Conn)
	for len(ranges) > 0 {
		pieces, bytes := window[:0], int64(0)
		for _, r := range ranges {
			if len(pieces) == len(window) || bytes >= 1<<20 {
				break
			}
			pieces = append(pieces, mem[r.Off:r.Off+r.Len])
			bytes += r.Len
		}
		if err := c.awaitRead(); err != nil {
			return err
		}
		n, err := in.read(pieces)
		if err != nil {
			return &lostError{err}
		}
		moved(int64(n))
		ranges = advance(ranges, int64(n))
	}
	return nil
}

// advance drops the first n bytes of ranges, which it overwrites.
func advance(ranges []transfer.Range, n int64) []transfer.Range {
	for n > 0 {
		if r := &ranges[0]; n < r.Len {
			r.Off, r.Len = r.Off+n, r.Len-n
			return ranges
		}
		n -= ranges[0].Len
		ranges = ranges[1:]
	}
	return ranges
}
