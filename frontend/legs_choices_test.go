package frontend

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"baton/leg"
	"baton/wire"
)

// goOnAll is the generation leg's request of several choices, as the relay makes it: what the context leg's answer has for
// each of them, unchanged.
func (a contextAnswer) goOnAll(b body) body {
	var left []body
	for _, c := range a.Choices {
		left = append(left, c.Params)
	}
	g := b.with(body{"disaggregated_params": left})
	if a.IDs != nil {
		g["prompt_token_ids"] = a.IDs
	} else {
		g["prompt_token_ids_b64"] = a.IDsB64
	}
	delete(g, "prompt")
	return g
}

// words are a prompt of n tokens of the toy language, more or less.
func words(n int) string {
	list := []string{"the", "cat", "sat", "on", "a", "mat"}
	var b strings.Builder
	for i := range n {
		b.WriteString(list[(i*i+i/5)%len(list)] + " ")
	}
	return b.String()
}

// Several answers in two legs are those of one engine, member by member, whatever of them ends with the first leg.
func TestChoicesInTwoLegs(t *testing.T) {
	alone, _ := legServer(t, wire.RoleBoth)
	p, prefill := legServer(t, wire.RolePrefill)
	d, decode := legServer(t, wire.RoleDecode)
	long := body{"prompt": words(36)}
	chat := body{"messages": []body{{"role": "user", "content": words(36)}}}
	ended, went := 0, 0
	for _, c := range []struct {
		name string
		body body
	}{
		{"sampled", long.with(body{"n": 3, "max_tokens": 12, "seed": 5, "logprobs": 2, "return_token_ids": true, "return_handoff": true})},
		{"greedy", long.with(body{"n": 2, "max_tokens": 5, "temperature": 0})},
		{"prompts", body{"prompt": []string{words(40), "the cat", words(35)}, "max_tokens": 9, "seed": 6, "return_token_ids": true}},
		{"prompts of ids, each with choices", body{"prompt": [][]int{{5, 6, 7, 600}, {8, 9}}, "n": 4, "max_tokens": 9, "seed": 7, "logprobs": 0}},
		{"one prompt in a list", body{"prompt": []string{"the cat sat on"}, "max_tokens": 7, "seed": 8, "return_token_ids": true}},
		{"echoed", body{"prompt": []string{"the cat", words(36)}, "n": 2, "max_tokens": 6, "seed": 9, "logprobs": 1, "echo": true, "prompt_logprobs": 1}},
		{"chat", chat.with(body{"n": 3, "max_tokens": 12, "seed": 10, "logprobs": true, "top_logprobs": 3, "return_token_ids": true})},
		{"stop strings, for some at once", long.with(body{"n": 5, "max_tokens": 8, "seed": 11, "stop": []string{"a", "e"}, "logprobs": 1})},
		{"stop strings that are shown", long.with(body{"n": 5, "max_tokens": 8, "seed": 12, "stop": []string{"a", "t"}, "include_stop_str_in_output": true})},
		{"stop ids, for some at once", long.with(body{"n": 5, "max_tokens": 8, "seed": 13, "stop_token_ids": ids(0, 250), "return_token_ids": true, "prompt_logprobs": 0, "return_handoff": true})},
		{"penalties", long.with(body{"n": 3, "max_tokens": 9, "seed": 14, "frequency_penalty": 0.5, "min_tokens": 5, "temperature": 1.5, "top_p": 0.9})},
	} {
		path := completionPath
		if c.body["messages"] != nil {
			path = chatPath
		}
		for _, stream := range []bool{false, true} {
			b := c.body.with(body{"cache_salt": fmt.Sprint(c.name, stream)}) // nothing is cached
			if stream {
				b = b.with(body{"stream": true, "stream_options": body{"include_usage": true}})
			}
			want := post(t, alone.Handler(), path, b.String()).decodeEither(t, stream)
			a := contextLeg(t, p, path, b, body{"return_prompt_token_ids_b64": stream})
			for _, choice := range a.Choices {
				if went++; choice.FinishReason != leg.FinishNotFinished {
					ended++
				}
			}
			second := a.goOnAll(b)
			if len(a.Choices) == 1 {
				second["disaggregated_params"] = a.Choices[0].Params.with(body{"request_type": "generation_only"})
			}
			got := post(t, d.Handler(), path, second.String()).decodeEither(t, stream)
			if w, g := computed(want), computed(got); w != g {
				t.Errorf("%s, stream %v: %v prompt tokens were computed, alone %v", c.name, stream, g, w)
			}
			if !reflect.DeepEqual(dump(got.Choices), dump(want.Choices)) {
				t.Errorf("%s, stream %v:\n%s\nalone\n%s", c.name, stream, dump(got.Choices), dump(want.Choices))
			}
			if !reflect.DeepEqual(got.PromptTokenIDs, want.PromptTokenIDs) || !reflect.DeepEqual(got.PromptLogprobs, want.PromptLogprobs) {
				t.Errorf("%s, stream %v: prompt %v, alone %v", c.name, stream, got.PromptTokenIDs, want.PromptTokenIDs)
			}
			if *got.Usage != *want.Usage {
				t.Errorf("%s, stream %v: usage %+v, alone %+v", c.name, stream, got.Usage, want.Usage)
			}
		}
	}
	if ended < 4 || went-ended < 30 {
		t.Errorf("%d of %d choices ended with the context leg", ended, went)
	}
	atRest(t, prefill, decode)
}

