package sim

import (
	"encoding/binary"
	"fmt"
	"strings"
	"time"

	"baton/engine"
	"baton/handoff"
	"baton/layout"
	"baton/wire"
)

// seat is an engine's place in the fleet. Process after process sits on it.
type seat struct {
	w        *world
	name     string
	role     string
	holdings []layout.Holding
	life     *life // nil between a death and the next start
}

func (w *world) newSeat(name string) (*seat, error) {
	f := w.script.Fleet
	s := &seat{w: w, name: name, role: strings.TrimRight(name, "0123456789")}
	g := geometry(f.BlockSize)
	tp, pp := f.DecodeTP, f.DecodePP
	if s.role == wire.RolePrefill {
		tp, pp = f.PrefillTP, f.PrefillPP
	}
	var err error
	s.holdings, err = holdings(g, tp, pp)
	return s, err
}

func holdings(g layout.Geometry, tp, pp int) ([]layout.Holding, error) {
	stages, err := layout.EvenStages(g.Layers, pp)
	if err != nil {
		return nil, err
	}
	return g.Holdings(tp, stages)
}

func (w *world) seat(name string) *seat {
	for _, s := range w.seats {
		if s.name == name {
			return s
		}
	}
	return nil
}

// phase is where an engine's process stands with its coordinator.
type phase uint8

const (
	dialing phase = iota
	registering
	serving
	abandoning // the connection is gone, a pass is still under way
)

// life is an engine's process: what engine.Engine is, in virtual time.
type life struct {
	w       *world
	seat    *seat
	number  int // its place in world.lives, by which peers find its memory
	name    string
	role    string
	version uint64
	birth   uint64 // incarnation
	core    *engine.Core
	memory  *memory

	dead    bool
	frozen  bool
	backlog []func()        // what happened while it was frozen
	waiting []*flow         // settled since the connection ended
	unseen  []handoff.Event // what came of checks since then
	link    *link
	phase   phase
	passing bool
	ticking bool
	leaving time.Duration // it said DISCONNECT, and another starts so long after its end; 0: it stays

	ranks       []rank
	begun       map[uint64]int // on which rank each transfer was
	transfers   map[uint64]*flow
	generations []uint32 // of each block, when it was last looked at
	clean       []bool   // blocks that are scribbled over
}

func (l *life) String() string { return fmt.Sprintf("%s#%d", l.name, l.number) }

// start begins a process.
func (s *seat) start() {
	if s.life != nil {
		return
	}
	w, f := s.w, s.w.script.Fleet
	blocks := f.DecodeBlocks
	if s.role == wire.RolePrefill {
		blocks = f.PrefillBlocks
	}
	l := &life{
		w: w, seat: s, number: len(w.lives), name: s.name, role: s.role, version: w.version, birth: w.rng.Uint64() | 1,
		memory: newMemory(f.BlockSize, blocks, s.holdings), transfers: map[uint64]*flow{}, begun: map[uint64]int{},
		ranks:       make([]rank, len(s.holdings)),
		generations: make([]uint32, blocks), clean: make([]bool, blocks),
	}
	if f.verifies() {
		l.memory.keepChecksums(blocks, s.holdings)
	}
	core, err := engine.NewCore(engine.CoreConfig{
		Name: s.name, Role: s.role, MaxRequests: f.MaxRequests, MaxTokens: f.MaxTokens, MaxSeqLen: maxSeqLen,
		Vocabulary: vocabulary, BlockSize: f.BlockSize, Blocks: blocks, Version: w.version, Continuation: f.Continuation, Overtake: f.Overtake,
		Geometry: geometry(f.BlockSize), Holdings: s.holdings, Verify: handoff.Verification(f.Verify),
		Checksums: l.memory.checksums(), ChecksumTile: sumTile, Push: f.Push, Timeout: transferTimeout,
		Secret: binary.LittleEndian.AppendUint64(nil, l.birth),
	})
	if err != nil {
		w.fail("%s cannot start: %v", s.name, err)
		return
	}
	l.core, s.life = core, l
	w.lives = append(w.lives, l)
	w.log("%v starts, weights %d", l, l.version)
	l.dial()
}

