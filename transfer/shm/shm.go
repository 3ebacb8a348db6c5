//go:build linux

// Package shm is the transfer backend for engines on one host. The source passes its memory, read-only,
// over a Unix socket to whoever shows a capability; the puller maps it once per source and copies. The
// source's engine spends nothing on a transfer but two small messages.
//
// A puller tells its source when it has read. The source counts it as a reader until then or until their
// connection ends, whichever is first. For that reason a pull during which the connection ended
// fails with ErrPeerLost, although the source's memory stays mapped and every byte may have been
// copied: the source, if it lives, may have reused the memory meanwhile. A failed pull is never Unsafe,
// since the puller itself does the copying.
//
// The address is an abstract Unix socket, so both engines need one network namespace and one user.
package shm

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"time"

	"baton/transfer"
	"baton/transfer/internal/backend"

	"golang.org/x/sys/unix"
)

// Name is the backend's name in flags and registrations.
const Name = "shm"

// Options tune an endpoint. The zero value is the default of each.
type Options struct {
	// Threads is how many copies run at once in this endpoint. Default: the processors, at most 4.
	Threads int
	// Timeout bounds each wait for a peer's answer. Default 5 s.
	Timeout time.Duration
}

// Endpoint is a transfer.Puller.
type Endpoint struct {
	mem     *transfer.Memory
	opt     Options
	desc    []byte
	id      uint64   // incarnation
	ro      *os.File // the memory's descriptor, opened again for reading only
	exports backend.Exports
	server  *backend.Server
	slots   chan struct{} // one for each copy that may run
	life    context.Context
	end     context.CancelFunc

	copied func() // test hook, called between the last copied byte and the verdict

	mu    sync.Mutex
	peers map[string]*peer // by description
	work  sync.WaitGroup   // pulls, and a reader for each peer
}

var _ transfer.Puller = (*Endpoint)(nil)

// New opens an endpoint on mem, which must have a descriptor.
func New(mem *transfer.Memory, opt Options) (*Endpoint, error) {
	if opt.Threads <= 0 {
		opt.Threads = min(4, runtime.GOMAXPROCS(0))
	}
	if opt.Timeout <= 0 {
		opt.Timeout = 5 * time.Second
	}
	fail := func(err error) (*Endpoint, error) { return nil, &transfer.Error{Op: "shm open", Err: err} }
	if mem.FD < 0 {
		return fail(errors.New("the memory has no descriptor to share"))
	}
	ro, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", mem.FD))
	if err != nil {
		return fail(fmt.Errorf("open the memory for reading: %w", err))
	}
	var random [24]byte
	rand.Read(random[:])
	name := "@baton-" + hex.EncodeToString(random[:16])
	ln, err := net.Listen("unix", name)
	if err != nil {
		ro.Close()
		return fail(err)
	}
	e := &Endpoint{
		mem: mem, opt: opt, ro: ro, id: binary.LittleEndian.Uint64(random[16:]),
		slots: make(chan struct{}, opt.Threads), peers: make(map[string]*peer),
	}
	e.desc = backend.Description{Backend: Name, Addr: name, Incarnation: e.id, Size: int64(len(mem.Data))}.Encode()
	e.life, e.end = context.WithCancel(context.Background())
	e.server = backend.Serve(ln, backend.DefaultLimits, e.serve)
	return e, nil
}

// Describe returns what a peer needs to reach this memory.
func (e *Endpoint) Describe() []byte { return e.desc }

// Export lets whoever shows the capability read ranges, until Revoke.
func (e *Endpoint) Export(handoff uint64, capability []byte, ranges []transfer.Range) error {
	if e.life.Err() != nil {
		return &transfer.Error{Op: "shm export", Err: transfer.ErrClosed}
	}
	if err := e.exports.Add(handoff, capability, ranges, int64(len(e.mem.Data))); err != nil {
		return &transfer.Error{Op: "shm export", Err: err}
	}
	return nil
}

// Revoke refuses further reads and reports whether none is under way any more.
func (e *Endpoint) Revoke(handoff uint64) bool { return e.exports.Revoke(handoff) }

// Close ends all transfers and waits until none touches the memory. Pullers that read from here keep
// their mapping, and fail with ErrPeerLost.
func (e *Endpoint) Close() error {
	e.mu.Lock()
	if e.life.Err() != nil {
		e.mu.Unlock()
		return nil
	}
	e.end()
	for _, p := range e.peers {
		p.fail(transfer.ErrClosed)
	}
	e.mu.Unlock()
	e.server.Close()
	e.work.Wait()
	return e.ro.Close()
}

// sameUser fails if the process at the other end of the socket belongs to another user.
func sameUser(c net.Conn) error {
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if credErr != nil {
		return os.NewSyscallError("getsockopt(SO_PEERCRED)", credErr)
	}
	if int(cred.Uid) != os.Geteuid() && cred.Uid != 0 {
		return fmt.Errorf("the peer runs as user %d, this process as %d: run both engines as one user, or use --transfer tcp", cred.Uid, os.Geteuid())
	}
	return nil
}
