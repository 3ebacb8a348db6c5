// Package layout says which rank of an engine holds what: it reads shard specs, does the rank arithmetic,
// and compiles two layouts of the KV cache into a template of copies from one to the other. It is pure
// arithmetic; it moves nothing and knows no addresses.
package layout

import (
	"fmt"
	"strconv"
	"strings"
)

// The roles of a shard. A spec without roles describes colocated engines.
const (
	RolePrefill = "prefill"
	RoleDecode  = "decode"
)

// maxDegree bounds every degree of parallelism, so that products of them cannot overflow.
const maxDegree = 1 << 12

// Shard is a set of ranks that hold one copy of the model a data-parallel group. Each of the DP groups is
// one engine of TP·PP ranks. Experts tile EP·ExpertTP over the ranks of a pipeline stage.
type Shard struct {
	TP, PP, DP   int
	EP, ExpertTP int
	Stages       []int  // layers of each pipeline stage; nil: as even as they go
	Role         string // RolePrefill, RoleDecode, or empty: colocated
}

// SpecError says what is wrong with a shard spec.
type SpecError struct {
	Shard  int    // which shard, from 0; -1: the spec as a whole
	Key    string // the key at fault, if one is
	Reason string
}

func (e *SpecError) Error() string {
	var b strings.Builder
	b.WriteString("shard spec: ")
	if e.Shard >= 0 {
		fmt.Fprintf(&b, "shard %d: ", e.Shard)
	}
	if e.Key != "" {
		b.WriteString(e.Key + ": ")
	}
	b.WriteString(e.Reason)
	return b.String()
}

// ParseShards reads a spec such as "tp=1,dp=2,role=prefill+tp=2,role=decode". Shards are separated by '+'
// or ';'. Keys are tp, pp, dp, ep, cp (default 1; cp may only be 1), expt_tp (default tp), stages (the layers of
// each pipeline stage, as in "pp=2,stages=5/7"; default even) and role. The error is a *SpecError.
func ParseShards(spec string) ([]Shard, error) {
	var shards []Shard
	for i, part := range strings.Split(strings.ReplaceAll(spec, ";", "+"), "+") {
		if strings.TrimSpace(part) == "" {
			return nil, &SpecError{Shard: i, Reason: `it is empty; "tp=1" is the least`}
		}
		s, err := parseShard(i, part)
		if err != nil {
			return nil, err
		}
		shards = append(shards, s)
	}
	if err := checkRoles(shards); err != nil {
		return nil, err
	}
	return shards, nil
}

func parseShard(index int, text string) (Shard, error) {
	s := Shard{TP: 1, PP: 1, DP: 1, EP: 1}
	cp := 1
	degrees := map[string]*int{"tp": &s.TP, "pp": &s.PP, "dp": &s.DP, "ep": &s.EP, "cp": &cp, "expt_tp": &s.ExpertTP}
	seen := map[string]bool{}
	for field := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(field, "=")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		fail := func(format string, args ...any) (Shard, error) {
			return Shard{}, &SpecError{Shard: index, Key: key, Reason: fmt.Sprintf(format, args...)}
		}
		if !ok || key == "" || value == "" {
			return fail("%q is not key=value", strings.TrimSpace(field))
		}
		if seen[key] {
			return fail("it is given twice")
		}
		seen[key] = true
		if key == "role" {
			if value != RolePrefill && value != RoleDecode {
				return fail("%q is not a role; use %s or %s, or no role at all for colocated engines", value, RolePrefill, RoleDecode)
			}
			s.Role = value
			continue
		}
		if key == "stages" {
			stages, err := parseStages(value)
			if err != nil {
				return fail("%v", err)
			}
			s.Stages = stages
			continue
		}
		degree := degrees[key]
		if degree == nil {
			return fail("unknown key; known are tp, pp, dp, ep, expt_tp, stages, cp, role")
		}
		n, err := strconv.Atoi(value)
		if err != nil || n < 1 || n > maxDegree {
			return fail("%q must be a number in [1, %d]", value, maxDegree)
		}
		*degree = n
	}
	if cp != 1 {
		return Shard{}, &SpecError{Shard: index, Key: "cp", Reason: fmt.Sprintf(
			"%d: context parallelism would split a sequence's KV by position, which the handoff does not move; use 1", cp)}
	}
	if s.ExpertTP == 0 {
		s.ExpertTP = s.TP
	}
	if s.Stages != nil && !seen["pp"] {
		s.PP = len(s.Stages)
	}
	if s.Stages != nil && len(s.Stages) != s.PP {
		return Shard{}, &SpecError{Shard: index, Key: "stages", Reason: fmt.Sprintf(
			"%s gives the layers of %d pipeline stages, pp is %d", joinStages(s.Stages), len(s.Stages), s.PP)}
	}
	if ranks, tile := s.TP*s.DP, s.EP*s.ExpertTP; ranks%tile != 0 {
		return Shard{}, &SpecError{Shard: index, Key: "ep", Reason: fmt.Sprintf(
			"a pipeline stage has tp·dp = %d·%d = %d ranks, which ep·expt_tp = %d·%d = %d does not divide",
			s.TP, s.DP, ranks, s.EP, s.ExpertTP, tile)}
	}
	return s, nil
}

