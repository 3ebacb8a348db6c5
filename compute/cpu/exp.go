package cpu

import "math"

// The exponential of both paths: n = round(x/ln 2), r = x - n ln 2 in two FMAs, a polynomial in r by
// FMA, then two exact scalings by powers of two so that results reach zero and infinity gradually.
// The assembly takes the same constants from here (asm/main.go repeats them; a test compares the bits).
const (
	expClamp = 120        // beyond it the result is 0 or +Inf anyway
	expMagic = 12582912.0 // 1.5 * 2^23: adding it rounds to an integer in the low bits
	expLog2e = 1.44269502
	expLn2Hi = 0.693147182
	expLn2Lo = -1.90465421e-9
	// Minimax fit of (e^r - 1 - r)/r^2 on |r| <= ln(2)/2, relative error 4e-9.
	expC2 = 0.49999994
	expC3 = 0.166665211
	expC4 = 0.041668389
	expC5 = 0.00836874545
	expC6 = 0.00138145394
)

// exp32 is e^x with about one unit in the last place of error.
func exp32(x float32) float32 {
	// Written so that NaN stays NaN, like MAXPS/MINPS with x as the second source.
	if x < -expClamp {
		x = -expClamp
	} else if x > expClamp {
		x = expClamp
	}
	t := fma32(x, expLog2e, expMagic)
	n := int32(math.Float32bits(t)) - int32(math.Float32bits(expMagic))
	f := t - expMagic
	r := fma32(f, -expLn2Hi, x)
	r = fma32(f, -expLn2Lo, r)
	p := fma32(expC6, r, expC5)
	p = fma32(p, r, expC4)
	p = fma32(p, r, expC3)
	p = fma32(p, r, expC2)
	p = fma32(p, r, 1)
	p = fma32(p, r, 1)
	half := n >> 1
	a := math.Float32frombits(uint32(half+127) << 23)
	b := math.Float32frombits(uint32(n-half+127) << 23)
	return float32(float32(p*a) * b)
}
