package sim

import (
	"bufio"
	"cmp"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"baton/wire"
)

// Script is one run: the fleet, what clients ask for and what goes wrong. All that is random besides
// (delays, transfer faults, durations) follows from Seed, so a script always plays the same way. Its text
// form, one thing a line, is what a failing run prints.
type Script struct {
	Seed     uint64
	Fleet    Fleet
	Requests []Request
	Faults   []Fault
}

// Fleet sizes the engines and says how bad their transfers are.
type Fleet struct {
	Prefill, Decode, Both int    // engines of each role
	Policy                string // of the coordinator
	Push                  bool   // sources write
	Shared                bool   // a stopped source can still be read, as through shared memory
	BlockSize             int
	PrefillBlocks         int // of each engine's pool
	DecodeBlocks          int // likewise; of colocated engines too
	Continuation          int // blocks that engines set aside for new tokens; 0: all that may be needed
	Overtake              int // requests that may begin before an earlier one
	Promise               int // blocks that engines announce beyond those they have
	MaxRequests           int
	MaxTokens             int
	PrefillTP, PrefillPP  int
	DecodeTP, DecodePP    int
	Remote                bool // ranks but an engine's first are in other processes
	Clients               int
	// Per mille of transfers that fail midway, that hang until they are cancelled, and of those stopped
	// early that may still touch memory for a while.
	Fail, Hang, Unsafe int
	// Verify says which handoffs are verified (off, sample, all), Flip how many transfers, per mille, change a bit.
	Verify string
	Flip   int
}

// Request is what a client asks for. Its prompt is Shared tokens of a family of prompts, then Own tokens
// that follow from Tail.
type Request struct {
	At             time.Duration
	Client         int
	Family, Shared int
	Tail, Own      int
	Max            int
	Stop           int // the number of the token that stops it, counted from 1; 0 is none
	Salt           int
	Session        int           // 0 is none
	Logprobs       bool          // of the prompt
	Abort          time.Duration // after At; 0 is never
}

// Kinds of faults.
const (
	Crash   = "crash"   // an engine, client or the coordinator dies, and another one starts
	Freeze  = "freeze"  // an engine stops (SIGSTOP) and goes on later
	Cut     = "cut"     // a connection to the coordinator breaks
	Leave   = "leave"   // an engine or the coordinator brings what it runs to an end, and then ends
	Upgrade = "upgrade" // all engines restart with other weights
	Pause   = "pause"   // a client pauses the fleet, and unpauses it
	Suspend = "suspend" // it suspends the paused fleet in between

	RankFails  = "rank-fails"  // one rank of an engine does what it is told without success
	RankStalls = "rank-stalls" // one rank of an engine does nothing, and goes on later
)

// Fault is something that goes wrong. Whom it befalls is an engine ("prefill1"), one of its ranks ("prefill1.0"), a
// client ("client0"), "coordinator" or "fleet".
type Fault struct {
	At   time.Duration
	Kind string
	Who  string
	For  time.Duration
}

// Generate makes the script of a seed.
func Generate(seed uint64) Script {
	g := generator{rand.New(rand.NewPCG(seed, 0x5eed))}
	s := Script{Seed: seed, Fleet: g.fleet()}
	s.Fleet.Verify, s.Fleet.Flip = verification(seed, s.Fleet)
	s.Fleet.Overtake = overtake(seed)
	calm := g.IntN(8) == 0
	if calm {
		s.Fleet.Fail, s.Fleet.Hang, s.Fleet.Flip = 0, 0, 0
	}
	span := time.Duration(10+g.IntN(60)) * time.Millisecond
	for range 4 + g.IntN(10) {
		s.Requests = append(s.Requests, g.request(s.Fleet, span))
	}
	ranks, remote := rankFaults(seed, s.Fleet, span)
	s.Fleet.Remote = remote
	if !calm {
		for range g.IntN(5) {
			s.Faults = append(s.Faults, g.fault(s.Fleet, span))
		}
		s.Faults = append(s.Faults, ranks...)
	}
	return s
}

