package frontend

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json/jsontext"
	"errors"
	"math"
	"strconv"

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
	return legStream{s}, nil
}

// legStream has this package's errors.
type legStream struct{ *leg.Stream }

func (s legStream) Next(ctx context.Context) (wire.Result, error) {
	r, err := s.Stream.Next(ctx)
	var failed *leg.RequestError
	if errors.As(err, &failed) {
		err = &RequestError{Code: failed.Code, Field: failed.Field, Message: failed.Message, Retryable: failed.Retryable}
	}
	return r, err
}

// legParams is disaggregated_params: which leg of a request this is, and what the legs tell each other.
type legParams struct {
	kind     leg.Kind
	group    int   // anyGroup when not given
	id       int64 // of whoever carries the request; 0 when not given
	idsB64   bool  // the prompt's ids are to be returned as base64
	cached   int   // prompt tokens that the context leg found cached; -1 when not given
	tokens   []int32
	logprobs []float32
	top      []wire.TokenLogprobs
	state    *wire.KVState
	digest   [32]byte
}

// requestTypes are the values of request_type.
var requestTypes = map[string]leg.Kind{
	leg.Context.String(): leg.Context, leg.Generation.String(): leg.Generation, leg.Whole.String(): leg.Whole,
}

// setLeg reads disaggregated_params. A server without legs ignores it.
func setLeg(p *params, v value) error {
	if !p.limits.legs {
		return nil
	}
	l, typed := &legParams{group: anyGroup, cached: -1}, false
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
	p.leg = l
	return err
}

// maxFirst bounds the tokens that a context leg hands over: one, and as many as speculation may add.
const maxFirst = 64

func (l *legParams) set(p *params, name string, v value) (err error) {
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
		err = l.setUsage(v)
	case "first_gen_tokens":
		if l.tokens, err = v.tokenIDs(p.limits.VocabSize); err == nil && len(l.tokens) > maxFirst {
			err = invalid(v.path, "%s has more than %d ids", v.path, maxFirst)
		}
	case "first_gen_log_probs":
		err = l.setLogprobs(p, v)
	case "encoded_opaque_state":
		err = l.setState(v)
	}
	return err
}

