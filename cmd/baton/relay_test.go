package main

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// One command puts a relay before engines that run, with keys on both sides.
func TestRelayCommand(t *testing.T) {
	keys := filepath.Join(t.TempDir(), "keys")
	engineKey := filepath.Join(t.TempDir(), "engine")
	for path, text := range map[string]string{keys: "client # of the test\n", engineKey: "secret\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	worker := func(answer string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost && r.Header.Get("Authorization") != "Bearer secret" {
				t.Errorf("a worker is called with %q", r.Header.Get("Authorization"))
			}
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, answer)
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	prefill := worker(`{"choices":[{"index":0,"finish_reason":"length"}],"kv_transfer_params":{"remote_engine_id":"e"}}`)
	decode := worker(`{"choices":[{"index":0,"text":"hello"}]}`)
	relay := start(t, "frontend", "--listen", "127.0.0.1:0", "--prefill", prefill, "--decode", decode, "--engine", "vllm", "--connector", "nixl",
		"--api-key-file", keys, "--engine-key-file", engineKey)
	url := "http://" + relay.await(t, `frontend at http://(\S+)`)
	await := func(status int, want string, key string) {
		t.Helper()
		req, err := http.NewRequest("POST", url+"/v1/completions", strings.NewReader(`{"prompt":"x"}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if err != nil || res.StatusCode != status || !strings.Contains(string(body), want) {
			t.Errorf("%d %s, %v", res.StatusCode, body, err)
		}
	}
	await(http.StatusOK, `"text":"hello"`, "client") // it waits until the workers have joined
	await(http.StatusUnauthorized, "API key", "stranger")
}

func TestRelayFlags(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args string
		want string
	}{
		{"", "missing flags: --model=PATH (or --prefill and --decode"},
		{"--decode http://10.0.0.1:8000", "--decode http://10.0.0.1:8000 reaches beyond this host without TLS"},
		{"--decode http://localhost:8001 --prefill localhost:8000", "--prefill: worker URL"},
		{"--decode http://localhost:8001 --prefill http://localhost:8000#x=1", `no setting "x"`},
		{"--decode http://localhost:8000 --engine llama", "--engine must be one of"},
		{"--decode http://localhost:8000 --node-id 256", "--node-id is 256; it is from 0 to 255"},
		{"--decode http://localhost:8000 --engine-key-file " + empty, "one key is wanted"},
		{"--decode http://localhost:8000 --admin-key-file " + empty, "--admin-key-file"},
		{"--decode http://localhost:8000 --prefill http://localhost:8000 --decode http://localhost:8000", "--decode http://localhost:8000 is a decode worker already"},
		{"--prefill http://localhost:8000", "--prefill without --decode"},
		{"--decode http://localhost:8000 --max-body 2MiB --max-bodies 1MiB", "--max-bodies is less than --max-body"},
		{"--decode http://localhost:8000 --worker-wait=-1s", "--worker-wait is -1s"},
		{"--decode http://localhost:8000 --max-retries=-1", "--max-retries is -1"},
		{"--decode http://localhost:8000 --leg-timeout 0", "--leg-timeout"},
		{"--decode http://localhost:8000 --stream-timeout 0s", "--stream-timeout"},
		{"--decode http://localhost:8000 --frontend-tokenize --shadow-rate 2", "--shadow-rate"},
		{"--decode http://localhost:8000 --trace-sample 2", "--trace-sample"},
		{"--decode http://localhost:8000 --coordinator 127.0.0.1:7000", "--coordinator does nothing"},
		{"--decode http://localhost:8000 --seed 1", "--seed does nothing"},
		{"--decode http://localhost:8000 --tool-parser hermes", "--tool-parser does nothing"},
		{"--decode http://localhost:8000 --peer-timeout 2s", "--peer-timeout does nothing"},
		{"--decode http://localhost:8000 --shadow-rate 0.5", "--shadow-rate takes --frontend-tokenize"},
		{"--decode http://localhost:8000 --model x", "--model takes --frontend-tokenize"},
		{"--decode http://localhost:8000 --engine vllm --strip-history", "--strip-history is for engines of trtllm and baton, and --engine is vllm"},
		{"--decode http://localhost:8000 --engine sglang --connector nixl", "--connector is for engines of vllm"},
		{"--decode http://localhost:8000 --engine vllm --schedule generation_first", "--schedule is for engines of trtllm"},
		{"--decode http://localhost:8000 --engine vllm --frontend-tokenize --model x", "--frontend-tokenize is for engines of trtllm and baton"},
		{"--model x --worker-wait 1s", "--worker-wait is for relays"},
		{"--model x --node-id 1", "--node-id is for relays"},
		{"--model x --engine-key-file x", "--engine-key-file is for relays"},
	} {
		var out, errs bytes.Buffer
		code := runContext(t.Context(), append([]string{"frontend", "--listen", "127.0.0.1:0"}, strings.Fields(c.args)...), &out, &errs)
		if code == 0 || !strings.Contains(errs.String(), c.want) {
			t.Errorf("%s: exit %d, %s", c.args, code, errs.String())
		}
	}
}
