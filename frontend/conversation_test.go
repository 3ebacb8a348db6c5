package frontend

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"pgregory.net/rapid"

	"baton/text"
	"baton/wire"
)

// agentTemplate shows thoughts since the last question only, and results in a row as one turn.
const agentTemplate = `{%- if tools %}{{ tools|tojson + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n' + m.content }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls %}{{ '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments|tojson + '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + mode|default('') }}{% endif %}`

// merges make the ids of a text others than its bytes, which scripts sample.
var merges = []string{"a n", "t h", "th e", "e r", "c i", "q u"}

// speaker answers each request with the next of its answers, spelled byte by byte.
type speaker struct {
	mu       sync.Mutex
	answers  []string
	requests []*wire.SubmitRequest
}

func (b *speaker) next(answer string) { b.answers = append(b.answers, answer) }

// script is the backend of one request.
func (b *speaker) script(req *wire.SubmitRequest) *script {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.requests = append(b.requests, req)
	answer := "an answer"
	if len(b.answers) > 0 {
		answer, b.answers = b.answers[0], b.answers[1:]
	}
	s := &script{sizes: []int{5}, finish: wire.FinishStop}
	answer, cut := strings.CutSuffix(answer, "…")
	for _, c := range []byte(answer) {
		s.tokens = append(s.tokens, int32(c))
	}
	if s.finish = wire.FinishLength; !cut {
		s.tokens, s.finish = append(s.tokens, 257), wire.FinishStop
	}
	return s
}

func (b *speaker) last() []int32 { return b.requests[len(b.requests)-1].Prompt }

func (b *speaker) Submit(ctx context.Context, req *wire.SubmitRequest) (Stream, error) {
	return b.script(req).Submit(ctx, req)
}

func (*speaker) Status(context.Context) (*wire.StatusReply, error) {
	return &wire.StatusReply{Ready: true}, nil
}

// talk is a client that sends all of a conversation each time.
type talk struct {
	t        testing.TB
	s        *Server
	b        *speaker
	tok      Tokenizer
	id       string // conversation id
	more     string // further fields
	messages []string
}

func newTalk(t testing.TB, change func(*Config)) *talk {
	t.Helper()
	k := &talk{t: t, b: &speaker{}, tok: newTextTokenizer(t, agentTemplate, merges...)}
	k.s = newTestServer(t, k.b, func(c *Config) {
		outputFormat(t, "hermes", "think")(c)
		c.Tokenizer, c.Limits = k.tok, Limits{VocabSize: 259 + len(merges)}
		if change != nil {
			change(c)
		}
	})
	return k
}

func (k *talk) body() string {
	return `{"model":"toy","messages":[` + strings.Join(k.messages, ", ") + `]` + k.more + `}`
}

// ask adds messages, asks and gives the answer's message and the prompt's ids.
func (k *talk) ask(messages ...string) (json.RawMessage, []int32) {
	k.t.Helper()
	k.messages = append(k.messages, messages...)
	var headers []string
	if k.id != "" {
		headers = []string{"X-Session-Id", k.id}
	}
	r := post(k.t, k.s.Handler(), chatPath, k.body(), headers...)
	var a struct {
		Choices []struct{ Message json.RawMessage }
	}
	if err := json.Unmarshal(r.body, &a); err != nil || r.status != 200 || len(a.Choices) != 1 {
		k.t.Fatalf("%s: %d %s", k.body(), r.status, r.body)
	}
	return a.Choices[0].Message, k.b.last()
}

// whole is the prompt that a server gives the same request that remembers nothing.
func (k *talk) whole() []int32 {
	k.t.Helper()
	fresh := &talk{t: k.t, b: &speaker{}, messages: k.messages, more: k.more}
	fresh.s = newTestServer(k.t, fresh.b, func(c *Config) {
		c.Tokenizer, c.Limits, c.Conversations.Entries = k.tok, Limits{VocabSize: 259 + len(merges)}, -1
	})
	_, ids := fresh.ask()
	return ids
}

func count(c *prometheus.CounterVec, label string) int {
	return int(testutil.ToFloat64(c.WithLabelValues(label)))
}

const toolCall = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\":\"the quay\",  \"n\": 1}}\n</tool_call>"

