package leg

import (
	"context"
	"fmt"
	"net"

	"baton/wire"
)

// kindLink is how a link introduces itself.
const kindLink = "link"

// outgoing is a link that this side opens: what is to be sent waits until it is open.
type outgoing struct {
	conn    *wire.Conn     // nil while it is being opened
	waiting []wire.Message // until then
	cancel  context.CancelFunc
}

// ask sends a message to a source, over the link to it or a new one. The lock is held.
func (s *Server) ask(address string, m wire.Message) {
	o := s.sources[address]
	if o == nil {
		o = &outgoing{}
		var ctx context.Context
		ctx, o.cancel = context.WithCancel(s.ctx)
		s.sources[address] = o
		s.workers.Go(func() { s.follow(ctx, address, o) })
	}
	if o.conn == nil {
		o.waiting = append(o.waiting, m)
		return
	}
	s.send(o.conn, m)
}

// hangUp ends the link to a source, after what was to be sent. The lock is held.
func (s *Server) hangUp(address string) {
	o := s.sources[address]
	if o == nil {
		return
	}
	delete(s.sources, address)
	o.cancel()
	if conn := o.conn; conn != nil {
		s.workers.Go(func() { conn.Close() })
	}
}

// follow opens a link and reads from it until it ends.
func (s *Server) follow(ctx context.Context, address string, o *outgoing) {
	defer o.cancel()
	conn, err := s.dial(ctx, address)
	if err == nil {
		defer conn.Close()
		err = s.converse(address, o, conn)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sources[address] != o {
		return // it was hung up
	}
	delete(s.sources, address)
	if !s.closed {
		s.log.Warn("a link to another engine ended", "address", address, "error", err)
		s.run(SourceGone{address, err})
	}
}

func (s *Server) dial(ctx context.Context, address string) (*wire.Conn, error) {
	if s.cfg.Permit != nil {
		if err := s.cfg.Permit(address); err != nil {
			return nil, err
		}
	}
	name := s.cfg.Core.Engines[0]
	conn, _, err := wire.Dial(ctx, "tcp", address, wire.Connect{Kind: kindLink, Name: name, Incarnation: s.cfg.Core.Incarnation}, s.cfg.Dial)
	return conn, err
}

// converse sends what waited for the link, then reads.
func (s *Server) converse(address string, o *outgoing, conn *wire.Conn) error {
	s.mu.Lock()
	if s.sources[address] != o {
		s.mu.Unlock()
		return ErrClosed
	}
	o.conn = conn
	for _, m := range o.waiting {
		s.send(conn, m)
	}
	o.waiting = nil
	s.mu.Unlock()
	return s.receive(conn, func(m wire.Message) Event { return SourceSaid{address, m} })
}

// Serve accepts links of other engines until ctx ends or the server is closed, and closes the listener. Its error says
// why accepting failed, and is nil after either end.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	if err := wire.AcceptAll(ctx, s.ctx, l, s.log, s.accepted); err != nil {
		return fmt.Errorf("leg: accept: %w", err)
	}
	return nil
}

// accepted gives a connection of a listener its goroutine.
func (s *Server) accepted(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		nc.Close()
		return
	}
	leave := s.strangers.Enter(nc)
	s.workers.Go(func() { s.welcome(nc, leave) })
}

// welcome waits for a connection's introduction and serves it.
func (s *Server) welcome(nc net.Conn, leave func()) {
	admit := func(hello wire.Connect) error {
		if hello.Kind != kindLink {
			return fmt.Errorf("this is the port on which an engine that is served over HTTP hands over KV; a %.20q has no business here", hello.Kind)
		}
		return nil
	}
	conn, hello, err := wire.Accept(s.ctx, nc, wire.ConnectAck{Incarnation: s.cfg.Core.Incarnation}, admit, s.cfg.Accept)
	leave()
	if err != nil {
		s.strangers.Refused(nc.RemoteAddr(), err)
		return
	}
	defer conn.Close()
	s.mu.Lock()
	if s.closed || len(s.links) >= s.cfg.MaxLinks {
		s.mu.Unlock()
		s.strangers.Refused(nc.RemoteAddr(), fmt.Errorf("%d links are open, as many as may", s.cfg.MaxLinks))
		return
	}
	s.last++
	link := s.last
	s.links[link] = conn
	s.mu.Unlock()
	err = s.receive(conn, func(m wire.Message) Event { return ReaderSaid{link, m} })
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.links, link)
	if !s.closed {
		s.log.Debug("a reader's link ended", "reader", hello.Name, "error", err)
		s.run(ReaderGone{link})
	}
}
