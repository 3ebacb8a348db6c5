package route

import "baton/kvcache"

// Expectation is a prefix that an engine is about to hold: a prompt that runs or is imported there.
type Expectation struct {
	engine int
	chain  []kvcache.Digest
	at     int // in its list
}

// expectations bounds how many prompts with the same first block one Match compares.
const expectations = 64

// Expect notes that engine will soon hold the prefix that chain spells, until Settle. The chain must not
// change. The result is nil when there is nothing to expect.
func (x *Index) Expect(engine int, chain []kvcache.Digest) *Expectation {
	if len(chain) == 0 {
		return nil
	}
	list := x.expected[chain[0]]
	e := &Expectation{engine: engine, chain: chain, at: len(list)}
	x.expected[chain[0]] = append(list, e)
	return e
}

// Settle ends an expectation: the engine has reported what became of it, or never will. Nil is settled
// already.
func (x *Index) Settle(e *Expectation) {
	if e == nil {
		return
	}
	first := e.chain[0]
	list := x.expected[first]
	last := len(list) - 1
	list[e.at] = list[last]
	list[e.at].at = e.at
	list[last] = nil
	if last == 0 {
		delete(x.expected, first)
		return
	}
	x.expected[first] = list[:last]
}

// matchExpected raises depths to what the engines are expected to hold.
func (x *Index) matchExpected(chain []kvcache.Digest, depths []int) {
	list := x.expected[chain[0]]
	for _, e := range list[max(0, len(list)-expectations):] {
		if e.engine < len(depths) && depths[e.engine] < len(chain) {
			depths[e.engine] = max(depths[e.engine], common(chain, e.chain))
		}
	}
}

// common is the length of the part that two chains begin with. A digest stands for all before it.
func common(a, b []kvcache.Digest) int {
	low, high := 0, min(len(a), len(b))
	for low < high {
		mid := int(uint(low+high+1) / 2)
		if a[mid-1] == b[mid-1] {
			low = mid
		} else {
			high = mid - 1
		}
	}
	return low
}
