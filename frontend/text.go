package frontend

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"unicode"

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
	template, err := t.Template("")
	if errors.Is(err, text.ErrNoTemplate) {
		return nil, errNoTemplate
	}
	if err != nil {
		return nil, templateFault(err)
	}
	prompt, err := template.Render(ctx, text.Chat{
		Messages: c.Messages, Tools: c.Tools, Documents: c.Documents, Extra: c.Kwargs,
		AddGenerationPrompt: c.AddGenerationPrompt,
	})
	if err != nil {
		return nil, templateFault(err)
	}
	if c.ContinueFinalMessage {
		if prompt.Text, err = cutAfterFinalMessage(prompt.Text, c.Messages); err != nil {
			return nil, err
		}
	}
	return t.EncodePrompt(prompt)
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

// cutAfterFinalMessage drops what the template wrote after the last message, as transformers does for
// continue_final_message: trailing space of the message stays only if the template kept it.
func cutAfterFinalMessage(rendered string, messages []byte) (string, error) {
	final := finalContent(messages)
	trimmed := strings.TrimSpace(final)
	if trimmed == "" {
		return "", errors.New("continue_final_message needs a last message with text")
	}
	at := strings.LastIndex(rendered, trimmed)
	if at < 0 {
		return "", errors.New("continue_final_message: the chat template does not show the last message as it is written")
	}
	if whole := strings.TrimLeftFunc(final, unicode.IsSpace); strings.HasPrefix(rendered[at:], whole) {
		return rendered[:at+len(whole)], nil
	}
	return rendered[:at+len(trimmed)], nil
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
