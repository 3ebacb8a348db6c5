package relay

import (
	"net/http"
	"sync/atomic"
)

// budget bounds the bytes of bodies that all requests hold at a time: their own, and answers that are read whole. A buffer
// may be up to twice as large as what is in it.
type budget struct {
	limit int64
	used  atomic.Int64
}

// holding is one request's part of a budget. Both legs of a request may take from it at once.
type holding struct {
	of    *budget
	bytes atomic.Int64
}

// errNoRoom refuses what does not fit now.
var errNoRoom = &apiError{
	status: http.StatusServiceUnavailable, kind: "service_unavailable_error", code: "overloaded", retryAfter: 1,
	message: "the requests that run hold as much memory as they may (--max-bodies): send the request again",
}

// take adds bytes that have arrived. A nil holding takes anything.
func (h *holding) take(n int) error {
	if h == nil || n == 0 {
		return nil
	}
	if h.of.used.Add(int64(n)) > h.of.limit {
		h.of.used.Add(-int64(n))
		return errNoRoom
	}
	h.bytes.Add(int64(n))
	return nil
}

// keep gives back all but so many bytes.
func (h *holding) keep(n int) {
	if more := h.bytes.Load() - int64(n); more > 0 {
		h.bytes.Add(-more)
		h.of.used.Add(-more)
	}
}
