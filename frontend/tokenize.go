package frontend

// tokenize answers vLLM's POST /tokenize: the ids of a prompt, or of a conversation after the template.
func (s *Server) tokenize(x *exchange) error {
	body, err := x.body()
	if err != nil {
		return err
	}
	var r tokenizeRequest
	if err := r.parse(body, &s.cfg.Limits); err != nil {
		return err
	}
	if err := s.checkModel(r.model); err != nil {
		return err
	}
	var ids []int32
	if r.prompt != nil {
		if ids, err = s.tok.Encode(*r.prompt, r.addSpecial); err != nil {
			return invalid("prompt", "%s", err)
		}
	} else if ids, err = s.prompts.render(x.ctx, &r.chat); err != nil {
		return err
	}
	b := appendInt([]byte(`{"count":`), len(ids))
	b = s.appendMaxModelLen(x.ctx, b)
	b = appendIDs(append(b, `,"tokens":`...), ids)
	b = append(b, `,"token_strs":`...)
	if !r.tokenStrings {
		return x.json(append(b, "null}"...))
	}
	b = append(b, '[')
	for i, id := range ids {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, s.tok.TokenBytes(id))
	}
	return x.json(append(b, "]}"...))
}

type tokenizeRequest struct {
	model        string
	prompt       *string
	chat         Chat
	addSpecial   bool
	tokenStrings bool
}

func (r *tokenizeRequest) parse(body []byte, limits *Limits) error {
	r.addSpecial = true
	r.chat = newChat(limits, nil)
	err := decodeObject(body, limits.MaxDepth, func(name string, v value) (err error) {
		switch name {
		case "model":
			r.model, err = v.textOf(maxLabelBytes)
		case "prompt":
			var s string
			s, err = v.text()
			r.prompt = &s
		case "add_special_tokens":
			r.addSpecial, err = v.boolean()
		case "return_token_strs":
			r.tokenStrings, err = v.boolean()
		default:
			_, err = r.chat.set(v)
		}
		return err
	})
	switch {
	case err != nil:
		return err
	case r.prompt == nil && r.chat.Messages == nil:
		return invalid("prompt", "prompt or messages is required")
	case r.prompt != nil && r.chat.Messages != nil:
		return invalid("messages", "prompt and messages exclude each other")
	}
	return r.chat.check()
}

// detokenize answers vLLM's POST /detokenize: the text of ids, special tokens included.
func (s *Server) detokenize(x *exchange) error {
	body, err := x.body()
	if err != nil {
		return err
	}
	var model string
	var ids []int32
	given := false
	err = decodeObject(body, s.cfg.Limits.MaxDepth, func(name string, v value) (err error) {
		switch name {
		case "model":
			model, err = v.textOf(maxLabelBytes)
		case "tokens":
			given = true
			ids, err = v.tokenIDs(s.cfg.Limits.VocabSize)
		}
		return err
	})
	if err == nil && !given {
		err = invalid("tokens", "tokens is required: an array of token ids")
	}
	if err == nil {
		err = s.checkModel(model)
	}
	if err != nil {
		return err
	}
	return x.json(append(appendString([]byte(`{"prompt":`), s.tok.Decode(ids, false)), '}'))
}
