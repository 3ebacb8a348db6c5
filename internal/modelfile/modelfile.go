// Package modelfile writes small model files, so that tests can read real ones of every shape, also
// damaged ones. It lays out bytes; it is no converter for users.
package modelfile

import (
	"bytes"
	"encoding/binary"
	"encoding/json/v2"
	"fmt"
	"slices"
	"strings"

	"baton/tensor"
)

// Floats makes a tensor of the given type from f32 values, quantising as tensor.Quantize does. It panics
// when values do not fill the shape, which is a mistake in the test.
func Floats(name string, t tensor.DType, values []float32, shape ...int) tensor.Tensor {
	out := tensor.Tensor{Name: name, DType: t, Shape: shape, Data: make([]byte, t.RowBytes(len(values)))}
	if out.Elements() != len(values) {
		panic(fmt.Sprintf("modelfile: %s: %d values for shape %v", name, len(values), shape))
	}
	if err := tensor.Quantize(out.Data, t, values); err != nil {
		panic(err)
	}
	return out
}

// Safetensors lays tensors out in the given order behind their header, which is padded to 8 bytes.
func Safetensors(tensors []tensor.Tensor, metadata map[string]string) ([]byte, error) {
	type entry struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	var members []string
	member := func(name string, value any) error {
		key, err := json.Marshal(name)
		if err != nil {
			return err
		}
		text, err := json.Marshal(value, json.Deterministic(true))
		if err == nil {
			members = append(members, string(key)+":"+string(text))
		}
		return err
	}
	if metadata != nil {
		if err := member("__metadata__", metadata); err != nil {
			return nil, err
		}
	}
	var data []byte
	for _, t := range tensors {
		if t.DType.Quantised() {
			return nil, fmt.Errorf("modelfile: %s: safetensors has no type %v", t.Name, t.DType)
		}
		e := entry{strings.ToUpper(t.DType.String()), slices.Concat([]int{}, t.Shape), [2]int{len(data), len(data) + len(t.Data)}}
		if err := member(t.Name, e); err != nil {
			return nil, err
		}
		data = append(data, t.Data...)
	}
	header := "{" + strings.Join(members, ",") + "}"
	header += strings.Repeat(" ", -len(header)&7)
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return slices.Concat(out, []byte(header), data), nil
}

// KV is one metadata entry of a GGUF file. Value is a string, a bool, a number of fixed width, or a
// slice of one of these.
type KV struct {
	Key   string
	Value any
}

// GGUF lays out a version 3 file with 32-byte alignment, or what general.alignment among the metadata
// says (a uint32).
func GGUF(metadata []KV, tensors []tensor.Tensor) ([]byte, error) {
	w := ggufWriter{}
	w.WriteString("GGUF")
	w.put(uint32(3), uint64(len(tensors)), uint64(len(metadata)))
	alignment := 32
	for _, kv := range metadata {
		w.text(kv.Key)
		if err := w.value(kv.Value); err != nil {
			return nil, fmt.Errorf("modelfile: %s: %w", kv.Key, err)
		}
		if a, ok := kv.Value.(uint32); ok && kv.Key == "general.alignment" {
			alignment = int(a)
		}
	}
	offset := 0
	for _, t := range tensors {
		number, ok := ggufNumbers[t.DType]
		if !ok {
			return nil, fmt.Errorf("modelfile: %s: GGUF has no type %v", t.Name, t.DType)
		}
		w.text(t.Name)
		w.put(uint32(len(t.Shape)))
		for _, d := range slices.Backward(t.Shape) {
			w.put(uint64(d))
		}
		w.put(number, uint64(offset))
		offset += len(t.Data) + pad(len(t.Data), alignment)
	}
	w.Write(make([]byte, pad(w.Len(), alignment)))
	for _, t := range tensors {
		w.Write(t.Data)
		w.Write(make([]byte, pad(len(t.Data), alignment)))
	}
	return w.Bytes(), nil
}

var ggufNumbers = map[tensor.DType]uint32{
	tensor.F32: 0, tensor.F16: 1, tensor.Q4_0: 2, tensor.Q4_1: 3, tensor.Q5_0: 6, tensor.Q5_1: 7, tensor.Q8_0: 8,
	tensor.I8: 24, tensor.I16: 25, tensor.I32: 26, tensor.I64: 27, tensor.F64: 28, tensor.BF16: 30,
}

func pad(n, alignment int) int { return -n & (alignment - 1) }

type ggufWriter struct{ bytes.Buffer }

// put appends fixed-size values, little-endian; a bytes.Buffer never fails.
func (w *ggufWriter) put(values ...any) {
	for _, v := range values {
		if err := binary.Write(&w.Buffer, binary.LittleEndian, v); err != nil {
			panic(err)
		}
	}
}

func (w *ggufWriter) text(s string) {
	w.put(uint64(len(s)))
	w.WriteString(s)
}

func (w *ggufWriter) value(v any) error {
	kind, ok := kindOf(v)
	if !ok {
		return fmt.Errorf("a %T is no metadata value", v)
	}
	switch v := v.(type) {
	case string:
		w.put(kind)
		w.text(v)
	case []string:
		w.put(uint32(9), kind, uint64(len(v)))
		for _, s := range v {
			w.text(s)
		}
	default:
		if n := binary.Size(v); isSlice(v) {
			w.put(uint32(9), kind, uint64(n/sizes[kind]))
		} else {
			w.put(kind)
		}
		w.put(v)
	}
	return nil
}

// sizes of the fixed-size kinds, by number.
var sizes = map[uint32]int{0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

func isSlice(v any) bool {
	switch v.(type) {
	case []uint8, []int8, []uint16, []int16, []uint32, []int32, []float32, []bool, []uint64, []int64, []float64:
		return true
	}
	return false
}

// kindOf is the number of a value's type, of its elements' for a slice.
func kindOf(v any) (uint32, bool) {
	switch v.(type) {
	case uint8, []uint8:
		return 0, true
	case int8, []int8:
		return 1, true
	case uint16, []uint16:
		return 2, true
	case int16, []int16:
		return 3, true
	case uint32, []uint32:
		return 4, true
	case int32, []int32:
		return 5, true
	case float32, []float32:
		return 6, true
	case bool, []bool:
		return 7, true
	case string, []string:
		return 8, true
	case uint64, []uint64:
		return 10, true
	case int64, []int64:
		return 11, true
	case float64, []float64:
		return 12, true
	}
	return 0, false
}
