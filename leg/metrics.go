package leg

import "github.com/prometheus/client_golang/prometheus"

var (
	requestsDesc = prometheus.NewDesc("baton_leg_requests", "Jobs of HTTP clients that have not ended.", nil, nil)
	exportsDesc  = prometheus.NewDesc("baton_leg_exports", "Prompts whose KV waits for a reader, or is being read.", nil, nil)
	claimsDesc   = prometheus.NewDesc("baton_leg_claims", "Readers of these exports.", nil, nil)
	readingDesc  = prometheus.NewDesc("baton_leg_reading", "Generation legs that wait for their KV.", nil, nil)
	cachedDesc   = prometheus.NewDesc("baton_leg_cached_blocks", "Blocks in the engines' prefix caches, each counted once.", nil, nil)
	exportedDesc = prometheus.NewDesc("baton_leg_exports_total", "Exports by how they ended; exported counts all that began.", []string{"event"}, nil)
	readsDesc    = prometheus.NewDesc("baton_leg_reads_total", "Generation legs by whether they got their KV.", []string{"result"}, nil)
)

// Collector gives the server's metrics.
func (s *Server) Collector() prometheus.Collector { return collector{s} }

type collector struct{ server *Server }

func (c collector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

func (c collector) Collect(ch chan<- prometheus.Metric) {
	s := c.server.Stats()
	gauge := func(d *prometheus.Desc, n int) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n))
	}
	count := func(d *prometheus.Desc, n uint64, label string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), label)
	}
	gauge(requestsDesc, s.Requests)
	gauge(exportsDesc, s.Exports)
	gauge(claimsDesc, s.Claims)
	gauge(readingDesc, s.Reading)
	gauge(cachedDesc, s.Cached)
	count(exportedDesc, s.Exported, "exported")
	count(exportedDesc, s.Released, "released")
	count(exportedDesc, s.Expired, "expired")
	count(exportedDesc, s.Refused, "claim_refused")
	count(readsDesc, s.Read, "done")
	count(readsDesc, s.Lost, "failed")
}
