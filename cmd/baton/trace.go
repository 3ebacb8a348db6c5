package main

import (
	"context"
	"time"

	"baton/tracing"
)

// traceFlags say where OpenTelemetry spans go.
type traceFlags struct {
	OTLPEndpoint string `name:"otlp-endpoint" env:"OTEL_EXPORTER_OTLP_ENDPOINT" placeholder:"URL" help:"Send a tree of OpenTelemetry spans for each request to this collector (OTLP over HTTP), as http://127.0.0.1:4318."`
	TraceSample  share  `default:"1" placeholder:"SHARE" help:"Which share of requests is traced, from 0 to 1, of those whose client has not decided (traceparent). Default: ${default}."`
}

// tracer is that of a process; stop sends what is left.
func (f traceFlags) tracer(env *environment, service, instance string) (t *tracing.Tracer, stop func(), err error) {
	if f.TraceSample == 0 {
		f.OTLPEndpoint = ""
	}
	t, err = tracing.New(env.ctx, tracing.Options{
		Endpoint: f.OTLPEndpoint, Service: "baton-" + service, Instance: instance, Version: version(), Sample: float64(f.TraceSample),
	})
	return t, func() {
		const patience = 2 * time.Second
		ctx, cancel := context.WithTimeout(context.WithoutCancel(env.ctx), patience)
		defer cancel()
		if err := t.Close(ctx); err != nil {
			env.log.Warn("spans were not sent", "error", err)
		}
	}, err
}