// TestConversation: each turn's prompt begins with the one before it and what was sampled since, whatever the template or
// a tokenizer would make of the message that comes back; and it costs only what is new (51).
func TestConversation(t *testing.T) {
	for _, id := range []string{"", "session"} {
		for _, stream := range []bool{false, true} {
			k := newTalk(t, nil)
			k.id, k.more = id, `,`+withTools
			k.messages = []string{`{"role":"system","content":"the system"}`, `{"role":"user","content":"and the question"}`}
			var seen []int32
			for turn := range 30 {
				answer := []string{toolCall, "the answer", "<think>\nthe thought\n</think>\n\n" + toolCall, "the answer is cut off in the…"}[turn%4]
				k.b.next(answer)
				var message json.RawMessage
				var ids []int32
				if stream {
					message, ids = k.stream()
				} else {
					message, ids = k.ask()
				}
				if len(ids) <= len(seen) || !slices.Equal(ids[:len(seen)], seen) {
					t.Fatalf("turn %d:\n got %q\nafter %q", turn, k.tok.Decode(ids, false), k.tok.Decode(seen, false))
				}
				text, cut := strings.CutSuffix(answer, "…")
				seen = slices.Clone(ids)
				for _, c := range []byte(text) {
					seen = append(seen, int32(c))
				}
				if !cut {
					seen = append(seen, 257)
				}
				k.messages = append(k.messages, string(message), `{"role":"tool","content":"and the result"}`)
			}
			m := k.s.prompts.metrics
			if n := count(m.rendered, "extended"); n < 25 {
				t.Errorf("%d of 29 turns were extended", n)
			}
			if n := count(m.splices, spliceSampled); n != 29 {
				t.Errorf("%d of 29 answers came back as they were sampled", n)
			}
			if n := testutil.ToFloat64(m.turns); n != 30 {
				t.Errorf("%v turns are remembered", n)
			}
		}
	}
}

// stream is ask for a stream, assembled.
func (k *talk) stream() (json.RawMessage, []int32) {
	k.t.Helper()
	body := strings.TrimSuffix(k.body(), "}") + `,"stream":true}`
	var headers []string
	if k.id != "" {
		headers = []string{"X-Session-Id", k.id}
	}
	r := post(k.t, k.s.Handler(), chatPath, body, headers...)
	if r.status != 200 {
		k.t.Fatalf("%d %s", r.status, r.body)
	}
	m := assemble(k.t, r).Choices[0].Message
	out := map[string]any{"role": "assistant", "content": m.Content}
	if m.Reasoning != "" {
		out["reasoning_content"] = m.Reasoning
	}
	if len(m.ToolCalls) > 0 {
		var calls []any
		for _, c := range m.ToolCalls {
			calls = append(calls, map[string]any{"id": c.ID, "type": "function", "function": map[string]any{"name": c.Function.Name, "arguments": c.Function.Arguments}})
		}
		out["tool_calls"] = calls
	}
	raw, err := json.Marshal(out)
	if err != nil {
		k.t.Fatal(err)
	}
	return raw, k.b.last()
}

