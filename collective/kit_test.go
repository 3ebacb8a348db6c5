package collective

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"

	"baton/compute"
)

// A goroutine that outlives its world is a leak of this package's.
func TestMain(m *testing.M) {
	if addr := os.Getenv(childEnv); addr != "" {
		child(addr)
		return
	}
	goleak.VerifyTestMain(m)
}

// heap is host memory that the race detector watches.
type heap []float32

func (h heap) Bytes() int { return 4 * len(h) }

func (h heap) Host() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(h))), 4*len(h))
}

// zeros makes a matrix that has other things around it and, half the time, between its rows.
func zeros(r *rand.Rand, rows, cols int) compute.Mat {
	m := compute.Mat{Off: r.IntN(5), Rows: rows, Cols: cols, Stride: cols + r.IntN(2)*r.IntN(20)}
	buf := make(heap, m.Off+rows*m.Stride+r.IntN(5))
	for i := range buf {
		buf[i] = float32(math.NaN()) // who reads it spoils what comes out
	}
	m.Buf = buf
	each(m, func(p *float32) { *p = 0 })
	return m
}

// random makes a matrix of numbers of very different size, among them both zeros.
func random(r *rand.Rand, rows, cols int) compute.Mat {
	m := zeros(r, rows, cols)
	each(m, func(p *float32) {
		switch r.IntN(8) {
		case 0:
			*p = float32(math.Copysign(0, -1))
		case 1:
		default:
			*p = float32(r.NormFloat64() * math.Exp2(float64(r.IntN(40)-20)))
		}
	})
	return m
}

func each(m compute.Mat, do func(*float32)) {
	for i := range m.Rows {
		for j := range m.Cols {
			do(&m.Buf.(heap)[m.Off+i*m.Stride+j])
		}
	}
}

// values lists a matrix's bits.
func values(m compute.Mat) []uint32 {
	v := make([]uint32, 0, m.Rows*m.Cols)
	each(m, func(p *float32) { v = append(v, math.Float32bits(*p)) })
	return v
}

func newRand(seed int) *rand.Rand { return rand.New(rand.NewPCG(uint64(seed), 7)) }

// patience is how long a test waits for what must happen.
const patience = 30 * time.Second

// together runs f for every rank at once and returns their errors.
func together(tb testing.TB, ws []*World, f func(*World) error) []error {
	tb.Helper()
	errs := make([]error, len(ws))
	var wg sync.WaitGroup
	for i, w := range ws {
		wg.Go(func() { errs[i] = f(w) })
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(patience):
		tb.Error("hung")
		ws[0].Fail(fmt.Errorf("the test has waited for %v", patience))
		<-done
	}
	return errs
}

// all makes each rank a member of a group of everybody and runs f, which must not fail.
func all(tb testing.TB, ws []*World, f func(*World, Group) error) {
	tb.Helper()
	ranks := make([]int, len(ws))
	for i := range ranks {
		ranks[i] = i
	}
	for i, err := range together(tb, ws, func(w *World) error {
		g, err := w.Group("all", ranks)
		if err != nil {
			return err
		}
		return f(w, g)
	}) {
		if err != nil {
			tb.Errorf("rank %d: %v", i, err)
		}
	}
}

// shut closes every rank.
func shut(tb testing.TB, ws []*World) {
	tb.Helper()
	together(tb, ws, (*World).Close)
}
