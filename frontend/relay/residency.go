package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"baton/frontend/relay/kvevents"
	"baton/kvcache"
	"baton/route"
)

// The routers that look at what workers hold: one always, one for conversations that it does not know.
const (
	residencyRouter    = "kv_cache_aware"
	conversationRouter = "conversation"
)

// residency is what workers say that they hold. The index is guarded by the fleet's lock.
type residency struct {
	index *route.Index
	block atomic.Int64 // ids a block, 0 before a worker has said it
}

// defaultBlock is the size of blocks, in ids, as long as no worker has named its own.
const defaultBlock = 32

// blockSize is the number of ids in the blocks of tokens chains.
func (r *residency) blockSize() int {
	if r == nil {
		return defaultBlock
	}
	if n := r.block.Load(); n > 0 {
		return int(n)
	}
	return defaultBlock
}

// overHTTP is the Events of workers that answer POST /kv_cache_events.
const overHTTP = "http"

// maxRanks bounds Worker.Ranks.
const maxRanks = 1024

// checkEvents completes a worker's event addresses and says what is wrong with them.
func checkEvents(w *Worker) error {
	w.Ranks = cmp.Or(w.Ranks, 1)
	if w.Ranks < 1 || w.Ranks > maxRanks {
		return fmt.Errorf("ranks is %d; it is from 1 to %d", w.Ranks, maxRanks)
	}
	if w.Events == "" || w.Events == overHTTP {
		if w.Replay != "" || w.Ranks != 1 {
			return errors.New("replay and ranks need events of the form tcp://HOST:PORT")
		}
		return nil
	}
	if w.Replay == "" && w.Ranks == 1 {
		w.Replay = kvevents.Above(w.Events, 1)
	}
	if w.Replay == "none" {
		w.Replay = ""
	}
	s := kvevents.Stream{Address: w.Events, Replay: w.Replay}
	if err := s.Check(); err != nil {
		return fmt.Errorf("%w (or \"http\" for POST /kv_cache_events)", err)
	}
	if last := w.Ranks - 1; kvevents.Above(w.Events, last) == "" || w.Replay != "" && kvevents.Above(w.Replay, last) == "" {
		return fmt.Errorf("there are no ports for %d ranks above %s", w.Ranks, w.Events)
	}
	return nil
}

// followEvents follows a worker's events until ctx ends, if a router looks at them. Baton's engines are asked for theirs
// without being told to.
func (s *Server) followEvents(ctx context.Context, w *worker) {
	if s.held == nil {
		return
	}
	follow := func(run func(c *cacheView)) {
		s.watchers.Add(1)
		w.watched.Go(func() {
			defer s.watchers.Done()
			c := &cacheView{s: s, w: w, names: map[string]kvcache.Digest{}}
			defer c.reset("")
			run(c)
		})
	}
	if w.Events != "" && w.Events != overHTTP {
		if w.Ranks > 1 {
			w.copies = make(map[kvcache.Digest]int)
		}
		for rank := range w.Ranks {
			stream := kvevents.Stream{Address: kvevents.Above(w.Events, rank)}
			if w.Replay != "" {
				stream.Replay = kvevents.Above(w.Replay, rank)
			}
			follow(func(c *cacheView) {
				stream.Handle, stream.Reset = c.handle, c.reset
				stream.Run(ctx)
			})
		}
		return
	}
	follow(func(c *cacheView) {
		switch {
		case w.Events == overHTTP, s.isBaton(ctx, w):
			c.poll(ctx)
		case ctx.Err() == nil && slices.Contains([]string{s.cfg.PrefillRouter, s.cfg.DecodeRouter}, residencyRouter):
			s.log.Warn("kv_cache_aware without a worker's events: what it holds is guessed from what was sent there; name them as URL#events=tcp://HOST:PORT", "worker", w.URL)
		}
	})
}

// isBaton waits until it is known what the worker is.
func (s *Server) isBaton(ctx context.Context, w *worker) bool {
	select {
	case <-w.identified:
		d := s.dialect()
		return d != nil && d.name() == "baton"
	case <-ctx.Done():
		return false
	}
}

