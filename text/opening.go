package text

import (
	"context"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
)

// Opening is the beginning of a call as a model's template writes it. A prompt that ends with it leaves the model no choice
// but to go on with the call. It is immutable.
type Opening struct {
	t      *Tokenizer
	format OutputFormat

	thinks bool     // the template's prompts end within reasoning
	drop   string   // what of such an end makes way for
	close  string   // what closes reasoning, or says that there is none
	call   string   // the beginning of the call
	need   int      // bytes of call that a prompt must have
	next   []string // what may follow call, as far as it is known
}

// Opened is a prompt that ends with the beginning of a call.
type Opened struct {
	IDs  []int32
	Kept int    // of the ids, those of the prompt as it was
	Call string // what the prompt has of the call: OutputOptions.Opening
}

// OpeningError says why a model cannot be made to call a function.
type OpeningError struct{ Reason string }

func (e *OpeningError) Error() string { return e.Reason }

const (
	notPlain  = "a function whose name has other characters than letters, digits, underscores and dashes cannot be called by name"
	noFormat  = "this model's answers are not searched for tool calls: serve it with a --tool-parser"
	notShown  = "the chat template shows no call that the tool parser can read"
	cannotTie = "this model writes something before the name of a function that cannot be known in advance"
	mustThink = "the chat template lets this model think before it calls a function, and cannot be told not to"
	askNot    = `this model thinks before it calls a function: send "chat_template_kwargs": {"enable_thinking": false}`
)

// What a template's calls are learned from.
const (
	openUser     = `{"role":"user","content":"question"}`
	openFunction = "look"
	openOther    = "view"
)

// openCall is a message with one call. Ids have nine letters and digits, which some templates insist on.
func openCall(id, function, arguments string) string {
	b, _ := jsontext.AppendQuote(nil, function)
	return `{"role":"assistant","content":"","tool_calls":[{"id":"` + id + `","type":"function","function":{"name":` + string(b) + `,"arguments":` + arguments + `}}]}`
}

// ToolNames lists the functions of a request's tools, a JSON array.
func ToolNames(tools []byte) []string {
	types, _ := readParameterTypes(tools)
	return slices.Sorted(maps.Keys(types))
}

// OpenCall finds how a prompt must end so that the answer calls a function: this one, or any if it is empty. It is what the
// template writes of a call, up to where the arguments or the name begin. Of the chat the tools and the template's arguments count.
//
// Who has to call cannot think first: where the template lets models think, the opening says that there was no thought as
// the template itself does. Where it does not, and where the format has no fixed beginning, the error is an OpeningError; the others
// are Render's.
func (t *Tokenizer) OpenCall(ctx context.Context, tm *Template, f OutputFormat, c Chat, function string) (*Opening, error) {
	if f.tools == nil {
		return nil, &OpeningError{noFormat}
	}
	if function != "" && !isPlainName(function) {
		return nil, &OpeningError{notPlain}
	}
	w, err := tm.written(ctx, f, c.Extra)
	if err != nil {
		return nil, err
	}
	o := &Opening{t: t, format: f, thinks: w.thinks, drop: w.drop, close: w.close}
	if function == "" {
		o.openAny(w, ToolNames(c.Tools))
		return o, nil
	}
	if err := o.openThis(w, function); err != nil {
		return nil, err
	}
	return o, nil
}

// writtenCall is how a template writes calls.
type writtenCall struct {
	thinks      bool   // its prompts end within reasoning
	drop, close string // as in Opening
	call        string // of openFunction
	bare        string // with another id and without arguments
	name        int    // where the name is
	same        int    // how much of both is the same
}

// calls remembers how a template writes calls.
type calls struct {
	mu    sync.Mutex
	known map[callsKey]*writtenCall
}

type callsKey struct {
	format OutputFormat
	extra  string
}

// Bounds on what is remembered of a template.
const (
	maxCallsKnown = 32
	maxCallsExtra = 1024
)

