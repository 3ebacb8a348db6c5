package sim

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"baton/handoff"
	"baton/layout"
	"baton/transfer"
)

// fabric is the transfer backend under all engines, as bad as the contract of package transfer lets it be:
// it fails, hangs, and goes on touching memory after a transfer was cancelled, until it says that it does
// not any more.
type fabric struct {
	exports map[exportKey]*export
	active  []*flow
	tags    uint64
}

type exportKey struct {
	life    *life
	handoff uint64
	rank    int
}

// export is what a rank lets others read.
type export struct {
	capability []byte
	ranges     []handoff.Range
	readers    int
	revoked    bool
}

type direction uint8

const (
	pull   direction = iota // the destination's side, and all there is
	push                    // the source's side
	expect                  // the destination's side of pushes
)

// flow is a transfer on one rank.
type flow struct {
	w     *world
	owner *life // whose handoff ordered it
	id    uint64
	kind  direction
	tag   string
	slot  *flow // of a push: where it writes
	used  bool  // of a receive: somebody pushes there

	source, destination         *life
	sourceRank, destinationRank int
	copies                      []layout.Copy // in words
	ranges                      []handoff.Range
	words, read, landed         int
	step                        int
	carried                     []uint64 // read and not yet landed

	state  transfer.State
	err    error
	export *export // claimed by a pull
	trips  int     // reads so far
	fails  int     // the read that fails; 0: none
	hangs  int     // the read that never comes; 0: none
	flips  int     // the word that changes on the way, counted from 1; 0: none

	sourceBlocks, destinationBlocks []touch
}

// touch is a block that a flow may read or write.
type touch struct {
	id         int32
	generation uint32
}

func descriptor(l *life, rank int) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(l.number))
	return binary.LittleEndian.AppendUint32(b, uint32(rank))
}

// place finds the memory that a descriptor names.
func (w *world) place(d []byte) (*life, int) {
	return w.lives[binary.LittleEndian.Uint32(d)], int(binary.LittleEndian.Uint32(d[4:]))
}

// order carries out one order of an engine's handoff and answers what can be answered at once.
func (f *fabric) order(l *life, action handoff.Action) handoff.Event {
	w := l.w
	w.log("%v: %s", l, ordered{action})
	switch a := action.(type) {
	case handoff.Seal:
		l.seal(a)
	case handoff.Verify:
		l.compare(a)
	case handoff.OpenExport:
		if f.exports == nil {
			f.exports = map[exportKey]*export{}
		}
		f.exports[exportKey{l, a.Handoff, a.Rank}] = &export{capability: a.Capability, ranges: a.Ranges}
		return handoff.Opened{Handoff: a.Handoff, Rank: a.Rank}
	case handoff.Revoke:
		return handoff.Revoked{Handoff: a.Handoff, Rank: a.Rank, Quiesced: f.revoke(exportKey{l, a.Handoff, a.Rank})}
	case handoff.StartPull:
		t := f.start(l, pull, a.Transfer)
		t.source, t.sourceRank = w.place(a.Peer)
		t.destination, t.destinationRank = l, a.Rank
		t.plan(a.Copies)
		t.destinationBlocks = t.touches(l, a.Rank, a.Copies, func(c layout.Copy) int64 { return c.Dst })
		w.after(w.hop(), func() { t.claim(a.Handoff, a.Capability) })
	case handoff.Expect:
		t := f.start(l, expect, a.Transfer)
		f.tags++
		t.tag = fmt.Sprintf("tag %d", f.tags)
		t.destination, t.destinationRank, t.ranges = l, a.Rank, a.Ranges
		for _, r := range a.Ranges {
			t.words += int(r.Len / tagBytes)
			t.destinationBlocks = append(t.destinationBlocks, l.blocks(a.Rank, r.Off, r.Len)...)
		}
		return handoff.Expected{Transfer: a.Transfer, Tag: []byte(t.tag)}
	case handoff.StartPush:
		t := f.start(l, push, a.Transfer)
		t.source, t.sourceRank, t.tag = l, a.Rank, string(a.Tag)
		t.destination, t.destinationRank = w.place(a.Peer)
		t.plan(a.Copies)
		t.sourceBlocks = t.touches(l, a.Rank, a.Copies, func(c layout.Copy) int64 { return c.Src })
		w.after(w.hop(), t.meet)
	case handoff.Cancel:
		if t := l.transfers[a.Transfer]; t != nil && t.state == transfer.Running {
			t.abort(errCancelled)
		}
	case handoff.Recheck:
		if t := l.transfers[a.Transfer]; t != nil {
			return l.settlement(t)
		}
	}
	return nil
}

