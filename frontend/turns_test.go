package frontend

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"baton/text"
	"baton/wire"
)

// silent answers with one token.
type silent struct{}

func (silent) Submit(_ context.Context, req *wire.SubmitRequest) (Stream, error) {
	return &scriptStream{script: &script{tokens: []int32{int32(req.Prompt[0])}, sizes: []int{1}, finish: wire.FinishLength}}, nil
}

func (silent) Status(context.Context) (*wire.StatusReply, error) {
	return &wire.StatusReply{Ready: true}, nil
}

// agent is a conversation with tools: about 3,000 tokens at first and 400 more each turn.
type agent struct {
	rng      *rand.Rand
	tools    string
	messages []string
	turn     int
}

func newAgent() *agent {
	a := &agent{rng: rand.New(rand.NewPCG(3, 4))}
	a.tools = `[{"type":"function","function":{"name":"run","description":"` + a.say(300) + `","parameters":{"type":"object","properties":{"cmd":{"type":"string","description":"` + a.say(100) + `"}}}}}]`
	a.messages = []string{toJSON(map[string]any{"role": "system", "content": a.say(1500)}), toJSON(map[string]any{"role": "user", "content": a.say(200)})}
	return a
}

var agentWords = strings.Fields("the agent reads a file and returns lines of code func main ( ) { fmt . Println value error nil Zürich 42 0x1f path/to/file.go != == := import package")

// say gives so many words.
func (a *agent) say(n int) string {
	list := make([]string, n)
	for i := range list {
		list[i] = agentWords[a.rng.IntN(len(agentWords))]
	}
	return strings.Join(list, " ")
}

func toJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func (a *agent) body(more string) string {
	return `{"model":"toy","messages":[` + strings.Join(a.messages, ",") + `],"tools":` + a.tools + `,"max_tokens":1` + more + `}`
}

// act adds an answer, which ids gives more members if it is not nil, and the result of its call.
func (a *agent) act(ids func(text string) string) {
	id := fmt.Sprint("call_", a.turn)
	a.turn++
	call := toJSON([]any{map[string]any{"id": id, "type": "function", "function": map[string]any{"name": "run", "arguments": toJSON(map[string]any{"cmd": a.say(20)})}}})
	said := a.say(40)
	more := ""
	if ids != nil {
		more = ids(said + call)
	}
	a.messages = append(a.messages, `{"role":"assistant","content":`+toJSON(said)+`,"tool_calls":`+call+more+`}`,
		toJSON(map[string]any{"role": "tool", "tool_call_id": id, "content": a.say(230)}))
}

// agentBodies are the requests of an agent's conversation.
func agentBodies(turns int) (bodies []string) {
	a := newAgent()
	for range turns {
		bodies = append(bodies, a.body(""))
		a.act(nil)
	}
	return bodies
}

// asked keeps the last prompt.
type asked struct {
	silent
	prompt []int32
}

func (b *asked) Submit(ctx context.Context, req *wire.SubmitRequest) (Stream, error) {
	b.prompt = req.Prompt
	return b.silent.Submit(ctx, req)
}

// rolloutBodies are those of a client that carries ids and log-probabilities along, as a server gave them.
func rolloutBodies(t testing.TB, tok Tokenizer, turns int) (bodies []string) {
	a, b := newAgent(), &asked{}
	s := newTestServer(t, b, func(c *Config) { c.Tokenizer, c.Limits = tok, Limits{} })
	for range turns {
		body := a.body(`,"logprobs":true,"return_tokens_as_token_ids":true`)
		if r := post(t, s.Handler(), chatPath, body); r.status != 200 {
			t.Fatalf("%d %s", r.status, r.body)
		}
		bodies = append(bodies, body)
		a.act(func(text string) string {
			sampled, err := tok.Encode(text, false)
			if err != nil {
				t.Fatal(err)
			}
			probs := make([]float32, len(sampled))
			for i := range probs {
				probs[i] = -a.rng.Float32()
			}
			return `,"prompt_token_ids":` + string(appendIDs(nil, b.prompt)) + `,"generation_token_ids":` + string(appendIDs(nil, sampled)) + `,"generation_log_probs":` + toJSON(probs)
		})
	}
	return bodies
}

// bigTokenizer is a real one if there is one in the cache (scripts/fetch-tokenizers).
func bigTokenizer(t testing.TB) Tokenizer {
	root := os.Getenv("BATON_CACHE")
	if home, err := os.UserHomeDir(); root == "" && err == nil {
		root = filepath.Join(home, ".cache", "baton")
	}
	tok, err := text.Load(filepath.Join(root, "tokenizers", "qwen3"))
	if err != nil {
		return newTextTokenizer(t, agentTemplate, wordMerges()...)
	}
	return NewTokenizer(tok)
}

