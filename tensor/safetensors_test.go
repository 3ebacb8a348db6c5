package tensor_test

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"baton/internal/modelfile"
	"baton/tensor"
)

var threeTensors = []tensor.Tensor{
	modelfile.Floats("b", tensor.F32, []float32{1, 2, 3, 4, 5, 6}, 2, 3),
	modelfile.Floats("a", tensor.BF16, []float32{0.5, -2}, 2),
	{Name: "count", DType: tensor.I64, Shape: []int{}, Data: []byte{7, 0, 0, 0, 0, 0, 0, 0}},
	{Name: "empty", DType: tensor.F16, Shape: []int{0, 4}, Data: []byte{}},
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func writeFile(t testing.TB, path string, data []byte) string {
	t.Helper()
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSafetensorsRoundTrip(t *testing.T) {
	data := must(modelfile.Safetensors(threeTensors, map[string]string{"format": "pt"}))(t)
	s := must(tensor.OpenSafetensors(writeFile(t, filepath.Join(t.TempDir(), "m.safetensors"), data)))(t)
	defer s.Close()
	if s.Metadata["format"] != "pt" {
		t.Errorf("metadata is %v", s.Metadata)
	}
	for _, want := range threeTensors {
		got, ok := s.Tensor(want.Name)
		if !ok || !reflect.DeepEqual(got, want) {
			t.Errorf("tensor %q is %+v, want %+v", want.Name, got, want)
		}
		if cap(got.Data) != len(got.Data) {
			t.Errorf("tensor %q can grow into its neighbour", want.Name)
		}
	}
	var names []string
	for _, x := range s.Tensors() {
		names = append(names, x.Name)
	}
	if strings.Join(names, " ") != "a b count empty" {
		t.Errorf("tensors come as %v", names)
	}
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Error(err)
	}
}

func TestShards(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, meta map[string]string, tensors ...tensor.Tensor) {
		writeFile(t, filepath.Join(dir, name), must(modelfile.Safetensors(tensors, meta))(t))
	}
	write("m-1-of-2.safetensors", map[string]string{"shard": "1"}, threeTensors[0], threeTensors[3])
	write("m-2-of-2.safetensors", map[string]string{"shard": "2"}, threeTensors[1])
	index := func(text string) string { return writeFile(t, filepath.Join(dir, "index.json"), []byte(text)) }

	s := must(tensor.OpenSafetensorsIndex(index(`{"metadata":{"total_size":28},"weight_map":{"a":"m-2-of-2.safetensors","b":"m-1-of-2.safetensors"}}`)))(t)
	a, _ := s.Tensor("a")
	b, _ := s.Tensor("b")
	if !reflect.DeepEqual(a, threeTensors[1]) || !reflect.DeepEqual(b, threeTensors[0]) || len(s.Tensors()) != 2 {
		t.Errorf("a is %+v, b is %+v, of %d tensors", a, b, len(s.Tensors()))
	}
	if s.Metadata["shard"] != "1" {
		t.Errorf("metadata is %v, not the first shard's", s.Metadata)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}

	for name, c := range map[string]struct{ text, want string }{
		"not JSON":     {`{"weight_map":`, "is not a valid index"},
		"no map":       {`{}`, "weight_map: names no tensor"},
		"leaves home":  {`{"weight_map":{"a":"../m-2-of-2.safetensors"}}`, "in the same folder"},
		"absolute":     {`{"weight_map":{"a":"/etc/m.safetensors"}}`, "in the same folder"},
		"other suffix": {`{"weight_map":{"a":"index.json"}}`, "in the same folder"},
		"absent shard": {`{"weight_map":{"a":"m-3-of-2.safetensors"}}`, "m-3-of-2.safetensors"},
		"wrong shard":  {`{"weight_map":{"a":"m-1-of-2.safetensors"}}`, `tensor "a": is not in m-1-of-2.safetensors`},
		"twice":        {`{"weight_map":{"a":"m-1-of-2.safetensors","a":"m-2-of-2.safetensors"}}`, "duplicate"},
	} {
		_, err := tensor.OpenSafetensorsIndex(index(c.text))
		checkFileError(t, name, err, c.want)
	}
}

// checkFileError wants a *FileError whose text holds want.
func checkFileError(t *testing.T, name string, err error, want string) {
	t.Helper()
	var fe *tensor.FileError
	if !errors.As(err, &fe) {
		t.Errorf("%s: error is %v, not a FileError", name, err)
	} else if !strings.Contains(err.Error(), want) {
		t.Errorf("%s: error %q does not say %q", name, err, want)
	}
}

func safetensorsFile(header string, data int) []byte {
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(out, header...), make([]byte, data)...)
}

