// Package model assembles a decoder from a checkpoint's Spec and runs it on a compute.Backend. A pass
// is a fixed list of operations for a given shape; the only tensor values that reach the host are the
// logits that the caller asked for.
package model

import (
	"fmt"
	"math"

	"baton/checkpoint"
	"baton/compute"
	"baton/tensor"
)

// WeightSet is one version of a decoder's weights, loaded onto a device. It never changes: an update
// makes another.
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
}

// LoadWeights makes a checkpoint's weights usable by the backend. The checkpoint must stay open.
func LoadWeights(b compute.Backend, w checkpoint.Weights) (*WeightSet, error) {
	l := loader{backend: b}
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
		if len(from.Experts) > 0 {
			l.experts(&set.layers[i], from.Experts)
		}
	}
	return set, l.err
}

// loader keeps the first error, so that a list of loads reads as a list.
type loader struct {
	backend compute.Backend
	err     error
}

func (l *loader) load(t tensor.Tensor) compute.Weight {
	if l.err != nil || t.Data == nil {
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
}

// maxLogitRows bounds the logits kept at a time: with a vocabulary of 150k, 64 rows take 38 MB.
const maxLogitRows = 64

// maxSegments is how many parts a row-parallel product is cut into at most: tensor-parallel widths up to
// this one give the same bits.
const maxSegments = 8

// Decoder runs passes of one architecture on one backend. It is used by one goroutine at a time.
type Decoder struct {
	spec      checkpoint.Spec
	backend   compute.Backend
	rope      compute.Buffer
	maxTokens int
	work      workspace
}

// workspace holds the activations of the largest pass.
type workspace struct {
	buffers                   []compute.Buffer
	x, h, q, k, v, attn       compute.Mat
	gate, up                  compute.Mat
	experts                   expertWorkspace
	lastRows, lastNorm, logit compute.Mat
	host                      []float32
}

// NewDecoder prepares passes of at most maxTokens rows over sequences of at most maxPositions tokens.
func NewDecoder(b compute.Backend, spec checkpoint.Spec, maxTokens, maxPositions int) (*Decoder, error) {
	rope, err := b.Rope(spec.Rope.Frequencies, spec.Rope.Scale, spec.Rope.Interleaved, maxPositions)
	if err != nil {
		return nil, fmt.Errorf("model: rope table: %w", err)
	}
	d := &Decoder{spec: spec, backend: b, rope: rope, maxTokens: maxTokens}
	if err := d.allocate(); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// segments is into how many parts a row-parallel product over units (heads, or single columns) of the
// given width is cut: the largest power of two, up to maxSegments, that gives equal parts of whole units
// and whole quantisation blocks.
func segments(units, width int, t tensor.DType) int {
	s, block := maxSegments, t.BlockElements()
	for s > 1 && (units%s != 0 || units/s*width%block != 0) {
		s /= 2
	}
	return s
}

func (d *Decoder) allocate() error {
	s, w := d.spec, &d.work
	rows := min(maxLogitRows, d.maxTokens)
	for _, m := range append([]area{
		{&w.x, d.maxTokens, s.HiddenSize},
		{&w.h, d.maxTokens, s.HiddenSize},
		{&w.q, d.maxTokens, s.Heads * s.HeadDim},
		{&w.k, d.maxTokens, s.KVHeads * s.HeadDim},
		{&w.v, d.maxTokens, s.KVHeads * s.HeadDim},
		{&w.attn, d.maxTokens, s.Heads * s.HeadDim},
		{&w.lastRows, rows, s.HiddenSize},
		{&w.lastNorm, rows, s.HiddenSize},
		{&w.logit, rows, s.VocabSize},
	}, d.feedForward()...) {
		buf, err := d.backend.Alloc(4 * m.rows * m.cols)
		if err != nil {
			return fmt.Errorf("model: workspace of %d x %d: %w", m.rows, m.cols, err)
		}
		w.buffers = append(w.buffers, buf)
		*m.to = compute.Mat{Buf: buf, Rows: m.rows, Cols: m.cols, Stride: m.cols}
	}
	w.host = make([]float32, rows*s.VocabSize)
	return d.allocateRouting()
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
	for i := range d.spec.Layers {
		dense, sparse = dense || !d.spec.Sparse(i), sparse || d.spec.Sparse(i)
	}
	if dense {
		out = append(out, area{&d.work.gate, d.maxTokens, d.spec.Intermediate}, area{&d.work.up, d.maxTokens, d.spec.Intermediate})
	}
	if sparse {
		out = append(out, d.expertAreas()...)
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

// Forward runs one pass and hands over the logits of the rows in batch.Logits, in order: each receives
// the index into batch.Logits and a slice that is valid only during the call. The pass has written the
// rows' KV when Forward returns nil.
func (d *Decoder) Forward(ws *WeightSet, kv compute.KV, batch Batch, each func(i int, logits []float32)) error {
	n := len(batch.Tokens)
	if n == 0 || n > d.maxTokens || len(batch.Positions) != n || len(batch.Slots) != n {
		return fmt.Errorf("model: a pass of %d tokens, %d positions, %d slots (at most %d tokens)",
			n, len(batch.Positions), len(batch.Slots), d.maxTokens)
	}
	x := d.work.x.Slice(0, n)
	d.backend.Embed(x, ws.embed, 0, batch.Tokens)
	for i := range ws.layers {
		d.layer(&ws.layers[i], i, kv, batch, n)
	}
	for from := 0; from < len(batch.Logits); from += d.work.logit.Rows {
		rows := batch.Logits[from:min(from+d.work.logit.Rows, len(batch.Logits))]
		host, err := d.logits(ws, x, rows)
		if err != nil {
			return err
		}
		for i := range rows {
			each(from+i, host[i*d.spec.VocabSize:(i+1)*d.spec.VocabSize])
		}
	}
	// A pass without wanted logits still reports a device fault.
	return d.backend.Read(nil, x.Slice(0, 0))
}

// layer adds one block's attention and MLP, or experts, to the residual stream.
func (d *Decoder) layer(w *layerWeights, layer int, kv compute.KV, batch Batch, n int) {
	b, s, k := d.backend, d.spec, &d.work
	x, h := k.x.Slice(0, n), k.h.Slice(0, n)
	q, key, value, attn := k.q.Slice(0, n), k.k.Slice(0, n), k.v.Slice(0, n), k.attn.Slice(0, n)

	b.RMSNorm(h, x, w.inputNorm, s.NormEps)
	b.MatMul(q, h, w.q, compute.Linear{Bias: w.qBias})
	b.MatMul(key, h, w.k, compute.Linear{Bias: w.kBias})
	b.MatMul(value, h, w.v, compute.Linear{Bias: w.vBias})
	if s.QKNorm {
		b.RMSNorm(q.Heads(s.Heads), q.Heads(s.Heads), w.qNorm, s.NormEps)
		b.RMSNorm(key.Heads(s.KVHeads), key.Heads(s.KVHeads), w.kNorm, s.NormEps)
	}
	b.RotateHeads(q, s.HeadDim, d.rope, batch.Positions)
	b.RotateHeads(key, s.HeadDim, d.rope, batch.Positions)
	b.StoreKV(kv, layer, key, value, batch.Slots)
	b.Attention(attn, q, kv, layer, batch.Sequences, float32(1/math.Sqrt(float64(s.HeadDim))))
	b.MatMul(x, attn, w.o, compute.Linear{Bias: w.oBias, Residual: true, Segments: segments(s.Heads, s.HeadDim, w.o.DType())})

	b.RMSNorm(h, x, w.postNorm, s.NormEps)
	if w.router != nil {
		d.experts(w, x, h)
		return
	}
	gate, up := k.gate.Slice(0, n), k.up.Slice(0, n)
	b.MatMul(gate, h, w.gate, compute.Linear{Bias: w.gateBias})
	b.MatMul(up, h, w.up, compute.Linear{Bias: w.upBias})
	b.SiLUMul(gate, gate, up)
	b.MatMul(x, gate, w.down, compute.Linear{Bias: w.downBias, Residual: true, Segments: segments(s.Intermediate, 1, w.down.DType())})
}

func (d *Decoder) logits(ws *WeightSet, x compute.Mat, rows []int32) ([]float32, error) {
	n := len(rows)
	last, norm, out := d.work.lastRows.Slice(0, n), d.work.lastNorm.Slice(0, n), d.work.logit.Slice(0, n)
	d.backend.GatherRows(last, x, rows)
	d.backend.RMSNorm(norm, last, ws.norm, d.spec.NormEps)
	d.backend.MatMul(out, norm, ws.head, compute.Linear{})
	host := d.work.host[:n*d.spec.VocabSize]
	if err := d.backend.Read(host, out); err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	return host, nil
}
