package backend

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"baton/transfer"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRevokeWaitsForReaders(t *testing.T) {
	var e Exports
	capability := []byte("secret")
	whole := []transfer.Range{{Len: 100}}
	if err := e.Add(1, capability, whole, 100); err != nil {
		t.Fatal(err)
	}
	clear(capability) // the table has its own
	capability = []byte("secret")
	end1, err := e.Begin(1, capability, whole)
	if err != nil {
		t.Fatal(err)
	}
	end2, err := e.Begin(1, capability, whole)
	if err != nil {
		t.Fatal(err)
	}
	if e.Revoke(1) {
		t.Error("two readers, and quiesced")
	}
	if _, err := e.Begin(1, capability, whole); !errors.Is(err, transfer.ErrRefused) {
		t.Errorf("a reader after Revoke: %v", err)
	}
	end1()
	if e.Revoke(1) {
		t.Error("a reader left, and quiesced")
	}
	if err := e.Add(1, capability, whole, 100); err == nil {
		t.Error("exported again while a reader is left")
	}
	end2()
	for range 2 { // the second time there is no such export
		if !e.Revoke(1) {
			t.Error("no reader left, and not quiesced")
		}
	}
	if err := e.Add(1, capability, whole, 100); err != nil {
		t.Error(err)
	}
}

func TestTask(t *testing.T) {
	life, end := context.WithCancel(t.Context())
	defer end()
	boom := errors.New("boom")

	task := NewTask(t.Context(), life)
	task.Moved(5)
	if st := task.Poll(); st.State != transfer.Running || st.Bytes != 5 || !st.Ended.IsZero() || st.Began.IsZero() {
		t.Errorf("running: %+v", st)
	}
	task.Distrust(boom)
	<-task.Settled()
	if st := task.Poll(); st.State != transfer.Unsafe || st.Err != boom {
		t.Errorf("unsafe: %+v", st)
	}
	task.Settle(errors.New("later"))
	if st := task.Poll(); st.State != transfer.Failed || st.Err != boom || st.Ended.IsZero() {
		t.Errorf("quiesced: %+v", st)
	}
	task.Settle(nil)
	task.Distrust(boom)
	if st := task.Poll(); st.State != transfer.Failed {
		t.Errorf("the first verdict does not stand: %+v", st)
	}
	if task.Context().Err() == nil {
		t.Error("a settled task keeps its context")
	}

	for name, c := range map[string]struct {
		stop func(*Task)
		ctx  func() (context.Context, context.CancelFunc)
		want error
	}{
		"cancel":   {(*Task).Cancel, nil, context.Canceled},
		"close":    {func(*Task) { end() }, nil, transfer.ErrClosed},
		"deadline": {func(*Task) {}, func() (context.Context, context.CancelFunc) { return context.WithTimeout(t.Context(), 1) }, transfer.ErrTimeout},
	} {
		ctx, cancel := t.Context(), context.CancelFunc(func() {})
		if c.ctx != nil {
			ctx, cancel = c.ctx()
		}
		var l context.Context
		l, end = context.WithCancel(t.Context())
		task := NewTask(ctx, l)
		c.stop(task)
		<-task.Context().Done()
		if err := Reason(task.Context(), boom); !errors.Is(err, c.want) || errors.Is(err, boom) {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
		end()
	}
}

func TestVerdicts(t *testing.T) {
	refusal := errors.Join(transfer.ErrRefused)
	var e Exports
	refused := e.Check(7, nil)
	for _, err := range []error{nil, refusal, refused, errors.New("odd"), errors.New(strings.Repeat("x", 500))} {
		got := ParseVerdict(AppendVerdict(nil, err))
		if (got == nil) != (err == nil) || errors.Is(got, transfer.ErrRefused) != errors.Is(err, transfer.ErrRefused) {
			t.Errorf("%v arrives as %v", err, got)
		}
	}
	if got := ParseVerdict(AppendVerdict(nil, refused)).Error(); got != refused.Error() {
		t.Errorf("%q arrives as %q", refused, got)
	}
	if ParseVerdict(nil) == nil {
		t.Error("no verdict is a yes")
	}
}

func TestFrames(t *testing.T) {
	body := bytes.Repeat([]byte("abc"), 30_000)
	frame := EndFrame(append(BeginFrame([]byte("x")), body...), 1)[1:]
	got, err := ReadFrame(bytes.NewReader(frame), nil, len(body))
	if err != nil || !bytes.Equal(got, body) {
		t.Fatal(err)
	}
	if _, err := ReadFrame(bytes.NewReader(frame), nil, len(body)-1); err == nil {
		t.Error("a frame beyond the limit was read")
	}
	if _, err := ReadFrame(bytes.NewReader(frame[:1000]), nil, len(body)); err != io.ErrUnexpectedEOF {
		t.Errorf("half a frame: %v", err)
	}
	if got, err := ReadFrame(bytes.NewReader([]byte{0xff, 0xff, 0xff, 2, 1}), nil, MaxFrame); err == nil || cap(got) > 1<<16 {
		t.Errorf("a lying length: %d bytes, %v", cap(got), err)
	}
	r := bytes.NewReader(append(frame[:len(frame):len(frame)], 'z'))
	if err := SkipFrame(r, len(body)); err != nil || r.Len() != 1 {
		t.Errorf("%d bytes left, %v", r.Len(), err)
	}
	for _, verdict := range [][]byte{{0}, []byte("\x01no")} {
		r := bytes.NewReader(append(EndFrame(append(BeginFrame(nil), verdict...), 0), "data"...))
		if got, err := ReadVerdict(r); err != nil || !bytes.Equal(got, verdict) || r.Len() != 4 {
			t.Errorf("got %q, %d bytes left, %v", got, r.Len(), err)
		}
	}
	for _, bad := range []string{"", "\x01\x00\x00\x00", "\x00\x00\x00\x00\x00", "\xff\xff\xff\xff\x00", "\x05\x00\x00\x00\x00ab"} {
		if _, err := ReadVerdict(strings.NewReader(bad)); err == nil {
			t.Errorf("%q is an answer", bad)
		}
	}
}

// pipes is a listener whose connections are in memory, for synctest.
type pipes struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func listenPipes() *pipes { return &pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.done) }); return nil }
func (p *pipes) Addr() net.Addr { return nil }

