package tensor_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"baton/internal/modelfile"
	"baton/tensor"
)

func ramp(n int) []float32 {
	out := make([]float32, n)
	for i := range out {
		out[i] = float32(i%37) - 18
	}
	return out
}

func ggufTensors() []tensor.Tensor {
	var out []tensor.Tensor
	for _, d := range []tensor.DType{tensor.F32, tensor.F16, tensor.BF16, tensor.Q4_0, tensor.Q4_1, tensor.Q5_0, tensor.Q5_1, tensor.Q8_0} {
		out = append(out, modelfile.Floats("weight."+d.String(), d, ramp(3*64), 3, 64))
	}
	return append(out, tensor.Tensor{Name: "scalar", DType: tensor.I32, Shape: []int{}, Data: []byte{1, 2, 3, 4}})
}

var ggufMetadata = []modelfile.KV{
	{Key: "general.architecture", Value: "llama"},
	{Key: "u8", Value: uint8(200)}, {Key: "i8", Value: int8(-3)}, {Key: "u16", Value: uint16(60000)}, {Key: "i16", Value: int16(-4)},
	{Key: "u32", Value: uint32(4e9)}, {Key: "i32", Value: int32(-5)}, {Key: "u64", Value: uint64(math.MaxUint64)}, {Key: "i64", Value: int64(-1 << 60)},
	{Key: "f32", Value: float32(0.5)}, {Key: "f64", Value: 0.1}, {Key: "yes", Value: true}, {Key: "no", Value: false},
	{Key: "tokens", Value: []string{"a", "", "Ġcafé", "\xff"}}, {Key: "types", Value: []int32{1, -3, 6}}, {Key: "scores", Value: []float32{0, -1.5}},
	{Key: "wide", Value: []uint64{1, 1 << 40}}, {Key: "none", Value: []uint8{}}, {Key: "halves", Value: []float64{0.5}},
}

func TestGGUFRoundTrip(t *testing.T) {
	for _, alignment := range []uint32{0, 8, 64} {
		metadata := ggufMetadata
		if alignment > 0 {
			metadata = append(slices.Clone(metadata), modelfile.KV{Key: "general.alignment", Value: alignment})
		}
		data := must(modelfile.GGUF(metadata, ggufTensors()))(t)
		g := must(tensor.OpenGGUF(writeFile(t, filepath.Join(t.TempDir(), "m.gguf"), data)))(t)
		for _, want := range ggufTensors() {
			if got, ok := g.Tensor(want.Name); !ok || !reflect.DeepEqual(got, want) {
				t.Errorf("alignment %d: tensor %q is %+v", alignment, want.Name, got)
			}
		}
		if len(g.Keys()) != len(metadata) || g.Keys()[1] != "u8" || len(g.Tensors()) != len(ggufTensors()) {
			t.Errorf("alignment %d: keys %v", alignment, g.Keys())
		}
		if err := errors.Join(g.Close(), g.Close()); err != nil {
			t.Error(err)
		}
	}
	v2 := must(modelfile.GGUF(ggufMetadata, ggufTensors()))(t)
	v2[4] = 2
	if _, err := tensor.ParseGGUF("v2", v2); err != nil {
		t.Error(err)
	}
}

