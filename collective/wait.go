package collective

import "fmt"

// waitKind is what a parked rank waits for.
type waitKind uint8

const (
	awake    waitKind = iota
	forAll            // the members of a shared group that have not come to its barrier
	forData           // a message of a lane
	forRoom           // room in a lane
	reported          // a rank of another process waits, as that process says
)

// wait is why a rank sleeps. Ranks that wait for each other in a circle would do so forever; circle finds
// them.
//
// Within a process that is exact, because a wait is recorded and everything that ends it happens under
// process.mu, except the release of a barrier, which can be seen. Between processes each says in its
// heartbeats which of its ranks wait for which, and each wait has a number. A report counts only if it names
// the number of the wait of the rank that is waited for: then its process had heard of that wait, hence had
// received everything sent before it (connections keep order), and was waiting nevertheless.
type wait struct {
	number uint64 // of this rank's waits, from 1
	kind   waitKind
	group  *group
	call   call
	round  uint32 // forAll
	lane   *lane  // forData, forRoom

	text  string // reported
	edges []edge // reported
}

// edge is a rank that is waited for, and the number of its own wait.
type edge struct {
	rank   int
	number uint64
}

func (w *wait) String() string {
	switch w.kind {
	case forAll:
		return fmt.Sprintf("in %v of group %q", w.call, w.group.name)
	case forData:
		return fmt.Sprintf("for %v from rank %d in group %q", w.call, w.group.ranks[w.lane.from], w.group.name)
	case forRoom:
		return fmt.Sprintf("to send %v to rank %d in group %q", w.call, w.group.ranks[w.lane.to], w.group.name)
	}
	return w.text
}

// waitsFor calls yield with every rank that s waits for, as far as that rank waits itself, until yield
// returns false. p.mu is held.
func (p *process) waitsFor(s *seat, yield func(*seat) bool) {
	w := &s.wait
	switch w.kind {
	case forAll:
		sh := w.group.shared
		if sh.barrier.released(w.round) {
			return
		}
		for i, r := range w.group.ranks {
			if k := p.ranks[r]; sh.slots[i].come.Load() == w.round && k.wait.kind != awake && !yield(k) {
				return
			}
		}
	case forData:
		if k := p.ranks[w.group.ranks[w.lane.from]]; k.wait.kind != awake {
			yield(k)
		}
	case forRoom:
		if k := p.ranks[w.group.ranks[w.lane.to]]; k.wait.kind != awake {
			yield(k)
		}
	case reported:
		for _, e := range w.edges {
			if k := p.ranks[e.rank]; k.wait.kind != awake && k.wait.number == e.number && !yield(k) {
				return
			}
		}
	}
}

// circle looks for one that s is part of; p.mu is held.
func (p *process) circle(s *seat) *DeadlockError {
	waiting := false
	p.waitsFor(s, func(*seat) bool { waiting = true; return false })
	if !waiting { // the usual case, and nothing is allocated for it
		return nil
	}
	p.mark++
	var path []*seat
	var search func(*seat) bool
	search = func(k *seat) (found bool) {
		path = append(path, k)
		p.waitsFor(k, func(next *seat) bool {
			if next == s {
				found = true
			} else if next.mark != p.mark {
				next.mark = p.mark
				found = search(next)
			}
			return !found
		})
		if !found {
			path = path[:len(path)-1]
		}
		return found
	}
	if !search(s) {
		return nil
	}
	d := &DeadlockError{}
	for _, k := range path {
		d.Waits = append(d.Waits, fmt.Sprintf("rank %d waits %s", k.rank, k.wait.String()))
	}
	return d
}
