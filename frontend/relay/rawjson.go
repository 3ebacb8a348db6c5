package relay

import (
	"bytes"
	"encoding/json/jsontext"
	"errors"
	"fmt"
)

// object is a JSON object, one level deep: where its fields are. Values are slices of the text, not checked inside
// beyond balanced brackets and quotes; what is wrong in them the engine will say.
type object struct {
	raw    []byte
	fields []field
}

type field struct {
	name       []byte // unquoted
	start, end int    // of the name and the value with what is between, in raw
	value      []byte
}

// Bounds of an object that is scanned.
const (
	maxFields = 1024
	maxNested = 512
)

// syntaxError says where a text stops being the JSON object that it should be.
type syntaxError struct {
	offset int
	reason string
}

func (e *syntaxError) Error() string { return fmt.Sprintf("near byte %d: %s", e.offset, e.reason) }

// scanObject finds the fields of an object. raw is kept.
func scanObject(raw []byte) (object, error) {
	s := scanner{b: raw}
	o := object{raw: raw}
	s.space()
	if !s.take('{') {
		return o, s.fail("an object begins with {")
	}
	s.space()
	if s.take('}') {
		return o, s.rest()
	}
	for {
		s.space()
		f := field{start: s.at}
		name, err := s.name()
		if err != nil {
			return o, err
		}
		f.name = name
		s.space()
		if !s.take(':') {
			return o, s.fail("a colon is missing after a name")
		}
		s.space()
		from := s.at
		if err := s.value(); err != nil {
			return o, err
		}
		f.end, f.value = s.at, raw[from:s.at]
		if len(o.fields) >= maxFields {
			return o, s.fail(fmt.Sprintf("more than %d fields", maxFields))
		}
		o.fields = append(o.fields, f)
		s.space()
		switch {
		case s.take(','):
		case s.take('}'):
			return o, s.rest()
		default:
			return o, s.fail("a comma or } is missing after a value")
		}
	}
}

// get is the value of a field, nil when there is none. Of several of one name the last counts, as it does for engines.
func (o *object) get(name string) []byte {
	for i := len(o.fields) - 1; i >= 0; i-- {
		if string(o.fields[i].name) == name {
			return o.fields[i].value
		}
	}
	return nil
}

// getSet is get for fields that null leaves unset.
func (o *object) getSet(name string) []byte {
	if v := o.get(name); !isNull(v) {
		return v
	}
	return nil
}

func isNull(v []byte) bool { return len(v) == 0 || string(v) == "null" }

// scanArray is the elements of an array, of which there may be at most limit.
func scanArray(raw []byte, limit int) ([][]byte, error) {
	s := scanner{b: raw}
	s.space()
	if !s.take('[') {
		return nil, s.fail("an array begins with [")
	}
	s.space()
	if s.take(']') {
		return nil, s.rest()
	}
	var list [][]byte
	for {
		s.space()
		from := s.at
		if err := s.value(); err != nil {
			return nil, err
		}
		if len(list) >= limit {
			return nil, s.fail(fmt.Sprintf("more than %d elements", limit))
		}
		list = append(list, raw[from:s.at])
		s.space()
		switch {
		case s.take(','):
		case s.take(']'):
			return list, s.rest()
		default:
			return nil, s.fail("a comma or ] is missing after an element")
		}
	}
}

// unquote is a string's value.
func unquote(raw []byte) (string, error) {
	if len(raw) < 2 || raw[0] != '"' {
		return "", errNotString
	}
	b, err := jsontext.AppendUnquote(nil, raw)
	return string(b), err
}

var errNotString = errors.New("not a string")

// scanner walks over a JSON text.
type scanner struct {
	b  []byte
	at int
}

func (s *scanner) fail(reason string) error { return &syntaxError{s.at, reason} }

func (s *scanner) space() {
	for s.at < len(s.b) {
		switch s.b[s.at] {
		case ' ', '\n', '\t', '\r':
			s.at++
		default:
			return
		}
	}
}

