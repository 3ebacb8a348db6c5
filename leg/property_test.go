package leg

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"baton/compute"
	"baton/engine"
	"baton/handoff"
	"baton/layout"
	"baton/transfer"
	"baton/wire"
)

// The world of this test has a prefill and a decode process: the real cores of legs and of engines, a device that really
// reads what lies in KV blocks, and a transport that moves them. All that goes on between them takes as long as chance has
// it, and fails when chance has it: copies (safely, or leaving bytes under way), links, the prefill process; clients leave, lose
// states and bring them twice; leases end. Tokens must be right all the same, and at rest nothing may be held.

const (
	worldBlock  = 4
	worldBlocks = 12
	worldLease  = 4 * time.Second
	worldVocab  = 50
)

var worldGeometry = layout.Geometry{BlockSize: worldBlock, Layers: 1, KVHeads: 1, HeadDim: 1, Planes: 1, ElementBytes: 4}

// host is one process.
type host struct {
	w      *world
	role   string
	legs   *Core
	engine *engine.Core
	life   uint64 // counts restarts
	mem    []int32
	plan   *engine.Plan
	toLegs []wire.Message // from the engine
	toEng  []wire.Message

	exports  map[uint64]*worldExport
	expected map[string]*copying // by tag, of destinations that wait for a push
	copies   map[uint64]*copying // by the engine's number
}

type worldExport struct {
	capability string
	readers    int
	revoked    bool
}

// copying is a transfer, from either side's view. A push has two.
type copying struct {
	of       *host
	life     uint64
	transfer uint64
	list     []layout.Copy
	from, to *host // whose memory; of a push that is expected, from is not known yet
	export   *worldExport
	other    *copying // of a push: the destination's
	state    transfer.State
	canceled bool
}

// link is the connection from the decode process to the prefill process.
type link struct {
	number     uint64
	toP, toD   []wire.Message
	pGone, dOK bool // P has heard of its end; D has not
}

// order is a client's request.
type order struct {
	request *wire.SubmitRequest
	want    wire.Tokens
	job     uint64 // at P
}

// answer is a generation leg at the client.
type answer struct {
	order *order
	got   wire.Tokens
}

type world struct {
	t      *testing.T
	seed   uint64
	rng    *rand.Rand
	now    time.Time
	p, d   *host
	push   bool
	link   *link // nil while there is none
	links  uint64
	jobs   uint64
	orders map[uint64]*order // by job at P
	states map[uint64][]byte // that clients hold, by job at P
	firsts map[uint64]wire.Result
	tries  map[uint64]*answer // by job at D
	tags   int
	live   []*copying // transfers that nobody has ended
	good   int
}

var (
	worldSeeds = flag.Int("worlds", 100, "how many worlds TestNothingIsLostOrWrong plays, of either kind of transport")
	worldFirst = flag.Uint64("first-world", 1, "the seed of the first")
)

func TestNothingIsLostOrWrong(t *testing.T) {
	for _, push := range []bool{false, true} {
		t.Run(fmt.Sprintf("push=%v", push), func(t *testing.T) {
			good := 0
			var p, d Stats
			for i := range *worldSeeds {
				w := newWorld(t, *worldFirst+uint64(i), push)
				for range 100 + w.rng.IntN(500) {
					w.step()
				}
				w.rest()
				good += w.good
				p.add(w.p.legs.Stats())
				d.add(w.d.legs.Stats())
			}
			t.Logf("%d requests ended well; P %+v; D %+v", good, p, d)
			if good == 0 || p.Expired == 0 || p.Refused == 0 || p.Released == 0 || d.Lost == 0 || d.Read == 0 {
				t.Error("something never happened")
			}
		})
	}
}

func (s *Stats) add(o Stats) {
	s.Exported, s.Released, s.Expired, s.Refused = s.Exported+o.Exported, s.Released+o.Released, s.Expired+o.Expired, s.Refused+o.Refused
	s.Read, s.Lost = s.Read+o.Read, s.Lost+o.Lost
}

