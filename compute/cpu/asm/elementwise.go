package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

func finish() {
	function("finishAVX2", "(dst *float32, dstStride int, part *float32, partStride int, bias *float32, rows, n, residual int)",
		"finishAVX2 is kernels.finish for n divisible by 8.")
	dst, dstStride, part, partStride, bias := param("dst"), param("dstStride"), param("part"), param("partStride"), param("bias")
	rows, n, residual := param("rows"), param("n"), param("residual")
	SHRQ(Imm(3), n)
	i, left := GP64(), GP64()
	count("row", rows, func() {
		XORQ(i, i)
		MOVQ(n, left)
		count("step", left, func() {
			v := YMM()
			VMOVUPS(Mem{Base: part, Index: i, Scale: 1}, v)
			TESTQ(bias, bias)
			JZ(LabelRef("unbiased"))
			VADDPS(Mem{Base: bias, Index: i, Scale: 1}, v, v)
			Label("unbiased")
			TESTQ(residual, residual)
			JZ(LabelRef("store"))
			VADDPS(Mem{Base: dst, Index: i, Scale: 1}, v, v)
			Label("store")
			VMOVUPS(v, Mem{Base: dst, Index: i, Scale: 1})
			ADDQ(Imm(32), i)
		})
		ADDQ(dstStride, dst)
		ADDQ(partStride, part)
	})
	done()
}

func norm() {
	function("normAVX2", "(dst *float32, dstStride int, src *float32, srcStride int, w *float32, rows, n int, eps float32)",
		"normAVX2 is kernels.norm for n divisible by 8.")
	dst, dstStride, src, srcStride, w := param("dst"), param("dstStride"), param("src"), param("srcStride"), param("w")
	rows, n := param("rows"), param("n")
	eps := Load(Param("eps"), XMM()).(reg.VecVirtual)
	size, one := XMM(), XMM()
	VXORPS(size, size, size)
	VCVTSI2SSQ(n, size, size)
	VMOVSS(every("expOne", 1), one)
	SHRQ(Imm(3), n)
	i, left := GP64(), GP64()
	count("row", rows, func() {
		acc := YMM()
		VXORPS(acc, acc, acc)
		XORQ(i, i)
		MOVQ(n, left)
		count("square", left, func() {
			v := YMM()
			VMOVUPS(Mem{Base: src, Index: i, Scale: 1}, v)
			VFMADD231PS(v, v, acc)
			ADDQ(Imm(32), i)
		})
		s := hsum(acc)
		VDIVSS(size, s, s)
		VADDSS(eps, s, s)
		VSQRTSS(s, s, s)
		VDIVSS(s, one, s)
		scale := YMM()
		VBROADCASTSS(s, scale)
		XORQ(i, i)
		MOVQ(n, left)
		count("scale", left, func() {
			v := YMM()
			VMULPS(Mem{Base: src, Index: i, Scale: 1}, scale, v)
			VMULPS(Mem{Base: w, Index: i, Scale: 1}, v, v)
			VMOVUPS(v, Mem{Base: dst, Index: i, Scale: 1})
			ADDQ(Imm(32), i)
		})
		ADDQ(dstStride, dst)
		ADDQ(srcStride, src)
	})
	done()
}

// exp replaces x by e^x; see exp.go of compute/cpu, whose constants these are.
func exp(x reg.VecVirtual) {
	t, r, p := YMM(), YMM(), YMM()
	// The constant is the first source, so that NaN comes through.
	VMOVUPS(every("expLow", -120), t)
	VMAXPS(x, t, x)
	VMOVUPS(every("expHigh", 120), t)
	VMINPS(x, t, x)
	magic := every("expMagic", 12582912)
	VMOVUPS(magic, t)
	VFMADD231PS(every("expLog2e", 1.44269502), x, t)
	f := YMM()
	VSUBPS(magic, t, f)
	VMOVAPS(x, r)
	VFNMADD231PS(every("expLn2Hi", 0.693147182), f, r)
	VFNMADD231PS(every("expLn2Lo", -1.90465421e-9), f, r)
	VMOVUPS(every("expC6", 0.00138145394), p)
	VFMADD213PS(every("expC5", 0.00836874545), r, p)
	VFMADD213PS(every("expC4", 0.041668389), r, p)
	VFMADD213PS(every("expC3", 0.166665211), r, p)
	VFMADD213PS(every("expC2", 0.49999994), r, p)
	VFMADD213PS(every("expOne", 1), r, p)
	VFMADD213PS(every("expOne", 1), r, p)
	n, h := YMM(), YMM()
	VPSUBD(magic, t, n)
	VPSRAD(Imm(1), n, h)
	VPSUBD(h, n, n)
	bias := everyInt("expBias", 127)
	VPADDD(bias, h, h)
	VPADDD(bias, n, n)
	VPSLLD(Imm(23), h, h)
	VPSLLD(Imm(23), n, n)
	VMULPS(h, p, p)
	VMULPS(n, p, x)
}

