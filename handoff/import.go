package handoff

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"baton/kvcache"
	"baton/layout"
	"baton/wire"
)

// importing is a request from its arrival until it is admitted, or, when it fails, until no transfer can
// touch its blocks any more.
type importing struct {
	message  *wire.SubmitRequestWithKV
	tokens   []int32 // whose KV comes from the source
	digests  []kvcache.Digest
	version  uint64
	capacity int
	reserve  int
	template *layout.Template
	sums     *layout.Template // of checksums
	arrived  time.Time

	table     *kvcache.Table // once it is moving
	reused    int            // leading blocks that were cached
	began     time.Time
	moved     time.Time
	legs      []*leg   // that have not come to a safe end
	tags      [][]byte // of each of the template's legs, where sources push
	preparing int      // legs of which Expect has not been answered
	bytes     int64
	verifying bool  // everything has arrived, and the legs are verifications
	corrupt   error // what a rank found wrong

	pin    *kvcache.Pin // of a quarantine
	owes   bool         // in quarantine: KVReadDone is due when it ends
	silent bool
}

func (m *importing) id() uint64 { return m.message.ID }

// live reports whether an import of the request is waiting or moving.
func (c *Core) live(id uint64) bool {
	same := func(m *importing) bool { return m.id() == id }
	return slices.ContainsFunc(c.queue, same) || slices.ContainsFunc(c.moving, same)
}

func (c *Core) submit(e Import) {
	id := e.Message.ID
	if c.live(id) {
		return
	}
	m := &importing{message: e.Message, version: e.Version, capacity: e.Capacity, reserve: e.Reserve, template: e.Template, sums: e.Checksums, arrived: c.now}
	if err := c.checkImport(m); err != nil {
		c.fail(id, wire.CodeInternal, true, "its KV cannot be imported: %v", err)
		return
	}
	m.digests = kvcache.Chain(kvcache.Root(e.Message.Salt, ""), c.pool.BlockSize(), m.tokens)
	c.queue = append(c.queue, m)
	c.retry = true
}

// checkImport also finds the tokens: the prompt and all that was generated, but for the last one, which
// has not been through the model.
func (c *Core) checkImport(m *importing) error {
	source := &m.message.Source
	tokens := len(m.message.Prompt) + len(m.message.Generated) - 1
	if len(m.message.Generated) == 0 || source.Export.Tokens != tokens || tokens < 1 {
		return fmt.Errorf("the source holds %d tokens; %d prompt and %d generated ones, of which the last has no KV, were named",
			source.Export.Tokens, len(m.message.Prompt), len(m.message.Generated))
	}
	m.tokens = append(slices.Clone([]int32(m.message.Prompt)), m.message.Generated[:len(m.message.Generated)-1]...)
	if want := c.pool.BlocksFor(tokens); len(source.Export.Blocks) != want {
		return fmt.Errorf("the source offers %d blocks for %d tokens; with %d tokens a block it must be %d",
			len(source.Export.Blocks), tokens, c.pool.BlockSize(), want)
	}
	if err := checkBlocks(source.Export.Blocks); err != nil {
		return err
	}
	if n := len(source.Export.Generations); n != len(source.Export.Blocks) {
		return fmt.Errorf("the source names %d generations for %d blocks", n, len(source.Export.Blocks))
	}
	if err := checkTemplate(m.template, len(source.Ranks), len(c.config.BlockBytes)); err != nil {
		return err
	}
	return c.checkSums(m.template, m.sums, source.Ranks)
}

// startQueued starts what can start, first come, first served. An import that lacks blocks holds back all
// behind it; one whose prefix is on its way steps aside for them.
func (c *Core) startQueued() {
	waiting := c.queue
	c.queue = nil
	for i, m := range waiting {
		table, err := c.pool.Open(kvcache.OpenRequest{
			Version: m.version, Root: kvcache.Root(m.message.Salt, ""), Prompt: m.tokens, Digests: m.digests,
			Capacity: m.capacity, Reserve: m.reserve, WholePrompt: true, Owner: m.id(),
		})
		switch {
		case err == nil:
			m.table = table
			c.start(m)
		case errors.Is(err, kvcache.ErrPending):
			c.queue = append(c.queue, m)
		case errors.Is(err, kvcache.ErrNoCapacity):
			c.queue = append(c.queue, waiting[i:]...)
			return
		default:
			c.failOpen(m, err)
		}
	}
}

