package handoff

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"baton/kvcache"
	"baton/layout"
	"baton/wire"
)

// side is one engine of a script: its pool, its Core, and what it told the other.
type side struct {
	name    string
	pool    *kvcache.Pool
	core    *Core
	layout  []layout.Holding
	sums    []Checksums
	running map[string]*kvcache.Table // of a scheduler that shares the pool
	offers  map[uint64]*wire.Export
	ready   map[uint64]*wire.KVTransferReady
	imports map[uint64]*wire.SubmitRequestWithKV
}

// script plays a testdata file: events go in, one a command, and the actions come out.
type script struct {
	t        *testing.T
	now      time.Time
	geometry layout.Geometry
	p, d     *side // the prefill and the decode engine
}

func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		s := &script{t: t, now: time.Unix(1000, 0)}
		datadriven.RunTest(t, path, s.run)
	})
}

// engines makes both sides: "engines [push] [blocks=8] [prefill-tp=1] [decode-tp=1] [timeout=30s] [verify=off]". A
// block has 4 tokens of 4 heads of one byte; with verify=all or verify=sample its checksums are of 4 tokens
// each.
func (s *script) engines(a args) string {
	s.geometry = layout.Geometry{BlockSize: 4, Layers: 1, KVHeads: 4, HeadDim: 1, Planes: 1, ElementBytes: 1}
	s.p = s.side("P", a, a.int("prefill-tp", 1))
	s.d = s.side("D", a, a.int("decode-tp", 1))
	return ""
}

