package loadgen

import (
	"context"
	"encoding/json/v2"
	"fmt"
	"io"
	"net/http"
	"time"
)

// server is a target that has been looked at.
type server struct {
	base     string
	model    string
	owner    string // of the model, by which engines can be told apart; empty if the server does not say
	tokenIDs bool   // it is asked for token ids
	client   *http.Client
	header   http.Header
	own      bool // the client was made here
}

// maxListing bounds the answer that lists models.
const maxListing = 4 << 20

// look asks a target for its models. A server that does not answer that is used all the same when the model's name is known.
func look(ctx context.Context, t Target, q *Request) (*server, error) {
	base, err := baseURL(t.URL)
	if err != nil {
		return nil, err
	}
	s := &server{base: base, model: t.Model, client: t.Client, header: t.Header}
	if s.client == nil {
		s.own = true
		s.client = &http.Client{Transport: NewTransport()}
	}
	if s.header == nil {
		s.header = http.Header{}
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := s.listing(ctx); err != nil && s.model == "" {
		return nil, fmt.Errorf("loadgen: %s does not list its models, so name one: %w", base, err)
	}
	s.tokenIDs = s.owner == "baton" || s.owner == "vllm"
	if q.TokenIDs != nil {
		s.tokenIDs = *q.TokenIDs
	}
	return s, nil
}

func (s *server) listing(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.base+"/v1/models", nil)
	if err != nil {
		return err
	}
	req.Header = s.header.Clone()
	resp, err := s.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxListing))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return refused(resp.StatusCode, body)
	}
	var list struct {
		Data []struct {
			ID      string `json:"id"`
			OwnedBy string `json:"owned_by"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return fmt.Errorf("GET /v1/models: %w", err)
	}
	if len(list.Data) == 0 {
		return fmt.Errorf("GET /v1/models lists no model")
	}
	for _, m := range list.Data {
		if s.model == "" || s.model == m.ID {
			s.model, s.owner = m.ID, m.OwnedBy
			return nil
		}
	}
	return nil
}

func (s *server) close() {
	if s.own {
		s.client.CloseIdleConnections()
	}
}

// NewTransport is how requests travel when a target brings no client: HTTP/1.1, as many connections as are needed, nothing
// compressed.
func NewTransport() *http.Transport {
	return &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		MaxIdleConnsPerHost:    maxConcurrency,
		IdleConnTimeout:        90 * time.Second,
		TLSHandshakeTimeout:    10 * time.Second,
		DisableCompression:     true,
		MaxResponseHeaderBytes: 1 << 20,
		ReadBufferSize:         16 << 10,
		WriteBufferSize:        64 << 10,
	}
}
