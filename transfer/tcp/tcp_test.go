package tcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"baton/transfer"
	"baton/transfer/internal/backend"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// raw is a peer spoken for in bytes.
type raw struct {
	*net.TCPConn
	t testing.TB
}

func dialRaw(t testing.TB, e *endpoint) raw {
	t.Helper()
	c, err := net.Dial("tcp", e.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(10 * time.Second))
	r := raw{c.(*net.TCPConn), t}
	r.write(binary.LittleEndian.AppendUint64([]byte(magic), e.id))
	return r
}

func (r raw) write(b []byte) {
	r.t.Helper()
	if _, err := r.Write(b); err != nil {
		r.t.Fatal(err)
	}
}

func (r raw) request(claim []byte, ranges ...transfer.Range) {
	r.t.Helper()
	b, err := appendRequest(nil, claim, ranges)
	if err != nil {
		r.t.Fatal(err)
	}
	r.write(b)
}

func (r raw) verdict() error {
	r.t.Helper()
	b, err := backend.ReadVerdict(r)
	if err != nil {
		r.t.Fatal(err)
	}
	return backend.ParseVerdict(b)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never: " + what)
		}
	}
}

const size = 32 << 20 // more than the sockets of a connection hold

// A puller that takes its time pins the source; when it is gone, or its time is up, it does not.
func TestRevokeDuringSend(t *testing.T) {
	for _, ends := range []string{"closes", "stalls"} {
		t.Run(ends, func(t *testing.T) {
			timeout := time.Minute
			if ends == "stalls" {
				timeout = time.Second
			}
			p := openPuller(t, size, Options{Timeout: timeout})
			if err := p.Export(1, capability, []transfer.Range{{Len: size}}); err != nil {
				t.Fatal(err)
			}
			c := dialRaw(t, p.endpoint)
			c.request(backend.AppendClaim(nil, 1, capability), transfer.Range{Len: size})
			if err := c.verdict(); err != nil {
				t.Fatal(err)
			}
			if p.Revoke(1) {
				t.Fatal("quiesced while it sends")
			}
			if ends == "closes" {
				c.Close()
			}
			eventually(t, "quiesced", func() bool { return p.Revoke(1) })
		})
	}
}

func TestSilentSource(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	p := openPuller(t, 4096, Options{Timeout: 50 * time.Millisecond})
	peer := backend.Description{Backend: PullName, Addr: ln.Addr().String(), Size: 4096}.Encode()
	h, err := p.Pull(t.Context(), peer, 1, capability, []transfer.Copy{{Len: 1}})
	if err != nil {
		t.Fatal(err)
	}
	<-h.Settled()
	if st := h.Poll(); st.State != transfer.Failed || !errors.Is(st.Err, transfer.ErrTimeout) {
		t.Fatalf("got %+v", st)
	}
}

// expect is an expectation of everything, and what opens it.
func expect(t *testing.T, p *Pusher, ranges ...transfer.Range) (transfer.Handle, claim) {
	t.Helper()
	b, h, err := p.Expect(t.Context(), ranges)
	if err != nil {
		t.Fatal(err)
	}
	var to tag
	if err := json.Unmarshal(b, &to); err != nil {
		t.Fatal(err)
	}
	return h, claim{ticket: ticket(to.Ticket), push: 5, streams: 2}
}

func state(h transfer.Handle) transfer.State {
	<-h.Settled()
	return h.Poll().State
}

