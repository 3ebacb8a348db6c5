package frontend

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"baton/checkpoint"
	"baton/engine"
	"baton/leg"
	"baton/wire"
)

// legVocab is the tiny llama's: the toy language has tokens for the first of its ids.
const legVocab = 640

// legServer serves an engine of a role over tcp, as cmd/baton does, until the test ends.
func legServer(t *testing.T, role string) (*Server, *leg.Server) {
	t.Helper()
	return legServerWith(t, role, time.Second)
}

// legServerWith is legServer with leases of a length.
func legServerWith(t *testing.T, role string, lease time.Duration) (*Server, *leg.Server) {
	t.Helper()
	ck, err := checkpoint.Open("../testdata/goldens/llama")
	if err != nil {
		t.Fatal(err)
	}
	quiet := slog.New(slog.DiscardHandler)
	shard, err := engine.Open(t.Context(), engine.Config{
		Role: role, Checkpoint: ck, KVBytes: 64 << 20, Threads: 1, Logger: quiet, Transport: "tcp", Continuation: -1, ServedModel: "toy", ExportLease: lease,
	})
	if err != nil {
		t.Fatal(err)
	}
	links, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	legs, err := leg.NewServer(leg.ServerConfig{
		Core: leg.Config{Engines: []string{role}, Address: links.Addr().String(), Lease: lease, DrainWait: 100 * time.Millisecond}, Logger: quiet,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- legs.Serve(context.Background(), links) }()
	go func() {
		err := shard.Run(ctx, func(_ context.Context, hello wire.Connect) (*wire.Conn, error) { return legs.Connect(hello) })
		ended <- errors.Join(err, shard.Close(), ck.Close())
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		legs.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	s := newTestServer(t, Legs{legs}, func(c *Config) {
		c.Limits = Limits{VocabSize: legVocab}
		c.ServerInfo = func() any { return map[string]string{"engine": "baton"} }
	})
	for do(t, s.Handler(), "GET", "/health", "").status != http.StatusOK {
		time.Sleep(time.Millisecond)
	}
	return s, legs
}

// body is a request as members, which tests add to and take from.
type body map[string]any

func (b body) with(more body) body {
	b = maps.Clone(b)
	maps.Copy(b, more)
	return b
}

func (b body) String() string {
	raw, err := json.Marshal(b)
	if err != nil {
		panic(err)
	}
	return string(raw)
}

// contextAnswer is what tests read of a context leg's answer.
type contextAnswer struct {
	Choices []struct {
		FinishReason string `json:"finish_reason"`
		Params       body   `json:"disaggregated_params"`
	}
	IDs    any `json:"prompt_token_ids"`     // one list, or one a prompt
	IDsB64 any `json:"prompt_token_ids_b64"` // likewise
	Usage  body
}

func contextLeg(t *testing.T, p *Server, path string, b body, params body) (a contextAnswer) {
	t.Helper()
	b = b.with(body{"stream": false, "disaggregated_params": body{"request_type": "context_only"}.with(params)})
	delete(b, "stream_options")
	r := post(t, p.Handler(), path, b.String())
	if r.status != http.StatusOK {
		t.Fatalf("context leg: %d %s", r.status, r.body)
	}
	decoder := json.NewDecoder(strings.NewReader(string(r.body)))
	decoder.UseNumber() // ids beyond 2^53
	if err := decoder.Decode(&a); err != nil {
		t.Fatal(err)
	}
	return a
}

// goOn is the generation leg's request.
func (a contextAnswer) goOn(path string, b body) body {
	g := b.with(body{"disaggregated_params": a.Choices[0].Params.with(body{"request_type": "generation_only", "ctx_usage": a.Usage})})
	switch {
	case a.IDsB64 != nil:
		g["prompt_token_ids_b64"] = a.IDsB64
		if path == completionPath {
			delete(g, "prompt")
		}
	case path == completionPath:
		g["prompt"] = a.IDs
	default:
		g["prompt_token_ids"] = a.IDs
	}
	return g
}

// What a client gets of two legs is what it gets of one engine, to the last bit.
func TestTwoLegs(t *testing.T) {
	alone, _ := legServer(t, wire.RoleBoth)
	p, prefill := legServer(t, wire.RolePrefill)
	d, decode := legServer(t, wire.RoleDecode)
	chat := body{"messages": []body{{"role": "user", "content": "the cat sat on the mat, and then"}}}
	text := body{"prompt": "the cat sat on"}
	for _, c := range []struct {
		name   string
		body   body
		params body // of the context leg
	}{
		{"greedy", text.with(body{"max_tokens": 20, "temperature": 0, "logprobs": 3, "return_token_ids": true}), nil},
		{"sampled", text.with(body{"max_tokens": 20, "seed": 5, "logprobs": 0}), body{"return_prompt_token_ids_b64": true}},
		{"echoed", text.with(body{"max_tokens": 6, "seed": 6, "logprobs": 2, "echo": true, "prompt_logprobs": 1}), nil},
		{"ids", body{"prompt": []int{5, 6, 7, 600}, "max_tokens": 9, "seed": 7, "cache_salt": "s"}, nil},
		{"chat", chat.with(body{"max_tokens": 20, "seed": 8, "logprobs": true, "top_logprobs": 4, "return_token_ids": true}), nil},
		{"chat, its ids as base64", chat.with(body{"max_tokens": 12, "seed": 9}), body{"return_prompt_token_ids_b64": true}},
		{"stop string", text.with(body{"max_tokens": 60, "seed": 10, "stop": []string{"a", "e", "t"}}), nil},
		{"one token", text.with(body{"max_tokens": 1, "seed": 11, "logprobs": 1}), nil},
		{"min_tokens", text.with(body{"max_tokens": 9, "min_tokens": 9, "seed": 12, "stop_token_ids": []int{7, 8, 9}}), nil},
	} {
		path := completionPath
		if c.body["messages"] != nil {
			path = chatPath
		}
		want := post(t, alone.Handler(), path, c.body.String()).decode(t)
		for _, stream := range []bool{false, true} {
			a := contextLeg(t, p, path, c.body, c.params)
			choice := a.Choices[0]
			if choice.FinishReason == "stop" {
				if choice.Params["encoded_opaque_state"] != nil || want.Choices[0].finish() != "stop" {
					t.Errorf("%s: ended in the context leg with %v", c.name, choice.Params)
				}
				break
			}
			b := c.body
			if stream {
				b = b.with(body{"stream": true, "stream_options": body{"include_usage": true}})
			}
			r := post(t, d.Handler(), path, a.goOn(path, b).String())
			got := r.decodeEither(t, stream)
			if !reflect.DeepEqual(dump(got.Choices), dump(want.Choices)) {
				t.Errorf("%s, stream %v:\n%s\nalone\n%s", c.name, stream, dump(got.Choices), dump(want.Choices))
			}
			got.Usage.Details.Cached, want.Usage.Details.Cached = 0, 0 // what was cached depends on what ran before
			if *got.Usage != *want.Usage {
				t.Errorf("%s: usage %+v, alone %+v", c.name, got.Usage, want.Usage)
			}
		}
	}
	atRest(t, prefill, decode)
}

// atRest waits until nothing is left on engines. Leases must have had no part in that.
func atRest(t *testing.T, sides ...*leg.Server) {
	t.Helper()
	for _, side := range sides {
		s := side.Stats()
		busy := func() bool { return s.Requests+s.Exports+s.Claims+s.Reading != 0 }
		for deadline := time.Now().Add(5 * time.Second); busy() && time.Now().Before(deadline); s = side.Stats() {
			time.Sleep(time.Millisecond) // the last release is on its way still
		}
		if busy() || s.Expired+s.Lost+s.Refused != 0 {
			t.Errorf("%+v", s)
		}
	}
}

// decodeEither joins a stream.
func (r reply) decodeEither(t *testing.T, stream bool) *answerJSON {
	t.Helper()
	if r.status != http.StatusOK {
		t.Fatalf("%d %s", r.status, r.body)
	}
	if stream {
		return assemble(t, r)
	}
	return r.decode(t)
}

// The names, types and rules of disaggregated_params are TensorRT-LLM's.
func TestContextAnswer(t *testing.T) {
	p, legs := legServer(t, wire.RolePrefill)
	b := body{"prompt": []int{5, 6, 7}, "max_tokens": 8, "temperature": 0, "logprobs": 2, "ignore_eos": true}
	const id = int64(1)<<62 + 12345
	a := contextLeg(t, p, completionPath, b, body{"disagg_request_id": id, "ctx_dp_rank": 0, "schedule_style": 0, "conversation_id": 7, "ctx_usage": nil})
	choice := a.Choices[0]
	q := choice.Params
	if choice.FinishReason != "not_finished" || q["request_type"] != "context_only" || q["disagg_request_id"] != json.Number(fmt.Sprint(id)) ||
		q["ctx_dp_rank"] != json.Number("0") || q["ctx_info_endpoint"] != legs.Address() || q["ctx_request_id"] != json.Number("1") || q["draft_tokens"] != nil {
		t.Errorf("%s: %v", choice.FinishReason, q)
	}
	if tokens, ok := q["first_gen_tokens"].([]any); !ok || len(tokens) != 1 {
		t.Errorf("first_gen_tokens %v", q["first_gen_tokens"])
	}
	if list, ok := q["first_gen_log_probs"].([]any); !ok || len(list) != 1 || len(list[0].([]any)) != 2 {
		t.Errorf("first_gen_log_probs %v", q["first_gen_log_probs"])
	}
	raw, err := base64.StdEncoding.DecodeString(q["encoded_opaque_state"].(string))
	if err != nil {
		t.Fatal(err)
	}
	if m, err := wire.Decode(raw); err != nil || m.(*wire.KVState).Address != legs.Address() {
		t.Errorf("%v, %v", m, err)
	}
	if fmt.Sprint(a.IDs) != "[5 6 7]" || a.IDsB64 != nil {
		t.Errorf("prompt ids %v %q", a.IDs, a.IDsB64)
	}
	a = contextLeg(t, p, completionPath, b, body{"return_prompt_token_ids_b64": true})
	ids := make([]int32, 3)
	if raw, err := base64.StdEncoding.DecodeString(a.IDsB64.(string)); err != nil || len(raw) != 12 {
		t.Errorf("%q, %v", a.IDsB64, err)
	} else if _, err := binary.Decode(raw, binary.LittleEndian, ids); err != nil || ids[2] != 7 || a.IDs != nil {
		t.Errorf("%v, %v", ids, err)
	}
	if id := a.Choices[0].Params; id["disagg_request_id"] != id["ctx_request_id"] {
		t.Errorf("an id of nobody's: %v", id)
	}
	a = contextLeg(t, p, completionPath, b.with(body{"max_tokens": 1}), nil)
	if q := a.Choices[0].Params; a.Choices[0].FinishReason != "length" || q["encoded_opaque_state"] != nil || q["ctx_request_id"] == nil || q["disagg_request_id"] == nil {
		t.Errorf("a request of one token: %s %v", a.Choices[0].FinishReason, q)
	}
	a = contextLeg(t, p, completionPath, body{"prompt": "the", "max_tokens": 8, "temperature": 0, "stop": p.tok.Decode([]int32{int32(firstToken(t, p))}, true)}, nil)
	if q := a.Choices[0].Params; a.Choices[0].FinishReason != "stop" || q["encoded_opaque_state"] != nil {
		t.Errorf("a stop string at once: %s %v", a.Choices[0].FinishReason, q)
	}
	for s := legs.Stats(); s.Exports > 0; s = legs.Stats() { // those that were answered wait for their lease, no other
		if s.Exports > 3 {
			t.Fatalf("%+v", s)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if s := legs.Stats(); s.Expired != 3 {
		t.Errorf("%+v", s)
	}
	if r := do(t, p.Handler(), "GET", "/server_info", ""); r.status != http.StatusOK || string(r.body) != `{"engine":"baton"}` {
		t.Errorf("%d %s", r.status, r.body)
	}
}

// firstToken is what the model says to "the".
func firstToken(t *testing.T, p *Server) int64 {
	a := contextLeg(t, p, completionPath, body{"prompt": "the", "max_tokens": 8, "temperature": 0}, nil)
	n, err := a.Choices[0].Params["first_gen_tokens"].([]any)[0].(json.Number).Int64()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// What is wrong with a leg is said in the words of whoever sent it, with a status that tells what to do next.
func TestLegsRefused(t *testing.T) {
	p, _ := legServer(t, wire.RolePrefill)
	d, _ := legServer(t, wire.RoleDecode)
	b := body{"prompt": []int{5, 6, 7}, "max_tokens": 8, "seed": 1, "ignore_eos": true}
	good := func() body { return contextLeg(t, p, completionPath, b, nil).goOn(completionPath, b) }
	params := func(change body) body {
		g := good()
		g["disaggregated_params"] = g["disaggregated_params"].(body).with(change)
		return g
	}
	context := func(change body) body {
		return b.with(body{"disaggregated_params": body{"request_type": "context_only"}}).with(change)
	}
	for _, c := range []struct {
		name   string
		at     *Server
		body   body
		status int
		param  string
		says   string
	}{
		{"whole, prefill", p, b, 400, "disaggregated_params.request_type", "context_only"},
		{"whole, decode", d, b.with(body{"disaggregated_params": body{"request_type": "context_and_generation"}}), 400, "disaggregated_params.request_type", "runs no prompt"},
		{"no type", p, context(body{"disaggregated_params": body{}}), 400, "disaggregated_params.request_type", "missing"},
		{"wrong type", p, context(body{"disaggregated_params": body{"request_type": "both"}}), 400, "disaggregated_params.request_type", "context_only"},
		{"no object", p, context(body{"disaggregated_params": 3}), 400, "disaggregated_params", "an object"},
		{"generation at prefill", p, params(nil), 400, "disaggregated_params.request_type", "--role is prefill"},
		{"streamed context", p, context(body{"stream": true}), 400, "stream", "not streamed"},
		{"group", p, context(body{"disaggregated_params": body{"request_type": "context_only", "ctx_dp_rank": 1}}), 400, "disaggregated_params.ctx_dp_rank", "1 data-parallel"},
		{"generation first", p, context(body{"disaggregated_params": body{"request_type": "context_only", "schedule_style": 1}}), 400, "disaggregated_params.schedule_style", "context_first"},
		{"no state", d, params(body{"encoded_opaque_state": nil}), 400, "disaggregated_params.encoded_opaque_state", "missing"},
		{"no base64", d, params(body{"encoded_opaque_state": "*"}), 400, "disaggregated_params.encoded_opaque_state", "base64"},
		{"garbage", d, params(body{"encoded_opaque_state": "AAAA"}), 400, "disaggregated_params.encoded_opaque_state", "decoded"},
		{"another message", d, params(body{"encoded_opaque_state": base64.StdEncoding.EncodeToString([]byte{0x92, 23, 0x91, 1})}), 400, "disaggregated_params.encoded_opaque_state", "something else"},
		{"huge", d, params(body{"encoded_opaque_state": strings.Repeat("A", 12<<20)}), 400, "disaggregated_params.encoded_opaque_state", "too long"},
		{"no tokens", d, params(body{"first_gen_tokens": []int{}}), 400, "disaggregated_params.first_gen_tokens", "at least one"},
		{"tokens beyond the vocabulary", d, params(body{"first_gen_tokens": []int{legVocab}}), 400, "disaggregated_params.first_gen_tokens", "token id"},
		{"logprobs missing", d, params(nil).with(body{"logprobs": 1}), 400, "disaggregated_params.first_gen_log_probs", "0 elements"},
		{"another prompt", d, params(nil).with(body{"prompt": []int{5, 6, 8}}), 400, "prompt", "prompt_token_ids"},
		{"prompt logprobs", d, params(nil).with(body{"prompt_logprobs": 1}), 400, "prompt_logprobs", "both legs"},
		{"ids of no number", d, params(nil).with(body{"prompt_token_ids_b64": "AAA="}), 400, "prompt_token_ids_b64", "int32"},
		{"ids beyond the vocabulary", d, params(nil).with(body{"prompt_token_ids_b64": "AAAAgA=="}), 400, "prompt_token_ids_b64", "token id"},
	} {
		r := post(t, c.at.Handler(), completionPath, c.body.String())
		if e := r.failure(t); r.status != c.status || c.param != deref(e.Param) || !strings.Contains(e.Message, c.says) {
			t.Errorf("%s: %d %s", c.name, r.status, r.body)
		}
	}
	twice := good()
	if r := post(t, d.Handler(), completionPath, twice.String()); r.status != http.StatusOK {
		t.Errorf("%d %s", r.status, r.body)
	}
	for _, stream := range []bool{false, true} {
		r := post(t, d.Handler(), completionPath, twice.with(body{"stream": stream}).String())
		if e := r.failure(t); r.status != http.StatusGone || deref(e.Code) != wire.CodeGone || r.header.Get("Retry-After") == "" {
			t.Errorf("a state that was used: %d %s", r.status, r.body)
		}
	}
}

// A server in front of a coordinator takes no orders about legs: what a client says there counts for nothing.
func TestLegsAreNotForClients(t *testing.T) {
	s := newTestServer(t, newToyBackend(), nil)
	for _, params := range []string{`{"request_type":"generation_only"}`, `3`} {
		plain := post(t, s.Handler(), completionPath, `{"prompt":"a","seed":1,"max_tokens":5}`).decode(t)
		got := post(t, s.Handler(), completionPath, `{"prompt":"a","seed":1,"max_tokens":5,"prompt_token_ids":"x","prompt_token_ids_b64":1,"disaggregated_params":`+params+`}`).decode(t)
		if dump(got.Choices) != dump(plain.Choices) {
			t.Errorf("%s: %s", params, dump(got.Choices))
		}
	}
	if r := do(t, s.Handler(), "GET", "/server_info", ""); r.status != http.StatusNotFound {
		t.Errorf("%d", r.status)
	}
}

// FuzzLegs sends bodies with disaggregated_params to a server whose engines are not up yet: whatever comes is refused with
// an error that names what is wrong, or has to wait for them.
func FuzzLegs(f *testing.F) {
	state, err := wire.Encode(&wire.KVState{Format: wire.KVStateFormat, Address: "a:1", Ranks: []wire.RankInfo{{}}})
	if err != nil {
		f.Fatal(err)
	}
	end, err := wire.Encode(&wire.EngineReply{Results: []wire.Result{{Tokens: wire.Tokens{7}, Finish: wire.FinishStop, StopToken: 7}}})
	if err != nil {
		f.Fatal(err)
	}
	for _, params := range []string{
		`[{"request_type":"context_only","first_gen_tokens":[7],"encoded_opaque_state":"` + base64.StdEncoding.EncodeToString(state) + `"},` +
			`{"request_type":"context_only","first_gen_tokens":[7],"encoded_opaque_state":"` + base64.StdEncoding.EncodeToString(end) + `"}]`,
		`{"request_type":"context_only","disagg_request_id":9223372036854775807,"return_prompt_token_ids_b64":true,"ctx_dp_rank":0,"schedule_style":0}`,
		`{"request_type":"generation_only","first_gen_tokens":[7],"first_gen_log_probs":[[{"token_id":7,"logprob":-1e-45,"rank":null},{"token_id":8,"logprob":-1,"rank":1}]],` +
			`"encoded_opaque_state":"` + base64.StdEncoding.EncodeToString(state) + `","ctx_usage":{"prompt_tokens_details":{"cached_tokens":3}},"conversation_id":"c"}`,
		`{"request_type":"context_and_generation"}`, `{"request_type":"generation_only","first_gen_log_probs":[[{"rank":2147483647}]]}`, `{}`, `null`, `[]`,
	} {
		f.Add([]byte(`{"prompt":[1,2],"max_tokens":4,"logprobs":2,"disaggregated_params":` + params + `}`))
		f.Add([]byte(`{"messages":[{"role":"user","content":"a"}],"prompt":"","prompt_token_ids_b64":"AQAAAA==","disaggregated_params":` + params + `}`))
		f.Add([]byte(`{"prompt":["a","b"],"prompt_token_ids_b64":["AQAAAA==","AgAAAA=="],"max_tokens":4,"stop":"a","disaggregated_params":` + params + `}`))
		f.Add([]byte(`{"prompt_token_ids":[[1],[2]],"n":2,"stream":true,"disaggregated_params":` + params + `}`))
	}
	legs, err := leg.NewServer(leg.ServerConfig{Core: leg.Config{Engines: []string{"none"}}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(legs.Close)
	s := newTestServer(f, Legs{legs}, func(c *Config) { c.Limits = Limits{VocabSize: toyVocab, MaxBody: 1 << 20} })
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, path := range []string{completionPath, chatPath, "/legs/release"} {
			r := post(t, s.Handler(), path, string(body))
			if r.status == http.StatusOK && (path == "/legs/release" || bytes.Contains(r.body, []byte(`"finish_reason":"`))) {
				continue // given back, or all of it had ended
			}
			if e := r.failure(t); r.status != http.StatusServiceUnavailable && (r.status < 400 || r.status >= 500) || e.Message == "" {
				t.Errorf("%s: %d %s", path, r.status, r.body)
			}
		}
	})
}
