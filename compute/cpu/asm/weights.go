package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// weightType says how to turn stored elements into f32 registers.
type weightType struct {
	name     string
	elements int // converted a step
	bytes    int // that those take
	// begin loads what a step's elements share and returns a function that converts elements
	// [8*i, 8*i+8) of the step at src.
	begin func(src Mem) func(i int) reg.VecVirtual
}

var weightTypes = []weightType{
	{"F32", 8, 32, func(src Mem) func(int) reg.VecVirtual {
		return func(int) reg.VecVirtual {
			v := YMM()
			VMOVUPS(src, v)
			return v
		}
	}},
	{"F16", 8, 16, func(src Mem) func(int) reg.VecVirtual {
		return func(int) reg.VecVirtual {
			v := YMM()
			VCVTPH2PS(src, v)
			return v
		}
	}},
	{"BF16", 8, 16, func(src Mem) func(int) reg.VecVirtual {
		return func(int) reg.VecVirtual {
			v := YMM()
			VPMOVZXWD(src, v)
			VPSLLD(Imm(16), v, v)
			return v
		}
	}},
	{"Q8_0", 32, 34, func(src Mem) func(int) reg.VecVirtual {
		d := half(src)
		return func(i int) reg.VecVirtual {
			v := YMM()
			VPMOVSXBD(src.Offset(2+8*i), v)
			VCVTDQ2PS(v, v)
			VMULPS(d, v, v)
			return v
		}
	}},
	{"Q4_0", 32, 18, nibbles(2, false, false)},
	{"Q4_1", 32, 20, nibbles(4, true, false)},
	{"Q5_0", 32, 22, nibbles(6, false, true)},
	{"Q5_1", 32, 24, nibbles(8, true, true)},
}

// half broadcasts an f16 as f32.
func half(src Mem) reg.VecVirtual {
	v := YMM()
	VPBROADCASTW(src, v.AsX())
	VCVTPH2PS(v.AsX(), v)
	return v
}

// nibbles converts the 4- and 5-bit types: 16 bytes at offset quants hold elements 0 to 15 in their low
// halves and 16 to 31 in their high ones; the fifth bits are a word before them.
func nibbles(quants int, minimum, five bool) func(src Mem) func(int) reg.VecVirtual {
	return func(src Mem) func(int) reg.VecVirtual {
		d := half(src)
		var m, high reg.VecVirtual
		if minimum {
			m = half(src.Offset(2))
		}
		if five {
			high = YMM()
			VPBROADCASTD(src.Offset(quants-4), high)
		}
		return func(i int) reg.VecVirtual {
			v := YMM()
			VPMOVZXBD(src.Offset(quants+8*(i%2)), v)
			if i < 2 {
				VPAND(everyInt("lowNibble", 15), v, v)
			} else {
				VPSRLD(Imm(4), v, v)
			}
			if five {
				h := YMM()
				shifts := constant(fmt.Sprintf("bits%d", 8*i), func(lane int) uint32 { return uint32(8*i + lane) })
				VPSRLVD(shifts, high, h)
				VPSLLD(Imm(4), h, h)
				VPAND(everyInt("fifthBit", 16), h, h)
				VPOR(h, v, v)
			}
			if !minimum {
				if five {
					VPSUBD(everyInt("fifthBit", 16), v, v)
				} else {
					VPSUBD(everyInt("eight", 8), v, v)
				}
			}
			VCVTDQ2PS(v, v)
			if minimum {
				VFMADD213PS(m, d, v) // the product is exact, so this rounds like a product and a sum
			} else {
				VMULPS(d, v, v)
			}
			return v
		}
	}
}

func expands() {
	for _, t := range weightTypes {
		function("expand"+t.name+"AVX2", "(dst *float32, dstStride int, src *byte, srcStride, rows, n int)",
			fmt.Sprintf("expand%sAVX2 is kernels.expand for n divisible by %d.", t.name, t.elements))
		dst, dstStride, src, srcStride, rows, n := param("dst"), param("dstStride"), param("src"), param("srcStride"), param("rows"), param("n")
		d, s, left := GP64(), GP64(), GP64()
		count("row", rows, func() {
			MOVQ(dst, d)
			MOVQ(src, s)
			MOVQ(n, left)
			SHRQ(imm(log2(t.elements)), left)
			count("step", left, func() {
				convert := t.begin(Mem{Base: s})
				for i := range t.elements / 8 {
					VMOVUPS(convert(i), Mem{Base: d, Disp: 32 * i})
				}
				ADDQ(imm(t.bytes), s)
				ADDQ(imm(4*t.elements), d)
			})
			ADDQ(dstStride, dst)
			ADDQ(srcStride, src)
		})
		RET()
	}
}

func log2(n int) int {
	if n <= 1 {
		return 0
	}
	return 1 + log2(n/2)
}

// gemvs multiplies four weight rows with one vector, converting in registers. Of each row only one sum
// is in flight, but four rows and the conversions keep the units busier than memory can feed them.
func gemvs() {
	for _, t := range weightTypes {
		function("gemv"+t.name+"AVX2", "(out *float32, w *byte, wStride int, x *float32, groups, k int)",
			fmt.Sprintf("gemv%sAVX2 is kernels.gemv.", t.name))
		out, w, wStride, x, groups, k := param("out"), param("w"), param("wStride"), param("x"), param("groups"), param("k")
		unroll := 32 / t.elements
		SHRQ(Imm(5), k)
		src, in, left, stride3 := GP64(), GP64(), GP64(), GP64()
		LEAQ(Mem{Base: wStride, Index: wStride, Scale: 2}, stride3)
		count("group", groups, func() {
			MOVQ(w, src)
			MOVQ(x, in)
			MOVQ(k, left)
			var acc []reg.VecVirtual
			for range 4 {
				a := YMM()
				VXORPS(a, a, a)
				acc = append(acc, a)
			}
			count("step", left, func() {
				row := [4]Mem{{Base: src}, {Base: src, Index: wStride, Scale: 1}, {Base: src, Index: wStride, Scale: 2}, {Base: src, Index: stride3, Scale: 1}}
				for j := range 4 {
					for u := range unroll {
						convert := t.begin(row[j].Offset(u * t.bytes))
						for i := range t.elements / 8 {
							VFMADD231PS(Mem{Base: in, Disp: 32 * (u*t.elements/8 + i)}, convert(i), acc[j])
						}
					}
				}
				ADDQ(imm(unroll*t.bytes), src)
				ADDQ(Imm(128), in)
			})
			VMOVUPS(reduce4(acc), Mem{Base: out})
			ADDQ(Imm(16), out)
			LEAQ(Mem{Base: w, Index: wStride, Scale: 4}, w)
		})
		RET()
	}
}
