package engine

import (
	"fmt"

	"baton/handoff"
	"baton/layout"
	"baton/wire"
)

// templates are the copies from and to the layouts of other engines, compiled when one is first met.
type templates struct {
	config CoreConfig
	known  map[string]copyTemplates
}

// copyTemplates is how blocks of one layout become blocks of another; checksums is nil where handoffs are not
// verified.
type copyTemplates struct{ blocks, checksums *layout.Template }

// maxTemplates bounds those that are remembered.
const maxTemplates = 256

// blockBytes is the size of a block on each rank of the engine.
func (t *templates) blockBytes() []int64 {
	sizes := make([]int64, len(t.config.Holdings))
	for rank, h := range t.config.Holdings {
		sizes[rank] = t.config.Geometry.BlockBytes(h)
	}
	return sizes
}

// from leads from another engine's layout to this one's.
func (t *templates) from(peer []wire.RankInfo) (copyTemplates, error) {
	holdings := Holdings(t.config.Geometry, peer)
	return t.compile("from", holdings, holdings, t.config.Holdings)
}

// to leads from this engine's layout to another's.
func (t *templates) to(peer []wire.RankInfo) (copyTemplates, error) {
	holdings := Holdings(t.config.Geometry, peer)
	return t.compile("to", holdings, t.config.Holdings, holdings)
}

func (t *templates) compile(direction string, peer, src, dst []layout.Holding) (copyTemplates, error) {
	key := fmt.Sprint(direction, peer)
	if known, ok := t.known[key]; ok {
		return known, nil
	}
	var c copyTemplates
	var err error
	if c.blocks, err = layout.Compile(t.config.Geometry, src, dst); err != nil {
		return c, err
	}
	if t.config.Verify != "" && t.config.Verify != handoff.VerifyOff {
		if c.checksums, err = layout.Compile(t.config.Geometry.Checksums(t.config.ChecksumTile), src, dst); err != nil {
			return c, err
		}
	}
	if len(t.known) >= maxTemplates {
		clear(t.known)
	}
	t.known[key] = c
	return c, nil
}

// Holdings is what the ranks of a registered engine hold of a geometry.
func Holdings(g layout.Geometry, ranks []wire.RankInfo) []layout.Holding {
	holdings := make([]layout.Holding, len(ranks))
	for i, r := range ranks {
		holdings[i] = layout.Holding{Layer: r.Layer, Layers: r.Layers, Head: r.Head, Heads: r.Heads}
		if r.Layers == 0 {
			holdings[i] = g.Whole()
		}
	}
	return holdings
}
