package coordinator

import (
	"fmt"
	"net"

	"baton/wire"
)

// accepted gives a connection of a listener its goroutine.
func (s *Server) accepted(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		nc.Close()
		return
	}
	leave := s.strangers.Enter(nc)
	s.readers.Go(func() { s.welcome(nc, leave) })
}

// welcome waits for a connection's introduction and serves it.
func (s *Server) welcome(nc net.Conn, leave func()) {
	held := false
	defer func() {
		if held {
			<-s.slots
		}
	}()
	admit := func(hello wire.Connect) error {
		err := s.admit(hello)
		if err == nil {
			err = s.takeSlot()
			held = err == nil
		}
		return err
	}
	conn, hello, err := wire.Accept(s.ctx, nc, wire.ConnectAck{Incarnation: s.cfg.Core.Incarnation}, admit, s.cfg.Wire)
	leave()
	if err != nil {
		s.strangers.Refused(nc.RemoteAddr(), err)
		return
	}
	s.read(conn, hello)
}

// takeSlot counts a connection in, which whoever took it counts out by a receive from s.slots.
func (s *Server) takeSlot() error {
	select {
	case s.slots <- struct{}{}:
		return nil
	default:
		return fmt.Errorf("%d connections are open, as many as may", s.cfg.MaxConnections)
	}
}
