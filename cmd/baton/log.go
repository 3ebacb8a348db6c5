package main

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"
)

// newLogger logs to w through a lineWriter, which is flushed when nothing is logged any more.
func newLogger(w io.Writer, level slog.Level, asJSON bool) (*slog.Logger, *lineWriter) {
	lines := &lineWriter{w: w}
	options := &slog.HandlerOptions{Level: level}
	var h slog.Handler = slog.NewTextHandler(lines, options)
	if asJSON {
		h = slog.NewJSONHandler(lines, options)
	}
	return slog.New(urgentHandler{h, lines}), lines
}

// urgentHandler writes warnings, and all before them, at once: they may be the last that is heard of a process.
type urgentHandler struct {
	slog.Handler
	lines *lineWriter
}

// Handle implements slog.Handler.
func (h urgentHandler) Handle(ctx context.Context, r slog.Record) error {
	err := h.Handler.Handle(ctx, r)
	if r.Level >= slog.LevelWarn {
		h.lines.Flush()
	}
	return err
}

// WithAttrs implements slog.Handler.
func (h urgentHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return urgentHandler{h.Handler.WithAttrs(attrs), h.lines}
}

// WithGroup implements slog.Handler.
func (h urgentHandler) WithGroup(name string) slog.Handler {
	return urgentHandler{h.Handler.WithGroup(name), h.lines}
}

// lineWriter writes a line at once when it is the first for a while. Others follow together: a process that
// logs thousands of requests a second would spend more time on the writes than on the lines. It is safe for
// concurrent use.
type lineWriter struct {
	w io.Writer

	mu      sync.Mutex
	pending []byte
	written time.Time   // when w was last written to
	timer   *time.Timer // that writes pending, nil when none runs
}

// How long lines wait for others, and how many bytes may.
const (
	lineWait   = 5 * time.Millisecond
	linesAhead = 256 << 10
)

// Write takes whole lines. What becomes of them shows on the other side of w alone, as with any log.
func (l *lineWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending = append(l.pending, b...)
	switch wait := lineWait - time.Since(l.written); {
	case wait <= 0 || len(l.pending) >= linesAhead:
		l.flush()
	case l.timer == nil:
		l.timer = time.AfterFunc(wait, l.Flush)
	}
	return len(b), nil
}

// Flush writes what waits.
func (l *lineWriter) Flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flush()
}

func (l *lineWriter) flush() {
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	if len(l.pending) > 0 {
		_, _ = l.w.Write(l.pending) // nobody could be told
		l.pending = l.pending[:0]
		l.written = time.Now()
	}
}