// While a stream may write, a cancelled expectation is unsafe.
func TestUnsafeWhileStreamsWrite(t *testing.T) {
	p := openPusher(t, 4096, Options{})
	h, c := expect(t, p, transfer.Range{Len: 100})
	x, err := p.begin(c, []transfer.Range{{Len: 60}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.begin(c, []transfer.Range{{Off: 60, Len: 40}}); err != nil {
		t.Fatal(err)
	}
	h.Cancel()
	if s := state(h); s != transfer.Unsafe {
		t.Fatalf("state %d", s)
	}
	p.finish(x, 60, nil)
	if s := state(h); s != transfer.Unsafe {
		t.Fatalf("one stream may still write: state %d", s)
	}
	p.finish(x, 40, io.ErrUnexpectedEOF)
	if st := h.Poll(); st.State != transfer.Failed || !errors.Is(st.Err, context.Canceled) {
		t.Fatalf("got %+v", st)
	}
}

func TestTicketIsForOnePush(t *testing.T) {
	p := openPusher(t, 4096, Options{})
	h, c := expect(t, p, transfer.Range{Len: 100})
	other := c
	other.push++
	first, second := dialRaw(t, p.endpoint), dialRaw(t, p.endpoint)
	first.request(c.append(nil), transfer.Range{Len: 60})
	if err := first.verdict(); err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string]claim{
		"another push":     other,
		"another number":   {c.ticket, c.push, 3},
		"an unknown one":   {ticket{1, 2, 3}, c.push, c.streams},
		"the zero ticket":  {ticket{}, 0, 1},
		"the same, intact": c, // refused for its ranges
	} {
		second.request(bad.append(nil), transfer.Range{Off: 50, Len: 50})
		if err := second.verdict(); !errors.Is(err, transfer.ErrRefused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	second.request(c.append(nil), transfer.Range{Off: 60, Len: 40})
	if err := second.verdict(); err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("x"), 100)
	second.write(data[60:])
	if err := second.verdict(); err != nil {
		t.Fatal(err)
	}
	if s := h.Poll().State; s != transfer.Running {
		t.Errorf("state %d with 60 bytes missing", s)
	}
	first.write(data[:60])
	if err := first.verdict(); err != nil {
		t.Fatal(err)
	}
	if s := state(h); s != transfer.Done || !bytes.Equal(p.mem.Data[:101], append(data, 0)) {
		t.Errorf("state %d", s)
	}
}

// A pusher that dies halfway fails the expectation at once, and its other stream is ended.
func TestPusherDiesHalfway(t *testing.T) {
	p := openPusher(t, 4096, Options{})
	h, c := expect(t, p, transfer.Range{Len: 100})
	dying, other := dialRaw(t, p.endpoint), dialRaw(t, p.endpoint)
	dying.request(c.append(nil), transfer.Range{Len: 60})
	other.request(c.append(nil), transfer.Range{Off: 60, Len: 40})
	if err := errors.Join(dying.verdict(), other.verdict()); err != nil {
		t.Fatal(err)
	}
	dying.write(make([]byte, 30))
	dying.Close()
	eventually(t, "failed", func() bool { return h.Poll().State == transfer.Failed })
	if st := h.Poll(); !errors.Is(st.Err, transfer.ErrPeerLost) {
		t.Errorf("got %+v", st)
	}
	if _, err := other.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the other stream is still open: %v", err)
	}
}

// Bytes that come before the verdict are not taken for the next request.
func TestEarlyBytes(t *testing.T) {
	p := openPusher(t, 4096, Options{})
	h, c := expect(t, p, transfer.Range{Len: 100})
	c.streams = 1
	r := dialRaw(t, p.endpoint)
	b, err := appendRequest(nil, c.append(nil), []transfer.Range{{Len: 100}})
	if err != nil {
		t.Fatal(err)
	}
	r.write(append(b, make([]byte, 100)...))
	io.Copy(io.Discard, r)
	h.Cancel()
	if s := state(h); s != transfer.Failed {
		t.Errorf("state %d", s)
	}
}

// Connections are kept; a kept one that the source has dropped is replaced without a failure.
func TestConnectionsAreKept(t *testing.T) {
	src, dst := openPuller(t, size, Options{}), openPuller(t, size, Options{})
	if err := src.Export(1, capability, []transfer.Range{{Len: size}}); err != nil {
		t.Fatal(err)
	}
	pull := func(n int64) {
		t.Helper()
		h, err := dst.Pull(t.Context(), src.Describe(), 1, capability, []transfer.Copy{{Len: n}})
		if err != nil {
			t.Fatal(err)
		}
		if s := state(h); s != transfer.Done {
			t.Fatal(h.Poll())
		}
	}
	key := peerKey{src.addr, src.id}
	pull(size)
	kept := len(dst.pool.idle[key])
	if kept != 4 {
		t.Errorf("%d connections kept, want 4", kept)
	}
	pull(size)
	pull(10)
	if n := len(dst.pool.idle[key]); n != kept {
		t.Errorf("%d connections after two more pulls, %d before", n, kept)
	}
	for _, c := range dst.pool.idle[key] {
		c.Conn.(*net.TCPConn).CloseWrite() // the source ends its side
	}
	pull(10)
	if n := len(dst.pool.idle[key]); n != 1 {
		t.Errorf("%d connections kept, want the new one", n)
	}
	old := dst.pool.idle[key][0]
	dst.pool.idle[key][0].since = time.Now().Add(-time.Hour)
	pull(10)
	if list := dst.pool.idle[key]; len(list) != 1 || list[0].Conn == old.Conn {
		t.Errorf("%d connections, want one, not the old one", len(list))
	}
	if err := old.SetDeadline(time.Time{}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the old connection is still open: %v", err)
	}
}

func TestAddresses(t *testing.T) {
	mem := memory(t, 4096)
	if p, err := NewPuller(mem, Options{Listen: "0.0.0.0:0"}); err == nil {
		p.Close()
		t.Error("peers would be told 0.0.0.0")
	}
	p, err := NewPuller(mem, Options{Listen: "0.0.0.0:0", Advertise: "host.example"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if !strings.HasPrefix(p.addr, "host.example:") {
		t.Errorf("advertised as %s", p.addr)
	}
	var typed *transfer.Error
	if _, err := NewPusher(mem, Options{Listen: "no such host:x"}); !errors.As(err, &typed) {
		t.Errorf("got %v", err)
	}
}

func TestTagOfAnotherPeer(t *testing.T) {
	a, b := openPusher(t, 4096, Options{}), openPusher(t, 4096, Options{})
	tagged, _, err := a.Expect(t.Context(), []transfer.Range{{Len: 10}})
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range [][]byte{nil, []byte("{}"), []byte("null"), tagged[:len(tagged)-2], bytes.Repeat([]byte(" "), 5000)} {
		if _, err := b.Push(t.Context(), a.Describe(), bad, []transfer.Copy{{Len: 10}}); err == nil {
			t.Errorf("tag %.40q was taken", bad)
		}
	}
	if _, err := b.Push(t.Context(), b.Describe(), tagged, []transfer.Copy{{Len: 10}}); err == nil {
		t.Error("a tag with another peer's description was taken")
	}
}

// What a stranger sends yields no byte of the memory and changes none.
func fuzzServer(f *testing.F, e *endpoint, claims ...[]byte) {
	before := bytes.Repeat([]byte{0xa5}, len(e.mem.Data))
	copy(e.mem.Data, before)
	ranges := backend.AppendRanges(nil, []transfer.Range{{Len: 100}})
	f.Add(true, uint8(0), ranges)
	f.Add(true, uint8(9), append([]byte{12, 0, 0, 0}, "some claim..."...))
	f.Add(false, uint8(9), []byte(magic))
	f.Fuzz(func(t *testing.T, greet bool, which uint8, rest []byte) {
		c, err := net.Dial("tcp", e.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(5 * time.Second))
		var b []byte
		if greet {
			b = binary.LittleEndian.AppendUint64([]byte(magic), e.id)
		}
		if int(which) < len(claims) {
			start := len(b)
			b = backend.EndFrame(append(backend.BeginFrame(b), claims[which]...), start)
		}
		if _, err := c.Write(append(b, rest...)); err == nil {
			c.(*net.TCPConn).CloseWrite()
		}
		got, _ := io.ReadAll(c)
		if bytes.Contains(got, []byte{0xa5, 0xa5, 0xa5, 0xa5}) {
			t.Fatalf("a stranger got %x", got)
		}
		if !bytes.Equal(e.mem.Data, before) {
			t.Fatal("a stranger wrote to the memory")
		}
	})
}

func FuzzPullRequest(f *testing.F) {
	p := openPuller(f, 1<<16, Options{Timeout: time.Second})
	if err := p.Export(1, capability, nil); err != nil { // a right capability, to nothing
		f.Fatal(err)
	}
	fuzzServer(f, p.endpoint, backend.AppendClaim(nil, 1, capability), backend.AppendClaim(nil, 2, capability))
}

func FuzzPushRequest(f *testing.F) {
	p := openPusher(f, 1<<16, Options{Timeout: time.Second})
	fuzzServer(f, p.endpoint, claim{streams: 1}.append(nil))
}
