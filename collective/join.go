package collective

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"baton/mtls"
)

// MeshConfig is one process's part of a world over several.
type MeshConfig struct {
	// Size is the number of ranks of the shard; Local are those that this process runs. Each rank runs in
	// exactly one process.
	Size  int
	Local []int
	// Listener is where the other processes reach this one. Join takes it over and closes it: once all
	// have come nobody else may.
	Listener net.Listener
	// Advertise is the listener's address (host:port) as others should dial it. Empty means the address it
	// listens at or, if that is a wildcard, the one from which this process reaches that of rank 0.
	Advertise string
	// Peers are addresses (host:port) of the others. The one of rank 0's process must be among them and is
	// enough: there everybody learns of everybody. That process itself needs none.
	Peers []string
	// Secret is what the processes of a shard know and nobody else does. They prove it to each other; by
	// itself it does not encrypt.
	Secret []byte
	// TLS encrypts the connections, nil for none.
	TLS *mtls.Identity
	// Silence is how long nothing may be heard from a process before it counts as dead. Default 2 s. Rank 0's
	// counts for all.
	Silence time.Duration
}

const (
	defaultSilence = 2 * time.Second
	minSilence     = 20 * time.Millisecond
	retryInterval  = 50 * time.Millisecond
	maxStrangers   = 64 // handshakes at a time, beside those of the world's processes
)

// ConfigError is a MeshConfig that cannot be.
type ConfigError struct{ Field, Reason string }

func (e *ConfigError) Error() string { return fmt.Sprintf("collective: %s %s", e.Field, e.Reason) }

// JoinError is a world that did not come together.
type JoinError struct {
	Missing []int // ranks that this process has no connection to
	Err     error
}

func (e *JoinError) Error() string {
	return fmt.Sprintf("collective: cannot reach %s: %v", rankList(e.Missing), e.Err)
}

// Unwrap returns the reason.
func (e *JoinError) Unwrap() error { return e.Err }

func (cfg *MeshConfig) check() error {
	cfg.Local = slices.Clone(cfg.Local)
	slices.Sort(cfg.Local)
	if cfg.Silence == 0 {
		cfg.Silence = defaultSilence
	}
	switch {
	case cfg.Size < 1 || cfg.Size > maxSize:
		return &ConfigError{"Size", fmt.Sprintf("is %d; it must be from 1 to %d", cfg.Size, maxSize)}
	case checkRanks(cfg.Local, cfg.Size) != nil:
		return &ConfigError{"Local", fmt.Sprintf("is %v; it must name different ranks from 0 to %d", cfg.Local, cfg.Size-1)}
	case cfg.Silence < minSilence:
		return &ConfigError{"Silence", fmt.Sprintf("is %v; it must be at least %v", cfg.Silence, minSilence)}
	case len(cfg.Local) == cfg.Size:
	case cfg.Listener == nil:
		return &ConfigError{"Listener", "is missing; others must be able to reach this process"}
	case len(cfg.Secret) == 0:
		return &ConfigError{"Secret", "is empty; without one anybody could join"}
	case cfg.Local[0] != 0 && len(cfg.Peers) == 0:
		return &ConfigError{"Peers", "is empty; it must have the address of rank 0's process"}
	case binary.NativeEndian.Uint16([]byte{1, 0}) != 1:
		return &ConfigError{"Size", "must be that of one process: this machine is big-endian, and matrices travel as they lie in memory"}
	}
	return nil
}

// Join brings the processes of a shard together and returns the World of each rank in Local, in ascending
// order. It waits until all have come, or ctx ends; afterwards ctx does not matter. Its errors: a ConfigError;
// a JoinError; a FailedError if a process that had come was lost again.
func Join(ctx context.Context, cfg MeshConfig) ([]*World, error) {
	err := cfg.check()
	if cfg.Listener != nil {
		defer cfg.Listener.Close()
	}
	if err != nil {
		return nil, err
	}
	p := newProcess(cfg.Size, cfg.Local)
	if len(cfg.Local) == cfg.Size {
		return p.worlds(), nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	j := &joiner{cfg: &cfg, p: p, arrivals: make(chan *arrival), lost: make(chan *arrival), strangers: make(chan struct{}, cfg.Size+maxStrangers)}
	defer j.work.Wait()
	defer cfg.Listener.Close() // ends listen
	defer cancel(nil)
	j.work.Go(func() { j.listen(ctx) })
	j.work.Go(func() {
		select {
		case <-p.ended:
			cancel(p.failed())
		case <-ctx.Done():
		}
	})
	if cfg.Local[0] == 0 {
		err = j.lead(ctx)
	} else {
		err = j.follow(ctx)
	}
	if err == nil {
		return p.worlds(), nil
	}
	if failed := p.failed(); failed != nil {
		err = failed
	} else {
		err = &JoinError{j.missing(), err}
	}
	p.end(cfg.Local[0], err)
	for _, l := range p.links {
		l.gone.Wait()
	}
	return nil, err
}

// joiner is a Join under way.
type joiner struct {
	cfg       *MeshConfig
	p         *process
	arrivals  chan *arrival
	lost      chan *arrival
	strangers chan struct{}
	work      sync.WaitGroup

	mu      sync.Mutex
	refused error // why somebody who called could not join, for people
}

// arrival is a process that called and has proved to know the secret. It waits for its welcome.
type arrival struct {
	*greeting
	hello hello
	gone  chan error // how watching it ended
}

func (j *joiner) missing() []int {
	var ranks []int
	for _, s := range j.p.ranks {
		if !s.here && s.link == nil {
			ranks = append(ranks, s.rank)
		}
	}
	return ranks
}

// late is why Join gives up when ctx has ended.
func (j *joiner) late(ctx context.Context, last error) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	err := context.Cause(ctx)
	if last != nil {
		err = fmt.Errorf("%w (the last attempt: %w)", err, last)
	}
	if j.refused != nil {
		err = fmt.Errorf("%w (somebody else called in vain: %w)", err, j.refused)
	}
	return err
}

// listen accepts calls until the listener closes.
func (j *joiner) listen(ctx context.Context) {
	for {
		conn, err := j.cfg.Listener.Accept()
		if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
			if err == nil {
				conn.Close()
			}
			return
		}
		if err != nil { // for example too many open files
			pause(ctx, retryInterval)
			continue
		}
		select {
		case j.strangers <- struct{}{}:
			j.work.Go(func() {
				j.admit(ctx, conn)
				<-j.strangers
			})
		default:
			conn.Close()
		}
	}
}

// pause reports whether ctx let it wait for d.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// admit passes a caller on, if it is one of the world's.
func (j *joiner) admit(ctx context.Context, conn net.Conn) {
	g, h, err := accept(ctx, conn, j.cfg)
	if err != nil {
		j.mu.Lock()
		j.refused = err
		j.mu.Unlock()
		return
	}
	a := &arrival{greeting: g, hello: h}
	switch leads := j.cfg.Local[0] == 0; {
	case h.Session == "" && !leads:
		a.refuse(true, "rank 0 does not run here; ask another address")
		return
	case h.Session != "" && leads:
		a.refuse(false, "rank 0 runs here; nobody has sent you")
		return
	}
	select {
	case j.arrivals <- a:
	case <-ctx.Done():
		conn.Close()
	}
}

// refuse ends a connection with words.
func (a *arrival) refuse(again bool, format string, args ...any) {
	_ = a.send("welcome", welcome{Refusal: fmt.Sprintf(format, args...), Again: again}) // it may have gone
	a.conn.Close()
}
