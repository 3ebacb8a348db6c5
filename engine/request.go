package engine

import (
	"fmt"
	"slices"
	"time"

	"baton/kvcache"
	"baton/wire"
)

// request is one sequence that the scheduler works on.
type request struct {
	id       uint64
	sampling wire.Sampling
	session  string
	version  uint64 // of the weights its KV is made under
	root     kvcache.Digest
	digests  []kvcache.Digest // of the complete blocks of tokens at submission
	handoff  bool             // stop after the first token and export

	tokens    []int32 // prompt, then generated
	prompt    int     // how many of tokens are the prompt
	limit     int     // how many may be generated in all
	ends      []int32 // ids that end the request: stop ids, and EOS unless ignored
	cached    int     // prompt tokens that needed no computing
	computed  int     // tokens whose KV is written
	reported  int     // generated tokens already sent
	table     *kvcache.Table
	decoding  bool // all tokens but the last one have their KV
	inPass    bool // part of the pass under way
	aborted   bool // to be dropped when the pass ends
	silent    bool // and nobody is told
	announced bool // the once-only fields of Result were sent
	overtaken int  // how many later ones began before it

	// Of tokens not reported yet, in order.
	logprobs []float32
	top      []wire.TokenLogprobs
	// Of the prompt, when asked for.
	promptLogprobs []float32
	promptTop      []wire.TokenLogprobs

	arrived, started, first time.Time
	stats                   wire.Stats
}

// generated counts the tokens that follow the prompt.
func (r *request) generated() int { return len(r.tokens) - r.prompt }

// capacity is how many tokens' KV the request can ever need. The last generated token needs none.
func (r *request) capacity() int {
	if r.handoff {
		return len(r.tokens)
	}
	return max(r.prompt+r.limit-1, len(r.tokens))
}

// wantsPrompt reports whether the log-probabilities of the prompt are still to be told.
func (r *request) wantsPrompt() bool { return r.sampling.PromptLogprobs && !r.announced }

// banned are the ids that may not be chosen yet.
func (r *request) banned() []int32 {
	if r.generated() < r.sampling.MinTokens {
		return r.ends
	}
	return nil
}

// accept appends a sampled token and says whether it ends the request.
func (r *request) accept(out Output) (finish string) {
	r.tokens = append(r.tokens, out.Token)
	if r.sampling.Logprobs {
		r.logprobs = append(r.logprobs, out.Logprob)
		r.top = append(r.top, out.Top)
	}
	switch {
	case slices.Contains(r.ends, out.Token) && r.generated() >= r.sampling.MinTokens:
		return wire.FinishStop
	case r.generated() >= r.limit:
		return wire.FinishLength
	}
	return ""
}

// report takes what was not sent yet.
func (r *request) report(finish string) wire.Result {
	res := wire.Result{
		ID: r.id, Start: r.reported, Finish: finish, StopToken: -1,
		Tokens:   slices.Clone(r.tokens[r.prompt+r.reported:]),
		Logprobs: r.logprobs, Top: r.top,
	}
	if finish == wire.FinishStop {
		res.StopToken = r.tokens[len(r.tokens)-1]
	}
	if !r.announced {
		r.announced = true
		res.PromptTokens, res.CachedTokens = r.prompt, min(r.prompt, r.cached)
		res.PromptLogprobs, res.PromptTop = r.promptLogprobs, r.promptTop
	}
	r.reported = r.generated()
	r.logprobs, r.top = nil, nil
	return res
}

// limits are what an engine can hold; they decide whether a request can ever run.
type limits struct {
	maxSeqLen  int
	vocabulary int
	blockSize  int
	blocks     int
	eos        []int32
}

// refusal is an admission error: it names the field and never goes away by waiting.
func refusal(id uint64, field, format string, args ...any) *wire.RequestError {
	return &wire.RequestError{
		ID: id, Code: wire.CodeInvalid, Field: field, SourceSafe: true,
		Message: fmt.Sprintf(format, args...),
	}
}

// leastTemperature is the smallest that is more than greedy: dividing logits by less could overflow, and
// would leave all the probability with the likeliest token anyway.
const leastTemperature = 1e-5

// newRequest checks a submission against the engine's limits, in the order a caller can fix things.
func newRequest(sub *wire.SubmitRequest, l limits, now time.Time) (*request, *wire.RequestError) {
	p := sub.Sampling
	if p.Temperature < leastTemperature {
		p.Temperature = 0
	}
	tokens := slices.Concat(sub.Prompt, sub.Resume)
	if len(sub.Prompt) == 0 {
		return nil, refusal(sub.ID, "prompt", "the prompt is empty; at least one token is needed")
	}
	for i, id := range tokens {
		if id < 0 || int(id) >= l.vocabulary {
			return nil, refusal(sub.ID, "prompt", "token id %d at position %d is outside the vocabulary of %d", id, i, l.vocabulary)
		}
	}
	for _, id := range p.StopTokenIDs {
		if id < 0 || int(id) >= l.vocabulary {
			return nil, refusal(sub.ID, "stop_token_ids", "token id %d is outside the vocabulary of %d", id, l.vocabulary)
		}
	}
	room := l.maxSeqLen - len(sub.Prompt)
	if room <= 0 {
		return nil, refusal(sub.ID, "prompt", "the prompt has %d tokens and the context length is %d: no room is left to generate", len(sub.Prompt), l.maxSeqLen)
	}
	if p.MaxTokens < 0 || p.MinTokens < 0 {
		return nil, refusal(sub.ID, "max_tokens", "max_tokens and min_tokens must not be negative, got %d and %d", p.MaxTokens, p.MinTokens)
	}
	limit := room
	if p.MaxTokens > 0 {
		limit = min(room, p.MaxTokens)
	}
	if p.MinTokens > limit {
		return nil, refusal(sub.ID, "min_tokens", "at least %d tokens are asked for and at most %d are allowed", p.MinTokens, limit)
	}
	if len(sub.Resume) >= limit {
		return nil, refusal(sub.ID, "resume", "%d tokens were generated already and at most %d are allowed", len(sub.Resume), limit)
	}
	r := &request{
		id: sub.ID, sampling: p, session: sub.Session, handoff: sub.Handoff,
		root:   kvcache.Root(sub.Salt, ""),
		tokens: tokens, prompt: len(sub.Prompt), limit: limit, reported: len(sub.Resume),
		ends:    slices.Clone(p.StopTokenIDs),
		arrived: now,
	}
	r.digests = kvcache.Chain(r.root, l.blockSize, r.tokens)
	if !p.IgnoreEOS {
		r.ends = append(r.ends, l.eos...)
	}
	if need := (r.capacity() + l.blockSize - 1) / l.blockSize; need > l.blocks {
		return nil, refusal(sub.ID, "max_tokens",
			"%d prompt tokens and up to %d generated ones need %d KV blocks of %d tokens, but the engine has %d; ask for fewer tokens or raise --kv-memory",
			r.prompt, r.limit, need, l.blockSize, l.blocks)
	}
	return r, nil
}
