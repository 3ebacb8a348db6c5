package sim

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"baton/handoff"
	"baton/transfer"
)

// rank is one of a process's ranks: what ails it, and what it is busy with. An engine is healthy as long as all of
// them are; these are the ways in which one of them is not, while the others go on.
type rank struct {
	fails     int64 // until when everything that it is told to do with its memory fails, and who comes for it is turned away
	stalls    int64 // until when it does nothing
	orderedAt int64 // when the last order reaches it, where its process is another
	ordered   int   // orders on the way to it
	checkedAt int64 // when its last check ends
}

var errRank = errors.New("the rank is at fault")

// parseRank reads the name of one rank: "decode0.1" is the second one of decode0. Where an engine has fewer, they are
// counted round.
func parseRank(who string) (engine string, rank int, err error) {
	engine, text, ok := strings.Cut(who, ".")
	if !ok {
		return "", 0, fmt.Errorf("sim: %q is no rank; one is called as in decode0.1", who)
	}
	if rank, err = strconv.Atoi(text); err != nil || rank < 0 {
		return "", 0, fmt.Errorf("sim: %q is no number of a rank", text)
	}
	return engine, rank, nil
}

// rankFails lets one of the ranks of the process that sits there fail, for d.
func (s *seat) rankFails(number int, d time.Duration) {
	if l := s.life; l != nil {
		r := number % len(l.ranks)
		l.ranks[r].fails = s.w.now + int64(d)
		for _, t := range s.w.fabric.of(l, r) {
			t.lose()
		}
	}
}

// rankStalls stops one of the ranks for d.
func (s *seat) rankStalls(number int, d time.Duration) {
	if l := s.life; l != nil {
		l.ranks[number%len(l.ranks)].stalls = s.w.now + int64(d)
	}
}

// recover ends what ails the ranks.
func (l *life) recover() {
	for i := range l.ranks {
		l.ranks[i].fails, l.ranks[i].stalls = 0, 0
	}
}

func (l *life) failing(rank int) bool { return l.w.now < l.ranks[rank].fails }
func (l *life) stalled(rank int) bool { return l.w.now < l.ranks[rank].stalls }

// of lists the flows under way from or to a rank.
func (f *fabric) of(l *life, rank int) (list []*flow) {
	for _, t := range f.active {
		if t.source == l && t.sourceRank == rank || t.destination == l && t.destinationRank == rank {
			list = append(list, t)
		}
	}
	return list
}

// order brings an order to the rank that it is for. A rank of the process itself carries it out at once; one of another
// process (all but the first, where Fleet.Remote says so) when it has come there, and its answer comes back later. So
// does a rank that stalls. Orders reach a rank one after the other.
func (l *life) order(o handoff.Action) handoff.Event {
	number, ok := l.rankOf(o)
	if !ok {
		return nil
	}
	r := &l.ranks[number]
	remote := number > 0 && l.w.script.Fleet.Remote
	if !remote && !l.stalled(number) && r.ordered == 0 {
		return l.carry(o, number)
	}
	at := max(l.w.now, r.stalls, r.orderedAt)
	if remote {
		at += int64(l.w.hop())
	}
	r.orderedAt = at
	r.ordered++
	l.w.counts.RankDelays++
	l.w.at(at, func() {
		l.deliver(func() { // when the process goes on, if it is frozen
			r.ordered--
			if answer := l.carry(o, number); answer != nil {
				l.checked(answer)
			}
		})
	})
	return nil
}

// rankOf is the rank that an order is for; of a transfer, the one that it was begun on.
func (l *life) rankOf(o handoff.Action) (rank int, ok bool) {
	begun := func(transfer uint64, rank int) (int, bool) {
		l.begun[transfer] = rank
		return rank, true
	}
	switch a := o.(type) {
	case handoff.Seal:
		return a.Rank, true
	case handoff.OpenExport:
		return a.Rank, true
	case handoff.Revoke:
		return a.Rank, true
	case handoff.Verify:
		return a.Rank, true
	case handoff.StartPull:
		return begun(a.Transfer, a.Rank)
	case handoff.StartPush:
		return begun(a.Transfer, a.Rank)
	case handoff.Expect:
		return begun(a.Transfer, a.Rank)
	case handoff.Cancel:
		rank, ok = l.begun[a.Transfer]
		return rank, ok
	case handoff.Recheck:
		rank, ok = l.begun[a.Transfer]
		return rank, ok
	}
	l.w.fail("%v gave an unknown order: %T", l, o)
	return 0, false
}

// carry has an order carried out, if the rank is able to.
func (l *life) carry(o handoff.Action, rank int) handoff.Event {
	if !l.failing(rank) {
		return l.w.fabric.order(l, o)
	}
	var answer handoff.Event
	switch a := o.(type) {
	case handoff.OpenExport:
		answer = handoff.Opened{Handoff: a.Handoff, Rank: a.Rank, Err: errRank}
	case handoff.Expect:
		answer = handoff.Expected{Transfer: a.Transfer, Err: errRank}
	case handoff.StartPull:
		answer = handoff.Settled{Transfer: a.Transfer, Err: errRank, Safe: true}
	case handoff.StartPush:
		answer = handoff.Settled{Transfer: a.Transfer, Err: errRank, Safe: true}
	default: // what is under way ends as it would
		return l.w.fabric.order(l, o)
	}
	l.w.log("%v: %s: rank %d fails", l, ordered{o}, rank)
	l.w.counts.BrokenTransfers++
	l.w.counts.RankFailures++
	return answer
}

// turnedAway is whether a flow comes to a rank of its peer that fails.
func (t *flow) turnedAway(by *life, rank int) bool {
	if !by.failing(rank) {
		return false
	}
	t.w.counts.BrokenTransfers++
	t.end(transfer.Failed, errRank)
	return true
}

// rankFaults draws what befalls single ranks, and whether ranks have processes of their own, from a source of its own:
// the rest of a seed's script does not depend on it.
func rankFaults(seed uint64, f Fleet, span time.Duration) (faults []Fault, remote bool) {
	g := generator{rand.New(rand.NewPCG(seed, 0x4a4b5))}
	if f.Both > 0 || f.PrefillTP*f.PrefillPP+f.DecodeTP*f.DecodePP == 2 {
		return nil, false
	}
	remote = g.IntN(2) == 0
	for range g.one(0, 1, 1, 2) {
		faults = append(faults, Fault{
			At: g.within(span + 20*time.Millisecond), Kind: []string{RankFails, RankStalls}[g.IntN(2)],
			Who: fmt.Sprintf("%s.%d", g.engine(f), g.IntN(8)), For: time.Millisecond + g.within(time.Duration(g.one(5, 40, 300))*time.Millisecond),
		})
	}
	return faults, remote
}
