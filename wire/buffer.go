package wire

import (
	"io"
	"net"
	"sync"
)

// Frames wait to be sent in segments, which are shared by all connections: one that is quiet holds none, and
// one that is busy works on memory that is still in the processor's cache.
const segmentSize = 64 << 10

var segments = sync.Pool{New: func() any { return new([segmentSize]byte) }}

func newSegment(need int) []byte {
	if need > segmentSize {
		return make([]byte, 0, need)
	}
	return segments.Get().(*[segmentSize]byte)[:0]
}

// recycle takes segments back whose bytes nobody needs any more.
func recycle(list net.Buffers) {
	for i, s := range list {
		if cap(s) == segmentSize {
			segments.Put((*[segmentSize]byte)(s[:segmentSize]))
		}
		list[i] = nil
	}
}

// A receive buffer begins with minBuffer bytes and grows, up to maxBuffer, when more arrives at once: the
// memory of many quiet connections stays small, and a busy one takes few reads.
const (
	minBuffer = 8 << 10
	maxBuffer = 128 << 10
)

// readBuffer is what has arrived on a connection and was not taken yet.
type readBuffer struct {
	src  io.Reader
	buf  []byte
	r, w int // buf[r:w] is unread
}

func (b *readBuffer) buffered() int { return b.w - b.r }

func (b *readBuffer) unread() []byte { return b.buf[b.r:b.w] }

// peek returns the next n bytes, at most maxBuffer, without taking them; they are valid until the next peek or
// read. With an error it returns what there is instead.
func (b *readBuffer) peek(n int) ([]byte, error) {
	for b.buffered() < n {
		if err := b.fill(n); err != nil {
			return b.unread(), err
		}
	}
	return b.buf[b.r : b.r+n], nil
}

// discard takes n bytes that were peeked at.
func (b *readBuffer) discard(n int) { b.r += n }

// fill reads once, into a buffer that has room for n unread bytes.
func (b *readBuffer) fill(n int) error {
	full := b.w == len(b.buf) && b.w > 0 // by a read that may have left something behind
	if size := max(n, minBuffer); size > len(b.buf) || full && len(b.buf) < maxBuffer {
		size = min(max(size, 2*len(b.buf)), maxBuffer)
		grown := make([]byte, size)
		copy(grown, b.unread())
		b.buf = grown
	} else {
		copy(b.buf, b.unread())
	}
	b.w -= b.r
	b.r = 0
	for range 100 {
		got, err := b.src.Read(b.buf[b.w:])
		b.w += got
		if got > 0 || err != nil {
			return later(got, err)
		}
	}
	return io.ErrNoProgress
}

// later leaves an error that came with bytes to the next read, which gets it again.
func later(got int, err error) error {
	if got > 0 {
		return nil
	}
	return err
}

// Read takes what is buffered first. It implements io.Reader for frames that are larger than the buffer.
func (b *readBuffer) Read(p []byte) (int, error) {
	if b.buffered() == 0 {
		return b.src.Read(p)
	}
	n := copy(p, b.unread())
	b.r += n
	return n, nil
}