type generator struct{ *rand.Rand }

func (g generator) one(of ...int) int { return of[g.IntN(len(of))] }

func (g generator) fleet() Fleet {
	f := Fleet{
		Prefill: g.one(1, 1, 2, 2, 3), Decode: g.one(1, 1, 2, 2, 3),
		Policy: []string{"prefix", "prefix", "least-loaded", "round-robin", "session"}[g.IntN(5)],
		Push:   g.IntN(2) == 0, Shared: g.IntN(2) == 0,
		BlockSize: g.one(2, 4, 4, 8), MaxRequests: 1 + g.IntN(6), Clients: 1 + g.IntN(3),
		PrefillTP: 1, PrefillPP: 1, DecodeTP: 1, DecodePP: 1,
	}
	if g.IntN(8) == 0 {
		f.Prefill, f.Decode, f.Both = 0, 0, 1+g.IntN(2)
	} else if g.IntN(2) == 0 {
		f.PrefillTP, f.PrefillPP = g.ranks()
		f.DecodeTP, f.DecodePP = g.ranks()
	}
	f.MaxTokens = f.MaxRequests + g.IntN(24)
	f.PrefillBlocks = (longestContext+f.BlockSize-1)/f.BlockSize + g.IntN(60/f.BlockSize)
	f.DecodeBlocks = (longestContext+f.BlockSize-1)/f.BlockSize + g.IntN(60/f.BlockSize)
	if g.IntN(2) == 0 {
		f.Continuation, f.Promise = 1+g.IntN(2), g.one(0, 0, g.IntN(200/f.BlockSize))
		f.DecodeBlocks = (longestContext+f.BlockSize-1)/f.BlockSize + g.IntN(16/f.BlockSize)
	}
	f.Fail, f.Hang, f.Unsafe = g.one(0, 0, 50, 200), g.one(0, 0, 30), g.one(0, 300, 700)
	return f
}

// verification draws from a source of its own: the rest of a seed's script does not depend on it.
func verification(seed uint64, f Fleet) (mode string, flip int) {
	g := generator{rand.New(rand.NewPCG(seed, 0xc5))}
	if f.Both > 0 {
		return "off", 0
	}
	if mode = []string{"off", "off", "sample", "all", "all"}[g.IntN(5)]; mode == "all" {
		flip = g.one(0, 100, 300)
	}
	return mode, flip
}

// overtake draws from a source of its own too.
func overtake(seed uint64) int {
	g := generator{rand.New(rand.NewPCG(seed, 0x07))}
	return g.one(0, 0, 1, 2+g.IntN(4))
}

func (g generator) ranks() (tp, pp int) {
	tp, pp = g.one(1, 1, 2, 2, 4, 8), g.one(1, 2) // with 8, heads are replicated
	if tp >= 4 {
		pp = 1
	}
	return tp, pp
}

// longestContext is the most tokens that a generated request may come to.
const longestContext = 56

func (g generator) request(f Fleet, span time.Duration) Request {
	r := Request{
		At: g.within(span), Client: g.IntN(f.Clients), Family: g.IntN(3), Shared: g.one(0, 4, 8, 8, 16, 24),
		Tail: g.IntN(6), Own: g.IntN(9), Max: 1 + g.IntN(11), Logprobs: g.IntN(12) == 0,
	}
	if r.Shared+r.Own == 0 {
		r.Own = 1
	}
	if f.Continuation > 0 && g.IntN(2) == 0 {
		r.Max = 12 + g.IntN(12)
	}
	if g.IntN(8) == 0 {
		r.Salt = 1
	}
	if g.IntN(2) == 0 {
		r.Session = 1 + g.IntN(3)
	}
	if g.IntN(6) == 0 {
		r.Stop = 1 + g.IntN(r.Max)
	}
	if g.IntN(5) == 0 {
		r.Abort = 1 + g.within(30*time.Millisecond)
	}
	return r
}

