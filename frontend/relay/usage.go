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

// promptTokens is the number that a usage gives, 0 if it gives none.
func promptTokens(usage []byte) int64 {
	u, err := scanObject(usage)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(string(u.get("prompt_tokens")), 10, 64)
	return max(0, n)
}

// usageKey cannot be part of a JSON string: its quotes would have backslashes.
var usageKey = []byte(`"usage"`)

// usageAt is where the object in a usage begins if the key is at the beginning of b, -1 if this is something else.
func usageAt(b []byte) int {
	s := scanner{b: b, at: len(usageKey)}
	s.space()
	if !s.take(':') {
		return -1
	}
	if s.space(); s.at == len(b) || b[s.at] != '{' {
		return -1
	}
	return s.at
}

// hasUsage reports whether a text of events may have one with a usage object.
func hasUsage(b []byte) bool {
	for {
		n := bytes.Index(b, usageKey)
		if n < 0 {
			return false
		}
		if usageAt(b[n:]) > 0 {
			return true
		}
		b = b[n+len(usageKey):]
	}
}

// lastUsage is the last usage in a text of events, nil if there is none.
func lastUsage(events []byte) []byte {
	for {
		n := bytes.LastIndex(events, usageKey)
		if n < 0 {
			return nil
		}
		if from := usageAt(events[n:]); from > 0 {
			s := scanner{b: events, at: n + from}
			if err := s.value(); err == nil {
				return events[n+from : s.at]
			}
		}
		events = events[:n]
	}
}

// mergeEvents is a text of whole events with the prompt's part of another usage in those that have one.
func mergeEvents(events, prompt []byte) []byte {
	if prompt == nil || !hasUsage(events) {
		return events
	}
	var merged, event []byte
	for len(events) > 0 {
		event, events = cutEvent(events)
		merged = appendMerged(merged, event, prompt)
	}
	return merged
}

// appendMerged appends an event. Fields other than its data stay as they are.
func appendMerged(b, event, prompt []byte) []byte {
	var data pieces
	if hasUsage(event) {
		data = mergeUsage(eventData(event), prompt)
	}
	if len(data) < 2 { // there is nothing to change
		return append(b, event...)
	}
	for done := false; len(event) > 0; {
		var line, end []byte
		line, end, event = cutLine(event)
		switch _, is := lineData(line); {
		case !is:
			b = append(append(b, line...), end...)
		case !done:
			done = true
			b = append(append(b, dataField...), ' ')
			for _, piece := range data {
				b = append(b, piece...)
			}
			b = append(b, end...)
		}
	}
	return b
}
