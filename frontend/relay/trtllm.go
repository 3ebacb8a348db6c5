package relay

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
)

// Orders of TensorRT-LLM's legs.
const (
	contextFirst    = "context_first"
	generationFirst = "generation_first"
)

// trtllm is TensorRT-LLM's disaggregated_params, which our own engines take too, and an array of them. The engine forbids unknown fields,
// so nothing is added that its request models do not have.
type trtllm struct {
	schedule     string
	stripHistory bool
	// baton says that the engines are ours: they take ids as base64 at both endpoints.
	baton bool
}

func (d trtllm) name() string {
	if d.baton {
		return "baton"
	}
	return "trtllm"
}

func (d trtllm) together() bool  { return d.schedule == generationFirst }
func (trtllm) mergesUsage() bool { return false } // generation workers do, from ctx_usage

// whole: our engines take several choices in two legs too, each with what its context leg left.
func (d trtllm) whole(r *request) string {
	if d.baton {
		return ""
	}
	return r.several
}

func (d trtllm) advice() string {
	if d.baton {
		return "start the worker with --role prefill"
	}
	return "set cache_transceiver_config (its backend, such as NIXL) on the workers"
}

// rolloutFields are what NeMo-Gym's clients send for vLLM. TensorRT-LLM knows none of them.
var rolloutFields = []string{"return_tokens_as_token_ids", "return_token_ids", "required_prefix_token_ids"}

// base begins a leg's body.
func (d trtllm) base(t *try) *edit {
	e := new(edit)
	e.remove(reserved...)
	if !d.baton {
		e.remove(rolloutFields...)
	}
	if t.r.conversation != "" && !t.r.inBody {
		e.put("conversation_params", append(appendString([]byte(`{"conversation_id":`), t.r.conversation), '}'))
	}
	return e
}

func (d trtllm) single(t *try) leg {
	e := d.base(t)
	d.attach(t, e)
	return leg{body: e.apply(&t.r.body)}
}

// params begins disaggregated_params.
func (d trtllm) params(t *try, kind string) []byte {
	b := append([]byte(`{"request_type":"`), kind...)
	b = append(b, `","disagg_request_id":`...)
	b = strconv.AppendInt(b, t.id, 10)
	return d.style(b)
}

// style appends schedule_style, an enumeration: 0 is context_first.
func (d trtllm) style(b []byte) []byte {
	switch {
	case d.baton:
		return b
	case d.schedule == generationFirst:
		return append(b, `,"schedule_style":1`...)
	}
	return append(b, `,"schedule_style":0`...)
}

// idsB64 reports whether the workers exchange the prompt's ids as base64: TensorRT-LLM's completions have no field
// for it.
func (d trtllm) idsB64(t *try) bool { return t.r.chat || d.baton }

func (d trtllm) prefill(t *try) (leg, error) {
	e := d.base(t)
	e.remove("stream_options")
	e.put("stream", []byte("false"))
	params := d.params(t, "context_only")
	if d.idsB64(t) && !d.together() {
		params = append(params, `,"return_prompt_token_ids_b64":true`...)
	}
	e.put("disaggregated_params", append(params, '}'))
	d.attach(t, e)
	return leg{body: e.apply(&t.r.body)}, nil
}

func (d trtllm) read(t *try) (verdict, error) {
	if d.together() {
		return goOn, nil
	}
	means := final
	for i := range t.answer.choices {
		c := &t.answer.choices[i]
		raw := c.getSet("disaggregated_params")
		switch {
		case c.finish != "length" && c.finish != "not_finished":
			continue // it was complete with the prefill leg
		case raw == nil:
			return silent, nil
		}
		params, err := scanObject(raw)
		if err != nil {
			return 0, fmt.Errorf("its disaggregated_params: %w", err)
		}
		for _, id := range []string{"ctx_request_id", "disagg_request_id"} {
			if params.getSet(id) == nil {
				return 0, fmt.Errorf("its disaggregated_params have no %s", id)
			}
		}
		if c.finish == "not_finished" || !d.atLimit(t, &params) {
			means = goOn
		}
	}
	if n := len(t.answer.choices); n > 1 && !d.baton {
		return 0, fmt.Errorf("its answer has %d choices, and one was asked for", n)
	}
	return means, nil
}

