// Command asm generates the AVX2+FMA kernels of compute/cpu: run go generate there. It is a module of
// its own, so that the generator's dependencies stay out of the product's.
//
// Every kernel gives the bits of its portable twin in compute/cpu/portable.go, which says what it
// computes; docs/numerics.md states the orders of summation. Functions are ABI0, take strides in bytes
// and expect counts that the wrappers in kernels_amd64.go have checked.
package main

import (
	"flag"
	"log"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// groups are the files that the kernels are spread over.
var groups = map[string][]func(){
	"dots":        {dots},
	"gemv":        {gemvs},
	"expand":      {expands},
	"elementwise": {finish, norm, silu, rotateHalves, rotatePairs, toBF16, fold, weigh, pause},
}

func main() {
	group := flag.String("kernels", "", "dots, gemv, expand or elementwise")
	flag.Parse()
	if groups[*group] == nil {
		log.Fatalf("-kernels is %q", *group)
	}
	ConstraintExpr("amd64")
	for _, generate := range groups[*group] {
		generate()
	}
	Generate()
}

// function starts a function whose pointers do not escape.
func function(name, signature, doc string) {
	TEXT(name, NOSPLIT, "func"+signature)
	Pragma("noescape")
	Doc(doc)
}

// done returns, leaving the upper halves of the registers clean: Go's own code uses the old encodings,
// which are slow behind dirty ones.
func done() {
	VZEROUPPER()
	RET()
}

func param(name string) reg.GPVirtual { return Load(Param(name), GP64()).(reg.GPVirtual) }

// imm is an immediate of a 64-bit operation: a signed byte or 32 bits.
func imm(n int) Constant {
	if n < 128 {
		return U8(n)
	}
	return U32(n)
}

// constants of eight equal or different lanes, in read-only data.
var lanesData = map[string]Mem{}

func constant(name string, bits func(lane int) uint32) Mem {
	if m, ok := lanesData[name]; ok {
		return m
	}
	m := GLOBL(name, RODATA|NOPTR)
	for i := range 8 {
		DATA(4*i, U32(bits(i)))
	}
	lanesData[name] = m
	return m
}

func every(name string, v float64) Mem {
	return constant(name, func(int) uint32 { return math.Float32bits(float32(v)) })
}

func everyInt(name string, v int32) Mem {
	return constant(name, func(int) uint32 { return uint32(v) })
}

// count emits a loop that runs body n times, n in a register that it consumes; n may be 0.
func count(label string, n reg.Register, body func()) {
	TESTQ(n, n)
	JZ(LabelRef(label + "_end"))
	Label(label)
	body()
	DECQ(n)
	JNZ(LabelRef(label))
	Label(label + "_end")
}

// hsum reduces the eight lanes of v to lane 0 of the result, by the fixed tree.
func hsum(v reg.VecVirtual) reg.VecVirtual {
	s, t := XMM(), XMM()
	VEXTRACTF128(Imm(1), v, t)
	VADDPS(t, v.AsX(), s) // 0+4, 1+5, 2+6, 3+7
	VMOVHLPS(s, s, t)
	VADDPS(t, s, s) // (0+4)+(2+6), (1+5)+(3+7)
	VMOVSHDUP(s, t)
	VADDSS(t, s, s)
	return s
}

func pause() {
	TEXT("pause", NOSPLIT, "func(n int)")
	Doc("pause spends n pause instructions.")
	n := param("n")
	Label("spin")
	PAUSE()
	DECQ(n)
	JG(LabelRef("spin"))
	RET()
}
