//go:build unix && !race

package frontend

import (
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestTurnCost: the thirtieth turn costs the processor at most twice what the second costs, for equal new text, also when
// its messages carry all ids that were ever seen. Copying a body into memory does not count. Each is the least of several, and the whole is tried
// again when it does not hold: other work on the machine costs caches.
func TestTurnCost(t *testing.T) {
	tok := bigTokenizer(t)
	for _, kind := range []struct {
		name   string
		bodies []string
	}{{"plain", agentBodies(31)}, {"rollout", rolloutBodies(t, tok, 31)}} {
		t.Run(kind.name, func(t *testing.T) {
			second, thirtieth := turnCost(t, tok, kind.bodies, -1, 3)
			t.Logf("nothing is remembered: turn 2 takes %v, turn 30 %v", second, thirtieth)
			for try := range 6 {
				second, thirtieth = turnCost(t, tok, kind.bodies, 0, 15)
				t.Logf("turn 2 takes %v, turn 30 %v (%.2f)", second, thirtieth, float64(thirtieth)/float64(second))
				if thirtieth <= 2*second {
					return
				}
				if try == 5 {
					t.Errorf("turn 30 takes %v, more than twice the %v of turn 2", thirtieth, second)
				}
			}
		})
	}
}

// turnCost is what turns take a server that remembers so many.
func turnCost(t *testing.T, tok Tokenizer, bodies []string, entries, rounds int) (second, thirtieth time.Duration) {
	all, copying := make([][]time.Duration, len(bodies)), make([][]time.Duration, len(bodies))
	for range rounds {
		s := newTestServer(t, silent{}, func(c *Config) {
			c.Tokenizer, c.Limits, c.Conversations.Entries = tok, Limits{}, entries
		})
		runtime.GC()
		for i, body := range bodies {
			start := cpuTime()
			b, err := readSized(strings.NewReader(body), int64(len(body)))
			if err != nil {
				t.Fatal(err)
			}
			spare(b)
			copying[i] = append(copying[i], cpuTime()-start)
			start = cpuTime()
			if r := post(t, s.Handler(), chatPath, body); r.status != 200 {
				t.Fatalf("turn %d: %d %s", i, r.status, r.body)
			}
			all[i] = append(all[i], cpuTime()-start)
		}
	}
	median := func(from, to int) time.Duration {
		var list []time.Duration
		for i := from; i < to; i++ {
			list = append(list, slices.Min(all[i])-slices.Min(copying[i]))
		}
		slices.Sort(list)
		return list[len(list)/2]
	}
	return median(1, 4), median(27, 30)
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestHostileBodies: what is deep, long or broken costs no more than its bytes.
func TestHostileBodies(t *testing.T) {
	const size = 4 << 20
	fill := func(s string) string { return strings.Repeat(s, size/len(s)) }
	for name, body := range map[string]string{
		"open arrays":      `{"a":` + fill("["),
		"lists in lists":   `{"a":` + fill("[1,"),
		"lists":            `{"a":[` + fill("[1],") + `[1]]}`,
		"a long list":      `{"a":[` + fill("1,") + `1]}`,
		"a list cut short": `{"a":[` + fill("1,"),
		"a long number":    `{"a":[` + fill("1") + `]}`,
		"a name in a list": `{"a":[` + fill("1,") + `x]}`,
		"quotes":           `{"a":"` + fill(`\"`) + `"}`,
		"backslashes":      `{"a":"` + fill(`\\`) + `"}`,
		"open quote":       `{"a":"` + fill(`\"`),
		"names":            `{"messages":` + fill(`"messages":[`),
	} {
		t.Run(name, func(t *testing.T) {
			before := cpuTime()
			s := newTestServer(t, newToyBackend(), nil)
			for range 2 {
				if r := post(t, s.Handler(), chatPath, body); r.status != 400 {
					t.Errorf("%d %.200s", r.status, r.body)
				}
			}
			if took := cpuTime() - before; took.Seconds() > 3 {
				t.Errorf("takes %v", took)
			}
		})
	}
}