// TestConversationChanges: what a client changes in its history counts, and the rest is the template's.
func TestConversationChanges(t *testing.T) {
	const question = `{"role":"user","content":"another question"}`
	for _, c := range []struct {
		name   string
		answer string
		change func(k *talk, answer string) []string // the next messages
		reason text.Reason
		splice string
	}{
		{"nothing", "the answer", func(_ *talk, a string) []string { return []string{a, question} }, text.Extended, spliceSampled},
		{"the answer's text", "the answer", func(_ *talk, a string) []string {
			return []string{strings.Replace(a, "the answer", "the other answer", 1), question}
		}, text.Extended, ""},
		{"its thoughts are stripped", "<think>\nthe thought\n</think>\n\n" + toolCall, func(_ *talk, a string) []string {
			return []string{strings.Replace(a, `"reasoning_content":"the thought",`, "", 1), `{"role":"tool","content":"the result"}`}
		}, text.Extended, ""},
		{"its thoughts are returned, but the template leaves them out", "<think>\nthe thought\n</think>\n\nthe answer", func(_ *talk, a string) []string {
			return []string{a, question}
		}, text.Extended, spliceThoughts},
		{"its calls have other ids", toolCall, func(_ *talk, a string) []string {
			return []string{callIDs.ReplaceAllString(a, `"id":"mine"`), `{"role":"tool","content":"the result"}`}
		}, text.Extended, ""},
		{"arguments are written as an object", toolCall, func(_ *talk, a string) []string {
			return []string{strings.Replace(a, `"{\"city\":\"the quay\",  \"n\": 1}"`, `{"city": "the quay", "n": 1}`, 1), `{"role":"tool","content":"the result"}`}
		}, text.Extended, spliceSampled},
		{"an old message", "the answer", func(k *talk, a string) []string {
			k.messages[1] = strings.Replace(k.messages[1], "question", "QUESTION", 1)
			return []string{a, question}
		}, text.Edited, ""},
		{"the answer is dropped", "the answer", func(*talk, string) []string { return []string{question} }, text.Extended, ""},
		{"the history is cut short", "the answer", func(k *talk, a string) []string {
			k.messages = k.messages[1:]
			return []string{a, question}
		}, text.Edited, ""},
		{"the tools", "the answer", func(k *talk, a string) []string {
			k.more = `,"tools":[{"type":"function","function":{"name":"another"}}]`
			return []string{a, question}
		}, text.OtherTools, spliceStale},
		{"no tools", "the answer", func(k *talk, a string) []string {
			k.more += `,"tool_choice":"none"`
			return []string{a, question}
		}, text.OtherTools, spliceStale},
		{"the template's arguments", "the answer", func(k *talk, a string) []string {
			k.more += `,"chat_template_kwargs":{"mode":"the mode"}`
			return []string{a, question}
		}, text.OtherOptions, spliceStale},
		{"the last message is to be continued", "the answer", func(k *talk, a string) []string {
			k.more += `,"continue_final_message":true`
			return []string{a}
		}, text.Continued, spliceSampled},
		{"the conversation's id", "the answer", func(k *talk, a string) []string {
			k.id = "another"
			return []string{a, question}
		}, text.Extended, ""},
		{"the cache salt", "the answer", func(k *talk, a string) []string {
			k.more += `,"cache_salt":"salt"`
			return []string{a, question}
		}, text.Extended, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := newTalk(t, nil)
			k.id, k.more = "session", `,`+withTools
			k.b.next(c.answer)
			answer, first := k.ask(`{"role":"system","content":"the system"}`, `{"role":"user","content":"the question"}`)
			first = slices.Clone(first)
			_, got := k.ask(c.change(k, string(answer))...)
			want := k.whole()
			if sampled := c.splice == spliceSampled; sampled {
				if at := len(first) + len(c.answer); at < len(got) && got[at] != 257 || !slices.Equal(got[:len(first)], first) || k.tok.Decode(got[len(first):at], false) != c.answer {
					t.Errorf("the answer is not in %q", k.tok.Decode(got, false))
				}
			} else if k.tok.Decode(got, false) != k.tok.Decode(want, false) {
				t.Errorf("the prompt is %q, want %q", k.tok.Decode(got, false), k.tok.Decode(want, false))
			}
			if sampled := c.splice == spliceSampled; sampled == slices.Equal(got, want) {
				t.Errorf("sampled ids are in the prompt: %v, want %v", !sampled, sampled)
			}
			if n := count(k.s.prompts.metrics.rendered, string(c.reason)); n != 1 {
				t.Errorf("not counted as %s", c.reason)
			}
			for _, outcome := range []string{spliceSampled, spliceSame, spliceThoughts, spliceRefused, spliceStale} {
				if n := count(k.s.prompts.metrics.splices, outcome); (n == 1) != (outcome == c.splice) {
					t.Errorf("%d splices of outcome %s", n, outcome)
				}
			}
		})
	}
}

// TestConversationsAreTheirOwn: conversations that begin alike keep what was sampled for each; without ids the answer that
// comes back tells them apart.
func TestConversationsAreTheirOwn(t *testing.T) {
	for _, ids := range []bool{false, true} {
		k := newTalk(t, nil)
		begin := []string{`{"role":"user","content":"the question"}`}
		answers := []string{"an answer", "another", "the rest"}
		var messages []json.RawMessage
		for i, a := range answers {
			k.messages, k.id = nil, ""
			if ids {
				k.id = answers[i]
			}
			k.b.next(a)
			m, _ := k.ask(begin...)
			messages = append(messages, m)
		}
		for i, a := range answers {
			k.messages, k.id = nil, ""
			if ids {
				k.id = answers[i]
			}
			_, got := k.ask(append(slices.Clone(begin), string(messages[i]), `{"role":"user","content":"more"}`)...)
			var want []int32
			for _, c := range []byte("assistant\n" + a) {
				want = append(want, int32(c))
			}
			want = append(want[10:], 257)
			at := len(k.b.requests[i].Prompt)
			if !slices.Equal(got[at:at+len(want)], want) {
				t.Errorf("ids %v: %q goes on as %q", ids, a, k.tok.Decode(got[at:], false))
			}
		}
	}
}

