//go:build linux

package shm

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"time"

	"baton/transfer/internal/backend"

	"golang.org/x/sys/unix"
)

// The protocol. A puller says hello: the magic and the incarnation that it expects. Then it sends
// frames: a claim {kindClaim, id, claim} followed by a frame of ranges, and later {kindDone, id}. The
// source answers each claim with {id, flags, verdict}; with flagMemory the descriptor travels along.
const (
	magic      = "batonsh1"
	helloSize  = len(magic) + 8
	kindClaim  = 1
	kindDone   = 2
	flagMemory = 1
)

// maxReads bounds the reads that one peer may have under way.
const maxReads = 4096

// serve is the source's side of one connection.
func (e *Endpoint) serve(s *backend.Session) {
	reads := make(map[uint64]func()) // under way, with what ends them
	// The connection ends first: the puller must see that before the memory can be reused.
	defer func() {
		s.Conn.Close()
		for _, end := range reads {
			end()
		}
	}()
	if sameUser(s.Conn) != nil {
		return
	}
	r := bufio.NewReader(s.Conn)
	var hello [helloSize]byte
	if _, err := io.ReadFull(r, hello[:]); err != nil || string(hello[:len(magic)]) != magic {
		return
	}
	if binary.LittleEndian.Uint64(hello[len(magic):]) != e.id {
		return
	}
	var head, body []byte
	passed := false // the descriptor was
	for {
		var err error
		if head, err = backend.ReadFrame(r, head, backend.MaxClaim); err != nil || len(head) < 9 {
			return
		}
		id := binary.LittleEndian.Uint64(head[1:])
		switch end := reads[id]; {
		case head[0] == kindDone && end != nil:
			delete(reads, id)
			end()
			continue
		case head[0] != kindClaim || end != nil || len(reads) == maxReads:
			return
		}
		var end func()
		end, body, err = e.admit(s, r, head[9:], body)
		if end == nil && err == nil {
			return
		}
		if err == nil {
			reads[id] = end
		}
		if e.answer(s, id, err, err == nil && !passed) != nil {
			return
		}
		if err == nil {
			passed = true
		}
	}
}

// admit reads the ranges that follow a claim and begins the read. It returns no end and no error when
// the connection is of no more use. body is a buffer for the next call.
func (e *Endpoint) admit(s *backend.Session, r *bufio.Reader, claim, body []byte) (func(), []byte, error) {
	handoff, capability, err := backend.ParseClaim(claim)
	if err != nil {
		return nil, body, nil
	}
	if refusal := e.exports.Check(handoff, capability); refusal != nil {
		if backend.SkipFrame(r, backend.MaxFrame) != nil {
			return nil, body, nil
		}
		return nil, body, refusal
	}
	s.Proven()
	if body, err = backend.ReadFrame(r, body, backend.MaxFrame); err != nil {
		return nil, body, nil
	}
	ranges, rest, err := backend.ReadRanges(body, int64(len(e.mem.Data)))
	if err == nil && (len(rest) > 0 || len(ranges) == 0) {
		err = errors.New("malformed list of ranges")
	}
	if err != nil {
		return nil, body, err
	}
	end, err := e.exports.Begin(handoff, capability, ranges)
	return end, body, err
}

// answer sends the verdict on a claim, with the descriptor if memory is set.
func (e *Endpoint) answer(s *backend.Session, id uint64, verdict error, memory bool) error {
	b := backend.BeginFrame(nil)
	b = binary.LittleEndian.AppendUint64(b, id)
	var oob []byte
	if memory {
		b = append(b, flagMemory)
		oob = unix.UnixRights(int(e.ro.Fd()))
	} else {
		b = append(b, 0)
	}
	b = backend.EndFrame(backend.AppendVerdict(b, verdict), 0)
	if err := s.SetWriteDeadline(time.Now().Add(e.opt.Timeout)); err != nil {
		return err
	}
	n, _, err := s.Conn.(*net.UnixConn).WriteMsgUnix(b, oob, nil)
	if err == nil && n < len(b) {
		_, err = s.Conn.Write(b[n:])
	}
	return err
}
