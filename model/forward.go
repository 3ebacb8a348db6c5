package model

import (
	"fmt"
	"math"

	"baton/checkpoint"
	"baton/compute"
)

// A pass over a pipeline is cut into micro-batches, so that its stages compute at the same time. Each of them
// reads all weights of a stage, so they are worth it only when they are not small.
const (
	microRows    = 32 // at least, of the engine that has most
	microBatches = 4  // a stage, at most
)

// Forward runs this rank's part of one pass. On the first rank, it hands over the logits of the rows in
// batch.Logits, in order: each receives the index into batch.Logits and a slice that is valid only during the
// call. The pass has written the rows' KV on this rank when Forward returns nil. After an error that is not
// from the arguments, the ranks do not agree any more.
func (d *Decoder) Forward(ws *WeightSet, kv compute.KV, batch Batch, each func(i int, logits []float32)) error {
	if err := d.checkBatch(batch); err != nil {
		return err
	}
	n := len(batch.Tokens)
	d.rows = n
	for _, cut := range d.microBatches(n, batch.Lockstep) {
		if err := d.stage(ws, kv, batch.cut(cut, n, batch.Lockstep)); err != nil {
			return err
		}
	}
	for from := 0; from < len(batch.Logits); from += min(maxLogitRows, d.maxTokens) {
		rows := batch.Logits[from:min(from+maxLogitRows, from+d.maxTokens, len(batch.Logits))]
		host, err := d.logits(ws, d.work.x.Slice(0, n), rows)
		if err != nil {
			return err
		}
		for i := range rows {
			if host != nil {
				each(from+i, host[i*d.spec.VocabSize:(i+1)*d.spec.VocabSize])
			}
		}
	}
	// A pass without wanted logits still reports a device fault.
	return d.backend.Read(nil, d.work.x.Slice(0, 0))
}

// State is the residual stream that the latest pass left: the same on all ranks that split the same layers.
func (d *Decoder) State() compute.Mat { return d.work.x.Slice(0, d.rows) }

func (d *Decoder) checkBatch(batch Batch) error {
	n := len(batch.Tokens)
	alone := len(batch.Lockstep) == 0
	if n == 0 && alone || n > d.maxTokens || len(batch.Positions) != n || len(batch.Slots) != n {
		return fmt.Errorf("model: a pass of %d tokens, %d positions, %d slots (at most %d tokens)",
			n, len(batch.Positions), len(batch.Slots), d.maxTokens)
	}
	if own, size := d.ranks.Tokens.place(), d.ranks.Tokens.size(); !alone && (len(batch.Lockstep) != size || batch.Lockstep[own] != n) ||
		alone && size > 1 {
		return fmt.Errorf("model: a pass of %d rows beside those of %d engines that share experts: %v", n, size, batch.Lockstep)
	}
	for i, id := range batch.Tokens {
		if id < 0 || int(id) >= d.spec.VocabSize {
			return fmt.Errorf("model: token %d of a pass is %d, outside the vocabulary of %d", i, id, d.spec.VocabSize)
		}
	}
	for _, row := range batch.Logits {
		if row < 0 || int(row) >= n {
			return fmt.Errorf("model: logits are wanted of row %d of %d", row, n)
		}
	}
	return nil
}

// micro is one of count equal parts of a pass's rows.
type micro struct{ i, count int }

func (m micro) of(n int) (from, to int) { return m.i * n / m.count, (m.i + 1) * n / m.count }

// microBatches cuts a pass. All ranks cut alike, those of engines that compute in lockstep too.
func (d *Decoder) microBatches(n int, lockstep []int) []micro {
	for _, rows := range lockstep {
		n = max(n, rows)
	}
	count := 1
	if stages := d.ranks.Part.Stages; stages > 1 {
		count = min(max(n/microRows, 1), microBatches*stages)
	}
	cuts := make([]micro, count)
	for i := range cuts {
		cuts[i] = micro{i, count}
	}
	return cuts
}

// part is a micro-batch: rows [from, to) of the pass.
type part struct {
	Batch
	from, to int
}

// cut takes a micro-batch out of a pass of n rows.
func (b Batch) cut(m micro, n int, lockstep []int) part {
	from, to := m.of(n)
	p := part{Batch: b, from: from, to: to}
	p.Tokens, p.Positions, p.Slots = b.Tokens[from:to], b.Positions[from:to], b.Slots[from:to]
	if m.count == 1 {
		return p
	}
	p.Sequences = nil
	for _, s := range b.Sequences {
		first, last := max(s.Row, from), min(s.Row+s.Rows, to)
		if first < last {
			p.Sequences = append(p.Sequences, compute.Sequence{
				Row: first - from, Rows: last - first, Position: s.Position + first - s.Row, Blocks: s.Blocks,
			})
		}
	}
	p.Lockstep = make([]int, len(lockstep))
	for i, rows := range lockstep {
		first, last := m.of(rows)
		p.Lockstep[i] = last - first
	}
	return p
}

// stage brings a micro-batch through the layers of this rank's pipeline stage.
func (d *Decoder) stage(ws *WeightSet, kv compute.KV, b part) error {
	r, x := &d.ranks, d.work.x.Slice(b.from, b.to)
	if r.Part.First() {
		d.backend.Embed(x, ws.embed, d.firstID, b.Tokens)
		if err := r.Tensor.allReduce(x); err != nil {
			return err
		}
	} else if err := r.Pipeline.recv(r.Part.Stage-1, x); err != nil {
		return err
	}
	for i := range ws.layers {
		if err := d.layer(&ws.layers[i], i, kv, b, x); err != nil {
			return err
		}
	}
	if r.Part.Last() {
		return nil
	}
	return r.Pipeline.send(r.Part.Stage+1, x)
}

