package relay

import (
	"bytes"
	"testing"
)

// Where the last event ends is where cutting one event after the other comes to, and the events that are let go with what is
// held back are all of the stream, however it comes; so is what is known of its end.
func FuzzEvents(f *testing.F) {
	for _, stream := range []string{
		"data: 1\n\ndata: [DONE]\n\n", "data: 1\r\n\r\ndata: 2\r\n\r\n", "id: 1\rdata: 1\r\rdata", ": x\n\r\n\r\r\n", "\n\n\n", "\r\n\r", "data: {\ndata: }\n\n",
	} {
		f.Add([]byte(stream), uint8(3))
	}
	f.Fuzz(func(t *testing.T, stream []byte, cut uint8) {
		whole := 0
		for rest := stream; len(rest) > 0; {
			var event []byte
			before := len(rest)
			event, rest = cutEvent(rest)
			line, _, _ := cutLine(event)
			if empty := len(line) == 0 && before < len(stream); empty || eventsEnd(event, 0) == len(event) { // more empty lines than one
				whole = len(stream) - len(rest)
			}
		}
		if got := eventsEnd(stream, 0); got != whole {
			t.Fatalf("%q: the last event ends at %d, not %d", stream, got, whole)
		}
		var buffer eventBuffer
		var out []byte
		var end ending
		for rest := stream; len(rest) > 0; {
			n := min(len(rest), int(cut)+1)
			next := buffer.next(rest[:n])
			if len(next) > 0 && eventsEnd(append([]byte{'\n'}, next...), len(next)) != len(next)+1 {
				t.Fatalf("%q is let go before it is whole", next)
			}
			out = append(out, next...)
			end.add(rest[:n])
			rest = rest[n:]
		}
		if all := append(out, buffer.rest()...); !bytes.Equal(all, stream) {
			t.Fatalf("%q became %q", stream, all)
		}
		if len(stream) <= endingKept {
			var once ending
			once.add(stream)
			if (end.check() == nil) != (once.check() == nil) || end.between() != once.between() {
				t.Fatalf("%q in pieces of %d ends otherwise", stream, int(cut)+1)
			}
		}
	})
}
