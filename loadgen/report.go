package loadgen

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"time"
)

// Report is the outcome of a run. The names of its JSON members are stable.
type Report struct {
	Targets    []TargetReport `json:"targets"`
	Comparison []Ratio        `json:"comparison,omitempty"` // of the second target to the first
	Client     ClientReport   `json:"client"`
	Warnings   []string       `json:"warnings"`
}

// TargetReport is what was measured of one target. Times are in milliseconds, rates per second.
type TargetReport struct {
	URL      string  `json:"url"`
	Model    string  `json:"model"`
	OwnedBy  string  `json:"owned_by,omitempty"`
	Duration float64 `json:"duration_s"` // of the rounds

	Completed int        `json:"completed"`
	Failed    int        `json:"failed"`
	Retries   int        `json:"retries"`
	Errors    []*Failure `json:"errors"`

	Sessions           int `json:"sessions_completed"`
	SessionsLost       int `json:"sessions_lost"`
	SessionsUnfinished int `json:"sessions_unfinished"` // when the duration was over

	InputTokens    int64  `json:"input_tokens"`
	OutputTokens   int64  `json:"output_tokens"`
	CountedBy      string `json:"output_tokens_counted_by"` // usage, token_ids or events: the worst that was needed
	StreamedTokens int64  `json:"streamed_tokens"`          // token ids that came with the events
	Events         int64  `json:"events"`                   // that brought tokens
	ShortAnswers   int    `json:"short_answers"`

	CachedTokens   *int64   `json:"cached_tokens,omitempty"` // absent when the server does not tell
	ReusableTokens int64    `json:"reusable_tokens"`         // of the prompts, sent before in this run
	HitRate        *float64 `json:"prefix_hit_rate,omitempty"`
	HitOfIdeal     *float64 `json:"prefix_hit_rate_of_ideal,omitempty"`

	RequestThroughput float64 `json:"request_throughput"`
	InputThroughput   float64 `json:"input_throughput"`
	OutputThroughput  float64 `json:"output_throughput"`
	TotalThroughput   float64 `json:"total_token_throughput"`
	Goodput           float64 `json:"request_goodput,omitzero"`

	TTFT      Distribution `json:"ttft_ms"`
	TPOT      Distribution `json:"tpot_ms"`
	ITL       Distribution `json:"itl_ms"`
	ITLOf     string       `json:"itl_between"` // tokens or events
	E2E       Distribution `json:"e2el_ms"`
	SendDelay Distribution `json:"send_delay_ms"` // from when requests were meant to be sent until they were
}

