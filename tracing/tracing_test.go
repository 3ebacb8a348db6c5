package tracing

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

func recorder(sample float64) (*Tracer, *tracetest.SpanRecorder) {
	r := tracetest.NewSpanRecorder()
	return newTracer(Options{Service: "test", Sample: sample}, sdk.WithSpanProcessor(r)), r
}

// A request's spans are one tree, in whatever process they are made.
func TestOneTree(t *testing.T) {
	front, ours := recorder(1)
	engine, theirs := recorder(1)
	header := http.Header{"Traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}}
	ctx, span := front.Start(front.FromHeader(t.Context(), header), "HTTP", true, attribute.Int("n", 1))
	parent := front.Parent(ctx)
	at := time.Now()
	engine.Record(parent, Phase{Name: "engine", From: at, To: at.Add(time.Second), Failed: "why"}, Phase{Name: "queue", From: at, To: at.Add(time.Millisecond)})
	span.Note(attribute.Int("m", 2))
	span.End(errors.New("gone"))
	root := ours.Ended()[0]
	if root.SpanContext().TraceID().String() != "0af7651916cd43dd8448eb211c80319c" || root.Parent().SpanID().String() != "b7ad6b7169203331" ||
		len(root.Attributes()) != 2 || root.Status().Code != codes.Error || root.Status().Description != "gone" {
		t.Errorf("%+v", root)
	}
	queue, whole := theirs.Ended()[0], theirs.Ended()[1]
	if whole.Parent().SpanID() != root.SpanContext().SpanID() || queue.Parent().SpanID() != whole.SpanContext().SpanID() || queue.SpanContext().TraceID() != root.SpanContext().TraceID() {
		t.Errorf("%v is not the parent of %v, or that of %v", root.SpanContext(), whole.Parent(), queue.Parent())
	}
	if whole.Status().Description != "why" || !whole.StartTime().Equal(at) || whole.EndTime().Sub(at) != time.Second || queue.EndTime().Sub(at) != time.Millisecond {
		t.Errorf("%v to %v, %+v", whole.StartTime(), whole.EndTime(), whole.Status())
	}
	out := http.Header{}
	front.ToHeader(ctx, out)
	if out.Get("Traceparent") != parent {
		t.Errorf("%v, want %s", out, parent)
	}
}

// Without a collector nothing is made; without a parent, or for one that is not sampled, nothing is recorded.
func TestNothing(t *testing.T) {
	none, err := New(t.Context(), Options{})
	if none != nil || err != nil {
		t.Fatal(none, err)
	}
	ctx, span := none.Start(none.FromHeader(t.Context(), http.Header{}), "HTTP", true)
	span.Note()
	span.End(errors.New("x"))
	none.Record("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", Phase{})
	none.ToHeader(ctx, http.Header{})
	if none.Parent(ctx) != "" || none.Close(t.Context()) != nil {
		t.Error("a tracer of nothing traces")
	}
	for _, bad := range []string{"nowhere", "ftp://x", "http://"} {
		if _, err := New(t.Context(), Options{Endpoint: bad}); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	some, spans := recorder(1)
	for _, parent := range []string{"", "nonsense", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"} {
		some.Record(parent, Phase{Name: "engine"})
	}
	if len(spans.Ended()) > 0 {
		t.Error("a request that is not traced has spans")
	}
	if err := some.Close(context.Background()); err != nil {
		t.Error(err)
	}
}
