//go:build linux

package bench

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"baton/mtls"
	"baton/transfer"
	"baton/transfer/backends"
	"baton/transfer/shm"
	"baton/transfer/tcp"
)

// Rate is how fast one way of moving bytes was.
type Rate struct {
	Shape string  `json:"shape"`
	Way   string  `json:"way"`
	GBps  float64 `json:"gb_per_s"` // median, 10^9 bytes a second
	Of    string  `json:"of,omitempty"`
	Ratio float64 `json:"ratio,omitempty"` // median of the turns' ratios to the way Of
}

// DataConfig says how the data phase is measured.
type DataConfig struct {
	Threads int           // that copy, of memcpy and shm alike
	Streams int           // TCP connections of one transfer
	For     time.Duration // about how long one shape takes
}

// shape is what is moved in one transfer.
type shape struct {
	name    string
	copies  []transfer.Copy
	targets bool
}

const mebi = 1 << 20

// arena is the size of every memory: beyond any L3 there is on this kind of machine, and it holds all shapes.
const arena = 256 * mebi

// small is about what one prompt needs.
const small = "6 MiB, one run"

var shapes = []shape{
	{"64 MiB, one run", []transfer.Copy{{Src: 64 * mebi, Dst: 128 * mebi, Len: 64 * mebi}}, true},
	{"256 MiB, one run", []transfer.Copy{{Len: arena}}, true},
	{small, []transfer.Copy{{Src: 64 * mebi, Dst: 128 * mebi, Len: 6 * mebi}}, false},
	{"64 MiB, blocks of 256 KiB", blocks(256, 256<<10), false},
}

// blocks are every second block of the source, in another order at the destination.
func blocks(n int, size int64) []transfer.Copy {
	copies := make([]transfer.Copy, n)
	for i := range copies {
		copies[i] = transfer.Copy{Src: int64(2*i) * size, Dst: int64(2*(n-1-i)) * size, Len: size}
	}
	return copies
}

func (s shape) bytes() (n int64) {
	for _, c := range s.copies {
		n += c.Len
	}
	return n
}

// The bounds.
const (
	memcpyName = "memcpy"
	bareName   = "bare loopback TCP"
)

// way is one way to move the bytes of a shape.
type way struct {
	name   string
	bound  *way // what it is compared with; nil for a bound
	target float64
	move   func(ctx context.Context, copies []transfer.Copy) error
}

// BoundRates are the rates of the bare ways for what one prompt needs, in bytes a second, by backend.
func BoundRates(data []Rate) map[string]float64 {
	rates := make(map[string]float64)
	for _, d := range data {
		for _, backend := range backends.Names {
			if d.Shape == small && (d.Way == memcpyName) == (backend == shm.Name) && (d.Way == memcpyName || d.Way == bareName) {
				rates[backend] = d.GBps * 1e9
			}
		}
	}
	return rates
}

// Data measures the data phase of every transfer backend.
func Data(ctx context.Context, c DataConfig) (rates []Rate, checks []Check, err error) {
	all, err := newStand(c, arena)
	if err != nil {
		return nil, nil, err
	}
	defer all.close()
	for _, s := range shapes {
		got, err := measure(ctx, s, all.ways, c.For)
		if err != nil {
			return rates, checks, err
		}
		rates = append(rates, got...)
		for i, w := range all.ways {
			if w.target > 0 && s.targets {
				checks = append(checks, Check{What: fmt.Sprintf("%s, %s: share of %s", w.name, s.name, w.bound.name), Got: got[i].Ratio, Target: w.target})
			}
		}
	}
	return rates, checks, nil
}

