package relay

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are what /metrics says. Times are in seconds.
type metrics struct {
	requests *prometheus.CounterVec
	inFlight prometheus.Gauge
	retries  *prometheus.CounterVec
	routes   *prometheus.CounterVec
	silent   *prometheus.CounterVec
	single   *prometheus.CounterVec
	local    *prometheus.CounterVec
	early    prometheus.Counter
	legs     *prometheus.CounterVec

	queue    *prometheus.HistogramVec
	prefill  prometheus.Histogram
	transfer prometheus.Histogram
	decode   prometheus.Histogram

	predicted, cached prometheus.Counter

	tokenized, shadows *prometheus.CounterVec
}

// Why requests go to one worker alone, beside what dialects say.
const (
	noPrefill      = "no prefill workers are known"
	unknownEngines = "the engines do not say what they are"
	noLegs         = "the worker takes no legs"
	afterSilent    = "silent re-prefill"
	noHandoff      = "the engines do no handoff"
	severalPrompts = "several prompts"
	severalChoices = "n is not 1"
	promptLogprobs = "prompt_logprobs"
	promptEcho     = "echo"
)

// singleReasons are all of them, so that counters that have not counted yet are 0 and not missing.
var singleReasons = []string{noPrefill, unknownEngines, noLegs, afterSilent, noHandoff, severalPrompts, severalChoices, promptLogprobs, promptEcho}

var secondsBuckets = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640}

func newMetrics(r prometheus.Registerer, f *fleet, bodies *budget) (*metrics, error) {
	var failed error
	register := func(c prometheus.Collector) {
		if err := r.Register(c); err != nil && failed == nil {
			failed = err
		}
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "baton_relay_" + name, Help: help}, labels)
		register(c)
		return c
	}
	counter := func(name, help string) prometheus.Counter { return counters(name, help).WithLabelValues() }
	histograms := func(name, help string, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "baton_relay_" + name, Help: help, Buckets: secondsBuckets}, labels)
		register(h)
		return h
	}
	histogram := func(name, help string) prometheus.Histogram {
		return histograms(name, help).WithLabelValues().(prometheus.Histogram)
	}
	m := &metrics{
		requests:  counters("requests_total", "Requests by endpoint and status; 499 are clients that left.", "endpoint", "status"),
		inFlight:  prometheus.NewGauge(prometheus.GaugeOpts{Name: "baton_relay_requests_in_flight", Help: "Requests that run now."}),
		retries:   counters("retries_total", "Requests that were sent again, by the leg that failed.", "leg"),
		routes:    counters("routes_total", "Workers that were chosen, by leg and why.", "leg", "reason"),
		silent:    counters("silent_reprefills_total", "Prefill legs that came back with nothing for a decode worker to take over.", "worker"),
		single:    counters("single_leg_total", "Requests that one worker served alone, and why.", "reason"),
		local:     counters("local_prefill_total", "Decisions about prompts that decode workers may compute.", "outcome"),
		early:     counter("early_finishes_total", "Requests that were complete with the prefill leg."),
		legs:      counters("legs_total", "Legs by worker and outcome.", "leg", "worker", "outcome"),
		queue:     histograms("queue_seconds", "Until a worker was found, by leg.", "leg"),
		prefill:   histogram("prefill_seconds", "From the prefill leg's request to its whole answer."),
		transfer:  histogram("transfer_seconds", "From the decode leg's request to the first event of its answer, the transfer and the first step, of streams whose legs follow each other."),
		decode:    histogram("decode_seconds", "From the first event of an answer to the last, of streams that are whole."),
		predicted: counter("predicted_cached_tokens_total", "Prompt tokens that prefill workers were thought to have cached when they were chosen, of the same requests."),
		tokenized: counters("tokenized_total", "Chats whose prompts were made here, by outcome.", "outcome"),
		shadows:   counters("shadow_checks_total", "Prompts made here that were compared with the engine's, by outcome.", "outcome"),
		cached:    counter("cached_tokens_total", "Prompt tokens that prefill workers had cached, as they say."),
	}
	for _, l := range []legKind{prefillLeg, decodeLeg} {
		m.retries.WithLabelValues(l.String())
	}
	for _, reason := range singleReasons {
		m.single.WithLabelValues(reason)
	}
	register(m.inFlight)
	register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "baton_relay_body_bytes", Help: "Bytes that requests, and answers that are no streams, hold now.",
	}, func() float64 { return float64(bodies.used.Load()) }))
	register(&fleetCollector{f})
	return m, failed
}

// fleetCollector shows the workers as they are when asked.
type fleetCollector struct{ f *fleet }

var (
	healthyDesc  = prometheus.NewDesc("baton_relay_worker_healthy", "1 for a worker that answers its health checks.", []string{"worker"}, nil)
	breakerDesc  = prometheus.NewDesc("baton_relay_breaker_open", "State of a worker's breaker: 0 closed, 0.5 half-open, 1 open.", []string{"worker"}, nil)
	requestsDesc = prometheus.NewDesc("baton_relay_worker_requests", "Requests that a worker has now, by leg.", []string{"worker", "leg"}, nil)
)

// Describe implements prometheus.Collector.
func (*fleetCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- healthyDesc
	ch <- breakerDesc
	ch <- requestsDesc
}

var breakerValues = map[string]float64{"closed": 0, "half-open": 0.5, "open": 1}

// Collect implements prometheus.Collector.
func (c *fleetCollector) Collect(ch chan<- prometheus.Metric) {
	now := time.Now()
	for _, w := range c.f.snapshot(now) {
		healthy := 0.0
		if w.Healthy {
			healthy = 1
		}
		ch <- prometheus.MustNewConstMetric(healthyDesc, prometheus.GaugeValue, healthy, w.URL)
		ch <- prometheus.MustNewConstMetric(breakerDesc, prometheus.GaugeValue, breakerValues[w.Breaker], w.URL)
		for l, n := range w.Requests {
			ch <- prometheus.MustNewConstMetric(requestsDesc, prometheus.GaugeValue, float64(n), w.URL, legKind(l).String())
		}
	}
}
