package doctor

import (
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

// fake is a server of some kind, as strict about requests as the real one where this package could get them wrong. Its
// model's next token depends on all before it.
type fake struct {
	*httptest.Server
	t    *testing.T
	kind string
	role string // prefill or decode
	peer *fake  // a decode server's prefill server

	// How it differs from a healthy one.
	owner     string            // in /v1/models, if not the kind
	answers   map[string]string // of GET endpoints; "503 text" for a status
	key       string            // the API key that it wants
	silent    bool              // a prefill leg is answered as if it were a whole request
	push      bool              // vLLM's pushing connector
	local     bool              // a decode leg is computed anew, whatever it says
	quiet     bool              // usage says nothing about the cache
	damaged   bool              // what arrives by a handoff is not what was sent
	noCache   bool
	stateless bool // TensorRT-LLM's context leg without opaque state
	finish    string
	noRoute   bool // no /v1/completions
	headers   map[string]string
	context   int
	handoff   string // of our frontends

	mu       sync.Mutex
	exported map[string][]int
	known    map[string]bool // prompts that are cached
	moved    int             // bytes that came from elsewhere
	posts    int
}

func serve(t *testing.T, kind string, change func(f *fake)) *fake {
	t.Helper()
	f := &fake{t: t, kind: kind, owner: kind, answers: map[string]string{"/health": ""}, finish: "length", context: 2048,
		exported: map[string][]int{}, known: map[string]bool{}}
	if change != nil {
		change(f)
	}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	return f
}

// couple makes a prefill and a decode server.
func couple(t *testing.T, kind string, change func(p, d *fake)) (p, d *fake) {
	t.Helper()
	p, d = serve(t, kind, nil), serve(t, kind, nil)
	p.role, d.role, d.peer = RolePrefill, RoleDecode, p
	if kind == SGLang {
		_, port, _ := strings.Cut(strings.TrimPrefix(p.URL, "http://"), ":")
		p.answers["/server_info"] = `{"disaggregation_mode":"prefill","disaggregation_transfer_backend":"mooncake","disaggregation_bootstrap_port":` + port +
			`,"context_length":4096,"version":"0.5.23","served_model_name":"m","api_key":"secret"}`
		d.answers["/server_info"] = strings.Replace(p.answers["/server_info"], `"prefill"`, `"decode"`, 1)
	}
	if kind == Baton {
		for _, f := range []*fake{p, d} {
			f.answers["/server_info"] = `{"engine":"baton","version":"v1","role":"` + f.role + `","fingerprint":"abc","transport":"shm","shard":"tp=2","block_size":32,` +
				`"kv_dtype":"f32","state_format":1,"disaggregated_params":{"ctx_dp_size":1,"ctx_info_endpoint":[]}}`
		}
		d.handoff = `{"prefill_engine":"d0","decode_engine":"d0","blocks_moved":16,"blocks_reused":0,"bytes_moved":4096}`
	}
	if change != nil {
		change(p, d)
	}
	return p, d
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.key != "" && r.URL.Path != "/health" && r.Header.Get("Authorization") != "Bearer "+f.key {
		http.Error(w, `{"error":"Unauthorized"}`, http.StatusUnauthorized)
		return
	}
	if text, ok := f.answers[r.URL.Path]; ok && r.Method == http.MethodGet {
		if status, rest, ok := strings.Cut(text, " "); ok && len(status) == 3 && status[0] == '5' {
			code, _ := strconv.Atoi(status)
			http.Error(w, rest, code)
			return
		}
		io.WriteString(w, text)
		return
	}
	switch {
	case r.URL.Path == "/v1/models":
		extra := fmt.Sprintf(`,"max_model_len":%d`, f.context)
		if f.owner == TRTLLM {
			extra = ""
		}
		fmt.Fprintf(w, `{"object":"list","data":[{"id":"m","object":"model","owned_by":%q%s}]}`, f.owner, extra)
	case r.URL.Path == "/metrics" && f.kind == VLLM:
		fmt.Fprintf(w, "# HELP x\nvllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"%v\"} 1.0\nvllm:nixl_bytes_transferred_sum{engine=\"0\"} %d.0\n", !f.noCache, f.moved)
	case r.URL.Path == completions && r.Method == http.MethodPost && !f.noRoute:
		f.posts++
		for k, v := range f.headers {
			w.Header().Set(k, v)
		}
		body, _ := io.ReadAll(r.Body)
		f.complete(w, r, body)
	default:
		http.NotFound(w, r)
	}
}

// query is a request as the fakes read it.
type query struct {
	fields map[string]json.RawMessage
	ids    []int
	max    int
}

func (q *query) str(name string) string { return string(q.fields[name]) }

var trtFields = strings.Fields("model prompt max_tokens temperature ignore_eos disaggregated_params stream")

func (f *fake) complete(w http.ResponseWriter, r *http.Request, body []byte) {
	q := &query{max: 16}
	if err := json.Unmarshal(body, &q.fields); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	_ = json.Unmarshal(q.fields["prompt"], &q.ids)
	_ = json.Unmarshal(q.fields["max_tokens"], &q.max)
	if len(q.ids)+q.max > f.context {
		http.Error(w, `{"message":"the prompt is too long"}`, http.StatusBadRequest)
		return
	}
	switch f.kind {
	case TRTLLM:
		for _, name := range slices.Sorted(maps.Keys(q.fields)) {
			if !slices.Contains(trtFields, name) {
				http.Error(w, fmt.Sprintf(`{"error":"%s: Extra inputs are not permitted"}`, name), http.StatusBadRequest)
				return
			}
		}
		f.trtllm(w, q)
	case VLLM:
		f.vllm(w, r, q)
	case SGLang:
		f.sglang(w, r, q)
	case Baton:
		f.trtllm(w, q)
	default:
		f.reply(w, q, "", "")
	}
}

// reply answers from the prompt alone. top and choice are members that are added, with a comma before each.
func (f *fake) reply(w http.ResponseWriter, q *query, top, choice string) {
	ids, text := slices.Clone(q.ids), ""
	for range q.max {
		h := len(ids)
		for _, id := range ids {
			h = (h*31 + id) % 50021
		}
		ids = append(ids, h)
		text += fmt.Sprint(" ", h)
	}
	if f.damaged {
		text += " damaged"
	}
	details, key := "null", fmt.Sprint(q.ids)
	if !f.quiet {
		cached := 0
		if f.known[key] && !f.noCache {
			cached = len(q.ids) / 16 * 16
		}
		details = fmt.Sprintf(`{"cached_tokens":%d}`, cached)
	}
	f.known[key] = true
	if f.handoff != "" && q.str("return_handoff") == "true" {
		choice += `,"handoff":` + f.handoff
	}
	fmt.Fprintf(w, `{"id":"x","choices":[{"index":0,"text":%q,"finish_reason":%q%s}],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":%s}%s}`,
		text, f.finish, choice, len(q.ids), q.max, details, top)
}

type vllmParams struct {
	RemoteDecode  bool   `json:"do_remote_decode"`
	RemotePrefill bool   `json:"do_remote_prefill"`
	Blocks        any    `json:"remote_block_ids"`
	Request       string `json:"remote_request_id"`
	Transfer      string `json:"transfer_id"`
	Engine        string `json:"remote_engine_id"`
}

func (f *fake) vllm(w http.ResponseWriter, r *http.Request, q *query) {
	var p vllmParams
	_ = json.Unmarshal(q.fields["kv_transfer_params"], &p)
	switch {
	case f.silent || !p.RemoteDecode && !p.RemotePrefill:
		f.reply(w, q, "", "")
	case p.RemoteDecode && p.Transfer != "":
		f.exported[p.Transfer] = q.ids
		f.reply(w, q, "", "")
	case p.RemoteDecode:
		if q.max != 1 {
			http.Error(w, "a prefill leg of more than one token", http.StatusBadRequest)
			return
		}
		id, mode := r.Header.Get("X-Request-Id"), "pull"
		if f.push {
			mode = "push"
		}
		f.exported[id] = q.ids
		f.reply(w, q, fmt.Sprintf(`,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":"E",`+
			`"remote_request_id":%q,"remote_host":"127.0.0.1","remote_port":5600,"remote_num_tokens":12345678901234567890,"transfer_mode":%q}`, id, mode), "")
	case f.local:
		f.reply(w, q, "", "")
	case p.Transfer != "":
		if p.Engine != "engine-0" || !f.fetch(p.Transfer, q.ids, r) {
			http.Error(w, "no transfer "+p.Transfer, http.StatusInternalServerError)
			return
		}
		f.reply(w, q, "", "")
	default:
		if f.peer.push != (p.Blocks == nil) || !f.fetch(p.Request, q.ids, r) {
			http.Error(w, "nothing was prefilled under "+p.Request, http.StatusInternalServerError)
			return
		}
		f.reply(w, q, "", "")
	}
}

// fetch waits for what the peer exports under an id, and counts its bytes.
func (f *fake) fetch(id string, ids []int, r *http.Request) bool {
	for {
		f.peer.mu.Lock()
		state, ok := f.peer.exported[id]
		delete(f.peer.exported, id)
		f.peer.mu.Unlock()
		if ok {
			f.moved += 1000 * len(ids)
			f.known[fmt.Sprint(ids)] = true
			return slices.Equal(state, ids)
		}
		select {
		case <-r.Context().Done():
			return false
		case <-time.After(time.Millisecond):
		}
	}
}

func (f *fake) sglang(w http.ResponseWriter, r *http.Request, q *query) {
	room := q.str("bootstrap_room")
	if f.role == "" {
		f.reply(w, q, "", "")
		return
	}
	n, err := strconv.ParseInt(room, 10, 64)
	_, port, _ := strings.Cut(strings.TrimPrefix(f.URL, "http://"), ":")
	if f.peer != nil {
		_, port, _ = strings.Cut(strings.TrimPrefix(f.peer.URL, "http://"), ":")
	}
	if err != nil || n < 0 || q.str("bootstrap_host") != `"127.0.0.1"` || q.str("bootstrap_port") != port {
		http.Error(w, `{"message":"bootstrap fields are wrong"}`, http.StatusBadRequest)
		return
	}
	if f.role == RolePrefill {
		f.exported[room] = q.ids
	} else if !f.fetch(room, q.ids, r) {
		http.Error(w, "nobody came", http.StatusInternalServerError)
		return
	}
	f.reply(w, q, "", "")
}

func (f *fake) trtllm(w http.ResponseWriter, q *query) {
	var p struct {
		Type  string          `json:"request_type"`
		ID    json.Number     `json:"disagg_request_id"`
		Ctx   json.Number     `json:"ctx_request_id"`
		State string          `json:"encoded_opaque_state"`
		First []int           `json:"first_gen_tokens"`
		Usage json.RawMessage `json:"ctx_usage"`
	}
	_ = json.Unmarshal(q.fields["disaggregated_params"], &p)
	const contextID = "9007199254740993" // beyond 2^53: it must not pass through a float
	switch {
	case p.Type == "" || f.silent:
		f.reply(w, q, "", "")
	case p.Type == "context_only":
		f.exported[p.ID.String()] = q.ids
		state := `"c3RhdGU="`
		if f.stateless {
			state = "null"
		}
		f.reply(w, q, `,"prompt_token_ids":[1]`, fmt.Sprintf(`,"disaggregated_params":{"request_type":"context_only","first_gen_tokens":[5],"ctx_request_id":%s,"encoded_opaque_state":%s,"disagg_request_id":%s}`, contextID, state, p.ID))
	case p.Type != "generation_only" || p.Ctx.String() != contextID || p.State != "c3RhdGU=" || len(p.First) != 1 || !strings.Contains(string(p.Usage), "prompt_tokens"):
		http.Error(w, `{"error":"these are not a context leg's parameters"}`, http.StatusBadRequest)
	default:
		f.peer.mu.Lock()
		state, ok := f.peer.exported[p.ID.String()]
		f.peer.mu.Unlock()
		if !ok || !slices.Equal(state, q.ids) {
			http.Error(w, `{"error":"no such context"}`, http.StatusInternalServerError)
			return
		}
		f.reply(w, q, "", "")
	}
}
