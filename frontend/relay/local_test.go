package relay

import (
	"strings"
	"testing"
)

// A prompt of which a decode worker lacks little is computed there; the rest takes two legs.
func TestLocalPrefill(t *testing.T) {
	prefill := newFake(t, "trtllm", nil)
	decode := newFake(t, "trtllm", prefill)
	r := relayTo(t, []*fake{prefill}, []*fake{decode}, func(c *Config) {
		c.DecodeRouter, c.LocalPrefillBelow = "kv_cache_aware", 40
		c.Decode[0].Events = "http"
	})
	legs := func(body string) (prefills, decodes int) {
		t.Helper()
		seen := func() (n [2]int) {
			for i, f := range []*fake{prefill, decode} {
				f.set(func() {
					for _, s := range f.seen {
						if s.path == completionsPath {
							n[i]++
						}
					}
				})
			}
			return n
		}
		before := seen()
		r.read(r.post(completionsPath, body))
		return seen()[0] - before[0], seen()[1] - before[1]
	}
	long, ids := idPrompt(1, 10)
	short, _ := idPrompt(2, 2)
	if p, d := legs(long); p != 1 || d != 1 {
		t.Errorf("a long prompt that nobody holds took %d prefill and %d decode legs", p, d)
	}
	if p, d := legs(short); p != 0 || d != 1 {
		t.Errorf("a short prompt took %d prefill and %d decode legs", p, d)
	}
	done := make(chan struct{})
	decode.set(func() {
		decode.events = append(decode.events, "["+cacheEvent(1, ids[:9*16])+"]", "[]")
		decode.told = done
	})
	<-done
	if p, d := legs(long); p != 0 || d != 1 {
		t.Errorf("a long prompt of which one block is missing took %d prefill and %d decode legs", p, d)
	}
	if n := r.metric("local_prefill_total"); n != 3 {
		t.Errorf("%v decisions", n)
	}
	for want, change := range map[string]func(*Config){
		"--decode-router kv_cache_aware": func(c *Config) { c.DecodeRouter = "load_balancing" },
		"can compute a prompt":           func(c *Config) { c.Engine = "sglang" },
		"is a number of tokens":          func(c *Config) { c.LocalPrefillBelow = -1 },
	} {
		c := Config{DecodeRouter: "kv_cache_aware", LocalPrefillBelow: 10}
		change(&c)
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
