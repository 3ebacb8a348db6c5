package loadgen

import (
	"math"
	"math/bits"
	"time"
)

// histogram counts durations in buckets whose width is at most 1/128 of their values, so that a quantile is within 0.4 %.
// Count, sum, least and greatest are exact. Its size does not depend on how many durations it has seen.
type histogram struct {
	counts          []uint64
	n               uint64
	sum, squares    float64 // seconds
	least, greatest time.Duration
}

// fine is how many buckets there are for each power of two.
const fine = 128

func bucketOf(d time.Duration) int {
	v := uint64(max(d, 0))
	if v < 2*fine {
		return int(v)
	}
	shift := bits.Len64(v) - bits.Len64(2*fine-1)
	return fine*shift + int(v>>shift)
}

// middle is about where a bucket's durations lie.
func middle(bucket int) time.Duration {
	if bucket < 2*fine {
		return time.Duration(bucket)
	}
	shift := bucket/fine - 1
	low := uint64(bucket-fine*shift) << shift
	return time.Duration(low + 1<<shift/2)
}

func (h *histogram) add(d time.Duration) { h.addMany(d, 1) }

func (h *histogram) addMany(d time.Duration, times int) {
	if times == 0 {
		return
	}
	i := bucketOf(d)
	if i >= len(h.counts) {
		h.counts = append(h.counts, make([]uint64, i+1-len(h.counts))...)
	}
	h.counts[i] += uint64(times)
	if h.n == 0 || d < h.least {
		h.least = d
	}
	h.greatest = max(h.greatest, d)
	h.n += uint64(times)
	s := d.Seconds()
	h.sum += s * float64(times)
	h.squares += s * s * float64(times)
}

func (h *histogram) merge(o *histogram) {
	if o.n == 0 {
		return
	}
	if len(o.counts) > len(h.counts) {
		h.counts = append(h.counts, make([]uint64, len(o.counts)-len(h.counts))...)
	}
	for i, n := range o.counts {
		h.counts[i] += n
	}
	if h.n == 0 || o.least < h.least {
		h.least = o.least
	}
	h.greatest = max(h.greatest, o.greatest)
	h.n += o.n
	h.sum += o.sum
	h.squares += o.squares
}

// quantile is the value below which a share q of the durations lies; 0 of none.
func (h *histogram) quantile(q float64) time.Duration {
	if h.n == 0 {
		return 0
	}
	rank := uint64(math.Ceil(q * float64(h.n)))
	seen := uint64(0)
	for i, n := range h.counts {
		if seen += n; seen >= max(rank, 1) {
			return min(max(middle(i), h.least), h.greatest)
		}
	}
	return h.greatest
}

// Distribution sums up durations, in milliseconds. Percentiles are within 0.4 %.
type Distribution struct {
	Count uint64  `json:"count"`
	Mean  float64 `json:"mean"`
	Std   float64 `json:"std"`
	Min   float64 `json:"min"`
	P50   float64 `json:"p50"`
	P90   float64 `json:"p90"`
	P99   float64 `json:"p99"`
	Max   float64 `json:"max"`
}

func (h *histogram) distribution() Distribution {
	if h.n == 0 {
		return Distribution{}
	}
	n := float64(h.n)
	mean := h.sum / n
	return Distribution{
		Count: h.n, Mean: round(1000 * mean), Std: round(1000 * math.Sqrt(max(h.squares/n-mean*mean, 0))),
		Min: millis(h.least), P50: millis(h.quantile(.5)), P90: millis(h.quantile(.9)), P99: millis(h.quantile(.99)), Max: millis(h.greatest),
	}
}

func millis(d time.Duration) float64 { return round(float64(d) / 1e6) }

// round keeps 6 significant digits, so that reports are readable.
func round(f float64) float64 {
	if f == 0 || math.IsInf(f, 0) || math.IsNaN(f) {
		return 0
	}
	scale := math.Pow(10, 5-math.Floor(math.Log10(math.Abs(f))))
	return math.Round(f*scale) / scale
}
