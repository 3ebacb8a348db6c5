package relay

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// workerInfo is what GET /workers says of a worker.
type workerInfo struct {
	URL      string   `json:"url"`
	Roles    []string `json:"roles"`
	Healthy  bool     `json:"healthy"`
	State    string   `json:"state"`
	Breaker  string   `json:"breaker"`
	Requests [2]int   `json:"requests"` // of the prefill and the decode leg
	roles    [2]bool
	takes    [2]bool // requests, if nobody else does
	usable   bool    // its breaker lets them through
}

// snapshot is the fleet as it is.
func (f *fleet) snapshot(now time.Time) []workerInfo {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := make([]workerInfo, 0, len(f.workers))
	for _, w := range f.workers {
		info := workerInfo{
			URL: w.URL, Healthy: w.healthy, State: w.state(now), Breaker: w.breaker.state(now), Requests: w.requests,
			roles: w.roles, takes: [2]bool{w.takes(prefillLeg), w.takes(decodeLeg)}, usable: w.breaker.state(now) != "open",
		}
		for l, has := range w.roles {
			if has {
				info.Roles = append(info.Roles, legKind(l).String())
			}
		}
		list = append(list, info)
	}
	return list
}

func (f *fleet) all() []*worker {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]*worker(nil), f.workers...)
}

// health answers 200 when every leg has a worker that takes requests, otherwise 503 with the reasons.
func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	var known, takes, usable [2]int
	list := s.fleet.snapshot(time.Now())
	for _, info := range list {
		for l, has := range info.roles {
			if has {
				known[l]++
			}
			if info.takes[l] {
				takes[l]++
				if info.usable {
					usable[l]++
				}
			}
		}
	}
	answer := struct {
		Status  string   `json:"status"`
		Reasons []string `json:"reasons,omitempty"`
		Engine  string   `json:"engine,omitempty"`
		Prefill string   `json:"prefill"`
		Decode  string   `json:"decode"`
	}{Status: "ok", Engine: s.Engine()}
	of := func(l legKind) string { return strconv.Itoa(usable[l]) + " of " + strconv.Itoa(known[l]) }
	answer.Prefill, answer.Decode = of(prefillLeg), of(decodeLeg)
	status := http.StatusOK
	fail := func(reason string) {
		status, answer.Status = http.StatusServiceUnavailable, "unavailable"
		answer.Reasons = append(answer.Reasons, reason)
	}
	if s.isDraining() {
		fail("the relay is shutting down")
	}
	for l := range known {
		if takes[l] > 0 || legKind(l) == prefillLeg && known[l] == 0 {
			continue
		}
		fail("no " + legKind(l).String() + " worker takes requests")
		for _, info := range list {
			if info.roles[l] && !info.takes[l] {
				answer.Reasons = append(answer.Reasons, info.URL+" "+info.State)
			}
		}
	}
	writeValue(w, status, answer)
}

func (s *Server) listWorkers(w http.ResponseWriter, r *http.Request) {
	if s.admin(w, r) {
		writeValue(w, http.StatusOK, map[string]any{"workers": s.fleet.snapshot(time.Now())})
	}
}

// admin checks that a client may see and change the pools; it answers one that may not.
func (s *Server) admin(w http.ResponseWriter, r *http.Request) bool {
	switch {
	case s.cfg.AuthorizeAdmin != nil:
		if s.cfg.AuthorizeAdmin(r) {
			return true
		}
		writeError(w, errUnauthorized)
	default:
		why := foreign(r)
		if why == "" {
			return true
		}
		writeError(w, &apiError{
			status: http.StatusForbidden, kind: "invalid_request_error", code: "admin_key_required",
			message: "without --admin-key-file the pools can be seen and changed by this host's own processes only, and " + why,
		})
	}
	return false
}

// through are headers of requests that a browser or a proxy makes for somebody else.
var through = []string{"Origin", "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-Ip", "Via"}

// foreign says why a request may come from elsewhere; "" if a process of this host makes it for itself.
func foreign(r *http.Request) string {
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err != nil || !isLoopbackName(host) {
		return "this request comes from " + r.RemoteAddr
	}
	for _, name := range through {
		if r.Header[name] != nil {
			return "this request has the header " + name + ", so that it may come through a proxy or a web page"
		}
	}
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	if !isLoopbackName(strings.Trim(host, "[]")) {
		return fmt.Sprintf("this request was sent to %q, which is no name of this host: use 127.0.0.1 or localhost", r.Host)
	}
	return ""
}

