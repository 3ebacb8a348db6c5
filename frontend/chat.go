package frontend

import (
	"context"
	"encoding/json/jsontext"
	"errors"
	"strconv"

	"baton/text"
)

// chatRequest is a decoded POST /v1/chat/completions.
type chatRequest struct {
	params
	chat     Chat
	logprobs bool
	choice   toolChoice
}

// parseChat reads a body. Its first messages may be left out: those that are known, if k is not nil.
func parseChat(body []byte, limits *Limits, withTokenizer bool, k *known) (*chatRequest, error) {
	r := &chatRequest{params: newParams(limits), chat: newChat(limits, k)}
	if err := decodeObject(body, limits.MaxDepth, r.field); err != nil {
		return nil, err
	}
	if err := r.settle(withTokenizer); err != nil {
		return nil, err
	}
	return r, nil
}

func (r *chatRequest) field(name string, v value) (err error) {
	if known, err := r.set(v); known || err != nil {
		return err
	}
	if known, err := r.chat.set(v); known || err != nil {
		return err
	}
	switch name {
	case "tool_choice":
		r.choice, err = parseToolChoice(v)
	case "logprobs":
		r.logprobs, err = v.boolean()
	case "top_logprobs":
		r.topLogprobs, err = r.count(v)
	}
	return err
}

func (r *chatRequest) settle(withTokenizer bool) error {
	switch {
	case r.chat.Messages == nil:
		return invalid("messages", "messages is required: an array of at least one message")
	case r.maxTokens == 0:
		return invalid("max_tokens", "max_tokens must be at least 1")
	case r.maxCompletionTokens == 0:
		return invalid("max_completion_tokens", "max_completion_tokens must be at least 1")
	case r.given != nil && r.given.list:
		return invalid(r.given.path, "%s is a list of prompts; a conversation has one", r.given.path)
	case r.topLogprobs > 0 && !r.logprobs:
		return invalid("top_logprobs", "top_logprobs needs logprobs to be true")
	}
	if err := r.chat.check(); err != nil {
		return err
	}
	if err := r.settleTools(); err != nil {
		return err
	}
	if r.logprobs {
		r.topLogprobs = max(r.topLogprobs, 0)
	} else {
		r.topLogprobs = -1
	}
	return r.check(withTokenizer)
}

// objects is an array of objects, unchanged.
func objects(v value) ([]byte, error) {
	err := v.elements("an array of objects", func(_ int, e value) error {
		if e.kind() != jsontext.KindBeginObject {
			return e.wrongType("an object")
		}
		return nil
	})
	return v.raw, err
}

// newChat begins a conversation of which the first messages may be known.
func newChat(limits *Limits, k *known) Chat {
	c := Chat{lastAnswer: -1, vocab: limits.VocabSize}
	if k != nil && len(k.turns) > 0 {
		c.known, c.cut = k.turns[0].script.Len(), k.cut
	}
	return c
}

// setMessages checks a conversation and leaves it as it is: what a template needs otherwise (content as
// one string, decoded arguments of tool calls) is the tokenizer's knowledge. Only what rollouts carry is taken out.
func (c *Chat) setMessages(v value) error {
	c.Messages = []byte{'['}
	n := c.known
	var last sampledIDs
	err := v.elements("an array of messages", func(i int, m value) error {
		m.path = v.path + "[" + strconv.Itoa(n) + "]"
		if i == 0 {
			c.next = m.raw
		}
		var ids sampledIDs
		role, err := checkMessage(m, &ids)
		if role == "assistant" {
			c.lastAnswer = n
			if err == nil {
				err = ids.check(m.path)
			}
			if ids.prompt.raw != nil {
				last, c.prefix.Message = ids, n
			}
		}
		c.cutSeen = c.cutSeen || c.isCut(ids.prompt)
		if i > 0 {
			c.Messages = append(c.Messages, ',')
		}
		c.Messages = ids.appendOthers(c.Messages, m.raw)
		n++
		return err
	})
	c.Messages = append(c.Messages, ']')
	switch {
	case err != nil:
		return err
	case n == 0:
		return invalid(v.path, "%s is empty: at least one message is needed", v.path)
	}
	c.raw = trimArray(v.raw[:len(v.raw)-1])
	if last.prompt.raw == nil {
		return nil
	}
	var first []int32
	if c.isCut(last.prompt) {
		first = c.cut.ids
	}
	c.prefix.IDs, c.list.ids, err = last.ids(c.vocab, first)
	c.list.at, c.list.size = last.prompt.at-v.at, len(last.prompt.raw)
	return err
}

// isCut reports whether a list is the one that ids are left out of.
func (c *Chat) isCut(prompt value) bool {
	return c.cut.size > 0 && prompt.raw != nil && prompt.at == c.cut.at
}

