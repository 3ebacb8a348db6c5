package main

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"baton/loadgen"
)

// clientFlags say how other people's servers are reached.
type clientFlags struct {
	APIKeyFile string   `name:"api-key-file" placeholder:"FILE" help:"File whose first line is sent as API key (Authorization: Bearer KEY). Default: the environment variable OPENAI_API_KEY, if it is set."`
	Header     []string `placeholder:"NAME:VALUE" sep:"none" help:"Header of every request; may be given several times."`
	CA         string   `name:"tls-ca" placeholder:"FILE" help:"Certificate of the authority that signed the servers' certificates (PEM). Default: the system's."`
}

// header makes the headers that go with every request.
func (f clientFlags) header() (http.Header, error) {
	h := http.Header{}
	for _, line := range f.Header {
		name, value, ok := strings.Cut(line, ":")
		if name = strings.TrimSpace(name); !ok || name == "" {
			return nil, fmt.Errorf("--header %q: it is written as NAME:VALUE", line)
		}
		h.Add(name, strings.TrimSpace(value))
	}
	key := os.Getenv("OPENAI_API_KEY")
	if f.APIKeyFile != "" {
		raw, err := os.ReadFile(f.APIKeyFile)
		if err != nil {
			return nil, fmt.Errorf("--api-key-file: %w", err)
		}
		key, _, _ = strings.Cut(strings.TrimSpace(string(raw)), "\n")
		if key = strings.TrimSpace(key); key == "" {
			return nil, fmt.Errorf("--api-key-file %s: its first line is empty", f.APIKeyFile)
		}
	}
	if key != "" && h.Get("Authorization") == "" {
		h.Set("Authorization", "Bearer "+key)
	}
	return h, nil
}

// client makes a client of its own.
func (f clientFlags) client() (*http.Client, error) {
	t := loadgen.NewTransport()
	if f.CA != "" {
		pem, err := os.ReadFile(f.CA)
		if err != nil {
			return nil, fmt.Errorf("--tls-ca: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--tls-ca %s: it holds no certificate (PEM)", f.CA)
		}
		t.TLSClientConfig = &tls.Config{RootCAs: pool}
	}
	return &http.Client{Transport: t}, nil
}

// benchCmd puts load on a server and shows what its clients see.
type benchCmd struct {
	clientFlags
	URL     string `arg:"" placeholder:"URL" help:"Server to measure: anything that speaks the OpenAI API."`
	Against string `placeholder:"URL" help:"Second server: the two take turns with the same requests, and are compared."`
	Model   string `placeholder:"NAME" help:"Model to ask for. Default: the first that the server lists."`

	Requests    int                      `placeholder:"N" help:"Requests in all. Default: 100, unless --sessions, --duration or --trace is given."`
	Duration    time.Duration            `placeholder:"TIME" help:"Begin no request after this time (of each server)."`
	Concurrency int                      `placeholder:"N" help:"Closed loop: so many sessions at a time. Default: 16, unless --rate or --trace is given."`
	Rate        float64                  `placeholder:"R" help:"Open loop: so many sessions begin in a second, whether answers come or not."`
	Burstiness  float64                  `default:"1" help:"How evenly --rate is spread: 1 is Poisson, less is burstier (shape of a gamma distribution)."`
	MaxConc     int                      `name:"max-concurrency" default:"4096" help:"Most sessions at a time in an open loop."`
	Prompt      loadgen.Prompt           `enum:"ids,text,chat" default:"ids" help:"What prompts are: random token ids or words for /v1/completions, or messages for /v1/chat/completions."`
	Own         loadgen.Range            `name:"new-tokens" aliases:"input-tokens" default:"512" placeholder:"N" help:"Tokens that each turn adds to the prompt: a number or a range (256:1024). Default: 512."`
	Prefix      int                      `name:"shared-prefix-tokens" default:"0" help:"Tokens that all prompts begin with, before those of their own."`
	Output      loadgen.Range            `name:"output-tokens" default:"64" placeholder:"N" help:"Tokens that each answer has: a number or a range. Default: 64."`
	Sessions    int                      `placeholder:"N" help:"Sessions, of --turns requests each. Default: as many as make up --requests."`
	Turns       int                      `default:"1" help:"Requests of a session: each sends all before it, answers included, and --new-tokens."`
	Think       time.Duration            `name:"think-time" default:"0s" help:"Time between an answer and the session's next turn."`
	VocabSize   int                      `default:"512" help:"Ids of prompts are below it; no more than the model's."`
	Temperature float64                  `default:"0" help:"Temperature."`
	IgnoreEOS   bool                     `name:"ignore-eos" default:"true" negatable:"" help:"Answers go on to their full length."`
	TokenIDs    string                   `name:"token-ids" enum:"auto,yes,no" default:"auto" help:"Ask for token ids with the answers (return_token_ids). auto: of Baton and vLLM."`
	SessionID   string                   `enum:"header,body,none" default:"header" help:"How sessions are named to the server: header (X-Session-Id), body (the header, and conversation_params.conversation_id), none."`
	ExtraBody   string                   `placeholder:"JSON" help:"Object whose members are added to every request."`
	Trace       string                   `placeholder:"FILE" help:"Replay a trace (JSONL: Mooncake's format, or what --record wrote) at its own times, or with --concurrency as fast as answers come."`
	TraceBlock  int                      `default:"512" help:"Tokens of a trace's hash_ids."`
	Speed       float64                  `default:"1" help:"Replay the times of a trace so many times as fast."`
	Record      string                   `placeholder:"FILE" help:"Write every request and its outcome to a trace."`
	Warmup      int                      `default:"0" placeholder:"N" help:"Requests sent first and not counted."`
	Rounds      int                      `default:"4" help:"How often the servers of --against take turns."`
	Seed        uint64                   `default:"0" help:"Decides what prompts say and when they are sent."`
	Timeout     time.Duration            `default:"10m" help:"Most time for one try of a request."`
	RetryFor    time.Duration            `default:"0s" help:"Send a request that was refused or cut off again for so long; its times go on counting."`
	Goodput     map[string]time.Duration `placeholder:"NAME=TIME" help:"Also count answers that were fast enough: ttft=500ms, tpot=50ms, e2e=10s; separated by ;."`
	JSON        bool                     `name:"json" help:"Print the report as JSON."`
}

