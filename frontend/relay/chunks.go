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

// scan looks at the next bytes of a body. The first forward of them are whole or partial chunks other than the last;
// what is behind the first taken must be shown again, with more behind it. When end is set, all of the body was taken.
func (c *chunks) scan(b []byte) (forward, taken int, err error) {
	for !c.end {
		rest := b[taken:]
		switch {
		case len(rest) == 0:
			return forward, taken, nil
		case c.left > 0:
			n := min(c.left, int64(len(rest)))
			c.left -= n
			c.tail = c.left == 0
			if c.data != nil {
				c.data(rest[:n])
			}
			taken += int(n)
			forward = taken
			continue
		case c.tail:
			if len(rest) < 2 {
				return forward, taken, nil
			}
			if rest[0] != '\r' || rest[1] != '\n' {
				return forward, taken, errFraming
			}
			c.tail = false
			taken += 2
			forward = taken
			continue
		}
		line := bytes.IndexByte(rest, '\n')
		if line < 0 && len(rest) <= maxLine {
			return forward, taken, nil
		}
		if line < 1 || line > maxLine || rest[line-1] != '\r' {
			return forward, taken, errFraming
		}
		text := rest[:line-1]
		taken += line + 1
		if c.last {
			c.end = len(text) == 0
			continue
		}
		size, ok := hex(text)
		if !ok {
			return forward, taken, errFraming
		}
		if c.last = size == 0; !c.last {
			c.left, forward = size, taken
		}
	}
	return forward, taken, nil
}

// hex reads a chunk's size.
func hex(b []byte) (n int64, ok bool) {
	if len(b) == 0 || len(b) > 15 {
		return 0, false
	}
	for _, c := range b {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			c = c | 0x20 - 'a' + 10
		default:
			return 0, false
		}
		n = n<<4 | int64(c)
	}
	return n, true
}
