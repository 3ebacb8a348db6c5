package main

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"baton/checkpoint"
	"baton/frontend"
	"baton/frontend/relay"
	"baton/text"
	"baton/tracing"
)

// frontendModelFlags are modelFlags, of which a relay needs none.
type frontendModelFlags struct {
	Model           string `placeholder:"PATH" help:"Folder with config.json and safetensors, or a .gguf file. Required unless the frontend relays (--prefill, --decode)."`
	ServedModelName string `placeholder:"NAME" help:"Name by which clients ask for the model. Default: the last element of --model."`
}

func (f frontendModelFlags) openText(log *slog.Logger) (*loaded, error) {
	return modelFlags(f).openText(log)
}

// relayFlags make a frontend stand before engines that are called over HTTP: no coordinator, no model files.
type relayFlags struct {
	Prefill         []string      `sep:"none" placeholder:"URL" help:"Relay: a prefill worker (again for each), as http://HOST:PORT, with #bootstrap=PORT for SGLang's and Mooncake's meeting point and #events=tcp://HOST:PORT for vLLM's KV events."`
	Decode          []string      `sep:"none" placeholder:"URL" help:"Relay: a decode worker (again for each). Without --prefill they serve whole requests."`
	Engine          string        `enum:"auto,baton,trtllm,vllm,sglang,plain" default:"auto" help:"Relay: what the workers are: ${enum}."`
	Connector       string        `enum:"auto,nixl,mooncake" default:"auto" help:"Relay: how vLLM's workers move KV: ${enum}."`
	Schedule        string        `enum:"context_first,generation_first" default:"context_first" help:"Relay: which of TensorRT-LLM's legs comes first: ${enum}."`
	PrefillRouter   string        `aliases:"ctx-router" enum:"conversation,kv_cache_aware,load_balancing,round_robin" default:"conversation" help:"Relay: how prefill workers are chosen: ${enum}."`
	DecodeRouter    string        `aliases:"gen-router" enum:"conversation,kv_cache_aware,load_balancing,round_robin" default:"load_balancing" help:"Relay: how decode workers are chosen."`
	SilentReprefill string        `enum:"serve,refuse" default:"serve" help:"Relay: what to do when a prefill worker hands nothing over: ${enum}."`
	LocalBelow      int           `name:"local-prefill-below" placeholder:"TOKENS" help:"Relay: a decode worker serves a whole request when fewer tokens of its prompt are not in its cache (vllm, trtllm; needs --decode-router kv_cache_aware)."`
	StripHistory    bool          `aliases:"gen-strip-message-history" help:"Relay: decode workers of TensorRT-LLM get only the last message of a chat beside its ids."`
	RolloutFields   bool          `help:"Relay: put token ids and log-probabilities that engines answer into the messages, where NeMo-Gym looks for them."`
	NodeID          int           `name:"node-id" default:"0" placeholder:"N" help:"Relay: 0 to 255; relays of the same engines need different ones."`
	MaxRetries      int           `default:"3" help:"Relay: how often a request is sent again when a worker fails."`
	WorkerWait      time.Duration `default:"10s" help:"Relay: how long requests wait for a worker when there is none; 0 not at all."`
	MaxBody         byteCount     `default:"64MiB" help:"Relay: the largest request."`
	MaxBodies       byteCount     `placeholder:"SIZE" help:"Relay: bytes of all requests at a time, and of their answers that are no streams; what comes beyond it gets 503. Default: 2GiB."`
	MaxAnswer       byteCount     `default:"64MiB" help:"Relay: the largest answer of a worker, streams aside."`
	LegTimeout      period        `default:"30m" help:"Relay: until a leg's answer begins."`
	StreamTimeout   period        `default:"10m" help:"Relay: between two pieces of a stream."`
	Tokenize        bool          `name:"frontend-tokenize" help:"Relay: render and encode chats here, with the tokenizer and chat template of --model (a folder without weights will do), for workers of trtllm and baton."`
	EngineKeyFile   string        `placeholder:"FILE" help:"Relay: file with the API key that workers want."`
	AdminKeyFile    string        `placeholder:"FILE" help:"Relay: file of API keys, one a line, for /workers. Without it only this host may change the pools."`
}

// defaultShadowRate is the share of prompts that engines make too, so that a template that changes on one side shows.
const defaultShadowRate = 0.01

// relaying reports whether the frontend is a relay.
func (f *relayFlags) relaying() bool { return len(f.Prefill)+len(f.Decode) > 0 }

