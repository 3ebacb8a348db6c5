package backends_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"baton/transfer"
	"baton/transfer/backends"
)

// Whatever the fragments, exactly the bytes that were asked for change.
func TestBytesArrive(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		const srcSize, dstSize = 3<<20 + 17, 5<<20 + 1
		from, to := open(t, name, srcSize), open(t, name, dstSize)
		from.fillRandom(1)
		to.fillRandom(2)
		rng := rand.New(rand.NewPCG(1, 2))
		for round, c := range []struct {
			n       int
			longest int64
		}{{1, 1}, {1, srcSize}, {4, 1 << 20}, {300, 20_000}, {5000, 100}, {7, 3}} {
			copies := randomCopies(rng, c.n, srcSize, dstSize, c.longest)
			want := append([]byte(nil), to.mem.Data...)
			apply(want, from.mem.Data, copies)
			move(t, from, to, uint64(round), copies)
			requireEqual(t, to.mem.Data, want)
		}
		move(t, from, to, 99, nil)
	})
}

func TestManyRanges(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		const n, length = 40_000, 512
		from, to := open(t, name, 2*n*length), open(t, name, 2*n*length)
		from.fillRandom(1)
		copies := make([]transfer.Copy, n)
		for i, j := range rand.New(rand.NewPCG(3, 4)).Perm(n) {
			copies[i] = transfer.Copy{Src: int64(j) * 2 * length, Dst: int64(i) * 2 * length, Len: length}
		}
		want := make([]byte, len(to.mem.Data))
		apply(want, from.mem.Data, copies)
		move(t, from, to, 1, copies)
		requireEqual(t, to.mem.Data, want)
	})
}

// Large enough for several streams and threads.
func TestLargeTransfer(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		const size = 40<<20 + 12345
		from, to := open(t, name, size), open(t, name, size)
		from.fillRandom(1)
		copies := []transfer.Copy{{Src: 20 << 20, Dst: 0, Len: size - 20<<20}, {Src: 0, Dst: size - 20<<20, Len: 20 << 20}}
		want := make([]byte, size)
		apply(want, from.mem.Data, copies)
		h, err := start(t.Context(), from, to, 1, copies)
		if err != nil {
			t.Fatal(err)
		}
		st := wait(t, h)
		if st.State != transfer.Done || st.Bytes != size || st.Ended.Before(st.Began) {
			t.Fatalf("got %+v", st)
		}
		requireEqual(t, to.mem.Data, want)
	})
}

func TestConcurrentTransfers(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		const peers, each, size = 3, 8, 1 << 20
		to := open(t, name, peers*each*size)
		var wg sync.WaitGroup
		for p := range int64(peers) {
			from := open(t, name, each*size)
			from.fillRandom(byte(p))
			for i := range int64(each) {
				wg.Go(func() {
					h, err := start(t.Context(), from, to, uint64(i), []transfer.Copy{{Src: i * size, Dst: (p*each + i) * size, Len: size}})
					if err != nil {
						t.Error(err)
						return
					}
					if st := wait(t, h); st.State != transfer.Done {
						t.Error(st)
					}
				})
			}
		}
		wg.Wait()
		want := make([]byte, each*size)
		for p := range peers {
			rand.NewChaCha8([32]byte{byte(p)}).Read(want)
			requireEqual(t, to.mem.Data[p*each*size:(p+1)*each*size], want)
		}
	})
}

func TestBothDirectionsAndSelf(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		a, b := open(t, name, 4096), open(t, name, 4096)
		a.fillRandom(1)
		b.fillRandom(2)
		move(t, a, b, 1, []transfer.Copy{{Src: 0, Dst: 2048, Len: 2048}})
		move(t, b, a, 1, []transfer.Copy{{Src: 0, Dst: 2048, Len: 2048}})
		move(t, a, a, 2, []transfer.Copy{{Src: 0, Dst: 2048, Len: 2048}})
		requireEqual(t, a.mem.Data[2048:], a.mem.Data[:2048])
	})
}