func TestGGUFMetadata(t *testing.T) {
	g := must(tensor.ParseGGUF("m.gguf", must(modelfile.GGUF(ggufMetadata, nil))(t)))(t)
	same := func(key string, got any, err error, want any) {
		t.Helper()
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s is %#v (%v), want %#v", key, got, err, want)
		}
	}
	for key, want := range map[string]int64{"u8": 200, "i8": -3, "u16": 60000, "i16": -4, "u32": 4e9, "i32": -5, "i64": -1 << 60} {
		n, err := g.Int(key)
		same(key, n, err, want)
		f, err := g.Float(key)
		same(key, f, err, float64(want))
	}
	for key, want := range map[string]float64{"f32": 0.5, "f64": 0.1, "u64": math.MaxUint64} {
		f, err := g.Float(key)
		same(key, f, err, want)
	}
	for key, want := range map[string]bool{"yes": true, "no": false} {
		b, err := g.Bool(key)
		same(key, b, err, want)
	}
	s, err := g.String("general.architecture")
	same("architecture", s, err, "llama")
	tokens, err := g.Strings("tokens")
	same("tokens", tokens, err, []string{"a", "", "Ġcafé", "\xff"})
	types, err := g.Int32s("types")
	same("types", types, err, []int32{1, -3, 6})
	none, err := g.Int32s("none")
	same("none", none, err, []int32{})
	scores, err := g.Float32s("scores")
	same("scores", scores, err, []float32{0, -1.5})
	halves, err := g.Float32s("halves")
	same("halves", halves, err, []float32{0.5})
}

func TestGGUFMetadataRefusals(t *testing.T) {
	g := must(tensor.ParseGGUF("m.gguf", must(modelfile.GGUF(ggufMetadata, nil))(t)))(t)
	get := func(f func() error) error { return f() }
	for name, c := range map[string]struct {
		err  error
		want string
		kind error
	}{
		"absent":          {get(func() error { _, err := g.String("nil"); return err }), `m.gguf: key "nil": is not in the metadata`, tensor.ErrMissing},
		"absent array":    {get(func() error { _, err := g.Strings("nil"); return err }), "is not in the metadata", tensor.ErrMissing},
		"text as int":     {get(func() error { _, err := g.Int("general.architecture"); return err }), "is not an integer", tensor.ErrMalformed},
		"bool as int":     {get(func() error { _, err := g.Int("yes"); return err }), "is not an integer", tensor.ErrMalformed},
		"int as bool":     {get(func() error { _, err := g.Bool("u8"); return err }), "is not a bool", tensor.ErrMalformed},
		"float as int":    {get(func() error { _, err := g.Int("f32"); return err }), "is not an integer", tensor.ErrMalformed},
		"too wide":        {get(func() error { _, err := g.Int("u64"); return err }), "64 signed bits", tensor.ErrMalformed},
		"array as scalar": {get(func() error { _, err := g.Int("types"); return err }), "is not an integer", tensor.ErrMalformed},
		"scalar as array": {get(func() error { _, err := g.Int32s("i32"); return err }), "is not an array", tensor.ErrMalformed},
		"other elements":  {get(func() error { _, err := g.Strings("types"); return err }), "is not an array of strings", tensor.ErrMalformed},
		"wide elements":   {get(func() error { _, err := g.Int32s("wide"); return err }), "32-bit", tensor.ErrMalformed},
		"text as floats":  {get(func() error { _, err := g.Float32s("tokens"); return err }), "is not an array of numbers", tensor.ErrMalformed},
	} {
		checkFileError(t, name, c.err, c.want)
		if !errors.Is(c.err, c.kind) {
			t.Errorf("%s: %v does not wrap %v", name, c.err, c.kind)
		}
	}
}

// le packs strings (raw bytes) and fixed-size numbers, little-endian.
func le(parts ...any) []byte {
	var b bytes.Buffer
	for _, p := range parts {
		if s, ok := p.(string); ok {
			b.WriteString(s)
		} else if err := binary.Write(&b, binary.LittleEndian, p); err != nil {
			panic(err)
		}
	}
	return b.Bytes()
}

type (
	u32 = uint32
	u64 = uint64
)

// head starts a version 3 file with so many tensors and metadata pairs.
func head(tensors, pairs u64) string { return string(le("GGUF", u32(3), tensors, pairs)) }

// str is a length and the text.
func str(s string) string { return string(le(u64(len(s)), s)) }

// info describes one tensor; sizes in the file's order.
func info(name string, dtype u32, offset u64, sizes ...u64) string {
	return string(le(str(name), u32(len(sizes)), sizes, dtype, offset))
}

