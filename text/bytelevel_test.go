package text

import (
	"testing"
	"unicode/utf8"
)

// byteLevelEncode spells bytes the way a byte-level vocabulary does.
func byteLevelEncode(bytes string) string {
	b := make([]byte, 0, len(bytes)*2)
	for i := range len(bytes) {
		b = utf8.AppendRune(b, byteRune[bytes[i]])
	}
	return string(b)
}

func TestByteLevel(t *testing.T) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	spelled := byteLevelEncode(string(all))
	if n := utf8.RuneCountInString(spelled); n != 256 {
		t.Fatalf("256 bytes are spelled with %d characters", n)
	}
	if got, ok := byteLevelDecode(spelled); !ok || got != string(all) {
		t.Errorf("decoded to %q, %v", got, ok)
	}
	for _, c := range []struct{ bytes, spelled string }{
		{" a", "Ġa"}, {"\n", "Ċ"}, {"é", "Ã©"}, {"\u00ad", "ÂŃ"}, {"\x00", "Ā"}, {"\x7f", "ġ"},
	} {
		if got := byteLevelEncode(c.bytes); got != c.spelled {
			t.Errorf("%q is spelled %q, want %q", c.bytes, got, c.spelled)
		}
	}
	for _, s := range []string{"<｜", "\u0144", "a b", "\n"} {
		if got, ok := byteLevelDecode(s); ok {
			t.Errorf("%q decoded to %q, want a refusal", s, got)
		}
	}
}
