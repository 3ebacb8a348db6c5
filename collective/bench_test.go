package collective

import (
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"

	"baton/compute"
)

// layouts are ways to run n ranks.
func layouts(n int) map[string]func(testing.TB) []*World {
	apart := make([][]int, n)
	halves := make([][]int, 2)
	for r := range n {
		apart[r] = []int{r}
		halves[r*2/n] = append(halves[r*2/n], r)
	}
	l := map[string]func(testing.TB) []*World{
		"local": func(testing.TB) []*World { return Local(n) },
		"mesh":  func(tb testing.TB) []*World { return mesh(tb, apart...) },
	}
	if n > 2 {
		l["halves"] = func(tb testing.TB) []*World { return mesh(tb, halves...) }
	}
	return l
}

// timed runs f for every rank and reports what it costs all processors together, which other work on the
// machine disturbs less than the time it takes.
func timed(b *testing.B, ws []*World, f func(*World, Group) error) {
	cpu := func() int64 {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return u.Utime.Nano() + u.Stime.Nano()
	}
	before := cpu()
	b.ResetTimer()
	all(b, ws, f)
	b.ReportMetric(float64(cpu()-before)/float64(b.N), "cpu-ns/op")
}

func BenchmarkAllReduce(b *testing.B) {
	for _, where := range []string{"local", "mesh", "halves"} {
		for _, n := range []int{2, 4, 8} {
			for _, rows := range []int{1, 64, 512} {
				start := layouts(n)[where]
				if start == nil {
					continue
				}
				b.Run(fmt.Sprintf("%s/ranks=%d/%dx2048", where, n, rows), func(b *testing.B) {
					ws := start(b)
					defer shut(b, ws)
					b.SetBytes(int64(rows * 2048 * 4))
					timed(b, ws, func(w *World, g Group) error {
						m := compute.Mat{Buf: make(heap, rows*2048), Rows: rows, Cols: 2048, Stride: 2048}
						for range b.N {
							if err := g.AllReduce(m); err != nil {
								return err
							}
						}
						return nil
					})
				})
			}
		}
	}
}

func BenchmarkBarrier(b *testing.B) {
	for _, where := range []string{"local", "mesh"} {
		for _, n := range []int{2, 4, 8} {
			b.Run(fmt.Sprintf("%s/ranks=%d", where, n), func(b *testing.B) {
				ws := layouts(n)[where](b)
				defer shut(b, ws)
				timed(b, ws, func(_ *World, g Group) error {
					for range b.N {
						if err := g.Barrier(); err != nil {
							return err
						}
					}
					return nil
				})
			})
		}
	}
}

// BenchmarkBareExchange is the bound for AllReduce over TCP among two: both send so many bytes and read the
// other's.
func BenchmarkBareExchange(b *testing.B) {
	for _, rows := range []int{1, 64, 512} {
		b.Run(fmt.Sprintf("%dx2048", rows), func(b *testing.B) {
			ln := listen(b)
			defer ln.Close()
			here, err := net.Dial("tcp", ln.Addr().String())
			if err != nil {
				b.Fatal(err)
			}
			defer here.Close()
			there, err := ln.Accept()
			if err != nil {
				b.Fatal(err)
			}
			defer there.Close()
			ends := []net.Conn{here, there}
			b.SetBytes(int64(rows * 2048 * 4))
			ws := Local(2)
			defer shut(b, ws)
			timed(b, ws, func(w *World, _ Group) error {
				conn, out, in := ends[w.Rank()], make([]byte, rows*2048*4), make([]byte, rows*2048*4)
				read := make(chan error)
				go func() {
					for range b.N {
						_, err := io.ReadFull(conn, in)
						read <- err
					}
				}()
				for range b.N {
					if _, err := conn.Write(out); err != nil {
						return err
					}
					if err := <-read; err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
}
