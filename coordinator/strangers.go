package coordinator

import (
	"container/list"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"baton/wire"
)

// strangers are the connections that have not introduced themselves. When there are too many the oldest
// is closed: an engine that connects while somebody floods the port is young, and introduces itself within
// milliseconds.
type strangers struct {
	limit int
	log   *slog.Logger

	mu     sync.Mutex
	conns  list.List // of net.Conn, oldest first
	quiet  int       // refusals since the last line about one
	logged time.Time
}

// enter admits a connection; leave must be called when it is a stranger no more.
func (s *strangers) enter(nc net.Conn) (leave func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns.Len() >= s.limit {
		_ = s.conns.Remove(s.conns.Front()).(net.Conn).Close()
	}
	e := s.conns.PushBack(nc)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.conns.Remove(e) // of no effect on one that was closed for room
	}
}

// refused logs why a connection was refused, one a second: strangers do not fill the log.
func (s *strangers) refused(peer net.Addr, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if now.Sub(s.logged) < time.Second {
		s.quiet++
		return
	}
	s.log.Warn("connection refused", "peer", peer, "error", err, "others", s.quiet)
	s.logged, s.quiet = now, 0
}

// accepted gives a connection of a listener its goroutine.
func (s *Server) accepted(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		nc.Close()
		return
	}
	leave := s.strangers.enter(nc)
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
		s.strangers.refused(nc.RemoteAddr(), err)
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
