package relay

import (
	"bytes"
	"errors"
)

// ending is the last of what has gone to the client of a stream. All our engines end theirs with [DONE], so one without has
// been cut, whatever its framing says.
type ending struct {
	buf [2 * endingKept]byte
	n   int
}

// endingKept is how much of a stream's end is always known: an event that says what has gone wrong, if it is not long.
const endingKept = 512

func (e *ending) add(b []byte) {
	switch {
	case len(b) >= endingKept:
		e.n = copy(e.buf[:], b[len(b)-endingKept:])
		return
	case e.n+len(b) > len(e.buf):
		e.n = copy(e.buf[:], e.buf[e.n-endingKept:e.n])
	}
	e.n += copy(e.buf[e.n:], b)
}

// between reports whether another event can follow.
func (e *ending) between() bool { return e.n == 0 || eventsEnd(e.buf[:e.n], e.n-1) == e.n }

// doneData is what the last event of a whole stream has.
const doneData = "[DONE]"

var (
	errCut = errors.New("the stream is not whole")
	errEnd = errors.New("it ends without [DONE]")
)

// check judges a stream that has ended: an *engineError is one that the client has got as the last event.
func (e *ending) check() error {
	data, before := lastData(e.buf[:e.n])
	done := string(data) == doneData
	if done {
		data, _ = lastData(before)
	}
	if o, err := scanObject(data); err == nil {
		if said := errorIn(&o); said != nil {
			return said
		}
	}
	if !done {
		return failed(errCut, errEnd)
	}
	return nil
}

// lastData is the data of the last event of b, and what is before that.
func lastData(b []byte) (data, before []byte) {
	b = bytes.TrimRight(b, "\r\n")
	n := eventsEnd(b, 0)
	return eventData(b[n:]), b[:n]
}
