// Package collective lets the ranks of a shard work as one: sums, gathers, broadcasts and exchanges of f32
// matrices among groups of ranks, and messages between two. Ranks of one process share memory; processes talk
// TCP, one connection a pair.
//
// A World owns its connections and their goroutines, and stops them. Operations run on the caller's goroutine
// and use the caller's memory only while they run. Nothing here knows what the matrices mean.
//
// Failure is common. Whatever goes wrong anywhere (a rank gives up, a process dies or falls silent, members
// call operations that do not fit together or wait for each other in a circle) ends every operation of every
// rank, now and later, with a *FailedError that says who failed and why. A rank that computes for long is no
// failure. After a failure the contents of destination matrices are undefined; their memory is no longer
// touched.
package collective

import (
	"fmt"
	"slices"

	"baton/compute"
)

// Group is one rank's membership of a group of ranks. All members call the same collective operations in
// the same order, with shapes that agree; Send and Recv are matched for each pair on their own. Matrices
// are in host memory (compute.HostBuffer), and destinations overlap nothing else. Every error is a
// *FailedError: the world has ended.
type Group interface {
	// Rank is this member's place in the group's list.
	Rank() int
	// Size is the number of members.
	Size() int
	// AllReduce replaces m, of one shape on all members, by the sum over members, added in a binary tree
	// over their ranks: ((0+1)+(2+3))+((4+5)+(6+7)). All get the same bits (of a NaN only
	// that it is one). Size must be a power of two.
	AllReduce(m compute.Mat) error
	// AllGatherRows stacks the members' src in rank order into dst, on all members. Members may have
	// different numbers of rows, also none.
	AllGatherRows(dst, src compute.Mat) error
	// AllGatherColumns puts the members' src side by side in rank order into dst, on all members.
	// Members may have different numbers of columns, also none.
	AllGatherColumns(dst, src compute.Mat) error
	// GatherColumns is AllGatherColumns of which only root receives; the others' dst is ignored.
	GatherColumns(root int, dst, src compute.Mat) error
	// Broadcast copies root's m to all members.
	Broadcast(root int, m compute.Mat) error
	// AllToAll sends src[i] to member i and receives dst[j] from member j. Each pair agrees on a shape,
	// which may be empty.
	AllToAll(dst, src []compute.Mat) error
	// Send gives m to another member, which must call Recv. It may return before: a pair holds up to
	// queueDepth messages. m may be overwritten once it returns.
	Send(to int, m compute.Mat) error
	// Recv waits for the other member's next message, which must have m's shape.
	Recv(from int, m compute.Mat) error
	// Barrier waits until all members have called it.
	Barrier() error
}

// World is one rank's membership of a shard: all its ranks, wherever they run. Its operations, and those of its
// groups, are called by one goroutine at a time; Fail and Err by any.
type World struct {
	p    *process
	rank int
}

// maxSize bounds the number of ranks of a world.
const maxSize = 4096

// Local makes a world whose ranks, 1 to 4096, all run in this process. It returns World r at index r.
func Local(ranks int) []*World {
	if ranks < 1 || ranks > maxSize {
		panic(fmt.Sprintf("collective: Local(%d): want 1 to %d ranks", ranks, maxSize))
	}
	local := make([]int, ranks)
	for r := range local {
		local[r] = r
	}
	return newProcess(ranks, local).worlds()
}

// Rank is this member's number, from 0.
func (w *World) Rank() int { return w.rank }

// Size is the number of ranks of the shard.
func (w *World) Size() int { return w.p.size }

// Group makes this rank a member of a group. Every member calls it with the same name and list, which says the
// order of ranks in the group; a rank may be in many groups, and groups without a common member may share a
// name. It does not wait for the others. Called again it returns the same membership.
func (w *World) Group(name string, ranks []int) (Group, error) {
	p := w.p
	if err := p.usable(w.rank); err != nil {
		return nil, err
	}
	if err := checkGroup(name, ranks, p.size); err != nil {
		return nil, p.end(w.rank, err)
	}
	me := slices.Index(ranks, w.rank)
	if me < 0 {
		return nil, p.end(w.rank, &GroupError{name, ranks, fmt.Sprintf("rank %d is not in it and must not call it", w.rank)})
	}
	p.mu.Lock()
	g, err := p.group(name, ranks, w.rank)
	if err != nil {
		p.mu.Unlock()
		return nil, p.end(w.rank, err)
	}
	m := g.members[me]
	if m == nil {
		m = &member{group: g, rank: me, self: p.ranks[w.rank]}
		g.members[me] = m
	}
	p.mu.Unlock()
	if err := p.announce(g); err != nil {
		return nil, err
	}
	switch {
	case len(ranks) == 1:
		return single{m}, nil
	case g.shared != nil:
		return shared{m, g.shared}, nil
	}
	return spread{m}, nil
}

// Fail ends every operation of every member, here and elsewhere, now and later. It does not wait.
func (w *World) Fail(err error) {
	if err == nil {
		err = errUnexplained
	}
	w.p.end(w.rank, err)
}

// Err says why the world ended, nil while it has not. It is a *FailedError.
func (w *World) Err() error { return w.p.failed() }

// Close ends this rank's membership. Operations that need it fail from then on, with an error for which
// errors.Is(err, ErrClosed); those that it has done its part of do not. When the last rank of a process
// closes, its connections end, and Close waits for that.
func (w *World) Close() error {
	w.p.close(w.rank)
	return nil
}
