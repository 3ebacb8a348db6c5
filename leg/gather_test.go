package leg

import (
	"context"
	"errors"
	"testing"
	"time"

	"baton/wire"
)

func TestBatchBlocks(t *testing.T) {
	for _, c := range []struct {
		b    Batch
		want int
	}{
		{Batch{Prompts: []int{1}, Choices: 1}, 1},
		{Batch{Prompts: []int{32}, Choices: 1}, 1},
		{Batch{Prompts: []int{33}, Choices: 1}, 2},
		{Batch{Prompts: []int{32}, Choices: 4}, 4}, // the last token is computed for each, in a block of its own
		{Batch{Prompts: []int{100}, Choices: 4}, 3 + 4},
		{Batch{Prompts: []int{100}, Choices: 4, Apart: true}, 4 * 4},
		{Batch{Prompts: []int{100, 10}, Choices: 2}, 3 + 2 + 2},
	} {
		if got := c.b.blocks(32); got != c.want {
			t.Errorf("%+v: %d blocks, want %d", c.b, got, c.want)
		}
	}
}

// Clients that each want more than half of an engine's memory before they take anything come to their end one after the
// other, whatever the order of their legs, and leave nothing.
func TestBatchesDoNotWaitForEachOther(t *testing.T) {
	p := start(t, wire.RolePrefill, func(o *options) {
		o.engine.KVBytes, o.engine.ExportLease = 32*blockBytes, time.Minute
	})
	ended := make(chan error, 4)
	for i := range cap(ended) {
		prompts := []wire.Tokens{prompt(200, uint64(i)), prompt(300, uint64(100+i))} // 7 and 10 blocks, and two more for the third and second choices
		go func() { ended <- p.gatherAll(t.Context(), prompts, 3) }()
	}
	for range cap(ended) {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	p.await(t, "the exports to end", func() bool { s := p.Stats(); return s.Exports+s.Requests == 0 })
	if s := p.Stats(); s.Exported != 4*6 || s.Released != 4*6 {
		t.Errorf("%+v", s)
	}
	var refused *RequestError
	if _, _, err := p.Gather(t.Context(), Batch{Group: -1, Prompts: []int{500, 500}, Choices: 2}); !errors.As(err, &refused) || refused.Code != wire.CodeInvalid || refused.Field != "n" {
		t.Errorf("more than there is: %v", err)
	}
	if _, _, err := p.Gather(t.Context(), Batch{Group: 3, Prompts: []int{5}, Choices: 2}); !errors.As(err, &refused) || refused.Field != "disaggregated_params.ctx_dp_rank" {
		t.Errorf("no such group: %v", err)
	}
	// Who leaves while it waits holds nothing up.
	_, done, err := p.Gather(t.Context(), Batch{Group: -1, Prompts: []int{900}, Choices: 2})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errGone)
	if _, _, err := p.Gather(ctx, Batch{Group: -1, Prompts: []int{900}, Choices: 2}); !errors.Is(err, errGone) {
		t.Error(err)
	}
	done()
	_, done, err = p.Gather(t.Context(), Batch{Group: -1, Prompts: []int{900}, Choices: 2})
	if err != nil {
		t.Fatal(err)
	}
	done()
}

var errGone = errors.New("gone")

// gatherAll runs a batch and gives all up once it has everything.
func (p *process) gatherAll(ctx context.Context, prompts []wire.Tokens, n int) error {
	b := Batch{Group: -1, Choices: n}
	for _, ids := range prompts {
		b.Prompts = append(b.Prompts, len(ids))
	}
	group, done, err := p.Gather(ctx, b)
	if err != nil {
		return err
	}
	defer done()
	for i, ids := range prompts { // the next is submitted when the last has all it needs: no order could be worse
		var streams []*Stream
		for c := range n {
			s, err := p.Submit(ctx, Job{Kind: Context, Group: group, Request: &wire.SubmitRequest{
				Prompt: ids, Sampling: wire.Sampling{Temperature: 1, Seed: uint64(i), Choice: c, MaxTokens: 9, IgnoreEOS: true},
			}})
			if err != nil {
				return err
			}
			defer s.Close()
			streams = append(streams, s)
		}
		for _, s := range streams {
			if _, err := s.Next(ctx); err != nil {
				return err
			}
			if s.Left().State == nil {
				return errors.New("a leg left nothing")
			}
			s.Renew()
		}
	}
	return nil
}
