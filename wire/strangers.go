package wire

import (
	"container/list"
	"log/slog"
	"net"
	"sync"
	"time"
)

// Strangers are the connections of a listener that have not introduced themselves. When there are too many the
// oldest is closed: a peer that connects while somebody floods the port is young, and introduces itself within
// milliseconds. It is safe for concurrent use.
type Strangers struct {
	limit int
	log   *slog.Logger

	mu     sync.Mutex
	conns  list.List // of net.Conn, oldest first
	quiet  int       // refusals since the last line about one
	logged time.Time
}

// NewStrangers makes room for so many strangers.
func NewStrangers(limit int, log *slog.Logger) *Strangers { return &Strangers{limit: limit, log: log} }

// Enter admits a connection; leave must be called when it is a stranger no more.
func (s *Strangers) Enter(nc net.Conn) (leave func()) {
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

// Len is how many there are.
func (s *Strangers) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns.Len()
}

// Refused logs why a connection was refused, one a second: strangers do not fill the log.
func (s *Strangers) Refused(peer net.Addr, err error) {
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