// written is how a template writes calls that the format's parser reads, with these arguments.
func (tm *Template) written(ctx context.Context, f OutputFormat, extra []byte) (*writtenCall, error) {
	key := callsKey{f, string(extra)}
	tm.calls.mu.Lock()
	w := tm.calls.known[key]
	tm.calls.mu.Unlock()
	if w != nil {
		return w, nil
	}
	var refused *OpeningError
	for _, quoted := range []bool{true, false} { // arguments as the API has them, then as many templates want them
		l := &lesson{ctx: ctx, tm: tm, format: f, extra: extra, quoted: quoted}
		w, err := l.learn()
		if errors.As(err, &refused) {
			continue
		}
		if err != nil {
			return nil, err
		}
		tm.calls.mu.Lock()
		defer tm.calls.mu.Unlock()
		if tm.calls.known == nil {
			tm.calls.known = map[callsKey]*writtenCall{}
		}
		if len(tm.calls.known) < maxCallsKnown && len(extra) <= maxCallsExtra {
			tm.calls.known[key] = w
		}
		return w, nil
	}
	return nil, refused
}

// lesson is a template that is made to write calls.
type lesson struct {
	ctx    context.Context
	tm     *Template
	format OutputFormat
	extra  []byte
	quoted bool // arguments are strings

	prompt Prompt
	calls  [3]string // behind the prompt: a call; with another id and no arguments; of another function
}

// render gives the text of a conversation with these messages.
func (l *lesson) render(messages string, generationPrompt bool) (Prompt, error) {
	return l.tm.Render(l.ctx, Chat{Messages: []byte("[" + messages + "]"), Tools: []byte(tryTools), Extra: l.extra, AddGenerationPrompt: generationPrompt})
}

// looksAlike tells whether what the client wrote looks like control tokens behind some bytes of a text: nothing that a
// prompt ends with is learned from that.
func (p Prompt) looksAlike(from int) bool {
	return len(p.plain) > 0 && p.plain[len(p.plain)-1] >= from
}

// write lets the template write. ok is false if what it shows of calls does not follow its prompt.
func (l *lesson) write() (ok bool, err error) {
	if l.prompt, err = l.render(openUser, true); err != nil {
		return false, err
	}
	for i, call := range []struct{ id, function, arguments string }{
		{"call1abcd", openFunction, `{"a": "b"}`}, {"abcd1call", openFunction, `{}`}, {"call1abcd", openOther, `{"a": "b"}`},
	} {
		if l.quoted {
			b, _ := jsontext.AppendQuote(nil, call.arguments)
			call.arguments = string(b)
		}
		whole, err := l.render(openUser+","+openCall(call.id, call.function, call.arguments), false)
		if err != nil {
			return false, soft(err)
		}
		var follows bool
		if l.calls[i], follows = strings.CutPrefix(whole.Text, l.prompt.Text); !follows || whole.looksAlike(len(l.prompt.Text)) {
			return false, nil
		}
	}
	return true, nil
}

// learn gives what the template writes, if the parser can read it.
func (l *lesson) learn() (*writtenCall, error) {
	follows, err := l.write()
	if err != nil {
		return nil, err
	}
	w := &writtenCall{thinks: l.format.OpensReasoning(l.prompt.Text)}
	rest, closed := skipReasoning(l.calls[0], w.thinks)
	switch {
	case w.thinks && !(follows && closed):
		if err := l.unthink(w); err != nil {
			return nil, err
		}
		rest, _ = skipReasoning(l.calls[0], false)
	case !follows:
		return nil, &OpeningError{notShown}
	}
	from := len(l.calls[0]) - len(rest)
	w.close += l.calls[0][:from]
	w.call, w.name, w.same = rest, commonPrefix(l.calls[0], l.calls[2])-from, commonPrefix(l.calls[0], l.calls[1])-from
	if w.name <= 0 || w.same <= 0 || !strings.HasPrefix(rest[w.name:], openFunction) || !l.format.reads(rest, openFunction) {
		return nil, &OpeningError{notShown}
	}
	w.bare = l.calls[1][from:]
	return w, nil
}

