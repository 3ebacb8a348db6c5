package engine

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"baton/compute"
	"baton/kvcache"
	"baton/model"
	"baton/wire"
)

// Scheduler decides what each pass computes. It is a plain value: no goroutine, no clock, no model. The
// shell gives it requests and the time, runs the passes it plans, and gives back what was sampled.
//
// The order is first come, first served, unless Overtake says otherwise: a request that does not fit yet holds back those behind it. The
// one exception is a request whose prefix another one is computing right now: it steps aside until the
// prefix can be reused. When running requests need more KV blocks than there are, the later ones wait
// (they are short), and give up their blocks if the first cannot go on otherwise (they are evicted).
type Scheduler struct {
	config   SchedulerConfig
	pool     *kvcache.Pool
	requests map[uint64]*request
	waiting  []*request // not begun, or evicted
	prompts  []*request // begun, prompt not through the model yet; all but the last complete this pass
	running  []*request // one token a pass, in the order in which they began
	short    int        // of those, how many lack a block in the latest pass
	evicted  uint64     // since the start
	paused   bool
}

// SchedulerConfig bounds what a Scheduler admits.
type SchedulerConfig struct {
	MaxRequests int // at once in the batch
	MaxTokens   int // a pass; at least MaxRequests
	MaxSeqLen   int
	Vocabulary  int
	EOS         []int32
	BlockSize   int
	Blocks      int
	Version     uint64 // of the weights
	// Continuation is how many blocks are set aside for a request's new tokens when it begins; those beyond
	// are taken as they are needed, so it may have to wait for them or be evicted. 0: all that it can ever
	// need.
	Continuation int
	// Overtake is how many requests that have less to compute may begin before one that waits for longer. 0: none.
	Overtake int
	// Return gives evicted requests back (FinishEvicted) instead of computing their prompts again, for
	// engines that only decode.
	Return bool
}

// Output is what was sampled or measured at one wanted row.
type Output struct {
	Token   int32
	Logprob float32
	Top     wire.TokenLogprobs
}

// Plan is one pass: the model's input, and what each wanted row is for.
type Plan struct {
	Batch model.Batch
	Rows  []Row
	parts []part
}

// Row is one wanted row of logits.
type Row struct {
	request *request
	// Target is the token whose log-probability is wanted, for a prompt row; -1 where a token is sampled.
	Target int32
}

// part is a run of a request's tokens that a pass computes.
type part struct {
	request  *request
	from, to int
}

// Outcome is what a pass, its planning or an abort changed.
type Outcome struct {
	Partial []wire.Result
	Final   []wire.Result
	Exports []Prefilled
	Aborted []uint64
	Failed  []wire.RequestError // turned out to be impossible
}

// Prefilled is a request whose prompt is computed and whose first token is sampled: its table goes to
// the handoff, which owns it from now on.
type Prefilled struct {
	ID     uint64
	Table  *kvcache.Table
	Tokens int // whose KV the table holds
	Result wire.Result
}

// NewScheduler makes an idle scheduler over a pool.
func NewScheduler(config SchedulerConfig, pool *kvcache.Pool) *Scheduler {
	return &Scheduler{config: config, pool: pool, requests: map[uint64]*request{}}
}

// Submit queues a request, or refuses it for good.
func (s *Scheduler) Submit(now time.Time, sub *wire.SubmitRequest) *wire.RequestError {
	if _, dup := s.requests[sub.ID]; dup {
		return refusal(sub.ID, "id", "request %d exists already", sub.ID)
	}
	r, refused := newRequest(sub, s.limits(), now)
	if refused != nil {
		return refused
	}
	r.version = s.config.Version
	s.requests[r.id] = r
	s.waiting = append(s.waiting, r)
	return nil
}

func (s *Scheduler) limits() limits {
	c := s.config
	return limits{maxSeqLen: c.MaxSeqLen, vocabulary: c.Vocabulary, blockSize: c.BlockSize, blocks: c.Blocks, eos: c.EOS}
}

// Import is a request whose prompt was computed elsewhere and whose KV now lies in Table.
type Import struct {
	Submit  *wire.SubmitRequestWithKV
	Table   *kvcache.Table
	Stats   wire.Stats
	Arrived time.Time
}

// CanAdmit reports whether Admit would find room in the batch.
func (s *Scheduler) CanAdmit() bool { return len(s.running)+len(s.prompts) < s.config.MaxRequests }

