// Package route decides which engine gets a request: an Index of the prefixes that engines hold, and
// policies that choose among the engines which can take the request now. It is pure: no goroutine,
// clock or random source, and the same inputs always give the same choice.
//
// The index is a guess: reports of what engines hold take their time, and older engines make none. An engine
// that has lost a prefix meanwhile costs a slower prefill, never a wrong token.
package route

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Candidate is an engine that can take the request now.
type Candidate struct {
	Match    int     // leading blocks of the prompt that it is thought to hold
	Requests int     // requests it has
	Free     float64 // the part of its capacity that is free, from 0 to 1
	Last     uint64  // when it last got work: larger is more recent, 0 is never
}

// Decision says who was chosen and why.
type Decision struct {
	Index      int // of the chosen candidate
	Policy     string
	Match      int     // leading blocks that the chosen engine is thought to hold
	Blocks     int     // complete blocks of the prompt
	Free       float64 // the chosen engine's, before this request
	Score      float64 // 0 for policies that do not score
	Candidates int
	Pinned     bool // the session was bound to the engine
}

// String is one line for logs.
func (d Decision) String() string {
	b := make([]byte, 0, 96) // fmt takes longer than the decision does
	b = append(append(b, d.Policy...), " of "...)
	b = append(strconv.AppendInt(b, int64(d.Candidates), 10), ": "...)
	b = append(strconv.AppendInt(b, int64(d.Match), 10), '/')
	b = append(strconv.AppendInt(b, int64(d.Blocks), 10), " blocks held, "...)
	b = append(strconv.AppendFloat(b, 100*d.Free, 'f', 0, 64), "% free"...)
	if d.Pinned {
		b = append(b, ", the session's engine"...)
	} else if d.Score != 0 {
		b = strconv.AppendFloat(append(b, ", score "...), d.Score, 'f', 3, 64)
	}
	return string(b)
}

// Policy chooses among candidates, of which there is at least one. blocks is the number of complete
// blocks of the prompt, 0 for a short one.
type Policy interface {
	Name() string
	Pick(blocks int, candidates []Candidate) Decision
}

// Prefix weighs held prefixes against free capacity: the highest
// Affinity × match/blocks + (1-Affinity) × free wins. Among equals the one that got work most recently
// wins (its prefixes are the freshest), then the first.
type Prefix struct {
	Affinity float64 // from 0 (free capacity alone) to 1 (held prefixes alone)
}

// Name implements Policy.
func (Prefix) Name() string { return "prefix" }

// Pick implements Policy.
func (p Prefix) Pick(blocks int, candidates []Candidate) Decision {
	best, bestScore := 0, p.score(blocks, candidates[0])
	for i := 1; i < len(candidates); i++ {
		s := p.score(blocks, candidates[i])
		if s > bestScore || s == bestScore && candidates[i].Last > candidates[best].Last {
			best, bestScore = i, s
		}
	}
	return decide(p, blocks, candidates, best, bestScore)
}

func (p Prefix) score(blocks int, c Candidate) float64 {
	s := (1 - p.Affinity) * max(0, c.Free)
	if blocks > 0 {
		s += p.Affinity * float64(c.Match) / float64(blocks)
	}
	return s
}

// LeastLoaded takes the candidate with the fewest requests, the first among equals.
type LeastLoaded struct{}

// Name implements Policy.
func (LeastLoaded) Name() string { return "least-loaded" }

// Pick implements Policy.
func (p LeastLoaded) Pick(blocks int, candidates []Candidate) Decision {
	best := 0
	for i := range candidates {
		if candidates[i].Requests < candidates[best].Requests {
			best = i
		}
	}
	return decide(p, blocks, candidates, best, 0)
}

// RoundRobin takes the candidate that has waited longest for work, the first among equals.
type RoundRobin struct{}

// Name implements Policy.
func (RoundRobin) Name() string { return "round-robin" }

// Pick implements Policy.
func (p RoundRobin) Pick(blocks int, candidates []Candidate) Decision {
	best := 0
	for i := range candidates {
		if candidates[i].Last < candidates[best].Last {
			best = i
		}
	}
	return decide(p, blocks, candidates, best, 0)
}

// Session keeps the requests of a session on one engine for as long as that engine takes work, and waits for
// it when it is full: its cache holds the conversation. The caller keeps the bindings, in Pins; Session
// chooses for a session's first request, and for requests without one, as Prefix does.
type Session struct {
	Prefix
	Sessions int // how many are remembered for each role; 0 is DefaultSessions
}

// Name implements Policy.
func (Session) Name() string { return "session" }

// Pick implements Policy.
func (p Session) Pick(blocks int, candidates []Candidate) Decision {
	d := p.Prefix.Pick(blocks, candidates)
	d.Policy = p.Name()
	return d
}

func decide(p Policy, blocks int, candidates []Candidate, i int, score float64) Decision {
	c := &candidates[i]
	return Decision{
		Index: i, Policy: p.Name(), Match: c.Match, Blocks: blocks, Free: c.Free, Score: score, Candidates: len(candidates),
	}
}

// DefaultAffinity is the weight that held prefixes have in the policy named "prefix".
const DefaultAffinity = 0.5

var policies = []Policy{
	Prefix{Affinity: DefaultAffinity}, LeastLoaded{}, RoundRobin{}, Session{Prefix: Prefix{Affinity: DefaultAffinity}},
}

// Names lists the policies that ByName knows.
func Names() []string {
	names := make([]string, len(policies))
	for i, p := range policies {
		names[i] = p.Name()
	}
	return names
}

// ByName returns the policy of that name; "" is "prefix". The error lists the names.
func ByName(name string) (Policy, error) {
	if name == "" {
		return policies[0], nil
	}
	if i := slices.Index(Names(), name); i >= 0 {
		return policies[i], nil
	}
	return nil, fmt.Errorf("route: no policy %q; use one of %s", name, strings.Join(Names(), ", "))
}
