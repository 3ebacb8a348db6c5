package frontend

import "baton/wire"

// The objects that answers are made of. Everything is appended to a buffer by hand: a chunk costs a few
// microseconds, and f32 values keep their shortest form.

// object names an answer or one chunk of it.
func (a *answer) object() string {
	switch {
	case !a.chat:
		return "text_completion"
	case a.stream:
		return "chat.completion.chunk"
	default:
		return "chat.completion"
	}
}

// appendHead appends an object's members up to the array of choices, without its elements.
func (a *answer) appendHead(b []byte) []byte {
	b = append(b, `{"id":`...)
	b = appendString(b, a.id)
	b = append(b, `,"object":"`...)
	b = append(b, a.object()...)
	b = append(b, `","created":`...)
	b = appendInt(b, a.created)
	b = append(b, `,"model":`...)
	b = appendString(b, a.model)
	return append(b, `,"choices":[`...)
}

// appendWhole appends the answer to a request that does not stream.
func (a *answer) appendWhole(b []byte) []byte {
	b = a.appendHead(b)
	for i, c := range a.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"index":`...)
		b = appendInt(b, c.index)
		if a.chat {
			b = append(b, `,"message":{"role":"assistant"`...)
			b = append(c.pending.appendMembers(b, false), `,"refusal":null`...)
			b = append(a.appendRollout(b, c), '}')
		} else {
			b = append(b, `,"text":`...)
			b = appendString(b, c.pending.text)
		}
		b = a.appendDetails(b, c)
		b = append(b, '}')
	}
	b = append(b, `],"usage":`...)
	b = a.usage().append(b)
	b = a.appendPrompt(b, a.choices[0])
	b = a.appendLegPrompt(b)
	return append(b, '}')
}

// appendRole appends the first chunk of a chat choice.
func (a *answer) appendRole(b []byte, c *choice) []byte {
	b = append(b, `{"index":`...)
	b = appendInt(b, c.index)
	b = append(b, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
	b = a.appendPrompt(b, c)
	return append(a.appendChunkUsage(b), '}')
}

// appendChunk appends what follows the head in a chunk with c's pending piece.
func (a *answer) appendChunk(b []byte, c *choice) []byte {
	b = append(b, `{"index":`...)
	b = appendInt(b, c.index)
	if a.chat {
		b = append(b, `,"delta":{`...)
		b = append(c.pending.appendMembers(b, true), '}')
	} else {
		b = append(b, `,"text":`...)
		b = appendString(b, c.pending.text)
	}
	b = a.appendDetails(b, c)
	b = append(b, "}]"...)
	if !a.chat && !c.announced {
		b = a.appendPrompt(b, c)
	}
	return append(a.appendChunkUsage(b), '}')
}

// appendMembers appends what a message, or a delta of one, is made of. A whole message has content always: null beside
// tool calls when there is none.
func (p *piece) appendMembers(b []byte, delta bool) []byte {
	member := func(name string) {
		if b[len(b)-1] != '{' {
			b = append(b, ',')
		}
		b = append(append(append(b, '"'), name...), `":`...)
	}
	if len(p.reasoning) > 0 {
		member("reasoning_content")
		b = appendString(b, p.reasoning)
	}
	switch {
	case len(p.text) > 0:
		member("content")
		b = appendString(b, p.text)
	case !delta && len(p.calls) > 0:
		member("content")
		b = append(b, "null"...)
	case !delta:
		member("content")
		b = append(b, `""`...)
	}
	if len(p.calls) == 0 {
		return b
	}
	member("tool_calls")
	b = append(b, '[')
	for i := range p.calls {
		call := &p.calls[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, '{')
		if delta {
			member("index")
			b = appendInt(b, call.Index)
		}
		member("id")
		b = appendString(b, call.ID)
		b = append(b, `,"type":"function","function":{"name":`...)
		b = appendString(b, call.Name)
		b = append(b, `,"arguments":`...)
		b = append(appendString(b, call.Arguments), "}}"...)
	}
	return append(b, ']')
}

// appendDetails appends what a choice has beside its text.
func (a *answer) appendDetails(b []byte, c *choice) []byte {
	b = append(b, `,"logprobs":`...)
	switch {
	case !a.sampling.Logprobs || a.stream && len(c.pending.logprobs) == 0:
		b = append(b, "null"...)
	case a.chat:
		b = a.appendChatLogprobs(b, a.tok, c.pending.logprobs)
	default:
		b = a.appendLegacyLogprobs(b, a.tok, c.pending.logprobs)
	}
	b = append(b, `,"finish_reason":`...)
	b = appendStringOrNull(b, c.finish)
	if c.finish != "" {
		b = append(b, `,"stop_reason":`...)
		if c.stopToken >= 0 {
			b = appendInt(b, c.stopToken)
		} else {
			b = appendStringOrNull(b, c.stopString)
		}
	}
	if a.returnTokenIDs {
		b = append(b, `,"token_ids":`...)
		b = appendIDs(b, c.pending.ids)
	}
	if !a.chat && !c.announced {
		b = a.appendPromptDetails(b, c)
	}
	b = a.appendLeg(b, c)
	if a.returnHandoff && c.finish != "" {
		b = append(b, `,"handoff":`...)
		b = appendHandoff(b, c.stats, c.complete)
	}
	return b
}

// appendPromptDetails appends the members that describe a prompt.
func (a *answer) appendPromptDetails(b []byte, c *choice) []byte {
	if a.returnTokenIDs {
		b = append(b, `,"prompt_token_ids":`...)
		b = appendIDs(b, c.prompt.ids)
	}
	if a.promptLogprobs >= 0 {
		b = append(b, `,"prompt_logprobs":`...)
		b = a.appendPromptLogprobs(b, a.tok, c.promptLogprobs)
	}
	return b
}

// appendPrompt appends the prompt's members to the answer itself: all of them in chat, which has one
// prompt; for a single prompt of /v1/completions its ids, beside those of each choice.
func (a *answer) appendPrompt(b []byte, c *choice) []byte {
	switch {
	case a.chat:
		return a.appendPromptDetails(b, c)
	case a.single && a.returnTokenIDs:
		b = append(b, `,"prompt_token_ids":`...)
		return appendIDs(b, c.prompt.ids)
	}
	return b
}

// appendChunkUsage appends what stream_options asks of every chunk.
func (a *answer) appendChunkUsage(b []byte) []byte {
	switch {
	case a.continuousUsage:
		return a.usage().append(append(b, `,"usage":`...))
	case a.includeUsage:
		return append(b, `,"usage":null`...)
	}
	return b
}

func (u usage) append(b []byte) []byte {
	b = append(b, `{"prompt_tokens":`...)
	b = appendInt(b, u.prompt)
	b = append(b, `,"completion_tokens":`...)
	b = appendInt(b, u.completion)
	b = append(b, `,"total_tokens":`...)
	b = appendInt(b, u.prompt+u.completion)
	b = append(b, `,"prompt_tokens_details":{"cached_tokens":`...)
	b = appendInt(b, u.cached)
	return append(b, "}}"...)
}

// appendHandoff appends what a request's legs did. A request that one engine ran has the same engine
// twice and moved nothing. When a stop string ended it, the last leg's report is not waited for: complete
// is false and its members are null.
func appendHandoff(b []byte, legs []wire.Stats, complete bool) []byte {
	if len(legs) == 0 {
		return append(b, "null"...)
	}
	prefill, decode := legs[0], legs[len(legs)-1]
	text := func(name, v string) { b = appendString(append(b, name...), v) }
	count := func(name string, n int64) { b = appendInt(append(b, name...), n) }
	millis := func(name string, seconds float64) { b = appendFloat32(append(b, name...), float32(1000*seconds)) }

	text(`{"prefill_engine":`, prefill.Engine)
	count(`,"prompt_computed":`, int64(prefill.PromptComputed))
	millis(`,"queue_ms":`, prefill.Queue)
	millis(`,"prefill_ms":`, prefill.Prefill)
	if !complete && len(legs) == 1 {
		return append(b, `,"decode_engine":null,"blocks_moved":null,"blocks_reused":null,"bytes_moved":null,`+
			`"handoff_ms":null,"transfer_ms":null,"decode_ms":null}`...)
	}
	text(`,"decode_engine":`, decode.Engine)
	count(`,"blocks_moved":`, int64(decode.BlocksMoved))
	count(`,"blocks_reused":`, int64(decode.BlocksReused))
	count(`,"bytes_moved":`, decode.BytesMoved)
	millis(`,"handoff_ms":`, decode.Handoff)
	millis(`,"transfer_ms":`, decode.Transfer)
	millis(`,"decode_ms":`, decode.Decode)
	return append(b, '}')
}
