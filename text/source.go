package text

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
)

const (
	maxTemplateSource = 256 << 10
	maxTemplateNested = 256 // brackets within one tag, and block tags within each other

	guardName = "__guard"
	guardTag  = "{%+ set __tick = " + guardName + "() +%}"
	depthTag  = "{%+ set __tick = " + guardName + "(true) +%}" // where a template can call itself
)

// prepareSource rewrites a template so that the library renders it as Python's jinja2 would with
// transformers' settings (trim_blocks, lstrip_blocks): white space around tags is settled here, by
// jinja2's rules, and the tags that come out say that nothing more is to be stripped. Each loop and macro
// gets a call of the guard, which bounds what a template can do.
func prepareSource(source string) (string, error) {
	if len(source) > maxTemplateSource {
		return "", fmt.Errorf("larger than %d KiB: %w", maxTemplateSource>>10, ErrLimit)
	}
	source = strings.ReplaceAll(source, "\r\n", "\n")
	source = strings.ReplaceAll(source, "\r", "\n")
	source = strings.TrimSuffix(source, "\n")
	p := preparer{source: source, lineStart: true}
	for p.at < len(source) {
		if err := p.step(); err != nil {
			return "", err
		}
	}
	return p.out.String(), nil
}

type preparer struct {
	source    string
	at        int
	out       strings.Builder
	lineStart bool // what came before ended with a line break
	nested    int
}

// step copies the text up to the next tag, and the tag.
func (p *preparer) step() error {
	rest := p.source[p.at:]
	open := strings.IndexByte(rest, '{')
	for open >= 0 && (open+1 == len(rest) || !strings.ContainsRune("{%#", rune(rest[open+1]))) {
		next := strings.IndexByte(rest[open+1:], '{')
		if next < 0 {
			open = -1
			break
		}
		open += 1 + next
	}
	if open < 0 {
		p.text(rest)
		p.at = len(p.source)
		return nil
	}
	text, kind := rest[:open], rest[open+1]
	p.at += open + 2
	sign := byte(0)
	if p.at < len(p.source) && (p.source[p.at] == '-' || p.source[p.at] == '+' && kind != '{') {
		sign = p.source[p.at]
		p.at++
	}
	p.text(stripBefore(text, sign, kind, p.lineStart))
	start := p.at
	end, err := p.closer(kind)
	if err != nil {
		return err
	}
	body := p.source[start:end]
	if kind == '%' && strings.TrimSpace(body) == "raw" {
		p.after('{', end) // unlike other tags, raw leaves the line break after it
		return p.raw()
	}
	p.after(kind, end)
	return p.tag(kind, body)
}

// stripBefore removes the white space before a tag that the tag's sign, or lstrip_blocks, removes.
func stripBefore(text string, sign, kind byte, lineStart bool) string {
	switch {
	case sign == '-':
		return strings.TrimRightFunc(text, unicode.IsSpace)
	case sign == '+' || kind == '{':
		return text
	}
	line := strings.LastIndexByte(text, '\n') + 1
	if (line > 0 || lineStart) && strings.TrimSpace(text[line:]) == "" {
		return text[:line]
	}
	return text
}

// closer finds the end of the tag's body, and leaves at on the sign or bracket that ends it.
func (p *preparer) closer(kind byte) (end int, err error) {
	last := map[byte]byte{'{': '}', '%': '%', '#': '#'}[kind]
	depth := 0
	for i := p.at; i+1 < len(p.source); i++ {
		c := p.source[i]
		switch {
		case depth == 0 && c == last && p.source[i+1] == '}':
			end = i
			if i > p.at && (p.source[i-1] == '-' || p.source[i-1] == '+' && kind != '{') {
				end--
			}
			p.at = end
			return end, nil
		case kind == '#':
		case c == '\'' || c == '"':
			if i = skipString(p.source, i); i < 0 {
				return 0, p.unclosed(kind)
			}
		case c == '(' || c == '[' || c == '{':
			if depth++; depth > maxTemplateNested {
				return 0, fmt.Errorf("brackets nested deeper than %d: %w", maxTemplateNested, ErrLimit)
			}
		case c == ')' || c == ']' || c == '}':
			depth--
		}
	}
	return 0, p.unclosed(kind)
}

func (p *preparer) unclosed(kind byte) error {
	return fmt.Errorf("line %d: tag {%c is not closed", 1+strings.Count(p.source[:p.at], "\n"), kind)
}

// skipString gives the position of the quote that ends the string that begins at i, or -1.
func skipString(s string, i int) int {
	quote := s[i]
	for i++; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case quote:
			return i
		}
	}
	return -1
}

// after passes the end of a tag and the white space that its sign, or trim_blocks, removes.
func (p *preparer) after(kind byte, end int) {
	p.at = end
	sign := p.source[p.at]
	if sign == '-' || sign == '+' {
		p.at++
	}
	p.at += 2
	rest := p.source[p.at:]
	switch {
	case sign == '-':
		p.at = len(p.source) - len(strings.TrimLeftFunc(rest, unicode.IsSpace))
	case sign != '+' && kind != '{' && strings.HasPrefix(rest, "\n"):
		p.at++
	}
	p.lineStart = p.source[p.at-1] == '\n'
}

// text writes literal text. A bracket at its end must not join what follows.
func (p *preparer) text(s string) {
	if cut, ok := strings.CutSuffix(s, "{"); ok {
		p.out.WriteString(cut + `{{ "{" }}`)
		return
	}
	p.out.WriteString(s)
}

// raw copies what lies between a raw tag and its end.
func (p *preparer) raw() error {
	start := p.at
	for at := start; ; {
		i := strings.Index(p.source[at:], "{%")
		if i < 0 {
			return errors.New("a raw block is not closed")
		}
		open := at + i
		at = open + 2
		p.at = at
		sign := byte(0)
		if p.at < len(p.source) && (p.source[p.at] == '-' || p.source[p.at] == '+') {
			sign = p.source[p.at]
			p.at++
		}
		bodyStart := p.at
		end, err := p.closer('%')
		if err != nil || strings.TrimSpace(p.source[bodyStart:end]) != "endraw" {
			continue
		}
		text := stripBefore(p.source[start:open], sign, '%', p.lineStart)
		if text != "" {
			p.out.WriteString("{%+ raw +%}" + text + "{%+ endraw +%}")
		}
		p.after('%', end)
		return nil
	}
}

// tag writes a tag that strips nothing.
func (p *preparer) tag(kind byte, body string) error {
	switch kind {
	case '#':
		return nil
	case '{':
		p.out.WriteString("{{ " + body + " }}")
		return nil
	}
	p.out.WriteString("{%+ " + body + " +%}")
	word, _, _ := strings.Cut(strings.TrimSpace(body), " ")
	switch {
	case word == "macro" || word == "for" && strings.Contains(body, "recursive"):
		p.out.WriteString(depthTag)
		p.nested++
	case word == "for":
		p.out.WriteString(guardTag)
		p.nested++
	case word == "if" || word == "call" || word == "filter" || word == "generation" || word == "block":
		p.nested++
	case strings.HasPrefix(word, "end"):
		p.nested--
	}
	if p.nested > maxTemplateNested {
		return fmt.Errorf("blocks nested deeper than %d: %w", maxTemplateNested, ErrLimit)
	}
	return nil
}