// atLimit reports whether a choice that ended with "length" did so because no more tokens were asked for. TensorRT-LLM's
// engines say that of every prefill leg. Ours leave no state then, unless a generation leg answers for other choices too.
func (d trtllm) atLimit(t *try, params *object) bool {
	return d.baton && (len(t.answer.choices) > 1 || params.getSet("encoded_opaque_state") == nil)
}

func (d trtllm) decode(t *try) (leg, error) {
	e := d.base(t)
	if d.together() {
		params := fmt.Appendf(d.params(t, "generation_only"), `,"ctx_request_id":%d`, t.id)
		if endpoint := t.source.known().contextEndpoint; endpoint != "" {
			params = appendString(append(params, `,"ctx_info_endpoint":`...), endpoint)
		}
		e.put("disaggregated_params", append(params, '}'))
		d.attach(t, e)
		return leg{body: e.apply(&t.r.body)}, nil
	}
	if len(t.answer.choices) > 1 {
		e.put("disaggregated_params", leftovers(t.answer.choices))
		d.handOverIDs(t, e)
		return leg{body: e.apply(&t.r.body)}, nil
	}
	params, err := scanObject(t.answer.choices[0].getSet("disaggregated_params"))
	if err != nil {
		return leg{}, err
	}
	var change edit
	change.put("request_type", []byte(`"generation_only"`))
	change.remove("return_prompt_token_ids_b64")
	if t.answer.usage != nil {
		change.put("ctx_usage", t.answer.usage)
	}
	if !d.baton {
		change.put("schedule_style", []byte("0"))
	}
	e.put("disaggregated_params", change.apply(&params).join())
	d.handOverIDs(t, e)
	return leg{body: e.apply(&t.r.body)}, nil
}

// giveBack: only our engines have something for it.
func (d trtllm) giveBack(t *try) pieces {
	if !d.baton {
		return nil
	}
	return pieces{[]byte(`{"disaggregated_params":`), leftovers(t.answer.choices), []byte{'}'}}
}

// leftovers is what a prefill leg left of several choices, as it came.
func leftovers(choices []prefilledChoice) []byte {
	list := make([][]byte, len(choices))
	for i := range choices {
		if list[i] = choices[i].getSet("disaggregated_params"); list[i] == nil {
			list[i] = []byte("null")
		}
	}
	return slices.Concat([]byte{'['}, bytes.Join(list, []byte{','}), []byte{']'})
}

// handOverIDs gives the decode worker the ids that the prefill worker computed, as they came.
func (d trtllm) handOverIDs(t *try, e *edit) {
	ids, b64 := t.answer.top.getSet("prompt_token_ids"), t.answer.top.getSet("prompt_token_ids_b64")
	switch {
	case b64 != nil && d.idsB64(t):
		e.remove("prompt_token_ids")
		if !t.r.chat {
			e.remove("prompt")
		}
		e.put("prompt_token_ids_b64", b64)
	case ids == nil:
		d.attach(t, e)
		return // a prompt of ids is there already; any other is rendered again
	case t.r.chat:
		e.remove("prompt_token_ids_b64")
		e.put("prompt_token_ids", ids)
	default:
		e.put("prompt", flat(ids))
	}
	if d.stripHistory && t.r.chat {
		if messages, err := scanArray(t.r.body.get("messages"), 1<<20); err == nil && len(messages) > 1 {
			e.put("messages", append(append([]byte{'['}, messages[len(messages)-1]...), ']'))
		}
	}
}

// flat is the first list of a list of lists: completions may answer with one a prompt.
func flat(ids []byte) []byte {
	if lists, err := scanArray(ids, 1); err == nil && len(lists) == 1 && lists[0][0] == '[' {
		return lists[0]
	}
	return ids
}