// computed takes what an answer says of its handoffs out, and returns how many prompt tokens were computed in all.
func computed(a *answerJSON) (n float64) {
	for i := range a.Choices {
		if h := a.Choices[i].Handoff; h != nil {
			n += h["prompt_computed"].(float64)
			a.Choices[i].Handoff = nil
		}
	}
	return n
}

func ids(from, to int) (list []int) {
	for id := from; id < to; id++ {
		list = append(list, id)
	}
	return list
}

// What is wrong with one of several choices is said of that one, and frees what the context leg left of all.
func TestChoicesRefused(t *testing.T) {
	p, prefill := legServerWith(t, wire.RolePrefill, time.Minute)
	d, decode := legServer(t, wire.RoleDecode)
	b := body{"prompt": []string{"the cat", "sat on"}, "n": 2, "max_tokens": 8, "seed": 1, "ignore_eos": true}
	good := func() (body, []body) {
		g := contextLeg(t, p, completionPath, b, nil).goOnAll(b)
		return g, g["disaggregated_params"].([]body)
	}
	encode := func(m wire.Message) string {
		raw, err := wire.Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		return base64.StdEncoding.EncodeToString(raw)
	}
	ended := func(change func(r *wire.Result)) string {
		r := wire.Result{Tokens: wire.Tokens{7}, Finish: wire.FinishStop, StopToken: 7}
		change(&r)
		return encode(&wire.EngineReply{Results: []wire.Result{r}})
	}
	const third = "disaggregated_params[2]"
	for _, c := range []struct {
		name   string
		change body // of the third choice
		param  string
		says   string
		freed  bool // all exports are, without their leases
	}{
		{"no base64", body{"encoded_opaque_state": "*"}, third + ".encoded_opaque_state", "base64", false},
		{"huge", body{"encoded_opaque_state": strings.Repeat("A", 12<<20)}, third + ".encoded_opaque_state", "too long", false},
		{"whole", body{"request_type": "context_and_generation"}, third + ".request_type", "element", false},
		{"no type", body{"request_type": nil}, third + ".request_type", "missing", false},
		{"tokens beyond the vocabulary", body{"first_gen_tokens": []int{legVocab}}, third + ".first_gen_tokens", "token id", false},
		{"two results", body{"encoded_opaque_state": encode(&wire.EngineReply{Results: make([]wire.Result, 2)})}, third + ".encoded_opaque_state", "something else", false},
		{"a result that is no end", body{"encoded_opaque_state": ended(func(r *wire.Result) { r.Finish = "" })}, third + ".encoded_opaque_state", "something else", false},
		{"a result of odd tokens", body{"encoded_opaque_state": ended(func(r *wire.Result) { r.Tokens[0] = legVocab })}, third + ".encoded_opaque_state", "something else", false},
		{"a result of odd alternatives", body{"encoded_opaque_state": ended(func(r *wire.Result) { r.Top = []wire.TokenLogprobs{{IDs: wire.Tokens{7}}} })}, third + ".encoded_opaque_state", "something else", false},
		{"a result that goes on", body{"encoded_opaque_state": ended(func(r *wire.Result) { r.Start = 1 })}, third + ".encoded_opaque_state", "something else", false},
		{"no tokens", body{"first_gen_tokens": []int{}}, third + ".first_gen_tokens", "at least one", true},
		{"too many tokens", body{"first_gen_tokens": []int{7, 8}}, third + ".encoded_opaque_state", "KV of", true},
	} {
		g, left := good()
		left[2] = left[2].with(c.change)
		r := post(t, d.Handler(), completionPath, g.String())
		if e := r.failure(t); r.status != 400 || c.param != deref(e.Param) || !strings.Contains(e.Message, c.says) {
			t.Errorf("%s: %d %s", c.name, r.status, r.body)
		}
		if !c.freed {
			left[2] = contextLeg(t, p, completionPath, body{"prompt": "x", "max_tokens": 5, "ignore_eos": true}, nil).Choices[0].Params // of another prompt
			if r := post(t, d.Handler(), completionPath, g.String()); r.status != 400 {
				t.Errorf("%s: %d %s", c.name, r.status, r.body)
			}
		}
	}
	g, left := good()
	for _, list := range [][]body{{}, left[:3], append(left[:4:4], left[0])} {
		r := post(t, d.Handler(), completionPath, g.with(body{"disaggregated_params": list}).String())
		if e := r.failure(t); r.status != 400 || deref(e.Param) != "disaggregated_params" || !strings.Contains(e.Message, fmt.Sprintf("of %d choices, and the request has 4", len(list))) {
			t.Errorf("%d elements: %d %s", len(list), r.status, r.body)
		}
	}
	for _, change := range []body{{"disaggregated_params": left[0].with(body{"request_type": "generation_only"})}, {"disaggregated_params": make([]int, 2000)}, {"disaggregated_params": []any{nil, 3}}} {
		if r := post(t, d.Handler(), completionPath, g.with(change).String()); r.status != 400 {
			t.Errorf("%d %s", r.status, r.body)
		}
	}
	if r := post(t, d.Handler(), completionPath, g.String()); r.status != http.StatusOK {
		t.Errorf("afterwards: %d %s", r.status, r.body)
	}
	for _, stream := range []bool{false, true} {
		r := post(t, d.Handler(), completionPath, g.with(body{"stream": stream}).String())
		if e := r.failure(t); r.status != http.StatusGone || deref(e.Code) != wire.CodeGone {
			t.Errorf("states that were used: %d %s", r.status, r.body)
		}
	}
	// Only the exports whose states were spoiled are left to their leases.
	s := prefill.Stats()
	for deadline := time.Now().Add(5 * time.Second); s.Exports > 10 && time.Now().Before(deadline); s = prefill.Stats() {
		time.Sleep(time.Millisecond)
	}
	if s.Exports != 10 || s.Expired != 0 || decode.Stats().Requests != 0 {
		t.Errorf("%+v, %+v", s, decode.Stats())
	}
	chat := body{"messages": []body{{"role": "user", "content": "a"}}, "max_tokens": 5, "prompt_token_ids_b64": []string{"AQAAAA=="}}
	if r := post(t, d.Handler(), chatPath, chat.String()); r.status != 400 || !strings.Contains(string(r.body), "a conversation has one") {
		t.Errorf("%d %s", r.status, r.body)
	}
}

