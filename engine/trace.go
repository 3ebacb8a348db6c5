package engine

import (
	"time"

	"go.opentelemetry.io/otel/attribute"

	"baton/tracing"
	"baton/wire"
)

// traces are the requests whose stay on the engine becomes a span when it ends.
type traces struct {
	tracer *tracing.Tracer
	engine string
	stays  map[uint64]stay
}

type stay struct {
	parent   string // traceparent
	arrived  time.Time
	imported bool // its KV comes from another engine
}

// maxStays bounds what is remembered; the rest goes without spans.
const maxStays = 1 << 16

func newTraces(t *tracing.Tracer, engine string) *traces {
	if t == nil {
		return nil
	}
	return &traces{tracer: t, engine: engine, stays: map[uint64]stay{}}
}

// received notes what begins a stay.
func (t *traces) received(m wire.Message) {
	if t == nil {
		return
	}
	switch m := m.(type) {
	case *wire.SubmitRequest:
		t.begin(m.ID, stay{m.Trace, time.Now(), false})
	case *wire.SubmitRequestWithKV:
		t.begin(m.ID, stay{m.Trace, time.Now(), true})
	}
}

func (t *traces) begin(id uint64, s stay) {
	if s.parent != "" && len(t.stays) < maxStays {
		t.stays[id] = s
	}
}

// sent makes the span of what ends a stay.
func (t *traces) sent(m wire.Message) {
	if t == nil || len(t.stays) == 0 {
		return
	}
	switch m := m.(type) {
	case *wire.EngineReply:
		for i := range m.Results {
			t.end(m.Results[i].ID, "", &m.Results[i])
		}
	case *wire.RequestError:
		t.end(m.ID, m.Message, nil)
	case *wire.RequestAborted:
		t.end(m.ID, "aborted", nil)
	}
}

func (t *traces) end(id uint64, failed string, r *wire.Result) {
	s, ok := t.stays[id]
	if !ok {
		return
	}
	delete(t.stays, id)
	now := time.Now()
	whole := tracing.Phase{Name: "engine prefill", From: s.arrived, To: now, Failed: failed, Attrs: []attribute.KeyValue{attribute.String("baton.engine", t.engine)}}
	if s.imported {
		whole.Name = "engine decode"
	} else if r != nil && r.Export == nil {
		whole.Name = "engine"
	}
	if r == nil || r.Stats == nil {
		t.tracer.Record(s.parent, whole)
		return
	}
	whole.Attrs = append(whole.Attrs, attribute.String("baton.finish", r.Finish), attribute.Int("baton.prompt_tokens_computed", r.Stats.PromptComputed))
	var steps []tracing.Phase
	at := s.arrived
	step := func(name string, seconds float64) {
		if seconds <= 0 {
			return
		}
		to := at.Add(time.Duration(seconds * float64(time.Second)))
		if to.After(now) {
			to = now
		}
		steps = append(steps, tracing.Phase{Name: name, From: at, To: to})
		at = to
	}
	if s.imported {
		step("handoff", r.Stats.Handoff)
	} else {
		step("queue", r.Stats.Queue)
		step("prefill", r.Stats.Prefill)
	}
	if r.Export != nil {
		step("export", now.Sub(at).Seconds())
	} else {
		step("decode", now.Sub(at).Seconds())
	}
	t.tracer.Record(s.parent, whole, steps...)
}

// drop forgets all stays: nobody is left to tell of them.
func (t *traces) drop() {
	if t != nil {
		clear(t.stays)
	}
}
