package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// tokens of an attention tile.
const tile = 16

func fold() {
	function("foldAVX2", "(scores, maximum, sum, rescale *float32, valid *int32, scale float32, n int)", "foldAVX2 is kernels.fold.")
	scores, maximum, sum, rescale, valid, n := param("scores"), param("maximum"), param("sum"), param("rescale"), param("valid"), param("n")
	scale := YMM()
	VBROADCASTSS(NewParamAddr("scale", 40), scale)
	minusInf := everyInt("minusInf", -0x800000)
	count("vector", n, func() {
		s := [2]reg.VecVirtual{YMM(), YMM()}
		allowed, limit, none := YMM(), YMM(), YMM()
		VPBROADCASTD(Mem{Base: valid}, limit)
		VMOVUPS(minusInf, none)
		for i := range s {
			VMULPS(Mem{Base: scores, Disp: 32 * i}, scale, s[i])
			VPCMPGTD(iota32(8*i), limit, allowed)
			VBLENDVPS(allowed, s[i], none, s[i])
		}
		m, t, old := XMM(), XMM(), XMM()
		both := YMM()
		VMAXPS(s[1], s[0], both)
		VEXTRACTF128(Imm(1), both, t)
		VMAXPS(t, both.AsX(), m)
		VMOVHLPS(m, m, t)
		VMAXPS(t, m, m)
		VMOVSHDUP(m, t)
		VMAXSS(t, m, m)
		VMOVSS(Mem{Base: maximum}, old)
		VMAXSS(m, old, m)
		VMOVSS(m, Mem{Base: maximum})
		wide := YMM()
		VBROADCASTSS(m, wide)
		for i := range s {
			VSUBPS(wide, s[i], s[i])
			exp(s[i])
			VMOVUPS(s[i], Mem{Base: scores, Disp: 32 * i})
		}
		VADDPS(s[1], s[0], s[0])
		total := hsum(s[0])
		// Most tiles leave the maximum as it was, and e^0 is exactly 1.
		factor := YMM()
		VMOVUPS(every("expOne", 1), factor)
		VUCOMISS(m, old)
		JE(LabelRef("same"))
		VSUBSS(m, old, factor.AsX())
		exp(factor)
		Label("same")
		VMOVSS(factor.AsX(), Mem{Base: rescale})
		VFMADD231SS(Mem{Base: sum}, factor.AsX(), total)
		VMOVSS(total, Mem{Base: sum})
		ADDQ(Imm(4*tile), scores)
		ADDQ(Imm(4), maximum)
		ADDQ(Imm(4), sum)
		ADDQ(Imm(4), rescale)
		ADDQ(Imm(4), valid)
	})
	done()
}

// weigh keeps some accumulators of three vectors, or more of one, in registers while it goes over the
// tile's tokens.
func weigh() {
	function("weighAVX2", "(acc, rescale, p, v *float32, vStride, n, dim, tokens int)", "weighAVX2 is kernels.weigh for dim divisible by 8.")
	a := weighArgs{
		acc: param("acc"), rescale: param("rescale"), p: param("p"), v: param("v"), vStride: param("vStride"), dim: param("dim"), tokens: param("tokens"),
	}
	n := param("n")
	SHLQ(Imm(2), a.dim)
	Label("three")
	CMPQ(n, Imm(3))
	JL(LabelRef("one"))
	a.rows(3, 4, 1)
	SUBQ(Imm(3), n)
	JMP(LabelRef("three"))
	Label("one")
	TESTQ(n, n)
	JZ(LabelRef("done"))
	a.rows(1, 8, 2, 1)
	DECQ(n)
	JMP(LabelRef("one"))
	Label("done")
	done()
}

type weighArgs struct{ acc, rescale, p, v, vStride, dim, tokens reg.GPVirtual }

// rows handles some vectors: widths are the numbers of registers a step covers, tried in order.
func (a weighArgs) rows(vectors int, widths ...int) {
	acc, v, left := GP64(), GP64(), GP64()
	MOVQ(a.acc, acc)
	MOVQ(a.v, v)
	MOVQ(a.dim, left)
	for _, width := range widths {
		name := func(s string) string { return fmt.Sprintf("rows%d_width%d_%s", vectors, width, s) }
		Label(name("more"))
		CMPQ(left, imm(32*width))
		JL(LabelRef(name("none")))
		a.step(vectors, width, acc, v, name("token"))
		ADDQ(imm(32*width), acc)
		ADDQ(imm(32*width), v)
		SUBQ(imm(32*width), left)
		JMP(LabelRef(name("more")))
		Label(name("none"))
	}
	for range vectors {
		ADDQ(a.dim, a.acc)
	}
	ADDQ(imm(4*vectors), a.rescale)
	ADDQ(imm(4*tile*vectors), a.p)
}

func (a weighArgs) step(vectors, width int, acc, v reg.GPVirtual, label string) {
	at := [3]Mem{{Base: acc}, {Base: acc, Index: a.dim, Scale: 1}, {Base: acc, Index: a.dim, Scale: 2}}
	sums := make([][]reg.VecVirtual, vectors)
	for r := range sums {
		c := YMM()
		VBROADCASTSS(Mem{Base: a.rescale, Disp: 4 * r}, c)
		for i := range width {
			s := YMM()
			VMULPS(at[r].Offset(32*i), c, s)
			sums[r] = append(sums[r], s)
		}
	}
	p, row, left := GP64(), GP64(), GP64()
	MOVQ(a.p, p)
	MOVQ(v, row)
	MOVQ(a.tokens, left)
	count(label, left, func() {
		if vectors == 1 {
			w := YMM()
			VBROADCASTSS(Mem{Base: p}, w)
			for i := range width {
				VFMADD231PS(Mem{Base: row, Disp: 32 * i}, w, sums[0][i])
			}
		} else {
			var ws []reg.VecVirtual
			for r := range vectors {
				w := YMM()
				VBROADCASTSS(Mem{Base: p, Disp: 4 * tile * r}, w)
				ws = append(ws, w)
			}
			for i := range width {
				x := YMM()
				VMOVUPS(Mem{Base: row, Disp: 32 * i}, x)
				for r := range vectors {
					VFMADD231PS(x, ws[r], sums[r][i])
				}
			}
		}
		ADDQ(Imm(4), p)
		ADDQ(a.vStride, row)
	})
	for r := range sums {
		for i := range width {
			VMOVUPS(sums[r][i], at[r].Offset(32*i))
		}
	}
}
