package text

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json/jsontext"
	"fmt"
	"strings"
)

// OutputFormat is how a model writes tool calls and reasoning. The zero value knows neither: all is content. It is
// immutable.
type OutputFormat struct {
	tools     *toolFormat
	reasoning *reasoningFormat
}

// toolFormat is how a family of models writes calls.
type toolFormat struct {
	name    string
	detect  func(template string) bool // whether a template teaches the format
	shapes  []shape
	begins  string   // the first bytes of the shapes: ASCII
	closers []string // what may follow a call and is neither call nor content
	tags    []string // what may be special tokens
	newID   func() string
}

// reasoningFormat is a pair of tags.
type reasoningFormat struct {
	name        string
	open, close string
}

// Names that stand for a choice: see NewOutputFormat.
const (
	FormatAuto = "auto"
	FormatNone = "none"
)

// NewOutputFormat looks formats up by name. FormatAuto is the one that the chat template's source shows, or none;
// FormatNone is none. An unknown name is an UnsupportedError that lists the known ones.
func NewOutputFormat(tools, reasoning, template string) (OutputFormat, error) {
	var f OutputFormat
	for i := range toolFormats {
		t := &toolFormats[i]
		if f.tools == nil && (tools == t.name || tools == FormatAuto && t.detect(template)) {
			f.tools = t
		}
	}
	if f.tools == nil && tools != FormatAuto && tools != FormatNone {
		return f, unknownFormat("tool parser", tools, ToolFormats())
	}
	for i := range reasoningFormats {
		r := &reasoningFormats[i]
		if f.reasoning == nil && (reasoning == r.name || reasoning == FormatAuto && strings.Contains(template, r.close)) {
			f.reasoning = r
		}
	}
	if f.reasoning == nil && reasoning != FormatAuto && reasoning != FormatNone {
		return f, unknownFormat("reasoning parser", reasoning, ReasoningFormats())
	}
	return f, nil
}

func unknownFormat(part, name string, known []string) error {
	return &UnsupportedError{part, name, fmt.Sprintf("use %s, %s or %s", strings.Join(known, ", "), FormatAuto, FormatNone)}
}

// ToolFormats lists the names of the formats of tool calls.
func ToolFormats() []string {
	var names []string
	for _, f := range toolFormats {
		names = append(names, f.name)
	}
	return names
}

// ReasoningFormats lists the names of the formats of reasoning.
func ReasoningFormats() []string {
	var names []string
	for _, f := range reasoningFormats {
		names = append(names, f.name)
	}
	return names
}

// Tools is the name of the format of tool calls, or FormatNone.
func (f OutputFormat) Tools() string {
	if f.tools == nil {
		return FormatNone
	}
	return f.tools.name
}

// Reasoning is the name of the format of reasoning, or FormatNone.
func (f OutputFormat) Reasoning() string {
	if f.reasoning == nil {
		return FormatNone
	}
	return f.reasoning.name
}

// Tags lists the tags that the parser looks for and a model may write as special tokens: a detokenizer must show them.
func (p *OutputParser) Tags() []string { return p.format.allTags() }

func (f OutputFormat) allTags() []string {
	var tags []string
	if f.reasoning != nil {
		tags = append(tags, f.reasoning.open, f.reasoning.close)
	}
	if f.tools != nil {
		tags = append(tags, f.tools.tags...)
	}
	return tags
}

// OpensReasoning tells whether a prompt that ends in this text has opened reasoning, which the answer goes on with.
func (f OutputFormat) OpensReasoning(prompt string) bool {
	return f.reasoning != nil && strings.HasSuffix(strings.TrimRight(prompt, whiteSpace), f.reasoning.open)
}

// ContinuesReasoning tells whether an answer that begins with this text is still within reasoning.
func (f OutputFormat) ContinuesReasoning(begun string) bool {
	if f.reasoning == nil {
		return false
	}
	begun, ok := strings.CutPrefix(strings.TrimLeft(begun, whiteSpace), f.reasoning.open)
	return ok && !strings.Contains(begun, f.reasoning.close)
}

var reasoningFormats = []reasoningFormat{
	{"think", "<think>", "</think>"},
	{"mistral", "[THINK]", "[/THINK]"},
}

// DeepSeek's tags have full-width bars and low blocks in them.
const (
	dsml             = "｜DSML｜"
	deepseekCalls    = "<｜tool▁calls▁begin｜>"
	deepseekCallsEnd = "<｜tool▁calls▁end｜>"
	deepseekCall     = "<｜tool▁call▁begin｜>"
	deepseekCallEnd  = "<｜tool▁call▁end｜>"
	deepseekSep      = "<｜tool▁sep｜>"
)

