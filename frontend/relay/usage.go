package relay

import (
	"bytes"
	"strconv"
)

// Usages count tokens. Of a request in two legs the prompt's are what the prefill leg says, with what of them was
// cached there; the answer's are what the decode leg says.

// mergeUsage is an answer with the prompt's part of another usage. What is not as expected stays as it is.
func mergeUsage(answer, prompt []byte) pieces {
	same := pieces{answer}
	o, err := scanObject(answer)
	if err != nil {
		return same
	}
	old := o.getSet("usage")
	if old == nil {
		return same
	}
	merged := mergedUsage(old, prompt)
	if merged == nil {
		return same
	}
	var e edit
	e.put("usage", merged)
	return e.apply(&o)
}

// mergedUsage is nil when either is not a usage.
func mergedUsage(usage, prompt []byte) []byte {
	u, err := scanObject(usage)
	if err != nil {
		return nil
	}
	p, err := scanObject(prompt)
	if err != nil {
		return nil
	}
	tokens, err := strconv.ParseInt(string(p.get("prompt_tokens")), 10, 64)
	if err != nil {
		return nil
	}
	completion, err := strconv.ParseInt(string(u.get("completion_tokens")), 10, 64)
	if err != nil {
		return nil
	}
	var e edit
	e.put("prompt_tokens", p.get("prompt_tokens"))
	e.put("total_tokens", strconv.AppendInt(nil, tokens+completion, 10))
	if details := p.getSet("prompt_tokens_details"); details != nil {
		e.put("prompt_tokens_details", details)
	} else if u.getSet("prompt_tokens_details") != nil {
		e.put("prompt_tokens_details", []byte("null")) // the decode worker's would count what it fetched
	}
	return e.apply(&u).join()
}

// cachedTokens is the number that a usage gives, 0 if it gives none.
func cachedTokens(usage []byte) int64 {
	u, err := scanObject(usage)
	if err != nil {
		return 0
	}
	details, err := scanObject(u.get("prompt_tokens_details"))
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(string(details.get("cached_tokens")), 10, 64)
	return max(0, n)
}

// usageKey cannot be part of a JSON string: its quotes would have backslashes.
var usageKey = []byte(`"usage":`)

// hasUsage reports whether a text of events may have one with a usage object.
func hasUsage(b []byte) bool {
	for {
		n := bytes.Index(b, usageKey)
		if n < 0 {
			return false
		}
		b = bytes.TrimLeft(b[n+len(usageKey):], " \t")
		if len(b) > 0 && b[0] == '{' {
			return true
		}
	}
}

// maxEvent bounds an event that is held back until it is complete.
const maxEvent = 1 << 20

// usageMerger merges a usage into those of a stream. It holds incomplete events back.
type usageMerger struct {
	prompt []byte
	held   []byte
	out    []byte
}

var (
	eventEnd  = []byte("\n\n")
	dataField = []byte("data:")
)

// next takes the next bytes and returns what can be sent, valid until the next call.
func (m *usageMerger) next(b []byte) []byte {
	end := bytes.LastIndex(b, eventEnd)
	joint := end < 0 && len(m.held) > 0 && m.held[len(m.held)-1] == '\n' && len(b) > 0 && b[0] == '\n'
	switch {
	case joint:
		end = 1
	case end < 0:
		m.held = append(m.held, b...)
		if len(m.held) > maxEvent {
			return m.rest()
		}
		return nil
	default:
		end += len(eventEnd)
	}
	m.out = append(append(m.out[:0], m.held...), b[:end]...)
	m.held = append(m.held[:0], b[end:]...)
	if !hasUsage(m.out) {
		return m.out
	}
	var merged []byte
	for event := range bytes.SplitAfterSeq(m.out, eventEnd) {
		merged = m.event(merged, event)
	}
	m.out = merged
	return m.out
}

// rest is what was held back.
func (m *usageMerger) rest() []byte {
	b := m.held
	m.held = nil
	return b
}

// event appends one event with its usage merged.
func (m *usageMerger) event(b, event []byte) []byte {
	if !bytes.HasPrefix(event, dataField) || !hasUsage(event) {
		return append(b, event...)
	}
	data := bytes.TrimRight(event[len(dataField):], "\n")
	b = append(append(b, dataField...), ' ')
	for _, piece := range mergeUsage(bytes.TrimLeft(data, " "), m.prompt) {
		b = append(b, piece...)
	}
	return append(b, event[len(dataField)+len(data):]...)
}

// lastUsage is the last usage in a text of events, nil if there is none.
func lastUsage(events []byte) []byte {
	for {
		n := bytes.LastIndex(events, usageKey)
		if n < 0 {
			return nil
		}
		s := scanner{b: events, at: n + len(usageKey)}
		s.space()
		from := s.at
		if err := s.value(); err == nil && from < len(events) && events[from] == '{' {
			return events[from:s.at]
		}
		events = events[:n]
	}
}
