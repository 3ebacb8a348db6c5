package leg

import (
	"context"
	"io"
	"sync"

	"baton/wire"
)

// Stream is the results of one job, in order. Next is for one goroutine; the rest is for any.
type Stream struct {
	server *Server
	id     uint64
	wake   chan struct{} // holds an element when there is news

	mu      sync.Mutex
	results []wire.Result
	err     error // how it ended; after the results
	stop    func() bool
	left    *Left // of a context leg
	kept    bool  // its state has gone out
}

// Left is what a context leg leaves.
type Left struct {
	Request uint64 // its number here
	Group   int    // the data-parallel group that ran it
	State   []byte // for the generation leg; nil when the request has ended
}

// Next waits for news of the job: io.EOF after the result that carries Finish, a *RequestError when the job failed,
// ErrClosed after Close, the cause of Submit's context when that ended. When ctx ends before there is news, Next returns
// its cause and the job goes on.
func (st *Stream) Next(ctx context.Context) (wire.Result, error) {
	for {
		st.mu.Lock()
		if len(st.results) > 0 {
			r := st.results[0]
			st.results[0] = wire.Result{}
			st.results = st.results[1:]
			st.mu.Unlock()
			return r, nil
		}
		err := st.err
		st.mu.Unlock()
		if err != nil {
			return wire.Result{}, err
		}
		select {
		case <-st.wake:
		case <-ctx.Done():
			return wire.Result{}, context.Cause(ctx)
		}
	}
}

// Left is what a context leg left, once Next has returned its result with Finish. The export goes with the stream,
// unless Keep is called.
func (st *Stream) Left() Left {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.left == nil {
		return Left{}
	}
	return *st.left
}

// Keep says that the client gets the state: the export outlives the stream, for its lease.
func (st *Stream) Keep() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.kept = true
}

// Renew begins the lease of what was left anew. It is for a client that waits for more before it gets the state.
func (st *Stream) Renew() {
	st.mu.Lock()
	held := st.left != nil && st.left.State != nil
	st.mu.Unlock()
	if held {
		st.server.step(Renew{st.id})
	}
}

// Close gives the job up if it still runs, and what it left if nobody was to keep it. It may be called again.
func (st *Stream) Close() {
	st.abort(ErrClosed)
	st.mu.Lock()
	discard := st.left != nil && st.left.State != nil && !st.kept
	st.kept = true
	st.mu.Unlock()
	if discard {
		st.server.step(Discard{st.id})
	}
}

// abort ends the stream here and the job on its engine.
func (st *Stream) abort(err error) {
	st.mu.Lock()
	running := st.err == nil
	if running {
		st.results = nil
	}
	st.mu.Unlock()
	if !running {
		return
	}
	st.end(err)
	s := st.server
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams[st.id] == st {
		delete(s.streams, st.id)
		if !s.closed {
			s.run(Cancel{st.id})
		}
	}
}

// push adds a result, and the end if it is the last. The server's lock is held.
func (st *Stream) push(d Deliver) {
	st.mu.Lock()
	if st.err == nil {
		st.results = append(st.results, d.Result)
		if d.End {
			st.left = &Left{Request: d.ID, Group: d.Group, State: d.State}
		}
	}
	st.mu.Unlock()
	if d.End {
		st.end(io.EOF)
		return
	}
	st.notify()
}

// end makes err the stream's end unless it has one.
func (st *Stream) end(err error) {
	st.mu.Lock()
	if st.err == nil {
		st.err = err
	}
	stop := st.stop
	st.mu.Unlock()
	if stop != nil {
		stop()
	}
	st.notify()
}

func (st *Stream) notify() {
	select {
	case st.wake <- struct{}{}:
	default:
	}
}