func (s *scanner) take(c byte) bool {
	if s.at < len(s.b) && s.b[s.at] == c {
		s.at++
		return true
	}
	return false
}

// rest checks that nothing follows.
func (s *scanner) rest() error {
	if s.space(); s.at < len(s.b) {
		return s.fail("something follows the end")
	}
	return nil
}

func (s *scanner) name() ([]byte, error) {
	from := s.at
	if s.at >= len(s.b) || s.b[s.at] != '"' {
		return nil, s.fail("a name in quotes is missing")
	}
	if err := s.str(); err != nil {
		return nil, err
	}
	quoted := s.b[from:s.at]
	if bytes.IndexByte(quoted, '\\') < 0 {
		return quoted[1 : len(quoted)-1], nil
	}
	name, err := jsontext.AppendUnquote(nil, quoted)
	if err != nil {
		return nil, &syntaxError{from, "a name is not a valid string"}
	}
	return name, nil
}

// str passes a string, which begins here.
func (s *scanner) str() error {
	from := s.at + 1
	for i := from; ; {
		n := bytes.IndexByte(s.b[i:], '"')
		if n < 0 {
			return s.fail("a string does not end")
		}
		i += n
		slashes := i
		for slashes > from && s.b[slashes-1] == '\\' {
			slashes--
		}
		if (i-slashes)%2 == 0 {
			s.at = i + 1
			return nil
		}
		i++
	}
}

// value passes any value.
func (s *scanner) value() error {
	if s.at >= len(s.b) {
		return s.fail("a value is missing")
	}
	switch s.b[s.at] {
	case '"':
		return s.str()
	case '[':
		if s.numbers() {
			return nil
		}
		return s.nested()
	case '{':
		return s.nested()
	}
	from := s.at
	for s.at < len(s.b) && scalar[s.b[s.at]] {
		s.at++
	}
	switch c := s.b[from:s.at]; {
	case len(c) == 0:
		return s.fail("a value is missing")
	case c[0] == '-' || c[0] >= '0' && c[0] <= '9', string(c) == "true", string(c) == "false", string(c) == "null":
		return nil
	}
	s.at = from
	return s.fail("this is no value")
}

// scalar are the bytes of numbers, true, false and null.
var scalar = func() (set [256]bool) {
	for _, c := range "+-.0123456789eEtrufalsn" {
		set[c] = true
	}
	return set
}()

// numbers passes an array without strings and nested values if this is one. Such arrays are long: prompts of ids, and those that
// messages of rollouts carry.
func (s *scanner) numbers() bool {
	inside := s.b[s.at+1:]
	// It is looked for no further than the next array, which may be asked about too.
	if n := bytes.IndexByte(inside, '['); n >= 0 {
		inside = inside[:n]
	}
	n := bytes.IndexByte(inside, ']')
	if n < 0 {
		return false
	}
	inside = inside[:n]
	for _, c := range [...]byte{'"', '{', '}'} {
		if bytes.IndexByte(inside, c) >= 0 {
			return false
		}
	}
	s.at += n + 2
	return true
}

// nested passes an object or array.
func (s *scanner) nested() error {
	var open [maxNested]byte // the brackets that must come
	depth := 0
	for s.at < len(s.b) {
		switch c := s.b[s.at]; c {
		case '"':
			if err := s.str(); err != nil {
				return err
			}
			continue
		case '{', '[':
			if depth == maxNested {
				return s.fail(fmt.Sprintf("values are nested more than %d deep", maxNested))
			}
			if c == '[' && s.numbers() {
				continue
			}
			open[depth] = c + 2 // in ASCII, { and [ are two before } and ]
			depth++
		case '}', ']':
			if depth--; open[depth] != c {
				return s.fail("brackets do not match")
			}
			if depth == 0 {
				s.at++
				return nil
			}
		}
		s.at++
	}
	return s.fail("a value does not end")
}
