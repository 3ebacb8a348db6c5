package relay

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"baton/route"
	"baton/tracing"
)

// Config says what fleet to stand before. Everything has a default.
type Config struct {
	// Prefill and Decode are the workers that are known from the start. While there is no prefill worker in the fleet,
	// well or not, decode workers serve whole requests.
	Prefill, Decode []Worker
	// Engine is what the workers are: one of Engines. "" and "auto" ask them.
	Engine string
	// Connector is how vLLM engines move KV: "nixl" (pull or push: the engines say which), "mooncake", or "auto".
	Connector string
	// Schedule is the order of TensorRT-LLM's legs: "context_first" (the default) or "generation_first".
	Schedule string
	// PrefillRouter and DecodeRouter choose workers: one of route.RouterNames. The defaults are conversation and
	// load_balancing.
	PrefillRouter, DecodeRouter string
	// SilentReprefill is what happens to a request whose prefill worker answers without anything that a decode worker
	// could take over: Serve lets a decode worker compute the prompt once more, Refuse fails the request.
	SilentReprefill SilentPolicy
	// LocalPrefillBelow lets a decode worker serve a whole request when less than so many tokens of its prompt are not in
	// its cache, by what it reports; 0 never does. The decode router must be kv_cache_aware, the engines able to.
	LocalPrefillBelow int
	// StripHistory sends TensorRT-LLM's decode workers only the last message of a chat: the ids hold all of it.
	StripHistory bool
	// RolloutFields puts token ids and log-probabilities into the messages of chat answers that have them elsewhere,
	// where NeMo-Gym looks first.
	RolloutFields bool
	// Tokenizer renders and encodes chats here, for engines that take ids beside messages (TensorRT-LLM's and our own); nil
	// leaves it to them.
	Tokenizer Tokenizer
	// ShadowRate is the share of these, from 0 to 1, whose ids are not sent but compared with the engine's own.
	ShadowRate float64
	// ShadowFirst is how many prompts of each worker are compared whatever the rate, after it has joined or made other ids
	// (default 3; negative for none).
	ShadowFirst int
	// NodeID tells this relay's request ids from those of other relays of the same engines: 0 to 255.
	NodeID int
	// MaxRetries is how often a request is sent again after a failure (default 3; negative for never).
	MaxRetries int
	// WorkerWait is how long a request waits for a worker when its leg has none (default 10 s; negative for not at all).
	WorkerWait time.Duration

	Limits   Limits
	Timeouts Timeouts

	// TLS is the trust for https workers; nil is the system's. Its certificates are shown to workers that ask.
	TLS *tls.Config
	// Insecure allows workers of http:// beyond this host.
	Insecure bool
	// EngineKey is sent to workers as their bearer token, in place of what clients send.
	EngineKey string
	// Authorize checks a client's request; nil lets everybody in. /health and /metrics are not checked.
	Authorize func(*http.Request) bool
	// AuthorizeAdmin checks requests that see or change the pools; nil lets this host's processes in, but not what comes
	// through proxies and browsers.
	AuthorizeAdmin func(*http.Request) bool
	// Logger gets a line a request; nil discards them.
	Logger *slog.Logger
	// Tracer gets a span a request and one a leg, which engines are told of; nil makes none.
	Tracer *tracing.Tracer
	// Registry gets the metrics and is what /metrics shows; nil makes one.
	Registry *prometheus.Registry
}

// ConfigError says what is wrong with a field of a Config.
type ConfigError struct {
	Field string
	Err   error
}

func (e *ConfigError) Error() string { return "relay: Config." + e.Field + ": " + e.Err.Error() }

// Unwrap gives the cause.
func (e *ConfigError) Unwrap() error { return e.Err }

func misconfigured(field, format string, args ...any) error {
	return &ConfigError{field, fmt.Errorf(format, args...)}
}

// SilentPolicy is what to do about silent re-prefills.
type SilentPolicy string

// The policies.
const (
	Serve  SilentPolicy = "serve"
	Refuse SilentPolicy = "refuse"
)

// Limits bound what clients and workers may send.
type Limits struct {
	MaxBody   int64 // bytes of a request; default 64 MiB
	MaxBodies int64 // bytes of all requests at a time, and of their answers that are not streams; default 2 GiB, or MaxBody if that is more
	MaxAnswer int64 // bytes of an answer that is not a stream; default 64 MiB
	MaxHeader int   // bytes of a request's headers; default 64 KiB
}

// Timeouts bound waiting.
type Timeouts struct {
	Connect time.Duration // to a worker; default 3 s
	Leg     time.Duration // until a leg's answer begins, or is there if it is not a stream; default 30 min
	Stream  time.Duration // between two pieces of a stream; default 10 min
	Read    time.Duration // of a client's request; default 60 s
	Write   time.Duration // while a client reads nothing; default 60 s
	Idle    time.Duration // that an unused connection to a worker is kept; default 4 s, as uvicorn closes after 5
	Drain   time.Duration // for running requests when Run ends; default 30 s
}

// Engines are the values of Config.Engine.
var Engines = []string{"auto", "baton", "trtllm", "vllm", "sglang", "plain"}

// Worker is one engine's address and what must be known of it beyond.
type Worker struct {
	URL string // http://HOST:PORT, perhaps with a path before /v1
	// BootstrapPort is where SGLang's and Mooncake's prefill workers meet decode workers (default 8998).
	BootstrapPort int
	// Events is where KV events come from, for kv_cache_aware: a ZMQ address as vLLM publishes them
	// (tcp://HOST:5557), or "http" for POST /kv_cache_events.
	Events string
	// Replay is the ZMQ address where missed events can be asked for; "" is one port above Events, or none with several
	// ranks.
	Replay string
	// Ranks are vLLM's data-parallel ranks (default 1): each publishes and replays one port above the one before it.
	Ranks int
}

