package wire

import (
	"context"
	"net"
	"sync"
	"testing"
)

// tcpPair connects two Conns over loopback TCP, as two processes would be.
func tcpPair(tb testing.TB, opt Options) (client, server *Conn) {
	tb.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	defer ln.Close()
	accepted := make(chan *Conn, 1)
	go func() {
		nc, err := ln.Accept()
		if err != nil {
			accepted <- nil
			return
		}
		c, _, _ := Accept(context.Background(), nc, ConnectAck{}, nil, opt)
		accepted <- c
	}()
	client, _, err = Dial(context.Background(), "tcp", ln.Addr().String(), Connect{Kind: "client"}, opt)
	if err != nil {
		tb.Fatal(err)
	}
	server = <-accepted
	if server == nil {
		tb.Fatal("not accepted")
	}
	tb.Cleanup(func() { client.Close(); server.Close() })
	return client, server
}

func partial() *EngineReplyPartial {
	return &EngineReplyPartial{Results: []Result{{ID: 12345, Start: 17, Tokens: Tokens{4242}, StopToken: -1}}}
}

func BenchmarkEncode(b *testing.B) {
	m := partial()
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		buf, _ = appendFrame(buf[:0], m, 1<<20)
	}
}

func BenchmarkDecode(b *testing.B) {
	buf, _ := appendFrame(nil, partial(), 1<<20)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := decodeFrame(buf[lengthSize:]); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPrompt2000(b *testing.B) {
	m := &SubmitRequest{ID: 1, Prompt: make(Tokens, 2000)}
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		buf, _ = appendFrame(buf[:0], m, 1<<20)
		if _, err := decodeFrame(buf[lengthSize:]); err != nil {
			b.Fatal(err)
		}
	}
}

// Messages a second down one connection, as a decode engine's partial replies flow.
func BenchmarkPipelined(b *testing.B) {
	client, server := tcpPair(b, Options{MaxQueue: 1 << 30})
	m := partial()
	b.ReportAllocs()
	done := make(chan struct{})
	n := b.N
	go func() {
		defer close(done)
		for range n {
			if _, err := server.Recv(); err != nil {
				return
			}
		}
	}()
	b.ResetTimer()
	for range n {
		if err := client.Send(m); err != nil {
			b.Fatal(err)
		}
	}
	<-done
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "messages/s")
}

// Round trips a second of 64 clients, each on its own connection, one request at a time.
func BenchmarkRoundTrips64(b *testing.B) {
	const clients = 64
	var conns [clients]*Conn
	for i := range conns {
		client, server := tcpPair(b, Options{})
		conns[i] = client
		go func() {
			for {
				m, err := server.Recv()
				if err != nil {
					return
				}
				server.Send(m)
			}
		}()
	}
	m := partial()
	var wg sync.WaitGroup
	b.ResetTimer()
	for i, c := range conns {
		wg.Go(func() {
			for n := i; n < b.N; n += clients {
				c.Send(m)
				if _, err := c.Recv(); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "roundtrips/s")
}
