package frontend

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"baton/leg"
	"baton/wire"
)

func (s *Server) chatCompletions(x *exchange) error {
	body, err := x.body()
	if err != nil {
		return err
	}
	req, k, err := s.prompts.read(body)
	if err != nil {
		return err
	}
	if len(k.turns) > 0 {
		spare(body)
	}
	if err := s.admit(&req.params, x.r.Header); err != nil {
		return err
	}
	ctx, span := s.cfg.Tracer.Start(x.ctx, "render and tokenize", false)
	g, err := s.chatGeneration(ctx, req, &k)
	span.End(err)
	if err != nil {
		return err
	}
	return s.answer(x, g, "chatcmpl-")
}

func (s *Server) completions(x *exchange) error {
	body, err := x.body()
	if err != nil {
		return err
	}
	req, err := parseCompletion(body, &s.cfg.Limits, s.cfg.Tokenizer != nil)
	if err != nil {
		return err
	}
	if err := s.admit(&req.params, x.r.Header); err != nil {
		return err
	}
	_, span := s.cfg.Tracer.Start(x.ctx, "tokenize", false)
	g, err := s.completionGeneration(req)
	span.End(err)
	if err != nil {
		return err
	}
	return s.answer(x, g, "cmpl-")
}

// admit checks the model's name and takes the session from the headers.
func (s *Server) admit(p *params, h http.Header) error {
	if err := s.checkModel(p.model); err != nil {
		return err
	}
	return p.sessionFrom(h)
}

// checkModel accepts the served name, and none.
func (s *Server) checkModel(name string) error {
	if name == "" || name == s.cfg.Model {
		return nil
	}
	return s.noModel(name)
}

func (s *Server) noModel(name string) error {
	return &apiError{
		status: http.StatusNotFound, kind: typeInvalid, param: "model", code: "model_not_found",
		message: "the model `" + name + "` does not exist; this server has `" + s.cfg.Model + "`",
	}
}

// answer runs a generation and answers it, whole or as a stream.
func (s *Server) answer(x *exchange, g *generation, idPrefix string) error {
	if err := g.checkLeg(); err != nil {
		return err
	}
	a := &answer{
		generation: g, tok: s.tok, id: idPrefix + x.id, model: s.cfg.Model, created: time.Now().Unix(),
		choices: s.newChoices(g),
	}
	if g.isLeg(leg.Context) {
		a.endpoint = s.legs.Server.Address()
	}
	done, err := s.gather(x.ctx, a)
	if err != nil {
		return g.blame(err)
	}
	defer done()
	defer a.closeStates()
	if g.stream {
		err = s.stream(x, a)
	} else {
		err = s.whole(x, a)
	}
	err = g.blame(err)
	u := a.usage()
	x.summary = append(x.summary, "choices", len(a.choices), "stream", g.stream,
		"prompt_tokens", u.prompt, "cached_tokens", u.cached, "completion_tokens", u.completion)
	if a.leg != nil && a.leg.id != 0 {
		x.summary = append(x.summary, "leg", a.leg.kind, "disagg_request_id", a.leg.id)
	}
	return err
}

// whole answers with one object.
func (s *Server) whole(x *exchange, a *answer) error {
	if err := s.run(x.ctx, a, func(*choice, bool) error { return nil }); err != nil {
		return err
	}
	if err := a.settleLeg(); err != nil {
		return err
	}
	s.prompts.remember(a.choices[0])
	body := a.appendWhole(nil)
	if x.ctx.Err() == nil {
		a.keepState()
	}
	return x.json(body)
}

