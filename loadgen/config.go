package loadgen

import (
	"encoding/json/jsontext"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Config is one run. Targets and Plan are required.
type Config struct {
	// Targets are one server, or two that are compared.
	Targets []Target
	// Plan is what is asked of each of them.
	Plan Plan
	// Load is when.
	Load Load
	// Rounds is how often two targets take turns (default 4). One target is played in one round.
	Rounds int
	// Duration ends the beginning of requests for each target; those that run are waited for. 0 plays the whole plan, which
	// then must have an end.
	Duration time.Duration
	// Warmup requests are sent to each target first and not counted.
	Warmup int
	// Request is how requests look.
	Request Request
	// Timeout bounds each try of a request (default 10 min).
	Timeout time.Duration
	// RetryFor is how long a request that was refused or cut off is sent again, from its first failure; its times go
	// on counting. 0 sends it once.
	RetryFor time.Duration
	// Goal counts the answers that were fast enough, if it is not zero.
	Goal Goal
	// Progress is told how it goes, Every so often (default 500 ms), from one goroutine. It may be nil.
	Progress func(Snapshot)
	Every    time.Duration
	// Observe gets every result as it comes, from one goroutine at a time, in the order of the answers' ends. It may be nil.
	Observe func(*Result)
}

// Target is a server.
type Target struct {
	// URL is its base, with or without /v1.
	URL string
	// Model is the name to ask for; empty takes the first that the server lists.
	Model string
	// Client makes the requests. With nil there is one with as many connections as are needed.
	Client *http.Client
	// Header goes with every request, such as Authorization.
	Header http.Header
}

// Load is when requests are sent.
type Load struct {
	// Concurrency is how many sessions run at a time in a closed loop: the next begins when one ends. 0 makes an open loop: sessions
	// begin when their plan says.
	Concurrency int
	// MaxConcurrency bounds what runs at a time in an open loop (default 4096). A request that has to wait for it counts from when it
	// was meant to be sent.
	MaxConcurrency int
	// Speed replays a plan's times so many times as fast (default 1).
	Speed float64
}

// Prompt is what prompts are made of, and with it where they go.
type Prompt string

// Prompts.
const (
	IDs  Prompt = "ids"  // token ids, to /v1/completions
	Text Prompt = "text" // text, to /v1/completions
	Chat Prompt = "chat" // messages, to /v1/chat/completions
)

// Request is how requests look.
type Request struct {
	Prompt Prompt // default IDs
	// VocabSize is above every token id of prompts (default 512).
	VocabSize int
	// Seed decides what prompts say.
	Seed        uint64
	Temperature float64
	// StopAtEOS lets answers end before they have the length that is asked for.
	StopAtEOS bool
	// TokenIDs asks for token ids with the answer (return_token_ids, a field of vLLM's and ours). With nil it is asked for when the server
	// is one of these.
	TokenIDs *bool
	// SessionHeader names a session to the server (default X-Session-Id; "-" for none), SessionBody does so by
	// conversation_params.conversation_id as well.
	SessionHeader string
	SessionBody   bool
	// Extra is an object whose members are added to every body.
	Extra jsontext.Value
}

// Goal is what an answer has to keep to for being good; zero fields ask for nothing.
type Goal struct{ TTFT, TPOT, E2E time.Duration }

// ConfigError is a field that makes no sense.
type ConfigError struct{ Field, Problem string }

func (e *ConfigError) Error() string { return "loadgen: " + e.Field + ": " + e.Problem }

// checked is the configuration with its defaults.
func (c Config) checked() (Config, error) {
	bad := func(field, problem string, args ...any) (Config, error) {
		return c, &ConfigError{field, fmt.Sprintf(problem, args...)}
	}
	setDefault(&c.Rounds, 4)
	if len(c.Targets) == 1 {
		c.Rounds = 1
	}
	setDefault(&c.Timeout, 10*time.Minute)
	setDefault(&c.Every, 500*time.Millisecond)
	setDefault(&c.Load.MaxConcurrency, 4096)
	setDefault(&c.Load.Speed, 1)
	setDefault(&c.Request.Prompt, IDs)
	setDefault(&c.Request.VocabSize, 512)
	setDefault(&c.Request.SessionHeader, "X-Session-Id")
	switch {
	case len(c.Targets) < 1 || len(c.Targets) > 2:
		return bad("Targets", "%d servers; it takes one, or two to compare", len(c.Targets))
	case c.Plan == nil:
		return bad("Plan", "there is none")
	case c.Duration < 0 || c.Timeout < 0 || c.RetryFor < 0 || c.Every < 0:
		return bad("Duration, Timeout, RetryFor, Every", "a negative time")
	case c.Duration == 0 && c.Plan.Requests() == 0:
		return bad("Duration", "neither it nor the plan has an end")
	case c.Rounds < 1 || c.Rounds > 1000:
		return bad("Rounds", "%d is not within 1 to 1000", c.Rounds)
	case c.Load.Concurrency < 0 || c.Load.Concurrency > maxConcurrency || c.Load.MaxConcurrency < 0 || c.Load.MaxConcurrency > maxConcurrency:
		return bad("Load.Concurrency", "%d is not within 1 to %d", c.Load.Concurrency, maxConcurrency)
	case !(c.Load.Speed > 0):
		return bad("Load.Speed", "%v is not more than 0", c.Load.Speed)
	case c.Warmup < 0:
		return bad("Warmup", "%d is negative", c.Warmup)
	case c.Request.VocabSize <= lowest || c.Request.VocabSize > 1<<30:
		return bad("Request.VocabSize", "%d is not within %d to %d", c.Request.VocabSize, lowest+1, 1<<30)
	case c.Request.Temperature < 0:
		return bad("Request.Temperature", "%v is negative", c.Request.Temperature)
	}
	for _, t := range c.Targets {
		if _, err := baseURL(t.URL); err != nil {
			return c, err
		}
	}
	switch c.Request.Prompt {
	case IDs, Text, Chat:
	default:
		return bad("Request.Prompt", "there is no %q", c.Request.Prompt)
	}
	if x := c.Request.Extra; len(x) > 0 && (x.Kind() != jsontext.KindBeginObject || !x.IsValid()) {
		return bad("Request.Extra", "it is not a JSON object")
	}
	if s, ok := c.Plan.(*Synthetic); ok {
		if err := s.Check(); err != nil {
			return c, err
		}
		if c.Load.Concurrency == 0 && s.Rate == 0 {
			return bad("Load.Concurrency", "neither it nor the plan's Rate says when requests are sent")
		}
	}
	return c, nil
}

const maxConcurrency = 1 << 16

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// baseURL is a server's URL without /v1 and a slash at the end. A URL without a scheme gets http.
func baseURL(s string) (string, error) {
	if !strings.Contains(s, "://") {
		s = "http://" + s
	}
	u, err := url.Parse(s)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.RawQuery != "" || u.Fragment != "" {
		return "", &ConfigError{"Target.URL", fmt.Sprintf("%q is not the URL of a server, such as http://127.0.0.1:8000", s)}
	}
	u.Path = strings.TrimSuffix(strings.TrimSuffix(u.Path, "/"), "/v1")
	return strings.TrimSuffix(u.String(), "/"), nil
}
