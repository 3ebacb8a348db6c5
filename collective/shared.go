package collective

import (
	"fmt"
	"sync/atomic"

	"baton/compute"
	"baton/compute/cpu"
)

// sharedGroup is a group whose members are all in this process. An operation goes like this: everybody
// says in its slot what it calls and where its matrices are; all meet; the last to come has compared the slots;
// each does its part of the work, in its own and the others' memory; all meet again, since until then others may
// use one's memory. That second meeting cannot fail: whoever came to the first one comes to it.
type sharedGroup struct {
	barrier  barrier
	slots    []slot
	mismatch *MismatchError // of the round that was released last
}

// slot is what one member tells the others. They read it between the two meetings.
type slot struct {
	call       call
	dst, src   view
	dsts, srcs []view        // AllToAll
	come       atomic.Uint32 // number of meetings it has come to
	_          [64]byte
}

func newSharedGroup(g *group) *sharedGroup {
	s := &sharedGroup{slots: make([]slot, len(g.ranks))}
	s.barrier.size = uint32(len(g.ranks))
	return s
}

// shared is the membership of a sharedGroup.
type shared struct {
	*member
	s *sharedGroup
}

var _ Group = shared{}

func (m shared) slot() *slot { return &m.s.slots[m.rank] }

// meet waits for all members and returns why they must not go on.
func (m shared) meet() error {
	m.slot().come.Add(1)
	r, last, ok := m.s.barrier.arrive()
	switch {
	case !ok:
		return m.p.failed() // only the end of the world breaks a barrier
	case last:
		m.s.mismatch = m.s.compare(m.group)
		m.release(r)
	default:
		if err := m.await(r, false); err != nil {
			return err
		}
	}
	if m.s.mismatch != nil {
		return m.p.end(m.self.rank, m.s.mismatch)
	}
	return nil
}

// part ends an operation: nobody uses another's memory any more.
func (m shared) part() {
	m.slot().come.Add(1)
	if r, last, _ := m.s.barrier.arrive(); last {
		m.release(r)
	} else {
		_ = m.await(r, true) // all come
	}
}

// release lets the other members go on.
func (m shared) release(r uint32) {
	m.s.barrier.release(r)
	if m.s.barrier.parked.Load() == 0 {
		return
	}
	m.p.mu.Lock()
	defer m.p.mu.Unlock()
	for _, k := range m.ranks {
		if s := m.p.ranks[k]; s.wait.kind == forAll && s.wait.group == m.group {
			m.p.rouse(s)
		}
	}
}

// await waits for the release of round r. Unless that is sure to come, it gives up when it cannot.
func (m shared) await(r uint32, sure bool) error {
	b := &m.s.barrier
	if b.poll(r) {
		return nil
	}
	b.parked.Add(1) // before the next look: whoever releases looks at it afterwards
	defer b.parked.Add(-1)
	for !b.released(r) {
		m.p.mu.Lock()
		if !sure {
			if err := m.hopeless(r); err != nil && b.giveUp(r) {
				m.p.mu.Unlock()
				return err
			}
		}
		if b.released(r) {
			m.p.mu.Unlock()
			break
		}
		m.p.sleep(m.self, wait{kind: forAll, group: m.group, call: m.slot().call, round: r})
	}
	return nil
}

// hopeless is why round r will not end; process.mu is held.
func (m shared) hopeless(r uint32) error {
	if err := m.p.failed(); err != nil {
		return err
	}
	for i, k := range m.ranks {
		if m.s.slots[i].come.Load() == r && m.p.ranks[k].closed.Load() {
			return m.p.endLocked(k, ErrClosed)
		}
	}
	return nil
}

// compare looks for members that do not agree. Everybody has come and nobody has gone on.
func (s *sharedGroup) compare(g *group) *MismatchError {
	first := s.slots[0].call
	for i := range s.slots {
		if c := s.slots[i].call; c != first {
			return g.mismatch(0, i, "calls "+first.String(), "calls "+c.String())
		}
	}
	switch first.op {
	case opAllReduce, opBroadcast:
		for i := range s.slots {
			if a, b := s.slots[0].src.shape(), s.slots[i].src.shape(); a != b {
				return g.mismatch(0, i, fmt.Sprintf("calls %v of %v", first, a), fmt.Sprint("of ", b))
			}
		}
	case opAllGatherRows, opAllGatherColumns, opGatherColumns:
		return s.compareGather(g, first)
	case opAllToAll:
		for i := range s.slots {
			for j := range s.slots {
				if a, b := s.slots[i].srcs[j].shape(), s.slots[j].dsts[i].shape(); !a.same(b) {
					return g.mismatch(i, j, fmt.Sprintf("calls %v and sends %v", first, a), fmt.Sprint("expects ", b))
				}
			}
		}
	}
	return nil
}

func (s *sharedGroup) compareGather(g *group, c call) *MismatchError {
	var total shape
	from := 0
	for i := range s.slots {
		v := s.slots[i].src.shape()
		if !total.extend(v, c.op) {
			return g.mismatch(from, i, fmt.Sprintf("calls %v of %v", c, s.slots[from].src.shape()), fmt.Sprint("of ", v))
		}
		if !v.empty() {
			from = i
		}
	}
	for i := range s.slots {
		if v := s.slots[i].dst.shape(); (c.op != opGatherColumns || i == c.root) && !v.same(total) {
			return g.mismatch(from, i, fmt.Sprintf("and others call %v of %v altogether", c, total), fmt.Sprint("makes room for ", v))
		}
	}
	return nil
}

