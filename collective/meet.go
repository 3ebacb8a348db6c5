package collective

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"baton/mtls"
)

// lead waits for everybody and tells them of each other.
func (j *joiner) lead(ctx context.Context) error {
	var present []*arrival
	defer func() {
		for _, a := range present {
			a.conn.Close()
		}
	}()
	for have := len(j.cfg.Local); ; {
		if have == j.cfg.Size {
			all := len(present)
			if present = j.settle(ctx, present); len(present) == all {
				break
			}
		}
		select {
		case a := <-j.arrivals:
			if rank, at := j.taken(present, a.hello.Ranks); at != "" {
				a.refuse(true, "rank %d runs at %s already", rank, at)
				continue
			}
			present = append(present, a)
			j.watch(ctx, a)
		case a := <-j.lost:
			a.conn.Close()
			present = slices.DeleteFunc(present, func(b *arrival) bool { return a == b })
		case <-ctx.Done():
			return j.late(ctx, nil)
		}
		have = len(j.cfg.Local)
		for _, a := range present {
			have += len(a.hello.Ranks)
		}
	}
	slices.SortFunc(present, func(a, b *arrival) int { return a.hello.Ranks[0] - b.hello.Ranks[0] })
	w := welcome{Session: rand.Text(), Silence: j.cfg.Silence, Processes: []processAddr{{Ranks: j.cfg.Local}}}
	for _, a := range present {
		w.Processes = append(w.Processes, processAddr{a.hello.Ranks, reachable(a.hello.Addr, a.conn.RemoteAddr())})
	}
	for len(present) > 0 {
		if err := j.link(present[0], w, j.cfg.Silence); err != nil {
			return err
		}
		present = present[1:]
	}
	return nil
}

// taken finds a rank that runs already, and where.
func (j *joiner) taken(present []*arrival, ranks []int) (rank int, at string) {
	for _, r := range ranks {
		if j.p.ranks[r].here {
			return r, "the process that was called"
		}
		for _, a := range present {
			if slices.Contains(a.hello.Ranks, r) {
				return r, a.conn.RemoteAddr().String()
			}
		}
	}
	return 0, ""
}

// watch notices when a process that waits for its welcome leaves.
func (j *joiner) watch(ctx context.Context, a *arrival) {
	a.gone = make(chan error, 1)
	j.work.Go(func() {
		_, err := a.conn.Read(make([]byte, 1))
		a.gone <- err
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			select {
			case j.lost <- a:
			case <-ctx.Done():
			}
		}
	})
}

// settle ends the watching and returns those that are still there. If some are not, it goes on.
func (j *joiner) settle(ctx context.Context, present []*arrival) []*arrival {
	for _, a := range present {
		_ = a.conn.SetReadDeadline(time.Unix(1, 0)) // if it fails, the connection has
	}
	there := present[:0:0]
	for _, a := range present {
		if err := <-a.gone; errors.Is(err, os.ErrDeadlineExceeded) && a.conn.SetReadDeadline(time.Time{}) == nil {
			there = append(there, a)
		} else {
			a.conn.Close()
		}
	}
	if len(there) < len(present) {
		for _, a := range there {
			j.watch(ctx, a)
		}
	}
	return there
}

// link welcomes a process; from then on it is part of the world.
func (j *joiner) link(a *arrival, w welcome, silence time.Duration) error {
	peer := a.conn.RemoteAddr().String()
	_ = a.conn.SetWriteDeadline(time.Now().Add(handshakeTimeout)) // if it fails, so does what follows
	if err := a.send("welcome", w); err != nil {
		return fmt.Errorf("%s: %w", peer, err)
	}
	_ = a.conn.SetWriteDeadline(time.Time{})
	newLink(j.p, a.conn, peer, a.hello.Ranks, silence).start()
	return nil
}

