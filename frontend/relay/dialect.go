package relay

import "errors"

// dialect is how one kind of engine takes the two legs of a request. Implementations are values without state.
type dialect interface {
	name() string
	// together reports whether both legs are sent at once. Otherwise the decode leg follows the prefill leg's answer.
	together() bool
	// whole says why this engine cannot serve a request in two legs; "" when it can. Such a request goes to a decode
	// worker alone.
	whole(r *request) string
	// prefill is the prefill leg. Of t only what is known before either leg is set.
	prefill(t *try) (leg, error)
	// read judges the answer to the prefill leg, t.answer.
	read(t *try) (verdict, error)
	// decode is the decode leg.
	decode(t *try) (leg, error)
	// single is a request that one worker serves alone.
	single(t *try) leg
	// mergesUsage reports whether the relay must put what the prefill leg says of the prompt's tokens into the decode
	// leg's usage. Where it does not, the engines see to that.
	mergesUsage() bool
	// advice says what to set on the engines when prefill legs come back with nothing to take over.
	advice() string
}

// giver is a dialect whose prefill workers take back what they left for a decode leg.
type giver interface {
	// giveBack is the body of a POST to releasePath; nil where there is no such thing.
	giveBack(t *try) pieces
}

// releasePath is where our engines take back what a prefill leg left.
const releasePath = "/legs/release"

// verdict is what the answer to a prefill leg means.
type verdict int

const (
	goOn   verdict = iota // the decode leg follows
	final                 // the answer was complete with the prefill leg
	silent                // the worker answered as if it had not been asked for a prefill leg
)

// leg is a request to a worker.
type leg struct {
	body   pieces
	header []string
}

// try is one attempt at a request.
type try struct {
	r      *request
	id     int64
	mint   func() int64
	source *worker // of the prefill leg
	answer *prefilled
	// compare says that ids that were made here are not sent to the source, but compared with its own.
	compare bool
	// rank is the data-parallel rank of the source that was chosen, and engine its id: Mooncake's.
	rank, engine string
}

// prefilled is a prefill leg's answer, looked at.
type prefilled struct {
	top     object
	choices []prefilledChoice // one at least
	usage   []byte            // nil when there is none
}

// prefilledChoice is a choice of a prefill leg's answer.
type prefilledChoice struct {
	object
	finish string
}

// parsePrefilled finds what all dialects look for in the answer.
func parsePrefilled(raw []byte) (*prefilled, error) {
	var p prefilled
	var err error
	if p.top, err = scanObject(raw); err != nil {
		return nil, err
	}
	if said := errorIn(&p.top); said != nil {
		return nil, said
	}
	choices, err := scanArray(p.top.get("choices"), maxPrompts)
	if err != nil || len(choices) == 0 {
		return nil, errors.New("the answer has no choices")
	}
	p.choices = make([]prefilledChoice, len(choices))
	for i, raw := range choices {
		c := &p.choices[i]
		if c.object, err = scanObject(raw); err != nil {
			return nil, err
		}
		if v := c.getSet("finish_reason"); v != nil {
			c.finish, _ = unquote(v)
		}
	}
	p.usage = p.top.getSet("usage")
	return &p, nil
}

// plain is whole requests for workers that do no handoff.
type plain struct{}

func (plain) name() string               { return "plain" }
func (plain) together() bool             { return false }
func (plain) whole(*request) string      { return noHandoff }
func (plain) prefill(*try) (leg, error)  { return leg{}, errors.ErrUnsupported }
func (plain) decode(*try) (leg, error)   { return leg{}, errors.ErrUnsupported }
func (plain) read(*try) (verdict, error) { return silent, nil }
func (plain) mergesUsage() bool          { return false }
func (plain) advice() string             { return "" }
func (plain) single(t *try) leg          { return passOn(t, reserved...) }

// passOn is the client's request but for some fields.
func passOn(t *try, drop ...string) leg {
	e := edit{drop: drop}
	return leg{body: e.apply(&t.r.body)}
}
