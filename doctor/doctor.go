package doctor

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
)

// Config is one examination. At least one URL is needed.
type Config struct {
	// URLs are servers that are expected to answer whole requests.
	URLs []string
	// Prefill and Decode are the workers of a fleet; each is paired with one of the other list.
	Prefill, Decode []string
	// Client makes the requests (default: one of its own).
	Client *http.Client
	// Header goes with every request.
	Header http.Header
	// Model is the model to ask for (default: the first that a server lists).
	Model string
	// BootstrapPort is where SGLang's and Mooncake's prefill servers are met, when they do not say (default 8998).
	BootstrapPort int
	// PromptTokens is the length of the requests that are sent (default 512, or half of the context if that is less).
	PromptTokens int
	// LookOnly sends no requests that a model would have to answer.
	LookOnly bool
	// Timeout bounds a request to a model (default 60 s), LookTimeout any other (default 5 s).
	Timeout, LookTimeout time.Duration
}

// Report is what was found. The names of its JSON members are stable.
type Report struct {
	Servers  []*Server  `json:"servers"`
	Handoffs []*Handoff `json:"handoffs"`
	Findings []Finding  `json:"findings"`
}

// Severity is how bad a finding is.
type Severity string

// Severities.
const (
	OK      Severity = "ok"
	Warning Severity = "warning"
	Wrong   Severity = "error"
)

// Finding is something worth knowing.
type Finding struct {
	Severity Severity `json:"severity"`
	Subject  string   `json:"subject"` // a URL, or two
	Text     string   `json:"text"`
	Do       string   `json:"do,omitempty"`
}

// Errors is how many findings say that something is wrong.
func (r *Report) Errors() (n int) {
	for _, f := range r.Findings {
		if f.Severity == Wrong {
			n++
		}
	}
	return n
}

// Handoff is how one request went from prefill to decode.
type Handoff struct {
	// Via is the frontend that was asked; empty when the two were asked themselves.
	Via string `json:"via,omitempty"`
	// Prefill and Decode are URLs, or names of engines behind Via.
	Prefill string `json:"prefill"`
	Decode  string `json:"decode"`
	// Moved tells whether KV came to the decode server from the prefill server; absent when it cannot be told.
	Moved *bool `json:"moved,omitempty"`
	// Evidence is why.
	Evidence     string  `json:"evidence"`
	PromptTokens int     `json:"prompt_tokens"`
	Bytes        int64   `json:"bytes_moved,omitzero"`
	PrefillMS    float64 `json:"prefill_leg_ms,omitzero"`
	DecodeMS     float64 `json:"decode_leg_ms,omitzero"`
}

// Bounds on an examination.
const (
	maxServers = 256
	maxPairs   = 32
)

// ConfigError is a field that makes no sense.
type ConfigError struct{ Field, Problem string }

func (e *ConfigError) Error() string { return "doctor: " + e.Field + ": " + e.Problem }

func (c *Config) check() error {
	total := len(c.URLs) + len(c.Prefill) + len(c.Decode)
	switch {
	case total == 0:
		return &ConfigError{"URLs", "there is no server to look at"}
	case total > maxServers:
		return &ConfigError{"URLs", fmt.Sprintf("%d servers are more than %d", total, maxServers)}
	case c.BootstrapPort < 0 || c.BootstrapPort > 65535:
		return &ConfigError{"BootstrapPort", fmt.Sprintf("there is no port %d", c.BootstrapPort)}
	case c.PromptTokens < 0 || c.PromptTokens > 1<<20:
		return &ConfigError{"PromptTokens", fmt.Sprintf("%d is not within 1 to %d", c.PromptTokens, 1<<20)}
	case c.Timeout < 0 || c.LookTimeout < 0:
		return &ConfigError{"Timeout", "a negative time"}
	}
	for _, list := range []*[]string{&c.URLs, &c.Prefill, &c.Decode} {
		clean := make([]string, len(*list))
		for i, s := range *list {
			var err error
			if clean[i], err = baseURL(s); err != nil {
				return err
			}
		}
		*list = clean
	}
	if c.BootstrapPort == 0 {
		c.BootstrapPort = 8998
	}
	if c.PromptTokens == 0 {
		c.PromptTokens = 512
	}
	if c.Timeout == 0 {
		c.Timeout = time.Minute
	}
	if c.LookTimeout == 0 {
		c.LookTimeout = 5 * time.Second
	}
	if c.Header == nil {
		c.Header = http.Header{}
	}
	return nil
}