// setUsage takes the context leg's usage, of which only the cached tokens are news.
func (l *legParams) setUsage(v value) error {
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
func (l *legParams) setLogprobs(p *params, v value) error {
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
func (l *legParams) setState(v value) error {
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
	state, ok := m.(*wire.KVState)
	if !ok {
		return damaged("it is something else")
	}
	l.state, l.digest = state, sha256.Sum256(raw)
	return nil
}

// setPromptIDs takes the prompt as ids, which count more than messages or text.
func setPromptIDs(p *params, v value) (err error) {
	if p.limits.legs {
		p.promptIDs, err = v.tokenIDs(p.limits.VocabSize)
	}
	return err
}

// setPromptIDsB64 takes them as base64 of little-endian int32.
func setPromptIDsB64(p *params, v value) error {
	if !p.limits.legs {
		return nil
	}
	text, err := v.text()
	if err != nil {
		return err
	}
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(raw)%4 != 0 {
		return invalid(v.path, "%s must be base64 of little-endian int32 ids", v.path)
	}
	limit := int64(math.MaxInt32)
	if n := p.limits.VocabSize; n > 0 {
		limit = int64(n) - 1
	}
	ids := make([]int32, len(raw)/4)
	for i := range ids {
		if ids[i] = int32(binary.LittleEndian.Uint32(raw[4*i:])); ids[i] < 0 || int64(ids[i]) > limit {
			return invalid(v.path, "%s[%d] is not a token id: they are integers from 0 to %d", v.path, i, limit)
		}
	}
	p.promptIDs = ids
	return nil
}

// isLeg reports whether the request is a single leg of such a kind.
func (p *params) isLeg(kind leg.Kind) bool { return p.leg != nil && p.leg.kind == kind }

// checkLeg refuses what cannot be done in two legs.
func (g *generation) checkLeg() error {
	if g.leg == nil || g.leg.kind == leg.Whole {
		return nil
	}
	const path = "disaggregated_params"
	switch {
	case g.n > 1:
		return invalid("n", "n is %d; with disaggregated_params it must be 1", g.n)
	case len(g.prompts) > 1:
		return invalid("prompt", "prompt holds %d prompts; with disaggregated_params it must be one", len(g.prompts))
	case g.leg.kind == leg.Context && g.stream:
		return invalid("stream", "the answer to a context_only request is not streamed: set stream to false")
	case g.leg.kind == leg.Generation && len(g.leg.logprobs) != len(g.leg.tokens) && g.sampling.Logprobs:
		return invalid(path+".first_gen_log_probs", "%s.first_gen_log_probs has %d elements for %d first_gen_tokens", path, len(g.leg.logprobs), len(g.leg.tokens))
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
	job.State, job.Digest = l.state, l.digest
	job.First = wire.Result{Tokens: l.tokens, CachedTokens: max(l.cached, 0)}
	if c.g.sampling.Logprobs {
		job.First.Logprobs, job.First.Top = l.logprobs, l.top
	}
	if l.cached < 0 && l.state != nil {
		job.First.CachedTokens = l.state.CachedTokens
	}
	return s.legs.submit(ctx, job)
}

// settleStream ends a choice's stream, or holds it when it may have left something that goes into the answer.
func (c *choice) settleStream(s Stream) {
	if held, ok := s.(legStream); ok && c.g.isLeg(leg.Context) {
		c.held = held
		return
	}
	s.Close()
}

// keepState says that the answer is about to go out; what its choices left outlives them. closeStates gives up what
// does not go out.
func (a *answer) keepState() {
	for _, c := range a.choices {
		if c.held.Stream != nil && c.finish == leg.FinishNotFinished {
			c.held.Keep()
		}
	}
}

func (a *answer) closeStates() {
	for _, c := range a.choices {
		if c.held.Stream != nil {
			c.held.Close()
		}
	}
}

// appendLeg appends what a context leg tells a generation leg. When the request has ended there is no state.
func (a *answer) appendLeg(b []byte, c *choice) []byte {
	if !a.isLeg(leg.Context) || c.held.Stream == nil {
		return b
	}
	left := c.held.Left()
	id := a.leg.id
	if id == 0 {
		id = int64(left.Request)
	}
	b = append(b, `,"disaggregated_params":{"request_type":"context_only","first_gen_tokens":`...)
	b = appendIDs(b, c.sampled.Tokens)
	b = append(b, `,"first_gen_log_probs":`...)
	b = appendAlternatives(b, &c.sampled)
	b = append(b, `,"ctx_request_id":`...)
	b = appendInt(b, int64(left.Request))
	b = append(b, `,"disagg_request_id":`...)
	b = appendInt(b, id)
	b = append(b, `,"ctx_dp_rank":`...)
	b = appendInt(b, left.Group)
	b = append(b, `,"ctx_info_endpoint":`...)
	b = appendStringOrNull(b, a.endpoint)
	b = append(b, `,"draft_tokens":null,"encoded_opaque_state":`...)
	if c.finish != leg.FinishNotFinished {
		return append(b, "null}"...)
	}
	b = append(b, '"')
	b = base64.StdEncoding.AppendEncode(b, left.State)
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

// appendLegPrompt appends the prompt's ids to a context leg's answer: the generation leg needs them.
func (a *answer) appendLegPrompt(b []byte) []byte {
	if !a.isLeg(leg.Context) {
		return b
	}
	ids := a.choices[0].prompt.ids
	if !a.leg.idsB64 {
		if a.returnTokenIDs {
			return b // they are there
		}
		return appendIDs(append(b, `,"prompt_token_ids":`...), ids)
	}
	raw := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		raw = binary.LittleEndian.AppendUint32(raw, uint32(id))
	}
	b = append(b, `,"prompt_token_ids_b64":"`...)
	b = base64.StdEncoding.AppendEncode(b, raw)
	return append(b, '"')
}
