package relay

import (
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pump copies a stream from one TCP connection to another. Events that come one by one cost little but system calls, and
// more in what is around them: so all of the stream is one Read of a syscall.RawConn, whose callback asks for more only
// when the runtime's poller has seen something come, and the calls, which never wait, are not announced to the scheduler,
// which would give the processor away when one takes longer than it likes.
type pump struct {
	x       *exchange
	a       *answer
	framing *chunks
	from    syscall.RawConn
	to      syscall.RawConn
	send    func(fd uintptr) bool // sendOut, made once

	buf  *[streamBuffer]byte // nil while nothing is held, so that streams that wait have none
	held int                 // bytes in buf that must be looked at again with more behind them
	out  []byte              // what the client is to get
	err  error
}

// newPump returns nil if one of the connections is not bare TCP.
func newPump(x *exchange, a *answer, client net.Conn, framing *chunks) *pump {
	from, isTCP := a.conn.Conn.(*net.TCPConn)
	to, areTCP := client.(*net.TCPConn)
	if !isTCP || !areTCP {
		return nil
	}
	p := &pump{x: x, a: a, framing: framing}
	p.send = p.sendOut
	var err error
	if p.from, err = from.SyscallConn(); err != nil {
		return nil
	}
	if p.to, err = to.SyscallConn(); err != nil {
		return nil
	}
	return p
}

// run copies all of the stream that is not in the answer's buffer, which must be empty, up to its end.
func (p *pump) run() error {
	defer p.release()
	receive, c := p.receive, p.a.conn
	for {
		if err := c.arm(); err != nil {
			return streamError(err)
		}
		err := p.from.Read(receive)
		if err != nil && c.early(err) {
			continue
		}
		if err != nil {
			return streamError(err)
		}
		p.a.lost = p.a.lost || p.held > 0 // bytes behind the end
		return p.err
	}
}

// receive takes what has come. It returns false when more must come, true at the end of the stream or with p.err set.
func (p *pump) receive(fd uintptr) bool {
	for {
		if p.buf == nil {
			p.buf = streamBuffers.Get().(*[streamBuffer]byte)
		}
		n, errno := transfer(unix.SYS_RECVFROM, fd, p.buf[p.held:], 0)
		switch {
		case errno == unix.EAGAIN:
			if p.held == 0 {
				p.release()
			}
			return false
		case errno == unix.EINTR:
			continue
		case errno != 0:
			p.err = failed(errReset, os.NewSyscallError("recv", errno))
			return true
		case n == 0:
			p.err = failed(errReset, io.ErrUnexpectedEOF)
			return true
		}
		if p.err = p.forward(p.buf[:p.held+n]); p.err != nil || p.framing.end {
			return true
		}
	}
}

// forward gives the client what is whole of b and holds the rest.
func (p *pump) forward(b []byte) error {
	out, taken, err := p.framing.scan(b)
	if err != nil {
		return failed(errAnswer, err)
	}
	if len(out) > 0 {
		p.x.extendDeadline()
		p.out = out
		if err := p.to.Write(p.send); err != nil || len(p.out) > 0 {
			return errClientGone
		}
	}
	p.held = copy(p.buf[:], b[taken:])
	p.a.within(p.x.s.cfg.Timeouts.Stream)
	if err := p.a.conn.arm(); err != nil {
		return streamError(err)
	}
	return nil
}

// sendOut sends p.out. It returns false when the client must read first; what is left at the end cannot be sent.
func (p *pump) sendOut(fd uintptr) bool {
	for len(p.out) > 0 {
		n, errno := transfer(unix.SYS_SENDTO, fd, p.out, unix.MSG_NOSIGNAL)
		switch errno {
		case 0:
			p.out = p.out[n:]
		case unix.EINTR:
		default:
			return errno != unix.EAGAIN
		}
	}
	return true
}

func (p *pump) release() {
	if p.buf != nil {
		streamBuffers.Put(p.buf)
		p.buf, p.out = nil, nil
	}
}

// transfer receives into b or sends it. The socket is not blocking.
func transfer(call, fd uintptr, b []byte, flags uintptr) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(call, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), flags, 0, 0)
	return int(n), errno
}