func newWorld(t *testing.T, seed uint64, push bool) *world {
	w := &world{
		t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 1)), now: time.Unix(1000, 0), push: push,
		orders: map[uint64]*order{}, states: map[uint64][]byte{}, firsts: map[uint64]wire.Result{}, tries: map[uint64]*answer{},
	}
	w.p, w.d = w.host(wire.RolePrefill), w.host(wire.RoleDecode)
	return w
}

// fatal ends the test in words that say how to see it again.
func (w *world) fatal(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("world %d: "+format, append([]any{w.seed}, args...)...)
}

// maybe is true once in n times.
func (w *world) maybe(n int) bool { return w.rng.IntN(n) == 0 }

func (w *world) host(role string) *host {
	h := &host{w: w, role: role}
	h.start()
	return h
}

// start begins a life of a process.
func (h *host) start() {
	w := h.w
	h.life++
	lease := time.Duration(0)
	cfg := Config{Engines: []string{h.role}, Incarnation: 100*h.life + uint64(len(h.role)), Requests: 64}
	if h.role == wire.RolePrefill {
		lease = worldLease
		cfg.Address, cfg.Lease = "p", lease
	}
	var err error
	if h.legs, err = New(cfg); err != nil {
		w.fatal("%v", err)
	}
	h.engine, err = engine.NewCore(engine.CoreConfig{
		Name: h.role, Role: h.role, MaxRequests: 3, MaxTokens: 8, MaxSeqLen: 40, Vocabulary: worldVocab, EOS: []int32{2}, BlockSize: worldBlock, Blocks: worldBlocks,
		Version: 1, Geometry: worldGeometry, Holdings: []layout.Holding{worldGeometry.Whole()}, Push: w.push, Secret: []byte{byte(h.life)}, ExportLease: lease,
		Timeout: 20 * time.Second,
	})
	if err != nil {
		w.fatal("%v", err)
	}
	h.mem = make([]int32, worldBlocks*worldBlock)
	h.plan, h.toLegs, h.toEng = nil, nil, nil
	h.exports, h.expected, h.copies = map[uint64]*worldExport{}, map[string]*copying{}, map[uint64]*copying{}
	h.tell(EngineSaid{h.role, &wire.RegisterRole{
		Role: h.role, Name: h.role, Transport: "toy", Requests: 3, Blocks: worldBlocks, WeightVersion: 1, Ranks: []wire.RankInfo{{Transport: []byte(h.role)}},
		Geometry: wire.Geometry{Model: "toy", BlockSize: worldBlock, Layers: 1, KVHeads: 1, HeadDim: 1, Planes: 1, VocabSize: worldVocab, MaxSeqLen: 40},
	}})
	h.toEng = nil // the acknowledgement
}

// tell steps the legs' core and carries out what it orders.
func (h *host) tell(e Event) {
	w := h.w
	for _, action := range h.legs.Step(w.now, e) {
		switch a := action.(type) {
		case Tell:
			h.toEng = append(h.toEng, a.Message)
		case Answer:
			if l := w.link; l != nil && l.number == a.Link && !l.pGone {
				l.toD = append(l.toD, a.Message)
			}
		case Ask:
			w.ask(a.Message)
		case HangUp:
			if w.link != nil {
				w.link.dOK = false
				w.breakLink()
			}
		case Deliver:
			w.deliver(h, a)
		case Fail:
			w.fail(h, a)
		case Warn:
			w.fatal("%s: %s", h.role, a.Text)
		case Close:
			w.fatal("%s is let go", h.role)
		}
	}
}

// ask sends over the link, or opens one.
func (w *world) ask(m wire.Message) {
	if w.link == nil {
		w.links++
		w.link = &link{number: w.links, dOK: true}
	}
	w.link.toP = append(w.link.toP, m)
}

// breakLink ends the link. Each side hears of it, with all that was under way lost.
func (w *world) breakLink() {
	l := w.link
	w.link = nil
	if !l.pGone {
		w.p.tell(ReaderGone{l.number})
	}
	if l.dOK {
		w.d.tell(SourceGone{"p", errors.New("broken")})
	}
}

