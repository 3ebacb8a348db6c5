package frontend

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"baton/leg"
	"baton/wire"
)

// Legs is the Backend of this process's own engines. With it the server takes single legs of requests
// (disaggregated_params) as well as whole ones, under TensorRT-LLM's names. The server stays its owner's to close.
type Legs struct{ Server *leg.Server }

// Submit implements Backend.
func (l Legs) Submit(ctx context.Context, req *wire.SubmitRequest) (Stream, error) {
	return l.submit(ctx, leg.Job{Kind: leg.Whole, Request: req, Group: anyGroup})
}

// Status implements Backend.
func (l Legs) Status(ctx context.Context) (*wire.StatusReply, error) { return l.Server.Status(ctx) }

// anyGroup leaves the data-parallel group to the server.
const anyGroup = -1

func (l Legs) submit(ctx context.Context, job leg.Job) (Stream, error) {
	s, err := l.Server.Submit(ctx, job)
	if err != nil {
		return nil, err
	}
	return legStream{s, legParamsField}, nil
}

// legParamsField names the field that says what legs tell each other.
const legParamsField = "disaggregated_params"

// legStream has this package's errors. path is what the client calls the leg's parameters.
type legStream struct {
	*leg.Stream
	path string
}

func (s legStream) Next(ctx context.Context) (wire.Result, error) {
	r, err := s.Stream.Next(ctx)
	return r, legFault(err, s.path)
}

// legFault is an error of a leg's as this package has them.
func legFault(err error, path string) error {
	var failed *leg.RequestError
	if !errors.As(err, &failed) {
		return err
	}
	field := failed.Field
	if rest, ok := strings.CutPrefix(field, legParamsField); ok {
		field = path + rest
	}
	return &RequestError{Code: failed.Code, Field: field, Message: failed.Message, Retryable: failed.Retryable}
}

// legParams is disaggregated_params: which leg of a request this is, and what the legs tell each other.
type legParams struct {
	kind   leg.Kind
	group  int        // anyGroup when not given
	id     int64      // of whoever carries the request; 0 when not given
	idsB64 bool       // the prompt's ids are to be returned as base64
	list   bool       // it is an array, with an element for each choice
	left   []leftover // of the context leg, by choice
}

// leftover is what the context leg left of a choice.
type leftover struct {
	path     string
	cached   int // prompt tokens that the context leg found cached; -1 when not given
	tokens   []int32
	logprobs []float32
	top      []wire.TokenLogprobs
	state    *wire.KVState
	digest   [32]byte
	ended    *wire.Result // all of it, of a choice that ended with the context leg
}

// requestTypes are the values of request_type.
var requestTypes = map[string]leg.Kind{
	leg.Context.String(): leg.Context, leg.Generation.String(): leg.Generation, leg.Whole.String(): leg.Whole,
}

// setLeg reads disaggregated_params. A server without legs ignores it. An array is a generation leg of as many choices.
func setLeg(p *params, v value) (err error) {
	if !p.limits.legs {
		return nil
	}
	if v.kind() != jsontext.KindBeginArray {
		p.leg, err = legOf(p, v)
		return err
	}
	all := &legParams{kind: leg.Generation, group: anyGroup, list: true}
	err = v.elements("", func(i int, e value) error {
		if i >= p.limits.MaxChoices {
			return invalid(v.path, "%s has more than %d elements", v.path, p.limits.MaxChoices)
		}
		one, err := legOf(p, e)
		if err != nil {
			return err
		}
		if one.kind == leg.Whole {
			return invalid(e.path+".request_type", "%s.request_type is %s; an element is what a context leg's answer has for a choice", e.path, one.kind)
		}
		all.left = append(all.left, one.left...)
		return nil
	})
	p.leg = all
	return err
}

// legOf reads one object.
func legOf(p *params, v value) (*legParams, error) {
	l, typed := &legParams{group: anyGroup, left: []leftover{{path: v.path, cached: -1}}}, false
	err := v.members(func(name string, m value) (err error) {
		if m.kind() == jsontext.KindNull {
			return nil
		}
		if name == "request_type" {
			typed = true
		}
		return l.set(p, name, m)
	})
	if err == nil && !typed {
		err = invalid(v.path+".request_type", "%s.request_type is missing: context_only, generation_only or context_and_generation", v.path)
	}
	return l, err
}