// What nobody goes on with is given back, long before its lease ends.
func TestLegsReleased(t *testing.T) {
	p, prefill := legServerWith(t, wire.RolePrefill, time.Minute)
	d, _ := legServer(t, wire.RoleDecode)
	const release = "/legs/release"
	one := body{"prompt": "the cat", "max_tokens": 8, "seed": 1, "ignore_eos": true}
	several := body{"prompt": []string{"the cat", "sat on"}, "n": 2, "max_tokens": 8, "seed": 1, "stop_token_ids": ids(0, 250)}
	for _, b := range []body{one, several} {
		a := contextLeg(t, p, completionPath, b, nil)
		second := a.goOnAll(b)
		var back any = second["disaggregated_params"]
		if len(a.Choices) == 1 {
			back = a.Choices[0].Params
			second = a.goOn(completionPath, b)
		}
		if prefill.Stats().Exports == 0 {
			t.Fatal("nothing is held")
		}
		if r := post(t, d.Handler(), release, body{"disaggregated_params": back}.String()); r.status != http.StatusOK || prefill.Stats().Exports == 0 {
			t.Errorf("at another engine: %d %s, %+v", r.status, r.body, prefill.Stats())
		}
		for range 2 {
			if r := post(t, p.Handler(), release, body{"disaggregated_params": back}.String()); r.status != http.StatusOK || prefill.Stats().Exports != 0 {
				t.Errorf("%d %s, %+v", r.status, r.body, prefill.Stats())
			}
		}
		if r := post(t, d.Handler(), completionPath, second.String()); r.status != http.StatusGone {
			t.Errorf("afterwards: %d %s", r.status, r.body)
		}
	}
	for _, b := range []body{{}, {"disaggregated_params": 3}, {"disaggregated_params": []any{nil}}, {"disaggregated_params": body{"request_type": "context_only", "encoded_opaque_state": "*"}}} {
		if r := post(t, p.Handler(), release, b.String()); r.status != http.StatusBadRequest || !strings.HasPrefix(deref(r.failure(t).Param), "disaggregated_params") {
			t.Errorf("%s: %d %s", b, r.status, r.body)
		}
	}
	s := newTestServer(t, newToyBackend(), nil)
	if r := post(t, s.Handler(), release, body{"disaggregated_params": nil}.String()); r.status != http.StatusNotFound {
		t.Errorf("a server without legs: %d", r.status)
	}
}

