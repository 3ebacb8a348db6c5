package engine

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"baton/wire"
)

// Metrics are the series of all engines of a process; each engine has its own label.
type Metrics struct {
	requests   *prometheus.GaugeVec
	blocks     *prometheus.GaugeVec
	tokens     *prometheus.CounterVec
	steps      *prometheus.HistogramVec
	stepTokens *prometheus.HistogramVec
	handoffs   *prometheus.CounterVec
	moved      *prometheus.CounterVec
	reused     *prometheus.CounterVec
	bytes      *prometheus.CounterVec
	corrupt    *prometheus.CounterVec
	kept       *prometheus.CounterVec
	transfer   *prometheus.HistogramVec
	handoff    *prometheus.HistogramVec
	evictions  *prometheus.CounterVec

	mu    sync.Mutex // of what the aliases show
	names []string
	loads map[string]engineLoad
}

// NewMetrics registers the engines' series.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	seconds := prometheus.ExponentialBuckets(0.0001, 2, 18) // 0.1 ms to 13 s
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "baton", Name: name, Help: help}, labels)
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "baton", Name: name, Help: help}, labels)
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "baton", Name: name, Help: help, Buckets: buckets}, labels)
	}
	m := &Metrics{
		loads:      map[string]engineLoad{},
		requests:   gauge("engine_requests", "Requests on the engine by state: waiting, prefill, exported, importing, admission, decode, short (of those in decode, without room for the next token), quarantined.", "engine", "state"),
		blocks:     gauge("engine_kv_blocks", "KV blocks by state: free, cached (reusable), used.", "engine", "state"),
		tokens:     counter("engine_tokens_total", "Tokens by kind: computed and cached prompt tokens, generated tokens.", "engine", "kind"),
		steps:      histogram("engine_step_seconds", "Time of one forward pass with sampling.", seconds, "engine"),
		stepTokens: histogram("engine_step_tokens", "Rows of one forward pass.", prometheus.ExponentialBuckets(1, 2, 15), "engine"),
		handoffs:   counter("handoffs_total", "KV handoffs that decode engines ended, by result: done, failed, aborted.", "engine", "result"),
		moved:      counter("handoff_blocks_moved_total", "KV blocks copied from prefill to decode engines.", "engine"),
		reused:     counter("handoff_blocks_reused_total", "Prompt blocks that decode engines held already and did not copy.", "engine"),
		bytes:      counter("handoff_bytes_total", "Bytes of KV copied from prefill to decode engines.", "engine"),
		kept:       counter("handoff_quarantines_total", "Times that blocks nobody used any more were kept back, because a transfer might still touch them.", "engine"),
		corrupt:    counter("handoff_corrupt_total", "Handoffs whose KV did not have the checksums that its source made; their prompts are computed again.", "engine"),
		transfer:   histogram("handoff_transfer_seconds", "Time of the copy of one handoff.", seconds, "engine"),
		handoff:    histogram("handoff_seconds", "Time from the arrival of a handoff to its admission into the decode batch.", seconds, "engine"),
		evictions:  counter("engine_evictions_total", "Times that requests, counted when they end, had to give up their KV to others.", "engine"),
	}
	reg.MustRegister(m.requests, m.blocks, m.tokens, m.steps, m.stepTokens, m.handoffs, m.moved, m.reused, m.bytes, m.corrupt, m.kept, m.transfer, m.handoff, m.evictions)
	return m
}

// engineMetrics are one engine's series, looked up once. The zero value records nothing.
type engineMetrics struct {
	all  *Metrics
	name string
}

// of gives the engine's metrics; nil stands for none.
func (m *Metrics) engine(name string) engineMetrics {
	if m != nil {
		m.corrupt.WithLabelValues(name) // 0 is worth seeing
		m.kept.WithLabelValues(name)
	}
	return engineMetrics{m, name}
}

// pass records a forward pass.
func (m engineMetrics) pass(p passed) {
	if m.all == nil {
		return
	}
	m.all.steps.WithLabelValues(m.name).Observe(p.took.Seconds())
	m.all.stepTokens.WithLabelValues(m.name).Observe(float64(len(p.plan.Batch.Tokens)))
}

// results counts the tokens of results that are about to be sent.
func (m engineMetrics) results(list []wire.Result) {
	if m.all == nil {
		return
	}
	generated, cached, computed, evictions := 0, 0, 0, 0
	for i := range list {
		r := &list[i]
		generated += len(r.Tokens)
		if r.PromptTokens > 0 { // the first result of a request
			cached += r.CachedTokens
			computed += r.PromptTokens - r.CachedTokens
		}
		if r.Stats != nil {
			evictions += r.Stats.Evictions
		}
	}
	m.all.evictions.WithLabelValues(m.name).Add(float64(evictions))
	for kind, n := range map[string]int{"generated": generated, "prompt_cached": cached, "prompt_computed": computed} {
		m.all.tokens.WithLabelValues(m.name, kind).Add(float64(n))
	}
}

// handed records the end of a handoff.
func (m engineMetrics) handed(h Handed) {
	if m.all == nil {
		return
	}
	m.all.handoffs.WithLabelValues(m.name, h.Result).Inc()
	if h.Code == wire.CodeCorrupt {
		m.all.corrupt.WithLabelValues(m.name).Inc()
	}
	if h.Result != "done" {
		return
	}
	m.all.moved.WithLabelValues(m.name).Add(float64(h.Stats.BlocksMoved))
	m.all.reused.WithLabelValues(m.name).Add(float64(h.Stats.BlocksReused))
	m.all.bytes.WithLabelValues(m.name).Add(float64(h.Stats.BytesMoved))
	m.all.transfer.WithLabelValues(m.name).Observe(h.Stats.Transfer)
	m.all.handoff.WithLabelValues(m.name).Observe(h.Stats.Handoff)
}

func (m engineMetrics) quarantined() {
	if m.all != nil {
		m.all.kept.WithLabelValues(m.name).Inc()
	}
}

// gauge publishes the lengths of the engine's queues and the state of its pool.
func (m engineMetrics) gauge(c *Core) {
	if m.all == nil {
		return
	}
	l := c.Load()
	for state, n := range map[string]int{
		"waiting": l.Waiting, "prefill": l.Prefill, "decode": l.Decode, "short": l.Short, "admission": l.Admission,
		"exported": l.Handoff.Exports, "importing": l.Handoff.Queued + l.Handoff.Moving, "quarantined": l.Handoff.Quarantined,
	} {
		m.all.requests.WithLabelValues(m.name, state).Set(float64(n))
	}
	p := c.Pool().Stats()
	m.all.note(m.name, engineLoad{load: l, pool: p, blockSize: c.config.BlockSize})
	for state, n := range map[string]int{"free": p.Free, "cached": p.Cached, "used": p.InUse} {
		m.all.blocks.WithLabelValues(m.name, state).Set(float64(n))
	}
}
