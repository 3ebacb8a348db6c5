package text

import (
	"encoding/json/v2"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

// Templates that write as those of the families do, and nothing more.
const (
	openingHead = `{% for m in messages %}{% if m.role != 'assistant' %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% else %}{{ '<|im_start|>assistant\n' }}`
	openingFoot = `{{ '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}`
	eachCall    = `{% for c in m.tool_calls %}{% set f = c.function %}{% if not loop.first %}{{ '\n' }}{% endif %}`

	hermesCall   = eachCall + `{{ '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}{{ f.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}`
	coderCall    = eachCall + `{{ '<tool_call>\n<function=' + f.name + '>\n' }}{% for k, v in f.arguments.items() %}{{ '<parameter=' + k + '>\n' + v + '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}`
	llamaCall    = eachCall + `{{ '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}{{ '}' }}{% endfor %}`
	oldMistral   = `{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{{ '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}{{ ', "id": "' + c.id + '"}' }}{% endfor %}]`
	newMistral   = `{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}{{ c.function.arguments | tojson }}{% endfor %}`
	idMistral    = `{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' }}{{ c.function.arguments | tojson }}{% endfor %}`
	deepseekV3   = `{{ '<｜tool▁calls▁begin｜>' }}` + eachCall + `{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + f.name + '\n` + "```json" + `\n' + f.arguments + '\n` + "```" + `<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}`
	deepseekV31  = `{{ '<｜tool▁calls▁begin｜>' }}` + eachCall + `{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}`
	deepseekV4   = `{{ '\n\n<｜DSML｜tool_calls>\n' }}` + eachCall + `{{ '<｜DSML｜invoke name="' + f.name + '">\n' }}{% for k, v in f.arguments.items() %}{{ '<｜DSML｜parameter name="' + k + '" string="true">' + v + '</｜DSML｜parameter>\n' }}{% endfor %}{{ '</｜DSML｜invoke>\n' }}{% endfor %}{{ '</｜DSML｜tool_calls>' }}`
	nemotronCall = `{{ '<TOOLCALL>[' }}{% for c in m.tool_calls %}{{ '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}{{ '}' }}{% endfor %}{{ ']</TOOLCALL>' }}`

	// How prompts end that say whether there are thoughts.
	thinkAlways = `{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}`
	thinkUnless = `{% if add_generation_prompt %}{{ '<think></think>' if enable_thinking is false else '<think>\n' }}{% endif %}`
	thinkAsked  = `{% if add_generation_prompt and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}`
)

type openingCase struct {
	name, tools, reasoning, template, extra string
	close, any, named                       string // what a prompt must end with; named for the function f
	refused                                 string // of the OpeningError
}

func openingCases() []openingCase {
	const begin, sep = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
	simple := func(call string) string { return openingHead + call + openingFoot }
	return []openingCase{
		{"hermes", "hermes", "none", simple(hermesCall), "", "", "<tool_call>\n{\"name\": \"", "<tool_call>\n{\"name\": \"f\", \"arguments\": ", ""},
		{"may think", "hermes", "think", simple(`{{ '<think>\n\n</think>\n\n' }}`+hermesCall) + thinkAsked, "", "<think>\n\n</think>\n\n", "<tool_call>\n{\"name\": \"", "<tool_call>\n{\"name\": \"f\", \"arguments\": ", ""},
		{"may not think", "hermes", "think", simple(`{{ '<think>\n\n</think>\n\n' }}`+hermesCall) + thinkAsked, `{"enable_thinking":false}`, "", "<tool_call>\n{\"name\": \"", "<tool_call>\n{\"name\": \"f\", \"arguments\": ", ""},
		{"thinks without a parser", "hermes", "none", simple(`{{ '<think>\n\n</think>\n\n' }}` + hermesCall), "", "<think>\n\n</think>\n\n", "<tool_call>\n{\"name\": \"", "<tool_call>\n{\"name\": \"f\", \"arguments\": ", ""},
		{"thinks and shows it", "qwen3_coder", "think", simple(`{{ '<think>\n\n</think>\n\n' }}`+coderCall) + thinkAlways, "", "\n</think>\n\n", "<tool_call>\n<function=", "<tool_call>\n<function=f>\n", ""},
		{"thinks unless told", "qwen3_coder", "think", simple(`{{ '<think></think>\n' }}`+coderCall) + thinkUnless, "", "</think>\n", "<tool_call>\n<function=", "<tool_call>\n<function=f>\n", ""},
		{"told to think", "qwen3_coder", "think", simple(`{{ '<think></think>\n' }}`+coderCall) + thinkUnless, `{"enable_thinking":true}`, "</think>\n", "<tool_call>\n<function=", "<tool_call>\n<function=f>\n", ""},
		{"told elsewhere", "hermes", "think", `{{ 'no thoughts' if enable_thinking is false else 'think!' }}` + simple(`{{ '<think></think>\n' }}`+hermesCall) + thinkUnless, "", "", "", "", `"enable_thinking": false`},
		{"always thinks", "hermes", "think", simple(hermesCall) + thinkAlways, "", "", "", "", "cannot be told not to"},
		{"calls within thoughts", "hermes", "think", simple(`{{ '<think>\n' }}`+hermesCall+`{{ '</think>' }}`) + thinkAlways, "", "", "", "", "cannot be told not to"},
		{"qwen3_coder", "qwen3_coder", "none", simple(coderCall), "", "", "<tool_call>\n<function=", "<tool_call>\n<function=f>\n", ""},
		{"llama3_json", "llama3_json", "none", simple(llamaCall), "", "", `{"name": "`, `{"name": "f", "parameters": `, ""},
		{"old mistral", "mistral", "none", simple(oldMistral), "", "", `[TOOL_CALLS] [{"name": "`, `[TOOL_CALLS] [{"name": "f", "arguments": `, ""},
		{"new mistral", "mistral", "none", simple(newMistral), "", "", `[TOOL_CALLS]`, `[TOOL_CALLS]f[ARGS]`, ""},
		{"mistral with ids", "mistral", "none", simple(idMistral), "", "", `[TOOL_CALLS]`, `[TOOL_CALLS]f[CALL_ID]`, ""},
		{"deepseek_v3", "deepseek_v3", "think", simple(deepseekV3), "", "", begin + "function" + sep, begin + "function" + sep + "f\n```json\n", ""},
		{"deepseek_v3.1", "deepseek_v3", "think", simple(deepseekV31), "", "", begin, begin + "f" + sep, ""},
		{"deepseek_v4", "deepseek_v4", "think", simple(deepseekV4), "", "\n\n", "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"", "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n", ""},
		{"deepseek_v4.1", "deepseek_v4", "think", simple(`{{ '</think>' }}`+strings.NewReplacer("DSML｜tool_", "DSML｜ ", "DSML｜", "DSML｜ ").Replace(deepseekV4)) + `{% if add_generation_prompt %}{{ '<think>' }}{% endif %}`, "", "", "", "", "cannot be told not to"},
		{"deepseek_v4.1 as it is", "deepseek_v4", "think", simple(`{{ '<think></think>' }}`+strings.NewReplacer("DSML｜tool_", "DSML｜ ", "DSML｜", "DSML｜ ").Replace(deepseekV4)) + `{% if add_generation_prompt %}{{ '<think>' }}{% endif %}`, "", "</think>\n\n", "<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"", "<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"f\">\n", ""},
		{"nemotron", "nemotron", "think", simple(nemotronCall), "", "", `<TOOLCALL>[{"name": "`, `<TOOLCALL>[{"name": "f", "arguments": `, ""},
		{"no parser", "none", "none", simple(hermesCall), "", "", "", "", "--tool-parser"},
		{"another parser", "mistral", "none", simple(hermesCall), "", "", "", "", "shows no call"},
		{"the client's text", "hermes", "none", simple(`{{ mode }}` + hermesCall), `{"mode":"<|im_start|>system"}`, "", "", "", "shows no call"},
		{"calls are not shown", "hermes", "none", simple(`{{ m.content }}`), "", "", "", "", "shows no call"},
		{"calls are refused", "hermes", "none", simple(`{{ raise_exception("no") }}`), "", "", "", "", "shows no call"},
	}
}

// openingTools have two functions.
const openingTools = `[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"get"}}]`

// byteTokenizer has bytes, two control tokens and merges.
func byteTokenizer(t testing.TB, merges ...string) *Tokenizer {
	t.Helper()
	vocab := map[string]int{}
	for b := range 256 {
		vocab[string(byteRune[b])] = b
	}
	for i, m := range merges {
		vocab[strings.Replace(m, " ", "", 1)] = 300 + i
	}
	b, err := json.Marshal(map[string]any{
		"added_tokens": []any{
			map[string]any{"id": 256, "content": "<|im_start|>", "special": true}, map[string]any{"id": 257, "content": "<|im_end|>", "special": true},
			map[string]any{"id": 258, "content": "[TOOL_CALLS]", "special": true}, map[string]any{"id": 259, "content": "<tool_call>"}, map[string]any{"id": 260, "content": "</think>"},
		},
		"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
		"model":         map[string]any{"type": "BPE", "vocab": vocab, "merges": append([]string{}, merges...)},
	})
	if err != nil {
		t.Fatal(err)
	}
	return loadBytes(t, b)
}

// TestOpenings: a prompt ends as the template writes a call; the whole is what it makes of an answer with one, and its ids.
func TestOpenings(t *testing.T) {
	tok := byteTokenizer(t)
	for _, c := range openingCases() {
		t.Run(c.name, func(t *testing.T) {
			tm, f := openingTemplate(t, tok, c.template, c.tools, c.reasoning)
			for _, function := range []string{"", "f"} {
				chat := Chat{Messages: []byte(`[` + openUser + `]`), Tools: []byte(openingTools), Extra: []byte(c.extra), AddGenerationPrompt: true}
				o, err := tok.OpenCall(t.Context(), tm, f, chat, function)
				if c.refused != "" {
					if e, ok := errors.AsType[*OpeningError](err); !ok || !strings.Contains(e.Error(), c.refused) {
						t.Errorf("function %q: %v, want %q", function, err, c.refused)
					}
					continue
				}
				if err != nil {
					t.Fatalf("function %q: %v", function, err)
				}
				want := c.any
				if function != "" {
					want = c.named
				}
				if o.close != c.close || o.call != want {
					t.Errorf("function %q: %q %q, want %q %q", function, o.close, o.call, c.close, want)
				}
				checkOpening(t, tok, tm, f, o, chat, function)
			}
		})
	}
}

func openingTemplate(t testing.TB, tok *Tokenizer, source, tools, reasoning string) (*Template, OutputFormat) {
	t.Helper()
	tm, err := tok.NewTemplate("test", source)
	if err != nil {
		t.Fatal(err)
	}
	f, err := NewOutputFormat(tools, reasoning, source)
	if err != nil {
		t.Fatal(err)
	}
	return tm, f
}

// rendered is a chat's prompt, as text and as ids.
func rendered(t *testing.T, tok *Tokenizer, tm *Template, chat Chat) (string, []int32) {
	t.Helper()
	p, err := tm.Render(t.Context(), chat)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := tok.EncodePrompt(p)
	if err != nil {
		t.Fatal(err)
	}
	return p.Text, ids
}

// checkOpening appends an opening to the prompt of a chat and compares with what the template makes of an answer.
func checkOpening(t *testing.T, tok *Tokenizer, tm *Template, f OutputFormat, o *Opening, chat Chat, function string) {
	t.Helper()
	shown, prompt := rendered(t, tok, tm, chat)
	opened, err := o.Append(prompt)
	if err != nil {
		t.Fatal(err)
	}
	text := tok.Decode(opened.IDs, false)
	if !slices.Equal(opened.IDs[:opened.Kept], prompt[:opened.Kept]) || !strings.HasPrefix(o.call, opened.Call) || !strings.HasSuffix(text, o.close+opened.Call) {
		t.Errorf("%q is opened as %q of %q %q", shown, text, o.close, opened.Call)
	}
	// What others make longer is not made longer again.
	if twice, err := o.Complete(opened.IDs); err != nil || !slices.Equal(twice.IDs, opened.IDs) || twice.Call != opened.Call {
		t.Errorf("%q is completed as %q, %v", text, tok.Decode(twice.IDs, false), err)
	}
	if once, err := o.Complete(prompt); err != nil || !slices.Equal(once.IDs, opened.IDs) {
		t.Errorf("%q is completed as %q, %v", shown, tok.Decode(once.IDs, false), err)
	}
	name := function
	if name == "" {
		name = "get"
	}
	written := answerWithCall(t, tm, chat, name, o.drop != "")
	if !strings.HasPrefix(written, text) {
		t.Errorf("the template writes %q, not %q", written, text)
		return
	}
	// The model goes on; its tokens are those of the whole text.
	rest := written[len(text):]
	whole, err := tok.Encode(written, EncodeOptions{ParseSpecial: true})
	if err != nil || !hasPrefix(whole, opened.IDs) {
		t.Errorf("the ids of %q do not begin with those of %q", written, text)
	}
	if hasPrefix(whole, prompt) && opened.Kept != len(prompt) {
		t.Errorf("of %d ids %d are kept", len(prompt), opened.Kept)
	}
	parser := f.NewParser(OutputOptions{Tools: []byte(openingTools), Opening: opened.Call, NewID: func() string { return "id" }})
	var calls []ToolCall
	content := ""
	for _, piece := range append(strings.Split(rest, ""), "") {
		deltas := parser.Push(piece)
		if piece == "" {
			deltas = parser.Flush()
		}
		for _, d := range deltas {
			if d.Kind == DeltaToolCall {
				calls = append(calls, d.Call)
			} else if len(calls) == 0 {
				content += d.Text
			}
		}
	}
	if len(calls) != 1 || calls[0].Name != name || !strings.Contains(calls[0].Arguments, "Zürich") || content != "" {
		t.Errorf("%q behind %q is read as %+v, content %q", rest, opened.Call, calls, content)
	}
}

// answerWithCall is the text of a chat with an answer that calls a function.
func answerWithCall(t *testing.T, tm *Template, chat Chat, name string, told bool) string {
	t.Helper()
	const arguments = `{"city": "Zürich"}`
	if told {
		chat.Extra = []byte(`{"enable_thinking":false,"thinking":false}`)
	}
	chat.AddGenerationPrompt = false
	messages := chat.Messages[:len(chat.Messages)-1]
	for _, form := range []string{quoteJSON(arguments), arguments} {
		chat.Messages = []byte(string(messages) + "," + openCall("call1abcd", name, form) + "]")
		p, err := tm.Render(t.Context(), chat)
		if err == nil && strings.Contains(p.Text, "Zürich") && !strings.Contains(p.Text, `name="arguments"`) {
			return p.Text
		}
	}
	t.Fatal("the template shows no call")
	return ""
}

// TestOpeningTokens: where tokens could span the end of an opening it ends before, and the model writes what is missing.
func TestOpeningTokens(t *testing.T) {
	tok := byteTokenizer(t, "= _", "Ġ {", "Ġ{ \"", "> Ċ", "f >")
	for _, c := range []struct{ template, tools, function, call string }{
		{coderCall, `[{"function":{"name":"_get"}},{"function":{"name":"f"}},{"function":{"name":"get"}}]`, "", "<tool_call>\n<function"},
		{coderCall, `[{"function":{"name":"f"}}]`, "", "<tool_call>\n<function="},
		{coderCall, `[{"function":{"name":"f"}}]`, "f", "<tool_call>\n<function=f>\n"},
		{hermesCall, openingTools, "f", "<tool_call>\n{\"name\": \"f\", \"arguments\":"},
		{hermesCall, openingTools, "", "<tool_call>\n{\"name\": \""},
	} {
		tm, f := openingTemplate(t, tok, openingHead+c.template+openingFoot, FormatAuto, "none")
		chat := Chat{Messages: []byte(`[` + openUser + `]`), Tools: []byte(c.tools), AddGenerationPrompt: true}
		o, err := tok.OpenCall(t.Context(), tm, f, chat, c.function)
		if err != nil {
			t.Fatal(err)
		}
		_, prompt := rendered(t, tok, tm, chat)
		opened, err := o.Append(prompt)
		if err != nil || opened.Call != c.call {
			t.Errorf("%s, %q: %q, %v; want %q", c.tools, c.function, opened.Call, err, c.call)
		}
		if c.function != "" || strings.Contains(c.tools, "get") {
			checkOpening(t, tok, tm, f, o, chat, c.function)
		}
	}
}

// TestOpeningsOfRealTemplates: as TestOpenings, for the templates that come with the template engine's source and, as far as they
// are in the cache, tokenizers of real models. BATON_TEMPLATES is a folder of more templates.
func TestOpeningsOfRealTemplates(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/ardanlabs/jinja").Output()
	dir := strings.TrimSpace(string(out))
	files, _ := filepath.Glob(filepath.Join(dir, "testdata", "templates", "*.jinja"))
	if more := os.Getenv("BATON_TEMPLATES"); more != "" {
		list, _ := filepath.Glob(filepath.Join(more, "*.jinja"))
		files = append(files, list...)
	}
	if err != nil || dir == "" || len(files) == 0 {
		t.Skipf("the engine's source is not here: %q, %v", dir, err)
	}
	found := cachedTokenizers(t)
	tokenizers := map[string]*Tokenizer{"bytes": byteTokenizer(t)}
	for name, sum := range map[string]string{
		"qwen3": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4", "llama3_1": "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
		"deepseek_v3": "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
	} {
		if path := found[sum]; path != "" {
			tokenizers[name] = loadAny(t, path)
		}
	}
	families, tried := map[string]bool{}, 0
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		f, err := NewOutputFormat(FormatAuto, FormatAuto, string(source))
		if err != nil {
			t.Fatal(err)
		}
		if f.tools == nil {
			continue
		}
		for name, tok := range tokenizers {
			t.Run(filepath.Base(file)+"/"+name, func(t *testing.T) {
				tm, err := tok.NewTemplate("test", string(source))
				if err != nil {
					t.Skip(err)
				}
				for _, function := range []string{"", "f", "get_current_weather"} {
					tools := strings.Replace(openingTools, `"f"`, `"get_current_weather"`, 1)
					chat := Chat{Messages: []byte(`[` + openUser + `]`), Tools: []byte(tools), AddGenerationPrompt: true}
					o, err := tok.OpenCall(t.Context(), tm, f, chat, function)
					if e, ok := errors.AsType[*OpeningError](err); ok && e.Reason == mustThink {
						continue
					}
					if err != nil {
						t.Fatalf("%s: %v", f.Tools(), err)
					}
					families[f.Tools()] = true
					tried++
					checkOpening(t, tok, tm, f, o, chat, function)
				}
			})
		}
	}
	if len(families) < 5 {
		t.Errorf("only the families %v", families)
	}
	t.Logf("%d openings of %v", tried, families)
}

// TestOpeningsAreThoseOfModels: each answer with calls alone that a model's own template has written begins as one of the cases.
func TestOpeningsAreThoseOfModels(t *testing.T) {
	var v struct {
		Answers []struct {
			Template string `json:"template"`
			Tools    string `json:"tools"`
			Text     string `json:"text"`
			Content  string `json:"content"`
		} `json:"answers"`
	}
	readVectors(t, "testdata/rendered.json.gz", &v)
	seen := map[string]bool{}
	for _, a := range v.Answers {
		if a.Content != "" {
			continue
		}
		_, text, thought := strings.Cut(a.Text, "</think>")
		if !thought {
			text = strings.TrimPrefix(a.Text, "[THINK]Hm.[/THINK]")
		}
		text = strings.TrimLeft(text, whiteSpace)
		seen[a.Tools] = true
		if !slices.ContainsFunc(openingCases(), func(c openingCase) bool {
			return c.tools == a.Tools && c.any != "" && strings.HasPrefix(text, c.any+"get_weather")
		}) {
			t.Errorf("%s: no prompt ends as %q begins", a.Template, text)
		}
	}
	for _, family := range ToolFormats() {
		if !seen[family] {
			t.Errorf("no template of %s", family)
		}
	}
}

// TestOpeningIsRead: behind any beginning of it, an answer is read as it would be as a whole.
func TestOpeningIsRead(t *testing.T) {
	pieces, formats := outputPieces(), allFormats()
	rapid.Check(t, func(rt *rapid.T) {
		f := rapid.SampledFrom(formats).Draw(rt, "format")
		f.reasoning = nil
		text := strings.Join(rapid.SliceOfN(rapid.SampledFrom(pieces), 1, 12).Draw(rt, "text"), "")
		cut := rapid.IntRange(0, len(text)).Draw(rt, "cut")
		read := func(opening string, pieces ...string) (s string) {
			n := 0
			p := f.NewParser(OutputOptions{Tools: []byte(someTools), Opening: opening, NewID: func() string { n++; return fmt.Sprint("id", n) }})
			var deltas []Delta
			for _, piece := range pieces {
				deltas = append(deltas, p.Push(piece)...)
			}
			for _, d := range append(deltas, p.Flush()...) {
				if d.Kind == DeltaToolCall {
					s += fmt.Sprintf("|%+v|", d.Call)
				}
				s += d.Text
			}
			return s
		}
		for cut < len(text) && cut > 0 && text[cut]&0xc0 == 0x80 {
			cut++ // openings are whole characters
		}
		opening := strings.ToValidUTF8(text[:cut], "?")
		if got, want := read(opening, text[cut:]), read("", opening+text[cut:]); got != want {
			rt.Fatalf("%s: %q then %q\n got %s\nwant %s", f.Tools(), opening, text[cut:], got, want)
		}
	})
}

// TestOpeningOfAnyName: whatever a tool is called, the opening has its whole name or there is an error.
func TestOpeningOfAnyName(t *testing.T) {
	tok := byteTokenizer(t, "a b", "_ a", "\" ,", "f >", "= a")
	cases := openingCases()
	rapid.Check(t, func(rt *rapid.T) {
		c := rapid.SampledFrom(cases).Draw(rt, "template")
		name := rapid.OneOf(rapid.StringMatching(`[a-zA-Z_][a-zA-Z0-9_-]{0,12}`), rapid.StringN(1, 8, 40)).Draw(rt, "name")
		tm, f := openingTemplate(t, tok, c.template, c.tools, c.reasoning)
		chat := Chat{Messages: []byte(`[` + openUser + `]`), Tools: []byte(`[{"function":{"name":` + quoteJSON(name) + `}}]`), Extra: []byte(c.extra), AddGenerationPrompt: true}
		p, err := tm.Render(t.Context(), chat)
		if err != nil {
			rt.Fatal(err)
		}
		prompt, err := tok.EncodePrompt(p)
		if err != nil {
			rt.Fatal(err)
		}
		o, err := tok.OpenCall(t.Context(), tm, f, chat, name)
		if err != nil {
			if _, ok := errors.AsType[*OpeningError](err); !ok || isPlainName(name) && c.refused == "" {
				rt.Fatalf("%s, %q: %v", c.name, name, err)
			}
			return
		}
		opened, err := o.Append(prompt)
		if err != nil || !strings.Contains(opened.Call, name) || !strings.HasPrefix(o.call, opened.Call) {
			rt.Fatalf("%s, %q: %q, %v", c.name, name, opened.Call, err)
		}
	})
}

// TestWrittenCallsAreKnown: what a template writes is learned once for arguments of the template, of which a bounded number is
// remembered, by many at a time.
func TestWrittenCallsAreKnown(t *testing.T) {
	tok := byteTokenizer(t)
	tm, f := openingTemplate(t, tok, openingHead+`{{ mode }}`+hermesCall+openingFoot+`{% if add_generation_prompt %}{{ mode }}{% endif %}`, "hermes", "none")
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for k := range 2 * maxCallsKnown {
				mode := fmt.Sprint("m", (k+i)%(maxCallsKnown+8), " ")
				o, err := tok.OpenCall(t.Context(), tm, f, Chat{Tools: []byte(openingTools), Extra: []byte(`{"mode":"` + mode + `"}`)}, "f")
				if err != nil || o.call != `<tool_call>`+"\n"+`{"name": "f", "arguments": ` {
					t.Errorf("%s: %+v, %v", mode, o, err)
				}
			}
		})
	}
	all.Wait()
	if n := len(tm.calls.known); n != maxCallsKnown {
		t.Errorf("%d are remembered", n)
	}
}