// maxFirst bounds the tokens that a context leg hands over: one, and as many as speculation may add.
const maxFirst = 64

func (l *legParams) set(p *params, name string, v value) (err error) {
	left := &l.left[0]
	switch name {
	case "request_type":
		s, err := v.text()
		if err != nil {
			return err
		}
		kind, ok := requestTypes[s]
		if !ok {
			return invalid(v.path, "%s is %.40q; it must be context_only, generation_only or context_and_generation", v.path, s)
		}
		l.kind = kind
	case "disagg_request_id":
		l.id, err = v.integer(math.MinInt64, math.MaxInt64)
	case "ctx_dp_rank":
		var n int64
		n, err = v.integer(0, math.MaxInt32)
		l.group = int(n)
	case "return_prompt_token_ids_b64":
		l.idsB64, err = v.boolean()
	case "conversation_id":
		if p.session == "" {
			p.session, err = conversationID(v)
		}
	case "schedule_style":
		var n int64
		if n, err = v.integer(0, math.MaxInt32); err == nil && n != 0 {
			err = invalid(v.path, "%s is %d; this engine serves context_first (0) only: the generation leg needs what the context leg left", v.path, n)
		}
	case "ctx_usage":
		err = left.setUsage(v)
	case "first_gen_tokens":
		if left.tokens, err = v.tokenIDs(p.limits.VocabSize); err == nil && len(left.tokens) > maxFirst {
			err = invalid(v.path, "%s has more than %d ids", v.path, maxFirst)
		}
	case "first_gen_log_probs":
		err = left.setLogprobs(p, v)
	case "encoded_opaque_state":
		err = left.setState(p, v)
	}
	return err
}

// setUsage takes the context leg's usage, of which only the cached tokens are news.
func (l *leftover) setUsage(v value) error {
	return v.members(func(name string, m value) error {
		if name != "prompt_tokens_details" || m.kind() == jsontext.KindNull {
			return nil
		}
		return m.members(func(name string, m value) error {
			if name != "cached_tokens" || m.kind() == jsontext.KindNull {
				return nil
			}
			n, err := m.integer(0, math.MaxInt32)
			l.cached = int(n)
			return err
		})
	})
}

// setLogprobs takes a list of alternatives for each first token: the token itself, and the likeliest ones by rank.
func (l *leftover) setLogprobs(p *params, v value) error {
	l.logprobs, l.top = nil, nil
	return v.elements("an array with an array for each first token", func(i int, at value) error {
		if i >= maxFirst {
			return invalid(v.path, "%s has more than %d elements", v.path, maxFirst)
		}
		var chosen float32
		var top wire.TokenLogprobs
		err := at.elements("an array of objects", func(k int, e value) error {
			if k > p.limits.MaxLogprobs+1 {
				return invalid(at.path, "%s has more than %d elements", at.path, p.limits.MaxLogprobs+1)
			}
			a, err := alternativeOf(e)
			if err != nil {
				return err
			}
			if k == 0 {
				chosen = a.logprob
			}
			if a.rank > 0 {
				top = a.into(top)
			}
			return nil
		})
		l.logprobs, l.top = append(l.logprobs, chosen), append(l.top, top)
		return err
	})
}

// alternative is one token in place of another.
type alternative struct {
	id      int32
	logprob float32
	rank    int64 // from 1; 0 for one that is not among the likeliest
}

func alternativeOf(v value) (a alternative, err error) {
	err = v.members(func(name string, m value) (err error) {
		switch {
		case m.kind() == jsontext.KindNull:
		case name == "token_id":
			var n int64
			n, err = m.integer(0, math.MaxInt32)
			a.id = int32(n)
		case name == "rank":
			a.rank, err = m.integer(0, math.MaxInt32)
		case name == "logprob":
			if m.kind() != jsontext.KindNumber {
				return m.wrongType("a number")
			}
			f, ferr := strconv.ParseFloat(string(m.raw), 32)
			if ferr != nil {
				return invalid(m.path, "%s is too large", m.path)
			}
			a.logprob = float32(f)
		}
		return err
	})
	return a, err
}

