package frontend

import (
	"bytes"
	"encoding/json/jsontext"
	"errors"
	"io"
	"math"
	"strconv"
	"strings"
)

// value is a JSON value of the request with the path that error messages call it by. Its bytes are
// valid JSON and alias the body, in which they begin at a place.
type value struct {
	path string
	raw  jsontext.Value
	at   int
}

func (v value) kind() jsontext.Kind { return v.raw.Kind() }

// describe names a value's type in messages.
func (v value) describe() string {
	switch v.kind() {
	case jsontext.KindNull:
		return "null"
	case jsontext.KindFalse, jsontext.KindTrue:
		return "a boolean"
	case jsontext.KindString:
		return "a string"
	case jsontext.KindNumber:
		return "a number"
	case jsontext.KindBeginObject:
		return "an object"
	default:
		return "an array"
	}
}

func (v value) wrongType(want string) error {
	return invalid(v.path, "%s must be %s, not %s", v.path, want, v.describe())
}

func (v value) boolean() (bool, error) {
	switch v.kind() {
	case jsontext.KindTrue:
		return true, nil
	case jsontext.KindFalse:
		return false, nil
	}
	return false, v.wrongType("a boolean")
}

// integer is a whole number in [low, high].
func (v value) integer(low, high int64) (int64, error) {
	if v.kind() != jsontext.KindNumber {
		return 0, v.wrongType("an integer")
	}
	n, err := strconv.ParseInt(string(v.raw), 10, 64)
	if err != nil {
		f, ferr := strconv.ParseFloat(string(v.raw), 64)
		if ferr != nil || f != math.Trunc(f) || math.Abs(f) >= 1<<53 {
			return 0, invalid(v.path, "%s must be an integer from %d to %d", v.path, low, high)
		}
		n = int64(f)
	}
	if n < low || n > high {
		return 0, invalid(v.path, "%s must be from %d to %d, not %d", v.path, low, high, n)
	}
	return n, nil
}

// number is a finite number; it is also finite as f32.
func (v value) number() (float64, error) {
	if v.kind() != jsontext.KindNumber {
		return 0, v.wrongType("a number")
	}
	f, err := strconv.ParseFloat(string(v.raw), 64)
	if err != nil || math.Abs(f) > math.MaxFloat32 {
		return 0, invalid(v.path, "%s is too large", v.path)
	}
	return f, nil
}

func (v value) text() (string, error) {
	if v.kind() != jsontext.KindString {
		return "", v.wrongType("a string")
	}
	b, err := jsontext.AppendUnquote(nil, v.raw)
	if err != nil {
		return "", invalid(v.path, "%s is not a valid string", v.path)
	}
	return string(b), nil
}

// textOf is text with a bound on its length in bytes.
func (v value) textOf(limit int) (string, error) {
	s, err := v.text()
	if err == nil && len(s) > limit {
		return "", invalid(v.path, "%s is longer than %d bytes", v.path, limit)
	}
	return s, err
}

// elements calls f for each element of an array; it names them path[i].
func (v value) elements(want string, f func(i int, e value) error) error {
	if v.kind() != jsontext.KindBeginArray {
		return v.wrongType(want)
	}
	c := inside(v.raw)
	for i := 0; c.more(); i++ {
		e := c.value()
		if err := f(i, value{v.path + "[" + strconv.Itoa(i) + "]", e, v.at + c.at - len(e)}); err != nil {
			return err
		}
	}
	return nil
}

// members calls f for each member of an object, in order; it names them path.name.
func (v value) members(f func(name string, m value) error) error {
	if v.kind() != jsontext.KindBeginObject {
		return v.wrongType("an object")
	}
	for c := inside(v.raw); c.more(); {
		quoted, m := c.member()
		name, err := unquoted(quoted)
		if err != nil {
			return syntaxError(err)
		}
		full := name
		if v.path != "" {
			full = v.path + "." + name
		}
		if err := f(name, value{full, m, v.at + c.at - len(m)}); err != nil {
			return err
		}
	}
	return nil
}

// tokenIDs is an array of token ids in [0, vocab), without a decoder's cost for each of them: prompts
// come with 100,000 and more. vocab 0 is any id.
func (v value) tokenIDs(vocab int) ([]int32, error) {
	if v.kind() != jsontext.KindBeginArray {
		return nil, v.wrongType("an array of token ids")
	}
	limit := int64(vocab)
	if limit == 0 {
		limit = math.MaxInt32
	}
	ids := make([]int32, 0, 1+bytes.Count(v.raw, []byte{','}))
	for rest := v.raw[1:]; ; {
		switch c := rest[0]; {
		case isSpace(c) || c == ',':
			rest = rest[1:]
			continue
		case c == ']':
			return ids, nil
		}
		end := 0
		var id int64
		for isDigit(rest[end]) && id < limit {
			id = id*10 + int64(rest[end]-'0')
			end++
		}
		if c := rest[end]; end == 0 || !isSpace(c) && c != ',' && c != ']' || id >= limit {
			return nil, invalid(v.path, "%s[%d] is not a token id: they are integers from 0 to %d", v.path, len(ids), limit-1)
		}
		ids = append(ids, int32(id))
		rest = rest[end:]
	}
}

// decodeObject reads a body that is one JSON object, no deeper than maxDepth, and calls f for each
// member that is not null.
func decodeObject(body []byte, maxDepth int, f func(name string, m value) error) error {
	short, depth := shorten(body)
	if depth > maxDepth {
		return invalid("", "the body nests %d levels deep; at most %d are allowed", depth, maxDepth)
	}
	if !jsontext.Value(short).IsValid() {
		if err := checkJSON(body); err != nil {
			return err
		}
	}
	v := value{at: skipSpace(body, 0)}
	v.raw = bytes.TrimRight(body[v.at:], " \t\r\n")
	if v.kind() != jsontext.KindBeginObject {
		return invalid("", "the body must be a JSON object")
	}
	return v.members(func(name string, m value) error {
		if m.kind() == jsontext.KindNull {
			return nil
		}
		return f(name, m)
	})
}

// checkJSON says what keeps a body from being one JSON value.
func checkJSON(body []byte) error {
	d := jsontext.NewDecoder(bytes.NewBuffer(body))
	switch _, err := d.ReadValue(); {
	case errors.Is(err, io.EOF):
		return invalid("", "the body is empty; send a JSON object")
	case err != nil:
		return syntaxError(err)
	}
	if _, err := d.ReadToken(); !errors.Is(err, io.EOF) {
		return invalid("", "the body holds more than one JSON value")
	}
	return nil
}

// plainJSONReason is a parser's reason without the name of its package.
func plainJSONReason(err error) string {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return "it ends too early"
	}
	return strings.TrimPrefix(err.Error(), "jsontext: ")
}
