// Package tcp holds two transfer backends over TCP. With a Puller the destination asks and the source
// sends; with a Pusher the destination hands out a ticket and the source sends to whom the ticket names.
// Either way bytes go from the source's memory to the kernel and from the kernel to the destination's
// memory, without a buffer between, over several connections when there is much to move. Connections are
// kept for later transfers.
//
// With Options.TLS both sides prove who they are before a word of the protocol is said, and bytes are
// encrypted, which costs a copy on either side. Without it they travel in the clear and peers are known by
// capability alone: that is for loopback and networks of one owner.
package tcp

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"baton/mtls"
	"baton/transfer"
	"baton/transfer/internal/backend"
)

// The backends' names in flags and registrations.
const (
	PullName = "tcp"
	PushName = "tcp-push"
)

// Options tune an endpoint. The zero value is the default of each.
type Options struct {
	// Listen is the address that peers connect to. Default 127.0.0.1:0; port 0 is any free one.
	Listen string
	// Advertise is the host that peers are told, where it is not Listen's: needed when that is
	// unspecified (0.0.0.0).
	Advertise string
	// Streams is the most connections that one transfer uses. Default 4.
	Streams int
	// Timeout bounds a connection's establishment, each wait for an answer, and each pause in a stream
	// of bytes. Default 10 s.
	Timeout time.Duration
	// SocketBuffer sets the kernel's buffers of each connection in bytes. By default the kernel sizes them.
	SocketBuffer int
	// TLS, when set, is required of every peer.
	TLS *mtls.Identity
}

// minStream is how many bytes are worth a connection of their own.
const minStream = 4 << 20

// endpoint is what both backends are made of: a listener, connections to peers, a life.
type endpoint struct {
	name   string
	mem    *transfer.Memory
	opt    Options
	id     uint64 // incarnation
	addr   string
	server *backend.Server
	pool   pool
	life   context.Context
	end    context.CancelFunc

	mu   sync.Mutex
	work sync.WaitGroup // transfers of this side's making
}

func open(name string, mem *transfer.Memory, opt Options) (*endpoint, net.Listener, error) {
	if opt.Listen == "" {
		opt.Listen = "127.0.0.1:0"
	}
	if opt.Streams <= 0 {
		opt.Streams = 4
	}
	if opt.Timeout <= 0 {
		opt.Timeout = 10 * time.Second
	}
	e := &endpoint{name: name, mem: mem, opt: opt}
	ln, err := net.Listen("tcp", opt.Listen)
	if err != nil {
		return nil, nil, e.failure("open", "", err)
	}
	if e.addr, err = advertised(ln.Addr(), opt.Advertise); err != nil {
		ln.Close()
		return nil, nil, e.failure("open", "", err)
	}
	var random [8]byte
	rand.Read(random[:])
	e.id = binary.LittleEndian.Uint64(random[:])
	e.life, e.end = context.WithCancel(context.Background())
	e.pool.opt = opt
	return e, ln, nil
}

// advertised is the address that peers are told.
func advertised(listen net.Addr, host string) (string, error) {
	a := listen.(*net.TCPAddr)
	if host == "" {
		if a.IP.IsUnspecified() {
			return "", fmt.Errorf("listening on %v: set Advertise to a host that peers can reach", a)
		}
		return a.String(), nil
	}
	return net.JoinHostPort(host, fmt.Sprint(a.Port)), nil
}

func (e *endpoint) failure(op, peer string, err error) error {
	return &transfer.Error{Op: e.name + " " + op, Peer: peer, Err: err}
}

// Describe returns what a peer needs to reach this memory.
func (e *endpoint) Describe() []byte {
	return backend.Description{
		Backend: e.name, Addr: e.addr, Incarnation: e.id, Size: int64(len(e.mem.Data)), TLS: e.opt.TLS != nil,
	}.Encode()
}

// describes decodes the description of a peer that this side can speak to.
func (e *endpoint) describes(peer []byte) (backend.Description, error) {
	d, err := backend.ParseDescription(peer, e.name)
	switch {
	case err != nil:
	case d.TLS && e.opt.TLS == nil:
		err = fmt.Errorf("the peer at %s takes TLS only: start this engine with --tls-ca, --tls-cert and --tls-key", d.Addr)
	case !d.TLS && e.opt.TLS != nil:
		err = fmt.Errorf("the peer at %s does not use TLS and this side does: start that engine with --tls-ca, --tls-cert and --tls-key", d.Addr)
	}
	return d, err
}

// Close ends all transfers and waits until none touches the memory.
func (e *endpoint) Close() error {
	e.mu.Lock()
	e.end()
	e.mu.Unlock()
	e.server.Close()
	e.work.Wait()
	e.pool.close()
	return nil
}

// start runs a transfer of this side's making, unless the endpoint is closed.
func (e *endpoint) start(ctx context.Context, op, peer string, run func(*backend.Task) error) (transfer.Handle, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.life.Err() != nil {
		return nil, e.failure(op, peer, transfer.ErrClosed)
	}
	t := backend.NewTask(ctx, e.life)
	e.work.Go(func() {
		err := run(t)
		if err != nil {
			err = e.failure(op, peer, backend.Reason(t.Context(), err))
		}
		t.Settle(err)
	})
	return t, nil
}

// parallel runs f for each part of a transfer of total bytes at once; part i covers size bytes from
// offset. The first failure stops the others and is returned.
func (e *endpoint) parallel(ctx context.Context, total int64, f func(ctx context.Context, streams int, off, size int64) error) error {
	streams := max(1, min(int64(e.opt.Streams), total/minStream))
	part := (total + streams - 1) / streams
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	run := func(off int64) {
		if err := f(ctx, int(streams), off, min(part, total-off)); err != nil {
			once.Do(func() { first = err })
			cancel()
		}
	}
	for i := int64(1); i < streams; i++ {
		wg.Go(func() { run(i * part) })
	}
	run(0)
	wg.Wait()
	return first
}

// The protocol. Whoever connects says hello: the magic and the incarnation that it expects. Then it may
// make any number of requests, one after the other. A request is two frames, a claim and a list of
// ranges, and is answered by a frame with a verdict. After a yes come the bytes of the ranges in
// order: from the source to the puller, or from the pusher to the destination, which then sends a
// second verdict.
const (
	magic     = "batontc1"
	helloSize = len(magic) + 8
)

var errIncarnation = fmt.Errorf("%w: another process has this address now", transfer.ErrRefused)

// greet secures a connection, then reads and checks a hello. Requests are read through the buffer that it
// returns; the bytes of a push are not, and come only after a verdict.
func (e *endpoint) greet(s *backend.Session) (conn, *bufio.Reader, error) {
	var secure *mtls.Conn
	if e.opt.TLS != nil {
		var err error
		if secure, err = mtls.Server(e.life, s.Conn, e.opt.TLS.Server()); err != nil {
			return conn{}, nil, err
		}
	}
	c := newConn(s.Conn, secure, e.opt)
	r := bufio.NewReader(c)
	var hello [helloSize]byte
	if _, err := io.ReadFull(r, hello[:]); err != nil {
		return c, r, err
	}
	if string(hello[:len(magic)]) != magic {
		return c, r, errors.New("not a peer")
	}
	if binary.LittleEndian.Uint64(hello[len(magic):]) != e.id {
		return c, r, errIncarnation
	}
	return c, r, nil
}
