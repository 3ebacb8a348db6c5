package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"baton/wire"
)

// answered is an answer as JSON with the route it took. The chunks of a stream are joined, choice by choice.
func (f *fleet) answered(t *testing.T, path string, body map[string]any) (answer map[string]any, route string) {
	t.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+path, bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := f.http().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var text bytes.Buffer
	if _, err := text.ReadFrom(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s %s: %d %s, %v", path, raw, resp.StatusCode, text.Bytes(), err)
	}
	route = resp.Header.Get("X-Baton-Route")
	decode := func(raw []byte) (m map[string]any) {
		d := json.NewDecoder(bytes.NewReader(raw))
		d.UseNumber()
		if err := d.Decode(&m); err != nil {
			t.Fatalf("%v in %s", err, raw)
		}
		return m
	}
	if body["stream"] == nil {
		answer = decode(text.Bytes())
	} else {
		events := strings.Split(strings.TrimSuffix(text.String(), "\n\n"), "\n\n")
		if events[len(events)-1] != "data: [DONE]" {
			t.Fatalf("a stream without an end: %s", text.Bytes())
		}
		answer = map[string]any{}
		for _, e := range events[:len(events)-1] {
			join(answer, decode([]byte(strings.TrimPrefix(e, "data: "))))
		}
	}
	delete(answer, "id")
	delete(answer, "created")
	return answer, route
}

// join adds a chunk to what has come: texts and lists grow, the rest is replaced by what is not null.
func join(to, chunk map[string]any) {
	for name, v := range chunk {
		switch v := v.(type) {
		case nil:
			if _, ok := to[name]; !ok {
				to[name] = nil
			}
		case map[string]any:
			m, _ := to[name].(map[string]any)
			if m == nil {
				m = map[string]any{}
			}
			join(m, v)
			to[name] = m
		case []any:
			if name != "choices" {
				list, _ := to[name].([]any)
				to[name] = append(list, v...)
				continue
			}
			all, _ := to[name].(map[string]any)
			if all == nil {
				all = map[string]any{}
			}
			for _, c := range v {
				index := c.(map[string]any)["index"].(json.Number).String()
				one, _ := all[index].(map[string]any)
				if one == nil {
					one = map[string]any{}
				}
				join(one, c.(map[string]any))
				all[index] = one
			}
			to[name] = all
		case string:
			if name == "text" || name == "content" {
				before, _ := to[name].(string)
				v = before + v
			}
			to[name] = v
		default:
			to[name] = v
		}
	}
}

// Requests for several answers get from two engines over HTTP, behind the relay, what the native frontend gives, member by
// member and number by number.
func TestChoicesThroughARelay(t *testing.T) {
	model := textModel(t, "")
	native := serve(t, model, "--shards=tp=1", "--kv-memory=32MiB", "--tool-parser=hermes", "--reasoning-parser=think")
	flags := []string{"--transfer=tcp", "--kv-memory=32MiB", "--tool-parser=hermes", "--reasoning-parser=think"}
	prefill, decode := httpPart(t, nil, model, wire.RolePrefill, append(flags, "--shard=dp=2")...), httpPart(t, nil, model, wire.RoleDecode, flags...)
	f := relayed(t, nil, prefill, decode)
	long := strings.Repeat("the other and another one, ", 9)
	chat := []any{map[string]any{"role": "user", "content": long}}
	for _, c := range []struct {
		name, body, route string
	}{
		{"choices", `{"n":3,"max_tokens":12,"seed":5,"logprobs":2,"return_token_ids":true}`, "two legs"},
		{"prompts", `{"prompt":["the one","` + long + `","an other"],"max_tokens":9,"seed":6,"return_token_ids":true}`, "two legs"},
		{"prompts of ids", `{"prompt":[[5,6,7],[8,9]],"n":3,"max_tokens":9,"seed":7,"logprobs":0}`, "two legs"},
		{"a list of one", `{"prompt":["the one"],"max_tokens":5,"seed":8,"return_token_ids":true}`, "two legs"},
		{"echo", `{"prompt":["the one","` + long + `"],"n":2,"max_tokens":5,"seed":9,"echo":true,"logprobs":1,"prompt_logprobs":1}`, "two legs"},
		{"chat", `{"n":4,"max_tokens":10,"seed":10,"logprobs":true,"top_logprobs":2,"return_token_ids":true}`, "two legs"},
		{"chat, without a seed", `{"n":2,"max_tokens":10,"temperature":0,"best_of":1}`, "two legs"},
		{"chat, with tools", `{"n":3,"max_tokens":10,"seed":15,"tools":[{"type":"function","function":{"name":"f"}}],"stop":["e"]}`, "two legs"},
		{"stop strings", `{"n":6,"max_tokens":9,"seed":11,"stop":["a","e","i","o"," "]}`, "two legs"},
		{"one token each", `{"n":3,"max_tokens":1,"seed":12,"logprobs":1,"return_token_ids":true}`, "prefill only"},
		{"one token", `{"max_tokens":1,"seed":13,"return_token_ids":true}`, "prefill only"},
		{"chat, one token", `{"max_tokens":1,"seed":14,"logprobs":true,"return_token_ids":true}`, "prefill only"},
		{"chat, a rollout of one token", `{"max_tokens":1,"seed":14,"logprobs":true,"return_tokens_as_token_ids":true}`, "prefill only"},
	} {
		body := map[string]any{}
		if err := json.Unmarshal([]byte(c.body), &body); err != nil {
			t.Fatal(err)
		}
		path := "/v1/completions"
		if strings.HasPrefix(c.name, "chat") {
			path, body["messages"] = "/v1/chat/completions", chat
		} else if body["prompt"] == nil {
			body["prompt"] = long
		}
		for _, stream := range []bool{false, true} {
			b := maps.Clone(body)
			b["cache_salt"] = fmt.Sprint(c.name, stream) // nothing is cached
			if stream {
				b["stream"], b["stream_options"] = true, map[string]any{"include_usage": true}
			}
			want, _ := native.answered(t, path, b)
			got, route := f.answered(t, path, b)
			if route != c.route {
				t.Errorf("%s, stream %v: took %q", c.name, stream, route)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s, stream %v:\n%s\nnative\n%s", c.name, stream, asJSON(got), asJSON(want))
			}
		}
	}
	atRest(t, prefill, decode, 0)
}

