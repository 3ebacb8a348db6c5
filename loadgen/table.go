package loadgen

import (
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Write prints the report for people.
func (r *Report) Write(w io.Writer) error {
	p := &printer{w: w}
	for i := range r.Targets {
		if i > 0 {
			p.line("")
		}
		r.Targets[i].write(p)
	}
	if len(r.Comparison) > 0 {
		r.compareTo(p)
	}
	p.line("")
	c := &r.Client
	p.line("load generator: %s of %d CPUs, %s us of CPU an event, woke up %s ms late (p99)",
		percent(c.CPUShare), c.AvailableCPU, figure(c.CPUPerEvent), figure(c.WakeUpDelay.P99))
	for _, warning := range r.Warnings {
		p.line("WARNING: %s", warning)
	}
	return p.err
}

// printer keeps the first error.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) line(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format+"\n", args...)
	}
}

// pair is a name and a value, two of which share a line.
type pair struct{ name, value string }

func (r *TargetReport) write(p *printer) {
	p.line("%s  %s", r.URL, r.Model)
	p.line("")
	requests := fmt.Sprint(r.Completed)
	if r.Failed > 0 {
		requests += fmt.Sprintf(", %d FAILED", r.Failed)
	}
	if r.Retries > 0 {
		requests += fmt.Sprintf(", %d retries", r.Retries)
	}
	pairs := []pair{
		{"requests", requests}, {"duration", figure(r.Duration) + " s"},
		{"requests/s", figure(r.RequestThroughput)}, {"output tokens/s", figure(r.OutputThroughput)},
		{"input tokens", fmt.Sprint(r.InputTokens)}, {"output tokens", fmt.Sprintf("%d%s", r.OutputTokens, counted(r.CountedBy))},
	}
	if r.HitRate != nil {
		pairs = append(pairs, pair{"prefix hit rate", percent(*r.HitRate)})
		if r.HitOfIdeal != nil {
			pairs = append(pairs, pair{"of the ideal", percent(*r.HitOfIdeal)})
		}
	} else if r.Completed > 0 {
		pairs = append(pairs, pair{"prefix hit rate", "the server does not tell"})
	}
	if r.Sessions+r.SessionsLost+r.SessionsUnfinished != r.Completed+r.Failed {
		pairs = append(pairs, pair{"sessions", fmt.Sprintf("%d complete, %d lost, %d cut off", r.Sessions, r.SessionsLost, r.SessionsUnfinished)})
	}
	if r.Goodput > 0 {
		pairs = append(pairs, pair{"goodput/s", figure(r.Goodput)})
	}
	for i := 0; i < len(pairs); i += 2 {
		line := fmt.Sprintf("  %-16s %-24s", pairs[i].name, pairs[i].value)
		if i+1 < len(pairs) {
			line += fmt.Sprintf(" %-16s %s", pairs[i+1].name, pairs[i+1].value)
		}
		p.line("%s", strings.TrimRight(line, " "))
	}
	p.line("")
	p.line("  %-10s %9s %9s %9s %9s %9s", "ms", "mean", "p50", "p90", "p99", "max")
	itl := "ITL"
	if r.ITLOf == "events" {
		itl = "ITL *"
	}
	for _, d := range []struct {
		name string
		d    *Distribution
	}{{"TTFT", &r.TTFT}, {"TPOT", &r.TPOT}, {itl, &r.ITL}, {"E2E", &r.E2E}} {
		if d.d.Count == 0 {
			p.line("  %-10s %9s", d.name, "-")
			continue
		}
		p.line("  %-10s %9s %9s %9s %9s %9s", d.name, figure(d.d.Mean), figure(d.d.P50), figure(d.d.P90), figure(d.d.P99), figure(d.d.Max))
	}
	if r.ITLOf == "events" {
		p.line("  * between events, which bring several tokens or none")
	}
	for _, f := range r.Errors {
		p.line("  %d x %s: %s", f.Count, f.Kind, f.Example)
	}
}

func counted(by string) string {
	if by == string(ByUsage) {
		return ""
	}
	return " (by " + strings.ReplaceAll(by, "_", " ") + ")"
}

func (r *Report) compareTo(p *printer) {
	p.line("")
	p.line("A %s", r.Targets[0].URL)
	p.line("B %s", r.Targets[1].URL)
	p.line("")
	p.line("  %-20s %10s %10s %8s   %s", "", "A", "B", "B/A", "rounds")
	for _, c := range r.Comparison {
		p.line("  %-20s %10s %10s %8.3f   %.3f to %.3f", c.Metric, figure(c.First), figure(c.Second), c.Ratio, c.Low, c.High)
	}
}

func percent(f float64) string { return strconv.FormatFloat(100*f, 'f', 1, 64) + " %" }

// figure shows about four digits.
func figure(f float64) string {
	switch {
	case f >= 1000:
		return strconv.FormatFloat(f, 'f', 0, 64)
	case f >= 100:
		return strconv.FormatFloat(f, 'f', 1, 64)
	case f >= 1 || f == 0:
		return strconv.FormatFloat(f, 'f', 2, 64)
	default:
		return strconv.FormatFloat(f, 'f', 4, 64)
	}
}

// String is a line that says how it goes.
func (s Snapshot) String() string {
	done := fmt.Sprint(s.Done + s.Failed)
	if s.Planned > 0 {
		done += fmt.Sprintf("/%d", s.Planned)
	}
	line := fmt.Sprintf("%6.1fs  %s requests, %d running", s.Elapsed.Seconds(), done, s.Running)
	if s.Failed > 0 {
		line += fmt.Sprintf(", %d FAILED", s.Failed)
	}
	if s.TTFT > 0 {
		line += fmt.Sprintf(", TTFT p50 %s ms", figure(millis(s.TTFT)))
	}
	line += fmt.Sprintf(", %d tokens", s.Tokens)
	if s.Of > 1 {
		line += fmt.Sprintf("  [round %d/%d: %s]", min(s.Round+1, s.Of), s.Of, s.URL)
	}
	return line
}
