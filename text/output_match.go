package text

import (
	"bytes"
	"strings"
	"unicode/utf8"
)

// shape is one way to write a call, or a list of them: parts that follow each other.
type shape struct {
	parts []part
	first bool // only where an answer begins, or where another call has just ended
	// calls makes calls of what the parts of the kinds that capture have matched, in order. No call is
	// that this is not one.
	calls func(captured []string, types parameterTypes) []ToolCall
}

// part is the next thing that a call's text must have.
type part struct {
	kind partKind
	text string
}

type partKind int

const (
	partLiteral  partKind = iota // text
	partOptional                 // text or nothing
	partSpace                    // white space or nothing; not the last part
	partName                     // a name without quotes; captured
	partObject                   // a JSON object; captured
	partArray                    // a JSON array; captured
	partUntil                    // anything up to text, which is left out of what is captured
)

func lit(s string) part   { return part{partLiteral, s} }
func opt(s string) part   { return part{partOptional, s} }
func until(s string) part { return part{partUntil, s} }

var (
	gap    = part{kind: partSpace}
	name   = part{kind: partName}
	object = part{kind: partObject}
	array  = part{kind: partArray}
)

// maxNameBytes bounds the name of a function.
const maxNameBytes = 256

// callMatch is a shape being matched against text that grows. Each byte is looked at once.
type callMatch struct {
	shape    *shape
	part     int
	from     int // where the part began
	at       int // what is matched so far
	json     jsonScanner
	captured [][2]int
}

type verdict int

const (
	wantMore verdict = iota
	matched
	failed // at the byte m.at
)

// advance goes on in b, which begins where the shape does.
func (m *callMatch) advance(b []byte) verdict {
	for m.part < len(m.shape.parts) {
		if v := m.advancePart(&m.shape.parts[m.part], b); v != matched {
			return v
		}
		m.part++
		m.from = m.at
	}
	return matched
}

func (m *callMatch) advancePart(p *part, b []byte) verdict {
	switch p.kind {
	case partLiteral, partOptional:
		return m.literal(p, b)
	case partSpace:
		for m.at < len(b) && isWhiteSpace(b[m.at]) {
			m.at++
		}
	case partName:
		for m.at < len(b) && isNameByte(b[m.at]) {
			m.at++
		}
		if n := m.at - m.from; n > maxNameBytes || n == 0 && m.at < len(b) {
			return failed
		}
	case partUntil:
		i := bytes.Index(b[m.at:], []byte(p.text))
		if i < 0 {
			m.at = max(m.at, len(b)-len(p.text)+1)
			return wantMore
		}
		m.captured = append(m.captured, [2]int{m.from, m.at + i})
		m.at += i + len(p.text)
		return matched
	default:
		return m.value(p, b)
	}
	if m.at == len(b) {
		return wantMore
	}
	if p.kind == partName {
		m.captured = append(m.captured, [2]int{m.from, m.at})
	}
	return matched
}

func (m *callMatch) literal(p *part, b []byte) verdict {
	for ; m.at < len(b); m.at++ {
		done := m.at - m.from
		switch {
		case done == len(p.text):
			return matched
		case b[m.at] == p.text[done]:
		case p.kind == partOptional:
			m.at = m.from
			return matched
		default:
			return failed
		}
	}
	if m.at-m.from == len(p.text) {
		return matched
	}
	return wantMore
}

func (m *callMatch) value(p *part, b []byte) verdict {
	if m.at == m.from && m.at < len(b) {
		m.json = jsonScanner{}
		if c := b[m.at]; p.kind == partObject && c != '{' || p.kind == partArray && c != '[' {
			return failed
		}
	}
	for ; m.at < len(b); m.at++ {
		if !m.json.step(b[m.at]) {
			return failed
		}
		if m.json.done() {
			m.at++
			m.captured = append(m.captured, [2]int{m.from, m.at})
			return matched
		}
	}
	return wantMore
}

