package relay

import (
	"net/http"
	"strconv"
	"strings"
	"time"
)

// passed are headers of engines' answers without which clients would take them wrong, or not know what to do next.
var passed = []string{"Content-Type", "Content-Encoding", "Allow", "WWW-Authenticate"}

// maxRetryAfter bounds how long an engine may keep clients away, in seconds.
const maxRetryAfter = 3600

// passHeaders gives the client what an engine's answer has of those headers, and when to come back.
func passHeaders(to, from http.Header, now time.Time) {
	for _, name := range passed {
		if values := from.Values(name); len(values) > 0 {
			to[name] = values
		}
	}
	if seconds := retryAfter(from, now); seconds > 0 {
		to.Set("Retry-After", strconv.Itoa(seconds))
	}
}

// retryAfter is what a Retry-After says, in seconds or as a date, as 1 to maxRetryAfter seconds; 0 where it says nothing.
func retryAfter(h http.Header, now time.Time) int {
	text := strings.TrimSpace(h.Get("Retry-After"))
	seconds, err := strconv.Atoi(text)
	if err != nil {
		at, err := http.ParseTime(text)
		if err != nil {
			return 0
		}
		seconds = max(0, int(at.Sub(now).Round(time.Second)/time.Second))
	}
	if seconds < 0 {
		return 0
	}
	return max(1, min(seconds, maxRetryAfter))
}
