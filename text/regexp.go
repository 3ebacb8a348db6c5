package text

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/dlclark/regexp2/v2"
)

// regexpTimeout bounds the search for one match: a pattern from a file may backtrack without end.
const regexpTimeout = 5 * time.Second

// regexpStack is how many positions (of 8 bytes) the search for one match may remember: a repeated group
// takes a few for each character of a long run.
const regexpStack = 8 << 20

// compileRegexp compiles a pattern in the dialect of Oniguruma, which tokenizer.json files are written in,
// for an engine that has .NET's.
func compileRegexp(expr string) (*regexp2.Regexp, error) {
	translated, err := translateRegexp(expr)
	if err != nil {
		return nil, err
	}
	// In Oniguruma's default syntax ^ and $ are the ends of lines.
	re, err := regexp2.Compile(translated, regexp2.Multiline, regexp2.OptionMaxBacktrackingStackSize(regexpStack))
	if err != nil {
		return nil, fmt.Errorf("pattern %q: %w", expr, err)
	}
	re.MatchTimeout = regexpTimeout
	return re, nil
}

// wordClass is \w: .NET's also has joiners, and lacks enclosing marks and fractions.
const wordClass = `\p{L}\p{M}\p{N}\p{Pc}`

// translateRegexp spells out word classes and rewrites the quantifiers that end in +, which .NET does not have.
func translateRegexp(expr string) (string, error) {
	const maxPattern, maxPatternNested = 64 << 10, 100
	if len(expr) > maxPattern {
		return "", fmt.Errorf("pattern of %d bytes: %w", len(expr), ErrLimit)
	}
	var out strings.Builder
	var groups []int // where in out the open groups begin
	atom := 0        // where in out the last atom begins
	for i := 0; i < len(expr); {
		if n := quantifierLen(expr[i:]); n > 0 {
			i += n
			if writeQuantifier(&out, atom, expr[i-n:i], expr[i:]) {
				i++
			}
			continue
		}
		atom = out.Len()
		switch c := expr[i]; c {
		case '[':
			n, err := translateClass(&out, expr[i:])
			if err != nil {
				return "", err
			}
			i += n
			continue
		case '\\':
			n := escapeLen(expr[i:])
			out.WriteString(wordEscape(expr[i : i+n]))
			i += n
			continue
		case '(':
			if len(groups) >= maxPatternNested {
				return "", fmt.Errorf("pattern with groups nested deeper than %d: %w", maxPatternNested, ErrLimit)
			}
			groups = append(groups, atom)
		case ')':
			if n := len(groups); n > 0 {
				atom, groups = groups[n-1], groups[:n-1]
			}
		}
		_, n := utf8.DecodeRuneInString(expr[i:])
		out.WriteString(expr[i : i+n])
		i += n
	}
	return out.String(), nil
}

// writeQuantifier writes a quantifier of the atom that begins at out[atom:], and tells whether it took the
// plus that comes after it.
func writeQuantifier(out *strings.Builder, atom int, quantifier, after string) bool {
	if !strings.HasPrefix(after, "+") {
		out.WriteString(quantifier)
		return false
	}
	open := "(?:" // {1,3}+ repeats the repetition
	possessive := len(quantifier) == 1
	if possessive {
		open = "(?>" // ++ gives nothing back
	}
	whole := out.String()
	out.Reset()
	out.WriteString(whole[:atom] + open + whole[atom:] + quantifier + ")")
	return possessive
}

// quantifierLen measures a quantifier at the start of s, or gives 0.
func quantifierLen(s string) int {
	switch s[0] {
	case '*', '+', '?':
		return 1
	case '{':
		end := strings.IndexByte(s, '}')
		if end > 1 && strings.Trim(s[1:end], "0123456789,") == "" {
			return end + 1
		}
	}
	return 0
}

// escapeLen measures an escape such as \n or \p{Lu}.
func escapeLen(s string) int {
	if len(s) < 2 {
		return len(s)
	}
	if (s[1] == 'p' || s[1] == 'P') && len(s) > 2 && s[2] == '{' {
		if end := strings.IndexByte(s, '}'); end > 0 {
			return end + 1
		}
	}
	return 2
}

func wordEscape(escape string) string {
	switch escape {
	case `\w`:
		return "[" + wordClass + "]"
	case `\W`:
		return "[^" + wordClass + "]"
	case `\b`:
		return "(?:(?<=[" + wordClass + "])(?![" + wordClass + "])|(?<![" + wordClass + "])(?=[" + wordClass + "]))"
	case `\B`:
		return "(?:(?<=[" + wordClass + "])(?=[" + wordClass + "])|(?<![" + wordClass + "])(?![" + wordClass + "]))"
	}
	return escape
}

// translateClass copies a bracketed class.
func translateClass(out *strings.Builder, s string) (n int, err error) {
	i := 1
	if i < len(s) && s[i] == '^' {
		i++
	}
	if i < len(s) && s[i] == ']' {
		i++
	}
	out.WriteString(s[:i])
	for i < len(s) {
		switch s[i] {
		case ']':
			out.WriteByte(']')
			return i + 1, nil
		case '[', '&':
			if s[i] == '[' || strings.HasPrefix(s[i:], "&&") {
				return 0, &UnsupportedError{Part: "pattern", Name: s, Hint: "a class within a class"}
			}
			out.WriteByte('&')
			i++
		case '\\':
			n := escapeLen(s[i:])
			switch escape := s[i : i+n]; escape {
			case `\w`:
				out.WriteString(wordClass)
			case `\W`:
				return 0, &UnsupportedError{Part: "pattern", Name: s, Hint: `\W within a class`}
			default:
				out.WriteString(escape)
			}
			i += n
		default:
			out.WriteByte(s[i])
			i++
		}
	}
	return 0, fmt.Errorf("pattern %q: a class is not closed", clip(s))
}
