package frontend

import (
	"encoding/json"
	"fmt"
	"testing"

	"baton/wire"
)

// TestUsageIsOfBothLegs: the generation leg's usage has what the context leg's says of the prompt, cached tokens and all, and
// counts the answer from its first token; without it, what the state says (37).
func TestUsageIsOfBothLegs(t *testing.T) {
	p, _ := legServer(t, wire.RolePrefill)
	d, _ := legServer(t, wire.RoleDecode)
	ids := make([]int, 100)
	for i := range ids {
		ids[i] = 3 + i%50
	}
	b := body{"prompt": ids, "max_tokens": 5, "temperature": 0, "ignore_eos": true}
	contextLeg(t, p, completionPath, b, nil) // now its cache has the prompt
	for _, c := range []struct {
		usage body
		want  int // cached tokens; -1: as the context leg's answer
	}{
		{body{"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101, "prompt_tokens_details": body{"cached_tokens": 7}}, 7},
		{body{"prompt_tokens": 100, "prompt_tokens_details": nil}, -1},
		{nil, -1},
	} {
		for _, stream := range []bool{false, true} {
			a := contextLeg(t, p, completionPath, b, nil)
			var first struct {
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
			raw, _ := json.Marshal(a.Usage)
			if err := json.Unmarshal(raw, &first); err != nil || first.Details.Cached == 0 {
				t.Fatalf("the context leg's usage is %s, %v", raw, err)
			}
			g := a.goOn(completionPath, b)
			params := g["disaggregated_params"].(body)
			if params["ctx_usage"] = c.usage; c.usage == nil {
				delete(params, "ctx_usage")
			}
			if g["stream"] = stream; stream {
				g["stream_options"] = body{"include_usage": true}
			}
			got := post(t, d.Handler(), completionPath, g.String()).decodeEither(t, stream).Usage
			want := c.want
			if want < 0 {
				want = first.Details.Cached
			}
			if got.Details.Cached != want || fmt.Sprint(got.PromptTokens, got.CompletionTokens, got.TotalTokens) != "100 5 105" {
				t.Errorf("ctx_usage %v, stream %t: %+v, want %d cached tokens", c.usage, stream, got, want)
			}
		}
	}
}
