package collective

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// A connection carries frames both ways: a header of headerSize bytes and, for some kinds, a body. Numbers
// are little-endian. Groups have the numbers that the sender gave them in frameGroup.
type frameKind uint8

const (
	frameGroup  frameKind = iota + 1 // the sender knows a group; body: see groupBody
	frameData                        // a message of a lane; body: rows × cols f32
	frameTaken                       // the receiver of a lane has taken so many messages
	frameBeat                        // the sender lives; body: see beatBody
	frameClosed                      // rank from has closed its membership
	frameFailed                      // rank from has failed; body: why, as text
	frameEnd
)

const headerSize = 40

// Limits of frames from outside.
const (
	maxBody     = 1 << 20 // bytes, of all but data
	maxReason   = 4 << 10 // bytes, of a text that is sent
	maxElements = 1 << 28 // of a message: 1 GiB
)

// header is the beginning of a frame. Fields that a kind does not need are zero.
type header struct {
	kind     frameKind
	op       op
	direct   bool
	group    uint32
	from, to int    // members of the group, up to 65535; frameClosed and frameFailed: from is a rank
	root     int    // of the call
	seq      uint64 // of the call
	taken    uint64 // messages taken of the lane from `to` to `from`: of frameTaken, and in passing of frameData
	rows     int    // of a matrix; of other kinds with a body its bytes
	cols     int
}

// bodySize is the number of bytes that follow the header.
func (h *header) bodySize() int {
	if h.kind == frameData {
		return 4 * h.rows * h.cols
	}
	return h.rows
}

func appendHeader(b []byte, h header) []byte {
	direct := byte(0)
	if h.direct {
		direct = 1
	}
	le := binary.LittleEndian
	b = append(b, byte(h.kind), byte(h.op), direct, 0)
	b = le.AppendUint32(b, h.group)
	b = le.AppendUint16(b, uint16(h.from))
	b = le.AppendUint16(b, uint16(h.to))
	b = le.AppendUint32(b, uint32(h.root))
	b = le.AppendUint64(b, h.seq)
	b = le.AppendUint64(b, h.taken)
	b = le.AppendUint32(b, uint32(h.rows))
	return le.AppendUint32(b, uint32(h.cols))
}

// errFrame is bytes that are no frame.
var errFrame = errors.New("it sent something that is not a frame of this protocol")

func badFrame(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errFrame, fmt.Sprintf(format, args...))
}

// parseHeader reads a header of headerSize bytes and checks what can be checked without knowing groups.
func parseHeader(b []byte) (header, error) {
	le := binary.LittleEndian
	h := header{
		kind: frameKind(b[0]), op: op(b[1]), direct: b[2] == 1, group: le.Uint32(b[4:]),
		from: int(le.Uint16(b[8:])), to: int(le.Uint16(b[10:])), root: int(le.Uint32(b[12:])),
		seq: le.Uint64(b[16:]), taken: le.Uint64(b[24:]),
		rows: int(le.Uint32(b[32:])), cols: int(le.Uint32(b[36:])),
	}
	switch {
	case h.kind == 0 || h.kind >= frameEnd || b[2] > 1 || b[3] != 0:
		return h, badFrame("it begins with % x", b[:4])
	case h.kind != frameData && (h.cols != 0 || h.rows > maxBody):
		return h, badFrame("a body of %d bytes", h.rows)
	case h.kind == frameData && (h.op == 0 || h.op >= opEnd || h.direct != (h.op == opSend)):
		return h, badFrame("operation %d", h.op)
	case h.kind == frameData && (h.rows > maxElements || h.cols > maxElements || h.rows*h.cols > maxElements):
		return h, badFrame("a matrix of %v; %d elements are the limit", shape{h.rows, h.cols}, maxElements)
	}
	return h, nil
}

// groupBody encodes a group: the number of its members, their ranks in order, its name.
func groupBody(b []byte, name string, ranks []int) []byte {
	b = binary.LittleEndian.AppendUint16(b, uint16(len(ranks)))
	for _, r := range ranks {
		b = binary.LittleEndian.AppendUint16(b, uint16(r))
	}
	return append(b, name...)
}

func parseGroup(b []byte) (name string, ranks []int, err error) {
	d := decoder{b: b}
	for range d.count(2) {
		ranks = append(ranks, int(d.uint16()))
	}
	if d.bad {
		return "", nil, badFrame("a group of %d bytes", len(b))
	}
	return string(d.b), ranks, nil
}

// report is a rank that waits, as its process says.
type report struct {
	rank   int
	number uint64
	edges  []edge
	text   string
}

// beatBody encodes the ranks that wait: rank, number of the wait, whom it waits for and with which wait of
// theirs, and the wait in words. Lists and texts begin with their length.
func beatBody(b []byte, reports []report) []byte {
	le := binary.LittleEndian
	b = le.AppendUint16(b, uint16(len(reports)))
	for _, r := range reports {
		b = le.AppendUint16(b, uint16(r.rank))
		b = le.AppendUint64(b, r.number)
		b = le.AppendUint16(b, uint16(len(r.edges)))
		for _, e := range r.edges {
			b = le.AppendUint16(b, uint16(e.rank))
			b = le.AppendUint64(b, e.number)
		}
		text := r.text[:min(len(r.text), math.MaxUint16)]
		b = le.AppendUint16(b, uint16(len(text)))
		b = append(b, text...)
	}
	return b
}

func parseBeat(b []byte) ([]report, error) {
	d := decoder{b: b}
	var reports []report
	for range d.count(14) {
		r := report{rank: int(d.uint16()), number: d.uint64()}
		for range d.count(10) {
			r.edges = append(r.edges, edge{int(d.uint16()), d.uint64()})
		}
		r.text = string(d.bytes(int(d.uint16())))
		reports = append(reports, r)
	}
	if d.bad || len(d.b) > 0 {
		return nil, badFrame("a heartbeat of %d bytes", len(b))
	}
	return reports, nil
}

// decoder reads numbers from the front of b. After the end of b everything is zero, and bad is set.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) bytes(n int) []byte {
	if n > len(d.b) {
		d.b, d.bad = nil, true
		return nil
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

func (d *decoder) uint16() uint16 {
	if b := d.bytes(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

func (d *decoder) uint64() uint64 {
	if b := d.bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// count reads the length of a list whose elements have at least size bytes.
func (d *decoder) count(size int) int {
	n := int(d.uint16())
	if n*size > len(d.b) {
		d.b, d.bad = nil, true
		return 0
	}
	return n
}
