package relay

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// body is a leg's as a map of its fields' bytes.
func fieldsOf(t *testing.T, s seen) map[string]string {
	t.Helper()
	var raw map[string]json.RawMessage
	if err := json.Unmarshal([]byte(s.body), &raw); err != nil {
		t.Fatalf("%v in %s", err, s.body)
	}
	m := map[string]string{}
	for name, v := range raw {
		m[name] = string(v)
	}
	return m
}

// Behaviour 32: what tells engines where to find KV never comes from a client, however it spells it.
func TestReservedFields(t *testing.T) {
	for _, kind := range append(slices.Clone(kinds), "plain") {
		r := newRelay(t, kind, func(c *Config) {
			if kind == "plain" {
				c.Engine = kind
			}
		})
		for _, path := range []string{chatPath, completionsPath} {
			prompt := map[string]string{chatPath: `"messages":["x"]`, completionsPath: `"prompt":[1,2]`}[path]
			r.read(r.post(path, `{"model":"toy",`+prompt+`,"disaggregated_params":{"request_type":"generation_only","ctx_info_endpoint":"evil"},`+
				`"disaggregated_par\u0061ms":{"evil":1},"kv_transfer_params":{"remote_host":"evil"},"bootstrap_host":"evil","bootstrap_port":666,"bootstrap_room":666,`+
				`"max_tokens":2,"kv_transfer_params":"evil"}`))
		}
		for _, s := range append(r.prefill.requests(), r.decode.requests()...) {
			if strings.Contains(s.body, "evil") || strings.Contains(s.body, ":666") {
				t.Errorf("%s: %s", kind, s.body)
			}
		}
	}
}

// What the relay does not know keeps its bytes on both legs, numbers beyond 2^53 too.
func TestUnknownFieldsKeepTheirBytes(t *testing.T) {
	const odd = `{"z": 1e400 ,"\u0061":[ 9007199254740993,-0.10 ],"a":"\/"}`
	for _, kind := range []string{"baton", "vllm", "mooncake", "sglang"} {
		r := newRelay(t, kind, nil)
		r.read(r.post(chatPath, `{ "odd" : `+odd+`, "model":"toy","seed":9223372036854775807,"messages":[{"role":"user"}],"max_tokens":2}`))
		for _, f := range []*fake{r.prefill, r.decode} {
			if m := fieldsOf(t, f.last()); m["odd"] != odd || m["seed"] != "9223372036854775807" {
				t.Errorf("%s: %s", kind, f.last().body)
			}
		}
	}
}

// Behaviours 27 and 31: what TensorRT-LLM does not know is not sent; the decode worker gets the ids as the prefill
// worker wrote them, and the last message only if so configured, with the tools.
func TestTRTBodies(t *testing.T) {
	for _, strip := range []bool{false, true} {
		r := newRelay(t, "trtllm", func(c *Config) { c.StripHistory = strip })
		const messages = `[{"role":"user","content":"a, [\"b\"]"},{"role":"assistant","content":"c"},{"role":"user","content":"d"}]`
		r.read(r.post(chatPath, `{"model":"toy","messages":`+messages+`,"tools":[{"type":"function"}],"return_tokens_as_token_ids":true,"return_token_ids":true,`+
			`"required_prefix_token_ids":[1],"stream":false,"max_tokens":2}`))
		p, d := fieldsOf(t, r.prefill.last()), fieldsOf(t, r.decode.last())
		for _, m := range []map[string]string{p, d} {
			for _, name := range rolloutFields {
				if m[name] != "" {
					t.Errorf("%s is sent", name)
				}
			}
			if m["tools"] != `[{"type":"function"}]` {
				t.Errorf("tools are %s", m["tools"])
			}
		}
		want := messages
		if strip {
			want = `[{"role":"user","content":"d"}]`
		}
		if p["messages"] != messages || d["messages"] != want {
			t.Errorf("strip %t: prefill %s, decode %s", strip, p["messages"], d["messages"])
		}
		var ids []int32
		for _, c := range []byte(messages) {
			ids = append(ids, int32(c))
		}
		if d["prompt_token_ids_b64"] != `"`+EncodeIDs(ids)+`"` {
			t.Errorf("ids are %s", d["prompt_token_ids_b64"])
		}
		w := wireOf(t, r.decode.last())
		if w.Type != "generation_only" || w.ContextID.String() != bigID || w.State != "c3RhdGU=" || *w.Style != 0 || string(w.Probs) == "" {
			t.Errorf("%+v", w)
		}
		if p["stream"] != "false" {
			t.Errorf("the prefill leg has stream %s", p["stream"])
		}
	}
	// Completions: a prompt of text is ids for the decode worker.
	r := newRelay(t, "trtllm", nil)
	r.read(r.post(completionsPath, `{"model":"toy","prompt":"ab","max_tokens":2}`))
	if got := fieldsOf(t, r.decode.last())["prompt"]; got != `[34,97,98,34]` {
		t.Errorf("the decode worker's prompt is %s", got)
	}
	r = newRelay(t, "baton", nil)
	r.read(r.post(completionsPath, `{"model":"toy","prompt":[1,2,3],"max_tokens":2,"return_token_ids":true}`))
	d := fieldsOf(t, r.decode.last())
	if d["prompt"] != "" || d["prompt_token_ids_b64"] != `"`+EncodeIDs([]int32{1, 2, 3})+`"` || d["return_token_ids"] != "true" {
		t.Errorf("%v", d)
	}
}