// layer adds one block's attention and MLP, or experts, to the residual stream.
func (d *Decoder) layer(w *layerWeights, layer int, kv compute.KV, batch part, x compute.Mat) error {
	b, h := d.backend, d.work.h.Slice(0, x.Rows)
	b.RMSNorm(h, x, w.inputNorm, d.spec.NormEps)
	attention := d.attention
	if d.spec.Latent.Rank > 0 {
		attention = d.latentAttention
	}
	if err := attention(w, layer, kv, batch, x, h); err != nil {
		return err
	}
	b.RMSNorm(h, x, w.postNorm, d.spec.NormEps)
	if w.router != nil {
		return d.experts(w, x, h, batch.Lockstep)
	}
	return d.denseMLP(w, x, h)
}

// attention adds to x what attention makes of h, which it overwrites.
func (d *Decoder) attention(w *layerWeights, layer int, kv compute.KV, batch part, x, h compute.Mat) error {
	b, s, k, n := d.backend, d.spec, &d.work, x.Rows
	q, key, value, attn := k.q.Slice(0, n), k.k.Slice(0, n), k.v.Slice(0, n), k.attn.Slice(0, n)
	b.MatMul(q, h, w.q, compute.Linear{Bias: w.qBias})
	b.MatMul(key, h, w.k, compute.Linear{Bias: w.kBias})
	b.MatMul(value, h, w.v, compute.Linear{Bias: w.vBias})
	if s.QKNorm {
		b.RMSNorm(q.Heads(d.heads), q.Heads(d.heads), w.qNorm, s.NormEps)
		b.RMSNorm(key.Heads(d.kvHeads), key.Heads(d.kvHeads), w.kNorm, s.NormEps)
	}
	b.RotateHeads(q, s.HeadDim, d.rope, batch.Positions)
	b.RotateHeads(key, s.HeadDim, d.rope, batch.Positions)
	b.StoreKV(kv, layer, key, value, batch.Slots)
	b.Attention(attn, q, kv, layer, batch.Sequences, float32(1/math.Sqrt(float64(s.HeadDim))))
	return d.rowParallel(x, attn, w.o, w.oBias, checkpoint.Segments(s.Heads, s.HeadDim, w.o.DType()), h)
}

// denseMLP adds to x what the MLP makes of h, which it overwrites.
func (d *Decoder) denseMLP(w *layerWeights, x, h compute.Mat) error {
	b, k := d.backend, &d.work
	gate, up := k.gate.Slice(0, x.Rows), k.up.Slice(0, x.Rows)
	b.MatMul(gate, h, w.gate, compute.Linear{Bias: w.gateBias})
	b.MatMul(up, h, w.up, compute.Linear{Bias: w.upBias})
	b.SiLUMul(gate, gate, up)
	return d.rowParallel(x, gate, w.down, w.downBias, checkpoint.Segments(d.spec.Intermediate, 1, w.down.DType()), h)
}

// rowParallel adds a product of which this rank has the columns of src, and of the weight, to x. segments are
// those of the whole product; scratch is a matrix like x that may be overwritten.
func (d *Decoder) rowParallel(x, src compute.Mat, w, bias compute.Weight, segments int, scratch compute.Mat) error {
	tp := d.ranks.Part.TP
	if tp == 1 {
		d.backend.MatMul(x, src, w, compute.Linear{Bias: bias, Residual: true, Segments: segments})
		return nil
	}
	d.backend.MatMul(scratch, src, w, compute.Linear{Segments: segments / tp})
	if err := d.ranks.Tensor.allReduce(scratch); err != nil {
		return err
	}
	d.backend.Add(x, scratch, bias)
	return nil
}

// logits makes those of rows of x at the last stage and brings them to the first rank; they are nil elsewhere.
func (d *Decoder) logits(ws *WeightSet, x compute.Mat, rows []int32) ([]float32, error) {
	n, r, k := len(rows), &d.ranks, &d.work
	whole := k.logits.Slice(0, n)
	if r.Part.Last() {
		last, norm := k.lastRows.Slice(0, n), k.lastNorm.Slice(0, n)
		d.backend.GatherRows(last, x, rows)
		d.backend.RMSNorm(norm, last, ws.norm, d.spec.NormEps)
		out := k.logit.Slice(0, n)
		if r.Part.TP == 1 {
			out = whole
		}
		d.backend.MatMul(out, norm, ws.head, compute.Linear{})
		if err := r.Tensor.gatherColumns(whole, out); err != nil {
			return nil, err
		}
	}
	if r.Part.TPRank > 0 {
		return nil, nil
	}
	switch p := r.Part; {
	case p.Stages == 1:
	case p.Last():
		return nil, r.Pipeline.send(0, whole)
	case p.First():
		if err := r.Pipeline.recv(p.Stages-1, whole); err != nil {
			return nil, err
		}
	default:
		return nil, nil
	}
	host := k.host[:n*d.spec.VocabSize]
	if err := d.backend.Read(host, whole); err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	return host, nil
}
