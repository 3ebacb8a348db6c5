package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func examine(t *testing.T, c Config) *Report {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	c.Client = &http.Client{Transport: transport}
	if c.Timeout == 0 {
		c.Timeout = 5 * time.Second
	}
	r, err := Run(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// expect checks that exactly these findings are there: "severity words of its text" or "severity words -> words of its advice".
func expect(t *testing.T, r *Report, want ...string) {
	t.Helper()
	rest := slices.Clone(r.Findings)
next:
	for _, w := range want {
		severity, words, _ := strings.Cut(w, " ")
		words, do, _ := strings.Cut(words, " -> ")
		for i, f := range rest {
			if string(f.Severity) == severity && strings.Contains(f.Text, words) && strings.Contains(f.Do, do) {
				rest = slices.Delete(rest, i, i+1)
				continue next
			}
		}
		t.Errorf("no finding %q", w)
	}
	for _, f := range rest {
		t.Errorf("finding: %+v", f)
	}
}

func TestServersAreTold(t *testing.T) {
	key := http.Header{"Authorization": {"Bearer k"}}
	for _, tc := range []struct {
		name   string
		kind   string
		change func(f *fake)
		header http.Header
		want   Server
		finds  []string
	}{
		{"vllm by its owner", VLLM, func(f *fake) { f.answers["/version"] = `{"version":"0.33.0"}` }, nil,
			Server{Engine: VLLM, Version: "0.33.0", Model: "m", Context: 2048, Role: RoleEither, Connector: "NixlConnector", Healthy: true, Reachable: true},
			[]string{"ok it answers, and reused 512 of 512"}},
		{"vllm in development mode", VLLM, func(f *fake) {
			f.answers["/server_info"] = `{"vllm_config":{"model_config":{},"kv_transfer_config":{"kv_connector":"MooncakeConnector","kv_role":"kv_both"}}}`
			f.quiet = true
		}, nil, Server{Engine: VLLM, Model: "m", Context: 2048, Role: RoleEither, Connector: "MooncakeConnector", Healthy: true, Reachable: true},
			[]string{"warning does not say how much of a prompt was cached -> --enable-prompt-tokens-details"}},
		{"vllm, as text", VLLM, func(f *fake) {
			f.answers["/server_info"] = `{"vllm_config":"model='x', kv_transfer_config=KVTransferConfig(kv_connector='NixlPushConnector', kv_role='kv_both')"}`
			f.noCache = true
		}, nil, Server{Engine: VLLM, Model: "m", Context: 2048, Role: RoleEither, Connector: "NixlPushConnector", Healthy: true, Reachable: true},
			[]string{"warning prefixes are not cached -> --enable-prefix-caching", "warning cached nothing of a prompt"}},
		{"vllm under another owner", VLLM, func(f *fake) { f.owner = "me" }, nil,
			Server{Engine: VLLM, Model: "m", Context: 2048, Role: RoleEither, Connector: "NixlConnector", Healthy: true, Reachable: true},
			[]string{"ok it answers"}},
		{"sglang", SGLang, func(f *fake) {
			f.owner = "x"
			f.answers["/get_server_info"] = `{"disaggregation_mode":"null","version":"0.5.1","context_length":4096,"disable_radix_cache":true,"served_model_name":"m"}`
			f.quiet = true
		}, nil, Server{Engine: SGLang, Version: "0.5.1", Model: "m", Context: 4096, Role: RoleWhole, Healthy: true, Reachable: true},
			[]string{"warning prefixes are not cached -> --disable-radix-cache", "warning does not say -> --enable-cache-report"}},
		{"sglang, nested", SGLang, func(f *fake) {
			f.answers["/server_info"] = `{"version":"0.6","server_args":{"disaggregation_mode":"null","context_length":null}}`
		}, nil, Server{Engine: SGLang, Version: "0.6", Model: "m", Context: 2048, Role: RoleWhole, Healthy: true, Reachable: true},
			[]string{"ok it answers"}},
		{"tensorrt_llm", TRTLLM, func(f *fake) {
			f.answers["/version"] = `{"version":"1.3.0"}`
			f.answers["/server_info"] = `{"disaggregated_params":{"ctx_info_endpoint":["tcp://x"]}}`
		}, nil, Server{Engine: TRTLLM, Version: "1.3.0", Model: "m", Role: RoleEither, Connector: "cache transceiver", Healthy: true, Reachable: true},
			[]string{"ok it answers"}},
		{"llama.cpp", LlamaCPP, func(f *fake) {
			f.answers["/v1/models"] = `{"data":[{"id":"m","owned_by":"llamacpp","meta":{"n_ctx":8192,"n_ctx_train":131072}}]}`
			f.answers["/props"] = `{"build_info":"b9992-abc","total_slots":4,"default_generation_settings":{"n_ctx":2000}}`
		}, nil, Server{Engine: LlamaCPP, Version: "b9992-abc", Model: "m", Context: 2000, Role: RoleWhole, Note: "4 slots", Healthy: true, Reachable: true},
			[]string{"ok it answers"}},
		{"an engine of ours", Baton, func(f *fake) {
			f.owner = "x"
			f.answers["/server_info"] = `{"engine":"baton","version":"v1","role":"both","shard":"tp=1","disaggregated_params":{"ctx_dp_size":1}}`
		}, nil, Server{Engine: Baton, Version: "v1", Model: "m", Context: 2048, Role: RoleWhole, Note: "tp=1", Healthy: true, Reachable: true},
			[]string{"ok it answers"}},
		{"unknown", "someone", nil, nil,
			Server{Engine: Unknown, Model: "m", Context: 2048, Role: RoleWhole, Healthy: true, Reachable: true},
			[]string{"warning does not say what it is", "ok it answers"}},
		{"with a key", VLLM, func(f *fake) { f.key = "k" }, key,
			Server{Engine: VLLM, Model: "m", Context: 2048, Role: RoleEither, Connector: "NixlConnector", Healthy: true, Reachable: true},
			[]string{"ok it answers"}},
		{"without the key", VLLM, func(f *fake) { f.key = "k" }, nil,
			Server{Engine: Unknown, Healthy: true, Reachable: true, Unauthorized: true},
			[]string{"error status 401: Unauthorized -> --api-key-file"}},
		{"not well", VLLM, func(f *fake) { f.answers["/health"] = "503 loading" }, nil,
			Server{Engine: VLLM, Model: "m", Context: 2048, Role: RoleEither, Connector: "NixlConnector", Reachable: true},
			[]string{"error /health is not well: status 503: loading", "ok it answers"}},
		{"nonsense", "someone", func(f *fake) {
			for _, path := range []string{"/v1/models", "/server_info", "/version", "/props", "/metrics"} {
				f.answers[path] = "\x00[{\"data\":" + strings.Repeat("[", 1000)
			}
			f.noRoute = true
		}, nil, Server{Engine: Unknown, Role: RoleWhole, Healthy: true, Reachable: true},
			[]string{"warning does not say what it is", "warning lists no model", "warning there is no /v1/completions"}},
		{"a small context", VLLM, func(f *fake) { f.context = 64 }, nil,
			Server{Engine: VLLM, Model: "m", Context: 64, Role: RoleEither, Connector: "NixlConnector", Healthy: true, Reachable: true},
			[]string{"ok reused 32 of 32"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := serve(t, tc.kind, tc.change)
			r := examine(t, Config{URLs: []string{f.URL + "/v1/"}, Header: tc.header})
			got, want := wire(t, r.Servers[0]), tc.want
			want.URL = f.URL
			if got != wire(t, &want) {
				t.Errorf("got  %s\nwant %s", got, wire(t, &want))
			}
			expect(t, r, tc.finds...)
		})
	}
}

func wire(t *testing.T, s *Server) string {
	t.Helper()
	raw, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func TestHandoffs(t *testing.T) {
	yes, no := true, false
	for _, tc := range []struct {
		name   string
		kind   string
		change func(p, d *fake)
		moved  *bool
		finds  []string
	}{
		{"nixl", VLLM, nil, &yes, []string{"ok 512000 bytes (vllm:nixl_bytes_transferred_sum)"}},
		{"nixl, pushing", VLLM, func(p, _ *fake) { p.push = true }, &yes, []string{"ok KV moves"}},
		{"nixl, silent", VLLM, func(p, _ *fake) { p.silent = true }, &no, []string{`error silent re-prefill: the prefill server answered without kv_transfer_params -> "kv_connector":"NixlConnector"`}},
		{"nixl, computed anew", VLLM, func(_, d *fake) { d.local = true }, &no, []string{"error no KV moves -> kv-transfer-config"}},
		{"nixl without metrics", VLLM, func(p, d *fake) { p.answers["/metrics"], d.answers["/metrics"] = "", "" }, &yes, []string{"ok 512 of 512 tokens were cached on the decode server"}},
		{"nixl without metrics, computed anew", VLLM, func(_, d *fake) { d.answers["/metrics"], d.local = "", true }, &no, []string{"error no KV moves"}},
		{"nixl without anything", VLLM, func(_, d *fake) { d.answers["/metrics"], d.quiet = "", true }, nil, []string{"warning it cannot be told whether KV moved -> --enable-prompt-tokens-details"}},
		{"nixl, damaged", VLLM, func(_, d *fake) { d.damaged = true }, &yes, []string{"ok KV moves", "warning damaged\", without it -> KV arrives damaged"}},
		{"a shorter context", VLLM, func(_, d *fake) { d.context = 520 }, &yes, []string{"warning context lengths differ: 2048 and 520", "ok KV moves"}},
		{"sglang", SGLang, nil, &yes, []string{"ok in its mode it computes no prompts"}},
		{"sglang, prefill refuses", SGLang, func(p, _ *fake) { p.noRoute = true }, nil, []string{"error the prefill leg was refused, status 404 -> bootstrap port"}},
		{"sglang, decode refuses", SGLang, func(_, d *fake) { d.noRoute = true }, nil, []string{"error the decode leg was refused, status 404 -> bootstrap port"}},
		{"sglang, not in its mode", SGLang, func(_, d *fake) {
			d.answers["/server_info"] = strings.Replace(d.answers["/server_info"], `"decode"`, `"null"`, 1)
		}, nil, []string{"error named as a decode server, and its role is whole -> --disaggregation-mode decode"}},
		{"trtllm", TRTLLM, nil, &yes, []string{"ok the generation leg answered"}},
		{"trtllm, silent", TRTLLM, func(p, _ *fake) { p.silent = true }, &no, []string{"error without disaggregated_params -> cache_transceiver_config"}},
		{"trtllm, no state", TRTLLM, func(p, _ *fake) { p.stateless = true }, &no, []string{"error no encoded_opaque_state -> cache_transceiver_config"}},
		{"trtllm, early end", TRTLLM, func(p, _ *fake) { p.finish = "stop" }, nil, []string{"warning the answer ended with its first token -> try again"}},
		{"trtllm, lost", TRTLLM, func(p, d *fake) { d.peer = serve(p.t, TRTLLM, nil) }, nil, []string{"error the generation leg was refused, status 500: no such context"}},
		{"baton", Baton, nil, &yes, []string{"ok the decode engine reports 16 blocks moved"}},
		{"baton, nothing moved", Baton, func(_, d *fake) { d.handoff = strings.Replace(d.handoff, "16", "0", 1) }, &no, []string{"error no KV moves -> log"}},
		{"baton, silent", Baton, func(p, _ *fake) { p.silent = true }, &no, []string{"error without disaggregated_params -> --role prefill"}},
		{"baton, other weights", Baton, func(p, _ *fake) {
			p.answers["/server_info"] = strings.Replace(p.answers["/server_info"], "abc", "abd", 1)
		}, nil, []string{`error weights differ: "abd" and "abc" -> --model`}},
		{"baton, swapped", Baton, func(p, d *fake) {
			p.answers["/server_info"], d.answers["/server_info"] = d.answers["/server_info"], p.answers["/server_info"]
		}, &yes, []string{"error named as a prefill server, and its role is decode -> --role prefill", "error named as a decode server, and its role is prefill -> --role decode", "ok KV moves"}},
		{"two kinds", VLLM, func(_, d *fake) { d.owner = SGLang; d.answers["/metrics"] = "" }, nil,
			[]string{"error one is vllm, the other sglang", "error its role is whole -> --disaggregation-mode decode"}},
		{"two models", VLLM, func(_, d *fake) {
			d.answers["/v1/models"] = `{"data":[{"id":"n","owned_by":"vllm","max_model_len":2048}]}`
		}, nil, []string{`error one serves "m", the other "n" -> --served-model-name`}},
		{"two versions", VLLM, func(p, d *fake) {
			p.answers["/version"], d.answers["/version"] = `{"version":"1"}`, `{"version":"2"}`
		}, &yes, []string{"warning versions differ: 1 and 2", "ok KV moves"}},
		{"wrong role", VLLM, func(p, _ *fake) {
			p.answers["/server_info"] = `{"vllm_config":{"kv_transfer_config":{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}}}`
		}, &yes, []string{"error named as a prefill server, and its role is decode -> kv_both", "ok KV moves"}},
		{"no connector", VLLM, func(p, _ *fake) {
			p.answers["/server_info"], p.answers["/metrics"], p.silent = `{"vllm_config":{"kv_transfer_config":null}}`, "", true
		}, &no, []string{"error its role is whole -> NixlConnector", "error silent re-prefill"}},
		{"another connector", VLLM, func(p, d *fake) {
			for _, f := range []*fake{p, d} {
				f.answers["/server_info"] = `{"vllm_config":{"kv_transfer_config":{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}}}`
			}
		}, nil, []string{"warning a handoff was not tried: the connector LMCacheConnectorV1"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, d := couple(t, tc.kind, tc.change)
			r := examine(t, Config{Prefill: []string{p.URL}, Decode: []string{d.URL}, BootstrapPort: 1})
			expect(t, r, tc.finds...)
			var moved *bool
			if len(r.Handoffs) > 0 {
				moved = r.Handoffs[0].Moved
			}
			if (moved == nil) != (tc.moved == nil) || moved != nil && *moved != *tc.moved {
				t.Errorf("handoff %+v", r.Handoffs)
			}
			var b bytes.Buffer
			if err := r.Write(&b); err != nil || strings.Contains(b.String(), "secret") {
				t.Errorf("%v: %s", err, &b)
			}
		})
	}
}

func TestMooncakeHandoff(t *testing.T) {
	p, d := couple(t, VLLM, func(p, d *fake) {
		for _, f := range []*fake{p, d} {
			f.answers["/server_info"] = `{"vllm_config":{"kv_transfer_config":{"kv_connector":"MooncakeConnector","kv_role":"kv_both"}}}`
		}
		p.answers["/query"] = `{"0":{"engine_id":"engine-0"},"1":{"engine_id":"engine-1"}}`
	})
	_, port, _ := strings.Cut(strings.TrimPrefix(p.URL, "http://"), ":")
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, examine(t, Config{Prefill: []string{p.URL}, Decode: []string{d.URL}, BootstrapPort: n}), "ok KV moves")
	expect(t, examine(t, Config{Prefill: []string{p.URL}, Decode: []string{d.URL}, BootstrapPort: 1}), "error does not answer /query -> --bootstrap-port")
}

func TestFrontendsReportTheirHandoffs(t *testing.T) {
	handoff := func(decode string, moved int) func(f *fake) {
		return func(f *fake) {
			f.answers["/health"] = `{"status":"ok","engines":{"decode":2,"prefill":1}}`
			f.handoff = `{"prefill_engine":"p0","decode_engine":"` + decode + `","blocks_moved":` + strconv.Itoa(moved) + `,"blocks_reused":0,"bytes_moved":4096}`
		}
	}
	f := serve(t, Baton, handoff("d0", 16))
	r := examine(t, Config{URLs: []string{f.URL}})
	expect(t, r, "ok KV moves from p0 to d0", "ok it answers")
	if s := r.Servers[0]; s.Role != RoleFrontend || s.Note != "1 prefill engine, 2 decode engines" {
		t.Errorf("%+v", s)
	}
	if h := r.Handoffs[0]; h.Via != f.URL || h.Bytes != 4096 || !*h.Moved {
		t.Errorf("%+v", h)
	}
	expect(t, examine(t, Config{URLs: []string{serve(t, Baton, handoff("p0", 0)).URL}}), "ok from prompt to end", "ok it answers")
	expect(t, examine(t, Config{URLs: []string{serve(t, Baton, handoff("d0", 0)).URL}}), "error nothing moved from p0 to d0", "ok it answers")
	if r := examine(t, Config{URLs: []string{f.URL}, LookOnly: true}); len(r.Findings) != 0 || f.posts != 2 {
		t.Errorf("look only: %+v, %d requests", r.Findings, f.posts)
	}
}

func TestWorkersBehindARelayAreExamined(t *testing.T) {
	p, d := couple(t, VLLM, nil)
	relay := serve(t, "relay", func(f *fake) {
		f.owner = VLLM
		f.answers["/metrics"] = "baton_relay_requests_in_flight 0\n"
		f.answers["/workers"] = `{"workers":[{"url":"` + p.URL + `","roles":["prefill"]},{"url":"` + d.URL + `","roles":["decode"]},{"url":"http://127.0.0.1:1","roles":["decode"]},{"url":":bad","roles":["decode"]}]}`
		f.headers = map[string]string{"X-Baton-Silent-Reprefill": p.URL}
	})
	r := examine(t, Config{URLs: []string{relay.URL}})
	expect(t, r, "error its prefill worker -> --prefill "+p.URL, "ok it answers", "ok KV moves", "warning it cannot be reached -> which named it")
	if len(r.Servers) != 4 || r.Servers[0].Role != RoleRelay || r.Servers[1].FoundAt != relay.URL {
		t.Errorf("%+v", r.Servers)
	}
}

func TestHalfAFleetIsNoticed(t *testing.T) {
	p, _ := couple(t, SGLang, nil)
	expect(t, examine(t, Config{URLs: []string{p.URL}}), "warning there is no decode server -> --decode URL")
}

func TestUnreachableServers(t *testing.T) {
	slow := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer slow.Close()
	r := examine(t, Config{URLs: []string{"127.0.0.1:1", slow.URL}, LookTimeout: 50 * time.Millisecond})
	expect(t, r, "error cannot be reached: 127.0.0.1:1: connect: connection refused -> check the address", "error no answer within 50ms")
	if r.Errors() != 2 {
		t.Errorf("%d errors", r.Errors())
	}
	flood := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			block := bytes.Repeat([]byte("x"), 1<<20)
			for range 20 {
				if _, err := w.Write(block); err != nil {
					return
				}
			}
		}
	}))
	defer flood.Close()
	expect(t, examine(t, Config{URLs: []string{flood.URL}}), "error an answer of more than 16 MiB")
}

