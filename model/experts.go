package model

import (
	"fmt"
	"slices"

	"baton/checkpoint"
	"baton/compute"
	"baton/tensor"
)

// maxExpertTokens bounds the tokens whose dispatched rows are kept at a time, topK of them a token. A pass
// over more takes them in turns: that reads the experts' weights again, but with this many tokens the
// multiplications cost far more than that.
const maxExpertTokens = 1024

// expertWorkspace holds the activations of a mixture of experts.
type expertWorkspace struct {
	routing        compute.Buffer // nil when no layer has experts
	tokens         compute.Mat    // [tokens, hidden], of all engines that share the experts; empty for one
	logits         compute.Mat    // [tokens, experts]
	sharedGate     compute.Mat    // [tokens, width] of the MLP of all tokens, as the next
	sharedUp       compute.Mat
	rows, gate, up compute.Mat // dispatched: [tokens*topK, hidden], [tokens*topK, intermediate] twice
}

// experts loads a sparse layer's experts.
func (l *loader) experts(to *layerWeights, from []checkpoint.Expert) {
	gate, up, down := make([]tensor.Tensor, len(from)), make([]tensor.Tensor, len(from)), make([]tensor.Tensor, len(from))
	for i, e := range from {
		gate[i], up[i], down[i] = e.Gate, e.Up, e.Down
	}
	to.experts.gate, to.experts.up, to.experts.down = l.loadExperts(gate), l.loadExperts(up), l.loadExperts(down)
}

func (l *loader) loadExperts(ts []tensor.Tensor) compute.Experts {
	ts = l.whole(ts)
	if l.err != nil {
		return nil
	}
	w, err := l.backend.LoadExperts(l.part.EPRank*len(ts), ts)
	if err != nil {
		l.err = fmt.Errorf("model: load experts such as %s: %w", ts[0].Name, err)
		return nil
	}
	return w
}

// expertAreas lists the matrices of the expert workspace.
func (d *Decoder) expertAreas() []area {
	e, w, p := d.spec.Experts, &d.work.experts, d.ranks.Part
	engines := d.ranks.Tokens.size()
	tokens := d.expertTokens() * engines
	from, to := tensor.Slice(e.Intermediate, p.ExpertTP, p.ExpertTPRank)
	areas := []area{
		{&w.logits, tokens, e.Count},
		{&w.rows, tokens * e.TopK, d.spec.HiddenSize},
		{&w.gate, tokens * e.TopK, to - from},
		{&w.up, tokens * e.TopK, to - from},
	}
	if engines > 1 {
		areas = append(areas, area{&w.tokens, tokens, d.spec.HiddenSize})
	}
	return areas
}

// expertTokens is how many tokens of each engine are computed at a time.
func (d *Decoder) expertTokens() int {
	return min(d.maxTokens, max(maxExpertTokens/d.ranks.Tokens.size(), 1))
}

// allocateRouting completes the expert workspace, if the model needs one.
func (d *Decoder) allocateRouting() error {
	w, e := &d.work, d.spec.Experts
	if w.experts.logits.Buf == nil {
		return nil
	}
	routing, err := d.backend.Routing(w.experts.logits.Rows, e.Count, e.TopK)
	if err != nil {
		return fmt.Errorf("model: routing of %d tokens: %w", w.experts.logits.Rows, err)
	}
	w.experts.routing = routing
	w.buffers = append(w.buffers, routing)
	return nil
}

// experts adds to each row of x what the experts that the router chooses for that row of h make of it. The rows
// of all engines that share the experts are gathered, each rank computes those of its experts, or its slice of
// them, and the results are summed over ranks; each engine takes those of its own rows.
func (d *Decoder) experts(w *layerWeights, x, h compute.Mat, lockstep []int) error {
	b, e, k := d.backend, d.spec.Experts, d.work.experts
	if len(lockstep) == 0 {
		lockstep = []int{h.Rows}
	}
	limit, own, p := d.expertTokens(), d.ranks.Tokens.place(), d.ranks.Part
	for from := 0; from < slices.Max(lockstep); from += limit {
		part := func(rows int) int { return min(max(rows-from, 0), limit) }
		first, n := 0, 0 // of this engine's tokens among all, and those
		for i, rows := range lockstep {
			if i == own {
				first = n
			}
			n += part(rows)
		}
		begin := min(from, h.Rows)
		mine := h.Slice(begin, begin+part(h.Rows))
		tokens, err := d.ranks.Tokens.gatherRows(k.tokens.Slice(0, n), mine)
		if err != nil {
			return err
		}
		logits := k.logits.Slice(0, n)
		rows, gate, up := k.rows.Slice(0, n*e.TopK), k.gate.Slice(0, n*e.TopK), k.up.Slice(0, n*e.TopK)
		b.MatMul(logits, tokens, w.router, compute.Linear{})
		b.Route(k.routing, logits, d.router(w))
		b.Dispatch(rows, tokens, k.routing)
		b.MatMulExperts(gate, rows, w.experts.gate, k.routing, compute.Linear{})
		b.MatMulExperts(up, rows, w.experts.up, k.routing, compute.Linear{})
		b.SiLUMul(gate, gate, up)
		segments := checkpoint.Segments(e.Intermediate, 1, w.experts.down.DType()) / p.ExpertTP
		b.MatMulExperts(rows, gate, w.experts.down, k.routing, compute.Linear{Segments: segments})
		if err := d.ranks.Experts.allReduce(rows); err != nil {
			return err
		}
		b.Combine(x.Slice(begin, begin+mine.Rows), rows, k.routing, first)
	}
	return d.shared(w, x, h)
}
