package kvevents

import (
	"bufio"
	"context"
	"encoding/binary"
	"io"
	"net"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stored is an event as vLLM writes it, in either form.
func stored(asMap bool, hashes []any, parent any, tokens []int, size int) []byte {
	var b []byte
	key := func(name string) {
		if asMap {
			b = msgp.AppendString(b, name)
		}
	}
	if asMap {
		b = msgp.AppendMapHeader(b, 8)
	} else {
		b = msgp.AppendArrayHeader(b, 7)
	}
	hash := func(h any) {
		switch h := h.(type) {
		case nil:
			b = msgp.AppendNil(b)
		case int64:
			b = msgp.AppendInt64(b, h)
		case uint64:
			b = msgp.AppendUint64(b, h)
		case []byte:
			b = msgp.AppendBytes(b, h)
		}
	}
	key("type")
	b = msgp.AppendString(b, "BlockStored")
	key("block_hashes")
	b = msgp.AppendArrayHeader(b, uint32(len(hashes)))
	for _, h := range hashes {
		hash(h)
	}
	key("parent_block_hash")
	hash(parent)
	key("token_ids")
	b = msgp.AppendArrayHeader(b, uint32(len(tokens)))
	for _, t := range tokens {
		b = msgp.AppendInt(b, t)
	}
	key("block_size")
	b = msgp.AppendInt(b, size)
	key("lora_id")
	b = msgp.AppendNil(b)
	key("medium")
	b = msgp.AppendString(b, "GPU")
	if asMap {
		key("something_new")
		b = msgp.AppendMapStrStr(b, map[string]string{"a": "b"})
	}
	return b
}

func removed(hash int64) []byte {
	b := msgp.AppendArrayHeader(nil, 2)
	b = msgp.AppendString(b, "BlockRemoved")
	return msgp.AppendInt64(msgp.AppendArrayHeader(b, 1), hash)
}

func batch(events ...[]byte) []byte {
	b := msgp.AppendArrayHeader(nil, 3)
	b = msgp.AppendFloat64(b, 1.5)
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for _, e := range events {
		b = append(b, e...)
	}
	return msgp.AppendInt(b, 0)
}

func name(b []byte) string { return string(b) }

func TestDecodeBatch(t *testing.T) {
	cleared := msgp.AppendString(msgp.AppendArrayHeader(nil, 1), "AllBlocksCleared")
	unknown := msgp.AppendBool(msgp.AppendString(msgp.AppendArrayHeader(nil, 2), "BlockMoved"), true)
	want := []Event{
		{Kind: Stored, Blocks: []string{name(msgp.AppendInt64(nil, -7)), name(msgp.AppendUint64(nil, 1<<63))}, Tokens: []int32{1, 2, 3, 4}, BlockSize: 2},
		{Kind: Removed, Blocks: []string{name(msgp.AppendInt64(nil, -7))}},
		{Kind: Cleared},
	}
	got, err := DecodeBatch(batch(stored(false, []any{int64(-7), uint64(1 << 63)}, nil, []int{1, 2, 3, 4}, 2), unknown, removed(-7), cleared))
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	sha := []byte("0123456789abcdef0123456789abcdef")
	got, err = DecodeBatch(batch(stored(true, []any{sha}, int64(5), []int{9}, 1)))
	want = []Event{{Kind: Stored, Blocks: []string{name(msgp.AppendBytes(nil, sha))}, Parent: name(msgp.AppendInt64(nil, 5)), Tokens: []int32{9}, BlockSize: 1}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	asMap := msgp.AppendMapHeader(nil, 2)
	asMap = msgp.AppendFloat64(msgp.AppendString(asMap, "ts"), 1)
	asMap = append(msgp.AppendArrayHeader(msgp.AppendString(asMap, "events"), 1), cleared...)
	if got, err := DecodeBatch(asMap); err != nil || len(got) != 1 || got[0].Kind != Cleared {
		t.Errorf("%+v, %v", got, err)
	}
	cpu := strings.Replace(string(stored(false, []any{int64(1)}, nil, []int{1}, 1)), "GPU", "CPU", 1)
	if got, err := DecodeBatch(batch([]byte(cpu))); err != nil || !got[0].Foreign {
		t.Errorf("another tier: %+v, %v", got, err)
	}
	for name, bad := range map[string][]byte{
		"nothing":             nil,
		"no array":            {0xc0},
		"lying length":        msgp.AppendArrayHeader(msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 2), 1), 1<<31),
		"lying tokens":        append(batch()[:0], batch(append(msgp.AppendString(msgp.AppendArrayHeader(nil, 7), "BlockStored"), 0x90, 0xc0, 0xdd, 0xff, 0xff, 0xff, 0xff))...),
		"tokens do not match": batch(stored(false, []any{int64(1)}, nil, []int{1, 2, 3}, 2)),
	} {
		if got, err := DecodeBatch(bad); err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func FuzzDecodeBatch(f *testing.F) {
	f.Add(batch(stored(false, []any{int64(1)}, nil, []int{1, 2}, 2), removed(1)))
	f.Add(batch(stored(true, []any{[]byte("x")}, int64(1), []int{1, 2}, 2)))
	f.Fuzz(func(t *testing.T, b []byte) {
		events, err := DecodeBatch(b)
		if err != nil {
			return
		}
		for _, e := range events {
			if e.Kind == Stored && len(e.Tokens) != len(e.Blocks)*e.BlockSize || len(e.Tokens) > len(b) {
				t.Errorf("%+v", e)
			}
		}
	})
}

func TestDecodeTRT(t *testing.T) {
	const text = `[{"event_id":4,"data":{"type":"created","num_blocks_per_cache_level":[10,0]}},
		{"event_id":5,"data":{"type":"stored","parent_hash":null,"blocks":[{"type":"stored_block","block_hash":4203099703668305365,"cache_level":0,"tokens":[{"token_id":1,"token_extra_id":0},{"token_id":2}]},
		{"block_hash":18446744073709551615,"tokens":[{"token_id":3},{"token_id":4}]}]}},
		{"event_id":6,"data":{"type":"stored","parent_hash":4203099703668305365,"blocks":[{"block_hash":7,"tokens":[{"token_id":3},{"token_id":4}]},{"block_hash":8,"tokens":[{"token_id":5}]}]}},
		{"event_id":7,"data":{"type":"updated","block_hash":7}},
		{"event_id":8,"data":{"type":"removed","block_hashes":[18446744073709551615]}}]`
	events, next, gap, err := decodeTRT([]byte(text), 4)
	want := []Event{
		{Kind: Cleared},
		{Kind: Stored, Blocks: []string{"4203099703668305365", "18446744073709551615"}, Tokens: []int32{1, 2, 3, 4}, BlockSize: 2},
		{Kind: Removed, Blocks: []string{"18446744073709551615"}},
	}
	if err != nil || next != 9 || gap || !reflect.DeepEqual(events, want) {
		t.Errorf("%+v, %d, %t, %v", events, next, gap, err)
	}
	if _, next, gap, err := decodeTRT([]byte(`[{"event_id":11,"data":{"type":"x"}}]`), 9); err != nil || next != 12 || !gap {
		t.Errorf("%d, %t, %v", next, gap, err)
	}
	if _, next, gap, err := decodeTRT([]byte(`[]`), 9); err != nil || next != 9 || gap {
		t.Errorf("%d, %t, %v", next, gap, err)
	}
	if _, _, _, err := decodeTRT([]byte(`{`), 9); err == nil {
		t.Error("no error")
	}
}

// engine is the publishing side: a PUB and a ROUTER socket.
type engine struct {
	t        *testing.T
	pub, rep net.Listener

	mu      sync.Mutex
	subs    map[*socket]bool
	batches [][]byte // all, by number
	kept    int      // the first that can be replayed
	asked   int
	running sync.WaitGroup
}

func newEngine(t *testing.T) *engine {
	e := &engine{t: t, subs: map[*socket]bool{}}
	for _, l := range []*net.Listener{&e.pub, &e.rep} {
		var err error
		if *l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
	}
	e.running.Go(func() { e.accept(e.pub, "PUB", e.publish) })
	e.running.Go(func() { e.accept(e.rep, "ROUTER", e.replay) })
	t.Cleanup(func() {
		e.pub.Close()
		e.rep.Close()
		e.drop()
		e.running.Wait()
	})
	return e
}

func (e *engine) accept(l net.Listener, kind string, serve func(*socket)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		e.running.Go(func() {
			defer c.Close()
			s := &socket{c: c, br: bufio.NewReader(c)}
			if err := s.greet(kind); err != nil {
				e.t.Error(err)
				return
			}
			serve(s)
		})
	}
}

func (e *engine) publish(s *socket) {
	flags, body, err := s.readFrame(100)
	if err != nil || flags != 0 || string(body) != "\x01" {
		e.t.Errorf("a subscription of %q with flags %d, %v", body, flags, err)
		return
	}
	if err := s.writeFrame(flagCommand, []byte("\x04PING\x00\x0actx")); err != nil {
		return
	}
	if flags, body, err := s.readFrame(100); err != nil || flags != flagCommand || string(body) != "\x04PONGctx" {
		e.t.Errorf("a ping is answered by %q with flags %d, %v", body, flags, err)
		return
	}
	e.mu.Lock()
	e.subs[s] = true
	e.mu.Unlock()
	_, _ = io.Copy(io.Discard, s.br)
	e.mu.Lock()
	delete(e.subs, s)
	e.mu.Unlock()
}

func (e *engine) replay(s *socket) {
	frames, err := s.read()
	if err != nil || len(frames) != 2 || len(frames[1]) != 8 {
		e.t.Errorf("asked for a replay with %q, %v", frames, err)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.asked++
	for n := max(int(binary.BigEndian.Uint64(frames[1])), e.kept); n < len(e.batches); n++ {
		_ = s.write(nil, binary.BigEndian.AppendUint64(nil, uint64(n)), e.batches[n])
	}
	_ = s.write(nil, binary.BigEndian.AppendUint64(nil, ^uint64(0)), nil)
}

// drop ends all connections.
func (e *engine) drop() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for s := range e.subs {
		s.close()
	}
}

// emit publishes a batch, or loses it.
func (e *engine) emit(lose bool, events ...[]byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := len(e.batches)
	e.batches = append(e.batches, batch(events...))
	for s := range e.subs {
		if !lose {
			_ = s.write([]byte("topic"), binary.BigEndian.AppendUint64(nil, uint64(n)), e.batches[n])
		}
	}
}

// mirror is what a subscriber knows.
type mirror struct {
	mu     sync.Mutex
	blocks map[string]bool
	resets []string
}

func (m *mirror) stream(e *engine, replay bool) *Stream {
	s := &Stream{Address: "tcp://" + e.pub.Addr().String(), Retry: time.Millisecond}
	if replay {
		s.Replay = "tcp://" + e.rep.Addr().String()
	}
	s.Handle = func(events []Event) {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, e := range events {
			for _, b := range e.Blocks {
				if m.blocks[b] = e.Kind == Stored; !m.blocks[b] {
					delete(m.blocks, b)
				}
			}
		}
	}
	s.Reset = func(reason string) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.blocks = map[string]bool{}
		m.resets = append(m.resets, reason)
	}
	return s
}

