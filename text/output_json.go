package text

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"strings"
)

// jsonScanner finds the end of a JSON object or array that comes byte by byte, and most of what is not JSON
// as soon as it comes: what it accepts still has to be parsed.
type jsonScanner struct {
	open  []byte // brackets that are not closed
	state jsonState
	key   bool // the string is the name of a member
	hex   int  // digits of \u that are missing
}

type jsonState int

const (
	jsonValue      jsonState = iota // a value must come
	jsonFirstValue                  // or the end of the array
	jsonKey                         // a name must come
	jsonFirstKey                    // or the end of the object
	jsonColon
	jsonNext // a comma or the end
	jsonWord // in a number, true, false or null
	jsonString
	jsonEscape
)

// done tells whether the value is complete.
func (s *jsonScanner) done() bool { return s.state == jsonNext && len(s.open) == 0 }

// step takes one byte; false is that it does not fit.
func (s *jsonScanner) step(c byte) bool {
	switch s.state {
	case jsonString:
		return s.inString(c)
	case jsonEscape:
		return s.inEscape(c)
	case jsonWord:
		if c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c == '+' || c == '-' || c == '.' || c == 'E' {
			return true
		}
		s.state = jsonNext
	}
	if isWhiteSpace(c) {
		return true
	}
	switch s.state {
	case jsonFirstValue:
		if c == ']' {
			return s.closing(c)
		}
		return s.value(c)
	case jsonFirstKey:
		if c == '}' {
			return s.closing(c)
		}
		return s.beginKey(c)
	case jsonValue:
		return s.value(c)
	case jsonKey:
		return s.beginKey(c)
	case jsonColon:
		s.state = jsonValue
		return c == ':'
	}
	if c != ',' {
		return s.closing(c)
	}
	s.state = jsonValue
	if s.open[len(s.open)-1] == '{' {
		s.state = jsonKey
	}
	return true
}

func (s *jsonScanner) inString(c byte) bool {
	switch {
	case c == '\\':
		s.state = jsonEscape
	case c == '"' && s.key:
		s.state = jsonColon
	case c == '"':
		s.state = jsonNext
	}
	return c >= ' '
}

func (s *jsonScanner) inEscape(c byte) bool {
	if s.hex > 0 {
		s.hex--
		if s.hex == 0 {
			s.state = jsonString
		}
		return c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'f'
	}
	if c == 'u' {
		s.hex = 4
		return true
	}
	s.state = jsonString
	return strings.IndexByte(`"\/bfnrt`, c) >= 0
}

func (s *jsonScanner) beginKey(c byte) bool {
	s.state, s.key = jsonString, true
	return c == '"'
}

func (s *jsonScanner) value(c byte) bool {
	switch {
	case c == '{' || c == '[':
		s.open = append(s.open, c)
		s.state = jsonFirstKey
		if c == '[' {
			s.state = jsonFirstValue
		}
		return len(s.open) <= maxValueDepth
	case c == '"':
		s.state, s.key = jsonString, false
		return true
	default:
		s.state = jsonWord
		return c >= '0' && c <= '9' || c == '-' || c == 't' || c == 'f' || c == 'n'
	}
}

func (s *jsonScanner) closing(c byte) bool {
	last := len(s.open) - 1
	if s.open[last] == '{' && c != '}' || s.open[last] == '[' && c != ']' {
		return false
	}
	s.open = s.open[:last]
	s.state = jsonNext
	return true
}

// looseJSON is how a model's JSON is read: of equal names, which the readers of the arguments may take, the last counts.
var looseJSON = jsontext.AllowDuplicateNames(true)

// jsonCall reads {"name": ..., "arguments": {...}}, or "parameters" instead; there may be an "id", and the whole
// may be the value of "function" as in the API. ok is false if it is not a call; one without arguments is a call
// if bare is true.
func jsonCall(raw jsontext.Value, bare bool) (call ToolCall, ok bool) {
	var c struct {
		ID         jsontext.Value `json:"id"`
		Name       jsontext.Value `json:"name"`
		Function   jsontext.Value `json:"function"`
		Arguments  jsontext.Value `json:"arguments"`
		Parameters jsontext.Value `json:"parameters"`
	}
	if json.Unmarshal(raw, &c, looseJSON) != nil {
		return call, false
	}
	if c.Name == nil && c.Function.Kind() == '{' {
		call, ok = jsonCall(c.Function, bare)
	} else {
		call.Name, ok = jsonText(c.Name)
		arguments := c.Arguments
		if arguments == nil {
			arguments = c.Parameters
		}
		if ok {
			call.Arguments, ok = jsonArguments(arguments)
			ok = ok && (bare || arguments != nil)
		}
	}
	if id, given := jsonText(c.ID); given && len(id) <= maxNameBytes {
		call.ID = id
	}
	return call, ok && call.Name != "" && len(call.Name) <= maxNameBytes
}

func jsonText(v jsontext.Value) (string, bool) {
	if v.Kind() != '"' {
		return "", false
	}
	b, err := jsontext.AppendUnquote(nil, v)
	return string(b), err == nil
}

// jsonArguments is an object as it is written, or one written in a string; none at all is the empty one.
func jsonArguments(v jsontext.Value) (string, bool) {
	switch v.Kind() {
	case '{':
		return string(v), v.IsValid(looseJSON)
	case '"':
		s, ok := jsonText(v)
		inner := jsontext.Value(s)
		return s, ok && inner.IsValid(looseJSON) && inner.Kind() == '{'
	case 'n', 0:
		return "{}", true
	}
	return "", false
}

// jsonCalls reads an array of calls; one that is none spoils them all.
func jsonCalls(raw jsontext.Value) []ToolCall {
	var list []jsontext.Value
	if json.Unmarshal(raw, &list, looseJSON) != nil {
		return nil
	}
	calls := make([]ToolCall, 0, len(list))
	for _, v := range list {
		call, ok := jsonCall(v, true)
		if !ok {
			return nil
		}
		calls = append(calls, call)
	}
	return calls
}
