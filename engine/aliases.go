package engine

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"baton/kvcache"
)

// Names under which routers that were written for vLLM look for an engine's load. The older of the two for the KV cache
// is asked for as well.
var (
	aliasLabels  = []string{"model_name", "engine"}
	aliasWaiting = prometheus.NewDesc("vllm:num_requests_waiting", "Requests that wait to be computed, or for their KV (alias of baton_engine_requests).", aliasLabels, nil)
	aliasRunning = prometheus.NewDesc("vllm:num_requests_running", "Requests that are being computed (alias of baton_engine_requests).", aliasLabels, nil)
	aliasUsage   = prometheus.NewDesc("vllm:kv_cache_usage_perc", "Share of the KV blocks that are in use, 0 to 1 (alias of baton_engine_kv_blocks).", aliasLabels, nil)
	aliasOldUse  = prometheus.NewDesc("vllm:gpu_cache_usage_perc", "The same.", aliasLabels, nil)
	aliasConfig  = prometheus.NewDesc("vllm:cache_config_info", "Size of the KV cache; always 1.", append([]string{"block_size", "num_gpu_blocks"}, aliasLabels...), nil)
)

// engineLoad is an engine at one moment.
type engineLoad struct {
	load      Load
	pool      kvcache.Stats
	blockSize int
}

// note keeps an engine's load for the aliases.
func (m *Metrics) note(engine string, l engineLoad) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.loads[engine]; !ok {
		m.names = append(m.names, engine)
	}
	m.loads[engine] = l
}

// Aliases gives the metrics that llm-d's picker and its like scrape, for the engines of this process, which count from 0
// in the order in which they came up. There are no adapters.
func (m *Metrics) Aliases(model string) prometheus.Collector { return aliases{m, model} }

type aliases struct {
	metrics *Metrics
	model   string
}

func (a aliases) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{aliasWaiting, aliasRunning, aliasUsage, aliasOldUse, aliasConfig} {
		ch <- d
	}
}

func (a aliases) Collect(ch chan<- prometheus.Metric) {
	a.metrics.mu.Lock()
	defer a.metrics.mu.Unlock()
	for i, name := range a.metrics.names {
		l, number := a.metrics.loads[name], strconv.Itoa(i)
		gauge := func(d *prometheus.Desc, v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, append(labels, a.model, number)...)
		}
		gauge(aliasWaiting, float64(l.load.Waiting+l.load.Admission+l.load.Handoff.Queued+l.load.Handoff.Moving))
		gauge(aliasRunning, float64(l.load.Prefill+l.load.Decode))
		usage := float64(l.pool.InUse) / float64(max(l.pool.Total, 1))
		gauge(aliasUsage, usage)
		gauge(aliasOldUse, usage)
		gauge(aliasConfig, 1, strconv.Itoa(l.blockSize), strconv.Itoa(l.pool.Total))
	}
}
