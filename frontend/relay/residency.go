package relay

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"baton/frontend/relay/kvevents"
	"baton/kvcache"
	"baton/route"
)

// residencyRouter is the router that looks at what workers hold.
const residencyRouter = "kv_cache_aware"

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

// followEvents follows a worker's events until ctx ends, if anybody wants to know of them.
func (s *Server) followEvents(ctx context.Context, w *worker) {
	if s.held == nil {
		return
	}
	if w.Events == "" {
		s.log.Warn("kv_cache_aware without a worker's events: what it holds is guessed from what was sent there; name them as URL#events=tcp://HOST:PORT", "worker", w.URL)
		return
	}
	c := &cacheView{s: s, w: w, names: map[string]kvcache.Digest{}}
	s.watchers.Add(1)
	w.watched.Go(func() {
		defer s.watchers.Done()
		defer c.reset("")
		if w.Events == overHTTP {
			c.poll(ctx)
			return
		}
		stream := kvevents.Stream{Address: w.Events, Replay: w.Replay, Handle: c.handle, Reset: c.reset}
		stream.Run(ctx)
	})
}

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
	if len(c.names)+len(e.Blocks) > maxNames {
		c.reset(fmt.Sprintf("it has named more than %d blocks", maxNames))
		c.reporting()
	}
	parent := kvcache.Digest{}
	if e.Parent != "" {
		known, ok := c.names[e.Parent]
		if !ok {
			return // nothing could be matched up to there
		}
		parent = known
	}
	chain := kvcache.Chain(parent, e.BlockSize, e.Tokens)
	for i, name := range e.Blocks {
		c.names[name] = chain[i]
	}
	c.s.fleet.mu.Lock()
	defer c.s.fleet.mu.Unlock()
	for _, d := range chain {
		c.s.held.index.Store(c.w.slot, d, parent)
		parent = d
	}
}

func (c *cacheView) removed(e kvevents.Event) {
	c.s.fleet.mu.Lock()
	defer c.s.fleet.mu.Unlock()
	for _, name := range e.Blocks {
		if d, ok := c.names[name]; ok {
			c.s.held.index.Remove(c.w.slot, d)
			delete(c.names, name)
		}
	}
}

// Polling of events over HTTP.
const (
	pollEvery = 200 * time.Millisecond
	maxEvents = 64 << 20 // bytes of an answer
)

// poll asks for events until ctx ends. The engine forgets what it has told, so it can tell one relay only.
func (c *cacheView) poll(ctx context.Context) {
	ticker := time.NewTicker(pollEvery)
	defer ticker.Stop()
	next, failing := int64(0), false
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		body, err := c.ask(ctx)
		var events []kvevents.Event
		var gap bool
		if err == nil {
			events, next, gap, err = kvevents.DecodeJSON(body, next)
		}
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			if !failing {
				c.reset(err.Error())
			}
			failing, next = true, 0
			continue
		case gap:
			c.reset("events are missing")
		}
		failing = false
		c.handle(events)
	}
}

func (c *cacheView) ask(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	for {
		a, err := c.w.endpoint.do(ctx, &call{method: http.MethodPost, path: "/kv_cache_events", header: c.s.engineAuth(""), body: pieces{}}, probeTimeout)
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
