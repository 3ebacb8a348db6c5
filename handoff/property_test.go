package handoff

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"baton/kvcache"
	"baton/layout"
	"baton/wire"
)

// cell is what one byte of a simulated KV pool holds: one token's state for one head.
type cell struct {
	prefix string // the token and all before it
	head   int
}

// node is one simulated engine: pool, Core, a memory a rank, checksums to make or to compare, and the open
// tables of its scheduler.
type node struct {
	pool     *kvcache.Pool
	core     *Core
	holdings []layout.Holding
	sums     []Checksums
	memory   [][]cell
	work     []func() Event
	revoked  map[uint64]bool
	tables   []*running
}

type running struct {
	id     uint64
	table  *kvcache.Table
	tokens []int32
}

// flow is a simulated transfer of a backend: bytes still to move, and whether it may be reported ended.
type flow struct {
	number   uint64
	kind     string // "pull", "push", "expect"
	owner    *node
	rank     int              // of the destination
	src, dst []cell           // the two ranks' memories
	expected []cell           // what src must still hold, byte by byte of todo
	lives    map[int32]uint32 // generations of the destination's blocks when it began
	todo     [][2]int64       // bytes to move, from and to
	handoff  uint64           // that a pull reads
	into     *flow            // the receive that a push writes into
	missing  map[int64]bool
	flips    int  // how many bytes from here one arrives wrong; -1: none does
	unsafe   bool // reported so
	ended    bool // nothing of it is in flight
	moved    int64
}

// world is two engines, a coordinator between them and a data plane, all driven by random choices.
type world struct {
	t        *rapid.T
	now      time.Time
	geometry layout.Geometry
	push     bool
	verify   Verification
	flipped  bool
	p, d     *node
	flows    []*flow
	tags     map[string]*flow
	toD, toP []func() // messages on their way
	nextID   uint64
	exports  map[uint64]*wire.Export
	prompts  map[uint64][]int32
	importing,
	over map[uint64]bool // ids that D was given, and how often they ended there
	lost bool // an engine was abandoned: ids no longer must end
}

func TestRandomHandoffs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		t.Repeat(map[string]func(*rapid.T){
			"":            func(t *rapid.T) { w.t = t; w.check() },
			"prefill":     w.with(w.prefill),
			"pressure":    w.with(w.pressure),
			"deliver":     w.with(w.deliver),
			"deliver too": w.with(w.deliver),
			"move":        w.with(w.move),
			"end":         w.with(w.end),
			"end well":    w.with(w.endWell),
			"work":        w.with(w.work),
			"decode":      w.with(w.decode),
			"finish":      w.with(w.finish),
			"abort":       w.with(w.abort),
			"poll":        w.with(w.poll),
			"abandon":     w.with(w.abandon),
		})
		w.drain()
	})
}

func (w *world) with(f func()) func(*rapid.T) {
	return func(t *rapid.T) {
		w.t = t
		f()
	}
}

func newWorld(t *rapid.T) *world {
	w := &world{
		t: t, now: time.Unix(0, 0), push: rapid.Bool().Draw(t, "push"),
		verify: rapid.SampledFrom([]Verification{VerifyOff, VerifySample, VerifyAll}).Draw(t, "verify"), tags: map[string]*flow{},
		exports: map[uint64]*wire.Export{}, prompts: map[uint64][]int32{}, importing: map[uint64]bool{}, over: map[uint64]bool{},
		geometry: layout.Geometry{BlockSize: rapid.IntRange(1, 3).Draw(t, "block size"), Layers: 1, KVHeads: 2, HeadDim: 1, Planes: 1, ElementBytes: 1},
	}
	w.p, w.d = w.node("prefill"), w.node("decode")
	return w
}

