package model

import (
	"fmt"

	"baton/checkpoint"
	"baton/compute"
	"baton/tensor"
)

// latentWeights are those of multi-head latent attention, beside q and o. kUp and vUp have a matrix for each of
// this rank's heads; the others are whole on every rank.
type latentWeights struct {
	qDown, qDownBias, qDownNorm    compute.Weight // nil where queries come from the hidden state
	kvDown, kvDownBias, kvDownNorm compute.Weight
	kUp, vUp                       compute.Experts
}

// latentWorkspace holds the activations of latent attention, beside q, k (what the cache keeps) and attn.
type latentWorkspace struct {
	queries compute.Mat // [tokens, queryRank]; empty where queries come from the hidden state
	folded  compute.Mat // queries of the cache's width: [tokens, heads*(rank+rope)]
	mixed   compute.Mat // latents, mixed by attention: [tokens, heads*rank]
}

// sharedWeights are those of the MLP that every token of a sparse layer goes through; nil without one.
type sharedWeights struct{ gate, up, down compute.Weight }

// latent loads what a layer of DeepSeek's has beside others.
func (l *loader) latent(to *layerWeights, from *checkpoint.Layer) {
	to.routerBias = l.load(from.RouterBias)
	to.shared = sharedWeights{l.load(from.Shared.Gate), l.load(from.Shared.Up), l.load(from.Shared.Down)}
	to.latent = latentWeights{
		qDown: l.load(from.QDown), qDownBias: l.load(from.QDownBias), qDownNorm: l.load(from.QDownNorm),
		kvDown: l.load(from.KVDown), kvDownBias: l.load(from.KVDownBias), kvDownNorm: l.load(from.KVDownNorm),
		kUp: l.loadHeads(from.KUp), vUp: l.loadHeads(from.VUp),
	}
}

// loadHeads loads the matrices of this rank's heads; there are none without latent attention.
func (l *loader) loadHeads(ts []tensor.Tensor) compute.Experts {
	if l.err != nil || len(ts) == 0 {
		return nil
	}
	w, err := l.backend.LoadExperts(0, ts)
	if err != nil {
		l.err = fmt.Errorf("model: load heads such as %s: %w", ts[0].Name, err)
		return nil
	}
	return w
}

// attentionAreas lists the matrices that attention needs of the workspace.
func (d *Decoder) attentionAreas() []area {
	s, w, m := d.spec, &d.work, d.spec.Latent
	areas := []area{{&w.q, d.maxTokens, d.heads * s.HeadDim}}
	if m.Rank == 0 {
		return append(areas,
			area{&w.k, d.maxTokens, d.kvHeads * s.HeadDim},
			area{&w.v, d.maxTokens, d.kvHeads * s.HeadDim},
			area{&w.attn, d.maxTokens, d.heads * s.HeadDim})
	}
	if m.QueryRank > 0 {
		areas = append(areas, area{&w.latent.queries, d.maxTokens, m.QueryRank})
	}
	return append(areas,
		area{&w.k, d.maxTokens, m.Rank + m.Rope},
		area{&w.latent.folded, d.maxTokens, d.heads * (m.Rank + m.Rope)},
		area{&w.latent.mixed, d.maxTokens, d.heads * m.Rank},
		area{&w.attn, d.maxTokens, d.heads * m.Value})
}

// latentAttention adds to x what latent attention makes of h, which it overwrites.
//
// A head's key is kUp × latent, and then the rotated part that all heads share; its score with a query is
// query · (kUp × latent) = (query × kUp) · latent. So queries are brought to the cache's width, attention runs
// over latents as they are cached, as if they were both keys and values of one head, and what it mixed becomes
// the head's result by vUp. Nothing is made of the cache's tokens again, and prompts take the same way as
// single tokens: that keeps the bits of a row from depending on how a prompt was cut.
func (d *Decoder) latentAttention(w *layerWeights, layer int, kv compute.KV, batch part, x, h compute.Mat) error {
	b, k, m, n := d.backend, &d.work, d.spec.Latent, x.Rows
	q, key, folded, mixed, attn := k.q.Slice(0, n), k.k.Slice(0, n), k.latent.folded.Slice(0, n), k.latent.mixed.Slice(0, n), k.attn.Slice(0, n)

	from := h
	if w.latent.qDown != nil {
		from = k.latent.queries.Slice(0, n)
		b.MatMul(from, h, w.latent.qDown, compute.Linear{Bias: w.latent.qDownBias})
		b.RMSNorm(from, from, w.latent.qDownNorm, m.NormEps)
	}
	b.MatMul(q, from, w.q, compute.Linear{})
	b.MatMul(key, h, w.latent.kvDown, compute.Linear{Bias: w.latent.kvDownBias})
	latent := key.Columns(0, m.Rank)
	b.RMSNorm(latent, latent, w.latent.kvDownNorm, m.NormEps)
	b.RotateHeads(key.Columns(m.Rank, m.Rank+m.Rope), m.Rope, d.rope, batch.Positions)
	b.StoreKV(kv, layer, key, compute.Mat{}, batch.Slots)

	heads, wide := q.Heads(d.heads), folded.Heads(d.heads)
	turned := heads.Columns(m.Nope, m.Nope+m.Rope)
	b.RotateHeads(turned, m.Rope, d.rope, batch.Positions)
	b.MatMulHeads(wide.Columns(0, m.Rank), heads.Columns(0, m.Nope), w.latent.kUp, true)
	b.Copy(wide.Columns(m.Rank, m.Rank+m.Rope), turned)
	b.Attention(mixed, folded, kv, layer, batch.Sequences, m.Scale)
	b.MatMulHeads(attn.Heads(d.heads), mixed.Heads(d.heads), w.latent.vUp, false)
	return d.rowParallel(x, attn, w.o, w.oBias, checkpoint.Segments(d.spec.Heads, m.Value, w.o.DType()), h)
}

// shared adds to x what the MLP of all tokens makes of h, which it overwrites.
func (d *Decoder) shared(w *layerWeights, x, h compute.Mat) error {
	if w.shared.gate == nil {
		return nil
	}
	b, k := d.backend, &d.work.experts
	gate, up := k.sharedGate.Slice(0, x.Rows), k.sharedUp.Slice(0, x.Rows)
	b.MatMul(gate, h, w.shared.gate, compute.Linear{})
	b.MatMul(up, h, w.shared.up, compute.Linear{})
	b.SiLUMul(gate, gate, up)
	return d.rowParallel(x, gate, w.shared.down, nil, checkpoint.Segments(d.spec.Experts.Shared, 1, w.shared.down.DType()), h)
}

// sharedAreas lists the matrices that the MLP of all tokens needs of the workspace.
func (d *Decoder) sharedAreas() []area {
	width := d.spec.Experts.Shared
	if width == 0 {
		return nil
	}
	from, to := tensor.Slice(width, d.ranks.Part.TP, d.ranks.Part.TPRank)
	w := &d.work.experts
	return []area{{&w.sharedGate, d.maxTokens, to - from}, {&w.sharedUp, d.maxTokens, to - from}}
}

// router is how a sparse layer's logits become experts.
func (d *Decoder) router(w *layerWeights) compute.Router {
	e := d.spec.Experts
	return compute.Router{
		Sigmoid: e.Sigmoid, Bias: w.routerBias, Groups: e.Groups, TopGroups: e.TopGroups, Normalize: e.Normalize, Scale: e.Scale,
	}
}