// tokenizer makes prompts if that is asked for.
func (f *relayFlags) tokenizer(env *environment, model string, shared frontendFlags, reg *prometheus.Registry) (relay.Tokenizer, error) {
	if !f.Tokenize {
		return nil, nil
	}
	if model == "" {
		return nil, errors.New("--frontend-tokenize needs --model: the folder with the model's tokenizer and chat template, or its .gguf file")
	}
	tok, err := openTokenizer(model)
	if err != nil {
		return nil, fmt.Errorf("--model: %w", err)
	}
	if _, err := tok.Template(""); err != nil {
		return nil, fmt.Errorf("--frontend-tokenize: %w", err)
	}
	return frontend.NewPrompter(frontend.PrompterConfig{
		Tokenizer: frontend.NewTokenizer(tok), Conversations: shared.limits(), Logger: env.log, Registry: reg,
		Limits: frontend.Limits{MaxBody: int64(f.MaxBody)},
	})
}

// openTokenizer reads a model's tokenizer, not its weights.
func openTokenizer(path string) (*text.Tokenizer, error) {
	if filepath.Ext(path) != ".gguf" {
		return text.Load(path)
	}
	ck, err := checkpoint.Open(path)
	if err != nil {
		return nil, err
	}
	tok, err := text.FromGGUF(ck.GGUF())
	return tok, errors.Join(err, ck.Close())
}

// relay runs the relay.
func (f *relayFlags) relay(env *environment, sec *security, tracer *tracing.Tracer, model string, shared frontendFlags) error {
	keys, err := shared.keys()
	if err != nil {
		return err
	}
	c := relay.Config{
		Engine: f.Engine, Connector: f.Connector, Schedule: f.Schedule, PrefillRouter: f.PrefillRouter, DecodeRouter: f.DecodeRouter,
		SilentReprefill: relay.SilentPolicy(f.SilentReprefill), LocalPrefillBelow: f.LocalBelow, StripHistory: f.StripHistory, RolloutFields: f.RolloutFields, NodeID: f.NodeID,
		MaxRetries: f.MaxRetries, WorkerWait: f.WorkerWait, Logger: env.log, Registry: newRegistry(), TLS: sec.id.Client(), Insecure: sec.insecure,
		Limits:   relay.Limits{MaxBody: int64(f.MaxBody), MaxBodies: int64(f.MaxBodies), MaxAnswer: int64(f.MaxAnswer)},
		Timeouts: relay.Timeouts{Leg: time.Duration(f.LegTimeout), Stream: time.Duration(f.StreamTimeout)},
	}
	c.ShadowRate, c.Tracer = shared.shadowRate(defaultShadowRate), tracer
	if c.Tokenizer, err = f.tokenizer(env, model, shared, c.Registry); err != nil {
		return err
	}
	if c.MaxRetries == 0 {
		c.MaxRetries = -1
	}
	if c.WorkerWait == 0 {
		c.WorkerWait = -1
	}
	if c.Prefill, err = relayWorkers(sec, "--prefill", f.Prefill); err != nil {
		return err
	}
	if c.Decode, err = relayWorkers(sec, "--decode", f.Decode); err != nil {
		return err
	}
	if c.EngineKey, err = engineKey(f.EngineKeyFile); err != nil {
		return err
	}
	if keys.Required() {
		c.Authorize = keys.Permit
	}
	if f.AdminKeyFile != "" {
		admins, err := frontend.ReadAPIKeys(f.AdminKeyFile)
		if err != nil {
			return fmt.Errorf("--admin-key-file: %w", err)
		}
		c.AuthorizeAdmin = admins.Permit
	}
	listener, at, err := sec.listenHTTP("--listen", shared.Listen)
	if err != nil {
		return err
	}
	defer listener.Close()
	server, err := relay.New(c)
	if err != nil {
		return namesFlag(err)
	}
	env.started()
	fmt.Fprintf(env.stdout, "frontend at %s\n", at)
	return server.Run(env.ctx, listener)
}

// relayWorkers reads the URLs of a flag.
func relayWorkers(sec *security, flag string, list []string) (workers []relay.Worker, err error) {
	for _, text := range list {
		w, err := relay.ParseWorker(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
		u, err := url.Parse(w.URL)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
		if u.Scheme == "http" && !sec.insecure && !isLoopback(u.Host) {
			return nil, fmt.Errorf("%s %s reaches beyond this host without TLS: name the worker by https://, or allow it by --insecure", flag, w.URL)
		}
		workers = append(workers, w)
	}
	return workers, nil
}

// engineKey reads a file with one key.
func engineKey(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("--engine-key-file: %w", err)
	}
	key := bytes.TrimSpace(raw)
	if len(key) == 0 || len(key) > 4096 || bytes.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("--engine-key-file %s: one key is wanted, of ASCII characters without spaces", path)
	}
	return string(key), nil
}

// errNoModel is for frontends that are no relay.
var errNoModel = errors.New("missing flags: --model=PATH (or --prefill and --decode, to relay to engines that run)")
