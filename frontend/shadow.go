package frontend

import (
	"context"
	"math/rand/v2"
	"slices"

	"baton/text"
)

// Outcomes of shadow checks.
const (
	shadowSame   = "same"
	shadowDiffer = "mismatch"
	shadowFailed = "failed"
)

// shadow makes some prompts a second time, from nothing, and compares. On a mismatch the second counts.
func (p *Prompter) shadow(ctx context.Context, tok Transcriber, c *Chat, prefix text.Prefix, script *text.Script, reuse *text.Reuse) (*text.Script, error) {
	if reuse.Reason != text.Extended || p.shadowRate == 0 || rand.Float64() >= p.shadowRate {
		return script, nil
	}
	whole, again, err := tok.Transcribe(ctx, nil, c, prefix)
	if err != nil {
		p.metrics.shadows.WithLabelValues(shadowFailed).Inc()
		return nil, err
	}
	if whole.Text() == script.Text() && slices.Equal(whole.IDs(), script.IDs()) {
		p.metrics.shadows.WithLabelValues(shadowSame).Inc()
		return script, nil
	}
	p.metrics.shadows.WithLabelValues(shadowDiffer).Inc()
	p.log.Error("a prompt that goes on from an earlier turn is not what it is as a whole: the chat template shows old messages in another way than was found out; "+
		"report it, and serve with --conversations 0 until then",
		"messages", script.Len(), "ids", len(script.IDs()), "ids_of_the_whole", len(whole.IDs()), "first_difference", firstDifference(script.IDs(), whole.IDs()))
	*reuse = again
	return whole, nil
}

// firstDifference is the place where two lists part.
func firstDifference(a, b []int32) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}
