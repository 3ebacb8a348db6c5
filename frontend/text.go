package frontend

import (
	"context"
	"encoding/json"
	"errors"

	"baton/text"
)

// NewTokenizer makes the tokenizer of a model, with its default chat template, into a Tokenizer.
func NewTokenizer(t *text.Tokenizer) Tokenizer { return modelTokenizer{t} }

type modelTokenizer struct{ *text.Tokenizer }

func (t modelTokenizer) Encode(s string, addSpecial bool) ([]int32, error) {
	return t.Tokenizer.Encode(s, text.EncodeOptions{AddSpecial: addSpecial, ParseSpecial: true})
}

func (t modelTokenizer) NewDetokenizer(skipSpecial bool, except ...string) Detokenizer {
	return modelDetokenizer{t.Tokenizer.NewDetokenizer(skipSpecial, except...)}
}

type modelDetokenizer struct{ *text.Detokenizer }

func (d modelDetokenizer) Push(id int32) string { return d.Detokenizer.Push(id) }

var errNoTemplate = errors.New("this model has no chat template: send the whole prompt to /v1/completions")

func (t modelTokenizer) RenderChat(ctx context.Context, c *Chat) ([]int32, error) {
	if len(c.prefix.IDs) > 0 {
		s, _, err := t.Transcribe(ctx, nil, c, c.prefix)
		if err != nil {
			return nil, err
		}
		return s.IDs(), nil
	}
	template, err := t.template()
	if err != nil {
		return nil, err
	}
	prompt, err := template.Render(ctx, c.forTemplate())
	if err != nil {
		return nil, templateFault(err)
	}
	return t.EncodePrompt(prompt)
}

func (t modelTokenizer) template() (*text.Template, error) {
	template, err := t.Template("")
	if errors.Is(err, text.ErrNoTemplate) {
		return nil, errNoTemplate
	}
	if err != nil {
		return nil, templateFault(err)
	}
	return template, nil
}

// forTemplate is what the template is given.
func (c *Chat) forTemplate() text.Chat {
	return text.Chat{
		Messages: c.Messages, Tools: c.Tools, Documents: c.Documents, Extra: c.Kwargs,
		AddGenerationPrompt: c.AddGenerationPrompt, ContinueFinalMessage: c.ContinueFinalMessage,
	}
}

// Transcribe implements Transcriber.
func (t modelTokenizer) Transcribe(ctx context.Context, prev *text.Script, c *Chat, p text.Prefix) (*text.Script, text.Reuse, error) {
	template, err := t.template()
	if err != nil {
		return nil, text.Reuse{}, err
	}
	s, reuse, err := t.Tokenizer.Transcribe(ctx, template, prev, c.forTemplate(), p)
	if err != nil {
		return nil, reuse, templateFault(err)
	}
	return s, reuse, nil
}

// OpenCall implements CallOpener.
func (t modelTokenizer) OpenCall(ctx context.Context, c *Chat, f text.OutputFormat, function string) (*text.Opening, error) {
	template, err := t.template()
	if err != nil {
		return nil, err
	}
	o, err := t.Tokenizer.OpenCall(ctx, template, f, c.forTemplate(), function)
	if err != nil {
		return nil, templateFault(err)
	}
	return o, nil
}

// templateFault words a template's failure for the author of the request.
func templateFault(err error) error {
	var e *text.TemplateError
	switch {
	case !errors.As(err, &e):
		return err
	case e.Raised:
		return errors.New("the chat template refuses these messages: " + e.Message)
	default:
		return errors.New("the chat template cannot render these messages: " + e.Message)
	}
}

// finalContent is the text of the last message, of the last part that has one.
func finalContent(messages []byte) string {
	var list []struct{ Content json.RawMessage }
	if json.Unmarshal(messages, &list) != nil || len(list) == 0 {
		return ""
	}
	content := list[len(list)-1].Content
	var s string
	if json.Unmarshal(content, &s) == nil {
		return s
	}
	var parts []struct{ Text string }
	if json.Unmarshal(content, &parts) != nil || len(parts) == 0 {
		return ""
	}
	return parts[len(parts)-1].Text
}
