package leg

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/semaphore"

	"baton/wire"
)

// Batch is several context legs of one client, who gets what they leave when all have ended: until then each of them
// holds its KV. Two such clients that each hold half of an engine's memory would wait for each other, so every batch
// has all that it needs set aside before it begins.
type Batch struct {
	Group   int // as a Job's
	Session string
	Prompts []int // their tokens
	Choices int   // of each prompt
	// Apart says that the choices of a prompt share no blocks: log-probabilities of it are asked for, so each computes it.
	Apart bool
}

// blocks is the most KV blocks that a batch holds at once. The choices of a prompt share what is complete before its last
// token.
func (b *Batch) blocks(size int) (n int) {
	for _, tokens := range b.Prompts {
		shared := max(tokens-1, 0) / size
		if b.Apart {
			n += b.Choices * (shared + 1)
		} else {
			n += shared + b.Choices
		}
	}
	return n
}

// Gather waits until an engine has room for a batch beside the others, and returns the data-parallel group for all of its
// jobs. The room is the batch's until done is called, once the client has what it left. A refusal is a *RequestError.
func (s *Server) Gather(ctx context.Context, b Batch) (group int, done func(), err error) {
	room, group, need, err := s.room(&b)
	if err != nil {
		return 0, nil, err
	}
	if err := room.Acquire(ctx, need); err != nil {
		return 0, nil, context.Cause(ctx)
	}
	return group, func() { room.Release(need) }, nil
}

// Release gives up what a context leg left, before anybody reads it. Digest is that of the state's bytes. What is not there,
// or not as the state says, is left alone.
func (s *Server) Release(state *wire.KVState, digest [32]byte) { s.step(Release{state, digest}) }

// Lease is how long what a context leg left waits for its reader; 0 is for ever.
func (s *Server) Lease() time.Duration { return s.cfg.Core.Lease }

// rooms are the KV blocks of engines, for batches, by data-parallel group.
type rooms map[int]*semaphore.Weighted

// room finds the engine for a batch, and what it takes of it.
func (s *Server) room(b *Batch) (room *semaphore.Weighted, group int, need int64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, 0, 0, ErrClosed
	}
	g, refused := s.core.choose(&Job{Kind: Context, Group: b.Group, Request: &wire.SubmitRequest{Session: b.Session}})
	if refused != nil {
		return nil, 0, 0, refused
	}
	blocks := g.reg.Blocks
	n := b.blocks(max(g.reg.Geometry.BlockSize, 1))
	if n > blocks {
		return nil, 0, 0, &RequestError{
			Code: wire.CodeInvalid, Field: "n",
			Message: fmt.Sprintf("the answers to this request need %d KV blocks on a prefill engine that has %d; ask for fewer of them a request, by n or the number of prompts", n, blocks),
		}
	}
	if s.rooms == nil {
		s.rooms = make(rooms)
	}
	if s.rooms[g.number] == nil {
		s.rooms[g.number] = semaphore.NewWeighted(int64(blocks))
	}
	return s.rooms[g.number], g.number, int64(n), nil
}
