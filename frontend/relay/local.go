package relay

import (
	"fmt"
	"slices"
	"time"
)

// localEngines are those whose decode workers can compute a prompt. Baton's and SGLang's never do.
var localEngines = []string{"vllm", "trtllm"}

// checkLocal checks what conditional disaggregation needs.
func (c *Config) checkLocal() error {
	switch {
	case c.LocalPrefillBelow < 0:
		return fmt.Errorf("relay: --local-prefill-below is %d; it is a number of tokens", c.LocalPrefillBelow)
	case c.LocalPrefillBelow == 0:
		return nil
	case c.DecodeRouter != "kv_cache_aware":
		return fmt.Errorf("relay: --local-prefill-below decides by what decode workers hold: it needs --decode-router kv_cache_aware, which is %s", c.DecodeRouter)
	case c.Engine != "auto" && !slices.Contains(localEngines, c.Engine):
		return fmt.Errorf("relay: --local-prefill-below is for engines whose decode workers can compute a prompt, %v; --engine is %s", localEngines, c.Engine)
	}
	return nil
}

// local lets a decode worker compute what it does not hold of a prompt, when that is short: then moving KV costs more
// than it saves. It reports whether the request has been served, or has failed; else it takes two legs.
func (x *exchange) local(d dialect, t *try) (served bool, err error) {
	limit := x.s.cfg.LocalPrefillBelow
	if limit == 0 || !slices.Contains(localEngines, d.name()) {
		return false, nil
	}
	ids := x.r.ids()
	if len(ids) == 0 {
		x.s.metrics.local.WithLabelValues("the prompt's ids are not known").Inc()
		return false, nil
	}
	at, err := x.acquire(decodeLeg)
	if err != nil {
		return true, err
	}
	defer at.end(canceled)
	if rest := len(ids) - at.choice.Match*x.s.held.blockSize(); rest >= limit {
		x.workers[decodeLeg] = ""
		x.s.metrics.local.WithLabelValues("too much is missing").Inc()
		return false, nil
	}
	x.s.metrics.local.WithLabelValues("served").Inc()
	x.route = "single; local prefill"
	a, err := x.call(at, d.single(t), nil)
	if err != nil {
		return true, err
	}
	return true, x.deliver(at, a, time.Time{}, nil)
}
