//go:build unix

package wire

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
)

// Pair returns two connected Conns within this process, past any handshake. They are the ends of a
// Unix socket pair: the same code runs as between machines, without a port. They need no keepalives, and
// have none by default: whatever stops one end stops the other.
func Pair(opt Options) (*Conn, *Conn, error) {
	if opt.IdleTimeout == 0 {
		opt.IdleTimeout = -1
	}
	if opt.KeepAlive == 0 {
		opt.KeepAlive = -1
	}
	syscall.ForkLock.RLock()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fds[0])
		syscall.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, nil, fmt.Errorf("wire: %w", os.NewSyscallError("socketpair", err))
	}
	a, errA := fileConn(fds[0])
	b, errB := fileConn(fds[1])
	if errA != nil || errB != nil {
		for _, nc := range []net.Conn{a, b} {
			if nc != nil {
				nc.Close()
			}
		}
		return nil, nil, fmt.Errorf("wire: socket pair: %w", errors.Join(errA, errB))
	}
	return NewConn(a, opt), NewConn(b, opt), nil
}

// fileConn wraps a socket and closes the descriptor, of which the result holds a duplicate.
func fileConn(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "socketpair")
	defer f.Close()
	return net.FileConn(f)
}
