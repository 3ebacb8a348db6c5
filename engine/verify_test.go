package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"baton/checkpoint"
	"baton/coordinator"
	"baton/handoff"
	"baton/transfer"
	"baton/wire"
)

// damage spoils what arrives in an engine's memory: a byte of each of the first transfers.
type damage struct {
	transfers atomic.Int32 // how many more
	// where chooses the byte, given the runs of bytes that arrive.
	where  func(arriving []transfer.Range) int64
	memory *transfer.Memory
	// atSource spoils the first byte that is read, in the memory that it is read from.
	atSource bool
	source   *transfer.Memory
}

// on puts the damage between a rank and its transfer backend.
func (d *damage) on(e *rank) {
	d.memory = e.memory
	switch end := e.endpoint.(type) {
	case transfer.Puller:
		e.endpoint = damagedPuller{end, d}
	case transfer.Pusher:
		e.endpoint = damagedPusher{end, d}
	}
}

type damagedPuller struct {
	transfer.Puller
	d *damage
}

func (p damagedPuller) Pull(ctx context.Context, peer []byte, number uint64, capability []byte, copies []transfer.Copy) (transfer.Handle, error) {
	if p.d.atSource {
		if p.d.transfers.Add(-1) >= 0 {
			p.d.source.Data[copies[0].Src] ^= 0x10
		}
		return p.Puller.Pull(ctx, peer, number, capability, copies)
	}
	h, err := p.Puller.Pull(ctx, peer, number, capability, copies)
	var arriving []transfer.Range
	for _, c := range copies {
		arriving = append(arriving, transfer.Range{Off: c.Dst, Len: c.Len})
	}
	return p.d.spoil(h, arriving), err
}

type damagedPusher struct {
	transfer.Pusher
	d *damage
}

func (p damagedPusher) Expect(ctx context.Context, ranges []transfer.Range) ([]byte, transfer.Handle, error) {
	tag, h, err := p.Pusher.Expect(ctx, ranges)
	return tag, p.d.spoil(h, ranges), err
}

// spoil gives a handle that settles once the byte is spoilt.
func (d *damage) spoil(h transfer.Handle, arriving []transfer.Range) transfer.Handle {
	if h == nil || d.transfers.Add(-1) < 0 {
		return h
	}
	s := &spoilt{Handle: h, settled: make(chan struct{})}
	go func() {
		<-h.Settled()
		if h.Poll().State == transfer.Done {
			d.memory.Data[d.where(arriving)] ^= 0x10
		}
		close(s.settled)
	}()
	return s
}

type spoilt struct {
	transfer.Handle
	settled chan struct{}
}

func (s *spoilt) Settled() <-chan struct{} { return s.settled }

func (s *spoilt) Poll() transfer.Status {
	select {
	case <-s.settled:
		return s.Handle.Poll()
	default:
		return transfer.Status{State: transfer.Running}
	}
}

// answer is what a client was told.
type answer struct {
	tokens   []int32
	logprobs []float32
	err      error
}

func (a answer) String() string { return fmt.Sprint(a.tokens, a.logprobs, a.err) }

