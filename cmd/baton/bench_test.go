package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"baton/doctor"
	"baton/loadgen"
	"baton/wire"
)

// command runs baton in this process and returns what it prints and its exit code.
func command(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	code = runContext(t.Context(), args, &out, &errs)
	return out.String(), errs.String(), code
}

// The tools for the operator, against a server of ours: bench measures sessions and replays what it recorded, doctor sees the handoff.
func TestBenchAndDoctorOfAServer(t *testing.T) {
	f := serve(t, goldenPath("qwen3"), "--kv-memory=64MiB")
	trace := filepath.Join(t.TempDir(), "trace.jsonl")
	sessions := []string{"bench", f.url, "--sessions=3", "--turns=3", "--shared-prefix-tokens=64", "--new-tokens=20:40", "--output-tokens=5", "--concurrency=1", "--json"}
	var first, again loadgen.Report
	bench(t, &first, append(sessions, "--record="+trace)...)
	r := first.Targets[0]
	if r.Completed != 9 || r.Failed != 0 || r.OutputTokens != 45 || r.StreamedTokens != 45 || r.OwnedBy != "baton" || r.ITL.Count == 0 || r.ITL.Count > 36 || r.TTFT.Count != 9 {
		t.Errorf("%+v", r)
	}
	// Whole blocks of 32 can be reused of the prefix (64), and of a turn's prompt and answer before.
	if r.HitOfIdeal == nil || *r.HitOfIdeal > 1 || *r.HitOfIdeal < 0.6 {
		t.Errorf("%d of %d reusable tokens were cached", *r.CachedTokens, r.ReusableTokens)
	}
	bench(t, &again, "bench", f.url, "--trace="+trace, "--concurrency=1", "--json")
	if a := again.Targets[0]; a.Completed != 9 || a.InputTokens != r.InputTokens || *a.CachedTokens <= *r.CachedTokens || len(again.Warnings) == 0 {
		t.Errorf("replayed: %+v, %q; before: %+v", a, again.Warnings, r)
	}
	out, errs, code := command(t, "bench", f.url, "--against="+f.url, "--requests=8", "--rounds=2", "--new-tokens=16", "--output-tokens=2", "--rate=200")
	if code != 0 || !strings.Contains(out, "ttft_ms.p50") || !strings.Contains(out, "requests         8") {
		t.Errorf("code %d\n%s%s", code, out, errs)
	}
	if out, errs, code := command(t, "bench", f.url, "--prompt=chat", "--requests=2"); code != 1 || !strings.Contains(out, "2 x http_400") || !strings.Contains(errs, "2 requests failed") {
		t.Errorf("a model without tokenizer: code %d\n%s%s", code, out, errs)
	}

	var report doctor.Report
	out, errs, code = command(t, "doctor", f.url, "--json")
	if err := json.Unmarshal([]byte(out), &report); err != nil || code != 0 {
		t.Fatalf("doctor: %v, code %d\n%s%s", err, code, out, errs)
	}
	if len(report.Handoffs) != 1 || report.Handoffs[0].Moved == nil || !*report.Handoffs[0].Moved || report.Servers[0].Role != doctor.RoleFrontend {
		t.Errorf("doctor: %s", out)
	}
	if out, errs, code := command(t, "doctor", "127.0.0.1:1"); code != 1 || !strings.Contains(out, "cannot be reached") || !strings.Contains(errs, "1 thing is wrong") {
		t.Errorf("doctor of nobody: code %d\n%s%s", code, out, errs)
	}
}

func bench(t *testing.T, report *loadgen.Report, args ...string) {
	t.Helper()
	out, errs, code := command(t, args...)
	if err := json.Unmarshal([]byte(out), report); err != nil || code != 0 {
		t.Fatalf("%v: %v, code %d\n%s%s", args, err, code, out, errs)
	}
}

