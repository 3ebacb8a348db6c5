package handoff

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"baton/kvcache"
	"baton/layout"
	"baton/wire"
)

// export is a prompt's KV from Retain until nobody can read it any more.
type export struct {
	handoff, id uint64
	pin         *kvcache.Pin
	tokens      int
	capability  []byte
	lease       time.Duration // 0: for ever
	expires     time.Time     // zero: not yet offered, or never

	sealing   int    // ranks that have not answered Seal
	opening   int    // ranks that have not answered OpenExport
	releasing bool   // only waiting until it is quiesced
	waited    bool   // and was looked at since
	kept      bool   // and has to wait for a transfer: reported as a Quarantine
	readable  []bool // ranks that may still be read; empty where sources push
	pushes    []*leg // not safe yet
	aborted   bool   // the other side waits for a RequestAborted
	silent    bool
	stale     bool // somebody else was given blocks of it, and that was reported
}

func (c *Core) retain(e Retain) {
	if e.Tokens < 1 || e.Tokens > e.Table.Len() {
		e.Table.Close()
		c.fail(e.ID, wire.CodeInternal, true, "an export of %d tokens of %d that are computed", e.Tokens, e.Table.Len())
		return
	}
	c.lastHandoff++
	x := &export{
		handoff: c.lastHandoff, id: e.ID, pin: e.Table.Pin(c.pool.BlocksFor(e.Tokens)), tokens: e.Tokens,
		capability: e.Capability, lease: e.Lease,
	}
	e.Table.Close()
	c.exports = append(c.exports, x)
	if c.verifies() {
		c.seal(x)
	} else {
		c.open(x)
	}
}

// open lets destinations read the blocks, where they do, and offers them.
func (c *Core) open(x *export) {
	if c.config.Push {
		c.offer(x)
		return
	}
	x.opening = len(c.config.BlockBytes)
	x.readable = make([]bool, x.opening)
	for rank := range x.readable {
		x.readable[rank] = true
		c.act(OpenExport{Handoff: x.handoff, Rank: rank, Capability: x.capability, Ranges: c.ranges(rank, x.pin.Blocks())})
	}
}

// ranges are the bytes of blocks on a rank, and of their checksums, neighbours merged.
func (c *Core) ranges(rank int, blocks []int32) []Range {
	ranges := appendRanges(nil, 0, c.config.BlockBytes[rank], blocks)
	if c.verifies() {
		s := c.config.Checksums[rank]
		ranges = appendRanges(ranges, s.Off, s.BlockBytes, blocks)
	}
	return ranges
}

// appendRanges adds the runs of blocks that lie from off on. They never merge into those before.
func appendRanges(ranges []Range, off, size int64, blocks []int32) []Range {
	first := len(ranges)
	for _, id := range blocks {
		r := Range{Off: off + int64(id)*size, Len: size}
		if last := len(ranges) - 1; last >= first && ranges[last].Off+ranges[last].Len == r.Off {
			ranges[last].Len += size
			continue
		}
		ranges = append(ranges, r)
	}
	return ranges
}

func (c *Core) offer(x *export) {
	if err := c.verify(x.pin); err != nil {
		x.stale = true
		c.fail(x.id, wire.CodeUnavailable, true, "its KV cannot be offered: %v", err)
		c.release(x)
		return
	}
	generations := make(wire.Tokens, len(x.pin.Generations()))
	for i, g := range x.pin.Generations() {
		generations[i] = int32(g)
	}
	c.stats.Exported++
	c.extend(x)
	c.act(Offer{ID: x.id, Export: &wire.Export{
		Handoff: x.handoff, Capability: x.capability, Blocks: slices.Clone(x.pin.Blocks()), Tokens: x.tokens,
		Generations: generations,
	}})
}

// verify makes sure that nobody else was given blocks which are held here. If somebody was, the engine has
// broken a rule of its own, and no token may come of it.
func (c *Core) verify(held interface{ Verify() error }) error {
	err := held.Verify()
	if err != nil {
		c.stats.Stale++
	}
	return err
}

func (c *Core) export(handoff uint64) *export {
	i, ok := slices.BinarySearchFunc(c.exports, handoff, func(x *export, h uint64) int { return cmp.Compare(x.handoff, h) })
	if !ok {
		return nil
	}
	return c.exports[i]
}

