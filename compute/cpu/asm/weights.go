package main

import (
	"fmt"
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// weightType says how to turn stored elements into f32 registers.
type weightType struct {
	name     string
	elements int // converted a step
	bytes    int // that those take
	rows     int // that gemv multiplies at a time; with 4, conversions keep the units busy, not the sums
	turns    int // rows that gemv converts in turns, as registers permit
	// begin loads what a step's elements share and returns a function that converts elements
	// [8*i, 8*i+8) of the step at src, to be called with rising i.
	begin func(src Mem) func(i int) reg.VecVirtual
}

var weightTypes = []weightType{
	{"F32", 8, 32, 8, 4, func(src Mem) func(int) reg.VecVirtual {
		return func(int) reg.VecVirtual {
			v := YMM()
			VMOVUPS(src, v)
			return v
		}
	}},
	{"F16", 8, 16, 8, 4, func(src Mem) func(int) reg.VecVirtual {
		return func(int) reg.VecVirtual {
			v := YMM()
			VCVTPH2PS(src, v)
			return v
		}
	}},
	{"BF16", 8, 16, 8, 4, func(src Mem) func(int) reg.VecVirtual {
		return func(int) reg.VecVirtual {
			v := YMM()
			VPMOVZXWD(src, v)
			VPSLLD(Imm(16), v, v)
			return v
		}
	}},
	{"Q8_0", 32, 34, 4, 4, func(src Mem) func(int) reg.VecVirtual {
		d := half(src)
		return func(i int) reg.VecVirtual {
			v := YMM()
			VPMOVSXBD(src.Offset(2+8*i), v)
			VCVTDQ2PS(v, v)
			VMULPS(d, v, v)
			return v
		}
	}},
	{"Q4_0", 32, 18, 4, 2, nibbles(2, false, false)},
	{"Q4_1", 32, 20, 4, 2, nibbles(4, true, false)},
	{"Q5_0", 32, 22, 4, 2, nibbles(6, false, true)},
	{"Q5_1", 32, 24, 4, 1, nibbles(8, true, true)},
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
func nibbles(quants int, minimum, five bool) func(Mem) func(int) reg.VecVirtual {
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
		var bytes [2]reg.VecVirtual // zero-extended
		return func(i int) reg.VecVirtual {
			v := YMM()
			if i < 2 {
				bytes[i] = YMM()
				VPMOVZXBD(src.Offset(quants+8*i), bytes[i])
				VPAND(everyInt("lowNibble", 15), bytes[i], v)
			} else {
				VPSRLD(Imm(4), bytes[i-2], v)
			}
			if five {
				h := YMM()
				fifthBit(high, h, i)
				VPOR(h, v, v)
			}
			if minimum {
				VCVTDQ2PS(v, v)
				VFMADD213PS(m, d, v) // the product is exact, so this rounds like a product and a sum
				return v
			}
			zero := everyInt("eight", 8)
			if five {
				zero = everyInt("sixteen", 16)
			}
			VPSUBD(zero, v, v)
			VCVTDQ2PS(v, v)
			VMULPS(d, v, v)
			return v
		}
	}
}

// fifthBit brings bit 8*i+lane of the lanes of high to bit 4.
func fifthBit(high, h reg.VecVirtual, i int) {
	if i == 0 {
		VPSLLD(Imm(4), high, h)
		VPSRLVD(iota32(0), h, h)
	} else {
		VPSRLVD(iota32(8*i-4), high, h)
	}
	VPAND(everyInt("sixteen", 16), h, h)
}

// iota32 is the constant from, from+1, ..., from+7.
func iota32(from int) Mem {
	return constant(fmt.Sprintf("iota%d", from), func(lane int) uint32 { return uint32(from + lane) })
}

func expands() {
	for _, t := range weightTypes {
		function("expand"+t.name+"AVX2", "(dst *float32, dstStride int, src *byte, srcStride, rows, n int)",
			fmt.Sprintf("expand%sAVX2 is kernels.expand for n divisible by %d.", t.name, t.elements))
		dst, dstStride, src, srcStride, rows, n := param("dst"), param("dstStride"), param("src"), param("srcStride"), param("rows"), param("n")
		d, s, left := GP64(), GP64(), GP64()
		ahead := GP64() // to the same place of the rows that come next
		MOVQ(rows, ahead)
		IMULQ(srcStride, ahead)
		steps := func(label string, elements int) {
			SHRQ(imm(bits.Len(uint(elements))-1), left)
			count(label, left, func() {
				PREFETCHT0(Mem{Base: s, Index: ahead, Scale: 1})
				for step := range elements / t.elements {
					convert := t.begin(Mem{Base: s, Disp: step * t.bytes})
					for i := range t.elements / 8 {
						VMOVUPS(convert(i), Mem{Base: d, Disp: 4*step*t.elements + 32*i})
					}
				}
				ADDQ(imm(elements/t.elements*t.bytes), s)
				ADDQ(imm(4*elements), d)
			})
		}
		count("row", rows, func() {
			MOVQ(dst, d)
			MOVQ(src, s)
			MOVQ(n, left)
			steps("steps", 32)
			if t.elements < 32 {
				MOVQ(n, left)
				ANDQ(Imm(31), left)
				steps("rest", t.elements)
			}
			ADDQ(dstStride, dst)
			ADDQ(srcStride, src)
		})
		done()
	}
}

// gemvs multiplies four or eight weight rows with one vector, converting in registers. The rows lie
// one after the other but are walked side by side, in runs too short for the processor to foresee, so
// every load asks for the same place of the next rows; long rows, for a place further on.
func gemvs() {
	for _, t := range weightTypes {
		function("gemv"+t.name+"AVX2", "(out *float32, outStride int, w *byte, wStride int, x *float32, groups, segments, k int)",
			fmt.Sprintf("gemv%sAVX2 is kernels.gemv.", t.name))
		g := gemvArgs{out: param("out"), w: param("w"), wStride: param("wStride"), wStride3: GP64(), ahead: GP64()}
		groups := param("groups")
		LEAQ(Mem{Base: g.wStride, Index: g.wStride, Scale: 2}, g.wStride3)
		MOVQ(g.wStride, g.ahead)
		SHLQ(imm(bits.Len(uint(t.rows))-1), g.ahead)
		CMPQ(g.ahead, imm(40<<10))
		JLE(LabelRef("rows"))
		MOVQ(imm(1024), g.ahead)
		Label("rows")
		if t.rows == 8 {
			Label("eight")
			CMPQ(groups, Imm(2))
			JL(LabelRef("four"))
			g.rows(t, 8, "eight")
			SUBQ(Imm(2), groups)
			JMP(LabelRef("eight"))
		}
		Label("four")
		TESTQ(groups, groups)
		JZ(LabelRef("none"))
		g.rows(t, 4, "four")
		DECQ(groups)
		JMP(LabelRef("four"))
		Label("none")
		done()
	}
}

type gemvArgs struct{ out, w, wStride, wStride3, ahead reg.GPVirtual }

func (g gemvArgs) rows(t weightType, n int, label string) {
	var src []reg.GPVirtual
	var row []Mem
	for range n / 4 {
		s := GP64()
		MOVQ(g.w, s)
		LEAQ(Mem{Base: g.w, Index: g.wStride, Scale: 4}, g.w)
		src = append(src, s)
		row = append(row, fourRows(s, g.wStride, g.wStride3)...)
	}
	out, in, left, segments := GP64(), GP64(), GP64(), GP64()
	MOVQ(g.out, out)
	Load(Param("x"), in)
	Load(Param("segments"), segments)
	count(label+"_segment", segments, func() {
		Load(Param("k"), left)
		SHRQ(Imm(5), left)
		var acc []reg.VecVirtual
		for range n {
			a := YMM()
			VXORPS(a, a, a)
			acc = append(acc, a)
		}
		size := 32 / t.elements * t.bytes // of a step of one row
		count(label+"_step", left, func() {
			next := GP64()
			for _, s := range src {
				LEAQ(Mem{Base: s, Index: g.ahead, Scale: 1}, next)
				for _, r := range fourRows(next, g.wStride, g.wStride3) {
					for p := 0; p < size; p += 64 {
						PREFETCHT0(r.Offset(p))
					}
				}
			}
			for j := 0; j < n; j += t.turns {
				for step := range 32 / t.elements {
					t.products(row[j:j+t.turns], acc[j:j+t.turns], step, in)
				}
			}
			for _, s := range src {
				ADDQ(imm(size), s)
			}
			ADDQ(imm(128), in)
		})
		for j := 0; j < n; j += 4 {
			VMOVUPS(reduce4(acc[j:j+4]), Mem{Base: out, Disp: 4 * j})
		}
		ADDQ(NewParamAddr("outStride", 8), out)
	})
	ADDQ(imm(4*n), g.out)
}

func fourRows(base, stride, stride3 reg.GPVirtual) []Mem {
	return []Mem{{Base: base}, {Base: base, Index: stride, Scale: 1}, {Base: base, Index: stride, Scale: 2}, {Base: base, Index: stride3, Scale: 1}}
}

// products adds one step of some rows to their accumulators. The rows take turns, so that the FMAs of
// one accumulator are far apart.
func (t weightType) products(row []Mem, acc []reg.VecVirtual, step int, in reg.Register) {
	var convert []func(int) reg.VecVirtual
	for _, r := range row {
		convert = append(convert, t.begin(r.Offset(step*t.bytes)))
	}
	for i := range t.elements / 8 {
		x := YMM()
		VMOVUPS(Mem{Base: in, Disp: 32 * (step*t.elements/8 + i)}, x)
		for r := range row {
			VFMADD231PS(x, convert[r](i), acc[r])
		}
	}
}