// Admit puts an imported request straight into the decode batch; no prompt token runs again. The
// scheduler owns the table from now on, also when it refuses.
func (s *Scheduler) Admit(now time.Time, in Import) (Outcome, *wire.RequestError) {
	sub := in.Submit
	r, refused := newRequest(&wire.SubmitRequest{
		ID: sub.ID, Prompt: sub.Prompt, Sampling: sub.Sampling, Session: sub.Session, Salt: sub.Salt,
	}, s.limits(), in.Arrived)
	if refused == nil && len(sub.Generated) == 0 {
		refused = refusal(sub.ID, "generated", "a handoff must bring the first token")
	}
	if refused != nil {
		in.Table.Close()
		return Outcome{}, refused
	}
	r.version = s.config.Version
	r.tokens = append(r.tokens, sub.Generated...)
	r.computed, r.reported = len(r.tokens)-1, len(sub.Generated)
	r.table, r.stats, r.announced = in.Table, in.Stats, true
	r.started, r.first, r.decoding = now, now, true
	s.requests[r.id] = r
	if r.generated() >= r.limit {
		return Outcome{Final: []wire.Result{s.finish(now, r, wire.FinishLength)}}, nil
	}
	s.running = append(s.running, r)
	return Outcome{}, nil
}

// Abort drops a request. Aborted lists it once nothing of it is in use: at once, or with the pass that is
// computing it.
func (s *Scheduler) Abort(id uint64) (out Outcome, known bool) {
	r, ok := s.requests[id]
	if !ok {
		return Outcome{}, false
	}
	if r.inPass {
		r.aborted = true
		return Outcome{}, true
	}
	s.drop(r)
	return Outcome{Aborted: []uint64{id}}, true
}

// Abandon drops every request with nobody to be told. What a pass is computing keeps its blocks until the
// pass ends.
func (s *Scheduler) Abandon() {
	for _, r := range sorted(s.requests) {
		if r.inPass {
			r.aborted, r.silent = true, true
			delete(s.requests, r.id) // the id may come again before the pass ends
			continue
		}
		s.drop(r)
	}
	gone := func(r *request) bool { return !r.silent }
	s.prompts, s.running = keep(s.prompts, gone), keep(s.running, gone)
}

// SetPaused stops or resumes planning. Running requests stay where they are.
func (s *Scheduler) SetPaused(paused bool) { s.paused = paused }

// Loads are the lengths of the scheduler's queues.
func (s *Scheduler) Loads() (waiting, prefilling, running int) {
	return len(s.waiting), len(s.prompts), len(s.running)
}

// Pressure tells how many running requests lack a KV block now, and how often one was evicted so far.
func (s *Scheduler) Pressure() (short int, evicted uint64) { return s.short, s.evicted }

// Idle reports whether there is nothing to plan.
func (s *Scheduler) Idle() bool { return len(s.requests) == 0 }

// Has reports whether the scheduler holds a request.
func (s *Scheduler) Has(id uint64) bool { return s.requests[id] != nil }

// Plan chooses the next pass, or returns nil when nothing can run. Every running request that has room
// gets one row; what is left of the token budget goes to prompts.
func (s *Scheduler) Plan(now time.Time) (*Plan, Outcome) {
	var out Outcome
	if s.paused {
		return nil, out
	}
	s.pool.Tick()
	if s.Starved() {
		s.evict(now, &out)
	}
	b := builder{scheduler: s, plan: &Plan{}, budget: s.config.MaxTokens}
	for _, r := range s.grow() {
		b.add(r, len(r.tokens))
	}
	for _, r := range s.prompts {
		b.add(r, min(len(r.tokens), r.computed+b.budget))
	}
	s.begin(now, &b)
	for _, e := range b.failed {
		s.drop(s.requests[e.ID])
	}
	out.Failed = b.failed
	if len(b.plan.parts) == 0 {
		return nil, out
	}
	return b.plan, out
}

// begin takes waiting requests into the pass, in order, as far as budget, batch and KV allow.
func (s *Scheduler) begin(now time.Time, b *builder) {
	if b.budget <= 0 || !s.CanAdmit() {
		return
	}
	for _, r := range s.order() {
		if b.budget <= 0 || !s.CanAdmit() {
			break
		}
		table, err := s.pool.Open(kvcache.OpenRequest{
			Version: r.version, Root: r.root, Prompt: r.tokens, Digests: r.digests, Capacity: r.capacity(),
			Reserve: s.config.reserve(len(r.tokens)), NoMatch: r.wantsPrompt(), Owner: r.id,
		})
		if errors.Is(err, kvcache.ErrPending) {
			continue
		}
		if errors.Is(err, kvcache.ErrNoCapacity) {
			break
		}
		if err != nil {
			b.fail(r, wire.CodeInvalid, err)
			continue
		}
		r.table, r.computed = table, table.Cached()
		if r.started.IsZero() {
			r.started, r.cached = now, table.Cached()
			r.stats.Queue = now.Sub(r.arrived).Seconds()
		}
		s.prompts = append(s.prompts, r)
		b.add(r, min(len(r.tokens), r.computed+b.budget))
	}
	if s.config.Overtake > 0 {
		s.overtook(s.waiting)
	}
	s.waiting = keep(s.waiting, func(r *request) bool { return r.table == nil })
}

// builder fills one plan.
type builder struct {
	scheduler *Scheduler
	plan      *Plan
	budget    int // rows left
	failed    []wire.RequestError
}

