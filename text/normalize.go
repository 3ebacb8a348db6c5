package text

import (
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/dlclark/regexp2/v2"
	"golang.org/x/text/unicode/norm"
)

// normalizer rewrites text before it is split.
type normalizer func(string) (string, error)

func simple(f func(string) string) normalizer {
	return func(s string) (string, error) { return f(s), nil }
}

// normalizeForm is Unicode normalization. The library keeps its output "stream safe" by putting U+034F into
// runs of more than 30 combining marks; tokenizers do not, so such text is composed here.
func normalizeForm(f norm.Form) func(string) string {
	return func(s string) string {
		if isASCII(s) {
			return s
		}
		out := f.String(s)
		if strings.Count(out, "\u034f") == strings.Count(s, "\u034f") {
			return out
		}
		return normalizeLongRuns(f, s)
	}
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// normalizeLongRuns is the algorithm of UAX #15: decompose, order, compose.
func normalizeLongRuns(f norm.Form, s string) string {
	base := norm.NFD
	if f == norm.NFKC || f == norm.NFKD {
		base = norm.NFKD
	}
	var runes []rune
	var buf [utf8.UTFMax]byte
	for _, r := range s {
		char := buf[:utf8.EncodeRune(buf[:], r)]
		runes = append(runes, []rune(base.String(string(char)))...)
	}
	class := func(r rune) uint8 { return norm.NFD.PropertiesString(string(r)).CCC() }
	for i := 0; i < len(runes); {
		j := i + 1
		if class(runes[i]) != 0 {
			for j < len(runes) && class(runes[j]) != 0 {
				j++
			}
			slices.SortStableFunc(runes[i:j], func(a, b rune) int { return int(class(a)) - int(class(b)) })
		}
		i = j
	}
	if f == norm.NFC || f == norm.NFKC {
		runes = compose(runes, class)
	}
	return string(runes)
}

func compose(runes []rune, class func(rune) uint8) []rune {
	starter, last := -1, 0 // last combining class after the starter; 256 after another starter
	out := runes[:0]
	for _, r := range runes {
		c := int(class(r))
		if starter >= 0 && (last < c || last == 0 && len(out) == starter+1) {
			if pair, ok := composePair(out[starter], r); ok {
				out[starter] = pair
				continue
			}
		}
		if c == 0 {
			starter, last = len(out), 0
		} else {
			last = c
		}
		out = append(out, r)
	}
	return out
}

func composePair(a, b rune) (rune, bool) {
	s := norm.NFC.String(string([]rune{a, b}))
	r, n := utf8.DecodeRuneInString(s)
	return r, n == len(s)
}

const (
	maxSteps  = 64 // of a normalizer or pre-tokenizer sequence
	maxNested = 8
)

// parseNormalizer reads a tokenizer.json normalizer, which may be null (nil).
func parseNormalizer(raw jsontext.Value, depth int) ([]normalizer, error) {
	if isNull(raw) {
		return nil, nil
	}
	var n struct {
		Type        string           `json:"type"`
		Normalizers []jsontext.Value `json:"normalizers"`
		Prepend     string           `json:"prepend"`
		Pattern     pattern          `json:"pattern"`
		Content     string           `json:"content"`
		StripLeft   bool             `json:"strip_left"`
		StripRight  bool             `json:"strip_right"`
	}
	if err := unmarshal(raw, &n); err != nil {
		return nil, err
	}
	switch n.Type {
	case "Sequence":
		if depth >= maxNested || len(n.Normalizers) > maxSteps {
			return nil, fmt.Errorf("more than %d steps or %d levels: %w", maxSteps, maxNested, ErrLimit)
		}
		var all []normalizer
		for i, raw := range n.Normalizers {
			some, err := parseNormalizer(raw, depth+1)
			if err != nil {
				return nil, fmt.Errorf("normalizers[%d]: %w", i, err)
			}
			all = append(all, some...)
		}
		return all, nil
	case "NFC":
		return []normalizer{simple(normalizeForm(norm.NFC))}, nil
	case "NFD":
		return []normalizer{simple(normalizeForm(norm.NFD))}, nil
	case "NFKC":
		return []normalizer{simple(normalizeForm(norm.NFKC))}, nil
	case "NFKD":
		return []normalizer{simple(normalizeForm(norm.NFKD))}, nil
	case "Prepend":
		return []normalizer{simple(func(s string) string {
			if s == "" {
				return s
			}
			return n.Prepend + s
		})}, nil
	case "Replace":
		return replacer(n.Pattern, n.Content)
	}
	return nil, &UnsupportedError{Part: "normalizer", Name: n.Type}
}

func replacer(p pattern, content string) ([]normalizer, error) {
	if p.Regex == "" {
		if p.String == "" {
			return nil, errors.New("a Replace without a pattern")
		}
		return []normalizer{simple(func(s string) string { return strings.ReplaceAll(s, p.String, content) })}, nil
	}
	re, err := compileRegexp(p.Regex)
	if err != nil {
		return nil, err
	}
	return []normalizer{func(s string) (string, error) {
		return re.ReplaceFunc(s, func(regexp2.Match) string { return content }, -1, -1)
	}}, nil
}

func isNull(raw jsontext.Value) bool { return len(raw) == 0 || raw.Kind() == 'n' }
