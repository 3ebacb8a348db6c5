package text

import (
	"slices"
	"unicode/utf8"
)

// syncPoint is a place where text can be cut and encoded in two: behind an added token. ids is the number of ids before
// it.
type syncPoint struct{ text, ids int }

// encoded are the ids of the beginning of a text, up to the last sync point.
type encoded struct {
	ids   []int32
	syncs []syncPoint
}

// upTo is what lies before a place in the text.
func (e encoded) upTo(text int) encoded {
	n := len(e.syncs)
	for n > 0 && e.syncs[n-1].text > text {
		n--
	}
	e.syncs = slices.Clip(e.syncs[:n])
	last := 0
	if n > 0 {
		last = e.syncs[n-1].ids
	}
	e.ids = slices.Clip(e.ids[:last])
	return e
}

// lookahead is more bytes than what follows a text can change at its end: an added token that it turns out to be the
// beginning of.
func (t *Tokenizer) lookahead() int { return t.longestAdded + utf8.UTFMax }

// prefixOf gives the ids of s that the text of p begins with.
func (t *Tokenizer) prefixOf(s *Script, p Prompt) encoded {
	if s == nil {
		return encoded{}
	}
	same := commonPrefix(s.prompt.Text, p.Text)
	for i := 0; i < len(s.prompt.plain) || i < len(p.plain); i++ {
		switch {
		case i >= len(s.prompt.plain):
			same = min(same, p.plain[i])
		case i >= len(p.plain):
			same = min(same, s.prompt.plain[i])
		case s.prompt.plain[i] != p.plain[i]:
			same = min(same, s.prompt.plain[i], p.plain[i])
		default:
			continue
		}
		break
	}
	return encoded{s.ids, s.syncs}.upTo(same - t.lookahead())
}

// encodeFrom gives the ids of a rendered chat that begins with these ids, up to the last of the sync points, and all its
// sync points.
func (t *Tokenizer) encodeFrom(p Prompt, ids []int32, syncs []syncPoint) ([]int32, []syncPoint, error) {
	tail, syncs, err := t.encodeTail(p, encoded{ids, syncs})
	return slices.Concat(ids, tail), syncs, err
}

// encodeTail gives the ids of a rendered chat behind those of base, with which it begins, and all its sync points.
func (t *Tokenizer) encodeTail(p Prompt, base encoded) (ids []int32, syncs []syncPoint, err error) {
	from := 0
	if n := len(base.syncs); n > 0 {
		from = base.syncs[n-1].text
	}
	tail := Prompt{Text: p.Text[from:]}
	for _, at := range p.plain {
		if at > from {
			tail.plain = append(tail.plain, at-from)
		}
	}
	syncs = slices.Clip(base.syncs)
	ids, err = t.encodeSegments(make([]int32, 0, len(tail.Text)/3+16), tail, true, func(text int, ids []int32) {
		text += from
		r, _ := utf8.DecodeLastRuneInString(p.Text[:text])
		if t.singleWords && wordRune(r) {
			return // a token that stands alone would not know what it touches
		}
		syncs = append(syncs, syncPoint{text, len(base.ids) + len(ids)})
	})
	return ids, syncs, err
}

// commonPrefix is the number of bytes that two texts begin with alike.
func commonPrefix(a, b string) int {
	n := min(len(a), len(b))
	const step = 256
	i := 0
	for i+step <= n && a[i:i+step] == b[i:i+step] {
		i += step
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}