// deliver is what clients do with results.
func (w *world) deliver(h *host, a Deliver) {
	if h == w.p {
		o := w.orders[a.ID]
		if !slices.Equal(a.Result.Tokens, o.want[:1]) {
			w.fatal("the first token of job %d is %v, want %v", a.ID, a.Result.Tokens, o.want)
		}
		switch {
		case a.State == nil && len(o.want) > 1:
			w.fatal("job %d ended with %q after a token of %d", a.ID, a.Result.Finish, len(o.want))
		case a.State != nil:
			w.states[a.ID], w.firsts[a.ID] = a.State, a.Result
		default:
			w.good++
		}
		return
	}
	try := w.tries[a.ID]
	if try == nil {
		w.fatal("news of job %d, whose client is gone", a.ID)
	}
	if a.Result.Start != len(try.got) {
		w.fatal("job %d: tokens from %d on after %d", a.ID, a.Result.Start, len(try.got))
	}
	try.got = append(try.got, a.Result.Tokens...)
	if len(try.got) > len(try.order.want) || !slices.Equal(try.got, try.order.want[:len(try.got)]) {
		w.fatal("job %d: %v, want %v", a.ID, try.got, try.order.want)
	}
	if a.End {
		if len(try.got) != len(try.order.want) {
			w.fatal("job %d ended after %v, want %v", a.ID, try.got, try.order.want)
		}
		w.good++
		delete(w.tries, a.ID)
	}
}

func (w *world) fail(h *host, a Fail) {
	switch a.Error.Code {
	case wire.CodeGone, wire.CodeUnavailable, wire.CodeEngineLost:
	default:
		w.fatal("%s: job %d failed: %+v", h.role, a.ID, a.Error)
	}
	if h == w.d {
		if try := w.tries[a.ID]; try == nil || len(try.got) > 0 {
			w.fatal("job %d failed with %v after it had begun", a.ID, a.Error)
		}
		delete(w.tries, a.ID)
	}
}

// tellEngine steps an engine and carries out what it orders.
func (h *host) tellEngine(e engine.Event) { h.carryOut(h.engine.Step(h.w.now, e)) }

func (h *host) carryOut(actions []engine.Action) {
	for _, action := range actions {
		switch a := action.(type) {
		case engine.Send:
			if _, report := a.Message.(*wire.KVEvents); !report {
				h.toLegs = append(h.toLegs, a.Message)
			}
		case engine.Transfer:
			if answer := h.move(a.Order); answer != nil {
				h.tellEngine(engine.Moved{Event: answer})
			}
		case engine.Warn:
			h.w.fatal("%s: %s", h.role, a.Text)
		}
	}
}

// move is the transport.
func (h *host) move(order handoff.Action) handoff.Event {
	w := h.w
	begin := func(number uint64, c *copying) {
		c.of, c.life, c.transfer, c.state = h, h.life, number, transfer.Running
		h.copies[number] = c
		w.live = append(w.live, c)
	}
	switch a := order.(type) {
	case handoff.OpenExport:
		h.exports[a.Handoff] = &worldExport{capability: string(a.Capability)}
		return handoff.Opened{Handoff: a.Handoff, Rank: a.Rank}
	case handoff.Revoke:
		x := h.exports[a.Handoff]
		if x == nil {
			return handoff.Revoked{Handoff: a.Handoff, Quiesced: true}
		}
		if x.revoked = true; x.readers == 0 {
			delete(h.exports, a.Handoff)
		}
		return handoff.Revoked{Handoff: a.Handoff, Quiesced: x.readers == 0}
	case handoff.StartPull:
		x := w.p.exports[a.Handoff]
		if x == nil || x.revoked || x.capability != string(a.Capability) {
			return handoff.Settled{Transfer: a.Transfer, Err: transfer.ErrRefused, Safe: true}
		}
		x.readers++
		begin(a.Transfer, &copying{list: a.Copies, from: w.p, to: h, export: x})
	case handoff.Expect:
		w.tags++
		tag := fmt.Sprint("tag", w.tags)
		c := &copying{to: h}
		begin(a.Transfer, c)
		h.expected[tag] = c
		return handoff.Expected{Transfer: a.Transfer, Tag: []byte(tag)}
	case handoff.StartPush:
		other := w.d.expected[string(a.Tag)]
		if other == nil || other.state != transfer.Running {
			return handoff.Settled{Transfer: a.Transfer, Err: transfer.ErrRefused, Safe: true}
		}
		delete(w.d.expected, string(a.Tag))
		begin(a.Transfer, &copying{list: a.Copies, from: h, to: w.d, other: other})
	case handoff.Cancel:
		if c := h.copies[a.Transfer]; c != nil {
			c.canceled = true
			if w.push && c.of == w.d && !w.pushing(c) {
				w.settle(c, transfer.Failed)
			}
		}
	case handoff.Recheck: // it settles when it does
	}
	return nil
}

