package text

import (
	"fmt"
	"strings"
	"time"

	"github.com/dlclark/regexp2/v2"
)

// regexpTimeout bounds the search for one match: a pattern from a file may backtrack without end.
const regexpTimeout = 5 * time.Second

// compileRegexp compiles a pattern in the dialect of Oniguruma, which tokenizer.json files are written in,
// for an engine that has .NET's.
func compileRegexp(expr string) (*regexp2.Regexp, error) {
	translated, err := translateRegexp(expr)
	if err != nil {
		return nil, err
	}
	// In Oniguruma's default syntax ^ and $ are the ends of lines.
	re, err := regexp2.Compile(translated, regexp2.Multiline)
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
	const maxPattern = 64 << 10
	if len(expr) > maxPattern {
		return "", fmt.Errorf("pattern of %d bytes: %w", len(expr), ErrLimit)
	}
	var out strings.Builder
	var groups []int // where in out the open groups begin
	atom := 0        // where in out the last atom begins
	for i := 0; i < len(expr); {
		quantifier := quantifierLen(expr[i:])
		if quantifier > 0 {
			text := expr[i : i+quantifier]
			i += quantifier
			if i >= len(expr) || expr[i] != '+' {
				out.WriteString(text)
				continue
			}
			open := "(?:" // {1,3}+ repeats the repetition
			if len(text) == 1 {
				open = "(?>" // ++ gives nothing back
				i++
			}
			whole := out.String()
			out.Reset()
			out.WriteString(whole[:atom] + open + whole[atom:] + text + ")")
			continue
		}
		start := out.Len()
		switch c := expr[i]; c {
		case '[':
			n, err := translateClass(&out, expr[i:])
			if err != nil {
				return "", err
			}
			i += n
		case '\\':
			n := escapeLen(expr[i:])
			out.WriteString(wordEscape(expr[i : i+n]))
			i += n
		case '(':
			if len(groups) >= maxTemplateNested {
				return "", fmt.Errorf("pattern with groups nested deeper than %d: %w", maxTemplateNested, ErrLimit)
			}
			groups = append(groups, start)
			out.WriteByte(c)
			i++
		case ')':
			if n := len(groups); n > 0 {
				start = groups[n-1]
				groups = groups[:n-1]
			}
			out.WriteByte(c)
			i++
		default:
			out.WriteByte(c)
			i++
			for i < len(expr) && expr[i]&0xc0 == 0x80 { // the rest of a character
				out.WriteByte(expr[i])
				i++
			}
		}
		atom = start
	}
	return out.String(), nil
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