// TestConversationsBesideOthers: a server that remembers gives the prompts of one that does not, whatever the
// requests look like and in whatever order they come.
func TestConversationsBesideOthers(t *testing.T) {
	content := rapid.SampledFrom([]string{"a", "the", `say \"messages\":[`, "é", "<|im_end|>", strings.Repeat("the quick answer ", 20)})
	role := rapid.SampledFrom([]string{"user", "assistant", "tool", "system"})
	spaces := rapid.SampledFrom([]string{"", " ", "\n\t"})
	fields := rapid.SampledFrom([]string{
		"", `,"tools":[{"messages":[{"role":"user","content":"a"}]}]`, `,"tools":[{"type":"function"}]`, `,"chat_template_kwargs":{"mode":"m"}`, `,"user":"u"`, `,"add_generation_prompt":false`,
	})
	tok := newTextTokenizer(t, agentTemplate, merges...)
	rapid.Check(t, func(rt *rapid.T) {
		serve := func(entries int) (*Server, *speaker) {
			b := &speaker{}
			return newTestServer(t, b, func(c *Config) {
				c.Tokenizer, c.Limits, c.Conversations.Entries, c.ShadowRate = tok, Limits{VocabSize: 259 + len(merges)}, entries, 0
			}), b
		}
		with, heard := serve(rapid.SampledFrom([]int{1, 3, 100}).Draw(rt, "entries"))
		without, want := serve(-1)
		var talks [][]string
		for range rapid.IntRange(1, 25).Draw(rt, "requests") {
			var messages []string
			if n := len(talks); n > 0 && rapid.IntRange(0, 9).Draw(rt, "goes on") > 1 {
				old := talks[rapid.IntRange(0, n-1).Draw(rt, "which")]
				messages = slices.Clone(old[:rapid.IntRange(0, len(old)).Draw(rt, "kept")])
			}
			for range rapid.IntRange(0, 3).Draw(rt, "more") {
				messages = append(messages, fmt.Sprintf(`{"role":"%s",%s"content":"%s"}`, role.Draw(rt, "role"), spaces.Draw(rt, "space"), content.Draw(rt, "content")))
			}
			talks = append(talks, messages)
			f := fields.Draw(rt, "fields")
			body := `{"messages"` + spaces.Draw(rt, "space") + `:[` + strings.Join(messages, spaces.Draw(rt, "space")+","+spaces.Draw(rt, "space")) + spaces.Draw(rt, "space") + `]` + f + `}`
			if f != "" && rapid.Bool().Draw(rt, "first") {
				body = `{` + f[1:] + `,` + body[1:len(body)-len(f)-1] + `}`
			}
			if rapid.IntRange(0, 9).Draw(rt, "damaged") == 0 {
				at := rapid.IntRange(0, len(body)-1).Draw(rt, "where")
				body = body[:at] + rapid.SampledFrom([]string{"", "x", ",", "]", "{"}).Draw(rt, "damage") + body[at+1:]
			}
			got, wanted := post(t, with.Handler(), chatPath, body), post(t, without.Handler(), chatPath, body)
			if got.status != wanted.status || got.status != 200 && string(got.body) != string(wanted.body) {
				rt.Fatalf("%s\ngives %d %s\n want %d %s", body, got.status, got.body, wanted.status, wanted.body)
			}
			if got.status == 200 && tok.Decode(heard.last(), false) != tok.Decode(want.last(), false) {
				rt.Fatalf("%s\ngives %q\n want %q", body, tok.Decode(heard.last(), false), tok.Decode(want.last(), false))
			}
		}
	})
}

