package relay

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

// toyTokenizer makes a chat's ids as the fakes do.
type toyTokenizer struct {
	other bool // ids that the engine would not make
	fail  error

	mu            sync.Mutex
	conversations []string
}

func (k *toyTokenizer) Prompt(_ context.Context, body []byte, conversation string) (ids []int32, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.conversations = append(k.conversations, conversation)
	o, err := scanObject(body)
	if err != nil || k.fail != nil {
		return nil, errors.Join(err, k.fail)
	}
	for _, c := range o.get("messages") {
		ids = append(ids, int32(c))
	}
	if k.other {
		ids[3]++
	}
	return ids, nil
}

const chatMessages = `[{"role":"user","content":"hello"}]`

// Behaviour 29: ids that are made here go along with the prefill leg; not when the client sends ids or
// disaggregated_params; and when they cannot be made the engine does it.
func TestTokenize(t *testing.T) {
	own := EncodeIDs([]int32{7, 8, 9})
	for _, c := range []struct {
		name, kind, more string
		tokenizer        *toyTokenizer
		want             string // prompt_token_ids_b64 of the prefill leg
		outcome          string
	}{
		{"attached", "trtllm", "", &toyTokenizer{}, "made", tokensAttached},
		{"for our own engines too", "baton", "", &toyTokenizer{}, "made", tokensAttached},
		{"the client sends ids", "trtllm", `,"prompt_token_ids_b64":"` + own + `"`, &toyTokenizer{}, own, ""},
		{"as numbers", "trtllm", `,"prompt_token_ids":[7,8,9]`, &toyTokenizer{}, "", ""},
		{"the client sends disaggregated_params", "trtllm", `,"disaggregated_params":{"request_type":"context_only"}`, &toyTokenizer{}, "", ""},
		{"disaggregated_params are null", "trtllm", `,"disaggregated_params":null`, &toyTokenizer{}, "made", tokensAttached},
		{"a failure", "trtllm", "", &toyTokenizer{fail: errors.New("no such role")}, "", tokensFailed},
		{"an engine that takes none", "vllm", "", &toyTokenizer{}, "", ""},
	} {
		r := newRelay(t, c.kind, func(cfg *Config) { cfg.Tokenizer, cfg.ShadowFirst = c.tokenizer, -1 })
		plain := newRelay(t, c.kind, nil)
		body := `{"model":"toy","messages":` + chatMessages + `,"max_tokens":4` + c.more + `}`
		got, want := r.post(chatPath, body), plain.post(chatPath, body)
		if got.status != 200 || got.body != want.body {
			t.Errorf("%s: %d %s, without it %s", c.name, got.status, got.body, want.body)
		}
		made := c.want
		if made == "made" {
			ids, _ := (&toyTokenizer{}).Prompt(t.Context(), []byte(body), "")
			made = EncodeIDs(ids)
		}
		if made != "" {
			made = `"` + made + `"`
		}
		p, d := fieldsOf(t, r.prefill.last()), fieldsOf(t, r.decode.last())
		if p["prompt_token_ids_b64"] != made {
			t.Errorf("%s: the prefill leg has %s, want %s", c.name, p["prompt_token_ids_b64"], made)
		}
		if n := strings.Count(r.prefill.last().body, "prompt_token_ids") + strings.Count(r.decode.last().body, "prompt_token_ids"); c.kind == "vllm" && n > 0 {
			t.Errorf("%s: %s", c.name, r.prefill.last().body)
		}
		if p["messages"] != chatMessages || d["messages"] != chatMessages {
			t.Errorf("%s: messages are %s and %s", c.name, p["messages"], d["messages"])
		}
		for _, outcome := range []string{tokensAttached, tokensFailed} {
			if n := testutil.ToFloat64(r.s.metrics.tokenized.WithLabelValues(outcome)); (n == 1) != (outcome == c.outcome) {
				t.Errorf("%s: %v times %s", c.name, n, outcome)
			}
		}
	}
}