func (c *Core) opened(e Opened) {
	x := c.export(e.Handoff)
	if x == nil || x.releasing || x.opening == 0 {
		return
	}
	if e.Err != nil {
		c.fail(x.id, wire.CodeUnavailable, true, "its KV cannot be offered: %v", e.Err)
		c.release(x)
		return
	}
	if x.opening--; x.opening == 0 {
		c.offer(x)
	}
}

// push starts the transfers to a decode engine that is ready. An engine that waits for a push which can
// never come is told so, through the failure of the request.
func (c *Core) push(e Push) {
	m := e.Message
	x := c.export(m.Handoff)
	if c.wasAborted(m.Handoff, m.ID) {
		return // a RequestAborted answers both
	}
	if x == nil || x.id != m.ID || x.releasing {
		c.failPush(m.ID, m.Reader, wire.CodeUnavailable, "its KV is not held any more (handoff %d)", m.Handoff)
		return
	}
	tags, err := unpackTags(m.Tag)
	if err == nil {
		err = c.checkPush(x, e, len(tags))
	}
	if err != nil {
		c.failPush(m.ID, m.Reader, wire.CodeInternal, "its KV cannot be sent: %v", err)
		return
	}
	if err := c.verify(x.pin); err != nil {
		x.stale = true
		c.failPush(m.ID, m.Reader, wire.CodeUnavailable, "its KV cannot be sent: %v", err)
		return
	}
	from := x.pin.Blocks()[m.CachedBlocks:]
	for i := range e.Template.Legs {
		t := &e.Template.Legs[i]
		l := c.newLeg(leg{rank: t.Src, export: x, reader: m.Reader, deadline: c.now.Add(c.config.Timeout)})
		x.pushes = append(x.pushes, l)
		c.act(StartPush{
			Transfer: l.transfer, Rank: t.Src, Peer: m.Ranks[t.Dst].Transport, Tag: tags[i],
			Copies: c.copies(t, c.sumsLeg(e.Checksums, i), c.sumsOff(t.Src), m.Ranks[t.Dst].Checksums, from, m.Blocks),
		})
	}
}

func (c *Core) checkPush(x *export, e Push, tags int) error {
	m := e.Message
	if !c.config.Push {
		return fmt.Errorf("this engine's transport does not push")
	}
	offered := len(x.pin.Blocks())
	if m.CachedBlocks < 0 || m.CachedBlocks > offered || len(m.Blocks) != offered-m.CachedBlocks {
		return fmt.Errorf("%d blocks cached and %d to receive do not make the %d offered", m.CachedBlocks, len(m.Blocks), offered)
	}
	if err := checkBlocks(m.Blocks); err != nil {
		return err
	}
	if err := checkTemplate(e.Template, len(c.config.BlockBytes), len(m.Ranks)); err != nil {
		return err
	}
	if legs := len(e.Template.Legs); tags != legs {
		return fmt.Errorf("%d tags for %d pairs of ranks", tags, legs)
	}
	return c.checkSums(e.Template, e.Checksums, m.Ranks)
}

func checkBlocks(blocks []int32) error {
	for i, id := range blocks {
		if id < 0 {
			return fmt.Errorf("block %d of the list is %d", i, id)
		}
	}
	return nil
}

func checkTemplate(t *layout.Template, sources, destinations int) error {
	if t == nil {
		return fmt.Errorf("the layouts of the two engines do not fit together")
	}
	for _, l := range t.Legs {
		if l.Src >= sources || l.Dst >= destinations {
			return fmt.Errorf("a copy from rank %d to rank %d, but there are %d and %d ranks", l.Src, l.Dst, sources, destinations)
		}
	}
	return nil
}

func (c *Core) pushSettled(l *leg, e Settled) {
	x := l.export
	c.stats.BytesMoved += uint64(max(e.Bytes, 0))
	if e.Err != nil && !l.failed {
		l.failed = true
		if !x.releasing {
			c.failPush(x.id, l.reader, wire.CodeUnavailable, "sending its KV failed: %v", e.Err)
		}
	}
	if !l.unsafe || e.Err == nil || e.Safe {
		x.pushes = slices.DeleteFunc(x.pushes, func(o *leg) bool { return o == l })
		c.settleRelease(x)
	}
}

func (c *Core) released(e Release) {
	if x := c.export(e.Handoff); x != nil && x.id == e.ID {
		if e.Corrupt {
			c.pool.Forget(x.pin.Blocks())
		}
		c.release(x)
	}
}

func (c *Core) renew(e Renew) {
	if x := c.export(e.Handoff); x != nil && x.id == e.ID && !x.expires.IsZero() {
		c.extend(x)
	}
}

