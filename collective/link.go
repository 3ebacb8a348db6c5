package collective

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

// link is the connection to another process. It owns two goroutines: one reads, into the queues of
// lanes, and never waits for anybody, so that the other process can always write; one says that this process
// lives. Ranks write on their own goroutines.
type link struct {
	p       *process
	conn    net.Conn
	addr    string
	ranks   []int // of the other process
	silence time.Duration

	writing chan struct{} // has a token while somebody writes a frame; guards what follows
	torn    bool          // a frame was cut short: nothing can follow it
	known   map[uint32]bool
	scratch []byte
	parts   net.Buffers
	space   [2][]byte // of parts

	theirs   map[uint32]*group // by the other's numbers; guarded by process.mu
	writeErr atomic.Pointer[error]
	over     chan struct{} // closed when the reader has left
	gone     sync.WaitGroup
}

// packBytes is how many bytes of a message are collected for one write.
const packBytes = 128 << 10

// lastWords bounds how long a failing process tries to say why.
const lastWords = 500 * time.Millisecond

// newLink adds the connection to a process. start lets it work.
func newLink(p *process, conn net.Conn, addr string, ranks []int, silence time.Duration) *link {
	l := &link{p: p, conn: conn, addr: addr, ranks: ranks, silence: silence, writing: make(chan struct{}, 1), known: map[uint32]bool{}, theirs: map[uint32]*group{}, over: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.links = append(p.links, l)
	for _, r := range ranks {
		p.ranks[r].link, p.ranks[r].home = l, ranks[0]
	}
	return l
}

func (l *link) start() {
	l.gone.Go(l.read)
	l.gone.Go(l.live)
}

// lock waits until nobody writes; who holds it owns the stream of frames.
func (l *link) lock() { l.writing <- struct{}{} }

func (l *link) unlock() { <-l.writing }

// interrupt ends what the link is doing because the world has ended; process.mu is held. The reader leaves
// at once; a write under way may come to its end.
func (l *link) interrupt() {
	_ = l.conn.SetReadDeadline(time.Unix(1, 0)) // it fails for a closed connection only
	_ = l.conn.SetWriteDeadline(time.Now().Add(lastWords))
}

// live sends heartbeats. When the world fails it says why and closes the connection.
func (l *link) live() {
	defer l.conn.Close()
	tick := time.NewTicker(min(beatEvery, l.silence/4))
	defer tick.Stop()
	for {
		select {
		case <-l.p.ended:
			l.confess()
			return
		case <-l.over:
			if l.p.failed() != nil {
				l.confess()
			}
			return
		case <-tick.C:
			reports := l.p.reports()
			select {
			case l.writing <- struct{}{}:
				_ = l.body(header{kind: frameBeat}, beatBody(nil, reports)) // the reader finds out
				l.unlock()
			default: // a frame under way says as much
			}
		}
	}
}

const beatEvery = 250 * time.Millisecond

// confess says why the world has ended, and waits until the other process has read it: when the connection is
// closed with something unread, that may be lost.
func (l *link) confess() {
	<-l.over
	f := l.p.failure.Load()
	reason := f.Err.Error()
	l.lock()
	err := l.body(header{kind: frameFailed, from: f.Rank}, []byte(reason[:min(len(reason), maxReason)]))
	said := err == nil && l.end()
	l.torn = true
	l.unlock()
	if said && l.conn.SetReadDeadline(time.Now().Add(lastWords)) == nil {
		_, _ = io.Copy(io.Discard, l.conn) // it ends one way or the other
	}
}

// end tells the other process that nothing follows, and reports whether that was possible; the caller holds the
// lock.
func (l *link) end() bool {
	half, ok := l.conn.(interface{ CloseWrite() error })
	return ok && half.CloseWrite() == nil
}

// bye says that a rank here has closed.
func (l *link) bye(rank int) {
	l.lock()
	defer l.unlock()
	_ = l.body(header{kind: frameClosed, from: rank}, nil) // if it fails, the reader ends the world
}

// finish waits for the end of the connection; every rank here has closed.
func (l *link) finish() {
	if l.p.failed() == nil {
		// The other process ends the connection when it has read everything. Closed earlier, it might
		// lose some.
		late := time.AfterFunc(lastWords, func() { l.conn.Close() })
		defer late.Stop()
		l.lock()
		l.end()
		l.unlock()
	}
	l.gone.Wait()
}

// body writes a frame with a small body; the caller holds the lock.
func (l *link) body(h header, body []byte) error {
	h.rows = len(body)
	l.scratch = append(appendHeader(l.scratch[:0], h), body...)
	return l.write(l.scratch, nil)
}

// write writes part of a frame, which lies in two places; the caller holds the lock.
func (l *link) write(b, more []byte) error {
	if l.torn {
		return net.ErrClosed
	}
	var err error
	if len(more) == 0 {
		_, err = l.conn.Write(b)
	} else {
		l.parts = append(l.space[:0], b, more)
		_, err = l.parts.WriteTo(l.conn)
	}
	if err != nil {
		l.torn = true
		l.writeErr.CompareAndSwap(nil, &err)
		// What the other side said last may explain it: the reader has a little time to find that.
		_ = l.conn.SetReadDeadline(time.Now().Add(lastWords))
	}
	return err
}

// check turns the failure of a write into why the world has ended, which the reader knows. A connection that ended
// well is no failure.
func (l *link) check(err error) error {
	if err == nil {
		return nil
	}
	select {
	case <-l.p.ended:
	case <-l.over:
	}
	return l.p.failed()
}

// announce makes a group known to the processes of its members.
func (p *process) announce(g *group) error {
	for _, l := range p.links {
		for _, r := range g.ranks {
			if p.ranks[r].link == l {
				if err := l.check(l.announce(g)); err != nil {
					return err
				}
				break
			}
		}
	}
	return nil
}

func (l *link) announce(g *group) error {
	l.lock()
	defer l.unlock()
	if l.known[g.number] {
		return nil
	}
	l.known[g.number] = true
	return l.body(header{kind: frameGroup, group: g.number}, groupBody(nil, g.name, g.ranks))
}

// sendTaken tells the sender of a lane how many messages have been taken.
func (l *link) sendTaken(g *group, k laneKey, taken uint64) error {
	l.lock()
	err := l.body(header{kind: frameTaken, direct: k.direct, group: g.number, from: k.to, to: k.from, taken: taken}, nil)
	l.unlock()
	return l.check(err)
}

// sendData writes a message. When it returns v is not needed any more.
func (l *link) sendData(g *group, k laneKey, c call, taken uint64, v view) error {
	h := header{
		kind: frameData, op: c.op, direct: k.direct, group: g.number, from: k.from, to: k.to, root: c.root, seq: c.seq,
		taken: taken, rows: v.rows, cols: v.cols,
	}
	l.lock()
	err := l.data(h, v)
	l.unlock()
	return l.check(err)
}

// data writes a message, collecting rows that are not large.
func (l *link) data(h header, v view) error {
	b := appendHeader(l.scratch[:0], h)
	defer func() { l.scratch = b[:0] }()
	if v.elements() > 0 && v.dense() {
		v = v.flat()
	}
	for i := 0; i < v.rows && v.cols > 0; i++ {
		row := asBytes(v.row(i))
		if len(b)+len(row) <= packBytes {
			b = append(b, row...)
			continue
		}
		if err := l.write(b, row); err != nil {
			return err
		}
		b = b[:0]
	}
	if len(b) == 0 {
		return nil
	}
	return l.write(b, nil)
}

func asBytes(f []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(f))), 4*len(f))
}

