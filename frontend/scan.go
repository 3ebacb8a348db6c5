package frontend

import (
	"bytes"
	"encoding/binary"
	"encoding/json/jsontext"
)

// Bodies are checked once, by jsontext, but for the long lists of numbers in them: most bytes of a rollout are ids. These
// are checked here, at the speed of memory. What is valid is then gone through without looking at each byte again.

// minList is the least bytes of a list of numbers that is worth leaving out.
const minList = 64

// shorten leaves the numbers of long lists out of a body and says how deep arrays and objects lie in each other. The short
// body is valid JSON if and only if the body is; of other bytes the depth says something, so that no parser recurses into
// them.
func shorten(body []byte) (short []byte, deepest int) {
	depth, kept := 0, 0 // what precedes kept is in short
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case '"':
			i = stringEnd(body, i) - 1
		case '{', '[':
			depth++
			deepest = max(deepest, depth)
			if body[i] != '[' {
				continue
			}
			if n := numbers(body[i+1:]); n > minList {
				short = append(short, body[kept:i+1]...)
				i += n - 1
				kept = i + 1
			}
		case '}', ']':
			depth--
		}
	}
	if kept == 0 {
		return body, deepest
	}
	return append(short, body[kept:]...), deepest
}

// numbers is how many bytes of an array that is open already are JSON numbers and the bracket that closes it; 0 if something else is
// in it.
func numbers(b []byte) int {
	for i := 0; ; {
		i += wholeNumbers(b[i:])
		n := number(b[skipSpace(b, i):])
		if n == 0 {
			return 0
		}
		i = skipSpace(b, skipSpace(b, i)+n)
		switch {
		case i >= len(b):
			return 0
		case b[i] == ']':
			return i + 1
		case b[i] != ',':
			return 0
		}
		i++
	}
}

// number is the length of the JSON number that a text begins with, 0 for none.
func number(b []byte) int {
	digits := func(i int) int {
		for i < len(b) && isDigit(b[i]) {
			i++
		}
		return i
	}
	i := 0
	if i < len(b) && b[i] == '-' {
		i++
	}
	end := digits(i)
	if end == i || b[i] == '0' && end > i+1 {
		return 0
	}
	if i = end; i < len(b) && b[i] == '.' {
		if end = digits(i + 1); end == i+1 {
			return 0
		}
		i = end
	}
	if i < len(b) && b[i]|0x20 == 'e' {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		if end = digits(i); end == i {
			return 0
		}
		i = end
	}
	return i
}

func isDigit(c byte) bool { return c-'0' <= 9 }

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\r' || c == '\t' }

func skipSpace(b []byte, i int) int {
	for i < len(b) && isSpace(b[i]) {
		i++
	}
	return i
}

// wholeNumbers is how many bytes of a text are whole numbers, each with a comma and at most one space behind it. It stops
// early; what it counts is right. Eight bytes are looked at at once: a lane of a mask is 0x80 where a byte is of a kind.
func wholeNumbers(b []byte) int {
	const (
		ones  = 0x0101010101010101
		highs = 0x8080808080808080
	)
	zeros := func(x uint64) uint64 { return ^(x + 0x7f*ones) & highs } // of lanes below 0x80
	var (
		afterDigit uint64
		afterComma uint64 = 0x80 // it begins as if behind one
		afterZero  uint64        // a zero that begins a number
	)
	n := 0
	for ; n+8 <= len(b); n += 8 {
		x := binary.LittleEndian.Uint64(b[n:])
		if x&highs != 0 {
			break
		}
		value := x ^ '0'*ones
		digit := ^(value + (0x7f-9)*ones) & highs
		comma, space := zeros(x^','*ones), zeros(x^' '*ones)
		if digit|comma|space != highs {
			break
		}
		behindDigit := digit<<8 | afterDigit
		zero := zeros(value) &^ behindDigit
		if comma&^behindDigit|space&^(comma<<8|afterComma)|digit&(zero<<8|afterZero) != 0 {
			break
		}
		afterDigit, afterComma, afterZero = digit>>56, comma>>56, zero>>56
	}
	return bytes.LastIndexByte(b[:n], ',') + 1
}

// stringEnd is where the string ends that begins at i, or the text.
func stringEnd(b []byte, i int) int {
	for i++; ; i++ {
		quote := bytes.IndexByte(b[min(i, len(b)):], '"')
		if quote < 0 {
			return len(b)
		}
		from := i
		i += quote
		slashes := 0
		for i-slashes > from && b[i-slashes-1] == '\\' {
			slashes++
		}
		if slashes%2 == 0 {
			return i + 1
		}
	}
}

// valueEnd is where the value ends that begins at i of valid JSON.
func valueEnd(b []byte, i int) int {
	depth := 0
	for i < len(b) {
		switch b[i] {
		case '"':
			i = stringEnd(b, i)
		case '{':
			depth++
			i++
		case '[':
			if n := plainList(b[i:]); n > 0 {
				i += n
				break
			}
			depth++
			i++
		case '}', ']':
			depth--
			i++
		case ',', ':', ' ', '\n', '\r', '\t':
			i++
			continue
		default: // a number or a name
			for i++; i < len(b) && !isSpace(b[i]) && b[i] != ',' && b[i] != ']' && b[i] != '}'; i++ {
			}
		}
		if depth == 0 {
			return i
		}
	}
	return i
}

// plainList is the length of an array of valid JSON that begins with a number and holds neither strings nor arrays nor
// objects; 0 if it does.
func plainList(b []byte) int {
	if i := skipSpace(b, 1); i >= len(b) || !isDigit(b[i]) && b[i] != '-' {
		return 0
	}
	n := bytes.IndexByte(b, ']') + 1
	if n == 0 || bytes.IndexByte(b[1:n], '[') >= 0 || bytes.IndexByte(b[:n], '"') >= 0 || bytes.IndexByte(b[:n], '{') >= 0 {
		return 0
	}
	return n
}

// cursor goes through an array or an object of valid JSON.
type cursor struct {
	b  []byte
	at int
}

// inside begins behind the bracket.
func inside(v []byte) cursor { return cursor{v, skipSpace(v, 0) + 1} }

// more reports whether another element or member follows, and goes to it.
func (c *cursor) more() bool {
	c.at = skipSpace(c.b, c.at)
	if c.at < len(c.b) && c.b[c.at] == ',' {
		c.at = skipSpace(c.b, c.at+1)
	}
	return c.at < len(c.b) && c.b[c.at] != ']' && c.b[c.at] != '}'
}

// value reads a value.
func (c *cursor) value() jsontext.Value {
	from := c.at
	c.at = valueEnd(c.b, from)
	return jsontext.Value(c.b[from:c.at:c.at])
}

// member reads a name, as it is written, and a value.
func (c *cursor) member() (name, v jsontext.Value) {
	name = c.value()
	c.at = skipSpace(c.b, c.at)
	c.at = skipSpace(c.b, c.at+1) // the colon
	return name, c.value()
}

// unquoted is a string of valid JSON.
func unquoted(s jsontext.Value) (string, error) {
	if bytes.IndexByte(s, '\\') < 0 {
		return string(s[1 : len(s)-1]), nil
	}
	b, err := jsontext.AppendUnquote(nil, s)
	return string(b), err
}