// extend begins an export's lease.
func (c *Core) extend(x *export) {
	if x.lease > 0 {
		x.expires = c.now.Add(x.lease)
	}
}

// expire ends an export that nobody came for.
func (c *Core) expire(x *export) {
	c.fail(x.id, wire.CodeGone, true, "its KV was held for %v, and nobody has read it", x.lease)
	c.release(x)
}

// release revokes an export. Its blocks are free once every rank says that nothing reads them, and every
// seal and push has come to an end.
func (c *Core) release(x *export) {
	if x.releasing {
		return
	}
	x.releasing = true
	for rank := range x.readable {
		c.act(Revoke{Handoff: x.handoff, Rank: rank})
	}
	c.settleRelease(x)
}

// keep notes, once, that a released export has to wait for a transfer.
func (c *Core) keep(x *export) {
	if !x.kept {
		x.kept = true
		c.kept = append(c.kept, Quarantine{ID: x.id, Blocks: len(x.pin.Blocks()), Source: true})
	}
}

func (c *Core) revoked(e Revoked) {
	x := c.export(e.Handoff)
	if x == nil || !x.releasing || e.Rank < 0 || e.Rank >= len(x.readable) {
		return
	}
	if !e.Quiesced {
		if x.waited {
			c.keep(x)
		}
		return
	}
	x.readable[e.Rank] = false
	c.settleRelease(x)
}

func (c *Core) settleRelease(x *export) {
	if !x.releasing || x.sealing > 0 || len(x.pushes) > 0 || slices.Contains(x.readable, true) {
		return
	}
	if !x.stale {
		if err := c.verify(x.pin); err != nil && !x.silent {
			c.fail(x.id, wire.CodeUnavailable, true, "what was read as its KV may be another's: %v", err)
		}
	}
	x.pin.Release()
	c.exports = slices.DeleteFunc(c.exports, func(o *export) bool { return o == x })
	c.retry = true
	if x.aborted && !x.silent {
		c.act(Send{&wire.RequestAborted{ID: x.id, SourceSafe: true}})
	}
}

// abortedExport remembers an export that was aborted: a push may be asked for by a message that crossed the abort.
type abortedExport struct{ handoff, id uint64 }

func (c *Core) wasAborted(handoff, id uint64) bool {
	return handoff != 0 && c.aborted[handoff%uint64(len(c.aborted))] == abortedExport{handoff, id}
}

func (c *Core) abortExports(id uint64) {
	for _, x := range slices.Clone(c.exports) {
		if x.id != id || x.releasing {
			continue
		}
		x.aborted = true
		c.aborted[x.handoff%uint64(len(c.aborted))] = abortedExport{x.handoff, x.id}
		for _, l := range x.pushes {
			c.act(Cancel{l.transfer})
		}
		c.release(x)
	}
}

func (c *Core) pollExports() {
	for _, x := range slices.Clone(c.exports) {
		for _, l := range x.pushes {
			if l.unsafe {
				c.act(Recheck{l.transfer})
			} else if !l.deadline.IsZero() && !c.now.Before(l.deadline) {
				l.deadline = time.Time{}
				c.act(Cancel{l.transfer})
			}
		}
		switch {
		case x.releasing:
			if len(x.pushes) > 0 && x.waited {
				c.keep(x) // a reader is often done a moment before its source knows
			}
			x.waited = true
			for rank, readable := range x.readable {
				if readable {
					c.act(Revoke{Handoff: x.handoff, Rank: rank})
				}
			}
		case len(x.pushes) > 0:
			c.extend(x)
		case !x.expires.IsZero() && !c.now.Before(x.expires):
			c.expire(x)
		}
	}
}

// fail ends a request with an error.
func (c *Core) fail(id uint64, code string, sourceSafe bool, format string, args ...any) {
	c.report(&wire.RequestError{ID: id, Code: code, SourceSafe: sourceSafe}, format, args...)
}

// failPush reports that a push came to nothing. It names the reader: another may have taken its place.
func (c *Core) failPush(id, reader uint64, code, format string, args ...any) {
	c.report(&wire.RequestError{ID: id, Code: code, SourceSafe: true, Reader: reader}, format, args...)
}

func (c *Core) report(m *wire.RequestError, format string, args ...any) {
	c.stats.Failed++
	m.Message = fmt.Sprintf("request %d: "+format, append([]any{m.ID}, args...)...)
	m.Retryable = m.Code == wire.CodeUnavailable || m.Code == wire.CodeCorrupt || m.Code == wire.CodeGone
	c.act(Send{m})
}
