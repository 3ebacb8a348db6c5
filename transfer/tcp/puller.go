package tcp

import (
	"context"
	"errors"
	"io"

	"baton/transfer"
	"baton/transfer/internal/backend"
)

// Puller is a transfer.Puller: the destination asks, the source sends. A failed pull is never Unsafe,
// since the destination itself reads from the connection, and stops.
type Puller struct {
	*endpoint
	exports backend.Exports
}

var _ transfer.Puller = (*Puller)(nil)

// NewPuller opens an endpoint on mem.
func NewPuller(mem *transfer.Memory, opt Options) (*Puller, error) {
	e, ln, err := open(PullName, mem, opt)
	if err != nil {
		return nil, err
	}
	p := &Puller{endpoint: e}
	e.server = backend.Serve(ln, backend.DefaultLimits, p.serve)
	return p, nil
}

// Export lets whoever shows the capability read ranges, until Revoke.
func (p *Puller) Export(handoff uint64, capability []byte, ranges []transfer.Range) error {
	if p.life.Err() != nil {
		return p.failure("export", "", transfer.ErrClosed)
	}
	if err := p.exports.Add(handoff, capability, ranges, int64(len(p.mem.Data))); err != nil {
		return p.failure("export", "", err)
	}
	return nil
}

// Revoke refuses further reads and reports whether none is under way any more.
func (p *Puller) Revoke(handoff uint64) bool { return p.exports.Revoke(handoff) }

// Pull copies from the peer that peer describes.
func (p *Puller) Pull(ctx context.Context, peer []byte, handoff uint64, capability []byte, copies []transfer.Copy) (transfer.Handle, error) {
	desc, err := p.describes(peer)
	if err != nil {
		return nil, p.failure("pull", "", err)
	}
	src, dst, err := backend.Split(copies, desc.Size, int64(len(p.mem.Data)))
	if err != nil {
		return nil, p.failure("pull", desc.Addr, err)
	}
	if err := backend.CheckCapability(capability); err != nil {
		return nil, p.failure("pull", desc.Addr, err)
	}
	key := peerKey{desc.Addr, desc.Incarnation}
	claim := backend.AppendClaim(nil, handoff, capability)
	return p.start(ctx, "pull", desc.Addr, func(t *backend.Task) error {
		total := backend.Total(src)
		if total == 0 {
			return nil
		}
		return p.parallel(t.Context(), total, func(ctx context.Context, _ int, off, size int64) error {
			request, err := appendRequest(nil, claim, backend.Part(src, off, size))
			if err != nil {
				return err
			}
			return p.pool.do(ctx, key, request, func(c conn) error {
				return c.receive(p.mem.Data, backend.Part(dst, off, size), t.Moved)
			})
		})
	})
}

// serve is the source's side of one connection.
func (p *Puller) serve(s *backend.Session) {
	c, r, stale := p.greet(s)
	if stale != nil && !errors.Is(stale, transfer.ErrRefused) {
		return
	}
	var claim, body []byte
	for {
		var err error
		if claim, err = backend.ReadFrame(r, claim, backend.MaxClaim); err != nil {
			return
		}
		handoff, capability, err := backend.ParseClaim(claim)
		if err != nil {
			return
		}
		refusal := stale
		if refusal == nil {
			refusal = p.exports.Check(handoff, capability)
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
		if p.sendTo(c, handoff, capability, ranges) != nil || c.awaitNothing() != nil {
			return
		}
	}
}

// ranges reads the list of ranges that follows a claim. Without any the connection is of no more use,
// and the error, if there is one, is for the peer.
func (e *endpoint) ranges(c conn, r io.Reader, buf []byte) ([]transfer.Range, []byte, error) {
	if c.awaitRead() != nil {
		return nil, buf, nil
	}
	buf, err := backend.ReadFrame(r, buf, backend.MaxFrame)
	if err != nil {
		return nil, nil, nil
	}
	ranges, rest, err := backend.ReadRanges(buf, int64(len(e.mem.Data)))
	if err == nil && (len(ranges) == 0 || len(rest) > 0) {
		err = errors.New("malformed list of ranges")
	}
	if err != nil {
		return nil, buf, err
	}
	return ranges, buf, nil
}

// sendTo answers a request, with the bytes if it is granted. An error ends the connection.
func (p *Puller) sendTo(c conn, handoff uint64, capability []byte, ranges []transfer.Range) error {
	end, err := p.exports.Begin(handoff, capability, ranges)
	if err != nil {
		return c.answer(err)
	}
	defer end()
	yes := backend.EndFrame(backend.AppendVerdict(backend.BeginFrame(nil), nil), 0)
	return c.send(yes, p.mem.Data, ranges, func(int64) {})
}
