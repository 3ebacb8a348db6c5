package tensor

import (
	"bytes"
	"encoding/binary"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// The format's own limit on a header, and ours on an index, which says less about each tensor.
const maxHeaderBytes = 100_000_000

// Safetensors is one .safetensors file, or all shards of an index, mapped read-only. It may be read by
// many goroutines; Close must come after the last use of any Tensor.
type Safetensors struct {
	Path     string
	Metadata map[string]string // the header's __metadata__ (of a sharded checkpoint: the first shard's)

	maps    [][]byte
	tensors map[string]Tensor
}

var safetensorsTypes = map[string]DType{
	"F64": F64, "F32": F32, "F16": F16, "BF16": BF16,
	"I64": I64, "I32": I32, "I16": I16, "I8": I8, "U8": U8, "BOOL": Bool,
}

// OpenSafetensors maps one file and checks its whole header. Errors are *FileError.
func OpenSafetensors(path string) (*Safetensors, error) {
	data, err := mapFile(path)
	if err != nil {
		return nil, err
	}
	s, err := parseSafetensors(path, data)
	if err != nil {
		return nil, errors.Join(err, unmap(data))
	}
	s.maps = [][]byte{data}
	return s, nil
}

// OpenSafetensorsIndex opens the shards that a model.safetensors.index.json names; they lie beside it.
// Tensors that a shard holds but the index does not name are left out. Errors are *FileError.
func OpenSafetensorsIndex(path string) (*Safetensors, error) {
	weightMap, err := readIndex(path)
	if err != nil {
		return nil, err
	}
	all := &Safetensors{Path: path, tensors: make(map[string]Tensor, len(weightMap))}
	shards := make(map[string]*Safetensors)
	for name, file := range weightMap {
		shard := shards[file]
		if shard == nil {
			if shard, err = OpenSafetensors(filepath.Join(filepath.Dir(path), file)); err != nil {
				return nil, errors.Join(err, all.Close())
			}
			shards[file] = shard
			all.maps = append(all.maps, shard.maps...)
		}
		t, ok := shard.Tensor(name)
		if !ok {
			err := fileErrorf(ErrMalformed, path, quoteName("tensor", name), "is not in %s, where the index puts it", file)
			return nil, errors.Join(err, all.Close())
		}
		all.tensors[name] = t
	}
	first := ""
	for file, shard := range shards {
		if first == "" || file < first {
			first, all.Metadata = file, shard.Metadata
		}
	}
	return all, nil
}

// readIndex returns which file holds each tensor, and makes sure that no name leads out of the folder.
func readIndex(path string) (map[string]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, osError(path, err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxHeaderBytes+1))
	if err != nil {
		return nil, osError(path, err)
	}
	if len(data) > maxHeaderBytes {
		return nil, fileErrorf(ErrMalformed, path, "", "is over %d bytes, too long for an index", maxHeaderBytes)
	}
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(data, &index); err != nil {
		member, problem := JSONProblem(err)
		return nil, fileErrorf(ErrMalformed, path, member, "%s; it is not a valid index", problem)
	}
	if len(index.WeightMap) == 0 {
		return nil, fileErrorf(ErrMalformed, path, "weight_map", "names no tensor")
	}
	for name, file := range index.WeightMap {
		if file != filepath.Base(file) || !strings.HasSuffix(file, ".safetensors") {
			return nil, fileErrorf(ErrMalformed, path, quoteName("tensor", name), "%q is not the name of a .safetensors file in the same folder", file)
		}
	}
	return index.WeightMap, nil
}

// Tensor returns the tensor of that name as a view of the mapped file.
func (s *Safetensors) Tensor(name string) (Tensor, bool) {
	t, ok := s.tensors[name]
	return t, ok
}

// Tensors returns every tensor, by name.
func (s *Safetensors) Tensors() []Tensor { return sortedByName(s.tensors) }

// Forget lets the system have the memory back that reading t, or a slice of one of the tensors, took. It can be
// read again.
func (s *Safetensors) Forget(t Tensor) { forget(s.maps, t.Data) }

// Close unmaps the files; every Tensor that came from them becomes unusable. A second call does nothing.
func (s *Safetensors) Close() error {
	var err error
	for _, data := range s.maps {
		err = errors.Join(err, unmap(data))
	}
	s.maps, s.tensors = nil, nil
	return err
}