// postWorker adds {"url": "http://HOST:PORT", "role": "prefill", "decode" or "both"}.
func (s *Server) postWorker(w http.ResponseWriter, r *http.Request) {
	if !s.admin(w, r) {
		return
	}
	var q struct {
		URL           string `json:"url"`
		Role          string `json:"role"`
		BootstrapPort int    `json:"bootstrap_port"`
		Events        string `json:"events"`
		Replay        string `json:"replay"`
		Ranks         int    `json:"ranks"`
	}
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 64<<10))
	d.DisallowUnknownFields()
	if err := d.Decode(&q); err != nil {
		writeError(w, badRequest("", `the body must be {"url": "http://HOST:PORT", "role": "prefill|decode|both"}, perhaps with bootstrap_port, events, replay and ranks`))
		return
	}
	spec, err := ParseWorker(q.URL)
	if err != nil {
		writeError(w, badRequest("url", "%v", err))
		return
	}
	if q.BootstrapPort < 0 || q.BootstrapPort > 65535 {
		writeError(w, badRequest("bootstrap_port", "bootstrap_port %d is not a port", q.BootstrapPort))
		return
	}
	if q.BootstrapPort != 0 {
		spec.BootstrapPort = q.BootstrapPort
	}
	if q.Events != "" {
		spec.Events, spec.Replay, spec.Ranks = q.Events, q.Replay, q.Ranks
	}
	if err := checkEvents(&spec); err != nil {
		writeError(w, badRequest("events", "%v", err))
		return
	}
	var legs []legKind
	switch q.Role {
	case "prefill":
		legs = []legKind{prefillLeg}
	case "decode":
		legs = []legKind{decodeLeg}
	case "both":
		legs = []legKind{prefillLeg, decodeLeg}
	default:
		writeError(w, badRequest("role", "role is %q; it takes prefill, decode or both", q.Role))
		return
	}
	switch err := s.addWorker(spec, legs...); {
	case err == nil:
	case errors.Is(err, errShuttingDown):
		writeError(w, errShuttingDown)
		return
	case errors.As(err, new(*plainError)):
		writeError(w, badRequest("url", "%v", err))
		return
	default:
		writeError(w, &apiError{status: http.StatusConflict, kind: "invalid_request_error", message: err.Error()})
		return
	}
	writeValue(w, http.StatusAccepted, map[string]string{"url": spec.URL, "role": q.Role, "state": "joins when it is healthy"})
}

// deleteWorker removes ?url=URL. Requests that it has go on; with &wait=true the answer comes when they are over.
func (s *Server) deleteWorker(w http.ResponseWriter, r *http.Request) {
	if !s.admin(w, r) {
		return
	}
	url := strings.TrimRight(r.URL.Query().Get("url"), "/")
	if url == "" {
		body, _ := io.ReadAll(http.MaxBytesReader(w, r.Body, 64<<10))
		var q struct {
			URL string `json:"url"`
		}
		if json.Unmarshal(body, &q) != nil || q.URL == "" {
			writeError(w, badRequest("url", "name the worker: DELETE /workers?url=http://HOST:PORT"))
			return
		}
		url = strings.TrimRight(q.URL, "/")
	}
	gone, err := s.removeWorker(url)
	switch {
	case errors.Is(err, errNoSuchWorker):
		writeError(w, &apiError{status: http.StatusNotFound, kind: "invalid_request_error", param: "url", message: "no worker at " + url})
		return
	case err != nil:
		writeError(w, errShuttingDown)
		return
	}
	if r.URL.Query().Get("wait") == "true" {
		select {
		case <-gone:
		case <-r.Context().Done():
			return
		}
	}
	writeValue(w, http.StatusOK, map[string]string{"url": url, "state": "gets no more requests"})
}

func writeValue(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		panic(err) // of types that always encode
	}
	writeJSON(w, status, body)
}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// writeError answers a request that got no answer yet.
func writeError(w http.ResponseWriter, err error) {
	var e *apiError
	if !errors.As(err, &e) {
		e = &apiError{status: http.StatusInternalServerError, kind: "server_error", message: err.Error()}
	}
	if e.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(e.retryAfter))
	}
	if e.challenge {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	writeJSON(w, e.status, e.appendJSON(nil))
}

var errUnauthorized = &apiError{
	status: http.StatusUnauthorized, kind: "invalid_request_error", code: "invalid_api_key", challenge: true,
	message: "this server needs an API key: send the header `Authorization: Bearer YOUR_KEY`",
}
