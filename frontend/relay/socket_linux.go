package relay

import (
	"math"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// sinceReceived is how long nothing has arrived on a connection, by what the kernel knows; without end where it does not.
func sinceReceived(c net.Conn) time.Duration {
	since := time.Duration(math.MaxInt64)
	raw, err := rawConn(c)
	if raw == nil || err != nil {
		return since
	}
	_ = raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			since = time.Duration(info.Last_data_recv) * time.Millisecond
		}
	})
	return since
}
