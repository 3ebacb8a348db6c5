package tensor_test

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json/v2"
	"errors"
	"math"
	"os"
	"slices"
	"testing"

	"baton/tensor"
)

func sha(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// The checksum is that of numpy's float16 → float32 over all 65,536 patterns, NaNs made quiet.
func TestEveryHalf(t *testing.T) {
	var wide []byte
	for h := range 1 << 16 {
		f := tensor.F16ToF32(uint16(h))
		wide = binary.LittleEndian.AppendUint32(wide, math.Float32bits(f))
		want := uint16(h)
		if f != f {
			want |= 0x200
		}
		if got := tensor.F32ToF16(f); got != want {
			t.Fatalf("half %#04x widens to %v and comes back as %#04x", h, f, got)
		}
	}
	if got := sha(wide); got != "b636c5716ff84d972782faf02d0194cb8951526bea4cc487082feb47b1860ddf" {
		t.Errorf("checksum of all halves is %s", got)
	}
}

// The checksum is that of numpy's float32 → float16 over the same patterns: a walk through all of them
// and every tie between two neighbouring halves.
func TestHalfRounding(t *testing.T) {
	var narrow []byte
	n := 0
	convert := func(bits uint32) {
		if bits&0x7fffffff <= 0x7f800000 {
			narrow = binary.LittleEndian.AppendUint16(narrow, tensor.F32ToF16(math.Float32frombits(bits)))
			n++
		}
	}
	for i := range uint32(1 << 18) {
		convert(i * 2654435761)
	}
	for h := range uint16(0x7bff) {
		convert(math.Float32bits((tensor.F16ToF32(h) + tensor.F16ToF32(h+1)) / 2))
	}
	if got := sha(narrow); n != 292862 || got != "caf1a9b3644e5b148fe50eee5ef5fece997447195cdb8f5556fd500a6300cccd" {
		t.Errorf("checksum of %d conversions is %s", n, got)
	}
}

func TestNarrowing(t *testing.T) {
	inf := float32(math.Inf(1))
	for _, c := range []struct {
		in        float32
		half, b16 uint16
	}{
		{0, 0, 0},
		{float32(math.Copysign(0, -1)), 0x8000, 0x8000},
		{1, 0x3c00, 0x3f80},
		{65519.996, 0x7bff, 0x4780},
		{65520, 0x7c00, 0x4780},
		{-65520, 0xfc00, 0xc780},
		{inf, 0x7c00, 0x7f80},
		{0x1p-25, 0, 0x3300},         // a tie between 0 and the smallest half
		{0x1.000002p-25, 1, 0x3300},  // just above it
		{0x1.8p-24, 2, 0x33c0},       // a tie that goes up to even
		{1.00390625, 0x3c04, 0x3f80}, // 1 + 2⁻⁸: a bf16 tie, down to even
		{1.01171875, 0x3c0c, 0x3f82}, // 1 + 3·2⁻⁸: a bf16 tie, up to even
		{math.MaxFloat32, 0x7c00, 0x7f80},
		{math.Float32frombits(0x7f800001), 0x7e00, 0x7fc0},
		{math.Float32frombits(0xffc12345), 0xfe09, 0xffc1},
	} {
		if got := tensor.F32ToF16(c.in); got != c.half {
			t.Errorf("%x as f16: %#04x, want %#04x", c.in, got, c.half)
		}
		if got := tensor.F32ToBF16(c.in); got != c.b16 {
			t.Errorf("%x as bf16: %#04x, want %#04x", c.in, got, c.b16)
		}
	}
	for b := range 1 << 16 {
		want := uint16(b)
		if f := tensor.BF16ToF32(want); f != f {
			want |= 0x40
		}
		if got := tensor.F32ToBF16(tensor.BF16ToF32(uint16(b))); got != want {
			t.Fatalf("bf16 %#04x comes back as %#04x", b, got)
		}
	}
}

// testdata/blocks.json was made with the Python package gguf: random values quantised, and those blocks
// and blocks of random bytes dequantised, in f32.
func TestBlocksMatchGGUFPackage(t *testing.T) {
	data, err := os.ReadFile("testdata/blocks.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Type                                   string
		Values, Quantised, Blocks, Dequantised string // hex
	}
	if err := json.Unmarshal(data, &cases, json.MatchCaseInsensitiveNames(true)); err != nil {
		t.Fatal(err)
	}
	types := map[string]tensor.DType{}
	for _, d := range []tensor.DType{tensor.Q4_0, tensor.Q4_1, tensor.Q5_0, tensor.Q5_1, tensor.Q8_0} {
		types[d.String()] = d
	}
	for _, c := range cases {
		dtype := types[c.Type]
		delete(types, c.Type)
		values, blocks := floats(t, unhex(t, c.Values)), unhex(t, c.Blocks)
		quantised := make([]byte, dtype.RowBytes(len(values)))
		if err := tensor.Quantize(quantised, dtype, values); err != nil {
			t.Fatal(err)
		}
		if hex.EncodeToString(quantised) != c.Quantised {
			t.Errorf("%v: quantised blocks differ", dtype)
		}
		got := make([]float32, len(blocks)/dtype.BlockBytes()*dtype.BlockElements())
		if err := tensor.Dequantize(got, dtype, blocks); err != nil {
			t.Fatal(err)
		}
		want := floats(t, unhex(t, c.Dequantised))
		for i := range want {
			if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
				t.Fatalf("%v: element %d is %v, want %v", dtype, i, got[i], want[i])
			}
		}
	}
	if len(types) != 0 {
		t.Errorf("no vectors for %v", types)
	}
}

