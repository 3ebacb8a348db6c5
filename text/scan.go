package text

import (
	"strings"
	"unicode/utf8"
)

// The patterns by which the well-known tokenizers split text into words, as tokenizer.json spells them.
// Each has a scanner below that does the same much faster; other patterns go to a regular-expression engine.
const (
	patternGPT2 = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

	patternTail  = `| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternLlama = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}` + patternTail
	patternQwen  = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}` + patternTail
	// Qwen 3.5 counts combining marks as letters.
	patternQwenMarks = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

	patternCased = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+` +
		`(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*` +
		`(?i:'s|'t|'re|'ve|'m|'ll|'d)?`
	patternO200k  = patternCased + `|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternTekken = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*` +
		`|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`

	patternDigits3 = `\p{N}{1,3}`
	patternCJK     = `[一-龥぀-ゟ゠-ヿ]+`
	// DeepSeek V3's third step. Its tokenizer.json has the two line breaks as themselves.
	patternDeepSeek = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

// scanner gives the length of the first piece of a text that is not empty.
type scanner func(t *classTable, s string) int

var scanners = map[string]scanner{
	patternGPT2:      scanGPT2,
	patternLlama:     wordScanner{digits: 3, other: anyLetter | number}.next,
	patternQwen:      wordScanner{digits: 1, other: anyLetter | number}.next,
	patternQwenMarks: wordScanner{digits: 1, marks: mark, other: anyLetter | number | mark}.next,
	patternO200k:     wordScanner{digits: 3, other: anyLetter | number, cased: true, suffix: true, slash: true}.next,
	patternTekken:    wordScanner{digits: 1, other: anyLetter | number, cased: true, slash: true}.next,
	patternDigits3:   scanDigits3,
	patternCJK:       scanCJK,
	patternDeepSeek:  scanDeepSeek,
}

// contraction is the length of 's, 't, 're, ... at the start of s; fold also takes other cases, of which
// the long s (U+017F) is one of an s.
func contraction(s string, fold bool) int {
	if len(s) < 2 || s[0] != '\'' {
		return 0
	}
	if fold && strings.HasPrefix(s[1:], "ſ") {
		return 1 + len("ſ")
	}
	at := func(i int) byte {
		if i >= len(s) {
			return 0
		}
		if b := s[i]; fold && b >= 'A' && b <= 'Z' {
			return b | 0x20
		}
		return s[i]
	}
	switch at(1) {
	case 's', 't', 'm', 'd':
		return 2
	case 'r', 'v':
		if at(2) == 'e' {
			return 3
		}
	case 'l':
		if at(2) == 'l' {
			return 3
		}
	}
	return 0
}

// spaces handles \s+(?!\S)|\s+ at white space: all of a run but its last character, unless the text ends
// there or there is only one.
func spaces(t *classTable, s string) int {
	end := t.run(s, 0, space)
	if end == len(s) {
		return end
	}
	if _, last := utf8.DecodeLastRuneInString(s[:end]); last < end {
		return end - last
	}
	return end
}

// lineBreaks handles \s*[\r\n]+: up to the last line break of a run of white space, or 0.
func lineBreaks(t *classTable, s string) int {
	return strings.LastIndexAny(s[:t.run(s, 0, space)], "\r\n") + 1
}

func scanGPT2(t *classTable, s string) int {
	if n := contraction(s, false); n > 0 {
		return n
	}
	start := 0
	if s[0] == ' ' {
		start = 1
	}
	switch c, n := t.at(s, start); {
	case n == 0 || c&space != 0:
		return spaces(t, s)
	case c&anyLetter != 0:
		return t.run(s, start, anyLetter)
	case c&number != 0:
		return t.run(s, start, number)
	}
	return t.runOut(s, start, space|anyLetter|number)
}

// wordScanner covers the patterns descended from GPT-4's.
type wordScanner struct {
	digits int   // how many make a piece
	marks  class // mark, if marks are letters of a word
	other  class // what a run of "other characters" ends at, besides white space
	cased  bool  // a lower-case letter before an upper-case one ends a word
	suffix bool  // a word takes a contraction that follows; else a contraction stands alone
	slash  bool  // a run of other characters takes slashes after it as well as line breaks
}

func (w wordScanner) next(t *classTable, s string) int {
	if !w.cased {
		if n := contraction(s, true); n > 0 {
			return n
		}
	}
	c, n := t.at(s, 0)
	if end := w.word(t, s, c, n); end > 0 {
		if w.suffix {
			end += contraction(s[end:], true)
		}
		return end
	}
	if c&number != 0 {
		return numbers(t, s, w.digits)
	}
	if end := w.others(t, s); end > 0 {
		return end
	}
	if end := lineBreaks(t, s); end > 0 {
		return end
	}
	return spaces(t, s)
}

