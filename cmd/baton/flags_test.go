package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"baton/wire"
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
		{"serve --model x --tool-parser magic", 2, "--tool-parser"},
		{"serve --model x --shards dp=2,role=prefill", 1, "role"},
		{"serve --model " + goldenPath("qwen3") + " --shards dp=4000 --listen 127.0.0.1:0", 1, "at most 64"},
		{"serve --model " + goldenPath("qwen3") + " --shards tp=3 --listen 127.0.0.1:0", 1, "8 attention heads over 3 ranks"},
		{"inspect " + goldenPath("qwen3") + " --shards dp=4000", 1, "at most 1024"},
		{"inspect " + goldenPath("qwen3") + " --shards tp=3", 1, "8 attention heads over 3 ranks"},
		{"serve --model nowhere --listen 127.0.0.1:0", 1, "nowhere"},
		{"serve --model x --listen foo", 1, "--listen foo is not an address: write HOST:PORT"},
		{"serve --model x --listen 127.0.0.1:http:80", 1, "is not an address"},
		{"serve --model x --listen 127.0.0.1:port", 1, "is not an address"},
		{"serve --model x --listen 1.2.3.4:80", 1, "--insecure"},
		{"coordinator --listen foo", 1, "--listen foo is not an address"},
		{"coordinator --listen 127.0.0.1:0 --metrics 9090", 1, "--metrics 9090 is not an address"},
		{"coordinator --engine-wait=-5s", 2, "--engine-wait"},
		{"coordinator --drain-wait=0s", 2, "is no duration of more than 0"},
		{"frontend --model " + goldenPath("qwen3") + " --listen 127.0.0.1:0 --api-key-file nowhere", 1, "--api-key-file"},
		{"engine --model x --role prefill --transfer tcp --transfer-host 127.0.0.1:80", 1, "is not a host"},
		{"coordinator --peer-timeout 1ms", 2, "is no duration of 100ms or more"},
		{"frontend --model x --coordinator foo", 1, "--coordinator foo is not an address"},
		{"frontend --model x --tool-parser magic", 2, "--tool-parser"},
		{"frontend --model x --peer-timeout 0", 2, "--peer-timeout"},
		{"engine --model x --coordinator foo", 1, "--coordinator foo is not an address"},
		{"engine --model x --shard=dp=4096", 1, "must be one shard of at most"},
		{"engine --model x --role cook", 2, "--role"},
		{"engine --model " + goldenPath("qwen3") + " --block-size 20", 1, "--block-size is 20; it must be a multiple of 16"},
		{"engine --model " + goldenPath("qwen3") + " --max-seq-len 1", 1, "--max-seq-len is 1; the model serves 2 to 4096"},
		{"engine --model " + goldenPath("qwen3") + " --threads=-1", 1, "--threads is -1; it must be 1 or more"},
	} {
		var out, log bytes.Buffer
		args := strings.Fields(tc.args)
		if code := runContext(t.Context(), args, &out, &log); code != tc.code || !strings.Contains(log.String(), tc.says) {
			t.Errorf("baton %s: code %d, %q; want %d and %q", tc.args, code, log.String(), tc.code, tc.says)
		}
	}
}

// Help names what holds without a flag.
func TestHelpNamesDefaults(t *testing.T) {
	for args, says := range map[string]string{
		"engine --help":   "Address of the coordinator. Default: 127.0.0.1:7000.",
		"frontend --help": "Address of the coordinator. Default: 127.0.0.1:7000.",
		"certs --help":    "Default: certs.",
		"--help":          "Default: info.",
	} {
		var out bytes.Buffer
		code := runContext(t.Context(), strings.Fields(args), &out, &out)
		if text := strings.Join(strings.Fields(out.String()), " "); code != 0 || !strings.Contains(text, says) {
			t.Errorf("baton %s: code %d, without %q:\n%s", args, code, says, &out)
		}
	}
}

// Whoever waits less must be spoken to more often; whoever waits longer need not be spoken to more rarely.
func TestPeerTimeout(t *testing.T) {
	for text, alive := range map[string]time.Duration{"1.2s": 300 * time.Millisecond, "10s": 300 * time.Millisecond, "400ms": 100 * time.Millisecond} {
		var f peerFlags
		if err := f.PeerTimeout.UnmarshalText([]byte(text)); err != nil {
			t.Fatal(err)
		}
		o := f.peers(wire.Options{MaxFrame: 7})
		if o.IdleTimeout.String() != text || o.KeepAlive != alive || o.MaxFrame != 7 {
			t.Errorf("--peer-timeout %s: %+v", text, o)
		}
	}
}