// into inserts the alternative by its rank. The chosen one comes first in JSON, wherever it ranks.
func (a alternative) into(top wire.TokenLogprobs) wire.TokenLogprobs {
	at := min(int(a.rank)-1, len(top.IDs))
	if at == len(top.IDs) {
		return wire.TokenLogprobs{IDs: append(top.IDs, a.id), Logprobs: append(top.Logprobs, a.logprob)}
	}
	top.IDs, top.Logprobs = append(top.IDs, 0), append(top.Logprobs, 0)
	copy(top.IDs[at+1:], top.IDs[at:])
	copy(top.Logprobs[at+1:], top.Logprobs[at:])
	top.IDs[at], top.Logprobs[at] = a.id, a.logprob
	return top
}

// setState decodes what the context leg left.
func (l *leftover) setState(p *params, v value) error {
	text, err := v.text()
	if err != nil || text == "" {
		return err
	}
	damaged := func(why string) error {
		return invalid(v.path, "%s is not what a context leg returns: %s", v.path, why)
	}
	if base64.StdEncoding.DecodedLen(len(text)) > leg.MaxState+2 {
		return damaged("it is too long")
	}
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return damaged("it is not base64")
	}
	m, err := wire.Decode(raw)
	if err != nil {
		return damaged("it cannot be decoded")
	}
	switch m := m.(type) {
	case *wire.KVState:
		l.state, l.digest = m, sha256.Sum256(raw)
		return nil
	case *wire.EngineReply:
		if len(m.Results) == 1 && isEnd(p, &m.Results[0]) {
			l.ended = &m.Results[0]
			return nil
		}
	}
	return damaged("it is something else")
}

// isEnd reports whether a result can be all that there is of a choice.
func isEnd(p *params, r *wire.Result) bool {
	top := func(list []wire.TokenLogprobs, n int) bool {
		for i := range list {
			if len(list[i].IDs) != len(list[i].Logprobs) || !areIDs(list[i].IDs, p.limits.VocabSize) {
				return false
			}
		}
		return len(list) <= n
	}
	tokens := len(r.Tokens)
	return (r.Finish == wire.FinishStop || r.Finish == wire.FinishLength) && r.Start == 0 && tokens > 0 && tokens <= maxFirst &&
		areIDs(r.Tokens, p.limits.VocabSize) && len(r.Logprobs) <= tokens && top(r.Top, tokens) && top(r.PromptTop, len(r.PromptLogprobs))
}

// areIDs reports whether ids are a model's. vocab 0 is any.
func areIDs(ids []int32, vocab int) bool {
	return !slices.ContainsFunc(ids, func(id int32) bool { return id < 0 || vocab > 0 && int(id) >= vocab })
}

// givenIDs are prompts as ids, beside messages or text.
type givenIDs struct {
	path    string
	list    bool // of prompts, not one prompt
	prompts []prompt
}

// setPromptIDs takes prompts as ids, which count more than messages or text.
func setPromptIDs(p *params, v value) error {
	return p.setGiven(v, jsontext.KindBeginArray, func(v value) ([]int32, error) { return v.tokenIDs(p.limits.VocabSize) })
}

// setPromptIDsB64 takes them as base64 of little-endian int32.
func setPromptIDsB64(p *params, v value) error {
	return p.setGiven(v, jsontext.KindString, func(v value) ([]int32, error) { return v.base64IDs(p.limits.VocabSize) })
}

// setGiven takes one prompt, or an array of prompts, which are of a kind.
func (p *params) setGiven(v value, kind jsontext.Kind, read func(value) ([]int32, error)) error {
	if !p.limits.legs {
		return nil
	}
	g := &givenIDs{path: v.path}
	add := func(_ int, e value) error {
		if len(g.prompts) >= p.limits.MaxChoices {
			return invalid(v.path, "%s holds more than %d prompts", v.path, p.limits.MaxChoices)
		}
		ids, err := read(e)
		g.prompts = append(g.prompts, prompt{path: e.path, ids: ids})
		return err
	}
	p.given = g
	if v.kind() == jsontext.KindBeginArray {
		g.list = jsontext.Value{firstElement(v.raw)}.Kind() == kind
	}
	if g.list {
		return v.elements("", add)
	}
	return add(0, v)
}