// measure takes turns until the time is over, at least three. A turn moves everything once each way, and
// what a way is compared with right before it or right after it.
func measure(ctx context.Context, s shape, ways []*way, total time.Duration) ([]Rate, error) {
	took := make(map[*way][]float64)   // seconds
	ratios := make(map[*way][]float64) // by turn
	move := func(w *way) (float64, error) {
		start := time.Now()
		if err := w.move(ctx, s.copies); err != nil {
			return 0, fmt.Errorf("bench: %s, %s: %w", w.name, s.name, err)
		}
		seconds := time.Since(start).Seconds()
		took[w] = append(took[w], seconds)
		return seconds, nil
	}
	began := time.Now()
	for turn := 0; turn < 4 || time.Since(began) < total; turn++ {
		for _, w := range ways {
			if w.bound == nil {
				continue
			}
			pair := [2]*way{w, w.bound}
			var seconds [2]float64
			for _, i := range [2]int{turn % 2, 1 - turn%2} {
				var err error
				if seconds[i], err = move(pair[i]); err != nil {
					return nil, err
				}
			}
			ratios[w] = append(ratios[w], seconds[1]/seconds[0])
		}
		if turn == 0 { // which touched pages and opened connections
			clear(took)
			clear(ratios)
		}
	}
	rates := make([]Rate, len(ways))
	for i, w := range ways {
		rates[i] = Rate{Shape: s.name, Way: w.name, GBps: float64(s.bytes()) / median(took[w]) / 1e9}
		if w.bound != nil {
			rates[i].Of, rates[i].Ratio = w.bound.name, median(ratios[w])
		}
	}
	return rates, nil
}

// stand holds the memories, endpoints and connections of all ways.
type stand struct {
	cfg     DataConfig
	size    int64 // of each memory
	ways    []*way
	from    []byte // what the ways move
	to      []byte // and where
	closers []func()
}

func newStand(c DataConfig, size int64) (s *stand, err error) {
	s = &stand{cfg: c, size: size}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	from, err := s.memory()
	if err != nil {
		return nil, err
	}
	to, err := s.memory()
	if err != nil {
		return nil, err
	}
	s.from, s.to = from.Data, to.Data
	anonymous, err := s.anonymous()
	if err != nil {
		return nil, err
	}
	stream, err := s.loopback()
	if err != nil {
		return nil, err
	}
	memcpy := &way{name: memcpyName, move: s.memcpy(s.from, s.to)}
	bare := &way{name: bareName, move: stream}
	s.ways = []*way{memcpy, bare, {name: "memcpy, anonymous memory", bound: memcpy, move: anonymous}}
	id, err := s.identity()
	if err != nil {
		return nil, err
	}
	for _, one := range []struct {
		backend string
		bound   *way
		target  float64
		tls     *mtls.Identity
	}{
		{shm.Name, memcpy, 0.9, nil}, {tcp.PullName, bare, 0.8, nil}, {tcp.PushName, bare, 0.8, nil},
		{tcp.PullName, bare, 0, id}, {tcp.PushName, bare, 0, id},
	} {
		w := &way{name: one.backend, bound: one.bound, target: one.target}
		if one.tls != nil {
			w.name += ", TLS"
		}
		opt := backends.Options{Threads: c.Threads, Streams: c.Streams, TLS: one.tls}
		if w.move, err = s.backend(one.backend, opt, from, to); err != nil {
			return nil, err
		}
		s.ways = append(s.ways, w)
	}
	return s, nil
}

func (s *stand) close() {
	for i := len(s.closers) - 1; i >= 0; i-- {
		s.closers[i]()
	}
}

// later runs f when the stand closes; errors of then would change no figure.
func (s *stand) later(f func() error) { s.closers = append(s.closers, func() { _ = f() }) }

// memory is a KV pool as engines have it, present.
func (s *stand) memory() (*transfer.Memory, error) {
	m, err := transfer.NewMemory(s.size, "bench")
	if err != nil {
		return nil, err
	}
	s.later(m.Close)
	for i := range m.Data {
		m.Data[i] = byte(i >> 12)
	}
	return m, nil
}