func TestDamagedGGUF(t *testing.T) {
	filler := string(make([]byte, 256))
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"empty":              {nil, "magic: needs 4 bytes"},
		"other format":       {le("PK\x03\x04", filler), "this is no GGUF file"},
		"version 1":          {le("GGUF", u32(1), filler), "version: is 1"},
		"big-endian":         {le("GGUF", u32(3<<24), filler), "is big-endian"},
		"tensor count":       {le(head(1<<60, 0), filler), "tensor count: is 1152921504606846976, which cannot fit"},
		"pair count":         {le(head(0, 1<<60), filler), "metadata count: is 1152921504606846976"},
		"long key":           {le(head(0, 1), u64(1<<60), filler), "metadata key: is 1152921504606846976 bytes long"},
		"long string":        {le(head(0, 1), str("k"), u32(8), u64(1<<60), filler), `key "k": needs 1152921504606846976 bytes`},
		"negative string":    {le(head(0, 1), str("k"), u32(8), u64(math.MaxUint64), filler), `key "k": needs`},
		"long array":         {le(head(0, 1), str("k"), u32(9), u32(4), u64(1<<60), filler), `key "k": is 1152921504606846976, which cannot fit`},
		"overflowing array":  {le(head(0, 1), str("k"), u32(9), u32(12), u64(1<<61), filler), `key "k"`},
		"array of strings":   {le(head(0, 1), str("k"), u32(9), u32(8), u64(30), filler[:80]), `key "k"`},
		"lying element":      {le(head(0, 1), str("k"), u32(9), u32(8), u64(2), str("x"), u64(1<<62), filler), `key "k": needs`},
		"array of arrays":    {le(head(0, 1), str("k"), u32(9), u32(9), u64(1), filler), `key "k": is an array of arrays`},
		"value type":         {le(head(0, 1), str("k"), u32(13), filler), "has value type 13"},
		"element type":       {le(head(0, 1), str("k"), u32(9), u32(99), u64(0), filler), "has value type 99"},
		"key twice":          {le(head(0, 2), str("k"), u32(7), "\x01", str("k"), u32(7), "\x01", filler), `key "k": is there twice`},
		"alignment 0":        {le(head(0, 1), str("general.alignment"), u32(4), u32(0)), "is no power of two"},
		"alignment 24":       {le(head(0, 1), str("general.alignment"), u32(4), u32(24)), "is no power of two"},
		"alignment text":     {le(head(0, 1), str("general.alignment"), u32(8), str("32")), "is no power of two"},
		"long tensor name":   {le(head(1, 0), u64(1<<40), filler), "tensor name: is 1099511627776 bytes long"},
		"dimensions":         {le(head(1, 0), str("t"), u32(1<<31), filler), `tensor "t": has 2147483648 dimensions`},
		"K-quant":            {le(head(1, 0), info("t", 12, 0, 256), filler), `tensor "t": is quantised as Q4_K`},
		"no such type":       {le(head(1, 0), info("t", 4, 0, 32), filler), `tensor "t": has element type 4`},
		"overflowing shape":  {le(head(1, 0), info("t", 0, 0, 1<<32, 1<<32), filler), "is no possible size of f32"},
		"overflowing bytes":  {le(head(1, 0), info("t", 0, 0, 1<<62), filler), "is no possible size of f32"},
		"partial block":      {le(head(1, 0), info("t", 8, 0, 40), filler), "is no possible size of q8_0"},
		"scalar of blocks":   {le(head(1, 0), info("t", 8, 0), filler), "is no possible size of q8_0"},
		"past the end":       {le(head(1, 0), info("t", 0, 0, 1024), filler), `tensor "t": needs 4096 bytes at offset 0`},
		"offset past it":     {le(head(1, 0), info("t", 0, 1<<63, 1), filler), `tensor "t": needs 4 bytes at offset`},
		"offset overflows":   {le(head(1, 0), info("t", 0, math.MaxUint64-31, 8), filler), `tensor "t": needs 32 bytes at offset`},
		"unaligned":          {le(head(1, 0), info("t", 0, 4, 1), filler), "is not aligned to 32 bytes"},
		"overlap":            {le(head(2, 0), info("t", 0, 0, 12), info("u", 0, 32, 1), filler), `tensor "u": shares bytes with tensor "t"`},
		"tensor twice":       {le(head(2, 0), info("t", 0, 0, 1), info("t", 0, 32, 1), filler), `tensor "t": is there twice`},
		"header cut":         {le(head(1, 0), str("t"), u32(2), u64(4), string(make([]byte, 8))), "the file ends after"},
		"ends in the header": {le(head(1, 0), info("t", 0, 0, 1)), "0 bytes of data follow the header"},
	} {
		_, err := tensor.ParseGGUF("f", c.file)
		checkFileError(t, name, err, c.want)
	}
	if _, err := tensor.OpenGGUF(filepath.Join(t.TempDir(), "absent")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v does not wrap ErrNotExist", err)
	}
}