// TestConversationLimits: what is remembered stays within its bounds, and what was forgotten is made again.
func TestConversationLimits(t *testing.T) {
	k := newTalk(t, func(c *Config) { c.Conversations = ConversationLimits{Entries: 10, Bytes: 40 << 10} })
	m := k.s.prompts.metrics
	rng := rand.New(rand.NewPCG(1, 2))
	talks := make([][]string, 12)
	for range 200 {
		i := rng.IntN(len(talks))
		k.id, k.messages = fmt.Sprint(i), talks[i]
		if len(talks[i]) > 12 {
			k.messages = nil
		}
		a, got := k.ask(fmt.Sprintf(`{"role":"user","content":"the question %d%s"}`, i, strings.Repeat(" and", rng.IntN(300))))
		if want := k.whole(); k.tok.Decode(got, false) != k.tok.Decode(want, false) {
			t.Fatalf("got %q, want %q", k.tok.Decode(got, false), k.tok.Decode(want, false))
		}
		talks[i] = append(k.messages, string(a))
		if n, b := testutil.ToFloat64(m.turns), testutil.ToFloat64(m.turnBytes); n > 10 || b > 40<<10 || n == 0 {
			t.Fatalf("%v turns, %v bytes", n, b)
		}
	}
	c := k.s.prompts.conversations
	var bytes int64
	turns := 0
	used := map[*writing]int{}
	for e := c.recent.Front(); e != nil; e = e.Next() {
		t := e.Value.(*turn)
		bytes += t.size
		turns++
		for w := t.written; w != nil; w = w.before {
			if used[w]++; used[w] > 1 {
				break
			}
			bytes += w.size()
		}
	}
	for w, n := range used {
		if w.uses != n {
			t.Errorf("%d uses of a writing, %d counted", n, w.uses)
		}
	}
	listed := 0
	for _, l := range c.turns {
		listed += len(l)
	}
	if bytes != c.bytes || turns != listed || len(c.scopes) > turns {
		t.Errorf("%d bytes counted of %d; %d turns, %d listed, %d scopes", c.bytes, bytes, turns, listed, len(c.scopes))
	}
}

// TestConversationsAtOnce is for the race detector: turns of one conversation from several clients.
func TestConversationsAtOnce(t *testing.T) {
	k := newTalk(t, func(c *Config) { c.Conversations.Entries = 5 })
	want := map[string]string{}
	var bodies []string
	for n := range 20 {
		k.messages = append(k.messages, fmt.Sprintf(`{"role":"user","content":"the question %d"}`, n))
		want[k.body()] = k.tok.Decode(k.whole(), false)
		bodies = append(bodies, k.body())
		k.messages = append(k.messages, `{"role":"assistant","content":"an answer"}`)
	}
	var clients sync.WaitGroup
	for i := range 4 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 0))
			for range 30 {
				n := rng.IntN(len(bodies))
				r := post(t, k.s.Handler(), chatPath, strings.TrimSuffix(bodies[n], "}")+`,"return_token_ids":true}`, "X-Session-Id", "one")
				if got := k.tok.Decode(r.decode(t).PromptTokenIDs, false); got != want[bodies[n]] {
					t.Errorf("got %q, want %q", got, want[bodies[n]])
				}
			}
		})
	}
	clients.Wait()
}

// TestShadow: prompts that go on are made a second time as well, at the rate asked for.
func TestShadow(t *testing.T) {
	k := newTalk(t, func(c *Config) { c.ShadowRate = 1 })
	k.messages = []string{`{"role":"user","content":"the question"}`}
	for range 8 {
		k.b.next(toolCall)
		a, _ := k.ask()
		k.messages = append(k.messages, string(a), `{"role":"tool","content":"the result"}`)
	}
	if n := count(k.s.prompts.metrics.shadows, shadowSame); n != 7 || count(k.s.prompts.metrics.shadows, shadowDiffer) != 0 {
		t.Errorf("%d of 7 prompts were compared", n)
	}
}

// forger goes on from another conversation than it is asked to.
type forger struct{ Transcriber }

func (f forger) Transcribe(ctx context.Context, prev *text.Script, c *Chat, p text.Prefix) (*text.Script, text.Reuse, error) {
	if prev != nil {
		other := *c
		other.Messages = []byte(`[{"role":"user","content":"something else"}]`)
		s, reuse, err := f.Transcriber.Transcribe(ctx, nil, &other, text.Prefix{})
		reuse.Reason = text.Extended
		return s, reuse, err
	}
	return f.Transcriber.Transcribe(ctx, prev, c, p)
}

// TestShadowMismatch: a difference is counted, told, and of no consequence (50).
func TestShadowMismatch(t *testing.T) {
	var log strings.Builder
	k := newTalk(t, func(c *Config) {
		c.ShadowRate, c.Logger = 1, slog.New(slog.NewTextHandler(&log, nil))
		c.Tokenizer = forger{c.Tokenizer.(Transcriber)}
	})
	a, _ := k.ask(`{"role":"user","content":"the question"}`)
	_, got := k.ask(strings.Replace(string(a), "an answer", "another", 1), `{"role":"user","content":"more"}`)
	if want := k.whole(); !slices.Equal(got, want) {
		t.Errorf("the prompt is %q", k.tok.Decode(got, false))
	}
	if n := count(k.s.prompts.metrics.shadows, shadowDiffer); n != 1 || !strings.Contains(log.String(), "level=ERROR") {
		t.Errorf("%d mismatches were counted, and told as %q", n, log.String())
	}
}
