package route

// Residency weighs what workers are known to hold of a prompt against their load, as Prefix does. Of a worker that does
// not report, it is what was sent there. Requests whose token ids are not known are routed as Conversation does.
type Residency struct {
	*Conversation
	held *Index
	turn int
}

// residencyCapacity is the number of requests at which a worker counts as full.
const residencyCapacity = 64

// NewResidency makes one that looks at held, which the caller keeps up to date.
func NewResidency(held *Index) *Residency {
	return &Residency{Conversation: NewConversation(0, 0), held: held}
}

// Name implements Router.
func (*Residency) Name() string { return "kv_cache_aware" }

// Needs implements Router.
func (r *Residency) Needs(conversation string) Need {
	return NeedTokens | r.Conversation.Needs(conversation)
}

// Done implements Router.
func (r *Residency) Done(c Choice) { r.held.Settle(c.expected) }

// Forget implements Router.
func (r *Residency) Forget(w Worker) {
	r.held.Forget(w.Slot)
	r.Conversation.Forget(w)
}

// Pick implements Router.
func (r *Residency) Pick(q Request, workers []Worker) Choice {
	if len(q.Tokens) == 0 {
		return r.Conversation.Pick(q, workers)
	}
	slots := 0
	for i := range workers {
		slots = max(slots, workers[i].Slot+1)
	}
	depths := make([]int, slots)
	r.held.Match(q.Tokens, depths)
	policy := Prefix{Affinity: DefaultAffinity}
	best, bestScore := -1, 0.0
	for k := range workers {
		i := (r.turn + k) % len(workers)
		w := &workers[i]
		free := 1 - float64(w.Requests)/residencyCapacity
		if s := policy.score(len(q.Tokens), Candidate{Match: depths[w.Slot], Free: free}); best < 0 || s > bestScore {
			best, bestScore = i, s
		}
	}
	r.turn = best + 1
	choice := Choice{Index: best, Reason: ReasonLoad, Match: depths[workers[best].Slot], Blocks: len(q.Tokens)}
	if choice.Match > 0 {
		choice.Reason = ReasonResidency
	}
	if workers[best].Reports {
		choice.expected = r.held.Expect(workers[best].Slot, q.Tokens)
	} else {
		r.held.Record(workers[best].Slot, q.Tokens)
	}
	return choice
}