// Settled for good and safe, in the end, after whatever went wrong.
func requireFailed(t *testing.T, h transfer.Handle, want error) {
	t.Helper()
	wait(t, h)
	eventually(t, "quiesced", func() bool { return h.Poll().State != transfer.Unsafe })
	st := h.Poll()
	if st.State != transfer.Failed || !errors.Is(st.Err, want) {
		t.Fatalf("got %+v, want a failure with %q", st, want)
	}
	var typed *transfer.Error
	if !errors.As(st.Err, &typed) {
		t.Errorf("%v does not say which transfer failed", st.Err)
	}
}

func TestCancel(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		const size = 16 << 20
		from, to := open(t, name, size), open(t, name, size)
		from.fillRandom(1)
		zero := make([]byte, size)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		h, err := start(ctx, from, to, 1, []transfer.Copy{{Len: size}})
		if err != nil {
			t.Fatal(err)
		}
		requireFailed(t, h, context.Canceled)
		// Cancelled somewhere on its way: after it settled nothing more is written.
		for i := range uint64(6) {
			h, err := start(t.Context(), from, to, 10+i, []transfer.Copy{{Len: size}})
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "under way", func() bool { st := h.Poll(); return st.Bytes >= int64(i)<<20 || st.State != transfer.Running })
			h.Cancel()
			wait(t, h)
			eventually(t, "quiesced", func() bool { return h.Poll().State != transfer.Unsafe })
			clear(to.mem.Data)
			if p, ok := from.Endpoint.(transfer.Puller); ok {
				eventually(t, "source released", func() bool { return p.Revoke(10 + i) })
			}
			if !bytes.Equal(to.mem.Data, zero) {
				t.Fatal("bytes were written after the transfer was quiesced")
			}
			if st := h.Poll(); st.State != transfer.Done && !errors.Is(st.Err, context.Canceled) {
				t.Fatalf("got %+v", st)
			}
		}
		clear(to.mem.Data)
		move(t, from, to, 1000, []transfer.Copy{{Len: size}}) // the endpoints still work
		requireEqual(t, to.mem.Data, from.mem.Data)
	})
}

func TestDeadline(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		from, to := open(t, name, 4096), open(t, name, 4096)
		ctx, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
		defer cancel()
		h, err := start(ctx, from, to, 1, []transfer.Copy{{Len: 4096}})
		if err != nil {
			t.Fatal(err)
		}
		requireFailed(t, h, transfer.ErrTimeout)
	})
}

func TestBadCopies(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		from, to := open(t, name, 4096), open(t, name, 4096)
		for _, c := range []transfer.Copy{
			{Src: 4000, Len: 97},
			{Dst: 4000, Len: 97},
			{Src: -1, Len: 1},
			{Dst: -1, Len: 1},
			{Len: -1},
			{Src: 1<<63 - 1, Len: 1<<63 - 1},
			{Dst: 1<<63 - 1, Len: 2},
			{Len: 1 << 40},
		} {
			var typed *transfer.Error
			if _, err := start(t.Context(), from, to, 1, []transfer.Copy{c}); !errors.As(err, &typed) {
				t.Errorf("%+v: %v", c, err)
			}
		}
	})
}

