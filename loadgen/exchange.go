package loadgen

import (
	"bytes"
	"context"
	"encoding/json/jsontext"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

// Result is one request's outcome. Err is nil when the whole answer came.
type Result struct {
	Target, Round int // numbers, from 0
	Session       *Session
	Turn          int

	// Meant is when it was to be sent, Sent when it was (the first try), Began when the try that counts was, First when the first token
	// came, End when the answer or the failure was complete.
	Meant, Sent, Began, First, End time.Time
	Tries                          int

	// PromptTokens and CachedTokens are the server's counts, -1 without one. Reusable is how many of the prompt's
	// tokens it had in common with the turn before, or with an earlier request of this run: what an ideal cache would have held.
	PromptTokens, CachedTokens, Reusable int
	// OutputTokens are counted by Counted. Streamed is how many token ids came (-1: none were sent).
	OutputTokens, Streamed, Events int
	Counted                        Count
	Finish                         string
	// IDs are the answer's token ids, in sessions of several turns whose prompts are ids; valid until Observe returns.
	IDs []int32
	Err *RequestError

	gaps []gap
}

// gap is the time between two arrivals of tokens, shared by those of the second.
type gap struct {
	time   time.Duration
	tokens int
}

// Count is how output tokens were counted.
type Count string

// Ways to count, the best first.
const (
	ByUsage    Count = "usage"
	ByTokenIDs Count = "token_ids"
	ByEvents   Count = "events"
)

// TTFT is the time to the first token; ok is false when none came.
func (r *Result) TTFT() (d time.Duration, ok bool) { return r.First.Sub(r.Meant), !r.First.IsZero() }

// TPOT is the time per output token after the first; ok is false when there is at most one.
func (r *Result) TPOT() (d time.Duration, ok bool) {
	if r.First.IsZero() || r.OutputTokens < 2 {
		return 0, false
	}
	return r.End.Sub(r.First) / time.Duration(r.OutputTokens-1), true
}

// E2E is the time to the end of the answer.
func (r *Result) E2E() time.Duration { return r.End.Sub(r.Meant) }

// exchange is what the requests of one client after the other need: one goroutine uses it.
type exchange struct {
	server  *server
	request *Request
	sse     *sse
	parser  parser
	events  func(tokens int) // called as tokens come
}

// try sends a body once and reads the answer into r.
func (x *exchange) try(ctx context.Context, r *Result, body []byte) *RequestError {
	r.First, r.Finish, r.gaps, r.Events = time.Time{}, "", r.gaps[:0], 0
	r.PromptTokens, r.CachedTokens, r.OutputTokens, r.Streamed = -1, -1, 0, -1
	x.parser.ids, x.parser.text = x.parser.ids[:0], x.parser.text[:0]
	r.Began = time.Now()
	defer func() { r.End = time.Now() }()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, x.server.base+x.request.path(), bytes.NewReader(body))
	if err != nil {
		return &RequestError{Kind: KindConnect, Message: err.Error()}
	}
	req.Header = x.server.header.Clone()
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "text/event-stream")
	if name := x.request.SessionHeader; name != "-" && !r.Session.Single {
		req.Header.Set(name, r.Session.ID)
	}
	resp, err := x.server.client.Do(req)
	if err != nil {
		return broke(ctx, err, false)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, maxRefusal)) // the status says enough if this fails
		return refused(resp.StatusCode, text)
	}
	return x.read(ctx, r, resp.Body)
}

// read reads a stream to its end.
func (x *exchange) read(ctx context.Context, r *Result, body io.Reader) *RequestError {
	x.sse.reset(body, maxResponse)
	var last time.Time
	var counted *usage
	for {
		data, err := x.sse.next()
		if err == io.EOF {
			return &RequestError{Kind: KindCut, Message: errCut.Error()}
		} else if err != nil {
			return broke(ctx, err, true)
		}
		if len(data) == 0 {
			continue
		}
		if string(data) == "[DONE]" {
			_, _ = io.Copy(io.Discard, io.LimitReader(body, 4096)) // the end of the body, so that the connection is used again
			x.settle(r, counted)
			return nil
		}
		e, err := x.parser.parse(data)
		if err != nil {
			return &RequestError{Kind: KindResponse, Message: shorten(fmt.Sprintf("%v, in %.200s", err, data))}
		}
		if e.fault != nil {
			e.fault.Message = shorten(e.fault.Message)
			return e.fault
		}
		if e.finish != "" {
			r.Finish = e.finish
		}
		if e.usage != nil {
			counted = e.usage
		}
		last = x.arrived(r, e, last)
	}
}

