//go:build unix

package frontend

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

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

// agentBodies are the requests of a conversation with tools: about 3,000 tokens at first and 400 more each turn.
func agentBodies(turns int) []string {
	rng := rand.New(rand.NewPCG(3, 4))
	words := strings.Fields("the agent reads a file and returns lines of code func main ( ) { fmt . Println value error nil Zürich 42 0x1f path/to/file.go != == := import package")
	say := func(n int) string {
		list := make([]string, n)
		for i := range list {
			list[i] = words[rng.IntN(len(words))]
		}
		return strings.Join(list, " ")
	}
	message := func(v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		return string(b)
	}
	tools := `[{"type":"function","function":{"name":"run","description":"` + say(300) + `","parameters":{"type":"object","properties":{"cmd":{"type":"string","description":"` + say(100) + `"}}}}}]`
	messages := []string{message(map[string]any{"role": "system", "content": say(1500)}), message(map[string]any{"role": "user", "content": say(200)})}
	var bodies []string
	for i := range turns {
		bodies = append(bodies, `{"model":"toy","messages":[`+strings.Join(messages, ",")+`],"tools":`+tools+`,"max_tokens":1}`)
		call := map[string]any{"id": fmt.Sprint("call_", i), "type": "function", "function": map[string]any{"name": "run", "arguments": message(map[string]any{"cmd": say(20)})}}
		messages = append(messages, message(map[string]any{"role": "assistant", "content": say(40), "tool_calls": []any{call}}),
			message(map[string]any{"role": "tool", "tool_call_id": call["id"], "content": say(230)}))
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
		return newTextTokenizer(t, agentTemplate, merges...)
	}
	return NewTokenizer(tok)
}

// cpuTime is what this thread has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestTurnCost: the thirtieth turn costs the processor at most twice what the second costs, for equal new text. Each is
// the least of several, and the whole is tried again when it does not hold: other work on the machine costs caches.
func TestTurnCost(t *testing.T) {
	tok := bigTokenizer(t)
	bodies := agentBodies(31)
	cost := func(entries int) (second, thirtieth time.Duration) {
		turns := make([]time.Duration, len(bodies))
		for round := range 7 {
			s := newTestServer(t, silent{}, func(c *Config) {
				c.Tokenizer, c.Limits, c.Conversations.Entries = tok, Limits{}, entries
			})
			runtime.GC()
			for i, body := range bodies {
				start := cpuTime()
				if r := post(t, s.Handler(), chatPath, body); r.status != 200 {
					t.Fatalf("turn %d: %d %s", i, r.status, r.body)
				}
				if took := cpuTime() - start; round == 0 || took < turns[i] {
					turns[i] = took
				}
			}
		}
		median := func(list []time.Duration) time.Duration { return slices.Sorted(slices.Values(list))[len(list)/2] }
		return median(turns[1:4]), median(turns[27:30])
	}
	second, thirtieth := cost(-1)
	t.Logf("nothing is remembered: turn 2 takes %v, turn 30 %v", second, thirtieth)
	for try := range 4 {
		second, thirtieth = cost(0)
		t.Logf("turn 2 takes %v, turn 30 %v (%.2f)", second, thirtieth, float64(thirtieth)/float64(second))
		if thirtieth <= 2*second {
			return
		}
		if try == 3 {
			t.Errorf("turn 30 takes %v, more than twice the %v of turn 2", thirtieth, second)
		}
	}
}
