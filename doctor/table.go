package doctor

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// Write prints the report for people.
func (r *Report) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SERVER\tENGINE\tVERSION\tMODEL\tCONTEXT\tROLE\tCONNECTOR\tHEALTH\t")
	for _, s := range r.Servers {
		health := "ok"
		switch {
		case !s.Reachable:
			health = "UNREACHABLE"
		case s.Unauthorized:
			health = "NO ACCESS"
		case !s.Healthy && s.problem != "":
			health = "NOT WELL"
		case !s.Healthy:
			health = "-"
		}
		length := "-"
		if s.Context > 0 {
			length = itoa(s.Context)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", s.URL, dash(s.Engine), dash(s.Version), dash(s.Model), length, dash(s.Role), dash(s.Connector), health, s.Note)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	var b strings.Builder
	if len(r.Findings) > 0 {
		b.WriteByte('\n')
	}
	for _, f := range r.Findings {
		fmt.Fprintf(&b, "%-8s %s\n         %s\n", strings.ToUpper(string(f.Severity)), f.Subject, f.Text)
		if f.Do != "" {
			fmt.Fprintf(&b, "         -> %s\n", f.Do)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