// pushing reports whether a source writes to a destination.
func (w *world) pushing(c *copying) bool {
	return slices.ContainsFunc(w.live, func(o *copying) bool { return o.other == c })
}

// land copies the first n of a transfer's pieces.
func (c *copying) land(n int) {
	for _, piece := range c.list[:n] {
		copy(c.to.mem[piece.Dst/4:(piece.Dst+piece.Len)/4], c.from.mem[piece.Src/4:(piece.Src+piece.Len)/4])
	}
}

// settle ends a transfer on its own side, or tells that it failed and is not over.
func (w *world) settle(c *copying, state transfer.State) {
	was := c.state
	c.state = state
	if state != transfer.Unsafe {
		w.live = slices.DeleteFunc(w.live, func(o *copying) bool { return o == c })
		if c.export != nil {
			c.export.readers--
		}
	}
	if c.of.life != c.life {
		return // the process is gone
	}
	e := handoff.Settled{Transfer: c.transfer, Safe: state != transfer.Unsafe, Bytes: int64(len(c.list))}
	if state != transfer.Done {
		e.Err = transfer.ErrPeerLost
	}
	if state == transfer.Done && was == transfer.Unsafe {
		w.fatal("a failed transfer is done")
	}
	if e.Safe {
		delete(c.of.copies, c.transfer)
	}
	c.of.tellEngine(engine.Moved{Event: e})
}

// advance lets a transfer come to an end, well if it can.
func (w *world) advance(c *copying, well bool) {
	switch {
	case c.of.life != c.life:
		w.settle(c, transfer.Failed)
	case c.state == transfer.Unsafe:
		if c.export != nil {
			c.land(len(c.list) / 2) // late bytes
		}
		w.settle(c, transfer.Failed)
		if c.other != nil && c.other.state != transfer.Failed {
			w.settle(c.other, transfer.Failed)
		}
	case w.push && c.of == w.d:
		if !w.pushing(c) && !well { // nobody will ever write
			w.settle(c, transfer.Failed)
		}
	case well && !c.canceled && (c.other == nil || c.other.state == transfer.Running && !c.other.canceled && c.other.life == w.d.life):
		c.land(len(c.list))
		w.settle(c, transfer.Done)
		if c.other != nil {
			w.settle(c.other, transfer.Done)
		}
	default:
		state := transfer.Failed
		if w.maybe(2) {
			state = transfer.Unsafe
		} else {
			c.land(len(c.list) / 2)
		}
		w.settle(c, state)
		if c.other != nil && c.other.state == transfer.Running {
			w.settle(c.other, state)
		}
	}
}

// pass runs an engine's next pass, or ends the one under way.
func (h *host) pass() {
	if h.plan == nil {
		plan, actions := h.engine.Plan(h.w.now)
		h.carryOut(actions)
		h.plan = plan
		return
	}
	plan := h.plan
	h.plan = nil
	b := plan.Batch
	for i, slot := range b.Slots {
		h.mem[slot] = b.Tokens[i]
	}
	outputs := make([]engine.Output, len(b.Logits))
	for i, row := range b.Logits {
		at := slices.IndexFunc(b.Sequences, func(s compute.Sequence) bool {
			return int(row) >= s.Row && int(row) < s.Row+s.Rows
		})
		s := b.Sequences[at]
		prefix := make([]int32, s.Position+int(row)-s.Row+1)
		for j := range prefix {
			prefix[j] = h.mem[int(s.Blocks[j/worldBlock])*worldBlock+j%worldBlock]
		}
		outputs[i] = engine.Output{Token: next(prefix)}
	}
	h.tellEngine(engine.Computed{Plan: plan, Outputs: outputs})
}