func (g generator) within(d time.Duration) time.Duration {
	return time.Duration(g.Int64N(int64(d))).Truncate(time.Microsecond)
}

func (g generator) fault(f Fleet, span time.Duration) Fault {
	x := Fault{At: g.within(span + 20*time.Millisecond)}
	switch n := g.IntN(20); {
	case n < 6:
		x.Kind, x.Who = Crash, g.engine(f)
	case n < 10:
		x.Kind, x.Who = Freeze, g.engine(f)
	case n < 13:
		x.Kind, x.Who = Cut, g.engine(f)
	case n < 14:
		x.Kind, x.Who = Cut, g.client(f)
	case n < 16:
		x.Kind, x.Who = Leave, g.engine(f)
	case n < 17:
		x.Kind, x.Who = []string{Crash, Leave}[g.IntN(2)], "coordinator"
	case n < 18:
		x.Kind, x.Who = Crash, g.client(f)
	case n < 19:
		x.Kind, x.Who = Upgrade, "fleet"
	default:
		x.Kind, x.Who = []string{Pause, Suspend}[g.IntN(2)], "fleet"
	}
	x.For = 1*time.Millisecond + g.within(time.Duration(g.one(5, 40, 300))*time.Millisecond)
	return x
}

func (g generator) engine(f Fleet) string {
	n := g.IntN(f.Prefill + f.Decode + f.Both)
	return f.names()[n]
}

func (g generator) client(f Fleet) string { return fmt.Sprintf("client%d", g.IntN(f.Clients)) }

// names lists the fleet's engines.
func (f Fleet) names() []string {
	var names []string
	for role, n := range [...]int{f.Prefill, f.Decode, f.Both} {
		for i := range n {
			names = append(names, [...]string{wire.RolePrefill, wire.RoleDecode, wire.RoleBoth}[role]+strconv.Itoa(i))
		}
	}
	return names
}

// String is the script's text form.
func (s Script) String() string {
	var b strings.Builder
	f := s.Fleet
	fmt.Fprintf(&b, "seed %d\n", s.Seed)
	fmt.Fprintf(&b, "fleet prefill=%d decode=%d both=%d policy=%s push=%t shared=%t block-size=%d prefill-blocks=%d decode-blocks=%d"+
		" continuation=%d overtake=%d promise=%d max-requests=%d max-tokens=%d prefill-tp=%d prefill-pp=%d decode-tp=%d decode-pp=%d remote=%t clients=%d fail=%d hang=%d unsafe=%d verify=%s flip=%d\n",
		f.Prefill, f.Decode, f.Both, f.Policy, f.Push, f.Shared, f.BlockSize, f.PrefillBlocks, f.DecodeBlocks,
		f.Continuation, f.Overtake, f.Promise, f.MaxRequests, f.MaxTokens, f.PrefillTP, f.PrefillPP, f.DecodeTP, f.DecodePP, f.Remote, f.Clients, f.Fail, f.Hang, f.Unsafe,
		cmp.Or(f.Verify, "off"), f.Flip)
	for _, r := range s.Requests {
		fmt.Fprintf(&b, "request at=%v client=%d family=%d shared=%d tail=%d own=%d max=%d stop=%d salt=%d session=%d logprobs=%t abort=%v\n",
			r.At, r.Client, r.Family, r.Shared, r.Tail, r.Own, r.Max, r.Stop, r.Salt, r.Session, r.Logprobs, r.Abort)
	}
	for _, x := range s.Faults {
		fmt.Fprintf(&b, "fault at=%v kind=%s who=%s for=%v\n", x.At, x.Kind, x.Who, x.For)
	}
	return b.String()
}

// Parse reads the text form. Empty lines and what follows a # do not count.
func Parse(text string) (Script, error) {
	var s Script
	lines := bufio.NewScanner(strings.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		line, _, _ := strings.Cut(lines.Text(), "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if err := s.parseLine(words); err != nil {
			return Script{}, fmt.Errorf("sim: line %d: %w", n, err)
		}
	}
	return s, s.validate()
}