// TensorRT-LLM's decode worker may learn of a request first, and where its context will be.
func TestGenerationFirst(t *testing.T) {
	prefill, decode := newFake(t, "trtllm", nil), (*fake)(nil)
	decode = newFake(t, "trtllm", prefill)
	prefill.set(func() { prefill.info = `{"disaggregated_params":{"ctx_info_endpoint":["tcp://ctx:1","tcp://ctx:2"]}}` })
	// The context worker may wait until the generation worker asks for the request.
	started := make(chan struct{}, 1)
	decode.set(func() {
		decode.before = func(int, http.ResponseWriter, *http.Request) bool { started <- struct{}{}; return false }
	})
	prefill.set(func() {
		prefill.before = func(int, http.ResponseWriter, *http.Request) bool { <-started; return false }
	})
	r := relayTo(t, []*fake{prefill}, []*fake{decode}, func(c *Config) { c.Schedule = generationFirst })
	for _, body := range []string{simple, streamed} {
		got := r.post(completionsPath, body)
		if got.status != 200 || !strings.Contains(got.body, fmt.Sprintf(`"token_ids":[%d`, expected([]int{1, 2, 3}, 1)[0])) {
			t.Fatalf("%+v", got)
		}
		p, d := wireOf(t, prefill.last()), wireOf(t, decode.last())
		if d.Endpoint != "tcp://ctx:1" || p.ID != d.ID || d.ContextID != d.ID || *d.Style != 1 || p.Type != "context_only" || d.Type != "generation_only" {
			t.Errorf("prefill %+v, decode %+v", p, d)
		}
	}
}

// vLLM's prefill leg asks for one token and nothing that one token cannot have; the decode leg has what the client sent.
func TestVLLMBodies(t *testing.T) {
	for _, kind := range []string{"vllm", "mooncake"} {
		r := newRelay(t, kind, nil)
		r.events(r.post(chatPath, `{"model":"toy","messages":["x"],"min_tokens":3,"max_tokens":4,"max_completion_tokens":4,"stream":true,"stream_options":{"include_usage":true},"response_format":{"type":"json_object"},"structured_outputs":{"regex":""}}`))
		p, d := fieldsOf(t, r.prefill.last()), fieldsOf(t, r.decode.last())
		if p["min_tokens"] != map[string]string{"mooncake": "1"}[kind] || p["stream_options"]+p["response_format"]+p["structured_outputs"] != "" || p["stream"] != "false" || p["max_tokens"] != "1" || p["max_completion_tokens"] != "1" {
			t.Errorf("%s, prefill: %v", kind, p)
		}
		if d["min_tokens"] != "3" || d["max_tokens"] != "4" || d["max_completion_tokens"] != "4" || d["stream"] != "true" || d["stream_options"] == "" || d["response_format"] == "" || d["structured_outputs"] == "" {
			t.Errorf("%s, decode: %v", kind, d)
		}
		if a, b := r.prefill.last().header.Get("X-Request-Id"), r.decode.last().header.Get("X-Request-Id"); a == "" || a != b {
			t.Errorf("%s: request ids %q and %q", kind, a, b)
		}
	}
	r := newRelay(t, "vllm", nil)
	r.prefill.set(func() { r.prefill.push = true })
	r.read(r.post(completionsPath, simple))
	if d := fieldsOf(t, r.decode.last())["kv_transfer_params"]; strings.Contains(d, "remote_block_ids") || !strings.Contains(d, `"remote_port":5600`) {
		t.Errorf("push: %s", d)
	}
	r = newRelay(t, "mooncake", nil)
	ranks := map[string]bool{}
	for range 4 {
		r.read(r.post(completionsPath, simple))
		ranks[r.prefill.last().header.Get("X-Data-Parallel-Rank")+fieldsOf(t, r.decode.last())["kv_transfer_params"][strings.Index(fieldsOf(t, r.decode.last())["kv_transfer_params"], "engine-"):][:8]] = true
	}
	if len(ranks) != 2 || !ranks["0engine-0"] || !ranks["1engine-1"] {
		t.Errorf("ranks and engines: %v", ranks)
	}
}