// Both legs have the ids when they run at once, where no answer could be compared.
func TestTokenizeTogether(t *testing.T) {
	ids, _ := (&toyTokenizer{}).Prompt(t.Context(), []byte(`{"messages":`+chatMessages+`}`), "")
	want := `"` + EncodeIDs(ids) + `"`
	body := `{"model":"toy","messages":` + chatMessages + `,"max_tokens":4}`
	tok := &toyTokenizer{}
	prefill := newFake(t, "trtllm", nil)
	prefill.set(func() { prefill.info = `{"disaggregated_params":{"ctx_info_endpoint":["tcp://ctx:1"]}}` })
	decode := newFake(t, "trtllm", prefill)
	sent := make(chan struct{}, 1) // the prefill worker waits for the decode worker to know
	decode.before = func(int, http.ResponseWriter, *http.Request) bool { sent <- struct{}{}; return false }
	prefill.before = func(int, http.ResponseWriter, *http.Request) bool { <-sent; return false }
	r := relayTo(t, []*fake{prefill}, []*fake{decode}, func(c *Config) { c.Tokenizer, c.Schedule, c.ShadowRate = tok, generationFirst, 1 })
	r.read(r.post(chatPath, body, "X-Session-Id: one"))
	if p, d := fieldsOf(t, prefill.last()), fieldsOf(t, decode.last()); p["prompt_token_ids_b64"] != want || d["prompt_token_ids_b64"] != want {
		t.Errorf("prefill %s, decode %s", p["prompt_token_ids_b64"], d["prompt_token_ids_b64"])
	}
	if len(tok.conversations) != 1 || tok.conversations[0] != "one" {
		t.Errorf("conversations %q", tok.conversations)
	}
}

// Behaviour 50: of a share of the requests the ids are the engine's, and compared.
func TestShadow(t *testing.T) {
	for _, c := range []struct {
		name, kind string
		other      bool
		outcome    string
	}{
		{"the same", "trtllm", false, shadowSame},
		{"another tokenizer", "trtllm", true, shadowDiffer},
		{"our own engine", "baton", false, shadowSame},
	} {
		var log bytes.Buffer
		r := newRelay(t, c.kind, func(cfg *Config) {
			cfg.Tokenizer, cfg.ShadowRate = &toyTokenizer{other: c.other}, 1
			cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
		})
		plain := newRelay(t, c.kind, nil)
		body := `{"model":"toy","messages":` + chatMessages + `,"max_tokens":4}`
		got, want := r.post(chatPath, body), plain.post(chatPath, body)
		if got.status != 200 || got.body != want.body {
			t.Errorf("%s: %d %s, want the engine's %s", c.name, got.status, got.body, want.body)
		}
		if p := fieldsOf(t, r.prefill.last()); p["prompt_token_ids_b64"] != "" {
			t.Errorf("%s: ids were sent", c.name)
		}
		for _, outcome := range []string{shadowSame, shadowDiffer, shadowSilent} {
			if n := testutil.ToFloat64(r.s.metrics.shadows.WithLabelValues(outcome)); (n == 1) != (outcome == c.outcome) {
				t.Errorf("%s: %v times %s", c.name, n, outcome)
			}
		}
		if loud := strings.Contains(log.String(), "level=ERROR"); loud != c.other {
			t.Errorf("%s: log %s", c.name, log.String())
		}
	}
	r := newRelay(t, "baton", func(cfg *Config) { cfg.Tokenizer, cfg.ShadowRate = &toyTokenizer{other: true}, 1 })
	r.post(chatPath, `{"model":"toy","messages":`+chatMessages+`,"tools":[{"function":{"name":"f"}}],"tool_choice":"required","max_tokens":4}`)
	if p := fieldsOf(t, r.prefill.last()); p["prompt_token_ids_b64"] == "" || p["tool_choice"] != `"required"` || testutil.ToFloat64(r.s.metrics.shadows.WithLabelValues(shadowDiffer)) != 0 {
		t.Errorf("a prompt to which the engine adds is compared with its own: %v", p)
	}
	if _, err := New(Config{ShadowRate: 2}); err == nil {
		t.Error("a share of 2 is taken")
	}
}

// The first prompts of each worker are compared without being asked for, and ids that it does not make itself are never sent.
func TestShadowOfWorkersThatJoin(t *testing.T) {
	const first = 3
	body := `{"model":"toy","messages":` + chatMessages + `,"max_tokens":4}`
	for _, other := range []bool{false, true} {
		r := newRelay(t, "trtllm", func(c *Config) { c.Tokenizer = &toyTokenizer{other: other} })
		sent := func(n int) (with int) {
			r.prefill.set(func() { r.prefill.seen = nil })
			for range n {
				r.read(r.post(chatPath, body))
			}
			for _, s := range r.prefill.requests() {
				if fieldsOf(t, s)["prompt_token_ids_b64"] != "" {
					with++
				}
			}
			return with
		}
		compared := func() float64 {
			return testutil.ToFloat64(r.s.metrics.shadows.WithLabelValues(shadowSame)) + testutil.ToFloat64(r.s.metrics.shadows.WithLabelValues(shadowDiffer))
		}
		for round := 1; round <= 2; round++ {
			with, checks := sent(first+2), compared()
			if !other && (with != 2 || checks != float64(first*round)) || other && (with != 0 || checks != float64((first+2)*round)) {
				t.Errorf("other %t, round %d: %d prompts had ids, %v were compared", other, round, with, checks)
			}
			r.setWell(r.prefill, false) // it may come back as another one
			r.setWell(r.prefill, true)
		}
	}
}
