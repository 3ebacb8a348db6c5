package collective

import (
	"bytes"
	"errors"
	"io"
	"net"
	"reflect"
	"testing"
	"time"
)

// frames encodes a frame with its body.
func frame(h header, body []byte) []byte {
	if h.kind != frameData {
		h.rows = len(body)
	}
	return append(appendHeader(nil, h), body...)
}

// FuzzFrames has a process say anything. Nothing may panic, hang or need memory that has not been paid for,
// and no rank but those of that process may seem to wait or close.
func FuzzFrames(f *testing.F) {
	group := frame(header{kind: frameGroup, group: 7}, groupBody(nil, "g", []int{2, 0, 1}))
	matrix := make([]byte, 24)
	sum := header{kind: frameData, op: opAllReduce, group: 7, from: 0, to: 1, rows: 2, cols: 3}
	f.Add(bytes.Join([][]byte{group, frame(sum, matrix), frame(sum, matrix), frame(sum, matrix), frame(sum, matrix), frame(sum, matrix)}, nil))
	f.Add(append(group, frame(header{kind: frameTaken, group: 7, from: 0, to: 2, taken: 1, direct: true}, nil)...))
	f.Add(append(group, frame(header{kind: frameData, op: opSend, direct: true, group: 7, from: 0, to: 2}, nil)...))
	f.Add(frame(header{kind: frameData, op: opAllReduce, rows: maxElements, cols: 1}, nil))
	f.Add(frame(header{kind: frameBeat}, beatBody(nil, []report{{rank: 2, number: 3, edges: []edge{{0, 1}, {3, 9}}, text: "why"}, {rank: 3}})))
	f.Add(append(frame(header{kind: frameClosed, from: 2}, nil), frame(header{kind: frameClosed, from: 0}, nil)...))
	f.Add(frame(header{kind: frameFailed, from: 3}, []byte("smoke")))
	f.Fuzz(func(t *testing.T, data []byte) {
		p := newProcess(4, []int{0, 1})
		l := newLink(p, silent{}, "there", []int{2, 3}, time.Hour)
		r := bytes.NewReader(data)
		for {
			head := make([]byte, headerSize)
			if _, err := io.ReadFull(r, head); err != nil {
				break
			}
			if err := l.frame(r, head); err != nil {
				var failed *FailedError
				if !errors.Is(err, errFrame) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.As(err, &failed) {
					var group *GroupError
					if !errors.As(err, &group) {
						t.Fatalf("an error of another kind: %v", err)
					}
				}
				break
			}
		}
		for _, r := range p.local {
			if s := p.ranks[r]; s.closed.Load() || s.wait.kind != awake {
				t.Fatalf("rank %d is not as it was", r)
			}
		}
		for _, g := range p.groups {
			for _, lane := range g.lanes {
				if len(lane.queue) > queueDepth || lane.taken > lane.sent && len(lane.queue) > 0 && p.ranks[g.ranks[lane.from]].here {
					t.Fatalf("lane %+v holds %d messages", lane.laneKey, len(lane.queue))
				}
			}
		}
		p.reports()
	})
}

// silent is a connection on which nothing happens.
type silent struct{ net.Conn }

func (silent) SetReadDeadline(time.Time) error  { return nil }
func (silent) SetWriteDeadline(time.Time) error { return nil }

func TestFrameRoundTrip(t *testing.T) {
	for _, h := range []header{
		{kind: frameGroup, group: 9, rows: 12},
		{kind: frameData, op: opGatherColumns, group: 1 << 31, from: 65535, to: 4000, root: 3, seq: 1 << 60, taken: 1 << 50, rows: 1 << 14, cols: 1 << 14},
		{kind: frameData, op: opSend, direct: true},
		{kind: frameTaken, direct: true, from: 1, to: 2, taken: 9},
		{kind: frameClosed, from: 4095},
	} {
		b := appendHeader(nil, h)
		got, err := parseHeader(b)
		if err != nil || got != h || len(b) != headerSize {
			t.Errorf("%+v: got %+v, %v in %d bytes", h, got, err, len(b))
		}
	}
	reports := []report{{rank: 1, number: 2, text: "in a sum"}, {rank: 3, number: 4, edges: []edge{{5, 6}, {7, 8}}}}
	got, err := parseBeat(beatBody(nil, reports))
	if err != nil || !reflect.DeepEqual(got, reports) {
		t.Errorf("got %+v, %v", got, err)
	}
	name, ranks, err := parseGroup(groupBody(nil, "tp", []int{4, 0}))
	if err != nil || name != "tp" || !reflect.DeepEqual(ranks, []int{4, 0}) {
		t.Errorf("got %q, %v, %v", name, ranks, err)
	}
	for _, b := range [][]byte{
		frame(header{}, nil), frame(header{kind: frameEnd}, nil), frame(header{kind: frameTaken}, make([]byte, maxBody+1)),
		frame(header{kind: frameData, op: opAllReduce, rows: maxElements, cols: 2}, nil),
		frame(header{kind: frameData, op: opAllReduce, rows: 1 << 31, cols: 1 << 31}, nil),
		frame(header{kind: frameData, op: opSend}, nil), frame(header{kind: frameData, op: opEnd}, nil),
		frame(header{kind: frameBeat, cols: 1}, nil),
	} {
		if h, err := parseHeader(b); !errors.Is(err, errFrame) {
			t.Errorf("%+v: got error %v", h, err)
		}
	}
}
