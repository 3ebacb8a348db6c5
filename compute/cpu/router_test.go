package cpu

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"baton/compute"
	"baton/tensor"
)

// chooser is a sigmoid router with a bias that is not loaded yet.
type chooser struct {
	compute.Router
	count, topK int
	bias        []float32 // nil for none
}

func (c chooser) route(t testing.TB, b *Backend, logits []float32) ([]int32, []float32) {
	t.Helper()
	if c.Bias = nil; c.bias != nil {
		c.Bias = load(t, b, tensor.Tensor{DType: tensor.F32, Shape: []int{c.count}, Data: f32Bytes(c.bias)})
	}
	return routeBy(t, b, logits, c.count, c.topK, c.Router)
}

func f32Bytes(v []float32) []byte {
	out := make([]byte, 4*len(v))
	if err := tensor.Quantize(out, tensor.F32, v); err != nil {
		panic(err)
	}
	return out
}

// choice sorts: groups by the sum of their two best, then the experts of the best groups.
func (c chooser) choice(logits []float32) (experts []int32, weights []float32) {
	scores, biased := make([]float32, c.count), make([]float32, c.count)
	for e, v := range logits {
		scores[e] = 1 / (1 + exp32(-v))
		biased[e] = scores[e]
		if c.bias != nil {
			biased[e] += c.bias[e]
		}
	}
	groups, top := max(c.Groups, 1), max(c.TopGroups, 1)
	size := c.count / groups
	order := make([]int, groups)
	pair := func(g int) float32 {
		s := slices.Clone(biased[g*size : (g+1)*size])
		slices.Sort(s)
		if size == 1 {
			return s[0]
		}
		return s[size-1] + s[size-2]
	}
	for g := range order {
		order[g] = g
	}
	slices.SortStableFunc(order, func(a, b int) int { return -compareFloats(float64(pair(a)), float64(pair(b))) })
	for e := range int32(c.count) {
		if slices.Contains(order[:top], int(e)/size) {
			experts = append(experts, e)
		}
	}
	slices.SortStableFunc(experts, func(a, b int32) int { return -compareFloats(float64(biased[a]), float64(biased[b])) })
	experts = experts[:c.topK]
	sum := float32(0)
	for _, e := range experts {
		sum += scores[e]
	}
	for _, e := range experts {
		w := scores[e]
		if c.Normalize {
			w /= sum + 1e-20
		}
		if c.Scale != 0 {
			w *= c.Scale
		}
		weights = append(weights, w)
	}
	return experts, weights
}

func TestSigmoidRouter(t *testing.T) {
	backends := make([]*Backend, len(setups))
	for i, o := range setups {
		backends[i] = open(t, o)
	}
	rapid.Check(t, func(r *rapid.T) {
		var c chooser
		c.Sigmoid, c.Normalize = true, rapid.Bool().Draw(r, "normalize")
		c.Scale = rapid.SampledFrom([]float32{0, 1, 2.5}).Draw(r, "scale")
		c.Groups = rapid.SampledFrom([]int{0, 1, 2, 4, 8}).Draw(r, "groups")
		size := rapid.IntRange(2, 20).Draw(r, "group size")
		c.count = max(c.Groups, 1) * size
		if c.Groups > 0 {
			c.TopGroups = rapid.IntRange(1, c.Groups).Draw(r, "top groups")
		}
		c.topK = rapid.IntRange(1, min(9, max(c.TopGroups, 1)*size)).Draw(r, "topK")
		coarse := func(v []float32) []float32 { // so that there are ties
			for i := range v {
				v[i] = float32(math.Round(float64(v[i])*4)) / 4
			}
			return v
		}
		if rapid.Bool().Draw(r, "bias") {
			c.bias = coarse(random(rapid.Uint64().Draw(r, "bias seed"), c.count))
		}
		tokens := rapid.IntRange(1, 40).Draw(r, "tokens")
		logits := coarse(random(rapid.Uint64().Draw(r, "seed"), tokens*c.count))
		for i, b := range backends {
			experts, weights := c.route(t, b, logits)
			for token := range tokens {
				wantExperts, wantWeights := c.choice(logits[token*c.count : (token+1)*c.count])
				at := token * c.topK
				if got := experts[at : at+c.topK]; !slices.Equal(got, wantExperts) {
					r.Fatalf("%+v, %v, token %d: experts %v, want %v", c, setups[i], token, got, wantExperts)
				}
				sameBits(r, fmt.Sprintf("%+v, %v, token %d", c, setups[i], token), weights[at:at+c.topK], wantWeights)
			}
		}
	})
}

func TestSigmoidRouterSpecialValues(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	grouped := compute.Router{Sigmoid: true, Groups: 2, TopGroups: 1}
	for name, c := range map[string]struct {
		router  compute.Router
		bias    []float32
		logits  []float32
		topK    int
		experts []int32
		weights []float32
	}{
		"halves":               {compute.Router{Sigmoid: true}, nil, []float32{0, 0, -200, 200}, 3, []int32{3, 0, 1}, []float32{1, .5, .5}},
		"the bias decides":     {compute.Router{Sigmoid: true, Normalize: true, Scale: 2}, []float32{0, 0, 7}, []float32{0, 0, 0}, 2, []int32{2, 0}, []float32{1, 1}},
		"the bias weighs none": {compute.Router{Sigmoid: true}, []float32{-1, 5, 0}, []float32{0, -200, 200}, 2, []int32{1, 2}, []float32{0, 1}},
		"all are zero":         {compute.Router{Sigmoid: true, Normalize: true}, nil, []float32{-200, -inf, -300}, 2, []int32{0, 1}, []float32{0, 0}},
		"two beat one":         {grouped, nil, []float32{200, -200, -200, 0, -200, 1}, 2, []int32{5, 3}, nil},
		"equal groups":         {grouped, nil, []float32{0, 0, 0, 0}, 2, []int32{0, 1}, []float32{.5, .5}},
		"below zero":           {grouped, []float32{-9, -8, -7, -10}, []float32{0, 0, 0, 0}, 2, []int32{1, 0}, []float32{.5, .5}},
		"no number":            {grouped, nil, []float32{nan, 9, 0, 0}, 2, []int32{2, 3}, []float32{.5, .5}},
		"infinite bias":        {grouped, []float32{0, 0, inf, -inf}, []float32{0, 0, 0, 0}, 1, []int32{0}, []float32{.5}},
	} {
		for _, o := range setups {
			b := open(t, o)
			experts, weights := chooser{Router: c.router, count: len(c.logits), topK: c.topK, bias: c.bias}.route(t, b, c.logits)
			if !slices.Equal(experts, c.experts) {
				t.Errorf("%s, %v: experts %v, want %v", name, o, experts, c.experts)
			}
			if c.weights != nil {
				sameBits(t, name, weights, c.weights)
			}
		}
	}
}

// Groups limit a softmax as well, and its weights are still shares of all experts.
func TestGroupsOfASoftmax(t *testing.T) {
	b := open(t, Options{Threads: 1})
	logits := []float32{3, 3, 3, -300, 3, -300}
	experts, weights := routeBy(t, b, logits, 6, 2, compute.Router{Groups: 3, TopGroups: 1})
	if !slices.Equal(experts, []int32{0, 1}) || weights[0] != .25 || weights[1] != .25 {
		t.Errorf("experts %v, weights %v", experts, weights)
	}
}
