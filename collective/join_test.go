package collective

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"baton/mtls"
)

// identity makes one of an authority of its own.
func identity(tb testing.TB) *mtls.Identity {
	tb.Helper()
	a, _, err := mtls.OpenAuthority(tb.TempDir())
	if err != nil {
		tb.Fatal(err)
	}
	c, err := a.Issue("engine", nil)
	if err != nil {
		tb.Fatal(err)
	}
	id, err := mtls.Load(c.Files, nil)
	if err != nil {
		tb.Fatal(err)
	}
	return id
}

// within bounds how long a test waits for processes to come together.
func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// TestJoinRefuses has the second of two processes do something wrong. It learns at once, and the first one can
// go on waiting for a better one.
func TestJoinRefuses(t *testing.T) {
	secure, other := identity(t), identity(t)
	for name, c := range map[string]struct {
		leader, follower MeshConfig
		says             string
	}{
		"secret":    {MeshConfig{}, MeshConfig{Secret: []byte("t")}, "another secret"},
		"size":      {MeshConfig{}, MeshConfig{Size: 3}, "it is for a shard of 3 ranks, this is one of 2"},
		"authority": {MeshConfig{TLS: secure}, MeshConfig{TLS: other}, "authority"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := within(t, patience)
			fill := func(cfg MeshConfig, local int, peer string) MeshConfig {
				cfg.Local, cfg.Listener, cfg.Peers = []int{local}, listen(t), []string{peer}
				if cfg.Size == 0 {
					cfg.Size = 2
				}
				if cfg.Secret == nil {
					cfg.Secret = []byte("s")
				}
				return cfg
			}
			leader := fill(c.leader, 0, "")
			addr := leader.Listener.Addr().String()
			first := join(ctx, leader)
			start := time.Now()
			if r := <-join(ctx, fill(c.follower, 1, addr)); r.err == nil || !strings.Contains(r.err.Error(), c.says) {
				t.Errorf("got error %v; want one that says %q", r.err, c.says)
			}
			if d := time.Since(start); d > patience/2 {
				t.Errorf("it took %v", d)
			}
			good := fill(MeshConfig{TLS: c.leader.TLS}, 1, addr)
			second := <-join(ctx, good)
			r := <-first
			if err := errors.Join(r.err, second.err); err != nil {
				t.Fatal(err)
			}
			shut(t, append(r.ws, second.ws...))
		})
	}
}

// TestJoinTakenRank lets a process claim a rank that runs already; it gets it when the other one leaves.
func TestJoinTakenRank(t *testing.T) {
	ctx := within(t, patience)
	lead := MeshConfig{Size: 3, Local: []int{0}, Listener: listen(t), Secret: []byte("s")}
	peers := []string{lead.Listener.Addr().String()}
	first := join(ctx, lead)
	follow := func(ctx context.Context, ranks ...int) <-chan joined {
		return join(ctx, MeshConfig{Size: 3, Local: ranks, Listener: listen(t), Secret: []byte("s"), Peers: peers})
	}
	old, leave := context.WithCancel(ctx)
	one := follow(old, 1)
	for deadline := time.Now().Add(patience); ; time.Sleep(4 * retryInterval) {
		brief, cancel := context.WithTimeout(ctx, 5*retryInterval)
		r := <-follow(brief, 1)
		cancel()
		if r.err != nil && strings.Contains(r.err.Error(), "rank 1 runs at 127.0.0.1") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("got error %v", r.err)
		}
	}
	leave()
	if r := <-one; !errors.Is(r.err, context.Canceled) {
		t.Errorf("the process that left: %v", r.err)
	}
	second := <-follow(ctx, 1, 2)
	r := <-first
	if err := errors.Join(r.err, second.err); err != nil {
		t.Fatal(err)
	}
	shut(t, append(r.ws, second.ws...))
}

// TestJoinNeedsNoOrder starts the followers first, with addresses that are no good among the right one.
func TestJoinNeedsNoOrder(t *testing.T) {
	ctx := within(t, patience)
	reserve := listen(t)
	addr := reserve.Addr().String()
	reserve.Close()
	nobody := listen(t)
	peers := []string{nobody.Addr().String()}
	nobody.Close()
	two, one := listen(t), listen(t)
	peers = append(peers, two.Addr().String(), one.Addr().String(), addr)
	cfg := MeshConfig{Size: 3, Secret: []byte("s"), Peers: peers}
	cfg.Local, cfg.Listener = []int{2}, two
	a := join(ctx, cfg)
	cfg.Local, cfg.Listener = []int{1}, one
	b := join(ctx, cfg)
	time.Sleep(100 * time.Millisecond) // so that they try in vain
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Skip("somebody took the port: ", err)
	}
	cfg.Local, cfg.Listener = []int{0}, ln
	c := join(ctx, cfg)
	var ws []*World
	for _, result := range []<-chan joined{a, b, c} {
		r := <-result
		if r.err != nil {
			t.Fatal(r.err)
		}
		ws = append(ws, r.ws...)
	}
	shut(t, ws)
}

