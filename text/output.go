package text

import (
	"bytes"
	"unicode/utf8"
)

// OutputParser sorts one answer, as its text comes, into content, reasoning and tool calls. How the text is
// cut into pieces, even within a tag or a character, changes nothing in what comes out. It is not safe for
// concurrent use.
//
// A call is given once it is complete: what was sent cannot be taken back, and a call that turns out malformed,
// or that the end of the answer cuts off, stays content as the model wrote it. Nothing is ever an error.
//
// Reasoning is looked for at the beginning of an answer only, calls in what follows it. Line breaks after a
// reasoning tag and white space before one are dropped, as templates write their own; so is white space before a
// call, and after a call when the answer ends there.
type OutputParser struct {
	format OutputFormat
	types  parameterTypes
	newID  func() string

	stage   outputStage
	opened  bool   // the prompt ended within reasoning
	trim    bool   // line breaks are dropped until other text comes
	partial []byte // the beginning of a character
	held    []byte // text of the current stage that is not decided yet

	out  []Delta
	kind DeltaKind
	text []byte // of the next delta, of that kind

	matches   []callMatch // what a call at the beginning of held may be; empty when none is under way
	space     []byte      // white space that came before held, and is content if content follows
	content   bool        // content has been given
	afterCall bool        // a call has been, and no content since
	calls     int
}

type outputStage int

const (
	stageOpening   outputStage = iota // is there an opening tag?
	stageReasoning                    // until the closing tag
	stageContent
)

// DeltaKind says what a Delta adds to.
type DeltaKind int

// The kinds of Delta.
const (
	DeltaContent DeltaKind = iota
	DeltaReasoning
	DeltaToolCall
)

// Delta is the next piece of an answer.
type Delta struct {
	Kind DeltaKind
	Text string   // of content or reasoning: whole characters
	Call ToolCall // the kind DeltaToolCall: one complete call
}

// ToolCall is a function call that a model asks for.
type ToolCall struct {
	Index     int    // from 0, in the order of the answer
	ID        string // the model's own where its format has ids, otherwise from OutputOptions.NewID
	Name      string // not empty; not checked against the tools of the request
	Arguments string // a JSON object, with the model's own spelling where its format is JSON
}

// OutputOptions describe one answer.
type OutputOptions struct {
	// Tools are the request's tools, a JSON array; without any no calls are looked for. Formats that are not
	// JSON take the types of arguments from their schemas.
	Tools []byte
	// ReasoningOpen says that the prompt ends within reasoning (see OutputFormat.OpensReasoning).
	ReasoningOpen bool
	// Opening is the beginning of a call that the prompt ends with (see Opened): the answer is read as if it began with it, and
	// no reasoning is looked for.
	Opening string
	// NewID makes the ids of calls; nil makes random ones in the form that the format's template accepts.
	NewID func() string
}

// NewParser begins an answer.
func (f OutputFormat) NewParser(o OutputOptions) *OutputParser {
	p := &OutputParser{format: f, newID: o.NewID, stage: stageContent, opened: o.ReasoningOpen}
	types, any := readParameterTypes(o.Tools)
	if !any {
		p.format.tools = nil
	}
	p.types = types
	if f.reasoning != nil && o.Opening == "" {
		p.stage = stageOpening
	}
	p.held = append(p.held, o.Opening...)
	if p.newID == nil && p.format.tools != nil {
		p.newID = p.format.tools.newID
	}
	return p
}

// Push takes more text and gives what it decides. The deltas are the caller's until the next call.
func (p *OutputParser) Push(text string) []Delta {
	p.out = p.out[:0]
	if len(p.partial) > 0 || !utf8.ValidString(text) {
		p.partial = append(p.partial, text...)
		var rest []byte
		text, rest = decodeUTF8(p.partial)
		p.partial = append(p.partial[:0], rest...)
	}
	p.held = append(p.held, text...)
	for p.step() {
	}
	p.endDelta()
	return p.out
}

