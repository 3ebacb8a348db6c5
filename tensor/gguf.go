package tensor

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
)

// GGUF is one .gguf file (version 2 or 3), mapped read-only. It may be read by many goroutines; Close
// must come after the last use of any Tensor and of the metadata getters, which decode on demand.
type GGUF struct {
	Path string

	data    []byte // the whole file
	keys    []string
	values  map[string]ggufValue
	tensors map[string]Tensor
}

// OpenGGUF maps a file and checks all of its header. Errors are *FileError.
func OpenGGUF(path string) (*GGUF, error) {
	data, err := mapFile(path)
	if err != nil {
		return nil, err
	}
	g, err := parseGGUF(path, data)
	if err != nil {
		return nil, errors.Join(err, unmap(data))
	}
	g.data = data
	return g, nil
}

// Tensor returns the tensor of that name as a view of the mapped file. Its Shape is row-major, the
// reverse of the order in the file.
func (g *GGUF) Tensor(name string) (Tensor, bool) {
	t, ok := g.tensors[name]
	return t, ok
}

// Tensors returns every tensor, by name.
func (g *GGUF) Tensors() []Tensor { return sortedByName(g.tensors) }

// Forget lets the system have the memory back that reading t, or a slice of one of the tensors, took. It can be
// read again.
func (g *GGUF) Forget(t Tensor) { forget([][]byte{g.data}, t.Data) }

// Close unmaps the file; Tensors and metadata become unusable. A second call does nothing.
func (g *GGUF) Close() error {
	data := g.data
	g.data, g.keys, g.values, g.tensors = nil, nil, nil, nil
	return unmap(data)
}

const (
	ggufMagic            = "GGUF"
	ggufDefaultAlignment = 32
	ggufMaxDims          = 4
	ggufMaxKey           = 1<<16 - 1
)

// ggufTypes maps the numbers of GGML's element types to ours.
var ggufTypes = map[uint32]DType{
	0: F32, 1: F16, 2: Q4_0, 3: Q4_1, 6: Q5_0, 7: Q5_1, 8: Q8_0,
	24: I8, 25: I16, 26: I32, 27: I64, 28: F64, 30: BF16,
}

// ggufForeign names the types that exist but cannot be read, for the error that says so.
var ggufForeign = map[uint32]string{
	9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
	17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
	29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}

// ggufParser walks the header. The first problem sticks in err; every read after it yields zero values.
type ggufParser struct {
	out *GGUF
	buf []byte
	pos int
	err error
}

func (p *ggufParser) fail(kind error, field, format string, args ...any) {
	if p.err == nil {
		p.err = fileErrorf(kind, p.out.Path, field, format, args...)
	}
}

// take returns the next n bytes, or nil and an error when the file ends before.
func (p *ggufParser) take(n uint64, field string) []byte {
	if p.err != nil {
		return nil
	}
	if left := len(p.buf) - p.pos; n > uint64(left) {
		p.fail(ErrMalformed, field, "needs %d bytes, but the file ends after %d more; is it whole?", n, left)
		return nil
	}
	b := p.buf[p.pos : p.pos+int(n)]
	p.pos += int(n)
	return b
}

