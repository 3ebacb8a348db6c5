package doctor

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	mathrand "math/rand/v2"
	"net/http"
	"strconv"
)

func itoa(n int) string { return strconv.Itoa(n) }

// Ids of prompts lie where every vocabulary has some, above those that mean beginning, end and padding.
const lowestID, highestID = 3, 250

// prompt makes a prompt that nobody has seen before, as the inside of a JSON array of ids.
func prompt(tokens int) []byte {
	var seed [16]byte
	_, _ = rand.Read(seed[:]) // never fails
	rng := mathrand.New(mathrand.NewPCG(binary.LittleEndian.Uint64(seed[:]), binary.LittleEndian.Uint64(seed[8:])))
	var b []byte
	for i := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(lowestID+rng.IntN(highestID-lowestID)), 10)
	}
	return b
}

// promptTokens is how long a prompt for these servers is.
func (x *examination) promptTokens(servers ...*Server) int {
	n := x.PromptTokens
	for _, s := range servers {
		if s.Context > 0 {
			n = min(n, max(s.Context/2, 1))
		}
	}
	return n
}

func (x *examination) model(s *Server) string {
	if x.Model != "" {
		return x.Model
	}
	return s.Model
}

const completions, chatCompletions = "/v1/completions", "/v1/chat/completions"

// answerTokens is how many tokens requests ask for.
const answerTokens = 8

// body makes a request for a completion of ids, with fields that follow as they are.
func (x *examination) body(s *Server, ids []byte, fields string) []byte {
	if s.Engine != Unknown {
		fields = `,"ignore_eos":true` + fields // all kinds that are known have it
	}
	name, _ := json.Marshal(x.model(s)) // a string that came out of JSON, or of the command line
	return fmt.Appendf(nil, `{"model":%s,"prompt":[%s],"temperature":0%s}`, name, ids, fields)
}

// reply is what matters of a completion.
type reply struct {
	Choices []struct {
		Text    string         `json:"text"`
		Finish  string         `json:"finish_reason"`
		Params  jsontext.Value `json:"disaggregated_params"`
		Handoff *struct {
			Prefill string `json:"prefill_engine"`
			Decode  string `json:"decode_engine"`
			Moved   int    `json:"blocks_moved"`
			Reused  int    `json:"blocks_reused"`
			Bytes   int64  `json:"bytes_moved"`
		} `json:"handoff"`
	} `json:"choices"`
	Usage    jsontext.Value `json:"usage"`
	Transfer jsontext.Value `json:"kv_transfer_params"`
}

// usage is how the server counted a prompt. cached is -1 when it does not say how much of it was cached.
func (r *reply) usage() (prompt, cached int) {
	var u struct {
		Prompt  int `json:"prompt_tokens"`
		Details struct {
			Cached *int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	if json.Unmarshal(r.Usage, &u) != nil || u.Details.Cached == nil {
		return u.Prompt, -1
	}
	return u.Prompt, *u.Details.Cached
}

func (r *reply) text() string {
	if len(r.Choices) == 0 {
		return ""
	}
	return r.Choices[0].Text
}

// set tells whether a JSON value is there and not null.
func set(v jsontext.Value) bool { return len(v) > 0 && string(v) != "null" }

// complete posts a request and reads the reply. A finding says what went wrong; then the reply is nil.
func (x *examination) complete(ctx context.Context, s *Server, subject, what string, body []byte, id string) (*reply, *answer) {
	a, err := x.post(ctx, s.URL+completions, body, id)
	if err != nil {
		x.find(Wrong, subject, what+" failed: "+err.Error(), "see the server's log")
		return nil, nil
	}
	var r reply
	switch {
	case a.status == http.StatusNotFound || a.status == http.StatusMethodNotAllowed:
		x.find(Warning, subject, what+" was not possible: there is no "+completions, "")
		return nil, nil
	case !a.ok():
		do := "see the server's log"
		if a.status == http.StatusServiceUnavailable {
			do = "see /health: a role may have no engine"
		}
		x.find(Wrong, subject, what+" was refused, "+a.failure(), do)
		return nil, nil
	case !a.read(&r) || len(r.Choices) == 0:
		x.find(Wrong, subject, what+" was answered with something else than a completion: "+shorten(string(a.body)), "")
		return nil, nil
	}
	return &r, a
}

// ask sends a server that answers whole requests the same prompt twice: does it answer, does it cache, does it hand over?
func (x *examination) ask(ctx context.Context, s *Server) {
	fields := fmt.Sprintf(`,"max_tokens":%d`, answerTokens)
	if s.Engine == Baton {
		fields += `,"return_handoff":true`
	}
	ids := prompt(x.promptTokens(s))
	first, a := x.complete(ctx, s, s.URL, "a request", x.body(s, ids, fields), "")
	if first == nil {
		return
	}
	if w := a.header.Get("X-Baton-Silent-Reprefill"); w != "" {
		x.find(Wrong, s.URL, "its prefill worker "+shorten(w)+" hands nothing over: decode computes every prompt again", "look at the pair itself: --prefill "+shorten(w)+" --decode URL")
	}
	x.handedOver(s, first)
	second, _ := x.complete(ctx, s, s.URL, "the same request again", x.body(s, ids, fields), "")
	if second == nil {
		return
	}
	tokens, cached := second.usage()
	switch {
	case cached < 0:
		do := map[string]string{VLLM: "start it with --enable-prompt-tokens-details", SGLang: "start it with --enable-cache-report"}[s.Engine]
		x.find(Warning, s.URL, "it answers, and does not say how much of a prompt was cached", do)
	case cached == 0:
		x.find(Warning, s.URL, fmt.Sprintf("it answers, and cached nothing of a prompt of %d tokens that came twice", tokens), "check that prefix caching is on, and that both requests reach the same engine")
	default:
		x.find(OK, s.URL, fmt.Sprintf("it answers, and reused %d of %d tokens of a prompt that came twice", cached, tokens), "")
	}
}

// handedOver reports the handoff that one of our frontends says a request had.
func (x *examination) handedOver(s *Server, r *reply) {
	h := r.Choices[0].Handoff
	if h == nil {
		return
	}
	if h.Prefill == h.Decode {
		x.find(OK, s.URL, "its engine "+shorten(h.Prefill)+" runs requests from prompt to end: there is no handoff", "")
		return
	}
	moved := h.Moved > 0
	tokens, _ := r.usage()
	out := &Handoff{
		Via: s.URL, Prefill: shorten(h.Prefill), Decode: shorten(h.Decode), Moved: &moved, PromptTokens: tokens, Bytes: h.Bytes,
		Evidence: fmt.Sprintf("the frontend reports %d blocks moved, %d reused", h.Moved, h.Reused),
	}
	x.report.Handoffs = append(x.report.Handoffs, out)
	if moved {
		x.find(OK, s.URL, fmt.Sprintf("KV moves from %s to %s: %s", out.Prefill, out.Decode, out.Evidence), "")
	} else {
		x.find(Wrong, s.URL, fmt.Sprintf("nothing moved from %s to %s, though the prompt was new: %s", out.Prefill, out.Decode, out.Evidence), "see the log of the decode engine")
	}
}