func (c *benchCmd) Run(env *environment) (err error) {
	config, err := c.config()
	if err != nil {
		return err
	}
	for _, t := range config.Targets {
		defer t.Client.CloseIdleConnections()
	}
	if c.Record != "" {
		finish, err := c.record(&config)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, finish()) }()
	}
	if status := terminal(os.Stderr); status != nil && !c.JSON {
		config.Progress = func(s loadgen.Snapshot) { fmt.Fprintf(status, "\r\x1b[K%s", s) }
		defer fmt.Fprint(status, "\r\x1b[K")
	}
	env.started() // it reports what it has measured even when it is interrupted
	report, err := loadgen.Run(env.ctx, config)
	if report == nil {
		return flagError(err)
	}
	if config.Progress != nil {
		fmt.Fprint(os.Stderr, "\r\x1b[K")
	}
	if err := c.print(env.stdout, report); err != nil {
		return err
	}
	if n := report.Failed(); n > 0 && err == nil {
		return fmt.Errorf("%d requests failed", n)
	}
	return err
}

func (c *benchCmd) print(w io.Writer, report *loadgen.Report) error {
	if !c.JSON {
		return report.Write(w)
	}
	if err := json.MarshalWrite(w, report, jsontext.Multiline(true)); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w)
	return err
}

// record makes the run write a trace.
func (c *benchCmd) record(config *loadgen.Config) (finish func() error, err error) {
	if c.Against != "" {
		return nil, errors.New("--record and --against exclude each other: a trace is of one server")
	}
	f, err := os.Create(c.Record)
	if err != nil {
		return nil, fmt.Errorf("--record: %w", err)
	}
	recorder := loadgen.NewRecorder(f)
	config.Observe = recorder.Observe
	return func() error {
		if err := errors.Join(recorder.Flush(), f.Close()); err != nil {
			return fmt.Errorf("--record %s: %w", c.Record, err)
		}
		return nil
	}, nil
}

func (c *benchCmd) config() (loadgen.Config, error) {
	config := loadgen.Config{
		Load:   loadgen.Load{Concurrency: c.Concurrency, MaxConcurrency: c.MaxConc, Speed: c.Speed},
		Rounds: c.Rounds, Duration: c.Duration, Warmup: c.Warmup, Timeout: c.Timeout, RetryFor: c.RetryFor,
		Request: loadgen.Request{
			Prompt: c.Prompt, VocabSize: c.VocabSize, Seed: c.Seed, Temperature: c.Temperature, StopAtEOS: !c.IgnoreEOS,
			SessionBody: c.SessionID == "body", Extra: jsontext.Value(c.ExtraBody),
		},
	}
	if c.SessionID == "none" {
		config.Request.SessionHeader = "-"
	}
	if c.TokenIDs != "auto" {
		want := c.TokenIDs == "yes"
		config.Request.TokenIDs = &want
	}
	if c.ExtraBody != "" && (config.Request.Extra.Kind() != jsontext.KindBeginObject || !config.Request.Extra.IsValid()) {
		return config, fmt.Errorf("--extra-body: %q is not a JSON object", c.ExtraBody)
	}
	for name, limit := range c.Goodput {
		goal, ok := map[string]*time.Duration{"ttft": &config.Goal.TTFT, "tpot": &config.Goal.TPOT, "e2e": &config.Goal.E2E}[name]
		if !ok {
			return config, fmt.Errorf("--goodput: there is no %q; it takes ttft, tpot and e2e", name)
		}
		*goal = limit
	}
	if err := c.targets(&config); err != nil {
		return config, err
	}
	if c.Trace != "" {
		return config, c.replay(&config)
	}
	return config, c.synthetic(&config)
}

