//go:build linux

package shm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"baton/transfer"
	"baton/transfer/internal/backend"

	"golang.org/x/sys/unix"
)

// Pull copies from the peer that peer describes.
func (e *Endpoint) Pull(ctx context.Context, peer []byte, handoff uint64, capability []byte, copies []transfer.Copy) (transfer.Handle, error) {
	fail := func(err error) (transfer.Handle, error) { return nil, &transfer.Error{Op: "shm pull", Err: err} }
	desc, err := backend.ParseDescription(peer, Name)
	if err != nil {
		return fail(err)
	}
	src, _, err := backend.Split(copies, desc.Size, int64(len(e.mem.Data)))
	if err != nil {
		return fail(err)
	}
	if err := backend.CheckCapability(capability); err != nil {
		return fail(err)
	}
	e.mu.Lock()
	if e.life.Err() != nil {
		e.mu.Unlock()
		return fail(transfer.ErrClosed)
	}
	t := backend.NewTask(ctx, e.life)
	capability = bytes.Clone(capability)
	e.work.Go(func() {
		err := e.pull(t, desc, handoff, capability, src, copies)
		if err != nil {
			err = &transfer.Error{Op: "shm pull", Peer: desc.Addr, Err: backend.Reason(t.Context(), err)}
		}
		t.Settle(err)
	})
	e.mu.Unlock()
	return t, nil
}

func (e *Endpoint) pull(t *backend.Task, desc backend.Description, handoff uint64, capability []byte, src []transfer.Range, copies []transfer.Copy) error {
	if len(src) == 0 {
		return nil
	}
	p, err := e.peer(t.Context(), desc)
	if err != nil {
		return err
	}
	defer p.release()
	end, err := p.claim(t.Context(), handoff, capability, src)
	if err != nil {
		return err
	}
	defer end()
	err = copyAll(t, e.slots, e.mem.Data, p.data, copies, p.lost)
	if e.copied != nil {
		e.copied()
	}
	if err == nil {
		err = p.alive()
	}
	return err
}

// peer is one source: a connection to it and, once it granted a read, its memory.
type peer struct {
	e    *Endpoint
	desc backend.Description
	made chan struct{} // closed when connecting ended

	c    *net.UnixConn
	lost chan struct{} // closed when the connection ended
	data []byte        // the source's memory; set before the first grant is delivered
	send sync.Mutex    // one frame at a time

	mu     sync.Mutex
	err    error // why it is lost
	refs   int   // pulls that use it, and the reader
	nextID uint64
	waits  map[uint64]chan error
}

// peer returns the connection to a source, made if necessary; release it.
func (e *Endpoint) peer(ctx context.Context, desc backend.Description) (*peer, error) {
	key := string(desc.Encode())
	var err error
	for range 2 { // a connection that was there may turn out to be lost; a new one should not
		e.mu.Lock()
		p := e.peers[key]
		if p == nil || p.isLost() {
			if e.life.Err() != nil {
				e.mu.Unlock()
				return nil, transfer.ErrClosed
			}
			p = &peer{e: e, desc: desc, made: make(chan struct{}), lost: make(chan struct{}), refs: 1, waits: make(map[uint64]chan error)}
			e.peers[key] = p
			e.work.Go(func() { p.run(key) })
		}
		e.mu.Unlock()
		select {
		case <-p.made:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if err = p.acquire(); err == nil {
			return p, nil
		}
	}
	return nil, err
}

func (p *peer) isLost() bool {
	select {
	case <-p.lost:
		return true
	default:
		return false
	}
}

// acquire takes a reference, unless the connection is lost.
func (p *peer) acquire() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.refs++
	}
	return p.err
}

// run connects, then reads answers until the connection ends.
func (p *peer) run(key string) {
	err := p.connect()
	if err != nil {
		p.fail(err)
	}
	close(p.made)
	if err == nil {
		p.fail(p.read())
	}
	p.e.mu.Lock()
	if p.e.peers[key] == p {
		delete(p.e.peers, key)
	}
	p.e.mu.Unlock()
	p.release()
}