func (p *pipes) dial() net.Conn {
	near, far := net.Pipe()
	p.conns <- far
	return near
}

// echo proves a connection by its first byte, then echoes.
func echo(s *Session) {
	var b [1]byte
	for {
		if _, err := s.Read(b[:]); err != nil {
			return
		}
		s.Proven()
		s.Write(b[:])
	}
}

func alive(c net.Conn) bool {
	c.SetDeadline(time.Now().Add(time.Second))
	if _, err := c.Write([]byte("x")); err != nil {
		return false
	}
	_, err := c.Read(make([]byte, 1))
	return err == nil
}

func TestServerBoundsStrangers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ln := listenPipes()
		srv := Serve(ln, Limits{Conns: 6, Unproven: 3, Patience: 5 * time.Second}, echo)
		var friends, strangers []net.Conn
		friend := func() bool {
			c := ln.dial()
			synctest.Wait()
			ok := alive(c)
			if ok {
				friends = append(friends, c)
			} else {
				c.Close()
			}
			return ok
		}
		for range 2 {
			if !friend() {
				t.Fatal("an engine is kept out of an empty server")
			}
		}
		for range 10 {
			strangers = append(strangers, ln.dial())
			synctest.Wait()
		}
		if n := len(srv.sessions); n != 5 {
			t.Errorf("%d connections, want 2 engines and 3 strangers", n)
		}
		for range 4 {
			if !friend() {
				t.Error("idle strangers keep an engine out")
			}
		}
		if friend() {
			t.Error("more connections than the limit")
		}
		// Strangers' time is up; engines may be idle.
		strangers = append(strangers, ln.dial())
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := len(srv.sessions); n != 6 {
			t.Errorf("%d connections after a minute, want 6 engines", n)
		}
		for _, c := range friends {
			if !alive(c) {
				t.Error("an idle engine was dropped")
			}
		}
		srv.Close()
		for _, c := range append(friends, strangers...) {
			c.Close()
		}
	})
}
