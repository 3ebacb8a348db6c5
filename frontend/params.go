package frontend

import (
	"encoding/json/jsontext"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"baton/wire"
)

// Bounds on what one request may name.
const (
	maxStops      = 16
	maxStopBytes  = 4096
	maxStopIDs    = 256
	maxLabelBytes = 4096 // model names, salts, sessions
)

// params are the fields that both generation endpoints take.
type params struct {
	limits *Limits

	model    string
	sampling wire.Sampling
	seeded   bool
	n        int

	maxTokens           int // -1 when not given, like the next three
	maxCompletionTokens int
	limitField          string // which of the two the client sent
	topLogprobs         int
	promptLogprobs      int

	stop        []string
	includeStop bool // the stop string or token stays in the text

	stream          bool
	streamOptions   bool // stream_options was given
	includeUsage    bool
	continuousUsage bool

	skipSpecial    bool
	addSpecial     bool
	returnTokenIDs bool
	tokensAsIDs    bool // token strings in logprobs are "token_id:N"
	returnHandoff  bool
	session, salt  string

	given *givenIDs  // the prompt as ids, beside messages or text; nil when not given
	leg   *legParams // nil for a whole request
}

func newParams(limits *Limits) params {
	return params{
		limits:              limits,
		sampling:            wire.Sampling{Temperature: 1},
		n:                   1,
		maxTokens:           -1,
		maxCompletionTokens: -1,
		topLogprobs:         -1,
		promptLogprobs:      -1,
		skipSpecial:         true,
	}
}

// setter reads one field into params.
type setter func(p *params, v value) error

// commonFields are the fields of both endpoints; what is not here, in an endpoint's own table or in
// refusedFields is ignored.
var commonFields = map[string]setter{
	"model": func(p *params, v value) (err error) { p.model, err = v.textOf(maxLabelBytes); return },

	"temperature":        float(func(p *params) *float32 { return &p.sampling.Temperature }, 0, math.MaxFloat32, "0 or more"),
	"top_p":              float(func(p *params) *float32 { return &p.sampling.TopP }, math.SmallestNonzeroFloat32, 1, "more than 0 and at most 1"),
	"min_p":              float(func(p *params) *float32 { return &p.sampling.MinP }, 0, 1, "from 0 to 1"),
	"presence_penalty":   float(func(p *params) *float32 { return &p.sampling.PresencePenalty }, -2, 2, "from -2 to 2"),
	"frequency_penalty":  float(func(p *params) *float32 { return &p.sampling.FrequencyPenalty }, -2, 2, "from -2 to 2"),
	"repetition_penalty": float(func(p *params) *float32 { return &p.sampling.RepetitionPenalty }, math.SmallestNonzeroFloat32, math.MaxFloat32, "more than 0"),

	"top_k":                 setTopK,
	"seed":                  setSeed,
	"n":                     setN,
	"max_tokens":            integer(func(p *params) *int { return &p.maxTokens }, 0),
	"max_completion_tokens": integer(func(p *params) *int { return &p.maxCompletionTokens }, 0),
	"min_tokens":            integer(func(p *params) *int { return &p.sampling.MinTokens }, 0),
	"prompt_logprobs":       func(p *params, v value) (err error) { p.promptLogprobs, err = p.count(v); return },

	"stop":                       setStop,
	"stop_token_ids":             setStopIDs,
	"include_stop_str_in_output": boolean(func(p *params) *bool { return &p.includeStop }),
	"ignore_eos":                 boolean(func(p *params) *bool { return &p.sampling.IgnoreEOS }),

	"stream":         boolean(func(p *params) *bool { return &p.stream }),
	"stream_options": setStreamOptions,

	"skip_special_tokens":        boolean(func(p *params) *bool { return &p.skipSpecial }),
	"add_special_tokens":         boolean(func(p *params) *bool { return &p.addSpecial }),
	"return_token_ids":           boolean(func(p *params) *bool { return &p.returnTokenIDs }),
	"return_tokens_as_token_ids": boolean(func(p *params) *bool { return &p.tokensAsIDs }),
	"return_handoff":             boolean(func(p *params) *bool { return &p.returnHandoff }),
	"cache_salt":                 func(p *params, v value) (err error) { p.salt, err = v.textOf(maxLabelBytes); return },
	"conversation_params":        setConversation,
	"disaggregated_params":       setLeg,
	"prompt_token_ids":           setPromptIDs,
	"prompt_token_ids_b64":       setPromptIDsB64,
}

func float(field func(*params) *float32, low, high float64, want string) setter {
	return func(p *params, v value) error {
		f, err := v.number()
		if err != nil {
			return err
		}
		narrow := float32(f)
		if float64(narrow) < low || float64(narrow) > high {
			return invalid(v.path, "%s must be %s, not %s", v.path, want, v.raw)
		}
		*field(p) = narrow
		return nil
	}
}