// word is a run of letters with at most one character before it that is no letter, number or line break.
func (w wordScanner) word(t *classTable, s string, c class, n int) int {
	before := 0
	if c&(anyLetter|number) == 0 && s[0] != '\r' && s[0] != '\n' {
		before = n
	}
	if !w.cased {
		if end := t.run(s, before, anyLetter|w.marks); end > before {
			return end
		}
		if before > 0 {
			return t.run(s, 0, anyLetter|w.marks)
		}
		return 0
	}
	for _, letters := range []func(*classTable, string, int) int{mixedCase, upperCase} {
		if end := letters(t, s, before); end > before {
			return end
		}
		if before > 0 {
			if end := letters(t, s, 0); end > 0 {
				return end
			}
		}
	}
	return 0
}

// mixedCase is [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ from s[i] on; i if it does not
// match. When no lower-case letter follows the first run, its last letter without case ends the word.
func mixedCase(t *classTable, s string, i int) int {
	const caseless = letter | mark
	last := i
	for {
		c, n := t.at(s, i)
		if c&lower != 0 {
			return t.run(s, i, lower|caseless)
		}
		if n == 0 || c&(upper|caseless) == 0 {
			return last
		}
		i += n
		if c&caseless != 0 {
			last = i
		}
	}
}

// upperCase is [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]* likewise.
func upperCase(t *classTable, s string, i int) int {
	const caseless = letter | mark
	end := t.run(s, i, upper|caseless)
	if end > i {
		end = t.run(s, end, lower|caseless)
	}
	return end
}

// others is " ?[^\s\p{L}\p{N}]+[\r\n]*", or 0.
func (w wordScanner) others(t *classTable, s string) int {
	start := 0
	if s[0] == ' ' {
		start = 1
	}
	end := t.runOut(s, start, space|w.other)
	if end == start {
		return 0
	}
	return breaksAfter(s, end, w.slash)
}

func breaksAfter(s string, end int, slash bool) int {
	for end < len(s) && (s[end] == '\r' || s[end] == '\n' || slash && s[end] == '/') {
		end++
	}
	return end
}

func numbers(t *classTable, s string, limit int) int {
	end := 0
	for range limit {
		c, n := t.at(s, end)
		if c&number == 0 {
			break
		}
		end += n
	}
	return end
}

func scanDigits3(t *classTable, s string) int {
	if n := numbers(t, s, 3); n > 0 {
		return n
	}
	return t.runOut(s, 0, number)
}

func scanCJK(_ *classTable, s string) int {
	inside := func(r rune) bool { return r >= '一' && r <= '龥' || r >= '぀' && r <= 'ヿ' }
	first, n := utf8.DecodeRuneInString(s)
	for i, r := range s[n:] {
		if inside(r) != inside(first) {
			return n + i
		}
	}
	return len(s)
}

// scanDeepSeek leaves characters that its pattern does not match (most numbers, controls) in pieces of
// their own, as long as they stand together.
func scanDeepSeek(t *classTable, s string) int {
	end := 0
	for end < len(s) {
		n := matchDeepSeek(t, s[end:])
		if n > 0 {
			if end == 0 {
				return n
			}
			return end
		}
		_, n = utf8.DecodeRuneInString(s[end:])
		end += n
	}
	return end
}

func matchDeepSeek(t *classTable, s string) int {
	c, n := t.at(s, 0)
	if c&punct != 0 && s[0] < utf8.RuneSelf {
		end := 1
		for end < len(s) && (s[end]|0x20) >= 'a' && (s[end]|0x20) <= 'z' {
			end++
		}
		if end > 1 {
			return end
		}
	}
	if c&(anyLetter|punct) == 0 && s[0] != '\r' && s[0] != '\n' {
		if end := t.run(s, n, anyLetter|mark); end > n {
			return end
		}
	}
	if c&(anyLetter|mark) != 0 {
		return t.run(s, 0, anyLetter|mark)
	}
	start := 0
	if s[0] == ' ' {
		start = 1
	}
	if end := t.run(s, start, punct); end > start {
		return breaksAfter(s, end, false)
	}
	if c&space == 0 {
		return 0
	}
	if end := lineBreaks(t, s); end > 0 {
		return end
	}
	return spaces(t, s)
}
