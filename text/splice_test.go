package text

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json/jsontext"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestReplacePrefix has the vectors of NeMo RL's splice (48): the end of sequence is 2.
func TestReplacePrefix(t *testing.T) {
	for i, c := range []struct {
		prior, upTo, all, want []int32
	}{
		{nil, nil, []int32{9, 2, 33, 44}, []int32{9, 2, 33, 44}},
		{
			[]int32{11, 12, 13, 40, 41, 220, 17, 2},
			[]int32{11, 12, 13, 40, 41, 1001, 2},
			[]int32{11, 12, 13, 40, 41, 1001, 2, 21, 22, 40, 41},
			[]int32{11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41},
		},
		{[]int32{100, 2}, []int32{9, 2, 9, 2}, []int32{9, 2, 9, 2, 77, 88}, []int32{100, 2, 77, 88}},
		{
			[]int32{11, 12, 99, 99, 99, 55, 2},
			[]int32{11, 12, 88, 88, 88, 56, 2},
			[]int32{11, 12, 56, 2, 70, 71, 2, 40, 41}, // the template leaves the old message's thoughts out
			[]int32{11, 12, 99, 99, 99, 55, 2, 70, 71, 2, 40, 41},
		},
		// A message that was cut off has no end of sequence; the template's closes it.
		{[]int32{1, 5, 6}, []int32{1, 5, 7, 2}, []int32{1, 5, 7, 2, 8}, []int32{1, 5, 6, 2, 8}},
	} {
		for base := 0; base <= len(c.all) && base <= len(c.upTo) && slices.Equal(c.all[:base], c.upTo[:base]); base++ {
			got, k, err := replacePrefix(c.prior, c.all[:base], c.upTo[base:], c.all[base:], 2)
			if err != nil || !slices.Equal(got, c.want) || !slices.Equal(got[len(got)-len(c.all[k:]):], c.all[k:]) {
				t.Errorf("%d: got %v (%d), %v; want %v", i, got, k, err, c.want)
			}
		}
	}
	for i, c := range []struct {
		upTo, all []int32
		eos       int32
	}{
		{[]int32{9, 9, 9}, []int32{9, 9, 9, 2, 10}, 2}, // none in what the message ends with
		{[]int32{9, 2, 9, 2}, []int32{9, 2, 9}, 2},     // fewer in the whole
		{[]int32{9, 2}, []int32{9, 2}, -1},             // the tokenizer has none
	} {
		_, _, err := replacePrefix([]int32{7, 2}, nil, c.upTo, c.all, c.eos)
		if e, ok := errors.AsType[*PrefixError](err); !ok || e.EOS != c.eos {
			t.Errorf("%d: error %v", i, err)
		}
	}
}

// Templates with the habits that matter here: what an old message looks like may depend on its place, on its neighbours,
// on what came before, and on what came since.
var habits = []struct {
	name, source string
	cut          bool // long conversations are rendered through windows
}{
	{"each alone", chatML, true},
	{
		// Thoughts are shown since the last question only; results in a row share a turn.
		"thoughts since the last question",
		`{%- if tools %}{{ '<|im_start|>system\n' + tools|tojson + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<result>' + m.content + '</result>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls %}{{ '<tool_call>' + c.function.name + ' ' + c.function.arguments|tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}`, true,
	},
	{
		// The first call ever looks otherwise; after a result there is no generation prompt.
		"the first is different",
		`{%- set ns = namespace(called=false, tool=false) %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{% set ns.tool = true %}{{ '<r>' + m.content + '</r>' }}
{%- elif m.tool_calls %}{% set ns.tool = false %}{{ ('<more>' if ns.called else '<calls>') + m.tool_calls[0].function.name + '<|im_end|>' }}{% set ns.called = true %}
{%- else %}{% set ns.tool = false %}{{ '<|im_start|>' + m.role + ' ' + m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}{{ '<|im_start|>assistant\n' }}{% endif %}`, true,
	},
	{
		"numbered",
		`{% for m in messages %}{{ '<|im_start|>' + loop.index|string + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}`, false,
	},
	{
		"counted",
		`{{ messages|length }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}`, false,
	},
	{
		"now and then",
		`{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + ('!' if loop.index % 7 == 6 else '') + m.content + '<|im_end|>\n' }}{% endfor %}`, false,
	},
	{
		"used up", // it takes the list apart
		`{% for i in range(messages|length) %}{% set m = messages.pop(0) %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}`, true,
	},
}