// transferTimeout is when engines cancel a transfer.
const transferTimeout = 200 * time.Millisecond

// crash kills the process; another one starts after d.
func (s *seat) crash(d time.Duration) {
	if l := s.life; l != nil {
		l.dead = true
		s.life = nil
		if l.link != nil {
			l.link.peerCloses(true)
		}
		s.w.fabric.died(s.w, l)
	}
	s.w.after(d, s.start)
}

// patience is how long the coordinator keeps a connection on which nothing comes.
const patience = 100 * time.Millisecond

// freeze stops the process and lets it go on after d. Meanwhile the coordinator may give it up.
func (s *seat) freeze(d time.Duration) {
	l := s.life
	if l == nil || l.frozen {
		return
	}
	l.frozen = true
	if k := l.link; k != nil && d > patience {
		s.w.after(patience, func() {
			k.coordLoses()
			k.downAt = max(k.downAt, s.w.now+int64(s.w.hop()))
			s.w.at(k.downAt, k.peerLoses)
		})
	}
	s.w.after(d, func() {
		l.frozen = false
		s.w.log("%v goes on", l)
		for _, do := range l.backlog {
			s.w.after(0, func() { l.deliver(do) })
		}
		l.backlog = nil
	})
}

// cut breaks the connection to the coordinator.
func (s *seat) cut() {
	if s.life != nil && s.life.link != nil {
		s.life.link.sever()
	}
}

// leave lets the process end in an orderly way, when the coordinator has let it go; another one starts d
// after that.
func (s *seat) leave(d time.Duration) {
	l := s.life
	if l == nil {
		return
	}
	l.later(0, func() {
		if l.link == nil || l.phase != serving {
			s.crash(d)
			return
		}
		l.leaving = d
		l.link.up(&wire.Disconnect{Reason: "the engine stops"})
	})
}

// deliver lets something happen inside the process, as soon as it runs.
func (l *life) deliver(do func()) {
	switch {
	case l.dead:
	case l.frozen:
		l.backlog = append(l.backlog, do)
	default:
		do()
	}
}

func (l *life) later(d time.Duration, do func()) { l.w.after(d, func() { l.deliver(do) }) }

func (l *life) dial() {
	l.phase = dialing
	l.w.connect(l, l, wire.Connect{Version: wire.Version, Kind: "engine", Name: l.name, Incarnation: l.birth})
}

func (l *life) refused() {
	l.later(5*time.Millisecond+l.w.within(10*time.Millisecond), l.dial)
}

func (l *life) connected(k *link) {
	if l.dead {
		k.peerCloses(false)
		return
	}
	l.link = k
	l.deliver(func() { l.register(k) })
}

func (l *life) register(k *link) {
	l.phase = registering
	f := l.w.script.Fleet
	transport := "pull"
	if f.Push {
		transport = "push"
	}
	r := &wire.RegisterRole{
		Role: l.role, Name: l.name, Incarnation: l.birth, Model: "simulated", Transport: transport,
		Geometry: wire.Geometry{
			Model: "simulated", BlockSize: f.BlockSize, Layers: layers, KVHeads: heads, HeadDim: 1, Planes: 1,
			VocabSize: vocabulary, MaxSeqLen: maxSeqLen, VerifyHandoff: f.Verify,
		},
		Requests: f.MaxRequests, Blocks: len(l.clean) + f.Promise, MaxTokens: f.MaxTokens,
		WeightVersion: l.version, Continuation: f.Continuation,
	}
	for rank := range l.memory.ranks {
		h := l.seat.holdings[rank]
		info := wire.RankInfo{Rank: rank, Transport: descriptor(l, rank), Layer: h.Layer, Layers: h.Layers, Head: h.Head, Heads: h.Heads}
		if f.verifies() {
			info.Checksums = l.memory.checksums()[rank].Off
		}
		r.Ranks = append(r.Ranks, info)
	}
	k.up(r)
}

