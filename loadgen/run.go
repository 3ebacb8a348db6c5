package loadgen

import (
	"context"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"time"
)

// Run plays the plan against every target and reports. When ctx ends first, the requests that run are broken off and not counted;
// the report then covers what was complete and comes with ctx's error.
func Run(ctx context.Context, c Config) (*Report, error) {
	c, err := c.checked()
	if err != nil {
		return nil, err
	}
	r := &run{cfg: &c}
	for i, t := range c.Targets {
		s, err := look(ctx, t, &c.Request)
		if err != nil {
			return nil, err
		}
		defer s.close()
		r.players = append(r.players, newPlayer(&c, i, s))
	}
	for _, p := range r.players {
		if err := p.warm(ctx); err != nil {
			return nil, err
		}
	}
	stopWatching := r.watch()
	for round := range c.Rounds {
		for i := range r.players {
			if round%2 == 1 { // so that neither always comes second
				i = len(r.players) - 1 - i
			}
			r.current.Store(r.players[i])
			r.players[i].round(ctx, round)
		}
	}
	stopWatching()
	return r.report(), context.Cause(ctx)
}

// run is one call of Run.
type run struct {
	cfg     *Config
	players []*player
	current atomic.Pointer[player]
	client  clientCost
}

// watch looks after this process itself, and tells how it goes, until the returned function is called.
func (r *run) watch() (stop func()) {
	done := make(chan struct{})
	var group sync.WaitGroup
	began, cpu := time.Now(), processCPU()
	group.Go(func() { r.client.lag = watchLag(done) })
	if r.cfg.Progress != nil {
		group.Go(func() {
			tick := time.NewTicker(r.cfg.Every)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
					if p := r.current.Load(); p != nil {
						r.cfg.Progress(p.snapshot(began))
					}
				case <-done:
					return
				}
			}
		})
	}
	return func() {
		close(done)
		group.Wait()
		r.client.wall, r.client.cpu = time.Since(began), processCPU()-cpu
	}
}

// watchLag sleeps a little, over and over, and measures by how much it sleeps too long.
func watchLag(done <-chan struct{}) *histogram {
	const nap = 10 * time.Millisecond
	h := &histogram{}
	timer := time.NewTimer(nap)
	defer timer.Stop()
	for {
		due := time.Now().Add(nap)
		select {
		case <-timer.C:
			h.add(max(time.Since(due), 0))
			timer.Reset(nap)
		case <-done:
			return h
		}
	}
}

// player plays the plan against one target.
type player struct {
	cfg    *Config
	number int
	server *server
	idle   sync.Pool // of *exchange

	running, tokens atomic.Int64

	mu    sync.Mutex
	total int // requests of the rounds so far, as far as the plan says
	all   *tally
	now   *tally // of the round that runs
	each  []*tally
	seen  map[uint64]struct{} // pieces of prompts that have been sent
}

func newPlayer(c *Config, number int, s *server) *player {
	p := &player{cfg: c, number: number, server: s, all: newTally(), now: newTally(), seen: make(map[uint64]struct{})}
	p.idle.New = func() any {
		return &exchange{server: s, request: &c.Request, sse: newSSE(), events: func(n int) { p.tokens.Add(int64(n)) }}
	}
	return p
}

// warm sends the requests that do not count.
func (p *player) warm(ctx context.Context) error {
	if p.cfg.Warmup == 0 {
		return nil
	}
	var group sync.WaitGroup
	slots := make(chan struct{}, max(p.cfg.Load.Concurrency, 1))
	failed := make(chan *RequestError, 1)
	next, stop := iter.Pull(p.cfg.Plan.Round(0, 1))
	defer stop()
	for i := range p.cfg.Warmup {
		s, ok := next()
		if !ok {
			break
		}
		t := s.Turns[0]
		one := &Session{ID: fmt.Sprint("warm-up-", i), Single: true, Turns: []Turn{t}}
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			x := p.idle.Get().(*exchange)
			defer p.idle.Put(x)
			talk := conversation{content: p.content(), kind: p.cfg.Request.Prompt}
			talk.say(&one.Turns[0], one.ID, 0)
			r := &Result{Session: one, Reusable: p.reusable(&one.Turns[0], nil)}
			p.send(ctx, x, r, x.body(&talk, one, t.Output))
			if r.Err != nil {
				select {
				case failed <- r.Err:
				default:
				}
			}
		})
	}
	group.Wait()
	select {
	case err := <-failed:
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return &WarmupError{URL: p.server.base, Cause: err}
	default:
	}
	p.tokens.Store(0)
	return nil
}

// WarmupError is a warm-up request that failed.
type WarmupError struct {
	URL   string
	Cause *RequestError
}

func (e *WarmupError) Error() string { return "loadgen: " + e.URL + ": warm-up: " + e.Cause.Error() }

func (e *WarmupError) Unwrap() error { return e.Cause }

func (p *player) content() content {
	return content{seed: p.cfg.Request.Seed, vocab: p.cfg.Request.VocabSize}
}