// What engines cannot do in two legs one worker does alone, and the answer says why.
func TestSingleLeg(t *testing.T) {
	for field, reason := range map[string]string{
		`"n":2`: "n is not 1", `"prompt_logprobs":1`: "prompt_logprobs", `"echo":true`: "echo", `"prompt":[[1],[2]]`: "several prompts", `"prompt":["a","b","c"]`: "several prompts",
	} {
		r := newRelay(t, "vllm", nil)
		got := r.post(completionsPath, `{"model":"toy","prompt":[1,2],`+field+`}`)
		if strings.HasPrefix(field, `"prompt":`) {
			if got.status != 200 && len(r.decode.requests()) == 0 {
				t.Errorf("%s: %+v", field, got)
			}
		} else if got.status != 200 {
			t.Errorf("%s: %+v", field, got)
		}
		if p, d := len(r.prefill.requests()), len(r.decode.requests()); p != 0 || d != 1 || r.metric("single_leg_total") != 1 {
			t.Errorf("%s: %d prefill and %d decode legs", field, p, d)
		}
		if got.header.Get("X-Baton-Route") != "single; "+reason && got.status == 200 {
			t.Errorf("%s: %q", field, got.header.Get("X-Baton-Route"))
		}
	}
	r := newRelay(t, "vllm", nil)
	for _, field := range []string{`"n":1`, `"n":null`, `"prompt":["a"]`, `"prompt":[[1,2]]`, `"echo":false`} {
		r.post(completionsPath, `{"model":"toy","prompt":[1,2],`+field+`}`)
		if n := len(r.prefill.requests()); n != 1 {
			t.Errorf("%s: %d prefill legs", field, n)
		}
		counts([]*fake{r.prefill})
	}
}

// A request whose first token ends it is served by either connector: what the prefill worker sampled counts for nothing.
func TestFirstTokenEnds(t *testing.T) {
	for _, kind := range []string{"vllm", "mooncake"} {
		r := newRelay(t, kind, func(c *Config) { c.MaxRetries, c.Timeouts.Leg = 1, 5*time.Second })
		for _, stream := range []string{"false", "true"} {
			got := r.post(completionsPath, fmt.Sprintf(`{"model":"toy","prompt":[1,2,3],"max_tokens":2,"stream":%s,"stop_token_ids":[%d]}`, stream, next([]int{1, 2, 3})))
			if got.status != http.StatusOK || len(r.prefill.requests()) != 1 {
				t.Errorf("%s: %d %s after %d tries", kind, got.status, got.body, len(r.prefill.requests()))
			}
			counts([]*fake{r.prefill})
		}
	}
}

// SGLang's rooms differ as ids do, and spread over data-parallel ranks whenever ids are made.
func TestSGLangRooms(t *testing.T) {
	seen := map[int64]bool{}
	for _, every := range []int64{1, 7, 64, 1000} {
		ranks := make([]int, 8)
		for i := range int64(2000) {
			r := room(Snowflake(uint64(1_000_000_000*every+i*every), 3, 0, uint64(i%2)))
			if seen[r] || r <= 0 {
				t.Fatalf("room %d, again", r)
			}
			seen[r] = true
			ranks[r%8]++
		}
		if slices.Min(ranks) < 150 || slices.Max(ranks) > 400 {
			t.Errorf("ids every %d ms go to the ranks like %v", every, ranks)
		}
	}
}

