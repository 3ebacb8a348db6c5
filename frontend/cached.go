package frontend

import (
	"context"
	"encoding/json/v2"
	"errors"
	"net/http"
	"strconv"
	"time"

	"baton/leg"
)

const cachedPath = "/kv_cache_events"

// maxCachedWait bounds how long a reader may wait for news of what is cached.
const maxCachedWait = 30 * time.Second

// cacheEvents is a part of the log of what the engines have cached, for relays that choose by it. Blocks are SHA-256 digests
// of all tokens up to their ends, as base64: see docs/legs.md.
type cacheEvents struct {
	Engine    string       `json:"engine"`
	Cursor    string       `json:"cursor"` // where the reader goes on
	Reset     bool         `json:"reset"`  // what the reader knew does not hold
	More      bool         `json:"more"`   // more can be had at once
	BlockSize int          `json:"block_size"`
	Events    []cacheEvent `json:"events"`
}

type cacheEvent struct {
	Type    string     `json:"type"`              // stored, removed, session
	Parent  []byte     `json:"parent,omitempty"`  // of a stored one's first block; none when that begins a prompt
	Blocks  [][32]byte `json:"blocks,omitempty"`  // of a stored one: each follows the one before it
	Session []byte     `json:"session,omitempty"` // SHA-256 of the name of one that has had a job here
	At      int64      `json:"at,omitempty"`      // when, in Unix milliseconds
}

// cached is POST /kv_cache_events?cursor=CURSOR&wait=SECONDS: how relays learn what the engines have cached, several of
// them at once. Those that wait hold up no shutdown, and leave no line in the log.
func (s *Server) cached(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(context.Cause(s.ctx)) })()
	c, err := s.readCached(ctx, r)
	if err != nil {
		toAPIError(ctx, err).write(w)
		return
	}
	body, err := json.Marshal(describeCached(c))
	if err != nil {
		errInternal.write(w)
		return
	}
	writeJSON(w, http.StatusOK, body)
}

func (s *Server) readCached(ctx context.Context, r *http.Request) (leg.Cached, error) {
	if err := s.cfg.APIKeys.authorize(r); err != nil {
		return leg.Cached{}, err
	}
	q, wait := r.URL.Query(), time.Duration(0)
	if text := q.Get("wait"); text != "" {
		seconds, err := strconv.ParseFloat(text, 64)
		if err != nil || !(seconds >= 0 && seconds <= maxCachedWait.Seconds()) {
			return leg.Cached{}, invalid("wait", "wait is %.40q; it is a number of seconds, at most %v", text, maxCachedWait.Seconds())
		}
		wait = time.Duration(seconds * float64(time.Second))
	}
	c, err := s.legs.Server.Cached(ctx, q.Get("cursor"), wait)
	if errors.Is(err, leg.ErrClosed) {
		err = errShuttingDown
	}
	return c, err
}

// describeCached puts chains of blocks together.
func describeCached(c leg.Cached) cacheEvents {
	out := cacheEvents{Engine: "baton", Cursor: c.Cursor, Reset: c.Reset, More: c.More, BlockSize: c.BlockSize, Events: []cacheEvent{}}
	for i := range c.Events {
		e, n := &c.Events[i], len(out.Events)
		switch {
		case e.Kind == leg.SessionSeen:
			out.Events = append(out.Events, cacheEvent{Type: "session", Session: e.Digest[:], At: e.At.UnixMilli()})
		case i > 0 && c.Events[i-1].Kind == e.Kind && (e.Kind == leg.Removed || e.Parent == c.Events[i-1].Digest):
			out.Events[n-1].Blocks = append(out.Events[n-1].Blocks, e.Digest)
		case e.Kind == leg.Removed:
			out.Events = append(out.Events, cacheEvent{Type: "removed", Blocks: [][32]byte{e.Digest}})
		default:
			one := cacheEvent{Type: "stored", Blocks: [][32]byte{e.Digest}}
			if e.Parent != [32]byte{} {
				one.Parent = e.Parent[:]
			}
			out.Events = append(out.Events, one)
		}
	}
	return out
}
