// Package doctor looks at servers that speak OpenAI's HTTP API and says what they are, how they are configured for
// handing KV from prefill to decode, and whether they do: Baton, vLLM, SGLang, TensorRT-LLM, llama.cpp, and whatever else answers.
//
// It asks the endpoints that each kind has, sends a few small requests, and compares what the servers counted before and
// after. A pair of a prefill and a decode server gets one request the way a relay would send it. What it finds is a list of
// findings, each of which says what to do about it.
//
// It changes nothing, and believes nobody: answers are bounded in size and in time, and what is printed of them is short.
package doctor
