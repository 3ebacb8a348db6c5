package frontend

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"baton/wire"
)

// metrics are what /metrics says of the frontend. Times are in seconds; those of the engines' legs are
// the engines' own.
type metrics struct {
	requests *prometheus.CounterVec
	inFlight *prometheus.GaugeVec

	promptTokens     prometheus.Counter
	cachedTokens     prometheus.Counter
	generationTokens prometheus.Counter
	finished         *prometheus.CounterVec

	firstToken prometheus.Histogram
	interToken prometheus.Histogram
	whole      prometheus.Histogram

	queue, prefill, handoff, transfer, decode prometheus.Histogram
}

// promptMetrics are what /metrics says of how prompts are made.
type promptMetrics struct {
	rendered, splices, shadows *prometheus.CounterVec
	keptTokens                 prometheus.Counter
	turns, turnBytes           prometheus.Gauge
}

// Buckets from a cached prompt on a fast device to a long one on a slow one.
var (
	tokenBuckets   = []float64{.0005, .001, .0025, .005, .01, .02, .03, .04, .05, .075, .1, .15, .2, .3, .5, 1, 2.5}
	requestBuckets = []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640}
)

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	var failed error
	register := func(c prometheus.Collector) {
		if err := r.Register(c); err != nil && failed == nil {
			failed = err
		}
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "baton_" + name, Help: help}, labels)
		register(c)
		return c
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "baton_" + name, Help: help, Buckets: buckets})
		register(h)
		return h
	}
	m := &metrics{
		requests:         counter("http_requests_total", "HTTP requests by endpoint and status.", "endpoint", "status"),
		inFlight:         prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "baton_http_requests_in_flight", Help: "HTTP requests that run now."}, []string{"endpoint"}),
		promptTokens:     counter("prompt_tokens_total", "Prompt tokens of requests that were started.").WithLabelValues(),
		cachedTokens:     counter("cached_prompt_tokens_total", "Prompt tokens whose KV was reused.").WithLabelValues(),
		generationTokens: counter("generation_tokens_total", "Tokens generated for clients.").WithLabelValues(),
		finished:         counter("choices_finished_total", "Answers that ended, by finish reason.", "reason"),
		firstToken:       histogram("time_to_first_token_seconds", "From a request's submission to the first token of each answer.", requestBuckets),
		interToken:       histogram("inter_token_seconds", "Between tokens of an answer; tokens that arrive together share their time.", tokenBuckets),
		whole:            histogram("request_seconds", "From a request's submission to the last token of all its answers.", requestBuckets),
		queue:            histogram("request_queue_seconds", "From arrival at the prefill engine to the first step.", requestBuckets),
		prefill:          histogram("request_prefill_seconds", "From the first step to the first token.", requestBuckets),
		handoff:          histogram("request_handoff_seconds", "From arrival at the decode engine to admission.", requestBuckets),
		transfer:         histogram("request_transfer_seconds", "Moving KV to the decode engine.", requestBuckets),
		decode:           histogram("request_decode_seconds", "Decoding on the engine.", requestBuckets),
	}
	register(m.inFlight)
	return m, failed
}

func newPromptMetrics(r prometheus.Registerer) (*promptMetrics, error) {
	counter := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "baton_" + name, Help: help}, []string{label})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: "baton_" + name, Help: help})
	}
	m := &promptMetrics{
		rendered:   counter("conversation_turns_total", "Chat requests by how their prompt was made: extended from an earlier turn, or as a whole and why.", "reason"),
		splices:    counter("conversation_splices_total", "Answers that came back in a conversation, by what became of their sampled ids.", "outcome"),
		shadows:    counter("shadow_checks_total", "Prompts that were made twice to compare them, by outcome.", "outcome"),
		keptTokens: prometheus.NewCounter(prometheus.CounterOpts{Name: "baton_conversation_kept_tokens_total", Help: "Prompt tokens that were taken over from earlier turns and not encoded again."}),
		turns:      gauge("conversation_turns_remembered", "Turns whose prompts are remembered."),
		turnBytes:  gauge("conversation_remembered_bytes", "Memory that these take."),
	}
	for _, c := range []prometheus.Collector{m.rendered, m.splices, m.shadows, m.keptTokens, m.turns, m.turnBytes} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// observation watches one run; it belongs to the run's goroutine.
type observation struct {
	m       *metrics
	a       *answer
	began   time.Time
	last    []time.Time // of each choice's last token; zero before the first
	running int
}

func (m *metrics) observeRun(a *answer) *observation {
	return &observation{m: m, a: a, began: time.Now(), last: make([]time.Time, len(a.choices)), running: len(a.choices)}
}

// result accounts for a result of c that brought so many tokens.
func (o *observation) result(c *choice, tokens int) {
	now := time.Now()
	last := &o.last[c.index]
	switch {
	case tokens == 0:
	case last.IsZero():
		o.m.firstToken.Observe(now.Sub(o.began).Seconds())
	default:
		each := now.Sub(*last).Seconds() / float64(tokens)
		for range tokens {
			o.m.interToken.Observe(each)
		}
	}
	if tokens > 0 {
		*last = now
		o.m.generationTokens.Add(float64(tokens))
	}
	if c.finish == "" {
		return
	}
	o.m.finished.WithLabelValues(c.finish).Inc()
	o.m.observeLegs(c.stats)
	if o.running--; o.running == 0 {
		o.m.whole.Observe(now.Sub(o.began).Seconds())
	}
}

// end accounts for the prompts once the run is over.
func (o *observation) end() {
	u := o.a.usage()
	o.m.promptTokens.Add(float64(u.prompt))
	o.m.cachedTokens.Add(float64(u.cached))
}

// observeLegs takes over what the engines measured: the first leg queued and computed the prompt, the
// last one decoded.
func (m *metrics) observeLegs(legs []wire.Stats) {
	if len(legs) == 0 {
		return
	}
	first, last := &legs[0], &legs[len(legs)-1]
	m.queue.Observe(first.Queue)
	m.prefill.Observe(first.Prefill)
	m.decode.Observe(last.Decode)
	if len(legs) > 1 {
		m.handoff.Observe(last.Handoff)
		m.transfer.Observe(last.Transfer)
	}
}