// add takes a request's tokens from the first without KV up to to into the pass.
func (b *builder) add(r *request, to int) {
	from, size := r.computed, b.scheduler.config.BlockSize
	if to <= from {
		return
	}
	if err := r.table.EnsureTokens(to); err != nil {
		b.fail(r, wire.CodeInternal, err)
		return
	}
	batch, row := &b.plan.Batch, len(b.plan.Batch.Tokens)
	batch.Sequences = append(batch.Sequences, compute.Sequence{
		Row: row, Rows: to - from, Position: from,
		Blocks: r.table.Blocks()[:(to-1)/size+1],
	})
	for i := from; i < to; i++ {
		batch.Tokens = append(batch.Tokens, r.tokens[i])
		batch.Positions = append(batch.Positions, int32(i))
		batch.Slots = append(batch.Slots, r.table.Slot(i))
		switch {
		case i == len(r.tokens)-1:
			b.want(r, row+i-from, -1)
		case i < r.prompt-1 && r.wantsPrompt():
			b.want(r, row+i-from, r.tokens[i+1])
		}
	}
	b.budget -= to - from
	r.inPass = true
	b.plan.parts = append(b.plan.parts, part{r, from, to})
}

func (b *builder) want(r *request, row int, target int32) {
	b.plan.Batch.Logits = append(b.plan.Batch.Logits, int32(row))
	b.plan.Rows = append(b.plan.Rows, Row{r, target})
}

func (b *builder) fail(r *request, code string, err error) {
	b.failed = append(b.failed, wire.RequestError{ID: r.id, Code: code, Message: err.Error(), SourceSafe: true})
}

// Apply takes in what a pass computed: outputs[i] belongs to plan.Rows[i].
func (s *Scheduler) Apply(now time.Time, p *Plan, outputs []Output) Outcome {
	var out Outcome
	next := 0
	for _, part := range p.parts {
		r := part.request
		r.inPass = false
		r.table.Commit(r.tokens[part.from:part.to])
		r.computed = part.to
		if !r.decoding {
			r.stats.PromptComputed += part.to - part.from
		}
		finish, sampled := "", false
		for next < len(p.Rows) && p.Rows[next].request == r {
			if p.Rows[next].Target >= 0 {
				r.promptLogprobs = append(r.promptLogprobs, outputs[next].Logprob)
				r.promptTop = append(r.promptTop, outputs[next].Top)
			} else {
				finish, sampled = r.accept(outputs[next]), true
			}
			next++
		}
		if r.aborted {
			s.drop(r)
			if !r.silent {
				out.Aborted = append(out.Aborted, r.id)
			}
			continue
		}
		if sampled {
			s.advance(now, r, finish, &out)
		}
	}
	s.prompts = keep(s.prompts, func(r *request) bool { return !r.decoding && s.requests[r.id] == r })
	s.running = keep(s.running, func(r *request) bool { return s.requests[r.id] == r })
	return out
}

// advance moves a request on after a token was sampled for it.
func (s *Scheduler) advance(now time.Time, r *request, finish string, out *Outcome) {
	if r.first.IsZero() {
		r.first = now
		r.stats.Prefill = now.Sub(r.started).Seconds()
	}
	switch {
	case finish != "":
		out.Final = append(out.Final, s.finish(now, r, finish))
	case r.handoff:
		stats := r.stats
		res := r.report("")
		res.Stats = &stats
		out.Exports = append(out.Exports, Prefilled{ID: r.id, Table: r.table, Tokens: r.computed, Result: res})
		delete(s.requests, r.id)
	default:
		out.Partial = append(out.Partial, r.report(""))
		if !r.decoding {
			r.decoding = true
			s.running = append(s.running, r)
		}
	}
}

// finish ends a request and frees what it held.
func (s *Scheduler) finish(now time.Time, r *request, why string) wire.Result {
	r.stats.Decode = now.Sub(r.first).Seconds()
	stats := r.stats
	res := r.report(why)
	res.Stats = &stats
	s.drop(r)
	return res
}

// drop forgets a request and frees its blocks.
func (s *Scheduler) drop(r *request) {
	if r.table != nil {
		r.table.Close()
		r.table = nil
	}
	if s.requests[r.id] == r {
		delete(s.requests, r.id)
	}
	gone := func(x *request) bool { return x != r }
	s.waiting, s.prompts, s.running = keep(s.waiting, gone), keep(s.prompts, gone), keep(s.running, gone)
}

// sorted lists requests by id: the same events give the same actions.
func sorted(requests map[uint64]*request) []*request {
	list := slices.Collect(maps.Values(requests))
	slices.SortFunc(list, func(a, b *request) int { return cmp.Compare(a.id, b.id) })
	return list
}

func keep(list []*request, wanted func(*request) bool) []*request {
	n := 0
	for _, r := range list {
		if wanted(r) {
			list[n] = r
			n++
		}
	}
	clear(list[n:])
	return list[:n]
}

// String is for logs.
func (p *Plan) String() string {
	return fmt.Sprintf("%d tokens of %d requests, %d rows of logits", len(p.Batch.Tokens), len(p.parts), len(p.Rows))
}
