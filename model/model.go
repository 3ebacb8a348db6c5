// Package model assembles a decoder from a checkpoint's Spec and runs it on a compute.Backend. A pass
// is a fixed list of operations for a given shape; the only tensor values that reach the host are the
// logits that the caller asked for.
package model

import (
	"fmt"
	"slices"

	"baton/checkpoint"
	"baton/compute"
	"baton/layout"
	"baton/tensor"
)

// WeightSet is one version of a rank's part of the weights, loaded onto its device. It never changes: an
// update makes another.
type WeightSet struct {
	embed, norm, head compute.Weight
	layers            []layerWeights
}

type layerWeights struct {
	inputNorm, postNorm        compute.Weight
	q, k, v, o                 compute.Weight
	qBias, kBias, vBias, oBias compute.Weight // nil when the model has none
	qNorm, kNorm               compute.Weight
	gate, up, down             compute.Weight
	gateBias, upBias, downBias compute.Weight

	router  compute.Weight // nil in a layer with an MLP
	experts struct{ gate, up, down compute.Experts }

	latent     latentWeights
	routerBias compute.Weight
	shared     sharedWeights
}

// LoadWeights makes a rank's part of a checkpoint's weights usable by the backend. The checkpoint must stay
// open and must have passed CheckShard. What is copied lives as long as the backend.
func LoadWeights(b compute.Backend, ck *checkpoint.Checkpoint, part layout.Part) (*WeightSet, error) {
	l, w := loader{backend: b, part: part, forget: ck.Forget}, ck.Shard(part)
	set := &WeightSet{
		embed:  l.load(w.Embed),
		norm:   l.load(w.Norm),
		head:   l.load(w.Head),
		layers: make([]layerWeights, len(w.Layers)),
	}
	for i, from := range w.Layers {
		set.layers[i] = layerWeights{
			inputNorm: l.load(from.InputNorm), postNorm: l.load(from.PostNorm),
			q: l.load(from.Q), k: l.load(from.K), v: l.load(from.V), o: l.load(from.O),
			qBias: l.load(from.QBias), kBias: l.load(from.KBias), vBias: l.load(from.VBias), oBias: l.load(from.OBias),
			qNorm: l.load(from.QNorm), kNorm: l.load(from.KNorm),
			gate: l.load(from.Gate), up: l.load(from.Up), down: l.load(from.Down),
			gateBias: l.load(from.GateBias), upBias: l.load(from.UpBias), downBias: l.load(from.DownBias),
			router: l.load(from.Router),
		}
		l.latent(&set.layers[i], &from)
		if len(from.Experts) > 0 {
			l.experts(&set.layers[i], from.Experts)
		}
	}
	return set, l.err
}

// loader keeps the first error, so that a list of loads reads as a list.
type loader struct {
	backend compute.Backend
	part    layout.Part
	forget  func(tensor.Tensor)
	err     error
}

func (l *loader) load(t tensor.Tensor) compute.Weight {
	if l.err != nil || t.Data == nil {
		return nil
	}
	t = l.whole([]tensor.Tensor{t})[0]
	if l.err != nil {
		return nil
	}
	w, err := l.backend.Load(t)
	if err != nil {
		l.err = fmt.Errorf("model: load %s: %w", t.Name, err)
		return nil
	}
	return w
}

// Batch is what one pass computes: rows of tokens that belong to sequences.
type Batch struct {
	Tokens    []int32            // one a row
	Positions []int32            // of each row in its own sequence
	Slots     []int32            // where each row's KV goes: block*BlockSize + offset
	Sequences []compute.Sequence // which rows belong together, and their block tables
	Logits    []int32            // rows whose logits are wanted, in the order they are delivered
	// Lockstep is how many rows each engine computes that shares experts with this one, in the order of
	// Ranks.Tokens; nil where none does.
	Lockstep []int
}

// maxLogitRows bounds the logits kept at a time: with a vocabulary of 150k, 64 rows take 38 MB.
const maxLogitRows = 64

// Decoder runs a rank's part of passes of one architecture on one backend. It is used by one goroutine at a
// time, and all ranks make the same passes.
type Decoder struct {
	spec      checkpoint.Spec
	ranks     Ranks
	heads     int // of this rank
	kvHeads   int
	mlp       int // columns of the MLP
	vocab     int // ids, from firstID on
	firstID   int32
	backend   compute.Backend
	rope      compute.Buffer
	maxTokens int
	rows      int // of the latest pass
	work      workspace
}

