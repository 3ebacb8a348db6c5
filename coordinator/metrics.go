package coordinator

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"baton/wire"
)

// metrics counts what a server does.
type metrics struct {
	in, out   [256]atomic.Int64 // messages by header
	malformed prometheus.Counter
	requests  *prometheus.CounterVec // by outcome
	queue     *prometheus.HistogramVec
	handoffs  prometheus.Counter
	handoff   prometheus.Histogram
	bytes     prometheus.Counter
	blocks    *prometheus.CounterVec
	prompt    prometheus.Counter
	cached    prometheus.Counter
	predicted prometheus.Counter
	missed    *prometheus.CounterVec
	recovered *prometheus.CounterVec
	generated prometheus.Counter

	// Of the vectors above, found once.
	colocatedWait, prefillWait, decodeWait prometheus.Observer

	moved, reused prometheus.Counter
	more, fewer   prometheus.Counter
	recoveries    [4]prometheus.Counter // in the order of Summary.recoveries

	mu                sync.Mutex
	open              map[*wire.Conn]struct{}
	bytesIn, bytesOut int64 // of connections that have ended
}

func newMetrics() *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	vec := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	}
	seconds := prometheus.ExponentialBuckets(0.0005, 2, 16) // 0.5 ms to 16 s
	m := &metrics{
		malformed: counter("baton_control_malformed_total", "Control messages that could not be decoded."),
		requests:  vec("baton_coordinator_requests_total", "Requests that ended, by outcome: stop, length, abort or an error code.", "outcome"),
		queue: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "baton_coordinator_queue_seconds", Help: "Time that requests waited for an engine of a role.", Buckets: seconds,
		}, []string{"role"}),
		handoffs: counter("baton_coordinator_handoffs_total", "Requests whose KV was handed from a prefill to a decode engine."),
		handoff: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "baton_coordinator_handoff_seconds", Help: "Time from the end of prefill until decode had read the KV.", Buckets: seconds,
		}),
		bytes:     counter("baton_coordinator_handoff_bytes_total", "KV bytes that decode engines reported as moved."),
		blocks:    vec("baton_coordinator_handoff_blocks_total", "KV blocks of prompts that decode engines reported as moved or reused.", "how"),
		prompt:    counter("baton_coordinator_prompt_tokens_total", "Prompt tokens of requests that ended."),
		cached:    counter("baton_coordinator_cached_tokens_total", "Prompt tokens whose KV was reused in prefill."),
		predicted: counter("baton_coordinator_predicted_cached_tokens_total", "Prompt tokens that the choice of an engine expected to be reused in prefill."),
		missed: vec("baton_coordinator_mispredicted_tokens_total",
			"Prompt tokens by which the expectation was wrong: reused without being expected (more), or expected and not reused (fewer).", "reused"),
		recovered: vec("baton_coordinator_recoveries_total",
			"What was done for requests to go on: takeovers (another decode engine read the same source), reruns (prompt and tokens ran again), "+
				"evictions (a decode engine gave it back), failures (an engine reported one).", "kind"),
		generated: counter("baton_coordinator_generated_tokens_total", "Tokens that were sent to clients."),
		open:      make(map[*wire.Conn]struct{}),
	}
	m.colocatedWait, m.prefillWait = m.queue.WithLabelValues(wire.RoleBoth), m.queue.WithLabelValues(wire.RolePrefill)
	m.decodeWait = m.queue.WithLabelValues(wire.RoleDecode)
	m.moved, m.reused = m.blocks.WithLabelValues("moved"), m.blocks.WithLabelValues("reused")
	m.more, m.fewer = m.missed.WithLabelValues("more"), m.missed.WithLabelValues("fewer")
	for i, n := range new(Summary).recoveries() {
		m.recoveries[i] = m.recovered.WithLabelValues(n.what)
	}
	return m
}

