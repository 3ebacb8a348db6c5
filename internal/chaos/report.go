//go:build unix

package chaos

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"
)

// Report is what drills found.
type Report struct {
	Seed   uint64
	Drills []*Drill
}

// Drill is what one fleet went through.
type Drill struct {
	Transport    string
	Disturbances map[string]int // by kind
	Streams      int            // that were answered, those of the quiet rounds included
	Tokens       int
	Takeovers    int           // a decode engine went on with the KV of the same source
	Reruns       int           // prompt and tokens were computed again
	HangUps      int           // clients that left before the end
	Retries      int           // of clients that were refused while the fleet could not serve
	Failed       int           // streams that ended with an error they must not have
	Wrong        int           // streams with another answer than the undisturbed one
	First, Stall time.Duration // the longest that a stream waited for its first token, and for another
	RSS          int64         // of the largest process at the end, in bytes
	Problems     []string
}

// OK tells whether everything was as it must be.
func (r *Report) OK() bool {
	for _, d := range r.Drills {
		if len(d.Problems) > 0 {
			return false
		}
	}
	return true
}

// Write prints the report as a table.
func (r *Report) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	row := func(name string, cell func(*Drill) any) {
		fmt.Fprintf(t, "%s\t", name)
		for _, d := range r.Drills {
			fmt.Fprintf(t, "%v\t", cell(d))
		}
		fmt.Fprintln(t)
	}
	row("", func(d *Drill) any { return d.Transport })
	for _, k := range kinds {
		row(k.name, func(d *Drill) any { return d.Disturbances[k.name] })
	}
	row("streams", func(d *Drill) any { return d.Streams })
	row("tokens", func(d *Drill) any { return d.Tokens })
	row("taken over from the source", func(d *Drill) any { return d.Takeovers })
	row("prefilled again", func(d *Drill) any { return d.Reruns })
	row("hung up", func(d *Drill) any { return d.HangUps })
	row("retried by clients, excused", func(d *Drill) any { return d.Retries })
	row("failed", func(d *Drill) any { return d.Failed })
	row("wrong", func(d *Drill) any { return d.Wrong })
	row("slowest first token", func(d *Drill) any { return d.First.Round(time.Millisecond) })
	row("slowest stall", func(d *Drill) any { return d.Stall.Round(time.Millisecond) })
	row("largest process, MiB", func(d *Drill) any { return d.RSS >> 20 })
	row("problems", func(d *Drill) any { return len(d.Problems) })
	if err := t.Flush(); err != nil {
		return err
	}
	const most = 10
	for _, d := range r.Drills {
		for i, p := range d.Problems {
			if i == most {
				fmt.Fprintf(w, "%s: and %d more problems\n", d.Transport, len(d.Problems)-most)
				break
			}
			fmt.Fprintf(w, "%s: %s\n", d.Transport, p)
		}
	}
	return nil
}
