package tcp

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"

	"baton/transfer"
)

const benchSize = 256 << 20

func memory(tb testing.TB, size int64) *transfer.Memory {
	tb.Helper()
	mem, err := transfer.NewMemory(size, "test")
	if err != nil {
		tb.Fatal(err)
	}
	if err := mem.Touch(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { mem.Close() })
	return mem
}

func openPuller(tb testing.TB, size int64, opt Options) *Puller {
	tb.Helper()
	p, err := NewPuller(memory(tb, size), opt)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { p.Close() })
	return p
}

func openPusher(tb testing.TB, size int64, opt Options) *Pusher {
	tb.Helper()
	p, err := NewPusher(memory(tb, size), opt)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { p.Close() })
	return p
}

var capability = []byte("0123456789abcdef")

// bareCopy is the bound: the same bytes over so many loopback connections, with nothing around them.
func bareCopy(b *testing.B, dst, src []byte, streams int) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	var from, to []net.Conn
	for range streams {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		s, err := ln.Accept()
		if err != nil {
			b.Fatal(err)
		}
		defer s.Close()
		from, to = append(from, c), append(to, s)
	}
	part := len(src) / streams
	b.SetBytes(int64(len(src)))
	for b.Loop() {
		var wg sync.WaitGroup
		for i := range streams {
			wg.Go(func() { from[i].Write(src[i*part : (i+1)*part]) })
			wg.Go(func() {
				if _, err := io.ReadFull(to[i], dst[i*part:(i+1)*part]); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
	}
}

// Each benchmark has halves that differ only in what moves the bytes.
func bench(b *testing.B, size int64, copies []transfer.Copy, opt Options) {
	streams := max(1, min(4, int(size/minStream)))
	b.Run("bare", func(b *testing.B) {
		src, dst := memory(b, benchSize), memory(b, benchSize)
		bareCopy(b, dst.Data[:size], src.Data[:size], streams)
	})
	b.Run("pull", func(b *testing.B) {
		src, dst := openPuller(b, benchSize, opt), openPuller(b, benchSize, opt)
		if err := src.Export(1, capability, []transfer.Range{{Len: benchSize}}); err != nil {
			b.Fatal(err)
		}
		b.SetBytes(size)
		for b.Loop() {
			h, err := dst.Pull(context.Background(), src.Describe(), 1, capability, copies)
			if err != nil {
				b.Fatal(err)
			}
			if <-h.Settled(); h.Poll().State != transfer.Done {
				b.Fatal(h.Poll().Err)
			}
		}
	})
	b.Run("push", func(b *testing.B) {
		src, dst := openPusher(b, benchSize, opt), openPusher(b, benchSize, opt)
		ranges := make([]transfer.Range, len(copies))
		for i, c := range copies {
			ranges[i] = transfer.Range{Off: c.Dst, Len: c.Len}
		}
		b.SetBytes(size)
		for b.Loop() {
			tag, h, err := dst.Expect(context.Background(), ranges)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := src.Push(context.Background(), dst.Describe(), tag, copies); err != nil {
				b.Fatal(err)
			}
			if <-h.Settled(); h.Poll().State != transfer.Done {
				b.Fatal(h.Poll().Err)
			}
		}
	})
}

func scattered(n int, size int64) []transfer.Copy {
	copies := make([]transfer.Copy, n)
	for i := range copies {
		copies[i] = transfer.Copy{Src: int64(i) * 2 * size, Dst: int64(n-1-i) * 2 * size, Len: size}
	}
	return copies
}

func BenchmarkWhole(b *testing.B) {
	bench(b, benchSize, []transfer.Copy{{Len: benchSize}}, Options{})
}

func BenchmarkSocketBuffer4MiB(b *testing.B) {
	bench(b, benchSize, []transfer.Copy{{Len: benchSize}}, Options{SocketBuffer: 4 << 20})
}

func BenchmarkOneStream(b *testing.B) {
	bench(b, 64<<20, []transfer.Copy{{Len: 64 << 20}}, Options{Streams: 1})
}

// Blocks of 256 KiB, every second one.
func BenchmarkBlocks(b *testing.B) { bench(b, 128<<20, scattered(512, 256<<10), Options{}) }

// A change of TP: fragments of 4 KiB.
func BenchmarkFragments(b *testing.B) { bench(b, 30_000*4096, scattered(30_000, 4<<10), Options{}) }

// The latency of a small handoff.
func BenchmarkOneBlock(b *testing.B) { bench(b, 256<<10, scattered(1, 256<<10), Options{}) }
