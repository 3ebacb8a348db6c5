package tcp

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"

	"baton/transfer"
	"baton/transfer/internal/backend"
)

// Pusher is a transfer.Pusher: the destination expects, the source sends.
//
// A ticket is good for one push, which may come over several connections; every expected byte must
// arrive exactly once. An attempt that is refused changes nothing. An expectation that was cancelled or
// failed while connections write for it is Unsafe until they are closed, which this side does itself.
type Pusher struct {
	*endpoint
	expected map[ticket]*expectation // guarded by endpoint.mu
}

type ticket [16]byte

// tag is what Expect returns, as JSON.
type tag struct {
	Addr        string `json:"addr"`
	Incarnation uint64 `json:"incarnation,string"`
	Ticket      []byte `json:"ticket"`
}

// expectation is one Expect under way.
type expectation struct {
	t         *backend.Task
	ticket    ticket
	unclaimed backend.Set // bytes that no stream has announced
	missing   int64       // bytes that have not arrived
	push      uint64      // who uses the ticket, once somebody does
	streams   int         // of that push
	begun     int         // streams that announced their ranges
	active    int         // streams that may write
	err       error       // why it failed
}

var _ transfer.Pusher = (*Pusher)(nil)

// NewPusher opens an endpoint on mem.
func NewPusher(mem *transfer.Memory, opt Options) (*Pusher, error) {
	e, ln, err := open(PushName, mem, opt)
	if err != nil {
		return nil, err
	}
	p := &Pusher{endpoint: e, expected: make(map[ticket]*expectation)}
	e.server = backend.Serve(ln, backend.DefaultLimits, p.serve)
	return p, nil
}

// Expect prepares to receive: only bytes that arrive under the returned tag land, only in ranges. ctx
// bounds the wait for all of them.
func (p *Pusher) Expect(ctx context.Context, ranges []transfer.Range) ([]byte, transfer.Handle, error) {
	set, err := backend.NewSet(ranges, int64(len(p.mem.Data)))
	if err != nil {
		return nil, nil, p.failure("expect", "", err)
	}
	x := &expectation{unclaimed: set, missing: backend.Total(set)}
	rand.Read(x.ticket[:])
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.life.Err() != nil {
		return nil, nil, p.failure("expect", "", transfer.ErrClosed)
	}
	x.t = backend.NewTask(ctx, p.life)
	if x.missing == 0 {
		x.t.Settle(nil)
	} else {
		p.expected[x.ticket] = x
		context.AfterFunc(x.t.Context(), func() { p.expire(x) })
	}
	b, err := json.Marshal(tag{p.addr, p.id, x.ticket[:]})
	return b, x.t, err
}

// expire ends an expectation whose context ended.
func (p *Pusher) expire(x *expectation) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed(x, backend.Reason(x.t.Context(), context.Canceled))
}

// failed withdraws the ticket; p.mu is held. The streams under way end because the task's context does.
func (p *Pusher) failed(x *expectation, err error) {
	if x.err == nil {
		x.err = p.failure("expect", "", err)
	}
	delete(p.expected, x.ticket)
	if x.active == 0 {
		x.t.Settle(x.err)
	} else {
		x.t.Distrust(x.err)
		x.t.Cancel()
	}
}

// claim is what a stream of a push shows: the ticket, the push that it belongs to, and how many streams
// that has.
type claim struct {
	ticket  ticket
	push    uint64
	streams uint32
}

const claimSize = 16 + 8 + 4

func (c claim) append(b []byte) []byte {
	b = append(b, c.ticket[:]...)
	b = binary.LittleEndian.AppendUint64(b, c.push)
	return binary.LittleEndian.AppendUint32(b, c.streams)
}

func parseClaim(b []byte) (claim, bool) {
	var c claim
	if len(b) != claimSize {
		return c, false
	}
	copy(c.ticket[:], b)
	c.push, c.streams = binary.LittleEndian.Uint64(b[16:]), binary.LittleEndian.Uint32(b[24:])
	return c, c.streams > 0
}

// find returns the expectation that a claim is for; p.mu is held. The ticket is 128 random bits, so a map
// lookup gives nothing away that would help to guess one.
func (p *Pusher) find(c claim) (*expectation, error) {
	x := p.expected[c.ticket]
	if x == nil || x.begun > 0 && (x.push != c.push || x.streams != int(c.streams) || x.begun == x.streams) {
		return nil, fmt.Errorf("%w: the ticket is not valid, was used, or its transfer ended", transfer.ErrRefused)
	}
	return x, nil
}

// check tells whether the claim is good now.
func (p *Pusher) check(c claim) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.find(c)
	return err
}

