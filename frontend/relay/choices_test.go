package relay

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// Parts of a prefill worker's answer for several choices. Their spelling must survive.
const (
	firstLeft  = `{ "request_type":"context_only","ctx_request_id":9007199254740993,"disagg_request_id":1 ,"first_gen_tokens":[7],"encoded_opaque_state":"QQ=="}`
	secondLeft = `{"request_type":"context_only","ctx_request_id":2,"disagg_request_id":1,"x":-0.10,"encoded_opaque_state":"Qg=="}`
	bothIDs    = `["AQAAAA==", "AgAAAA=="]`
)

// choicesAnswer is what a prefill worker says of two choices, with their finish reasons.
func choicesAnswer(finish ...string) string {
	return fmt.Sprintf(`{"id":"c","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":%q,"disaggregated_params":%s},`+
		`{"index":1,"text":"b","finish_reason":%q,"disaggregated_params":%s}],"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4},"prompt_token_ids_b64":%s}`,
		finish[0], firstLeft, finish[1], secondLeft, bothIDs)
}

// answers lets a worker say something.
func (f *fake) answers(status int, body string) {
	f.set(func() {
		f.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			io.WriteString(w, body)
			return true
		}
	})
}

// What a prefill worker of ours leaves of several choices goes to the decode worker as it came, with the ids of all prompts;
// when none goes on, its answer is the client's.
func TestSeveralChoices(t *testing.T) {
	const body = `{"model":"toy","prompt":["x","y"],"n":1,"prompt_token_ids":[[1],[2]],"max_tokens":3}`
	r := newRelay(t, "baton", nil)
	r.decode.answers(200, `{"choices":[],"done":true}`)
	for _, finish := range [][]string{{"not_finished", "not_finished"}, {"stop", "not_finished"}, {"not_finished", "length"}} {
		r.prefill.answers(200, choicesAnswer(finish...))
		got := r.post(completionsPath, body)
		d := fieldsOf(t, r.decode.last())
		if got.status != 200 || got.body != `{"choices":[],"done":true}` || got.header.Get("X-Baton-Route") != "two legs" {
			t.Errorf("%v: %+v", finish, got)
		}
		if d["disaggregated_params"] != "["+firstLeft+","+secondLeft+"]" || d["prompt_token_ids_b64"] != bothIDs || d["prompt"]+d["prompt_token_ids"] != "" || d["n"] != "1" {
			t.Errorf("%v: %v", finish, d)
		}
	}
	before := len(r.decode.requests())
	for _, finish := range [][]string{{"stop", "stop"}, {"length", "length"}, {"stop", "length"}} {
		r.prefill.answers(200, choicesAnswer(finish...))
		got := r.post(completionsPath, body)
		if got.status != 200 || strings.Contains(got.body, "disaggregated_params") || strings.Contains(got.body, "b64") || !strings.Contains(got.body, `"text":"b"`) {
			t.Errorf("%v: %+v", finish, got)
		}
		events := r.events(r.post(completionsPath, strings.Replace(body, "{", `{"stream":true,`, 1)))
		if len(events) != 2 || !strings.Contains(events[0], `"index":0,"text":"a","finish_reason":"`+finish[0]) || !strings.Contains(events[1], `"index":1,"text":"b","finish_reason":"`+finish[1]) {
			t.Errorf("%v: %q", finish, events)
		}
	}
	if n := len(r.decode.requests()) - before; n != 0 || r.metric("early_finishes_total") != 6 {
		t.Errorf("%d decode legs", n)
	}
	for _, odd := range []string{
		strings.Replace(choicesAnswer("stop", "not_finished"), secondLeft, "null", 1), strings.Replace(choicesAnswer("length", "stop"), firstLeft, "null", 1),
	} {
		r.prefill.answers(200, odd)
		if got := r.post(completionsPath, body); got.header.Get("X-Baton-Silent-Reprefill") != r.prefill.URL {
			t.Errorf("%+v", got)
		}
	}
	if n := len(r.prefill.released); n != 0 {
		t.Errorf("%d were given back", n)
	}
}

// A request of one token has ended when its prefill leg has, where the engines say so: ours, by leaving nothing. Those of
// TensorRT-LLM and vLLM end every prefill leg with "length" and hold the KV until it is fetched.
func TestOneToken(t *testing.T) {
	for kind, decodes := range map[string]int{"baton": 0, "trtllm": 2, "vllm": 2, "mooncake": 2, "sglang": 2} {
		r := newRelay(t, kind, nil)
		if kind == "baton" {
			r.prefill.answers(200, `{"choices":[{"index":0,"text":"t","token_ids":[`+fmt.Sprint(expected([]int{1, 2, 3}, 1)[0])+`],"finish_reason":"length",`+
				`"disaggregated_params":{"ctx_request_id":1,"disagg_request_id":1,"encoded_opaque_state":null}}]}`)
		}
		for _, body := range []string{simple, streamed} {
			got := r.post(completionsPath, strings.Replace(body, `"max_tokens":3`, `"max_tokens":1`, 1))
			if got.status != 200 || !strings.Contains(got.body, fmt.Sprintf(`"token_ids":[%d]`, expected([]int{1, 2, 3}, 1)[0])) {
				t.Errorf("%s: %+v", kind, got)
			}
		}
		if n := len(r.decode.requests()); n != decodes {
			t.Errorf("%s: %d decode legs, want %d", kind, n, decodes)
		}
	}
}

// What no decode worker takes over goes back to our prefill workers before the request is tried again. No other engine gets
// such a request, or an array.
func TestGivenBack(t *testing.T) {
	for _, several := range []bool{false, true} {
		for i, status := range []int{400, 410, 500} {
			r := newRelay(t, "baton", func(c *Config) { c.MaxRetries = 1 })
			body, want := simple, `{"disaggregated_params":[{"request_type":"context_only"`
			if several {
				body, want = `{"model":"toy","prompt":["x","y"]}`, `{"disaggregated_params":[`+firstLeft+","+secondLeft+"]}"
				r.prefill.answers(200, choicesAnswer("not_finished", "not_finished"))
			}
			r.decode.answers(status, `{"error":{"message":"no"}}`)
			r.post(completionsPath, body)
			r.await(func() (all bool) { // it is not waited for
				r.prefill.set(func() { all = len(r.prefill.released) >= min(i+1, 2) })
				return all
			})
			r.prefill.set(func() {
				if n := len(r.prefill.released); n != min(i+1, 2) || !strings.HasPrefix(r.prefill.released[0], want) {
					t.Errorf("%d: %q", status, r.prefill.released)
				}
			})
		}
	}
	for _, kind := range []string{"trtllm", "vllm"} {
		r := newRelay(t, kind, func(c *Config) { c.MaxRetries = 1 })
		r.decode.answers(500, "broken")
		r.post(completionsPath, simple)
		r.decode.answers(200, "{}")
		for _, body := range []string{`{"model":"toy","prompt":[1,2],"n":2}`, `{"model":"toy","prompt":["a","b"]}`} {
			r.post(completionsPath, body)
		}
		all := append(r.prefill.requests(), r.decode.requests()...)
		if slices.ContainsFunc(all, func(s seen) bool { return strings.Contains(s.body, `"disaggregated_params":[`) }) {
			t.Errorf("%s: %v", kind, all)
		}
		if slices.ContainsFunc(r.prefill.requests(), func(s seen) bool {
			return strings.Contains(s.body, `"n":2`) || strings.Contains(s.body, `["a","b"]`)
		}) {
			t.Errorf("%s: a prefill leg of several choices", kind)
		}
	}
}
