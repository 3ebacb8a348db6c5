package frontend

import (
	"context"
	"fmt"
	"sync/atomic"
	"unicode/utf8"

	"baton/leg"
	"baton/text"
	"baton/wire"
)

// generation is a checked request, ready to run: n choices of each prompt.
type generation struct {
	*params
	chat    bool // the answer has the shape of /v1/chat/completions
	prompts []prompt
	output  *text.OutputOptions // chat: how its answers are read; nil leaves them as they are
	single  bool                // completions: prompt was not a list of prompts
	echo    bool                // completions: the answer begins with the prompt
	turn    *turn               // chat: what its answer is remembered with; nil for nothing
	opened  *text.Opened        // chat: the prompt, where it ends with the beginning of a call; otherwise nil
	oneCall bool                // chat: the client knows which function is called
}

// choice makes one answer out of one stream of results. It collects text, ids and logprobs until they
// are sent; a stream sends them after each result, a whole answer once.
type choice struct {
	g      *generation
	index  int // prompt number × n + number of the choice
	prompt *prompt
	seed   uint64
	cancel context.CancelFunc // ends the request upstream

	detok     Detokenizer
	matcher   *text.StopMatcher  // nil without stop strings
	parser    *text.OutputParser // nil if all is content
	offset    int                // code points that the detokenizer has completed
	received  int                // tokens that have come
	generated int                // those that count: not what follows a stop string

	started    bool // its first result was taken in
	announced  bool // something of it was sent
	complete   bool // its last result was taken in
	cached     int  // prompt tokens that were not computed
	stats      []wire.Stats
	called     bool   // it has tool calls
	finish     string // empty while it runs
	stopToken  int32  // the request's own stop id that ended it, -1 otherwise
	stopString string // or the stop string
	ended      bool   // a token of it that is not shown did
	kept       kept   // what is to be remembered

	held    atomic.Pointer[leg.Stream] // of a context leg that is done, until the answer has gone out
	sampled wire.Result                // what it ended with
	left    leg.Left                   // and what it leaves

	promptLogprobs []tokenLogprob // in order of the prompt, the first without a value
	pending        piece
}

// piece is what a choice has produced and not sent yet.
type piece struct {
	text      []byte // content, when there is more than that
	reasoning []byte
	calls     []text.ToolCall
	ids       []int32
	logprobs  []tokenLogprob
}

// tokenLogprob is the log-probability of one token and of the likeliest ones in its place.
type tokenLogprob struct {
	id      int32
	offset  int  // where its text begins
	missing bool // the first token of a prompt has no value
	logprob float32
	top     wire.TokenLogprobs
}

func newChoice(g *generation, tok Tokenizer, format text.OutputFormat, index int, seed uint64) *choice {
	c := &choice{
		g:         g,
		index:     index,
		prompt:    &g.prompts[index/g.n],
		seed:      seed,
		stopToken: -1,
	}
	if g.output != nil {
		c.parser = format.NewParser(*g.output)
		c.detok = tok.NewDetokenizer(g.skipSpecial, c.parser.Tags()...)
	} else {
		c.detok = tok.NewDetokenizer(g.skipSpecial)
	}
	if len(g.stop) > 0 {
		c.matcher = text.NewStopMatcher(g.stop)
	}
	if g.echo {
		c.pending.text = append(c.pending.text, c.prompt.text...)
	}
	return c
}

// request is what the backend is asked for.
func (c *choice) request(trace string) *wire.SubmitRequest {
	sampling := c.g.sampling
	sampling.Seed = c.seed
	sampling.Choice = c.index % c.g.n
	// A backend cannot be asked for no token at all; the one it makes is dropped.
	sampling.MaxTokens = max(c.g.maxTokens, 0)
	if c.g.maxTokens == 0 {
		sampling.MaxTokens = 1
		sampling.MinTokens = 0
	}
	return &wire.SubmitRequest{Prompt: c.prompt.ids, Sampling: sampling, Session: c.g.session, Salt: c.g.salt, Trace: trace}
}

// apply takes one result in. It fails if the backend lost or repeated tokens on the way.
func (c *choice) apply(res *wire.Result, tok Tokenizer) error {
	if res.Start != c.received {
		return fmt.Errorf("choice %d: a result starts at token %d, but %d have come", c.index, res.Start, c.received)
	}
	c.received += len(res.Tokens)
	if !c.started {
		c.started = true
		c.cached = res.CachedTokens
		c.takePrompt(res, tok)
	}
	if res.Stats != nil {
		c.stats = append(c.stats, *res.Stats)
	}
	c.complete = res.Finish != ""
	if c.g.isLeg(leg.Context) {
		c.sampled = *res
	}
	for i := range res.Tokens {
		if c.finish != "" || c.g.maxTokens == 0 {
			break
		}
		c.token(res, i)
	}
	if c.finish == "" && res.Finish != "" {
		c.end(res)
	}
	return nil
}

