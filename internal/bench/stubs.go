//go:build linux

package bench

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"baton/coordinator"
	"baton/kvcache"
	"baton/wire"
)

// traffic is what a client and stub engines send each other through a coordinator.
type traffic struct {
	prompt int  // tokens
	tokens int  // generated for each request, the first of them by prefill
	events bool // the engines report which blocks they have cached
	fresh  bool // no prompt begins like an earlier one
}

// The stubs are as large as engines of this kind of machine, but for the time that they take.
const (
	blockSize = 32
	capacity  = 256 // requests an engine works on at a time
	inFlight  = 256 // requests of the client
	cached    = 8192
	distinct  = 1024 // prompts; every one begins like 15 others
)

// workload is a client and the stub engines, each with a connection of its own.
type workload struct {
	traffic
	prompts []wire.Tokens
	client  *wire.Conn
	stubs   []*stub
	group   *errgroup.Group
	failed  context.Context // ends with the first failure of a stub
	lastID  uint64
}

// connect introduces everybody to the coordinator at addr.
func connect(ctx context.Context, addr string, t traffic) (*workload, error) {
	w := &workload{traffic: t}
	for i := range distinct {
		p := make(wire.Tokens, t.prompt)
		for j := range p {
			p[j] = int32(i/16*t.prompt + j)
			if j >= t.prompt/2 {
				p[j] += int32(i+1) << 20
			}
		}
		w.prompts = append(w.prompts, p)
	}
	var err error
	if w.client, _, err = dial(ctx, addr, coordinator.KindClient, "client"); err != nil {
		return nil, err
	}
	w.group, w.failed = errgroup.WithContext(ctx)
	for _, role := range []string{wire.RolePrefill, wire.RoleDecode} {
		s := &stub{traffic: t, inbox: make(chan wire.Message, 4*capacity)}
		var incarnation uint64
		if s.conn, incarnation, err = dial(ctx, addr, coordinator.KindEngine, role); err == nil {
			w.stubs = append(w.stubs, s)
			err = s.register(role, incarnation)
		}
		if err != nil {
			w.close()
			return nil, err
		}
		w.group.Go(s.receive)
		w.group.Go(s.work)
	}
	return w, nil
}

func dial(ctx context.Context, addr, kind, name string) (*wire.Conn, uint64, error) {
	incarnation := coordinator.Incarnation()
	conn, _, err := wire.Dial(ctx, "tcp", addr, wire.Connect{Kind: kind, Name: name, Incarnation: incarnation}, wire.Options{})
	return conn, incarnation, err
}

func (w *workload) close() {
	for _, s := range w.stubs {
		_ = s.conn.Close() // its receive ends with that
	}
	_ = w.client.Close()
	_ = w.group.Wait() // nothing of the failure is left to tell: run did
}

// run sends requests and waits for their ends.
func (w *workload) run(ctx context.Context, requests int) error {
	err := w.requests(ctx, requests)
	if cause := context.Cause(w.failed); err != nil && cause != nil {
		err = cause // the client was closed because of it
	}
	return err
}

func (w *workload) requests(ctx context.Context, requests int) error {
	defer context.AfterFunc(ctx, func() { w.client.Close() })()
	defer context.AfterFunc(w.failed, func() { w.client.Close() })()
	for sent, ended := 0, 0; ended < requests; {
		for ; sent < requests && sent-ended < inFlight; sent++ {
			w.lastID++
			prompt := w.prompts[w.lastID%distinct]
			if w.fresh {
				prompt[0] = int32(w.lastID)
			}
			if err := w.client.Send(&wire.SubmitRequest{
				ID: w.lastID, Prompt: prompt, Sampling: wire.Sampling{MaxTokens: w.tokens, IgnoreEOS: true},
			}); err != nil {
				return err
			}
		}
		m, err := w.client.Recv()
		if err != nil {
			return err
		}
		switch m := m.(type) {
		case *wire.EngineReply:
			ended += len(m.Results)
		case *wire.EngineReplyPartial:
		case *wire.RequestError:
			return fmt.Errorf("request %d: %s: %s", m.ID, m.Code, m.Message)
		default:
			return fmt.Errorf("the client got %s", m.Header())
		}
	}
	return nil
}

// stub is an engine that computes nothing: it answers whatever has arrived, all of it at once, as an engine
// does after a pass.
type stub struct {
	traffic
	conn  *wire.Conn
	inbox chan wire.Message

	// Owned by work.
	running  []running
	sequence uint64
	blocks   map[kvcache.Digest]struct{}
	order    []kvcache.Digest // the oldest first
}

// running is a request on a decode stub.
type running struct {
	id   uint64
	next int // index of its next token
}

