package checkpoint

import "math"

// ropeParams are the rotary embedding's constants as a file gives them, defaults filled in.
type ropeParams struct {
	kind     string  // "default", "linear", "llama3" or "yarn"
	base     float64 // θ
	dims     int     // how many dimensions of a head rotate
	factor   float64 // by how much the context was stretched; all kinds but "default"
	original float64 // the context length before that; llama3 and yarn

	lowFactor, highFactor float64 // llama3
	betaFast, betaSlow    float64 // yarn: rotations over the original context between which it blends
	truncate              bool    // yarn: round that range outwards to whole pairs

	attention float64   // multiplies cos and sin
	scores    float64   // multiplies the scores of latent attention, beside 1/√dimensions
	divisors  []float32 // GGUF's rope_freqs, one a pair; nil for none
}

// frequencies gives the radians a position of each pair: base^(-2i/dims), scaled as kind says.
//
// linear: Chen et al. 2023, "Position Interpolation". yarn: Peng et al. 2023, "YaRN", section 3.2.
// llama3: the scaling published with Llama 3.1.
func (p ropeParams) frequencies() ([]float64, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	out := make([]float64, p.dims/2)
	low, high := p.yarnRange()
	for i := range out {
		f := math.Pow(p.base, -2*float64(i)/float64(p.dims))
		if p.divisors != nil {
			f /= float64(p.divisors[i])
		}
		switch p.kind {
		case "linear":
			f /= p.factor
		case "llama3":
			f = p.llama3(f)
		case "yarn":
			ramp := min(max((float64(i)-low)/(high-low), 0), 1)
			f = f/p.factor*ramp + f*(1-ramp)
		}
		if !(f > 0) || math.IsInf(f, 0) {
			return nil, malformed("rope", "pair %d of %d gets frequency %g", i, len(out), f)
		}
		out[i] = f
	}
	return out, nil
}

// llama3 keeps short wavelengths, stretches long ones and blends between.
func (p ropeParams) llama3(f float64) float64 {
	rotations := p.original * f / (2 * math.Pi)
	switch {
	case rotations > p.highFactor:
		return f
	case rotations < p.lowFactor:
		return f / p.factor
	}
	smooth := (rotations - p.lowFactor) / (p.highFactor - p.lowFactor)
	return (1-smooth)*f/p.factor + smooth*f
}

// yarnRange is the range of pairs over which yarn goes from keeping a frequency to dividing it.
func (p ropeParams) yarnRange() (low, high float64) {
	if p.kind != "yarn" {
		return 0, 0
	}
	pair := func(rotations float64) float64 {
		return float64(p.dims) * math.Log(p.original/(rotations*2*math.Pi)) / (2 * math.Log(p.base))
	}
	low, high = pair(p.betaFast), pair(p.betaSlow)
	if p.truncate {
		low, high = math.Floor(low), math.Ceil(high)
	}
	low, high = max(low, 0), min(high, float64(p.dims-1))
	if low == high {
		high += 0.001
	}
	return low, high
}

// yarnAttention is the factor on cos and sin that YaRN derives from the stretching, weighted by mscale.
func yarnAttention(factor, mscale float64) float64 {
	if factor <= 1 {
		return 1
	}
	return 0.1*mscale*math.Log(factor) + 1
}

func (p ropeParams) check() error {
	positive := func(field string, v float64) error {
		if !(v > 0) || math.IsInf(v, 0) {
			return malformed(field, "is %g; it must be a positive number", v)
		}
		return nil
	}
	if p.dims < 2 || p.dims%2 != 0 || p.dims > maxHeadDim {
		return malformed("rope dimensions", "are %d; they must be even, 2 to %d", p.dims, maxHeadDim)
	}
	if !(p.base > 1) || math.IsInf(p.base, 0) {
		return malformed("rope base (theta)", "is %g; it must be over 1", p.base)
	}
	if p.divisors != nil && len(p.divisors) != p.dims/2 {
		return malformed("rope_freqs", "has %d factors for %d pairs", len(p.divisors), p.dims/2)
	}
	needs := map[string][]string{"default": nil, "linear": {"factor"}, "llama3": {"factor", "original"}, "yarn": {"factor", "original"}}
	fields, ok := needs[p.kind]
	if !ok {
		return unsupported("rope type", "%q is not supported; supported: default, linear, llama3, yarn", p.kind)
	}
	for _, field := range fields {
		v := p.factor
		if field == "original" {
			v = p.original
		}
		if err := positive("rope "+field, v); err != nil {
			return err
		}
	}
	switch {
	case p.kind == "yarn" && p.factor < 1:
		return malformed("rope factor", "is %g; yarn stretches, so it must be at least 1", p.factor)
	case p.kind == "llama3" && !(p.lowFactor > 0 && p.highFactor > p.lowFactor):
		return malformed("rope high_freq_factor", "is %g; it must be over low_freq_factor, which is %g, and that over 0", p.highFactor, p.lowFactor)
	case p.kind == "yarn" && !(p.betaSlow > 0 && p.betaFast >= p.betaSlow):
		return malformed("rope beta_fast", "is %g; it must be at least beta_slow, which is %g, and that over 0", p.betaFast, p.betaSlow)
	}
	if err := positive("rope attention factor", p.attention); err != nil {
		return err
	}
	return positive("rope mscale_all_dim's factor on scores", p.scores)
}
