//go:build linux

package shm

import (
	"context"
	"sync"
	"sync/atomic"

	"baton/transfer"
	"baton/transfer/internal/backend"
)

// Bounds of a batch, which is what one goroutine copies before it looks up: 50 to 100 µs of work. From
// 1 MiB on, Go's copy writes around the cache, which doubles its speed. Larger batches would gain nothing
// more, and in the end all wait for the one whose thread was held up.
const (
	minBatch = 512 << 10
	maxBatch = 1 << 20
)

// batches cuts copies into shares of equal size for so many threads; a long copy is divided.
func batches(copies []transfer.Copy, threads int) [][]transfer.Copy {
	var total int64
	for _, c := range copies {
		total += c.Len
	}
	size := min(max((total+int64(threads)-1)/int64(threads), minBatch), maxBatch)
	pieces := make([]transfer.Copy, 0, int64(len(copies))+total/size+1)
	var ends []int
	var have int64
	for _, c := range copies {
		for c.Len > 0 {
			n := min(c.Len, size-have)
			pieces = append(pieces, transfer.Copy{Src: c.Src, Dst: c.Dst, Len: n})
			c.Src, c.Dst, c.Len = c.Src+n, c.Dst+n, c.Len-n
			if have += n; have == size {
				ends, have = append(ends, len(pieces)), 0
			}
		}
	}
	if have > 0 {
		ends = append(ends, len(pieces))
	}
	shares := make([][]transfer.Copy, len(ends))
	begin := 0
	for i, end := range ends {
		shares[i], begin = pieces[begin:end], end
	}
	return shares
}

// copyAll copies with as many goroutines as slots has room for, until the task's context or the
// connection ends. When it returns nothing is being copied.
func copyAll(t *backend.Task, slots chan struct{}, dst, src []byte, copies []transfer.Copy, lost <-chan struct{}) error {
	shares := batches(copies, cap(slots))
	var next atomic.Int64
	var stopped atomic.Bool
	work := func() {
		for {
			select {
			case slots <- struct{}{}:
			case <-t.Context().Done():
				stopped.Store(true)
				return
			}
			i := int(next.Add(1)) - 1
			if i >= len(shares) || interrupted(t.Context(), lost) {
				<-slots
				if i < len(shares) {
					stopped.Store(true)
				}
				return
			}
			var n int64
			for _, c := range shares[i] {
				n += int64(copy(dst[c.Dst:c.Dst+c.Len], src[c.Src:c.Src+c.Len]))
			}
			<-slots
			t.Moved(n)
		}
	}
	var wg sync.WaitGroup
	for range min(cap(slots), len(shares)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	if !stopped.Load() {
		return nil
	}
	if err := t.Context().Err(); err != nil {
		return err
	}
	return transfer.ErrPeerLost
}

func interrupted(ctx context.Context, lost <-chan struct{}) bool {
	select {
	case <-ctx.Done():
		return true
	case <-lost:
		return true
	default:
		return false
	}
}
