package text

import (
	"errors"
	"fmt"
)

// Errors that callers tell apart with errors.Is.
var (
	// ErrNoTokenizer: the folder holds no tokenizer. A model can still be served with token ids.
	ErrNoTokenizer = errors.New("no tokenizer.json")
	// ErrNoTemplate: the model has no chat template of the requested name.
	ErrNoTemplate = errors.New("no chat template")
	// ErrLimit: an input is larger, or a template does more, than this package accepts.
	ErrLimit = errors.New("limit exceeded")
)

// FileError says what is wrong with which field of a tokenizer's files.
type FileError struct {
	File  string // path, or "gguf"
	Field string // dotted path of the field; empty when the whole file is at fault
	Err   error
}

func (e *FileError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("tokenizer: %s: %v", e.File, e.Err)
	}
	return fmt.Sprintf("tokenizer: %s: %s: %v", e.File, e.Field, e.Err)
}

func (e *FileError) Unwrap() error { return e.Err }

// UnsupportedError names a kind of tokenizer, or a part of one, that this package does not implement.
type UnsupportedError struct {
	Part string // "model type", "pre-tokenizer", "normalizer", ...
	Name string // as the file spells it
	Hint string // what would work instead; may be empty
}

func (e *UnsupportedError) Error() string {
	s := fmt.Sprintf("unsupported %s %q", e.Part, e.Name)
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// TemplateError is a template's own refusal of a conversation (raise_exception), or a failure to render
// it. Raised tells the first: the request is at fault, and Message is meant for its author.
type TemplateError struct {
	Template string
	Raised   bool
	Message  string
	Err      error
}

func (e *TemplateError) Error() string {
	return fmt.Sprintf("chat template %q: %s", e.Template, e.Message)
}

func (e *TemplateError) Unwrap() error { return e.Err }

// PrefixError says why a conversation's ids cannot begin with those that the model saw and sampled (see Prefix).
type PrefixError struct {
	Message int   // index of the message that the sampled ids are
	EOS     int32 // the tokenizer's end-of-sequence token; -1 for none
	Reason  string
}

func (e *PrefixError) Error() string {
	return fmt.Sprintf("the sampled ids of message %d cannot be continued: where it ends is told by end-of-sequence tokens (id %d), and %s", e.Message, e.EOS, e.Reason)
}