func TestDescriptions(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		to := open(t, name, 4096)
		reach := func(peer string) error {
			var h transfer.Handle
			var err error
			switch to := to.Endpoint.(type) {
			case transfer.Puller:
				h, err = to.Pull(t.Context(), []byte(peer), 1, capability, []transfer.Copy{{Len: 1}})
			case transfer.Pusher:
				tag := `{"addr":"127.0.0.1:1","incarnation":"5","ticket":"AAAAAAAAAAAAAAAAAAAAAA=="}`
				h, err = to.Push(t.Context(), []byte(peer), []byte(tag), []transfer.Copy{{Len: 1}})
			}
			if err != nil {
				return err
			}
			return wait(t, h).Err
		}
		for _, c := range []struct{ peer, words string }{
			{"", "description"},
			{"{", "description"},
			{strings.Repeat(" ", 5000), "4096"},
			{`{"backend":"rdma","addr":"x","size":1}`, `"rdma"`},
			{fmt.Sprintf(`{"backend":%q,"size":1}`, name), "address"},
			{fmt.Sprintf(`{"backend":%q,"addr":"x","size":-1}`, name), "negative"},
		} {
			if err := reach(c.peer); err == nil || !strings.Contains(err.Error(), c.words) {
				t.Errorf("%s: got %v, want an error that says %q", c.peer, err, c.words)
			}
		}
		gone := map[string]string{"shm": "@baton-nobody"}[name]
		if gone == "" {
			gone = "127.0.0.1:1"
		}
		if err := reach(fmt.Sprintf(`{"backend":%q,"addr":%q,"incarnation":"5","size":4096}`, name, gone)); !errors.Is(err, transfer.ErrPeerLost) {
			t.Errorf("nobody there: %v", err)
		}
	})
}

// Another process at an address that a description names is not mistaken for the one meant.
func TestIncarnation(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		from, to := open(t, name, 4096), open(t, name, 4096)
		i := strings.Index(string(from.Describe()), `"incarnation":"`)
		other := []byte(string(from.Describe())[:i] + `"incarnation":"12345","size":4096}`)
		var h transfer.Handle
		var err error
		switch to := to.Endpoint.(type) {
		case transfer.Puller:
			if err := from.Endpoint.(transfer.Puller).Export(1, capability, []transfer.Range{{Len: 4096}}); err != nil {
				t.Fatal(err)
			}
			h, err = to.Pull(t.Context(), other, 1, capability, []transfer.Copy{{Len: 1}})
		case transfer.Pusher:
			tag, _, expectErr := from.Endpoint.(transfer.Pusher).Expect(t.Context(), []transfer.Range{{Len: 1}})
			if expectErr != nil {
				t.Fatal(expectErr)
			}
			if _, err := to.Push(t.Context(), other, tag, []transfer.Copy{{Len: 1}}); err == nil {
				t.Error("the tag of one life, the description of another")
			}
			i := strings.Index(string(tag), `"incarnation":"`)
			j := i + strings.Index(string(tag)[i:], ",")
			h, err = to.Push(t.Context(), other, []byte(string(tag)[:i]+`"incarnation":"12345"`+string(tag)[j:]), []transfer.Copy{{Len: 1}})
		}
		if err != nil {
			t.Fatal(err)
		}
		if st := wait(t, h); st.State != transfer.Failed || !errors.Is(st.Err, transfer.ErrRefused) && !errors.Is(st.Err, transfer.ErrPeerLost) {
			t.Fatalf("got %+v", st)
		}
	})
}