func (l *life) receive(k *link, m wire.Message) {
	l.deliver(func() {
		ack, ok := m.(*wire.RegisterRoleAck)
		switch {
		case k != l.link:
		case l.phase == registering && ok && ack.Error != "":
			l.w.log("%v is refused: %s", l, ack.Error)
			l.seat.crash(10*time.Millisecond + l.w.within(20*time.Millisecond))
		case l.phase == registering && ok:
			l.phase = serving
			l.step(engine.Registered{})
			for _, t := range l.waiting {
				l.later(0, func() { l.settled(t) })
			}
			l.waiting = nil
			for _, e := range l.unseen {
				l.later(0, func() { l.checked(e) })
			}
			l.unseen = nil
		case l.phase == serving:
			l.step(engine.Received{Message: m})
		}
	})
}

func (l *life) lost(k *link) {
	l.deliver(func() {
		if k != l.link {
			return
		}
		l.w.log("%v: its connection ended", l)
		if l.leaving > 0 {
			l.seat.crash(l.leaving)
			return
		}
		l.link = nil
		if l.phase == serving {
			l.phase = abandoning
			l.step(engine.Disconnected{})
		}
		if !l.passing {
			l.redial()
		}
	})
}

func (l *life) redial() {
	l.phase = dialing
	l.later(5*time.Millisecond+l.w.within(10*time.Millisecond), l.dial)
}

// step gives the core one event, does what it orders, and starts a pass if one is due.
func (l *life) step(event engine.Event) {
	l.carryOut(l.core.Step(l.w.time(), event))
	l.look()
	if l.phase == serving {
		l.pump()
	}
}

func (l *life) carryOut(actions []engine.Action) {
	for len(actions) > 0 {
		action := actions[0]
		actions = actions[1:]
		switch a := action.(type) {
		case engine.Send:
			l.w.blame(l, a.Message)
			if l.link != nil {
				l.link.up(a.Message)
			}
		case engine.Transfer:
			if answer := l.order(a.Order); answer != nil {
				actions = append(actions, l.core.Step(l.w.time(), engine.Moved{Event: answer})...)
			}
		case engine.Leave:
			l.w.log("%v is told to stop", l)
			l.later(0, func() { l.seat.crash(10*time.Millisecond + l.w.within(20*time.Millisecond)) })
		case engine.Handed:
			l.w.counts.Handoffs++
		case engine.Warn:
			l.w.log("%v: %s", l, a.Text)
		}
	}
}

func (l *life) moved(e handoff.Event) { l.step(engine.Moved{Event: e}) }

// pump starts the next pass. The model runs when it begins or when it ends.
func (l *life) pump() {
	plan, actions := l.core.Plan(l.w.time())
	l.carryOut(actions)
	l.look()
	l.tick()
	if plan == nil {
		return
	}
	l.passing = true
	var outputs []engine.Output
	early := l.w.chance(500)
	if early {
		outputs = l.memory.forward(l.version, plan)
	}
	l.later(300*time.Microsecond+l.w.within(2*time.Millisecond), func() {
		if !early {
			outputs = l.memory.forward(l.version, plan)
		}
		l.w.log("%v: a pass of %v", l, plan)
		l.passing = false
		l.step(engine.Computed{Plan: plan, Outputs: outputs})
		if l.phase == abandoning {
			l.redial()
		}
	})
}

// tick makes time pass for the core while it may be waiting for it.
func (l *life) tick() {
	h := l.core.Load().Handoff
	if l.ticking || h.Exports+h.Queued+h.Moving+h.Quarantined == 0 {
		return
	}
	l.ticking = true
	l.later(20*time.Millisecond, func() {
		l.ticking = false
		if l.phase == serving {
			l.step(engine.Tick{})
		}
	})
}

// look checks the pool and scribbles over what became free, or was free for a moment.
func (l *life) look() {
	pool := l.core.Pool()
	if err := pool.Check(); err != nil {
		l.w.fail("%v: %v", l, err)
	}
	for i := range l.clean {
		id := int32(i)
		held, matchable := pool.State(id)
		generation := pool.Generation(id)
		if free := !held && !matchable; free && !l.clean[i] || generation != l.generations[i] {
			l.memory.scribble(id)
			l.clean[i] = free
		} else if !free {
			l.clean[i] = false
		}
		l.generations[i] = generation
	}
	if n := l.core.Load().Handoff.Stale; n > 0 {
		l.w.fail("%v: %d handoffs found blocks of theirs with somebody else", l, n)
	}
}