func TestWrongConfigurations(t *testing.T) {
	for field, c := range map[string]Config{
		"URLs":          {},
		"BootstrapPort": {URLs: []string{"h"}, BootstrapPort: 70000},
		"PromptTokens":  {URLs: []string{"h"}, PromptTokens: -1},
		"Timeout":       {URLs: []string{"h"}, Timeout: -1},
	} {
		_, err := Run(t.Context(), c)
		var bad *ConfigError
		if !errors.As(err, &bad) || bad.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	for _, u := range []string{"ftp://h", "http://", "http://h?x=1", "http://user:secret@h", "http://%"} {
		if _, err := Run(t.Context(), Config{URLs: []string{u}}); err == nil {
			t.Errorf("%s was taken", u)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, Config{URLs: []string{"127.0.0.1:1"}}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestMetricsAreRead(t *testing.T) {
	m := readMetrics([]byte("# HELP a b\na 1\nb{x=\"1\",y=\"a b} c\"} 2.5 1700000000\nb{x=\"2\"} 3\nc NaN\nbroken\n{} \n\xff\nd{ 4\n"))
	if v, ok := m.sum("b"); !ok || v != 5.5 {
		t.Errorf("b is %v in %v", v, m)
	}
	if v, ok := m.sum("b", `x="1"`); !ok || v != 2.5 {
		t.Errorf("b of 1 is %v", v)
	}
	if v, ok := m.sum("a"); !ok || v != 1 || !m.has("a") || m.has("z") || m.label("b", "x") == "" || m.label("a", "x") != "" {
		t.Errorf("a is %v in %v", v, m)
	}
	if _, ok := m.sum("z"); ok {
		t.Error("there is a z")
	}
}

func FuzzMetrics(f *testing.F) {
	f.Add([]byte("a{b=\"c\"} 1\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m := readMetrics(raw)
		for series := range m {
			if _, ok := m.sum(seriesName(series)); !ok {
				t.Fatalf("%q is there and is not", series)
			}
		}
		m.label("a", "b")
	})
}
