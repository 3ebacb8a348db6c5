package cpu

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"baton/tensor"
)

// TestRandomProducts multiplies operands of random shapes on every setup, all rows at once and one by one.
func TestRandomProducts(t *testing.T) {
	skipUnderRace(t)
	backends := make([]*Backend, len(setups))
	for i, o := range setups {
		backends[i] = open(t, o)
	}
	rapid.Check(t, func(r *rapid.T) {
		p := product{
			dtype:    rapid.SampledFrom(weightTypes).Draw(r, "type"),
			inputs:   rapid.IntRange(1, 20).Draw(r, "inputs"),
			outer:    rapid.IntRange(1, 40).Draw(r, "outer"),
			segments: 1 << rapid.IntRange(0, 3).Draw(r, "log2 segments"),
			bias:     rapid.Bool().Draw(r, "bias"),
			residual: rapid.Bool().Draw(r, "residual"),
		}
		if p.dtype.Quantised() {
			p.inner = p.dtype.BlockElements() * rapid.IntRange(1, 24).Draw(r, "blocks")
		} else {
			p.inner = p.segments * rapid.IntRange(1, 800/p.segments).Draw(r, "length")
		}
		first := p.run(t, backends[0])
		for i, b := range backends[1:] {
			p.oneByOne = i%2 == 1
			sameBits(r, fmt.Sprint(p, " ", setups[i+1]), p.run(t, b), first)
		}
	})
}

// TestRandomAttention attends over random sequences with random chunks and block sizes.
func TestRandomAttention(t *testing.T) {
	skipUnderRace(t)
	backends := make([]*Backend, len(setups))
	for i, o := range setups {
		backends[i] = open(t, o)
	}
	rapid.Check(t, func(r *rapid.T) {
		c := attentionCase{
			heads:   rapid.IntRange(1, 3).Draw(r, "heads"),
			group:   rapid.IntRange(1, 5).Draw(r, "group"),
			dim:     rapid.SampledFrom([]int{4, 8, 16, 40, 64, 80}).Draw(r, "dim"),
			dtype:   rapid.SampledFrom([]tensor.DType{tensor.F32, tensor.BF16}).Draw(r, "type"),
			lengths: rapid.SliceOfN(rapid.IntRange(1, 40), 1, 2).Draw(r, "lengths"),
		}
		var first []float32
		for i, o := range setups {
			size := 16 * rapid.IntRange(1, 4).Draw(r, "block size")
			chunk := rapid.IntRange(1, 40).Draw(r, "chunk")
			got := c.run(t, backends[i], size, chunk, rapid.Bool().Draw(r, "together"))
			if first == nil {
				first = got
			}
			sameBits(r, fmt.Sprint(o, " blocks of ", size, ", chunks of ", chunk), got, first)
		}
	})
}