// workspace holds the activations of the largest pass.
type workspace struct {
	buffers                   []compute.Buffer
	x, h, q, k, v, attn       compute.Mat
	gate, up                  compute.Mat
	latent                    latentWorkspace
	experts                   expertWorkspace
	lastRows, lastNorm, logit compute.Mat
	logits                    compute.Mat // of the whole vocabulary
	host                      []float32
}

// NewDecoder prepares passes of at most maxTokens rows over sequences of at most maxPositions tokens.
func NewDecoder(b compute.Backend, spec checkpoint.Spec, ranks Ranks, maxTokens, maxPositions int) (*Decoder, error) {
	rope, err := b.Rope(spec.Rope.Frequencies, spec.Rope.Scale, spec.Rope.Interleaved, maxPositions)
	if err != nil {
		return nil, fmt.Errorf("model: rope table: %w", err)
	}
	p := ranks.Part
	from, to := tensor.Slice(spec.VocabSize, p.TP, p.TPRank)
	first, last := tensor.Slice(spec.Intermediate, p.TP, p.TPRank)
	d := &Decoder{
		spec: spec, ranks: ranks, backend: b, rope: rope, maxTokens: maxTokens,
		heads: spec.Heads / p.TP, kvHeads: max(spec.KVHeads/p.TP, 1), mlp: last - first, vocab: to - from, firstID: int32(from),
	}
	if err := d.allocate(); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

func (d *Decoder) allocate() error {
	s, w := d.spec, &d.work
	rows := min(maxLogitRows, d.maxTokens)
	for _, m := range append([]area{
		{&w.x, d.maxTokens, s.HiddenSize},
		{&w.h, d.maxTokens, s.HiddenSize},
	}, slices.Concat(d.attentionAreas(), d.output(rows), d.feedForward())...) {
		buf, err := d.backend.Alloc(4 * m.rows * m.cols)
		if err != nil {
			return fmt.Errorf("model: workspace of %d x %d: %w", m.rows, m.cols, err)
		}
		w.buffers = append(w.buffers, buf)
		*m.to = compute.Mat{Buf: buf, Rows: m.rows, Cols: m.cols, Stride: m.cols}
	}
	if w.logits.Buf != nil {
		w.host = make([]float32, rows*s.VocabSize)
	}
	return d.allocateRouting()
}

// output lists what it takes to make logits: those of the vocabulary that the last stage's ranks have, and all
// of it where they come together.
func (d *Decoder) output(rows int) (out []area) {
	w, p := &d.work, d.ranks.Part
	if p.Last() {
		out = append(out, area{&w.lastRows, rows, d.spec.HiddenSize}, area{&w.lastNorm, rows, d.spec.HiddenSize}, area{&w.logit, rows, d.vocab})
	}
	if p.TPRank == 0 && (p.First() || p.Last()) {
		out = append(out, area{&w.logits, rows, d.spec.VocabSize})
	}
	return out
}

// area is a matrix of the workspace.
type area struct {
	to         *compute.Mat
	rows, cols int
}

// feedForward lists what the layers need between attention and attention: an MLP's activations if some
// layer has one, experts' if some layer has them.
func (d *Decoder) feedForward() []area {
	var out []area
	dense, sparse := false, false
	p := d.ranks.Part
	for i := p.Layer; i < p.Layer+p.Layers; i++ {
		dense, sparse = dense || !d.spec.Sparse(i), sparse || d.spec.Sparse(i)
	}
	if dense {
		out = append(out, area{&d.work.gate, d.maxTokens, d.mlp}, area{&d.work.up, d.maxTokens, d.mlp})
	}
	if sparse {
		out = slices.Concat(out, d.expertAreas(), d.sharedAreas())
	}
	return out
}

// Close frees the workspace; the backend stays open.
func (d *Decoder) Close() {
	for _, b := range d.work.buffers {
		d.backend.Free(b)
	}
	d.work = workspace{}
	if d.rope != nil {
		d.backend.Free(d.rope)
		d.rope = nil
	}
}

// Spec is the architecture the decoder runs.
func (d *Decoder) Spec() checkpoint.Spec { return d.spec }