// turnsOf draws a conversation as what each request adds.
func turnsOf(t *rapid.T) [][]string {
	content := rapid.SampledFrom([]string{
		"short", "<|im_end|>", "<|im_", "end|>", " leading and trailing ", "Zürich 漢字 👩‍🚀", "line\\nbreak\\n\\n", strings.Repeat("many words of no interest ", 12), "",
	})
	message := func(role string) string {
		m := `{"role":"` + role + `","content":"` + content.Draw(t, "content") + `"`
		if role == "assistant" && rapid.Bool().Draw(t, "thinks") {
			m += `,"reasoning_content":"` + content.Draw(t, "thought") + `"`
		}
		return m + "}"
	}
	call := `{"role":"assistant","content":"","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{\"n\":1}"}}]}`
	turns := [][]string{{message("system"), message("user")}}
	calls := rapid.IntRange(0, 10).Draw(t, "calls of ten turns")
	for range rapid.IntRange(1, 30).Draw(t, "turns") {
		switch n := rapid.IntRange(0, 9).Draw(t, "kind"); {
		case n < calls:
			turns = append(turns, []string{call, message("tool")})
		case n == 9:
			turns = append(turns, []string{call, message("tool"), message("tool")})
		default:
			turns = append(turns, []string{message("assistant"), message("user")})
		}
	}
	return turns
}

