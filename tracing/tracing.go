// Package tracing makes OpenTelemetry spans: one tree a request, over all processes that have a part in it. A
// request carries its place in the tree as a W3C traceparent, in a header between HTTP servers and in a field of
// messages. Without a collector's address nothing is made and nothing is sent.
package tracing

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Tracer makes the spans of one process. A nil Tracer makes none, and costs nothing.
type Tracer struct {
	provider *sdk.TracerProvider
	tracer   trace.Tracer
}

// Options say where spans go and who made them.
type Options struct {
	// Endpoint is the URL of an OTLP/HTTP collector, such as http://127.0.0.1:4318; empty for none.
	Endpoint string
	// Service is the kind of process ("baton-frontend"), Instance tells it from its like, Version is its build.
	Service, Instance, Version string
	// Sample is the share of requests that are traced, of those that no client has decided about. 0 means 1.
	Sample float64
}

// New makes a Tracer that sends its spans to a collector, in batches; it is nil without an Endpoint. What cannot
// be sent is dropped: a collector that is slow or away does not hold up a request.
func New(ctx context.Context, o Options) (*Tracer, error) {
	if o.Endpoint == "" {
		return nil, nil
	}
	u, err := url.Parse(o.Endpoint)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("tracing: %q is not the URL of a collector: write it as http://HOST:4318", o.Endpoint)
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = "/v1/traces"
	}
	exporter, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(u.String()))
	if err != nil {
		return nil, fmt.Errorf("tracing: %w", err)
	}
	return newTracer(o, sdk.WithBatcher(exporter)), nil
}

func newTracer(o Options, spans sdk.TracerProviderOption) *Tracer {
	if o.Sample == 0 {
		o.Sample = 1
	}
	provider := sdk.NewTracerProvider(spans,
		sdk.WithSampler(sdk.ParentBased(sdk.TraceIDRatioBased(o.Sample))),
		sdk.WithResource(resource.NewSchemaless(
			attribute.String("service.name", o.Service), attribute.String("service.instance.id", o.Instance),
			attribute.String("service.version", o.Version),
		)),
	)
	return &Tracer{provider, provider.Tracer("baton")}
}

// Close sends what is left, until ctx ends.
func (t *Tracer) Close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	if err := t.provider.Shutdown(ctx); err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("tracing: %w", err)
	}
	return nil
}

var format = propagation.TraceContext{}

// FromHeader is ctx within the span that a client's request names, if it does.
func (t *Tracer) FromHeader(ctx context.Context, h http.Header) context.Context {
	if t == nil {
		return ctx
	}
	return format.Extract(ctx, propagation.HeaderCarrier(h))
}

// ToHeader names the span of ctx to the server that a request goes to.
func (t *Tracer) ToHeader(ctx context.Context, h http.Header) {
	if t != nil {
		format.Inject(ctx, propagation.HeaderCarrier(h))
	}
}

// Parent is the span of ctx as a traceparent, empty for none.
func (t *Tracer) Parent(ctx context.Context) string {
	if t == nil {
		return ""
	}
	carrier := propagation.MapCarrier{}
	format.Inject(ctx, carrier)
	return carrier["traceparent"]
}

// Span is something that is going on. Its methods are those of a nil Span, too: they do nothing.
type Span struct{ span trace.Span }

// Start begins a span within that of ctx. server says that it answers a request from elsewhere.
func (t *Tracer) Start(ctx context.Context, name string, server bool, attrs ...attribute.KeyValue) (context.Context, *Span) {
	if t == nil {
		return ctx, nil
	}
	kind := trace.SpanKindInternal
	if server {
		kind = trace.SpanKindServer
	}
	ctx, span := t.tracer.Start(ctx, name, trace.WithSpanKind(kind), trace.WithAttributes(attrs...))
	return ctx, &Span{span}
}

// Note adds attributes.
func (s *Span) Note(attrs ...attribute.KeyValue) {
	if s != nil {
		s.span.SetAttributes(attrs...)
	}
}

// End ends the span. An error marks it as failed.
func (s *Span) End(err error) {
	if s == nil {
		return
	}
	if err != nil {
		s.span.SetStatus(codes.Error, err.Error())
	}
	s.span.End()
}

// Phase is a span that is over.
type Phase struct {
	Name     string
	From, To time.Time
	Failed   string // why, or empty
	Attrs    []attribute.KeyValue
}

// Record makes a span of phase within parent, a traceparent, and spans of steps within that one.
func (t *Tracer) Record(parent string, phase Phase, steps ...Phase) {
	if t == nil || parent == "" {
		return
	}
	ctx := format.Extract(context.Background(), propagation.MapCarrier{"traceparent": parent})
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return
	}
	ctx, span := t.record(ctx, phase)
	for _, s := range steps {
		_, step := t.record(ctx, s)
		step.End(trace.WithTimestamp(s.To))
	}
	span.End(trace.WithTimestamp(phase.To))
}

func (t *Tracer) record(ctx context.Context, p Phase) (context.Context, trace.Span) {
	ctx, span := t.tracer.Start(ctx, p.Name, trace.WithTimestamp(p.From), trace.WithAttributes(p.Attrs...))
	if p.Failed != "" {
		span.SetStatus(codes.Error, p.Failed)
	}
	return ctx, span
}
