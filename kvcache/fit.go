package kvcache

// Want is a table and the number of tokens that it needs room for next.
type Want struct {
	Table  *Table
	Tokens int
}

// Fit tells who can go on when the pool is used up: it returns the largest n for which the first n of the
// tables would all get what they want if the others were closed. A block counts as won only when nobody
// but those others holds it. The tables are open and distinct; put the ones that must go on first. 0
// means that closing all but the first would not be enough for it: what it lacks, others hold.
func (p *Pool) Fit(wants []Want) int {
	need, have := 0, p.available()
	for _, w := range wants {
		need += w.Table.Shortage(w.Tokens)
	}
	held := map[int32]int32{} // by the tables that would be closed
	won := func(id int32) {
		if held[id]++; held[id] == p.blocks[id].refs {
			have++
		}
	}
	n := len(wants)
	for ; n > 0 && need > have; n-- {
		t := wants[n-1].Table
		need -= t.Shortage(wants[n-1].Tokens)
		have += t.promised()
		for _, id := range t.blocks {
			won(id)
		}
		for _, w := range t.twins {
			won(w.id)
		}
	}
	return n
}
