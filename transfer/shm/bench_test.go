//go:build linux

package shm

import (
	"sync"
	"testing"

	"baton/transfer"
)

const benchSize = 256 << 20 // beyond any L3 here, and source and destination are apart

// Each benchmark has two halves: the bound is the same copies by the same number of threads between the
// same kind of pages, without a protocol.
func bench(b *testing.B, copies []transfer.Copy) {
	src, dst := open(b, benchSize, Options{}), open(b, benchSize, Options{})
	if err := src.Export(1, capability, []transfer.Range{{Len: benchSize}}); err != nil {
		b.Fatal(err)
	}
	var n int64
	for _, c := range copies {
		n += c.Len
	}
	b.Run("bound", func(b *testing.B) {
		b.SetBytes(n)
		for b.Loop() {
			memcpy(dst, src, copies)
		}
	})
	b.Run("pull", func(b *testing.B) {
		b.SetBytes(n)
		for b.Loop() {
			if st := pull(b, dst, src, copies); st.State != transfer.Done {
				b.Fatal(st.Err)
			}
		}
	})
}

func memcpy(dst, src *Endpoint, copies []transfer.Copy) {
	threads := cap(dst.slots)
	if len(copies) < threads {
		part := copies[0].Len / int64(threads)
		whole := copies[0]
		copies = nil
		for i := range int64(threads) {
			copies = append(copies, transfer.Copy{Src: whole.Src + i*part, Dst: whole.Dst + i*part, Len: part})
		}
	}
	var wg sync.WaitGroup
	for i := range threads {
		share := copies[i*len(copies)/threads : (i+1)*len(copies)/threads]
		wg.Go(func() {
			for _, c := range share {
				copy(dst.mem.Data[c.Dst:c.Dst+c.Len], src.mem.Data[c.Src:c.Src+c.Len])
			}
		})
	}
	wg.Wait()
}

func BenchmarkWhole(b *testing.B) { bench(b, []transfer.Copy{{Len: benchSize}}) }

func Benchmark64MiB(b *testing.B) {
	bench(b, []transfer.Copy{{Src: 64 << 20, Dst: 128 << 20, Len: 64 << 20}})
}

// Blocks of 256 KiB, every second one of the source.
func BenchmarkBlocks(b *testing.B) { bench(b, scattered(512, 256<<10)) }

// A change of TP: fragments of 4 KiB.
func BenchmarkFragments(b *testing.B) { bench(b, scattered(30_000, 4<<10)) }

// The latency of a small handoff.
func BenchmarkOneBlock(b *testing.B) { bench(b, scattered(1, 256<<10)) }

func scattered(n int, size int64) []transfer.Copy {
	copies := make([]transfer.Copy, n)
	for i := range copies {
		copies[i] = transfer.Copy{Src: int64(i) * 2 * size, Dst: int64(n-1-i) * 2 * size, Len: size}
	}
	return copies
}
