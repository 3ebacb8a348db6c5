package frontend

import (
	"encoding/json/jsontext"
	"math"
	"net/http"
	"slices"
	"strconv"
)

// appendString appends s as a JSON string; bytes that are not UTF-8 become U+FFFD.
func appendString[T ~string | ~[]byte](b []byte, s T) []byte {
	// The error only reports the replacement.
	b, _ = jsontext.AppendQuote(b, s)
	return b
}

func appendStringOrNull(b []byte, s string) []byte {
	if s == "" {
		return append(b, "null"...)
	}
	return appendString(b, s)
}

// unlikely is what OpenAI sends for the log-probability of what cannot happen; JSON has no infinity.
const unlikely = -9999

// appendFloat32 appends the shortest number that reads back as the same f32.
func appendFloat32(b []byte, f float32) []byte {
	v := float64(f)
	if math.IsInf(v, 0) || math.IsNaN(v) {
		return strconv.AppendInt(b, unlikely, 10)
	}
	format := byte('f')
	if abs := math.Abs(v); abs != 0 && (abs < 1e-6 || abs >= 1e21) {
		format = 'e'
	}
	return strconv.AppendFloat(b, v, format, -1, 32)
}

func appendInt[T ~int | ~int32 | ~int64](b []byte, n T) []byte {
	return strconv.AppendInt(b, int64(n), 10)
}

// appendIDs appends an array of token ids.
func appendIDs(b []byte, ids []int32) []byte {
	b = append(slices.Grow(b, 7*len(ids)+2), '[')
	var number [11]byte // with the comma before it
	for i, id := range ids {
		at := len(number)
		for n := uint32(id); ; n /= 10 {
			at--
			number[at] = byte('0' + n%10)
			if n < 10 {
				break
			}
		}
		if i > 0 {
			at--
			number[at] = ','
		}
		b = append(b, number[at:]...)
	}
	return append(b, ']')
}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	// A client that is gone is noticed by its context.
	_, _ = w.Write(body)
}