func integer(field func(*params) *int, low int64) setter {
	return func(p *params, v value) error {
		n, err := v.integer(low, math.MaxInt32)
		*field(p) = int(n)
		return err
	}
}

// count is a number of alternatives to report, bounded by the server's limit.
func (p *params) count(v value) (int, error) {
	n, err := v.integer(0, int64(p.limits.MaxLogprobs))
	return int(n), err
}

func boolean(field func(*params) *bool) setter {
	return func(p *params, v value) (err error) {
		*field(p), err = v.boolean()
		return err
	}
}

func setTopK(p *params, v value) error {
	n, err := v.integer(-1, math.MaxInt32)
	p.sampling.TopK = int(max(n, 0)) // -1 and 0 both mean all tokens
	return err
}

func setSeed(p *params, v value) error {
	n, err := v.integer(math.MinInt64, math.MaxInt64)
	p.sampling.Seed, p.seeded = uint64(n), true
	return err
}

func setN(p *params, v value) error {
	n, err := v.integer(1, int64(p.limits.MaxChoices))
	p.n = int(n)
	return err
}

func setStop(p *params, v value) error {
	add := func(_ int, e value) error {
		s, err := e.textOf(maxStopBytes)
		switch {
		case err != nil:
			return err
		case s == "":
			return invalid(v.path, "%s must not be an empty string", e.path)
		case len(p.stop) == maxStops:
			return invalid(v.path, "stop holds more than %d strings", maxStops)
		}
		p.stop = append(p.stop, s)
		return nil
	}
	p.stop = nil
	if v.kind() == jsontext.KindString {
		return add(0, v)
	}
	return v.elements("a string or an array of strings", add)
}

func setStopIDs(p *params, v value) (err error) {
	ids, err := v.tokenIDs(p.limits.VocabSize)
	if err == nil && len(ids) > maxStopIDs {
		return invalid(v.path, "%s holds more than %d ids", v.path, maxStopIDs)
	}
	p.sampling.StopTokenIDs = ids
	return err
}

func setStreamOptions(p *params, v value) error {
	p.streamOptions = true
	return v.members(func(name string, m value) (err error) {
		switch name {
		case "include_usage":
			p.includeUsage, err = m.boolean()
		case "continuous_usage_stats":
			p.continuousUsage, err = m.boolean()
		}
		return err
	})
}

func setConversation(p *params, v value) error {
	p.session = ""
	err := v.members(func(name string, m value) (err error) {
		if name == "conversation_id" {
			p.session, err = conversationID(m)
		}
		return err
	})
	if err == nil && p.session == "" {
		err = invalid(v.path, "%s needs a conversation_id", v.path)
	}
	return err
}

// conversationID is a text or an integer, as text.
func conversationID(v value) (string, error) {
	switch v.kind() {
	case jsontext.KindNumber:
		n, err := v.integer(math.MinInt64, math.MaxInt64)
		return strconv.FormatInt(n, 10), err
	case jsontext.KindString:
	default:
		return "", v.wrongType("a string or an integer")
	}
	id, err := v.textOf(maxLabelBytes)
	if id = strings.TrimSpace(id); err == nil && id == "" {
		err = invalid(v.path, "%s must not be blank", v.path)
	}
	return id, err
}

// sessionHeaders name a conversation when the body does not; the first that is not blank counts.
var sessionHeaders = []string{"X-Session-Id", "X-Correlation-Id", "X-Session-Affinity", "X-Multi-Turn-Session-Id"}

func (p *params) sessionFrom(h http.Header) error {
	if p.session != "" {
		return nil
	}
	for _, name := range sessionHeaders {
		if id := strings.TrimSpace(h.Get(name)); id != "" {
			if len(id) > maxLabelBytes {
				return invalid("", "the header %s is longer than %d bytes", name, maxLabelBytes)
			}
			p.session = id
			return nil
		}
	}
	return nil
}

// refused is a field whose effect nobody would want silently left out, with the values that ask for
// nothing.
type refused struct {
	harmless func(v value) bool
	instead  string
}

func isEmpty(v value) bool {
	switch strings.Join(strings.Fields(string(v.raw)), "") {
	case "{}", "[]", `""`, "false", "0":
		return true
	}
	return false
}

func isOneOf(texts ...string) func(value) bool {
	return func(v value) bool {
		s, err := v.text()
		return err == nil && slices.Contains(texts, s)
	}
}

func isTextFormat(v value) bool {
	plain := true
	err := v.members(func(name string, m value) error {
		if name == "type" {
			plain = isOneOf("text")(m)
		}
		return nil
	})
	return err == nil && plain
}