// TestJoinTimes names who is missing when time is up, and why.
func TestJoinTimes(t *testing.T) {
	ln := listen(t)
	r := <-join(within(t, 100*time.Millisecond), MeshConfig{Size: 4, Local: []int{0}, Listener: ln, Secret: []byte("s")})
	var j *JoinError
	if !errors.As(r.err, &j) || !errors.Is(r.err, context.DeadlineExceeded) || !strings.Contains(r.err.Error(), "ranks 1-3") {
		t.Errorf("rank 0: %v", r.err)
	}
	r = <-join(within(t, 200*time.Millisecond), MeshConfig{
		Size: 4, Local: []int{1}, Listener: listen(t), Secret: []byte("s"), Peers: []string{ln.Addr().String()},
	})
	why := regexp.MustCompile("connection refused|i/o timeout") // the latter on a machine that is busy
	if !errors.As(r.err, &j) || !errors.Is(r.err, context.DeadlineExceeded) || !why.MatchString(r.err.Error()) {
		t.Errorf("rank 1: %v", r.err)
	}
	if _, err := ln.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener is open still: %v", err)
	}
}

// TestJoinStrangers lets others than the world's processes call.
func TestJoinStrangers(t *testing.T) {
	ln := listen(t)
	addr := ln.Addr().String()
	first := join(within(t, patience), MeshConfig{Size: 2, Local: []int{0}, Listener: ln, Secret: []byte("s")})
	for _, says := range []string{"", "GET / HTTP/1.1\r\nHost: x\r\n\r\nand what else a browser might say", magic + strings.Repeat("n", nonceSize) + "\xff\xff\xff\xff" + strings.Repeat("m", 32)} {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, says); err != nil {
			t.Fatal(err)
		}
		if says == "" {
			continue // and stays, silently
		}
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		got, err := io.ReadAll(conn)
		if errors.Is(err, os.ErrDeadlineExceeded) || strings.Contains(string(got), "Refusal") {
			t.Errorf("%.20q got %q, %v", says, got, err)
		}
	}
	second := <-join(within(t, patience), MeshConfig{Size: 2, Local: []int{1}, Listener: listen(t), Secret: []byte("s"), Peers: []string{addr}})
	r := <-first
	if err := errors.Join(r.err, second.err); err != nil {
		t.Fatal(err)
	}
	shut(t, append(r.ws, second.ws...))
}

func TestMeshConfig(t *testing.T) {
	for _, c := range []struct {
		field string
		cfg   MeshConfig
	}{
		{"Size", MeshConfig{}},
		{"Size", MeshConfig{Size: maxSize + 1}},
		{"Local", MeshConfig{Size: 2}},
		{"Local", MeshConfig{Size: 2, Local: []int{1, 1}}},
		{"Local", MeshConfig{Size: 2, Local: []int{2}}},
		{"Listener", MeshConfig{Size: 2, Local: []int{0}}},
		{"Secret", MeshConfig{Size: 2, Local: []int{0}, Listener: listen(t)}},
		{"Peers", MeshConfig{Size: 2, Local: []int{1}, Listener: listen(t), Secret: []byte("s")}},
		{"Silence", MeshConfig{Size: 2, Local: []int{0, 1}, Silence: time.Millisecond}},
	} {
		_, err := Join(t.Context(), c.cfg)
		var bad *ConfigError
		if !errors.As(err, &bad) || bad.Field != c.field {
			t.Errorf("%+v: got error %v", c.cfg, err)
		}
	}
	ws, err := Join(t.Context(), MeshConfig{Size: 2, Local: []int{1, 0}})
	if err != nil || len(ws) != 2 || ws[0].Rank() != 0 {
		t.Fatalf("all in one process: %v, %v", ws, err)
	}
	shut(t, ws)
}

// TestReachable tells how others find a process that does not say where.
func TestReachable(t *testing.T) {
	from := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 7), Port: 999}
	for listens, want := range map[string]string{
		"[::]:80": "10.0.0.7:80", "0.0.0.0:80": "10.0.0.7:80", ":80": "10.0.0.7:80",
		"10.1.1.1:80": "10.1.1.1:80", "host:80": "host:80",
	} {
		if got := reachable(listens, from); got != want {
			t.Errorf("%s: got %s, want %s", listens, got, want)
		}
	}
}
