package route

import (
	"fmt"
	"strings"
	"testing"
)

func TestPinsForgetTheLeastRecentlyUsed(t *testing.T) {
	p := NewPins(2)
	p.Set("a", 1)
	p.Set("b", 2)
	p.Set("a", 3) // moved, and used
	p.Set(strings.Repeat("c", 1<<20), 4)
	for session, want := range map[string]uint64{"a": 3, "b": 0, strings.Repeat("c", 1<<20): 4, "": 0} {
		if got := p.Get(session); got != want {
			t.Errorf("%.1s is bound to %d, want %d", session, got, want)
		}
	}
	for i := range 100 {
		p.Set(fmt.Sprint(i), uint64(i))
	}
	if p.Len() != 2 {
		t.Errorf("%d sessions", p.Len())
	}
}
