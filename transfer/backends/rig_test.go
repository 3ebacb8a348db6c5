package backends_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"
	"time"

	"baton/transfer"
	"baton/transfer/backends"

	"go.uber.org/goleak"
)

const childEnv = "BATON_TRANSFER_CHILD" // the backend that a child process opens

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		if err := child(name); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

var capability = []byte("0123456789abcdef")

// side is an endpoint with its memory.
type side struct {
	transfer.Endpoint
	mem *transfer.Memory
}

func open(tb testing.TB, name string, size int64) side {
	tb.Helper()
	return openWith(tb, name, size, backends.Options{})
}

func openWith(tb testing.TB, name string, size int64, opt backends.Options) side {
	tb.Helper()
	mem, err := transfer.NewMemory(size, "test")
	if err != nil {
		tb.Fatal(err)
	}
	e, err := backends.Open(name, mem, opt)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := e.Close(); err != nil {
			tb.Error(err)
		}
		if err := mem.Close(); err != nil {
			tb.Error(err)
		}
	})
	return side{e, mem}
}

// fillRandom fills the memory with bytes that depend on the seed.
func (s side) fillRandom(seed byte) { rand.NewChaCha8([32]byte{seed}).Read(s.mem.Data) }

// eachBackend runs f on every backend.
func eachBackend(t *testing.T, f func(t *testing.T, name string)) {
	for _, name := range backends.Names {
		t.Run(name, func(t *testing.T) { f(t, name) })
	}
}

func ranges(copies []transfer.Copy, of func(transfer.Copy) int64) []transfer.Range {
	list := make([]transfer.Range, len(copies))
	for i, c := range copies {
		list[i] = transfer.Range{Off: of(c), Len: c.Len}
	}
	return list
}

func src(c transfer.Copy) int64 { return c.Src }
func dst(c transfer.Copy) int64 { return c.Dst }

// start begins one handoff's transfer the way its backend does it. Of a push the destination's handle
// counts.
func start(ctx context.Context, from, to side, handoff uint64, copies []transfer.Copy) (transfer.Handle, error) {
	switch to := to.Endpoint.(type) {
	case transfer.Puller:
		if err := from.Endpoint.(transfer.Puller).Export(handoff, capability, ranges(copies, src)); err != nil {
			return nil, err
		}
		return to.Pull(ctx, from.Describe(), handoff, capability, copies)
	case transfer.Pusher:
		tag, h, err := to.Expect(ctx, ranges(copies, dst))
		if err != nil {
			return nil, err
		}
		_, err = from.Endpoint.(transfer.Pusher).Push(ctx, to.Describe(), tag, copies)
		return h, err
	}
	return nil, fmt.Errorf("%T moves nothing", to.Endpoint)
}

func wait(tb testing.TB, h transfer.Handle) transfer.Status {
	tb.Helper()
	select {
	case <-h.Settled():
	case <-time.After(10 * time.Second):
		tb.Fatalf("not settled: %+v", h.Poll())
	}
	return h.Poll()
}

// eventually polls a condition that another goroutine is about to bring about.
func eventually(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			tb.Fatal("never: " + what)
		}
		time.Sleep(time.Millisecond)
	}
}

func move(tb testing.TB, from, to side, handoff uint64, copies []transfer.Copy) {
	tb.Helper()
	h, err := start(context.Background(), from, to, handoff, copies)
	if err != nil {
		tb.Fatal(err)
	}
	if st := wait(tb, h); st.State != transfer.Done || st.Err != nil {
		tb.Fatalf("got %+v", st)
	}
}

// randomCopies divides some of the destination among fragments in random order.
func randomCopies(rng *rand.Rand, n int, srcSize, dstSize, longest int64) []transfer.Copy {
	var copies []transfer.Copy
	var at int64
	for len(copies) < n && at < dstSize {
		length := min(1+rng.Int64N(longest), dstSize-at, srcSize)
		copies = append(copies, transfer.Copy{Src: rng.Int64N(srcSize - length + 1), Dst: at, Len: length})
		at += length
		if rng.IntN(3) > 0 {
			at += rng.Int64N(longest)
		}
	}
	rng.Shuffle(len(copies), func(i, j int) { copies[i], copies[j] = copies[j], copies[i] })
	return copies
}

// apply does what a transfer should do.
func apply(dst, src []byte, copies []transfer.Copy) {
	for _, c := range copies {
		copy(dst[c.Dst:c.Dst+c.Len], src[c.Src:c.Src+c.Len])
	}
}

// offer is what a child process tells: how to reach its memory, filled with fillRandom(childSeed).
type offer struct{ Peer []byte }

// order is what a child that pushes is told.
type order struct {
	Peer, Tag []byte
	Copies    []transfer.Copy
}

const (
	childSize = 12 << 20
	childSeed = 7
)

// child runs in a process of its own: it exports all its memory as handoff 1, or pushes as told, until
// its input ends.
func child(name string) error {
	mem, err := transfer.NewMemory(childSize, "child")
	if err != nil {
		return err
	}
	e, err := backends.Open(name, mem, backends.Options{})
	if err != nil {
		return err
	}
	side{e, mem}.fillRandom(childSeed)
	if p, ok := e.(transfer.Puller); ok {
		if err := p.Export(1, capability, []transfer.Range{{Len: childSize}}); err != nil {
			return err
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(offer{e.Describe()}); err != nil {
		return err
	}
	for in := json.NewDecoder(os.Stdin); ; {
		var o order
		if err := in.Decode(&o); err == io.EOF {
			return e.Close()
		} else if err != nil {
			return err
		}
		if _, err := e.(transfer.Pusher).Push(context.Background(), o.Peer, o.Tag, o.Copies); err != nil {
			return err
		}
	}
}

// process is a running child.
type process struct {
	cmd  *exec.Cmd
	in   *json.Encoder
	peer []byte
}

func startChild(t *testing.T, name string) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+name)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	var o offer
	if err := json.Unmarshal(line, &o); err != nil {
		t.Fatal(err)
	}
	return &process{cmd, json.NewEncoder(in), o.Peer}
}

// childBytes is what the child's memory holds.
func childBytes() []byte {
	b := make([]byte, childSize)
	rand.NewChaCha8([32]byte{childSeed}).Read(b)
	return b
}

func requireEqual(t *testing.T, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("byte %d of %d differs", i, len(want))
		}
	}
}
