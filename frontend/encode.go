package frontend

import (
	"encoding/binary"
	"encoding/json/jsontext"
	"math"
	"math/bits"
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
	for i, id := range ids {
		if i > 0 {
			b = append(b, ',')
		}
		if uint32(id) >= 1e8 {
			b = appendInt(b, id)
			continue
		}
		digits, n := eightDigits(uint64(id))
		b = binary.LittleEndian.AppendUint64(b, digits)
		b = b[:len(b)-8+n]
	}
	return append(b, ']')
}

// eightDigits are the digits of a number below 1e8, the first in the lowest byte, and how many there are. Prompts are printed by the ten
// thousands, and guessing how many digits an id has costs more than these multiplications.
func eightDigits(n uint64) (digits uint64, count int) {
	n = n/1e4 | n%1e4<<32 // four digits in each half
	high := n * 10486 >> 20 & 0x7f0000007f
	n = high | (n-100*high)<<16 // two in each quarter
	high = n * 103 >> 10 & 0x000f000f000f000f
	n = high | (n-10*high)<<8 // one in each byte
	zeros := bits.TrailingZeros64(n|1<<56) / 8
	return (n | 0x3030303030303030) >> (8 * zeros), 8 - zeros
}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	// A client that is gone is noticed by its context.
	_, _ = w.Write(body)
}
