//go:build linux

package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// stub is a pair of engines that compute nothing. The prefill one answers at once; the decode one streams its tokens
// as fast as they are taken, or all streams together every so often, as an engine's steps make them.
func stub(args []string) error {
	flags := flag.NewFlagSet("stub", flag.ExitOnError)
	prefill := flags.String("prefill", "127.0.0.1:9101", "address")
	decode := flags.String("decode", "127.0.0.1:9102", "address")
	tokens := flags.Int("tokens", 512, "events of a stream")
	step := flags.Duration("step", 0, "time between tokens")
	prompt := flags.Int("prompt", 32768, "token ids that the prefill worker answers with")
	_ = flags.Parse(args)
	e := &engines{tokens: *tokens, step: *step, tick: make(chan struct{})}
	e.ids = `"` + strings.Repeat("AQAAAAIA", *prompt/2*8/6/8+1) + `"`
	if *step > 0 {
		go e.beat()
	}
	failed := make(chan error, 2)
	go func() { failed <- http.ListenAndServe(*prefill, http.HandlerFunc(e.prefill)) }()
	go func() { failed <- http.ListenAndServe(*decode, http.HandlerFunc(e.decode)) }()
	return <-failed
}

type engines struct {
	tokens int
	step   time.Duration
	ids    string // base64 of the prompt's

	mu   sync.Mutex
	tick chan struct{} // closed at the next step
}

func (e *engines) beat() {
	for range time.Tick(e.step) {
		e.mu.Lock()
		close(e.tick)
		e.tick = make(chan struct{})
		e.mu.Unlock()
	}
}

func (e *engines) next() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.tick
}

// common answers what routers ask before they send requests.
func common(w http.ResponseWriter, r *http.Request, role string) bool {
	switch r.URL.Path {
	case "/v1/chat/completions", "/v1/completions", "/generate":
		return false
	case "/v1/models":
		io.WriteString(w, `{"object":"list","data":[{"id":"stub","object":"model","owned_by":"sglang"}]}`)
	case "/server_info", "/get_server_info":
		fmt.Fprintf(w, `{"model_path":"stub","served_model_name":"stub","disaggregation_mode":%q,"tp_size":1,"dp_size":1}`, role)
	case "/model_info", "/get_model_info":
		io.WriteString(w, `{"model_path":"stub","tokenizer_path":"stub","is_generation":true}`)
	default:
		io.WriteString(w, `{"status":"ok"}`)
	}
	return true
}

func (e *engines) prefill(w http.ResponseWriter, r *http.Request) {
	if common(w, r, "prefill") {
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		log.Print(err)
		return
	}
	if bytes.Contains(body, []byte(`"bootstrap_room"`)) && bytes.Contains(body, []byte(`"stream":true`)) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {\"id\":\"p\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"stub\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n")
		return
	}
	id, ids := "1", ""
	if n := bytes.Index(body, []byte(`"disagg_request_id":`)); n >= 0 {
		rest := body[n+len(`"disagg_request_id":`):]
		id = string(rest[:bytes.IndexAny(rest, ",}")])
	}
	if bytes.Contains(body, []byte(`"return_prompt_token_ids_b64":true`)) {
		ids = `,"prompt_token_ids_b64":` + e.ids
	}
	answer := `{"id":"p","object":"chat.completion","created":1,"model":"stub","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length",` +
		`"disaggregated_params":{"request_type":"context_only","first_gen_tokens":[7],"ctx_request_id":1,"encoded_opaque_state":"` + strings.Repeat("x", 1000) + `","disagg_request_id":` + id + `}}],` +
		`"usage":{"prompt_tokens":32768,"total_tokens":32769,"completion_tokens":1},"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"e","remote_block_ids":[[1]],"transfer_mode":"pull"}` + ids + `}`
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
	io.WriteString(w, answer)
}

// event is one token as vLLM and SGLang send it.
const event = `data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1790000000,"model":"stub","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}` + "\n\n"

func (e *engines) decode(w http.ResponseWriter, r *http.Request) {
	if common(w, r, "decode") {
		return
	}
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		log.Print(err)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	flush := w.(http.Flusher).Flush
	one := []byte(event)
	for range e.tokens {
		if e.step > 0 {
			select {
			case <-e.next():
			case <-r.Context().Done():
				return
			}
		}
		if _, err := w.Write(one); err != nil {
			return
		}
		flush()
	}
	io.WriteString(w, "data: [DONE]\n\n")
}
