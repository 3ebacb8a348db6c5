//go:build !linux

package tcp

import "net"

// scatter reads into one place at a time where the system's readv is not at hand.
type scatter struct{ nc net.Conn }

func newScatter(nc net.Conn) scatter { return scatter{nc} }

func (s scatter) read(pieces [][]byte) (int, error) { return s.nc.Read(pieces[0]) }
