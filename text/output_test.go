package text

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"
)

// someTools make parsers look for calls, and give the types of arguments.
const someTools = `[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{
	"s":{"type":"string"},"i":{"type":"integer"},"x":{"type":"number"},"b":{"type":"boolean"},"o":{"type":"object"},"a":{"type":"array"},
	"optional":{"anyOf":[{"type":"string"},{"type":"null"}]},"either":{"type":["integer","string"]},"n":{"type":["integer","null"]}}}}}]`

// output is a whole answer, sorted.
type output struct {
	content, reasoning string
	calls              []ToolCall
}

// parseOutput reads an answer that comes in pieces and puts it together.
func parseOutput(t interface{ Fatalf(string, ...any) }, f OutputFormat, open bool, pieces ...string) (o output) {
	n := 0
	p := f.NewParser(OutputOptions{Tools: []byte(someTools), ReasoningOpen: open, NewID: func() string { n++; return fmt.Sprint("id", n) }})
	take := func(deltas []Delta) {
		for i, d := range deltas {
			if d.Kind != DeltaToolCall && (d.Text == "" || !utf8.ValidString(d.Text)) {
				t.Fatalf("delta %d has the text %q", i, d.Text)
			}
			switch d.Kind {
			case DeltaContent:
				o.content += d.Text
			case DeltaReasoning:
				o.reasoning += d.Text
			case DeltaToolCall:
				if d.Call.Index != len(o.calls) || d.Call.Name == "" || d.Call.ID == "" || jsontext.Value(d.Call.Arguments).Kind() != '{' {
					t.Fatalf("call %d is %+v", len(o.calls), d.Call)
				}
				o.calls = append(o.calls, d.Call)
			}
		}
	}
	for _, piece := range pieces {
		take(p.Push(piece))
	}
	take(p.Flush())
	if again := p.Flush(); len(again) > 0 {
		t.Fatalf("a second Flush gives %v", again)
	}
	return o
}

func (o output) String() string {
	var b strings.Builder
	if o.reasoning != "" {
		fmt.Fprintf(&b, "reasoning %q\n", o.reasoning)
	}
	if o.content != "" {
		fmt.Fprintf(&b, "content %q\n", o.content)
	}
	for _, c := range o.calls {
		fmt.Fprintf(&b, "call %s %s %s\n", c.ID, c.Name, c.Arguments)
	}
	if b.Len() == 0 {
		return "nothing\n"
	}
	return b.String()
}

// TestOutputs reads the answers of testdata/outputs.txt whole, and again character by character; go test -rewrite
// writes the results anew.
func TestOutputs(t *testing.T) {
	datadriven.RunTest(t, "testdata/outputs.txt", func(t *testing.T, d *datadriven.TestData) string {
		tools, reasoning := FormatNone, FormatNone
		d.MaybeScanArgs(t, "tools", &tools)
		d.MaybeScanArgs(t, "reasoning", &reasoning)
		f, err := NewOutputFormat(tools, reasoning, "")
		if err != nil {
			return err.Error()
		}
		text := strings.ReplaceAll(d.Input, "⏎", "\n")
		got := parseOutput(t, f, d.HasArg("open"), text).String()
		if slow := parseOutput(t, f, d.HasArg("open"), strings.Split(text, "")...).String(); slow != got {
			t.Errorf("%s: in pieces %q\n is %s not %s", d.Pos, text, slow, got)
		}
		return got
	})
}

// outputPieces are what the formats are made of, whole and broken.
func outputPieces() []string {
	pieces := []string{
		" ", "\n", "\n\n", "text", "é日😀", "\xf0\x9f", "\xff", "<", "[", "{", "{}", "}", "\"", "\\", ";", "｜", "f", "abcdefghi", "function", "```json\n", "```",
		`{"name": "f", "arguments": {"s": "x</tool_call>"}}`, `{"name":"f","parameters":{"i":1}}`, `[{"name": "f", "arguments": {}}]`, `{"name":"f","arguments":`, `{"name": 1}`,
		"<function=f>", "<parameter=s>", "</parameter>", "</function>", "<parameter=i>\n7\n</parameter>", "<tool", "_call>", "<th", "ink>",
	}
	for _, f := range toolFormats {
		pieces = append(append(pieces, f.tags...), f.closers...)
	}
	for _, r := range reasoningFormats {
		pieces = append(pieces, r.open, r.close)
	}
	return pieces
}

func allFormats() (list []OutputFormat) {
	for i := range len(toolFormats) + 1 {
		for k := range len(reasoningFormats) + 1 {
			var f OutputFormat
			if i < len(toolFormats) {
				f.tools = &toolFormats[i]
			}
			if k < len(reasoningFormats) {
				f.reasoning = &reasoningFormats[k]
			}
			list = append(list, f)
		}
	}
	return list
}