func TestExports(t *testing.T) {
	for _, name := range []string{"shm", "tcp"} {
		t.Run(name, func(t *testing.T) {
			source, dest := open(t, name, 1<<16), open(t, name, 1<<16)
			source.fillRandom(1)
			from, to := source.Endpoint.(transfer.Puller), dest.Endpoint.(transfer.Puller)
			if err := from.Export(1, capability, []transfer.Range{{Off: 4096, Len: 4096}, {Off: 8192, Len: 100}, {Off: 50_000, Len: 1}}); err != nil {
				t.Fatal(err)
			}
			pull := func(handoff uint64, capability string, copies ...transfer.Copy) transfer.Status {
				t.Helper()
				h, err := to.Pull(t.Context(), from.Describe(), handoff, []byte(capability), copies)
				if err != nil {
					t.Fatal(err)
				}
				return wait(t, h)
			}
			ok := string(capability)
			for _, c := range []struct {
				name       string
				handoff    uint64
				capability string
				copies     []transfer.Copy
				granted    bool
			}{
				{"all of it", 1, ok, []transfer.Copy{{Src: 50_000, Len: 1}, {Src: 4096, Dst: 1, Len: 4196}}, true},
				{"wrong capability", 1, ok[1:] + "x", []transfer.Copy{{Src: 4096, Len: 1}}, false},
				{"prefix of the capability", 1, ok[:4], []transfer.Copy{{Src: 4096, Len: 1}}, false},
				{"wrong handoff", 2, ok, []transfer.Copy{{Src: 4096, Len: 1}}, false},
				{"a byte before", 1, ok, []transfer.Copy{{Src: 4095, Len: 2}}, false},
				{"a byte after", 1, ok, []transfer.Copy{{Src: 8192, Len: 101}}, false},
				{"one bad range", 1, ok, []transfer.Copy{{Src: 4096, Len: 5}, {Src: 0, Dst: 50, Len: 5}}, false},
				{"the same again", 1, ok, []transfer.Copy{{Src: 4096, Len: 1}}, true},
			} {
				st := pull(c.handoff, c.capability, c.copies...)
				if granted := st.State == transfer.Done; granted != c.granted {
					t.Errorf("%s: %+v", c.name, st)
				}
				if !c.granted && (st.State != transfer.Failed || !errors.Is(st.Err, transfer.ErrRefused) || st.Bytes > 0) {
					t.Errorf("%s: got %+v, want a refusal", c.name, st)
				}
			}
			for _, bad := range [][]byte{nil, make([]byte, 257)} {
				if _, err := to.Pull(t.Context(), from.Describe(), 1, bad, nil); err == nil {
					t.Errorf("a capability of %d bytes was sent", len(bad))
				}
			}
			if err := from.Export(1, capability, nil); err == nil {
				t.Error("exported twice")
			}
			for _, bad := range []error{
				from.Export(3, nil, nil),
				from.Export(3, make([]byte, 257), nil),
				from.Export(3, capability, []transfer.Range{{Off: 1 << 16, Len: 1}}),
			} {
				if bad == nil {
					t.Error("a bad export was accepted")
				}
			}
			eventually(t, "quiesced", func() bool { return from.Revoke(1) })
			if st := pull(1, ok, transfer.Copy{Src: 4096, Len: 1}); !errors.Is(st.Err, transfer.ErrRefused) {
				t.Errorf("after Revoke: %+v", st)
			}
			if !from.Revoke(1) || !from.Revoke(77) {
				t.Error("nothing is under way, and Revoke says otherwise")
			}
			if err := from.Export(1, []byte("another"), []transfer.Range{{Len: 1}}); err != nil {
				t.Error(err)
			}
			if st := pull(1, "another", transfer.Copy{Len: 1}); st.State != transfer.Done {
				t.Errorf("exported again: %+v", st)
			}
		})
	}
}

