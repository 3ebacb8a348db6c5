package text

import "strings"

// Byte-level vocabularies spell every byte as a printable character (GPT-2's bytes_to_unicode): printable
// Latin-1 stands for itself, the other 68 bytes are U+0100 onwards, in order.
var (
	byteRune [256]rune
	runeByte [324]int16 // by rune; -1 where none
)

func init() {
	for i := range runeByte {
		runeByte[i] = -1
	}
	next := rune(256)
	for b := range 256 {
		r := rune(b)
		if !(b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae) {
			r = next
			next++
		}
		byteRune[b] = r
		runeByte[r] = int16(b)
	}
}

// byteLevelDecode gives the bytes that a vocabulary entry stands for; ok is false if a character of it
// stands for none.
func byteLevelDecode(token string) (bytes string, ok bool) {
	var b strings.Builder
	b.Grow(len(token))
	for _, r := range token {
		if r >= rune(len(runeByte)) || runeByte[r] < 0 {
			return "", false
		}
		b.WriteByte(byte(runeByte[r]))
	}
	return b.String(), true
}