// checkMessage checks what every template reads, and notes ids. An assistant's message may have no content: it only
// reasoned, or called tools.
func checkMessage(message value, ids *sampledIDs) (role string, err error) {
	content := false
	err = message.members(func(name string, m value) (err error) {
		switch {
		case ids.set(name, m):
		case name == "role":
			role, err = m.textOf(maxLabelBytes)
		case m.kind() == jsontext.KindNull:
		case name == "content":
			content = true
			if m.kind() != jsontext.KindString {
				err = m.elements("a string or an array of text parts", func(_ int, part value) error { return checkPart(part) })
			}
		case name == "tool_calls":
			_, err = objects(m)
		case name == "name" || name == "tool_call_id":
			_, err = m.textOf(maxLabelBytes)
		case name == "reasoning_content":
			_, err = m.text()
		}
		return err
	})
	switch {
	case err != nil:
	case role == "":
		err = invalid(message.path+".role", "%s.role is required", message.path)
	case !content && role != "assistant":
		err = invalid(message.path+".content", "%s.content is required in a message of role %.40q", message.path, role)
	}
	return role, err
}

// checkPart takes {"type":"text","text":"..."}; images and sounds are refused by name.
func checkPart(part value) error {
	text := false
	err := part.members(func(name string, m value) error {
		if name != "type" && name != "text" {
			return nil
		}
		s, err := m.text()
		if err == nil && name == "type" && s != "text" {
			return invalid(m.path, "%s is %q, but this server takes text only", m.path, s)
		}
		text = text || name == "text"
		return err
	})
	if err == nil && !text {
		err = invalid(part.path, "%s has no text", part.path)
	}
	return err
}

// set reads one field that describes a conversation.
func (c *Chat) set(v value) (known bool, err error) {
	switch v.path {
	case "messages":
		err = c.setMessages(v)
	case "required_prefix_token_ids":
		err = c.setRequiredPrefix(v, c.vocab)
	case "tools":
		c.Tools, err = objects(v)
	case "documents":
		c.Documents, err = objects(v)
	case "chat_template_kwargs":
		if v.kind() != jsontext.KindBeginObject {
			return true, v.wrongType("an object")
		}
		c.Kwargs = v.raw
	case "add_generation_prompt":
		var add bool
		add, err = v.boolean()
		c.generationPrompt = &add
	case "continue_final_message":
		c.ContinueFinalMessage, err = v.boolean()
	default:
		return false, nil
	}
	return true, err
}

// check settles whether the prompt ends with the beginning of an answer: unless the last message is to be
// continued, it does.
func (c *Chat) check() error {
	c.AddGenerationPrompt = !c.ContinueFinalMessage
	if c.generationPrompt != nil {
		c.AddGenerationPrompt = *c.generationPrompt
	}
	if c.ContinueFinalMessage && c.AddGenerationPrompt {
		return invalid("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
	}
	return c.settlePrefix()
}

// render is the prompt of a conversation of which nothing is known.
func (p *Prompter) render(ctx context.Context, c *Chat) ([]int32, error) {
	ids, err := p.tok.RenderChat(ctx, c)
	return ids, chatFault(ctx, err)
}

// chatFault is what an error of rendering means for the client.
func chatFault(ctx context.Context, err error) error {
	var prefix *text.PrefixError
	switch {
	case err == nil || ctx.Err() != nil:
		return err
	case errors.As(err, &prefix):
		path := "messages[" + strconv.Itoa(prefix.Message) + "]"
		return invalid(path+".generation_token_ids", "%s: %s", path, prefix)
	default:
		return invalid("messages", "%s", err)
	}
}

// chatGeneration makes a request ready to run.
func (s *Server) chatGeneration(ctx context.Context, r *chatRequest, k *known) (*generation, error) {
	p, err := prompted{}, error(nil)
	if r.given != nil {
		p.ids = r.given.prompts[0].ids
	} else {
		p, err = s.prompts.converse(ctx, &r.chat, k, scope{r.session, r.salt})
	}
	if err != nil {
		return nil, err
	}
	opened, err := s.openCall(ctx, r, p.ids)
	if err != nil {
		return nil, err
	}
	ids := p.ids
	if opened != nil {
		ids = opened.IDs
	}
	if err := r.checkLength("messages", len(ids)); err != nil {
		return nil, err
	}
	g := &generation{params: &r.params, chat: true, prompts: []prompt{{path: "messages", ids: ids}}, turn: p.turn, opened: opened, oneCall: r.choice.function != ""}
	switch {
	case opened != nil:
		g.output = &text.OutputOptions{Tools: r.chat.Tools, Opening: opened.Call}
	case s.cfg.Output != (text.OutputFormat{}):
		g.output = &text.OutputOptions{Tools: r.chat.Tools, ReasoningOpen: s.reasoningOpen(&r.chat, ids)}
	}
	return g, nil
}

// reasoningOpen tells whether the answer to a conversation begins within reasoning.
func (s *Server) reasoningOpen(c *Chat, prompt []int32) bool {
	if c.ContinueFinalMessage {
		return s.cfg.Output.ContinuesReasoning(finalContent(c.Messages))
	}
	const tail = 32 // more tokens than a tag and white space have
	return s.cfg.Output.OpensReasoning(s.tok.Decode(prompt[max(0, len(prompt)-tail):], false))
}
