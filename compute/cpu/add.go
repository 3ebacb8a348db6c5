package cpu

import "unsafe"

// Add adds src to dst, which are of one length and do not overlap: dst[i] = dst[i] + src[i]. It is for
// sums that cross devices, on the calling goroutine; it needs no Backend.
func Add(dst, src []float32) {
	n := len(dst)
	_ = src[:n]
	if n > 0 {
		bestKernels().finish(unsafe.SliceData(dst), 0, unsafe.SliceData(src), 0, nil, 1, n, 1)
	}
}