// TestOutputSplits: how an answer is cut, within tags and characters too, changes nothing.
func TestOutputSplits(t *testing.T) {
	pieces, formats := outputPieces(), allFormats()
	rapid.Check(t, func(rt *rapid.T) {
		f := rapid.SampledFrom(formats).Draw(rt, "format")
		open := rapid.Bool().Draw(rt, "open")
		text := strings.Join(rapid.SliceOfN(rapid.SampledFrom(pieces), 0, 16).Draw(rt, "text"), "")
		want := parseOutput(rt, f, open, text).String()
		var cut []string
		for rest := text; rest != ""; {
			n := min(len(rest), rapid.IntRange(1, 9).Draw(rt, "n"))
			cut = append(cut, rest[:n])
			rest = rest[n:]
		}
		if got := parseOutput(rt, f, open, cut...).String(); got != want {
			rt.Fatalf("%s/%s %q\n got %s\nwant %s", f.Tools(), f.Reasoning(), cut, got, want)
		}
	})
}

// writeCalls is how each family writes calls, apart from the parser's own tables.
var writeCalls = map[string]func(calls []ToolCall) string{
	"hermes": func(calls []ToolCall) string {
		return joinCalls(calls, "\n", func(c ToolCall) string {
			return "<tool_call>\n{\"name\": " + quoteJSON(c.Name) + ", \"arguments\": " + c.Arguments + "}\n</tool_call>"
		})
	},
	"nemotron": func(calls []ToolCall) string {
		return "<TOOLCALL>[" + joinCalls(calls, ", ", plainCall) + "]</TOOLCALL>"
	},
	"mistral": func(calls []ToolCall) string { return "[TOOL_CALLS] [" + joinCalls(calls, ", ", plainCall) + "]" },
	"deepseek_v3": func(calls []ToolCall) string {
		return "<｜tool▁calls▁begin｜>" + joinCalls(calls, "\n", func(c ToolCall) string {
			return "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + c.Name + "\n```json\n" + c.Arguments + "\n```<｜tool▁call▁end｜>"
		}) + "<｜tool▁calls▁end｜>"
	},
	"deepseek_v4": func(calls []ToolCall) string {
		return "<｜DSML｜tool_calls>\n" + joinCalls(calls, "\n", func(c ToolCall) string {
			var arguments map[string]string
			_ = json.Unmarshal([]byte(c.Arguments), &arguments)
			return "<｜DSML｜invoke name=\"" + c.Name + "\">\n<｜DSML｜parameter name=\"s\" string=\"true\">" + arguments["s"] + "</｜DSML｜parameter>\n</｜DSML｜invoke>"
		}) + "\n</｜DSML｜tool_calls>"
	},
	"llama3_json": func(calls []ToolCall) string {
		return joinCalls(calls, "; ", func(c ToolCall) string {
			return `{"name": ` + quoteJSON(c.Name) + `, "parameters": ` + c.Arguments + `}`
		})
	},
	"qwen3_coder": func(calls []ToolCall) string {
		return joinCalls(calls, "\n", func(c ToolCall) string {
			var arguments map[string]string
			_ = json.Unmarshal([]byte(c.Arguments), &arguments)
			body := ""
			for _, name := range slices.Sorted(maps.Keys(arguments)) {
				body += "<parameter=" + name + ">\n" + arguments[name] + "\n</parameter>\n"
			}
			return "<tool_call>\n<function=" + c.Name + ">\n" + body + "</function>\n</tool_call>"
		})
	},
}

func plainCall(c ToolCall) string {
	return `{"name": ` + quoteJSON(c.Name) + `, "arguments": ` + c.Arguments + `}`
}

func joinCalls(calls []ToolCall, sep string, one func(ToolCall) string) string {
	var parts []string
	for _, c := range calls {
		parts = append(parts, one(c))
	}
	return strings.Join(parts, sep)
}

func quoteJSON(s string) string {
	b, _ := jsontext.AppendQuote(nil, s)
	return string(b)
}

