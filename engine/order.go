package engine

import (
	"cmp"
	"slices"
)

// order is the order in which waiting requests begin: as they came, or, with Overtake, those with least to compute first,
// what is cached of their prompts taken into account. A cache that is too small for all who come by turns would otherwise
// lose everybody's prefix before it is wanted again. Nobody is overtaken more than Overtake times, nor are those that have
// begun before.
func (s *Scheduler) order() []*request {
	if s.config.Overtake <= 0 || len(s.waiting) < 2 {
		return s.waiting
	}
	left := make(map[*request]int, len(s.waiting)) // tokens to compute; 0 for those whose turn it is
	for _, r := range s.waiting {
		if !r.started.IsZero() || r.overtaken >= s.config.Overtake {
			continue
		}
		left[r] = len(r.tokens)
		if !r.wantsPrompt() {
			left[r] -= s.pool.Held(r.version, r.digests) * s.config.BlockSize
		}
		left[r] = max(left[r], 1)
	}
	order := slices.Clone(s.waiting)
	slices.SortStableFunc(order, func(a, b *request) int { return cmp.Compare(left[a], left[b]) })
	return order
}

// overtook notes that requests have begun of which each may have been behind others. waiting is what was there before, in
// order of arrival.
func (s *Scheduler) overtook(waiting []*request) {
	last := -1 // position of the last one that began
	for i, r := range waiting {
		if r.table != nil {
			last = i
		}
	}
	began := 0
	for i := last; i >= 0; i-- {
		if r := waiting[i]; r.table != nil {
			began++
		} else {
			r.overtaken += began
		}
	}
}
