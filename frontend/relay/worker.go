package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"baton/kvcache"
)

// worker is one engine. What the fleet's lock guards says so.
type worker struct {
	Worker
	id       uint64
	slot     int
	hostname string
	endpoint *endpoint

	facts  atomic.Pointer[facts] // nil until the worker joins
	agreed atomic.Int32          // how often in a row it has made the ids that are made here
	turns  atomic.Uint64         // of its data-parallel ranks
	kick   chan struct{}         // probes it at once

	identified chan struct{} // closed when it is known what the worker is
	settled    sync.Once     // guards that
	told       chan struct{} // closed when it has told over HTTP what it holds

	reports  int                    // guarded: of its ranks, those whose events come
	copies   map[kvcache.Digest]int // guarded: of a block, in how many ranks; nil where there is one rank
	roles    [2]bool                // guarded
	joined   bool                   // guarded: it has been identified since it last failed
	healthy  bool                   // guarded
	trouble  string                 // guarded: why it is not
	leaving  bool                   // guarded: it gets no more requests
	breaker  breaker                // guarded
	requests [2]int                 // guarded: by leg
	content  int64                  // guarded: bytes of their text
	running  map[*lease]struct{}    // guarded: its legs
	idle     chan struct{}          // guarded: closed when it is leaving and has no request; nil before it leaves

	stop    context.CancelFunc // of its watcher
	watched sync.WaitGroup
}

// facts are what a worker said of itself when it joined.
type facts struct {
	contextEndpoint string            // TensorRT-LLM's ctx_info_endpoint
	ranks           map[string]string // Mooncake's data-parallel ranks and their engines' ids
	whole           bool              // it serves whole requests, and no legs: one of ours with --role both
}

func (w *worker) known() facts {
	if f := w.facts.Load(); f != nil {
		return *f
	}
	return facts{}
}

func (w *worker) bootstrapPort() int {
	if w.BootstrapPort != 0 {
		return w.BootstrapPort
	}
	return DefaultBootstrapPort
}

func (w *worker) bootstrapURL() string {
	return "http://" + net.JoinHostPort(w.hostname, strconv.Itoa(w.bootstrapPort()))
}

// probeNow makes the watcher look at once.
func (w *worker) probeNow() {
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

// takes reports whether a leg may go to the worker, its breaker aside. The caller holds the fleet's lock.
func (w *worker) takes(l legKind) bool {
	return w.roles[l] && w.healthy && !w.leaving && (l == prefillLeg || !w.known().whole)
}

// Watching.
const (
	probeTimeout  = 4 * time.Second
	probeEvery    = 3 * time.Second
	probeAgain    = time.Second // after a probe that failed
	probeFailures = 3           // in a row, before a worker that still accepts connections counts as lost
	maxProbe      = 1 << 20     // bytes of an answer to a probe
)

// watch follows a worker's health until ctx ends.
func (s *Server) watch(ctx context.Context, w *worker) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	failures := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-w.kick:
		}
		roles := s.fleet.rolesOf(w)
		err := s.probe(ctx, w)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			failures = 0
		} else {
			failures++
		}
		next := probeEvery
		if !s.fleet.setHealth(w, roles, err, failures) || failures > 0 {
			next = probeAgain
		}
		w.endpoint.expire(time.Now())
		timer.Reset(next)
	}
}

// probe asks a worker whether it is well, and one that has not joined what it is.
func (s *Server) probe(ctx context.Context, w *worker) error {
	if _, err := s.ask(ctx, w, "/health"); err != nil {
		var said *statusError
		if errors.As(err, &said) && said.status == http.StatusNotFound && strings.HasSuffix(w.URL, "/v1") {
			return fmt.Errorf("%w: if the engine is not behind %s, name it without /v1", err, w.URL)
		}
		return err
	}
	if s.fleet.hasJoined(w) {
		return nil
	}
	err := s.identify(ctx, w)
	if errors.Is(err, errTimeout) {
		return fmt.Errorf("/health answers, but there is %s", err) // it does not hang
	}
	return err
}