// TestOutputRoundTrip: calls with any strings in their arguments, written as a family writes them, come back byte for
// byte, with the text around them.
func TestOutputRoundTrip(t *testing.T) {
	for _, family := range ToolFormats() {
		write := writeCalls[family]
		if write == nil {
			t.Errorf("no calls of %s are written", family)
			continue
		}
		f, err := NewOutputFormat(family, "think", "")
		if err != nil {
			t.Fatal(err)
		}
		t.Run(family, func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				var want output
				for i := range rapid.IntRange(1, 3).Draw(rt, "calls") {
					value := rapid.OneOf(rapid.String(), rapid.StringMatching(`[<>\[\]{}"\\/;a-z]{0,20}(</tool_call>|\[TOOL_CALLS\]|"}]|<think>)?`)).Draw(rt, "value")
					if strings.HasSuffix(family, "_coder") || family == "deepseek_v4" { // its values are not escaped
						value = "v" + strings.NewReplacer("<", "(", "\r", "").Replace(value) + "v"
					}
					want.calls = append(want.calls, ToolCall{
						Index: i, ID: fmt.Sprint("id", i+1), Name: rapid.StringMatching(`[a-zA-Z_][a-zA-Z0-9_.-]{0,20}`).Draw(rt, "name"),
						Arguments: `{"s": ` + quoteJSON(value) + `}`,
					})
				}
				if family != "llama3_json" {
					want.content = rapid.StringMatching(`([a-z{é][a-z é\n]{0,20}[a-zé.])?`).Draw(rt, "content")
				}
				text := want.content + "\n" + write(want.calls)
				if rapid.Bool().Draw(rt, "thinks") {
					want.reasoning = rapid.StringMatching(`[a-zé<][a-z \n<]{0,30}[a-z/<]`).Draw(rt, "reasoning")
					text = "<think>\n" + want.reasoning + "\n</think>\n\n" + strings.TrimLeft(text, "\n")
				}
				if got := parseOutput(rt, f, false, text); got.String() != want.String() {
					rt.Fatalf("%q\n got %s\nwant %s", text, got, want)
				}
			})
		})
	}
}

// TestRenderedOutputs: what models' own templates make of an answer with calls comes back as the same answer.
func TestRenderedOutputs(t *testing.T) {
	var v struct {
		Tools     jsontext.Value   `json:"tools"`
		Arguments []jsontext.Value `json:"arguments"`
		Answers   []struct {
			Template  string `json:"template"`
			Tools     string `json:"tools"`
			Reasoning string `json:"reasoning"`
			Open      bool   `json:"open"`
			Text      string `json:"text"`
			Content   string `json:"content"`
			Calls     int    `json:"calls"`
		} `json:"answers"`
	}
	readVectors(t, "testdata/rendered.json.gz", &v)
	names := []string{"get_weather", "noop"}
	covered := map[string]bool{}
	for _, a := range v.Answers {
		covered[a.Tools] = true
		f, err := NewOutputFormat(a.Tools, a.Reasoning, "")
		if err != nil {
			t.Fatal(err)
		}
		p := f.NewParser(OutputOptions{Tools: v.Tools, ReasoningOpen: a.Open})
		var got output
		for _, deltas := range [][]Delta{slices.Clone(p.Push(a.Text)), p.Flush()} {
			for _, d := range deltas {
				switch d.Kind {
				case DeltaContent:
					got.content += d.Text
				case DeltaReasoning:
					got.reasoning += d.Text
				case DeltaToolCall:
					got.calls = append(got.calls, d.Call)
				}
			}
		}
		reasoning := ""
		if strings.Contains(a.Text, "Hm.") {
			reasoning = "Hm."
		}
		if got.content != a.Content || got.reasoning != reasoning || len(got.calls) != a.Calls {
			t.Errorf("%s: %q\n becomes %s", a.Template, a.Text, got)
			continue
		}
		for i, call := range got.calls {
			want, given := v.Arguments[i].Clone(), jsontext.Value(call.Arguments).Clone()
			if err := errors.Join(want.Canonicalize(), given.Canonicalize()); err != nil || call.Name != names[i] || string(given) != string(want) {
				t.Errorf("%s: call %d is %+v, want %s %s (%v)", a.Template, i, call, names[i], want, err)
			}
		}
	}
	for _, family := range ToolFormats() {
		if !covered[family] {
			t.Errorf("no template of %s", family)
		}
	}
}

