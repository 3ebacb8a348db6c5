package tcp

import (
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// scatter reads into several places at once.
type scatter struct {
	nc  net.Conn
	raw syscall.RawConn // nil where there is no descriptor
}

func newScatter(nc net.Conn) scatter {
	s := scatter{nc: nc}
	if sc, ok := nc.(syscall.Conn); ok {
		s.raw, _ = sc.SyscallConn()
	}
	return s
}

// read waits for bytes and fills pieces in order with as many as there are.
func (s scatter) read(pieces [][]byte) (n int, err error) {
	if len(pieces) == 1 || s.raw == nil {
		return s.nc.Read(pieces[0])
	}
	waitErr := s.raw.Read(func(fd uintptr) bool {
		for {
			n, err = unix.Readv(int(fd), pieces)
			if err != unix.EINTR {
				return err != unix.EAGAIN
			}
		}
	})
	switch {
	case waitErr != nil:
		return 0, waitErr
	case err != nil:
		return 0, os.NewSyscallError("readv", err)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}
