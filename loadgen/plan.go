package loadgen

import (
	"encoding/json/jsontext"
	"fmt"
	"hash/fnv"
	"iter"
	"math"
	"math/rand/v2"
	"strconv"
	"time"
)

// Plan is what is asked. Round r of n is the part of it that is played between two looks at the other target; all rounds
// together are the plan. The same round gives the same sessions every time, so that two targets get the same.
type Plan interface {
	Round(r, n int) iter.Seq[*Session]
	// Requests is how many there are in all; 0 when there is no end.
	Requests() int
}

// Session is a conversation: each turn's prompt is everything before it, the answers included, and something new.
type Session struct {
	// ID is told to the server, unless Single is set.
	ID string
	// Start is when the first turn is meant to be sent, after the beginning of the round. Closed loops ignore it.
	Start time.Duration
	// Single marks a request that belongs to no conversation.
	Single bool
	Turns  []Turn
}

// Turn is one request of a session.
type Turn struct {
	// Delay is how long the client thinks before it, after the answer to the turn before.
	Delay time.Duration
	// At is when a later turn is meant to be sent at the earliest, after the beginning of the round. Closed loops ignore it.
	At time.Duration
	// Afresh leaves out everything that was said before.
	Afresh bool
	// Prefix is how many tokens this prompt begins with that are the same for all sessions of the run. It is of
	// account in the first turn.
	Prefix int
	// Own is how many tokens the turn adds that are nobody else's.
	Own int
	// HashIDs are blocks of HashBlock tokens that come between the two: an id stands for the same tokens wherever it is. With
	// them Own counts what is left after the last block, and may be negative: the last block is shorter by so many.
	HashIDs   []int64
	HashBlock int
	// Messages replaces all of these: the elements of a chat's messages, as they are sent.
	Messages jsontext.Value
	// Output is how many tokens are asked for.
	Output int
}

// inputTokens is how many tokens the turn adds to its session's prompt; 0 for messages, of which it cannot be known.
func (t *Turn) inputTokens() int {
	if len(t.Messages) > 0 {
		return 0
	}
	return t.Prefix + len(t.HashIDs)*t.HashBlock + t.Own
}

// Range is a count that is drawn evenly from Low to High.
type Range struct{ Low, High int }

// Exactly is the range of one value.
func Exactly(n int) Range { return Range{n, n} }

func (r Range) draw(rng *rand.Rand) int { return r.Low + rng.IntN(r.High-r.Low+1) }

func (r Range) check(name string, least int) error {
	if r.Low < least || r.High < r.Low || r.High > maxTokens {
		return &ConfigError{name, fmt.Sprintf("%d:%d is not a range of %d to %d", r.Low, r.High, least, maxTokens)}
	}
	return nil
}

// UnmarshalText reads "512" or "256:1024".
func (r *Range) UnmarshalText(text []byte) error {
	if _, err := fmt.Sscanf(string(text), "%d:%d", &r.Low, &r.High); err == nil && fmt.Sprintf("%d:%d", r.Low, r.High) == string(text) && r.Low <= r.High {
		return nil
	}
	n, err := strconv.Atoi(string(text))
	if err != nil {
		return fmt.Errorf("%q is neither a number nor a range such as 256:1024", text)
	}
	*r = Exactly(n)
	return nil
}

// maxTokens bounds the length of one prompt or answer.
const maxTokens = 1 << 24

// Synthetic is a plan of sessions that are made up.
type Synthetic struct {
	// Sessions is how many; 0 goes on until the run's Duration ends.
	Sessions int
	// Turns of each session; default 1.
	Turns int
	// Prefix is how many tokens all sessions begin with.
	Prefix int
	// New is how many tokens each turn adds.
	New Range
	// Output is how many tokens each turn asks for.
	Output Range
	// Think is the time between an answer and the next turn.
	Think time.Duration
	// Rate is how many sessions begin in a second, on average, in an open loop. The times between them have a gamma
	// distribution of shape Burstiness: 1 (the default) makes it a Poisson process, less makes bursts, more evens out.
	Rate, Burstiness float64
	Seed             uint64
}

