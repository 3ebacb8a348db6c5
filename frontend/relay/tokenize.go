package relay

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
)

// Tokenizer makes the ids of chats. It is safe for concurrent use.
type Tokenizer interface {
	// Prompt gives the ids of the prompt of a POST /v1/chat/completions. conversation is the conversation's id if the
	// body has none.
	Prompt(ctx context.Context, body []byte, conversation string) ([]int32, error)
}

// Outcomes of tokenizing here.
const (
	tokensAttached = "attached"
	tokensFailed   = "failed"
)

// Outcomes of comparing with an engine.
const (
	shadowSame   = "same"
	shadowDiffer = "mismatch"
	shadowSilent = "no_ids"
)

// tokenize makes the ids of a chat, for engines that take them. When that fails, the engine sees to it, and says what is
// wrong with the request if it is that. Of some requests the ids are not sent but compared with the engine's own.
func (x *exchange) tokenize() {
	c := &x.s.cfg
	if c.Tokenizer == nil || !x.r.chat {
		return
	}
	for _, field := range []string{"prompt_token_ids", "prompt_token_ids_b64", "disaggregated_params"} {
		if x.r.body.getSet(field) != nil {
			return
		}
	}
	if _, ok := x.s.dialect().(trtllm); !ok {
		return // it has no field for them, or is not known yet
	}
	ids, err := c.Tokenizer.Prompt(x.ctx, x.r.body.raw, x.r.conversation)
	if err != nil {
		if !errors.Is(err, context.Canceled) {
			x.s.metrics.tokenized.WithLabelValues(tokensFailed).Inc()
			x.s.log.Warn("a prompt could not be tokenized here: the engine does it", "error", err)
		}
		return
	}
	x.r.made = ids
	x.r.madeB64 = slices.Concat([]byte{'"'}, []byte(EncodeIDs(ids)), []byte{'"'})
	x.s.metrics.tokenized.WithLabelValues(tokensAttached).Inc()
}

// forcesCall reports whether engines end the prompt with the beginning of a call, which the ids that are made here lack.
func forcesCall(choice []byte) bool {
	return choice != nil && string(choice) != `"auto"` && string(choice) != `"none"`
}

// attach adds ids that were made here.
func (d trtllm) attach(t *try, e *edit) {
	if t.r.madeB64 != nil && !t.compare {
		e.put("prompt_token_ids_b64", t.r.madeB64)
	}
}

// compares decides whether a worker is sent no ids, so that its own can be compared: the first prompts after it has joined
// or made others, since a template that is not the engine's spoils all answers and shows in none; then a share of them.
func (x *exchange) compares(source *worker) bool {
	if x.r.made == nil || x.compared || forcesCall(x.r.body.getSet("tool_choice")) {
		return false
	}
	c := &x.s.cfg
	return int(source.agreed.Load()) < c.ShadowFirst || c.ShadowRate > 0 && rand.Float64() < c.ShadowRate
}

// compare looks whether an engine that was sent no ids made the same.
func (x *exchange) compare(t *try, source *worker) {
	if !t.compare {
		return
	}
	x.compared = true // another try goes the usual way
	theirs, ok := idsOf(&t.answer.top)
	switch {
	case !ok:
		x.s.metrics.shadows.WithLabelValues(shadowSilent).Inc()
		source.agreed.Add(1) // it never says
	case slices.Equal(theirs, x.r.made):
		x.s.metrics.shadows.WithLabelValues(shadowSame).Inc()
		source.agreed.Add(1)
	default:
		x.s.metrics.shadows.WithLabelValues(shadowDiffer).Inc()
		source.agreed.Store(0)
		at := 0
		for at < min(len(theirs), len(x.r.made)) && theirs[at] == x.r.made[at] {
			at++
		}
		x.s.log.Error("the engine does not make the ids of a chat that are made here, and would be sent: the relay's --model has another tokenizer or chat template than "+
			"the engine, or the engine other template arguments; relay without --frontend-tokenize until they agree",
			"worker", source.URL, "conversation", x.r.conversation, "first_difference", at, "engine_ids", len(theirs), "ids", len(x.r.made))
	}
}

// idsOf are the ids of the prompt in an answer.
func idsOf(top *object) ([]int32, bool) {
	if v := top.getSet("prompt_token_ids_b64"); v != nil {
		text, err := unquote(v)
		if err != nil {
			return nil, false
		}
		ids, err := DecodeIDs(text)
		return ids, err == nil
	}
	if v := top.getSet("prompt_token_ids"); v != nil {
		ids, err := parseIDs(flat(v))
		return ids, err == nil
	}
	return nil, false
}