// enough tells whether nothing is missing but what closes a call, where an answer may end as well.
func (m *callMatch) enough() bool {
	for _, p := range m.shape.parts[m.part:] {
		if p.kind >= partName {
			return false
		}
	}
	return true
}

// isNameByte tells whether c can be in a name without quotes: it is no white space and no delimiter of any format.
func isNameByte(c byte) bool {
	return c > ' ' && c < utf8.RuneSelf && strings.IndexByte("<>[]{}()\"'`,;\x7f", c) < 0
}

// toolCalls goes on with a call, or looks for the next one.
func (p *OutputParser) toolCalls() bool {
	if len(p.matches) == 0 && !p.begin() {
		return false
	}
	stop := 0 // where the last of the possible shapes failed
	alive := p.matches[:0]
	for _, m := range p.matches {
		switch m.advance(p.held) {
		case matched:
			return p.finish(&m)
		case wantMore:
			alive = append(alive, m)
		case failed:
			stop = max(stop, m.at)
		}
	}
	if p.matches = alive; len(alive) > 0 {
		return false
	}
	// The byte that did not fit may begin a call itself. A call begins with an ASCII character.
	stop = max(stop, 1)
	for stop < len(p.held) && !utf8.RuneStart(p.held[stop]) {
		stop--
	}
	p.emitContent(p.held[:stop])
	p.drop(stop)
	return true
}

// begin gives the text before the next place where a call may begin as content, and begins to match
// there. It is false when there is no such place.
func (p *OutputParser) begin() bool {
	f := p.format.tools
	if p.afterCall {
		switch skip, open := p.closer(); {
		case open:
			return false
		case skip > 0:
			p.space = p.space[:0]
			p.drop(skip)
			return p.begin()
		}
	}
	for i, c := range p.held {
		if strings.IndexByte(f.begins, c) < 0 {
			continue
		}
		first := (!p.content || p.afterCall) && len(bytes.TrimLeft(p.held[:i], whiteSpace)) == 0
		for s := range f.shapes {
			if first || !f.shapes[s].first {
				p.matches = append(p.matches, callMatch{shape: &f.shapes[s]})
			}
		}
		if len(p.matches) > 0 {
			p.emitContent(p.held[:i])
			p.drop(i)
			return true
		}
	}
	p.emitContent(p.held)
	p.held = p.held[:0]
	return false
}

// closer measures what may follow a call and is no content, with the white space before it. open says
// that more text is needed to tell.
func (p *OutputParser) closer() (n int, open bool) {
	rest := bytes.TrimLeft(p.held, whiteSpace)
	for _, c := range p.format.tools.closers {
		if bytes.HasPrefix(rest, []byte(c)) {
			return len(p.held) - len(rest) + len(c), false
		}
		open = open || len(rest) < len(c) && len(rest) > 0 && c[:len(rest)] == string(rest)
	}
	return 0, open
}

// finish takes the calls of a complete match, unless they are malformed.
func (p *OutputParser) finish(m *callMatch) bool {
	text := p.held[:m.at]
	captured := make([]string, len(m.captured))
	for i, c := range m.captured {
		captured[i] = string(text[c[0]:c[1]])
	}
	calls := m.shape.calls(captured, p.types)
	if len(calls) == 0 {
		p.emitContent(text)
	}
	for _, call := range calls {
		p.endDelta()
		call.Index = p.calls
		if call.ID == "" {
			call.ID = p.newID()
		}
		p.out = append(p.out, Delta{Kind: DeltaToolCall, Call: call})
		p.calls++
		p.space, p.afterCall = p.space[:0], true
	}
	p.drop(m.at)
	p.matches = p.matches[:0]
	return true
}

// endCalls ends the answer: a call that lacks only its end is one.
func (p *OutputParser) endCalls() {
	for _, m := range p.matches {
		if m.enough() {
			m.at = len(p.held)
			p.finish(&m)
			break
		}
	}
	p.matches = p.matches[:0]
	if len(p.held) > 0 {
		p.emitContent(p.held)
		p.held = p.held[:0]
	}
}
