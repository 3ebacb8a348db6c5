package tensor

import (
	"errors"
	"fmt"
)

// The kinds of trouble that a FileError wraps.
var (
	// ErrMalformed: the file contradicts itself or its format, or it ends early. Getting it again may help.
	ErrMalformed = errors.New("malformed file")
	// ErrUnsupported: the file is well formed, but holds something that this program cannot read.
	ErrUnsupported = errors.New("unsupported")
	// ErrMissing: the file is well formed, but lacks what was asked of it.
	ErrMissing = errors.New("missing")
)

// FileError says what is wrong with which part of which file. errors.Is tells the three kinds apart.
type FileError struct {
	Path    string
	Field   string // a header field, metadata key or tensor; empty when the file as a whole is meant
	Problem string
	Err     error // ErrMalformed, ErrUnsupported, ErrMissing, or what the operating system said
}

func (e *FileError) Error() string {
	if e.Field == "" {
		return e.Path + ": " + e.Problem
	}
	return e.Path + ": " + e.Field + ": " + e.Problem
}

func (e *FileError) Unwrap() error { return e.Err }

func fileErrorf(kind error, path, field, format string, args ...any) error {
	return &FileError{Path: path, Field: field, Problem: fmt.Sprintf(format, args...), Err: kind}
}

// quoteName names a tensor or key in a message. Names come from files, so they are escaped and cut.
func quoteName(kind, name string) string {
	const limit = 80
	if len(name) > limit {
		return fmt.Sprintf("%s %q… (%d bytes)", kind, name[:limit], len(name))
	}
	return fmt.Sprintf("%s %q", kind, name)
}
