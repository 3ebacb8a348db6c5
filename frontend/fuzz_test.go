package frontend

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"testing"

	"baton/wire"
)

// canned answers every request with the same token, as often as was asked for.
type canned struct{}

func (*canned) Status(context.Context) (*wire.StatusReply, error) { return &wire.StatusReply{}, nil }

func (*canned) Submit(_ context.Context, req *wire.SubmitRequest) (Stream, error) {
	return &cannedStream{req: req, left: max(1, min(req.Sampling.MaxTokens, 1000))}, nil
}

type cannedStream struct {
	req  *wire.SubmitRequest
	left int
	sent int
}

func (s *cannedStream) Next(context.Context) (wire.Result, error) {
	if s.left == 0 {
		return wire.Result{}, io.EOF
	}
	s.left--
	res := wire.Result{Start: s.sent, Tokens: wire.Tokens{261}, StopToken: -1}
	s.sent++
	if s.req.Sampling.Logprobs {
		res.Logprobs, res.Top = wire.Floats{-1}, []wire.TokenLogprobs{{}}
	}
	if s.left == 0 {
		res.Finish = wire.FinishLength
	}
	return res, nil
}

func (*cannedStream) Close() {}

// FuzzRequests sends bodies to every endpoint that takes one. Whatever comes, the answer is 200 or a 4xx
// with an error that names what is wrong.
func FuzzRequests(f *testing.F) {
	paths := []string{chatPath, completionPath, "/tokenize", "/detokenize"}
	for _, body := range []string{
		``, `{`, `[]`, `null`, `{"prompt":"a"}`, `{"prompt":[1,2,3],"n":2,"logprobs":1,"echo":true}`, `{"prompt":[[1],[2]]}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"tools":[{}],"stop":["a"],"logprobs":true,"top_logprobs":2}`,
		`{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":"{\"a\":1}"}}]}],"continue_final_message":true}`,
		`{"tokens":[1,2]}`, `{"prompt":"a","stream":true,"stream_options":{"include_usage":true},"max_tokens":3}`,
		`{"prompt":"a","temperature":1e-50,"top_p":1,"top_k":-1,"min_p":0.5,"seed":-1,"stop_token_ids":[1]}`,
		`{"prompt":"a","max_tokens":1e3,"min_tokens":2.0,"conversation_params":{"conversation_id":1}}`,
	} {
		for i := range paths {
			f.Add(uint8(i), []byte(body))
		}
	}
	s := newTestServer(f, &canned{}, func(c *Config) { c.Limits.MaxChoices, c.Limits.MaxBody = 8, 1<<20 })
	f.Fuzz(func(t *testing.T, path uint8, body []byte) {
		r := post(t, s.Handler(), paths[int(path)%len(paths)], string(body))
		switch {
		case r.status == http.StatusOK && r.header.Get("Content-Type") == "text/event-stream":
			list, done := events(t, r.body)
			if !done {
				t.Errorf("no end in %s", r.body)
			}
			for _, e := range list {
				if !json.Valid(e) {
					t.Errorf("%s is not JSON", e)
				}
			}
		case r.status == http.StatusOK:
			if !json.Valid(r.body) {
				t.Errorf("%s is not JSON", r.body)
			}
		case r.status >= 400 && r.status < 500:
			r.failure(t)
		default:
			t.Errorf("status %d: %s", r.status, r.body)
		}
	})
}
