package route

import "baton/kvcache"

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
	return &Residency{Conversation: NewConversation(0, 0, nil), held: held}
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
	return weigh(r.held, &r.turn, q.Tokens, workers)
}

// weigh chooses by what held says that the workers have of a prompt, and by their load; of equals by turn.
func weigh(held *Index, turn *int, prompt []kvcache.Digest, workers []Worker) Choice {
	slots := 0
	for i := range workers {
		slots = max(slots, workers[i].Slot+1)
	}
	depths := make([]int, slots)
	held.Match(prompt, depths)
	policy := Prefix{Affinity: DefaultAffinity}
	best, bestScore := -1, 0.0
	for k := range workers {
		i := (*turn + k) % len(workers)
		w := &workers[i]
		free := 1 - float64(w.Requests)/residencyCapacity
		if s := policy.score(len(prompt), Candidate{Match: depths[w.Slot], Free: free}); best < 0 || s > bestScore {
			best, bestScore = i, s
		}
	}
	*turn = best + 1
	choice := Choice{Index: best, Reason: ReasonLoad, Match: depths[workers[best].Slot], Blocks: len(prompt)}
	if choice.Match > 0 {
		choice.Reason = ReasonResidency
	}
	if workers[best].Reports {
		choice.expected = held.Expect(workers[best].Slot, prompt)
	} else {
		held.Record(workers[best].Slot, prompt)
	}
	return choice
}
