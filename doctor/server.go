package doctor

import (
	"context"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// Engines that are told apart.
const (
	Baton    = "baton"
	VLLM     = "vllm"
	SGLang   = "sglang"
	TRTLLM   = "tensorrt_llm"
	LlamaCPP = "llamacpp"
	Unknown  = "unknown"
)

// Roles of servers.
const (
	RolePrefill  = "prefill"
	RoleDecode   = "decode"
	RoleEither   = "either"   // takes either leg of a request, or all of it
	RoleWhole    = "whole"    // answers requests from prompt to end
	RoleFrontend = "frontend" // has engines behind it
	RoleRelay    = "relay"    // a frontend of engines that are called over HTTP
)

// Server is what a server says about itself. Fields that it does not tell are empty.
type Server struct {
	URL string `json:"url"`
	// Asked is the role that it was named for: prefill, decode or none; FoundAt is the relay that named it.
	Asked        string `json:"asked_as,omitempty"`
	FoundAt      string `json:"found_at,omitempty"`
	Reachable    bool   `json:"reachable"`
	Unauthorized bool   `json:"unauthorized,omitzero"` // it wants an API key, or another one
	Healthy      bool   `json:"healthy"`
	Engine       string `json:"engine"`
	Version      string `json:"version,omitempty"`
	Model        string `json:"model,omitempty"`
	Context      int    `json:"context_length,omitzero"`
	Role         string `json:"role,omitempty"`
	// Connector is how it moves KV: vLLM's kv_connector, SGLang's transfer backend, and so on.
	Connector string `json:"connector,omitempty"`
	// Note is what else is worth a few words.
	Note string `json:"note,omitempty"`

	problem   string // why it cannot be reached, or what /health says
	workers   []worker
	bootstrap int // SGLang's port
	metrics   samples
	caching   string // "off" when prefixes are not cached
	reports   string // "off" when usage has no cached tokens
	kvRole    string // vLLM's kv_role
	info      map[string]jsontext.Value
}

// worker is a server behind a relay.
type worker struct{ url, role string }

// part is which leg it is tried with; empty for whole requests.
func (s *Server) part() string {
	if s.Asked != "" {
		return s.Asked
	}
	if s.Role == RolePrefill || s.Role == RoleDecode {
		return s.Role
	}
	return ""
}

// models is the answer of /v1/models.
type models struct {
	Data []struct {
		ID       string         `json:"id"`
		OwnedBy  string         `json:"owned_by"`
		MaxLen   jsontext.Value `json:"max_model_len"`
		Metadata struct {
			Context jsontext.Value `json:"n_ctx"`
			Trained jsontext.Value `json:"n_ctx_train"`
		} `json:"meta"`
	} `json:"data"`
}

// lookAt asks a server all that any kind of server answers, and what its kind does.
func (x *examination) lookAt(ctx context.Context, s *Server) {
	s.Engine = Unknown
	health, err := x.get(ctx, s.URL+"/health")
	if err != nil {
		s.problem = err.Error()
		return
	}
	s.Reachable, s.Healthy = true, health.ok()
	if !health.ok() && health.status != http.StatusNotFound {
		s.problem = health.failure()
	}
	list, err := x.get(ctx, s.URL+"/v1/models")
	if err == nil && (list.status == http.StatusUnauthorized || list.status == http.StatusForbidden) {
		s.Unauthorized, s.problem = true, list.failure()
		return
	}
	var m models
	if err == nil && list.read(&m) && len(m.Data) > 0 {
		s.takeModel(&m, x.Model)
	}
	if s.Engine != TRTLLM { // whose /metrics forgets what it has shown
		if a, err := x.get(ctx, s.URL+"/metrics"); err == nil && a.ok() {
			s.metrics = readMetrics(a.body)
		}
	}
	s.info = x.object(ctx, s.URL+"/server_info?config_format=json")
	if s.info == nil {
		s.info = x.object(ctx, s.URL+"/get_server_info")
	}
	version := x.object(ctx, s.URL+"/version")
	s.Version = text(version["version"])
	x.identify(ctx, s, health)
}

func (x *examination) object(ctx context.Context, url string) map[string]jsontext.Value {
	var v map[string]jsontext.Value
	if a, err := x.get(ctx, url); err != nil || !a.read(&v) {
		return nil
	}
	return v
}

func (s *Server) takeModel(m *models, want string) {
	chosen := &m.Data[0]
	for i := range m.Data {
		if m.Data[i].ID == want {
			chosen = &m.Data[i]
		}
	}
	s.Model = shorten(chosen.ID)
	s.Context = count(chosen.MaxLen)
	if s.Context == 0 {
		s.Context = count(chosen.Metadata.Context)
	}
	switch chosen.OwnedBy {
	case Baton, VLLM, SGLang, TRTLLM, LlamaCPP:
		s.Engine = chosen.OwnedBy
	}
}

// identify finds out what a server is by whatever gives it away, and reads what that kind says of itself.
func (x *examination) identify(ctx context.Context, s *Server, health *answer) {
	if s.Engine == Unknown {
		switch {
		case s.info["disaggregation_mode"] != nil || s.metrics.has("sglang:"):
			s.Engine = SGLang
		case s.info["vllm_config"] != nil || s.metrics.has("vllm:"):
			s.Engine = VLLM
		case s.info["disaggregated_params"] != nil && text(s.info["engine"]) != Baton || s.metrics.has("trtllm_"):
			s.Engine = TRTLLM
		case text(s.info["engine"]) == Baton || s.metrics.has("baton_"):
			s.Engine = Baton
		case s.metrics.has("llamacpp:"):
			s.Engine = LlamaCPP
		}
	}
	s.Role = RoleWhole
	x.lookForRelay(ctx, s)
	switch s.Engine {
	case Baton:
		s.readBaton(health)
	case VLLM:
		s.readVLLM()
	case SGLang:
		s.readSGLang()
	case TRTLLM:
		s.readTRTLLM()
	default:
		x.lookForLlamaCPP(ctx, s)
	}
}

// lookForRelay asks for the workers that a relay of ours has.
func (x *examination) lookForRelay(ctx context.Context, s *Server) {
	if !s.metrics.has("baton_relay_") {
		return
	}
	s.Role = RoleRelay
	var list struct {
		Workers []struct {
			URL   string   `json:"url"`
			Roles []string `json:"roles"`
		} `json:"workers"`
	}
	if a, err := x.get(ctx, s.URL+"/workers"); err != nil || !a.read(&list) {
		s.Note = "it does not show its workers"
		return
	}
	for _, w := range list.Workers {
		for _, role := range w.Roles {
			if role == RolePrefill || role == RoleDecode {
				s.workers = append(s.workers, worker{w.URL, role})
			}
		}
	}
	s.Note = fmt.Sprintf("%d workers", len(list.Workers))
}

// lookForLlamaCPP reads llama.cpp's properties, by which it can be told as well.
func (x *examination) lookForLlamaCPP(ctx context.Context, s *Server) {
	props := x.object(ctx, s.URL+"/props")
	if props == nil || props["build_info"] == nil && s.Engine != LlamaCPP {
		return
	}
	s.Engine = LlamaCPP
	s.Version = text(props["build_info"])
	var settings struct {
		Context jsontext.Value `json:"n_ctx"`
	}
	if json.Unmarshal(props["default_generation_settings"], &settings) == nil && count(settings.Context) > 0 {
		s.Context = count(settings.Context)
	}
	if n := count(props["total_slots"]); n > 0 {
		s.Note = fmt.Sprintf("%d slots", n)
	}
}

// text is a JSON string, short; empty for any other value.
func text(v jsontext.Value) string {
	var s string
	if json.Unmarshal(v, &s) != nil {
		return ""
	}
	return shorten(s)
}

// count is a JSON number that counts something; 0 for any other value.
func count(v jsontext.Value) int {
	n, err := strconv.ParseInt(string(v), 10, 32)
	if err != nil || n < 0 {
		return 0
	}
	return int(n)
}

// judge turns what a server says into findings.
func (x *examination) judge(s *Server) {
	switch {
	case !s.Reachable:
		do := "check the address, and that the server runs"
		if strings.Contains(s.problem, "certificate") {
			do = "name the authority that signed its certificate by --tls-ca FILE"
		}
		severity := Wrong
		if s.FoundAt != "" {
			severity, do = Warning, "try from the host of "+s.FoundAt+", which named it"
		}
		x.find(severity, s.URL, "it cannot be reached: "+s.problem, do)
		return
	case s.Unauthorized:
		x.find(Wrong, s.URL, "it does not let us in: "+s.problem, "give an API key by --api-key-file FILE")
		return
	case !s.Healthy && s.problem != "":
		x.find(Wrong, s.URL, "/health is not well: "+s.problem, "see the server's log; a frontend is well when every role has an engine")
	}
	if s.Engine == Unknown {
		x.find(Warning, s.URL, "it does not say what it is: owned_by of /v1/models, /server_info, /props and /metrics are of no kind that is known here", "")
	}
	if s.Model == "" && s.Reachable {
		x.find(Warning, s.URL, "it lists no model", "name one by --model NAME")
	}
	if s.caching == "off" {
		do := map[string]string{VLLM: "start it with --enable-prefix-caching", SGLang: "start it without --disable-radix-cache"}[s.Engine]
		x.find(Warning, s.URL, "prefixes are not cached: every turn of a conversation is computed anew", do)
	}
	x.judgeRole(s)
}

// judgeRole compares what a server was named for with what it is.
func (x *examination) judgeRole(s *Server) {
	if s.Asked == "" || s.Role == s.Asked || s.Role == RoleEither {
		return
	}
	do := ""
	switch s.Engine {
	case VLLM:
		if s.Role == RoleWhole && s.info["vllm_config"] == nil {
			return // it does not show its configuration; the handoff will tell
		}
		do = `start it with --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'`
	case SGLang:
		do = "start it with --disaggregation-mode " + s.Asked
	case TRTLLM:
		return // a server does not know its role before a request says it
	case Baton:
		do = "run \"baton engine --role " + s.Asked + " --http ADDR\" there, and name that address; a frontend needs no --prefill and --decode, it does handoffs by itself"
	}
	x.find(Wrong, s.URL, fmt.Sprintf("it was named as a %s server, and its role is %s", s.Asked, s.Role), do)
}