// FuzzOpening: whatever ids a prompt has, an opening is put behind it, once.
func FuzzOpening(f *testing.F) {
	tok := byteTokenizer(f, "= _", "> Ċ", "Ċ Ċ", "Ċ <", "t h", "Ġ {", "\" :")
	cases := slices.DeleteFunc(openingCases(), func(c openingCase) bool { return c.refused != "" })
	f.Add(uint8(0), "get", []byte("\x00\x01<|im_start|>assistant\n"))
	f.Add(uint8(4), "f", []byte("<think>\n"))
	f.Add(uint8(5), "", []byte("th\xf0\x9f<think>\n"))
	f.Fuzz(func(t *testing.T, which uint8, function string, raw []byte) {
		c := cases[int(which)%len(cases)]
		tm, format := openingTemplate(t, tok, c.template, c.tools, c.reasoning)
		o, err := tok.OpenCall(t.Context(), tm, format, Chat{Tools: []byte(openingTools), Extra: []byte(c.extra)}, function)
		if err != nil {
			if _, ok := errors.AsType[*OpeningError](err); !ok || function == "" || isPlainName(function) {
				t.Fatalf("%s, %q: %v", c.name, function, err)
			}
			return
		}
		prompt := make([]int32, 0, len(raw)/2)
		for i, b := range raw { // some ids, spelled as no encoder would, and then a text
			if id := int32(b) + 50; i < len(raw)/2 && len(tok.TokenBytes(id)) > 0 {
				prompt = append(prompt, id)
			}
		}
		rest, err := tok.Encode(strings.ToValidUTF8(string(raw[len(raw)/2:]), ""), EncodeOptions{ParseSpecial: true})
		if err != nil {
			return
		}
		prompt = append(prompt, rest...)
		opened, err := o.Append(prompt)
		if err != nil {
			if _, ok := errors.AsType[*OpeningError](err); !ok {
				t.Fatal(err)
			}
			return
		}
		if !slices.Equal(opened.IDs[:opened.Kept], prompt[:opened.Kept]) || !strings.HasPrefix(o.call, opened.Call) || len(opened.Call) < o.need || len(opened.IDs) <= opened.Kept {
			t.Fatalf("%s, %q behind %v: %+v", c.name, function, prompt, opened)
		}
		if !strings.HasSuffix(tok.Decode(opened.IDs, false), opened.Call) {
			t.Fatalf("%q does not end with %q", tok.Decode(opened.IDs, false), opened.Call)
		}
		again, err := o.Complete(opened.IDs)
		if err != nil || !slices.Equal(again.IDs, opened.IDs) || again.Call != opened.Call {
			t.Fatalf("%s, %q: %v is completed as %v, %v", c.name, function, opened.IDs, again, err)
		}
	})
}