// base64IDs are ids as base64 of little-endian int32.
func (v value) base64IDs(vocab int) ([]int32, error) {
	text, err := v.text()
	if err != nil {
		return nil, err
	}
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(raw)%4 != 0 {
		return nil, invalid(v.path, "%s must be base64 of little-endian int32 ids", v.path)
	}
	limit := int64(math.MaxInt32)
	if vocab > 0 {
		limit = int64(vocab) - 1
	}
	ids := make([]int32, len(raw)/4)
	for i := range ids {
		if ids[i] = int32(binary.LittleEndian.Uint32(raw[4*i:])); ids[i] < 0 || int64(ids[i]) > limit {
			return nil, invalid(v.path, "%s[%d] is not a token id: they are integers from 0 to %d", v.path, i, limit)
		}
	}
	return ids, nil
}

// isLeg reports whether the request is a single leg of such a kind.
func (p *params) isLeg(kind leg.Kind) bool { return p.leg != nil && p.leg.kind == kind }

// checkLeg refuses what cannot be done in two legs.
func (g *generation) checkLeg() error {
	if g.leg == nil || g.leg.kind == leg.Whole {
		return nil
	}
	if g.leg.kind == leg.Context {
		if g.stream {
			return invalid("stream", "the answer to a context_only request is not streamed: set stream to false")
		}
		return nil
	}
	if choices := len(g.prompts) * g.n; len(g.leg.left) != choices {
		return invalid(legParamsField, "%s is of %d choices, and the request has %d: it takes what the context leg left of each, in an array in their order",
			legParamsField, len(g.leg.left), choices)
	}
	for i := range g.leg.left {
		l := &g.leg.left[i]
		if l.ended == nil && len(l.tokens) > max(g.maxTokens, 1) && g.maxTokens >= 0 {
			return invalid(l.path+".first_gen_tokens", "%s.first_gen_tokens has %d tokens, and %s is %d", l.path, len(l.tokens), g.limitField, g.maxTokens)
		}
		if l.ended == nil && len(l.logprobs) != len(l.tokens) && g.sampling.Logprobs {
			return invalid(l.path+".first_gen_log_probs", "%s.first_gen_log_probs has %d elements for %d first_gen_tokens", l.path, len(l.logprobs), len(l.tokens))
		}
	}
	return nil
}

// submit starts a choice's request, or the leg of it that this is.
func (s *Server) submit(ctx context.Context, c *choice) (Stream, error) {
	l := c.g.leg
	if l == nil || l.kind == leg.Whole {
		return s.backend.Submit(ctx, c.request(s.cfg.Tracer.Parent(ctx)))
	}
	job := leg.Job{Kind: l.kind, Request: c.request(s.cfg.Tracer.Parent(ctx)), Group: anyGroup}
	if l.kind == leg.Context {
		job.Group = l.group
		return s.legs.submit(ctx, job)
	}
	left := &l.left[c.index]
	if left.ended != nil {
		return &replay{result: left.ended}, nil
	}
	job.State, job.Digest, job.Once = left.state, left.digest, l.list
	job.First = wire.Result{Tokens: left.tokens, CachedTokens: min(max(left.cached, 0), len(c.prompt.ids))}
	if c.g.sampling.Logprobs {
		job.First.Logprobs, job.First.Top = left.logprobs, left.top
	}
	if left.cached < 0 && left.state != nil {
		job.First.CachedTokens = left.state.CachedTokens
	}
	stream, err := s.legs.submit(ctx, job)
	if held, ok := stream.(legStream); ok {
		held.path = left.path
		stream = held
	}
	return stream, err
}

// releaseLegs takes disaggregated_params back that a context leg's answer had, one or an array: nobody will go on with them.
func (s *Server) releaseLegs(x *exchange) error {
	body, err := x.body()
	if err != nil {
		return err
	}
	p := newParams(&s.cfg.Limits)
	err = decodeObject(body, s.cfg.Limits.MaxDepth, func(name string, v value) error {
		if name != legParamsField {
			return nil
		}
		return setLeg(&p, v)
	})
	switch {
	case err != nil:
		return err
	case p.leg == nil:
		return invalid(legParamsField, "%s is missing: what the context leg's answer has of a choice, or an array of that", legParamsField)
	}
	for i := range p.leg.left {
		if left := &p.leg.left[i]; left.state != nil {
			s.legs.Server.Release(left.state, left.digest)
		}
	}
	return x.json([]byte("{}"))
}