// statusError is an answer to a probe that is not 200.
type statusError struct {
	path   string
	status int
}

func (e *statusError) Error() string { return fmt.Sprintf("%s answers %d", e.path, e.status) }

// ask gets a small document from a worker.
func (s *Server) ask(ctx context.Context, w *worker, path string) ([]byte, error) {
	return s.askEndpoint(ctx, w.endpoint, path)
}

func (s *Server) askEndpoint(parent context.Context, e *endpoint, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(parent, probeTimeout)
	defer cancel()
	body, status, err := e.fetch(ctx, &call{method: http.MethodGet, path: path, header: s.engineAuth("")}, probeTimeout, maxProbe)
	switch {
	case err == nil && status != http.StatusOK:
		err = &statusError{path, status}
	case err != nil && parent.Err() == nil && ctx.Err() != nil, errors.Is(err, errTimeout):
		err = failed(errTimeout, fmt.Errorf("%s within %v", path, probeTimeout))
	}
	return body, err
}

// identify finds out what a worker is and refuses one that is not like the others. As long as no prefill worker is
// known it does not matter: whole requests are the same for all.
func (s *Server) identify(ctx context.Context, w *worker) error {
	if !s.fleet.has(prefillLeg) {
		return nil
	}
	engine := s.cfg.Engine
	if engine == "auto" {
		found, err := s.detect(ctx, w)
		if err != nil {
			return err
		}
		engine = found
	}
	learned := new(facts)
	d, err := s.dialectOf(ctx, engine, w, learned)
	if err != nil {
		return err
	}
	if known := s.setDialect(d); known.name() != d.name() {
		return fmt.Errorf("it is %s, but the other workers are %s: one relay serves one kind", d.name(), known.name())
	}
	if d.name() == "baton" {
		if learned.whole, err = s.isWhole(ctx, w); err != nil {
			return err
		}
	}
	if s.fleet.hasRole(w, prefillLeg) {
		if err := s.learn(ctx, d, w, learned); err != nil {
			return err
		}
	}
	w.facts.Store(learned)
	w.settled.Do(func() { close(w.identified) })
	if d.name() == "baton" {
		s.awaitEvents(ctx, w)
	}
	return nil
}

// isWhole asks an engine of ours for its role, refuses it where that does not fit, and reports whether it serves whole
// requests.
func (s *Server) isWhole(ctx context.Context, w *worker) (bool, error) {
	var info struct {
		Role string `json:"role"`
	}
	if body, err := s.ask(ctx, w, "/server_info"); err != nil {
		if errors.As(err, new(*statusError)) {
			return false, nil
		}
		return false, err
	} else if err := json.Unmarshal(body, &info); err != nil {
		return false, fmt.Errorf("/server_info: %w", err)
	}
	p, d := s.fleet.hasRole(w, prefillLeg), s.fleet.hasRole(w, decodeLeg)
	switch {
	case info.Role == "prefill" && d:
		return false, errors.New("its --role is prefill, and it is here for decode legs too")
	case info.Role == "decode" && p:
		return false, errors.New("its --role is decode, and it is here for prefill legs too")
	case info.Role == "both" && !p:
		return false, errors.New("its --role is both: it serves whole requests only, which it gets as a prefill worker, or when there are none")
	}
	return info.Role == "both", nil
}

// owners are what engines call themselves in /v1/models.
var owners = map[string]string{"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm", "baton": "baton"}