func (w *world) node(name string) *node {
	blocks := rapid.IntRange(4, 12).Draw(w.t, name+" blocks")
	pool, err := kvcache.New(kvcache.Config{Blocks: blocks, BlockSize: w.geometry.BlockSize})
	if err != nil {
		w.t.Fatal(err)
	}
	n := &node{pool: pool, revoked: map[uint64]bool{}}
	n.holdings, err = w.geometry.Holdings(rapid.IntRange(1, 2).Draw(w.t, name+" ranks"), []int{1})
	if err != nil {
		w.t.Fatal(err)
	}
	var sizes []int64
	for _, h := range n.holdings {
		kv := int64(blocks) * w.geometry.BlockBytes(h)
		sums := Checksums{Off: kv, BlockBytes: w.geometry.Checksums(w.geometry.BlockSize).BlockBytes(h)}
		sizes, n.sums = append(sizes, w.geometry.BlockBytes(h)), append(n.sums, sums)
		n.memory = append(n.memory, make([]cell, kv+int64(blocks)*sums.BlockBytes))
	}
	n.core, err = New(Config{
		Pool: pool, BlockBytes: sizes, Push: w.push, Timeout: 10 * time.Second, Verify: w.verify, Checksums: n.sums,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

// at is where the state of a position for a head lies on a rank.
func (w *world) at(n *node, rank int, table *kvcache.Table, position, head int) int64 {
	h, size := n.holdings[rank], w.geometry.BlockSize
	block := int64(table.Blocks()[position/size])
	return block*w.geometry.BlockBytes(h) + int64((head-h.Head)*size+position%size)
}

func (w *world) each(n *node, table *kvcache.Table, tokens []int32, from, to int, f func(c *cell, want cell)) {
	for rank, h := range n.holdings {
		for head := h.Head; head < h.Head+h.Heads; head++ {
			for i := from; i < to; i++ {
				f(&n.memory[rank][w.at(n, rank, table, i, head)], cell{fmt.Sprint(tokens[:i+1]), head})
			}
		}
	}
}

func (w *world) write(n *node, r *running, from, to int) {
	w.each(n, r.table, r.tokens, from, to, func(c *cell, want cell) { *c = want })
	r.table.Commit(r.tokens[from:to])
}

func (w *world) check() {
	for _, n := range []*node{w.p, w.d} {
		if err := n.pool.Check(); err != nil {
			w.t.Fatal(err)
		}
		for _, r := range n.tables {
			w.each(n, r.table, r.tokens, 0, r.table.Len(), func(c *cell, want cell) {
				if *c != want {
					w.t.Fatalf("request %d holds %v instead of %v", r.id, *c, want)
				}
			})
		}
	}
}

// compute runs a prompt on the prefill engine, if it fits now.
func (w *world) compute(id uint64, tokens []int32) *running {
	table, err := w.p.pool.Open(kvcache.OpenRequest{Prompt: tokens, Owner: id})
	if err != nil {
		w.t.Skip("no room")
	}
	r := &running{id: id, table: table, tokens: tokens}
	w.write(w.p, r, table.Cached(), len(tokens))
	return r
}

func (w *world) prompt() []int32 {
	return rapid.SliceOfN(rapid.Int32Range(0, 1), 1, 7).Draw(w.t, "prompt")
}

func (w *world) prefill() {
	w.nextID++
	id := w.nextID
	r := w.compute(id, w.prompt())
	w.prompts[id] = r.tokens
	w.step(w.p, Retain{ID: id, Table: r.table, Tokens: len(r.tokens), Capability: []byte{1}})
}

// pressure makes the prefill engine reuse whatever it may.
func (w *world) pressure() { w.compute(0, append(w.prompt(), 2)).table.Close() }

func (w *world) deliver() {
	queue := &w.toD
	if rapid.Bool().Draw(w.t, "to prefill") {
		queue = &w.toP
	}
	if len(*queue) == 0 {
		w.t.Skip("no message")
	}
	message := (*queue)[0]
	*queue = (*queue)[1:]
	message()
}

func (w *world) ranks(n *node) []wire.RankInfo {
	infos := make([]wire.RankInfo, len(n.holdings))
	for rank := range infos {
		infos[rank] = wire.RankInfo{Rank: rank, Transport: []byte{byte(rank)}, Checksums: n.sums[rank].Off}
	}
	return infos
}

func (w *world) template(g layout.Geometry) *layout.Template {
	template, err := layout.Compile(g, w.p.holdings, w.d.holdings)
	if err != nil {
		w.t.Fatal(err)
	}
	return template
}

func (w *world) sums() layout.Geometry { return w.geometry.Checksums(w.geometry.BlockSize) }

// checksum visits the checksums of blocks on a rank: the 8 cells of each head, and what they should be.
func (w *world) checksum(n *node, rank int, blocks []int32, visit func(have *cell, want cell)) {
	memory, size := n.memory[rank], int64(w.geometry.BlockSize)
	for _, id := range blocks {
		for head := range n.holdings[rank].Heads {
			kv := int64(id)*w.geometry.BlockBytes(n.holdings[rank]) + int64(head)*size
			sum := fmt.Sprint("sum of ", memory[kv:kv+size])
			at := n.sums[rank].Off + int64(id)*n.sums[rank].BlockBytes + int64(head)*8
			for i := range 8 {
				visit(&memory[at+int64(i)], cell{sum, i})
			}
		}
	}
}

// later does something with blocks after a while, and makes sure that they are nobody else's by then.
func (w *world) later(n *node, blocks []int32, do func() Event) {
	lives := w.lives(n, blocks)
	n.work = append(n.work, func() Event {
		for id, generation := range lives {
			if n.pool.Generation(id) != generation {
				w.t.Fatalf("block %d was given to somebody else while its checksums were made or compared", id)
			}
		}
		return do()
	})
}

// work does the first thing that is left to do on an engine.
func (w *world) work() {
	n := w.d
	if rapid.Bool().Draw(w.t, "on prefill") {
		n = w.p
	}
	if len(n.work) == 0 {
		w.t.Skip("nothing to do")
	}
	do := n.work[0]
	n.work = n.work[1:]
	w.step(n, do())
}

// step gives a Core an event and plays shell, coordinator and backend for what comes back.
func (w *world) step(n *node, event Event) {
	actions := n.core.Step(w.now, event)
	for len(actions) > 0 {
		action := actions[0]
		actions = actions[1:]
		if answer := w.act(n, action); answer != nil {
			actions = append(actions, n.core.Step(w.now, answer)...)
		}
	}
}

func (w *world) act(n *node, action Action) Event {
	switch a := action.(type) {
	case Seal:
		w.later(n, a.Blocks, func() Event {
			w.checksum(n, a.Rank, a.Blocks, func(have *cell, want cell) { *have = want })
			return Sealed{Handoff: a.Handoff, Rank: a.Rank}
		})
	case Verify:
		w.later(n, a.Blocks, func() Event {
			var err error
			w.checksum(n, a.Rank, a.Blocks, func(have *cell, want cell) {
				if *have != want {
					err = fmt.Errorf("%v instead of %v", *have, want)
				}
			})
			return Verified{Transfer: a.Transfer, Err: err}
		})
	case OpenExport:
		if rapid.IntRange(0, 19).Draw(w.t, "export fails") == 0 {
			return Opened{a.Handoff, a.Rank, errors.New("refused")}
		}
		return Opened{a.Handoff, a.Rank, nil}
	case Offer:
		w.offer(a)
	case Revoke:
		n.revoked[a.Handoff] = true
		busy := slices.ContainsFunc(w.flows, func(f *flow) bool { return f.kind == "pull" && f.handoff == a.Handoff && !f.ended })
		return Revoked{a.Handoff, a.Rank, !busy}
	case StartPull:
		if w.p.revoked[a.Handoff] {
			return Settled{Transfer: a.Transfer, Err: errors.New("refused"), Safe: true}
		}
		w.start(&flow{number: a.Transfer, kind: "pull", owner: n, handoff: a.Handoff,
			rank: a.Rank, src: w.p.memory[a.Peer[0]], dst: w.d.memory[a.Rank]}, a.Copies)
	case Expect:
		f := &flow{number: a.Transfer, kind: "expect", owner: n, rank: a.Rank, dst: w.d.memory[a.Rank], missing: map[int64]bool{}}
		var blocks []int32
		for _, r := range a.Ranges {
			for i := range r.Len {
				f.missing[r.Off+i] = true
				blocks = append(blocks, w.block(a.Rank, r.Off+i))
			}
		}
		tag := fmt.Sprint("tag", a.Transfer)
		f.lives = w.lives(w.d, blocks)
		w.tags[tag] = f
		w.flows = append(w.flows, f)
		return Expected{Transfer: a.Transfer, Tag: []byte(tag)}
	case StartPush:
		into := w.tags[string(a.Tag)]
		if delete(w.tags, string(a.Tag)); into == nil {
			w.t.Fatalf("transfer %d pushes under the tag %q, which is not there or was used", a.Transfer, a.Tag)
		}
		w.start(&flow{number: a.Transfer, kind: "push", owner: n, into: into, src: w.p.memory[a.Rank], dst: into.dst}, a.Copies)
	case Cancel, Recheck: // a cancelled transfer ends by the data plane's whim, like any other
	case Admit:
		w.admit(a)
	case Send:
		w.coordinate(n, a.Message)
	}
	return nil
}

func (w *world) start(f *flow, copies []layout.Copy) {
	var blocks []int32
	for _, c := range copies {
		for i := range c.Len {
			f.todo = append(f.todo, [2]int64{c.Src + i, c.Dst + i})
			f.expected = append(f.expected, f.src[c.Src+i])
			blocks = append(blocks, w.block(f.rank, c.Dst+i))
		}
	}
	f.lives = w.lives(w.d, blocks)
	f.flips = -1
	if w.verify == VerifyAll && rapid.IntRange(0, 9).Draw(w.t, "flips a byte") == 0 {
		f.flips = rapid.IntRange(0, len(f.todo)-1).Draw(w.t, "byte")
	}
	w.flows = append(w.flows, f)
}

// block is the block at an offset of a decode rank.
func (w *world) block(rank int, off int64) int32 {
	if s := w.d.sums[rank]; off >= s.Off {
		return int32((off - s.Off) / s.BlockBytes)
	}
	return int32(off / w.geometry.BlockBytes(w.d.holdings[rank]))
}

func (w *world) lives(n *node, blocks []int32) map[int32]uint32 {
	lives := map[int32]uint32{}
	for _, id := range blocks {
		lives[id] = n.pool.Generation(id)
	}
	return lives
}

func (w *world) offer(a Offer) {
	w.exports[a.ID] = a.Export
	first := rapid.Int32Range(0, 1).Draw(w.t, "first token")
	more := rapid.IntRange(1, 4).Draw(w.t, "more")
	w.toD = append(w.toD, func() {
		w.importing[a.ID] = true
		w.step(w.d, Import{
			Message: &wire.SubmitRequestWithKV{
				ID: a.ID, Prompt: w.prompts[a.ID], Generated: wire.Tokens{first},
				Source: wire.Source{Ranks: w.ranks(w.p), Export: *a.Export},
			},
			Capacity: len(w.prompts[a.ID]) + more, Template: w.template(w.geometry), Checksums: w.template(w.sums()),
		})
	})
}

func (w *world) admit(a Admit) {
	w.ends(a.Message.ID)
	r := &running{id: a.Message.ID, table: a.Table, tokens: append(slices.Clone([]int32(a.Message.Prompt)), a.Message.Generated...)}
	if r.table.Len() != len(a.Message.Prompt) {
		w.t.Fatalf("request %d is admitted with %d of %d tokens", r.id, r.table.Len(), len(a.Message.Prompt))
	}
	w.d.tables = append(w.d.tables, r)
}

func (w *world) ends(id uint64) {
	if w.over[id] {
		w.t.Fatalf("request %d ends twice", id)
	}
	w.over[id] = true
}

// coordinate is the coordinator: it releases sources once they are safe.
func (w *world) coordinate(n *node, message wire.Message) {
	release := func(id uint64) {
		x := w.exports[id]
		w.toP = append(w.toP, func() { w.step(w.p, Release{ID: id, Handoff: x.Handoff}) })
	}
	switch m := message.(type) {
	case *wire.KVTransferReady:
		x := w.exports[m.ID]
		w.toP = append(w.toP, func() {
			w.step(w.p, Push{Message: &wire.SendKV{
				ID: m.ID, Handoff: x.Handoff, CachedBlocks: m.CachedBlocks, Blocks: m.Blocks, Tag: m.Tag, Ranks: w.ranks(w.d),
			}, Template: w.template(w.geometry), Checksums: w.template(w.sums())})
		})
	case *wire.KVReadDone:
		release(m.ID)
	case *wire.RequestError:
		if n == w.p {
			w.toD = append(w.toD, func() { w.step(w.d, Abort{m.ID}) })
			return
		}
		if m.Code == wire.CodeCorrupt && (!w.flipped || !m.Retryable || !m.SourceSafe) {
			w.t.Fatalf("unexpected: %+v", m)
		}
		w.ends(m.ID)
		if m.SourceSafe {
			release(m.ID)
		}
	case *wire.RequestAborted:
		if n == w.p {
			return
		}
		w.ends(m.ID)
		if m.SourceSafe {
			release(m.ID)
		}
	}
}

func (w *world) pick() *flow {
	if len(w.flows) == 0 {
		w.t.Skip("no transfer")
	}
	return w.flows[rapid.IntRange(0, len(w.flows)-1).Draw(w.t, "transfer")]
}

// move moves some bytes of a transfer, also of one that was reported unsafe.
func (w *world) move() {
	f := w.pick()
	if len(f.todo) == 0 {
		w.t.Skip("nothing to move")
	}
	w.bytes(f, rapid.IntRange(1, len(f.todo)).Draw(w.t, "bytes"))
}

func (w *world) bytes(f *flow, n int) {
	for i := range n {
		from, to := f.todo[i][0], f.todo[i][1]
		if f.src[from] != f.expected[i] {
			w.t.Fatalf("%s %d: the source was reused while it is read", f.kind, f.number)
		}
		f.moved++
		if f.into != nil {
			if f.into.ended {
				continue // the tag is not valid any more: dropped
			}
			if !f.into.missing[to] {
				w.t.Fatalf("push %d writes %d, which nobody expects", f.number, to)
			}
			delete(f.into.missing, to)
			f.into.moved++
		}
		receiver := f
		if f.into != nil {
			receiver = f.into
		}
		if id := w.block(receiver.rank, to); w.d.pool.Generation(id) != receiver.lives[id] {
			w.t.Fatalf("%s %d writes block %d, which was given to somebody else", f.kind, f.number, id)
		}
		f.dst[to] = f.src[from]
		if i == f.flips {
			f.dst[to], w.flipped = cell{"flipped", -1}, true
		}
	}
	f.flips -= n
	f.todo, f.expected = f.todo[n:], f.expected[n:]
}

func (w *world) endWell() {
	f := w.pick()
	if f.kind == "expect" {
		if len(f.missing) > 0 {
			w.t.Skip("still receiving")
		}
	} else {
		w.bytes(f, len(f.todo))
	}
	w.settle(f, Settled{Transfer: f.number, Bytes: f.moved})
}

// end ends a transfer badly, or makes one safe that ended so.
func (w *world) end() {
	f := w.pick()
	err := errors.New("broken")
	if !f.unsafe && rapid.Bool().Draw(w.t, "unsafe") {
		f.unsafe = true
		w.step(f.owner, Settled{Transfer: f.number, Err: err, Bytes: f.moved})
		return
	}
	w.settle(f, Settled{Transfer: f.number, Err: err, Safe: true, Bytes: f.moved})
}

func (w *world) settle(f *flow, e Settled) {
	f.ended = true
	w.flows = slices.DeleteFunc(w.flows, func(o *flow) bool { return o == f })
	w.step(f.owner, e)
}

func (w *world) table() int {
	if len(w.d.tables) == 0 {
		w.t.Skip("nothing decodes")
	}
	return rapid.IntRange(0, len(w.d.tables)-1).Draw(w.t, "request")
}

func (w *world) decode() {
	r := w.d.tables[w.table()]
	n := r.table.Len()
	if n == r.table.Capacity() {
		w.t.Skip("full")
	}
	if err := r.table.EnsureTokens(n + 1); err != nil {
		w.t.Fatal(err)
	}
	w.write(w.d, r, n, n+1)
	r.tokens = append(r.tokens, rapid.Int32Range(0, 1).Draw(w.t, "token"))
}

func (w *world) finish() {
	i := w.table()
	w.d.tables[i].table.Close()
	w.d.tables = slices.Delete(w.d.tables, i, i+1)
}

func (w *world) abort() {
	if w.nextID == 0 {
		w.t.Skip("no request")
	}
	id := rapid.Uint64Range(1, w.nextID).Draw(w.t, "id")
	w.toD = append(w.toD, func() { w.step(w.d, Abort{id}) })
}

func (w *world) poll() {
	w.now = w.now.Add(time.Duration(rapid.IntRange(0, 4).Draw(w.t, "seconds")) * time.Second)
	w.step(w.p, Poll{})
	w.step(w.d, Poll{})
}

// abandon cuts an engine off: it stops what it can, and the messages about its requests are lost.
func (w *world) abandon() {
	if rapid.IntRange(0, 9).Draw(w.t, "rarely") != 0 {
		w.t.Skip("not now")
	}
	w.lost = true
	w.toD, w.toP = nil, nil
	before := len(w.over)
	w.step(w.d, Abandon{})
	w.step(w.p, Abandon{})
	if len(w.toP)+len(w.toD) > 0 || len(w.over) != before {
		w.t.Fatal("an abandoned engine talks")
	}
}

// drain lets everything come to an end and looks for what is left.
func (w *world) drain() {
	for range 1000 {
		if len(w.toD)+len(w.toP)+len(w.flows)+len(w.d.tables)+len(w.d.work)+len(w.p.work) == 0 && len(w.d.core.queue) == 0 && len(w.p.core.exports) == 0 {
			break
		}
		for _, queue := range []*[]func(){&w.toD, &w.toP} {
			messages := *queue
			*queue = nil
			for _, message := range messages {
				message()
			}
		}
		for _, f := range slices.Clone(w.flows) {
			if f.kind == "expect" && len(f.missing) == 0 {
				w.settle(f, Settled{Transfer: f.number, Bytes: f.moved})
			} else if f.kind != "expect" {
				w.bytes(f, len(f.todo))
				w.settle(f, Settled{Transfer: f.number, Bytes: f.moved})
			} else if f.unsafe || w.now.Unix() > 1000 {
				w.settle(f, Settled{Transfer: f.number, Err: errors.New("cancelled"), Safe: true})
			}
		}
		for _, n := range []*node{w.p, w.d} {
			work := n.work
			n.work = nil
			for _, do := range work {
				w.step(n, do())
			}
		}
		w.check()
		for _, r := range w.d.tables {
			r.table.Close()
		}
		w.d.tables = nil
		w.now = w.now.Add(5 * time.Second)
		w.step(w.p, Poll{})
		w.step(w.d, Poll{})
	}
	w.check()
	for name, n := range map[string]*node{"prefill": w.p, "decode": w.d} {
		if s := n.pool.Stats(); s.InUse != 0 || s.Pinned != 0 || s.Promised != 0 {
			w.t.Errorf("%s keeps %+v, %+v", name, s, n.core.Stats())
		}
		if s := n.core.Stats(); s.Exports+s.Queued+s.Moving+s.Quarantined+s.QuarantinedBlocks+len(n.core.transfers) != 0 {
			w.t.Errorf("%s keeps %+v and %d transfers", name, s, len(n.core.transfers))
		}
		if err := n.core.Reset(); err != nil {
			w.t.Errorf("%s: %v", name, err)
		}
	}
	for id := range w.importing {
		if !w.over[id] && !w.lost {
			w.t.Errorf("request %d never ended", id)
		}
	}
}
