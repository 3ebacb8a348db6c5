// Package frontend serves the OpenAI HTTP interface: it turns text into tokens, hands requests to a
// Backend, and turns the tokens that come back into text, whole or as server-sent events.
//
// The server owns the HTTP side of a request: decoding and checking it, the n choices of each prompt,
// detokenizing, stop strings, the JSON of the answer, cancellation when the client goes away. It never
// samples, schedules or routes: those are the backend's. A request's goroutines are owned by its handler
// and end before the handler returns.
//
// # Rules that the wire formats of OpenAI and vLLM leave open
//
//   - Stop strings are matched on text, across tokens. The text ends before the match (after it with
//     include_stop_str_in_output). Token ids and logprobs end with the token that completed the match,
//     so they are what the model sampled up to the decision to stop; later tokens of the same step are
//     dropped and not counted. The text of the first min_tokens tokens is never matched.
//   - An end-of-sequence or stop id is the last of token_ids and logprobs and is counted; its text is
//     left out unless include_stop_str_in_output.
//   - Without a tokenizer, prompts are token ids, the token string of id N is "token_id:N", and text is
//     the token strings joined without a separator. Chat, text prompts and stop strings are refused.
//   - A missing seed is drawn at random once a prompt; choice i of a prompt is choice i of that seed, so
//     each choice equals what n = i+1 would give for it.
//   - cached_tokens is the least over a prompt's choices: what was cached before the request came.
//   - text_offset counts Unicode code points.
//   - A stream's headers are sent with its first result, so that whatever fails earlier has its proper
//     status. Later failures are one SSE error object, without [DONE].
package frontend
