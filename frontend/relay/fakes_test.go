package relay

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// fake is an engine with a toy model, as strict about its requests as the real server of its kind. A prompt's ids are its
// characters; the model's next id depends on all before it.
type fake struct {
	*httptest.Server
	t    *testing.T
	kind string
	more []*fake
	peer *fake // the prefill worker that a decode worker may fetch from; nil for a prefill worker

	mu       sync.Mutex
	seen     []seen           // requests
	exported map[string][]int // what was prefilled and not fetched yet, by id: the prompt with the first token
	released []string         // bodies of what was given back
	healthy  bool
	owner    string // in /v1/models; "" for no such endpoint
	info     string // of /server_info

	// before lets a test answer itself; it returns true if it did.
	before func(n int, w http.ResponseWriter, r *http.Request) bool
	// gap is the time between tokens.
	gap chan struct{}
	// push makes vLLM's prefill worker a pushing one; noParams makes it forget what was asked.
	push, noParams bool
	finish         string // the finish reason of prefill legs
	closed         chan struct{}
	events         []string      // answers to come of /kv_cache_events
	slow           chan struct{} // closed when what is given back may be taken
	cut            bool          // break connections on which something else is asked
	told           chan struct{} // closed when all but the last were asked for
}

type seen struct {
	path   string
	body   string
	header http.Header
}

func newFake(t *testing.T, kind string, peer *fake) *fake {
	f := &fake{
		t: t, kind: kind, peer: peer, exported: map[string][]int{}, healthy: true, finish: "length",
		closed: make(chan struct{}),
	}
	if kind == "baton" {
		f.finish = "not_finished"
	}
	f.owner = map[string]string{"trtllm": "tensorrt_llm", "baton": "baton", "vllm": "vllm", "mooncake": "vllm", "sglang": "sglang", "plain": "someone"}[kind]
	f.Server = httptest.NewServer(f)
	t.Cleanup(func() {
		close(f.closed)
		f.Close()
	})
	return f
}

func (f *fake) requests() []seen {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.seen)
}

func (f *fake) last() seen {
	f.t.Helper()
	list := f.requests()
	if len(list) == 0 {
		f.t.Fatalf("%s has got no request", f.kind)
	}
	return list[len(list)-1]
}