// read delivers what the other process sends until the connection or the world ends.
func (l *link) read() {
	defer close(l.over)
	r := bufio.NewReaderSize(&watched{link: l}, 64<<10)
	var head [headerSize]byte
	for {
		_, err := io.ReadFull(r, head[:])
		if err == nil {
			err = l.frame(r, head[:])
		}
		if err == nil {
			continue
		}
		if l.endsWell(err) {
			return
		}
		if w := l.writeErr.Load(); w != nil && errors.Is(err, os.ErrDeadlineExceeded) {
			err = *w
		}
		if err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("the connection ended")
		}
		lost := &LostError{l.ranks, l.addr, err}
		if l.p.end(l.ranks[0], lost).(*FailedError).Err == error(lost) && !errors.Is(err, errFrame) {
			l.conn.Close() // nothing can be said here any more, and somebody may be stuck trying
		}
		return
	}
}

// endsWell reports whether nobody needs the connection any more: every rank there has closed and said so, or
// every rank here has.
func (l *link) endsWell(err error) bool {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	if l.p.open == 0 {
		return true
	}
	for _, r := range l.ranks {
		if !l.p.ranks[r].closed.Load() {
			return false
		}
	}
	return err == io.EOF
}

// watched reads from the connection of a link and fails when nothing comes for too long.
type watched struct {
	*link
	deadline time.Time
	last     bool // no later deadline follows, since nothing can be written
}

func (w *watched) Read(b []byte) (int, error) {
	if err := w.extend(); err != nil {
		return 0, err
	}
	n, err := w.conn.Read(b)
	if errors.Is(err, os.ErrDeadlineExceeded) && w.writeErr.Load() == nil {
		// It may be this process that was stopped: then what the other said meanwhile is there to be read.
		w.deadline = time.Now().Add(lastLook)
		if err := w.until(w.deadline); err != nil {
			return 0, err
		}
		if n, err = w.conn.Read(b); errors.Is(err, os.ErrDeadlineExceeded) {
			err = fmt.Errorf("nothing heard for %v", w.silence)
		}
	}
	return n, err
}

// extend allows a silence from now on. Setting deadlines costs as much as a small read, so not each time.
func (w *watched) extend() error {
	switch now := time.Now(); {
	case w.last:
		return nil
	case w.writeErr.Load() != nil:
		w.last, w.deadline = true, now.Add(lastWords)
	case w.deadline.Sub(now) >= w.silence*7/8:
		return nil
	default:
		w.deadline = now.Add(w.silence - lastLook)
	}
	return w.until(w.deadline)
}

// lastLook is the end of a silence, in which a process that was stopped itself finds what it has missed.
const lastLook = time.Millisecond

// until sets the deadline, unless the world has ended. Whoever ends it sets one too, later than that.
func (w *watched) until(t time.Time) error {
	if err := w.conn.SetReadDeadline(t); err != nil {
		return err
	}
	return w.p.failed()
}