var errCancelled = errors.New("cancelled")

func (f *fabric) revoke(key exportKey) (quiesced bool) {
	e := f.exports[key]
	if e == nil {
		return true
	}
	e.revoked = true
	if e.readers > 0 {
		return false
	}
	delete(f.exports, key)
	return true
}

// start makes a flow, and draws what will go wrong with it.
func (f *fabric) start(l *life, kind direction, id uint64) *flow {
	t := &flow{w: l.w, owner: l, id: id, kind: kind, state: transfer.Running}
	fleet := l.w.script.Fleet
	if l.w.chance(fleet.Fail) {
		t.fails = 1 + l.w.rng.IntN(3)
	}
	if l.w.chance(fleet.Hang) {
		t.hangs = 1 + l.w.rng.IntN(3)
	}
	l.transfers[id] = t
	f.active = append(f.active, t)
	l.w.counts.Transfers++
	return t
}

// plan takes the copies, in words, and how many at a time.
func (t *flow) plan(copies []layout.Copy) {
	for _, c := range copies {
		t.copies = append(t.copies, layout.Copy{Src: c.Src / tagBytes, Dst: c.Dst / tagBytes, Len: c.Len / tagBytes})
		t.words += int(c.Len / tagBytes)
	}
	if t.w.chance(t.w.script.Fleet.Flip) {
		t.flips = 1 + t.w.rng.IntN(t.words)
	}
	t.step = max(1, t.words/(1+t.w.rng.IntN(3)))
}

// blocks lists the blocks that a run of bytes of a rank's pool lies in.
func (l *life) blocks(rank int, off, length int64) []touch {
	var list []touch
	size := int64(l.memory.words[rank]) * tagBytes
	if m := l.memory; m.sumsAt != nil {
		switch at := int64(m.sumsAt[rank]) * tagBytes; {
		case off >= at:
			off, size = off-at, int64(m.sumWords[rank])*tagBytes
		case off+length > at: // the last block and the first checksums are neighbours
			list, length = l.blocks(rank, at, off+length-at), at-off
		}
	}
	for id := off / size; id*size < off+length; id++ {
		list = append(list, touch{int32(id), l.core.Pool().Generation(int32(id))})
	}
	return list
}

func (t *flow) touches(l *life, rank int, copies []layout.Copy, side func(layout.Copy) int64) []touch {
	var list []touch
	for _, c := range copies {
		for _, x := range l.blocks(rank, side(c), c.Len) {
			if !slices.Contains(list, x) {
				list = append(list, x)
			}
		}
	}
	return list
}

// claim is the arrival of a pull at its source, which lets it read or not.
func (t *flow) claim(number uint64, capability []byte) {
	w := t.w
	switch {
	case t.state != transfer.Running || t.owner.dead:
		return
	case t.owner.frozen || t.source.frozen && !w.script.Fleet.Shared || t.stalls():
		w.after(stall, func() { t.claim(number, capability) })
		return
	case t.source.dead:
		t.refused(t.source, transfer.ErrPeerLost)
		return
	case t.turnedAway(t.source, t.sourceRank):
		return
	}
	e := w.fabric.exports[exportKey{t.source, number, t.sourceRank}]
	if e == nil || e.revoked || !bytes.Equal(e.capability, capability) {
		t.refused(t.source, transfer.ErrRefused)
		return
	}
	for _, c := range t.copies {
		if !inside(e.ranges, c.Src*tagBytes, c.Len*tagBytes) {
			w.fail("%v reads words %d to %d of %v, which are not exported to it", t, c.Src, c.Src+c.Len, t.source)
			return
		}
		t.sourceBlocks = append(t.sourceBlocks, t.source.blocks(t.sourceRank, c.Src*tagBytes, c.Len*tagBytes)...)
	}
	e.readers++
	t.export = e
	t.move()
}

func inside(ranges []handoff.Range, off, length int64) bool {
	return slices.ContainsFunc(ranges, func(r handoff.Range) bool { return off >= r.Off && off+length <= r.Off+r.Len })
}

