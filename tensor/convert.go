package tensor

import (
	"encoding/binary"
	"fmt"
	"math"
)

// F16ToF32 widens an IEEE half exactly. A signalling NaN comes out quiet, as F16C hardware has it.
func F16ToF32(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	exponent, mantissa := uint32(h>>10)&0x1f, uint32(h)&0x3ff
	switch exponent {
	case 0: // zero or subnormal: mantissa × 2⁻²⁴, which f32 holds exactly
		return math.Float32frombits(math.Float32bits(float32(mantissa)*0x1p-24) | sign)
	case 0x1f:
		if mantissa != 0 {
			mantissa |= 0x200
		}
		return math.Float32frombits(sign | 0x7f800000 | mantissa<<13)
	}
	return math.Float32frombits(sign | (exponent+112)<<23 | mantissa<<13)
}

// F32ToF16 rounds to the nearest half, ties to even; from 65520 on that is infinity. NaN stays a
// (quiet) NaN with the upper bits of its payload.
func F32ToF16(f float32) uint16 {
	bits := math.Float32bits(f)
	sign, abs := uint16(bits>>16)&0x8000, bits&0x7fffffff
	switch {
	case abs > 0x7f800000:
		return sign | 0x7e00 | uint16(abs>>13)&0x3ff
	case abs >= 0x47800000: // 2¹⁶ and above
		return sign | 0x7c00
	case abs < 0x38800000: // below 2⁻¹⁴: subnormal halves are multiples of 2⁻²⁴, the ulp of 0.5
		return sign | uint16(math.Float32bits(math.Float32frombits(abs)+0.5)-0x3f000000)
	}
	abs -= 112 << 23
	abs += 0xfff + abs>>13&1
	return sign | uint16(abs>>13)
}

// BF16ToF32 widens a bfloat16 exactly.
func BF16ToF32(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// F32ToBF16 rounds to the nearest bfloat16, ties to even. NaN stays a (quiet) NaN.
func F32ToBF16(f float32) uint16 {
	bits := math.Float32bits(f)
	if bits&0x7fffffff > 0x7f800000 {
		return uint16(bits>>16) | 0x40
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// checkLengths says whether elements f32 values and byteSize bytes of type t describe the same row.
func checkLengths(t DType, elements, byteSize int) error {
	switch t {
	case F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0:
	default:
		return fmt.Errorf("tensor: %w: no conversion between f32 and %v", ErrUnsupported, t)
	}
	if elements%t.BlockElements() != 0 {
		return fmt.Errorf("tensor: %d elements are no whole number of %v blocks (%d elements each)", elements, t, t.BlockElements())
	}
	if want := t.RowBytes(elements); byteSize != want {
		return fmt.Errorf("tensor: %d elements of %v take %d bytes, not %d", elements, t, want, byteSize)
	}
	return nil
}

// Dequantize widens len(dst) elements of type t to f32: F32, F16, BF16 exactly, and GGML's blocks by
// these formulas, whose operations are each one f32 operation, rounded on its own (never fused). d and
// m are the block's halves widened to f32, q the stored integer:
//
//	Q4_0  d*(q-8)      Q5_0  d*(q-16)      Q8_0  d*q
//	Q4_1  d*q + m      Q5_1  d*q + m
//
// src must hold exactly t.RowBytes(len(dst)) bytes. The result for a type without a conversion wraps
// ErrUnsupported.
func Dequantize(dst []float32, t DType, src []byte) error {
	if err := checkLengths(t, len(dst), len(src)); err != nil {
		return err
	}
	switch t {
	case F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		}
	case F16:
		for i := range dst {
			dst[i] = F16ToF32(binary.LittleEndian.Uint16(src[2*i:]))
		}
	case BF16:
		for i := range dst {
			dst[i] = BF16ToF32(binary.LittleEndian.Uint16(src[2*i:]))
		}
	default:
		dequantizeBlocks(dst, t, src)
	}
	return nil
}

// Quantize is Dequantize's inverse as far as the type allows: F16 and BF16 round to nearest even, blocks
// are quantised by GGML's reference rule (scale from the extreme value, no search). dst must hold
// exactly t.RowBytes(len(src)) bytes.
func Quantize(dst []byte, t DType, src []float32) error {
	if err := checkLengths(t, len(src), len(dst)); err != nil {
		return err
	}
	switch t {
	case F32:
		for i, v := range src {
			binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(v))
		}
	case F16:
		for i, v := range src {
			binary.LittleEndian.PutUint16(dst[2*i:], F32ToF16(v))
		}
	case BF16:
		for i, v := range src {
			binary.LittleEndian.PutUint16(dst[2*i:], F32ToBF16(v))
		}
	default:
		quantizeBlocks(dst, t, src)
	}
	return nil
}