func parseStages(value string) ([]int, error) {
	var stages []int
	for text := range strings.SplitSeq(value, "/") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxDegree || len(stages) == maxDegree {
			return nil, fmt.Errorf("%q: each stage needs its number of layers, at least 1, as in 5/7", value)
		}
		stages = append(stages, n)
	}
	return stages, nil
}

func joinStages(stages []int) string {
	text := make([]string, len(stages))
	for i, n := range stages {
		text[i] = strconv.Itoa(n)
	}
	return strings.Join(text, "/")
}

func checkRoles(shards []Shard) error {
	var prefill, decode, colocated int
	for _, s := range shards {
		switch s.Role {
		case RolePrefill:
			prefill++
		case RoleDecode:
			decode++
		default:
			colocated++
		}
	}
	switch {
	case colocated == len(shards):
		return nil
	case colocated > 0:
		return &SpecError{Shard: -1, Key: "role", Reason: fmt.Sprintf(
			"%d of %d shards have no role; give all of them one, or none", colocated, len(shards))}
	case prefill == 0 || decode == 0:
		return &SpecError{Shard: -1, Key: "role", Reason: fmt.Sprintf(
			"%d prefill and %d decode shards; at least one of each is needed", prefill, decode)}
	}
	return nil
}

// CheckWorld compares the ranks of all shards with those there are.
func CheckWorld(shards []Shard, world int) error {
	sum := 0
	terms := make([]string, len(shards))
	for i, s := range shards {
		sum += s.Ranks()
		terms[i] = fmt.Sprintf("%d·%d·%d", s.TP, s.PP, s.DP)
	}
	if sum != world {
		return &SpecError{Shard: -1, Reason: fmt.Sprintf(
			"tp·pp·dp over all shards is %s = %d ranks, but there are %d", strings.Join(terms, " + "), sum, world)}
	}
	return nil
}

// String is the spec that ParseShards reads as this shard.
func (s Shard) String() string {
	text := fmt.Sprintf("tp=%d,pp=%d,dp=%d,ep=%d,expt_tp=%d", s.TP, s.PP, s.DP, s.EP, s.ExpertTP)
	if s.Stages != nil {
		text += ",stages=" + joinStages(s.Stages)
	}
	if s.Role != "" {
		text += ",role=" + s.Role
	}
	return text
}

// Ranks is how many ranks the shard has.
func (s Shard) Ranks() int { return s.TP * s.PP * s.DP }

// Place is where a rank stands in its shard.
type Place struct {
	TP, PP, DP             int // DP is the engine, (PP, TP) the rank within it
	ExpertTP, EP, ExpertDP int // of the same rank, for expert weights
}

// Rank is the rank at a place: TP varies fastest, then DP, then PP.
func (s Shard) Rank(tp, pp, dp int) int { return (pp*s.DP+dp)*s.TP + tp }

// Place is the inverse of Rank, for rank in [0, Ranks).
func (s Shard) Place(rank int) Place {
	inStage := rank % (s.TP * s.DP)
	return Place{
		TP: rank % s.TP, DP: inStage / s.TP, PP: rank / (s.TP * s.DP),
		ExpertTP: inStage % s.ExpertTP, EP: inStage / s.ExpertTP % s.EP, ExpertDP: inStage / (s.ExpertTP * s.EP),
	}
}

// Group lists the ranks of one engine in the order in which Geometry.Holdings numbers them: stage by
// stage, TP varying fastest.
func (s Shard) Group(dp int) []int {
	ranks := make([]int, 0, s.PP*s.TP)
	for pp := range s.PP {
		for tp := range s.TP {
			ranks = append(ranks, s.Rank(tp, pp, dp))
		}
	}
	return ranks
}