// next is the model: what follows depends on all that was read.
func next(prefix []int32) int32 {
	h := fnv.New32a()
	for _, id := range prefix {
		_ = binary.Write(h, binary.LittleEndian, id)
	}
	return 3 + int32(h.Sum32()%(worldVocab-3))
}

// submit brings a client's request to the prefill process.
func (w *world) submit() {
	n := 1 + w.rng.IntN(13)
	o := &order{request: &wire.SubmitRequest{Sampling: wire.Sampling{MaxTokens: 1 + w.rng.IntN(6), IgnoreEOS: true}}}
	text := int32(3 + w.rng.IntN(6))
	for i := range n { // prompts of one text share prefixes
		o.request.Prompt = append(o.request.Prompt, text+int32(i))
	}
	o.request.Prompt[n-1] = int32(3 + w.rng.IntN(4))
	all := slices.Clone([]int32(o.request.Prompt))
	for range o.request.Sampling.MaxTokens {
		all = append(all, next(all))
	}
	o.want = all[n:]
	w.jobs++
	o.job = w.jobs
	w.orders[o.job] = o
	w.p.tell(Submit{o.job, Job{Kind: Context, Request: o.request, Group: -1}})
}

// bring takes a state to the decode process. The client may keep a copy, even if it said that it would not try again.
func (w *world) bring() {
	id := pick(w, w.states)
	if id == 0 {
		return
	}
	raw, o, once := w.states[id], w.orders[id], w.maybe(2)
	if !w.maybe(3) {
		delete(w.states, id)
	}
	w.jobs++
	w.tries[w.jobs] = &answer{order: o}
	w.d.tell(Submit{w.jobs, Job{
		Kind: Generation, Request: o.request, Group: -1, State: w.decode(raw), Digest: sha256.Sum256(raw), First: wire.Result{Tokens: w.firsts[id].Tokens}, Once: once,
	}})
}

func (w *world) decode(raw []byte) *wire.KVState {
	m, err := wire.Decode(raw)
	if err != nil {
		w.fatal("%v", err)
	}
	return m.(*wire.KVState)
}

// giveUp is a client that does not go on: its answer was not sent, or it died, or it says so. It may have sent the state
// somewhere before.
func (w *world) giveUp() {
	id := pick(w, w.states)
	if id == 0 {
		return
	}
	raw := w.states[id]
	delete(w.states, id)
	switch w.rng.IntN(3) {
	case 0:
		w.p.tell(Discard{id})
	case 1:
		w.p.tell(Release{w.decode(raw), sha256.Sum256(raw)})
	}
}