func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	healthy, owner, info := f.healthy, f.owner, f.info
	f.mu.Unlock()
	if r.Method == http.MethodGet {
		w.Header().Set("Connection", "close") // tests of broken connections need new ones
	}
	switch r.URL.Path {
	case "/health":
		if !healthy {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		return
	case "/v1/models":
		if owner == "" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprintf(w, `{"object":"list","data":[{"id":"toy","object":"model","owned_by":%q}]}`, owner)
		return
	case "/server_info":
		if info == "" {
			http.NotFound(w, r)
			return
		}
		io.WriteString(w, info)
		return
	case "/query":
		if f.kind != "mooncake" || f.peer != nil {
			http.NotFound(w, r)
			return
		}
		io.WriteString(w, `{"0":{"engine_id":"engine-0"},"1":{"engine_id":"engine-1"}}`)
		return
	case "/kv_cache_events":
		f.tellEvents(w)
		return
	case releasePath:
		f.release(w, r)
		return
	case chatPath, completionsPath:
	default:
		f.mu.Lock()
		cut := f.cut
		f.mu.Unlock()
		if cut {
			panic(http.ErrAbortHandler)
		}
		http.NotFound(w, r)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	f.mu.Lock()
	f.seen = append(f.seen, seen{r.URL.Path, string(body), r.Header.Clone()})
	n, before := len(f.seen), f.before
	f.mu.Unlock()
	r.Body = io.NopCloser(bytes.NewReader(body))
	if before != nil && before(n, w, r) {
		return
	}
	q, err := f.parse(r.URL.Path, body)
	if err != nil {
		refuse(w, err)
		return
	}
	switch f.kind {
	case "trtllm", "baton":
		f.serveTRT(w, r, q)
	case "vllm", "mooncake":
		f.serveVLLM(w, r, q)
	case "sglang":
		f.serveSGLang(w, r, q)
	default:
		f.generate(w, r, q, nil, "null")
	}
}

// tellEvents answers what there is to tell, once. That the next one is asked for shows that it was taken.
func (f *fake) tellEvents(w http.ResponseWriter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	answer := "[]"
	if len(f.events) > 0 {
		answer = f.events[0]
		if f.events = f.events[1:]; len(f.events) == 0 && f.told != nil {
			close(f.told)
			f.told = nil
		}
	}
	io.WriteString(w, answer)
}

// release takes back what our prefill worker left; no other has such an endpoint.
func (f *fake) release(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if f.kind != "baton" || f.peer != nil || err != nil {
		f.t.Errorf("%s got POST %s %s, %v", f.kind, r.URL.Path, body, err)
		http.NotFound(w, r)
		return
	}
	f.mu.Lock()
	slow := f.slow
	f.mu.Unlock()
	if slow != nil {
		<-slow
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.released = append(f.released, string(body))
	io.WriteString(w, "{}")
}

func refuse(w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadRequest)
	fmt.Fprintf(w, `{"object":"error","message":%q,"type":"BadRequestError","code":400}`, err)
}

// query is a request as an engine reads it.
type query struct {
	chat   bool
	ids    []int
	max    int
	stream bool
	usage  bool
	probs  bool
	fields map[string]json.RawMessage
}

// The fields of TensorRT-LLM's request models; any other is an error.
var (
	trtBoth = strings.Fields(`model best_of echo frequency_penalty logit_bias logprobs n presence_penalty seed stop stream stream_options
		temperature top_p user lora_request prompt_ignore_length use_beam_search top_k top_p_min min_p repetition_penalty length_penalty
		early_stopping stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
		truncate_prompt_tokens thinking_token_budget add_special_tokens response_format disaggregated_params priority conversation_params max_tokens`)
	trtChat = append(slices.Clone(trtBoth), strings.Fields(`messages prompt_token_ids prompt_token_ids_b64 top_logprobs max_completion_tokens tools
		tool_choice reasoning_effort thinking add_generation_prompt documents chat_template chat_template_kwargs media_io_kwargs cache_salt
		agent_hierarchy mm_processor_kwargs`)...)
	trtCompletion = append(slices.Clone(trtBoth), strings.Fields(`prompt suffix return_context_logits detokenize`)...)
	trtParams     = strings.Fields(`request_type first_gen_tokens first_gen_log_probs first_gen_logits ctx_request_id encoded_opaque_state
		draft_tokens disagg_request_id ctx_dp_rank ctx_info_endpoint schedule_style ctx_usage return_prompt_token_ids_b64 resolved_thinking`)
)

func allow(fields map[string]json.RawMessage, known []string) error {
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if !slices.Contains(known, name) {
			return fmt.Errorf("%s: Extra inputs are not permitted", name)
		}
	}
	return nil
}

func (f *fake) parse(path string, body []byte) (*query, error) {
	q := &query{chat: path == chatPath, max: 16}
	if err := json.Unmarshal(body, &q.fields); err != nil {
		return nil, err
	}
	switch f.kind {
	case "trtllm":
		known := trtCompletion
		if q.chat {
			known = trtChat
		}
		if err := allow(q.fields, known); err != nil {
			return nil, err
		}
		if q.has("stream_options") && string(q.fields["stream"]) != "true" {
			return nil, fmt.Errorf("stream_options can only be set if stream is true")
		}
		if !q.has("model") {
			return nil, fmt.Errorf("model: Field required")
		}
	case "vllm", "mooncake":
		if q.has("stream_options") && string(q.fields["stream"]) != "true" {
			return nil, fmt.Errorf("stream options can only be defined when `stream=True`")
		}
		if q.int("min_tokens", 0) > q.int("max_tokens", 16) {
			return nil, fmt.Errorf("min_tokens must be less than or equal to max_tokens")
		}
	}
	q.stream = string(q.fields["stream"]) == "true"
	q.usage = strings.Contains(string(q.fields["stream_options"]), `"include_usage":true`)
	q.probs = q.has("logprobs")
	q.max = q.int("max_tokens", q.int("max_completion_tokens", 16))
	var err error
	q.ids, err = f.ids(q)
	return q, err
}

func (q *query) has(name string) bool { return !isNull(q.fields[name]) }

func (q *query) int(name string, otherwise int) int {
	if n, err := strconv.Atoi(string(q.fields[name])); err == nil {
		return n
	}
	return otherwise
}

func (f *fake) ids(q *query) (ids []int, err error) {
	if v := q.fields["prompt_token_ids_b64"]; q.has("prompt_token_ids_b64") {
		var text string
		if err := json.Unmarshal(v, &text); err != nil {
			return nil, err
		}
		list, err := DecodeIDs(text)
		for _, id := range list {
			ids = append(ids, int(id))
		}
		return ids, err
	}
	if v := q.fields["prompt_token_ids"]; q.has("prompt_token_ids") {
		return ids, json.Unmarshal(v, &ids)
	}
	field := "prompt"
	if q.chat {
		field = "messages"
	}
	v := q.fields[field]
	if !q.has(field) {
		return nil, fmt.Errorf("%s: Field required", field)
	}
	if !q.chat && json.Unmarshal(v, &ids) == nil {
		return ids, nil
	}
	for _, c := range v {
		ids = append(ids, int(c))
	}
	return ids, nil
}