// unthink lets the template write as it does when it is told not to let the model think, which may change how the prompt ends only.
func (l *lesson) unthink(w *writtenCall) error {
	extra := map[string]jsontext.Value{}
	if len(l.extra) > 0 {
		if err := json.Unmarshal(l.extra, &extra, looseJSON); err != nil {
			return l.tm.failure(err)
		}
	}
	for _, name := range []string{"enable_thinking", "thinking"} {
		extra[name] = jsontext.Value("false")
	}
	told := *l
	var err error
	if told.extra, err = json.Marshal(extra); err != nil {
		return l.tm.failure(err)
	}
	ok, err := told.write()
	switch {
	case err != nil:
		return err
	case !ok || l.format.OpensReasoning(told.prompt.Text):
		return &OpeningError{mustThink}
	}
	n := commonPrefix(l.prompt.Text, told.prompt.Text)
	if len(l.prompt.Text)-n > len(l.format.reasoning.open)+2 || told.prompt.looksAlike(n) {
		return &OpeningError{askNot}
	}
	w.drop, w.close, l.calls = l.prompt.Text[n:], told.prompt.Text[n:], told.calls
	return nil
}

// skipReasoning leaves out what a template writes for a model that has not thought, and white space. open says that its prompt
// ends within reasoning, closed that it is over.
func skipReasoning(s string, open bool) (rest string, closed bool) {
	s = strings.TrimLeft(s, whiteSpace)
	for _, r := range reasoningFormats {
		rest, begun := strings.CutPrefix(s, r.open)
		if !begun && !open {
			continue
		}
		if rest, closed = strings.CutPrefix(strings.TrimLeft(rest, whiteSpace), r.close); closed {
			return strings.TrimLeft(rest, whiteSpace), true
		}
	}
	return s, false
}

// openAny ends the opening where the name begins.
func (o *Opening) openAny(w *writtenCall, functions []string) {
	end := min(w.name, w.same)
	o.call, o.need = w.call[:end], 1
	for _, f := range functions {
		if len(o.next) < maxNext && isPlainName(f) {
			o.next = append(o.next, w.call[end:w.name]+f+w.call[w.name+len(openFunction):])
		}
	}
	if len(o.next) == 0 {
		o.next = []string{w.call[end:]}
	}
}

// openThis ends it where the arguments of a function begin.
func (o *Opening) openThis(w *writtenCall, function string) error {
	after := w.name + len(openFunction)
	end := len(strings.TrimRight(w.call[:w.same], "{<")) // what differs may begin alike
	if end < after || strings.Contains(w.call[after:end], openFunction) {
		return &OpeningError{cannotTie}
	}
	if !o.format.reads(w.call[:w.name]+function+w.call[after:], function) {
		return &OpeningError{notShown}
	}
	o.call, o.need = w.call[:w.name]+function+w.call[after:end], w.name+len(function)
	o.next = []string{w.call[end:], w.bare[end:]}
	if strings.HasPrefix(w.call[end:], "{") {
		o.next = append(o.next, "{\n")
	}
	return nil
}

// maxNext bounds the names that are tried for what may follow.
const maxNext = 64

// isPlainName tells whether every format can write a name as it is.
func isPlainName(name string) bool {
	for i := range len(name) {
		if !isNameByte(name[i]) || name[i] == '\\' {
			return false
		}
	}
	return name != "" && len(name) <= maxNameBytes
}

