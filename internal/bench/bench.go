//go:build linux

// Package bench measures the handoff against what the machine can do at all: the copy of KV bytes against a
// bare memcpy and a bare TCP stream, the path from the end of prefill to the first decode step through real
// processes, and what a request costs the coordinator.
//
// A rate says little on a machine that others use as well, a ratio more: what is compared is measured in turns
// of a few milliseconds, and compared turn by turn.
package bench

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"
)

// Report is what was measured. Parts that were not are empty.
type Report struct {
	Data        []Rate  `json:"data,omitempty"`
	Path        []Path  `json:"path,omitempty"`
	Coordinator []Load  `json:"coordinator,omitempty"`
	Checks      []Check `json:"checks"`
}

// Check is a figure that has a target.
type Check struct {
	What   string  `json:"what"`
	Got    float64 `json:"got"`
	Target float64 `json:"target"`
	AtMost bool    `json:"at_most,omitempty"` // less is better
}

// OK tells whether the target was met.
func (c Check) OK() bool {
	if c.AtMost {
		return c.Got <= c.Target
	}
	return c.Got >= c.Target
}

// Write prints the report as tables.
func (r *Report) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(r.Data) > 0 {
		fmt.Fprintln(t, "The data phase\tGB/s\tratio\tto")
		for _, d := range r.Data {
			fmt.Fprintf(t, "%s: %s\t%.2f\t", d.Shape, d.Way, d.GBps)
			if d.Of != "" {
				fmt.Fprintf(t, "%.2f\t%s", d.Ratio, d.Of)
			}
			fmt.Fprintln(t)
		}
		fmt.Fprintln(t)
	}
	if len(r.Path) > 0 {
		fmt.Fprintln(t, "From prefill to decode, ms\tbetween tokens\tdecode step\tbytes\tat bare rate\toverhead\tp10\tp90\tengine: transfer\thandoff")
		for _, p := range r.Path {
			fmt.Fprintf(t, "%s, %s, %d tokens\t%.2f\t%.2f\t%d\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\n", p.Model, p.Transport, p.Prompt,
				p.Between, p.Step, p.Bytes, p.ByteTime, p.Overhead, p.Overhead1, p.Overhead9, p.Transfer, p.Handoff)
		}
		fmt.Fprintln(t)
	}
	if len(r.Coordinator) > 0 {
		fmt.Fprintln(t, "The coordinator process\trequests\tper CPU-second\tCPU s\twall s\tRSS, MiB")
		for _, l := range r.Coordinator {
			fmt.Fprintf(t, "%s\t%d\t%.0f\t%.1f\t%.1f\t", l.What, l.Requests, l.Rate, l.CPUSeconds, l.Wall)
			for i := 0; i < len(l.RSS); i += max(1, len(l.RSS)/8) {
				fmt.Fprintf(t, "%d ", l.RSS[i]>>20)
			}
			fmt.Fprintln(t)
		}
		fmt.Fprintln(t)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, c := range r.Checks {
		verdict, relation := "ok    ", "at least"
		if !c.OK() {
			verdict = "MISSED"
		}
		if c.AtMost {
			relation = "at most"
		}
		fmt.Fprintf(w, "%s  %s: %.2f (%s %v)\n", verdict, c.What, c.Got, relation, c.Target)
	}
	return nil
}

// quantile is the value below which a share q of the list lies. It sorts the list, which must not be empty.
func quantile[T cmp.Ordered](list []T, q float64) T {
	slices.Sort(list)
	return list[min(len(list)-1, int(q*float64(len(list))))]
}

func median[T cmp.Ordered](list []T) T { return quantile(list, 0.5) }

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