// Whatever prefix of a good file is left, the reader says so. Padding behind the last tensor may go.
func TestTruncatedGGUF(t *testing.T) {
	tensors := []tensor.Tensor{modelfile.Floats("t", tensor.F32, ramp(8), 8)}
	data := must(modelfile.GGUF(ggufMetadata, tensors))(t)
	for n := range data {
		if _, err := tensor.ParseGGUF("f", data[:n]); err == nil {
			t.Fatalf("the first %d of %d bytes were accepted", n, len(data))
		}
	}
}

// A header that claims much must not cost much: the limits hold before anything is allocated.
func TestLyingGGUFAllocatesLittle(t *testing.T) {
	filler := string(make([]byte, 4096))
	file := le(head(0, 1), str("k"), u32(9), u32(8), u64(1<<50), filler)
	if allocated := testing.AllocsPerRun(10, func() { tensor.ParseGGUF("f", file) }); allocated > 40 {
		t.Errorf("%v allocations for a refused file", allocated)
	}
}

func FuzzGGUF(f *testing.F) {
	f.Add(must(modelfile.GGUF(ggufMetadata, ggufTensors()))(f))
	f.Add(must(modelfile.GGUF([]modelfile.KV{{Key: "general.alignment", Value: u32(8)}}, ggufTensors()[:2]))(f))
	f.Add(le(head(0, 1), str("k"), u32(9), u32(9), u64(1), string(make([]byte, 64))))
	f.Add(le(head(2, 0), info("t", 0, 0, 12), info("u", 0, 32, 1), string(make([]byte, 128))))
	f.Fuzz(func(t *testing.T, file []byte) {
		g, err := tensor.ParseGGUF("f", file)
		var fe *tensor.FileError
		if err != nil {
			if !errors.As(err, &fe) {
				t.Fatalf("%v is no FileError", err)
			}
			return
		}
		checkViews(t, g.Tensors(), len(file))
		for _, key := range g.Keys() {
			readEveryWay(t, g, key)
		}
	})
}

// readEveryWay tries all getters: exactly those of the value's type may succeed, none may panic.
func readEveryWay(t *testing.T, g *tensor.GGUF, key string) {
	t.Helper()
	_, text := g.String(key)
	_, truth := g.Bool(key)
	_, float := g.Float(key)
	_, texts := g.Strings(key)
	_, floats := g.Float32s(key)
	succeeded := 0
	for _, err := range []error{text, truth, float, texts, floats} {
		if err == nil {
			succeeded++
		}
	}
	if _, err := g.Int(key); err == nil && float != nil {
		t.Fatalf("key %q is an integer but no number", key)
	}
	if _, err := g.Int32s(key); err == nil && floats != nil {
		t.Fatalf("key %q has integers but no numbers", key)
	}
	if succeeded > 1 {
		t.Fatalf("key %q has %d types", key, succeeded)
	}
}
