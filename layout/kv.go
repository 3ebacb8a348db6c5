package layout

import (
	"fmt"
	"math"
	"slices"
)

// Geometry is the KV cache of a whole model. A rank's block is [layer][plane][head][token][dim] over the
// layers and heads that it holds, one contiguous run of bytes.
type Geometry struct {
	BlockSize    int // tokens a block
	Layers       int
	KVHeads      int
	HeadDim      int
	Planes       int // 2: keys and values; 1: a latent cache
	ElementBytes int
}

func (g Geometry) validate() error {
	bytes := int64(1)
	for _, f := range [...]struct {
		name  string
		value int
	}{
		{"BlockSize", g.BlockSize}, {"Layers", g.Layers}, {"KVHeads", g.KVHeads}, {"HeadDim", g.HeadDim},
		{"Planes", g.Planes}, {"ElementBytes", g.ElementBytes},
	} {
		if f.value < 1 {
			return fmt.Errorf("layout: %s is %d; it must be at least 1", f.name, f.value)
		}
		if int64(f.value) > math.MaxInt32/bytes {
			return fmt.Errorf("layout: a block of %+v is larger than %d bytes", g, math.MaxInt32)
		}
		bytes *= int64(f.value)
	}
	return nil
}

// Holding is the part of every block that one rank holds: Layers from Layer on, Heads from Head on.
// Ranks with equal holdings are replicas.
type Holding struct {
	Layer, Layers int
	Head, Heads   int
}

// Whole is what the only rank of an engine holds.
func (g Geometry) Whole() Holding { return Holding{Layers: g.Layers, Heads: g.KVHeads} }

// Holdings tells what the ranks of an engine hold, in the order of Shard.Group. stages are the layers of
// each pipeline stage and add up to all of them. With more ranks than heads a head is replicated.
func (g Geometry) Holdings(tp int, stages []int) ([]Holding, error) {
	if err := g.validate(); err != nil {
		return nil, err
	}
	if tp < 1 || g.KVHeads%tp != 0 && tp%g.KVHeads != 0 {
		return nil, fmt.Errorf("layout: %d KV heads cannot be split evenly over, or replicated to, tp = %d ranks", g.KVHeads, tp)
	}
	heads := max(g.KVHeads/tp, 1)
	var holdings []Holding
	layer := 0
	for p, n := range stages {
		if n < 1 {
			return nil, fmt.Errorf("layout: pipeline stage %d has %d layers; it needs at least 1", p, n)
		}
		for t := range tp {
			holdings = append(holdings, Holding{Layer: layer, Layers: n, Head: t * g.KVHeads / tp, Heads: heads})
		}
		layer += n
	}
	if layer != g.Layers {
		return nil, fmt.Errorf("layout: the stages %v hold %d layers in all; the model has %d", stages, layer, g.Layers)
	}
	return holdings, nil
}

// EvenStages splits layers over pp stages, as evenly as they go.
func EvenStages(layers, pp int) ([]int, error) {
	if pp < 1 || pp > layers {
		return nil, fmt.Errorf("layout: pp = %d; it must be in [1, %d], the number of layers", pp, layers)
	}
	stages := make([]int, pp)
	for p := range stages {
		stages[p] = (p+1)*layers/pp - p*layers/pp
	}
	return stages, nil
}

// BlockBytes is the size of one block on a rank.
func (g Geometry) BlockBytes(h Holding) int64 {
	return int64(h.Layers) * int64(g.Planes) * int64(h.Heads) * g.headBytes()
}

// Checksums is the geometry of the blocks' checksums: 64 bits for each tile of so many tokens of a head, which is
// contiguous, in the order in which the tiles lie in a block. BlockSize must be a multiple of tile. They are
// moved from one layout to another as the blocks are.
func (g Geometry) Checksums(tile int) Geometry {
	return Geometry{BlockSize: g.BlockSize / tile, Layers: g.Layers, KVHeads: g.KVHeads, HeadDim: 1, Planes: g.Planes, ElementBytes: 8}
}

// headBytes is the contiguous run of one head of one plane of one layer.
func (g Geometry) headBytes() int64 {
	return int64(g.BlockSize) * int64(g.HeadDim) * int64(g.ElementBytes)
}

