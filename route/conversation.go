package route

import "slices"

// Conversation keeps the requests of a conversation on one worker, whose cache holds it. A conversation is
// known by the id that its client gives, or else by its text: a request most of which went to a worker before is
// taken for the next turn of what is there. Load plays a part only where nothing is known.
//
// A router that was restarted knows no conversation. Where workers tell what they hold, one that it does not know goes
// where it was (Learn), or else where most of its prompt is, as Residency would send it.
//
// A worker that is not among the candidates loses its conversations when they next come: their prefix is
// computed, and from then on held, elsewhere.
type Conversation struct {
	threshold float64
	pins      *Pins  // by what was chosen here
	learned   *Pins  // by what workers say
	held      *Index // what text went where
	reported  *Index // what workers say that they hold; may be nil
	next      int
}

// DefaultThreshold is the part of a request's blocks that must have been at a worker before for the request to
// count as a turn of the same conversation. DefaultConversations bounds the ids that are remembered.
const (
	DefaultThreshold     = 0.75
	DefaultConversations = 100_000
)

// contentEntries bounds the blocks of text that Conversation remembers, in all.
const contentEntries = 1 << 18

// NewConversation makes an empty one. threshold and conversations have the defaults when they are not positive. reported is
// what workers say that they hold, which the caller keeps up to date; it may be nil.
func NewConversation(threshold float64, conversations int, reported *Index) *Conversation {
	if threshold <= 0 {
		threshold = DefaultThreshold
	}
	if conversations <= 0 {
		conversations = DefaultConversations
	}
	return &Conversation{threshold: threshold, pins: NewPins(conversations), learned: NewPins(conversations), held: NewIndex(contentEntries), reported: reported}
}

// Name implements Router.
func (*Conversation) Name() string { return "conversation" }

// Needs implements Router: where there is an id that is known, nothing else is looked at.
func (c *Conversation) Needs(conversation string) (need Need) {
	if conversation != "" && (c.pins.Get(conversation) != 0 || c.learned.Get(conversation) != 0) {
		return 0
	}
	if conversation == "" {
		need = NeedContent
	}
	if c.reported != nil && c.reported.Len() > 0 {
		need |= NeedTokens
	}
	return need
}

// Done implements Router.
func (c *Conversation) Done(choice Choice) {
	if choice.expected != nil {
		c.reported.Settle(choice.expected)
	}
}

// Learn notes that a session had a request at a worker, which says so: sent there by this router or by another. at orders
// what several workers say of one.
func (c *Conversation) Learn(session SessionKey, worker uint64, at int64) {
	c.learned.Learn(session, worker, at)
}

// Forget implements Router.
func (c *Conversation) Forget(w Worker) { c.held.Forget(w.Slot) }

// Pick implements Router.
func (c *Conversation) Pick(r Request, workers []Worker) Choice {
	if r.Conversation != "" {
		return c.byID(r, workers)
	}
	choice := c.byContent(r, workers)
	if len(r.Content) > 0 {
		c.held.Record(workers[choice.Index].Slot, r.Content)
	}
	return choice
}

func (c *Conversation) byID(r Request, workers []Worker) Choice {
	choice := Choice{Index: -1, Reason: ReasonConversation}
	for _, pins := range []*Pins{c.pins, c.learned} {
		id := pins.Get(r.Conversation)
		at := func(w Worker) bool { return id != 0 && w.ID == id }
		if choice.Index = slices.IndexFunc(workers, at); choice.Index >= 0 {
			break
		}
	}
	if choice.Index < 0 {
		choice = c.unknown(r, workers)
	}
	c.pins.Set(r.Conversation, workers[choice.Index].ID)
	return choice
}

func (c *Conversation) byContent(r Request, workers []Worker) Choice {
	slots := 0
	for i := range workers {
		slots = max(slots, workers[i].Slot+1)
	}
	depths := make([]int, slots)
	c.held.Match(r.Content, depths)
	best := 0
	for i := 1; i < len(workers); i++ {
		w, b := &workers[i], &workers[best]
		if d := depths[w.Slot] - depths[b.Slot]; d > 0 || d == 0 && w.Content < b.Content {
			best = i
		}
	}
	match := depths[workers[best].Slot]
	if match > 0 && float64(match) >= c.threshold*float64(len(r.Content)) {
		return Choice{Index: best, Reason: ReasonPrefix, Match: match, Blocks: len(r.Content)}
	}
	if len(r.Content) == 0 {
		return c.unknown(r, workers)
	}
	choice := c.byLoad(workers)
	choice.Match, choice.Blocks = depths[workers[choice.Index].Slot], len(r.Content)
	return choice
}

// unknown places a request of which nothing is known here.
func (c *Conversation) unknown(r Request, workers []Worker) Choice {
	reports := func(w Worker) bool { return w.Reports }
	if c.reported == nil || len(r.Tokens) == 0 || !slices.ContainsFunc(workers, reports) {
		return c.byLoad(workers)
	}
	return weigh(c.reported, &c.next, r.Tokens, workers)
}

// byLoad takes the worker with the least text in its requests, taking turns among equals.
func (c *Conversation) byLoad(workers []Worker) Choice {
	i := least(c.next, workers, func(w *Worker) int64 { return w.Content })
	c.next = i + 1
	return Choice{Index: i, Reason: ReasonLoad}
}
