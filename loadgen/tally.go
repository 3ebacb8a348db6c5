package loadgen

import "time"

// tally adds up results. It is guarded by its player's mutex.
type tally struct {
	wall time.Duration

	completed, failed, retried      int
	sessions, lost, unfinished      int // sessions that ended well, that ended with a failure, that the run's end cut off
	input, output, cached, reusable int64
	events, streamed                int64
	cacheKnown                      int   // answers that said how much was cached
	cacheInput, cacheReusable       int64 // of those
	counted                         map[Count]int
	short, mismatched, good         int // shorter than asked for; other count of ids than of usage; within the goal
	errors                          map[string]*Failure
	ttft, tpot, itl, e2e, late      histogram
}

func newTally() *tally {
	return &tally{counted: make(map[Count]int), errors: make(map[string]*Failure)}
}

// Failure counts failures of one kind.
type Failure struct {
	Kind    string `json:"kind"`
	Count   int    `json:"count"`
	Example string `json:"example"`
}

func (t *tally) add(r *Result, goal Goal) {
	if r.Tries > 1 {
		t.retried += r.Tries - 1
	}
	t.late.add(r.Sent.Sub(r.Meant))
	last := r.Turn == len(r.Session.Turns)-1
	if e := r.Err; e != nil {
		t.failed++
		t.lost++
		f := t.errors[e.Kind]
		if f == nil {
			f = &Failure{Kind: e.Kind, Example: e.Message}
			t.errors[e.Kind] = f
		}
		f.Count++
		return
	}
	t.completed++
	if last {
		t.sessions++
	}
	t.input += int64(max(r.PromptTokens, 0))
	t.output += int64(r.OutputTokens)
	t.reusable += int64(r.Reusable)
	t.events += int64(r.Events)
	t.counted[r.Counted]++
	if r.CachedTokens >= 0 {
		t.cacheKnown++
		t.cached += int64(r.CachedTokens)
		t.cacheInput += int64(max(r.PromptTokens, 0))
		t.cacheReusable += int64(r.Reusable)
	}
	if r.Streamed >= 0 {
		t.streamed += int64(r.Streamed)
		if r.Counted == ByUsage && r.Streamed != r.OutputTokens {
			t.mismatched++
		}
	}
	if r.OutputTokens < r.Session.Turns[r.Turn].Output {
		t.short++
	}
	t.times(r, goal)
}

func (t *tally) times(r *Result, goal Goal) {
	good := true
	within := func(d, limit time.Duration) {
		if limit > 0 && d > limit {
			good = false
		}
	}
	if d, ok := r.TTFT(); ok {
		t.ttft.add(d)
		within(d, goal.TTFT)
	}
	if d, ok := r.TPOT(); ok {
		t.tpot.add(d)
		within(d, goal.TPOT)
	}
	for _, g := range r.gaps {
		t.itl.addMany(g.time/time.Duration(g.tokens), g.tokens)
	}
	t.e2e.add(r.E2E())
	within(r.E2E(), goal.E2E)
	if good {
		t.good++
	}
}

// merge adds another tally.
func (t *tally) merge(o *tally) {
	t.wall += o.wall
	for to, from := range map[*int]int{
		&t.completed: o.completed, &t.failed: o.failed, &t.retried: o.retried, &t.sessions: o.sessions, &t.lost: o.lost,
		&t.unfinished: o.unfinished, &t.cacheKnown: o.cacheKnown, &t.short: o.short, &t.mismatched: o.mismatched, &t.good: o.good,
	} {
		*to += from
	}
	for to, from := range map[*int64]int64{
		&t.input: o.input, &t.output: o.output, &t.cached: o.cached, &t.reusable: o.reusable, &t.events: o.events,
		&t.streamed: o.streamed, &t.cacheInput: o.cacheInput, &t.cacheReusable: o.cacheReusable,
	} {
		*to += from
	}
	for to, from := range map[*histogram]*histogram{
		&t.ttft: &o.ttft, &t.tpot: &o.tpot, &t.itl: &o.itl, &t.e2e: &o.e2e, &t.late: &o.late,
	} {
		to.merge(from)
	}
	for k, n := range o.counted {
		t.counted[k] += n
	}
	for k, f := range o.errors {
		if mine := t.errors[k]; mine != nil {
			mine.Count += f.Count
		} else {
			same := *f
			t.errors[k] = &same
		}
	}
}

// Snapshot is how a run goes.
type Snapshot struct {
	Target       int
	URL          string
	Round, Of    int // from 0
	Elapsed      time.Duration
	Done, Failed int
	Planned      int // requests up to the end of this round; 0 when the plan does not say
	Running      int
	Tokens       int64         // that have come, from the target in all
	TTFT         time.Duration // median of what is complete in this round
}

func (p *player) snapshot(began time.Time) Snapshot {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Snapshot{
		Target: p.number, URL: p.server.base, Round: len(p.each), Of: p.cfg.Rounds, Elapsed: time.Since(began),
		Done: p.all.completed + p.now.completed, Failed: p.all.failed + p.now.failed, Planned: p.total,
		Running: int(p.running.Load()), Tokens: p.tokens.Load(), TTFT: p.now.ttft.quantile(.5),
	}
}