// baseURL is a server's URL without /v1 and a slash at the end; without a scheme it gets http.
func baseURL(s string) (string, error) {
	if !strings.Contains(s, "://") {
		s = "http://" + s
	}
	u, err := url.Parse(s)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.RawQuery != "" || u.User != nil {
		return "", &ConfigError{"URLs", fmt.Sprintf("%q is not the URL of a server, such as http://127.0.0.1:8000", s)}
	}
	u.Fragment = "" // what a relay's flags know beside the URL
	u.Path = strings.TrimSuffix(strings.TrimSuffix(u.Path, "/"), "/v1")
	return strings.TrimSuffix(u.String(), "/"), nil
}

// Run examines. Its error is a wrong configuration or the end of ctx; everything else is a finding.
func Run(ctx context.Context, c Config) (*Report, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	if c.Client == nil {
		t := &http.Transport{Proxy: http.ProxyFromEnvironment, MaxResponseHeaderBytes: 1 << 20}
		defer t.CloseIdleConnections()
		c.Client = &http.Client{Transport: t}
	}
	x := &examination{Config: c, report: &Report{Servers: []*Server{}, Handoffs: []*Handoff{}, Findings: []Finding{}}}
	for _, list := range []struct {
		role string
		urls []string
	}{{"", c.URLs}, {RolePrefill, c.Prefill}, {RoleDecode, c.Decode}} {
		for _, u := range list.urls {
			x.add(u, list.role, "")
		}
	}
	x.look(ctx)
	x.lookBehind(ctx)
	for _, s := range x.report.Servers {
		x.judge(s)
	}
	if !c.LookOnly {
		x.test(ctx)
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return x.report, nil
}

// examination is one call of Run. Servers are looked at all at once, everything else happens one after the other.
type examination struct {
	Config
	report *Report
}

// add notes a server, once.
func (x *examination) add(u, role, foundAt string) {
	for _, s := range x.report.Servers {
		if s.URL == u {
			if s.Asked == "" {
				s.Asked = role
			}
			return
		}
	}
	if len(x.report.Servers) < maxServers {
		x.report.Servers = append(x.report.Servers, &Server{URL: u, Asked: role, FoundAt: foundAt})
	}
}

// look looks at the servers that have not been looked at.
func (x *examination) look(ctx context.Context) {
	var group sync.WaitGroup
	slots := make(chan struct{}, 16)
	for _, s := range x.report.Servers {
		if s.Engine != "" {
			continue
		}
		slots <- struct{}{}
		group.Go(func() {
			x.lookAt(ctx, s)
			<-slots
		})
	}
	group.Wait()
}

// lookBehind looks at the workers that relays name.
func (x *examination) lookBehind(ctx context.Context) {
	for _, s := range x.report.Servers {
		for _, w := range s.workers {
			if u, err := baseURL(w.url); err == nil {
				x.add(u, w.role, s.URL)
			}
		}
	}
	x.look(ctx)
}

func (x *examination) find(severity Severity, subject, text, do string) {
	x.report.Findings = append(x.report.Findings, Finding{severity, subject, shorten(text), do})
}

// test sends requests: one to each server that answers whole ones, one to each pair.
func (x *examination) test(ctx context.Context) {
	var prefill, decode []*Server
	for _, s := range x.report.Servers {
		if !s.Reachable || s.Unauthorized {
			continue
		}
		switch s.part() {
		case RolePrefill:
			prefill = append(prefill, s)
		case RoleDecode:
			decode = append(decode, s)
		default:
			x.ask(ctx, s)
		}
	}
	switch {
	case len(prefill) == 0 && len(decode) == 0:
		return
	case len(prefill) == 0 || len(decode) == 0:
		missing, there := RolePrefill, decode
		if len(decode) == 0 {
			missing, there = RoleDecode, prefill
		}
		x.find(Warning, there[0].URL, "there is no "+missing+" server to try a handoff with", "name one by --"+missing+" URL")
		return
	}
	for i := range min(max(len(prefill), len(decode)), maxPairs) {
		if ctx.Err() != nil {
			return
		}
		x.pair(ctx, prefill[i%len(prefill)], decode[i%len(decode)])
	}
}
