package engine

import "math/bits"

// philox is Philox 4x32-10, a counter-based generator (Salmon et al., "Parallel Random Numbers: As Easy
// as 1, 2, 3", 2011).
func philox(c [4]uint32, k [2]uint32) [4]uint32 {
	const (
		m0, m1 = 0xD2511F53, 0xCD9E8D57
		w0, w1 = 0x9E3779B9, 0xBB67AE85
	)
	for range 10 {
		h0, l0 := bits.Mul32(m0, c[0])
		h1, l1 := bits.Mul32(m1, c[2])
		c = [4]uint32{h1 ^ c[1] ^ k[0], l1, h0 ^ c[3] ^ k[1], l0}
		k[0] += w0
		k[1] += w1
	}
	return c
}

// uniform draws the number in [0, 1) that belongs to (seed, choice, position). Nothing but these three
// decides it, so neither batch mates nor a restart can change a token.
func uniform(seed uint64, choice, position int) float64 {
	c, p := uint64(choice), uint64(position)
	r := philox(
		[4]uint32{uint32(p), uint32(p >> 32), uint32(c), uint32(c >> 32)},
		[2]uint32{uint32(seed), uint32(seed >> 32)})
	return float64(uint64(r[0])<<21|uint64(r[1])>>11) / (1 << 53)
}