// DefaultBootstrapPort is SGLang's and Mooncake's.
const DefaultBootstrapPort = 8998

// ParseWorker reads a worker as flags and POST /workers give it: its URL, and after a # what else is known, as in
// http://10.0.0.7:8000#bootstrap=8998&events=tcp://10.0.0.7:5557.
func ParseWorker(text string) (Worker, error) {
	base, extra, _ := strings.Cut(text, "#")
	w := Worker{URL: strings.TrimRight(base, "/")}
	if _, err := parseBase(w.URL); err != nil {
		return w, err
	}
	values, err := url.ParseQuery(extra)
	if err != nil {
		return w, fmt.Errorf("worker %q: after #: %w", text, err)
	}
	for name, list := range values {
		value := list[len(list)-1]
		switch name {
		case "bootstrap":
			if w.BootstrapPort, err = strconv.Atoi(value); err != nil || w.BootstrapPort < 1 || w.BootstrapPort > 65535 {
				return w, fmt.Errorf("worker %q: bootstrap=%s is not a port", text, value)
			}
		case "events":
			w.Events = value
		case "replay":
			w.Replay = value
		case "ranks":
			if w.Ranks, err = strconv.Atoi(value); err != nil {
				return w, fmt.Errorf("worker %q: ranks=%s is not a number", text, value)
			}
		default:
			return w, fmt.Errorf("worker %q: no setting %q; there are bootstrap, events, replay and ranks", text, name)
		}
	}
	return w, nil
}

func (c *Config) setDefaults() error {
	def := func(v *string, d string) {
		if *v == "" {
			*v = d
		}
	}
	def(&c.Engine, "auto")
	def(&c.Connector, "auto")
	def(&c.Schedule, contextFirst)
	def(&c.PrefillRouter, "conversation")
	def(&c.DecodeRouter, "load_balancing")
	def((*string)(&c.SilentReprefill), string(Serve))
	for _, choice := range []struct {
		field, value string
		of           []string
	}{
		{"Engine", c.Engine, Engines},
		{"Connector", c.Connector, []string{"auto", connectorNIXL, connectorMooncake}},
		{"Schedule", c.Schedule, []string{contextFirst, generationFirst}},
		{"PrefillRouter", c.PrefillRouter, route.RouterNames()},
		{"DecodeRouter", c.DecodeRouter, route.RouterNames()},
		{"SilentReprefill", string(c.SilentReprefill), []string{string(Serve), string(Refuse)}},
	} {
		if !slices.Contains(choice.of, choice.value) {
			return misconfigured(choice.field, "%q is none of %s", choice.value, strings.Join(choice.of, ", "))
		}
	}
	if err := c.checkLocal(); err != nil {
		return err
	}
	return c.setNumbers()
}

func (c *Config) setNumbers() error {
	if !(c.ShadowRate >= 0 && c.ShadowRate <= 1) {
		return misconfigured("ShadowRate", "%v is no share from 0 to 1", c.ShadowRate)
	}
	if c.ShadowFirst == 0 {
		c.ShadowFirst = 3
	}
	switch {
	case c.WorkerWait == 0:
		c.WorkerWait = 10 * time.Second
	case c.WorkerWait < 0:
		c.WorkerWait = 0
	}
	if c.MaxRetries == 0 {
		c.MaxRetries = 3
	}
	for _, d := range []struct {
		field string
		v     *time.Duration
		def   time.Duration
	}{
		{"Timeouts.Connect", &c.Timeouts.Connect, 3 * time.Second},
		{"Timeouts.Leg", &c.Timeouts.Leg, 30 * time.Minute},
		{"Timeouts.Stream", &c.Timeouts.Stream, 10 * time.Minute},
		{"Timeouts.Read", &c.Timeouts.Read, time.Minute},
		{"Timeouts.Write", &c.Timeouts.Write, time.Minute},
		{"Timeouts.Idle", &c.Timeouts.Idle, 4 * time.Second},
		{"Timeouts.Drain", &c.Timeouts.Drain, 30 * time.Second},
	} {
		if *d.v < 0 {
			return misconfigured(d.field, "%v is negative", *d.v)
		}
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	if c.Limits.MaxBody < 0 || c.Limits.MaxBodies < 0 || c.Limits.MaxAnswer < 0 || c.Limits.MaxHeader < 0 {
		return misconfigured("Limits", "a field is negative: %+v", c.Limits)
	}
	if c.Limits.MaxBody == 0 {
		c.Limits.MaxBody = 64 << 20
	}
	if c.Limits.MaxBodies == 0 {
		c.Limits.MaxBodies = max(2<<30, c.Limits.MaxBody)
	}
	if c.Limits.MaxBodies < c.Limits.MaxBody {
		return misconfigured("Limits.MaxBodies", "%d is less than the %d bytes that one request may have", c.Limits.MaxBodies, c.Limits.MaxBody)
	}
	if c.Limits.MaxAnswer == 0 {
		c.Limits.MaxAnswer = 64 << 20
	}
	if c.Limits.MaxHeader == 0 {
		c.Limits.MaxHeader = 64 << 10
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Registry == nil {
		c.Registry = prometheus.NewRegistry()
	}
	return nil
}
