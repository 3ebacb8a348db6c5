package frontend

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"hash/fnv"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"baton/wire"
)

// The toy language: 256 bytes, a few control tokens, and pieces that are awkward on purpose (parts of
// characters, overlapping beginnings of words). Its model is a hash of the prefix.
var toyPieces = []string{
	"<|end|>", "<|user|>", "<|assistant|>", "<|system|>",
	"the", " the", " cat", " sat", "sat", " on", "\n", "\n\n", "STOP", "ST", "OP", "ing", ", ", ". ", "é", "\xc3", "\xa9",
	"😀", "\xf0\x9f", "\x98\x80", "日", "本", "\xe6\x97", "\xa5", "aaa", "aab", "\"quoted\"", "\\", "\u2028", "</s",
}

const (
	toyEnd       = 256
	toyUser      = 257
	toyAssistant = 258
	toySystem    = 259
	toyWords     = 260 // the first piece that is no control token
)

var toyVocab = 256 + len(toyPieces)

type toyTokenizer struct{}

func (toyTokenizer) TokenBytes(id int32) []byte {
	switch {
	case id < 0 || int(id) >= toyVocab:
		return nil
	case id < 256:
		return []byte{byte(id)}
	}
	return []byte(toyPieces[id-256])
}

func (t toyTokenizer) encode(text string, special bool) []int32 {
	var ids []int32
	for text != "" {
		best, id := 1, int32(text[0])
		for i, p := range toyPieces {
			if (special || 256+i >= toyWords) && len(p) > best && strings.HasPrefix(text, p) {
				best, id = len(p), int32(256+i)
			}
		}
		ids = append(ids, id)
		text = text[best:]
	}
	return ids
}

func (t toyTokenizer) Encode(text string, addSpecial bool) ([]int32, error) {
	ids := t.encode(text, true)
	if addSpecial {
		ids = append([]int32{toySystem}, ids...)
	}
	return ids, nil
}

func (t toyTokenizer) RenderChat(_ context.Context, c *Chat) ([]int32, error) {
	var messages []struct{ Role, Content string }
	if err := json.Unmarshal(c.Messages, &messages); err != nil {
		return nil, err
	}
	ids := t.encode(string(c.Tools)+string(c.Documents)+string(c.Kwargs), false)
	for i, m := range messages {
		switch m.Role {
		case "user":
			ids = append(ids, toyUser)
		case "assistant":
			ids = append(ids, toyAssistant)
		case "system":
			ids = append(ids, toySystem)
		default:
			return nil, errors.New("the template knows no role " + m.Role)
		}
		ids = append(ids, t.encode(m.Content, false)...)
		if i < len(messages)-1 || !c.ContinueFinalMessage {
			ids = append(ids, toyEnd)
		}
	}
	if c.AddGenerationPrompt {
		ids = append(ids, toyAssistant)
	}
	return ids, nil
}

func (t toyTokenizer) Decode(ids []int32, skipSpecial bool) string {
	d := t.NewDetokenizer(skipSpecial)
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(d.Push(id))
	}
	return b.String() + d.Flush()
}

func (toyTokenizer) NewDetokenizer(skipSpecial bool, _ ...string) Detokenizer {
	return &toyDetokenizer{skipSpecial: skipSpecial}
}

type toyDetokenizer struct {
	skipSpecial bool
	held        []byte
}

func (d *toyDetokenizer) Push(id int32) string {
	if d.skipSpecial && id >= 256 && id < toyWords {
		return ""
	}
	d.held = append(d.held, toyTokenizer{}.TokenBytes(id)...)
	n := wholeCharacters(d.held)
	s := strings.ToValidUTF8(string(d.held[:n]), "\uFFFD")
	d.held = append(d.held[:0], d.held[n:]...)
	return s
}

func (d *toyDetokenizer) Flush() string {
	s := strings.ToValidUTF8(string(d.held), "\uFFFD")
	d.held = d.held[:0]
	return s
}

