package cpu

import (
	"math"
	"testing"
)

func TestAdd(t *testing.T) {
	negative := float32(math.Copysign(0, -1))
	for n := range 40 {
		dst, src, want := random(1, n+1), random(2, n+1), make([]float32, n+1)
		for i := range n {
			switch i % 5 {
			case 3:
				dst[i], src[i] = negative, negative
			case 4:
				src[i] = negative
			}
			want[i] = dst[i] + src[i]
		}
		want[n] = dst[n]
		Add(dst[:n], src[:n])
		for i := range want {
			if math.Float32bits(dst[i]) != math.Float32bits(want[i]) {
				t.Fatalf("%d elements: element %d is %v, want %v", n, i, dst[i], want[i])
			}
		}
	}
}
