package main

import (
	"bytes"
	"strings"
	"testing"
)

// What inspect says of attention and of experts is what the family has.
func TestInspect(t *testing.T) {
	for model, lines := range map[string][]string{
		"qwen2":     {"attention     4 heads, 2 KV heads, head dimension 16"},
		"qwen3_moe": {"attention     8 heads, 4 KV heads, head dimension 16", "experts       2 of 8 a token, MLP 48\n"},
		"deepseek_v3": {
			"attention     8 heads of dimension 40, values 16, over a latent of 32; 48 numbers a token and layer in the cache",
			"experts       2 of 8 a token, MLP 48, shared MLP 48\n",
		},
	} {
		var out, log bytes.Buffer
		if code := runContext(t.Context(), []string{"inspect", goldenPath(model)}, &out, &log); code != 0 {
			t.Fatalf("%s: code %d, %s", model, code, &log)
		}
		for _, line := range lines {
			if !strings.Contains(out.String(), line) {
				t.Errorf("%s: no %q in\n%s", model, line, &out)
			}
		}
	}
}
