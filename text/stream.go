package text

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// Detokenizer decodes one stream of ids as they come. It gives only whole characters; all that it
// gives, together, is what Decode gives for all ids. It is not safe for concurrent use.
type Detokenizer struct {
	t           *Tokenizer
	skipSpecial bool
	shown       []int32 // special tokens that are not skipped
	strip       int     // spaces still to be dropped at the start
	held        []byte  // the beginning of a character, at most 3 bytes
}

// NewDetokenizer begins a stream that continues an earlier text (a prompt): nothing is dropped at its start. Special
// tokens whose text is in except are shown even with skipSpecial.
func (t *Tokenizer) NewDetokenizer(skipSpecial bool, except ...string) *Detokenizer {
	d := &Detokenizer{t: t, skipSpecial: skipSpecial}
	for _, text := range except {
		if id, ok := t.TokenID(text); ok && skipSpecial {
			d.shown = append(d.shown, id)
		}
	}
	return d
}

// Push gives the text that ids complete, perhaps none.
func (d *Detokenizer) Push(ids ...int32) string {
	buf := d.held
	for _, id := range ids {
		if id < 0 || int(id) >= len(d.t.tokens) {
			continue
		}
		tok := &d.t.tokens[id]
		if tok.special && d.skipSpecial && !slices.Contains(d.shown, id) {
			continue
		}
		bytes := tok.bytes
		for d.strip > 0 && bytes != "" {
			if bytes[0] != ' ' {
				d.strip = 0
				break
			}
			bytes = bytes[1:]
			d.strip--
		}
		buf = append(buf, bytes...)
	}
	text, rest := decodeUTF8(buf)
	d.held = append(d.held[:0], rest...)
	return text
}

// Flush ends the stream: U+FFFD if it ends within a character, else nothing.
func (d *Detokenizer) Flush() string {
	if len(d.held) == 0 {
		return ""
	}
	d.held = d.held[:0]
	return "\uFFFD"
}

// decodeUTF8 gives the characters of b, with U+FFFD for each maximal part of an ill-formed one (as the
// Unicode Standard recommends), and the bytes at the end that may yet become a character.
func decodeUTF8(b []byte) (text string, rest []byte) {
	var out strings.Builder
	for len(b) > 0 {
		n := validPrefix(b)
		out.Write(b[:n])
		if b = b[n:]; len(b) == 0 {
			break
		}
		n, open := illFormed(b)
		if open {
			return out.String(), b
		}
		out.WriteString("\uFFFD")
		b = b[n:]
	}
	return out.String(), nil
}

func validPrefix(b []byte) int {
	n := 0
	for n < len(b) {
		r, size := utf8.DecodeRune(b[n:])
		if r == utf8.RuneError && size <= 1 {
			break
		}
		n += size
	}
	return n
}

// illFormed measures the maximal part of a character at the start of b, which does not begin with a
// whole one; open says that b ends before anything was wrong with it.
func illFormed(b []byte) (n int, open bool) {
	var need int
	low, high := byte(0x80), byte(0xbf) // bounds of the second byte
	switch c := b[0]; {
	case c >= 0xc2 && c <= 0xdf:
		need = 2
	case c >= 0xe0 && c <= 0xef:
		need = 3
		if c == 0xe0 {
			low = 0xa0
		} else if c == 0xed {
			high = 0x9f
		}
	case c >= 0xf0 && c <= 0xf4:
		need = 4
		if c == 0xf0 {
			low = 0x90
		} else if c == 0xf4 {
			high = 0x8f
		}
	default:
		return 1, false
	}
	for n = 1; n < need; n++ {
		if n == len(b) {
			return n, true
		}
		if b[n] < low || b[n] > high {
			return n, false
		}
		low, high = 0x80, 0xbf
	}
	return n, false
}

// StopMatcher finds the first stop string in a stream of text. Text that may be the beginning of one is
// held back. What it finds does not depend on how the text is cut. It is not safe for concurrent use.
type StopMatcher struct {
	stops   []stopString
	held    string
	stopped bool
}

// stopString is matched by Knuth, Morris and Pratt's algorithm.
type stopString struct {
	text    string
	failure []int32 // [i]: length of the longest proper border of text[:i+1]
	matched int
}

// NewStopMatcher makes a matcher; empty stop strings are never found.
func NewStopMatcher(stops []string) *StopMatcher {
	m := &StopMatcher{stops: make([]stopString, len(stops))}
	for i, s := range stops {
		failure := make([]int32, len(s))
		k := 0
		for j := 1; j < len(s); j++ {
			for k > 0 && s[j] != s[k] {
				k = int(failure[k-1])
			}
			if s[j] == s[k] {
				k++
			}
			failure[j] = int32(k)
		}
		m.stops[i] = stopString{text: s, failure: failure}
	}
	return m
}

// advance takes one more byte and tells whether the stop string is complete.
func (s *stopString) advance(b byte) bool {
	for s.matched > 0 && (s.matched == len(s.text) || s.text[s.matched] != b) {
		s.matched = int(s.failure[s.matched-1])
	}
	if s.matched < len(s.text) && s.text[s.matched] == b {
		s.matched++
	}
	return s.matched > 0 && s.matched == len(s.text)
}

// Push takes more text and gives what may be shown. Once a stop string is complete, stopped is true, which
// is its index (the longest, if several end there), emit is the text before it, and everything later is dropped.
func (m *StopMatcher) Push(text string) (emit string, stopped bool, which int) {
	if m.stopped {
		return "", true, -1
	}
	whole := m.held + text
	for i := len(m.held); i < len(whole); i++ {
		which = -1
		for s := range m.stops {
			if m.stops[s].advance(whole[i]) && (which < 0 || len(m.stops[s].text) > len(m.stops[which].text)) {
				which = s
			}
		}
		if which >= 0 {
			m.stopped, m.held = true, ""
			return whole[:i+1-len(m.stops[which].text)], true, which
		}
	}
	keep := 0
	for s := range m.stops {
		keep = max(keep, m.stops[s].matched)
	}
	m.held = strings.Clone(whole[len(whole)-keep:])
	return whole[:len(whole)-keep], false, -1
}

// Flush gives what is held back, when the stream ends without a stop string.
func (m *StopMatcher) Flush() string {
	held := m.held
	m.held = ""
	return held
}
