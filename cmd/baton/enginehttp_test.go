package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"baton/internal/rig"
	"baton/wire"
)

// httpPart starts an engine that is served over HTTP and waits until it is up.
func httpPart(t *testing.T, client *http.Client, model, role string, flags ...string) *fleet {
	t.Helper()
	p := start(t, append([]string{"engine", "--role=" + role, "--name=" + role, "--model=" + model, "--http=127.0.0.1:0", "--served-model-name=m", "--threads=2"}, flags...)...)
	f := &fleet{url: p.await(t, `engine at (https?://\S+)`), model: "m", client: client, parts: map[string]*part{role: p}}
	f.awaitHealth(t)
	return f
}

// relayed puts a frontend before engines that are served over HTTP.
func relayed(t *testing.T, client *http.Client, prefill, decode *fleet, flags ...string) *fleet {
	t.Helper()
	front := start(t, append([]string{"frontend", "--listen=127.0.0.1:0", "--prefill=" + prefill.url, "--decode=" + decode.url}, flags...)...)
	f := &fleet{url: front.await(t, `frontend at (https?://\S+)`), model: "m", client: client, parts: map[string]*part{"frontend": front}}
	f.awaitHealth(t)
	return f
}

// context runs a context leg and returns the generation leg's request.
func (f *fleet) context(ctx context.Context, body map[string]any) (map[string]any, error) {
	first, second := map[string]any{}, map[string]any{}
	for k, v := range body {
		first[k], second[k] = v, v
	}
	first["model"], first["disaggregated_params"] = f.model, map[string]any{"request_type": "context_only", "return_prompt_token_ids_b64": true}
	status, raw, err := f.post(ctx, "/v1/completions", first)
	if err != nil || status != http.StatusOK {
		return nil, fmt.Errorf("context leg: %d %s, %w", status, raw, err)
	}
	var answer struct {
		Choices []struct {
			Params map[string]any `json:"disaggregated_params"`
		}
		Usage json.RawMessage
		IDs   string `json:"prompt_token_ids_b64"`
	}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	if err := decoder.Decode(&answer); err != nil {
		return nil, err
	}
	params := answer.Choices[0].Params
	params["request_type"], params["ctx_usage"] = "generation_only", answer.Usage
	delete(second, "prompt")
	second["prompt_token_ids_b64"], second["disaggregated_params"] = answer.IDs, params
	return second, nil
}

// heldAfter waits until engines hold nothing, for so long at most, and returns what they hold then: blocks, requests, exports and
// claims.
func heldAfter(t *testing.T, patience time.Duration, engines ...*fleet) (held float64) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		held = 0
		for _, f := range engines {
			held += metric(t, f.url, "baton_engine_kv_blocks", `state="used"`) + metric(t, f.url, "baton_engine_requests") +
				metric(t, f.url, "baton_leg_requests") + metric(t, f.url, "baton_leg_exports") + metric(t, f.url, "baton_leg_claims") + metric(t, f.url, "baton_leg_reading")
		}
		if held == 0 {
			break
		}
	}
	return held
}

// Engines that know of no coordinator give transformers' tokens, and the bits of one engine, through the frontend that
// relays between them. It finds out by itself what they are.
func TestGoldensInTwoLegs(t *testing.T) {
	for _, family := range []struct{ model, transport, prefill, decode string }{
		{"qwen3", "shm", "tp=1", "tp=2"}, {"llama", "tcp", "tp=2", "tp=1"}, {"qwen2", "tcp-push", "tp=1", "tp=1,dp=2"},
	} {
		t.Run(family.model+"/"+family.transport, func(t *testing.T) {
			g, model := readGolden(t, family.model), goldenPath(family.model)
			want := goldenRun(t, serve(t, model, "--shards=tp=1", "--kv-memory=64MiB"), g)
			flags := []string{"--transfer=" + family.transport, "--kv-memory=32MiB"}
			prefill := httpPart(t, nil, model, wire.RolePrefill, append(flags, "--shard="+family.prefill)...)
			decode := httpPart(t, nil, model, wire.RoleDecode, append(flags, "--shard="+family.decode)...)
			f := relayed(t, nil, prefill, decode)
			sameBits(t, goldenRun(t, f, g), want)
			ids, err := f.stream(t.Context(), map[string]any{"prompt": g.Cases[0].Prompt, "max_tokens": len(g.Cases[0].Generated), "temperature": 0, "ignore_eos": true}, 1<<30)
			if err != nil || fmt.Sprint(ids) != fmt.Sprint(g.Cases[0].Generated) {
				t.Errorf("a stream of %v, %v; want %v", ids, err, g.Cases[0].Generated)
			}
			h := f.complete(t, map[string]any{"prompt": prompt(70, 1), "max_tokens": 4, "ignore_eos": true, "return_handoff": true}).Choices[0].Handoff
			if h == nil || h.PrefillEngine != "prefill" || !strings.HasPrefix(h.DecodeEngine, "decode") || h.BytesMoved == 0 || h.PromptComputed != 70 {
				t.Errorf("the handoff was %+v", h)
			}
			if left := metric(t, prefill.url, "baton_leg_exports") + metric(t, decode.url, "baton_leg_reading"); left != 0 {
				t.Errorf("%v exports and reads are left", left)
			}
			for _, name := range []string{"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"} {
				if v := metric(t, decode.url, name, `model_name="m"`); v != 0 {
					t.Errorf("%s is %v at rest", name, v)
				}
			}
		})
	}
}

