package frontend

import "encoding/json/jsontext"

// completionRequest is a decoded POST /v1/completions.
type completionRequest struct {
	params
	prompts []prompt
	single  bool // the prompt was not a list of prompts
	echo    bool
}

// prompt is what to continue, as text until it is encoded.
type prompt struct {
	path string // its name in messages: "prompt" or "prompt[2]"
	text string
	ids  []int32 // nil for text
}

func parseCompletion(body []byte, limits *Limits, withTokenizer bool) (*completionRequest, error) {
	r := &completionRequest{params: newParams(limits)}
	r.addSpecial = true
	if err := decodeObject(body, limits.MaxDepth, r.field); err != nil {
		return nil, err
	}
	if err := r.settle(withTokenizer); err != nil {
		return nil, err
	}
	return r, nil
}

func (r *completionRequest) field(name string, v value) (err error) {
	if known, err := r.set(v); known || err != nil {
		return err
	}
	switch name {
	case "prompt":
		return r.setPrompt(v)
	case "echo":
		r.echo, err = v.boolean()
	case "logprobs":
		r.topLogprobs, err = r.count(v)
	case "best_of":
		var n int64
		if n, err = v.integer(1, int64(r.limits.MaxChoices)); err == nil && n > 1 {
			return invalid(v.path, "best_of is not supported: use n and choose among the answers")
		}
	}
	return err
}

const promptShapes = "a string, an array of token ids, or an array of strings or of arrays of token ids"

// setPrompt takes the four shapes of a prompt.
func (r *completionRequest) setPrompt(v value) error {
	r.prompts, r.single = nil, true
	switch first := firstElement(v.raw); {
	case v.kind() == jsontext.KindString:
		s, err := v.text()
		r.prompts = []prompt{{path: v.path, text: s}}
		return err
	case v.kind() != jsontext.KindBeginArray:
		return v.wrongType(promptShapes)
	case first == ']':
		return invalid(v.path, "prompt is empty")
	case first != '"' && first != '[':
		ids, err := v.tokenIDs(r.limits.VocabSize)
		r.prompts = []prompt{{path: v.path, ids: ids}}
		return err
	}
	r.single = false
	return v.elements(promptShapes, func(i int, e value) (err error) {
		if i >= r.limits.MaxChoices {
			return invalid(v.path, "prompt holds more than %d prompts", r.limits.MaxChoices)
		}
		p := prompt{path: e.path}
		switch e.kind() {
		case jsontext.KindString:
			p.text, err = e.text()
		case jsontext.KindBeginArray:
			p.ids, err = e.tokenIDs(r.limits.VocabSize)
		default:
			err = e.wrongType("a string or an array of token ids")
		}
		r.prompts = append(r.prompts, p)
		return err
	})
}

// firstElement is the byte that an array's first element starts with, ']' for an empty one.
func firstElement(raw jsontext.Value) byte {
	for _, c := range raw[1:] {
		switch c {
		case ' ', '\t', '\r', '\n':
		default:
			return c
		}
	}
	return 0
}

// defaultMaxTokens is OpenAI's for this endpoint.
const defaultMaxTokens = 16

func (r *completionRequest) settle(withTokenizer bool) error {
	if r.given != nil {
		r.prompts, r.single = r.given.prompts, !r.given.list
	}
	if r.prompts == nil {
		return invalid("prompt", "prompt is required: %s", promptShapes)
	}
	if len(r.prompts)*r.n > r.limits.MaxChoices {
		return invalid("n", "%d prompts with n = %d are more than the %d answers that one request may ask for",
			len(r.prompts), r.n, r.limits.MaxChoices)
	}
	if err := r.check(withTokenizer); err != nil {
		return err
	}
	if r.maxTokens < 0 {
		r.maxTokens = max(defaultMaxTokens, r.sampling.MinTokens)
	}
	if r.echo && r.sampling.Logprobs {
		r.sampling.PromptLogprobs = true
		r.sampling.PromptTopLogprobs = max(r.sampling.PromptTopLogprobs, r.topLogprobs)
	}
	if r.maxTokens == 0 && !r.echo && !r.sampling.PromptLogprobs {
		return invalid(r.limitField, "%s must be at least 1, unless echo or prompt_logprobs asks for the prompt alone", r.limitField)
	}
	return nil
}

// completionGeneration makes a request ready to run.
func (s *Server) completionGeneration(r *completionRequest) (*generation, error) {
	for i := range r.prompts {
		p := &r.prompts[i]
		if p.ids == nil {
			ids, err := s.tok.Encode(p.text, r.addSpecial)
			if err != nil {
				return nil, invalid(p.path, "%s", err)
			}
			p.ids = ids
		} else if r.echo {
			p.text = s.tok.Decode(p.ids, r.skipSpecial)
		}
		if err := r.checkLength(p.path, len(p.ids)); err != nil {
			return nil, err
		}
	}
	return &generation{params: &r.params, prompts: r.prompts, single: r.single, echo: r.echo}, nil
}