// Flush ends the answer and gives what was held back.
func (p *OutputParser) Flush() []Delta {
	p.out = p.out[:0]
	if len(p.partial) > 0 {
		p.partial = p.partial[:0]
		p.held = append(p.held, "\uFFFD"...)
	}
	for p.step() {
	}
	switch {
	case p.stage == stageReasoning || p.stage == stageOpening && p.opened:
		p.emit(DeltaReasoning, p.held)
	default:
		p.endCalls()
		if !p.afterCall {
			p.emit(DeltaContent, p.space)
		}
		p.emit(DeltaContent, p.held)
		p.space = p.space[:0]
	}
	p.held, p.stage = p.held[:0], stageContent
	p.endDelta()
	return p.out
}

// step decides what it can at the beginning of held; false is that more text is needed.
func (p *OutputParser) step() bool {
	if p.trim && len(p.held) > 0 {
		p.drop(len(p.held) - len(bytes.TrimLeft(p.held, "\r\n")))
		p.trim = len(p.held) == 0
	}
	if len(p.held) == 0 {
		return false
	}
	switch p.stage {
	case stageOpening:
		return p.opening()
	case stageReasoning:
		return p.reasoning()
	}
	if p.format.tools != nil {
		return p.toolCalls()
	}
	p.emit(DeltaContent, p.held)
	p.held = p.held[:0]
	return false
}

// opening looks for the tag that begins reasoning. A model may repeat one that the prompt has.
func (p *OutputParser) opening() bool {
	tag := p.format.reasoning.open
	rest := bytes.TrimLeft(p.held, whiteSpace)
	switch {
	case bytes.HasPrefix(rest, []byte(tag)):
		p.drop(len(p.held) - len(rest) + len(tag))
		p.stage, p.trim = stageReasoning, true
	case len(rest) < len(tag) && tag[:len(rest)] == string(rest):
		return false
	case p.opened:
		p.stage, p.trim = stageReasoning, true
	default:
		p.stage = stageContent
	}
	return true
}

// reasoning looks for the tag that ends it.
func (p *OutputParser) reasoning() bool {
	tag := p.format.reasoning.close
	if i := bytes.Index(p.held, []byte(tag)); i >= 0 {
		p.emit(DeltaReasoning, bytes.TrimRight(p.held[:i], whiteSpace))
		p.drop(i + len(tag))
		p.stage, p.trim = stageContent, true
		return true
	}
	decided := len(p.held)
	for k := min(len(tag)-1, len(p.held)); k > 0; k-- {
		if bytes.HasSuffix(p.held, []byte(tag[:k])) {
			decided -= k
			break
		}
	}
	decided = len(bytes.TrimRight(p.held[:decided], whiteSpace))
	p.emit(DeltaReasoning, p.held[:decided])
	p.drop(decided)
	return false
}

// emit gives text.
func (p *OutputParser) emit(kind DeltaKind, text []byte) {
	if kind != p.kind {
		p.endDelta()
		p.kind = kind
	}
	p.text = append(p.text, text...)
}

// endDelta makes a delta of the text that was given since the last one.
func (p *OutputParser) endDelta() {
	if len(p.text) > 0 {
		p.out = append(p.out, Delta{Kind: p.kind, Text: string(p.text)})
		p.text = p.text[:0]
	}
}

// emitContent gives content but for the white space at its end, which a call may follow.
func (p *OutputParser) emitContent(text []byte) {
	body := bytes.TrimRight(text, whiteSpace)
	if len(body) > 0 {
		p.emit(DeltaContent, p.space)
		p.emit(DeltaContent, body)
		p.space = p.space[:0]
		p.content, p.afterCall = true, false
	}
	p.space = append(p.space, text[len(body):]...)
}

// drop forgets the first n bytes of held.
func (p *OutputParser) drop(n int) { p.held = p.held[n:] }

const whiteSpace = " \t\r\n"

func isWhiteSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\n' }