// toolFormats are the known families; of those that a template matches the first counts.
var toolFormats = []toolFormat{
	{
		// <tool_call> <function=f> <parameter=a> value </parameter> </function> </tool_call>, also without the outer tag.
		name: "qwen3_coder", begins: "<", newID: randomCallID,
		detect: contains("<function=", "<parameter="),
		shapes: []shape{{
			parts: []part{opt("<tool_call>"), gap, lit("<function="), name, lit(">"), until("</function>"), gap, lit("</tool_call>")},
			calls: taggedCall,
		}},
		tags: []string{"<tool_call>", "</tool_call>"},
	},
	{
		// <tool_call> {"name": "f", "arguments": {}} </tool_call>
		name: "hermes", begins: "<", newID: randomCallID,
		detect: func(template string) bool {
			return strings.Contains(template, "<tool_call>") && !strings.Contains(template, "<arg_key>")
		},
		shapes: []shape{{parts: []part{lit("<tool_call>"), gap, object, gap, lit("</tool_call>")}, calls: oneCall}},
		tags:   []string{"<tool_call>", "</tool_call>"},
	},
	{
		// <TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>; older models: <toolcall> {} </toolcall>
		name: "nemotron", begins: "<", newID: randomCallID,
		detect: func(template string) bool { return strings.Contains(strings.ToUpper(template), "<TOOLCALL>") },
		shapes: []shape{
			{parts: []part{lit("<TOOLCALL>"), gap, array, gap, lit("</TOOLCALL>")}, calls: listOfCalls},
			{parts: []part{lit("<TOOLCALL>"), gap, object, gap, lit("</TOOLCALL>")}, calls: oneCall},
			{parts: []part{lit("<toolcall>"), gap, object, gap, lit("</toolcall>")}, calls: oneCall},
		},
		tags: []string{"<TOOLCALL>", "</TOOLCALL>", "<toolcall>", "</toolcall>"},
	},
	{
		// [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]; from version 11 of its tokenizers
		// [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{} for each call.
		name: "mistral", begins: "[", newID: randomShortID,
		detect: contains("[TOOL_CALLS]"),
		shapes: []shape{
			{parts: []part{lit("[TOOL_CALLS]"), gap, array}, calls: listOfCalls},
			{parts: []part{lit("[TOOL_CALLS]"), gap, name, opt("[ARGS]"), gap, object}, calls: namedCall},
			{parts: []part{lit("[TOOL_CALLS]"), gap, name, lit("[CALL_ID]"), name, opt("[ARGS]"), gap, object}, calls: identifiedCall},
		},
		tags: []string{"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"},
	},
	{
		// Version 3 names the type and wraps the arguments as code, version 3.1 does not.
		name: "deepseek_v3", begins: "<", newID: randomCallID,
		detect: contains(deepseekCall),
		shapes: []shape{
			{
				parts: []part{
					opt(deepseekCalls), gap, lit(deepseekCall), lit("function"), lit(deepseekSep), name, gap,
					lit("```json"), gap, object, gap, lit("```"), gap, lit(deepseekCallEnd),
				},
				calls: namedCall,
			},
			{
				parts: []part{opt(deepseekCalls), gap, lit(deepseekCall), name, lit(deepseekSep), gap, object, gap, lit(deepseekCallEnd)},
				calls: namedCall,
			},
		},
		closers: []string{deepseekCallsEnd},
		tags:    []string{deepseekCalls, deepseekCallsEnd, deepseekCall, deepseekCallEnd, deepseekSep},
	},
	{
		// <｜DSML｜tool_calls> <｜DSML｜invoke name="f"> <｜DSML｜parameter name="a" string="true">value</｜DSML｜parameter> ...
		// The outer tag's name differs between versions, and the latest has a space in each.
		name: "deepseek_v4", begins: "<", newID: randomCallID,
		detect: contains(dsml),
		shapes: []shape{
			dsmlShape("<"+dsml+"tool_calls>", ""), dsmlShape("<"+dsml+"function_calls>", ""), dsmlShape("<"+dsml+" calls>", " "),
		},
		closers: []string{"</" + dsml + "tool_calls>", "</" + dsml + "function_calls>", "</" + dsml + " calls>"},
		tags:    []string{dsml},
	},
	{
		// {"name": "f", "parameters": {}} as the whole answer, several with semicolons between; <|python_tag|> may precede.
		name: "llama3_json", begins: "{<", newID: randomCallID,
		detect: func(template string) bool {
			return strings.Contains(template, "<|start_header_id|>") && strings.Contains(template, `"parameters": `)
		},
		shapes: []shape{
			{parts: []part{object}, calls: wholeCall, first: true},
			{parts: []part{lit("<|python_tag|>"), gap, object}, calls: oneCall},
		},
		closers: []string{";"},
		tags:    []string{"<|python_tag|>"},
	},
}

func contains(marks ...string) func(string) bool {
	return func(template string) bool {
		for _, m := range marks {
			if !strings.Contains(template, m) {
				return false
			}
		}
		return true
	}
}

func oneCall(captured []string, _ parameterTypes) []ToolCall {
	return callOf(jsonCall(jsontext.Value(captured[0]), true))
}

// wholeCall is a call without tags around it: only its arguments tell it from any other answer in JSON.
func wholeCall(captured []string, _ parameterTypes) []ToolCall {
	return callOf(jsonCall(jsontext.Value(captured[0]), false))
}

func callOf(call ToolCall, ok bool) []ToolCall {
	if !ok {
		return nil
	}
	return []ToolCall{call}
}

func listOfCalls(captured []string, _ parameterTypes) []ToolCall {
	return jsonCalls(jsontext.Value(captured[0]))
}

// namedCall is a name and its arguments.
func namedCall(captured []string, _ parameterTypes) []ToolCall {
	arguments, ok := jsonArguments(jsontext.Value(captured[1]))
	return callOf(ToolCall{Name: captured[0], Arguments: arguments}, ok)
}

// identifiedCall is a name, an id and the arguments.
func identifiedCall(captured []string, types parameterTypes) []ToolCall {
	calls := namedCall([]string{captured[0], captured[2]}, types)
	for i := range calls {
		calls[i].ID = captured[1]
	}
	return calls
}

// randomCallID has the form of OpenAI's ids.
func randomCallID() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails
	return "call_" + hex.EncodeToString(b[:])
}

// randomShortID has the nine letters and digits that Mistral's templates insist on.
func randomShortID() string { return rand.Text()[:9] }
