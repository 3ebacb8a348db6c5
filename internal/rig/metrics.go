//go:build unix

package rig

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// Metrics are the samples of one look at /metrics, by series as it is printed.
type Metrics map[string]float64

// Scrape reads url/metrics.
func Scrape(ctx context.Context, client *http.Client, url string) (Metrics, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("rig: %s/metrics: status %d", url, resp.StatusCode)
	}
	return parseMetrics(resp.Body)
}

func parseMetrics(r io.Reader) (Metrics, error) {
	m := make(Metrics)
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if line == "" || line[0] == '#' {
			continue
		}
		series, value, ok := cutLast(line, " ")
		v, err := strconv.ParseFloat(value, 64)
		if !ok || err != nil {
			return nil, fmt.Errorf("rig: unexpected metric %q", line)
		}
		m[series] = v
	}
	return m, lines.Err()
}

// Sum adds the samples of a name whose labels contain all of labels, such as `state="used"`. Without such a
// sample ok is false.
func (m Metrics) Sum(name string, labels ...string) (sum float64, ok bool) {
next:
	for series, v := range m {
		if base, _, _ := strings.Cut(series, "{"); base != name {
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