// beginGrace is how long a stream of several generation legs waits for those that have no KV yet.
const beginGrace = time.Second

// beginning decides when a stream begins: with its first result. Of several generation legs each may fail until its KV is
// here, and a failure before the stream has begun can be made good by another try, so they begin together.
type beginning struct {
	a     *answer
	first time.Time
}

func (b *beginning) now() bool {
	if !b.a.isLeg(leg.Generation) || len(b.a.choices) == 1 || allStarted(b.a.choices) {
		return true
	}
	if b.first.IsZero() {
		b.first = time.Now()
	}
	return time.Since(b.first) >= beginGrace
}

func allStarted(choices []*choice) bool {
	return !slices.ContainsFunc(choices, func(c *choice) bool { return !c.started })
}

// replay is the stream of a choice that ended with its context leg.
type replay struct{ result *wire.Result }

func (r *replay) Next(context.Context) (wire.Result, error) {
	if r.result == nil {
		return wire.Result{}, io.EOF
	}
	result := *r.result
	r.result = nil
	return result, nil
}

func (*replay) Close() {}

// gather has room set aside for what a context leg of several choices leaves, until its answer has gone out.
func (s *Server) gather(ctx context.Context, a *answer) (done func(), err error) {
	if !a.isLeg(leg.Context) || len(a.choices) == 1 {
		return func() {}, nil
	}
	b := leg.Batch{Group: a.leg.group, Session: a.session, Choices: a.n, Apart: a.sampling.PromptLogprobs}
	for i := range a.prompts {
		b.Prompts = append(b.Prompts, len(a.prompts[i].ids))
	}
	a.leg.group, done, err = s.legs.Server.Gather(ctx, b)
	return done, legFault(err, legParamsField)
}

// renewals tell when to begin leases anew, while some choices of a context leg are done and others are not. The channel
// is nil when there is nothing to do.
func (s *Server) renewals(a *answer) (due <-chan time.Time, stop func()) {
	lease := time.Duration(0)
	if a.isLeg(leg.Context) && len(a.choices) > 1 {
		lease = s.legs.Server.Lease()
	}
	if lease <= 0 {
		return nil, func() {}
	}
	ticker := time.NewTicker(max(lease/3, time.Millisecond))
	return ticker.C, ticker.Stop
}

// settleStream ends a choice's stream, or holds it when it may have left something that goes into the answer.
func (c *choice) settleStream(s Stream) {
	if held, ok := s.(legStream); ok && c.g.isLeg(leg.Context) {
		c.held.Store(held.Stream)
		return
	}
	s.Close()
}

// renew begins the leases of what the choices have left so far anew.
func (a *answer) renew() {
	for _, c := range a.choices {
		if held := c.held.Load(); held != nil {
			held.Renew()
		}
	}
}

// keepState says that the answer is about to go out; what its choices left outlives them. closeStates gives up what
// does not go out.
func (a *answer) keepState() {
	if len(a.choices) > 1 {
		a.renew()
	}
	for _, c := range a.choices {
		if held := c.held.Load(); held != nil && c.finish == leg.FinishNotFinished {
			held.Keep()
		}
	}
}

func (a *answer) closeStates() {
	for _, c := range a.choices {
		if held := c.held.Load(); held != nil {
			held.Close()
		}
	}
}

// settleLeg makes what the context leg leaves of each choice. Where there are several, a generation leg answers for those
// too that have ended: it gets all that there is of them.
func (a *answer) settleLeg() error {
	if !a.isLeg(leg.Context) {
		return nil
	}
	for i, c := range a.choices {
		held := c.held.Load()
		if held == nil {
			return fmt.Errorf("choice %d has left nothing", i)
		}
		c.left = held.Left()
		if c.finish == leg.FinishNotFinished {
			continue
		}
		c.left.State = nil
		if len(a.choices) == 1 {
			continue
		}
		end := c.sampled
		end.ID, end.Export = 0, nil
		if end.Finish == leg.FinishNotFinished {
			end.Finish = wire.FinishStop // by a stop string, which the generation leg finds again
		}
		state, err := wire.Encode(&wire.EngineReply{Results: []wire.Result{end}})
		if err != nil {
			return err
		}
		if len(state) > leg.MaxState {
			return invalid("prompt_logprobs", "what this leg would leave for the next takes %d bytes, of %d that it may; ask for fewer prompt_logprobs", len(state), leg.MaxState)
		}
		c.left.State = state
	}
	return nil
}

