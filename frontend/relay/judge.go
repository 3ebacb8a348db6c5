package relay

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// An answer of 200 may still be none: a proxy's page, half of one, an error. What is seen before the client has got anything
// is treated as the failure that it is.

var (
	errNone        = errors.New("the answer is no completion")
	errHalf        = errors.New("the answer is no whole JSON")
	errEmptyStream = errors.New("the stream is empty")
)

// checkEncoding refuses encodings of bodies: nobody has asked for one.
func checkEncoding(a *answer) error {
	if coding := a.header.Get("Content-Encoding"); coding != "" && !strings.EqualFold(coding, "identity") {
		return failed(errNone, fmt.Errorf("it is encoded as %s, which nobody asked for", clip([]byte(coding))))
	}
	return nil
}

// checkKind judges whether an answer is a stream just if it should be.
func (x *exchange) checkKind(a *answer) error {
	switch events := isEvents(a.header); {
	case events == x.r.stream:
		return nil
	case events:
		return failed(errNone, errors.New("it is a stream, which the request is not for"))
	}
	body, err := a.readAll(nil, min(x.s.cfg.Limits.MaxAnswer, maxError))
	if err == nil {
		_, err = readCompletion(body)
	}
	if err != nil && !errors.As(err, new(*tooLargeError)) {
		return err
	}
	return failed(errNone, errors.New("it is no stream, which the request is for"))
}

// checkPassed judges an answer that is passed on as it is: one of 200 that calls itself JSON must be a whole value.
func checkPassed(a *answer, body []byte) error {
	kind, _, _ := strings.Cut(a.header.Get("Content-Type"), ";")
	if a.status != http.StatusOK || !strings.EqualFold(strings.TrimSpace(kind), "application/json") || checkEncoding(a) != nil {
		return nil
	}
	s := scanner{b: body}
	s.space()
	err := s.value()
	if err == nil {
		err = s.rest()
	}
	if err != nil {
		return failed(errHalf, err)
	}
	return nil
}

// readCompletion looks at a whole answer, which is kept.
func readCompletion(body []byte) (object, error) {
	o, err := scanObject(body)
	if err != nil {
		return o, failed(errNone, err)
	}
	if said := errorIn(&o); said != nil {
		return o, said
	}
	if choices := o.getSet("choices"); choices == nil || choices[0] != '[' {
		return o, failed(errNone, errors.New("it has no choices"))
	}
	return o, nil
}

// errorIn is the error that an answer or event is, nil if it is none. Its status is the error's own code if that is one.
func errorIn(o *object) *engineError {
	if o.getSet("choices") != nil {
		return nil
	}
	e := o.getSet("error")
	if e == nil && string(o.get("object")) != `"error"` {
		return nil
	}
	code := o.get("code")
	if inner, err := scanObject(e); err == nil && inner.getSet("code") != nil {
		code = inner.get("code")
	}
	status, err := strconv.Atoi(string(code))
	if err != nil || status < 400 || status > 599 {
		status = http.StatusInternalServerError
	}
	return &engineError{status: status, header: http.Header{"Content-Type": {"application/json"}}, body: bytes.Clone(o.raw), in200: true}
}

// checkEvent judges the first of a text of whole events.
func checkEvent(events []byte) error {
	event, _ := cutEvent(events)
	data := eventData(event)
	switch string(data) {
	case "":
		return nil // a comment, which may keep the client waiting for longer
	case doneData:
		return failed(errNone, errEmptyStream)
	}
	o, err := scanObject(data)
	if err != nil {
		return failed(errNone, err)
	}
	if said := errorIn(&o); said != nil {
		return said
	}
	return nil
}

// awaitEvent waits until the first event of a stream in chunks has come, and judges it. It takes nothing.
func (x *exchange) awaitEvent(a *answer) error {
	var data, rest []byte
	framing := chunks{data: func(b []byte) { data = append(data, b...) }}
	for at := 0; ; {
		b, err := a.next()
		if errors.Is(err, bufio.ErrBufferFull) {
			break // it is large, so no error
		}
		if err != nil {
			return streamError(err)
		}
		rest = append(rest[:0], b[at:]...) // scan writes into what it gets
		before := len(data)
		_, taken, err := framing.scan(rest)
		if err != nil {
			return failed(errAnswer, err)
		}
		at += taken
		if eventsEnd(data, before) > 0 {
			if err := checkEvent(data); err != nil {
				return err
			}
			break
		}
		switch {
		case framing.end && len(data) == 0:
			return failed(errNone, errEmptyStream)
		case framing.end:
			return failed(errCut, errEnd)
		case len(data) > 0:
			a.within(x.s.cfg.Timeouts.Stream)
		}
	}
	a.seen = 0 // so that next shows it again
	return nil
}