func (s *script) side(name string, a args, tp int) *side {
	pool, err := kvcache.New(kvcache.Config{Blocks: a.int("blocks", 8), BlockSize: s.geometry.BlockSize})
	if err != nil {
		s.t.Fatal(err)
	}
	holdings, err := s.geometry.Holdings(tp, []int{s.geometry.Layers})
	if err != nil {
		s.t.Fatal(err)
	}
	var sizes []int64
	var sums []Checksums
	for _, h := range holdings {
		size := s.geometry.BlockBytes(h)
		sizes = append(sizes, size)
		if a.has("verify") {
			sums = append(sums, Checksums{Off: size * int64(a.int("blocks", 8)), BlockBytes: s.geometry.Checksums(4).BlockBytes(h)})
		}
	}
	core, err := New(Config{
		Pool: pool, BlockBytes: sizes, Push: a.has("push"), Timeout: a.duration("timeout"),
		Verify: Verification(a.text("verify")), Checksums: sums,
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return &side{
		name: name, pool: pool, core: core, layout: holdings, sums: sums, running: map[string]*kvcache.Table{},
		offers: map[uint64]*wire.Export{}, ready: map[uint64]*wire.KVTransferReady{},
		imports: map[uint64]*wire.SubmitRequestWithKV{},
	}
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	s.t = t
	a := args{t, d}
	switch d.Cmd {
	case "engines":
		return s.engines(a)
	case "after":
		s.now = s.now.Add(a.duration("seconds"))
		return ""
	case "P", "D":
		e := s.p
		if d.Cmd == "D" {
			e = s.d
		}
		out := s.command(e, d.CmdArgs[0].Key, args{t, d})
		if err := e.pool.Check(); err != nil {
			out += err.Error() + "\n"
		}
		return out
	}
	t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
	return ""
}

// command is one event for an engine, or something its scheduler does with the pool.
func (s *script) command(e *side, name string, a args) string {
	id := uint64(a.int("id", 0))
	switch name {
	case "retain":
		return s.step(e, Retain{
			ID: id, Table: s.compute(e, a.text("prompt")), Tokens: a.int("tokens", len(a.text("prompt"))),
			Capability: []byte("secret" + strconv.Itoa(int(id))), Lease: a.duration("lease"),
		})
	case "sealed":
		return s.step(e, Sealed{Handoff: uint64(a.int("handoff", 1)), Rank: a.int("rank", 0)})
	case "opened":
		return s.step(e, Opened{Handoff: uint64(a.int("handoff", 1)), Rank: a.int("rank", 0), Err: a.err()})
	case "push":
		return s.step(e, s.pushEvent(id, a))
	case "release":
		handoff := uint64(a.int("handoff", 0))
		if x := s.p.offers[id]; handoff == 0 && x != nil {
			handoff = x.Handoff
		}
		return s.step(e, Release{ID: id, Handoff: handoff, Corrupt: a.has("corrupt")})
	case "renew":
		return s.step(e, Renew{ID: id, Handoff: uint64(a.int("handoff", 1))})
	case "revoked":
		return s.step(e, Revoked{Handoff: uint64(a.int("handoff", 1)), Rank: a.int("rank", 0), Quiesced: !a.has("busy")})
	case "import":
		return s.step(e, s.importEvent(id, a))
	case "expected":
		return s.step(e, Expected{Transfer: uint64(a.int("transfer", 1)), Tag: []byte(a.text("tag")), Err: a.err()})
	case "settled":
		return s.step(e, Settled{
			Transfer: uint64(a.int("transfer", 1)), Err: a.err(), Safe: !a.has("unsafe"), Bytes: int64(a.int("bytes", 0)),
		})
	case "verified":
		return s.step(e, Verified{Transfer: uint64(a.int("transfer", 1)), Err: a.err()})
	case "abort":
		return s.step(e, Abort{id})
	case "abandon":
		return s.step(e, Abandon{})
	case "poll":
		return s.step(e, Poll{})
	case "reset":
		if err := e.core.Reset(); err != nil {
			return err.Error() + "\n"
		}
		return "done\n"
	case "run": // a request of the engine's own scheduler, open until "finish"
		e.running[a.text("prompt")] = s.compute(e, a.text("prompt"))
		return ""
	case "finish":
		e.running[a.text("prompt")].Close()
		return ""
	case "steal": // break the rules: give up the blocks of an export or of an import, then let somebody take them
		for _, x := range e.core.exports {
			if x.id == id {
				x.pin.Release()
			}
		}
		for _, m := range e.core.moving {
			if m.id() == id {
				m.table.Close()
			}
		}
		s.compute(e, a.text("prompt")).Close()
		return ""
	case "stats":
		return fmt.Sprintf("%+v\n%+v\n", e.core.Stats(), e.pool.Stats())
	}
	s.t.Fatalf("unknown event %q", name)
	return ""
}

// compute runs a prompt: each character is a token.
func (s *script) compute(e *side, prompt string) *kvcache.Table {
	ids := tokens(prompt)
	table, err := e.pool.Open(kvcache.OpenRequest{Prompt: ids})
	if err != nil {
		s.t.Fatal(err)
	}
	table.Commit(ids[table.Cached():])
	return table
}

func tokens(text string) []int32 {
	ids := make([]int32, len(text))
	for i := range ids {
		ids[i] = int32(text[i])
	}
	return ids
}

func (s *script) template(from, to *side) (blocks, sums *layout.Template) {
	blocks, err := layout.Compile(s.geometry, from.layout, to.layout)
	if err != nil {
		s.t.Fatal(err)
	}
	if from.sums != nil {
		if sums, err = layout.Compile(s.geometry.Checksums(4), from.layout, to.layout); err != nil {
			s.t.Fatal(err)
		}
	}
	return blocks, sums
}

func ranks(e *side) []wire.RankInfo {
	var infos []wire.RankInfo
	for rank := range e.layout {
		info := wire.RankInfo{Rank: rank, Transport: []byte(e.name + strconv.Itoa(rank))}
		if e.sums != nil {
			info.Checksums = e.sums[rank].Off
		}
		infos = append(infos, info)
	}
	return infos
}

// importEvent is what the coordinator makes of the offer of the same id.
func (s *script) importEvent(id uint64, a args) Import {
	m := &wire.SubmitRequestWithKV{
		ID: id, Prompt: tokens(a.text("prompt")), Generated: tokens(a.textOr("generated", "!")),
		Source: wire.Source{Engine: "P", Ranks: ranks(s.p)},
	}
	if x := s.p.offers[id]; x != nil {
		m.Source.Export = *x
	}
	if a.has("source-tokens") {
		m.Source.Export.Tokens = a.int("source-tokens", 0)
	}
	if a.has("generations") {
		m.Source.Export.Generations = m.Source.Export.Generations[:a.int("generations", 0)]
	}
	if a.has("no-checksums") {
		m.Source.Ranks[0].Checksums = 0
	}
	e := Import{Message: m, Capacity: a.int("capacity", len(m.Prompt)+4), Version: uint64(a.int("version", 0))}
	e.Template, e.Checksums = s.template(s.p, s.d)
	return e
}

// pushEvent is what the coordinator makes of decode's readiness.
func (s *script) pushEvent(id uint64, a args) Push {
	m := &wire.SendKV{ID: id, Handoff: uint64(a.int("handoff", 0)), Ranks: ranks(s.d), Reader: uint64(a.int("reader", 0))}
	if x := s.p.offers[id]; x != nil && m.Handoff == 0 {
		m.Handoff = x.Handoff
	}
	if r := s.d.ready[id]; r != nil {
		m.CachedBlocks, m.Blocks, m.Tag = r.CachedBlocks, r.Blocks, r.Tag
	}
	m.CachedBlocks = a.int("cached", m.CachedBlocks)
	if a.has("tag") {
		m.Tag = []byte(a.text("tag"))
	}
	e := Push{Message: m}
	e.Template, e.Checksums = s.template(s.p, s.d)
	return e
}

func (s *script) step(e *side, event Event) string {
	var b strings.Builder
	for _, action := range e.core.Step(s.now, event) {
		b.WriteString(s.describe(e, action) + "\n")
	}
	if b.Len() == 0 {
		return "nothing\n"
	}
	return b.String()
}

func (s *script) describe(e *side, action Action) string {
	switch a := action.(type) {
	case Seal:
		return fmt.Sprintf("seal handoff=%d rank=%d blocks=%v", a.Handoff, a.Rank, a.Blocks)
	case Verify:
		return fmt.Sprintf("verify transfer=%d rank=%d blocks=%v", a.Transfer, a.Rank, a.Blocks)
	case OpenExport:
		return fmt.Sprintf("open-export handoff=%d rank=%d capability=%s ranges=%v", a.Handoff, a.Rank, a.Capability, a.Ranges)
	case Offer:
		e.offers[a.ID] = a.Export
		for i, id := range a.Export.Blocks {
			if uint32(a.Export.Generations[i]) != e.pool.Generation(id) {
				return fmt.Sprintf("offer id=%d with generations %v of %v", a.ID, a.Export.Generations, a.Export.Blocks)
			}
		}
		return fmt.Sprintf("offer id=%d handoff=%d tokens=%d blocks=%v", a.ID, a.Export.Handoff, a.Export.Tokens, a.Export.Blocks)
	case StartPush:
		return fmt.Sprintf("start-push transfer=%d rank=%d to=%s tag=%q copies=%v", a.Transfer, a.Rank, a.Peer, a.Tag, a.Copies)
	case Revoke:
		return fmt.Sprintf("revoke handoff=%d rank=%d", a.Handoff, a.Rank)
	case StartPull:
		return fmt.Sprintf("start-pull transfer=%d rank=%d from=%s handoff=%d capability=%s copies=%v",
			a.Transfer, a.Rank, a.Peer, a.Handoff, a.Capability, a.Copies)
	case Expect:
		return fmt.Sprintf("expect transfer=%d rank=%d ranges=%v", a.Transfer, a.Rank, a.Ranges)
	case Cancel:
		return fmt.Sprintf("cancel transfer=%d", a.Transfer)
	case Recheck:
		return fmt.Sprintf("recheck transfer=%d", a.Transfer)
	case Admit:
		e.running[strconv.Itoa(int(a.Message.ID))] = a.Table
		return fmt.Sprintf("admit id=%d tokens=%d blocks=%v moved=%d reused=%d bytes=%d transfer=%vs handoff=%vs",
			a.Message.ID, a.Table.Len(), a.Table.Blocks(), a.Stats.BlocksMoved, a.Stats.BlocksReused, a.Stats.BytesMoved,
			a.Stats.Transfer, a.Stats.Handoff)
	case Send:
		return s.message(e, a.Message)
	}
	return fmt.Sprintf("%T", action)
}

func (s *script) message(e *side, message wire.Message) string {
	switch m := message.(type) {
	case *wire.KVTransferReady:
		e.ready[m.ID] = m
		return fmt.Sprintf("send %v id=%d cached=%d blocks=%v tag=%q", m.Header(), m.ID, m.CachedBlocks, m.Blocks, m.Tag)
	case *wire.KVReadDone:
		return fmt.Sprintf("send %v id=%d", m.Header(), m.ID)
	case *wire.RequestError:
		reader := ""
		if m.Reader != 0 {
			reader = fmt.Sprintf(" reader=%d", m.Reader)
		}
		return fmt.Sprintf("send %v id=%d%s code=%s retryable=%v source-safe=%v: %s", m.Header(), m.ID, reader, m.Code, m.Retryable, m.SourceSafe, m.Message)
	case *wire.RequestAborted:
		return fmt.Sprintf("send %v id=%d source-safe=%v", m.Header(), m.ID, m.SourceSafe)
	}
	return fmt.Sprintf("send %T", message)
}

// args reads the arguments of a command.
type args struct {
	t *testing.T
	d *datadriven.TestData
}

func (a args) has(key string) bool { return a.d.HasArg(key) }

func (a args) textOr(key, otherwise string) string {
	if !a.has(key) {
		return otherwise
	}
	var v string
	a.d.ScanArgs(a.t, key, &v)
	return v
}

func (a args) text(key string) string { return a.textOr(key, "") }

func (a args) int(key string, otherwise int) int {
	if a.has(key) {
		a.d.ScanArgs(a.t, key, &otherwise)
	}
	return otherwise
}

func (a args) duration(key string) time.Duration { return time.Duration(a.int(key, 0)) * time.Second }

func (a args) err() error {
	if !a.has("err") {
		return nil
	}
	return errors.New(a.text("err"))
}
