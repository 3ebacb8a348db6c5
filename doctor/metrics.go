package doctor

import (
	"bytes"
	"strconv"
	"strings"
)

// samples are the lines of a Prometheus exposition: the series as it is printed, and its value.
type samples map[string]float64

// readMetrics reads what it can.
func readMetrics(raw []byte) samples {
	m := make(samples)
	for line := range bytes.Lines(raw) {
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		end := bytes.LastIndexByte(line, '}') + 1
		if end == 0 {
			end = max(bytes.IndexAny(line, " \t"), 0)
		}
		fields := bytes.Fields(line[end:]) // the value, and perhaps a time
		if len(fields) == 0 {
			continue
		}
		if v, err := strconv.ParseFloat(string(fields[0]), 64); err == nil {
			m[string(bytes.TrimSpace(line[:end]))] = v
		}
	}
	return m
}

// name is a series without its labels.
func seriesName(series string) string {
	base, _, _ := strings.Cut(series, "{")
	return base
}

// sum adds the samples of a name whose labels contain all of labels, such as `role="decode"`.
func (m samples) sum(name string, labels ...string) (sum float64, ok bool) {
next:
	for series, v := range m {
		if seriesName(series) != name {
			continue
		}
		for _, l := range labels {
			if !strings.Contains(series, l) {
				continue next
			}
		}
		sum, ok = sum+v, true
	}
	return sum, ok
}

// has tells whether there is a series whose name begins so.
func (m samples) has(prefix string) bool {
	for series := range m {
		if strings.HasPrefix(series, prefix) {
			return true
		}
	}
	return false
}

// label is the value of a label of the first series of that name; empty without one.
func (m samples) label(name, label string) string {
	for series := range m {
		if seriesName(series) != name {
			continue
		}
		if _, rest, ok := strings.Cut(series, label+`="`); ok {
			value, _, _ := strings.Cut(rest, `"`)
			return value
		}
	}
	return ""
}
