package collective

import (
	"fmt"
	"io"
)

// frame reads the rest of a frame and does what it says. An error is a process that broke the protocol, the
// end of its connection, or of the world.
func (l *link) frame(r io.Reader, head []byte) error {
	h, err := parseHeader(head)
	if err != nil {
		return err
	}
	if h.kind == frameData {
		return l.message(r, h)
	}
	body := make([]byte, h.bodySize())
	if _, err := io.ReadFull(r, body); err != nil {
		return err
	}
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	switch h.kind {
	case frameGroup:
		return l.group(h, body)
	case frameTaken:
		return l.taken(h)
	case frameBeat:
		return l.beat(body)
	case frameClosed:
		return l.closed(h)
	}
	return l.p.endLocked(h.from, &RemoteError{string(body)})
}

// group learns the other's number of a group, and the group if it is new here; process.mu is held.
func (l *link) group(h header, body []byte) error {
	name, ranks, err := parseGroup(body)
	if err != nil {
		return err
	}
	if l.theirs[h.group] != nil || len(l.theirs) == maxGroups {
		return badFrame("group %d once more", h.group)
	}
	if err := checkGroup(name, ranks, l.p.size); err != nil {
		return err
	}
	g, err := l.p.group(name, ranks, l.ranks[0])
	if err != nil {
		return l.p.endLocked(l.ranks[0], err)
	}
	l.theirs[h.group] = g
	return nil
}

// lane finds the group and the lane of a frame from a member there to one here; process.mu is held.
func (l *link) lane(h header) (*group, *lane, error) {
	g := l.theirs[h.group]
	if g == nil || h.from >= len(g.ranks) || h.to >= len(g.ranks) {
		return nil, nil, badFrame("members %d and %d of group %d", h.from, h.to, h.group)
	}
	if from, to := l.p.ranks[g.ranks[h.from]], l.p.ranks[g.ranks[h.to]]; from.link != l || !to.here {
		return nil, nil, badFrame("something from rank %d to rank %d", from.rank, to.rank)
	}
	return g, g.lane(laneKey{h.from, h.to, h.direct}), nil
}

// taken learns how much of the lane in the other direction has been taken; process.mu is held.
func (l *link) taken(h header) error {
	g, _, err := l.lane(h)
	if err != nil {
		return err
	}
	back := g.lane(laneKey{h.to, h.from, h.direct})
	if h.taken > back.sent {
		return badFrame("that %d messages have been taken of %d", h.taken, back.sent)
	}
	if h.taken > back.taken {
		back.taken = h.taken
		if s := l.p.ranks[g.ranks[h.to]]; s.wait.kind == forRoom && s.wait.lane == back {
			l.p.rouse(s)
		}
	}
	return nil
}

// message reads a matrix and puts it into its lane.
func (l *link) message(r io.Reader, h header) error {
	msg := message{call: call{h.op, h.root, h.seq}, shape: shape{h.rows, h.cols}}
	if n := h.rows * h.cols; n > 0 {
		var err error
		if msg.floats, err = readFloats(r, n); err != nil {
			return err
		}
	}
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	g, lane, err := l.lane(h)
	if err == nil {
		err = l.taken(h)
	}
	if err == nil && len(lane.queue) == queueDepth {
		err = badFrame("more than %d messages ahead from rank %d to rank %d", queueDepth, g.ranks[h.from], g.ranks[h.to])
	}
	if err != nil {
		return err
	}
	g.put(lane, msg)
	return nil
}

// readStep is how many floats are made room for before any have come; further room comes as they do.
const readStep = 1 << 20

// readFloats reads n floats into memory from the pool.
func readFloats(r io.Reader, n int) (*[]float32, error) {
	b := getFloats(min(n, readStep))
	for have := 0; ; {
		if _, err := io.ReadFull(r, asBytes((*b)[have:])); err != nil {
			return nil, err
		}
		if have = len(*b); have == n {
			return b, nil
		}
		more := getFloats(min(n, 2*have))
		copy(*more, *b)
		putFloats(b)
		b = more
	}
}

// closed learns that a rank there needs nothing any more; process.mu is held.
func (l *link) closed(h header) error {
	if h.from >= l.p.size || l.p.ranks[h.from].link != l {
		return badFrame("that rank %d has closed", h.from)
	}
	s := l.p.ranks[h.from]
	s.closed.Store(true)
	s.wait.kind = awake
	l.p.rouseAll()
	return nil
}

// beat learns which ranks there wait; process.mu is held.
func (l *link) beat(body []byte) error {
	reports, err := parseBeat(body)
	if err != nil {
		return err
	}
	for _, r := range l.ranks {
		l.p.ranks[r].wait.kind = awake
	}
	for _, r := range reports {
		if r.rank >= l.p.size || l.p.ranks[r.rank].link != l {
			return badFrame("that rank %d waits", r.rank)
		}
		for _, e := range r.edges {
			if e.rank >= l.p.size {
				return badFrame("that rank %d waits for rank %d", r.rank, e.rank)
			}
		}
		l.p.ranks[r.rank].wait = wait{kind: reported, number: r.number, edges: r.edges, text: r.text}
	}
	for _, r := range l.p.local {
		if s := l.p.ranks[r]; s.wait.kind != awake {
			if d := l.p.circle(s); d != nil {
				return l.p.endLocked(s.rank, d)
			}
		}
	}
	return nil
}

// reports says which ranks here wait, and which of those that they wait for are known to wait as well.
func (p *process) reports() []report {
	p.mu.Lock()
	defer p.mu.Unlock()
	var reports []report
	size := 0
	for _, r := range p.local {
		s := p.ranks[r]
		if s.wait.kind == awake {
			continue
		}
		rep := report{rank: r, number: s.wait.number, text: fmt.Sprintf("%.200s", s.wait.String())}
		p.waitsFor(s, func(k *seat) bool {
			rep.edges = append(rep.edges, edge{k.rank, k.wait.number})
			return true
		})
		if size += 14 + 10*len(rep.edges) + len(rep.text); size > maxBody {
			break
		}
		reports = append(reports, rep)
	}
	return reports
}
