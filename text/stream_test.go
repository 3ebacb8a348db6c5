package text

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestDecodeUTF8(t *testing.T) {
	for _, c := range []struct{ bytes, text, rest string }{
		{"abc", "abc", ""},
		{"a\xc3\xa9", "aé", ""},
		{"a\xc3", "a", "\xc3"},
		{"\xf0\x9f\x98", "", "\xf0\x9f\x98"},
		{"\xf0\x9f\x98\x80\xe2", "😀", "\xe2"},
		{"\xff", "\uFFFD", ""},
		{"\x80\x80", "\uFFFD\uFFFD", ""},
		{"\xe2\x82a", "\uFFFDa", ""},               // a truncated character is one fault
		{"\xe2a", "\uFFFDa", ""},                   // as is a shorter one
		{"\xed\xa0\x80", "\uFFFD\uFFFD\uFFFD", ""}, // a surrogate is none
		{"\xe0\x80\x80", "\uFFFD\uFFFD\uFFFD", ""}, // overlong
		{"\xf4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD", ""},
		{"\xf0\x80", "\uFFFD\uFFFD", ""},
		{"\xc0\xaf", "\uFFFD\uFFFD", ""},
		{"\xe2\xe2\x82\xac", "\uFFFD€", ""},
		{"\xed", "", "\xed"},
		{"\xf4\x8f\xbf\xbf", "\U0010ffff", ""},
		{"\xef\xbf\xbd", "\uFFFD", ""}, // U+FFFD itself
	} {
		text, rest := decodeUTF8([]byte(c.bytes))
		if text != c.text || string(rest) != c.rest {
			t.Errorf("%q: %q and %q left, want %q and %q", c.bytes, text, rest, c.text, c.rest)
		}
	}
}

// TestStreamedDecoding: whatever the ids and however they come, a Detokenizer gives whole characters that add up
// to what Decode gives.
func TestStreamedDecoding(t *testing.T) {
	tok := tinyTokenizer(t, "gpt2")
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOfN(rapid.Int32Range(-2, int32(tok.VocabSize())+2), 0, 40).Draw(t, "ids")
		if rapid.Bool().Draw(t, "text") {
			ids, _ = tok.Encode(rapid.String().Draw(t, "s"), EncodeOptions{})
		}
		skip := rapid.Bool().Draw(t, "skip")
		want := tok.Decode(ids, skip)
		d := tok.NewDetokenizer(skip)
		var got strings.Builder
		for len(ids) > 0 {
			n := rapid.IntRange(1, len(ids)).Draw(t, "n")
			part := d.Push(ids[:n]...)
			if !utf8.ValidString(part) {
				t.Fatalf("part %q is not UTF-8", part)
			}
			got.WriteString(part)
			ids = ids[n:]
		}
		got.WriteString(d.Flush())
		if got.String() != want {
			t.Fatalf("streamed %q, at once %q", got.String(), want)
		}
		if d.Flush() != "" {
			t.Fatal("a second Flush gave more")
		}
	})
}

// TestDetokenizerExcept: of special tokens only those named are shown.
func TestDetokenizerExcept(t *testing.T) {
	tok := bare(t, "<|python_tag|>", "<|eom_id|>")
	for _, c := range []struct {
		skip   bool
		except []string
		want   string
	}{
		{true, nil, ""},
		{true, []string{"<|python_tag|>", "<tool_call>"}, "<|python_tag|>"},
		{false, []string{"<|python_tag|>"}, "<|python_tag|><|eom_id|>"},
	} {
		d := tok.NewDetokenizer(c.skip, c.except...)
		if got := d.Push(0, 1) + d.Flush(); got != c.want {
			t.Errorf("skip %v except %q: %q, want %q", c.skip, c.except, got, c.want)
		}
	}
}

// TestRoundTrip: byte-level BPE decodes to the text it encoded.
func TestRoundTrip(t *testing.T) {
	for _, name := range []string{"gpt2", "llama", "o200k", "tekken", "deepseek", "smollm", "qwen-marks", "nothing"} {
		tok := tinyTokenizer(t, name)
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				s := rapid.OneOf(rapid.String(), rapid.StringMatching(`([a-zA-Z0-9 \n\r\t'./]|<\|im_(start|end)\|>|é|中|😀){0,60}`)).Draw(t, "s")
				if name == "qwen-marks" { // what comes back is the normalized text
					s, _ = tok.normalizeText(s)
				}
				for _, parse := range []bool{false, true} {
					ids, err := tok.Encode(s, EncodeOptions{ParseSpecial: parse})
					if err != nil {
						t.Fatal(err)
					}
					if got := tok.Decode(ids, false); got != s {
						t.Fatalf("%q came back as %q", s, got)
					}
				}
			})
		})
	}
}