func TestPlainTypesRoundTrip(t *testing.T) {
	in := []float32{0, -1.5, 3.140625, 1024, float32(math.Inf(-1))}
	for _, dtype := range []tensor.DType{tensor.F32, tensor.F16, tensor.BF16} {
		raw, out := make([]byte, dtype.RowBytes(len(in))), make([]float32, len(in))
		if err := errors.Join(tensor.Quantize(raw, dtype, in), tensor.Dequantize(out, dtype, raw)); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(in, out) {
			t.Errorf("%v: %v came back as %v", dtype, in, out)
		}
	}
}

func TestConversionRefusals(t *testing.T) {
	f := func(n int) []float32 { return make([]float32, n) }
	for name, err := range map[string]error{
		"half a block":  tensor.Dequantize(f(16), tensor.Q8_0, make([]byte, 34)),
		"short source":  tensor.Dequantize(f(32), tensor.Q4_1, make([]byte, 19)),
		"long source":   tensor.Dequantize(f(2), tensor.F32, make([]byte, 9)),
		"short target":  tensor.Quantize(make([]byte, 3), tensor.F16, f(2)),
		"integers":      tensor.Dequantize(f(4), tensor.I32, make([]byte, 16)),
		"no type":       tensor.Dequantize(f(4), tensor.Invalid, nil),
		"unknown dtype": tensor.Dequantize(f(4), tensor.DType(200), nil),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if err := tensor.Dequantize(f(4), tensor.I32, make([]byte, 16)); !errors.Is(err, tensor.ErrUnsupported) {
		t.Errorf("integers: %v does not wrap ErrUnsupported", err)
	}
}

func TestScalarShape(t *testing.T) {
	s := tensor.Tensor{DType: tensor.F32}
	m := tensor.Tensor{Shape: []int{2, 3, 5}}
	if s.Rows() != 1 || s.Cols() != 1 || s.Elements() != 1 || m.Rows() != 6 || m.Cols() != 5 || m.Elements() != 30 {
		t.Error("rows and columns of a scalar and a cube are wrong")
	}
}

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func floats(t *testing.T, raw []byte) []float32 {
	t.Helper()
	out := make([]float32, len(raw)/4)
	if err := tensor.Dequantize(out, tensor.F32, raw); err != nil {
		t.Fatal(err)
	}
	return out
}