// offset is where a layer's plane's head starts in a rank's block.
func (g Geometry) offset(h Holding, layer, plane, head int) int64 {
	return int64(((layer-h.Layer)*g.Planes+plane)*h.Heads+head-h.Head) * g.headBytes()
}

// Run is one contiguous copy, from an offset in the source's block to one in the destination's.
type Run struct{ Src, Dst, Len int64 }

// Leg is what one source rank gives one destination rank of every block.
type Leg struct {
	Src, Dst           int   // places in the two lists of holdings
	SrcBlock, DstBlock int64 // bytes of a block on either rank
	Runs               []Run
}

// Template says how blocks of one layout become blocks of another. It is compiled once for a pair of
// engines; a request supplies the block lists. Every byte of a destination block is written exactly once.
type Template struct {
	Legs []Leg // by destination, then by source
}

// CoverageError says that the sources do not hold what a destination needs, or hold it twice in parts
// that are not replicas.
type CoverageError struct {
	Dst         int // the destination rank
	Layer, Head int // the first one at fault, counted over the whole model
	Sources     int // how many sources would write it
}

func (e *CoverageError) Error() string {
	return fmt.Sprintf("layout: layer %d, head %d of destination rank %d comes from %d source ranks; it must be exactly one",
		e.Layer, e.Head, e.Dst, e.Sources)
}

