package backend

import (
	"container/list"
	"net"
	"sync"
	"time"
)

// Limits bound what strangers can take from a server.
type Limits struct {
	Conns    int           // connections at once
	Unproven int           // of these, so many that have not shown a capability yet
	Patience time.Duration // how long a connection may take to show one
}

// DefaultLimits suit engines: a peer shows its capability with the first thing it says.
var DefaultLimits = Limits{Conns: 1024, Unproven: 64, Patience: 5 * time.Second}

// Server accepts connections and runs a handler for each. A connection counts as a stranger's until
// its handler says Proven. When there are too many strangers the oldest is dropped, so that idle ones
// cannot keep an engine out.
type Server struct {
	ln     net.Listener
	limits Limits
	handle func(*Session)

	mu       sync.Mutex
	sessions map[*Session]struct{}
	unproven list.List // of *Session, oldest first
	closed   bool
	wg       sync.WaitGroup
}

// Session is one connection of a server.
type Session struct {
	net.Conn
	srv     *Server
	element *list.Element // in srv.unproven; nil once proven or dropped
}

// Serve runs handle for each connection of ln, on a goroutine of its own, until Close.
func Serve(ln net.Listener, limits Limits, handle func(*Session)) *Server {
	s := &Server{ln: ln, limits: limits, handle: handle, sessions: make(map[*Session]struct{})}
	s.wg.Go(s.accept)
	return s
}

func (s *Server) accept() {
	for {
		nc, err := s.ln.Accept()
		if err != nil {
			s.mu.Lock()
			closed := s.closed
			s.mu.Unlock()
			if closed {
				return
			}
			// Out of descriptors, or a peer that gave up: neither is a reason to stop listening.
			time.Sleep(5 * time.Millisecond)
			continue
		}
		if c := s.admit(nc); c != nil {
			s.wg.Go(func() {
				defer s.drop(c)
				s.handle(c)
			})
		}
	}
}

// admit makes room for nc or closes it.
func (s *Server) admit(nc net.Conn) *Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	full := len(s.sessions) >= s.limits.Conns
	if (full || s.unproven.Len() >= s.limits.Unproven) && s.unproven.Len() > 0 {
		oldest := s.unproven.Remove(s.unproven.Front()).(*Session)
		oldest.element = nil
		oldest.Conn.Close()
		delete(s.sessions, oldest)
		full = false
	}
	if full || s.closed {
		nc.Close()
		return nil
	}
	c := &Session{Conn: nc, srv: s}
	nc.SetReadDeadline(time.Now().Add(s.limits.Patience))
	c.element = s.unproven.PushBack(c)
	s.sessions[c] = struct{}{}
	return c
}

// Proven ends the connection's time as a stranger.
func (c *Session) Proven() {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.element != nil {
		s.unproven.Remove(c.element)
		c.element = nil
		c.SetReadDeadline(time.Time{})
	}
}

func (s *Server) drop(c *Session) {
	c.Conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.element != nil {
		s.unproven.Remove(c.element)
		c.element = nil
	}
	delete(s.sessions, c)
}

// Addr is the listener's.
func (s *Server) Addr() net.Addr { return s.ln.Addr() }

// Close closes the listener and every connection and waits for the handlers.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.ln.Close()
	for c := range s.sessions {
		c.Conn.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}
