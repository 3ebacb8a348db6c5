package cpu

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"baton/compute"
	"baton/tensor"
)

// mixture is a block of experts: gate, up and down of each, chosen by logits that are given.
type mixture struct {
	dtype                 tensor.DType
	hidden, inner         int
	count, topK, segments int
	normalize             bool
	logits                []float32 // [tokens, count]
}

func (m mixture) tokens() int { return len(m.logits) / m.count }

func (m mixture) String() string {
	return fmt.Sprintf("%d tokens to %d of %d experts, %d-%d %v segments=%d normalize=%v", m.tokens(), m.topK, m.count, m.hidden, m.inner, m.dtype, m.segments, m.normalize)
}

// matrix is one expert's; which tells gate, up and down apart.
func (m mixture) matrix(t testing.TB, expert, which int) (tensor.Tensor, []float32) {
	rows, cols := m.inner, m.hidden
	if which == 2 {
		rows, cols = m.hidden, m.inner
	}
	return quantised(t, m.dtype, random(uint64(10+3*expert+which), rows*cols), rows, cols)
}

// run computes the tokens, so many at a time, and returns dst, which held random(2) before.
func (m mixture) run(t testing.TB, b *Backend, together int) []float32 {
	var w [3]compute.Experts
	for which := range w {
		var ts []tensor.Tensor
		for e := range m.count {
			one, _ := m.matrix(t, e, which)
			ts = append(ts, one)
		}
		var err error
		if w[which], err = b.LoadExperts(0, ts); err != nil {
			t.Fatal(err)
		}
	}
	n := m.tokens()
	x, dst, logits := put(t, b, random(1, n*m.hidden), m.hidden), put(t, b, random(2, n*m.hidden), m.hidden), put(t, b, m.logits, m.count)
	routing, err := b.Routing(together, m.count, m.topK)
	if err != nil {
		t.Fatal(err)
	}
	rows := blank(t, b, together*m.topK, m.hidden, m.hidden+1)
	gate, up := blank(t, b, together*m.topK, m.inner, m.inner), blank(t, b, together*m.topK, m.inner, m.inner+3)
	for from := 0; from < n; from += together {
		to := min(from+together, n)
		rows, gate, up := rows.Slice(0, (to-from)*m.topK), gate.Slice(0, (to-from)*m.topK), up.Slice(0, (to-from)*m.topK)
		b.Route(routing, logits.Slice(from, to), compute.Router{Normalize: m.normalize})
		b.Dispatch(rows, x.Slice(from, to), routing)
		b.MatMulExperts(gate, rows, w[0], routing, compute.Linear{})
		b.MatMulExperts(up, rows, w[1], routing, compute.Linear{})
		b.SiLUMul(gate, gate, up)
		b.MatMulExperts(rows, gate, w[2], routing, compute.Linear{Segments: m.segments})
		b.Combine(dst.Slice(from, to), rows, routing, 0)
	}
	return get(t, b, dst)
}

// choice is the experts of one token and their weights, in float64.
func (m mixture) choice(logits []float32) (experts []int, weights []float64) {
	p := make([]float64, m.count)
	sum := 0.0
	for e, v := range logits {
		p[e] = math.Exp(float64(v) - float64(slices.Max(logits)))
		sum += p[e]
		experts = append(experts, e)
	}
	slices.SortStableFunc(experts, func(a, b int) int { return -compareFloats(p[a], p[b]) })
	experts = experts[:m.topK]
	chosen := 0.0
	for _, e := range experts {
		weights = append(weights, p[e]/sum)
		chosen += p[e] / sum
	}
	for j := range weights {
		if m.normalize {
			weights[j] /= chosen
		}
	}
	return experts, weights
}