// begin admits a stream that will write ranges; finish must follow.
func (p *Pusher) begin(c claim, ranges []transfer.Range) (*expectation, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	x, err := p.find(c)
	if err != nil {
		return nil, err
	}
	left, ok := x.unclaimed.Remove(ranges)
	if !ok {
		return nil, fmt.Errorf("%w: it would write bytes that are not expected, or twice", transfer.ErrRefused)
	}
	x.unclaimed = left
	x.push, x.streams = c.push, int(c.streams)
	x.begun++
	x.active++
	return x, nil
}

// finish records that a stream writes no more; err is nil when its size bytes arrived.
func (p *Pusher) finish(x *expectation, size int64, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	x.active--
	if err == nil {
		x.missing -= size
	}
	switch {
	case err != nil || x.err != nil:
		p.failed(x, backend.Reason(x.t.Context(), err))
	case x.missing == 0:
		delete(p.expected, x.ticket)
		x.t.Settle(nil)
	case x.active == 0 && x.begun == x.streams:
		p.failed(x, fmt.Errorf("the push ended, and %d expected bytes were not in it", x.missing))
	}
}

// Push writes to the peer that peer describes, under its tag. It is Done when the peer has every byte.
func (p *Pusher) Push(ctx context.Context, peer, tagged []byte, copies []transfer.Copy) (transfer.Handle, error) {
	desc, err := p.describes(peer)
	if err != nil {
		return nil, p.failure("push", "", err)
	}
	var to tag
	if err := backend.ParseJSON(tagged, &to); err != nil {
		return nil, p.failure("push", desc.Addr, fmt.Errorf("tag: %w", err))
	}
	if to.Incarnation != desc.Incarnation || len(to.Ticket) != len(ticket{}) {
		return nil, p.failure("push", desc.Addr, errors.New("the tag is not one of this peer's"))
	}
	src, dst, err := backend.Split(copies, int64(len(p.mem.Data)), desc.Size)
	if err != nil {
		return nil, p.failure("push", desc.Addr, err)
	}
	var push [8]byte
	rand.Read(push[:])
	key := peerKey{to.Addr, to.Incarnation}
	return p.start(ctx, "push", to.Addr, func(t *backend.Task) error {
		total := backend.Total(src)
		if total == 0 {
			return nil
		}
		return p.parallel(t.Context(), total, func(ctx context.Context, streams int, off, size int64) error {
			shown := claim{ticket(to.Ticket), binary.LittleEndian.Uint64(push[:]), uint32(streams)}
			request, err := appendRequest(nil, shown.append(nil), backend.Part(dst, off, size))
			if err != nil {
				return err
			}
			return p.pool.do(ctx, key, request, func(c conn) error {
				if err := c.send(nil, p.mem.Data, backend.Part(src, off, size), t.Moved); err != nil {
					return err
				}
				return c.verdict()
			})
		})
	})
}

// serve is the destination's side of one connection.
func (p *Pusher) serve(s *backend.Session) {
	c, r, stale := p.greet(s)
	if stale != nil && !errors.Is(stale, transfer.ErrRefused) {
		return
	}
	var shown, body []byte
	for {
		var err error
		if shown, err = backend.ReadFrame(r, shown, backend.MaxClaim); err != nil {
			return
		}
		claim, ok := parseClaim(shown)
		if !ok {
			return
		}
		refusal := stale
		if refusal == nil {
			refusal = p.check(claim)
		}
		if refusal != nil {
			if backend.SkipFrame(r, backend.MaxFrame) != nil || c.answer(refusal) != nil || stale != nil {
				return
			}
			continue
		}
		s.Proven()
		var ranges []transfer.Range
		ranges, body, err = p.ranges(c, r, body)
		if ranges == nil {
			if err != nil {
				_ = c.answer(err)
			}
			return
		}
		if r.Buffered() > 0 { // bytes before they were asked for
			return
		}
		if p.receiveFrom(c, claim, ranges) != nil || c.awaitNothing() != nil {
			return
		}
	}
}

// receiveFrom answers a request and, if it is granted, takes the bytes. An error ends the connection.
func (p *Pusher) receiveFrom(c conn, shown claim, ranges []transfer.Range) error {
	x, err := p.begin(shown, ranges)
	if err != nil {
		return c.answer(err)
	}
	stop := context.AfterFunc(x.t.Context(), func() { c.Close() })
	size := backend.Total(ranges)
	if err = c.answer(nil); err == nil {
		err = c.receive(p.mem.Data, ranges, x.t.Moved)
	}
	if !stop() && err == nil {
		err = context.Canceled
	}
	if err != nil {
		c.Close()
	}
	p.finish(x, size, err)
	if err != nil {
		return err
	}
	return c.answer(nil)
}

// Close ends all transfers and waits until none touches the memory.
func (p *Pusher) Close() error {
	err := p.endpoint.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, x := range p.expected {
		p.failed(x, transfer.ErrClosed)
	}
	return err
}