func (c *Core) failOpen(m *importing, err error) {
	var capacity *kvcache.CapacityError
	if errors.As(err, &capacity) && errors.Is(err, kvcache.ErrNeverFits) {
		c.fail(m.id(), wire.CodeInvalid, true, "it needs %d KV blocks of %d tokens; the decode engine has %d",
			capacity.Need, c.pool.BlockSize(), capacity.Have)
		return
	}
	c.fail(m.id(), wire.CodeInternal, true, "its KV cannot be imported: %v", err)
}

// start moves what is not cached. When everything is, nothing moves and nobody is asked to push: the
// import is complete.
func (c *Core) start(m *importing) {
	m.began, m.moved = c.now, c.now
	m.reused = m.table.Cached() / c.pool.BlockSize()
	c.moving = append(c.moving, m)
	source := &m.message.Source
	from := source.Export.Blocks[m.reused:]
	to := m.table.Blocks()[m.reused:len(source.Export.Blocks)]
	if len(from) == 0 {
		c.complete(m)
		return
	}
	if c.config.Push {
		m.preparing = len(m.template.Legs)
		m.tags = make([][]byte, m.preparing)
	}
	for i := range m.template.Legs {
		t := &m.template.Legs[i]
		l := c.addLeg(m, t.Dst)
		copies := c.copies(t, c.sumsLeg(m.sums, i), source.Ranks[t.Src].Checksums, c.sumsOff(t.Dst), from, to)
		if c.config.Push { // each source has a tag of its own, which lets it write its part alone
			l.part = i
			c.act(Expect{Transfer: l.transfer, Rank: t.Dst, Ranges: landing(copies)})
			continue
		}
		c.act(StartPull{
			Transfer: l.transfer, Rank: t.Dst, Peer: source.Ranks[t.Src].Transport,
			Handoff: source.Export.Handoff, Capability: source.Export.Capability, Copies: copies,
		})
	}
}

// landing is where copies arrive.
func landing(copies []layout.Copy) []Range {
	var ranges []Range
	for _, c := range copies {
		if last := len(ranges) - 1; last >= 0 && ranges[last].Off+ranges[last].Len == c.Dst {
			ranges[last].Len += c.Len
			continue
		}
		ranges = append(ranges, Range{Off: c.Dst, Len: c.Len})
	}
	return ranges
}

func (c *Core) addLeg(m *importing, rank int) *leg {
	l := c.newLeg(leg{rank: rank, imported: m})
	m.legs = append(m.legs, l)
	return l
}

// expected collects the legs' tags; the source may push when it has all of them.
func (c *Core) expected(e Expected) {
	l := c.transfers[e.Transfer]
	if l == nil || l.imported == nil {
		return
	}
	m := l.imported
	if e.Err != nil { // there will be no other word of it, also when the import was dropped meanwhile
		c.settled(Settled{Transfer: e.Transfer, Err: e.Err, Safe: true})
		return
	}
	if m.pin != nil {
		return
	}
	if m.preparing == 0 || m.tags[l.part] != nil {
		return
	}
	m.tags[l.part] = e.Tag
	if m.preparing--; m.preparing > 0 {
		return
	}
	blocks := m.table.Blocks()[m.reused:len(m.message.Source.Export.Blocks)]
	c.act(Send{&wire.KVTransferReady{
		ID: m.id(), CachedBlocks: m.reused, Blocks: slices.Clone(blocks), Tag: packTags(m.tags),
	}})
}

// importSettled aggregates the ranks: an import is complete when all are done, and fails with the first
// that does.
func (c *Core) importSettled(l *leg, e Settled) {
	m := l.imported
	if e.Err == nil || e.Safe {
		m.legs = slices.DeleteFunc(m.legs, func(o *leg) bool { return o == l })
	}
	if m.pin != nil {
		c.leaveQuarantine(m)
		return
	}
	m.bytes += max(e.Bytes, 0)
	switch {
	case e.Err != nil:
		safe := c.drop(m)
		c.fail(m.id(), wire.CodeUnavailable, safe, "moving its KV from %s failed: %v", m.message.Source.Engine, e.Err)
	case len(m.legs) == 0:
		c.verifyArrived(m)
	}
}

