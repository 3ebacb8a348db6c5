package engine

import (
	"cmp"
	"math"
	"slices"

	"baton/wire"
)

// LogprobsMode says which distribution reported log-probabilities come from.
type LogprobsMode string

// The modes: the model's own distribution, or the one tokens are drawn from (after penalties, masks,
// temperature and truncation).
const (
	LogprobsRaw       LogprobsMode = "raw"
	LogprobsProcessed LogprobsMode = "processed"
)

// sampler turns one row of logits into a token. It keeps scratch memory and no state between calls.
type sampler struct {
	mode     LogprobsMode
	work     []float32 // processed logits
	order    []int32   // candidate ids
	counts   map[int32]int
	inPrompt map[int32]struct{}
}

// draw is what a sampler needs to know of a request.
type draw struct {
	params    *wire.Sampling
	prompt    []int32
	generated []int32
	banned    []int32 // ids that may not be chosen now (before MinTokens)
}

// sample chooses the token that follows prompt and generated. It does not change logits.
func (s *sampler) sample(logits []float32, d draw) Output {
	p := d.params
	processed := s.process(logits, d)
	out := Output{}
	if p.Temperature <= 0 {
		out.Token = argmax(processed)
	} else {
		out.Token = s.pick(processed, p, len(d.prompt)+len(d.generated))
	}
	if p.Logprobs {
		from := logits
		if s.mode == LogprobsProcessed {
			from = processed
		}
		norm := logSumExp(from)
		out.Logprob = from[out.Token] - norm
		out.Top = s.top(from, norm, p.TopLogprobs)
	}
	return out
}

// process applies penalties, bans and temperature. The result aliases logits when there is nothing to do.
func (s *sampler) process(logits []float32, d draw) []float32 {
	p := d.params
	penalised := p.PresencePenalty != 0 || p.FrequencyPenalty != 0 || (p.RepetitionPenalty != 0 && p.RepetitionPenalty != 1)
	scaled := p.Temperature > 0 && p.Temperature != 1
	if !penalised && !scaled && len(d.banned) == 0 && !truncates(p) {
		return logits
	}
	s.work = append(s.work[:0], logits...)
	if penalised {
		s.penalise(s.work, d)
	}
	for _, id := range d.banned {
		s.work[id] = float32(math.Inf(-1))
	}
	if scaled {
		inverse := 1 / p.Temperature
		for i, v := range s.work {
			s.work[i] = v * inverse
		}
	}
	if p.Temperature > 0 && truncates(p) {
		s.truncate(s.work, p)
	}
	return s.work
}

// penalise follows OpenAI's presence and frequency penalties over generated tokens, and the repetition
// penalty of Keskar et al. (2019) over prompt and generated tokens.
func (s *sampler) penalise(logits []float32, d draw) {
	if s.counts == nil {
		s.counts, s.inPrompt = map[int32]int{}, map[int32]struct{}{}
	}
	clear(s.counts)
	clear(s.inPrompt)
	for _, id := range d.generated {
		s.counts[id]++
	}
	for id, n := range s.counts {
		logits[id] -= d.params.PresencePenalty + d.params.FrequencyPenalty*float32(n)
	}
	r := d.params.RepetitionPenalty
	if r == 0 || r == 1 {
		return
	}
	for _, id := range d.prompt {
		s.inPrompt[id] = struct{}{}
	}
	for id := range s.counts {
		s.inPrompt[id] = struct{}{}
	}
	for id := range s.inPrompt {
		if logits[id] > 0 {
			logits[id] /= r
		} else {
			logits[id] *= r
		}
	}
}

func truncates(p *wire.Sampling) bool {
	return p.TopK > 0 || (p.TopP > 0 && p.TopP < 1) || p.MinP > 0
}

// truncate sets to -Inf whatever top-k, then top-p, then min-p exclude. Ties go to the smaller id.
func (s *sampler) truncate(logits []float32, p *wire.Sampling) {
	kept := s.ranked(logits, p)
	norm := logSumExp(logits)
	minLogit := float32(math.Inf(-1))
	if p.MinP > 0 {
		minLogit = logits[kept[0]] + float32(math.Log(float64(p.MinP)))
	}
	total := 0.0 // of the kept ones, for top-p over what top-k left
	if p.TopK > 0 && p.TopK < len(logits) {
		norm = logSumExpOf(logits, kept)
	}
	cut := len(kept)
	for i, id := range kept {
		if logits[id] < minLogit || math.IsInf(float64(logits[id]), -1) {
			cut = i
			break
		}
		total += math.Exp(float64(logits[id] - norm))
		if p.TopP > 0 && p.TopP < 1 && total >= float64(p.TopP) {
			cut = i + 1
			break
		}
	}
	kept = kept[:max(cut, 1)]
	values := make([]float32, len(kept))
	for i, id := range kept {
		values[i] = logits[id]
	}
	for i := range logits {
		logits[i] = float32(math.Inf(-1))
	}
	for i, id := range kept {
		logits[id] = values[i]
	}
}

