package sim

import (
	"slices"
	"time"

	"baton/handoff"
	"baton/layout"
	"baton/wire"
)

// sumTile is how many tokens a simulated checksum is of.
const sumTile = 2

// sumGeometry is that of the blocks' checksums.
func sumGeometry(blockSize int) layout.Geometry { return geometry(blockSize).Checksums(sumTile) }

// keepChecksums makes room for the checksums of all blocks behind them.
func (m *memory) keepChecksums(blocks int, holdings []layout.Holding) {
	for rank, h := range holdings {
		words := int(sumGeometry(m.blockSize).BlockBytes(h) / tagBytes)
		m.sumsAt, m.sumWords = append(m.sumsAt, len(m.ranks[rank])), append(m.sumWords, words)
		m.ranks[rank] = append(m.ranks[rank], make([]uint64, blocks*words)...)
	}
}

func (m *memory) checksums() []handoff.Checksums {
	var list []handoff.Checksums
	for rank, words := range m.sumWords {
		list = append(list, handoff.Checksums{Off: int64(m.sumsAt[rank]) * tagBytes, BlockBytes: int64(words) * tagBytes})
	}
	return list
}

// sums visits the checksums of blocks on a rank, and what they should be.
func (m *memory) sums(rank int, blocks []int32, visit func(have *uint64, want uint64)) {
	for _, id := range blocks {
		tags := m.ranks[rank][int(id)*m.words[rank]:][:m.words[rank]]
		for i := range m.sumWords[rank] {
			sum := uint64(sumTile)
			for _, tag := range tags[i*sumTile:][:sumTile] {
				sum = mix(sum, tag)
			}
			visit(&m.ranks[rank][m.sumsAt[rank]+int(id)*m.sumWords[rank]+i], sum)
		}
	}
}

// scribbleSums spoils the checksums of a block that nobody may read any more.
func (m *memory) scribbleSums(id int32) {
	for rank, words := range m.sumWords {
		for i := range words {
			m.ranks[rank][m.sumsAt[rank]+int(id)*words+i] = poison
		}
	}
}

// errDamaged is what a verification finds.
type errDamaged struct{ have, want uint64 }

func (e errDamaged) Error() string { return "a checksum differs" }

// seal and compare are the two things that an engine does with the checksums of blocks, one after the other.
func (l *life) seal(a handoff.Seal) {
	l.check(a.Rank, a.Blocks, func() handoff.Event {
		l.memory.sums(a.Rank, a.Blocks, func(have *uint64, want uint64) { *have = want })
		return handoff.Sealed{Handoff: a.Handoff, Rank: a.Rank}
	})
}

func (l *life) compare(a handoff.Verify) {
	l.check(a.Rank, a.Blocks, func() handoff.Event {
		var err error
		l.memory.sums(a.Rank, a.Blocks, func(have *uint64, want uint64) {
			if *have != want {
				err = errDamaged{*have, want}
			}
		})
		return handoff.Verified{Transfer: a.Transfer, Err: err}
	})
}

// check has a rank do something with blocks after a while. They must be held and stay nobody else's until then.
func (l *life) check(rank int, blocks []int32, do func() handoff.Event) {
	var touches []touch
	for _, id := range blocks {
		touches = append(touches, touch{id, l.core.Pool().Generation(id)})
	}
	r := &l.ranks[rank]
	r.checkedAt = max(r.checkedAt, l.w.now, r.stalls) + int64(l.w.within(400*time.Microsecond))
	l.checkAt(rank, r.checkedAt, func() {
		l.deliver(func() {
			for _, x := range touches {
				if held, _ := l.core.Pool().State(x.id); !held || l.core.Pool().Generation(x.id) != x.generation {
					l.w.fail("block %d of %v is free or somebody else's while its checksums are made or compared", x.id, l)
				}
			}
			l.checked(do())
		})
	})
}

// checkAt does something when its time has come and the rank does not stall.
func (l *life) checkAt(rank int, at int64, do func()) {
	l.w.at(at, func() {
		if l.stalled(rank) {
			l.checkAt(rank, l.ranks[rank].stalls, do)
			return
		}
		do()
	})
}

// checked gives the engine's core what came of a check. Between two connections it does not look.
func (l *life) checked(e handoff.Event) {
	if l.phase != serving {
		l.unseen = append(l.unseen, e)
		return
	}
	l.moved(e)
}

// flip damages one bit of what a flow brings, once.
func (t *flow) flip(word *uint64) {
	*word ^= 1 << t.w.rng.IntN(64)
	t.w.counts.Flips++
	t.w.counts.BrokenTransfers++
	t.w.log("%v: a bit changes on the way", t)
}

// blame fails the run when an engine finds damage that nobody did.
func (w *world) blame(l *life, m wire.Message) {
	if e, ok := m.(*wire.RequestError); ok && e.Code == wire.CodeCorrupt {
		w.counts.Corrupt++
		if w.counts.Corrupt > w.counts.Flips {
			w.fail("%v found %d handoffs damaged; %d bits were changed", l, w.counts.Corrupt, w.counts.Flips)
		}
	}
}

// verifications are the modes that a script can name; empty is off.
var verifications = []handoff.Verification{"", handoff.VerifyOff, handoff.VerifySample, handoff.VerifyAll}

func (f Fleet) verifies() bool {
	v, _ := handoff.ParseVerification(f.Verify)
	return v != handoff.VerifyOff && f.Both == 0
}

func (f Fleet) checkVerify() string {
	switch {
	case !slices.Contains(verifications, handoff.Verification(f.Verify)):
		return "verify must be off, sample or all"
	case f.verifies() && f.BlockSize%sumTile != 0:
		return "block-size must be even where handoffs are verified"
	case f.Flip > 0 && (f.Verify != string(handoff.VerifyAll) || f.Both > 0):
		return "only with verify=all would every flip be noticed"
	}
	return ""
}