func (m *mirror) await(t *testing.T, want ...int64) {
	t.Helper()
	var have []string
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		m.mu.Lock()
		ok := len(m.blocks) == len(want)
		have = m.resets
		for _, h := range want {
			ok = ok && m.blocks[name(msgp.AppendInt64(nil, h))]
		}
		m.mu.Unlock()
		if ok {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("want %v, have %d blocks; resets %q", want, len(m.blocks), have)
		}
	}
}

func one(h int64) []byte { return stored(false, []any{h}, nil, []int{int(h)}, 1) }

// What was missed is asked for; when it cannot be had, what is known is forgotten.
func TestStream(t *testing.T) {
	for _, replay := range []bool{true, false} {
		e := newEngine(t)
		e.emit(false, one(1)) // before anybody listens
		m := &mirror{blocks: map[string]bool{}}
		s := m.stream(e, replay)
		if err := s.Check(); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { s.Run(ctx); close(done) }()
		for { // until it has subscribed
			e.mu.Lock()
			n := len(e.subs)
			e.mu.Unlock()
			if n == 1 {
				break
			}
			time.Sleep(time.Millisecond)
		}
		if replay {
			m.await(t, 1)
		}
		e.emit(false, one(2))
		if replay {
			m.await(t, 1, 2)
		} else {
			m.await(t, 2)
		}
		e.emit(true, one(3)) // lost
		e.emit(false, one(4), removed(2))
		if replay {
			m.await(t, 1, 3, 4)
		} else {
			m.await(t, 4)
		}
		e.emit(true, one(5))
		e.mu.Lock()
		e.kept = len(e.batches) // nothing can be replayed
		e.mu.Unlock()
		e.emit(false, one(6))
		m.await(t, 6)
		e.emit(true, one(7))
		e.mu.Lock()
		e.kept = len(e.batches) + 1 // nor the last one
		e.mu.Unlock()
		e.emit(false, one(8))
		m.await(t, 8)
		e.drop() // it connects again
		cancel()
		<-done
	}
}

