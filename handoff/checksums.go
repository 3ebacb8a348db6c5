package handoff

import (
	"fmt"
	"slices"

	"baton/layout"
	"baton/wire"
)

// Verification says which blocks of a handoff are compared with the checksums that their source made.
type Verification string

// The kinds of verification. A sample is every eighth block of a prompt, and its last one.
const (
	VerifyOff    Verification = "off"
	VerifySample Verification = "sample"
	VerifyAll    Verification = "all"
)

const sampleEvery = 8

// covers reports whether block i of the n that a prompt has is verified. Both sides decide alike.
func (v Verification) covers(i, n int) bool {
	switch v {
	case VerifyAll:
		return true
	case VerifySample:
		return i%sampleEvery == 0 || i == n-1
	}
	return false
}

// ParseVerification reads off, sample or all; empty is off.
func ParseVerification(s string) (Verification, error) {
	switch v := Verification(s); v {
	case "":
		return VerifyOff, nil
	case VerifyOff, VerifySample, VerifyAll:
		return v, nil
	}
	return "", fmt.Errorf("handoff: verification %q; it must be %s, %s or %s", s, VerifyOff, VerifySample, VerifyAll)
}

// Checksums is where a rank's memory keeps the checksums of its blocks, one block's after another's.
type Checksums struct {
	Off        int64 // of the first block's
	BlockBytes int64 // of the checksums of one block
}

func (c Config) validateChecksums() error {
	v, err := ParseVerification(string(c.Verify))
	if err != nil {
		return err
	}
	if v == VerifyOff {
		return nil
	}
	if len(c.Checksums) != len(c.BlockBytes) {
		return fmt.Errorf("handoff: Config.Checksums has %d entries for %d ranks", len(c.Checksums), len(c.BlockBytes))
	}
	for rank, s := range c.Checksums {
		if s.Off < 1 || s.BlockBytes < 1 {
			return fmt.Errorf("handoff: Config.Checksums[%d] is %+v; both must be positive", rank, s)
		}
	}
	return nil
}

func (c *Core) verifies() bool { return c.config.Verify != VerifyOff }

// seal has the checksums made of those blocks of an export that have none yet. A block's bytes stay the
// same until it is handed out again, so those from an earlier export, made or about to be, still hold; if
// the bytes should have changed nevertheless, they tell.
func (c *Core) seal(x *export) {
	blocks, generations := x.pin.Blocks(), x.pin.Generations()
	var open []int32
	for i, id := range blocks {
		if c.config.Verify.covers(i, len(blocks)) && c.sealed[id] != generations[i] {
			c.sealed[id] = generations[i]
			open = append(open, id)
		}
	}
	x.sealing = len(c.config.BlockBytes)
	for rank := range x.sealing {
		c.act(Seal{Handoff: x.handoff, Rank: rank, Blocks: open})
	}
}

func (c *Core) sealedBy(e Sealed) {
	x := c.export(e.Handoff)
	if x == nil || x.sealing == 0 {
		return
	}
	if x.sealing--; x.sealing > 0 {
		return
	}
	if x.releasing {
		c.settleRelease(x)
		return
	}
	c.open(x)
}

// verifyArrived goes on with an import whose bytes are all there: their checksums are compared first.
func (c *Core) verifyArrived(m *importing) {
	m.moved = c.now
	n := len(m.message.Source.Export.Blocks)
	var blocks []int32
	for i := m.reused; i < n; i++ {
		if c.config.Verify.covers(i, n) {
			blocks = append(blocks, m.table.Blocks()[i])
		}
	}
	if len(blocks) == 0 {
		c.complete(m)
		return
	}
	m.verifying = true
	for rank := range c.config.BlockBytes {
		l := c.addLeg(m, rank)
		c.act(Verify{Transfer: l.transfer, Rank: rank, Blocks: blocks})
	}
}

// verified aggregates the ranks. What arrived wrong is closed without a trace, and never becomes a token:
// the other side computes the prompt again.
func (c *Core) verified(e Verified) {
	l := c.transfers[e.Transfer]
	if l == nil || l.imported == nil || !l.imported.verifying {
		return
	}
	delete(c.transfers, e.Transfer)
	m := l.imported
	m.legs = slices.DeleteFunc(m.legs, func(o *leg) bool { return o == l })
	if e.Err != nil && m.corrupt == nil {
		m.corrupt = e.Err
	}
	switch {
	case m.pin != nil:
		c.leaveQuarantine(m)
	case len(m.legs) > 0:
	case m.corrupt != nil:
		c.drop(m)
		c.stats.Corrupt++
		c.fail(m.id(), wire.CodeCorrupt, true, "its KV arrived damaged from %s: %v", m.message.Source.Engine, m.corrupt)
	default:
		c.complete(m)
	}
}

// copies brings blocks, and their checksums where there are any, from one rank to another. sums leads from
// checksums to checksums, which begin at srcOff and dstOff.
func (c *Core) copies(blocks, sums *layout.Leg, srcOff, dstOff int64, from, to []int32) []layout.Copy {
	copies := blocks.Apply(nil, from, to)
	if !c.verifies() {
		return copies
	}
	n := len(copies)
	copies = sums.Apply(copies, from, to)
	for i := n; i < len(copies); i++ {
		copies[i].Src += srcOff
		copies[i].Dst += dstOff
	}
	return copies
}

// sumsLeg is the part of a checksum template that belongs to leg i of the blocks' template.
func (c *Core) sumsLeg(t *layout.Template, i int) *layout.Leg {
	if !c.verifies() {
		return nil
	}
	return &t.Legs[i]
}

// sumsOff is where this engine's checksums are on a rank.
func (c *Core) sumsOff(rank int) int64 {
	if !c.verifies() {
		return 0
	}
	return c.config.Checksums[rank].Off
}

// maxMemory bounds where a peer can say that its checksums are: offsets stay far from overflowing.
const maxMemory = 1 << 48

// checkSums makes sure that checksums can be moved along with the blocks.
func (c *Core) checkSums(blocks, sums *layout.Template, peers []wire.RankInfo) error {
	if !c.verifies() {
		return nil
	}
	if sums == nil || len(sums.Legs) != len(blocks.Legs) {
		return fmt.Errorf("handoffs are verified here, but there is no way for the checksums")
	}
	for i, l := range blocks.Legs {
		if s := sums.Legs[i]; s.Src != l.Src || s.Dst != l.Dst {
			return fmt.Errorf("blocks move from rank %d to rank %d, their checksums from %d to %d", l.Src, l.Dst, s.Src, s.Dst)
		}
	}
	for i, r := range peers {
		if r.Checksums < 1 || r.Checksums > maxMemory {
			return fmt.Errorf("handoffs are verified here, but rank %d of the other engine keeps no checksums (at %d)", i, r.Checksums)
		}
	}
	return nil
}
