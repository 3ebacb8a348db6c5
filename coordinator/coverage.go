package coordinator

import (
	"errors"
	"fmt"
	"strings"

	"baton/layout"
	"baton/wire"
)

// Bounds of what an engine may claim of its model: the check of its ranks takes memory for every head of every layer.
const (
	maxLayers  = 1 << 10
	maxKVHeads = 1 << 10
	maxRanks   = 1 << 12
)

// uncovered says why the ranks of an engine do not hold the model's KV cache whole, each part of it once but for
// replicas. Engines that do can hand over to each other whatever their layouts: any part that one of them holds is
// then to be found, once, with the other.
func uncovered(m *wire.RegisterRole) string {
	g := layout.Geometry{BlockSize: 1, Layers: m.Geometry.Layers, KVHeads: m.Geometry.KVHeads, HeadDim: 1, Planes: 1, ElementBytes: 1}
	holdings := make([]layout.Holding, len(m.Ranks))
	for i, r := range m.Ranks {
		holdings[i] = layout.Holding{Layer: r.Layer, Layers: r.Layers, Head: r.Head, Heads: r.Heads}
		if r.Layers == 0 {
			holdings[i] = g.Whole()
		}
		if h := holdings[i]; !within(h.Layer, h.Layers, g.Layers) || !within(h.Head, h.Heads, g.KVHeads) {
			return fmt.Sprintf("%s, it says; the model has layers 0-%d and KV heads 0-%d", rankHolds(i, h), g.Layers-1, g.KVHeads-1)
		}
	}
	err := g.Covered(holdings)
	var gap *layout.CoverageError
	switch {
	case err == nil:
		return ""
	case !errors.As(err, &gap):
		return err.Error()
	case gap.Sources == 0:
		return fmt.Sprintf("no rank holds the KV of layer %d, head %d (%s); an engine registers with all ranks of its --shard", gap.Layer, gap.Head, listed(holdings, nil))
	}
	holds := func(h layout.Holding) bool {
		return h.Layer <= gap.Layer && gap.Layer < h.Layer+h.Layers && h.Head <= gap.Head && gap.Head < h.Head+h.Heads
	}
	return fmt.Sprintf("the KV of layer %d, head %d is held by ranks that are not replicas of each other (%s)", gap.Layer, gap.Head, listed(holdings, holds))
}

func within(first, n, all int) bool { return first >= 0 && n >= 1 && n <= all-first }

// listed says what ranks hold: those that only picks, or all.
func listed(holdings []layout.Holding, only func(layout.Holding) bool) string {
	const most = 8
	var list []string
	more := 0
	for i, h := range holdings {
		if only != nil && !only(h) {
			continue
		}
		if len(list) == most {
			more++
			continue
		}
		list = append(list, rankHolds(i, h))
	}
	if more > 0 {
		list = append(list, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(list, "; ")
}

func rankHolds(rank int, h layout.Holding) string {
	return fmt.Sprintf("rank %d holds layers %d-%d, heads %d-%d", rank, h.Layer, h.Layer+h.Layers-1, h.Head, h.Head+h.Heads-1)
}
