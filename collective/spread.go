package collective

import (
	"fmt"

	"baton/compute"
)

// spread is the membership of a group whose members are in several processes. Operations consist of messages
// between pairs.
type spread struct{ *member }

var _ Group = spread{}

func (m spread) to(i int) laneKey { return laneKey{from: m.rank, to: i} }

func (m spread) from(i int) laneKey { return laneKey{from: i, to: m.rank} }

// AllReduce implements Group. In step s = 1, 2, 4, ... members whose ranks differ by s give each other the sum
// of the s members on their side of the tree. Both add the two, and addition commutes to the bit.
func (m spread) AllReduce(mat compute.Mat) error {
	v, err := m.see(opAllReduce, "m", mat)
	if err != nil {
		return err
	}
	if len(m.ranks)&(len(m.ranks)-1) != 0 {
		return m.reject(opAllReduce, notPowerOfTwo, len(m.ranks))
	}
	c, err := m.begin(opAllReduce, 0)
	if err != nil {
		return err
	}
	if len(m.ranks) > 2 && v.elements() >= halveElements {
		return m.halve(c, v)
	}
	for step := 1; step < len(m.ranks); step *= 2 {
		other := m.rank ^ step
		if err := m.send(m.to(other), c, v); err != nil {
			return err
		}
		if err := m.receive(m.from(other), c, v, addTo); err != nil {
			return err
		}
	}
	return nil
}

// halveElements is from where on it costs less to send twice as many messages of fewer bytes altogether.
const halveElements = 64 << 10

// halve adds like AllReduce, but in each step either of the two takes over one half of what both have worked
// on so far. Then they give each other the sums, in the reverse order of steps.
func (m spread) halve(c call, v view) error {
	cut, whole := view.sliceRows, v.rows // the same on all members, whatever their strides
	if whole < len(m.ranks) {
		cut, whole = view.sliceColumns, v.cols
	}
	type interval struct{ from, to int }
	mine := interval{0, whole}
	var shared []interval // with the other of each step
	for step := 1; step < len(m.ranks); step *= 2 {
		other, keep, give := m.rank^step, mine, mine
		shared = append(shared, mine)
		middle := (mine.from + mine.to) / 2
		keep.to, give.from = middle, middle
		if m.rank&step != 0 {
			keep, give = give, keep
		}
		if err := m.send(m.to(other), c, cut(v, give.from, give.to-give.from)); err != nil {
			return err
		}
		if err := m.receive(m.from(other), c, cut(v, keep.from, keep.to-keep.from), addTo); err != nil {
			return err
		}
		mine = keep
	}
	for step := len(m.ranks) / 2; step > 0; step /= 2 {
		other, both := m.rank^step, shared[len(shared)-1]
		shared = shared[:len(shared)-1]
		theirs := interval{both.from, mine.from}
		if mine.from == both.from {
			theirs = interval{mine.to, both.to}
		}
		if err := m.send(m.to(other), c, cut(v, mine.from, mine.to-mine.from)); err != nil {
			return err
		}
		if err := m.receive(m.from(other), c, cut(v, theirs.from, theirs.to-theirs.from), unpack); err != nil {
			return err
		}
		mine = both
	}
	return nil
}

// AllGatherRows implements Group.
func (m spread) AllGatherRows(dst, src compute.Mat) error {
	return m.gather(opAllGatherRows, -1, dst, src)
}

// AllGatherColumns implements Group.
func (m spread) AllGatherColumns(dst, src compute.Mat) error {
	return m.gather(opAllGatherColumns, -1, dst, src)
}

// GatherColumns implements Group.
func (m spread) GatherColumns(root int, dst, src compute.Mat) error {
	if m.rank != root {
		dst = compute.Mat{}
	}
	return m.gather(opGatherColumns, root, dst, src)
}

// gather sends src to root, or with root -1 to everybody, and collects what comes.
func (m spread) gather(o op, root int, dst, src compute.Mat) error {
	d, err := m.see(o, "dst", dst)
	if err != nil {
		return err
	}
	s, err := m.see(o, "src", src)
	if err != nil {
		return err
	}
	c, err := m.begin(o, max(root, 0))
	if err != nil {
		return err
	}
	for k := 1; k < len(m.ranks); k++ { // everybody begins with another one
		i := (m.rank + k) % len(m.ranks)
		if root >= 0 && i != root {
			continue
		}
		if err := m.send(m.to(i), c, s); err != nil {
			return err
		}
	}
	if root >= 0 && m.rank != root {
		return nil
	}
	return m.collect(c, d, s)
}

