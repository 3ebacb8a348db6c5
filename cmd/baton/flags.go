package main

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/units"

	"baton/checkpoint"
	"baton/coordinator"
	"baton/engine"
	"baton/frontend"
	"baton/handoff"
	"baton/route"
	"baton/tensor"
	"baton/text"
	"baton/wire"
)

// modelFlags choose a model.
type modelFlags struct {
	Model           string `required:"" placeholder:"PATH" help:"Folder with config.json and safetensors, or a .gguf file."`
	ServedModelName string `placeholder:"NAME" help:"Name by which clients ask for the model. Default: the last element of --model."`
}

func (f modelFlags) name() string {
	if f.ServedModelName != "" {
		return f.ServedModelName
	}
	return filepath.Base(filepath.Clean(f.Model))
}

// kvFlags size the KV cache of an engine.
type kvFlags struct {
	BlockSize   int       `default:"32" help:"Tokens a KV block; a multiple of 16."`
	KVMemory    byteCount `name:"kv-memory" placeholder:"SIZE" help:"KV cache of each engine, such as 512MiB or 4GiB. Default: enough for --max-requests sequences of full length, at most 2GiB."`
	KVDtype     string    `name:"kv-dtype" enum:"auto,f32,bf16" default:"auto" help:"Element type of the KV cache. auto: f32 for f32 checkpoints, else bf16."`
	MaxRequests int       `default:"64" help:"Requests an engine works on at a time."`
	MaxSeqLen   int       `placeholder:"N" help:"Longest prompt plus answer, in tokens. Default: what the model was made for."`
}

// engineFlags size an engine.
type engineFlags struct {
	kvFlags
	Transfer      string `aliases:"disagg-kv-transport-backend" enum:"shm,tcp,tcp-push" default:"shm" help:"How KV moves from prefill to decode: shm (one host), tcp (decode reads), tcp-push (prefill writes)."`
	Continuation  int    `placeholder:"N" help:"KV blocks set aside for the new tokens of a request when it begins; more are taken as they are needed, and requests may have to wait or start over for them. -1: all that it may need. Default: 4, or -1 for decode engines with --http."`
	Overtake      int    `default:"0" placeholder:"N" help:"How many requests may begin before one that came earlier because they have less to compute, cached prefixes counted. Where caches are too small for all sessions, much more of them is reused. 0: first come, first served."`
	MaxTokens     int    `default:"512" help:"Tokens of one step; longer prompts are computed in chunks."`
	Threads       int    `placeholder:"N" help:"Threads that compute, per engine. Default: one a core."`
	VerifyHandoff string `enum:"off,sample,all" default:"off" help:"Compare KV with checksums that its source made, after it moved from prefill to decode: of no block, of every eighth and the last of a prompt, or of all. What arrives damaged is computed again. Engines of a coordinator must agree."`
	Logprobs      string `enum:"raw,processed" default:"raw" help:"Which distribution log-probabilities come from: the model's own, or the one that tokens are drawn from."`
}

// outputFlags say how a model writes what is not content.
type outputFlags struct {
	ToolParser      string `default:"auto" placeholder:"NAME" help:"How the model writes tool calls: hermes, qwen3_coder, llama3_json, mistral, deepseek_v3, deepseek_v4 or nemotron. auto: as its chat template shows; none: calls are left in the content."`
	ReasoningParser string `default:"auto" placeholder:"NAME" help:"How the model writes its reasoning: think (<think>) or mistral ([THINK]). auto: as its chat template shows; none: reasoning is left in the content."`
}

// AfterApply refuses a wrong name before anything is started.
func (f outputFlags) AfterApply() error {
	_, err := f.format(nil)
	return err
}

// format looks the parsers up; t may be nil.
func (f outputFlags) format(t *text.Tokenizer) (text.OutputFormat, error) {
	source := ""
	if t != nil {
		if template, err := t.Template(""); err == nil { // without a template chats are refused, one by one
			source = template.Source()
		}
	}
	format, err := text.NewOutputFormat(f.ToolParser, f.ReasoningParser, source)
	if err != nil {
		return format, fmt.Errorf("--tool-parser, --reasoning-parser: %w", err)
	}
	return format, nil
}

// frontendFlags are those of an HTTP frontend.
type frontendFlags struct {
	outputFlags
	keyFlags
	Listen string  `default:"127.0.0.1:8000" help:"Address of the HTTP frontend."`
	Seed   *uint64 `placeholder:"N" help:"Makes the random seeds of requests that bring none repeatable."`
	promptFlags
}

// promptFlags are how prompts of conversations are made.
type promptFlags struct {
	Conversations      int       `default:"4096" placeholder:"N" help:"How many turns of conversations are remembered, so that the next costs only what is new in it; 0 remembers none."`
	ConversationMemory byteCount `default:"256MiB" placeholder:"SIZE" help:"Memory for them."`
	ShadowRate         *share    `placeholder:"SHARE" help:"Share of prompts, from 0 to 1, that are made in a second way as well, to compare: as a whole, or by the engine. Default: 0; with --frontend-tokenize 0.01, and the first 3 prompts of each worker at any rate."`
}