func TestBenchFlagsThatContradictEachOther(t *testing.T) {
	chat := filepath.Join(t.TempDir(), "chat.jsonl")
	if err := os.WriteFile(chat, []byte(`{"output_length":5,"messages":[{"role":"user","content":"x"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for words, flags := range map[string]string{
		"--requests and --sessions": "--requests=1 --sessions=1",
		"--rate and --concurrency":  "--rate=1 --concurrency=1",
		"--new-tokens":              "--new-tokens=0",
		"--output-tokens":           "--output-tokens=0",
		"--vocab-size":              "--vocab-size=2",
		"--burstiness":              "--burstiness=-1 --rate=1",
		"--trace says what is sent": "--trace=x --rate=1",
		"--trace: open x":           "--trace=x",
		"--prompt chat":             "--trace=" + chat,
		"--record and --against":    "--record=x --against=http://h",
		"--extra-body":              "--extra-body=[1]",
		"--goodput":                 "--goodput=x=1s",
		"--header":                  "--header=x",
		"--speed is for":            "--speed=2",
		"--turns":                   "--turns=0",
		"URL: \"ftp://x\"":          "--against=ftp://x",
	} {
		_, errs, code := command(t, append([]string{"bench", "http://127.0.0.1:1"}, strings.Fields(flags)...)...)
		if code == 0 || !strings.Contains(errs, words) {
			t.Errorf("%s: code %d, %s", flags, code, errs)
		}
	}
}

// Engines that are called over HTTP, and a relay before them: doctor finds the engines behind it and tries the handoff between them.
func TestDoctorOfEnginesBehindARelay(t *testing.T) {
	if testing.Short() {
		t.Skip("processes")
	}
	flags := []string{"frontend", "--listen=127.0.0.1:0"}
	urls := map[string]string{}
	for _, role := range []string{wire.RolePrefill, wire.RoleDecode} {
		e := start(t, "engine", "--role="+role, "--http=127.0.0.1:0", "--model="+goldenPath("qwen3"), "--served-model-name=m", "--kv-memory=64MiB")
		urls[role] = e.await(t, `engine at (\S+)`)
		flags = append(flags, "--"+role+"="+urls[role])
	}
	front := start(t, flags...)
	relay := &fleet{url: front.await(t, `frontend at (\S+)`)}
	relay.awaitHealth(t)

	var report doctor.Report
	out, errs, code := command(t, "doctor", relay.url, "--json")
	if err := json.Unmarshal([]byte(out), &report); err != nil || code != 0 || len(report.Servers) != 3 {
		t.Fatalf("%v, code %d\n%s%s", err, code, out, errs)
	}
	for i, want := range []doctor.Server{
		{URL: relay.url, Role: doctor.RoleRelay}, {URL: urls[wire.RolePrefill], Role: doctor.RolePrefill, Connector: "shm"}, {URL: urls[wire.RoleDecode], Role: doctor.RoleDecode, Connector: "shm"},
	} {
		if s := report.Servers[i]; s.URL != want.URL || s.Role != want.Role || s.Connector != want.Connector || s.Engine != doctor.Baton || !s.Healthy || s.Model != "m" || s.Context != 4096 {
			t.Errorf("server %d: %+v, want %+v", i, s, want)
		}
	}
	if len(report.Handoffs) != 2 { // the relay's own, and the pair's
		t.Fatalf("%s", out)
	}
	for i, via := range []string{relay.url, ""} {
		if h := report.Handoffs[i]; h.Via != via || h.Moved == nil || !*h.Moved || h.Bytes == 0 {
			t.Errorf("handoff %d: %+v", i, h)
		}
	}
	if out, errs, code := command(t, "doctor", "--prefill", urls[wire.RoleDecode], "--decode", urls[wire.RolePrefill]); code != 1 || !strings.Contains(out, "named as a prefill server, and its role is decode") {
		t.Errorf("swapped: code %d\n%s%s", code, out, errs)
	}
}
