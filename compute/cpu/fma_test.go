package cpu

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
)

// adversarial draws a float32 whose sums and products tend to land on and next to halfway points, at the
// ends of the range, and on special values.
func adversarial(r *rand.Rand) float32 {
	switch r.IntN(8) {
	case 0:
		return [...]float32{0, float32(math.Copysign(0, -1)), 1, -1, float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN()),
			math.MaxFloat32, math.SmallestNonzeroFloat32, 0x1p-126, 0x1p-64, 0x1p64}[r.IntN(12)]
	case 1: // few significant bits
		return float32(math.Ldexp(float64(r.IntN(16)-8), r.IntN(280)-150))
	case 2: // near a power of two
		return math.Float32frombits(math.Float32bits(float32(math.Ldexp(1, r.IntN(250)-125))) + uint32(r.IntN(5)) - 2)
	case 3:
		return math.Float32frombits(r.Uint32())
	case 4: // subnormal
		return math.Float32frombits(r.Uint32() & 0x807fffff)
	case 5: // around one, so that three draws interact
		return float32(math.Ldexp(float64(int32(r.Uint32())>>7), -24+r.IntN(3)))
	default: // a few high and a few low bits
		return math.Float32frombits(uint32(127+r.IntN(60)-30)<<23 | uint32(r.IntN(8))<<20 | uint32(r.IntN(8)) | uint32(r.IntN(2))<<31)
	}
}

// fmaBig is x*y + z in exact arithmetic, rounded once. Finite arguments only; zero results excepted.
func fmaBig(x, y, z float32) float32 {
	exact := func(v float32) *big.Float { return new(big.Float).SetPrec(2000).SetFloat64(float64(v)) }
	sum := new(big.Float).SetPrec(2000).Mul(exact(x), exact(y))
	sum.Add(sum, exact(z))
	f, _ := sum.Float32()
	return f
}

// nearHalfway draws operands whose exact sum lies within a hair of halfway between two results, normal or
// subnormal, so that rounding it to float64 first loses on which side.
func nearHalfway(r *rand.Rand) (x, y, z float32) {
	tiny := math.Ldexp(1, -[]int{20, 22, 23}[r.IntN(3)])
	x, y = float32(1+tiny), float32(1-tiny)
	if r.IntN(2) == 0 {
		y = float32(1 + tiny/2)
	}
	k := float64(r.IntN(1<<23) + 1)
	scale := -149 + r.IntN(40)*r.IntN(2)
	x, y = float32(math.Ldexp(float64(x), scale/2-1)), float32(math.Ldexp(float64(y), scale-scale/2))
	if r.IntN(2) == 0 {
		x = -x
	}
	return x, y, float32(math.Ldexp(k, scale))
}

func TestFMAAgainstExactArithmetic(t *testing.T) {
	skipUnderRace(t)
	r := rand.New(rand.NewPCG(1, 2))
	finite := func(v float32) bool { return !math.IsInf(float64(v), 0) && v == v }
	checked := 0
	for range 100_000 {
		x, y, z := adversarial(r), adversarial(r), adversarial(r)
		if r.IntN(8) == 0 {
			x, y, z = nearHalfway(r)
		}
		if !finite(x) || !finite(y) || !finite(z) {
			continue
		}
		want := fmaBig(x, y, z)
		got := fma32(x, y, z)
		if want == 0 && got == 0 {
			continue // the sign of an exact zero: see the hardware test
		}
		checked++
		if math.Float32bits(got) != math.Float32bits(want) {
			t.Fatalf("fma32(%x, %x, %x) is %x, want %x", x, y, z, got, want)
		}
	}
	if checked < 50_000 {
		t.Fatalf("only %d cases were checked", checked)
	}
}

func TestExp(t *testing.T) {
	worst := 0.0
	for x := float32(-87); x < 88; x += 0.00371 {
		want := math.Exp(float64(x))
		got := float64(exp32(x))
		ulp := math.Ldexp(1, math.Ilogb(want)-23)
		worst = max(worst, math.Abs(got-want)/ulp)
	}
	if worst > 1.01 {
		t.Errorf("exp is off by %.3f units in the last place", worst)
	}
	for x, want := range map[float32]float32{
		0: 1, float32(math.Inf(-1)): 0, float32(math.Inf(1)): float32(math.Inf(1)), -200: 0, 200: float32(math.Inf(1)),
		-103: 1e-45, -105: 0, 88.8: float32(math.Inf(1)),
	} {
		if got := exp32(x); got != want {
			t.Errorf("exp(%v) is %v, want %v", x, got, want)
		}
	}
	if got := exp32(float32(math.NaN())); got == got {
		t.Errorf("exp(NaN) is %v", got)
	}
}
