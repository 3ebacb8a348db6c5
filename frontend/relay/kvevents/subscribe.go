// Package kvevents follows what engines tell of their KV caches: vLLM's ZeroMQ stream, with what was missed asked for
// again, and the events that TensorRT-LLM's and our own engines answer over HTTP.
//
// It owns the connections and the decoding, with limits on all that engines send. What the events mean for routing is
// its caller's business.
package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"
)

// Stream is a subscription to one engine's events.
type Stream struct {
	// Address is where the engine publishes, as tcp://HOST:PORT.
	Address string
	// Replay is where missed batches can be asked for; "" for nowhere.
	Replay string
	// Handle gets the events in order.
	Handle func([]Event)
	// Reset says that events were lost: what is known of the engine may be wrong from here on.
	Reset func(reason string)
	// Retry is the pause before a lost connection is made again; default 1 s.
	Retry time.Duration
}

// Above is an address of ZMQ so many ports higher, "" if there is none. vLLM replays one above where it publishes, by
// convention, and its data-parallel ranks publish one above the other.
func Above(address string, ports int) string {
	host, err := hostPort(address)
	if err != nil {
		return ""
	}
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		return ""
	}
	n, err := strconv.Atoi(port)
	if err != nil || n+ports > 65535 {
		return ""
	}
	return "tcp://" + net.JoinHostPort(name, strconv.Itoa(n+ports))
}

// Check says what is wrong with the addresses, nil if nothing is.
func (s *Stream) Check() error {
	if _, err := hostPort(s.Address); err != nil {
		return err
	}
	if s.Replay == "" {
		return nil
	}
	_, err := hostPort(s.Replay)
	return err
}

// Run follows the stream until ctx ends. It connects again as often as it must.
func (s *Stream) Run(ctx context.Context) {
	retry := s.Retry
	if retry <= 0 {
		retry = time.Second
	}
	f := follower{s: s}
	for {
		err := f.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		if !f.down {
			f.down = true
			s.Reset(fmt.Sprintf("the connection to %s: %v", s.Address, err))
		}
		timer := time.NewTimer(retry)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// follower is the state of a subscription.
type follower struct {
	s     *Stream
	next  uint64 // the number that the next batch has
	begun bool   // next is known
	down  bool   // the last connection failed, which was said
}

func (f *follower) follow(ctx context.Context) error {
	sub, err := dialZMTP(ctx, f.s.Address, "SUB")
	if err != nil {
		return err
	}
	defer sub.close()
	defer context.AfterFunc(ctx, sub.close)()
	if err := sub.subscribe(); err != nil {
		return err
	}
	f.begun = false
	// Subscribed first, so that what the replay ends with is followed by what comes.
	if f.s.Replay != "" {
		if err := f.replay(ctx, 0); err != nil {
			f.s.Reset("no replay: " + err.Error())
		}
	}
	f.down = false
	for {
		frames, err := sub.read()
		if err != nil {
			return err
		}
		if len(frames) != 3 || len(frames[1]) != 8 {
			return fmt.Errorf("a message of %d frames, want topic, number and batch", len(frames))
		}
		if err := f.take(ctx, binary.BigEndian.Uint64(frames[1]), frames[2]); err != nil {
			return err
		}
	}
}

// take handles one published batch.
func (f *follower) take(ctx context.Context, n uint64, batch []byte) error {
	if f.begun && n > f.next {
		if err := f.fill(ctx, n); err != nil {
			f.s.Reset(fmt.Sprintf("batch %d came instead of %d: %v", n, f.next, err))
			f.next = n
		}
	}
	if f.begun && n < f.next {
		return nil // the replay had it
	}
	return f.handle(n, batch)
}

// fill gets the batches before n that were missed.
func (f *follower) fill(ctx context.Context, n uint64) error {
	if f.s.Replay == "" {
		return errors.New("there is no replay")
	}
	if err := f.replay(ctx, f.next); err != nil {
		return err
	}
	if f.next < n {
		return errReplay
	}
	return nil
}

func (f *follower) handle(n uint64, batch []byte) error {
	events, err := DecodeBatch(batch)
	if err != nil {
		return fmt.Errorf("batch %d: %w", n, err)
	}
	f.next, f.begun = n+1, true
	f.s.Handle(events)
	return nil
}

var errReplay = errors.New("the batches are not there any more")

// replay asks for the batches from one on, and handles them.
func (f *follower) replay(ctx context.Context, from uint64) error {
	ctx, cancel := context.WithTimeout(ctx, replayTime)
	defer cancel()
	dealer, err := dialZMTP(ctx, f.s.Replay, "DEALER")
	if err != nil {
		return err
	}
	defer dealer.close()
	defer context.AfterFunc(ctx, dealer.close)()
	if err := dealer.write(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return err
	}
	for first := true; ; first = false {
		frames, err := dealer.read()
		if err != nil {
			return err
		}
		if len(frames) != 3 || len(frames[0]) != 0 || len(frames[1]) != 8 {
			return fmt.Errorf("a replayed message of %d frames", len(frames))
		}
		n := binary.BigEndian.Uint64(frames[1])
		if n == ^uint64(0) {
			return nil
		}
		if first && from > 0 && n != from || !first && n != f.next {
			return errReplay
		}
		if err := f.handle(n, frames[2]); err != nil {
			return err
		}
	}
}

// replayTime bounds a replay.
const replayTime = 30 * time.Second
