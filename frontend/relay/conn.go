package relay

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"
)

// conn is one connection to a worker. Reads count against budget, so that heads are bounded, and end at limit.
type conn struct {
	net.Conn
	br     *bufio.Reader
	budget int
	limit  time.Time // of reads
	armed  time.Time // the deadline that is set, at most limit
	reused bool
	used   time.Time // when it was last given back
}

// unbounded is a budget for bodies; who reads those has limits of their own.
const unbounded = 1 << 62

var errHeadTooLarge = fmt.Errorf("the answer's headers are larger than %d bytes", maxHead)

// readBuffer is what one read takes from a connection at most. Under load it holds many events.
const readBuffer = 32 << 10

func newConn(nc net.Conn) *conn {
	c := &conn{Conn: nc}
	c.br = bufio.NewReaderSize(c, readBuffer)
	return c
}

// ahead is by how much the deadline that is set may precede limit, which moves with every piece of a stream: setting it
// costs more than looking at it.
const ahead = time.Second

// arm sets the deadline of reads unless one is set that is near limit.
func (c *conn) arm() error {
	if c.limit.Sub(c.armed) <= ahead && !c.armed.After(c.limit) {
		return nil
	}
	c.armed = c.limit
	return c.SetReadDeadline(c.armed)
}

// early reports whether a read has ended at a deadline that precedes limit. It must then be armed and done again.
func (c *conn) early(err error) bool {
	if c.armed == c.limit || !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	c.armed = time.Time{}
	return true
}

// Read implements io.Reader.
func (c *conn) Read(p []byte) (int, error) {
	if c.budget <= 0 {
		return 0, errHeadTooLarge
	}
	p = p[:min(len(p), c.budget)]
	for {
		if err := c.arm(); err != nil {
			return 0, err
		}
		n, err := c.Conn.Read(p)
		c.budget -= n
		if n == 0 && c.early(err) {
			continue
		}
		return n, err
	}
}

// quiet reports whether nothing has arrived on an idle connection: neither its end nor bytes out of turn.
func quiet(c net.Conn) bool {
	raw, err := rawConn(c)
	if raw == nil {
		return err == nil
	}
	open := false
	err = raw.Read(func(fd uintptr) bool {
		open = nothingToRead(fd)
		return true
	})
	return err == nil && open
}

// rawConn is the socket of a connection, also of one with TLS; nil without error where there is none.
func rawConn(c net.Conn) (syscall.RawConn, error) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	s, ok := c.(syscall.Conn)
	if !ok {
		return nil, nil
	}
	return s.SyscallConn()
}