// limits are the first two.
func (f promptFlags) limits() frontend.ConversationLimits {
	l := frontend.ConversationLimits{Entries: f.Conversations, Bytes: int64(f.ConversationMemory)}
	if l.Entries == 0 {
		l.Entries = -1
	}
	return l
}

// shadowRate is the last one.
func (f promptFlags) shadowRate(unset float64) float64 {
	if f.ShadowRate == nil {
		return unset
	}
	return float64(*f.ShadowRate)
}

// share is a number from 0 to 1.
type share float64

// UnmarshalText reads 0.25.
func (s *share) UnmarshalText(text []byte) error {
	f, err := strconv.ParseFloat(string(text), 64)
	if err != nil || !(f >= 0 && f <= 1) {
		return fmt.Errorf("%q is no share from 0 to 1, such as 0.25", text)
	}
	*s = share(f)
	return nil
}

// peerFlags are those of both ends of a connection between a coordinator and others.
type peerFlags struct {
	PeerTimeout peerTimeout `default:"1.2s" help:"How long the other end of a connection may say nothing before it is taken for dead. Less than the default must be given to all processes of the fleet alike."`
}

// peerTimeout is a duration that leaves a loaded machine the time to say something.
type peerTimeout time.Duration

// UnmarshalText reads 500ms or 5s.
func (p *peerTimeout) UnmarshalText(text []byte) error {
	const least = 100 * time.Millisecond
	d, err := time.ParseDuration(string(text))
	if err != nil || d < least {
		return fmt.Errorf("%q is no duration of %v or more, such as 500ms or 5s", text, least)
	}
	*p = peerTimeout(d)
	return nil
}

// peers adds the flags' meaning to a connection's options. This side speaks up as often as another wants that
// has the same flag, and no more rarely than one that has the default does.
func (f peerFlags) peers(o wire.Options) wire.Options {
	o.IdleTimeout = time.Duration(f.PeerTimeout)
	o.KeepAlive = min(o.IdleTimeout/4, wire.DefaultKeepAlive)
	return o
}

// coordinatorFlags tune a coordinator.
type coordinatorFlags struct {
	Routing    string `enum:"prefix,least-loaded,round-robin,session" default:"prefix" help:"How engines are chosen: ${enum}."`
	EngineWait period `default:"10s" help:"How long requests wait for an engine to come (back) when their role has none."`
	DrainWait  period `default:"30s" help:"How long an engine that leaves may take to end its requests before they move."`
}

func (f coordinatorFlags) config() (coordinator.Config, error) {
	policy, err := route.ByName(f.Routing)
	return coordinator.Config{Policy: policy, Wait: time.Duration(f.EngineWait), DrainWait: time.Duration(f.DrainWait)}, err
}

// period is a duration of more than nothing.
type period time.Duration

// UnmarshalText reads 500ms or 5s.
func (p *period) UnmarshalText(text []byte) error {
	d, err := time.ParseDuration(string(text))
	if err != nil || d <= 0 {
		return fmt.Errorf("%q is no duration of more than 0, such as 500ms or 5s", text)
	}
	*p = period(d)
	return nil
}

// byteCount is a size such as 512MiB.
type byteCount int64

// UnmarshalText reads 4096, 512MiB (powers of 1024) or 2GB (powers of 1000).
func (b *byteCount) UnmarshalText(text []byte) error {
	s := strings.TrimSpace(string(text))
	if s != "" && strings.Trim(s, "0123456789") == "" {
		s += "B"
	}
	n, err := units.ParseStrictBytes(s)
	if err != nil || n <= 0 {
		return fmt.Errorf("%q is not a size; write it as 512MiB or 4GiB", text)
	}
	*b = byteCount(n)
	return nil
}

// config is an engine's configuration but for its name and role.
func (f engineFlags) config(m modelFlags, ck *checkpoint.Checkpoint) engine.Config {
	return engine.Config{
		ServedModel: m.name(), Checkpoint: ck,
		BlockSize: f.BlockSize, Continuation: f.Continuation, Overtake: f.Overtake, KVBytes: int64(f.KVMemory), KVType: kvTypes[f.KVDtype],
		MaxRequests: f.MaxRequests, MaxTokens: f.MaxTokens, MaxSeqLen: f.MaxSeqLen,
		Threads: f.Threads, Transport: f.Transfer, Logprobs: engine.LogprobsMode(f.Logprobs),
		VerifyHandoff: handoff.Verification(f.VerifyHandoff),
	}
}

var kvTypes = map[string]tensor.DType{"auto": tensor.Invalid, "f32": tensor.F32, "bf16": tensor.BF16}