// ended counts a request that is over.
func (m *metrics) ended(r *Summary) {
	m.requests.WithLabelValues(r.Outcome).Inc()
	m.prompt.Add(float64(r.PromptTokens))
	m.cached.Add(float64(r.CachedTokens))
	m.predicted.Add(float64(r.PredictedTokens))
	if more := r.CachedTokens - r.PredictedTokens; more > 0 {
		m.more.Add(float64(more))
	} else {
		m.fewer.Add(float64(-more))
	}
	for i, n := range r.recoveries() {
		m.recoveries[i].Add(float64(n.count))
	}
	m.generated.Add(float64(r.Generated))
	if !r.Dispatched.IsZero() {
		first := m.colocatedWait
		if r.Prefill != "" {
			first = m.prefillWait
		}
		first.Observe(r.Dispatched.Sub(r.Submitted).Seconds())
	}
	if !r.Bound.IsZero() {
		m.decodeWait.Observe(r.Bound.Sub(r.Exported).Seconds())
	}
	if r.Read.IsZero() {
		return
	}
	m.handoffs.Inc()
	m.handoff.Observe(r.Read.Sub(r.Exported).Seconds())
	m.bytes.Add(float64(r.Stats.BytesMoved))
	m.moved.Add(float64(r.Stats.BlocksMoved))
	m.reused.Add(float64(r.Stats.BlocksReused))
}

// track counts a connection's bytes until the returned function is called.
func (m *metrics) track(conn *wire.Conn) (release func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.open[conn] = struct{}{}
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.open, conn)
		n := conn.Counters()
		m.bytesIn += n.BytesIn
		m.bytesOut += n.BytesOut
	}
}

func (m *metrics) controlBytes() (in, out int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	in, out = m.bytesIn, m.bytesOut
	for conn := range m.open {
		n := conn.Counters()
		in += n.BytesIn
		out += n.BytesOut
	}
	return in, out
}

func (m *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{
		m.malformed, m.requests, m.queue, m.handoffs, m.handoff, m.bytes, m.blocks, m.prompt, m.cached, m.predicted, m.missed,
		m.recovered, m.generated,
	}
}

var (
	bytesDesc    = prometheus.NewDesc("baton_control_bytes_total", "Bytes of the control plane, framing included.", []string{"direction"}, nil)
	messagesDesc = prometheus.NewDesc("baton_control_messages_total", "Messages of the control plane.", []string{"direction", "message"}, nil)
	readyDesc    = prometheus.NewDesc("baton_coordinator_ready", "1 when a new request finds an engine of every role that it needs.", nil, nil)
	runningDesc  = prometheus.NewDesc("baton_coordinator_requests", "Requests that have not ended.", nil, nil)
	queuedDesc   = prometheus.NewDesc("baton_coordinator_queue_length", "Requests that wait for an engine of a role.", []string{"role"}, nil)
	enginesDesc  = prometheus.NewDesc("baton_coordinator_engines", "Engines that are connected.", []string{"role"}, nil)
	slotsDesc    = prometheus.NewDesc("baton_coordinator_engine_requests", "Requests that an engine has.", []string{"engine", "role"}, nil)
	reservedDesc = prometheus.NewDesc("baton_coordinator_engine_blocks_reserved", "KV blocks reserved on an engine.", []string{"engine", "role"}, nil)
)

// Collector reports the server's metrics; register it once.
func (s *Server) Collector() prometheus.Collector { return collector{s} }

type collector struct{ s *Server }

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range c.s.metrics.collectors() {
		m.Describe(ch)
	}
	for _, d := range []*prometheus.Desc{
		bytesDesc, messagesDesc, readyDesc, runningDesc, queuedDesc, enginesDesc, slotsDesc, reservedDesc,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	m := c.s.metrics
	for _, x := range m.collectors() {
		x.Collect(ch)
	}
	count := func(d *prometheus.Desc, v int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	in, out := m.controlBytes()
	count(bytesDesc, in, "in")
	count(bytesDesc, out, "out")
	for h := range m.in {
		if n := m.in[h].Load(); n > 0 {
			count(messagesDesc, n, "in", wire.Header(h).String())
		}
		if n := m.out[h].Load(); n > 0 {
			count(messagesDesc, n, "out", wire.Header(h).String())
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	status, err := c.s.Status(ctx)
	if err != nil {
		return // a closed server has no state
	}
	collectStatus(ch, status)
}

func collectStatus(ch chan<- prometheus.Metric, status *wire.StatusReply) {
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	ready := 0
	if status.Ready {
		ready = 1
	}
	gauge(readyDesc, ready)
	gauge(runningDesc, status.Requests)
	engines := make(map[string]int)
	for _, e := range status.Engines {
		engines[e.Role]++
		gauge(slotsDesc, e.RequestsInUse, e.Name, e.Role)
		gauge(reservedDesc, e.BlocksReserved, e.Name, e.Role)
	}
	for _, q := range status.Queues {
		gauge(queuedDesc, q.Length, q.Role)
		gauge(enginesDesc, engines[q.Role], q.Role)
	}
}