// While a context leg computes the last of its prompts, the KV of the first is kept, however long that takes.
func TestChoicesAreKept(t *testing.T) {
	const lease = 250 * time.Millisecond
	p, prefill := legServerWith(t, wire.RolePrefill, lease)
	var prompts [][]int
	for i := range 4 {
		prompts = append(prompts, append([]int{i + 3}, ids(3, 253)...))
	}
	b := body{"prompt": prompts, "n": 2, "max_tokens": 5, "seed": 1, "ignore_eos": true}
	for n := 0; ; n++ { // more, until it takes long
		begin := time.Now()
		a := contextLeg(t, p, completionPath, b.with(body{"cache_salt": fmt.Sprint(n)}), nil)
		s, took := prefill.Stats(), time.Since(begin)
		if took > 3*lease {
			if s.Expired > 0 || s.Exports != len(a.Choices) {
				t.Errorf("after %v: %+v", took, s)
			}
			return
		}
		for _, c := range a.Choices {
			post(t, p.Handler(), "/legs/release", body{"disaggregated_params": c.Params}.String())
		}
		prompts = append(prompts, prompts...)
		if b["prompt"] = prompts; len(prompts) > 600 {
			t.Skip("this machine is too fast")
		}
	}
}

// One choice whose KV is gone fails the request before any of it is sent, streamed or not, and the others' KV is freed.
func TestOneChoiceIsGone(t *testing.T) {
	p, prefill := legServerWith(t, wire.RolePrefill, time.Minute)
	d, decode := legServer(t, wire.RoleDecode)
	b := body{"prompt": words(50), "n": 5, "max_tokens": 50, "seed": 1, "ignore_eos": true}
	for gone := range 5 {
		for _, stream := range []bool{false, true} {
			a := contextLeg(t, p, completionPath, b, nil)
			if r := post(t, p.Handler(), "/legs/release", body{"disaggregated_params": a.Choices[gone].Params}.String()); r.status != http.StatusOK {
				t.Fatalf("%d %s", r.status, r.body)
			}
			r := post(t, d.Handler(), completionPath, a.goOnAll(b.with(body{"stream": stream})).String())
			if e := r.failure(t); r.status != http.StatusGone || deref(e.Code) != wire.CodeGone {
				t.Errorf("choice %d, stream %v: %d %s", gone, stream, r.status, r.body)
			}
			for _, side := range []*leg.Server{prefill, decode} {
				for deadline := time.Now().Add(5 * time.Second); side.Stats().Exports+side.Stats().Requests > 0 && time.Now().Before(deadline); {
					time.Sleep(time.Millisecond)
				}
			}
			if s := prefill.Stats(); s.Exports != 0 || s.Expired != 0 || decode.Stats().Requests != 0 {
				t.Fatalf("%+v, %+v", s, decode.Stats())
			}
		}
	}
}
