package relay

import (
	"bytes"
	"errors"
)

// chunks follows the framing of an HTTP/1.1 body in chunks, so that one can be copied as it is.
type chunks struct {
	left int64 // bytes of the current chunk's data that are to come
	tail bool  // the CRLF behind a chunk's data is to come
	last bool  // the last chunk was seen; trailers follow
	end  bool  // all was seen

	data func([]byte) // is shown the data in turn, unless nil
}

// between reports whether whole chunks were taken, so that others can follow.
func (c *chunks) between() bool { return c.left == 0 && !c.tail }

var errFraming = errors.New("the answer's chunks are not well-formed")

// maxLine bounds a chunk's head and a trailer.
const maxLine = 4 << 10

// scan looks at the next bytes of a body. forward is the part of them that goes on: whole or partial chunks other than the last,
// without extensions, which are between two neighbours only and for whose removal scan writes into b. What is behind the first taken must
// be shown again, with more behind it. When end is set, all of the body was taken.
func (c *chunks) scan(b []byte) (forward []byte, taken int, err error) {
	from, to := 0, 0 // of what goes on
	for !c.end {
		rest := b[taken:]
		switch {
		case len(rest) == 0:
			return b[from:to], taken, nil
		case c.left > 0:
			n := min(c.left, int64(len(rest)))
			c.left -= n
			c.tail = c.left == 0
			if c.data != nil {
				c.data(rest[:n])
			}
			taken += int(n)
			to = taken
			continue
		case c.tail:
			if len(rest) < 2 {
				return b[from:to], taken, nil
			}
			if rest[0] != '\r' || rest[1] != '\n' {
				return b[from:to], taken, errFraming
			}
			c.tail = false
			taken += 2
			to = taken
			continue
		}
		line := bytes.IndexByte(rest, '\n')
		if line < 0 && len(rest) <= maxLine {
			return b[from:to], taken, nil
		}
		if line < 1 || line > maxLine || rest[line-1] != '\r' {
			return b[from:to], taken, errFraming
		}
		text := rest[:line-1]
		if c.last {
			taken += line + 1
			c.end = len(text) == 0
			continue
		}
		size, digits := hex(text)
		if digits == 0 || !isExtension(text[digits:]) {
			return b[from:to], taken, errFraming
		}
		if c.last = size == 0; !c.last {
			if n := len(text) - digits; n > 0 { // what is before it moves over it
				copy(b[from+n:], b[from:taken+digits])
				from += n
			}
			c.left, to = size, taken+line+1
		}
		taken += line + 1
	}
	return b[from:to], taken, nil
}

// isExtension reports whether what follows a chunk's size is nothing, space, or extensions.
func isExtension(b []byte) bool {
	b = bytes.TrimLeft(b, " \t")
	return len(b) == 0 || b[0] == ';' && bytes.IndexByte(b, '\r') < 0
}

// hex reads a chunk's size; digits is 0 if there is none.
func hex(b []byte) (n int64, digits int) {
	for ; digits < len(b); digits++ {
		c := b[digits]
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			c = c | 0x20 - 'a' + 10
		default:
			return n, digits
		}
		if digits == 15 {
			return 0, 0
		}
		n = n<<4 | int64(c)
	}
	return n, digits
}
