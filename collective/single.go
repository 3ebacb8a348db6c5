package collective

import "baton/compute"

// single is the only member of a group. Nothing needs others; matrices are checked all the same.
type single struct{ *member }

var _ Group = single{}

// copy is what gathering from one member is.
func (m single) copy(o op, root int, dst, src compute.Mat) error {
	d, err := m.see(o, "dst", dst)
	if err != nil {
		return err
	}
	s, err := m.see(o, "src", src)
	if err != nil {
		return err
	}
	c, err := m.begin(o, root)
	if err != nil {
		return err
	}
	if !d.shape().same(s.shape()) {
		return m.reject(o, "%v of %v makes room for %v", c, s.shape(), d.shape())
	}
	copyView(d, s)
	return nil
}

// AllReduce implements Group.
func (m single) AllReduce(mat compute.Mat) error { return m.copy(opAllReduce, 0, mat, mat) }

// AllGatherRows implements Group.
func (m single) AllGatherRows(dst, src compute.Mat) error {
	return m.copy(opAllGatherRows, 0, dst, src)
}

// AllGatherColumns implements Group.
func (m single) AllGatherColumns(dst, src compute.Mat) error {
	return m.copy(opAllGatherColumns, 0, dst, src)
}

// GatherColumns implements Group.
func (m single) GatherColumns(root int, dst, src compute.Mat) error {
	return m.copy(opGatherColumns, root, dst, src)
}

// Broadcast implements Group.
func (m single) Broadcast(root int, mat compute.Mat) error {
	return m.copy(opBroadcast, root, mat, mat)
}

// AllToAll implements Group.
func (m single) AllToAll(dst, src []compute.Mat) error {
	if len(dst) != 1 || len(src) != 1 {
		return m.reject(opAllToAll, "dst has %d matrices and src %d; the group has 1 member", len(dst), len(src))
	}
	return m.copy(opAllToAll, 0, dst[0], src[0])
}

// Barrier implements Group.
func (m single) Barrier() error { return m.copy(opBarrier, 0, compute.Mat{}, compute.Mat{}) }
