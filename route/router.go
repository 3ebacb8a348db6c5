package route

import (
	"fmt"
	"slices"
	"strings"

	"baton/kvcache"
)

// Router chooses a worker for each request of one leg and remembers what it needs for that. Unlike a Policy,
// which sees one moment, it learns from what it chose before. It is not safe for concurrent use.
type Router interface {
	Name() string
	// Needs says which of a request's chains Pick will look at, so that nobody computes the others.
	Needs(conversation string) Need
	// Pick chooses among workers, of which there is at least one.
	Pick(r Request, workers []Worker) Choice
	// Done tells that the request of a choice has ended there.
	Done(c Choice)
	// Forget drops what is known of a worker that is gone.
	Forget(w Worker)
}

// Need is a set of a request's chains.
type Need uint8

// The chains.
const (
	NeedContent Need = 1 << iota // Request.Content, unless Tokens are needed too and known
	NeedTokens                   // Request.Tokens
)

// Request is what routers see of one.
type Request struct {
	Conversation string           // the client's id of it; "" when it gave none
	Content      []kvcache.Digest // chain of the blocks of its text, as it came
	Tokens       []kvcache.Digest // chain of the blocks of its token ids; nil when they are not known
}

// Worker is one that can take the request now.
type Worker struct {
	ID       uint64 // positive and never used again
	Slot     int    // small; may be used again after Forget
	Requests int    // requests it has
	Content  int64  // bytes of their text
	Reports  bool   // it tells what it holds
}

// Choice says who was chosen and why.
type Choice struct {
	Index  int    // of the chosen worker
	Reason string // one of the constants below
	Match  int    // leading blocks of the request that it is thought to hold
	Blocks int    // blocks of the request that were looked at

	expected *Expectation
}

// Why a worker was chosen.
const (
	ReasonTurn         = "turn"         // it is the next one's turn
	ReasonLoad         = "load"         // it has the least to do
	ReasonConversation = "conversation" // the conversation was there before
	ReasonPrefix       = "prefix"       // text like this was there before
	ReasonResidency    = "residency"    // it holds more of the prompt than others, its load considered
)

// TurnRouter is round_robin.
type TurnRouter struct{ next int }

// Name implements Router.
func (*TurnRouter) Name() string { return "round_robin" }

// Needs implements Router.
func (*TurnRouter) Needs(string) Need { return 0 }

// Done implements Router.
func (*TurnRouter) Done(Choice) {}

// Forget implements Router.
func (*TurnRouter) Forget(Worker) {}

// Pick implements Router.
func (r *TurnRouter) Pick(_ Request, workers []Worker) Choice {
	i := r.next % len(workers)
	r.next = i + 1
	return Choice{Index: i, Reason: ReasonTurn}
}

// LoadRouter is load_balancing: the fewest requests, taking turns among equals.
type LoadRouter struct{ next int }

// Name implements Router.
func (*LoadRouter) Name() string { return "load_balancing" }

// Needs implements Router.
func (*LoadRouter) Needs(string) Need { return 0 }

// Done implements Router.
func (*LoadRouter) Done(Choice) {}

// Forget implements Router.
func (*LoadRouter) Forget(Worker) {}

// Pick implements Router.
func (r *LoadRouter) Pick(_ Request, workers []Worker) Choice {
	i := least(r.next, workers, func(w *Worker) int64 { return int64(w.Requests) })
	r.next = i + 1
	return Choice{Index: i, Reason: ReasonLoad}
}

// least is the index of the smallest load, the first at or after start among equals.
func least(start int, workers []Worker, load func(*Worker) int64) int {
	best := start % len(workers)
	for k := 1; k < len(workers); k++ {
		if i := (start + k) % len(workers); load(&workers[i]) < load(&workers[best]) {
			best = i
		}
	}
	return best
}

// routers makes one of each kind.
var routers = []func(*Index) Router{
	func(x *Index) Router { return NewConversation(0, 0, x) },
	func(x *Index) Router { return NewResidency(x) },
	func(*Index) Router { return new(LoadRouter) },
	func(*Index) Router { return new(TurnRouter) },
}

// RouterNames lists the names that NewRouter knows.
func RouterNames() []string {
	names := make([]string, len(routers))
	for i, make := range routers {
		names[i] = make(NewIndex(1)).Name()
	}
	return names
}

// NewRouter makes the router of that name. held is what workers are known to hold, or say that they
// hold: kv_cache_aware looks at it, and conversation for conversations that it does not know. The error lists the names.
func NewRouter(name string, held *Index) (Router, error) {
	names := RouterNames()
	if i := slices.Index(names, name); i >= 0 {
		return routers[i](held), nil
	}
	return nil, fmt.Errorf("route: no router %q; use one of %s", name, strings.Join(names, ", "))
}