// appendLeg appends what a context leg tells a generation leg. A request that has ended has no state.
func (a *answer) appendLeg(b []byte, c *choice) []byte {
	if !a.isLeg(leg.Context) {
		return b
	}
	id := a.leg.id
	if id == 0 {
		id = int64(c.left.Request)
	}
	b = append(b, `,"disaggregated_params":{"request_type":"context_only","first_gen_tokens":`...)
	b = appendIDs(b, c.sampled.Tokens)
	b = append(b, `,"first_gen_log_probs":`...)
	b = appendAlternatives(b, &c.sampled)
	b = append(b, `,"ctx_request_id":`...)
	b = appendInt(b, int64(c.left.Request))
	b = append(b, `,"disagg_request_id":`...)
	b = appendInt(b, id)
	b = append(b, `,"ctx_dp_rank":`...)
	b = appendInt(b, c.left.Group)
	b = append(b, `,"ctx_info_endpoint":`...)
	b = appendStringOrNull(b, a.endpoint)
	if len(a.choices) > 1 {
		b = append(b, `,"ctx_usage":`...)
		b = usage{prompt: len(c.prompt.ids), cached: c.cached, completion: c.generated}.append(b)
	}
	b = append(b, `,"draft_tokens":null,"encoded_opaque_state":`...)
	if c.left.State == nil {
		return append(b, "null}"...)
	}
	b = append(b, '"')
	b = base64.StdEncoding.AppendEncode(b, c.left.State)
	return append(b, `"}`...)
}

// appendAlternatives appends first_gen_log_probs: for each token a list that begins with the token itself.
func appendAlternatives(b []byte, r *wire.Result) []byte {
	if len(r.Logprobs) != len(r.Tokens) || len(r.Tokens) == 0 {
		return append(b, "null"...)
	}
	alternative := func(b []byte, id int32, logprob float32, rank int) []byte {
		b = append(b, `{"token_id":`...)
		b = appendInt(b, id)
		b = append(b, `,"logprob":`...)
		b = appendFloat32(b, logprob)
		b = append(b, `,"rank":`...)
		if rank == 0 {
			return append(b, "null}"...)
		}
		return append(appendInt(b, rank), '}')
	}
	b = append(b, '[')
	for i, id := range r.Tokens {
		if i > 0 {
			b = append(b, ',')
		}
		var top wire.TokenLogprobs
		if i < len(r.Top) {
			top = r.Top[i]
		}
		rank := 0
		for k, other := range top.IDs {
			if other == id {
				rank = k + 1
			}
		}
		b = alternative(append(b, '['), id, r.Logprobs[i], rank)
		for k, other := range top.IDs {
			if other != id {
				b = alternative(append(b, ','), other, top.Logprobs[k], k+1)
			}
		}
		b = append(b, ']')
	}
	return append(b, ']')
}

// appendLegPrompt appends the ids of the prompt, or of a list of prompts, to a context leg's answer: the generation leg
// needs them.
func (a *answer) appendLegPrompt(b []byte) []byte {
	list := !a.chat && !a.single
	switch {
	case !a.isLeg(leg.Context):
		return b
	case a.leg.idsB64:
		return a.appendPromptList(append(b, `,"prompt_token_ids_b64":`...), list, appendBase64IDs)
	case a.returnTokenIDs && !list:
		return b // they are there
	}
	return a.appendPromptList(append(b, `,"prompt_token_ids":`...), list, appendIDs)
}

func (a *answer) appendPromptList(b []byte, list bool, one func([]byte, []int32) []byte) []byte {
	if !list {
		return one(b, a.prompts[0].ids)
	}
	b = append(b, '[')
	for i := range a.prompts {
		if i > 0 {
			b = append(b, ',')
		}
		b = one(b, a.prompts[i].ids)
	}
	return append(b, ']')
}

// appendBase64IDs appends ids as base64 of little-endian int32.
func appendBase64IDs(b []byte, ids []int32) []byte {
	raw := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		raw = binary.LittleEndian.AppendUint32(raw, uint32(id))
	}
	b = base64.StdEncoding.AppendEncode(append(b, '"'), raw)
	return append(b, '"')
}