func silu() {
	function("siluAVX2", "(dst, gate, up *float32, n int)", "siluAVX2 is kernels.silu for n divisible by 8.")
	dst, gate, up, n := param("dst"), param("gate"), param("up"), param("n")
	SHRQ(Imm(3), n)
	i := GP64()
	XORQ(i, i)
	count("step", n, func() {
		g, e := YMM(), YMM()
		VMOVUPS(Mem{Base: gate, Index: i, Scale: 1}, g)
		VXORPS(everyInt("signBit", -1<<31), g, e)
		exp(e)
		VADDPS(every("expOne", 1), e, e)
		VDIVPS(e, g, g)
		VMULPS(Mem{Base: up, Index: i, Scale: 1}, g, g)
		VMOVUPS(g, Mem{Base: dst, Index: i, Scale: 1})
		ADDQ(Imm(32), i)
	})
	done()
}

func rotateHalves() {
	function("rotateHalvesAVX2", "(x, cos, sin *float32, pairs int)", "rotateHalvesAVX2 is kernels.rotateHalves for pairs divisible by 8.")
	x, cos, sin, pairs := param("x"), param("cos"), param("sin"), param("pairs")
	second, i := GP64(), GP64()
	LEAQ(Mem{Base: x, Index: pairs, Scale: 4}, second)
	SHRQ(Imm(3), pairs)
	XORQ(i, i)
	count("step", pairs, func() {
		at := func(base reg.Register) Mem { return Mem{Base: base, Index: i, Scale: 1} }
		a, b, c, s, ac, bs, bc := YMM(), YMM(), YMM(), YMM(), YMM(), YMM(), YMM()
		VMOVUPS(at(x), a)
		VMOVUPS(at(second), b)
		VMOVUPS(at(cos), c)
		VMOVUPS(at(sin), s)
		VMULPS(c, a, ac)
		VMULPS(s, b, bs)
		VSUBPS(bs, ac, ac)
		VMULPS(c, b, bc)
		VMULPS(s, a, a)
		VADDPS(a, bc, bc)
		VMOVUPS(ac, at(x))
		VMOVUPS(bc, at(second))
		ADDQ(Imm(32), i)
	})
	done()
}

func rotatePairs() {
	function("rotatePairsAVX2", "(x, cos, sin *float32, pairs int)", "rotatePairsAVX2 is kernels.rotatePairs for pairs divisible by 4.")
	x, cos, sin, pairs := param("x"), param("cos"), param("sin"), param("pairs")
	SHRQ(Imm(2), pairs)
	i := GP64()
	XORQ(i, i)
	count("step", pairs, func() {
		// Each cosine and sine twice: widened to the even lanes, then copied to the odd ones.
		v, c, s := YMM(), YMM(), YMM()
		VPMOVZXDQ(Mem{Base: cos, Index: i, Scale: 1}, c)
		VPMOVZXDQ(Mem{Base: sin, Index: i, Scale: 1}, s)
		VMOVSLDUP(c, c)
		VMOVSLDUP(s, s)
		VMOVUPS(Mem{Base: x, Index: i, Scale: 2}, v)
		VMULPS(c, v, c)
		VPERMILPS(Imm(0xb1), v, v)
		VMULPS(s, v, s)
		VADDSUBPS(s, c, c)
		VMOVUPS(c, Mem{Base: x, Index: i, Scale: 2})
		ADDQ(Imm(16), i)
	})
	done()
}

func toBF16() {
	function("toBF16AVX2", "(dst *uint16, src *float32, n int)", "toBF16AVX2 is kernels.toBF16 for n divisible by 8.")
	dst, src, n := param("dst"), param("src"), param("n")
	SHRQ(Imm(3), n)
	count("step", n, func() {
		v, odd, nan := YMM(), YMM(), YMM()
		VMOVUPS(Mem{Base: src}, v)
		VCMPPS(Imm(3), v, v, nan) // unordered
		VPSRLD(Imm(16), v, odd)
		quiet := YMM()
		VPOR(everyInt("quietBit", 0x40), odd, quiet)
		VPAND(everyInt("oneInt", 1), odd, odd)
		VPADDD(everyInt("roundUp", 0x7fff), v, v)
		VPADDD(odd, v, v)
		VPSRLD(Imm(16), v, v)
		VBLENDVPS(nan, quiet, v, v)
		high := XMM()
		VEXTRACTF128(Imm(1), v, high)
		VPACKUSDW(high, v.AsX(), high)
		VMOVDQU(high, Mem{Base: dst})
		ADDQ(Imm(32), src)
		ADDQ(Imm(16), dst)
	})
	done()
}
