package checkpoint

import (
	"fmt"

	"baton/layout"
	"baton/tensor"
)

// MaxSegments is into how many parts a row-parallel product is cut at most, whatever the number of ranks:
// so tensor-parallel widths up to this one give the same bits.
const MaxSegments = 8

// Segments is into how many parts a row-parallel product over units (heads, or single columns) of the given
// width is cut: the largest power of two, up to MaxSegments, that gives equal parts of whole units and whole
// quantisation blocks.
func Segments(units, width int, t tensor.DType) int {
	s, block := MaxSegments, t.BlockElements()
	for s > 1 && (units%s != 0 || units/s*width%block != 0) {
		s /= 2
	}
	return s
}

// ShardError says why a model cannot be split as a shard spec wants it.
type ShardError struct {
	Key    string // of the spec: "tp", "ep", ...
	Reason string
}

func (e *ShardError) Error() string { return "cannot split the model: " + e.Key + ": " + e.Reason }

// CheckShard tells whether a shard's ranks can split the model. The error is a *ShardError.
func (c *Checkpoint) CheckShard(s layout.Shard) error {
	refuse := func(key, format string, args ...any) error { return &ShardError{key, fmt.Sprintf(format, args...)} }
	spec := &c.Spec
	if _, err := s.StageLayers(spec.Layers); err != nil {
		return refuse("pp", "%v", err)
	}
	if spec.Heads%s.TP != 0 {
		return refuse("tp", "%d attention heads over %d ranks are %.4g a rank", spec.Heads, s.TP, float64(spec.Heads)/float64(s.TP))
	}
	if spec.KVHeads%s.TP != 0 && s.TP%spec.KVHeads != 0 {
		return refuse("tp", "%d KV heads cannot be split evenly over, or replicated to, %d ranks", spec.KVHeads, s.TP)
	}
	if s.TP > spec.VocabSize {
		return refuse("tp", "a vocabulary of %d over %d ranks", spec.VocabSize, s.TP)
	}
	for i := range c.Weights.Layers {
		l := &c.Weights.Layers[i]
		if n := spec.outputSegments(l); n%s.TP != 0 {
			return refuse("tp", "layer %d: the %d heads of the output projection (%v) are summed in %d parts, which %d ranks cannot share; tp may be up to %d, a power of two",
				i, spec.Heads, l.O.DType, n, s.TP, n)
		}
		if l.Down.Data != nil {
			if n := Segments(spec.Intermediate, 1, l.Down.DType); n%s.TP != 0 {
				return refuse("tp", "layer %d: the MLP's %d columns (%v) are summed in %d parts, which %d ranks cannot share; tp may be up to %d, a power of two",
					i, spec.Intermediate, l.Down.DType, n, s.TP, n)
			}
		}
		if len(l.Experts) > 0 {
			if err := spec.checkExperts(i, l, s, refuse); err != nil {
				return err
			}
		}
	}
	if spec.Experts.Count == 0 && s.EP > 1 {
		return refuse("ep", "%d, but the model has no experts", s.EP)
	}
	return nil
}

// outputSegments is into how many parts attention's output projection is summed.
func (s *Spec) outputSegments(l *Layer) int { return Segments(s.Heads, l.O.Cols()/s.Heads, l.O.DType) }

