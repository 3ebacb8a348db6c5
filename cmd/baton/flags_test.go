package main

import (
	"bytes"
	"strings"
	"testing"
)

// What a command line cannot mean is refused in words, before anything is loaded.
func TestRefusedCommandLines(t *testing.T) {
	for _, tc := range []struct {
		args string
		code int
		says string
	}{
		{"", 2, "expected one of"},
		{"serve", 2, "--model"},
		{"serve --model x --transfer pigeon", 2, "--transfer"},
		{"serve --model x --kv-memory lots", 2, "is not a size"},
		{"serve --model x --shards dp=2,role=prefill", 1, "role"},
		{"serve --model " + goldenPath("qwen3") + " --shards dp=4000 --listen 127.0.0.1:0", 1, "at most 64"},
		{"serve --model " + goldenPath("qwen3") + " --shards tp=3 --listen 127.0.0.1:0", 1, "8 attention heads over 3 ranks"},
		{"serve --model nowhere --listen 127.0.0.1:0", 1, "nowhere"},
		{"engine --model x --shard=dp=4096", 1, "at most 64 ranks"},
		{"engine --model x --role cook", 2, "--role"},
	} {
		var out, log bytes.Buffer
		args := strings.Fields(tc.args)
		if code := runContext(t.Context(), args, &out, &log); code != tc.code || !strings.Contains(log.String(), tc.says) {
			t.Errorf("baton %s: code %d, %q; want %d and %q", tc.args, code, log.String(), tc.code, tc.says)
		}
	}
}