// TestTranscribe lets conversations grow, with templates of all habits: text and ids are those of rendering and encoding
// everything each time.
func TestTranscribe(t *testing.T) {
	tok := tinyTokenizer(t, "llama")
	templates := make([]*Template, len(habits))
	for i, h := range habits {
		var err error
		if templates[i], err = tok.NewTemplate(h.name, h.source); err != nil {
			t.Fatal(err)
		}
		if templates[i].local() != h.cut {
			t.Errorf("%s: rendered through windows: %v, want %v", h.name, templates[i].local(), h.cut)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		tm := rapid.SampledFrom(templates).Draw(t, "template")
		var messages []string
		var prev *Script
		for _, turn := range turnsOf(t) {
			messages = append(messages, turn...)
			c := Chat{Messages: []byte("[ " + strings.Join(messages, " ,\n") + " ]"), Tools: []byte(`[{"type":"function"}]`), AddGenerationPrompt: true}
			whole, err := tm.Render(t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			want, err := tok.EncodePrompt(whole)
			if err != nil {
				t.Fatal(err)
			}
			s, reuse, err := tok.Transcribe(t.Context(), tm, prev, c, Prefix{})
			if err != nil {
				t.Fatal(err)
			}
			if s.Text() != whole.Text || !slices.Equal(s.IDs(), want) || s.Len() != len(messages) {
				t.Fatalf("%s, %d messages (%+v):\n got %q %v\nwant %q %v", tm.name, len(messages), reuse, s.Text(), s.IDs(), whole.Text, want)
			}
			if !s.begins(c.Messages) || !slices.Equal(s.prompt.plain, whole.plain) {
				t.Fatalf("kept %q and %v of %q and %v", s.Messages(), s.prompt.plain, c.Messages, whole.plain)
			}
			prev = s
		}
	})
}

// TestTranscribeReuse: what each turn costs, and why a turn is rendered as a whole.
func TestTranscribeReuse(t *testing.T) {
	tok := tinyTokenizer(t, "llama")
	tm, err := tok.NewTemplate("t", habits[1].source)
	if err != nil {
		t.Fatal(err)
	}
	const question, call, result = `{"role":"user","content":"q"}`, `{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":{}}}]}`, `{"role":"tool","content":"a long result, a long result, a long result, a long result"}`
	rounds := func(n int) string { return question + strings.Repeat(","+call+","+result, n) }
	array := func(s string) []byte { return []byte("[" + s + "]") }
	base := Chat{Messages: array(rounds(20)), AddGenerationPrompt: true}
	with := func(change func(c *Chat)) Chat {
		c := base
		change(&c)
		return c
	}
	prev, reuse, err := tok.Transcribe(t.Context(), tm, nil, base, Prefix{})
	if err != nil || reuse.Reason != Fresh || reuse.IDs != 0 {
		t.Fatalf("%+v, %v", reuse, err)
	}
	if len(prev.window) > 7 {
		t.Errorf("a window of %d messages stands for %d alike", len(prev.window), prev.Len())
	}
	for _, c := range []struct {
		name string
		chat Chat
		want Reason
	}{
		{"one more round", with(func(c *Chat) { c.Messages = array(rounds(21)) }), Extended},
		{"the same again", base, Extended},
		{"an answer and a question", with(func(c *Chat) { c.Messages = array(rounds(20) + `,{"role":"assistant","content":"a"},` + question) }), LongTurn},
		{"an edited message", with(func(c *Chat) { c.Messages = array(strings.Replace(rounds(21), "long", "LONG", 1)) }), Edited},
		{"a message less", with(func(c *Chat) { c.Messages = array(rounds(19)) }), Edited},
		{"other tools", with(func(c *Chat) { c.Messages, c.Tools = array(rounds(21)), []byte(`[{}]`) }), OtherTools},
		{"other arguments", with(func(c *Chat) { c.Extra = []byte(`{"a":1}`) }), OtherOptions},
		{"no generation prompt", with(func(c *Chat) { c.AddGenerationPrompt = false }), OtherOptions},
		{"to be continued", Chat{Messages: array(question), ContinueFinalMessage: true}, Continued},
	} {
		s, reuse, err := tok.Transcribe(t.Context(), tm, prev, c.chat, Prefix{})
		if err != nil || reuse.Reason != c.want {
			t.Errorf("%s: %+v, %v", c.name, reuse, err)
			continue
		}
		whole, err := tm.Render(t.Context(), c.chat)
		if err != nil {
			t.Fatal(err)
		}
		ids, err := tok.EncodePrompt(whole)
		if err != nil || s.Text() != whole.Text || !slices.Equal(s.IDs(), ids) {
			t.Errorf("%s: the ids are not those of the whole (%v)", c.name, err)
		}
		if c.want == Extended && (reuse.Text < prev.body || reuse.IDs < len(prev.IDs())*9/10) {
			t.Errorf("%s: only %d bytes and %d ids of %d and %d were kept", c.name, reuse.Text, reuse.IDs, prev.body, len(prev.IDs()))
		}
	}
}

// TestTranscribePrefix: what was sampled stays, and the rest is the template's (48, 49, 51).
func TestTranscribePrefix(t *testing.T) {
	tok := tinyTokenizer(t, "llama")
	tm, err := tok.NewTemplate("t", habits[1].source)
	if err != nil {
		t.Fatal(err)
	}
	tok.special.EOS, _ = tok.TokenID("<|im_end|>")
	spell := func(text string) (ids []int32) { // one id a byte: never what merges give
		for i := range len(text) {
			ids = append(ids, tok.model.bytes[text[i]])
		}
		return ids
	}
	for _, c := range []struct {
		name, answer, sampled string
		closed                bool // the sampled ids end with an end of sequence
	}{
		{"spelled otherwise", `{"role":"assistant","content":"an answer"}`, "an answer", true},
		{"cut off", `{"role":"assistant","content":"an answer, an answer, an ans"}`, "an answer, an ans", false},
		{"thoughts that the template drops", `{"role":"assistant","content":"an answer","reasoning_content":"hm"}`, "<think>hm</think>an answer", true},
		{"a call that the template formats", `{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":"{\"a\":1}"}}]}`, `<tool_call>f {"a":1}</tool_call>`, true},
	} {
		for _, cached := range []bool{true, false} {
			messages := `{"role":"user","content":"a question"}`
			var prev *Script
			var p Prefix
			var seen []int32
			for turn := range 12 {
				chat := Chat{Messages: []byte("[" + messages + "]"), AddGenerationPrompt: true}
				from := prev
				if !cached {
					from = nil
				}
				s, reuse, err := tok.Transcribe(t.Context(), tm, from, chat, p)
				if err != nil {
					t.Fatalf("%s, turn %d: %v", c.name, turn, err)
				}
				if !hasPrefix(s.IDs(), seen) {
					t.Fatalf("%s, turn %d: the ids %v do not begin with those seen, %v", c.name, turn, s.IDs(), seen)
				}
				if got := strings.Count(tok.Decode(s.IDs(), false), c.sampled); got != turn {
					t.Fatalf("%s, turn %d: %q", c.name, turn, tok.Decode(s.IDs(), false))
				}
				if turn > 0 {
					if !reuse.Spliced {
						t.Errorf("%s, turn %d: not spliced", c.name, turn)
					}
					if tail := tok.Decode(s.IDs()[len(p.IDs)-1:], false); !strings.HasSuffix(tail, "<|im_end|>\n<|im_start|>user\na question<|im_end|>\n<|im_start|>assistant\n") {
						t.Errorf("%s, turn %d: what follows is %q", c.name, turn, tail)
					}
					whole, err := tm.Render(t.Context(), chat)
					if err != nil || s.Text() != whole.Text {
						t.Fatalf("%s, turn %d: text %q, want %q (%v)", c.name, turn, s.Text(), whole.Text, err)
					}
				}
				prev, seen = s, slices.Clone(s.IDs())
				p = Prefix{IDs: slices.Concat(s.IDs(), spell(c.sampled)), Message: s.Len()}
				if c.closed {
					p.IDs = append(p.IDs, tok.special.EOS)
				}
				messages += "," + c.answer + `,{"role":"user","content":"a question"}`
			}
		}
	}
}

// TestContinuedPrefix: what was sampled is continued, or stays before the message that is.
func TestContinuedPrefix(t *testing.T) {
	tok := tinyTokenizer(t, "llama")
	tm, err := tok.NewTemplate("t", chatML)
	if err != nil {
		t.Fatal(err)
	}
	eos, _ := tok.TokenID("<|im_end|>")
	tok.special.EOS = eos
	const first, more = `{"role":"user","content":"q"},{"role":"assistant","content":"an answer"}`, `,{"role":"user","content":"r"},{"role":"assistant","content":"so"}`
	prompt, _, err := tok.Transcribe(t.Context(), tm, nil, Chat{Messages: []byte(`[{"role":"user","content":"q"}]`), AddGenerationPrompt: true}, Prefix{})
	if err != nil {
		t.Fatal(err)
	}
	sampled := slices.Clone(prompt.IDs())
	for _, c := range []byte("an answer") {
		sampled = append(sampled, tok.model.bytes[c])
	}
	for _, c := range []struct {
		messages, want string
	}{
		{first, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nan answer"},
		{first + more, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nan answer<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nso"},
	} {
		s, reuse, err := tok.Transcribe(t.Context(), tm, nil, Chat{Messages: []byte("[" + c.messages + "]"), ContinueFinalMessage: true}, Prefix{IDs: append(slices.Clone(sampled), eos), Message: 1})
		if err != nil || reuse.Reason != Continued || !reuse.Spliced {
			t.Fatalf("%+v, %v", reuse, err)
		}
		if !hasPrefix(s.IDs(), sampled) || tok.Decode(s.IDs(), false) != c.want || s.Text() != c.want {
			t.Errorf("%q from %v", tok.Decode(s.IDs(), false), s.IDs())
		}
	}
}

// TestPrefixErrors: a message whose end cannot be told is not guessed at.
func TestPrefixErrors(t *testing.T) {
	tok := tinyTokenizer(t, "llama")
	eos, _ := tok.TokenID("<|im_end|>")
	const open = `{% for m in messages %}{% if m.role == 'user' %}{{ m.content + '<|im_end|>' }}{% else %}{{ m.content + '|' }}{% endif %}{% endfor %}`
	for _, c := range []struct {
		name, template string
		eos            int32
		message        int
	}{
		{"no end of sequence", chatML, -1, 1},
		{"answers do not end with one", open, eos, 1},
		{"no such message", chatML, eos, 7},
		{"nor such", chatML, eos, -1},
	} {
		tm, err := tok.NewTemplate("t", c.template)
		if err != nil {
			t.Fatal(err)
		}
		tok.special.EOS = c.eos
		chat := Chat{Messages: []byte(`[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}]`)}
		_, _, err = tok.Transcribe(t.Context(), tm, nil, chat, Prefix{IDs: []int32{1, 2}, Message: c.message})
		if e, ok := errors.AsType[*PrefixError](err); !ok || e.Message != c.message || e.EOS != c.eos {
			t.Errorf("%s: error %v", c.name, err)
		}
	}
}

// TestEncodeFrom: any text goes on from the ids of any other that it begins like.
func TestEncodeFrom(t *testing.T) {
	for _, name := range []string{"llama", "gpt2", "o200k", "deepseek"} {
		tok := tinyTokenizer(t, name)
		var specials []string
		for _, a := range append(slices.Clone(tok.raw.tokens), tok.normalized.tokens...) {
			specials = append(specials, a.Content)
		}
		piece := rapid.OneOf(rapid.SampledFrom(append(specials, "a", " ", "\n", "word ", "<|", "漢", "\u00e9")), rapid.String())
		text := rapid.Custom(func(t *rapid.T) string {
			return strings.ToValidUTF8(strings.Join(rapid.SliceOfN(piece, 0, 12).Draw(t, "pieces"), ""), "\uFFFD")
		})
		plain := func(t *rapid.T, s string) (list []int) {
			for i := range s {
				if i > 0 && rapid.IntRange(0, 9).Draw(t, "plain") == 0 {
					list = append(list, i)
				}
			}
			return list
		}
		rapid.Check(t, func(t *rapid.T) {
			same := text.Draw(t, "same")
			old := Prompt{Text: same + text.Draw(t, "old")}
			fresh := Prompt{Text: same + text.Draw(t, "new")}
			old.plain, fresh.plain = plain(t, old.Text), plain(t, fresh.Text)
			s := &Script{prompt: old}
			var err error
			if s.ids, s.syncs, err = tok.encodeFrom(old, nil, nil); err != nil {
				t.Fatal(err)
			}
			base := tok.prefixOf(s, fresh)
			got, _, err := tok.encodeFrom(fresh, base.ids, base.syncs)
			if err != nil {
				t.Fatal(err)
			}
			want, err := tok.EncodePrompt(fresh)
			if err != nil || !slices.Equal(got, want) {
				t.Fatalf("after %q, %q gives %v, want %v (%v)", old.Text, fresh.Text, got, want, err)
			}
		})
	}
}

// conversationVectors are long conversations and the ids that Hugging Face gives them at each turn.
type conversationVectors []struct {
	Tokenizer string         `json:"tokenizer"`
	SHA256    string         `json:"sha256"` // of tokenizer.json
	Tools     jsontext.Value `json:"tools"`
	Turns     []struct {
		Messages jsontext.Value `json:"messages"` // that this turn adds
		Count    int            `json:"count"`
		SHA256   string         `json:"sha256"` // of the ids as little-endian int32
	} `json:"turns"`
}

// TestConversations: thirty turns with tools, thoughts and several questions have Hugging Face's ids at each turn (49).
func TestConversations(t *testing.T) {
	var v conversationVectors
	readVectors(t, filepath.Join(*vectorDir, "conversations.json.gz"), &v)
	if len(v) == 0 {
		t.Fatal("no vectors")
	}
	found := cachedTokenizers(t)
	for _, c := range v {
		t.Run(c.Tokenizer, func(t *testing.T) {
			path := found[c.SHA256]
			if path == "" {
				t.Skip("its tokenizer is not in the cache: see scripts/fetch-tokenizers")
			}
			tok := loadAny(t, path)
			tm, err := tok.Template("")
			if err != nil {
				t.Fatal(err)
			}
			var prev *Script
			var messages []byte
			reasons := map[Reason]int{}
			for i, turn := range c.Turns {
				added := bytes.TrimSpace(turn.Messages)
				messages = append(append(messages, ','), added[1:len(added)-1]...)
				chat := Chat{Messages: slices.Concat([]byte{'['}, messages[1:], []byte{']'}), AddGenerationPrompt: true}
				if string(c.Tools) != "null" {
					chat.Tools = c.Tools
				}
				s, reuse, err := tok.Transcribe(t.Context(), tm, prev, chat, Prefix{})
				if err != nil {
					t.Fatal(err)
				}
				reasons[reuse.Reason]++
				var raw []byte
				for _, id := range s.IDs() {
					raw = binary.LittleEndian.AppendUint32(raw, uint32(id))
				}
				if sum := sha256.Sum256(raw); len(s.IDs()) != turn.Count || hex.EncodeToString(sum[:]) != turn.SHA256 {
					t.Fatalf("turn %d (%+v): %d ids, want %d", i, reuse, len(s.IDs()), turn.Count)
				}
				prev = s
			}
			if reasons[Extended] < len(c.Turns)*3/4 {
				t.Errorf("most turns were rendered as a whole: %v", reasons)
			}
			t.Log(reasons)
		})
	}
}
