package doctor

import (
	"context"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"
)

const nixlAdvice = `start both servers with --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'`

// vllm tries vLLM's NIXL connectors, or Mooncake's.
func (t *trial) vllm(ctx context.Context) {
	if bootstrap, ranks := t.mooncakeRanks(ctx); strings.Contains(t.p.Connector, "Mooncake") || t.p.Connector == "" && len(ranks) > 0 {
		t.mooncake(ctx, bootstrap, ranks)
		return
	}
	if c := t.p.Connector; c != "" && !strings.Contains(c, "Nixl") && c != "MultiConnector" {
		t.handoff.Evidence = "the connector " + c + " is not tried here"
		t.find(Warning, t.subject, "a handoff was not tried: "+t.handoff.Evidence, "")
		return
	}
	first, a := t.complete(ctx, t.p, t.subject, "the prefill leg", t.body(t.p, t.ids, `,"max_tokens":1,"kv_transfer_params":`+
		`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`), t.id)
	if first == nil {
		return
	}
	params, ok := t.transferParams(first)
	if !ok {
		return
	}
	before := t.counters(ctx)
	second, b := t.complete(ctx, t.d, t.subject, "the decode leg", t.body(t.d, t.ids, fmt.Sprintf(`,"max_tokens":%d,"kv_transfer_params":%s`, answerTokens, params)), t.id)
	if second == nil {
		return
	}
	t.legs(a.took, b.took)
	t.verdict(ctx, before, second)
	t.compare(ctx, second)
}

// transferParams checks what the prefill leg left for the decode leg, and makes that leg's field of it.
func (t *trial) transferParams(first *reply) (jsontext.Value, bool) {
	var params map[string]jsontext.Value
	if json.Unmarshal(first.Transfer, &params) != nil || !set(params["remote_engine_id"]) {
		t.moved(false, "the prefill server answered without kv_transfer_params")
		t.find(Wrong, t.subject, "silent re-prefill: "+t.handoff.Evidence+", so that decode computes every prompt again", nixlAdvice)
		return nil, false
	}
	if host := text(params["remote_host"]); (host == "localhost" || strings.HasPrefix(host, "127.")) && !sameHost(t.p.URL, t.d.URL) {
		t.find(Wrong, t.subject, "the prefill server tells decode to fetch KV from "+host+", which on another host is somebody else",
			"set VLLM_NIXL_SIDE_CHANNEL_HOST on the prefill server to its address")
	}
	if text(params["transfer_mode"]) == "push" { // with block ids the decode server would read
		delete(params, "remote_block_ids")
	}
	raw, err := json.Marshal(params, json.Deterministic(true))
	return raw, err == nil
}

func sameHost(a, b string) bool {
	u, err1 := url.Parse(a)
	v, err2 := url.Parse(b)
	return err1 == nil && err2 == nil && u.Hostname() == v.Hostname()
}

// vllmCounters are the series of a decode server that grow when KV comes from elsewhere.
var vllmCounters = []struct {
	name, label, what string
}{
	{"vllm:nixl_bytes_transferred_sum", "", "bytes"},
	{"vllm:external_prefix_cache_hits_total", "", "tokens"},
	{"vllm:prompt_tokens_by_source_total", `source="external_kv_transfer"`, "tokens"},
}

// counters looks at them; a series that is not there has no element.
func (t *trial) counters(ctx context.Context) map[string]float64 {
	a, err := t.get(ctx, t.d.URL+"/metrics")
	if err != nil || !a.ok() {
		return nil
	}
	m := readMetrics(a.body)
	found := make(map[string]float64)
	for _, c := range vllmCounters {
		var labels []string
		if c.label != "" {
			labels = append(labels, c.label)
		}
		if v, ok := m.sum(c.name, labels...); ok {
			found[c.name] = v
		}
	}
	return found
}

