package text

import (
	"context"
	"hash/fnv"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/ardanlabs/jinja"
)

// Bounds of a window, in messages.
const (
	maxGrowth = 8  // since it was picked; then it is picked anew
	maxWindow = 32 // beyond it all messages are rendered
	minTail   = 2  // of the last messages, which a window always has
)

// messageShape is what a template can tell a message by without showing it: its role, which fields it has and of what kind, and
// whether its text holds what the template looks for.
type messageShape struct {
	kind messageKind
	hash uint64
}

// messageKind is a coarser shape.
type messageKind byte

const (
	kindOther messageKind = iota
	kindUser
	kindAnswer // of the assistant, without calls
	kindCall
	kindTool
)

// searched finds what a template looks for in strings.
var searched = regexp.MustCompile(`(?:'([^'\\]+)'|"([^"\\]+)")\s+(?:not\s+)?in\s|\.(?:startswith|endswith|split|rsplit|find|partition|index|count)\(\s*(?:'([^'\\]+)'|"([^"\\]+)")`)

// needles are the strings that a template's source looks for.
func needles(source string) (list []string) {
	for _, m := range searched.FindAllStringSubmatch(source, -1) {
		if s := strings.Join(m[1:], ""); !slices.Contains(list, s) {
			list = append(list, s)
		}
	}
	return list
}

// mutators are methods by which a template changes values.
var mutators = regexp.MustCompile(`\.\s*(?:append|insert|pop|update|extend|remove|clear|setdefault|sort|reverse)\s*\(`)

func (tm *Template) shapesOf(messages []jinja.Value) []messageShape {
	list := make([]messageShape, len(messages))
	for i, m := range messages {
		list[i] = tm.shapeOf(m)
	}
	return list
}

func (tm *Template) shapeOf(m jinja.Value) messageShape {
	h := fnv.New64a()
	var s messageShape
	if m.IsDict() {
		role, _ := m.AsDict().Get("role")
		calls, _ := m.AsDict().Get("tool_calls")
		s.kind = kindOf(role, calls)
		if role.IsString() {
			io.WriteString(h, role.AsString())
		}
	}
	tm.feature(h, m, 0)
	s.hash = h.Sum64()
	return s
}

func kindOf(role, calls jinja.Value) messageKind {
	if !role.IsString() {
		return kindOther
	}
	switch role.AsString() {
	case "user":
		return kindUser
	case "tool", "ipython", "function":
		return kindTool
	case "assistant":
		if calls.IsTruthy() {
			return kindCall
		}
		return kindAnswer
	}
	return kindOther
}

// maxFeature is how deep a message is looked into: at the fields of a call's function, not at its arguments.
const maxFeature = 4

func (tm *Template) feature(h io.Writer, v jinja.Value, depth int) {
	write := func(b ...byte) { h.Write(b) }
	switch {
	case v.IsString():
		s := v.AsString()
		write('s')
		switch {
		case s == "":
			write(0)
		case strings.TrimSpace(s) == "":
			write(1)
		}
		for i, needle := range tm.needles {
			switch {
			case depth > 2 || !strings.Contains(s, needle):
			case strings.HasPrefix(s, needle):
				write('p', byte(i))
			case strings.HasSuffix(s, needle):
				write('e', byte(i))
			default:
				write('i', byte(i))
			}
		}
	case v.IsList():
		items := v.AsList().Items
		write('l', byte(min(len(items), 2)))
		if len(items) > 0 && depth < maxFeature {
			tm.feature(h, items[0], depth+1)
		}
	case v.IsDict():
		write('d')
		if depth >= maxFeature {
			return
		}
		for _, name := range v.AsDict().Keys {
			io.WriteString(h, name)
			if name == "arguments" || name == "parameters" {
				write('s')
				continue
			}
			tm.feature(h, v.AsDict().Data[name], depth+1)
		}
		write('.')
	case v.IsNone():
		write('n')
	case v.IsBool():
		write('b')
	default:
		write('0')
	}
}

// bigram is a message's kind and that of the one before it.
type bigram [2]messageKind

func bigramAt(shapes []messageShape, i int) bigram { return bigram{shapes[i-1].kind, shapes[i].kind} }

// mustKeep is the first of the old messages that may look otherwise, or count, once these are added, so that a window must
// have it and all that follow it: none if the new messages only go on as the old ones since the last of the user
// have; otherwise all since then.
func mustKeep(old, added []messageShape) int {
	user := len(old) - 1
	for user > 0 && old[user].kind != kindUser {
		user--
	}
	if len(old) == 0 {
		return 0
	}
	seen := map[bigram]bool{}
	for i := user + 2; i < len(old); i++ {
		seen[bigramAt(old, i)] = true
	}
	last := old[len(old)-1].kind
	for _, s := range added {
		if s.kind == kindUser || !seen[bigram{last, s.kind}] {
			return user
		}
		last = s.kind
	}
	return len(old)
}

// keeps reports whether a window of n messages has all of them from one on.
func keeps(win []int, from, n int) bool {
	return len(win) >= n-from && (n == from || win[len(win)-(n-from)] == from)
}

