package relay

import (
	"net/http"
	"slices"
	"strconv"
	"time"
)

// What only concerns the other leg does not belong into an answer that is complete without it.
var handoverFields = []string{"disaggregated_params"}

// deliverPrefilled gives the client the prefill leg's answer: the request ended there.
func (x *exchange) deliverPrefilled(t *try) error {
	if x.r.stream {
		return x.streamPrefilled(t)
	}
	list := []byte{'['}
	for i := range t.answer.choices {
		if i > 0 {
			list = append(list, ',')
		}
		e := edit{drop: handoverFields}
		list = append(list, e.apply(&t.answer.choices[i].object).join()...)
	}
	var e edit
	e.remove("kv_transfer_params", "prompt_token_ids_b64")
	if !wantsIDs(t.r) {
		e.remove("prompt_token_ids")
	}
	e.put("choices", append(list, ']'))
	body := e.apply(&t.answer.top)
	h := x.w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(body.size()))
	x.begin(http.StatusOK)
	for _, piece := range body {
		if err := x.write(piece); err != nil {
			return err
		}
	}
	return nil
}

// wantsIDs reports whether the client asked for token ids.
func wantsIDs(r *request) bool { return string(r.body.get("return_token_ids")) == "true" }

// streamPrefilled sends the answer as the events of a stream: one a choice, one with the usage if the client wants it,
// and the end.
func (x *exchange) streamPrefilled(t *try) error {
	head := edit{drop: []string{"choices", "usage", "prompt_token_ids_b64", "kv_transfer_params"}}
	if !wantsIDs(t.r) {
		head.remove("prompt_token_ids")
	}
	if t.r.chat {
		head.put("object", []byte(`"chat.completion.chunk"`))
	}
	event := func(out []byte, choices, usage []byte) []byte {
		e := edit{drop: slices.Clone(head.drop), set: slices.Clone(head.set)}
		e.put("choices", choices)
		if usage != nil {
			e.put("usage", usage)
			e.remove("prompt_token_ids")
		}
		out = append(out, "data: "...)
		for _, piece := range e.apply(&t.answer.top) {
			out = append(out, piece...)
		}
		return append(out, "\n\n"...)
	}
	var out []byte
	for i := range t.answer.choices {
		choice, err := asDelta(&t.answer.choices[i].object)
		if err != nil {
			return err
		}
		out = event(out, append(append([]byte{'['}, choice...), ']'), nil)
	}
	if t.r.includeUsage && t.answer.usage != nil {
		out = event(out, []byte("[]"), t.answer.usage)
	}
	out = append(out, "data: [DONE]\n\n"...)
	x.beginEvents(time.Time{})
	if err := x.write(out); err != nil {
		return err
	}
	return x.flush()
}

// asDelta makes a choice of a whole answer one of a stream.
func asDelta(o *object) ([]byte, error) {
	e := edit{drop: handoverFields}
	if message := o.getSet("message"); message != nil {
		delta, err := deltaOf(message)
		if err != nil {
			return nil, err
		}
		e.remove("message")
		e.put("delta", delta)
	}
	return e.apply(o).join(), nil
}

// deltaOf is a message as a stream has it: its tool calls are numbered, and nothing stands for what there is not.
func deltaOf(message []byte) ([]byte, error) {
	o, err := scanObject(message)
	if err != nil {
		return nil, err
	}
	e := edit{drop: slices.Clone(rolloutMembers)}
	for _, name := range []string{"content", "refusal"} {
		if isNull(o.get(name)) {
			e.remove(name)
		}
	}
	calls := o.getSet("tool_calls")
	if calls == nil {
		return e.apply(&o).join(), nil
	}
	list, err := scanArray(calls, 1024)
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		e.remove("tool_calls")
		return e.apply(&o).join(), nil
	}
	numbered := []byte{'['}
	for i, raw := range list {
		call, err := scanObject(raw)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			numbered = append(numbered, ',')
		}
		var index edit
		index.put("index", strconv.AppendInt(nil, int64(i), 10))
		numbered = append(numbered, index.apply(&call).join()...)
	}
	e.put("tool_calls", append(numbered, ']'))
	return e.apply(&o).join(), nil
}

// rolloutMembers are what only whole messages have.
var rolloutMembers = []string{"prompt_token_ids", "generation_token_ids", "generation_log_probs"}