// follow asks rank 0's process about the others, calls those with higher ranks and waits for the calls of
// those with lower ones.
func (j *joiner) follow(ctx context.Context) error {
	h := hello{Size: j.cfg.Size, Ranks: j.cfg.Local, Addr: j.cfg.Advertise}
	if h.Addr == "" {
		h.Addr = j.cfg.Listener.Addr().String()
	}
	leader, w, err := j.find(ctx, h)
	if err != nil {
		return err
	}
	if err := w.check(j.cfg); err != nil {
		leader.conn.Close()
		return fmt.Errorf("%s: %w", leader.conn.RemoteAddr(), err)
	}
	newLink(j.p, leader.conn, leader.conn.RemoteAddr().String(), w.Processes[0].Ranks, w.Silence).start()
	h.Session = w.Session
	lower := 0
	for _, other := range w.Processes[1:] {
		if other.Ranks[0] < j.cfg.Local[0] {
			lower++
		} else if other.Ranks[0] > j.cfg.Local[0] {
			if err := j.call(ctx, other, h, w.Silence); err != nil {
				return err
			}
		}
	}
	for lower > 0 {
		select {
		case a := <-j.arrivals:
			if !w.expects(a.hello, j.cfg.Local[0]) || j.p.ranks[a.hello.Ranks[0]].link != nil {
				a.refuse(false, "this world is another one")
				continue
			}
			if err := j.link(a, welcome{}, w.Silence); err != nil {
				a.conn.Close()
				return err
			}
			lower--
		case <-ctx.Done():
			return j.late(ctx, nil)
		}
	}
	return nil
}

// find tries the addresses until the process of rank 0 answers.
func (j *joiner) find(ctx context.Context, h hello) (*greeting, welcome, error) {
	var last error
	for {
		for _, addr := range j.cfg.Peers {
			g, w, err := j.ask(ctx, addr, h)
			if err == nil {
				return g, w, nil
			}
			if ctx.Err() != nil {
				return nil, w, j.late(ctx, last)
			}
			if final(err) {
				return nil, w, err
			}
			last = err
		}
		if !pause(ctx, retryInterval) {
			return nil, welcome{}, j.late(ctx, last)
		}
	}
}

// final reports whether trying again cannot help.
func final(err error) bool {
	var secret *SecretError
	var refused *RefusedError
	var tls *mtls.Error
	return errors.As(err, &secret) || errors.As(err, &refused) && !refused.again || errors.As(err, &tls) && tls.Permanent
}

// ask introduces this process at addr and waits for the answer.
func (j *joiner) ask(ctx context.Context, addr string, h hello) (*greeting, welcome, error) {
	g, err := dial(ctx, addr, j.cfg, h)
	if err != nil {
		return nil, welcome{}, err
	}
	w, err := g.answer(ctx, addr)
	if err != nil {
		g.conn.Close()
		return nil, w, err
	}
	return g, w, nil
}

// call connects to a process with higher ranks.
func (j *joiner) call(ctx context.Context, to processAddr, h hello, silence time.Duration) error {
	for {
		g, _, err := j.ask(ctx, to.Addr, h)
		if err == nil {
			newLink(j.p, g.conn, to.Addr, to.Ranks, silence).start()
			return nil
		}
		if ctx.Err() != nil || final(err) || !pause(ctx, retryInterval) {
			if ctx.Err() != nil {
				return j.late(ctx, err)
			}
			return err
		}
	}
}

// check wants every rank exactly once and this process among them.
func (w *welcome) check(cfg *MeshConfig) error {
	bad := func(what string) error { return fmt.Errorf("its list of processes %s", what) }
	seen := make([]bool, cfg.Size)
	count, here := 0, false
	for i, p := range w.Processes {
		if checkRanks(p.Ranks, cfg.Size) != nil || i > 0 && w.Processes[i-1].Ranks[0] >= p.Ranks[0] {
			return bad("is in disorder")
		}
		for _, r := range p.Ranks {
			if seen[r] {
				return bad(fmt.Sprintf("has rank %d twice", r))
			}
			seen[r] = true
			count++
		}
		here = here || slices.Equal(p.Ranks, cfg.Local)
	}
	switch {
	case count != cfg.Size:
		return bad("is incomplete")
	case !here || w.Session == "":
		return bad("does not have this one")
	case w.Silence < minSilence:
		return bad("says that nobody may be silent")
	}
	return nil
}

// expects reports whether a process with lower ranks than own is one of the world's.
func (w *welcome) expects(h hello, own int) bool {
	return h.Session == w.Session && h.Ranks[0] < own && slices.ContainsFunc(w.Processes[1:], func(p processAddr) bool {
		return slices.Equal(p.Ranks, h.Ranks)
	})
}

// reachable is the address at which others can dial a process that listens at listens and was seen at seen.
func reachable(listens string, seen net.Addr) string {
	host, port, err := net.SplitHostPort(listens)
	if err != nil {
		return listens
	}
	if ip := net.ParseIP(host); host != "" && (ip == nil || !ip.IsUnspecified()) {
		return listens
	}
	from, _, err := net.SplitHostPort(seen.String())
	if err != nil {
		return listens
	}
	return net.JoinHostPort(from, port)
}