// meet is the arrival of a push at its destination.
func (t *flow) meet() {
	w := t.w
	switch {
	case t.state != transfer.Running || t.owner.dead:
		return
	case t.source.frozen || t.destination.frozen || t.stalls():
		w.after(stall, t.meet)
		return
	case t.turnedAway(t.destination, t.destinationRank):
		return
	}
	i := slices.IndexFunc(w.fabric.active, func(x *flow) bool { return x.kind == expect && x.tag == t.tag })
	if i < 0 || t.destination.dead || w.fabric.active[i].state != transfer.Running {
		t.refused(t.destination, transfer.ErrRefused)
		return
	}
	t.slot = w.fabric.active[i]
	if t.slot.used {
		w.fail("%v is not the first one under its tag, which is good for one", t)
		return
	}
	t.slot.used = true
	if t.slot.destination != t.destination || t.slot.destinationRank != t.destinationRank {
		w.fail("%v was sent to rank %d of %v under a tag of rank %d of %v", t,
			t.destinationRank, t.destination, t.slot.destinationRank, t.slot.destination)
		return
	}
	for _, c := range t.copies {
		if !inside(t.slot.ranges, c.Dst*tagBytes, c.Len*tagBytes) {
			w.fail("%v writes words %d to %d of %v, which do not wait for it", t, c.Dst, c.Dst+c.Len, t.destination)
			return
		}
	}
	t.move()
}

// refused ends a flow that its peer does not take. It counts as broken where the peer is not to blame, since it
// died or lost its connection.
func (t *flow) refused(by *life, err error) {
	if by.dead || by.phase != serving {
		t.w.counts.BrokenTransfers++
	}
	t.end(transfer.Failed, err)
}

// stalls reports whether one of a flow's two ranks does nothing. Shared memory can be read all the same.
func (t *flow) stalls() bool {
	return t.destination.stalled(t.destinationRank) || t.source.stalled(t.sourceRank) && !(t.kind == pull && t.w.script.Fleet.Shared)
}

// stall is how often a flow looks whether who stopped goes on.
const stall = 5 * time.Millisecond

// move lands what was read last and reads on, until everything has landed.
func (t *flow) move() {
	w := t.w
	if t.state != transfer.Running && t.state != transfer.Unsafe || t.owner.dead {
		return
	}
	frozen := t.destination.frozen || t.source.frozen && !(t.kind == pull && w.script.Fleet.Shared)
	if frozen || t.stalls() {
		w.after(stall, t.move)
		return
	}
	if t.source.dead && t.kind == pull && !w.script.Fleet.Shared {
		return // died has seen to it
	}
	t.land()
	if t.state != transfer.Running && t.state != transfer.Unsafe {
		return
	}
	if t.landed == t.words {
		t.complete()
		return
	}
	t.trips++
	switch {
	case t.trips == t.hangs && t.state == transfer.Running:
		return // until somebody cancels it
	case t.trips == t.fails && t.state == transfer.Running:
		t.abort(transfer.ErrPeerLost)
		return
	}
	from := t.source.memory.ranks[t.sourceRank]
	t.each(t.read, t.read+t.step, func(src, _ int64) { t.carried = append(t.carried, from[src]) })
	t.read += len(t.carried)
	w.after(w.within(600*time.Microsecond), t.move)
}

// each visits the words of a part of the copies.
func (t *flow) each(first, end int, visit func(src, dst int64)) {
	at := 0
	for _, c := range t.copies {
		for i := max(0, first-at); i < min(int(c.Len), end-at); i++ {
			visit(c.Src+int64(i), c.Dst+int64(i))
		}
		at += int(c.Len)
	}
}

// land writes what is carried, if the destination still takes it.
func (t *flow) land() {
	if len(t.carried) == 0 {
		return
	}
	if s := t.slot; s != nil {
		if s.state != transfer.Running && s.state != transfer.Unsafe {
			t.carried = nil
			t.end(transfer.Failed, transfer.ErrRefused)
			return
		}
		s.landed += len(t.carried)
	}
	to := t.destination.memory.ranks[t.destinationRank]
	i := 0
	t.each(t.landed, t.landed+len(t.carried), func(_, dst int64) {
		to[dst] = t.carried[i]
		if i++; t.landed+i == t.flips {
			t.flip(&to[dst])
		}
	})
	t.landed += len(t.carried)
	t.carried = t.carried[:0]
	if s := t.slot; s != nil && s.landed == s.words {
		s.complete()
	}
}

// complete ends a flow whose bytes are all there.
func (t *flow) complete() {
	if t.state == transfer.Unsafe {
		t.end(transfer.Failed, t.err)
		return
	}
	if t.kind == push && t.w.chance(t.w.script.Fleet.Fail) { // all has arrived, but the word of it did not
		t.abort(transfer.ErrPeerLost)
		return
	}
	t.end(transfer.Done, nil)
}

