package engine

import (
	"errors"
	"slices"
	"time"

	"baton/kvcache"
	"baton/wire"
)

// reserve is for how many tokens blocks are set aside when a request of so many begins; 0 is all that it
// can ever need.
func (c SchedulerConfig) reserve(tokens int) int {
	if c.Continuation == 0 {
		return 0
	}
	return tokens + c.Continuation*c.BlockSize
}

// Starved reports whether the running request that began first lacks blocks: then nothing that began
// later may keep them from it. Others that lack some only wait.
func (s *Scheduler) Starved() bool {
	if s.paused || len(s.running) == 0 {
		return false
	}
	r := s.running[0]
	return r.table.Shortage(len(r.tokens)) > s.pool.Stats().Available()
}

// grow makes room for one more token of each running request and returns those that have it. Each lacks
// one block at most, so those that began first get theirs first. What the others lack is withheld from
// imports and new requests.
func (s *Scheduler) grow() []*request {
	fit := make([]*request, 0, len(s.running))
	for _, r := range s.running {
		if !errors.Is(r.table.EnsureTokens(len(r.tokens)), kvcache.ErrNoCapacity) {
			fit = append(fit, r)
		}
	}
	s.short = len(s.running) - len(fit)
	s.pool.Withhold(s.short)
	return fit
}

// evict closes the fewest requests, the last to begin first, that lets all others go on. The first stays:
// if it cannot go on even alone, what it lacks is held outside, by exports or imports, and comes back.
func (s *Scheduler) evict(now time.Time, out *Outcome) {
	began := slices.Concat(s.running, s.prompts)
	wants := make([]kvcache.Want, len(began))
	for i, r := range began {
		wants[i] = kvcache.Want{Table: r.table, Tokens: len(r.tokens)} // a prompt has its room
	}
	victims := began[max(s.pool.Fit(wants), 1):]
	s.evicted += uint64(len(victims))
	for _, r := range victims {
		r.stats.Evictions++
		if s.config.Return {
			out.Final = append(out.Final, s.finish(now, r, wire.FinishEvicted))
		} else {
			s.suspend(r)
		}
	}
	if !s.config.Return {
		s.waiting = slices.Concat(victims, s.waiting) // they began before all that wait
	}
}

// suspend takes a request back to where it waits, with the tokens that it has.
func (s *Scheduler) suspend(r *request) {
	r.table.Close()
	r.table, r.computed, r.decoding = nil, 0, false
	r.digests = kvcache.Chain(r.root, s.config.BlockSize, r.tokens)
	if r.wantsPrompt() {
		r.promptLogprobs, r.promptTop = nil, nil
	}
	gone := func(x *request) bool { return x != r }
	s.prompts, s.running = keep(s.prompts, gone), keep(s.running, gone)
}
