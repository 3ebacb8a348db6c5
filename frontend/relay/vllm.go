package relay

import (
	"fmt"
	"maps"
	"slices"
)

// vLLM's connectors.
const (
	connectorNIXL     = "nixl"
	connectorMooncake = "mooncake"
)

// nixl is vLLM's NixlConnector, which reads KV from the prefill worker, and NixlPushConnector, to which the prefill
// worker writes. Which of them runs, the prefill worker's answer says.
type nixl struct{}

func (nixl) name() string      { return "vllm" }
func (nixl) together() bool    { return false }
func (nixl) mergesUsage() bool { return true } // a decode worker counts what it fetched as cached

func (nixl) advice() string {
	return `start the worker with --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'`
}

// whole: the choices of a prompt would fetch the same blocks, which the prefill worker frees after the first fetch;
// and log-probabilities of the prompt are those of whoever computes it.
func (nixl) whole(r *request) string {
	switch {
	case r.several != "":
		return r.several
	case r.body.getSet("prompt_logprobs") != nil:
		return promptLogprobs
	case string(r.body.get("echo")) == "true":
		return promptEcho
	}
	return ""
}

func (nixl) single(t *try) leg { return passOn(t, reserved...) }

// grammars constrain an answer's tokens. The one of a prefill leg is thrown away, and a grammar could let it be the end only.
var grammars = []string{"structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}

// oneToken makes the prefill leg of engines that sample a token with it, which is then thrown away.
func oneToken(t *try, params []byte, set ...assignment) leg {
	e := edit{set: set}
	e.remove(reserved...)
	e.remove("stream_options", "min_tokens", "min_completion_tokens")
	e.remove(grammars...)
	e.put("stream", []byte("false"))
	e.put("max_tokens", []byte("1"))
	if t.r.body.get("max_completion_tokens") != nil {
		e.put("max_completion_tokens", []byte("1"))
	}
	e.put("kv_transfer_params", params)
	return leg{body: e.apply(&t.r.body)}
}

func (nixl) prefill(t *try) (leg, error) {
	return oneToken(t, []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,`+
		`"remote_block_ids":null,"remote_host":null,"remote_port":null}`)), nil
}

func (nixl) read(t *try) (verdict, error) {
	raw := t.answer.top.getSet("kv_transfer_params")
	if raw == nil {
		return silent, nil
	}
	params, err := scanObject(raw)
	if err != nil {
		return 0, fmt.Errorf("its kv_transfer_params: %w", err)
	}
	if params.getSet("remote_engine_id") == nil {
		return silent, nil
	}
	return goOn, nil
}

func (nixl) decode(t *try) (leg, error) {
	raw := t.answer.top.getSet("kv_transfer_params")
	params, err := scanObject(raw)
	if err != nil {
		return leg{}, err
	}
	if string(params.get("transfer_mode")) == `"push"` {
		// With block ids the decode worker would read; without them it tells the prefill worker where to write.
		change := edit{drop: []string{"remote_block_ids"}}
		raw = change.apply(&params).join()
	}
	var e edit
	e.remove(reserved...)
	e.put("kv_transfer_params", raw)
	return leg{body: e.apply(&t.r.body)}, nil
}

// mooncake is vLLM's MooncakeConnector: both legs at once, joined by a transfer id.
type mooncake struct{ nixl }

func (mooncake) together() bool { return true }

func (mooncake) advice() string {
	return `start the worker with --kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"}'`
}

func transferID(t *try) string { return "xfer-" + requestID(t.id) }

func (mooncake) prefill(t *try) (leg, error) {
	// A prefill worker whose token happens to end the request frees the KV, and the decode worker waits for it for minutes:
	// with min_tokens it samples another token.
	l := oneToken(t, []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"`+transferID(t)+`"}`), assignment{"min_tokens", []byte{'1'}})
	if t.rank != "" {
		l.header = append(l.header, "X-data-parallel-rank: "+t.rank)
	}
	return l, nil
}

// read: the worker's answer says nothing of the transfer.
func (mooncake) read(*try) (verdict, error) { return goOn, nil }

func (mooncake) decode(t *try) (leg, error) {
	params := appendString([]byte(`{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":`), t.source.bootstrapURL())
	params = appendString(append(params, `,"remote_engine_id":`...), t.engine)
	params = appendString(append(params, `,"transfer_id":`...), transferID(t))
	var e edit
	e.remove(reserved...)
	e.put("kv_transfer_params", append(params, '}'))
	return leg{body: e.apply(&t.r.body)}, nil
}

// chooseRank picks one of the source's data-parallel ranks, in turns.
func (mooncake) chooseRank(t *try) {
	ranks := t.source.known().ranks
	names := slices.Sorted(maps.Keys(ranks))
	if len(names) == 0 {
		return
	}
	rank := names[int(t.source.turns.Add(1)%uint64(len(names)))]
	t.engine = ranks[rank]
	if len(names) > 1 {
		t.rank = rank
	}
}