func (p *peer) connect() error {
	ctx, cancel := context.WithTimeout(p.e.life, p.e.opt.Timeout)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "unix", p.desc.Addr)
	if err != nil {
		return fmt.Errorf("%w: %w", transfer.ErrPeerLost, err)
	}
	if err := sameUser(c); err != nil {
		c.Close()
		return err
	}
	p.mu.Lock()
	if p.err != nil { // the endpoint closes
		p.mu.Unlock()
		c.Close()
		return p.err
	}
	p.c = c.(*net.UnixConn)
	p.mu.Unlock()
	return p.write(binary.LittleEndian.AppendUint64([]byte(magic), p.desc.Incarnation))
}

// write sends whole frames. A failure is the end of the connection.
func (p *peer) write(b []byte) error {
	p.send.Lock()
	defer p.send.Unlock()
	err := p.c.SetWriteDeadline(time.Now().Add(p.e.opt.Timeout))
	if err == nil {
		_, err = p.c.Write(b)
	}
	if err != nil {
		return p.fail(fmt.Errorf("%w: %w", transfer.ErrPeerLost, err))
	}
	return nil
}

// fail ends the connection and returns why it ended, which is an earlier reason if there was one.
func (p *peer) fail(err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = err
		close(p.lost)
		if p.c != nil {
			p.c.Close()
		}
	}
	return p.err
}

// release gives up a reference. The last one unmaps the memory.
func (p *peer) release() {
	p.mu.Lock()
	p.refs--
	last := p.refs == 0
	p.mu.Unlock()
	if last && p.data != nil {
		_ = unix.Munmap(p.data)
	}
}

// claim asks the source for leave to read src. end tells it that reading is over.
func (p *peer) claim(ctx context.Context, handoff uint64, capability []byte, src []transfer.Range) (end func(), err error) {
	answer := make(chan error, 1)
	p.mu.Lock()
	p.nextID++
	id := p.nextID
	p.waits[id] = answer
	p.mu.Unlock()

	b := backend.BeginFrame(nil)
	b = binary.LittleEndian.AppendUint64(append(b, kindClaim), id)
	b = backend.EndFrame(backend.AppendClaim(b, handoff, capability), 0)
	body := len(b)
	b = backend.EndFrame(backend.AppendRanges(backend.BeginFrame(b), src), body)
	if len(b)-body > backend.MaxFrame {
		return nil, fmt.Errorf("%d fragments in one pull are too many: use larger blocks or split it", len(src))
	}
	if err := p.write(b); err != nil {
		return nil, err
	}
	// From here on the source may count a reader.
	done := func() {
		b := binary.LittleEndian.AppendUint64(append(backend.BeginFrame(nil), kindDone), id)
		_ = p.write(backend.EndFrame(b, 0)) // a failure ends the read as well
	}
	timeout := time.NewTimer(p.e.opt.Timeout)
	defer timeout.Stop()
	select {
	case err := <-answer:
		if err != nil {
			return nil, err // nothing was granted
		}
		return done, nil
	case <-p.lost:
		select {
		case err := <-answer: // it came just before the end
			if err != nil {
				return nil, err
			}
		default:
		}
		return nil, p.fail(nil)
	case <-timeout.C:
		return nil, p.fail(fmt.Errorf("%w: no answer for %v", transfer.ErrTimeout, p.e.opt.Timeout))
	case <-ctx.Done():
		// The grant may be on its way: unclaimed, it would pin the source.
		p.mu.Lock()
		p.refs++
		p.mu.Unlock()
		p.e.work.Go(func() {
			defer p.release()
			p.abandon(answer, done)
		})
		return nil, ctx.Err()
	}
}

