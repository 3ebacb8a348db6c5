package relay

import (
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

// checkEvents completes a worker's event addresses and says what is wrong with them.
func checkEvents(w *Worker) error {
	if w.Events == "" || w.Events == overHTTP {
		if w.Replay != "" {
			return errors.New("replay needs events of the form tcp://HOST:PORT")
		}
		return nil
	}
	if w.Replay == "" {
		w.Replay = kvevents.DefaultReplay(w.Events)
	}
	if w.Replay == "none" {
		w.Replay = ""
	}
	s := kvevents.Stream{Address: w.Events, Replay: w.Replay}
	if err := s.Check(); err != nil {
		return fmt.Errorf("%w (or \"http\" for POST /kv_cache_events)", err)
	}
	return nil
}

// followEvents follows a worker's events until ctx ends, if a router looks at them. Baton's engines are asked for theirs
// without being told to.
func (s *Server) followEvents(ctx context.Context, w *worker) {
	if s.held == nil {
		return
	}
	c := &cacheView{s: s, w: w, names: map[string]kvcache.Digest{}}
	s.watchers.Add(1)
	w.watched.Go(func() {
		defer s.watchers.Done()
		defer c.reset("")
		switch {
		case w.Events == overHTTP, w.Events == "" && s.isBaton(ctx, w):
			c.poll(ctx)
		case w.Events != "":
			stream := kvevents.Stream{Address: w.Events, Replay: w.Replay, Handle: c.handle, Reset: c.reset}
			stream.Run(ctx)
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

// cacheView is one worker's part of the residency. It belongs to the goroutine that follows the worker's events.
type cacheView struct {
	s     *Server
	w     *worker
	names map[string]kvcache.Digest // of the worker's names of blocks
	told  bool                      // that its blocks have another size
}

// maxNames bounds the blocks of one worker.
const maxNames = 1 << 20

// reset forgets what is known of the worker.
func (c *cacheView) reset(reason string) {
	if reason != "" {
		c.s.log.Warn("KV events: what the worker holds is learned anew", "worker", c.w.URL, "reason", reason)
	}
	clear(c.names)
	c.s.fleet.mu.Lock()
	defer c.s.fleet.mu.Unlock()
	c.w.reports = false
	c.s.held.index.Forget(c.w.slot)
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
		}
	}
}

// reporting notes that the worker's events come, so that what was guessed gives way.
func (c *cacheView) reporting() {
	c.s.fleet.mu.Lock()
	defer c.s.fleet.mu.Unlock()
	if !c.w.reports {
		c.w.reports = true
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
	parent, chain, ok := c.chain(e)
	if !ok {
		return
	}
	c.s.fleet.mu.Lock()
	defer c.s.fleet.mu.Unlock()
	for _, d := range chain {
		c.s.held.index.Store(c.w.slot, d, parent)
		parent = d
	}
}

// chain is the digests of an event's blocks, and of the block before. It is not ok when that one is not known: nothing
// could be matched up to there.
func (c *cacheView) chain(e kvevents.Event) (parent kvcache.Digest, chain []kvcache.Digest, ok bool) {
	if e.Digests {
		copy(parent[:], e.Parent)
		for _, name := range e.Blocks {
			chain = append(chain, kvcache.Digest([]byte(name)))
		}
		return parent, chain, true
	}
	if len(c.names)+len(e.Blocks) > maxNames {
		c.reset(fmt.Sprintf("it has named more than %d blocks", maxNames))
		c.reporting()
	}
	if e.Parent != "" {
		if parent, ok = c.names[e.Parent]; !ok {
			return parent, nil, false
		}
	}
	chain = kvcache.Chain(parent, e.BlockSize, e.Tokens)
	for i, name := range e.Blocks {
		c.names[name] = chain[i]
	}
	return parent, chain, true
}

func (c *cacheView) removed(e kvevents.Event) {
	c.s.fleet.mu.Lock()
	defer c.s.fleet.mu.Unlock()
	for _, name := range e.Blocks {
		if e.Digests {
			c.s.held.index.Remove(c.w.slot, kvcache.Digest([]byte(name)))
		} else if d, ok := c.names[name]; ok {
			c.s.held.index.Remove(c.w.slot, d)
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
	for {
		a, err := c.w.endpoint.do(ctx, &call{method: http.MethodPost, path: "/kv_cache_events" + query, header: c.s.engineAuth(""), body: pieces{}}, most)
		if errors.Is(err, errStale) {
			continue
		}
		if err != nil {
			return nil, err
		}
		defer a.close()
		body, err := a.readAll(nil, maxEvents)
		if err == nil && a.status != http.StatusOK {
			err = fmt.Errorf("%w: %s", &statusError{"/kv_cache_events", a.status}, strings.TrimSpace(clip(body)))
		}
		return body, err
	}
}
