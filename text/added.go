package text

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// addedToken is a token that is matched as a whole, before pre-tokenization.
type addedToken struct {
	ID         int32  `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"` // only where no word character touches it
	LStrip     bool   `json:"lstrip"`      // takes the white space on its left
	RStrip     bool   `json:"rstrip"`      // and on its right
	Normalized bool   `json:"normalized"`  // matched in normalized text
	Special    bool   `json:"special"`
}

// protected tells the tokens that must not be matched in a client's text: special ones, and those that
// have a control token's shape although their vocabulary does not call them special (DeepSeek's <｜User｜>).
func (a *addedToken) protected() bool {
	return a.Special || controlShaped(a.Content)
}

func controlShaped(s string) bool {
	return strings.HasPrefix(s, "<|") && strings.HasSuffix(s, "|>") && len(s) > 4 ||
		strings.HasPrefix(s, "<｜") && strings.HasSuffix(s, "｜>")
}

// addedSet finds added tokens in text.
type addedSet struct {
	tokens []addedToken
	trie   byteTrie
}

func (s *addedSet) add(pattern string, t addedToken) {
	if pattern == "" {
		return
	}
	s.trie.insert(pattern, int32(len(s.tokens)))
	s.tokens = append(s.tokens, t)
}

// match is an added token found at text[start:end]; token is nil for what lies between matches.
type match struct {
	start, end int
	token      *addedToken
}

// split cuts text at its added tokens: leftmost first, then longest. plain holds ascending offsets that
// no protected token may reach across; parseProtected says whether protected tokens are matched at all.
func (s *addedSet) split(text string, parseProtected bool, plain []int) []match {
	if len(s.tokens) == 0 {
		return []match{{0, len(text), nil}}
	}
	var out []match
	done := 0 // text before this is in out
	for at := s.trie.nextStart(text, 0); at < len(text); at = s.trie.nextStart(text, at) {
		for len(plain) > 0 && plain[0] <= at {
			plain = plain[1:]
		}
		token, end := s.longest(text, at)
		if token == nil {
			at++
			continue
		}
		if token.protected() && !parseProtected {
			at = end
			continue
		}
		if token.protected() && len(plain) > 0 && plain[0] < end {
			at++
			continue
		}
		next := end
		if token.SingleWord && (wordBefore(text[:at]) || wordAfter(text[end:])) {
			at = next
			continue
		}
		start := at
		if token.LStrip {
			start = max(done, len(strings.TrimRightFunc(text[:at], unicode.IsSpace)))
		}
		if token.RStrip {
			end = len(text) - len(strings.TrimLeftFunc(text[end:], unicode.IsSpace))
		}
		if done < start {
			out = append(out, match{done, start, nil})
		}
		out = append(out, match{start, end, token})
		done = end
		at = max(next, end)
	}
	if done < len(text) {
		out = append(out, match{done, len(text), nil})
	}
	return out
}

// longest finds the longest token at text[at:].
func (s *addedSet) longest(text string, at int) (token *addedToken, end int) {
	s.trie.walk(text[at:], func(n int, value int32) {
		token, end = &s.tokens[value], at+n
	})
	return token, end
}

func wordBefore(s string) bool {
	r, n := utf8.DecodeLastRuneInString(s)
	return n > 0 && wordRune(r)
}

func wordAfter(s string) bool {
	r, n := utf8.DecodeRuneInString(s)
	return n > 0 && wordRune(r)
}

// wordRune is a regular expression's \w.
func wordRune(r rune) bool {
	return unicode.In(r, unicode.L, unicode.M, unicode.Nd, unicode.Nl, unicode.Pc, unicode.Other_Alphabetic, unicode.Join_Control)
}

// byteTrie maps strings to numbers and finds those that a text begins with.
type byteTrie struct {
	edges  map[trieEdge]int32
	value  []int32 // by node; -1 where no string ends
	first  [256]bool
	only   byte // the one first byte there is, if single
	firsts int
}

type trieEdge struct {
	node int32
	b    byte
}

// insert adds a string; a later equal one replaces it.
func (t *byteTrie) insert(s string, value int32) {
	if t.edges == nil {
		t.edges = map[trieEdge]int32{}
		t.value = []int32{-1}
	}
	if !t.first[s[0]] {
		t.first[s[0]] = true
		t.only = s[0]
		t.firsts++
	}
	node := int32(0)
	for i := range len(s) {
		e := trieEdge{node, s[i]}
		child, ok := t.edges[e]
		if !ok {
			child = int32(len(t.value))
			t.value = append(t.value, -1)
			t.edges[e] = child
		}
		node = child
	}
	t.value[node] = value
}

// walk calls found for every string that text begins with, shortest first.
func (t *byteTrie) walk(text string, found func(n int, value int32)) {
	node := int32(0)
	for i := range len(text) {
		child, ok := t.edges[trieEdge{node, text[i]}]
		if !ok {
			return
		}
		node = child
		if v := t.value[node]; v >= 0 {
			found(i+1, v)
		}
	}
}

// nextStart is the first position from at on whose byte begins some string, or len(text).
func (t *byteTrie) nextStart(text string, at int) int {
	if t.firsts == 1 && at < len(text) {
		if i := strings.IndexByte(text[at:], t.only); i >= 0 {
			return at + i
		}
		return len(text)
	}
	for at < len(text) && !t.first[text[at]] {
		at++
	}
	return at
}