// awaitEvents waits until it is known what one of Baton's engines holds, lest it gets what others hold: a relay that has
// just begun knows no conversation. One that does not tell in time joins all the same.
func (s *Server) awaitEvents(ctx context.Context, w *worker) {
	if s.held == nil || w.Events != "" && w.Events != overHTTP {
		return
	}
	timer := time.NewTimer(firstEvents)
	defer timer.Stop()
	select {
	case <-w.told:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// firstEvents is how long a worker may take to tell what it holds before it gets requests.
const firstEvents = 2 * time.Second

// cacheView is one worker's part of the residency, or that of one of its ranks. It belongs to the goroutine that follows
// these events.
type cacheView struct {
	s     *Server
	w     *worker
	names map[string]kvcache.Digest // of the worker's names of blocks
	told  bool                      // that its blocks have another size

	reports bool // its events come
}

// maxNames bounds the blocks of one worker.
const maxNames = 1 << 20

// reset forgets what is known of the worker, or of this rank.
func (c *cacheView) reset(reason string) {
	if reason != "" {
		c.s.log.Warn("KV events: what the worker holds is learned anew", "worker", c.w.URL, "reason", reason)
	}
	c.s.fleet.mu.Lock()
	defer c.s.fleet.mu.Unlock()
	if c.reports {
		c.reports = false
		c.w.reports--
	}
	if c.w.copies == nil {
		c.s.held.index.Forget(c.w.slot)
	} else {
		for _, d := range c.names {
			c.drop(d)
		}
	}
	clear(c.names)
}

// drop notes that a block is gone here. The fleet's lock is held.
func (c *cacheView) drop(d kvcache.Digest) {
	if n := c.w.copies[d]; n > 1 {
		c.w.copies[d] = n - 1
		return
	}
	delete(c.w.copies, d)
	c.s.held.index.Remove(c.w.slot, d)
}

// handle takes events.
func (c *cacheView) handle(events []kvevents.Event) {
	c.reporting()
	for _, e := range events {
		switch e.Kind {
		case kvevents.Stored:
			c.stored(e)
		case kvevents.Removed:
			c.removed(e)
		case kvevents.Cleared:
			c.reset("")
			c.reporting()
		case kvevents.Session:
			c.s.fleet.learn(c.w, route.SessionKey([]byte(e.Blocks[0])), e.At)
		}
	}
}

// reporting notes that the worker's events come, so that what was guessed gives way.
func (c *cacheView) reporting() {
	c.s.fleet.mu.Lock()
	defer c.s.fleet.mu.Unlock()
	if c.reports {
		return
	}
	c.reports = true
	if c.w.reports++; c.w.reports == 1 {
		c.s.held.index.Forget(c.w.slot)
	}
}

func (c *cacheView) stored(e kvevents.Event) {
	if e.Foreign {
		return // matched by more than tokens, or slow to get
	}
	c.s.held.block.CompareAndSwap(0, int64(e.BlockSize))
	if size := c.s.held.blockSize(); e.BlockSize != size {
		if !c.told {
			c.told = true
			c.s.log.Error("KV events: the worker's blocks are of another size than the others', so what it holds cannot be compared",
				"worker", c.w.URL, "block_size", e.BlockSize, "others", size)
		}
		return
	}
	if !e.Digests && len(c.names)+len(e.Blocks) > maxNames {
		c.reset(fmt.Sprintf("it has named more than %d blocks", maxNames))
		c.reporting()
	}
	parent, ok := c.known(e.Parent, e.Digests)
	if !ok {
		return // nothing could be matched up to there
	}
	chain := make([]kvcache.Digest, len(e.Blocks))
	if e.Digests {
		for i, name := range e.Blocks {
			chain[i], _ = c.known(name, true)
		}
	} else {
		chain = kvcache.Chain(parent, e.BlockSize, e.Tokens)
	}
	c.s.fleet.mu.Lock()
	defer c.s.fleet.mu.Unlock()
	for i, d := range chain {
		c.hold(e.Blocks[i], d, e.Digests)
		c.s.held.index.Store(c.w.slot, d, parent)
		parent = d
	}
}

// known is the digest of a block that the worker has named before, or that has its digest for a name.
func (c *cacheView) known(name string, isDigest bool) (d kvcache.Digest, ok bool) {
	switch {
	case name == "":
		return d, true
	case isDigest:
		return kvcache.Digest([]byte(name)), true
	}
	d, ok = c.names[name]
	return d, ok
}

// hold notes what a block is called. The fleet's lock is held.
func (c *cacheView) hold(name string, d kvcache.Digest, isDigest bool) {
	if isDigest {
		return
	}
	if _, again := c.names[name]; !again && c.w.copies != nil {
		c.w.copies[d]++
	}
	c.names[name] = d
}

func (c *cacheView) removed(e kvevents.Event) {
	c.s.fleet.mu.Lock()
	defer c.s.fleet.mu.Unlock()
	for _, name := range e.Blocks {
		if d, ok := c.known(name, e.Digests); ok && name != "" {
			c.drop(d)
			delete(c.names, name)
		}
	}
}

// Polling of events over HTTP.
const (
	pollEvery = 200 * time.Millisecond
	pollSoon  = 10 * time.Millisecond // where the engine waits for news, that several come together
	pollAgain = time.Second           // after a failure
	maxEvents = 64 << 20              // bytes of an answer
)

// poll asks for events until ctx ends.
func (c *cacheView) poll(ctx context.Context) {
	var at kvevents.Poll
	timer := time.NewTimer(0)
	defer timer.Stop()
	for failing, told := false, false; ; {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		asked := time.Now()
		body, err := c.ask(ctx, at.Query())
		var events []kvevents.Event
		var gap bool
		if err == nil {
			events, gap, err = at.Decode(body)
		}
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			if !failing {
				c.reset(err.Error())
			}
			failing, at = true, kvevents.Poll{}
			timer.Reset(pollAgain)
			continue
		case gap:
			c.reset("events are missing")
		}
		failing = false
		c.handle(events)
		if !told && at.Whole() {
			told = true
			close(c.w.told)
		}
		if at.Waits() && (len(events) > 0 || time.Since(asked) > pollEvery) {
			timer.Reset(pollSoon)
		} else {
			timer.Reset(pollEvery)
		}
	}
}

func (c *cacheView) ask(ctx context.Context, query string) ([]byte, error) {
	const most = kvevents.PollWait + probeTimeout
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	body, status, err := c.w.endpoint.fetch(ctx, &call{method: http.MethodPost, path: "/kv_cache_events" + query, header: c.s.engineAuth(""), body: pieces{}}, most, maxEvents)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("%w: %s", &statusError{"/kv_cache_events", status}, strings.TrimSpace(clip(body)))
	}
	return body, err
}
