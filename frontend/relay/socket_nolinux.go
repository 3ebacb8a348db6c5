//go:build !linux

package relay

import (
	"math"
	"net"
	"time"
)

// sinceReceived is how long nothing has arrived on a connection: unknown here, so without end.
func sinceReceived(net.Conn) time.Duration { return math.MaxInt64 }