// detect asks a worker what it is.
func (s *Server) detect(ctx context.Context, w *worker) (string, error) {
	body, err := s.ask(ctx, w, "/v1/models")
	var models struct {
		Data []struct {
			OwnedBy string `json:"owned_by"`
		} `json:"data"`
	}
	if err == nil {
		err = json.Unmarshal(body, &models)
	}
	if err == nil && len(models.Data) > 0 {
		if engine, ok := owners[models.Data[0].OwnedBy]; ok {
			return engine, nil
		}
	}
	var info struct {
		Engine string          `json:"engine"`
		Params json.RawMessage `json:"disaggregated_params"`
		Mode   string          `json:"disaggregation_mode"`
	}
	if body, err := s.ask(ctx, w, "/server_info"); err == nil && json.Unmarshal(body, &info) == nil {
		switch {
		case info.Engine == "baton":
			return "baton", nil
		case info.Params != nil:
			return "trtllm", nil
		case info.Mode != "":
			return "sglang", nil
		}
	}
	if err != nil && !errors.As(err, new(*statusError)) {
		return "", err
	}
	return "", errors.New("it does not say what it is, in /v1/models or /server_info: name it with --engine")
}

// dialectOf is how to speak with engines of a kind; w is one of them.
func (s *Server) dialectOf(ctx context.Context, engine string, w *worker, learned *facts) (dialect, error) {
	switch engine {
	case "plain":
		return plain{}, nil
	case "trtllm":
		return trtllm{schedule: s.cfg.Schedule, stripHistory: s.cfg.StripHistory}, nil
	case "baton":
		return trtllm{schedule: contextFirst, stripHistory: s.cfg.StripHistory, baton: true}, nil
	case "sglang":
		return sglang{}, nil
	}
	switch s.cfg.Connector {
	case connectorNIXL:
		return nixl{}, nil
	case connectorMooncake:
		return mooncake{}, nil
	}
	if known := s.dialect(); known != nil {
		return known, nil
	}
	if !s.fleet.hasRole(w, prefillLeg) {
		return nil, errors.New("waiting for a prefill worker, which shows how KV moves (or say it with --connector)")
	}
	if s.mooncakeRanks(ctx, w, learned) == nil {
		return mooncake{}, nil
	}
	return nixl{}, nil
}

// learn asks a prefill worker for what its dialect needs to know.
func (s *Server) learn(ctx context.Context, d dialect, w *worker, learned *facts) error {
	switch d := d.(type) {
	case mooncake:
		if learned.ranks == nil {
			if err := s.mooncakeRanks(ctx, w, learned); err != nil {
				return fmt.Errorf("the bootstrap server of Mooncake at %s: %w (another port: URL#bootstrap=PORT)", w.bootstrapURL(), err)
			}
		}
	case trtllm:
		if !d.together() {
			return nil
		}
		var info struct {
			Params struct {
				Endpoint []string `json:"ctx_info_endpoint"`
			} `json:"disaggregated_params"`
		}
		body, err := s.ask(ctx, w, "/server_info")
		if err == nil {
			err = json.Unmarshal(body, &info)
		}
		if err == nil && len(info.Params.Endpoint) == 0 {
			err = errors.New("no disaggregated_params.ctx_info_endpoint in it")
		}
		if err != nil {
			return fmt.Errorf("/server_info, which generation_first needs: %w", err)
		}
		learned.contextEndpoint = info.Params.Endpoint[0]
	}
	return nil
}

// mooncakeRanks asks a prefill worker's bootstrap server which engines it has, by data-parallel rank.
func (s *Server) mooncakeRanks(ctx context.Context, w *worker, learned *facts) error {
	u, err := parseBase(w.bootstrapURL())
	if err != nil {
		return err
	}
	e := newEndpoint(u, nil, s.cfg.Timeouts.Connect, s.cfg.Timeouts.Idle)
	defer e.close()
	body, err := s.askEndpoint(ctx, e, "/query")
	if err != nil {
		return err
	}
	var ranks map[string]struct {
		Engine string `json:"engine_id"`
	}
	if err := json.Unmarshal(body, &ranks); err != nil {
		return fmt.Errorf("/query: %w", err)
	}
	found := make(map[string]string)
	for rank, r := range ranks {
		if r.Engine != "" && strings.Trim(rank, "0123456789") == "" {
			found[rank] = r.Engine
		}
	}
	if len(found) == 0 {
		return errors.New("/query names no engine")
	}
	learned.ranks = found
	return nil
}
