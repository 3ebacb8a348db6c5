package model

import (
	"fmt"

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
	logits         compute.Mat    // [tokens, experts]
	rows, gate, up compute.Mat    // dispatched: [tokens*topK, hidden], [tokens*topK, intermediate] twice
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
	if l.err != nil {
		return nil
	}
	w, err := l.backend.LoadExperts(0, ts)
	if err != nil {
		l.err = fmt.Errorf("model: load experts such as %s: %w", ts[0].Name, err)
		return nil
	}
	return w
}

// expertAreas lists the matrices of the expert workspace.
func (d *Decoder) expertAreas() []area {
	e, w := d.spec.Experts, &d.work.experts
	tokens := min(d.maxTokens, maxExpertTokens)
	return []area{
		{&w.logits, tokens, e.Count},
		{&w.rows, tokens * e.TopK, d.spec.HiddenSize},
		{&w.gate, tokens * e.TopK, e.Intermediate},
		{&w.up, tokens * e.TopK, e.Intermediate},
	}
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

// experts adds to each row of x what the experts that the router chooses for that row of h make of it.
func (d *Decoder) experts(w *layerWeights, x, h compute.Mat) {
	b, s, k := d.backend, d.spec, d.work.experts
	for from := 0; from < h.Rows; from += k.logits.Rows {
		to := min(from+k.logits.Rows, h.Rows)
		n := to - from
		logits := k.logits.Slice(0, n)
		rows, gate, up := k.rows.Slice(0, n*s.Experts.TopK), k.gate.Slice(0, n*s.Experts.TopK), k.up.Slice(0, n*s.Experts.TopK)

		b.MatMul(logits, h.Slice(from, to), w.router, compute.Linear{})
		b.Route(k.routing, logits, compute.Router{Normalize: s.Experts.Normalize})
		b.Dispatch(rows, h.Slice(from, to), k.routing)
		b.MatMulExperts(gate, rows, w.experts.gate, k.routing, compute.Linear{})
		b.MatMulExperts(up, rows, w.experts.up, k.routing, compute.Linear{})
		b.SiLUMul(gate, gate, up)
		b.MatMulExperts(rows, gate, w.experts.down, k.routing, compute.Linear{Segments: segments(s.Experts.Intermediate, 1, w.experts.down.DType())})
		b.Combine(x.Slice(from, to), rows, k.routing, 0)
	}
}
