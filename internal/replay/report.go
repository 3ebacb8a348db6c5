//go:build unix

package replay

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"baton/loadgen"
)

// Report is what came of it.
type Report struct {
	Wall      time.Duration
	Completed int // turns
	Lost      int // trajectories: sessions that ended with a failure
	Retries   int
	Verified  bool // answers were compared
	Changed   int  // trajectories that said something else
	Phases    []Phase
	Failures  []*loadgen.Failure

	digests map[string]uint64
}

// Phase is a part of the run: before the kill, until the restart, after it.
type Phase struct {
	Name       string
	Turns      int
	Wall       time.Duration
	HitRate    float64 // cached of all prompt tokens
	HitOfIdeal float64 // of those that prefill engines with room for everything would have had
	TTFT50     time.Duration
	TTFT99     time.Duration
	Retries    int
}

// GoodHitRate is how much of the ideal must be cached before the kill.
const GoodHitRate = 0.95

// Err is what must not be.
func (r *Report) Err() error {
	switch {
	case r.Lost > 0:
		return fmt.Errorf("replay: %d trajectories were lost", r.Lost)
	case r.Changed > 0:
		return fmt.Errorf("replay: %d trajectories changed", r.Changed)
	case r.Phases[0].HitOfIdeal < GoodHitRate:
		return fmt.Errorf("replay: before the kill, %.1f %% of the ideal was cached; at least %.0f %% is the aim", 100*r.Phases[0].HitOfIdeal, 100*GoodHitRate)
	}
	return nil
}

// phase adds up results.
type phase struct {
	began                 time.Duration
	turns, retries        int
	prompt, cached, ideal int
	ttft                  []time.Duration
}

func (p *phase) add(r *loadgen.Result) {
	p.retries += r.Tries - 1
	if r.Err != nil {
		return
	}
	p.turns++
	p.prompt += max(r.PromptTokens, 0)
	p.cached += max(r.CachedTokens, 0)
	if d, ok := r.TTFT(); ok {
		p.ttft = append(p.ttft, d)
	}
}

func (w *watcher) report(result *loadgen.Report) *Report {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := &result.Targets[0]
	r := &Report{
		Wall: time.Duration(t.Duration * float64(time.Second)), Completed: t.Completed, Lost: t.SessionsLost, Retries: t.Retries,
		Failures: t.Errors, digests: w.digests,
	}
	for i, name := range []string{"before the kill", "until the restart", "after the restart"} {
		p := &w.phases[i]
		end := r.Wall
		if i+1 < len(w.phases) && w.phases[i+1].began > 0 {
			end = w.phases[i+1].began
		}
		slices.Sort(p.ttft)
		r.Phases = append(r.Phases, Phase{
			Name: name, Turns: p.turns, Wall: end - p.began, HitRate: share(p.cached, p.prompt), HitOfIdeal: share(p.cached, p.ideal),
			TTFT50: quantile(p.ttft, 0.5), TTFT99: quantile(p.ttft, 0.99), Retries: p.retries,
		})
	}
	return r
}

func share(n, of int) float64 {
	if of == 0 {
		return 0
	}
	return float64(n) / float64(of)
}

func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// Write prints the report.
func (r *Report) Write(w io.Writer) error {
	verdict := ""
	if r.Verified {
		verdict = fmt.Sprintf(", %d changed", r.Changed)
	}
	if _, err := fmt.Fprintf(w, "wall time %.1f s, %d turns, %d trajectories lost%s, %d retries\n\n%-18s %6s %8s %9s %9s %10s %10s %8s\n",
		r.Wall.Seconds(), r.Completed, r.Lost, verdict, r.Retries, "", "turns", "seconds", "hit rate", "of ideal", "TTFT p50", "TTFT p99", "retries"); err != nil {
		return err
	}
	for _, p := range r.Phases {
		if _, err := fmt.Fprintf(w, "%-18s %6d %8.1f %7.1f %% %7.1f %% %7.0f ms %7.0f ms %8d\n",
			p.Name, p.Turns, p.Wall.Seconds(), 100*p.HitRate, 100*p.HitOfIdeal, ms(p.TTFT50), ms(p.TTFT99), p.Retries); err != nil {
			return err
		}
	}
	for _, f := range r.Failures {
		if _, err := fmt.Fprintf(w, "%d x %s: %s\n", f.Count, f.Kind, f.Example); err != nil {
			return err
		}
	}
	return nil
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

func newClient() *http.Client { return &http.Client{Transport: loadgen.NewTransport()} }
