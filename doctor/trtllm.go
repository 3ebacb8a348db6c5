package doctor

import (
	"context"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
)

// trtllm tries TensorRT-LLM's disaggregated_params, context first. Our own engines take them too.
func (t *trial) trtllm(ctx context.Context) {
	what := "set cache_transceiver_config (such as backend: NIXL) in the configuration of both servers"
	extra := ""
	if t.p.Engine == Baton {
		what = "run the engines with --role prefill and --role decode, and --http"
		extra = `,"return_handoff":true`
	}
	length := fmt.Sprintf(`,"max_tokens":%d`, answerTokens)
	first, a := t.complete(ctx, t.p, t.subject, "the context leg", t.body(t.p, t.ids, length+
		fmt.Sprintf(`,"disaggregated_params":{"request_type":"context_only","disagg_request_id":%d}`, t.number)), t.id)
	if first == nil {
		return
	}
	choice := first.Choices[0]
	var params map[string]jsontext.Value
	switch {
	case choice.Finish != "length" && choice.Finish != "not_finished":
		t.handoff.Evidence = "the answer ended with its first token"
		t.find(Warning, t.subject, "a handoff could not be tried: "+t.handoff.Evidence+" ("+shorten(choice.Finish)+")", "try again: prompts are random")
		return
	case json.Unmarshal(choice.Params, &params) != nil || !set(params["ctx_request_id"]):
		t.moved(false, "the context leg was answered without disaggregated_params")
		t.find(Wrong, t.subject, "no KV can move: "+t.handoff.Evidence, what)
		return
	case text(params["encoded_opaque_state"]) == "":
		t.moved(false, "the context leg's disaggregated_params have no encoded_opaque_state")
		t.find(Wrong, t.subject, "no KV can move: "+t.handoff.Evidence, what)
		return
	}
	params["request_type"] = jsontext.Value(`"generation_only"`)
	if set(first.Usage) {
		params["ctx_usage"] = first.Usage
	}
	raw, err := json.Marshal(params, json.Deterministic(true))
	if err != nil {
		return
	}
	second, b := t.complete(ctx, t.d, t.subject, "the generation leg", t.body(t.d, t.ids, length+extra+`,"disaggregated_params":`+string(raw)), t.id)
	if second == nil {
		return
	}
	t.legs(a.took, b.took)
	evidence := "the generation leg answered, and computes no prompts"
	if h := second.Choices[0].Handoff; h != nil {
		t.handoff.Bytes = h.Bytes
		evidence = fmt.Sprintf("the decode engine reports %d blocks moved, %d reused", h.Moved, h.Reused)
		if h.Moved == 0 {
			t.moved(false, evidence)
			t.find(Wrong, t.subject, "no KV moves: "+evidence+", though the prompt was new", "see the decode engine's log")
			return
		}
	}
	t.moved(true, evidence)
	t.good()
}
