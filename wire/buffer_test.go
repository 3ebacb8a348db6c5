package wire

import (
	"bytes"
	"io"
	"math/rand/v2"
	"testing"
	"testing/iotest"
	"testing/synctest"

	"net"

	"pgregory.net/rapid"
)

// Whatever the reads bring, peeks and reads take the same bytes in the same order, and the buffer stays
// within its bounds.
func TestReadBufferKeepsOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sent := make([]byte, rapid.IntRange(0, 3*maxBuffer).Draw(t, "bytes"))
		random := rand.New(rand.NewPCG(1, uint64(len(sent))))
		for i := range sent {
			sent[i] = byte(random.Uint32())
		}
		src := io.Reader(bytes.NewReader(sent))
		src = rapid.SampledFrom([]func(io.Reader) io.Reader{
			func(r io.Reader) io.Reader { return r }, iotest.HalfReader, iotest.DataErrReader,
		}).Draw(t, "source")(src)
		b := readBuffer{src: src}
		for at := 0; at < len(sent); {
			n := rapid.SampledFrom([]int{1, 4, 100, minBuffer, minBuffer + 1, maxBuffer}).Draw(t, "size")
			if rapid.Bool().Draw(t, "read") {
				p := make([]byte, n)
				got, err := b.Read(p)
				if err != nil && got == 0 || !bytes.Equal(p[:got], sent[at:at+got]) {
					t.Fatalf("read of %d at %d: %d, %v", n, at, got, err)
				}
				at += got
				continue
			}
			got, err := b.peek(n)
			if have := len(sent) - at; n > have {
				if err != io.EOF || !bytes.Equal(got, sent[at:]) {
					t.Fatalf("peek of %d at %d of %d: %d bytes, %v", n, at, len(sent), len(got), err)
				}
				n = have
			} else if err != nil || !bytes.Equal(got, sent[at:at+n]) {
				t.Fatalf("peek of %d at %d: %d bytes, %v", n, at, len(got), err)
			}
			b.discard(n)
			at += n
			if len(b.buf) > maxBuffer {
				t.Fatalf("a buffer of %d bytes", len(b.buf))
			}
		}
	})
}

// A connection on which little arrives keeps a small buffer.
func TestReadBufferGrowsWithTheTraffic(t *testing.T) {
	b := readBuffer{src: iotest.OneByteReader(bytes.NewReader(make([]byte, 4*minBuffer)))}
	for range 4 * minBuffer {
		if _, err := b.peek(1); err != nil {
			t.Fatal(err)
		}
		b.discard(1)
	}
	if len(b.buf) != minBuffer {
		t.Errorf("a buffer of %d bytes for one at a time", len(b.buf))
	}
	b = readBuffer{src: bytes.NewReader(make([]byte, 4*maxBuffer))}
	for range 4 * maxBuffer / 1024 {
		if _, err := b.peek(1024); err != nil {
			t.Fatal(err)
		}
		b.discard(1024)
	}
	if len(b.buf) != maxBuffer {
		t.Errorf("a buffer of %d bytes for as many as there are", len(b.buf))
	}
}

// brokenReader returns neither bytes nor an error.
type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, nil }

func TestReadBufferGivesUp(t *testing.T) {
	b := readBuffer{src: brokenReader{}}
	if _, err := b.peek(1); err != io.ErrNoProgress {
		t.Errorf("got %v", err)
	}
}

// What is queued leaves with a Flush or a Send, in order, and not before; a lot of it leaves by itself.
func TestQueueWaitsForFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		a, b := NewConn(near, Options{KeepAlive: -1}), NewConn(far, Options{KeepAlive: -1, IdleTimeout: -1})
		defer a.Close()
		defer b.Close()
		arrived := make(chan uint64, 1<<16)
		go func() {
			for {
				m, err := b.Recv()
				if err != nil {
					close(arrived)
					return
				}
				arrived <- m.(*AbortRequest).ID
			}
		}()
		var next, id uint64
		queue := func(n int) {
			for range n {
				id++
				if err := a.Queue(&AbortRequest{ID: id}); err != nil {
					t.Fatal(err)
				}
			}
		}
		expect := func(when string, n uint64) {
			t.Helper()
			synctest.Wait()
			for len(arrived) > 0 {
				if got := <-arrived; got != next+1 {
					t.Fatalf("%s: message %d after %d", when, got, next)
				}
				next++
			}
			if next != n {
				t.Fatalf("%s: %d messages arrived, want %d", when, next, n)
			}
		}
		queue(10)
		expect("queued", 0)
		if c := a.Counters(); c.MessagesOut != 10 || c.Queued == 0 {
			t.Errorf("%+v", c)
		}
		a.Flush()
		expect("flushed", 10)
		a.Flush()
		expect("flushed in vain", 10)
		queue(5)
		id++
		if err := a.Send(&AbortRequest{ID: id}); err != nil {
			t.Fatal(err)
		}
		expect("sent", 16)
		queue(flushAt / 5) // bytes a message, at least
		synctest.Wait()
		if len(arrived) == 0 {
			t.Error("nothing left by itself")
		}
		a.Flush()
		expect("all", id)
	})
}

// Close sends what is queued.
func TestCloseFlushes(t *testing.T) {
	a, b := pair(t, Options{})
	if err := a.Queue(&AbortRequest{ID: 7}); err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if m, err := b.Recv(); err != nil || m.(*AbortRequest).ID != 7 {
		t.Fatalf("got %v, %v", m, err)
	}
	if err := a.Queue(&Pause{}); err != ErrClosed {
		t.Errorf("Queue after Close: %v", err)
	}
}

// Buffered tells of whole messages alone, past keepalives.
func TestBuffered(t *testing.T) {
	one, err := appendFrame(nil, &AbortRequest{ID: 1}, 100)
	if err != nil {
		t.Fatal(err)
	}
	keepalive := make([]byte, lengthSize)
	for name, c := range map[string]struct {
		after []byte // the first message, in the same read
		want  bool
	}{
		"nothing":              {nil, false},
		"a message":            {one, true},
		"keepalives":           {append(keepalive, keepalive...), false},
		"one after keepalives": {append(append(keepalive, keepalive...), one...), true},
		"part of a length":     {one[:2], false},
		"part of a message":    {one[:len(one)-1], false},
		"a frame beyond limit": {[]byte{255, 255, 255, 255, 1, 2, 3}, false},
	} {
		conn, far := stranger(t, Options{})
		if conn.Buffered() {
			t.Errorf("%s: before anything arrived", name)
		}
		if _, err := far.Write(append(one[:len(one):len(one)], c.after...)); err != nil {
			t.Fatal(err)
		}
		for n := 0; n < len(one)+len(c.after); n = conn.in.buffered() { // until all is there
			if _, err := conn.in.peek(len(one) + len(c.after)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := conn.Recv(); err != nil {
			t.Fatal(err)
		}
		if got := conn.Buffered(); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
		if in := conn.Counters().BytesIn; c.want && in < int64(len(one)) {
			t.Errorf("%s: %d bytes in", name, in)
		}
	}
}
