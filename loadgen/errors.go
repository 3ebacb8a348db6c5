package loadgen

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
)

// Kinds of failures, as reports count them. A refusal's kind is "http_" and its status, such as http_503.
const (
	KindConnect  = "connect"      // no connection, or it was lost before the answer's head
	KindTimeout  = "timeout"      // Config.Timeout
	KindCut      = "stream_cut"   // the stream ended without [DONE]
	KindStream   = "stream_error" // the server sent an error in the stream
	KindResponse = "bad_response" // what came is no stream of completions, or breaks a limit
	KindSession  = "no_next_turn" // the answer cannot be sent back: no token ids came
	kindCanceled = "canceled"     // the run was ended; not counted
)

// RequestError is why a request failed.
type RequestError struct {
	Kind    string
	Status  int // of a refusal
	Message string
}

func (e *RequestError) Error() string {
	if e.Message == "" {
		return e.Kind
	}
	return e.Kind + ": " + e.Message
}

// refused is an answer that is not 200.
func refused(status int, body []byte) *RequestError {
	message := strings.TrimSpace(string(body))
	p := &parser{}
	if e, err := p.parse(body); err == nil && e.fault != nil && e.fault.Message != "" {
		message = e.fault.Message
	}
	return &RequestError{Kind: fmt.Sprintf("http_%d", status), Status: status, Message: shorten(message)}
}

func shorten(s string) string {
	const most = 400
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "..."
	}
	return s
}

// broke is what a transport's error means. begun: the head of the answer had come.
func broke(ctx context.Context, err error, begun bool) *RequestError {
	var timeout net.Error
	e := &RequestError{Kind: KindConnect, Message: shorten(err.Error())}
	switch {
	case errors.Is(context.Cause(ctx), errTimeout), errors.As(err, &timeout) && timeout.Timeout():
		e.Kind, e.Message = KindTimeout, errTimeout.Error()
	case ctx.Err() != nil:
		e.Kind = kindCanceled
	case errors.Is(err, errEventTooLong), errors.Is(err, errStreamTooLong):
		e.Kind = KindResponse
	case begun:
		e.Kind = KindCut
	}
	return e
}

var errTimeout = errors.New("no complete answer in time")

// mayPass tells whether the same request may succeed a little later.
func (e *RequestError) mayPass() bool {
	switch e.Kind {
	case KindConnect, KindCut, KindStream:
		return true
	}
	return e.Status == 429 || e.Status >= 500
}
