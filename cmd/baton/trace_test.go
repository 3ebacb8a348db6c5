package main

import (
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
)

// spanRecord is what the test reads of one.
type spanRecord struct{ service, name, trace, id, parent string }

// collect is an OTLP collector.
func collect(t *testing.T) (url string, spans func() []spanRecord) {
	var mu sync.Mutex
	var list []spanRecord
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := io.Reader(r.Body)
		if r.Header.Get("Content-Encoding") == "gzip" {
			var err error
			if body, err = gzip.NewReader(body); err != nil {
				t.Error(err)
				return
			}
		}
		raw, err := io.ReadAll(body)
		var export collector.ExportTraceServiceRequest
		if err == nil {
			err = proto.Unmarshal(raw, &export)
		}
		if err != nil {
			t.Error(err)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		for _, resource := range export.ResourceSpans {
			service := ""
			for _, a := range resource.Resource.Attributes {
				if a.Key == "service.name" {
					service = a.Value.GetStringValue()
				}
			}
			for _, scope := range resource.ScopeSpans {
				for _, s := range scope.Spans {
					list = append(list, spanRecord{service, s.Name, string(s.TraceId), string(s.SpanId), string(s.ParentSpanId)})
				}
			}
		}
	}))
	t.Cleanup(server.Close)
	return server.URL, func() []spanRecord {
		mu.Lock()
		defer mu.Unlock()
		return list
	}
}

// So they are where a relay runs the legs of engines over HTTP.
func TestTracesOfLegs(t *testing.T) {
	url, spans := collect(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
	model := goldenPath("qwen3")
	prefill, decode := httpPart(t, nil, model, "prefill", "--kv-memory=16MiB"), httpPart(t, nil, model, "decode", "--kv-memory=16MiB")
	f := relayed(t, nil, prefill, decode)
	f.complete(t, map[string]any{"prompt": prompt(70, 5), "max_tokens": 8, "temperature": 0})
	for _, p := range []*part{f.parts["frontend"], prefill.parts["prefill"], decode.parts["decode"]} {
		p.end(t)
	}
	checkTree(t, spans(), "baton-relay/HTTP /v1/completions", map[string]string{
		"baton-relay/prefill leg": "HTTP /v1/completions", "baton-relay/decode leg": "HTTP /v1/completions",
		"baton-engine/HTTP /v1/completions": "prefill leg", "baton-engine/engine prefill": "generate", "baton-engine/engine decode": "generate",
	})
}

// The spans of a request are one tree, over all processes.
func TestTraces(t *testing.T) {
	url, spans := collect(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
	f := processes(t, goldenPath("qwen3"), []string{"prefill", "decode"}, "--kv-memory=16MiB")
	f.complete(t, map[string]any{"prompt": prompt(70, 5), "max_tokens": 8, "temperature": 0})
	for _, name := range []string{"frontend", "coordinator", "prefill1", "decode2"} {
		f.parts[name].end(t) // which sends what is left
	}
	checkTree(t, spans(), "baton-frontend/HTTP /v1/completions", map[string]string{
		"baton-frontend/tokenize": "HTTP /v1/completions", "baton-frontend/generate": "HTTP /v1/completions",
		"baton-coordinator/coordinate": "generate", "baton-coordinator/queue for prefill": "coordinate", "baton-coordinator/prefill": "coordinate",
		"baton-coordinator/queue for decode": "coordinate", "baton-coordinator/handoff": "coordinate", "baton-coordinator/decode": "coordinate",
		"baton-engine/engine prefill": "generate", "baton-engine/prefill": "engine prefill", "baton-engine/export": "engine prefill",
		"baton-engine/engine decode": "generate", "baton-engine/handoff": "engine decode", "baton-engine/decode": "engine decode",
	})
}

// checkTree looks for the root, and for spans that belong to the named parents within its trace.
func checkTree(t *testing.T, spans []spanRecord, rootName string, want map[string]string) {
	t.Helper()
	byID, root := map[string]spanRecord{}, spanRecord{}
	for _, s := range spans {
		byID[s.id] = s
		if s.service+"/"+s.name == rootName {
			root = s
		}
	}
	for _, s := range byID {
		if s.trace != root.trace {
			continue // health checks and the like
		}
		if parent, ok := want[s.service+"/"+s.name]; ok && byID[s.parent].name == parent {
			delete(want, s.service+"/"+s.name)
		}
	}
	if root.name == "" || len(want) > 0 {
		t.Errorf("missing, or elsewhere: %v\nof %+v", want, byID)
	}
}
