//go:build unix

package relay

import "golang.org/x/sys/unix"

// nothingToRead looks at a socket without waiting.
func nothingToRead(fd uintptr) bool {
	var b [1]byte
	_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	return err == unix.EAGAIN || err == unix.EWOULDBLOCK
}