// ranked returns the ids that can survive truncation, best first: the top k, or all of those within
// reach of top-p and min-p.
func (s *sampler) ranked(logits []float32, p *wire.Sampling) []int32 {
	if p.TopK > 0 && p.TopK < len(logits) {
		return s.best(logits, p.TopK)
	}
	// With top-p or min-p alone a few hundred ids usually hold the mass; rank all only when they do not.
	for k := 256; k < len(logits); k *= 8 {
		ids := s.best(logits, k)
		last := logits[ids[k-1]]
		if p.MinP > 0 && last < logits[ids[0]]+float32(math.Log(float64(p.MinP))) {
			return ids
		}
		if p.TopP > 0 && p.TopP < 1 {
			norm := logSumExp(logits)
			total := 0.0
			for _, id := range ids {
				total += math.Exp(float64(logits[id] - norm))
			}
			if total >= float64(p.TopP) {
				return ids
			}
		}
	}
	return s.best(logits, len(logits))
}

// best returns the k ids with the largest logits, best first, ties by id.
func (s *sampler) best(logits []float32, k int) []int32 {
	k = min(k, len(logits))
	better := func(a, b int32) int {
		if c := cmp.Compare(logits[b], logits[a]); c != 0 {
			return c
		}
		return cmp.Compare(a, b)
	}
	heap := s.order[:0] // a min-heap of the k best so far: the root is the worst of them
	for id := range int32(len(logits)) {
		switch {
		case len(heap) < k:
			heap = append(heap, id)
			if len(heap) == k {
				for i := k/2 - 1; i >= 0; i-- {
					sink(heap, i, better)
				}
			}
		case better(id, heap[0]) < 0:
			heap[0] = id
			sink(heap, 0, better)
		}
	}
	s.order = heap
	slices.SortFunc(heap, better)
	return heap
}

// sink restores the heap order below i; the worst id is on top.
func sink(h []int32, i int, better func(a, b int32) int) {
	for {
		child := 2*i + 1
		if child >= len(h) {
			return
		}
		if child+1 < len(h) && better(h[child+1], h[child]) > 0 {
			child++
		}
		if better(h[child], h[i]) <= 0 {
			return
		}
		h[i], h[child] = h[child], h[i]
		i = child
	}
}

// pick draws from the softmax of processed logits by inverting its distribution in order of id.
func (s *sampler) pick(logits []float32, p *wire.Sampling, position int) int32 {
	largest := logits[argmax(logits)]
	total := 0.0
	for _, v := range logits {
		if d := v - largest; d > negligible {
			total += math.Exp(float64(d))
		}
	}
	target := uniform(p.Seed, p.Choice, position) * total
	last := argmax(logits)
	sum := 0.0
	for id, v := range logits {
		d := v - largest
		if d <= negligible {
			continue
		}
		sum += math.Exp(float64(d))
		if d > -30 {
			last = int32(id)
		}
		if sum > target {
			return int32(id)
		}
	}
	return last
}

// negligible is the distance below the largest logit under which a token's probability is less than
// 1e-43 and is not worth an exponential.
const negligible = -100

func (s *sampler) top(logits []float32, norm float32, n int) wire.TokenLogprobs {
	if n <= 0 {
		return wire.TokenLogprobs{}
	}
	ids := slices.Clone(s.best(logits, n))
	out := wire.TokenLogprobs{IDs: ids, Logprobs: make([]float32, len(ids))}
	for i, id := range ids {
		out.Logprobs[i] = logits[id] - norm
	}
	return out
}

func argmax(logits []float32) int32 {
	best, at := float32(math.Inf(-1)), 0
	for i, v := range logits {
		if v > best {
			best, at = v, i
		}
	}
	return int32(at)
}

// logSumExp sums in float64 and in order of id, so that the same logits give the same bits everywhere.
func logSumExp(logits []float32) float32 {
	largest := logits[argmax(logits)]
	total := 0.0
	for _, v := range logits {
		if d := v - largest; d > negligible {
			total += math.Exp(float64(d))
		}
	}
	return float32(float64(largest) + math.Log(total))
}

func logSumExpOf(logits []float32, ids []int32) float32 {
	largest := logits[ids[0]]
	total := 0.0
	for _, id := range ids {
		total += math.Exp(float64(logits[id] - largest))
	}
	return float32(float64(largest) + math.Log(total))
}

// output samples or measures one wanted row.
func (s *sampler) output(row Row, logits []float32) Output {
	r := row.request
	if row.Target >= 0 {
		return s.measure(logits, row.Target, r.sampling.PromptTopLogprobs)
	}
	return s.sample(logits, draw{
		params: &r.sampling, prompt: r.tokens[:r.prompt], generated: r.tokens[r.prompt:], banned: r.banned(),
	})
}

// measure reports how likely a given token was.
func (s *sampler) measure(logits []float32, target int32, top int) Output {
	norm := logSumExp(logits)
	return Output{Token: target, Logprob: logits[target] - norm, Top: s.top(logits, norm, top)}
}
