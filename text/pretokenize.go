package text

import (
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"unicode/utf8"
)

// splitter cuts a piece of text into smaller ones, none empty, and gives them to next in order. It may
// change them (a prefix space).
type splitter interface {
	split(piece string, next func(string) error) error
}

// splitAll runs a piece through a chain of splitters.
func splitAll(steps []splitter, piece string, next func(string) error) error {
	if len(steps) == 0 {
		return next(piece)
	}
	if len(steps) == 1 {
		return steps[0].split(piece, next)
	}
	return steps[0].split(piece, func(s string) error { return splitAll(steps[1:], s, next) })
}

// scanSplit splits with a hand-written scanner.
type scanSplit struct {
	scan    scanner
	classes *classTable
}

func (p scanSplit) split(s string, next func(string) error) error {
	for s != "" {
		n := p.scan(p.classes, s)
		if err := next(s[:n]); err != nil {
			return err
		}
		s = s[n:]
	}
	return nil
}

// digitSplit sets numbers apart, each character by itself or a run at a time.
type digitSplit struct {
	each    bool
	classes *classTable
}

func (p digitSplit) split(s string, next func(string) error) error {
	for s != "" {
		c, n := p.classes.at(s, 0)
		switch {
		case c&number == 0:
			n = p.classes.runOut(s, 0, number)
		case !p.each:
			n = p.classes.run(s, 0, number)
		}
		if err := next(s[:n]); err != nil {
			return err
		}
		s = s[n:]
	}
	return nil
}

// prefixSpace puts a space before a piece that does not begin with one.
type prefixSpace struct{}

func (prefixSpace) split(s string, next func(string) error) error {
	if s[0] != ' ' {
		s = " " + s
	}
	return next(s)
}

// What becomes of the matches of a Split pattern.
const (
	isolated       = "Isolated"
	removed        = "Removed"
	mergedPrevious = "MergedWithPrevious"
	mergedNext     = "MergedWithNext"
	contiguous     = "Contiguous"
)

// patternSplit splits at the matches of a pattern.
type patternSplit struct {
	find     func(s string) ([][]int, error) // byte ranges of the matches
	behavior string
	invert   bool // what lies between matches counts as match, and the other way round
}

func (p patternSplit) split(s string, next func(string) error) error {
	found, err := p.find(s)
	if err != nil {
		return err
	}
	ranges := make([]matchRange, 0, 2*len(found)+1)
	add := func(start, end int, matched bool) {
		if start < end {
			ranges = append(ranges, matchRange{start, end, matched != p.invert})
		}
	}
	done := 0
	for _, m := range found {
		add(done, m[0], false)
		add(m[0], m[1], true)
		done = m[1]
	}
	add(done, len(s), false)
	for _, r := range applyBehavior(ranges, p.behavior) {
		if err := next(s[r.start:r.end]); err != nil {
			return err
		}
	}
	return nil
}

type matchRange struct {
	start, end int
	matched    bool
}

func applyBehavior(ranges []matchRange, behavior string) []matchRange {
	if behavior == isolated {
		return ranges
	}
	var out []matchRange
	for i, r := range ranges {
		previous := len(out) - 1
		switch {
		case behavior == removed && r.matched:
		case previous >= 0 && (behavior == contiguous && ranges[i-1].matched == r.matched ||
			behavior == mergedPrevious && r.matched && !ranges[i-1].matched ||
			behavior == mergedNext && !r.matched && ranges[i-1].matched):
			out[previous].end = r.end
		default:
			out = append(out, r)
		}
	}
	return out
}

// pattern is a tokenizer.json pattern: a literal or a regular expression.
type pattern struct {
	String string `json:"String"`
	Regex  string `json:"Regex"`
}

// newSplit makes the step for one pattern and what to do with its matches.
func newSplit(p pattern, behavior string, invert bool) (splitter, error) {
	switch behavior {
	case isolated, removed, mergedPrevious, mergedNext, contiguous:
	default:
		return nil, &UnsupportedError{Part: "split behavior", Name: behavior}
	}
	if scan, ok := scanners[p.Regex]; ok && behavior == isolated && !invert {
		return scanSplit{scan, classes()}, nil
	}
	if p.Regex == "" {
		if p.String == "" {
			return nil, errors.New("a Split without a pattern")
		}
		return patternSplit{literalFinder(p.String), behavior, invert}, nil
	}
	re, err := compileRegexp(p.Regex)
	if err != nil {
		return nil, err
	}
	find := func(s string) ([][]int, error) { return re.FindAllStringIndex(s, -1) }
	return patternSplit{find, behavior, invert}, nil
}

func literalFinder(literal string) func(string) ([][]int, error) {
	return func(s string) (found [][]int, err error) {
		for i := 0; i+len(literal) <= len(s); {
			if s[i:i+len(literal)] == literal {
				found = append(found, []int{i, i + len(literal)})
				i += len(literal)
				continue
			}
			_, n := utf8.DecodeRuneInString(s[i:])
			i += n
		}
		return found, nil
	}
}

// preTokenizer is a tokenizer.json pre-tokenizer.
type preTokenizer struct {
	Type             string           `json:"type"`
	PreTokenizers    []jsontext.Value `json:"pretokenizers"`
	Pattern          pattern          `json:"pattern"`
	Behavior         string           `json:"behavior"`
	Invert           bool             `json:"invert"`
	IndividualDigits bool             `json:"individual_digits"`
	AddPrefixSpace   bool             `json:"add_prefix_space"`
	UseRegex         *bool            `json:"use_regex"`
}

// parsePreTokenizer reads a tokenizer.json pre-tokenizer, which may be null; byteLevel says whether one
// of its steps turns text into the byte alphabet, which then is the last.
func parsePreTokenizer(raw jsontext.Value, depth int) (steps []splitter, byteLevel bool, err error) {
	if isNull(raw) {
		return nil, false, nil
	}
	var p preTokenizer
	if err := unmarshal(raw, &p); err != nil {
		return nil, false, err
	}
	switch p.Type {
	case "Sequence":
		return parseSequence(p.PreTokenizers, depth)
	case "ByteLevel":
		if p.AddPrefixSpace {
			steps = append(steps, prefixSpace{})
		}
		if p.UseRegex == nil || *p.UseRegex {
			steps = append(steps, scanSplit{scanGPT2, classes()})
		}
		return steps, true, nil
	case "Digits":
		return []splitter{digitSplit{p.IndividualDigits, classes()}}, false, nil
	case "Split":
		s, err := newSplit(p.Pattern, p.Behavior, p.Invert)
		return []splitter{s}, false, err
	}
	return nil, false, &UnsupportedError{Part: "pre-tokenizer", Name: p.Type}
}

func parseSequence(list []jsontext.Value, depth int) (steps []splitter, byteLevel bool, err error) {
	if depth >= maxNested || len(list) > maxSteps {
		return nil, false, fmt.Errorf("more than %d steps or %d levels: %w", maxSteps, maxNested, ErrLimit)
	}
	for i, raw := range list {
		some, bytes, err := parsePreTokenizer(raw, depth+1)
		if err != nil {
			return nil, false, fmt.Errorf("pretokenizers[%d]: %w", i, err)
		}
		if byteLevel {
			return nil, false, fmt.Errorf("pretokenizers[%d]: %w", i,
				&UnsupportedError{Part: "pre-tokenizer order", Name: "a step after ByteLevel"})
		}
		steps = append(steps, some...)
		byteLevel = byteLevel || bytes
	}
	return steps, byteLevel, nil
}