func (s *Spec) checkExperts(layer int, l *Layer, shard layout.Shard, refuse func(key, format string, args ...any) error) error {
	e, width := &s.Experts, shard.EP*shard.ExpertTP
	if n := Segments(e.Intermediate, 1, l.Experts[0].Down.DType); n%shard.ExpertTP != 0 {
		return refuse("expt_tp", "layer %d: an expert's %d columns (%v) are summed in %d parts, which %d ranks cannot share; expt_tp may be up to %d, a power of two (ep takes any of the rest)",
			layer, e.Intermediate, l.Experts[0].Down.DType, n, shard.ExpertTP, n)
	}
	if e.Shared > 0 {
		if n := Segments(e.Shared, 1, l.Shared.Down.DType); n%shard.TP != 0 {
			return refuse("tp", "layer %d: the shared experts' %d columns (%v) are summed in %d parts, which %d ranks cannot share; tp may be up to %d, a power of two",
				layer, e.Shared, l.Shared.Down.DType, n, shard.TP, n)
		}
	}
	if e.Count%shard.EP != 0 {
		return refuse("ep", "%d experts over %d ranks are %.4g a rank", e.Count, shard.EP, float64(e.Count)/float64(shard.EP))
	}
	if width&(width-1) != 0 {
		return refuse("ep", "the ep·expt_tp = %d·%d = %d ranks that sum up experts must be a power of two", shard.EP, shard.ExpertTP, width)
	}
	if width%shard.TP != 0 && shard.TP%width != 0 {
		return refuse("ep", "the ep·expt_tp = %d·%d = %d ranks that hold the experts must be a part or a multiple of the tp = %d ranks that hold a layer",
			shard.EP, shard.ExpertTP, width, shard.TP)
	}
	return nil
}

// Shard is what a rank needs of the weights: views, not copies. The spec must have passed CheckShard.
func (c *Checkpoint) Shard(p layout.Part) Weights {
	w, s := c.Weights, &c.Spec
	out := Weights{Layers: make([]Layer, 0, p.Layers)}
	if p.First() {
		out.Embed = w.Embed.SliceRows(tensor.Slice(s.VocabSize, p.TP, p.TPRank))
	}
	if p.Last() {
		out.Norm = w.Norm
		out.Head = w.Head.SliceRows(tensor.Slice(s.VocabSize, p.TP, p.TPRank))
	}
	for i := p.Layer; i < p.Layer+p.Layers; i++ {
		out.Layers = append(out.Layers, w.Layers[i].shard(s, p))
	}
	return out
}

// shard cuts a layer: column-parallel matrices and their biases by rows, row-parallel ones by columns. The
// biases of the latter are whole: they are added once, to the sum over ranks.
func (l Layer) shard(s *Spec, p layout.Part) Layer {
	heads := func(n, width int) (from, to int) {
		from, to = n*p.TPRank/p.TP, (n*p.TPRank)/p.TP+max(n/p.TP, 1)
		return from * width, to * width
	}
	q0, q1 := heads(s.Heads, s.HeadDim)
	k0, k1 := heads(s.KVHeads, s.HeadDim)
	l.Q, l.QBias = l.Q.SliceRows(q0, q1), l.QBias.SliceRows(q0, q1)
	l.O = l.O.SliceColumns(heads(s.Heads, l.O.Cols()/s.Heads))
	if s.Latent.Rank > 0 { // one latent is there for all heads, so it is whole on every rank
		first, last := heads(s.Heads, 1)
		l.KUp, l.VUp = l.KUp[first:last], l.VUp[first:last]
	}
	l.K, l.KBias = l.K.SliceRows(k0, k1), l.KBias.SliceRows(k0, k1)
	l.V, l.VBias = l.V.SliceRows(k0, k1), l.VBias.SliceRows(k0, k1)
	from, to := tensor.Slice(s.Intermediate, p.TP, p.TPRank)
	l.Gate, l.GateBias = l.Gate.SliceRows(from, to), l.GateBias.SliceRows(from, to)
	l.Up, l.UpBias = l.Up.SliceRows(from, to), l.UpBias.SliceRows(from, to)
	l.Down = l.Down.SliceColumns(from, to)
	if len(l.Experts) > 0 {
		first, last := tensor.Slice(len(l.Experts), p.EP, p.EPRank)
		from, to := tensor.Slice(s.Experts.Intermediate, p.ExpertTP, p.ExpertTPRank)
		held := make([]Expert, 0, last-first)
		for _, e := range l.Experts[first:last] {
			held = append(held, Expert{e.Gate.SliceRows(from, to), e.Up.SliceRows(from, to), e.Down.SliceColumns(from, to)})
		}
		l.Experts = held
		from, to = tensor.Slice(s.Experts.Shared, p.TP, p.TPRank)
		l.Shared = Expert{l.Shared.Gate.SliceRows(from, to), l.Shared.Up.SliceRows(from, to), l.Shared.Down.SliceColumns(from, to)}
	}
	return l
}