func (p *ggufParser) u32(field string) uint32 {
	if b := p.take(4, field); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (p *ggufParser) u64(field string) uint64 {
	if b := p.take(8, field); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// name reads a string that is to be a key or a tensor's name.
func (p *ggufParser) name(field string) string {
	n := p.u64(field)
	if n > ggufMaxKey {
		p.fail(ErrMalformed, field, "is %d bytes long; at most %d are allowed", n, ggufMaxKey)
	}
	return string(p.take(n, field))
}

// count reads a number of things that take at least size bytes each, so that a lie shows at once.
func (p *ggufParser) count(field string, size uint64) uint64 {
	n := p.u64(field)
	if left := uint64(len(p.buf) - p.pos); n > left/size {
		p.fail(ErrMalformed, field, "is %d, which cannot fit in the %d bytes that follow; is the file whole?", n, left)
		return 0
	}
	return n
}

func parseGGUF(path string, file []byte) (*GGUF, error) {
	p := &ggufParser{out: &GGUF{Path: path, values: make(map[string]ggufValue), tensors: make(map[string]Tensor)}, buf: file}
	if magic := p.take(4, "magic"); p.err == nil && string(magic) != ggufMagic {
		p.fail(ErrMalformed, "magic", "is %q, not %q: this is no GGUF file", magic, ggufMagic)
	}
	switch version := p.u32("version"); {
	case version == 2 || version == 3:
	case version&0xffff == 0 && version != 0:
		p.fail(ErrUnsupported, "version", "is big-endian; convert the model to little-endian")
	default:
		p.fail(ErrUnsupported, "version", "is %d; 2 and 3 can be read", version)
	}
	tensors, pairs := p.count("tensor count", 8+4+4+8), p.count("metadata count", 8+4+1)
	if tensors > maxEntries || pairs > maxEntries {
		p.fail(ErrMalformed, "tensor count", "is %d, with %d metadata keys; at most %d of each are allowed", tensors, pairs, maxEntries)
	}
	for i := uint64(0); i < pairs && p.err == nil; i++ {
		p.pair()
	}
	infos := p.tensorInfos(tensors)
	p.place(infos)
	if p.err != nil {
		return nil, p.err
	}
	return p.out, nil
}

// pair reads one metadata key and where its value lies.
func (p *ggufParser) pair() {
	key := p.name("metadata key")
	field := quoteName("key", key)
	v := ggufValue{kind: ggufKind(p.u32(field)), count: 1}
	v.element = v.kind
	if v.kind == kindArray {
		v.element = ggufKind(p.u32(field))
		if v.element == kindArray {
			p.fail(ErrUnsupported, field, "is an array of arrays")
		}
		v.count = int(p.count(field, v.element.minBytes()))
	}
	start := p.pos
	if size := v.element.size(); size > 0 {
		p.take(uint64(v.count)*size, field)
	} else if v.element == kindString {
		for i := 0; i < v.count && p.err == nil; i++ {
			p.take(p.u64(field), field)
		}
	} else {
		p.fail(ErrMalformed, field, "has value type %d, which does not exist", v.element)
	}
	if _, twice := p.out.values[key]; twice {
		p.fail(ErrMalformed, field, "is there twice")
	}
	if p.err == nil {
		v.data = p.buf[start:p.pos]
		p.out.values[key] = v
		p.out.keys = append(p.out.keys, key)
	}
}

type ggufInfo struct {
	Tensor
	size   int
	offset uint64 // from the start of the data section
}

func (p *ggufParser) tensorInfos(n uint64) []ggufInfo {
	var infos []ggufInfo
	for i := uint64(0); i < n && p.err == nil; i++ {
		name := p.name("tensor name")
		field := quoteName("tensor", name)
		dims := p.u32(field)
		if dims > ggufMaxDims {
			p.fail(ErrMalformed, field, "has %d dimensions; at most %d are allowed", dims, ggufMaxDims)
			break
		}
		sizes := make([]uint64, dims)
		for i := range sizes {
			sizes[i] = p.u64(field)
		}
		slices.Reverse(sizes) // the file has the fastest dimension first
		number := p.u32(field)
		info := ggufInfo{offset: p.u64(field)}
		if p.err != nil {
			break
		}
		dtype, ok := ggufTypes[number]
		if !ok {
			p.unknownType(field, number)
			break
		}
		size, ok := byteSize(dtype, sizes)
		shape, fits := toInts(sizes)
		if !ok || !fits {
			p.fail(ErrMalformed, field, "has shape %v, which is no possible size of %v", sizes, dtype)
			break
		}
		info.Tensor, info.size = Tensor{Name: name, DType: dtype, Shape: shape}, size
		infos = append(infos, info)
	}
	return infos
}

func (p *ggufParser) unknownType(field string, number uint32) {
	const readable = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 can be read; quantise the model to one of these"
	if name, ok := ggufForeign[number]; ok {
		p.fail(ErrUnsupported, field, "is quantised as %s; %s", name, readable)
		return
	}
	p.fail(ErrUnsupported, field, "has element type %d; %s", number, readable)
}

// place finds each tensor's bytes: offsets count from the end of the header, rounded up to the alignment.
func (p *ggufParser) place(infos []ggufInfo) {
	alignment := uint64(ggufDefaultAlignment)
	if p.err == nil && p.out.Has("general.alignment") {
		n, err := p.out.Int("general.alignment")
		if err != nil || n <= 0 || n > math.MaxUint32 || n&(n-1) != 0 {
			p.fail(ErrMalformed, quoteName("key", "general.alignment"), "is no power of two")
		}
		alignment = uint64(n)
	}
	if p.err != nil {
		return
	}
	base := (uint64(p.pos) + alignment - 1) &^ (alignment - 1)
	data := p.buf[min(base, uint64(len(p.buf))):]
	extents := make([]extent, 0, len(infos))
	for _, info := range infos {
		field := quoteName("tensor", info.Name)
		switch left := uint64(len(data)); {
		case info.offset%alignment != 0:
			p.fail(ErrMalformed, field, "starts at %d, which is not aligned to %d bytes", info.offset, alignment)
		case info.offset > left || uint64(info.size) > left-info.offset:
			p.fail(ErrMalformed, field, "needs %d bytes at offset %d, but only %d bytes of data follow the header; is the file whole?", info.size, info.offset, left)
		}
		if _, twice := p.out.tensors[info.Name]; twice {
			p.fail(ErrMalformed, field, "is there twice")
		}
		if p.err != nil {
			return
		}
		begin, end := int(info.offset), int(info.offset)+info.size
		info.Data = data[begin:end:end]
		p.out.tensors[info.Name] = info.Tensor
		extents = append(extents, extent{info.Name, begin, end})
	}
	if a, b := sortExtents(extents); a != nil {
		p.fail(ErrMalformed, quoteName("tensor", b.name), "shares bytes with %s", quoteName("tensor", a.name))
	}
}