// wholeCharacters is the length of b without the beginning of a character at its end.
func wholeCharacters(b []byte) int {
	for back := 1; back <= min(3, len(b)); back++ {
		c := b[len(b)-back]
		switch {
		case c >= 0xf0 && c < 0xf8 && back < 4, c >= 0xe0 && c < 0xf0 && back < 3, c >= 0xc0 && c < 0xe0 && back < 2:
			return len(b) - back
		case c < 0x80 || c >= 0xc0:
			return len(b)
		}
	}
	return len(b)
}

// toyBackend runs the toy language: a working engine without a scheduler. Its answer depends on the
// request alone; how it is cut into results depends on chunkSeed.
type toyBackend struct {
	maxLen    int
	chunkSeed uint64
	stall     int                                           // blocks after so many tokens until the request is cancelled; 0 is never
	fail      func(req *wire.SubmitRequest, made int) error // asked before each result
	endless   bool                                          // never samples the end by itself

	mu       sync.Mutex
	status   wire.StatusReply
	active   int
	requests []*wire.SubmitRequest
	seen     map[string]bool
}

func newToyBackend() *toyBackend {
	return &toyBackend{
		maxLen: 4096,
		seen:   map[string]bool{},
		status: wire.StatusReply{Ready: true, Engines: []wire.EngineStatus{
			{Name: "prefill_0", Role: wire.RolePrefill}, {Name: "decode_0", Role: wire.RoleDecode}, {Name: "decode_1", Role: wire.RoleDecode},
		}},
	}
}

func (b *toyBackend) Status(context.Context) (*wire.StatusReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.status
	return &s, nil
}

func (b *toyBackend) submitted() []*wire.SubmitRequest {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.requests)
}