// stream answers with one event a result, each sent at once unless another result waits already.
func (s *Server) stream(x *exchange, a *answer) error {
	head := a.appendHead([]byte("data: "))
	var buf []byte
	event := func(c *choice) {
		if a.chat && !c.announced {
			buf = append(a.appendRole(append(buf, head...), c), "\n\n"...)
			c.announced = true
		}
		if !c.idle() {
			buf = append(a.appendChunk(append(buf, head...), c), "\n\n"...)
			c.sent()
		}
	}
	begin := beginning{a: a}
	err := s.run(x.ctx, a, func(c *choice, more bool) error {
		buf = buf[:0]
		if !x.began {
			if !begin.now() {
				return nil
			}
			x.beginEvents()
			for _, other := range a.choices {
				if other.started && other != c {
					event(other)
				}
			}
		}
		event(c)
		if err := x.write(buf); err != nil || more {
			return err
		}
		return x.flush()
	})
	if err != nil {
		return err
	}
	s.prompts.remember(a.choices[0])
	buf = buf[:0]
	if a.includeUsage {
		buf = append(append(buf, head...), `],"usage":`...)
		buf = append(a.usage().append(buf), "}\n\n"...)
	}
	if err := x.write(append(buf, "data: [DONE]\n\n"...)); err != nil {
		return err
	}
	return x.flush()
}

func (s *Server) models(x *exchange) error {
	b := s.appendModel(x.ctx, []byte(`{"object":"list","data":[`))
	return x.json(append(b, "]}"...))
}

func (s *Server) model(x *exchange) error {
	if name := x.r.PathValue("model"); name != s.cfg.Model {
		return s.noModel(name)
	}
	return x.json(s.appendModel(x.ctx, nil))
}

func (s *Server) appendModel(ctx context.Context, b []byte) []byte {
	b = append(b, `{"id":`...)
	b = appendString(b, s.cfg.Model)
	b = append(b, `,"object":"model","created":`...)
	b = appendInt(b, s.started.Unix())
	b = append(b, `,"owned_by":"baton"`...)
	return append(s.appendMaxModelLen(ctx, b), '}')
}

// appendMaxModelLen appends the longest sequence, which the engines decide if the configuration does not;
// null while neither is known.
func (s *Server) appendMaxModelLen(ctx context.Context, b []byte) []byte {
	b = append(b, `,"max_model_len":`...)
	n := s.cfg.Limits.MaxModelLen
	if n == 0 {
		ctx, cancel := context.WithTimeout(ctx, statusTimeout)
		defer cancel()
		if status, err := s.backend.Status(ctx); err == nil {
			n = status.Geometry.MaxSeqLen
		}
	}
	if n == 0 {
		return append(b, "null"...)
	}
	return appendInt(b, n)
}

// serverInfo shows what runs here.
func (s *Server) serverInfo(x *exchange) error {
	body, err := json.Marshal(s.cfg.ServerInfo())
	if err != nil {
		return err
	}
	return x.json(body)
}

// statusTimeout bounds the wait for the backend's word about itself.
const statusTimeout = 2 * time.Second

// health is 200 while requests can be served, otherwise 503 with the reason.
func (s *Server) health(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), statusTimeout)
	defer cancel()
	status, err := s.backend.Status(ctx)
	switch {
	case s.isDraining():
		writeHealth(w, "shutting down", nil)
	case err != nil:
		writeHealth(w, s.unreachable(err), nil)
	case !status.Ready:
		writeHealth(w, status.Reason, status)
	default:
		writeHealth(w, "", status)
	}
}

// unreachable is why there is no status. What a backend words for clients may be shown; the rest is for the log.
func (s *Server) unreachable(err error) string {
	var failed *RequestError
	if errors.As(err, &failed) {
		return strings.TrimSuffix(failed.Message, "; try again")
	}
	s.log.Warn("no status from the backend", "error", err)
	return "the coordinator does not answer"
}

// writeHealth answers with the number of engines of each role and, when it is not empty, what is wrong.
func writeHealth(w http.ResponseWriter, wrong string, status *wire.StatusReply) {
	code := http.StatusOK
	b := []byte(`{"status":"ok"`)
	if wrong != "" {
		code = http.StatusServiceUnavailable
		b = appendString([]byte(`{"status":"unavailable","reason":`), wrong)
	}
	if status != nil {
		counts := map[string]int{}
		for _, e := range status.Engines {
			if !e.Draining {
				counts[e.Role]++
			}
		}
		b = append(b, `,"engines":{`...)
		for i, role := range slices.Sorted(maps.Keys(counts)) {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendInt(append(appendString(b, role), ':'), counts[role])
		}
		b = append(b, '}')
	}
	writeJSON(w, code, append(b, '}'))
}

// randomID is 24 hexadecimal digits.
func randomID() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
