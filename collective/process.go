package collective

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"baton/compute"
)

// process is what the ranks of one process share.
type process struct {
	size  int
	local []int // ranks here, ascending

	failure atomic.Pointer[FailedError]
	ended   chan struct{} // closed when failure is set

	// mu guards what follows, and the lanes of groups. It is never held while anything waits, computes or
	// does I/O.
	mu     sync.Mutex
	ranks  []*seat
	groups []*group
	links  []*link
	open   int    // local ranks that have not closed
	mark   uint32 // of the search for circles under way
}

// seat is a rank of the world, as this process knows it.
type seat struct {
	rank   int
	home   int           // the lowest rank of its process
	here   bool          // it is in this process
	link   *link         // to its process when it is elsewhere
	wake   chan struct{} // what it sleeps on
	closed atomic.Bool   // set under process.mu
	wait   wait
	mark   uint32 // of the last search that came here
}

func newProcess(size int, local []int) *process {
	p := &process{size: size, local: slices.Sorted(slices.Values(local)), ended: make(chan struct{}), open: len(local)}
	for r := range size {
		p.ranks = append(p.ranks, &seat{rank: r, wake: make(chan struct{}, 1)})
	}
	for _, r := range p.local {
		p.ranks[r].here, p.ranks[r].home = true, p.local[0]
	}
	return p
}

func (p *process) worlds() []*World {
	var ws []*World
	for _, r := range p.local {
		ws = append(ws, &World{p, r})
	}
	return ws
}

// failed is why the world has ended, nil while it has not.
func (p *process) failed() error {
	if f := p.failure.Load(); f != nil {
		return f
	}
	return nil
}

// usable fails when the world has ended, or a rank's part in it.
func (p *process) usable(rank int) error {
	if err := p.failed(); err != nil {
		return err
	}
	if p.ranks[rank].closed.Load() {
		return &FailedError{rank, ErrClosed}
	}
	return nil
}

// end ends the world because of err, found by rank. It returns why the world has ended, a *FailedError,
// which is an earlier one if there was one.
func (p *process) end(rank int, err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.endLocked(rank, err)
}

// endLocked is end while p.mu is held.
func (p *process) endLocked(rank int, err error) error {
	if p.failure.Load() == nil {
		p.failure.Store(&FailedError{rank, err})
		close(p.ended)
		p.rouseAll()
		for _, l := range p.links {
			l.interrupt()
		}
	}
	return p.failure.Load()
}

// close ends the membership of a local rank.
func (p *process) close(rank int) {
	p.mu.Lock()
	first := !p.ranks[rank].closed.Swap(true)
	if first {
		p.open--
		p.rouseAll()
	}
	last := p.open == 0
	links := slices.Clone(p.links)
	p.mu.Unlock()
	if first && p.failed() == nil { // else that is what there is to say
		for _, l := range links {
			l.bye(rank)
		}
	}
	if last {
		for _, l := range links {
			l.finish()
		}
	}
}

// rouseAll makes every sleeping rank here look again; p.mu is held.
func (p *process) rouseAll() {
	for _, r := range p.local {
		p.rouse(p.ranks[r])
	}
}

// rouse wakes a rank if it sleeps; p.mu is held.
func (p *process) rouse(s *seat) {
	if s.here && s.wait.kind != awake {
		s.wait.kind = awake
		s.wake <- struct{}{} // has room: one token a sleep
	}
}

// sleep parks the calling rank until it is roused, or at once refuses because that would close a circle of
// ranks that wait for each other: then the world has ended. p.mu is held, and given up.
func (p *process) sleep(s *seat, w wait) {
	w.number = s.wait.number + 1
	s.wait = w
	if d := p.circle(s); d != nil {
		p.endLocked(s.rank, d) // rouses all, this rank too
	}
	p.mu.Unlock()
	<-s.wake
}