// complete admits an import whose KV is in place. The source can be released now, however long the
// scheduler takes to find room.
func (c *Core) complete(m *importing) {
	c.unmove(m)
	if err := c.verify(m.table); err != nil {
		m.table.Close()
		c.retry = true
		c.fail(m.id(), wire.CodeUnavailable, true, "its KV cannot be used: %v", err)
		return
	}
	m.table.Commit(m.tokens[m.table.Cached():])
	moved := len(m.message.Source.Export.Blocks) - m.reused
	c.stats.Imported++
	c.stats.BlocksMoved += uint64(moved)
	c.stats.BlocksReused += uint64(m.reused)
	c.stats.BytesMoved += uint64(m.bytes)
	c.act(Send{&wire.KVReadDone{ID: m.id()}})
	c.act(Admit{Message: m.message, Table: m.table, Arrived: m.arrived, Stats: wire.Stats{
		Transfer: m.moved.Sub(m.began).Seconds(), Handoff: c.now.Sub(m.arrived).Seconds(),
		BlocksMoved: moved, BlocksReused: m.reused, BytesMoved: m.bytes,
	}})
	c.retry = true
}

func (c *Core) unmove(m *importing) {
	c.moving = slices.DeleteFunc(c.moving, func(o *importing) bool { return o == m })
}

// drop gives up an import that is in no queue any more, and reports whether the source is safe from it.
// Blocks that a transfer may still write, or a verification read, go into quarantine.
func (c *Core) drop(m *importing) (sourceSafe bool) {
	if m.table == nil {
		return true
	}
	c.unmove(m)
	c.retry = true
	if len(m.legs) == 0 {
		m.table.Close()
		return true
	}
	for _, l := range m.legs {
		if !l.unsafe && !m.verifying {
			c.act(Cancel{l.transfer})
		}
	}
	m.pin = m.table.Pin(len(m.table.Blocks()))
	m.table.Close()
	// A source that pushes knows by itself when its blocks are safe; one that is read must be told.
	m.owes = !c.config.Push && !m.verifying
	c.quarantined = append(c.quarantined, m)
	c.kept = append(c.kept, Quarantine{ID: m.id(), Blocks: len(m.pin.Blocks())})
	return !m.owes
}

func (c *Core) leaveQuarantine(m *importing) {
	if len(m.legs) > 0 {
		return
	}
	m.pin.Release()
	c.quarantined = slices.DeleteFunc(c.quarantined, func(o *importing) bool { return o == m })
	c.retry = true
	// The other side knows requests, not their attempts: a later one that still reads speaks for both.
	if m.owes && !m.silent && !c.live(m.id()) {
		c.act(Send{&wire.KVReadDone{ID: m.id()}})
	}
}

func (c *Core) abortImport(id uint64) {
	same := func(m *importing) bool { return m.id() == id }
	if i := slices.IndexFunc(c.queue, same); i >= 0 {
		c.queue = slices.Delete(c.queue, i, i+1)
		c.act(Send{&wire.RequestAborted{ID: id, SourceSafe: true}})
		c.retry = true
		return
	}
	if i := slices.IndexFunc(c.moving, same); i >= 0 {
		safe := c.drop(c.moving[i])
		c.act(Send{&wire.RequestAborted{ID: id, SourceSafe: safe}})
	}
}

func (c *Core) pollImports() {
	for _, m := range slices.Clone(c.moving) {
		if !m.verifying && c.now.Sub(m.began) >= c.config.Timeout {
			safe := c.drop(m)
			c.fail(m.id(), wire.CodeUnavailable, safe, "its KV did not arrive from %s within %v",
				m.message.Source.Engine, c.config.Timeout)
		}
	}
	for _, m := range c.quarantined {
		for _, l := range m.legs {
			if l.unsafe {
				c.act(Recheck{l.transfer})
			}
		}
	}
}