func (c *benchCmd) targets(config *loadgen.Config) error {
	header, err := c.header()
	if err != nil {
		return err
	}
	for _, url := range []string{c.URL, c.Against} {
		if url == "" {
			continue
		}
		client, err := c.client()
		if err != nil {
			return err
		}
		config.Targets = append(config.Targets, loadgen.Target{URL: url, Model: c.Model, Client: client, Header: header})
	}
	return nil
}

// synthetic makes the requests up.
func (c *benchCmd) synthetic(config *loadgen.Config) error {
	plan := &loadgen.Synthetic{
		Sessions: c.Sessions, Turns: c.Turns, Prefix: c.Prefix, New: c.Own, Output: c.Output, Think: c.Think,
		Rate: c.Rate, Burstiness: c.Burstiness, Seed: c.Seed,
	}
	switch {
	case c.Turns < 1:
		return fmt.Errorf("--turns %d: a session has at least one", c.Turns)
	case c.Requests < 0 || c.Sessions < 0 || c.Concurrency < 0:
		return errors.New("--requests, --sessions and --concurrency are not negative")
	case c.Requests > 0 && c.Sessions > 0:
		return errors.New("--requests and --sessions exclude each other: a session has --turns requests")
	case c.Rate > 0 && c.Concurrency > 0:
		return errors.New("--rate and --concurrency exclude each other; --max-concurrency bounds an open loop")
	case c.Speed != 1:
		return errors.New("--speed is for --trace")
	}
	if c.Sessions == 0 && (c.Requests > 0 || c.Duration == 0) {
		plan.Sessions = (cmp.Or(c.Requests, 100) + c.Turns - 1) / c.Turns
	}
	if c.Rate == 0 && c.Concurrency == 0 {
		config.Load.Concurrency = 16
	}
	config.Plan = plan
	return flagError(plan.Check())
}

// replay reads the requests from a file.
func (c *benchCmd) replay(config *loadgen.Config) error {
	if c.Requests > 0 || c.Sessions > 0 || c.Rate > 0 {
		return errors.New("--trace says what is sent: --requests, --sessions and --rate do not go with it")
	}
	f, err := os.Open(c.Trace)
	if err != nil {
		return fmt.Errorf("--trace: %w", err)
	}
	defer f.Close()
	trace, err := loadgen.ReadTrace(f, c.TraceBlock)
	if err != nil {
		return fmt.Errorf("--trace %s: %w", c.Trace, flagError(err))
	}
	if trace.HasMessages() && config.Request.Prompt != loadgen.Chat {
		return fmt.Errorf("--trace %s: it holds messages, so it takes --prompt chat", c.Trace)
	}
	config.Plan = trace
	return nil
}

// flagError names flags where a configuration's fields are named.
func flagError(err error) error {
	var bad *loadgen.ConfigError
	if !errors.As(err, &bad) {
		return err
	}
	flag := map[string]string{
		"Sessions": "--sessions", "Turns": "--turns", "Prefix": "--shared-prefix-tokens", "New": "--new-tokens", "Output": "--output-tokens",
		"Think": "--think-time", "Rate": "--rate", "Burstiness": "--burstiness", "hash block": "--trace-block",
		"Duration": "--duration", "Rounds": "--rounds", "Load.Concurrency": "--concurrency", "Load.Speed": "--speed", "Warmup": "--warmup",
		"Request.VocabSize": "--vocab-size", "Request.Temperature": "--temperature", "Target.URL": "URL",
	}[bad.Field]
	return fmt.Errorf("%s: %s", cmp.Or(flag, bad.Field), bad.Problem)
}

// terminal is a file if somebody looks at it.
func terminal(f *os.File) io.Writer {
	if info, err := f.Stat(); err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return nil
	}
	return f
}