// Frontends that die between the legs, and clients that leave, leave nothing on engines under load.
func TestAbandonedLegsLeaveNothing(t *testing.T) {
	model := goldenPath("llama")
	flags := []string{"--transfer=tcp", "--kv-memory=768KiB", "--max-seq-len=512", "--export-lease=1s"} // 32 blocks
	prefill, decode := httpPart(t, nil, model, wire.RolePrefill, flags...), httpPart(t, nil, model, wire.RoleDecode, flags...)
	var group sync.WaitGroup
	for i := range 30 {
		group.Go(func() {
			body := map[string]any{"prompt": prompt(20+i*5, uint64(i)), "max_tokens": 300, "temperature": 0.8, "seed": i, "ignore_eos": true}
			second, err := prefill.context(t.Context(), body)
			switch {
			case err != nil:
				t.Error(err)
			case i%3 == 1: // the client of the second leg leaves
				if _, err := decode.stream(t.Context(), second, 1+i%7); err != nil && !strings.Contains(err.Error(), "410") {
					t.Error(err)
				}
			case i%3 == 2:
				ctx, leave := context.WithTimeout(t.Context(), time.Duration(i)*time.Millisecond)
				defer leave()
				_, _, _ = decode.post(ctx, "/v1/completions", second) // it need not come back
			}
		})
	}
	group.Wait()
	held := heldAfter(t, 20*time.Second, prefill, decode)
	if held != 0 {
		t.Errorf("%v blocks, requests, exports and claims are still held", held)
	}
	exported, ended := metric(t, prefill.url, "baton_leg_exports_total", "exported"), metric(t, prefill.url, "baton_leg_exports_total", "expired")+metric(t, prefill.url, "baton_leg_exports_total", "released")
	if exported != 30 || ended != 30 {
		t.Errorf("%v exports, of which %v ended", exported, ended)
	}
	if c := prefill.twoLegs(t, decode, map[string]any{"prompt": prompt(300, 9), "max_tokens": 5, "ignore_eos": true}); len(c.Choices[0].TokenIDs) != 5 {
		t.Errorf("afterwards: %+v", c)
	}
}

// twoLegs runs both legs of a completion.
func (f *fleet) twoLegs(t *testing.T, decode *fleet, body map[string]any) completion {
	t.Helper()
	second, err := f.context(t.Context(), body)
	if err != nil {
		t.Fatal(err)
	}
	return decode.complete(t, second)
}

// The death of a prefill engine between the legs is a 503, the loss of its KV a 410.
func TestPrefillEngineDiesBetweenTheLegs(t *testing.T) {
	model := goldenPath("llama")
	prefill, decode := httpPart(t, nil, model, wire.RolePrefill), httpPart(t, nil, model, wire.RoleDecode)
	body := map[string]any{"prompt": prompt(50, 1), "max_tokens": 5, "ignore_eos": true}
	second, err := prefill.context(t.Context(), body)
	if err != nil {
		t.Fatal(err)
	}
	decode.complete(t, second)
	if status, raw, err := decode.post(t.Context(), "/v1/completions", second); err != nil || status != http.StatusGone || !strings.Contains(string(raw), wire.CodeGone) {
		t.Errorf("a state that was used: %d %s, %v", status, raw, err)
	}
	if second, err = prefill.context(t.Context(), body); err != nil {
		t.Fatal(err)
	}
	if err := prefill.parts["prefill"].Kill(); err != nil {
		t.Fatal(err)
	}
	if status, raw, err := decode.post(t.Context(), "/v1/completions", second); err != nil || status != http.StatusServiceUnavailable || !strings.Contains(string(raw), "prefill again") {
		t.Errorf("after the death: %d %s, %v", status, raw, err)
	}
}