// abort stops a flow early. It may be safe at once, or go on for a while.
func (t *flow) abort(err error) {
	w := t.w
	w.counts.BrokenTransfers++
	touching := t.export != nil || t.slot != nil || t.kind == expect
	if !touching || !w.chance(w.script.Fleet.Unsafe) {
		t.end(transfer.Failed, err)
		return
	}
	w.counts.Quarantines++
	hung := t.hangs > 0 && t.trips >= t.hangs
	t.state, t.err = transfer.Unsafe, err
	t.notify()
	if hung && t.kind != expect {
		w.after(w.within(30*time.Millisecond), t.move) // what was stuck comes after all
	}
	w.after(w.within(60*time.Millisecond), func() {
		if t.state == transfer.Unsafe {
			t.end(transfer.Failed, err)
		}
	})
}

// end is when nothing of a flow is in flight any more.
func (t *flow) end(state transfer.State, err error) {
	was := t.state
	t.state, t.err = state, err
	t.w.log("%v: %v %v", t, [...]string{transfer.Done: "done", transfer.Failed: "failed"}[state], orNothing(err))
	if t.export != nil {
		t.export.readers--
		t.export = nil
	}
	t.w.fabric.active = slices.DeleteFunc(t.w.fabric.active, func(x *flow) bool { return x == t })
	if was == transfer.Running {
		t.notify()
	}
}

func orNothing(err error) string {
	if err == nil {
		return ""
	}
	return "(" + err.Error() + ")"
}

// notify tells the owner, once, that the flow settled.
func (t *flow) notify() {
	t.owner.later(t.w.within(200*time.Microsecond), func() { t.owner.settled(t) })
}

func (t *flow) String() string {
	return fmt.Sprintf("%s %d of %v", [...]string{"pull", "push", "receive"}[t.kind], t.id, t.owner)
}

// settled takes in the end of a transfer. Between two connections the engine does not look at them.
func (l *life) settled(t *flow) {
	if l.phase != serving {
		l.waiting = append(l.waiting, t)
		return
	}
	if l.transfers[t.id] != t {
		return
	}
	if e := l.settlement(t); e != nil {
		l.moved(e)
	}
}

// settlement is what a look at a transfer means to the handoff; nil while it runs.
func (l *life) settlement(t *flow) handoff.Event {
	if t.state == transfer.Running {
		return nil
	}
	e := handoff.Settled{Transfer: t.id, Err: t.err, Bytes: int64(t.landed) * tagBytes, Safe: t.state != transfer.Unsafe}
	if e.Safe {
		delete(l.transfers, t.id)
	}
	return e
}

// died ends what an engine had under way, some of it only when others notice.
func (f *fabric) died(w *world, l *life) {
	for key := range f.exports {
		if key.life == l {
			delete(f.exports, key)
		}
	}
	for _, t := range slices.Clone(f.active) {
		switch {
		case t.owner == l:
			f.orphan(w, t)
		case t.source == l && !(t.kind == pull && w.script.Fleet.Shared), t.kind == push && t.destination == l:
			w.after(w.within(40*time.Millisecond), func() { t.lose() })
		}
	}
}

// orphan is a flow whose engine died.
func (f *fabric) orphan(w *world, t *flow) {
	f.active = slices.DeleteFunc(f.active, func(x *flow) bool { return x == t })
	if e := t.export; e != nil {
		t.export = nil
		w.after(w.within(40*time.Millisecond), func() { e.readers-- })
	}
	if s := t.slot; s != nil && w.chance(700) {
		w.after(w.within(40*time.Millisecond), func() { s.lose() })
	}
}

// lose ends a flow whose other side is gone.
func (t *flow) lose() {
	if t.state == transfer.Running && !t.owner.dead {
		t.abort(transfer.ErrPeerLost)
	}
}

// check makes sure that blocks which a flow may touch are held and were not handed out anew.
func (f *fabric) check(w *world) {
	for _, t := range f.active {
		if t.source != nil && (t.kind == push || t.export != nil) {
			t.checkBlocks(t.source, t.sourceBlocks, "read")
		}
		if t.kind != push {
			t.checkBlocks(t.destination, t.destinationBlocks, "written")
		}
	}
}

func (t *flow) checkBlocks(l *life, blocks []touch, how string) {
	if l.dead {
		return
	}
	pool := l.core.Pool()
	for _, x := range blocks {
		if held, _ := pool.State(x.id); !held || pool.Generation(x.id) != x.generation {
			t.w.fail("block %d of %v can still be %s by %v, but it is free or somebody else's", x.id, l, how, t)
			return
		}
	}
}
