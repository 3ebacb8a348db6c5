package relay

import "time"

// breaker keeps requests from a worker that fails them. It is a plain value: the caller brings the time and the lock.
//
// It opens after some requests in a row have failed. Once its pause is over it lets one request try; that one's success
// closes it, its failure opens it for twice as long. A request may be sent although it is open, when nobody else can take
// it: its success closes it too.
type breaker struct {
	failures int
	open     bool
	trying   bool
	until    time.Time
	pause    time.Duration
}

// Limits of breakers.
const (
	breakerFailures = 3
	breakerPause    = time.Second
	breakerMaxPause = 30 * time.Second
)

// allows reports whether a request may be sent now.
func (b *breaker) allows(now time.Time) bool {
	return !b.open || !b.trying && !now.Before(b.until)
}

// begin notes that a request is sent. trial says that it is the one that tries an open breaker; its end must be told with
// that.
func (b *breaker) begin(now time.Time) (trial bool) {
	if !b.open || !b.allows(now) {
		return false
	}
	b.trying = true
	return true
}

// success notes that a request went well.
func (b *breaker) success() { *b = breaker{} }

// failure notes that one failed; it reports whether that opened a closed breaker.
func (b *breaker) failure(now time.Time, trial bool) (opened bool) {
	b.failures++
	switch {
	case b.open && !trial:
		return false // sent before it opened, or although it is
	case b.open:
		b.pause = min(2*b.pause, breakerMaxPause)
	case b.failures >= breakerFailures:
		b.open, b.pause, opened = true, breakerPause, true
	default:
		return false
	}
	b.trying = false
	b.until = now.Add(b.pause)
	return opened
}

// cancel notes that a request ended for reasons of its own.
func (b *breaker) cancel(trial bool) {
	if trial {
		b.trying = false
	}
}

// state is what metrics and answers show.
func (b *breaker) state(now time.Time) string {
	switch {
	case !b.open:
		return "closed"
	case b.trying || !now.Before(b.until):
		return "half-open"
	}
	return "open"
}