const noConstraints = "output is not constrained by this server; ask for the format in the prompt"

var refusedFields = map[string]refused{
	"logit_bias":             {isEmpty, "this server cannot bias tokens"},
	"response_format":        {isTextFormat, `only {"type":"text"} is supported; ` + noConstraints},
	"structured_outputs":     {isEmpty, noConstraints},
	"guided_json":            {isEmpty, noConstraints},
	"guided_regex":           {isEmpty, noConstraints},
	"guided_choice":          {isEmpty, noConstraints},
	"guided_grammar":         {isEmpty, noConstraints},
	"bad_words":              {isEmpty, noConstraints},
	"allowed_token_ids":      {isEmpty, noConstraints},
	"logits_processors":      {isEmpty, noConstraints},
	"functions":              {isEmpty, "use tools"},
	"function_call":          {isOneOf("auto", "none"), "use tools"},
	"truncate_prompt_tokens": {isEmpty, "shorten the prompt before sending it"},
	"suffix":                 {isEmpty, "this server does not fill in the middle"},
	"use_beam_search":        {isEmpty, "this server samples; use n for several answers"},
	"prompt_embeds":          {isEmpty, "send text or token ids"},
	"chat_template":          {isEmpty, "templates come with the model, not with a request"},
	"priority":               {isEmpty, "requests are served in the order of their arrival"},
	"modalities":             {func(v value) bool { return strings.Join(strings.Fields(string(v.raw)), "") == `["text"]` }, "this server answers in text"},
	"audio":                  {isEmpty, "this server answers in text"},
}

// set reads one field of a request: own is the endpoint's table.
func (p *params) set(v value) (known bool, err error) {
	if f, ok := commonFields[v.path]; ok {
		return true, f(p, v)
	}
	if r, ok := refusedFields[v.path]; ok && !r.harmless(v) {
		return true, invalid(v.path, "%s is not supported: %s", v.path, r.instead)
	}
	return false, nil
}

// check settles what depends on several fields. withTokenizer is false for a model without one.
func (p *params) check(withTokenizer bool) error {
	switch {
	case p.maxTokens >= 0 && p.maxCompletionTokens >= 0 && p.maxTokens != p.maxCompletionTokens:
		return invalid("max_tokens", "max_tokens and max_completion_tokens contradict each other; send only one of them")
	case p.streamOptions && !p.stream:
		return invalid("stream_options", "stream_options needs stream to be true")
	case len(p.stop) > 0 && !withTokenizer:
		return invalid("stop", "this model is served without a tokenizer: use stop_token_ids instead of stop")
	}
	if p.limitField = "max_tokens"; p.maxCompletionTokens >= 0 && p.maxTokens < 0 {
		p.limitField = "max_completion_tokens"
	}
	p.maxTokens = max(p.maxTokens, p.maxCompletionTokens)
	if p.maxTokens > 0 && p.sampling.MinTokens > p.maxTokens {
		return invalid("min_tokens", "min_tokens (%d) must not exceed %s (%d)", p.sampling.MinTokens, p.limitField, p.maxTokens)
	}
	if p.topLogprobs >= 0 {
		p.sampling.Logprobs = true
		p.sampling.TopLogprobs = p.topLogprobs
	}
	if p.promptLogprobs >= 0 {
		p.sampling.PromptLogprobs = true
		p.sampling.PromptTopLogprobs = p.promptLogprobs
	}
	return nil
}

// checkLength refuses a prompt that leaves no room for the answer it asks for.
func (p *params) checkLength(param string, promptTokens int) error {
	limit := p.limits.MaxModelLen
	var e *apiError
	switch {
	case promptTokens == 0:
		return invalid(param, "%s is empty: at least one token is needed", param)
	case limit == 0:
		return nil
	case promptTokens >= limit:
		e = invalid(param, "the prompt has %d tokens, and this model's context length is %d: at most %d leave room for an answer",
			promptTokens, limit, limit-1).(*apiError)
	case promptTokens+p.sampling.MinTokens > limit:
		e = invalid("min_tokens", "the prompt has %d tokens and min_tokens asks for %d more, but this model's context length is %d: ask for at most %d",
			promptTokens, p.sampling.MinTokens, limit, limit-promptTokens).(*apiError)
	case promptTokens+p.maxTokens > limit:
		e = invalid(p.limitField, "the prompt has %d tokens and %s asks for %d more, but this model's context length is %d: ask for at most %d",
			promptTokens, p.limitField, p.maxTokens, limit, limit-promptTokens).(*apiError)
	default:
		return nil
	}
	e.code = "context_length_exceeded"
	return e
}
