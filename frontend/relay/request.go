package relay

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"net/http"
	"strconv"
	"strings"

	"baton/kvcache"
	"baton/route"
)

// request is what a client sent, looked at once.
type request struct {
	path string // as it goes to the engines
	chat bool
	body object

	stream       bool
	includeUsage bool   // the client wants usage at the end of its stream
	content      []byte // the value that holds the prompt: messages, prompt, or ids
	several      string // why there is more than one answer to it; "" when there is one

	made    []int32 // the ids of a chat's prompt, if they were made here
	madeB64 []byte  // as a JSON string

	conversation string // the client's id of it
	inBody       bool   // the id came in the body, which the engines get
	header       []string
}

// conversationHeaders may carry a conversation's id, in order of precedence.
var conversationHeaders = []string{"X-Session-Id", "X-Correlation-Id", "X-Session-Affinity", "X-Multi-Turn-Session-Id"}

// forwarded are headers of clients that engines get too.
var forwarded = []string{"Traceparent", "Tracestate"}

// Fields of both endpoints that only the relay may set: a client that did could make an engine fetch KV from an address
// of its choice.
var reserved = []string{"disaggregated_params", "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"}

const (
	chatPath        = "/v1/chat/completions"
	completionsPath = "/v1/completions"
)

// parseRequest looks at a body. Its errors are the client's fault.
func parseRequest(path string, body []byte, h http.Header) (*request, error) {
	o, err := scanObject(body)
	if err != nil {
		return nil, badRequest("", "the body is not a JSON object: %v", err)
	}
	r := &request{path: path, chat: path == chatPath, body: o}
	if r.stream, err = boolField(&o, "stream"); err != nil {
		return nil, err
	}
	if options := o.getSet("stream_options"); options != nil && r.stream {
		so, err := scanObject(options)
		if err != nil {
			return nil, badRequest("stream_options", "stream_options is not an object")
		}
		if r.includeUsage, err = boolField(&so, "include_usage"); err != nil {
			return nil, err
		}
	}
	if err := r.findContent(); err != nil {
		return nil, err
	}
	if err := r.findConversation(h); err != nil {
		return nil, err
	}
	for _, name := range forwarded {
		if v := h.Get(name); v != "" {
			r.header = append(r.header, name+": "+v)
		}
	}
	return r, nil
}

func boolField(o *object, name string) (bool, error) {
	switch v := o.getSet(name); string(v) {
	case "true":
		return true, nil
	case "false", "":
		return false, nil
	default:
		return false, badRequest(name, "%s is %s; it takes true or false", name, clip(v))
	}
}

// clip shortens a value for an error.
func clip(v []byte) string {
	if len(v) > 40 {
		return string(v[:40]) + "…"
	}
	return string(v)
}

func (r *request) findContent() error {
	field := "prompt"
	if r.chat {
		field = "messages"
	}
	value := r.body.getSet(field)
	if value == nil {
		return badRequest(field, "%s is missing", field)
	}
	r.content = value
	if !r.chat {
		inner := bytes.TrimLeft(value[1:], " \n\t\r")
		if value[0] == '[' && len(inner) > 0 && (inner[0] == '[' || inner[0] == '"') {
			if list, err := scanArray(value, 2); err != nil || len(list) > 1 {
				r.several = severalPrompts
			}
		}
	}
	if n := r.body.getSet("n"); n != nil && string(n) != "1" {
		r.several = severalChoices
	}
	for _, ids := range []string{"prompt_token_ids", "prompt_token_ids_b64"} {
		if v := r.body.getSet(ids); v != nil {
			r.content = v
		}
	}
	return nil
}

// prompts is how many prompts a completion has.
func (r *request) prompts() int {
	if r.several == "" || r.chat {
		return 1
	}
	list, err := scanArray(r.content, maxPrompts)
	if err != nil || len(list) == 0 || list[0][0] != '[' && list[0][0] != '"' {
		return 1
	}
	return len(list)
}

