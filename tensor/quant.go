package tensor

import (
	"encoding/binary"
	"math"
)

// blockElements is the number of elements in each of GGML's "_0" and "_1" blocks.
const blockElements = 32

// A block is its f16 scale d, then for the "_1" types the f16 offset m, then for the 5-bit types the
// fifth bits of all elements as a little-endian word, then the low bits: element j in the low half of
// byte j, element j+16 in its high half. Q8_0 has signed bytes instead.
func dequantizeBlocks(dst []float32, t DType, src []byte) {
	size := t.BlockBytes()
	for len(dst) > 0 {
		dequantizeBlock((*[blockElements]float32)(dst), t, src[:size])
		dst, src = dst[blockElements:], src[size:]
	}
}

func dequantizeBlock(dst *[blockElements]float32, t DType, src []byte) {
	d := F16ToF32(binary.LittleEndian.Uint16(src))
	src = src[2:]
	if t == Q8_0 {
		for j := range dst {
			dst[j] = d * float32(int8(src[j]))
		}
		return
	}
	var m float32
	if t == Q4_1 || t == Q5_1 {
		m = F16ToF32(binary.LittleEndian.Uint16(src))
		src = src[2:]
	}
	var high uint32
	if t == Q5_0 || t == Q5_1 {
		high = binary.LittleEndian.Uint32(src)
		src = src[4:]
	}
	zero := zeroPoint(t)
	for j, b := range src[:blockElements/2] {
		low := int32(b&0x0f) | int32(high>>j&1)<<4
		top := int32(b>>4) | int32(high>>(j+16)&1)<<4
		if t == Q4_1 || t == Q5_1 {
			// The conversions keep the compiler from fusing the multiplication with the addition.
			dst[j] = float32(d*float32(low)) + m
			dst[j+16] = float32(d*float32(top)) + m
		} else {
			dst[j] = d * float32(low-zero)
			dst[j+16] = d * float32(top-zero)
		}
	}
}

// zeroPoint is the stored integer that stands for zero in a type without an offset.
func zeroPoint(t DType) int32 {
	switch t {
	case Q4_0:
		return 8
	case Q5_0:
		return 16
	}
	return 0
}

func quantizeBlocks(dst []byte, t DType, src []float32) {
	size := t.BlockBytes()
	for len(src) > 0 {
		quantizeBlock(dst[:size], t, (*[blockElements]float32)(src))
		dst, src = dst[size:], src[blockElements:]
	}
}

func quantizeBlock(dst []byte, t DType, src *[blockElements]float32) {
	if t == Q8_0 {
		quantizeQ8(dst, src)
		return
	}
	low, high, extreme := src[0], src[0], src[0]
	for _, v := range src {
		low, high = min(low, v), max(high, v)
		if abs(v) > abs(extreme) {
			extreme = v
		}
	}
	levels := int32(16)
	if t == Q5_0 || t == Q5_1 {
		levels = 32
	}
	var d, base float32
	bias := float32(0.5)
	offset := t == Q4_1 || t == Q5_1
	if offset {
		d, base = (high-low)/float32(levels-1), low
	} else {
		d = extreme / float32(-levels/2)
		bias += float32(levels / 2)
	}
	var inverse float32
	if d != 0 {
		inverse = 1 / d
	}
	binary.LittleEndian.PutUint16(dst, F32ToF16(d))
	dst = dst[2:]
	if offset {
		binary.LittleEndian.PutUint16(dst, F32ToF16(base))
		dst = dst[2:]
	}
	var top uint32
	packed := dst[len(dst)-blockElements/2:]
	clear(packed)
	for j, v := range src {
		q := uint32(min(max(int32(float32((v-base)*inverse)+bias), 0), levels-1))
		packed[j%16] |= byte(q&0x0f) << (j / 16 * 4)
		top |= q >> 4 << j
	}
	if levels == 32 {
		binary.LittleEndian.PutUint32(dst, top)
	}
}

func quantizeQ8(dst []byte, src *[blockElements]float32) {
	var extreme float32
	for _, v := range src {
		extreme = max(extreme, abs(v))
	}
	d := extreme / 127
	var inverse float32
	if d != 0 {
		inverse = 1 / d
	}
	binary.LittleEndian.PutUint16(dst, F32ToF16(d))
	for j, v := range src {
		dst[2+j] = byte(int8(math.Round(float64(v * inverse))))
	}
}

func abs(v float32) float32 { return math.Float32frombits(math.Float32bits(v) &^ (1 << 31)) }