// abandon waits for the answer to a claim that nobody wants any more and ends what it granted.
func (p *peer) abandon(answer <-chan error, end func()) {
	timeout := time.NewTimer(p.e.opt.Timeout)
	defer timeout.Stop()
	select {
	case err := <-answer:
		if err == nil {
			end()
		}
	case <-p.lost:
	case <-timeout.C:
		p.fail(fmt.Errorf("%w: no answer for %v", transfer.ErrTimeout, p.e.opt.Timeout))
	}
}

// read delivers answers until the connection ends, and returns why.
func (p *peer) read() error {
	in := &fdReader{c: p.c}
	defer in.close()
	r := bufio.NewReader(in)
	var buf []byte
	for {
		var err error
		if buf, err = backend.ReadFrame(r, buf, backend.MaxClaim); err != nil {
			return fmt.Errorf("%w: %w", transfer.ErrPeerLost, err)
		}
		if len(buf) < 10 {
			return errors.New("malformed answer from the peer")
		}
		id := binary.LittleEndian.Uint64(buf)
		if buf[8]&flagMemory != 0 && p.data == nil {
			if err := p.mapMemory(in); err != nil {
				return err
			}
		}
		verdict := backend.ParseVerdict(buf[9:])
		if verdict == nil && p.data == nil {
			return errors.New("the peer granted a read without passing its memory")
		}
		p.mu.Lock()
		if answer := p.waits[id]; answer != nil {
			delete(p.waits, id)
			answer <- verdict
		}
		p.mu.Unlock()
	}
}

// mapMemory maps the descriptor that came with the answer.
func (p *peer) mapMemory(in *fdReader) error {
	if len(in.fds) == 0 {
		return errors.New("the peer's memory did not come with its answer")
	}
	fd := in.fds[0]
	in.fds = in.fds[1:]
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	// A file that can shrink could kill this process in the middle of a copy.
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		return errors.New("the peer's memory is not sealed against shrinking")
	}
	if st.Size < p.desc.Size || p.desc.Size == 0 {
		return fmt.Errorf("the peer's memory has %d bytes where its description says %d", st.Size, p.desc.Size)
	}
	data, err := unix.Mmap(fd, 0, int(p.desc.Size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	_ = unix.Madvise(data, unix.MADV_HUGEPAGE) // see transfer.NewMemory
	p.data = data
	return nil
}

// alive fails if the connection has ended. Asked after a copy, it tells that the source counted a reader
// all along: whatever makes it stop counting closes its end first, and closing a Unix socket shows at the
// other end at once.
func (p *peer) alive() error {
	raw, err := p.c.SyscallConn()
	if err == nil {
		fds := []unix.PollFd{{Events: unix.POLLRDHUP}}
		ctlErr := raw.Control(func(fd uintptr) {
			fds[0].Fd = int32(fd)
			for {
				if _, err = unix.Poll(fds, 0); err != unix.EINTR {
					return
				}
			}
		})
		if err == nil {
			err = ctlErr
		}
		if err == nil && fds[0].Revents != 0 {
			err = io.EOF
		}
	}
	if err != nil {
		return fmt.Errorf("%w: the connection ended during the copy: %w", transfer.ErrPeerLost, err)
	}
	return nil
}

// fdReader reads bytes and keeps the descriptors that come with them. A descriptor arrives no later
// than the bytes that it was sent with.
type fdReader struct {
	c   *net.UnixConn
	fds []int
}

func (r *fdReader) Read(b []byte) (int, error) {
	var oob [64]byte
	n, oobn, _, _, err := r.c.ReadMsgUnix(b, oob[:])
	if oobn > 0 {
		msgs, _ := unix.ParseSocketControlMessage(oob[:oobn])
		for i := range msgs {
			fds, _ := unix.ParseUnixRights(&msgs[i])
			r.fds = append(r.fds, fds...)
		}
		if len(r.fds) > 4 {
			return 0, errors.New("the peer passes more descriptors than it should")
		}
	}
	if n == 0 && err == nil && len(b) > 0 {
		err = io.EOF
	}
	return max(n, 0), err // n is -1 after some errors
}

func (r *fdReader) close() {
	for _, fd := range r.fds {
		unix.Close(fd)
	}
}