// A connection that is lost is made again, and what happened meanwhile is learned from the replay.
func TestReconnect(t *testing.T) {
	e := newEngine(t)
	m := &mirror{blocks: map[string]bool{}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { m.stream(e, true).Run(ctx); close(done) }()
	e.emit(false, one(1))
	m.await(t, 1)
	e.emit(true, removed(1))
	e.emit(true, one(2))
	e.drop()
	m.await(t, 2)
	m.mu.Lock()
	if len(m.resets) == 0 {
		t.Error("a lost connection is not said")
	}
	m.mu.Unlock()
	cancel()
	<-done
}

// Peers that do not speak the protocol are refused, without end or memory.
func TestStrangers(t *testing.T) {
	greeting := func(mechanism string) string {
		b := make([]byte, 64)
		b[0], b[9], b[10] = 0xff, 0x7f, 3
		copy(b[12:], mechanism)
		return string(b)
	}
	for says, want := range map[string]string{
		"HTTP/1.1 400 Bad Request\r\n\r\n" + strings.Repeat("x", 64): "does not speak ZMTP",
		greeting("CURVE"): "CURVE",
		greeting("NULL") + "\x06\xff\xff\xff\xff\xff\xff\xff\xff": "a frame of",
		greeting("NULL") + "\x00\x01x":                            "skips the handshake",
		greeting("NULL") + "\x04\x09\x05ERROR\x02no":              "refuses",
		greeting("NULL") + "\x04\x06\x05HELLO":                    "another command",
		"":                                                        "EOF",
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, says)
			c.(*net.TCPConn).CloseWrite()
			io.Copy(io.Discard, c)
			c.Close()
		}()
		s, err := dialZMTP(t.Context(), "tcp://"+l.Addr().String(), "SUB")
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", says, err)
		}
		if s != nil {
			s.close()
		}
		l.Close()
	}
	for _, bad := range []string{"", "tcp://", "127.0.0.1:1", "ipc:///x", "tcp://h", "tcp://h:1/x"} {
		if err := (&Stream{Address: bad}).Check(); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	if got := Above("tcp://h:5557", 1); got != "tcp://h:5558" {
		t.Errorf("%q", got)
	}
}