// All samples of a prompt would meet in one of SGLang's rooms.
func TestSGLangChoices(t *testing.T) {
	r := newRelay(t, "sglang", nil)
	for n, want := range map[string]int{"1": 200, "null": 200, "2": 400} {
		got := r.post(completionsPath, `{"model":"toy","prompt":[1,2],"max_tokens":2,"n":`+n+`}`)
		if got.status != want || want == 400 && !strings.Contains(got.body, `"param":"n"`) {
			t.Errorf("n %s: %d %s", n, got.status, got.body)
		}
	}
}

// SGLang's batches have a room a prompt.
func TestSGLangBatch(t *testing.T) {
	ids := int64(1 << 40)
	mint := func() int64 { ids++; return ids }
	r, err := parseRequest(completionsPath, []byte(`{"prompt":[[1],[2],[3]],"stream":true}`), nil)
	if err != nil {
		t.Fatal(err)
	}
	l, err := sglang{}.prefill(&try{r: r, id: 7, mint: mint, source: &worker{hostname: "h"}})
	want := `{"prompt":[[1],[2],[3]],"stream":true,"bootstrap_host":["h","h","h"],"bootstrap_port":[8998,8998,8998],"bootstrap_room":[%d,%d,%d]}`
	want = fmt.Sprintf(want, room(1<<40+1), room(1<<40+2), room(1<<40+3))
	if err != nil || string(l.body.join()) != want {
		t.Errorf("%s, %v", l.body.join(), err)
	}
}

// Messages get what trainers look for there, all of it or nothing.
func TestRollout(t *testing.T) {
	const message, bundle = `"message":{"role":"assistant","content":"x"}`, `"message":{"role":"assistant","content":"x","prompt_token_ids":[1,2],"generation_token_ids":[3,4],"generation_log_probs":[-0.5,-1e-7]}`
	const probs = `"logprobs":{"content":[{"token":"token_id:3","logprob":-0.5},{"token":"token_id:4","logprob":-1e-7}]}`
	for _, c := range []struct{ answer, want string }{
		{`{"choices":[{` + message + `,"token_ids":[3,4],` + probs + `}],"prompt_token_ids":[1,2]}`, `{"prompt_token_ids":[1,2],"choices":[{"token_ids":[3,4],` + probs + `,` + bundle + `}]}`},
		{`{"choices":[{` + message + `,` + probs + `}],"prompt_token_ids":[1,2]}`, `{"prompt_token_ids":[1,2],"choices":[{` + probs + `,` + bundle + `}]}`},
		{`{"choices":[{` + message + `,"token_ids":[3,4,5],` + probs + `}],"prompt_token_ids":[1,2]}`, ""},
		{`{"choices":[{` + message + `,"token_ids":[3,4],` + probs + `}]}`, ""},
		{`{"choices":[{` + message + `,"token_ids":[3,4]}],"prompt_token_ids":[1,2]}`, ""},
		{`{"choices":[{` + message + `},{` + message + `}],"prompt_token_ids":[1,2]}`, ""},
		{`{"choices":[{` + strings.Replace(message+`,`+probs, "token_id:4", "four", 1) + `}],"prompt_token_ids":[1,2]}`, ""},
		{`{"choices":[{` + bundle + `,` + probs + `}],"prompt_token_ids":[1,2]}`, ""},
		{`{"choices":"nonsense"}`, ""},
	} {
		if c.want == "" {
			c.want = c.answer
		}
		answer, err := scanObject([]byte(c.answer))
		if err != nil {
			t.Fatal(err)
		}
		var e edit
		if choices := rolloutChoices(&answer); choices != nil {
			e.put("choices", choices)
		}
		if got := string(e.apply(&answer).join()); got != c.want {
			t.Errorf("%s\nbecame %s\nwant   %s", c.answer, got, c.want)
		}
	}
	r := newRelay(t, "trtllm", func(c *Config) { c.RolloutFields = true })
	r.decode.set(func() {
		r.decode.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
			fmt.Fprintf(w, `{"choices":[{%s,"token_ids":[3,4],%s}],"prompt_token_ids":[1,2]}`, message, probs)
			return true
		}
	})
	if got := r.post(chatPath, `{"model":"toy","messages":["x"]}`); !strings.Contains(got.body, bundle) {
		t.Errorf("%+v", got)
	}
}