// next is the model.
func next(ids []int) int {
	h := len(ids)
	for _, id := range ids {
		h = (h*31 + id) % 50021
	}
	return h
}

// generate answers a request whose first tokens may be known from elsewhere. details is what its usage says of the
// prompt; usage, if not nil, replaces the prompt's part.
func (f *fake) generate(w http.ResponseWriter, r *http.Request, q *query, first []int, details string) {
	all := append(slices.Clone(q.ids), first...)
	for len(all) < len(q.ids)+q.max {
		all = append(all, next(all))
	}
	tokens := all[len(q.ids):]
	usage := fmt.Sprintf(`{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":%s}`,
		len(q.ids), len(all), len(tokens), details)
	if !q.stream {
		w.Header().Set("Content-Type", "application/json")
		text := ""
		for _, token := range tokens {
			text += fmt.Sprintf("t%d ", token)
		}
		fmt.Fprintf(w, `{"id":"%s","object":"%s","created":1,"model":"toy","choices":[{"index":0,%s,"token_ids":%s,"logprobs":%s,"finish_reason":"length"}],"usage":%s}`,
			"cmpl-1", map[bool]string{true: "chat.completion", false: "text_completion"}[q.chat], q.text(text), ints(tokens), q.logprobs(tokens), usage)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	flush := w.(http.Flusher).Flush
	w.WriteHeader(http.StatusOK)
	flush()
	for i, token := range tokens {
		if f.gap != nil {
			select {
			case <-f.gap:
			case <-r.Context().Done():
				return
			case <-f.closed:
				return
			}
		}
		finish := "null"
		if i == len(tokens)-1 {
			finish = `"length"`
		}
		fmt.Fprintf(w, "data: {\"id\":\"cmpl-1\",\"object\":\"chunk\",\"choices\":[{\"index\":0,%s,\"token_ids\":%s,\"finish_reason\":%s}]}\n\n",
			q.delta(fmt.Sprintf("t%d ", token)), ints(tokens[i:i+1]), finish)
		flush()
	}
	if q.usage {
		fmt.Fprintf(w, "data: {\"id\":\"cmpl-1\",\"object\":\"chunk\",\"choices\":[],\"usage\":%s}\n\n", usage)
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

func ints(list []int) string {
	b, _ := json.Marshal(list)
	return string(b)
}

func (q *query) text(text string) string {
	if q.chat {
		return fmt.Sprintf(`"message":{"role":"assistant","content":%q}`, text)
	}
	return fmt.Sprintf(`"text":%q`, text)
}

func (q *query) delta(text string) string {
	if q.chat {
		return fmt.Sprintf(`"delta":{"content":%q}`, text)
	}
	return fmt.Sprintf(`"text":%q`, text)
}

func (q *query) logprobs(tokens []int) string {
	if !q.probs {
		return "null"
	}
	var list []string
	for _, token := range tokens {
		list = append(list, fmt.Sprintf(`{"token":"token_id:%d","logprob":-0.5}`, token))
	}
	return `{"content":[` + strings.Join(list, ",") + `]}`
}

// trtWire is disaggregated_params.
type trtWire struct {
	Type       string          `json:"request_type"`
	First      []int           `json:"first_gen_tokens"`
	Probs      json.RawMessage `json:"first_gen_log_probs"`
	ContextID  json.Number     `json:"ctx_request_id"`
	ID         json.Number     `json:"disagg_request_id"`
	State      string          `json:"encoded_opaque_state"`
	Usage      json.RawMessage `json:"ctx_usage"`
	Endpoint   string          `json:"ctx_info_endpoint"`
	Style      *int            `json:"schedule_style"`
	B64        bool            `json:"return_prompt_token_ids_b64"`
	DraftDummy []int           `json:"draft_tokens"`
}

func (f *fake) serveTRT(w http.ResponseWriter, r *http.Request, q *query) {
	raw := q.fields["disaggregated_params"]
	if isNull(raw) {
		f.generate(w, r, q, nil, `{"cached_tokens":0}`)
		return
	}
	var fields map[string]json.RawMessage
	var p trtWire
	if err := json.Unmarshal(raw, &fields); err != nil {
		refuse(w, err)
		return
	}
	if err := allow(fields, trtParams); err != nil {
		refuse(w, err)
		return
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	if err := d.Decode(&p); err != nil {
		refuse(w, err)
		return
	}
	switch p.Type {
	case "context_only":
		f.trtContext(w, q, &p)
	case "generation_only":
		f.trtGeneration(w, r, q, &p)
	default:
		refuse(w, fmt.Errorf("unknown request_type %q", p.Type))
	}
}

// bigState is beyond 2^53, and its spelling must survive.
const bigID = "9007199254740993"

func (f *fake) trtContext(w http.ResponseWriter, q *query, p *trtWire) {
	if q.stream {
		refuse(w, fmt.Errorf("a context_only request cannot stream"))
		return
	}
	first := next(q.ids)
	ids := `"prompt_token_ids":` + ints(q.ids)
	if p.B64 {
		var list []int32
		for _, id := range q.ids {
			list = append(list, int32(id))
		}
		ids = fmt.Sprintf(`"prompt_token_ids_b64":%q`, EncodeIDs(list))
		if !q.chat && f.kind == "trtllm" {
			refuse(w, fmt.Errorf("completions have no prompt_token_ids_b64"))
			return
		}
	}
	f.mu.Lock()
	finish, none := f.finish, f.noParams
	f.exported[p.ID.String()] = append(slices.Clone(q.ids), first)
	f.mu.Unlock()
	params := fmt.Sprintf(`{"request_type":"context_only","first_gen_tokens":[%d],"first_gen_log_probs":[[{"token_id":%d,"logprob":-0.5,"rank":1}]],`+
		`"ctx_request_id":%s,"encoded_opaque_state":"c3RhdGU=","disagg_request_id":%s}`, first, first, bigID, p.ID)
	if none {
		params = "null"
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"id":"ctx","object":"%s","created":1,"model":"toy","choices":[{"index":0,%s,"finish_reason":%q,"disaggregated_params":%s}],`+
		`"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":7}},%s}`,
		map[bool]string{true: "chat.completion", false: "text_completion"}[q.chat], q.text(fmt.Sprintf("t%d ", first)), finish, params,
		len(q.ids), len(q.ids)+1, ids)
}

// trtGeneration goes on from what the context worker exported, once; it reports the prompt's usage as that counted it.
func (f *fake) trtGeneration(w http.ResponseWriter, r *http.Request, q *query, p *trtWire) {
	if p.Endpoint != "" { // generation first: wait for the context worker
		for f.fetch(p.ID.String(), false) == nil {
			select {
			case <-r.Context().Done():
				return
			case <-time.After(time.Millisecond):
			}
		}
		f.generate(w, r, q, f.fetch(p.ID.String(), true)[len(q.ids):], `{"cached_tokens":7}`)
		return
	}
	state := f.fetch(p.ID.String(), true)
	switch {
	case p.ContextID.String() != bigID:
		refuse(w, fmt.Errorf("ctx_request_id is %s", p.ContextID))
	case p.State != "c3RhdGU=" || len(p.First) != 1:
		refuse(w, fmt.Errorf("the state of the context worker is missing"))
	case state == nil:
		http.Error(w, "no context with id "+p.ID.String(), http.StatusInternalServerError)
	case !slices.Equal(state[:len(state)-1], q.ids):
		refuse(w, fmt.Errorf("the prompt's ids are not those of the context worker"))
	default:
		details := "null"
		if strings.Contains(string(p.Usage), `"cached_tokens":7`) {
			details = `{"cached_tokens":7}`
		}
		f.generate(w, r, q, p.First, details)
	}
}

// fetch takes from whichever prefill worker has it.
func (f *fake) fetch(id string, remove bool) []int {
	for _, p := range append([]*fake{f.peer}, f.more...) {
		if state := p.take(id, remove); state != nil {
			return state
		}
	}
	return nil
}

// take is what was exported under an id.
func (f *fake) take(id string, remove bool) []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	state := f.exported[id]
	if remove {
		delete(f.exported, id)
	}
	return state
}

type vllmWire struct {
	RemoteDecode  bool   `json:"do_remote_decode"`
	RemotePrefill bool   `json:"do_remote_prefill"`
	Blocks        any    `json:"remote_block_ids"`
	Engine        string `json:"remote_engine_id"`
	Request       string `json:"remote_request_id"`
	Mode          string `json:"transfer_mode"`
	Transfer      string `json:"transfer_id"`
	Bootstrap     string `json:"remote_bootstrap_addr"`
}

// serveVLLM: the engine decides by kv_transfer_params which leg a request is; without them it serves it whole.
func (f *fake) serveVLLM(w http.ResponseWriter, r *http.Request, q *query) {
	raw := q.fields["kv_transfer_params"]
	f.mu.Lock()
	none, push := f.noParams, f.push
	f.mu.Unlock()
	if isNull(raw) || none {
		f.generate(w, r, q, nil, `{"cached_tokens":0}`)
		return
	}
	var p vllmWire
	if err := json.Unmarshal(raw, &p); err != nil {
		refuse(w, err)
		return
	}
	id := r.Header.Get("X-Request-Id")
	switch {
	case p.RemoteDecode && q.max != 1:
		refuse(w, fmt.Errorf("a prefill leg with max_tokens %d", q.max))
	case p.RemoteDecode:
		key := id
		if p.Transfer != "" {
			key = p.Transfer
		}
		var stops []int
		_ = json.Unmarshal(q.fields["stop_token_ids"], &stops)
		f.mu.Lock()
		if p.Transfer == "" || q.int("min_tokens", 0) > 0 || !slices.Contains(stops, next(q.ids)) {
			f.exported[key] = q.ids // Mooncake's connector frees what a token has ended
		}
		f.mu.Unlock()
		mode := "pull"
		if push {
			mode = "push"
		}
		params := fmt.Sprintf(`,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":"E",`+
			`"remote_request_id":%q,"remote_host":"h","remote_port":5600,"tp_size":1,"remote_num_tokens":%d,"transfer_mode":%q}`, id, len(q.ids), mode)
		if p.Transfer != "" {
			params = ""
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"id":"p","object":"chat.completion","choices":[{"index":0,%s,"finish_reason":"length"}],`+
			`"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":7}}%s}`,
			q.text("x"), len(q.ids), len(q.ids)+1, params)
	case f.peer == nil:
		refuse(w, fmt.Errorf("a decode leg at a prefill worker"))
	case p.Transfer != "":
		for f.fetch(p.Transfer, false) == nil {
			select {
			case <-r.Context().Done():
				return
			case <-time.After(time.Millisecond):
			}
		}
		known := func(o *fake) bool { return o.URL == p.Bootstrap }
		if !strings.HasPrefix(p.Engine, "engine-") || !known(f.peer) && !slices.ContainsFunc(f.more, known) {
			refuse(w, fmt.Errorf("engine %q at %q", p.Engine, p.Bootstrap))
			return
		}
		f.fetch(p.Transfer, true)
		f.generate(w, r, q, nil, fmt.Sprintf(`{"cached_tokens":%d}`, len(q.ids)-1))
	default:
		f.mu.Lock()
		push = f.peer.push
		f.mu.Unlock()
		if push != (p.Blocks == nil) {
			refuse(w, fmt.Errorf("push is %t and block ids are %v", push, p.Blocks))
			return
		}
		state := f.fetch(p.Request, true)
		if p.Request != id || !slices.Equal(state, q.ids) {
			refuse(w, fmt.Errorf("nothing was prefilled for request %q (this one is %q)", p.Request, id))
			return
		}
		f.generate(w, r, q, nil, fmt.Sprintf(`{"cached_tokens":%d}`, len(q.ids)-1))
	}
}

// serveSGLang: both workers get the same body and meet in a room.
func (f *fake) serveSGLang(w http.ResponseWriter, r *http.Request, q *query) {
	room := string(q.fields["bootstrap_room"])
	if _, err := strconv.ParseInt(room, 10, 64); err != nil || !q.has("bootstrap_host") || !q.has("bootstrap_port") {
		refuse(w, fmt.Errorf("bootstrap_room %s, host %s, port %s", room, q.fields["bootstrap_host"], q.fields["bootstrap_port"]))
		return
	}
	if f.peer == nil {
		f.mu.Lock()
		f.exported[room] = q.ids
		f.mu.Unlock()
		q.max = 1
		f.generate(w, r, q, nil, `{"cached_tokens":7}`)
		return
	}
	for f.fetch(room, false) == nil {
		select {
		case <-r.Context().Done():
			return
		case <-time.After(time.Millisecond):
		}
	}
	if !slices.Equal(f.fetch(room, true), q.ids) {
		refuse(w, fmt.Errorf("the room's prompt is another"))
		return
	}
	f.generate(w, r, q, nil, `{"cached_tokens":0}`)
}