// verdict decides whether KV moved, by the decode server's counters or its usage.
func (t *trial) verdict(ctx context.Context, before map[string]float64, second *reply) {
	after := before
	for range 10 { // metrics follow a moment later
		after = t.counters(ctx)
		if grew := growth(before, after); grew != "" {
			t.handoff.Bytes = int64(after[vllmCounters[0].name] - before[vllmCounters[0].name])
			t.moved(true, "the decode server counted "+grew)
			t.good()
			return
		}
		if len(after) == 0 || sleep(ctx, 200*time.Millisecond) != nil {
			break
		}
	}
	_, cached := second.usage()
	switch half := t.handoff.PromptTokens / 2; {
	case cached >= half && half > 0:
		t.moved(true, fmt.Sprintf("%d of %d tokens were cached on the decode server, which had not seen the prompt", cached, t.handoff.PromptTokens))
		t.good()
	case cached >= 0 || len(after) > 0:
		t.moved(false, "the decode server counted nothing that came from elsewhere")
		t.find(Wrong, t.subject, "no KV moves: "+t.handoff.Evidence+"; it computed the prompt itself", nixlAdvice+
			"; then see its log for failed transfers (is the prefill server's side channel, port 5600, reachable?)")
	default:
		t.handoff.Evidence = "the decode server shows neither metrics nor cached tokens"
		t.find(Warning, t.subject, "both legs answer, and it cannot be told whether KV moved: "+t.handoff.Evidence, "start the decode server with --enable-prompt-tokens-details")
	}
}

// growth says which counter grew; empty for none.
func growth(before, after map[string]float64) string {
	for _, c := range vllmCounters {
		v, ok := after[c.name]
		if ok && v > before[c.name] {
			return fmt.Sprintf("%.0f %s (%s)", v-before[c.name], c.what, c.name)
		}
	}
	return ""
}

// compare lets the prefill server answer alone: what decode says must be the same, or the KV arrived damaged.
func (t *trial) compare(ctx context.Context, second *reply) {
	alone, err := t.post(ctx, t.p.URL+completions, t.body(t.p, t.ids, fmt.Sprintf(`,"max_tokens":%d`, answerTokens)), "")
	var r reply
	if err != nil || !alone.read(&r) || len(r.Choices) == 0 { // a server that only prefills
		return
	}
	if r.text() != second.text() {
		t.find(Warning, t.subject, fmt.Sprintf("after the handoff the answer is %q, without it %q", shorten(second.text()), shorten(r.text())),
			"with a random prompt near-ties may fall either way; if it happens every time, KV arrives damaged: compare dtype, block size, kv_cache_dtype and tensor parallelism of both")
	}
}

// mooncakeRanks asks where Mooncake's prefill server would be met, and which engines are there, by data-parallel rank.
func (t *trial) mooncakeRanks(ctx context.Context) (bootstrap string, engines map[string]string) {
	u, err := url.Parse(t.p.URL)
	if err != nil {
		return "", nil
	}
	bootstrap = fmt.Sprintf("http://%s:%d", bracket(u.Hostname()), t.BootstrapPort)
	var ranks map[string]struct {
		Engine string `json:"engine_id"`
	}
	if a, err := t.get(ctx, bootstrap+"/query"); err != nil || !a.read(&ranks) {
		return bootstrap, nil
	}
	engines = make(map[string]string)
	for rank, r := range ranks {
		if r.Engine != "" {
			engines[rank] = r.Engine
		}
	}
	return bootstrap, engines
}

// mooncake tries vLLM's MooncakeConnector: both legs at once, joined by a transfer id.
func (t *trial) mooncake(ctx context.Context, bootstrap string, ranks map[string]string) {
	if len(ranks) == 0 {
		t.find(Wrong, t.subject, "the prefill server's bootstrap server at "+bootstrap+" does not answer /query with its engines", "name its port by --bootstrap-port, and open it")
		return
	}
	rank := slices.Sorted(maps.Keys(ranks))[0]
	engine, _ := json.Marshal(ranks[rank]) // it came out of JSON
	before := t.counters(ctx)
	prefill := t.body(t.p, t.ids, `,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-`+t.id+`"}`)
	decode := t.body(t.d, t.ids, fmt.Sprintf(`,"max_tokens":%d,"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,`+
		`"remote_bootstrap_addr":"%s","remote_engine_id":%s,"transfer_id":"xfer-%s"}`, answerTokens, bootstrap, engine, t.id))
	if second := t.together(ctx, prefill, decode); second != nil {
		t.verdict(ctx, before, second)
	}
}

// bracket writes an IPv6 address as URLs have it.
func bracket(host string) string {
	if strings.Contains(host, ":") {
		return "[" + host + "]"
	}
	return host
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