// continued runs one request through a coordinator, a prefill and a decode engine, of which the latter
// receives damaged bytes, and returns the answer and the stats of both.
func continued(t *testing.T, ck *checkpoint.Checkpoint, c Config, d *damage) (a answer, prefill, decode handoff.Stats) {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	hub, err := coordinator.NewServer(coordinator.ServerConfig{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer hub.Close()
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var shards []*Shard
	for _, role := range []string{wire.RolePrefill, wire.RoleDecode} {
		c.Checkpoint, c.Role, c.Name = ck, role, role
		e, err := Open(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range e.ranks {
			if role == wire.RoleDecode {
				d.on(r)
			} else {
				d.source = r.memory
			}
		}
		shards = append(shards, e)
		running.Go(func() {
			err := e.Run(ctx, func(_ context.Context, hello wire.Connect) (*wire.Conn, error) { return hub.Connect(hello) })
			if err != nil {
				t.Error(err)
			}
		})
	}
	client, err := hub.Client(coordinator.ClientConfig{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	a = ask(t, client)
	client.Close()
	stop()
	running.Wait()
	prefill, decode = shards[0].engines[0].core.Load().Handoff, shards[1].engines[0].core.Load().Handoff
	for _, s := range shards {
		e := s.engines[0]
		// The last release may find its reader just leaving; then the next looks do.
		for deadline := time.Now().Add(5 * time.Second); e.core.Pool().Stats().InUse != 0 && time.Now().Before(deadline); {
			select {
			case <-e.events.ready:
				e.happened()
			case <-time.After(time.Millisecond):
				e.step(Tick{})
			}
		}
		if s := e.core.Pool().Stats(); s.InUse != 0 {
			t.Errorf("%s keeps %+v, %+v", e.config.Name, s, e.core.Load().Handoff)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	return a, prefill, decode
}

func ask(t *testing.T, client *coordinator.Client) (a answer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	prompt := make([]int32, 100)
	for i := range prompt {
		prompt[i] = int32(3 + i*i%630)
	}
	s, err := client.Submit(ctx, &wire.SubmitRequest{Prompt: prompt, Sampling: wire.Sampling{
		MaxTokens: 8, Temperature: 0.8, Seed: 7, Logprobs: true, IgnoreEOS: true,
	}})
	if err != nil {
		t.Fatal(err)
	}
	for {
		r, err := s.Next(ctx)
		if err != nil {
			if !errors.Is(err, io.EOF) {
				a.err = err
			}
			return a
		}
		a.tokens, a.logprobs = append(a.tokens, r.Tokens...), append(a.logprobs, r.Logprobs...)
	}
}

// A byte that changes on its way from prefill to decode is noticed before a token comes of it; the prompt is
// computed again, and the client is told what it would have been told anyway.
func TestDamagedHandoff(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	ck, err := checkpoint.Open("../testdata/goldens/llama")
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	firstKey := func(r []transfer.Range) int64 { return r[0].Off + 3 }
	lastSum := func(r []transfer.Range) int64 { return r[len(r)-1].Off + r[len(r)-1].Len - 1 }
	base := Config{BlockSize: 16, MaxRequests: 2, Threads: 1, KVBytes: 4 << 20}
	want, _, _ := continued(t, ck, base, &damage{where: firstKey})
	if len(want.tokens) != 8 || want.err != nil {
		t.Fatalf("undisturbed: %v", want)
	}
	cases := []struct {
		name, transport string
		verify          handoff.Verification
		block           int
		times           int32
		where           func([]transfer.Range) int64 // nil: at the source
	}{
		{"a key, shm", "shm", handoff.VerifyAll, 16, 1, firstKey},
		{"a key, tcp", "tcp", handoff.VerifyAll, 32, 1, firstKey},
		{"a key, tcp-push", "tcp-push", handoff.VerifyAll, 64, 1, firstKey},
		{"at the source, shm", "shm", handoff.VerifyAll, 16, 1, nil},
		{"at the source, twice, tcp", "tcp", handoff.VerifyAll, 32, 2, nil},
		{"a checksum", "shm", handoff.VerifyAll, 32, 1, lastSum},
		{"twice", "tcp", handoff.VerifyAll, 16, 2, firstKey},
		{"never", "tcp-push", handoff.VerifyAll, 32, 0, firstKey},
		{"a key, of a sample", "shm", handoff.VerifySample, 16, 1, firstKey},
		{"the last checksum, of a sample", "tcp-push", handoff.VerifySample, 16, 1, lastSum},
	}
	if testing.Short() {
		cases = cases[:4] // under the race detector, one of each transport, and one at the source
	}
	for _, tt := range cases {
		t.Run(tt.name, func(t *testing.T) {
			c, d := base, &damage{where: tt.where, atSource: tt.where == nil}
			c.Transport, c.VerifyHandoff, c.BlockSize = tt.transport, tt.verify, tt.block
			d.transfers.Store(tt.times)
			got, prefill, decode := continued(t, ck, c, d)
			if got.String() != want.String() {
				t.Errorf("damaged: %v\nundisturbed: %v", got, want)
			}
			n := uint64(tt.times)
			if decode.Corrupt != n || decode.Failed != n || decode.Imported != 1 || prefill.Exported != n+1 || prefill.Failed != 0 {
				t.Errorf("%d damaged: prefill %+v, decode %+v", n, prefill, decode)
			}
		})
	}
	t.Run("always", func(t *testing.T) {
		c, d := base, &damage{where: firstKey}
		c.VerifyHandoff = handoff.VerifyAll
		d.transfers.Store(1 << 30)
		got, _, decode := continued(t, ck, c, d)
		var failure *coordinator.RequestError
		if !errors.As(got.err, &failure) || failure.Code != wire.CodeCorrupt || decode.Imported != 0 {
			t.Errorf("%v, decode %+v; want a failure with %s", got, decode, wire.CodeCorrupt)
		}
		if n := len(got.tokens); n < 1 || !slices.Equal(got.tokens, want.tokens[:n]) {
			t.Errorf("tokens %v, undisturbed %v", got.tokens, want.tokens)
		}
	})
	t.Run("unnoticed", func(t *testing.T) { // or the cases above would prove nothing
		d := &damage{where: firstKey}
		d.transfers.Store(1)
		if got, _, _ := continued(t, ck, base, d); got.String() == want.String() {
			t.Error("without verification the damage changes nothing")
		}
	})
}

// Whatever part of a block changes, its checksum tells which.
func TestChecksums(t *testing.T) {
	for model, what := range map[string]string{"qwen2": "the values of layer 3, head 1,", "deepseek_v3": "the latents of layer 3, head 0,"} {
		t.Run(model, func(t *testing.T) { testChecksums(t, "../testdata/goldens/"+model, what) })
	}
}

// testChecksums expects a fault in the last of everything to be named by what.
func testChecksums(t *testing.T, path, what string) {
	ck, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	for _, size := range []int{16, 32, 64} {
		c, err := Config{
			Checkpoint: ck, Role: wire.RolePrefill, BlockSize: size, KVBytes: 1 << 20, MaxRequests: 1, VerifyHandoff: handoff.VerifyAll,
		}.withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		r := &rank{config: c, holding: c.layout().Whole()}
		memory, kv := make([]byte, r.memoryBytes()), c.kv(r.holding)
		kv.Blocks = c.blocks()
		s := newChecksums(kv, memory)
		if got, want := len(s.sums), c.blocks()*s.tiles*checksumBytes; got != want || s.tiles*s.tile != int(c.blockBytes()) {
			t.Fatalf("%d bytes of checksums for %d blocks of %d tiles of %d bytes, want %d", got, c.blocks(), s.tiles, s.tile, want)
		}
		for i := range s.data {
			s.data[i] = byte(i * 7 >> 3)
		}
		s.seal([]int32{3, 1})
		if err := s.verify([]int32{1, 3, 1}); err != nil {
			t.Fatal(err)
		}
		if s.verify([]int32{2}) == nil {
			t.Error("a block without checksums passes")
		}
		elem := kv.DType.BlockBytes()
		layer, plane, head, token := kv.Layers-1, kv.Planes-1, kv.Heads-1, size-1
		at := (((layer*kv.Planes+plane)*kv.Heads+head)*size+token)*kv.HeadDim*elem + 1
		for _, bit := range []byte{1, 0x80} {
			memory[3*int(c.blockBytes())+at] ^= bit
			var fault *ChecksumError
			err := s.verify([]int32{1, 3})
			if !errors.As(err, &fault) || !strings.HasPrefix(err.Error(), what) || fault.Block != 3 || fault.Layer != layer || fault.Plane != plane || fault.Head != head || fault.Token != size-16 {
				t.Errorf("blocks of %d: %v", size, err)
			}
			memory[3*int(c.blockBytes())+at] ^= bit
		}
		if err := s.verify([]int32{1, 3}); err != nil {
			t.Error(err)
		}
	}
}

func TestVerificationConfig(t *testing.T) {
	ck, err := checkpoint.Open("../testdata/goldens/qwen2")
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	if c, err := (Config{Checkpoint: ck, VerifyHandoff: handoff.VerifyAll}).withDefaults(); err != nil || c.verifies() {
		t.Errorf("a colocated engine keeps checksums: %v", err)
	}
	if _, err := (Config{Checkpoint: ck, Role: wire.RoleDecode, VerifyHandoff: "some"}).withDefaults(); err == nil {
		t.Error(`verification "some" is accepted`)
	}
}

// BenchmarkChecksums verifies what a prompt of 2,000 tokens of SmolLM2-135M has in 32-token blocks.
func BenchmarkChecksums(b *testing.B) {
	const blocks, perBlock = 63, 30 * 2 * 3 * 32 * 64 * 2
	s := checksums{data: make([]byte, blocks*perBlock), tile: 16 * 64 * 2}
	s.tiles = perBlock / s.tile
	s.sums = make([]byte, blocks*s.tiles*checksumBytes)
	for i := range s.data {
		s.data[i] = byte(i)
	}
	ids := make([]int32, blocks)
	for i := range ids {
		ids[i] = int32(i)
	}
	sample := []int32{0, 8, 16, 24, 32, 40, 48, 56, 62}
	to := make([]byte, len(s.data))
	b.Run("seal", func(b *testing.B) {
		b.SetBytes(int64(len(s.data)))
		for b.Loop() {
			s.seal(ids)
		}
	})
	b.Run("verify", func(b *testing.B) {
		b.SetBytes(int64(len(s.data)))
		for b.Loop() {
			if err := s.verify(ids); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("verify a sample", func(b *testing.B) {
		for b.Loop() {
			if err := s.verify(sample); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("copy", func(b *testing.B) { // to compare with
		b.SetBytes(int64(len(s.data)))
		for b.Loop() {
			copy(to, s.data)
		}
	})
}