// With certificates, every port wants them, links too.
func TestTwoLegsOverTLS(t *testing.T) {
	dir, keys := certs(t), keyFile(t, "sk-engine-0123456789")
	other := certs(t)
	client := httpsClient(t, dir, "sk-engine-0123456789")
	model := goldenPath("llama")
	flags := append(mutualFlags(dir, "engine"), "--transfer=tcp", "--kv-memory=32MiB", "--api-key-file="+keys)
	prefill, decode := httpPart(t, client, model, wire.RolePrefill, flags...), httpPart(t, client, model, wire.RoleDecode, flags...)
	body := map[string]any{"prompt": prompt(80, 3), "max_tokens": 6, "temperature": 0}
	want := serve(t, model, "--shards=tp=1").complete(t, body)
	if got := prefill.twoLegs(t, decode, body); fmt.Sprint(got.Choices[0].TokenIDs) != fmt.Sprint(want.Choices[0].TokenIDs) {
		t.Errorf("%v, alone %v", got.Choices[0].TokenIDs, want.Choices[0].TokenIDs)
	}
	stranger := *decode
	stranger.client = &http.Client{Transport: client.Transport.(withKey).RoundTripper}
	if status, raw, err := stranger.post(t.Context(), "/v1/completions", body); err != nil || status != http.StatusUnauthorized {
		t.Errorf("without a key: %d %s, %v", status, raw, err)
	}
	// A decode engine of another authority gets no KV.
	foreignClient := httpsClient(t, other, "")
	foreign := httpPart(t, foreignClient, model, wire.RoleDecode, append(mutualFlags(other, "engine"), "--transfer=tcp")...)
	second, err := prefill.context(t.Context(), body)
	if err != nil {
		t.Fatal(err)
	}
	if status, raw, err := foreign.post(t.Context(), "/v1/completions", second); err != nil || status != http.StatusServiceUnavailable || !strings.Contains(string(raw), "certificate") {
		t.Errorf("an engine of another authority: %d %s, %v", status, raw, err)
	}
	// Nor does one without certificates, though it may call this host.
	plain := httpPart(t, nil, model, wire.RoleDecode, "--transfer=tcp")
	if status, raw, err := plain.post(t.Context(), "/v1/completions", second); err != nil || status != http.StatusServiceUnavailable {
		t.Errorf("a plain engine: %d %s, %v", status, raw, err)
	}
	if got := decode.complete(t, second); len(got.Choices[0].TokenIDs) != 6 {
		t.Errorf("afterwards: %+v", got)
	}
}

// /server_info tells what an engine is; both refuse what they do not do.
func TestEngineOverHTTP(t *testing.T) {
	both := httpPart(t, nil, goldenPath("qwen3"), wire.RoleBoth, "--shard=dp=2")
	resp, err := http.Get(both.url + "/server_info")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var info serverInfo
	if err := json.NewDecoder(resp.Body).Decode(&info); err != nil {
		t.Fatal(err)
	}
	if info.Engine != "baton" || info.Role != wire.RoleBoth || info.Model != "m" || info.Transport != "" || len(info.Engines) != 2 || info.Engines[1].Name != "both_dp1" ||
		info.Disaggregated.DPSize != 2 || info.WeightVersion != 1 || info.BlockSize != 32 || info.MaxModelLen == 0 || info.Fingerprint == "" || !strings.HasPrefix(info.Shard, "tp=1") {
		t.Errorf("%+v", info)
	}
	whole := both.complete(t, map[string]any{"prompt": prompt(40, 1), "max_tokens": 5, "temperature": 0})
	want := serve(t, goldenPath("qwen3"), "--shards=tp=1").complete(t, map[string]any{"prompt": prompt(40, 1), "max_tokens": 5, "temperature": 0})
	if fmt.Sprint(whole.Choices[0].TokenIDs) != fmt.Sprint(want.Choices[0].TokenIDs) {
		t.Errorf("%v, want %v", whole.Choices[0].TokenIDs, want.Choices[0].TokenIDs)
	}
	for _, c := range []struct{ flags, says string }{
		{"--http 127.0.0.1:0 --coordinator 127.0.0.1:7000", "exclude each other"},
		{"--http foo", "--http foo is not an address"},
		{"--http 127.0.0.1:0 --export-lease 10ms", "--export-lease"},
		{"--role prefill --http 127.0.0.1:0 --transfer-host 10.9.8.7", "--transfer-host 10.9.8.7"},
		{"--http 10.9.8.7:80", "--http 10.9.8.7:80 reaches beyond this host"},
	} {
		var out bytes.Buffer
		log := rig.NewLog(nil, nil)
		args := append([]string{"engine", "--model=" + filepath.Join(goldenPath("llama"))}, strings.Fields(c.flags)...)
		if code := runContext(t.Context(), args, &out, log); code != 1 || !strings.Contains(log.Tail(), c.says) {
			t.Errorf("%s: code %d, %s", c.flags, code, log.Tail())
		}
	}
}