// AllReduce implements Group. Each member adds up its share of the elements, in all members' memory.
func (m shared) AllReduce(mat compute.Mat) error {
	if len(m.ranks)&(len(m.ranks)-1) != 0 {
		return m.reject(opAllReduce, notPowerOfTwo, len(m.ranks))
	}
	if err := m.publish(opAllReduce, 0, compute.Mat{}, mat); err != nil {
		return err
	}
	if err := m.meet(); err != nil {
		return err
	}
	m.s.reduce(m.rank)
	m.part()
	return nil
}

const notPowerOfTwo = "the group has %d members; a sum needs a power of two"

// publish starts an operation: it fills the caller's slot.
func (m shared) publish(o op, root int, dst, src compute.Mat) (err error) {
	s := m.slot()
	if s.dst, err = m.see(o, "dst", dst); err != nil {
		return err
	}
	if s.src, err = m.see(o, "src", src); err != nil {
		return err
	}
	s.call, err = m.begin(o, root)
	return err
}

// reduceChunk is how many elements of all members are added at a time: they stay in the first-level cache.
const reduceChunk = 1024

// reduce makes the sums of one member's share and writes them to everybody.
func (s *sharedGroup) reduce(member int) {
	rows, cols, dense := s.slots[0].src.rows, s.slots[0].src.cols, true
	for i := range s.slots {
		dense = dense && s.slots[i].src.dense()
	}
	if dense {
		rows, cols = 1, rows*cols
	}
	from, to := share(rows*cols, len(s.slots), member)
	for from < to {
		row, col := from/cols, from%cols
		n := min(to-from, cols-col, reduceChunk)
		s.tree(row, col, n)
		from += n
	}
}

// share cuts elements into nearly equal parts that begin at multiples of a cache line.
func share(elements, parts, part int) (from, to int) {
	const line = 16
	size := (elements + parts*line - 1) / (parts * line) * line
	return min(part*size, elements), min((part+1)*size, elements)
}

// tree adds n elements of all members and gives all the sum. A dense matrix counts as one row.
func (s *sharedGroup) tree(row, col, n int) {
	for step := 1; step < len(s.slots); step *= 2 {
		for i := 0; i < len(s.slots); i += 2 * step {
			cpu.Add(s.slots[i].src.run(row, col, n), s.slots[i+step].src.run(row, col, n))
		}
	}
	sum := s.slots[0].src.run(row, col, n)
	for i := range s.slots[1:] {
		copy(s.slots[i+1].src.run(row, col, n), sum)
	}
}

// AllGatherRows implements Group.
func (m shared) AllGatherRows(dst, src compute.Mat) error {
	return m.gather(opAllGatherRows, 0, dst, src)
}

// AllGatherColumns implements Group.
func (m shared) AllGatherColumns(dst, src compute.Mat) error {
	return m.gather(opAllGatherColumns, 0, dst, src)
}

// GatherColumns implements Group.
func (m shared) GatherColumns(root int, dst, src compute.Mat) error {
	if m.rank != root {
		dst = compute.Mat{}
	}
	return m.gather(opGatherColumns, root, dst, src)
}

// gather collects in everybody's dst: each member fetches all parts. For a single root each brings its own.
func (m shared) gather(o op, root int, dst, src compute.Mat) error {
	if err := m.publish(o, root, dst, src); err != nil {
		return err
	}
	if err := m.meet(); err != nil {
		return err
	}
	at := 0
	for i := range m.s.slots {
		part := m.s.slots[i].src
		switch {
		case part.elements() == 0:
			continue
		case o == opAllGatherRows:
			copyView(m.slot().dst.sliceRows(at, part.rows), part)
			at += part.rows
			continue
		case o == opAllGatherColumns:
			copyView(m.slot().dst.sliceColumns(at, part.cols), part)
		case i == m.rank:
			copyView(m.s.slots[root].dst.sliceColumns(at, part.cols), part)
		}
		at += part.cols
	}
	m.part()
	return nil
}

// Broadcast implements Group.
func (m shared) Broadcast(root int, mat compute.Mat) error {
	if err := m.publish(opBroadcast, root, compute.Mat{}, mat); err != nil {
		return err
	}
	if err := m.meet(); err != nil {
		return err
	}
	if m.rank != root {
		copyView(m.slot().src, m.s.slots[root].src)
	}
	m.part()
	return nil
}

// AllToAll implements Group.
func (m shared) AllToAll(dst, src []compute.Mat) error {
	s := m.slot()
	var err error
	if s.dsts, err = m.seeAll("dst", dst, s.dsts); err != nil {
		return err
	}
	if s.srcs, err = m.seeAll("src", src, s.srcs); err != nil {
		return err
	}
	if s.call, err = m.begin(opAllToAll, 0); err != nil {
		return err
	}
	if err := m.meet(); err != nil {
		return err
	}
	for i := range m.s.slots {
		copyView(s.dsts[i], m.s.slots[i].srcs[m.rank])
	}
	m.part()
	return nil
}

// Barrier implements Group.
func (m shared) Barrier() error {
	if err := m.publish(opBarrier, 0, compute.Mat{}, compute.Mat{}); err != nil {
		return err
	}
	return m.meet()
}
