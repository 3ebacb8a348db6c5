package text

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Marks are one character of the last private-use plane that nothing else in the chat contains.
const (
	lastMark  = 0x10fffd
	firstMark = 0x100000
)

// marker puts marks into a client's strings. See the package comment.
type marker struct {
	protected *byteTrie
	mark      string
	clash     map[rune]bool // characters of the marks' plane met in the strings
}

// text marks one string.
func (m *marker) text(s string) string {
	for i := 0; i < len(s); i++ {
		if s[i] == 0xf4 { // how the marks' plane begins in UTF-8
			if r, _ := utf8.DecodeRuneInString(s[i:]); r >= firstMark {
				m.clash[r] = true
			}
		}
	}
	trie := m.protected
	if trie == nil || trie.firsts == 0 {
		return s
	}
	trimmed := len(strings.TrimRightFunc(s, unicode.IsSpace))
	var out strings.Builder
	done := 0
	for at := trie.nextStart(s, 0); at < len(s); at = trie.nextStart(s, at+1) {
		if !trie.looksAlike(s[at:], trimmed-at) {
			continue
		}
		_, n := utf8.DecodeRuneInString(s[at:])
		out.WriteString(s[done : at+n])
		out.WriteString(m.mark)
		done = at + n
	}
	if done == 0 {
		return s
	}
	out.WriteString(s[done:])
	return out.String()
}

// again marks a string that was decoded from marked JSON.
func (m *marker) again(s string) string {
	return m.text(strings.ReplaceAll(s, m.mark, ""))
}

// looksAlike tells whether text begins with one of the strings, or whether all of its first n bytes (the
// text without the white space at its end) or the whole text is the beginning of one.
func (t *byteTrie) looksAlike(text string, n int) bool {
	node := int32(0)
	for i := range len(text) {
		if i == n && i > 0 {
			return true
		}
		child, ok := t.edges[trieEdge{node, text[i]}]
		if !ok {
			return false
		}
		if node = child; t.value[node] >= 0 {
			return true
		}
	}
	return true
}

// unmark takes the marks out of a rendered text and remembers where they were.
func unmark(s, mark string) Prompt {
	var p Prompt
	var out strings.Builder
	for {
		i := strings.Index(s, mark)
		if i < 0 {
			break
		}
		out.WriteString(s[:i])
		if n := len(p.plain); n == 0 || p.plain[n-1] != out.Len() {
			p.plain = append(p.plain, out.Len())
		}
		s = s[i+len(mark):]
	}
	if out.Len() == 0 && len(p.plain) == 0 {
		p.Text = s
		return p
	}
	out.WriteString(s)
	p.Text = out.String()
	return p
}

// newMark picks a mark that is not among the characters in use.
func newMark(used ...map[rune]bool) (string, error) {
next:
	for r := rune(lastMark); r >= firstMark; r-- {
		for _, set := range used {
			if set[r] {
				continue next
			}
		}
		return string(r), nil
	}
	return "", fmt.Errorf("the chat uses every character of plane 16: %w", ErrLimit)
}