// Compile plans the copies from every source rank to every destination rank. Destinations take turns at replicas.
// The error tells an impossible holding or is a *CoverageError.
func Compile(g Geometry, src, dst []Holding) (*Template, error) {
	if err := g.validate(); err != nil {
		return nil, err
	}
	if err := g.check("source", src); err != nil {
		return nil, err
	}
	if err := g.check("destination", dst); err != nil {
		return nil, err
	}
	var distinct []Holding
	replicas := map[Holding][]int{} // source ranks
	for rank, h := range src {
		if replicas[h] == nil {
			distinct = append(distinct, h)
		}
		replicas[h] = append(replicas[h], rank)
	}
	t, readers := &Template{}, map[Holding]int{}
	for to, want := range dst {
		var parts []Holding
		for _, h := range distinct {
			part, ok := intersect(h, want)
			if !ok {
				continue
			}
			from := replicas[h][readers[h]%len(replicas[h])]
			readers[h]++
			parts = append(parts, part)
			t.Legs = append(t.Legs, Leg{
				Src: from, Dst: to, SrcBlock: g.BlockBytes(src[from]), DstBlock: g.BlockBytes(want),
				Runs: g.runs(src[from], want, part),
			})
		}
		if err := covers(to, want, parts); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// Covered tells whether ranks hold the whole cache, no part of it twice but for replicas. From engines of which
// that is true, every holding of the cache can be compiled. The error tells an impossible holding or is a
// *CoverageError, whose destination is the whole.
func (g Geometry) Covered(ranks []Holding) error {
	if err := g.validate(); err != nil {
		return err
	}
	if err := g.check("ranks", ranks); err != nil {
		return err
	}
	distinct, seen := []Holding(nil), map[Holding]bool{}
	for _, h := range ranks {
		if !seen[h] {
			seen[h] = true
			distinct = append(distinct, h)
		}
	}
	return covers(0, g.Whole(), distinct)
}

// check refuses holdings of what the cache has not.
func (g Geometry) check(side string, holdings []Holding) error {
	for rank, h := range holdings {
		if h.Layer < 0 || h.Head < 0 || h.Layers < 1 || h.Heads < 1 ||
			h.Layers > g.Layers-h.Layer || h.Heads > g.KVHeads-h.Head {
			return fmt.Errorf("layout: %s: rank %d holds %+v of a model with %d layers and %d KV heads", side, rank, h, g.Layers, g.KVHeads)
		}
	}
	return nil
}

func intersect(a, b Holding) (Holding, bool) {
	layer, head := max(a.Layer, b.Layer), max(a.Head, b.Head)
	h := Holding{
		Layer: layer, Layers: min(a.Layer+a.Layers, b.Layer+b.Layers) - layer,
		Head: head, Heads: min(a.Head+a.Heads, b.Head+b.Heads) - head,
	}
	return h, h.Layers > 0 && h.Heads > 0
}

// runs lists the copies of part, merging those that touch on both sides.
func (g Geometry) runs(src, dst, part Holding) []Run {
	var runs []Run
	n := int64(part.Heads) * g.headBytes()
	for layer := part.Layer; layer < part.Layer+part.Layers; layer++ {
		for plane := range g.Planes {
			r := Run{Src: g.offset(src, layer, plane, part.Head), Dst: g.offset(dst, layer, plane, part.Head), Len: n}
			if i := len(runs) - 1; i >= 0 && runs[i].Src+runs[i].Len == r.Src && runs[i].Dst+runs[i].Len == r.Dst {
				runs[i].Len += n
				continue
			}
			runs = append(runs, r)
		}
	}
	return runs
}

// covers makes sure that the parts are the whole of what is wanted, and none of it twice.
func covers(rank int, want Holding, parts []Holding) error {
	// Count the parts of every head: each adds one where it begins, and takes it back where it has ended.
	width := want.Heads + 1
	steps := make([]int32, (want.Layers+1)*width)
	for _, p := range parts {
		layer, head := p.Layer-want.Layer, p.Head-want.Head
		steps[layer*width+head]++
		steps[layer*width+head+p.Heads]--
		steps[(layer+p.Layers)*width+head]--
		steps[(layer+p.Layers)*width+head+p.Heads]++
	}
	for layer := range want.Layers {
		n := 0
		for head := range want.Heads {
			at := layer*width + head
			if n += int(steps[at]); n != 1 {
				return &CoverageError{Dst: rank, Layer: want.Layer + layer, Head: want.Head + head, Sources: n}
			}
			steps[at+width] += steps[at]
		}
	}
	return nil
}

// Copy moves Len bytes from offset Src of the source rank's pool to offset Dst of the destination's.
type Copy struct{ Src, Dst, Len int64 }

// Apply appends the copies that bring srcBlocks[i] of the source rank to dstBlocks[i] of the destination
// rank. Copies that touch on both sides are merged: with equal layouts, a run of neighbouring blocks is
// one copy. The lists are equally long and hold no negative id.
func (l *Leg) Apply(copies []Copy, srcBlocks, dstBlocks []int32) []Copy {
	if len(l.Runs) == 0 || len(srcBlocks) == 0 {
		return copies
	}
	copies = slices.Grow(copies, len(srcBlocks)*len(l.Runs))
	first, n := len(copies), len(copies)
	out := copies[:cap(copies)]
	step, even := l.step()
	for i, from := range srcBlocks {
		src, dst := int64(from)*l.SrcBlock, int64(dstBlocks[i])*l.DstBlock
		runs := l.Runs
		// Runs of one block do not touch each other: only the first one may go on where the block before ended.
		if n > first {
			if last, r := &out[n-1], runs[0]; last.Src+last.Len == src+r.Src && last.Dst+last.Len == dst+r.Dst {
				last.Len += r.Len
				runs = runs[1:]
			}
		}
		to := out[n : n+len(runs)]
		n += len(runs)
		switch {
		case len(runs) == 0:
		case even:
			fill(to, Copy{Src: src + runs[0].Src, Dst: dst + runs[0].Dst, Len: runs[0].Len}, step)
		default:
			for j, r := range runs {
				to[j] = Copy{Src: src + r.Src, Dst: dst + r.Dst, Len: r.Len}
			}
		}
	}
	return out[:n]
}

// step is the distance from each run to the next, if all are alike, as they are when only heads are split.
func (l *Leg) step() (step Run, even bool) {
	if len(l.Runs) > 1 {
		step = Run{Src: l.Runs[1].Src - l.Runs[0].Src, Dst: l.Runs[1].Dst - l.Runs[0].Dst, Len: 0}
	}
	for i := 1; i < len(l.Runs); i++ {
		a, b := l.Runs[i-1], l.Runs[i]
		if (Run{Src: b.Src - a.Src, Dst: b.Dst - a.Dst, Len: b.Len - a.Len}) != step {
			return step, false
		}
	}
	return step, true
}

// fill makes a row of copies. It is where the time of a long prompt's handoff goes: three stores a copy.
func fill(to []Copy, c Copy, step Run) {
	for i := range to {
		to[i].Src, to[i].Dst, to[i].Len = c.Src, c.Dst, c.Len
		c.Src += step.Src
		c.Dst += step.Dst
	}
}
