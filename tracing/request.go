package tracing

import (
	"net/http"
	"strings"
)

// maxRequestID bounds what a client may call its request.
const maxRequestID = 128

// RequestID is what a client, or a relay before this process, calls a request (X-Request-Id); "" if it does not say, or if that is
// not fit for logs and headers.
func RequestID(h http.Header) string {
	id := h.Get("X-Request-Id")
	if len(id) > maxRequestID || strings.ContainsFunc(id, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return ""
	}
	return id
}