func asJSON(v any) string {
	raw, _ := json.Marshal(v)
	return string(raw)
}

// atRest waits until two engines hold nothing, and compares how many exports came to their end by their lease.
func atRest(t *testing.T, prefill, decode *fleet, expired float64) {
	t.Helper()
	held := heldAfter(t, 10*time.Second, prefill, decode)
	if got := metric(t, prefill.url, "baton_leg_exports_total", "expired"); held != 0 || got != expired {
		t.Errorf("%v blocks, requests, exports and claims are still held; %v leases ended, of %v that had to", held, got, expired)
	}
}

// Clients of several answers that leave at any time leave nothing on engines under load.
func TestClientsOfChoicesLeave(t *testing.T) {
	model := goldenPath("llama")
	flags := []string{"--transfer=tcp", "--kv-memory=2MiB", "--max-seq-len=512", "--export-lease=2s"} // 85 blocks
	prefill, decode := httpPart(t, nil, model, wire.RolePrefill, flags...), httpPart(t, nil, model, wire.RoleDecode, flags...)
	f := relayed(t, nil, prefill, decode)
	var group sync.WaitGroup
	for i := range 24 {
		group.Go(func() {
			body := map[string]any{
				"prompt": [][]int32{prompt(20+i*5, uint64(i)), prompt(100, uint64(i%3))}, "n": 1 + i%3, "max_tokens": 25, "seed": i, "ignore_eos": true, "model": "m",
			}
			ctx, leave := context.WithTimeout(t.Context(), time.Minute)
			if i%3 != 0 {
				ctx, leave = context.WithTimeout(t.Context(), time.Duration(i*7)*time.Millisecond)
			}
			defer leave()
			status, raw, err := f.post(ctx, "/v1/completions", body)
			if i%3 == 0 && (err != nil || status != http.StatusOK) {
				t.Errorf("%d %s, %v", status, raw, err)
			}
		})
	}
	group.Wait()
	expired := metric(t, prefill.url, "baton_leg_exports_total", "expired")
	for deadline := time.Now().Add(20 * time.Second); metric(t, prefill.url, "baton_leg_exports") > 0 && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
		expired = metric(t, prefill.url, "baton_leg_exports_total", "expired")
	}
	atRest(t, prefill, decode, expired)
	t.Logf("%v exports were left to their leases", expired)
}

