package loadgen

import (
	"bufio"
	"bytes"
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"
)

// Bounds on what a server may send.
const (
	maxEvent    = 8 << 20   // bytes of one event
	maxResponse = 512 << 20 // bytes of one stream
	maxText     = 64 << 20  // bytes of an answer's text
	maxRefusal  = 64 << 10  // bytes of an error's body that are read
)

var (
	errEventTooLong  = fmt.Errorf("an event of more than %d MiB", maxEvent>>20)
	errStreamTooLong = fmt.Errorf("a stream of more than %d MiB", maxResponse>>20)
	errCut           = errors.New("the stream ended without [DONE]")
)

// sse reads the data of server-sent events. It keeps its buffers for the next stream.
type sse struct {
	from io.Reader
	at   time.Time // when the last bytes came; events that came together have the same time
	r    *bufio.Reader
	line []byte // of a line that is longer than r's buffer
	data []byte // of an event that has several data lines or comes in parts, with a line's end after each
	left int64  // bytes that the stream may still have
}

func newSSE() *sse {
	s := &sse{}
	s.r = bufio.NewReaderSize(arrival{s}, 32<<10)
	return s
}

// reset begins a stream of at most so many bytes.
func (s *sse) reset(r io.Reader, limit int64) {
	s.from, s.left = r, limit
	s.r.Reset(arrival{s})
}

// arrival notes when bytes come.
type arrival struct{ *sse }

func (a arrival) Read(b []byte) (int, error) {
	n, err := a.from.Read(b)
	a.at = time.Now()
	return n, err
}

// next is the data of the next event. It is valid until the next call. At the stream's end err is io.EOF.
func (s *sse) next() ([]byte, error) {
	s.data = s.data[:0]
	for {
		line, err := s.readLine()
		if err != nil {
			return nil, err
		}
		value, isData := bytes.CutPrefix(line, []byte("data:"))
		switch {
		case len(line) == 0 && len(s.data) > 0:
			return s.data[:len(s.data)-1], nil
		case !isData: // a comment, another field, or an empty line too many
			continue
		}
		value = bytes.TrimPrefix(value, []byte(" "))
		if len(s.data) == 0 && s.blankAhead() {
			return value, nil
		}
		s.data = append(append(s.data, value...), '\n')
		if len(s.data) > maxEvent {
			return nil, errEventTooLong
		}
	}
}

// blankAhead tells whether the event ends here, as far as it has arrived, and then takes its end. Nearly all events have one line
// of data and arrive whole, so that they need not be copied.
func (s *sse) blankAhead() bool {
	ahead, _ := s.r.Peek(min(2, s.r.Buffered()))
	n := 0
	switch {
	case bytes.HasPrefix(ahead, []byte("\n")):
		n = 1
	case bytes.HasPrefix(ahead, []byte("\r\n")):
		n = 2
	default:
		return false
	}
	s.left -= int64(n)
	_, _ = s.r.Discard(n) // it is in the buffer
	return true
}

// readLine reads a line and takes its end off.
func (s *sse) readLine() ([]byte, error) {
	line, err := s.r.ReadSlice('\n')
	s.left -= int64(len(line))
	if err == bufio.ErrBufferFull {
		s.line = append(s.line[:0], line...)
		for err == bufio.ErrBufferFull {
			line, err = s.r.ReadSlice('\n')
			s.left -= int64(len(line))
			if s.line = append(s.line, line...); len(s.line) > maxEvent {
				return nil, errEventTooLong
			}
		}
		line = s.line
	}
	if s.left < 0 {
		return nil, errStreamTooLong
	}
	if err != nil {
		return nil, err // what comes before the end without a line's end is not a line
	}
	line = line[:len(line)-1]
	return bytes.TrimSuffix(line, []byte("\r")), nil
}

// event is what one chunk of an answer brings.
type event struct {
	tokens int  // token ids that came with it
	ids    bool // there was a field for them
	text   bool // there was text, reasoning or a tool call
	finish string
	usage  *usage
	fault  *RequestError // the server's word that it failed
}

// usage counts tokens; a count that the server does not give is -1.
type usage struct{ prompt, completion, cached int }

// parser reads chunks. It collects the answer's ids and text if it is asked to.
type parser struct {
	keepIDs, keepText bool
	ids               []int32
	text              []byte

	src bytes.Buffer
	dec jsontext.Decoder
}

var lenient = []jsontext.Options{jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true)}

// parse reads one chunk.
func (p *parser) parse(data []byte) (e event, err error) {
	p.src = *bytes.NewBuffer(data)
	p.dec.Reset(&p.src, lenient...)
	if p.dec.PeekKind() != jsontext.KindBeginObject {
		return e, errors.New("an event is not a JSON object")
	}
	err = p.members(func(name []byte) error {
		switch string(name) {
		case `"choices"`:
			return p.elements(func() error { return p.choice(&e) })
		case `"usage"`:
			return p.usage(&e)
		case `"error"`:
			return p.fault(&e)
		}
		return p.dec.SkipValue()
	})
	return e, err
}