// anonymous is memcpy between memories that are no pools: what the kernel gives to programs that do not
// share.
func (s *stand) anonymous() (func(context.Context, []transfer.Copy) error, error) {
	var side [2][]byte
	for i := range side {
		b, err := unix.Mmap(-1, 0, int(s.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
		if err != nil {
			return nil, os.NewSyscallError("mmap", err)
		}
		s.later(func() error { return unix.Munmap(b) })
		side[i] = b
	}
	return s.memcpy(side[0], side[1]), nil
}

// memcpy is the bound of shm: the same copies by as many threads, nothing else.
func (s *stand) memcpy(from, to []byte) func(context.Context, []transfer.Copy) error {
	return func(_ context.Context, copies []transfer.Copy) error {
		var group sync.WaitGroup
		for _, share := range divide(copies, s.cfg.Threads) {
			group.Go(func() {
				for _, c := range share {
					copy(to[c.Dst:c.Dst+c.Len], from[c.Src:c.Src+c.Len])
				}
			})
		}
		group.Wait()
		return nil
	}
}

// divide gives each of n the same number of bytes.
func divide(copies []transfer.Copy, n int) [][]transfer.Copy {
	total := shape{copies: copies}.bytes()
	shares := make([][]transfer.Copy, n)
	i, left := 0, (total+int64(n)-1)/int64(n)
	each := left
	for _, c := range copies {
		for c.Len > 0 {
			part := c
			part.Len = min(c.Len, left)
			shares[i] = append(shares[i], part)
			c.Src, c.Dst, c.Len = c.Src+part.Len, c.Dst+part.Len, c.Len-part.Len
			if left -= part.Len; left == 0 && i < n-1 {
				i, left = i+1, each
			}
		}
	}
	return shares
}

// worthAStream is how many bytes the TCP backends move over one connection before they take another.
const worthAStream = 4 * mebi

// loopback is the bound of tcp: the same copies over as many connections, nothing else.
func (s *stand) loopback() (func(context.Context, []transfer.Copy) error, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer ln.Close()
	var sends, receives []net.Conn
	for range s.cfg.Streams {
		a, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			return nil, err
		}
		s.later(a.Close)
		b, err := ln.Accept()
		if err != nil {
			return nil, err
		}
		s.later(b.Close)
		sends, receives = append(sends, a), append(receives, b)
	}
	return func(_ context.Context, copies []transfer.Copy) error {
		var group sync.WaitGroup
		errs := make(chan error, 2*len(sends))
		streams := int(max(1, min(int64(len(sends)), shape{copies: copies}.bytes()/worthAStream)))
		for i, share := range divide(copies, streams) {
			group.Go(func() {
				for _, c := range share {
					if _, err := sends[i].Write(s.from[c.Src : c.Src+c.Len]); err != nil {
						errs <- err
						return
					}
				}
			})
			group.Go(func() {
				for _, c := range share {
					if _, err := io.ReadFull(receives[i], s.to[c.Dst:c.Dst+c.Len]); err != nil {
						errs <- err
						return
					}
				}
			})
		}
		group.Wait()
		close(errs)
		return <-errs
	}, nil
}

// identity is that of a fleet of one host.
func (s *stand) identity() (*mtls.Identity, error) {
	dir, err := os.MkdirTemp("", "baton-bench-")
	if err != nil {
		return nil, err
	}
	s.later(func() error { return os.RemoveAll(dir) })
	authority, _, err := mtls.OpenAuthority(dir)
	if err != nil {
		return nil, err
	}
	issued, err := authority.Issue("engine", nil)
	if err != nil {
		return nil, err
	}
	return mtls.Load(issued.Files, nil)
}

// capability is what pullers show.
var capability = []byte("0123456789abcdef")

// backend opens two endpoints of a transfer backend; what it moves is measured from the order to the news
// that every byte has arrived.
func (s *stand) backend(name string, opt backends.Options, from, to *transfer.Memory) (func(context.Context, []transfer.Copy) error, error) {
	source, err := backends.Open(name, from, opt)
	if err != nil {
		return nil, err
	}
	s.later(source.Close)
	destination, err := backends.Open(name, to, opt)
	if err != nil {
		return nil, err
	}
	s.later(destination.Close)
	if source, ok := source.(transfer.Puller); ok {
		if err := source.Export(1, capability, []transfer.Range{{Len: s.size}}); err != nil {
			return nil, err
		}
		return func(ctx context.Context, copies []transfer.Copy) error {
			h, err := destination.(transfer.Puller).Pull(ctx, source.Describe(), 1, capability, copies)
			if err != nil {
				return err
			}
			return settled(h)
		}, nil
	}
	return func(ctx context.Context, copies []transfer.Copy) error {
		ranges := make([]transfer.Range, len(copies))
		for i, c := range copies {
			ranges[i] = transfer.Range{Off: c.Dst, Len: c.Len}
		}
		tag, h, err := destination.(transfer.Pusher).Expect(ctx, ranges)
		if err != nil {
			return err
		}
		if _, err := source.(transfer.Pusher).Push(ctx, destination.Describe(), tag, copies); err != nil {
			return err
		}
		return settled(h)
	}, nil
}

func settled(h transfer.Handle) error {
	<-h.Settled()
	if s := h.Poll(); s.State != transfer.Done {
		return fmt.Errorf("bench: the transfer ended in state %d: %w", s.State, s.Err)
	}
	return nil
}