// A decode engine that dies with several answers in its hands costs the client time and the prefill engine nothing: what
// it held for them is given back, and the request begins again.
func TestChoicesWithoutADecodeEngine(t *testing.T) {
	model := goldenPath("llama")
	flags := []string{"--transfer=tcp", "--kv-memory=32MiB"}
	prefill, decode := httpPart(t, nil, model, wire.RolePrefill, flags...), httpPart(t, nil, model, wire.RoleDecode, flags...)
	target, err := url.Parse(decode.url)
	if err != nil {
		t.Fatal(err)
	}
	var die atomic.Int32 // how many requests more
	died := make(chan struct{}, 8)
	proxy := httputil.NewSingleHostReverseProxy(target)
	before := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost && die.Add(-1) >= 0 {
			_, _ = io.Copy(io.Discard, r.Body)
			died <- struct{}{}
			if die.Load() < 5 {
				panic(http.ErrAbortHandler)
			}
			<-r.Context().Done()
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(before.Close)
	f := relayed(t, nil, prefill, &fleet{url: before.URL})
	body := map[string]any{"model": "m", "prompt": [][]int32{prompt(70, 1), prompt(20, 2)}, "n": 3, "max_tokens": 6, "seed": 4, "ignore_eos": true, "cache_salt": "a"}
	want, _ := f.answered(t, "/v1/completions", body)
	for _, n := range []int32{1, 2} {
		die.Store(n)
		body["cache_salt"] = fmt.Sprint(n)
		if got, _ := f.answered(t, "/v1/completions", body); asJSON(got["choices"]) != asJSON(want["choices"]) {
			t.Errorf("after %d deaths: %s, want %s", n, asJSON(got), asJSON(want))
		}
	}
	// The client leaves while the decode engine has said nothing.
	for len(died) > 0 {
		<-died
	}
	die.Store(9)
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, _, err := f.post(ctx, "/v1/completions", body)
		left <- err
	}()
	<-died
	leave()
	if err := <-left; err == nil {
		t.Error("an answer")
	}
	die.Store(0)
	atRest(t, prefill, decode, 0)
}

// Engines of ours that take no legs serve whole requests beside those that do. One that is in the wrong pool is left out.
func TestRelayKnowsRoles(t *testing.T) {
	model := goldenPath("llama")
	flags := []string{"--transfer=tcp", "--kv-memory=32MiB"}
	prefill, decode, both := httpPart(t, nil, model, wire.RolePrefill, flags...), httpPart(t, nil, model, wire.RoleDecode, flags...), httpPart(t, nil, model, wire.RoleBoth, "--kv-memory=32MiB")
	front := start(t, "frontend", "--listen=127.0.0.1:0", "--prefill-router=round_robin", "--prefill="+prefill.url, "--decode="+decode.url,
		"--prefill="+both.url, "--decode="+both.url)
	f := &fleet{url: front.await(t, `frontend at (https?://\S+)`), model: "m"}
	body := func(seed int) map[string]any {
		return map[string]any{"model": "m", "prompt": prompt(70, 1), "n": 2, "max_tokens": 6, "seed": seed, "ignore_eos": true}
	}
	want, _ := both.answered(t, "/v1/completions", body(1))
	routes := map[string]int{}
	f.awaitHealth(t)
	f.awaitWorkers(t, func(s string) bool { return strings.Count(s, `"healthy":true`) == 3 })
	for range 6 {
		got, route := f.answered(t, "/v1/completions", body(1))
		routes[route]++
		if asJSON(got["choices"]) != asJSON(want["choices"]) {
			t.Errorf("%s: %s, want %s", route, asJSON(got), asJSON(want))
		}
	}
	if routes["two legs"] != 3 || routes["single; the worker takes no legs"] != 3 {
		t.Errorf("%v", routes)
	}
	for role, url := range map[string]string{"prefill": decode.url, "decode": prefill.url} {
		wrong := start(t, "frontend", "--listen=127.0.0.1:0", "--prefill="+prefill.url, "--decode="+decode.url, "--"+role+"="+url)
		w := &fleet{url: wrong.await(t, `frontend at (https?://\S+)`), model: "m"}
		w.awaitWorkers(t, func(s string) bool { return strings.Contains(s, "and it is here for "+role+" legs too") })
	}
	wrong := start(t, "frontend", "--listen=127.0.0.1:0", "--prefill="+prefill.url, "--decode="+both.url)
	w := &fleet{url: wrong.await(t, `frontend at (https?://\S+)`), model: "m"}
	w.awaitWorkers(t, func(s string) bool { return strings.Contains(s, "it serves whole requests only") })
}

// awaitWorkers waits until a relay says something of its workers.
func (f *fleet) awaitWorkers(t *testing.T, says func(string) bool) {
	t.Helper()
	var raw []byte
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		resp, err := f.http().Get(f.url + "/workers")
		if err != nil {
			t.Fatal(err)
		}
		raw, err = io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		if says(string(raw)) {
			return
		}
	}
	t.Fatalf("%s", raw)
}