func TestExpectations(t *testing.T) {
	source, dest := open(t, "tcp-push", 1<<16), open(t, "tcp-push", 1<<16)
	source.fillRandom(1)
	from, to := source.Endpoint.(transfer.Pusher), dest.Endpoint.(transfer.Pusher)
	expect := func(ranges ...transfer.Range) ([]byte, transfer.Handle) {
		t.Helper()
		tag, h, err := to.Expect(t.Context(), ranges)
		if err != nil {
			t.Fatal(err)
		}
		return tag, h
	}
	push := func(tag []byte, copies ...transfer.Copy) transfer.Status {
		t.Helper()
		h, err := from.Push(t.Context(), to.Describe(), tag, copies)
		if err != nil {
			t.Fatal(err)
		}
		return wait(t, h)
	}
	tag, h := expect(transfer.Range{Off: 100, Len: 50}, transfer.Range{Off: 200, Len: 50})
	for name, copies := range map[string][]transfer.Copy{
		"before":  {{Dst: 99, Len: 2}},
		"after":   {{Dst: 200, Len: 51}},
		"between": {{Dst: 150, Len: 1}},
		"twice":   {{Dst: 100, Len: 10}, {Dst: 105, Len: 1}},
	} {
		if st := push(tag, copies...); !errors.Is(st.Err, transfer.ErrRefused) {
			t.Errorf("%s: %+v", name, st)
		}
	}
	for _, b := range dest.mem.Data {
		if b != 0 {
			t.Fatal("a refused push wrote something")
		}
	}
	if st := h.Poll(); st.State != transfer.Running {
		t.Fatalf("refused pushes changed the expectation: %+v", st)
	}
	if st := push(tag, transfer.Copy{Src: 1000, Dst: 200, Len: 50}, transfer.Copy{Src: 5, Dst: 100, Len: 50}); st.State != transfer.Done {
		t.Fatalf("got %+v", st)
	}
	if st := wait(t, h); st.State != transfer.Done || st.Bytes != 100 {
		t.Fatalf("got %+v", st)
	}
	want := make([]byte, 1<<16)
	copy(want[200:250], source.mem.Data[1000:])
	copy(want[100:150], source.mem.Data[5:])
	requireEqual(t, dest.mem.Data, want)

	if st := push(tag, transfer.Copy{Dst: 100, Len: 50}); !errors.Is(st.Err, transfer.ErrRefused) {
		t.Errorf("a used ticket: %+v", st)
	}
	tag, h = expect(transfer.Range{Len: 100})
	if st := push(tag, transfer.Copy{Len: 99}); st.State != transfer.Done {
		t.Errorf("got %+v", st)
	}
	if st := wait(t, h); st.State != transfer.Failed || !strings.Contains(st.Err.Error(), "1 expected byte") {
		t.Errorf("a push that left one out: %+v", st)
	}
	tag, h = expect(transfer.Range{Len: 100})
	h.Cancel()
	requireFailed(t, h, context.Canceled)
	if st := push(tag, transfer.Copy{Len: 100}); !errors.Is(st.Err, transfer.ErrRefused) {
		t.Errorf("a cancelled ticket: %+v", st)
	}
	if _, h = expect(); wait(t, h).State != transfer.Done {
		t.Error("nothing expected, and not done")
	}
}

func TestAcrossProcesses(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		to := open(t, name, childSize)
		p := startChild(t, name)
		copies := randomCopies(rand.New(rand.NewPCG(5, 6)), 1000, childSize, childSize, 100_000)
		want := make([]byte, childSize)
		apply(want, childBytes(), copies)
		h := p.feed(t, to, copies)
		if st := wait(t, h); st.State != transfer.Done {
			t.Fatalf("got %+v", st)
		}
		requireEqual(t, to.mem.Data, want)
		if err := p.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		p.cmd.Wait()
		if puller, ok := to.Endpoint.(transfer.Puller); ok {
			h, err := puller.Pull(t.Context(), p.peer, 1, capability, copies)
			if err != nil {
				t.Fatal(err)
			}
			requireFailed(t, h, transfer.ErrPeerLost)
		}
	})
}

// feed makes the child's bytes come.
func (p *process) feed(t *testing.T, to side, copies []transfer.Copy) transfer.Handle {
	t.Helper()
	var h transfer.Handle
	var err error
	switch e := to.Endpoint.(type) {
	case transfer.Puller:
		h, err = e.Pull(t.Context(), p.peer, 1, capability, copies)
	case transfer.Pusher:
		var tag []byte
		if tag, h, err = e.Expect(t.Context(), ranges(copies, dst)); err == nil {
			err = p.in.Encode(order{e.Describe(), tag, copies})
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// A source that dies in the middle of a transfer ends it soon; the next one from a new process works.
func TestPeerDies(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		to := open(t, name, childSize)
		whole := []transfer.Copy{{Len: childSize}}
		p := startChild(t, name)
		h := p.feed(t, to, whole)
		eventually(t, "under way", func() bool { st := h.Poll(); return st.Bytes > 0 || st.State != transfer.Running })
		began := time.Now()
		p.cmd.Process.Kill()
		st := wait(t, h)
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("noticed after %v", took)
		}
		// It may have been done before the signal.
		if st.State == transfer.Done {
			requireEqual(t, to.mem.Data, childBytes())
		} else {
			requireFailed(t, h, transfer.ErrPeerLost)
		}
		if st := wait(t, startChild(t, name).feed(t, to, whole)); st.State != transfer.Done {
			t.Fatalf("got %+v", st)
		}
		requireEqual(t, to.mem.Data, childBytes())
	})
}

