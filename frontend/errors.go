package frontend

import (
	"context"
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"baton/wire"
)

// Kinds of error, as OpenAI names them.
const (
	typeInvalid     = "invalid_request_error"
	typeServer      = "server_error"
	typeUnavailable = "service_unavailable_error"
)

// apiError is an error as a client sees it.
type apiError struct {
	status     int
	kind       string // "type" in JSON
	message    string
	param      string // the request's field at fault; "" is null
	code       string // "" is null
	retryAfter int    // seconds; 0 for no such header
	challenge  bool   // the answer asks for an API key
}

func (e *apiError) Error() string { return e.message }

// invalid is a 400 that names a field.
func invalid(param, format string, args ...any) error {
	return &apiError{status: http.StatusBadRequest, kind: typeInvalid, param: param, message: fmt.Sprintf(format, args...)}
}

// appendJSON appends the error's body, {"error":{...}}.
func (e *apiError) appendJSON(b []byte) []byte {
	b = append(b, `{"error":{"message":`...)
	b = appendString(b, e.message)
	b = append(b, `,"type":`...)
	b = appendString(b, e.kind)
	b = append(b, `,"param":`...)
	b = appendStringOrNull(b, e.param)
	b = append(b, `,"code":`...)
	b = appendStringOrNull(b, e.code)
	return append(b, "}}"...)
}

// write answers a request whose headers are not sent yet.
func (e *apiError) write(w http.ResponseWriter) {
	if e.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(e.retryAfter))
	}
	if e.challenge {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	writeJSON(w, e.status, e.appendJSON(nil))
}

var (
	errShuttingDown = &apiError{
		status: http.StatusServiceUnavailable, kind: typeUnavailable, code: "shutting_down", retryAfter: 5,
		message: "the server is shutting down: send the request to another one or try again later",
	}
	errNoRoom = &apiError{
		status: http.StatusServiceUnavailable, kind: typeUnavailable, code: "overloaded", retryAfter: 1,
		message: "the requests that run hold as much memory as they may: send the request again",
	}
	errClientGone = &apiError{status: statusClientClosed, kind: typeInvalid, message: "the client closed the connection"}
	errInternal   = &apiError{
		status: http.StatusInternalServerError, kind: typeServer, code: wire.CodeInternal,
		message: "the server failed to run the request; its log says more",
	}
)

// statusClientClosed is what logs and metrics say of a client that left; nobody receives it.
const statusClientClosed = 499

// toAPIError translates any error of a request run under ctx. An error of unknown origin is not shown to
// the client: its text is the server's business.
func toAPIError(ctx context.Context, err error) *apiError {
	var known *apiError
	if errors.As(err, &known) {
		return known
	}
	var failed *RequestError
	if errors.As(err, &failed) {
		return fromRequestError(failed)
	}
	if ctx.Err() != nil {
		if errors.As(context.Cause(ctx), &known) {
			return known
		}
		return errClientGone
	}
	return errInternal
}

func fromRequestError(e *RequestError) *apiError {
	out := &apiError{message: e.Message, param: e.Field, code: e.Code}
	switch e.Code {
	case wire.CodeInvalid:
		out.status, out.kind = http.StatusBadRequest, typeInvalid
	case wire.CodeGone:
		out.status, out.kind = http.StatusGone, typeInvalid
	case wire.CodeUnavailable, wire.CodeEngineLost:
		out.status, out.kind, out.retryAfter = http.StatusServiceUnavailable, typeUnavailable, 1
	default:
		out.status, out.kind = http.StatusInternalServerError, typeServer
	}
	if e.Retryable && out.status != http.StatusServiceUnavailable {
		out.retryAfter = 1
	}
	return out
}

// syntaxError says where a body stops being JSON.
func syntaxError(err error) error {
	var s *jsontext.SyntacticError
	if !errors.As(err, &s) {
		return invalid("", "the body is not valid JSON")
	}
	return invalid("", "the body is not valid JSON (near byte %d): %s", s.ByteOffset, plainJSONReason(s.Err))
}