// window picks messages that stand for all: it leaves out rounds that are repeated, so that what precedes the gap and what
// follows it are of kinds that also follow each other elsewhere. The first message of each shape stays, each pair of kinds
// once, and all from keep on.
func window(shapes []messageShape, keep int) []int {
	tail := min(len(shapes)-minTail, keep)
	for tail > 0 && shapes[tail].kind == kindTool {
		tail--
	}
	var win []int
	pairs, known := map[bigram]bool{}, map[messageShape]bool{}
	for p := 0; p < len(shapes); p++ {
		next := p
		if p > 0 {
			here := bigramAt(shapes, p)
			pairs[here] = true
			// What is left out is [p, q): all of it must be known.
			for q := p + 1; q <= tail && known[shapes[q-1]] && pairs[bigramAt(shapes, q)]; q++ {
				if bigramAt(shapes, q) == here {
					next = q
				}
			}
		}
		win = append(win, next)
		known[shapes[next]] = true
		p = next
	}
	return win
}

// tryWindows finds out whether what the template shows of a message depends only on what windows keep: it lets
// conversations of several kinds grow and compares.
func (tm *Template) tryWindows(t *Tokenizer) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	tried := false
	for _, rounds := range trials {
		ok, ran := tm.tryRounds(ctx, t, rounds)
		if !ok || ctx.Err() != nil {
			return false
		}
		tried = tried || ran
	}
	return tried
}

// Messages of the conversations that are tried. A dollar is their number.
const (
	trySystem  = `{"role":"system","content":"system $"}`
	tryUser    = `{"role":"user","content":"question $"}`
	tryAnswer  = `{"role":"assistant","content":"answer $"}`
	tryThought = `{"role":"assistant","content":"answer $","reasoning_content":"thought $"}`
	tryTagged  = `{"role":"assistant","content":"<think>\nthought $\n</think>\n\nanswer $"}`
	tryCall    = `{"role":"assistant","content":"","tool_calls":[{"id":"call$abcd","type":"function","function":{"name":"look","arguments":"{\"a\":\"$\"}"}}]}`
	trySaid    = `{"role":"assistant","content":"let me see $","reasoning_content":"thought $","tool_calls":[{"id":"call$abcd","type":"function","function":{"name":"look","arguments":"{\"a\":\"$\"}"}}]}`
	tryTwo     = `{"role":"assistant","content":"","tool_calls":[{"id":"call$abcd","type":"function","function":{"name":"look","arguments":"{}"}},{"id":"call$abce","type":"function","function":{"name":"look","arguments":"{}"}}]}`
	tryTool    = `{"role":"tool","tool_call_id":"call$abcd","name":"look","content":"result $"}`
	tryTools   = `[{"type":"function","function":{"name":"look","description":"d","parameters":{"type":"object","properties":{"a":{"type":"string","description":"d"}},"required":["a"]}}}]`
)

// trials are conversations as what each turn adds.
var trials = [][][]string{
	grow([]string{trySystem, tryUser}, 16, []string{tryCall, tryTool}),
	grow([]string{tryUser}, 12, []string{trySaid, tryTool}),
	grow([]string{trySystem, tryUser}, 10, []string{tryTwo, tryTool, tryTool}),
	grow([]string{trySystem, tryUser}, 12, []string{tryAnswer, tryUser}),
	grow([]string{tryUser}, 10, []string{tryThought, tryUser}),
	grow([]string{tryUser}, 10, []string{tryTagged, tryUser}),
	grow([]string{trySystem, tryUser}, 6, []string{tryCall, tryTool}, []string{trySaid, tryTool}, []string{tryTwo, tryTool, tryTool}, []string{tryCall, tryTool}),
	grow([]string{trySystem, tryUser}, 3, []string{tryCall, tryTool}, []string{trySaid, tryTool}, []string{tryCall, tryTool},
		[]string{tryThought, tryUser}, []string{tryTwo, tryTool, tryTool}, []string{tryCall, tryTool}, []string{tryAnswer, tryUser}),
}

// grow repeats turns behind a beginning.
func grow(first []string, times int, turns ...[]string) [][]string {
	list := [][]string{first}
	for range times {
		list = append(list, turns...)
	}
	return list
}

// tryRounds lets one conversation grow. ran is false when the template does not take it.
func (tm *Template) tryRounds(ctx context.Context, t *Tokenizer, turns [][]string) (ok, ran bool) {
	var messages []string
	var prev *Script
	n := 0
	for _, turn := range turns {
		for _, m := range turn {
			messages = append(messages, strings.ReplaceAll(m, "$", string(rune('a'+n/26%26))+string(rune('a'+n%26))))
			n++
		}
		c := Chat{Messages: []byte("[" + strings.Join(messages, ",") + "]"), Tools: []byte(tryTools), AddGenerationPrompt: true, Now: time.Unix(0, 0).UTC()}
		whole, err := tm.Render(ctx, c)
		if err != nil {
			return true, ran // it takes no such conversation, or none so long
		}
		r := &rendering{t: t, tm: tm, chat: c, trial: true}
		s, reuse, err := r.run(ctx, prev, Prefix{}, Reuse{Reason: prev.Follows(tm, &c)})
		if err != nil || s.prompt.Text != whole.Text || reuse.Reason == Seam {
			return false, true
		}
		prev, ran = s, true
	}
	return true, true
}
