package frontend

import (
	"context"
	"errors"
	"slices"

	"baton/text"
)

// CallOpener is a Tokenizer that knows how its model begins a call.
type CallOpener interface {
	Tokenizer
	// OpenCall gives what the prompt of a chat must end with for the answer to call a function, any one if it is empty (see
	// text.Tokenizer.OpenCall).
	OpenCall(ctx context.Context, chat *Chat, format text.OutputFormat, function string) (*text.Opening, error)
}

// toolChoice is what tool_choice asks for. The zero value leaves the choice to the model.
type toolChoice struct {
	none     bool   // no function
	required bool   // some function
	function string // this one
}

// forced reports whether the model has no choice but to call.
func (c *toolChoice) forced() bool { return c.required || c.function != "" }

// parseToolChoice reads "none", "auto", "required" or {"type":"function","function":{"name":"..."}}.
func parseToolChoice(v value) (c toolChoice, err error) {
	if s, err := v.text(); err == nil {
		switch s {
		case "auto":
		case "none":
			c.none = true
		case "required":
			c.required = true
		default:
			err = invalid(v.path, `%s is %.40q; it must be "none", "auto", "required" or {"type":"function","function":{"name":"..."}}`, v.path, s)
		}
		return c, err
	}
	err = v.members(func(name string, m value) error {
		switch name {
		case "type":
			s, err := m.text()
			if err == nil && s != "function" {
				err = invalid(m.path, `%s is %.40q; this server can be asked for a "function" only`, m.path, s)
			}
			return err
		case "function":
			return m.members(func(name string, m value) (err error) {
				if name == "name" {
					c.function, err = m.textOf(maxLabelBytes)
				}
				return err
			})
		}
		return nil
	})
	if err == nil && c.function == "" {
		err = invalid(v.path+".function.name", "%s.function.name is missing: the function to call", v.path)
	}
	return c, err
}

// settleTools applies tool_choice to the tools.
func (r *chatRequest) settleTools() error {
	c := &r.choice
	if c.none || string(r.chat.Tools) == "[]" {
		r.chat.Tools = nil
	}
	switch {
	case !c.forced():
		return nil
	case len(r.chat.Tools) == 0:
		return invalid("tool_choice", "tool_choice asks for a call, and there are no tools: send tools, or tool_choice auto")
	case c.function != "" && !slices.Contains(text.ToolNames(r.chat.Tools), c.function):
		return invalid("tool_choice.function.name", "tool_choice.function.name is %.80q, and tools has no such function", c.function)
	case !r.chat.AddGenerationPrompt:
		return invalid("tool_choice", "tool_choice asks for a call, which begins an answer: it goes with neither continue_final_message nor add_generation_prompt false")
	}
	return nil
}

// openCall ends a prompt with the beginning of a call, if tool_choice asks for one.
func (s *Server) openCall(ctx context.Context, r *chatRequest, prompt []int32) (*text.Opened, error) {
	if !r.choice.forced() {
		return nil, nil
	}
	tok, ok := s.tok.(CallOpener)
	if !ok {
		return nil, invalid("tool_choice", "tool_choice asks for a call, and this model's tokenizer does not tell how it begins; only auto and none are supported")
	}
	opening, err := tok.OpenCall(ctx, &r.chat, s.cfg.Output, r.choice.function)
	var opened text.Opened
	if err == nil {
		// The ids that a relay or an earlier leg gives may have it already.
		if r.given != nil {
			opened, err = opening.Complete(prompt)
		} else {
			opened, err = opening.Append(prompt)
		}
	}
	var refused *text.OpeningError
	switch {
	case errors.As(err, &refused):
		return nil, invalid("tool_choice", "tool_choice asks for a call, which cannot be had: %s", refused.Reason)
	case err != nil:
		return nil, chatFault(ctx, err)
	}
	return &opened, nil
}
