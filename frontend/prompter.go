package frontend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"baton/text"
	"baton/wire"
)

// Transcriber is a Tokenizer for which a turn of a conversation costs as much as is new in it.
type Transcriber interface {
	Tokenizer
	// Transcribe is RenderChat that goes on from an earlier turn, if the chat does and prev is not nil, and puts what
	// the model sampled in its place (see text.Tokenizer.Transcribe).
	Transcribe(ctx context.Context, prev *text.Script, chat *Chat, p text.Prefix) (*text.Script, text.Reuse, error)
}

// Prompter makes the prompts of chat requests: it renders and encodes them, and remembers conversations, so that a turn
// costs as much as is new in it. It is safe for concurrent use.
type Prompter struct {
	tok           Tokenizer
	known         bool // there is a tokenizer
	limits        *Limits
	conversations *conversations // nil if nothing is remembered
	shadowRate    float64
	metrics       *promptMetrics
	log           *slog.Logger
}

// PrompterConfig is what of a Config matters to prompts.
type PrompterConfig struct {
	// Tokenizer is the model's.
	Tokenizer     Tokenizer
	Limits        Limits
	Conversations ConversationLimits
	ShadowRate    float64
	Logger        *slog.Logger
	Registry      *prometheus.Registry
}

// NewPrompter makes a Prompter for a program that is no Server.
func NewPrompter(c PrompterConfig) (*Prompter, error) {
	if c.Tokenizer == nil {
		return nil, errors.New("frontend: PrompterConfig.Tokenizer is missing")
	}
	c.Limits.setDefaults()
	c.Conversations.setDefaults()
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Registry == nil {
		c.Registry = prometheus.NewRegistry()
	}
	return newPrompter(c.Tokenizer, true, &c.Limits, c)
}

func newPrompter(tok Tokenizer, known bool, limits *Limits, c PrompterConfig) (*Prompter, error) {
	p := &Prompter{tok: tok, known: known, limits: limits, shadowRate: c.ShadowRate, log: c.Logger}
	var err error
	if p.metrics, err = newPromptMetrics(c.Registry); err != nil {
		return nil, fmt.Errorf("frontend: registering metrics: %w", err)
	}
	if _, ok := tok.(Transcriber); ok {
		p.conversations = newConversations(c.Conversations, p.metrics)
	}
	return p, nil
}

// Prompt gives the ids of a chat request's prompt. body is that of a POST /v1/chat/completions; conversation is the
// conversation's id where the body names none. Its errors are the client's fault, or ctx's.
func (p *Prompter) Prompt(ctx context.Context, body []byte, conversation string) ([]int32, error) {
	r, k, err := p.read(body)
	if err != nil {
		return nil, err
	}
	if r.session == "" {
		r.session = conversation
	}
	prompt, err := p.converse(ctx, &r.chat, &k, scope{r.session, r.salt})
	return prompt.ids, err
}

// read reads a body but for the messages that are known. If there are any, nothing of what it gives refers to the body.
func (p *Prompter) read(body []byte) (*chatRequest, known, error) {
	k := p.conversations.recall(body)
	req, err := parseChat(k.body, p.limits, p.known, &k)
	if err == nil && k.settle(body, &req.chat) {
		return req, k, nil
	}
	if len(k.turns) > 0 { // it is something else that is known, or an error to be told with its place in the whole
		req, err = parseChat(body, p.limits, p.known, nil)
	}
	return req, known{}, err
}

// prompted is a conversation's prompt.
type prompted struct {
	ids  []int32
	turn *turn // nil if it is not remembered
}

// converse renders and encodes a chat, from what is known of it, and remembers it.
func (p *Prompter) converse(ctx context.Context, c *Chat, k *known, who scope) (prompted, error) {
	tok, ok := p.tok.(Transcriber)
	if !ok || p.conversations == nil {
		ids, err := p.render(ctx, c)
		return prompted{ids: ids}, err
	}
	prev, own := p.pick(k, c, who)
	prefix, carried := p.prefix(prev, own, c, who)
	var from *text.Script
	if prev != nil {
		from = prev.script
	}
	script, reuse, err := tok.Transcribe(ctx, from, c, prefix)
	if why := dropped(carried, own, script, reuse, err); why != "" {
		p.metrics.splices.WithLabelValues(why).Inc()
		prefix = text.Prefix{}
		script, reuse, err = tok.Transcribe(ctx, from, c, prefix)
	}
	if err == nil {
		script, err = p.shadow(ctx, tok, c, prefix, script, &reuse)
	}
	if err != nil {
		return prompted{}, chatFault(ctx, err)
	}
	p.countTurn(reuse, prefix, prev, who)
	if reuse.Reason == text.Continued {
		return prompted{ids: script.IDs()}, nil
	}
	if prev != nil && prev.script == script && prev.scope == who {
		p.conversations.use(prev)
		return prompted{script.IDs(), prev}, nil
	}
	t := &turn{scope: who, script: script, prefix: len(prefix.IDs), message: prefix.Message, carried: carried}
	if t.written = c.written; t.written == nil {
		t.written = t.written.and(c.raw)
	}
	if k.keys == nil {
		k.keys = chain(c.raw)
	}
	t.key = lastKey(k.keys, t.written.end)
	t.list = c.listIn(t.written, script.IDs())
	p.conversations.put(t, prev)
	return prompted{script.IDs(), t}, nil
}

