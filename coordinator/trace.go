package coordinator

import (
	"time"

	"go.opentelemetry.io/otel/attribute"

	"baton/tracing"
)

// traceEnd makes the span of a request that has ended: the coordinator's view of where its time went.
func traceEnd(t *tracing.Tracer, r *Summary) {
	if t == nil || r.Trace == "" {
		return
	}
	whole := tracing.Phase{Name: "coordinate", From: r.Submitted, To: r.Ended, Failed: r.Message, Attrs: []attribute.KeyValue{
		attribute.Int64("baton.request.id", int64(r.ID)), attribute.String("baton.outcome", r.Outcome),
		attribute.Int("baton.prompt_tokens", r.PromptTokens), attribute.Int("baton.cached_tokens", r.CachedTokens),
		attribute.Int("baton.predicted_tokens", r.PredictedTokens), attribute.Int("baton.generated_tokens", r.Generated),
	}}
	for _, n := range r.recoveries() {
		if n.count > 0 {
			whole.Attrs = append(whole.Attrs, attribute.Int("baton."+n.what, n.count))
		}
	}
	var steps []tracing.Phase
	at := r.Submitted
	step := func(name string, to time.Time, attrs ...attribute.KeyValue) {
		if !to.IsZero() && !to.Before(at) { // of a request that came back, only the latest stay is known
			steps = append(steps, tracing.Phase{Name: name, From: at, To: to, Attrs: attrs})
			at = to
		}
	}
	engine := func(name, why string) []attribute.KeyValue {
		return []attribute.KeyValue{attribute.String("baton.engine", name), attribute.String("baton.route", why)}
	}
	if r.Prefill == "" {
		step("queue", r.Dispatched, engine(r.Decode, r.DecodeRoute.String())...)
		step("run", r.Ended)
	} else {
		step("queue for prefill", r.Dispatched, engine(r.Prefill, r.PrefillRoute.String())...)
		step("prefill", r.Exported)
		step("queue for decode", r.Bound, engine(r.Decode, r.DecodeRoute.String())...)
		step("handoff", r.Read, attribute.Int("baton.blocks_moved", r.Stats.BlocksMoved),
			attribute.Int("baton.blocks_reused", r.Stats.BlocksReused), attribute.Int64("baton.bytes_moved", r.Stats.BytesMoved))
		step("decode", r.Ended)
	}
	t.Record(r.Trace, whole, steps...)
}