// group finds or makes a group; p.mu is held.
func (p *process) group(name string, ranks []int, caller int) (*group, error) {
	for _, g := range p.groups {
		if g.name != name {
			continue
		}
		if slices.Equal(g.ranks, ranks) {
			return g, nil
		}
		for _, r := range ranks {
			if slices.Contains(g.ranks, r) {
				return nil, &GroupError{name, ranks, fmt.Sprintf("rank %d gives this list, another member of the same name gives %v", caller, g.ranks)}
			}
		}
	}
	if len(p.groups) == maxGroups {
		return nil, &GroupError{name, ranks, fmt.Sprintf("there are %d groups already", maxGroups)}
	}
	g := newGroup(p, uint32(len(p.groups)), name, slices.Clone(ranks))
	p.groups = append(p.groups, g)
	return g, nil
}

// Limits of groups.
const (
	maxGroups = 4096
	maxName   = 256 // bytes
)

func checkGroup(name string, ranks []int, size int) error {
	reject := func(format string, args ...any) error { return &GroupError{name, ranks, fmt.Sprintf(format, args...)} }
	if len(name) > maxName {
		return reject("the name is %d bytes long; at most %d will do", len(name), maxName)
	}
	if len(ranks) == 0 {
		return reject("it has no ranks")
	}
	seen := make(map[int]bool, len(ranks))
	for _, r := range ranks {
		if r < 0 || r >= size {
			return reject("rank %d is not in a world of %d", r, size)
		}
		if seen[r] {
			return reject("rank %d is in it twice", r)
		}
		seen[r] = true
	}
	return nil
}

// group is what the members here share of a group.
type group struct {
	p       *process
	number  uint32
	name    string
	ranks   []int     // by place in the group
	members []*member // those here that called Group
	shared  *sharedGroup
	lanes   map[laneKey]*lane
}

func newGroup(p *process, number uint32, name string, ranks []int) *group {
	g := &group{p: p, number: number, name: name, ranks: ranks, members: make([]*member, len(ranks)), lanes: map[laneKey]*lane{}}
	here := 0
	for _, r := range ranks {
		if p.ranks[r].here {
			here++
		}
	}
	if here == len(ranks) && here > 1 {
		g.shared = newSharedGroup(g)
	}
	return g
}

// member is one rank's place in a group, with what all kinds of groups have in common.
type member struct {
	*group
	rank int // in the group
	self *seat
	next uint64 // number of the next collective operation
}

func (m *member) Rank() int { return m.rank }

func (m *member) Size() int { return len(m.ranks) }

// begin starts a collective operation.
func (m *member) begin(o op, root int) (call, error) {
	c := call{op: o, root: root, seq: m.next}
	if err := m.p.usable(m.self.rank); err != nil {
		return c, err
	}
	if root < 0 || root >= len(m.ranks) {
		return c, m.reject(o, "root %d is not in a group of %d", root, len(m.ranks))
	}
	m.next++
	return c, nil
}

// reject ends the world because an operation cannot be done: the others would wait for it.
func (m *member) reject(o op, format string, args ...any) error {
	return m.p.end(m.self.rank, &OperandError{m.name, o.String(), fmt.Sprintf(format, args...)})
}

// see views a matrix, or ends the world.
func (m *member) see(o op, what string, mat compute.Mat) (view, error) {
	v, problem := see(mat)
	if problem != "" {
		return v, m.reject(o, "%s: %s", what, problem)
	}
	return v, nil
}

// seeAll views one matrix for each member, into buf.
func (m *member) seeAll(what string, mats []compute.Mat, buf []view) ([]view, error) {
	if len(mats) != len(m.ranks) {
		return buf, m.reject(opAllToAll, "%s has %d matrices; the group has %d members", what, len(mats), len(m.ranks))
	}
	buf = buf[:0]
	for i := range mats {
		v, problem := see(mats[i])
		if problem != "" {
			return buf, m.reject(opAllToAll, "%s[%d]: %s", what, i, problem)
		}
		buf = append(buf, v)
	}
	return buf, nil
}

// mismatch is an error about members i and j.
func (g *group) mismatch(i, j int, a, b string) *MismatchError {
	return &MismatchError{g.name, g.ranks[i], g.ranks[j], a, b}
}