// pick chooses among turns that begin alike: one of the same conversation, one whose answer comes back (which own is
// then), the latest.
func (p *Prompter) pick(k *known, c *Chat, who scope) (best *turn, own *said) {
	points := -1
	for _, t := range k.turns {
		n := 0
		var a *said
		if t.scope == who {
			n = 1
			if a = p.conversations.answer(t, c.next); a != nil {
				n = 2
			}
		}
		if n > points {
			best, own, points = t, a, n
		}
	}
	return best, own
}

// prefix is what the ids of a chat must begin with: what came with its messages now or earlier (carried), or else own,
// which was answered to prev and comes back, or what was earlier.
func (p *Prompter) prefix(prev *turn, own *said, c *Chat, who scope) (first text.Prefix, carried bool) {
	switch {
	case len(c.prefix.IDs) > 0:
		return c.prefix, true
	case prev == nil || prev.scope != who:
		return first, false
	case own != nil:
		return text.Prefix{IDs: slices.Concat(prev.script.IDs()[:own.begin], own.ids), Message: prev.script.Len()}, false
	}
	return text.Prefix{IDs: prev.script.IDs()[:prev.prefix], Message: prev.message}, prev.carried
}

// dropped says why remembered ids are not what the prompt should begin with after all; "" if they are, or were carried by
// the client, who knows.
func dropped(carried bool, own *said, script *text.Script, reuse text.Reuse, err error) string {
	switch {
	case carried:
		return ""
	case errors.As(err, new(*text.PrefixError)):
		return spliceRefused
	case err != nil:
		return ""
	case reuse.Spliced && (reuse.Reason == text.OtherTools || reuse.Reason == text.OtherOptions || reuse.Reason == text.Edited):
		return spliceStale
	case reuse.Spliced && own != nil && !shows(script, own):
		return spliceThoughts
	}
	return ""
}

// shows reports whether a conversation shows the thoughts of an answer. A template that leaves them out means it.
func shows(script *text.Script, a *said) bool {
	thought := strings.TrimSpace(a.reasoning)
	return thought == "" || strings.Contains(script.Text(), thought)
}

// Outcomes of splices.
const (
	spliceSampled  = "sampled"  // the prompt has the sampled ids, which are not what its text would be encoded to
	spliceSame     = "same"     // they are
	spliceThoughts = "thoughts" // dropped: the template does not show what the model thought
	spliceRefused  = "no_end"   // dropped: the template does not tell where the answer ends
	spliceStale    = "stale"    // dropped: what was before the answer is something else now
)

func (p *Prompter) countTurn(reuse text.Reuse, prefix text.Prefix, prev *turn, who scope) {
	reason := reuse.Reason
	if reason == text.Fresh && p.conversations.latest(who) != nil {
		reason = text.Edited
	}
	p.metrics.rendered.WithLabelValues(string(reason)).Inc()
	p.metrics.keptTokens.Add(float64(reuse.IDs))
	switch {
	case len(prefix.IDs) == 0 || prev != nil && len(prefix.IDs) <= prev.prefix:
	case reuse.Spliced:
		p.metrics.splices.WithLabelValues(spliceSampled).Inc()
	default:
		p.metrics.splices.WithLabelValues(spliceSame).Inc()
	}
}

// remember keeps what a choice says, for the turn that follows.
func (p *Prompter) remember(c *choice) {
	t := c.g.turn
	if t == nil || len(c.g.prompts) != 1 || c.g.n != 1 || c.stopString != "" || !c.complete {
		return
	}
	a := said{content: string(c.kept.content), reasoning: string(c.kept.reasoning), calls: c.kept.calls, ids: c.kept.ids}
	switch c.finish {
	case wire.FinishStop, finishToolCalls:
		if n := len(a.ids); n > 0 && c.ended {
			a.ids = a.ids[:n-1]
		}
	case wire.FinishLength:
	default:
		return
	}
	a.begin, a.ids = len(t.script.IDs()), slices.Clip(a.ids)
	if o := c.g.opened; o != nil {
		a.begin, a.ids = o.Kept, slices.Concat(o.IDs[o.Kept:], a.ids)
	}
	p.conversations.answered(t, &a)
}