// pick draws a key; 0 when there is none.
func pick[V any](w *world, m map[uint64]V) uint64 {
	if len(m) == 0 {
		return 0
	}
	keys := make([]uint64, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys[w.rng.IntN(len(keys))]
}

// step lets one thing happen.
func (w *world) step() {
	type thing struct {
		weight int
		do     func()
	}
	things := []thing{
		{2, w.submit}, {8, w.bring},
		{10, func() { w.carry(w.p) }}, {10, func() { w.carry(w.d) }}, {10, w.carryLink},
		{6, w.p.pass}, {6, w.d.pass},
		{8, func() { w.anyCopy(true) }}, {1, func() { w.anyCopy(false) }},
		{5, func() { w.pass(time.Duration(1+w.rng.IntN(900)) * time.Millisecond) }},
		{1, w.leave},
		{1, w.giveUp},
		{1, func() { w.p.tell(Renew{pick(w, w.states)}) }},
		{1, func() {
			if w.link != nil && w.maybe(2) {
				w.breakLink()
			}
		}},
		{1, func() {
			if w.maybe(8) {
				w.die()
			}
		}},
	}
	total := 0
	for _, x := range things {
		total += x.weight
	}
	at := w.rng.IntN(total)
	for _, x := range things {
		if at -= x.weight; at < 0 {
			x.do()
			break
		}
	}
	w.check()
}

func (w *world) check() {
	for _, h := range []*host{w.p, w.d} {
		if err := h.engine.Pool().Check(); err != nil {
			w.fatal("%s: %v", h.role, err)
		}
	}
}

// carry takes a message between an engine and its legs.
func (w *world) carry(h *host) {
	if len(h.toLegs) > 0 && (len(h.toEng) == 0 || w.maybe(2)) {
		m := h.toLegs[0]
		h.toLegs = h.toLegs[1:]
		h.tell(EngineSaid{h.role, m})
	} else if len(h.toEng) > 0 {
		m := h.toEng[0]
		h.toEng = h.toEng[1:]
		h.tellEngine(engine.Received{Message: m})
	}
}

// carryLink takes a message over the link.
func (w *world) carryLink() {
	l := w.link
	switch {
	case l == nil:
	case len(l.toP) > 0 && (len(l.toD) == 0 || w.maybe(2)):
		m := l.toP[0]
		l.toP = l.toP[1:]
		w.p.tell(ReaderSaid{l.number, m})
	case len(l.toD) > 0:
		m := l.toD[0]
		l.toD = l.toD[1:]
		w.d.tell(SourceSaid{"p", m})
	}
}

func (w *world) anyCopy(well bool) {
	if len(w.live) > 0 {
		w.advance(w.live[w.rng.IntN(len(w.live))], well)
	}
}

// pass lets time pass.
func (w *world) pass(d time.Duration) {
	w.now = w.now.Add(d)
	for _, h := range []*host{w.p, w.d} {
		h.tellEngine(engine.Tick{})
		h.tell(Tick{})
	}
}

// leave lets a client go.
func (w *world) leave() {
	if id := pick(w, w.tries); id != 0 && w.maybe(2) {
		delete(w.tries, id)
		w.d.tell(Cancel{id})
		return
	}
	if id := pick(w, w.orders); id != 0 {
		w.p.tell(Cancel{id})
	}
}

// die ends the prefill process, and starts it anew.
func (w *world) die() {
	if l := w.link; l != nil {
		l.pGone = true
		w.breakLink()
	}
	clear(w.states)
	w.p.start()
	w.orders = map[uint64]*order{}
	for _, c := range slices.Clone(w.live) {
		if slices.Contains(w.live, c) && (c.of == w.p || c.from == w.p) {
			w.settle(c, transfer.Failed)
			if c.other != nil && c.other.state == transfer.Running {
				w.settle(c.other, transfer.Failed)
			}
		}
	}
}

// rest lets everything come to its end, and finds nothing left.
func (w *world) rest() {
	clear(w.states)
	for i := range 3000 {
		for _, h := range []*host{w.p, w.d} {
			for len(h.toLegs)+len(h.toEng) > 0 {
				w.carry(h)
			}
			h.pass()
		}
		for w.link != nil && len(w.link.toP)+len(w.link.toD) > 0 {
			w.carryLink()
		}
		for _, c := range slices.Clone(w.live) {
			if slices.Contains(w.live, c) {
				w.advance(c, true)
			}
		}
		w.pass(20 * time.Millisecond)
		if i > 300 && w.left() == "" && len(w.live) == 0 {
			break
		}
	}
	w.check()
	if left := w.left(); left != "" {
		w.fatal("%s", left)
	}
	if len(w.tries) > 0 {
		w.fatal("%d clients wait for ever", len(w.tries))
	}
}

func (w *world) left() string {
	for _, h := range []*host{w.p, w.d} {
		s, pool, load := h.legs.Stats(), h.engine.Pool().Stats(), h.engine.Load()
		if s.Requests+s.Exports+s.Claims+s.Reading+pool.InUse+load.Waiting+load.Prefill+load.Decode+load.Admission != 0 {
			return fmt.Sprintf("%s has %+v, %+v, %+v left", h.role, s, pool, load)
		}
	}
	return ""
}