// FuzzOutput: nothing panics, without calls nothing is lost but white space and tags, and pieces give the whole.
func FuzzOutput(f *testing.F) {
	formats := allFormats()
	for i := range formats {
		f.Add(uint8(i), uint8(i*7), "<think>\nhm\n</think>\n\n"+`a <tool_call>{"name":"f","arguments":{}}</tool_call>`)
	}
	for family, write := range writeCalls {
		k := slices.IndexFunc(formats, func(o OutputFormat) bool { return o.Tools() == family })
		f.Add(uint8(k), uint8(3), "x"+write([]ToolCall{{Name: "f", Arguments: `{"s": "é"}`}, {Name: "g", Arguments: `{}`}}))
	}
	f.Fuzz(func(t *testing.T, format, cut uint8, text string) {
		format %= uint8(len(formats))
		o, open := formats[format], cut&1 == 1
		whole := parseOutput(t, o, open, text)
		at := len(text) * int(cut) / 256
		if got := parseOutput(t, o, open, text[:at], text[at:]); got.String() != whole.String() {
			t.Errorf("%q cut at %d\n got %s\nwant %s", text, at, got, whole)
		}
		if len(whole.calls) > 0 {
			return
		}
		dense := func(s string) string {
			s = strings.Join(strings.Fields(strings.ReplaceAll(strings.ToValidUTF8(s, ""), "\uFFFD", "")), "")
			for _, tag := range append(slices.Concat(toolFormats[4].closers, toolFormats[5].closers, toolFormats[6].closers), o.allTags()...) {
				s = strings.ReplaceAll(s, tag, "")
			}
			return s
		}
		if shown := dense(whole.reasoning + whole.content); shown != dense(text) {
			t.Errorf("%q became %q", text, shown)
		}
	})
}

// TestOutputFormatNames: names, detection and what is unknown.
func TestOutputFormatNames(t *testing.T) {
	for _, tt := range []struct{ tools, reasoning, template, want string }{
		{"auto", "auto", "", "none none"},
		{"none", "none", "<tool_call></think>", "none none"},
		{"hermes", "think", "", "hermes think"},
		{"auto", "auto", `<tool_call>\n{"name"... </think>`, "hermes think"},
		{"auto", "auto", `<tool_call>\n<function=x>\n<parameter=y> </think>`, "qwen3_coder think"},
		{"auto", "auto", `<tool_call>x<arg_key>`, "none none"},
		{"auto", "auto", `<TOOLCALL>[`, "nemotron none"},
		{"auto", "auto", `<toolcall> {`, "nemotron none"},
		{"auto", "auto", `[TOOL_CALLS] [THINK] [/THINK]`, "mistral mistral"},
		{"auto", "none", `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜> </think>`, "deepseek_v3 none"},
		{"auto", "auto", `{%- set t = '｜DSML｜' -%} </think>`, "deepseek_v4 think"},
		{"auto", "auto", `<|start_header_id|> {{ '"parameters": ' }}`, "llama3_json none"},
		{"auto", "auto", `<|start_header_id|>`, "none none"},
		{"mistral", "think", `<tool_call>`, "mistral think"},
	} {
		f, err := NewOutputFormat(tt.tools, tt.reasoning, tt.template)
		if got := f.Tools() + " " + f.Reasoning(); err != nil || got != tt.want {
			t.Errorf("%s, %s, %q: %s, %v; want %s", tt.tools, tt.reasoning, tt.template, got, err, tt.want)
		}
	}
	for _, names := range [][2]string{{"herpes", "auto"}, {"auto", "thin"}, {"", "none"}, {"none", ""}} {
		_, err := NewOutputFormat(names[0], names[1], "<tool_call></think>")
		if e, ok := errors.AsType[*UnsupportedError](err); !ok || !strings.Contains(e.Error(), "auto") {
			t.Errorf("%q: %v", names, err)
		}
	}
}

// TestShapesBegin: a format's table names every byte that one of its shapes can begin with.
func TestShapesBegin(t *testing.T) {
	for _, f := range toolFormats {
		for _, s := range f.shapes {
			for _, p := range s.parts {
				if p.kind == partSpace {
					continue
				}
				first := p.text
				if p.kind == partObject {
					first = "{"
				}
				if !strings.Contains(f.begins, first[:1]) {
					t.Errorf("%s does not begin with %s", f.name, first)
				}
				if p.kind != partOptional {
					break
				}
			}
		}
	}
}

func TestReasoningIsOpen(t *testing.T) {
	f, err := NewOutputFormat("none", "think", "")
	if err != nil {
		t.Fatal(err)
	}
	for prompt, want := range map[string]bool{
		"<|im_start|>assistant\n<think>\n": true, "<think>": true, "<think>\n\n</think>\n\n": false, "": false,
		"<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n": false,
	} {
		if f.OpensReasoning(prompt) != want || (OutputFormat{}).OpensReasoning(prompt) {
			t.Errorf("OpensReasoning(%q) is not %v", prompt, want)
		}
	}
	for begun, want := range map[string]bool{"<think>\nso": true, " <think>": true, "<think>a</think>b": false, "so <think>": false, "": false} {
		if f.ContinuesReasoning(begun) != want || (OutputFormat{}).ContinuesReasoning(begun) {
			t.Errorf("ContinuesReasoning(%q) is not %v", begun, want)
		}
	}
}