// collect puts everybody's part of a gathering operation where it belongs.
func (m spread) collect(c call, dst, src view) error {
	var have shape
	for i := range m.ranks {
		if i == m.rank {
			part, ok := have.next(dst, src.shape(), c.op)
			if !ok {
				return m.reject(c.op, "after %v from lower members, %v does not fit into %v", have, src.shape(), dst.shape())
			}
			copyView(part, src)
			continue
		}
		msg, err := m.take(m.from(i), c)
		if err != nil {
			return err
		}
		part, ok := have.next(dst, msg.shape, c.op)
		if !ok {
			return m.misfit(m.from(i), msg, fmt.Sprintf("after %v from lower members, makes room for %v", have, dst.shape()))
		}
		if msg.floats != nil {
			unpack(part, *msg.floats)
			msg.free()
		}
	}
	if !have.same(dst.shape()) {
		return m.reject(c.op, "the members give %v, dst makes room for %v", have, dst.shape())
	}
	return nil
}

// next extends what has been gathered by a part and returns the part's place in dst.
func (s *shape) next(dst view, part shape, by op) (view, bool) {
	if part.empty() {
		return view{}, true
	}
	was := *s
	if !s.extend(part, by) {
		return view{}, false
	}
	if by == opAllGatherRows {
		if s.rows > dst.rows || s.cols != dst.cols {
			*s = was
			return view{}, false
		}
		return dst.sliceRows(was.rows, part.rows), true
	}
	if s.cols > dst.cols || s.rows != dst.rows {
		*s = was
		return view{}, false
	}
	return dst.sliceColumns(was.cols, part.cols), true
}

// Broadcast implements Group. The root sends once to each process, to the member there that comes first; that
// one passes it on to those beside it.
func (m spread) Broadcast(root int, mat compute.Mat) error {
	v, err := m.see(opBroadcast, "m", mat)
	if err != nil {
		return err
	}
	c, err := m.begin(opBroadcast, root)
	if err != nil {
		return err
	}
	source := m.source(root)
	if m.rank != root {
		if err := m.receive(m.from(source), c, v, unpack); err != nil {
			return err
		}
	}
	for k := 1; k < len(m.ranks); k++ {
		i := (root + k) % len(m.ranks)
		if i == m.rank || m.sourceOf(root, i) != m.rank {
			continue
		}
		if err := m.send(m.to(i), c, v); err != nil {
			return err
		}
	}
	return nil
}

func (m spread) source(root int) int { return m.sourceOf(root, m.rank) }

// sourceOf says from whom member i gets what root broadcasts.
func (m spread) sourceOf(root, i int) int {
	home := m.home(i)
	if home == m.home(root) {
		return root
	}
	for j := range m.ranks {
		if m.home(j) == home {
			if j == i {
				return root
			}
			return j
		}
	}
	return root
}

// home is a number of the process that member i is in.
func (m spread) home(i int) int { return m.p.ranks[m.ranks[i]].home }

// AllToAll implements Group.
func (m spread) AllToAll(dst, src []compute.Mat) error {
	ds, err := m.seeAll("dst", dst, nil)
	if err != nil {
		return err
	}
	ss, err := m.seeAll("src", src, nil)
	if err != nil {
		return err
	}
	c, err := m.begin(opAllToAll, 0)
	if err != nil {
		return err
	}
	if a, b := ss[m.rank].shape(), ds[m.rank].shape(); !a.same(b) {
		return m.reject(opAllToAll, "src has %v for the member itself, dst expects %v", a, b)
	}
	copyView(ds[m.rank], ss[m.rank])
	for k := 1; k < len(m.ranks); k++ {
		i := (m.rank + k) % len(m.ranks)
		if err := m.send(m.to(i), c, ss[i]); err != nil {
			return err
		}
	}
	for k := 1; k < len(m.ranks); k++ {
		i := (m.rank + len(m.ranks) - k) % len(m.ranks)
		if err := m.receive(m.from(i), c, ds[i], unpack); err != nil {
			return err
		}
	}
	return nil
}

// Barrier implements Group. In step s = 1, 2, 4, ... each member tells the one s further that it and the s-1 before
// it have come.
func (m spread) Barrier() error {
	c, err := m.begin(opBarrier, 0)
	if err != nil {
		return err
	}
	n := len(m.ranks)
	for step := 1; step < n; step *= 2 {
		if err := m.send(m.to((m.rank+step)%n), c, view{}); err != nil {
			return err
		}
		if err := m.receive(m.from((m.rank+n-step)%n), c, view{}, unpack); err != nil {
			return err
		}
	}
	return nil
}