func TestInvalidUTF8(t *testing.T) {
	tok := tinyTokenizer(t, "gpt2")
	got, err := tok.Encode("a\xff\xe2\x82b", EncodeOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want, _ := tok.Encode("a\uFFFD\uFFFD\uFFFDb", EncodeOptions{})
	if !slices.Equal(got, want) {
		t.Errorf("ids %q, want %q", pieces(tok, got), pieces(tok, want))
	}
}

func TestStopMatcher(t *testing.T) {
	for _, c := range []struct {
		stops  []string
		pushes string // parts, a bar between
		emits  string // likewise; the last one is Flush's, or the stop's number after an exclamation mark
	}{
		{nil, "a|b", "a|b|"},
		{[]string{""}, "a|b", "a|b|"},
		{[]string{"stop"}, "go on|st|art", "go on||start|"},
		{[]string{"stop"}, "a st|op b", "a |!0"},
		{[]string{"stop"}, "a stop b", "a !0"},
		{[]string{"stop"}, "a st", "a |st"},
		{[]string{"ab", "abc"}, "xab|c", "x!0"},
		{[]string{"bc", "abc"}, "xa|b|c", "x||!1"}, // both end there: the longer
		{[]string{"abcd", "bc"}, "xabc", "xa!1"},   // bc is complete first
		{[]string{"aab"}, "aa|a|ab", "|a|a!0"},
		{[]string{"abab"}, "abaab|ab", "aba|!0"},
		{[]string{"\n\n", "###"}, "x\n|\n", "x|!0"},
		{[]string{"é"}, "caf|é!", "caf|!0"},
		{[]string{"日本"}, "日|中", "|日中|"},
		{[]string{"x", "x"}, "ax", "a!0"},
	} {
		m := NewStopMatcher(c.stops)
		var got []string
		stopped := false
		for part := range strings.SplitSeq(c.pushes, "|") {
			emit, stop, which := m.Push(part)
			if stopped = stop; stop {
				got = append(got, fmt.Sprintf("%s!%d", emit, which))
				break
			}
			got = append(got, emit)
		}
		if !stopped {
			got = append(got, m.Flush())
		}
		if s := strings.Join(got, "|"); s != c.emits {
			t.Errorf("stops %q, text %q: %q, want %q", c.stops, c.pushes, s, c.emits)
		}
		if stopped {
			if emit, again, _ := m.Push("more"); emit != "" || !again || m.Flush() != "" {
				t.Errorf("stops %q: text after the stop was shown", c.stops)
			}
		}
	}
}

// TestStopMatcherCuts compares with a plain search, however the text is cut.
func TestStopMatcherCuts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stops := rapid.SliceOfN(rapid.StringMatching(`[ab]{1,4}`), 0, 4).Draw(t, "stops")
		text := rapid.StringMatching(`[abc]{0,20}`).Draw(t, "text")
		want, wantWhich := text, -1
	search:
		for end := range len(text) + 1 {
			for which, s := range stops {
				if strings.HasSuffix(text[:end], s) && (wantWhich < 0 || len(s) > len(stops[wantWhich])) {
					want, wantWhich = text[:end-len(s)], which
				}
			}
			if wantWhich >= 0 {
				break search
			}
		}
		m := NewStopMatcher(stops)
		var got strings.Builder
		gotWhich := -1
		for text != "" && gotWhich < 0 {
			n := rapid.IntRange(1, len(text)).Draw(t, "n")
			emit, stopped, which := m.Push(text[:n])
			got.WriteString(emit)
			if stopped {
				gotWhich = which
			}
			text = text[n:]
		}
		got.WriteString(m.Flush())
		if got.String() != want || gotWhich != wantWhich {
			t.Fatalf("shown %q, stop %d; want %q, %d", got.String(), gotWhich, want, wantWhich)
		}
	})
}
