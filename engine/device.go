package engine

import (
	"fmt"

	"baton/compute"
	"baton/model"
)

// device runs passes. It is used by one goroutine at a time.
type device struct {
	backend compute.Backend
	decoder *model.Decoder
	weights *model.WeightSet
	kv      compute.KV
	sampler sampler
}

// newDevice loads the model and gives the backend the pool's memory.
func newDevice(c Config, backend compute.Backend, pool []byte) (*device, error) {
	weights, err := model.LoadWeights(backend, c.Checkpoint.Weights)
	if err != nil {
		return nil, err
	}
	decoder, err := model.NewDecoder(backend, c.Checkpoint.Spec, c.MaxTokens, c.MaxSeqLen)
	if err != nil {
		return nil, err
	}
	kv := c.kv()
	kv.Blocks = c.blocks()
	if kv.Buf, err = backend.Wrap(pool); err != nil {
		decoder.Close()
		return nil, fmt.Errorf("engine: KV pool: %w", err)
	}
	return &device{
		backend: backend, decoder: decoder, weights: weights, kv: kv,
		sampler: sampler{mode: c.Logprobs},
	}, nil
}

// run computes one pass and samples or measures its wanted rows.
func (d *device) run(p *Plan) ([]Output, error) {
	outputs := make([]Output, len(p.Rows))
	err := d.decoder.Forward(d.weights, d.kv, p.Batch, func(i int, logits []float32) {
		outputs[i] = d.output(p.Rows[i], logits)
	})
	return outputs, err
}

func (d *device) output(row Row, logits []float32) Output {
	r := row.request
	if row.Target >= 0 {
		return d.sampler.measure(logits, row.Target, r.sampling.PromptTopLogprobs)
	}
	return d.sampler.sample(logits, draw{
		params: &r.sampling, prompt: r.tokens[:r.prompt], generated: r.tokens[r.prompt:], banned: r.banned(),
	})
}

// measure reports how likely a given token was.
func (s *sampler) measure(logits []float32, target int32, top int) Output {
	norm := logSumExp(logits)
	return Output{Token: target, Logprob: logits[target] - norm, Top: s.top(logits, norm, top)}
}

func (d *device) close() error {
	d.decoder.Close()
	d.backend.Free(d.kv.Buf)
	return d.backend.Close()
}