// round plays one round and waits for its requests.
func (p *player) round(ctx context.Context, number int) {
	began := time.Now()
	var stop time.Time
	if d := p.cfg.Duration; d > 0 {
		stop = began.Add(d / time.Duration(p.cfg.Rounds))
	}
	p.mu.Lock()
	p.now = newTally()
	p.total = p.cfg.Plan.Requests() * (number + 1) / p.cfg.Rounds
	p.mu.Unlock()
	g := &game{player: p, round: number, began: began, stop: stop}
	if p.cfg.Load.Concurrency > 0 {
		g.closed(ctx)
	} else {
		g.open(ctx)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now.wall = time.Since(began)
	p.each = append(p.each, p.now)
	p.all.merge(p.now)
	p.now = newTally()
}

// game is a round of a player.
type game struct {
	*player
	round       int
	began, stop time.Time // stop is zero when the plan's end is the end
}

func (g *game) over(ctx context.Context) bool {
	return ctx.Err() != nil || !g.stop.IsZero() && !time.Now().Before(g.stop)
}

// closed runs so many sessions at a time.
func (g *game) closed(ctx context.Context) {
	var mu sync.Mutex
	next, stop := iter.Pull(g.cfg.Plan.Round(g.round, g.cfg.Rounds))
	defer stop()
	take := func() (*Session, bool) {
		mu.Lock()
		defer mu.Unlock()
		if g.over(ctx) {
			return nil, false
		}
		return next()
	}
	var group sync.WaitGroup
	for range g.cfg.Load.Concurrency {
		s, ok := take()
		if !ok {
			break
		}
		group.Go(func() {
			for ; ok; s, ok = take() {
				g.play(ctx, s, time.Now())
			}
		})
	}
	group.Wait()
}

// open begins sessions when they are due.
func (g *game) open(ctx context.Context) {
	var group sync.WaitGroup
	defer group.Wait()
	slots := make(chan struct{}, g.cfg.Load.MaxConcurrency)
	for s := range g.cfg.Plan.Round(g.round, g.cfg.Rounds) {
		due := g.began.Add(g.scaled(s.Start))
		if !g.stop.IsZero() && due.After(g.stop) || sleepUntil(ctx, due) != nil {
			return
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		group.Go(func() {
			defer func() { <-slots }()
			g.play(ctx, s, due)
		})
	}
}

func (g *game) scaled(d time.Duration) time.Duration {
	return time.Duration(float64(d) / g.cfg.Load.Speed)
}

// play goes through the turns of a session.
func (g *game) play(ctx context.Context, s *Session, meant time.Time) {
	x := g.idle.Get().(*exchange)
	defer g.idle.Put(x)
	kind := g.cfg.Request.Prompt
	several := len(s.Turns) > 1
	x.parser.keepIDs, x.parser.keepText = several && kind == IDs, several && kind != IDs
	talk := conversation{content: g.content(), kind: kind}
	var before *Result
	for k := range s.Turns {
		t := &s.Turns[k]
		if k > 0 {
			meant = before.End.Add(g.scaled(t.Delay))
			if at := g.began.Add(g.scaled(t.At)); g.cfg.Load.Concurrency == 0 && at.After(meant) {
				meant = at
			}
			if sleepUntil(ctx, meant) != nil || g.over(ctx) {
				g.unfinished()
				return
			}
		}
		if t.Afresh {
			talk.prompt = talk.prompt[:0]
		}
		talk.say(t, s.ID, k)
		body := x.body(&talk, s, t.Output)
		if g.cfg.Load.Concurrency > 0 {
			meant = time.Now()
		}
		r := &Result{Target: g.number, Round: g.round, Session: s, Turn: k, Meant: meant, Reusable: g.reusable(t, before)}
		g.running.Add(1)
		g.send(ctx, x, r, body)
		g.running.Add(-1)
		r.IDs = x.parser.ids
		if k+1 < len(s.Turns) && r.Err == nil {
			if kind == IDs && len(x.parser.ids) == 0 {
				r.Err = &RequestError{Kind: KindSession, Message: "no token ids came with the answer, and the next prompt is made of them: use text prompts for this server"}
			} else {
				talk.hear(&x.parser)
			}
		}
		if !g.note(r) {
			return
		}
		before = r
	}
}

// send sends a request until it is answered, or there is no hope.
func (p *player) send(ctx context.Context, x *exchange, r *Result, body []byte) {
	r.Sent = time.Now()
	var failed time.Time
	pause := 50 * time.Millisecond
	for {
		r.Tries++
		once, cancel := context.WithTimeoutCause(ctx, p.cfg.Timeout, errTimeout)
		r.Err = x.try(once, r, body)
		cancel()
		if r.Err == nil || !r.Err.mayPass() {
			return
		}
		if failed.IsZero() {
			failed = r.End
		}
		if r.End.Sub(failed)+pause > p.cfg.RetryFor || sleepUntil(ctx, r.End.Add(pause)) != nil {
			return
		}
		pause = min(2*pause, time.Second)
	}
}

// reusable is how many tokens of a prompt are those of an earlier one.
func (p *player) reusable(t *Turn, before *Result) int {
	if before != nil && !t.Afresh {
		return max(before.PromptTokens, 0) + max(before.OutputTokens-1, 0) // nobody computed the KV of the last token
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	n, all := 0, true
	for _, piece := range t.pieces("", -1) {
		_, ok := p.seen[piece.key]
		if all = all && ok; all {
			n += piece.tokens
		}
		if piece.key != ownKey {
			p.seen[piece.key] = struct{}{}
		}
	}
	return n
}

// note counts a result, and tells whether its session goes on.
func (g *game) note(r *Result) bool {
	if r.Err != nil && r.Err.Kind == kindCanceled {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.now.add(r, g.cfg.Goal)
	if g.cfg.Observe != nil {
		g.cfg.Observe(r)
	}
	return r.Err == nil
}

func (g *game) unfinished() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.now.unfinished++
}

func sleepUntil(ctx context.Context, t time.Time) error {
	d := time.Until(t)
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
