package frontend

import (
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"sync"

	"go.opentelemetry.io/otel/attribute"

	"baton/wire"
)

// answer is a generation under way: its choices and what every piece of its JSON repeats.
type answer struct {
	*generation
	tok     Tokenizer
	id      string
	model   string
	created int64
	choices []*choice
	// endpoint is where a generation leg's engine finds what a context leg left.
	endpoint string
}

// newChoices makes the choices of all prompts. A prompt without a seed gets one of its own.
func (s *Server) newChoices(g *generation) []*choice {
	choices := make([]*choice, 0, len(g.prompts)*g.n)
	for range g.prompts {
		seed := g.sampling.Seed
		if !g.seeded {
			seed = s.seeds.next()
		}
		for range g.n {
			choices = append(choices, newChoice(g, s.tok, s.cfg.Output, len(choices), seed))
		}
	}
	return choices
}

// seeds are for prompts that bring none.
type seeds struct {
	mu       sync.Mutex
	sequence *rand.Rand // nil for unpredictable ones
}

func (s *seeds) next() uint64 {
	if s.sequence == nil {
		var b [8]byte
		_, _ = crand.Read(b[:]) // never fails
		return binary.LittleEndian.Uint64(b[:])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sequence.Uint64()
}

// update is news of one choice.
type update struct {
	choice *choice
	result wire.Result
	err    error
}

// run submits all choices and calls emit after each result taken in, from this goroutine; more says that
// another result waits already. It returns when every choice has ended or at the first error, with no
// request left upstream.
func (s *Server) run(ctx context.Context, a *answer, emit func(c *choice, more bool) error) error {
	ctx, cancel := context.WithCancel(ctx)
	updates := make(chan update, len(a.choices))
	var pumps sync.WaitGroup
	defer pumps.Wait()
	defer cancel()
	for _, c := range a.choices {
		var upstream context.Context
		upstream, c.cancel = context.WithCancel(ctx)
		defer c.cancel()
		pumps.Go(func() { s.pump(upstream, c, updates) })
	}
	observe := s.metrics.observeRun(a)
	defer observe.end()
	renew, stop := s.renewals(a)
	defer stop()
	for running := len(a.choices); running > 0; {
		var u update
		select {
		case u = <-updates:
		case <-renew:
			a.renew()
			continue
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		c := u.choice
		if c.finish != "" {
			continue // what was under way when a stop string ended it
		}
		if u.err != nil {
			return u.err
		}
		before := c.generated
		if err := c.apply(&u.result, a.tok); err != nil {
			return err
		}
		observe.result(c, c.generated-before)
		if c.finish != "" {
			running--
			c.cancel()
		}
		if err := emit(c, len(updates) > 0); err != nil {
			return err
		}
	}
	return nil
}

var errCutShort = errors.New("the backend's stream ended before the request did")

// pump forwards one choice's results until it has ended or ctx has.
func (s *Server) pump(ctx context.Context, c *choice, updates chan<- update) {
	send := func(u update) bool {
		u.choice = c
		select {
		case updates <- u:
			return u.err == nil && u.result.Finish == ""
		case <-ctx.Done():
			return false
		}
	}
	ctx, span := s.cfg.Tracer.Start(ctx, "generate", false, attribute.Int("baton.choice", c.index))
	defer func() {
		span.Note(attribute.Int("baton.prompt_tokens", len(c.prompt.ids)))
		span.End(nil)
	}()
	stream, err := s.submit(ctx, c)
	if err != nil {
		span.End(err)
		send(update{err: err})
		return
	}
	defer c.settleStream(stream)
	for {
		result, err := stream.Next(ctx)
		if errors.Is(err, io.EOF) {
			err = errCutShort
		}
		if !send(update{result: result, err: err}) {
			return
		}
	}
}

// blame names the field of the client's own request that a backend's refusal is about.
func (g *generation) blame(err error) error {
	var e *RequestError
	if !errors.As(err, &e) {
		return err
	}
	field := e.Field
	switch {
	case g.chat && field == "prompt":
		field = "messages"
	case field == "max_tokens":
		field = g.limitField
	}
	if field == e.Field {
		return err
	}
	renamed := *e
	renamed.Field = field
	return &renamed
}

// usage counts tokens as OpenAI does: each prompt once, however many choices it has.
type usage struct {
	prompt, cached, completion int
}

func (a *answer) usage() usage {
	var u usage
	for i, c := range a.choices {
		if i%a.n == 0 {
			u.prompt += len(c.prompt.ids)
			u.cached += leastCached(a.choices[i : i+a.n])
		}
		u.completion += c.generated
	}
	return u
}

// leastCached is what one prompt's choices all found in a cache. Choices that have not started say
// nothing.
func leastCached(choices []*choice) int {
	least := -1
	for _, c := range choices {
		if c.started && (least < 0 || c.cached < least) {
			least = c.cached
		}
	}
	return max(least, 0)
}