// members calls f with each member's quoted name; f reads the value. A value that is no object is passed over.
func (p *parser) members(f func(name []byte) error) error {
	if p.dec.PeekKind() != jsontext.KindBeginObject {
		return p.dec.SkipValue()
	}
	if _, err := p.dec.ReadToken(); err != nil {
		return err
	}
	for p.dec.PeekKind() != jsontext.KindEndObject {
		name, err := p.dec.ReadValue()
		if err != nil {
			return err
		}
		if err := f(name); err != nil {
			return err
		}
	}
	_, err := p.dec.ReadToken()
	return err
}

// elements calls f for each element, which reads it. A value that is no array is passed over.
func (p *parser) elements(f func() error) error {
	if p.dec.PeekKind() != jsontext.KindBeginArray {
		return p.dec.SkipValue()
	}
	if _, err := p.dec.ReadToken(); err != nil {
		return err
	}
	for p.dec.PeekKind() != jsontext.KindEndArray {
		if err := f(); err != nil {
			return err
		}
	}
	_, err := p.dec.ReadToken()
	return err
}

func (p *parser) choice(e *event) error {
	return p.members(func(name []byte) error {
		switch string(name) {
		case `"text"`:
			return p.content(e, true)
		case `"delta"`:
			return p.members(func(name []byte) error {
				switch string(name) {
				case `"content"`:
					return p.content(e, true)
				case `"reasoning_content"`, `"reasoning"`, `"tool_calls"`:
					return p.content(e, false)
				}
				return p.dec.SkipValue()
			})
		case `"token_ids"`:
			return p.tokenIDs(e)
		case `"finish_reason"`:
			finish, err := p.readString()
			if finish != "" {
				e.finish = finish
			}
			return err
		}
		return p.dec.SkipValue()
	})
}

// content notes whether a value says something, and keeps text that belongs to the answer.
func (p *parser) content(e *event, keep bool) error {
	v, err := p.dec.ReadValue()
	if err != nil {
		return err
	}
	switch string(v) {
	case `""`, "null", "[]":
		return nil
	}
	e.text = true
	if !keep || !p.keepText || v.Kind() != jsontext.KindString {
		return nil
	}
	if p.text, err = jsontext.AppendUnquote(p.text, v); err != nil {
		return err
	}
	if len(p.text) > maxText {
		return fmt.Errorf("an answer of more than %d MiB", maxText>>20)
	}
	return nil
}

func (p *parser) tokenIDs(e *event) error {
	if p.dec.PeekKind() != jsontext.KindBeginArray {
		return p.dec.SkipValue()
	}
	e.ids = true
	return p.elements(func() error {
		v, err := p.dec.ReadValue()
		if err != nil {
			return err
		}
		e.tokens++
		if !p.keepIDs {
			return nil
		}
		id, err := strconv.ParseInt(string(v), 10, 32)
		if err != nil || id < 0 {
			return fmt.Errorf("token_ids has %.40q", v)
		}
		if len(p.ids) == maxTokens {
			return fmt.Errorf("an answer of more than %d tokens", maxTokens)
		}
		p.ids = append(p.ids, int32(id))
		return nil
	})
}

func (p *parser) readString() (string, error) {
	v, err := p.dec.ReadValue()
	if err != nil || v.Kind() != jsontext.KindString {
		return "", err
	}
	b, err := jsontext.AppendUnquote(nil, v)
	return string(b[:min(len(b), maxRefusal)]), err
}

func (p *parser) readCount(n *int) error {
	v, err := p.dec.ReadValue()
	if err != nil || v.Kind() == jsontext.KindNull {
		return err
	}
	count, err := strconv.ParseInt(string(v), 10, 32)
	if err != nil || count < 0 {
		return fmt.Errorf("usage has the count %.40q", v)
	}
	*n = int(count)
	return nil
}

func (p *parser) usage(e *event) error {
	if p.dec.PeekKind() != jsontext.KindBeginObject {
		return p.dec.SkipValue()
	}
	u := &usage{-1, -1, -1}
	e.usage = u
	return p.members(func(name []byte) error {
		switch string(name) {
		case `"prompt_tokens"`:
			return p.readCount(&u.prompt)
		case `"completion_tokens"`:
			return p.readCount(&u.completion)
		case `"prompt_tokens_details"`:
			return p.members(func(name []byte) error {
				if string(name) == `"cached_tokens"` {
					return p.readCount(&u.cached)
				}
				return p.dec.SkipValue()
			})
		}
		return p.dec.SkipValue()
	})
}

// fault reads an error: an object with a message, or the message itself.
func (p *parser) fault(e *event) error {
	var message string
	var err error
	switch p.dec.PeekKind() {
	case jsontext.KindNull:
		return p.dec.SkipValue()
	case jsontext.KindString:
		message, err = p.readString()
	default:
		err = p.members(func(name []byte) (err error) {
			if string(name) == `"message"` {
				message, err = p.readString()
				return err
			}
			return p.dec.SkipValue()
		})
	}
	e.fault = &RequestError{Kind: KindStream, Message: message}
	return err
}
