package doctor

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"time"
)

// trial is the examination of one pair.
type trial struct {
	*examination
	p, d    *Server
	subject string
	handoff *Handoff
	ids     []byte
	id      string // of the request
	number  int64  // of the request, below 2^63 and above 2^40
}

// pair tries a handoff between two servers.
func (x *examination) pair(ctx context.Context, p, d *Server) {
	t := &trial{examination: x, p: p, d: d, subject: p.URL + " -> " + d.URL, handoff: &Handoff{Prefill: p.URL, Decode: d.URL}}
	if !t.matches() {
		return
	}
	n := x.promptTokens(p, d)
	t.ids, t.handoff.PromptTokens = prompt(n), n
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	t.number = int64(binary.LittleEndian.Uint64(b[:])>>2 | 1<<40)
	t.id = "baton-doctor-" + hex.EncodeToString(b[:])
	x.report.Handoffs = append(x.report.Handoffs, t.handoff)
	switch p.Engine {
	case VLLM:
		t.vllm(ctx)
	case SGLang:
		t.sglang(ctx)
	case TRTLLM, Baton:
		t.trtllm(ctx)
	default:
		t.handoff.Evidence = "it is not known how these servers hand over"
		x.find(Warning, t.subject, "a handoff cannot be tried: "+t.handoff.Evidence, "")
	}
}

// matches compares the two, and tells whether a try makes sense.
func (t *trial) matches() bool {
	p, d := t.p, t.d
	if p.Engine != d.Engine {
		t.find(Wrong, t.subject, fmt.Sprintf("one is %s, the other %s: they cannot hand over to each other", p.Engine, d.Engine), "pair servers of one kind")
		return false
	}
	if p.Model != d.Model && t.Model == "" {
		t.find(Wrong, t.subject, fmt.Sprintf("one serves %q, the other %q: a request names one model", p.Model, d.Model), "give both the same --served-model-name")
		return false
	}
	if p.Version != d.Version && p.Version != "" && d.Version != "" {
		t.find(Warning, t.subject, fmt.Sprintf("versions differ: %s and %s; how KV moves may too", p.Version, d.Version), "run the same version on both")
	}
	if p.Context != d.Context && p.Context > 0 && d.Context > 0 {
		t.find(Warning, t.subject, fmt.Sprintf("context lengths differ: %d and %d; longer requests fail on the second leg", p.Context, d.Context), "give both the same length")
	}
	if p.Connector != d.Connector && p.Connector != "" && d.Connector != "" {
		t.find(Wrong, t.subject, fmt.Sprintf("connectors differ: %s and %s", p.Connector, d.Connector), "configure the same on both")
		return false
	}
	return t.matchesOurs()
}

// matchesOurs compares what engines of ours say beyond that; those of others say nothing.
func (t *trial) matchesOurs() bool {
	if t.p.Engine != Baton {
		return true
	}
	for _, f := range []struct{ name, what, do string }{
		{"fingerprint", "weights", "serve the same --model on both"},
		{"state_format", "formats of the state that is handed over", "run the same version on both"},
		{"block_size", "block sizes", "give both the same --block-size"},
		{"kv_dtype", "KV types", "give both the same --kv-dtype"},
	} {
		p, d := t.p.info[f.name], t.d.info[f.name]
		if set(p) && set(d) && string(p) != string(d) {
			t.find(Wrong, t.subject, fmt.Sprintf("%s differ: %s and %s", f.what, shorten(string(p)), shorten(string(d))), f.do)
			return false
		}
	}
	return true
}

func (t *trial) moved(yes bool, evidence string) {
	t.handoff.Moved, t.handoff.Evidence = &yes, evidence
}

func (t *trial) legs(prefill, decode time.Duration) {
	t.handoff.PrefillMS, t.handoff.DecodeMS = float64(prefill.Microseconds())/1000, float64(decode.Microseconds())/1000
}

// good is the finding of a handoff that works.
func (t *trial) good() {
	text := fmt.Sprintf("KV moves: %s (prompt of %d tokens, legs of %.0f and %.0f ms)", t.handoff.Evidence, t.handoff.PromptTokens, t.handoff.PrefillMS, t.handoff.DecodeMS)
	t.find(OK, t.subject, text, "")
}
