package doctor

import (
	"bytes"
	"context"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// maxAnswer bounds an answer: /metrics of a large fleet is the longest.
const maxAnswer = 16 << 20

// answer is what came back.
type answer struct {
	status int
	header http.Header
	body   []byte
	took   time.Duration
}

func (a *answer) ok() bool { return a != nil && a.status == http.StatusOK }

// read decodes a JSON body into v, as far as it fits: what an engine's next version spells otherwise is left out, field by
// field, which is why v's fields are jsontext.Value where it matters.
func (a *answer) read(v any) bool {
	return a.ok() && json.Unmarshal(a.body, v, jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true)) == nil
}

// failure says what an answer that is not 200 said.
func (a *answer) failure() string {
	var e struct {
		Error   jsontext.Value `json:"error"`
		Message string         `json:"message"`
		Detail  jsontext.Value `json:"detail"`
	}
	text := string(a.body)
	if json.Unmarshal(a.body, &e) == nil {
		var inner struct {
			Message string `json:"message"`
		}
		var plain string
		switch {
		case json.Unmarshal(e.Error, &inner) == nil && inner.Message != "":
			text = inner.Message
		case json.Unmarshal(e.Error, &plain) == nil && plain != "":
			text = plain
		case e.Message != "":
			text = e.Message
		case len(e.Detail) > 0:
			text = string(e.Detail)
		}
	}
	return fmt.Sprintf("status %d: %s", a.status, shorten(text))
}

// shorten keeps what fits a line or two, without control characters.
func shorten(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(strings.TrimSpace(s), "?"))
	const most = 300
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "..."
	}
	return s
}

func (x *examination) get(ctx context.Context, url string) (*answer, error) {
	return x.do(ctx, x.LookTimeout, http.MethodGet, url, nil, "")
}

// post sends a request to a model. id, if not empty, is its X-Request-Id.
func (x *examination) post(ctx context.Context, url string, body []byte, id string) (*answer, error) {
	return x.do(ctx, x.Timeout, http.MethodPost, url, body, id)
}

func (x *examination) do(ctx context.Context, timeout time.Duration, method, url string, body []byte, id string) (*answer, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header = x.Header.Clone()
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if id != "" {
		req.Header.Set("X-Request-Id", id)
	}
	began := time.Now()
	resp, err := x.Client.Do(req)
	if err != nil {
		return nil, plainly(err, timeout)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, plainly(err, timeout)
	}
	if len(raw) > maxAnswer {
		return nil, fmt.Errorf("an answer of more than %d MiB", maxAnswer>>20)
	}
	return &answer{resp.StatusCode, resp.Header, raw, time.Since(began)}, nil
}

// plainly is an error without what everybody knows.
func plainly(err error, timeout time.Duration) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("no answer within %v", timeout)
	}
	text := err.Error()
	for _, drop := range []string{`": dial tcp `, `": `} {
		if _, rest, ok := strings.Cut(text, drop); ok {
			return errors.New(shorten(rest))
		}
	}
	return errors.New(shorten(text))
}
