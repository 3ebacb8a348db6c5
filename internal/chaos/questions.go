//go:build unix

package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"baton/internal/rig"
)

// question is a completion and what an undisturbed server answers.
type question struct {
	number int
	body   rig.Completion
	want   rig.Answer
}

// ask makes n questions: of all lengths, every third beginning like another, half of them with log-probabilities.
// Token ids are those that the golden models have.
func ask(rng *rand.Rand, n int) []*question {
	list := make([]*question, n)
	for i := range list {
		prompt := make([]int32, 1+rng.IntN(600))
		for j := range prompt {
			prompt[j] = 3 + rng.Int32N(630)
		}
		if i%3 == 2 {
			copy(prompt, list[i-2].body.Prompt)
		}
		q := &question{number: i, body: rig.Completion{
			Model: rig.ServedModel, Prompt: prompt, MaxTokens: 20 + rng.IntN(400), Temperature: 0.8,
			Seed: rng.Uint64() >> 1, IgnoreEOS: true,
		}}
		if i%2 == 0 {
			q.body.Logprobs = new(int)
		}
		list[i] = q
	}
	return list
}

// differs tells how an answer is not what was wanted, or that it is. A stream that broke may lack the end.
func (q *question) differs(got rig.Answer, whole bool) string {
	want := q.want
	if !whole {
		n, l := len(got.IDs), len(got.Logprobs)
		if n > len(want.IDs) || l > len(want.Logprobs) || !strings.HasPrefix(want.Text, got.Text) {
			return fmt.Sprintf("%d tokens that do not begin the answer of %d", n, len(want.IDs))
		}
		want.IDs, want.Logprobs, want.Text, want.Finish = want.IDs[:n], want.Logprobs[:l], got.Text, got.Finish
	}
	for i := range min(len(got.IDs), len(want.IDs)) {
		if got.IDs[i] != want.IDs[i] {
			return fmt.Sprintf("token %d is %d, want %d", i, got.IDs[i], want.IDs[i])
		}
	}
	switch {
	case len(got.IDs) != len(want.IDs):
		return fmt.Sprintf("%d tokens, want %d", len(got.IDs), len(want.IDs))
	case got.Text != want.Text:
		return "the same tokens and another text"
	case got.Finish != want.Finish:
		return fmt.Sprintf("finish reason %q, want %q", got.Finish, want.Finish)
	}
	if !slices.Equal(got.Logprobs, want.Logprobs) {
		for i := range min(len(got.Logprobs), len(want.Logprobs)) {
			if got.Logprobs[i] != want.Logprobs[i] {
				return fmt.Sprintf("log-probability %d is %s, want %s", i, got.Logprobs[i], want.Logprobs[i])
			}
		}
		return fmt.Sprintf("%d log-probabilities, want %d", len(got.Logprobs), len(want.Logprobs))
	}
	return ""
}

// stream asks a question until it is answered, the way a careful client would: again after an error that says
// so. What it may not say is a problem.
func (d *drill) stream(ctx context.Context, q *question) {
	for attempt := 0; ctx.Err() == nil; attempt++ {
		within, cancel := context.WithTimeout(ctx, patience)
		began := time.Now()
		var first, stall time.Duration // until the first token, between tokens
		last := began
		got, err := q.body.Stream(within, d.http, d.frontend.URL, func() {
			now := time.Now()
			if first == 0 {
				first = now.Sub(began)
			} else {
				stall = max(stall, now.Sub(last))
			}
			last = now
		})
		cancel()
		ended := time.Now()
		if ctx.Err() != nil {
			return
		}
		if bad := q.differs(got, err == nil); bad != "" {
			d.problem("question %d (%d prompt tokens, attempt %d, %d tokens so far): %s", q.number, len(q.body.Prompt), attempt, len(got.IDs), bad)
			d.count(func(r *Drill) { r.Wrong++ })
			return
		}
		if err == nil {
			d.count(func(r *Drill) {
				r.Streams++
				r.Tokens += len(got.IDs)
				r.First, r.Stall = max(r.First, first), max(r.Stall, stall)
			})
			return
		}
		var refused *rig.HTTPError
		if retry := errors.As(err, &refused) && refused.Retryable(); !retry || !d.excused(began, ended) {
			d.problem("question %d (%d prompt tokens, attempt %d) after %v and %d tokens: %v", q.number, len(q.body.Prompt), attempt,
				ended.Sub(began).Round(time.Millisecond), len(got.IDs), err)
			d.count(func(r *Drill) { r.Failed++ })
			return
		}
		d.count(func(r *Drill) { r.Retries++ })
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// hangUp asks a question and leaves after a while, wherever the request may be then.
func (d *drill) hangUp(ctx context.Context, q *question, after time.Duration) {
	within, cancel := context.WithTimeout(ctx, after)
	defer cancel()
	got, err := q.body.Stream(within, d.http, d.frontend.URL, func() {})
	if bad := q.differs(got, err == nil); bad != "" && ctx.Err() == nil {
		d.problem("question %d (%d prompt tokens), hung up after %v and %d tokens: %s", q.number, len(q.body.Prompt), after, len(got.IDs), bad)
		d.count(func(r *Drill) { r.Wrong++ })
		return
	}
	d.count(func(r *Drill) { r.HangUps++ })
}

func (d *drill) count(f func(*Drill)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(d.run)
}
