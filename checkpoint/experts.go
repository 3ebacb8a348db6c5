package checkpoint

import (
	"fmt"
	"math"
	"slices"

	"baton/tensor"
)

// expertNames is how a format calls the tensors of a sparse layer: those of one expert, with its number
// put in, or one tensor for all experts, [experts, rows, cols]. An empty name means that the format has
// no such tensor.
type expertNames struct {
	router                             string
	gate, up, down                     string
	allGate, allUp, allGateUp, allDown string

	bias   string // of the router, added for the choice
	shared string // what the names of the MLP of all tokens start with
}

func (e *Experts) check() error {
	if e.Count == 0 && e.Layers == nil {
		return nil
	}
	for _, f := range []struct {
		what       string
		value, max int
	}{
		{"number of experts", e.Count, maxExperts},
		{"number of experts per token", e.TopK, e.Count},
		{"intermediate size of an expert", e.Intermediate, maxWidth},
	} {
		if f.value < 1 || f.value > f.max {
			return malformed(f.what, "is %d; it must lie in 1 to %d", f.value, f.max)
		}
	}
	if e.Shared > maxWidth {
		return malformed("width of the shared experts", "is %d; it must be at most %d", e.Shared, maxWidth)
	}
	if e.Scale != 0 && !(e.Scale > 0 && e.Scale < math.MaxFloat32) {
		return malformed("routed scaling factor", "is %g; it must be a positive number", e.Scale)
	}
	return e.checkGroups()
}

// checkGroups makes sure that a token finds its experts in the groups it is limited to. Groups are compared by
// their two best.
func (e *Experts) checkGroups() error {
	const field = "number of expert groups"
	switch {
	case e.Groups == 0:
	case e.Count%e.Groups != 0:
		return malformed(field, "is %d, which does not divide the %d experts", e.Groups, e.Count)
	case e.TopGroups < 1 || e.TopGroups > e.Groups:
		return malformed("number of expert groups per token", "is %d; it must lie in 1 to %d", e.TopGroups, e.Groups)
	case e.TopGroups < e.Groups && e.Count/e.Groups < 2:
		return malformed(field, "is %d for %d experts; a group must have two at least", e.Groups, e.Count)
	case e.TopK > e.TopGroups*(e.Count/e.Groups):
		return malformed("number of experts per token", "is %d; %d groups of %d have fewer", e.TopK, e.TopGroups, e.Count/e.Groups)
	}
	return nil
}

// sparseLayers asks for each layer whether it has experts. A number of layers that Spec.check will refuse
// gives none.
func sparseLayers(layers int, sparse func(layer int) bool) []bool {
	out := make([]bool, min(max(layers, 0), maxLayers))
	for i := range out {
		out[i] = sparse(i)
	}
	return out
}

// experts reads what config.json says of them: every decoder_sparse_step-th layer has experts, but for
// those in mlp_only_layers.
func (h *hfConfig) experts() (Experts, error) {
	e := Experts{TopK: h.NumExpertsPerTok, Intermediate: h.MoEIntermediateSize, Normalize: h.NormTopKProb != nil && *h.NormTopKProb}
	for _, n := range []*int{h.NumLocalExperts, h.NumExperts} {
		if n != nil {
			e.Count = *n
		}
	}
	step := 1
	if h.DecoderSparseStep != nil {
		step = *h.DecoderSparseStep
	}
	if step < 1 {
		return e, malformed("decoder_sparse_step", "is %d; it must be at least 1", step)
	}
	e.Layers = sparseLayers(h.NumHiddenLayers, func(i int) bool {
		return (i+1)%step == 0 && !slices.Contains(h.MLPOnlyLayers, i)
	})
	return e, nil
}

// experts reads what the metadata says of them. It does not say which layers have experts: those that
// have a router do. llama.cpp divides by the sum of a token's weights without being told to.
func (m *ggufMetadata) experts(layers int) Experts {
	e := Experts{
		Count: m.uniform("expert_count", nil), TopK: m.uniform("expert_used_count", nil),
		Intermediate: m.uniform("expert_feed_forward_length", nil), Normalize: true,
	}
	if key := m.prefix + "expert_weights_norm"; m.g.Has(key) {
		norm, err := m.g.Bool(key)
		m.keep(err)
		e.Normalize = norm
	}
	e.Layers = sparseLayers(layers, func(i int) bool {
		_, ok := m.g.Tensor(fmt.Sprintf(ggufNames.layer, i) + ggufNames.experts.router + ".weight")
		return ok
	})
	return e
}

// experts finds the experts of one layer, however the file keeps them: each projection of all of them in
// one tensor (GGUF), the same with gate above up (how transformers 5 holds them in memory), or one by one
// (how it saves them).
func (l *loader) experts(s *Spec, n expertNames, at func(string) string) []Expert {
	count, width, hidden := s.Experts.Count, s.Experts.Intermediate, s.HiddenSize
	out := make([]Expert, count)
	_, gateUp := l.source.Tensor(at(n.allGateUp))
	switch {
	case n.allGate != "":
		gate, up := l.stack(at(n.allGate), count, width, hidden), l.stack(at(n.allUp), count, width, hidden)
		down := l.stack(at(n.allDown), count, hidden, width)
		for i := range out {
			out[i] = Expert{slab(gate, i, width), slab(up, i, width), slab(down, i, hidden)}
		}
	case gateUp:
		both, down := l.stack(at(n.allGateUp), count, 2*width, hidden), l.stack(at(n.allDown), count, hidden, width)
		for i := range out {
			out[i] = Expert{slab(both, 2*i, width), slab(both, 2*i+1, width), slab(down, i, hidden)}
		}
	default:
		one := func(name string, i, rows, cols int) tensor.Tensor {
			return l.matrix(at(fmt.Sprintf(name, i)), rows, cols)
		}
		for i := 0; i < count && l.err == nil; i++ {
			out[i] = Expert{one(n.gate, i, width, hidden), one(n.up, i, width, hidden), one(n.down, i, hidden, width)}
			l.sameTypes(out[0], out[i])
		}
	}
	return out
}

// stack is a matrix for each of count experts, in one tensor.
func (l *loader) stack(name string, count, rows, cols int) tensor.Tensor {
	return l.multiplied(l.find(name, always, count, rows, cols))
}

// slab is the i-th run of so many rows, as a matrix of its own.
func slab(t tensor.Tensor, i, rows int) tensor.Tensor {
	if t.Data == nil {
		return tensor.Tensor{}
	}
	size := rows * t.DType.RowBytes(t.Cols())
	return tensor.Tensor{
		Name: fmt.Sprintf("%s[%d]", t.Name, i), DType: t.DType, Shape: []int{rows, t.Cols()}, Data: t.Data[i*size : (i+1)*size],
	}
}

// sameTypes refuses an expert whose weights are not of the first one's types.
func (l *loader) sameTypes(first, e Expert) {
	for _, pair := range [][2]tensor.Tensor{{first.Gate, e.Gate}, {first.Up, e.Up}, {first.Down, e.Down}} {
		if l.err == nil && pair[0].DType != pair[1].DType {
			l.err = problemf(tensor.ErrUnsupported, l.path, fmt.Sprintf("tensor %q", pair[1].Name), "is %v where that of expert 0 is %v; all experts of a layer must be alike", pair[1].DType, pair[0].DType)
		}
	}
}
