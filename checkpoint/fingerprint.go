package checkpoint

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"

	"baton/tensor"
)

const (
	samplesPerTensor = 8
	samplesOfMany    = 2 // where experts make tens of thousands of tensors
	sampleBytes      = 64
)

// Fingerprint tells whether two engines opened the same model: SHA-256, in hex, over the architecture, the
// special ids, every tensor's name, shape and type, and eight samples of 64 bytes spread over each (two in
// a mixture of experts). It reads a few pages a tensor, so it is cheap, and no proof: weights that differ
// only between the samples look the same. The path does not matter; the format does.
func (c *Checkpoint) Fingerprint() string {
	h := sha256.New()
	s := c.Spec
	s.Rope.Frequencies, s.Rope.Scale, s.Latent.Scale = nil, 0, 0 // computed; identity has what they were computed from
	fmt.Fprintf(h, "%s\n%+v\n%s\n", c.Format(), s, c.identity)
	samples := samplesPerTensor
	if s.Experts.Count > 0 {
		samples = samplesOfMany
	}
	c.Weights.each(func(t tensor.Tensor) {
		fmt.Fprintf(h, "%q %v %v\n", t.Name, t.DType, t.Shape)
		sample(h, t.Data, samples)
	})
	return hex.EncodeToString(h.Sum(nil))
}

// sample hashes equally spaced pieces of data, the first and last bytes included.
func sample(h hash.Hash, data []byte, samples int) {
	if len(data) <= samplesPerTensor*sampleBytes {
		h.Write(data)
		return
	}
	for i := range samples {
		at := (len(data) - sampleBytes) * i / (samples - 1)
		h.Write(data[at : at+sampleBytes])
	}
}