// TestOutputIDs: without an injected source, ids are random and of the form that templates accept.
func TestOutputIDs(t *testing.T) {
	for family, form := range map[string]string{"hermes": "call_", "mistral": ""} {
		f, _ := NewOutputFormat(family, "none", "")
		seen := map[string]bool{}
		for range 20 {
			p := f.NewParser(OutputOptions{Tools: []byte(someTools)})
			deltas := p.Push(writeCalls[family]([]ToolCall{{Name: "f", Arguments: "{}"}, {Name: "f", Arguments: "{}"}}))
			for _, d := range append(slices.Clone(deltas), p.Flush()...) {
				if d.Kind == DeltaToolCall {
					id := d.Call.ID
					if seen[id] || !strings.HasPrefix(id, form) || form == "" && (len(id) != 9 || strings.Trim(id, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") != "") {
						t.Errorf("%s: id %q", family, id)
					}
					seen[id] = true
				}
			}
		}
		if len(seen) != 40 {
			t.Errorf("%s: %d ids", family, len(seen))
		}
	}
}

// TestOutputWithoutTools: a request without tools has no calls, whatever the answer looks like.
func TestOutputWithoutTools(t *testing.T) {
	f, _ := NewOutputFormat("hermes", "think", "")
	text := `<tool_call>{"name":"f","arguments":{}}</tool_call> `
	for _, tools := range []string{"", "[]", "null", "nonsense"} {
		p := f.NewParser(OutputOptions{Tools: []byte(tools)})
		deltas := append(slices.Clone(p.Push("<think>a</think>"+text)), p.Flush()...)
		if len(deltas) != 2 || deltas[0] != (Delta{Kind: DeltaReasoning, Text: "a"}) || deltas[1] != (Delta{Kind: DeltaContent, Text: text}) {
			t.Errorf("tools %q: %+v", tools, deltas)
		}
	}
}

// TestContentIsNotHeldBack: text that cannot be part of a call comes at once.
func TestContentIsNotHeldBack(t *testing.T) {
	for _, f := range allFormats() {
		p := f.NewParser(OutputOptions{Tools: []byte(someTools)})
		p.Push("So")
		for _, piece := range []string{" it", " <b>", " [1]", " x", "😀", "."} {
			deltas := p.Push(piece)
			if len(deltas) == 0 || !strings.HasSuffix(deltas[len(deltas)-1].Text, piece[len(piece)-1:]) {
				t.Errorf("%s/%s: %q gave %v", f.Tools(), f.Reasoning(), piece, deltas)
			}
		}
	}
}

// TestHostileOutput: long answers of beginnings, in pieces and whole, come through (and in time that grows with their
// length only: a quadratic parser takes minutes here).
func TestHostileOutput(t *testing.T) {
	for _, family := range ToolFormats() {
		f, _ := NewOutputFormat(family, "think", "")
		for _, unit := range []string{"<", "<tool_call>{\"", "<tool_call><function=f><parameter=a>", "[TOOL_CALLS]a", "{\"a\":[", "<｜tool▁calls▁begin｜>", " x", "<TOOLCALL>[{"} {
			text := strings.Repeat(unit, 1<<16/len(unit))
			for _, size := range []int{16, len(text)} {
				p := f.NewParser(OutputOptions{Tools: []byte(someTools)})
				n := 0
				for rest := text; rest != ""; {
					k := min(len(rest), size)
					for _, d := range p.Push(rest[:k]) {
						n += len(d.Text)
					}
					rest = rest[k:]
				}
				for _, d := range p.Flush() {
					n += len(d.Text)
				}
				if n != len(text) {
					t.Errorf("%s: of %d bytes of %q come %d", f.Tools(), len(text), unit, n)
				}
			}
		}
	}
}

// BenchmarkOutput is what a token of four bytes costs.
func BenchmarkOutput(b *testing.B) {
	for name, text := range map[string]string{
		"content": strings.Repeat("Some words, and <b>more</b> of them. ", 30),
		"call":    `<tool_call>{"name":"f","arguments":{"s":"` + strings.Repeat("some words ", 100) + `"}}</tool_call>`,
	} {
		b.Run(name, func(b *testing.B) {
			f, _ := NewOutputFormat("hermes", "think", "")
			b.ReportAllocs()
			for b.Loop() {
				p := f.NewParser(OutputOptions{Tools: []byte(someTools)})
				for rest := text; rest != ""; {
					k := min(len(rest), 4)
					p.Push(rest[:k])
					rest = rest[k:]
				}
				p.Flush()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(text)/4), "ns/token")
		})
	}
}
