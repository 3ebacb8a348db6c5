package engine

import (
	"fmt"

	"baton/compute"
	"baton/model"
)

// device runs a rank's part of passes. It is used by one goroutine at a time.
type device struct {
	split   bool // whether others hold the same activations
	backend compute.Backend
	decoder *model.Decoder
	weights *model.WeightSet
	kv      compute.KV
}

// newDevice loads the model and gives the backend the pool's memory.
func newDevice(c Config, ranks model.Ranks, backend compute.Backend, pool []byte) (*device, error) {
	weights, err := model.LoadWeights(backend, c.Checkpoint, ranks.Part)
	if err != nil {
		return nil, err
	}
	decoder, err := model.NewDecoder(backend, c.Checkpoint.Spec, ranks, c.MaxTokens, c.MaxSeqLen)
	if err != nil {
		return nil, err
	}
	kv := c.kv(c.holding(ranks.Part))
	kv.Blocks = c.blocks()
	if kv.Buf, err = backend.Wrap(pool); err != nil {
		decoder.Close()
		return nil, fmt.Errorf("engine: KV pool: %w", err)
	}
	return &device{
		split: ranks.Part.TP > 1, backend: backend, decoder: decoder, weights: weights, kv: kv,
	}, nil
}

// run computes one pass. each gets the logits of its wanted rows, on the engine's first rank.
func (d *device) run(b model.Batch, each func(i int, logits []float32)) error {
	return d.decoder.Forward(d.weights, d.kv, b, each)
}

// state is a fingerprint of the activations that the latest pass left, where other ranks have the same.
func (d *device) state() uint64 {
	if !d.split {
		return 0
	}
	return digest(d.decoder.State())
}

func (d *device) close() error {
	d.decoder.Close()
	d.backend.Free(d.kv.Buf)
	return d.backend.Close()
}
