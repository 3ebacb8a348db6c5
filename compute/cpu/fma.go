package cpu

import "math"

// fma32 is x*y + z rounded once to float32, as the FMA instructions do.
//
// The product of two float32 values is exact in float64 and the sum is rounded there once. Rounding that
// again to float32 differs from a single rounding only when the float64 sum sits exactly halfway between
// two float32 values although the true sum does not, or when the result is subnormal (where halfway lies
// elsewhere); fmaExact corrects those.
func fma32(x, y, z float32) float32 {
	p := float64(x) * float64(y)
	s := p + float64(z)
	if delicate(s) {
		return fmaExact(p, float64(z))
	}
	return float32(s)
}

// delicate reports whether rounding s again may go wrong.
func delicate(s float64) bool {
	b := math.Float64bits(s)
	return b<<35 == 1<<63 || b<<1 < minNormal32<<1
}

// minNormal32 is 2^-126 as float64 bits.
const minNormal32 = uint64(1023-126) << 52

// fmaExact adds with round-to-odd: an inexact sum gets an odd last bit, which keeps "above or below
// halfway" alive for the second rounding.
func fmaExact(p, z float64) float32 {
	s := p + z
	if s == 0 || math.IsNaN(s) || math.IsInf(s, 0) {
		return float32(s)
	}
	t := s - p
	e := (p - (s - t)) + (z - t) // exactly p + z - s
	if b := math.Float64bits(s); e != 0 && b&1 == 0 {
		if (e > 0) == (s > 0) {
			b++
		} else {
			b--
		}
		s = math.Float64frombits(b)
	}
	return float32(s)
}
