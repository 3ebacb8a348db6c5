package relay

import (
	"bytes"
)

// Streams are made of events, as the standard of Server-Sent Events has them: lines that end with CR, LF or both, and an
// empty line behind each event.

// maxEvent bounds an event that is held back until it is complete.
const maxEvent = 1 << 20

func isLineEnd(c byte) bool { return c == '\n' || c == '\r' }

// eventsEnd is where the last whole event of b ends; 0 when none ends behind the first from bytes.
func eventsEnd(b []byte, from int) int {
	for i := len(b) - 1; i >= max(from, 1); i-- {
		if !isLineEnd(b[i]) {
			continue
		}
		line := i // where this line's end begins
		if b[i] == '\n' && b[i-1] == '\r' {
			line--
		}
		if line > 0 && isLineEnd(b[line-1]) {
			return i + 1
		}
	}
	return 0
}

// cutLine is the first line of b, what ends it, and what follows.
func cutLine(b []byte) (line, end, rest []byte) {
	n := bytes.IndexAny(b, "\r\n")
	if n < 0 {
		return b, nil, nil
	}
	next := n + 1
	if b[n] == '\r' && next < len(b) && b[next] == '\n' {
		next++
	}
	return b[:n], b[n:next], b[next:]
}

// cutEvent is the first event of b with the empty line behind it, and what follows.
func cutEvent(b []byte) (event, rest []byte) {
	for rest = b; len(rest) > 0; {
		var line []byte
		if line, _, rest = cutLine(rest); len(line) == 0 {
			break
		}
	}
	return b[:len(b)-len(rest)], rest
}

var dataField = []byte("data:")

// lineData is what a line says of an event's data, without the space that may stand before it.
func lineData(line []byte) (data []byte, ok bool) {
	if !bytes.HasPrefix(line, dataField) {
		return nil, false
	}
	data = line[len(dataField):]
	if len(data) > 0 && data[0] == ' ' {
		data = data[1:]
	}
	return data, true
}

// eventData is the data of an event, nil if it has none. Lines are joined by spaces: to JSON they are the same as the
// standard's line ends, and one line can hold them.
func eventData(event []byte) (data []byte) {
	for several := false; len(event) > 0; {
		var line []byte
		line, _, event = cutLine(event)
		switch more, ok := lineData(line); {
		case !ok:
		case data == nil:
			data = more
		default:
			if !several {
				data = bytes.Clone(data) // it is a part of the event
			}
			several = true
			data = append(append(data, ' '), more...)
		}
	}
	return data
}

// eventBuffer holds events back until they are whole.
type eventBuffer struct {
	held []byte
	out  []byte
}

// next takes the next bytes of a stream and returns the events that are whole now, valid until the next call.
func (e *eventBuffer) next(b []byte) []byte {
	before := len(e.held)
	e.held = append(e.held, b...)
	n := eventsEnd(e.held, before)
	if n == 0 && len(e.held) > maxEvent {
		n = len(e.held)
	}
	e.out = append(e.out[:0], e.held[:n]...)
	e.held = append(e.held[:0], e.held[n:]...)
	return e.out
}

// rest is what is held back.
func (e *eventBuffer) rest() []byte { return e.held }
