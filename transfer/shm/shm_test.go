//go:build linux

package shm

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"baton/transfer/internal/backend"

	"baton/transfer"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(tb testing.TB, size int64, opt Options) *Endpoint {
	tb.Helper()
	mem, err := transfer.NewMemory(size, "test")
	if err != nil {
		tb.Fatal(err)
	}
	if err := mem.Touch(); err != nil {
		tb.Fatal(err)
	}
	e, err := New(mem, opt)
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
	return e
}

var capability = []byte("0123456789abcdef")

func pull(tb testing.TB, dst, src *Endpoint, copies []transfer.Copy) transfer.Status {
	tb.Helper()
	h, err := dst.Pull(context.Background(), src.Describe(), 1, capability, copies)
	if err != nil {
		tb.Fatal(err)
	}
	<-h.Settled()
	return h.Poll()
}

// The connection ends between the last copied byte and the verdict: the source may have reused the
// memory, so the pull must not succeed.
func TestConnectionLostDuringCopy(t *testing.T) {
	src, dst := open(t, 1<<20, Options{}), open(t, 1<<20, Options{})
	all := []transfer.Range{{Len: 1 << 20}}
	if err := src.Export(1, capability, all); err != nil {
		t.Fatal(err)
	}
	dst.copied = func() {
		if src.Revoke(1) {
			t.Error("quiesced in the middle of a read")
		}
		src.server.Close()
		if !src.Revoke(1) {
			t.Error("not quiesced without a connection")
		}
	}
	st := pull(t, dst, src, []transfer.Copy{{Len: 1 << 20}})
	if st.State != transfer.Failed || !errors.Is(st.Err, transfer.ErrPeerLost) {
		t.Fatalf("got %+v", st)
	}
}

// Two pulls from one source share a connection and a mapping, and a mapping is given back.
func TestMappingIsShared(t *testing.T) {
	src, dst := open(t, 1<<20, Options{}), open(t, 1<<20, Options{})
	rand.Read(src.mem.Data)
	if err := src.Export(1, capability, []transfer.Range{{Len: 1 << 20}}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range int64(8) {
		wg.Go(func() {
			if st := pull(t, dst, src, []transfer.Copy{{Src: i << 17, Dst: i << 17, Len: 1 << 17}}); st.State != transfer.Done {
				t.Error(st)
			}
		})
	}
	wg.Wait()
	if !bytes.Equal(src.mem.Data, dst.mem.Data) {
		t.Error("bytes differ")
	}
	if len(dst.peers) != 1 {
		t.Errorf("%d connections", len(dst.peers))
	}
}

func TestBatches(t *testing.T) {
	copies := []transfer.Copy{{Src: 0, Dst: 100, Len: maxBatch*2 + 5}, {Src: 7, Dst: 9, Len: 0}, {Src: 50, Dst: 60, Len: 10}}
	for range 3 * maxBatch / 1000 {
		copies = append(copies, transfer.Copy{Src: 1, Dst: 2, Len: 1000})
	}
	var want, got int64
	for _, c := range copies {
		want += c.Len
	}
	shares := batches(copies, 2)
	for i, share := range shares {
		var n int64
		for _, c := range share {
			n += c.Len
		}
		if n != maxBatch && i != len(shares)-1 {
			t.Errorf("batch %d of %d has %d bytes", i, len(shares), n)
		}
		got += n
	}
	if got != want {
		t.Errorf("%d bytes of %d", got, want)
	}
	if last := shares[2][0]; last != (transfer.Copy{Src: maxBatch * 2, Dst: 100 + maxBatch*2, Len: 5}) {
		t.Errorf("the rest of a long copy: %+v", last)
	}
	if n := len(batches(nil, 2)); n != 0 {
		t.Errorf("nothing has %d batches", n)
	}
	if n := len(batches([]transfer.Copy{{Len: 2 << 20}}, 4)); n != 4 {
		t.Errorf("2 MiB for 4 threads are %d batches", n)
	}
}

// A stranger gets no descriptor, whatever it says.
func FuzzServe(f *testing.F) {
	src := open(f, 4096, Options{Timeout: time.Second})
	addr := src.server.Addr().String()
	claim := binary.LittleEndian.AppendUint64([]byte{0, 0, 0, 0, kindClaim}, 1)
	claim = backend.EndFrame(backend.AppendClaim(claim, 1, capability), 0)
	ranges := backend.EndFrame(backend.AppendRanges(make([]byte, 4), []transfer.Range{{Len: 10}}), 0)
	f.Add(true, append(claim, ranges...))
	f.Add(true, []byte{9, 0, 0, 0, kindDone, 1, 0, 0, 0, 0, 0, 0, 0})
	f.Add(false, []byte(magic))
	f.Fuzz(func(t *testing.T, greet bool, rest []byte) {
		c, err := net.Dial("unix", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(5 * time.Second))
		var b []byte
		if greet {
			b = binary.LittleEndian.AppendUint64([]byte(magic), src.id)
		}
		if _, err := c.Write(append(b, rest...)); err == nil {
			c.(*net.UnixConn).CloseWrite()
		}
		in := &fdReader{c: c.(*net.UnixConn)}
		defer in.close()
		for buf := make([]byte, 4096); ; {
			if _, err := in.Read(buf); err != nil {
				break
			}
		}
		if len(in.fds) > 0 {
			t.Fatal("a stranger got the memory")
		}
	})
}