// Check reports the first field that makes no sense.
func (s *Synthetic) Check() error {
	bad := func(field, problem string, args ...any) error {
		return &ConfigError{field, fmt.Sprintf(problem, args...)}
	}
	switch {
	case s.Sessions < 0 || s.Sessions > maxSessions:
		return bad("Sessions", "%d is not within 0 to %d", s.Sessions, maxSessions)
	case s.Turns < 1 || s.Turns > maxTurns:
		return bad("Turns", "%d is not within 1 to %d", s.Turns, maxTurns)
	case s.Prefix < 0 || s.Prefix > maxTokens:
		return bad("Prefix", "%d is not within 0 to %d", s.Prefix, maxTokens)
	case s.Think < 0:
		return bad("Think", "%v is negative", s.Think)
	case s.Rate < 0 || math.IsInf(s.Rate, 0) || math.IsNaN(s.Rate):
		return bad("Rate", "%v is not a rate", s.Rate)
	case !(s.Burstiness > 0) || math.IsInf(s.Burstiness, 0):
		return bad("Burstiness", "%v is not more than 0", s.Burstiness)
	}
	least := 1
	if s.Prefix > 0 {
		least = 0
	}
	if err := s.New.check("New", least); err != nil {
		return err
	}
	return s.Output.check("Output", 1)
}

const (
	maxSessions = 1 << 24
	maxTurns    = 1 << 16
)

// Requests implements Plan.
func (s *Synthetic) Requests() int { return s.Sessions * s.Turns }

// Round implements Plan.
func (s *Synthetic) Round(r, n int) iter.Seq[*Session] {
	first, end := s.Sessions*r/n, s.Sessions*(r+1)/n
	if s.Sessions == 0 {
		first, end = r<<32, math.MaxInt
	}
	return func(yield func(*Session) bool) {
		arrivals := rand.New(rand.NewPCG(s.Seed, keyOf("arrivals", r)))
		start := time.Duration(0)
		for i := first; i < end; i++ {
			if s.Rate > 0 && i > first {
				start += time.Duration(gamma(arrivals, s.Burstiness) / (s.Burstiness * s.Rate) * float64(time.Second))
			}
			if !yield(s.session(i, start)) {
				return
			}
		}
	}
}

func (s *Synthetic) session(i int, start time.Duration) *Session {
	rng := rand.New(rand.NewPCG(s.Seed, keyOf("session", i)))
	session := &Session{ID: fmt.Sprintf("bench-%d-%d", s.Seed, i), Start: start, Single: s.Turns == 1, Turns: make([]Turn, s.Turns)}
	for k := range session.Turns {
		t := &session.Turns[k]
		t.Own, t.Output = s.New.draw(rng), s.Output.draw(rng)
		if k == 0 {
			t.Prefix = s.Prefix
		} else {
			t.Delay = s.Think
			t.Own = max(t.Own, 1)
		}
	}
	return session
}

// gamma draws from the gamma distribution of the given shape and scale 1, by the method of Marsaglia and Tsang (2000).
func gamma(rng *rand.Rand, shape float64) float64 {
	boost := 1.0
	if shape < 1 {
		boost = math.Pow(1-rng.Float64(), 1/shape) // of (0, 1]
		shape++
	}
	d := shape - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := rng.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v = v * v * v
		if math.Log(1-rng.Float64()) < 0.5*x*x+d-d*v+d*math.Log(v) {
			return boost * d * v
		}
	}
}

// keyOf names a sequence of random numbers.
func keyOf(kind string, parts ...any) uint64 {
	h := fnv.New64a()
	fmt.Fprint(h, kind)
	for _, p := range parts {
		fmt.Fprint(h, "/", p)
	}
	return h.Sum64()
}