func (b *toyBackend) Submit(_ context.Context, req *wire.SubmitRequest) (Stream, error) {
	if len(req.Prompt) >= b.maxLen {
		return nil, &RequestError{Code: wire.CodeInvalid, Field: "prompt", Message: "the prompt is too long for the engine"}
	}
	if b.fail != nil {
		if err := b.fail(req, 0); err != nil {
			return nil, err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.requests = append(b.requests, req)
	b.active++
	key := string(binary.AppendUvarint(nil, uint64(len(req.Prompt)))) + toyTokenizer{}.Decode(req.Prompt, false) + req.Salt
	cached := 0
	if b.seen[key] {
		cached = (len(req.Prompt) - 1) / 16 * 16
	}
	b.seen[key] = true
	return &toyStream{
		b: b, req: req, prefix: slices.Clone(req.Prompt), cached: cached,
		chunks: rand.New(rand.NewPCG(b.chunkSeed, uint64(len(b.requests)))),
	}, nil
}

type toyStream struct {
	b      *toyBackend
	req    *wire.SubmitRequest
	prefix []int32
	cached int
	chunks *rand.Rand
	done   bool
}

func (s *toyStream) made() int { return len(s.prefix) - len(s.req.Prompt) }

func (s *toyStream) Close() {
	if !s.done {
		s.done = true
		s.b.mu.Lock()
		s.b.active--
		s.b.mu.Unlock()
	}
}

func (s *toyStream) Next(ctx context.Context) (wire.Result, error) {
	if s.done {
		return wire.Result{}, io.EOF
	}
	if err := ctx.Err(); err != nil {
		return wire.Result{}, err
	}
	if s.b.stall > 0 && s.made() >= s.b.stall {
		<-ctx.Done()
		return wire.Result{}, ctx.Err()
	}
	if s.b.fail != nil {
		if err := s.b.fail(s.req, s.made()); err != nil {
			return wire.Result{}, err
		}
	}
	p := &s.req.Sampling
	res := wire.Result{Start: s.made(), StopToken: -1}
	if s.made() == 0 {
		s.promptResult(&res)
		res.Stats = &wire.Stats{Engine: "prefill_0", Queue: .001, Prefill: .25, PromptComputed: len(s.req.Prompt) - s.cached}
	}
	n := 1
	if s.made() > 0 {
		n += s.chunks.IntN(4)
	}
	limit := s.b.maxLen - len(s.req.Prompt)
	if p.MaxTokens > 0 {
		limit = min(limit, p.MaxTokens)
	}
	for range n {
		id, lp, top := s.sample()
		s.prefix = append(s.prefix, id)
		res.Tokens = append(res.Tokens, id)
		if p.Logprobs {
			res.Logprobs = append(res.Logprobs, lp)
			res.Top = append(res.Top, top)
		}
		if s.ends(id) && s.made() > p.MinTokens {
			res.Finish, res.StopToken = wire.FinishStop, id
		} else if s.made() >= limit {
			res.Finish = wire.FinishLength
		}
		if res.Finish != "" {
			res.Stats = &wire.Stats{Engine: "decode_1", Decode: .5, Transfer: .0125, Handoff: .02, BlocksMoved: 2, BlocksReused: 1, BytesMoved: 8192}
			s.Close()
			break
		}
	}
	return res, nil
}

func (s *toyStream) ends(id int32) bool {
	return id == toyEnd && !s.req.Sampling.IgnoreEOS || slices.Contains(s.req.Sampling.StopTokenIDs, id)
}

func (s *toyStream) promptResult(res *wire.Result) {
	res.PromptTokens, res.CachedTokens = len(s.req.Prompt), s.cached
	if !s.req.Sampling.PromptLogprobs {
		return
	}
	for i := 1; i < len(s.req.Prompt); i++ {
		scores := toyScores(s.req.Prompt[:i])
		res.PromptLogprobs = append(res.PromptLogprobs, scores[s.req.Prompt[i]])
		res.PromptTop = append(res.PromptTop, toyTop(scores, s.req.Sampling.PromptTopLogprobs))
	}
}

// sample takes the likeliest allowed token, or with a temperature one of the 16 likeliest by a hash of
// (seed, choice, position).
func (s *toyStream) sample() (int32, float32, wire.TokenLogprobs) {
	scores := toyScores(s.prefix)
	p := &s.req.Sampling
	rank := uint64(0)
	if p.Temperature > 0 {
		rank = toyHash(p.Seed, uint64(p.Choice), uint64(len(s.prefix)), uint64(math.Float32bits(p.Temperature))) % 16
	}
	top := toyTop(scores, 20)
	id := top.IDs[rank]
	for i := 0; s.made() < p.MinTokens && s.ends(id) || s.b.endless && id == toyEnd; i++ {
		id = top.IDs[i]
	}
	return id, scores[id], wire.TokenLogprobs{IDs: top.IDs[:p.TopLogprobs:p.TopLogprobs], Logprobs: top.Logprobs[:p.TopLogprobs:p.TopLogprobs]}
}

// toyScores are the log-probabilities of all tokens after prefix.
func toyScores(prefix []int32) []float32 {
	h := fnv.New64a()
	for _, id := range prefix {
		_, _ = h.Write(binary.LittleEndian.AppendUint32(nil, uint32(id)))
	}
	base := h.Sum64()
	scores := make([]float32, toyVocab)
	sum := 0.0
	for id := range scores {
		scale := 6.0
		if id >= 256 {
			scale = 12
		}
		scores[id] = float32(scale * float64(toyHash(base, uint64(id))>>11) / (1 << 53))
		sum += math.Exp(float64(scores[id]))
	}
	norm := float32(math.Log(sum))
	for id := range scores {
		scores[id] -= norm
	}
	return scores
}

// toyTop lists the k likeliest tokens, best first, of equal ones the lower id.
func toyTop(scores []float32, k int) wire.TokenLogprobs {
	var top wire.TokenLogprobs
	for id, lp := range scores {
		at := len(top.IDs)
		for at > 0 && top.Logprobs[at-1] < lp {
			at--
		}
		if at < k {
			top.IDs = slices.Insert(top.IDs, at, int32(id))[:min(k, len(top.IDs)+1)]
			top.Logprobs = slices.Insert(top.Logprobs, at, lp)[:len(top.IDs)]
		}
	}
	return top
}

func toyHash(values ...uint64) uint64 {
	x := uint64(0x9e3779b97f4a7c15)
	for _, v := range values {
		x ^= v
		x ^= x >> 30
		x *= 0xbf58476d1ce4e5b9
		x ^= x >> 27
		x *= 0x94d049bb133111eb
		x ^= x >> 31
	}
	return x
}

// idle fails the test if the backend still runs a request.
func (b *toyBackend) idle(t *testing.T) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.active != 0 {
		t.Errorf("%d requests still run upstream", b.active)
	}
}