func compareFloats(a, b float64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// reference is the whole block in float64.
func (m mixture) reference(t testing.TB) (out, scale []float64) {
	x, old := random(1, m.tokens()*m.hidden), random(2, m.tokens()*m.hidden)
	w := make([][3][]float32, m.count)
	for e := range w {
		for which := range w[e] {
			_, w[e][which] = m.matrix(t, e, which)
		}
	}
	dot := func(a []float32, b []float64) (s float64) {
		for i, v := range a {
			s += float64(v) * b[i]
		}
		return s
	}
	for i := range m.tokens() {
		row := make([]float64, m.hidden)
		for j := range row {
			row[j] = float64(x[i*m.hidden+j])
		}
		sum, size := make([]float64, m.hidden), make([]float64, m.hidden)
		experts, weights := m.choice(m.logits[i*m.count : (i+1)*m.count])
		for j, e := range experts {
			act := make([]float64, m.inner)
			for r := range act {
				g := dot(w[e][0][r*m.hidden:(r+1)*m.hidden], row)
				act[r] = g / (1 + math.Exp(-g)) * dot(w[e][1][r*m.hidden:(r+1)*m.hidden], row)
			}
			for r := range sum {
				down := w[e][2][r*m.inner : (r+1)*m.inner]
				sum[r] += weights[j] * dot(down, act)
				for c, v := range down {
					size[r] += weights[j] * math.Abs(float64(v)*act[c])
				}
			}
		}
		for r := range sum {
			v := float64(old[i*m.hidden+r])
			out, scale = append(out, v+sum[r]), append(scale, math.Abs(v)+size[r])
		}
	}
	return out, scale
}

// skewed are logits with which every token goes to expert 3 and none to the last one.
func skewed(tokens, count int) []float32 {
	v := random(5, tokens*count)
	for i := range tokens {
		v[i*count+3] += 20
		v[(i+1)*count-1] -= 50
	}
	return v
}

func TestExperts(t *testing.T) {
	backends := make([]*Backend, len(setups))
	for i, o := range setups {
		backends[i] = open(t, o)
	}
	all := []mixture{
		{dtype: tensor.F32, hidden: 24, inner: 40, count: 9, topK: 3, normalize: true, logits: skewed(200, 9)},
		{dtype: tensor.BF16, hidden: 64, inner: 48, count: 20, topK: 2, segments: 8, logits: skewed(12, 20)},
		{dtype: tensor.Q8_0, hidden: 64, inner: 96, count: 5, topK: 5, segments: 4, logits: skewed(7, 5)},
		{dtype: tensor.Q4_0, hidden: 512, inner: 32, count: 17, topK: 4, normalize: true, logits: skewed(30, 17)},
		{dtype: tensor.F16, hidden: 7, inner: 5, count: 4, topK: 1, logits: skewed(3, 4)},
	}
	if raceDetector {
		all = all[1:2]
	}
	for _, m := range all {
		want, scale := m.reference(t)
		var first []float32
		for i, b := range backends {
			got := m.run(t, b, m.tokens())
			if first == nil {
				first = got
				near(t, m.String(), got, want, scale, 2e-6)
			}
			sameBits(t, fmt.Sprint(m, " ", setups[i]), got, first)
			if !setups[i].Portable {
				sameBits(t, fmt.Sprint(m, " ", setups[i], " one by one"), m.run(t, b, 1), first)
				sameBits(t, fmt.Sprint(m, " ", setups[i], " in fives"), m.run(t, b, 5), first)
			}
		}
	}
}

// A dispatched row times its expert's matrix has the bits of a MatMul of that row.
func TestMatMulExpertsEqualsMatMul(t *testing.T) {
	skipUnderRace(t)
	const tokens, count, topK, inner, outer = 40, 6, 2, 1344, 37
	for _, d := range weightTypes {
		for _, segments := range []int{1, 4} {
			b := open(t, Options{Threads: 2})
			var ts []tensor.Tensor
			for e := range count {
				w, _ := quantised(t, d, random(uint64(e), outer*inner), outer, inner)
				ts = append(ts, w)
			}
			experts, err := b.LoadExperts(0, ts)
			if err != nil {
				t.Fatal(err)
			}
			mem, err := b.Routing(tokens, count, topK)
			if err != nil {
				t.Fatal(err)
			}
			b.Route(mem, put(t, b, skewed(tokens, count), count), compute.Router{})
			x, got, want := put(t, b, random(9, tokens*topK*inner), inner), blank(t, b, tokens*topK, outer, outer), blank(t, b, tokens*topK, outer, outer)
			b.MatMulExperts(got, x, experts, mem, compute.Linear{Segments: segments})
			r := mem.(*routing)
			for e := range count {
				from, to := int(r.start[e]), int(r.start[e+1])
				b.MatMul(want.Slice(from, to), x.Slice(from, to), load(t, b, ts[e]), compute.Linear{Segments: segments})
			}
			sameBits(t, fmt.Sprint(d, " ", segments, " segments"), get(t, b, got), get(t, b, want))
		}
	}
}

// route returns what Route chose: experts and weights, by token.
func route(t testing.TB, b *Backend, logits []float32, count, topK int, normalize bool) ([]int32, []float32) {
	t.Helper()
	return routeBy(t, b, logits, count, topK, compute.Router{Normalize: normalize})
}

func routeBy(t testing.TB, b *Backend, logits []float32, count, topK int, router compute.Router) ([]int32, []float32) {
	t.Helper()
	mem, err := b.Routing(len(logits)/count+3, count, topK)
	if err != nil {
		t.Fatal(err)
	}
	b.Route(mem, put(t, b, logits, count), router)
	if err := b.Read(nil, compute.Mat{Buf: &buffer{}, Cols: 1}); err != nil {
		t.Fatal(err)
	}
	r := mem.(*routing)
	n := len(logits) / count * topK
	return r.expert[:n], r.weight[:n]
}

func TestRouteSpecialValues(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for name, c := range map[string]struct {
		logits    []float32
		topK      int
		normalize bool
		experts   []int32
		weights   []float32 // nil: not a number
	}{
		"ties go by index":    {[]float32{1, 2, 2, 1, 2}, 4, true, []int32{1, 2, 4, 0}, nil},
		"all equal":           {[]float32{3, 3, 3, 3}, 2, false, []int32{0, 1}, []float32{.25, .25}},
		"normalised":          {[]float32{3, 3, 3, 3}, 2, true, []int32{0, 1}, []float32{.5, .5}},
		"underflow is a tie":  {[]float32{-300, -200, 0}, 3, false, []int32{2, 0, 1}, []float32{1, 0, 0}},
		"far from zero":       {[]float32{-1e30, 3e38, -3e38}, 2, false, []int32{1, 0}, []float32{1, 0}},
		"impossible":          {[]float32{-inf, 0, -inf}, 3, true, []int32{1, 0, 2}, []float32{1, 0, 0}},
		"one expert":          {[]float32{-7}, 1, false, []int32{0}, []float32{1}},
		"all are not numbers": {[]float32{nan, nan, nan}, 2, false, []int32{0, 1}, []float32{nan, nan}},
		"nothing possible":    {[]float32{-inf, -inf}, 1, false, []int32{0}, []float32{nan}},
		"infinite":            {[]float32{0, inf, 1}, 2, false, []int32{0, 2}, nil},
		"one is not a number": {[]float32{nan, 1, 2}, 3, false, []int32{2, 1, 0}, nil},
	} {
		for _, o := range setups {
			b := open(t, o)
			experts, weights := route(t, b, c.logits, len(c.logits), c.topK, c.normalize)
			if !slices.Equal(experts, c.experts) {
				t.Errorf("%s, %v: experts %v, want %v", name, o, experts, c.experts)
			}
			if c.weights != nil {
				sameBits(t, name, weights, c.weights)
			}
		}
	}
}

func TestRoute(t *testing.T) {
	backends := make([]*Backend, len(setups))
	for i, o := range setups {
		backends[i] = open(t, o)
	}
	rapid.Check(t, func(r *rapid.T) {
		m := mixture{count: rapid.SampledFrom([]int{1, 2, 8, 15, 16, 17, 60, 128}).Draw(r, "experts"), normalize: rapid.Bool().Draw(r, "normalize")}
		m.topK = rapid.IntRange(1, min(m.count, 9)).Draw(r, "topK")
		tokens := rapid.IntRange(1, 50).Draw(r, "tokens")
		m.logits = random(rapid.Uint64().Draw(r, "seed"), tokens*m.count)
		for i := range m.logits { // coarse, so that there are ties
			m.logits[i] = float32(math.Round(float64(m.logits[i])*8)) / 4
		}
		var experts []int32
		var weights []float32
		for i, b := range backends {
			gotExperts, gotWeights := route(t, b, m.logits, m.count, m.topK, m.normalize)
			if i == 0 {
				experts, weights = gotExperts, gotWeights
			}
			if !slices.Equal(gotExperts, experts) {
				r.Fatalf("%v: experts %v, want %v", setups[i], gotExperts, experts)
			}
			sameBits(r, setups[i].String(), gotWeights, weights)
		}
		for i := range tokens {
			want, p := m.choice(m.logits[i*m.count : (i+1)*m.count])
			for j, e := range want {
				if got := experts[i*m.topK+j]; int(got) != e {
					r.Fatalf("token %d, place %d: expert %d, want %d", i, j, got, e)
				}
				if got := float64(weights[i*m.topK+j]); math.Abs(got-p[j]) > 1e-6*p[j] {
					r.Fatalf("token %d, place %d: weight %v, want %v", i, j, got, p[j])
				}
			}
		}
	})
}

// Combine multiplies and adds in the order of the choice, each step rounded once, and adds to dst last.
func TestCombineOrder(t *testing.T) {
	const tokens, count, topK, n = 6, 5, 3, 4100 // over one stretch of combineWidth
	logits, old, src := random(1, tokens*count), random(2, tokens*n), random(3, tokens*topK*n)
	for _, o := range setups {
		b := open(t, o)
		mem, err := b.Routing(tokens, count, topK)
		if err != nil {
			t.Fatal(err)
		}
		b.Route(mem, put(t, b, logits, count), compute.Router{})
		dst := put(t, b, old, n)
		b.Combine(dst, put(t, b, src, n), mem, 0)
		r := mem.(*routing)
		var want []float32
		for i := range tokens {
			for c := range n {
				sum := float32(0)
				for slot := i * topK; slot < (i+1)*topK; slot++ {
					sum = fma32(r.weight[slot], src[int(r.row[slot])*n+c], sum)
				}
				want = append(want, old[i*n+c]+sum)
			}
		}
		sameBits(t, o.String(), get(t, b, dst), want)
	}
}

func TestExpertMistakes(t *testing.T) {
	b, other := open(t, Options{Threads: 2}), open(t, Options{Threads: 1})
	matrix, _ := quantised(t, tensor.F32, random(1, 8*16), 8, 16)
	three, err := b.LoadExperts(0, []tensor.Tensor{matrix, matrix, matrix})
	if err != nil {
		t.Fatal(err)
	}
	two, err := b.LoadExperts(2, []tensor.Tensor{matrix, matrix})
	if err != nil {
		t.Fatal(err)
	}
	vector, _ := quantised(t, tensor.F32, random(1, 8), 8)
	routing := func(b *Backend) compute.Buffer {
		mem, err := b.Routing(4, 3, 2)
		if err != nil {
			t.Fatal(err)
		}
		return mem
	}
	mem, freed, foreign := routing(b), routing(b), routing(other)
	b.Free(freed)
	logits, x, rows, out := put(t, b, random(1, 4*3), 3), put(t, b, random(2, 4*16), 16), put(t, b, random(3, 8*16), 16), put(t, b, random(4, 8*8), 8)
	b.Route(mem, logits, compute.Router{})
	product := func(dst, src compute.Mat, w compute.Experts, mem compute.Buffer, opt compute.Linear) func() {
		return func() { b.MatMulExperts(dst, src, w, mem, opt) }
	}
	for name, f := range map[string]func(){
		"Route experts":     func() { b.Route(mem, logits.Columns(0, 2), compute.Router{}) },
		"Route tokens":      func() { b.Route(mem, out.Columns(0, 3), compute.Router{}) },
		"Route memory":      func() { b.Route(x.Buf, logits, compute.Router{}) },
		"Route nothing":     func() { b.Route(nil, logits, compute.Router{}) },
		"Route freed":       func() { b.Route(freed, logits, compute.Router{}) },
		"Route foreign":     func() { b.Route(foreign, logits, compute.Router{}) },
		"Route as matrix":   func() { b.Route(mem, compute.Mat{Buf: mem, Rows: 4, Cols: 3, Stride: 3}, compute.Router{}) },
		"Dispatch tokens":   func() { b.Dispatch(rows, x.Slice(0, 3), mem) },
		"Dispatch rows":     func() { b.Dispatch(rows.Slice(0, 7), x, mem) },
		"Dispatch columns":  func() { b.Dispatch(rows.Columns(0, 8), x, mem) },
		"Combine tokens":    func() { b.Combine(x, rows, mem, 1) },
		"Combine rows":      func() { b.Combine(x, rows.Slice(0, 7), mem, 0) },
		"Combine columns":   func() { b.Combine(x.Columns(0, 8), rows, mem, 0) },
		"product rows":      product(out.Slice(0, 4), rows.Slice(0, 4), three, mem, compute.Linear{}),
		"product dst":       product(out.Slice(0, 4), rows, three, mem, compute.Linear{}),
		"product shape":     product(rows, out, three, mem, compute.Linear{}),
		"product experts":   product(out, rows, two, mem, compute.Linear{}),
		"product nothing":   product(out, rows, nil, mem, compute.Linear{}),
		"product bias":      product(out, rows, three, mem, compute.Linear{Bias: load(t, b, vector)}),
		"product residual":  product(out, rows, three, mem, compute.Linear{Residual: true}),
		"product segments":  product(out, rows, three, mem, compute.Linear{Segments: 3}),
		"product no memory": product(out, rows, three, nil, compute.Linear{}),
	} {
		before := get(t, b, x)
		f()
		b.SiLUMul(x, x, x) // must not run
		var op *OpError
		if err := b.Read(make([]float32, 64), x); !errors.As(err, &op) || op.Op == "" {
			t.Errorf("%s: error is %v", name, err)
		}
		sameBits(t, name, get(t, b, x), before)
	}
	for _, n := range [][3]int{{0, 3, 2}, {4, 0, 0}, {4, 3, 0}, {4, 3, 4}, {4, maxExperts + 1, 1}, {math.MaxInt, 3, 2}} {
		if _, err := b.Routing(n[0], n[1], n[2]); err == nil {
			t.Errorf("Routing%v gave no error", n)
		}
	}
}

func TestLoadExpertsRefusals(t *testing.T) {
	b := open(t, Options{Threads: 1})
	of := func(d tensor.DType, shape ...int) tensor.Tensor {
		n := 1
		for _, s := range shape {
			n *= s
		}
		return tensor.Tensor{Name: "w", DType: d, Shape: shape, Data: make([]byte, d.RowBytes(n))}
	}
	for name, ts := range map[string][]tensor.Tensor{
		"none":      nil,
		"vector":    {of(tensor.F32, 8)},
		"rows":      {of(tensor.F32, 4, 8), of(tensor.F32, 5, 8)},
		"columns":   {of(tensor.F32, 4, 8), of(tensor.F32, 4, 9)},
		"type":      {of(tensor.F32, 4, 8), of(tensor.F16, 4, 8)},
		"unusable":  {of(tensor.I8, 4, 8)},
		"cut short": {of(tensor.F32, 4, 8), {DType: tensor.F32, Shape: []int{4, 8}, Data: make([]byte, 127)}},
	} {
		var e *LoadError
		if _, err := b.LoadExperts(0, ts); !errors.As(err, &e) {
			t.Errorf("%s: error is %v", name, err)
		}
	}
}

func TestExpertsAllocateNothing(t *testing.T) {
	b := open(t, Options{Threads: 2})
	const tokens, count, topK, n = 30, 8, 2, 64
	matrix, _ := quantised(t, tensor.F32, random(1, n*n), n, n)
	w, err := b.LoadExperts(0, slices.Repeat([]tensor.Tensor{matrix}, count))
	if err != nil {
		t.Fatal(err)
	}
	mem, err := b.Routing(tokens, count, topK)
	if err != nil {
		t.Fatal(err)
	}
	logits, x, rows, out := put(t, b, skewed(tokens, count), count), put(t, b, random(2, tokens*n), n), blank(t, b, tokens*topK, n, n), blank(t, b, tokens*topK, n, n)
	if got := testing.AllocsPerRun(10, func() {
		b.Route(mem, logits, compute.Router{Normalize: true})
		b.Dispatch(rows, x, mem)
		b.MatMulExperts(out, rows, w, mem, compute.Linear{Segments: 4})
		b.Combine(x, out, mem, 0)
	}); got != 0 {
		t.Errorf("%v allocations", got)
	}
	if err := b.Read(nil, x.Slice(0, 0)); err != nil {
		t.Fatal(err)
	}
}