// arrived accounts for the tokens of an event.
func (x *exchange) arrived(r *Result, e event, last time.Time) time.Time {
	if e.ids {
		r.Streamed = max(r.Streamed, 0) + e.tokens
	}
	n := e.tokens
	if !e.ids && e.text {
		n = 1 // as far as can be seen
	}
	if n == 0 {
		return last
	}
	r.Events++
	x.events(n)
	now := x.sse.at
	switch {
	case r.First.IsZero():
		r.First = now
	case now.After(last):
		r.gaps = append(r.gaps, gap{now.Sub(last), n})
	case len(r.gaps) > 0:
		r.gaps[len(r.gaps)-1].tokens += n
	}
	return now
}

// settle decides how many tokens there were.
func (x *exchange) settle(r *Result, u *usage) {
	r.OutputTokens, r.Counted = r.Events, ByEvents
	if r.Streamed >= 0 {
		r.OutputTokens, r.Counted = r.Streamed, ByTokenIDs
	}
	if u == nil {
		return
	}
	if u.completion >= 0 {
		r.OutputTokens, r.Counted = u.completion, ByUsage
	}
	r.PromptTokens, r.CachedTokens = u.prompt, u.cached
}

func (r *Request) path() string {
	if r.Prompt == Chat {
		return "/v1/chat/completions"
	}
	return "/v1/completions"
}

// conversation is a session's prompt as it is sent; it only grows.
type conversation struct {
	content content
	kind    Prompt
	prompt  []byte // elements of an array (ids, messages), or the inside of a JSON string
}

// say adds what a turn of the session brings.
func (c *conversation) say(t *Turn, session string, turn int) {
	if len(t.Messages) > 0 {
		c.add(t.Messages)
		return
	}
	pieces := t.pieces(session, turn)
	switch c.kind {
	case IDs:
		for _, p := range pieces {
			c.prompt = c.content.appendIDs(c.prompt, p)
		}
	case Text:
		for _, p := range pieces {
			c.prompt = c.content.appendWords(c.prompt, p) // the words need no escapes
		}
	default:
		if len(pieces) > 0 && pieces[0].key == sharedKey {
			c.message("system", c.content.appendWords(nil, pieces[0]))
			pieces = pieces[1:]
		}
		var text []byte
		for _, p := range pieces {
			text = c.content.appendWords(text, p)
		}
		if len(text) > 0 || len(c.prompt) == 0 {
			c.message("user", text)
		}
	}
}

// hear adds the answer.
func (c *conversation) hear(p *parser) {
	switch c.kind {
	case IDs:
		for _, id := range p.ids {
			c.prompt = strconv.AppendInt(append(c.prompt, ','), int64(id), 10)
		}
	case Text:
		quoted := quote(p.text)
		c.prompt = append(c.prompt, quoted[1:len(quoted)-1]...)
	default:
		c.message("assistant", p.text)
	}
}

func (c *conversation) message(role string, text []byte) {
	m := append([]byte(`{"role":"`), role...)
	m = append(append(append(m, `","content":`...), quote(bytes.TrimPrefix(text, []byte(" ")))...), '}')
	c.add(m)
}

func (c *conversation) add(element []byte) {
	if len(c.prompt) > 0 {
		c.prompt = append(c.prompt, ',')
	}
	c.prompt = append(c.prompt, element...)
}

// quote makes a JSON string; what is not UTF-8 becomes U+FFFD.
func quote(text []byte) []byte {
	b, _ := jsontext.AppendQuote(nil, bytes.ToValidUTF8(text, []byte("\uFFFD"))) // fails for nothing else
	return b
}

// body makes a request's body. It is a new one each time: a transport may go on reading the one before after its answer has come.
func (x *exchange) body(c *conversation, s *Session, output int) []byte {
	q := x.request
	b := append(make([]byte, 0, len(c.prompt)+len(q.Extra)+512), `{"model":`...)
	b = append(b, quote([]byte(x.server.model))...)
	switch q.Prompt {
	case IDs:
		b = append(append(append(b, `,"prompt":[`...), c.prompt...), ']')
	case Text:
		b = append(append(append(b, `,"prompt":"`...), c.prompt...), '"')
	default:
		b = append(append(append(b, `,"messages":[`...), c.prompt...), ']')
	}
	b = strconv.AppendInt(append(b, `,"max_tokens":`...), int64(output), 10)
	b = strconv.AppendFloat(append(b, `,"temperature":`...), q.Temperature, 'g', -1, 64)
	if !q.StopAtEOS {
		b = append(b, `,"ignore_eos":true`...)
	}
	b = append(b, `,"stream":true,"stream_options":{"include_usage":true}`...)
	if x.server.tokenIDs {
		b = append(b, `,"return_token_ids":true`...)
	}
	if q.SessionBody && !s.Single {
		b = append(append(append(b, `,"conversation_params":{"conversation_id":`...), quote([]byte(s.ID))...), '}')
	}
	if extra := bytes.TrimSpace(q.Extra); len(extra) > 2 {
		if inner := bytes.TrimSpace(extra[1 : len(extra)-1]); len(inner) > 0 {
			b = append(append(b, ','), inner...)
		}
	}
	return append(b, '}')
}
