package frontend

import (
	"context"
	"encoding/json/jsontext"
	"strings"
)

// chatRequest is a decoded POST /v1/chat/completions.
type chatRequest struct {
	params
	chat     Chat
	logprobs bool
	noTools  bool // tool_choice "none"
}

func parseChat(body []byte, limits *Limits, withTokenizer bool) (*chatRequest, error) {
	r := &chatRequest{params: newParams(limits)}
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
		choice, _ := v.text()
		r.noTools = choice == "none"
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
	case r.maxTokens == 0 || r.maxCompletionTokens == 0:
		return invalid("max_tokens", "max_tokens must be at least 1")
	case r.topLogprobs > 0 && !r.logprobs:
		return invalid("top_logprobs", "top_logprobs needs logprobs to be true")
	}
	if err := r.chat.check(); err != nil {
		return err
	}
	if r.noTools || string(r.chat.Tools) == "[]" {
		r.chat.Tools = nil
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

// normalizeMessages rewrites messages to what chat templates expect, members in their order: content
// parts joined by newlines, content null or missing as "", the arguments of tool calls as objects.
func normalizeMessages(v value) ([]byte, error) {
	out := []byte{'['}
	err := v.elements("an array of messages", func(i int, m value) (err error) {
		if i > 0 {
			out = append(out, ',')
		}
		out, err = appendMessage(out, m)
		return err
	})
	if err == nil && len(out) == 1 {
		err = invalid("messages", "messages is empty: at least one message is needed")
	}
	return append(out, ']'), err
}

func appendMessage(out []byte, message value) ([]byte, error) {
	role, content := false, false
	start := len(out)
	err := message.members(func(name string, m value) (err error) {
		if len(out) > start {
			out = append(out, ',')
		} else {
			out = append(out, '{')
		}
		out = appendString(out, name)
		out = append(out, ':')
		switch name {
		case "role":
			role = true
			if s, err := m.text(); err != nil {
				return err
			} else if s == "" {
				return invalid(m.path, "%s must not be empty", m.path)
			}
			out = append(out, m.raw...)
		case "content":
			content = true
			out, err = appendContent(out, m)
		case "tool_calls":
			out, err = appendToolCalls(out, m)
		default:
			out = append(out, m.raw...)
		}
		return err
	})
	if err == nil && !role {
		err = invalid(message.path+".role", "%s.role is required", message.path)
	}
	if err == nil && !content {
		out = append(out, `,"content":""`...)
	}
	return append(out, '}'), err
}

func appendContent(out []byte, v value) ([]byte, error) {
	switch v.kind() {
	case jsontext.KindString:
		return append(out, v.raw...), nil
	case jsontext.KindNull:
		return append(out, `""`...), nil
	}
	var parts []string
	err := v.elements("a string or an array of text parts", func(_ int, e value) error {
		part, err := textPart(e)
		parts = append(parts, part)
		return err
	})
	return appendString(out, strings.Join(parts, "\n")), err
}

// textPart is the text of {"type":"text","text":...} or of a bare string.
func textPart(v value) (string, error) {
	if v.kind() == jsontext.KindString {
		return v.text()
	}
	var text *string
	err := v.members(func(name string, m value) error {
		if name != "type" && name != "text" {
			return nil
		}
		s, err := m.text()
		if err != nil {
			return err
		}
		if name == "text" {
			text = &s
		} else if s != "text" {
			return invalid(m.path, "%s is %q, but this server takes text only", m.path, s)
		}
		return nil
	})
	switch {
	case err != nil:
		return "", err
	case text == nil:
		return "", invalid(v.path, "%s has no text", v.path)
	}
	return *text, nil
}

// appendToolCalls turns arguments that are a string of JSON into that JSON: templates expect an object.
// What the model once wrote and is not an object stays a string.
func appendToolCalls(out []byte, v value) ([]byte, error) {
	if v.kind() == jsontext.KindNull {
		return append(out, "null"...), nil
	}
	out = append(out, '[')
	err := v.elements("an array of tool calls", func(i int, call value) error {
		if i > 0 {
			out = append(out, ',')
		}
		return rewrite(&out, call, func(name string, m value) (bool, error) {
			if name != "function" || m.kind() != jsontext.KindBeginObject {
				return false, nil
			}
			return true, rewrite(&out, m, func(name string, m value) (bool, error) {
				if name != "arguments" || m.kind() != jsontext.KindString {
					return false, nil
				}
				s, err := m.text()
				if raw := jsontext.Value(s); err == nil && nesting(raw) < 64 && raw.IsValid() && raw.Kind() == jsontext.KindBeginObject {
					out = append(out, raw...)
					return true, nil
				}
				return false, err
			})
		})
	})
	return append(out, ']'), err
}

// rewrite copies an object to out; a member that replace has written itself is not copied.
func rewrite(out *[]byte, v value, replace func(name string, m value) (bool, error)) error {
	*out = append(*out, '{')
	first := true
	err := v.members(func(name string, m value) error {
		if !first {
			*out = append(*out, ',')
		}
		first = false
		*out = append(appendString(*out, name), ':')
		done, err := replace(name, m)
		if err == nil && !done {
			*out = append(*out, m.raw...)
		}
		return err
	})
	*out = append(*out, '}')
	return err
}

// set reads one field that describes a conversation.
func (c *Chat) set(v value) (known bool, err error) {
	switch v.path {
	case "messages":
		c.Messages, err = normalizeMessages(v)
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
	return nil
}

// renderChat is the prompt of a conversation.
func (s *Server) renderChat(ctx context.Context, c *Chat) ([]int32, error) {
	ids, err := s.tok.RenderChat(ctx, c)
	switch {
	case err == nil:
		return ids, nil
	case ctx.Err() != nil:
		return nil, err
	default:
		return nil, invalid("messages", "%s", err)
	}
}

// chatGeneration makes a request ready to run.
func (s *Server) chatGeneration(ctx context.Context, r *chatRequest) (*generation, error) {
	ids, err := s.renderChat(ctx, &r.chat)
	if err != nil {
		return nil, err
	}
	if err := r.checkLength("messages", len(ids)); err != nil {
		return nil, err
	}
	return &generation{params: &r.params, chat: true, prompts: []prompt{{path: "messages", ids: ids}}}, nil
}
