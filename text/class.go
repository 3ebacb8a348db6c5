package text

import (
	"sync"
	"unicode"
	"unicode/utf8"
)

// class is a set of the character properties that word patterns speak of.
type class uint8

const (
	upper  class = 1 << iota // Lu, Lt
	lower                    // Ll
	letter                   // Lm, Lo: neither upper nor lower
	mark                     // M
	number                   // N
	space                    // White_Space
	punct                    // P, S

	anyLetter = upper | lower | letter
)

const classBlock = 256

// classTable is in two stages: blocks of 256 characters, equal ones stored once.
type classTable struct {
	index  [(utf8.MaxRune + 1) / classBlock]uint16
	blocks [][classBlock]class
}

var classes = sync.OnceValue(func() *classTable {
	all := make([]class, utf8.MaxRune+1)
	for _, c := range []struct {
		class  class
		tables []*unicode.RangeTable
	}{
		{upper, []*unicode.RangeTable{unicode.Lu, unicode.Lt}},
		{lower, []*unicode.RangeTable{unicode.Ll}},
		{letter, []*unicode.RangeTable{unicode.Lm, unicode.Lo}},
		{mark, []*unicode.RangeTable{unicode.M}},
		{number, []*unicode.RangeTable{unicode.N}},
		{space, []*unicode.RangeTable{unicode.White_Space}},
		{punct, []*unicode.RangeTable{unicode.P, unicode.S}},
	} {
		for _, t := range c.tables {
			for _, r := range t.R16 {
				for x := rune(r.Lo); x <= rune(r.Hi); x += rune(r.Stride) {
					all[x] |= c.class
				}
			}
			for _, r := range t.R32 {
				for x := rune(r.Lo); x <= rune(r.Hi); x += rune(r.Stride) {
					all[x] |= c.class
				}
			}
		}
	}
	t := &classTable{}
	seen := map[[classBlock]class]uint16{}
	for i := range t.index {
		block := [classBlock]class(all[i*classBlock:])
		n, ok := seen[block]
		if !ok {
			n = uint16(len(t.blocks))
			seen[block] = n
			t.blocks = append(t.blocks, block)
		}
		t.index[i] = n
	}
	return t
})

func (t *classTable) of(r rune) class {
	return t.blocks[t.index[uint32(r)/classBlock]][uint32(r)%classBlock]
}

// at is the class and length of the character at s[i]; 0, 0 at the end.
func (t *classTable) at(s string, i int) (class, int) {
	if i >= len(s) {
		return 0, 0
	}
	if b := s[i]; b < utf8.RuneSelf {
		return t.blocks[0][b], 1
	}
	r, n := utf8.DecodeRuneInString(s[i:])
	return t.of(r), n
}

// run is the end of the characters from s[i] on that have one of the classes.
func (t *classTable) run(s string, i int, in class) int {
	for {
		c, n := t.at(s, i)
		if n == 0 || c&in == 0 {
			return i
		}
		i += n
	}
}

// runOut is the end of the characters from s[i] on that have none of the classes.
func (t *classTable) runOut(s string, i int, out class) int {
	for {
		c, n := t.at(s, i)
		if n == 0 || c&out != 0 {
			return i
		}
		i += n
	}
}
