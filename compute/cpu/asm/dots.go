package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// dots multiplies four weight rows with three input rows at a time: twelve accumulators, three input
// vectors and one weight vector fill the sixteen registers, and seven loads feed twelve FMAs.
func dots() {
	function("dotsAVX2", "(out *float32, outStride int, w *float32, wStride int, x *float32, xStride, n, k int, carry *float32, mode int)",
		"dotsAVX2 is kernels.dots for k divisible by 8.")
	d := dotsArgs{
		out: param("out"), outStride: param("outStride"), w: param("w"), wStride: param("wStride"),
		x: param("x"), xStride: param("xStride"), carry: param("carry"), mode: param("mode"),
	}
	n := param("n")
	k := param("k")
	SHRQ(Imm(3), k)
	d.steps = k
	Label("three")
	CMPQ(n, Imm(4))
	JE(LabelRef("two")) // 4 = 2+2 keeps more sums in flight than 3+1
	CMPQ(n, Imm(3))
	JL(LabelRef("two"))
	d.tile(3)
	SUBQ(Imm(3), n)
	JMP(LabelRef("three"))
	Label("two")
	CMPQ(n, Imm(2))
	JL(LabelRef("one"))
	d.tile(2)
	SUBQ(Imm(2), n)
	JMP(LabelRef("two"))
	Label("one")
	TESTQ(n, n)
	JZ(LabelRef("done"))
	d.tile(1)
	Label("done")
	done()
}

type dotsArgs struct {
	out, outStride, w, wStride, x, xStride, carry, mode, steps reg.GPVirtual
}

func (d dotsArgs) tile(inputs int) {
	name := func(s string) string { return fmt.Sprintf("tile%d_%s", inputs, s) }
	acc := make([][]reg.VecVirtual, inputs)
	for i := range acc {
		for range 4 {
			acc[i] = append(acc[i], YMM())
		}
	}
	each := func(f func(i, j int)) {
		for i := range inputs {
			for j := range 4 {
				f(i, j)
			}
		}
	}
	carry := func(i, j int) Mem { return Mem{Base: d.carry, Disp: (i*4 + j) * 32} }

	BTQ(Imm(0), d.mode)
	JCS(LabelRef(name("resume")))
	each(func(i, j int) { VXORPS(acc[i][j], acc[i][j], acc[i][j]) })
	JMP(LabelRef(name("start")))
	Label(name("resume"))
	each(func(i, j int) { VMOVUPS(carry(i, j), acc[i][j]) })
	Label(name("start"))

	w, x, w3, steps := GP64(), GP64(), GP64(), GP64()
	MOVQ(d.w, w)
	MOVQ(d.x, x)
	LEAQ(Mem{Base: d.wStride, Index: d.wStride, Scale: 2}, w3)
	step := func(disp int) {
		row := [4]Mem{{Base: w}, {Base: w, Index: d.wStride, Scale: 1}, {Base: w, Index: d.wStride, Scale: 2}, {Base: w, Index: w3, Scale: 1}}
		in := [3]Mem{{Base: x}, {Base: x, Index: d.xStride, Scale: 1}, {Base: x, Index: d.xStride, Scale: 2}}
		var xs []reg.VecVirtual
		for i := range inputs {
			v := YMM()
			VMOVUPS(in[i].Offset(disp), v)
			xs = append(xs, v)
		}
		for j := range 4 {
			v := YMM()
			VMOVUPS(row[j].Offset(disp), v)
			for i := range inputs {
				VFMADD231PS(v, xs[i], acc[i][j])
			}
		}
	}
	const unroll = 4
	MOVQ(d.steps, steps)
	SUBQ(Imm(unroll), steps)
	JL(LabelRef(name("tail")))
	Label(name("loop"))
	for u := range unroll {
		step(32 * u)
	}
	ADDQ(Imm(32*unroll), w)
	ADDQ(Imm(32*unroll), x)
	SUBQ(Imm(unroll), steps)
	JGE(LabelRef(name("loop")))
	Label(name("tail"))
	ADDQ(Imm(unroll), steps)
	JZ(LabelRef(name("sum")))
	Label(name("single"))
	step(0)
	ADDQ(Imm(32), w)
	ADDQ(Imm(32), x)
	DECQ(steps)
	JNZ(LabelRef(name("single")))
	Label(name("sum"))

	BTQ(Imm(1), d.mode)
	JCC(LabelRef(name("finish")))
	each(func(i, j int) { VMOVUPS(acc[i][j], carry(i, j)) })
	JMP(LabelRef(name("next")))
	Label(name("finish"))
	for i := range inputs {
		VMOVUPS(reduce4(acc[i]), Mem{Base: d.out})
		ADDQ(d.outStride, d.out)
	}
	Label(name("next"))
	ADDQ(imm(inputs*4*32), d.carry)
	for range inputs {
		ADDQ(d.xStride, d.x)
	}
}

// reduce4 sums the lanes of four accumulators by the fixed tree and returns the four sums.
func reduce4(a []reg.VecVirtual) reg.VecVirtual {
	// Both halves of two accumulators side by side, added: lanes 0+4, 1+5, 2+6, 3+7 of each.
	fold := func(a, b reg.VecVirtual) reg.VecVirtual {
		t := YMM()
		VPERM2F128(Imm(0x21), b, a, t)
		VBLENDPS(Imm(0xf0), b, a, a)
		VADDPS(t, a, a)
		return a
	}
	p, q := fold(a[0], a[2]), fold(a[1], a[3])
	t := YMM()
	VSHUFPS(Imm(0x4e), q, p, t)
	VBLENDPS(Imm(0xcc), q, p, p)
	VADDPS(t, p, p)
	high, even := XMM(), XMM()
	VEXTRACTF128(Imm(1), p, high)
	VSHUFPS(Imm(0x88), high, p.AsX(), even)
	VSHUFPS(Imm(0xdd), high, p.AsX(), high)
	VADDPS(high, even, even)
	return even
}