func TestDamagedSafetensors(t *testing.T) {
	lying := func(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"empty":              {nil, "the file ends after 0 bytes"},
		"only a length":      {lying(2), "says 2 bytes, but the file has 0"},
		"huge length":        {append(lying(1<<60), "{}"...), "header length"},
		"over the limit":     {append(lying(100_000_001), make([]byte, 10)...), "header length"},
		"not an object":      {safetensorsFile(`[]`, 0), "does not start with a JSON object"},
		"cut JSON":           {safetensorsFile(`{"a":`, 0), "unexpected EOF"},
		"trailing JSON":      {safetensorsFile(`{}{}`, 0), "goes on after"},
		"not an entry":       {safetensorsFile(`{"a":3}`, 0), `tensor "a"`},
		"no offsets":         {safetensorsFile(`{"a":{"dtype":"F32","shape":[1]}}`, 4), "needs dtype, shape and data_offsets"},
		"no shape":           {safetensorsFile(`{"a":{"dtype":"F32","data_offsets":[0,4]}}`, 4), "needs dtype, shape and data_offsets"},
		"three offsets":      {safetensorsFile(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,2,4]}}`, 4), `tensor "a"`},
		"negative dimension": {safetensorsFile(`{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}`, 4), `tensor "a"`},
		"unknown type":       {safetensorsFile(`{"a":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}`, 4), `has element type "F8_E4M3"`},
		"past the end":       {safetensorsFile(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 4), "is the file cut short"},
		"backwards":          {safetensorsFile(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}`, 4), "lies at bytes [4, 0)"},
		"wrong size":         {safetensorsFile(`{"a":{"dtype":"F16","shape":[1],"data_offsets":[0,4]}}`, 4), "has 4 bytes, which is not what shape [1] of F16 takes"},
		"overflowing shape":  {safetensorsFile(`{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0), "shape"},
		"overflowing bytes":  {safetensorsFile(`{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}}`, 0), "shape"},
		"huge beside zero":   {safetensorsFile(`{"a":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}}`, 0), "shape"},
		"many dimensions":    {safetensorsFile(`{"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}}`, 4), "17 dimensions"},
		"same name":          {safetensorsFile(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 2), "duplicate"},
		"overlap":            {safetensorsFile(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, 3), `tensor "b": shares bytes with tensor "a"`},
		"gap":                {safetensorsFile(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}`, 3), "leaving a gap"},
		"rest":               {safetensorsFile(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 9), "has 9 bytes, but the tensors end at 1"},
		"metadata":           {safetensorsFile(`{"__metadata__":{"a":[]}}`, 0), "__metadata__: is not a map of strings"},
	} {
		_, err := tensor.ParseSafetensors("f", c.file)
		checkFileError(t, name, err, c.want)
	}
	_, err := tensor.OpenSafetensors(t.TempDir())
	checkFileError(t, "a folder", err, "is not a regular file")
	_, err = tensor.OpenSafetensors(writeFile(t, filepath.Join(t.TempDir(), "nothing"), nil))
	checkFileError(t, "nothing", err, "is empty")
	if _, err := tensor.OpenSafetensors("absent"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v does not wrap ErrNotExist", err)
	}
}

// Whatever prefix of a good file is left, the reader says so.
func TestTruncatedSafetensors(t *testing.T) {
	data := must(modelfile.Safetensors(threeTensors, nil))(t)
	for n := range data {
		if _, err := tensor.ParseSafetensors("f", data[:n]); err == nil {
			t.Fatalf("the first %d of %d bytes were accepted", n, len(data))
		}
	}
}

func FuzzSafetensors(f *testing.F) {
	f.Add(must(modelfile.Safetensors(threeTensors, map[string]string{"k": "v"}))(f))
	f.Add(safetensorsFile(`{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0))
	f.Add(safetensorsFile(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, 3))
	f.Add(safetensorsFile(`{"a":{"dtype":"BOOL","shape":[],"data_offsets":[0,1]}}   `, 1))
	f.Fuzz(func(t *testing.T, file []byte) {
		s, err := tensor.ParseSafetensors("f", file)
		var fe *tensor.FileError
		if err != nil {
			if !errors.As(err, &fe) {
				t.Fatalf("%v is no FileError", err)
			}
			return
		}
		checkViews(t, s.Tensors(), len(file))
	})
}

// checkViews touches all of every tensor and compares sizes: together they cannot exceed the file.
func checkViews(t *testing.T, tensors []tensor.Tensor, fileSize int) {
	t.Helper()
	total := 0
	for _, x := range tensors {
		if x.DType.RowBytes(x.Elements()) != len(x.Data) {
			t.Fatalf("%q: %d bytes for shape %v of %v", x.Name, len(x.Data), x.Shape, x.DType)
		}
		crc32.ChecksumIEEE(x.Data) // a view outside the file would fault here
		total += len(x.Data)
	}
	if total > fileSize {
		t.Fatalf("tensors hold %d bytes of a file of %d", total, fileSize)
	}
}