func (s *Script) parseLine(words []string) error {
	switch words[0] {
	case "seed":
		if len(words) != 2 {
			return fmt.Errorf("seed takes one number")
		}
		n, err := strconv.ParseUint(words[1], 10, 64)
		s.Seed = n
		return err
	case "fleet":
		return parseFields(words[1:], s.Fleet.fields())
	case "request":
		var r Request
		err := parseFields(words[1:], r.fields())
		s.Requests = append(s.Requests, r)
		return err
	case "fault":
		var x Fault
		err := parseFields(words[1:], map[string]any{"at": &x.At, "kind": &x.Kind, "who": &x.Who, "for": &x.For})
		s.Faults = append(s.Faults, x)
		return err
	}
	return fmt.Errorf("%q is none of seed, fleet, request, fault", words[0])
}

func (f *Fleet) fields() map[string]any {
	return map[string]any{
		"prefill": &f.Prefill, "decode": &f.Decode, "both": &f.Both, "policy": &f.Policy, "push": &f.Push, "shared": &f.Shared,
		"block-size": &f.BlockSize, "prefill-blocks": &f.PrefillBlocks, "decode-blocks": &f.DecodeBlocks,
		"continuation": &f.Continuation, "overtake": &f.Overtake, "promise": &f.Promise, "max-requests": &f.MaxRequests, "max-tokens": &f.MaxTokens, "prefill-tp": &f.PrefillTP, "prefill-pp": &f.PrefillPP,
		"decode-tp": &f.DecodeTP, "decode-pp": &f.DecodePP, "remote": &f.Remote, "clients": &f.Clients, "fail": &f.Fail, "hang": &f.Hang, "unsafe": &f.Unsafe,
		"verify": &f.Verify, "flip": &f.Flip,
	}
}

func (r *Request) fields() map[string]any {
	return map[string]any{
		"at": &r.At, "client": &r.Client, "family": &r.Family, "shared": &r.Shared, "tail": &r.Tail, "own": &r.Own,
		"max": &r.Max, "stop": &r.Stop, "salt": &r.Salt, "session": &r.Session, "logprobs": &r.Logprobs, "abort": &r.Abort,
	}
}

// parseFields reads name=value words into the places that fields gives.
func parseFields(words []string, fields map[string]any) error {
	for _, w := range words {
		name, value, _ := strings.Cut(w, "=")
		var err error
		switch to := fields[name].(type) {
		case *int:
			*to, err = strconv.Atoi(value)
		case *bool:
			*to, err = strconv.ParseBool(value)
		case *string:
			*to = value
		case *time.Duration:
			*to, err = time.ParseDuration(value)
		default:
			err = fmt.Errorf("unknown field")
		}
		if err != nil {
			return fmt.Errorf("%s: %w", w, err)
		}
	}
	return nil
}

func (s Script) validate() error {
	f := s.Fleet
	for _, x := range []struct {
		name  string
		value int
		least int
	}{
		{"block-size", f.BlockSize, 1}, {"prefill-blocks", f.PrefillBlocks, 1}, {"decode-blocks", f.DecodeBlocks, 1},
		{"max-requests", f.MaxRequests, 1}, {"max-tokens", f.MaxTokens, f.MaxRequests}, {"clients", f.Clients, 1},
		{"prefill+decode+both", f.Prefill + f.Decode + f.Both, 1},
	} {
		if x.value < x.least {
			return fmt.Errorf("sim: %s is %d; it must be at least %d", x.name, x.value, x.least)
		}
	}
	if reason := f.checkVerify(); reason != "" {
		return fmt.Errorf("sim: %s", reason)
	}
	for i, r := range s.Requests {
		if r.Client < 0 || r.Client >= f.Clients || r.Shared < 0 || r.Own < 0 || r.Shared+r.Own < 1 || r.Max < 1 {
			return fmt.Errorf("sim: request %d of the script is impossible: %+v", i, r)
		}
	}
	return nil
}