// takePrompt keeps the prompt's log-probabilities.
func (c *choice) takePrompt(res *wire.Result, tok Tokenizer) {
	if !c.g.sampling.PromptLogprobs {
		if c.g.echo {
			c.offset = utf8.RuneCountInString(c.prompt.text)
		}
		return
	}
	detok := tok.NewDetokenizer(c.g.skipSpecial)
	c.promptLogprobs = make([]tokenLogprob, len(c.prompt.ids))
	for i, id := range c.prompt.ids {
		t := tokenLogprob{id: id, offset: c.offset, missing: i == 0 || i > len(res.PromptLogprobs)}
		if !t.missing {
			t.logprob = res.PromptLogprobs[i-1]
			if i <= len(res.PromptTop) {
				t.top = res.PromptTop[i-1]
			}
		}
		c.promptLogprobs[i] = t
		if c.g.echo {
			c.offset += utf8.RuneCountInString(detok.Push(id))
		}
	}
	if c.g.echo {
		c.offset = utf8.RuneCountInString(c.prompt.text)
		if c.g.sampling.Logprobs {
			c.pending.logprobs = append(c.pending.logprobs, c.promptLogprobs...)
		}
	}
}

// token takes token i of a result in.
func (c *choice) token(res *wire.Result, i int) {
	id := res.Tokens[i]
	c.generated++
	if c.g.returnTokenIDs {
		c.pending.ids = append(c.pending.ids, id)
	}
	if c.g.turn != nil {
		c.kept.ids = append(c.kept.ids, id)
	}
	if c.g.sampling.Logprobs && i < len(res.Logprobs) {
		t := tokenLogprob{id: id, offset: c.offset, logprob: res.Logprobs[i]}
		if i < len(res.Top) {
			t.top = res.Top[i]
		}
		c.pending.logprobs = append(c.pending.logprobs, t)
	}
	ends := res.Finish == wire.FinishStop && i == len(res.Tokens)-1 && id == res.StopToken
	c.ended = c.ended || ends
	if !ends || c.g.includeStop {
		c.show(c.detok.Push(id))
	}
}

// show takes text in, unless a stop string ends it.
func (c *choice) show(s string) {
	if !c.g.chat && c.g.sampling.Logprobs {
		c.offset += utf8.RuneCountInString(s)
	}
	if c.matcher == nil || c.generated <= c.g.sampling.MinTokens {
		c.add(s)
		return
	}
	s, stopped, which := c.matcher.Push(s)
	c.add(s)
	if stopped {
		c.stopString = c.g.stop[which]
		if c.g.includeStop {
			c.add(c.stopString)
		}
		c.settle(wire.FinishStop)
	}
}

// add takes text in that no stop string ends.
func (c *choice) add(s string) {
	if c.parser != nil {
		c.sort(c.parser.Push(s))
		return
	}
	c.pending.text = append(c.pending.text, s...)
	c.keep(&c.kept.content, s)
}

// kept is what was answered so far.
type kept struct {
	content, reasoning []byte
	calls              []text.ToolCall
	ids                []int32
}

// keep adds to what is to be remembered.
func (c *choice) keep(to *[]byte, s string) {
	if c.g.turn != nil {
		*to = append(*to, s...)
	}
}

// sort keeps what the parser has decided.
func (c *choice) sort(deltas []text.Delta) {
	for i := range deltas {
		switch d := &deltas[i]; d.Kind {
		case text.DeltaReasoning:
			c.pending.reasoning = append(c.pending.reasoning, d.Text...)
			c.keep(&c.kept.reasoning, d.Text)
		case text.DeltaToolCall:
			c.pending.calls = append(c.pending.calls, d.Call)
			if c.g.turn != nil {
				c.kept.calls = append(c.kept.calls, d.Call)
			}
			c.called = true
		default:
			c.pending.text = append(c.pending.text, d.Text...)
			c.keep(&c.kept.content, d.Text)
		}
	}
}

// finishToolCalls is the finish reason of a chat answer that has calls and was not cut off, unless tool_choice named the
// function: then it is stop, as with OpenAI and vLLM.
const finishToolCalls = "tool_calls"

// settle ends the text and says why.
func (c *choice) settle(finish string) {
	c.finish = finish
	if c.parser == nil {
		return
	}
	c.sort(c.parser.Flush())
	if c.called && finish == wire.FinishStop && !c.g.oneCall {
		c.finish = finishToolCalls
	}
}

// end settles how the choice ended and shows what was held back.
func (c *choice) end(res *wire.Result) {
	if c.g.maxTokens == 0 {
		c.finish = wire.FinishLength
		return
	}
	if res.Finish == leg.FinishNotFinished {
		c.finish = res.Finish // the generation leg reads these tokens again
		return
	}
	c.show(c.detok.Flush())
	if c.finish != "" {
		return // the tail completed a stop string
	}
	if c.matcher != nil {
		c.add(c.matcher.Flush())
	}
	c.settle(res.Finish)
	if res.Finish == wire.FinishStop {
		for _, id := range c.g.sampling.StopTokenIDs {
			if id == res.StopToken {
				c.stopToken = id
			}
		}
	}
}

// idle reports whether there is nothing to send.
func (c *choice) idle() bool {
	return len(c.pending.text) == 0 && len(c.pending.reasoning) == 0 && len(c.pending.calls) == 0 && len(c.pending.ids) == 0 && len(c.pending.logprobs) == 0 && c.finish == ""
}

// sent forgets what was sent and keeps the memory.
func (c *choice) sent() {
	c.announced = true
	c.pending.text = c.pending.text[:0]
	c.pending.reasoning = c.pending.reasoning[:0]
	c.pending.calls = c.pending.calls[:0]
	c.pending.ids = c.pending.ids[:0]
	c.pending.logprobs = c.pending.logprobs[:0]
}
