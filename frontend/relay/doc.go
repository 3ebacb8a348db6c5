// Package relay puts one OpenAI-compatible URL in front of a fleet of prefill and decode engines that already run:
// TensorRT-LLM's, vLLM's, SGLang's or our own. A request's prefill leg goes to one worker, its decode leg to another,
// and what the second sends is copied to the client.
//
// The relay owns the two legs of a request: choosing workers, retrying, merging what the legs say of usage, ending
// both when the client leaves. It never tokenizes, renders or samples, and holds no KV: a dialect tells the engines in
// their own words where to find each other's.
//
// # Bytes, not values
//
// A body is looked at once, one level deep, and never decoded: legs are made of slices of what the client sent with a
// few fields cut out and a few added. Unknown fields keep their bytes, and 63-bit ids their digits. A stream is copied as it
// comes; only an event that carries a usage object is ever looked into, and only when the legs' usages must be merged.
//
// # Retries
//
// A request is sent again until the first byte of its answer has gone to the client, never after. Every try has a new
// request id, so that state which a lost try left behind in an engine is not taken for the new one's. A worker that
// failed is passed over by the tries that follow if there is another.
//
// # Goroutines
//
// A request's goroutines end before its handler returns. Each worker has one more, which watches its health and ends
// when the worker is removed or the Server closed.
package relay