// wordMerges give an agent's words one id each, with the space before them, or a few.
func wordMerges() (list []string) {
	for _, word := range agentWords {
		end := len(word) - len(strings.TrimLeft(word, "abcdefghijklmnopqrstuvwxyz"))
		if end == 0 {
			end = len(word) - len(strings.TrimLeft(word, "0123456789"))
		}
		if end == 0 && word[0] < 'A' {
			end = len(word)
		}
		for i := range word[:end] {
			if m := "Ġ" + word[:i] + " " + word[i:i+1]; !slices.Contains(list, m) {
				list = append(list, m)
			}
		}
	}
	return append(list, "t o", "f i", "fi l", "fil e", "g o")
}

// TestRolloutWork counts instead: what of a rollout's body is read does not grow with the turns, and what is remembered of all of them
// is little more than what the last one sent.
func TestRolloutWork(t *testing.T) {
	tok := newTextTokenizer(t, agentTemplate, merges...)
	for name, spell := range map[string]func(string) string{
		"compact": func(body string) string { return body },
		"spaced":  func(body string) string { return strings.ReplaceAll(body, ",", ", ") },
	} {
		bodies := rolloutBodies(t, tok, 31)
		p, err := NewPrompter(PrompterConfig{Tokenizer: tok})
		if err != nil {
			t.Fatal(err)
		}
		read := make([]int, len(bodies))
		text := 0
		for i, body := range bodies {
			body = spell(body)
			k := p.conversations.recall([]byte(body))
			read[i] = len(k.body)
			if _, err := p.Prompt(t.Context(), []byte(body), ""); err != nil {
				t.Fatal(err)
			}
			text += p.conversations.recent.Front().Value.(*turn).script.Size()
		}
		// The second turn is the first with ids.
		if got := slices.Max(read[2:]); 2*got > 3*slices.Min(read[2:]) || got > read[1] {
			t.Errorf("%s: of the bodies, %d bytes are read", name, read)
		}
		if last := int64(len(spell(bodies[30]))); p.conversations.bytes-int64(text) > last+64*31 || p.conversations.bytes < last {
			t.Errorf("%s: %d bytes are remembered, %d of texts; the last turn sent %d", name, p.conversations.bytes, text, last)
		}
	}
}

// TestSparesAreFree: nothing that is remembered or under way lies in memory that bodies use again. Rollouts of several clients
// at once get the prompts that a server gives them that remembers nothing.
func TestSparesAreFree(t *testing.T) {
	tok := newTextTokenizer(t, agentTemplate, wordMerges()...)
	bodies := rolloutBodies(t, tok, 9)
	if len(bodies[8]) < 2*firstBody {
		t.Fatalf("bodies of %d bytes are none of those", len(bodies[8]))
	}
	server := func(entries int) *Server {
		return newTestServer(t, silent{}, func(c *Config) { c.Tokenizer, c.Limits, c.Conversations.Entries = tok, Limits{}, entries })
	}
	ask := func(s *Server, body string) []int32 {
		r := post(t, s.Handler(), chatPath, strings.TrimSuffix(body, "}")+`,"return_token_ids":true}`)
		if r.status != 200 {
			t.Errorf("%d %.300s", r.status, r.body)
			return nil
		}
		return r.decode(t).PromptTokenIDs
	}
	one, forgets := server(0), server(-1)
	var clients sync.WaitGroup
	for client := range 4 {
		clients.Go(func() {
			for turn, body := range bodies {
				body = strings.ReplaceAll(body, "Zürich", fmt.Sprint("Zürich", client))
				if got, want := ask(one, body), ask(forgets, body); !slices.Equal(got, want) {
					t.Errorf("client %d, turn %d: %d ids are not the %d that they should be", client, turn, len(got), len(want))
				}
			}
		})
	}
	clients.Wait()
}

// BenchmarkTurn is a request of a conversation of which the turn before is known.
func BenchmarkTurn(b *testing.B) {
	tok := bigTokenizer(b)
	for _, kind := range []struct {
		name   string
		bodies []string
	}{{"plain", agentBodies(31)}, {"rollout", rolloutBodies(b, tok, 31)}} {
		for _, turn := range []int{2, 10, 30} {
			b.Run(fmt.Sprintf("%s/turn=%d", kind.name, turn), func(b *testing.B) {
				s := newTestServer(b, silent{}, func(c *Config) { c.Tokenizer, c.Limits = tok, Limits{} })
				ask := func(body string) {
					if r := post(b, s.Handler(), chatPath, body); r.status != 200 {
						b.Fatalf("%d %s", r.status, r.body)
					}
				}
				for _, body := range kind.bodies[:turn-1] {
					ask(body)
				}
				b.ReportAllocs()
				b.SetBytes(int64(len(kind.bodies[turn-1])))
				for b.Loop() {
					ask(kind.bodies[turn-1])
					s.prompts.conversations.forgetLatest()
				}
			})
		}
	}
}

// forgetLatest forgets the turn that was used last.
func (c *conversations) forgetLatest() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forget(c.recent.Front().Value.(*turn))
}