// maxPrompts bounds the prompts of one request that are told apart.
const maxPrompts = 1024

func (r *request) findConversation(h http.Header) error {
	if params := r.body.getSet("conversation_params"); params != nil {
		o, err := scanObject(params)
		if err != nil {
			return badRequest("conversation_params", "conversation_params is not an object")
		}
		v := o.get("conversation_id")
		id, err := unquote(v)
		if err == errNotString && len(v) > 0 && (v[0] == '-' || v[0] >= '0' && v[0] <= '9') {
			id, err = string(v), nil
		}
		if id = strings.TrimSpace(id); err != nil || id == "" {
			return badRequest("conversation_params.conversation_id", "conversation_params needs a conversation_id that is not empty")
		}
		r.conversation, r.inBody = id, true
	}
	for _, name := range conversationHeaders {
		v := strings.TrimSpace(h.Get(name))
		if v == "" {
			continue
		}
		if r.conversation == "" {
			r.conversation = v
		}
		r.header = append(r.header, name+": "+v)
	}
	return nil
}

// contentBlock is the size of the blocks of text that chains are made of, in bytes.
const contentBlock = 512

var contentSeed = maphash.MakeSeed()

// contentChain names the leading blocks of a text. The last byte never counts: it closes what the next turn goes on
// with.
func contentChain(text []byte) []kvcache.Digest {
	n := max(0, len(text)-1) / contentBlock
	chain := make([]kvcache.Digest, n)
	var h maphash.Hash
	h.SetSeed(contentSeed)
	for i := range chain {
		h.Write(text[i*contentBlock : (i+1)*contentBlock])
		binary.LittleEndian.PutUint64(chain[i][:], h.Sum64())
	}
	return chain
}

// routing is what routers see; need says what of it.
func (r *request) routing(need route.Need, tokenBlock int) route.Request {
	q := route.Request{Conversation: r.conversation}
	if need&route.NeedTokens != 0 && r.body.getSet("cache_salt") == nil { // a salt makes blocks of its own
		q.Tokens = kvcache.Chain(kvcache.Digest{}, tokenBlock, r.ids())
	}
	if need&route.NeedContent != 0 && len(q.Tokens) == 0 {
		q.Content = contentChain(r.content)
	}
	return q
}

// ids are the prompt's, nil when they are not known.
func (r *request) ids() []int32 {
	if r.made != nil {
		return r.made
	}
	switch r.content[0] {
	case '[':
		if ids, err := parseIDs(r.content); err == nil {
			return ids
		}
	case '"':
		if r.body.getSet("prompt_token_ids_b64") != nil {
			if text, err := unquote(r.content); err == nil {
				ids, _ := DecodeIDs(text)
				return ids
			}
		}
	}
	return nil
}

// requestID is how ids go into headers.
func requestID(id int64) string { return strconv.FormatInt(id, 10) }

// apiError is an error as a client sees it.
type apiError struct {
	status     int
	kind       string // "type" in JSON
	message    string
	param      string // the request's field at fault
	code       string
	retryAfter int // seconds; 0 for no such header
	challenge  bool
}

func (e *apiError) Error() string { return e.message }

func badRequest(param, format string, args ...any) error {
	return &apiError{status: http.StatusBadRequest, kind: "invalid_request_error", param: param, message: fmt.Sprintf(format, args...)}
}

// appendJSON appends {"error":{...}}.
func (e *apiError) appendJSON(b []byte) []byte {
	orNull := func(b []byte, s string) []byte {
		if s == "" {
			return append(b, "null"...)
		}
		return appendString(b, s)
	}
	b = appendString(append(b, `{"error":{"message":`...), e.message)
	b = appendString(append(b, `,"type":`...), e.kind)
	b = orNull(append(b, `,"param":`...), e.param)
	b = orNull(append(b, `,"code":`...), e.code)
	return append(b, "}}"...)
}
