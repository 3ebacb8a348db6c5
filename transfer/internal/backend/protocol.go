package backend

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"baton/transfer"
)

// Description is what Endpoint.Describe encodes: how to reach a memory, and which life of it.
type Description struct {
	Backend     string `json:"backend"`
	Addr        string `json:"addr"`
	Incarnation uint64 `json:"incarnation,string"`
	Size        int64  `json:"size"`
	TLS         bool   `json:"tls,omitempty"`
}

// Encode returns the description as JSON.
func (d Description) Encode() []byte {
	b, err := json.Marshal(d)
	if err != nil {
		panic(err) // strings and numbers always encode
	}
	return b
}

// ParseDescription decodes the description of a peer, which must be of the given backend.
func ParseDescription(b []byte, backend string) (Description, error) {
	var d Description
	if err := ParseJSON(b, &d); err != nil {
		return d, fmt.Errorf("description of the peer: %w", err)
	}
	if d.Backend != backend {
		return d, fmt.Errorf("the peer's transport is %q, this side's %q: start both engines with the same one", d.Backend, backend)
	}
	if d.Addr == "" || d.Size < 0 {
		return d, errors.New("description of the peer: no address or a negative size")
	}
	return d, nil
}

// ParseJSON decodes a small object from a peer.
func ParseJSON(b []byte, v any) error {
	if len(b) > 4096 {
		return fmt.Errorf("%d bytes, at most 4096 make sense", len(b))
	}
	return json.Unmarshal(b, v)
}

// AppendClaim encodes what a puller shows before it names ranges: the source looks at these few bytes
// before it takes more from a stranger.
func AppendClaim(b []byte, handoff uint64, capability []byte) []byte {
	return append(binary.LittleEndian.AppendUint64(b, handoff), capability...)
}

// ParseClaim decodes a claim. capability is part of b.
func ParseClaim(b []byte) (handoff uint64, capability []byte, err error) {
	if len(b) <= 8 || len(b) > 8+maxCapability {
		return 0, nil, errors.New("malformed claim")
	}
	return binary.LittleEndian.Uint64(b), b[8:], nil
}

// Verdicts that a server sends ahead of a reason.
const (
	verdictOK      = 0
	verdictRefused = 1 // the capability or ticket does not give what was asked for
	verdictBad     = 2 // the request makes no sense
)

// AppendVerdict encodes the answer to a request: nil is yes.
func AppendVerdict(b []byte, err error) []byte {
	switch {
	case err == nil:
		return append(b, verdictOK)
	case errors.Is(err, transfer.ErrRefused):
		b = append(b, verdictRefused)
	default:
		b = append(b, verdictBad)
	}
	// The reader puts the sentinel back.
	return append(b, bytes.TrimPrefix([]byte(err.Error()), []byte(transfer.ErrRefused.Error()+": "))...)
}

// ParseVerdict decodes an answer.
func ParseVerdict(b []byte) error {
	if len(b) == 0 {
		return errors.New("empty answer from the peer")
	}
	switch b[0] {
	case verdictOK:
		return nil
	case verdictRefused:
		return fmt.Errorf("%w: %.200s", transfer.ErrRefused, b[1:])
	}
	return fmt.Errorf("the peer does not accept the request: %.200q", b[1:])
}

// ReadVerdict reads the frame of an answer, and not a byte beyond. A yes takes one read.
func ReadVerdict(r io.Reader) ([]byte, error) {
	var b [FrameHead + 1]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return nil, err
	}
	size := binary.LittleEndian.Uint32(b[:])
	if size == 0 || size > MaxClaim {
		return nil, fmt.Errorf("an answer of %d bytes", size)
	}
	verdict := make([]byte, size)
	verdict[0] = b[FrameHead]
	_, err := io.ReadFull(r, verdict[1:])
	return verdict, err
}

// Frames are a little-endian uint32 length and so many bytes.
const (
	FrameHead = 4
	// MaxClaim bounds the frames of strangers, and of answers.
	MaxClaim = 1024
	// MaxFrame holds a list of MaxRanges ranges of 12 bytes, more than scattered blocks of a large pool take.
	MaxFrame = 48 << 20
)

// BeginFrame appends the place for a length to b; EndFrame fills it in when the body follows.
func BeginFrame(b []byte) []byte { return append(b, 0, 0, 0, 0) }

// EndFrame completes the frame that begins at b[start:].
func EndFrame(b []byte, start int) []byte {
	binary.LittleEndian.PutUint32(b[start:], uint32(len(b)-start-FrameHead))
	return b
}

// frameSize reads the length of a frame's body.
func frameSize(r io.Reader, limit int) (int64, error) {
	var head [FrameHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, err
	}
	size := int64(binary.LittleEndian.Uint32(head[:]))
	if size > int64(limit) {
		return 0, fmt.Errorf("frame of %d bytes, the limit is %d", size, limit)
	}
	return size, nil
}

// SkipFrame reads a frame and keeps nothing.
func SkipFrame(r io.Reader, limit int) error {
	size, err := frameSize(r, limit)
	if err == nil {
		_, err = io.CopyN(io.Discard, r, size)
	}
	return err
}

// ReadFrame reads a frame's body into buf, which grows only as bytes arrive.
func ReadFrame(r io.Reader, buf []byte, limit int) ([]byte, error) {
	size, err := frameSize(r, limit)
	if err != nil {
		return nil, err
	}
	buf = buf[:0]
	for int64(len(buf)) < size {
		have := len(buf)
		step := int(min(size-int64(have), int64(max(have, 4096))))
		buf = slices.Grow(buf, step)[:have+step]
		if _, err := io.ReadFull(r, buf[have:]); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
	return buf, nil
}
