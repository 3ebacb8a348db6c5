package relay

import (
	"crypto/tls"
	"math"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// sinceReceived is how long nothing has arrived on a connection, by what the kernel knows; without end where it does not.
func sinceReceived(c net.Conn) time.Duration {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	const unknown = time.Duration(math.MaxInt64)
	s, ok := c.(syscall.Conn)
	if !ok {
		return unknown
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return unknown
	}
	since := unknown
	_ = raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			since = time.Duration(info.Last_data_recv) * time.Millisecond
		}
	})
	return since
}