func (s *stub) register(role string, incarnation uint64) error {
	if err := s.conn.Send(&wire.RegisterRole{
		Role: role, Name: role, Incarnation: incarnation, Model: "stub", Transport: "tcp",
		Geometry: wire.Geometry{BlockSize: blockSize, Layers: 1, KVHeads: 1, HeadDim: 64, Planes: 2, KVDType: "bf16", VocabSize: 1 << 20, MaxSeqLen: 8192},
		Ranks:    []wire.RankInfo{{Transport: make([]byte, 64)}}, Requests: capacity, Blocks: 1 << 15, MaxTokens: 512, WeightVersion: 1,
	}); err != nil {
		return err
	}
	m, err := s.conn.Recv()
	if err != nil {
		return err
	}
	if ack, ok := m.(*wire.RegisterRoleAck); !ok || ack.Error != "" {
		return fmt.Errorf("registration of %s: %+v", role, m)
	}
	if !s.events {
		return nil
	}
	s.blocks, s.sequence = make(map[kvcache.Digest]struct{}), 1
	return s.conn.Send(&wire.KVEvents{Sequence: 1, Next: 1, Reset: true})
}

func (s *stub) receive() error {
	defer close(s.inbox)
	for {
		m, err := s.conn.Recv()
		if err != nil {
			return err
		}
		s.inbox <- m
	}
}

// work makes passes until the connection ends.
func (s *stub) work() error {
	for {
		var out pass
		if len(s.running) == 0 {
			m, ok := <-s.inbox
			if !ok {
				return nil
			}
			s.take(m, &out)
		}
		for more := true; more; {
			select {
			case m, ok := <-s.inbox:
				if !ok {
					return nil
				}
				s.take(m, &out)
			default:
				more = false
			}
		}
		s.decode(&out)
		if err := out.send(s.conn); err != nil {
			return nil // the receiving side says why
		}
		if len(s.running) > 0 {
			time.Sleep(200 * time.Microsecond) // a pass takes its time
		}
	}
}

// pass is what an engine says after one.
type pass struct {
	messages []wire.Message
	ended    []wire.Result
	partial  []wire.Result
}

func (p *pass) send(conn *wire.Conn) error {
	if len(p.partial) > 0 {
		p.messages = append(p.messages, &wire.EngineReplyPartial{Results: p.partial})
	}
	if len(p.ended) > 0 {
		p.messages = append(p.messages, &wire.EngineReply{Results: p.ended})
	}
	for _, m := range p.messages {
		if err := conn.Send(m); err != nil {
			return err
		}
	}
	return nil
}

func (s *stub) take(m wire.Message, out *pass) {
	switch m := m.(type) {
	case *wire.SubmitRequest:
		s.cache(m.Prompt, out)
		n := (len(m.Prompt) + blockSize - 1) / blockSize
		out.ended = append(out.ended, wire.Result{
			ID: m.ID, Tokens: wire.Tokens{1}, StopToken: -1, PromptTokens: len(m.Prompt),
			Export: &wire.Export{Handoff: m.ID, Capability: make([]byte, 32), Blocks: make(wire.Tokens, n), Generations: make(wire.Tokens, n), Tokens: len(m.Prompt)},
			Stats:  &wire.Stats{Engine: "prefill", PromptComputed: len(m.Prompt)},
		})
	case *wire.SubmitRequestWithKV:
		s.cache(m.Prompt, out)
		out.messages = append(out.messages, &wire.KVReadDone{ID: m.ID})
		s.running = append(s.running, running{m.ID, 1})
	}
}

// decode gives every running request its next token.
func (s *stub) decode(out *pass) {
	left := s.running[:0]
	for _, r := range s.running {
		result := wire.Result{ID: r.id, Start: r.next, Tokens: wire.Tokens{1}, StopToken: -1}
		if r.next++; r.next < s.tokens {
			out.partial = append(out.partial, result)
			left = append(left, r)
			continue
		}
		result.Finish = wire.FinishLength
		result.Stats = &wire.Stats{Engine: "decode", BlocksMoved: s.prompt / blockSize, BytesMoved: 1 << 20}
		out.ended = append(out.ended, result)
	}
	s.running = left
}

// cache stores a prompt's blocks, makes room for them, and reports both.
func (s *stub) cache(prompt wire.Tokens, out *pass) {
	if !s.events {
		return
	}
	events := &wire.KVEvents{Sequence: s.sequence}
	parent := kvcache.Digest{}
	for _, d := range kvcache.Chain(parent, blockSize, prompt) {
		if _, ok := s.blocks[d]; !ok {
			s.blocks[d] = struct{}{}
			s.order = append(s.order, d)
			events.Events = append(events.Events, wire.KVEvent{Kind: wire.KVStored, Digest: d, Parent: parent, Version: 1})
		}
		parent = d
	}
	for len(s.blocks) > cached {
		d := s.order[0]
		s.order = s.order[1:]
		delete(s.blocks, d)
		events.Events = append(events.Events, wire.KVEvent{Kind: wire.KVRemoved, Digest: d, Version: 1})
	}
	if s.sequence += uint64(len(events.Events)); len(events.Events) > 0 {
		events.Next = s.sequence
		out.messages = append(out.messages, events)
	}
}
