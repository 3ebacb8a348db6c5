package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"baton/compute/cpu"
	"baton/handoff"
	"baton/layout"
	"baton/model"
	"baton/transfer"
	"baton/transfer/backends"
	"baton/wire"
)

// rank is one of an engine's ranks in this process: its device, its part of the KV pool and its end of the
// transfer backend.
type rank struct {
	config    Config
	number    int // within the engine, stage by stage
	holding   layout.Holding
	device    *device
	memory    *transfer.Memory
	endpoint  transfer.Endpoint // nil on a colocated engine
	checksums checksums         // of the pool's blocks, where handoffs are verified

	tell    func(handoff.Event) // what an order comes to, later
	workers sync.WaitGroup      // of transfers and checks
	// lifetime is of transfers; ended by close.
	lifetime context.Context
	end      context.CancelFunc

	mu        sync.Mutex
	transfers map[uint64]transfer.Handle
	checks    []func() handoff.Event // of blocks and their checksums; the first is under way
}

// openRank loads a rank's part of the model, allocates its part of the pool and opens its end of the transfer
// backend.
func openRank(c Config, number int, ranks model.Ranks, tell func(handoff.Event)) (*rank, error) {
	r := &rank{
		config: c, number: number, holding: c.holding(ranks.Part), tell: tell,
		transfers: map[uint64]transfer.Handle{},
	}
	r.lifetime, r.end = context.WithCancel(context.Background())
	if err := r.open(ranks); err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

func (r *rank) open(ranks model.Ranks) (err error) {
	c := r.config
	if r.memory, err = transfer.NewMemory(r.memoryBytes(), fmt.Sprintf("baton-kv-%s-%d", c.Name, r.number)); err != nil {
		return fmt.Errorf("engine: KV pool of %d blocks: %w", c.blocks(), err)
	}
	backend, err := cpu.New(cpu.Options{Threads: c.Threads})
	if err != nil {
		return err
	}
	kv := r.kvBytes()
	if r.device, err = newDevice(c, ranks, backend, r.memory.Data[:kv:kv]); err != nil {
		return errors.Join(err, backend.Close())
	}
	if c.Role == wire.RoleBoth {
		return nil
	}
	if c.verifies() {
		r.checksums = newChecksums(r.device.kv, r.memory.Data)
	}
	r.endpoint, err = backends.Open(c.Transport, r.memory, backends.Options{
		// Peers call the host as it was given: that is what the certificate is for.
		Listen: net.JoinHostPort(c.TransferHost, "0"), Advertise: advertise(c.TransferHost), TLS: c.TransferTLS,
	})
	return err
}

// close waits until nothing touches the rank's memory, and frees it.
func (r *rank) close() error {
	var errs []error
	if r.endpoint != nil {
		errs = append(errs, r.endpoint.Close()) // waits until no transfer touches the pool
	}
	r.end()
	r.workers.Wait()
	if r.device != nil {
		errs = append(errs, r.device.close())
	}
	if r.memory != nil {
		errs = append(errs, r.memory.Close())
	}
	return errors.Join(errs...)
}

// advertise is the name of a host that has one. An address is known from the listener.
func advertise(host string) string {
	if net.ParseIP(host) != nil {
		return ""
	}
	return host
}

// kvBytes is the size of the rank's part of the pool's blocks.
func (r *rank) kvBytes() int64 {
	return int64(r.config.blocks()) * r.config.layout().BlockBytes(r.holding)
}

// memoryBytes is the size of the rank's memory. Checksums add 1 byte in 256 for heads of 64 dimensions in bf16.
func (r *rank) memoryBytes() int64 {
	if !r.config.verifies() {
		return r.kvBytes()
	}
	return r.kvBytes() + int64(r.config.blocks())*r.config.checksumLayout().BlockBytes(r.holding)
}

func (r *rank) info() wire.RankInfo {
	h := r.holding
	info := wire.RankInfo{Rank: r.number, Layer: h.Layer, Layers: h.Layers, Head: h.Head, Heads: h.Heads}
	if r.endpoint == nil {
		return info
	}
	info.Transport = r.endpoint.Describe()
	if r.config.verifies() {
		info.Checksums = r.kvBytes()
	}
	return info
}

func (r *rank) order(order handoff.Action) handoff.Event {
	switch a := order.(type) {
	case handoff.Seal:
		r.check(func() handoff.Event {
			r.checksums.seal(a.Blocks)
			return handoff.Sealed{Handoff: a.Handoff, Rank: a.Rank}
		})
	case handoff.Verify:
		r.check(func() handoff.Event {
			return handoff.Verified{Transfer: a.Transfer, Err: r.checksums.verify(a.Blocks)}
		})
	case handoff.OpenExport:
		return handoff.Opened{Handoff: a.Handoff, Rank: a.Rank, Err: r.puller().Export(a.Handoff, a.Capability, ranges(a.Ranges))}
	case handoff.Revoke:
		return handoff.Revoked{Handoff: a.Handoff, Rank: a.Rank, Quiesced: r.puller().Revoke(a.Handoff)}
	case handoff.StartPull:
		h, err := r.puller().Pull(r.lifetime, a.Peer, a.Handoff, a.Capability, copies(a.Copies))
		return r.started(a.Transfer, h, err)
	case handoff.StartPush:
		h, err := r.pusher().Push(r.lifetime, a.Peer, a.Tag, copies(a.Copies))
		return r.started(a.Transfer, h, err)
	case handoff.Expect:
		tag, h, err := r.pusher().Expect(r.lifetime, ranges(a.Ranges))
		if err == nil {
			r.started(a.Transfer, h, nil)
		}
		return handoff.Expected{Transfer: a.Transfer, Tag: tag, Err: err}
	case handoff.Cancel:
		if h := r.handle(a.Transfer); h != nil {
			h.Cancel()
		}
	case handoff.Recheck:
		if h := r.handle(a.Transfer); h != nil {
			return r.settlement(a.Transfer, h)
		}
	}
	return nil
}

func (r *rank) puller() transfer.Puller { return r.endpoint.(transfer.Puller) }
func (r *rank) pusher() transfer.Pusher { return r.endpoint.(transfer.Pusher) }

func (r *rank) handle(id uint64) transfer.Handle {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.transfers[id]
}

// started follows a transfer until it settles. It answers only when it could not start.
func (r *rank) started(id uint64, h transfer.Handle, err error) handoff.Event {
	if err != nil {
		return handoff.Settled{Transfer: id, Err: err, Safe: true}
	}
	r.mu.Lock()
	r.transfers[id] = h
	r.mu.Unlock()
	r.workers.Go(func() {
		<-h.Settled()
		if event := r.settlement(id, h); event != nil {
			r.tell(event)
		}
	})
	return nil
}

// settlement is what a poll of a transfer means to the handoff; nil while it runs.
func (r *rank) settlement(id uint64, h transfer.Handle) handoff.Event {
	s := h.Poll()
	if s.State == transfer.Running {
		return nil
	}
	event := handoff.Settled{Transfer: id, Bytes: s.Bytes, Safe: s.State != transfer.Unsafe}
	if s.State != transfer.Done {
		event.Err = s.Err
		if event.Err == nil {
			event.Err = errors.New("the transfer was cancelled")
		}
	}
	if event.Safe {
		r.mu.Lock()
		delete(r.transfers, id)
		r.mu.Unlock()
	}
	return event
}

// check has something done with blocks by the one goroutine that makes and compares checksums, one thing after
// the other: nobody waits for it, and it takes one thread.
func (r *rank) check(f func() handoff.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.checks = append(r.checks, f); len(r.checks) == 1 {
		r.workers.Go(r.runChecks)
	}
}

func (r *rank) runChecks() {
	r.mu.Lock()
	for len(r.checks) > 0 {
		f := r.checks[0]
		r.mu.Unlock()
		r.tell(f())
		r.mu.Lock()
		r.checks = r.checks[1:]
	}
	r.mu.Unlock()
}

func copies(from []layout.Copy) []transfer.Copy {
	to := make([]transfer.Copy, len(from))
	for i, c := range from {
		to[i] = transfer.Copy(c)
	}
	return to
}

func ranges(from []handoff.Range) []transfer.Range {
	to := make([]transfer.Range, len(from))
	for i, r := range from {
		to[i] = transfer.Range(r)
	}
	return to
}