// reads tells whether the parser finds a call at once.
func (f OutputFormat) reads(shown, function string) bool {
	p := OutputFormat{tools: f.tools}.NewParser(OutputOptions{Tools: []byte(tryTools)})
	deltas := slices.Clone(p.Push(shown))
	deltas = append(deltas, p.Flush()...)
	if len(deltas) == 0 || deltas[0].Kind != DeltaToolCall || deltas[0].Call.Name != function {
		return false
	}
	arguments := jsontext.Value(deltas[0].Call.Arguments)
	return arguments.Compact() == nil && string(arguments) == `{"a":"b"}`
}

// Append ends a prompt with the opening. The ids are those of the text as a whole, cut where a token ends whatever comes next, as
// far as that is known; some of the prompt's last ids may be others then.
func (o *Opening) Append(prompt []int32) (Opened, error) {
	last, text := o.tail(prompt, maxTail)
	shown := text
	if last == nil {
		shown = o.t.Decode(prompt[max(0, len(prompt)-maxTail):], false)
	}
	ids, call, err := o.end(text, o.format.OpensReasoning(shown))
	if err != nil {
		return Opened{}, err
	}
	same := commonIDs(last, ids)
	kept := len(prompt) - len(last) + same
	return Opened{slices.Concat(prompt[:kept], ids[same:]), kept, call}, nil
}

// Complete is Append for a prompt that may end with the opening already.
func (o *Opening) Complete(prompt []int32) (Opened, error) {
	last, text := o.tail(prompt, maxTail+len(o.close)+len(o.call))
	for n := len(o.call); n >= o.need; n-- {
		before, ok := strings.CutSuffix(text, o.call[:n])
		if !ok {
			continue
		}
		before = strings.TrimSuffix(before, o.close)
		ids, call, err := o.end(before, o.format.OpensReasoning(before))
		if err == nil && slices.Equal(ids, last) {
			return Opened{prompt, len(prompt), call}, nil
		}
	}
	return o.Append(prompt)
}

// end gives the ids of a prompt's end and of the opening behind it, and what these have of the call. open says that the prompt
// ends within reasoning.
func (o *Opening) end(text string, open bool) (ids []int32, call string, err error) {
	shut := o.close
	switch {
	case open && !o.thinks:
		return nil, "", &OpeningError{mustThink}
	case o.thinks && !open:
		shut = "" // after a tool's answer, with some templates
	default:
		text = strings.TrimSuffix(text, o.drop)
	}
	from := len(text) + len(shut)
	whole := text + shut + o.call
	ids, n, err := o.encode(whole, from+o.need)
	if err != nil {
		return nil, "", err
	}
	return ids, whole[from:n], nil
}

// maxTail is so many tokens at the end of a prompt that what is encoded behind them does not depend on what is before.
const maxTail = 32

// tail gives the last ids of a prompt, at most n, whose text has just these ids, and that text.
func (o *Opening) tail(prompt []int32, n int) ([]int32, string) {
	for n = min(n, len(prompt)); n > 0; n-- {
		last := prompt[len(prompt)-n:]
		text := o.t.Decode(last, false)
		if again, err := o.t.Encode(text, EncodeOptions{ParseSpecial: true}); err == nil && slices.Equal(again, last) {
			return last, text
		}
	}
	return nil, ""
}

// encode gives the ids that a text has whatever follows, and how many bytes of it they are: at least so many.
func (o *Opening) encode(whole string, need int) (ids []int32, n int, err error) {
	special := EncodeOptions{ParseSpecial: true}
	for i, next := range o.next {
		more, err := o.t.Encode(whole+next, special)
		if err != nil {
			return nil, 0, err
		}
		if i == 0 {
			ids = more
		}
		ids = ids[:commonIDs(ids, more)]
	}
	for ; len(ids) > 0; ids = ids[:len(ids)-1] {
		if text := o.t.Decode(ids, false); len(text) >= need && strings.HasPrefix(whole, text) {
			return ids, len(text), nil
		} else if len(text) < need {
			break
		}
	}
	ids, err = o.t.Encode(whole, special)
	return ids, len(whole), err
}