// parseSafetensors reads a header: its length as a little-endian u64, that much JSON, then the data.
func parseSafetensors(path string, file []byte) (*Safetensors, error) {
	if len(file) < 8 {
		return nil, fileErrorf(ErrMalformed, path, "header length", "the file ends after %d bytes", len(file))
	}
	size := binary.LittleEndian.Uint64(file)
	if size > maxHeaderBytes || size > uint64(len(file)-8) {
		return nil, fileErrorf(ErrMalformed, path, "header length", "says %d bytes, but the file has %d after it; is this a safetensors file, and whole?", size, len(file)-8)
	}
	header, data := file[8:8+size], file[8+size:]
	p := safetensorsParser{
		out:  &Safetensors{Path: path, tensors: make(map[string]Tensor)},
		dec:  jsontext.NewDecoder(bytes.NewReader(header)),
		data: data,
	}
	if err := p.header(); err != nil {
		return nil, err
	}
	if err := p.layout(); err != nil {
		return nil, err
	}
	return p.out, nil
}

type safetensorsParser struct {
	out     *Safetensors
	dec     *jsontext.Decoder // rejects an object that names a member twice
	data    []byte
	extents []extent
}

func (p *safetensorsParser) bad(field, format string, args ...any) error {
	return fileErrorf(ErrMalformed, p.out.Path, field, format, args...)
}

func (p *safetensorsParser) header() error {
	if tok, err := p.dec.ReadToken(); err != nil || tok.Kind() != '{' {
		return p.bad("header", "does not start with a JSON object")
	}
	for p.dec.PeekKind() != '}' {
		tok, err := p.dec.ReadToken()
		if err != nil {
			return p.bad("header", "%v", err)
		}
		name := tok.String()
		if name == "__metadata__" {
			if err := json.UnmarshalDecode(p.dec, &p.out.Metadata); err != nil {
				_, problem := JSONProblem(err)
				return p.bad(name, "is not a map of strings: one value %s", problem)
			}
		} else if err := p.tensor(name); err != nil {
			return err
		}
	}
	if _, err := p.dec.ReadToken(); err != nil {
		return p.bad("header", "%v", err)
	}
	if _, err := p.dec.ReadToken(); err != io.EOF {
		return p.bad("header", "goes on after its JSON object")
	}
	return nil
}

func (p *safetensorsParser) tensor(name string) error {
	var entry struct {
		DType   string     `json:"dtype"`
		Shape   []uint64   `json:"shape"`
		Offsets *[2]uint64 `json:"data_offsets"`
	}
	field := quoteName("tensor", name)
	if len(p.extents) == maxEntries {
		return p.bad(field, "is one more than the %d tensors that a file may have", maxEntries)
	}
	if err := json.UnmarshalDecode(p.dec, &entry); err != nil {
		member, problem := JSONProblem(err)
		return p.bad(field, "%s %s", member[strings.LastIndexByte(member, '/')+1:], problem)
	}
	if entry.DType == "" || entry.Shape == nil || entry.Offsets == nil {
		return p.bad(field, "needs dtype, shape and data_offsets")
	}
	dtype, ok := safetensorsTypes[entry.DType]
	if !ok {
		return fileErrorf(ErrUnsupported, p.out.Path, field, "has element type %q; F32, F16, BF16, F64 and the integers up to 64 bits can be read", entry.DType)
	}
	if len(entry.Shape) > maxRank {
		return p.bad(field, "has %d dimensions; at most %d make sense", len(entry.Shape), maxRank)
	}
	begin, end := entry.Offsets[0], entry.Offsets[1]
	if begin > end || end > uint64(len(p.data)) {
		return p.bad(field, "lies at bytes [%d, %d) of %d; is the file cut short?", begin, end, len(p.data))
	}
	size, ok := byteSize(dtype, entry.Shape)
	shape, fits := toInts(entry.Shape)
	if !ok || !fits || uint64(size) != end-begin {
		return p.bad(field, "has %d bytes, which is not what shape %v of %s takes", end-begin, entry.Shape, entry.DType)
	}
	p.out.tensors[name] = Tensor{Name: name, DType: dtype, Shape: shape, Data: p.data[begin:end:end]}
	p.extents = append(p.extents, extent{name, int(begin), int(end)})
	return nil
}

// layout checks the format's promise that the tensors tile the data section: no overlap, no gap, no rest.
func (p *safetensorsParser) layout() error {
	if a, b := sortExtents(p.extents); a != nil {
		return p.bad(quoteName("tensor", b.name), "shares bytes with %s", quoteName("tensor", a.name))
	}
	next := 0
	for _, e := range p.extents {
		if e.begin > next {
			return p.bad(quoteName("tensor", e.name), "starts at byte %d, leaving a gap after byte %d", e.begin, next)
		}
		next = max(next, e.end)
	}
	if next != len(p.data) {
		return p.bad("data", "has %d bytes, but the tensors end at %d", len(p.data), next)
	}
	return nil
}