// A source that is stopped, not dead, holds a pull up to the deadline at most.
func TestPeerStops(t *testing.T) {
	for _, name := range []string{"shm", "tcp"} {
		t.Run(name, func(t *testing.T) {
			to := open(t, name, childSize).Endpoint.(transfer.Puller)
			p := startChild(t, name)
			p.cmd.Process.Signal(syscall.SIGSTOP)
			var status syscall.WaitStatus
			if _, err := syscall.Wait4(p.cmd.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
				t.Fatalf("not stopped: %v, %v", status, err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			h, err := to.Pull(ctx, p.peer, 1, capability, []transfer.Copy{{Len: childSize}})
			if err != nil {
				t.Fatal(err)
			}
			requireFailed(t, h, transfer.ErrTimeout)
			h, err = to.Pull(t.Context(), p.peer, 1, capability, []transfer.Copy{{Len: childSize}})
			if err != nil {
				t.Fatal(err)
			}
			p.cmd.Process.Kill()
			requireFailed(t, h, transfer.ErrPeerLost)
		})
	}
}

func TestClose(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		const size = 32 << 20
		from, to := open(t, name, size), open(t, name, size)
		h, err := start(t.Context(), from, to, 1, []transfer.Copy{{Len: size}})
		if err != nil {
			t.Fatal(err)
		}
		to.Close()
		if st := h.Poll(); st.State != transfer.Done && (st.State != transfer.Failed || !errors.Is(st.Err, transfer.ErrClosed)) {
			t.Fatalf("the destination closed: %+v", st)
		}
		if _, err := start(t.Context(), from, to, 2, []transfer.Copy{{Len: size}}); !errors.Is(err, transfer.ErrClosed) {
			t.Errorf("a transfer to a closed endpoint: %v", err)
		}
		to = open(t, name, size)
		if h, err = start(t.Context(), from, to, 3, []transfer.Copy{{Len: size}}); err != nil {
			t.Fatal(err)
		}
		from.Close()
		if name == "tcp-push" {
			h.Cancel() // nobody may have come for it
		}
		st := wait(t, h)
		if st.State != transfer.Done && !errors.Is(st.Err, transfer.ErrPeerLost) && name != "tcp-push" {
			t.Fatalf("the source closed: %+v", st)
		}
		eventually(t, "quiesced", func() bool { s := h.Poll().State; return s == transfer.Done || s == transfer.Failed })
	})
}

// Strangers get nothing and keep nobody out.
func TestStrangers(t *testing.T) {
	eachBackend(t, func(t *testing.T, name string) {
		from, to := open(t, name, 1<<20), open(t, name, 1<<20)
		from.fillRandom(1)
		listener := from
		if name == "tcp-push" {
			listener = to
		}
		network, addr := "tcp", between(string(listener.Describe()), `"addr":"`, `"`)
		if name == "shm" {
			network = "unix"
		}
		for i := range 200 {
			c, err := net.Dial(network, addr)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			switch i % 4 {
			case 0: // says nothing
			case 1:
				c.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
			case 2:
				c.Write([]byte("batontc1\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff"))
			case 3:
				garbage := make([]byte, 64<<10)
				rand.NewChaCha8([32]byte{byte(i)}).Read(garbage)
				c.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
				c.Write(garbage)
			}
		}
		move(t, from, to, 1, []transfer.Copy{{Len: 1 << 20}})
		requireEqual(t, to.mem.Data, from.mem.Data)
	})
}

func between(s, before, after string) string {
	_, s, _ = strings.Cut(s, before)
	s, _, _ = strings.Cut(s, after)
	return s
}

func TestUnknownBackend(t *testing.T) {
	_, err := backends.Open("carrier-pigeon", nil, backends.Options{})
	var unknown *backends.UnknownError
	if !errors.As(err, &unknown) {
		t.Fatalf("got %v", err)
	}
	for _, name := range backends.Names {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("%q does not list %s", err, name)
		}
	}
}