// Ratio compares one figure. Low and High are the least and the greatest of the rounds' ratios.
type Ratio struct {
	Metric string  `json:"metric"`
	First  float64 `json:"first"`
	Second float64 `json:"second"`
	Ratio  float64 `json:"ratio"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

// ClientReport is what the load generator itself cost.
type ClientReport struct {
	CPUSeconds   float64      `json:"cpu_s"`
	CPUShare     float64      `json:"cpu_share"` // of the CPUs that it may use
	CPUPerEvent  float64      `json:"cpu_us_per_event"`
	WakeUpDelay  Distribution `json:"wakeup_delay_ms"`
	AvailableCPU int          `json:"cpus"`
}

// Failed is how many requests failed, of all targets.
func (r *Report) Failed() int {
	n := 0
	for i := range r.Targets {
		n += r.Targets[i].Failed
	}
	return n
}

type clientCost struct {
	wall, cpu time.Duration
	lag       *histogram
}

func (r *run) report() *Report {
	report := &Report{Warnings: []string{}}
	events := int64(0)
	for _, p := range r.players {
		t := p.report(p.all)
		report.Targets = append(report.Targets, t)
		report.Warnings = append(report.Warnings, p.warnings(&t)...)
		events += p.all.events
	}
	if len(r.players) == 2 {
		report.Comparison = compare(r.players[0], r.players[1])
	}
	c := &report.Client
	c.AvailableCPU = runtime.GOMAXPROCS(0)
	c.CPUSeconds = round(r.client.cpu.Seconds())
	if r.client.wall > 0 {
		c.CPUShare = round(r.client.cpu.Seconds() / r.client.wall.Seconds() / float64(c.AvailableCPU))
	}
	if events > 0 {
		c.CPUPerEvent = round(float64(r.client.cpu.Microseconds()) / float64(events))
	}
	c.WakeUpDelay = r.client.lag.distribution()
	report.Warnings = append(report.Warnings, c.warnings()...)
	return report
}

func (p *player) report(t *tally) TargetReport {
	seconds := t.wall.Seconds()
	rate := func(n int64) float64 {
		if seconds == 0 {
			return 0
		}
		return round(float64(n) / seconds)
	}
	r := TargetReport{
		URL: p.server.base, Model: p.server.model, OwnedBy: p.server.owner, Duration: round(seconds),
		Completed: t.completed, Failed: t.failed, Retries: t.retried,
		Errors:   slices.SortedFunc(maps.Values(t.errors), func(a, b *Failure) int { return cmp.Or(b.Count-a.Count, cmp.Compare(a.Kind, b.Kind)) }),
		Sessions: t.sessions, SessionsLost: t.lost, SessionsUnfinished: t.unfinished,
		InputTokens: t.input, OutputTokens: t.output, StreamedTokens: t.streamed, Events: t.events, ShortAnswers: t.short,
		CountedBy: string(ByUsage), ReusableTokens: t.reusable,
		RequestThroughput: rate(int64(t.completed)), InputThroughput: rate(t.input), OutputThroughput: rate(t.output), TotalThroughput: rate(t.input + t.output),
		TTFT: t.ttft.distribution(), TPOT: t.tpot.distribution(), ITL: t.itl.distribution(), ITLOf: "tokens", E2E: t.e2e.distribution(),
		SendDelay: t.late.distribution(),
	}
	if r.Errors == nil {
		r.Errors = []*Failure{}
	}
	for _, worse := range []Count{ByTokenIDs, ByEvents} {
		if t.counted[worse] > 0 {
			r.CountedBy = string(worse)
		}
	}
	if t.streamed == 0 && t.output != t.events {
		r.ITLOf = "events"
	}
	if t.cacheKnown > 0 {
		r.CachedTokens = &t.cached
		if t.cacheInput > 0 {
			r.HitRate = share(t.cached, t.cacheInput)
		}
		if t.cacheReusable > 0 {
			r.HitOfIdeal = share(t.cached, t.cacheReusable)
		}
	}
	if p.cfg.Goal != (Goal{}) {
		r.Goodput = rate(int64(t.good))
	}
	return r
}

func share(n, of int64) *float64 {
	f := round(float64(n) / float64(of))
	return &f
}

func (p *player) warnings(r *TargetReport) (list []string) {
	warn := func(format string, args ...any) {
		list = append(list, r.URL+": "+fmt.Sprintf(format, args...))
	}
	t := p.all
	if n := t.mismatched; n > 0 {
		warn("%d answers came with another number of token ids than their usage says: %d ids in all, %d by usage", n, t.streamed, t.output)
	}
	if t.counted[ByEvents] > 0 {
		warn("the server sends neither usage nor token ids with %d answers; their tokens are taken to be as many as their events", t.counted[ByEvents])
	}
	if t.short > 0 && !p.cfg.Request.StopAtEOS {
		warn("%d answers are shorter than was asked for: does the server take ignore_eos, and is its context long enough?", t.short)
	}
	if t.cacheReusable > 0 && t.cached > t.cacheReusable+t.cacheReusable/20 || t.cacheReusable == 0 && t.cached > t.cacheInput/20 {
		warn("%d prompt tokens were cached, but only %d had been sent before in this run: the server knew them from an earlier one. Take another seed to measure without", t.cached, t.cacheReusable)
	}
	if p.cfg.Load.Concurrency == 0 {
		if late := t.late.quantile(.99); late > 20*time.Millisecond {
			warn("requests were sent up to %v (p99) after they were meant to be: the bound on what runs at a time was reached, or this process was short of CPU. Times count from when they were meant to be sent", late.Round(time.Millisecond))
		}
	}
	return list
}

// The limits beyond which the client's own slowness shows in what it measures.
const (
	busyShare = 0.8
	lateMS    = 5
)

func (c *ClientReport) warnings() (list []string) {
	if c.CPUShare > busyShare {
		list = append(list, fmt.Sprintf("the load generator used %.0f %% of its %d CPUs: it was the bottleneck, or near it. Run it on another host, or several of it", 100*c.CPUShare, c.AvailableCPU))
	}
	if c.WakeUpDelay.P99 > lateMS {
		list = append(list, fmt.Sprintf("the load generator was short of CPU: it woke up %.1f ms late (p99), and the times above include such delays. Run it on another host than the servers, or with less load", c.WakeUpDelay.P99))
	}
	return list
}

// compared are the figures that two targets are compared by.
var compared = []struct {
	name string
	of   func(*TargetReport) float64
}{
	{"request_throughput", func(r *TargetReport) float64 { return r.RequestThroughput }},
	{"output_throughput", func(r *TargetReport) float64 { return r.OutputThroughput }},
	{"ttft_ms.mean", func(r *TargetReport) float64 { return r.TTFT.Mean }},
	{"ttft_ms.p50", func(r *TargetReport) float64 { return r.TTFT.P50 }},
	{"ttft_ms.p99", func(r *TargetReport) float64 { return r.TTFT.P99 }},
	{"tpot_ms.mean", func(r *TargetReport) float64 { return r.TPOT.Mean }},
	{"itl_ms.p50", func(r *TargetReport) float64 { return r.ITL.P50 }},
	{"itl_ms.p99", func(r *TargetReport) float64 { return r.ITL.P99 }},
	{"e2el_ms.p50", func(r *TargetReport) float64 { return r.E2E.P50 }},
	{"e2el_ms.p99", func(r *TargetReport) float64 { return r.E2E.P99 }},
	{"prefix_hit_rate", func(r *TargetReport) float64 {
		if r.HitRate == nil {
			return 0
		}
		return *r.HitRate
	}},
}

// compare makes ratios of the second player's figures to the first's. Figures that one of them lacks are left out.
func compare(a, b *player) (list []Ratio) {
	first, second := a.report(a.all), b.report(b.all)
	var rounds [][2]TargetReport
	for i := range min(len(a.each), len(b.each)) {
		rounds = append(rounds, [2]TargetReport{a.report(a.each[i]), b.report(b.each[i])})
	}
	for _, m := range compared {
		x, y := m.of(&first), m.of(&second)
		if x == 0 || y == 0 {
			continue
		}
		r := Ratio{Metric: m.name, First: x, Second: y, Ratio: round(y / x), Low: math.Inf(1)}
		for i := range rounds {
			if u, v := m.of(&rounds[i][0]), m.of(&rounds[i][1]); u > 0 && v > 0 {
				r.Low, r.High = min(r.Low, round(v/u)), max(r.High, round(v/u))
			}
		}
		if r.High == 0 {
			r.Low, r.High = r.Ratio, r.Ratio
		}
		list = append(list, r)
	}
	return list
}
