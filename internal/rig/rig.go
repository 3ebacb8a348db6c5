//go:build unix

// Package rig runs real baton processes for benchmarks and drills: it starts and ends them, reads what they
// print and measure, looks at what they hold, and asks their frontends for completions.
//
// Whoever starts a Process ends it with Stop or Kill. A rig touches no process that it did not start.
package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"sync"
	"syscall"
	"time"
)

// Command says how baton is run.
type Command struct {
	Path string
	Env  []string // beside this process's own
}

// Process is one life of a baton process.
type Process struct {
	Name string
	Log  *Log

	cmd  *exec.Cmd
	done chan struct{}
}

// Start runs baton with args. What it prints goes to log.
func (c Command) Start(name string, log *Log, args ...string) (*Process, error) {
	p := &Process{Name: name, Log: log, cmd: exec.Command(c.Path, args...), done: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), c.Env...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.WaitDelay = time.Second                           // for what children of its own still print
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt of the terminal's is for the rig
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("rig: start %s: %w", name, err)
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // how it ended is read from ProcessState
	}()
	return p, nil
}

// Pid is the process's number.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Alive tells whether it has not.
func (p *Process) Alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// ExitCode is how it ended: -1 by a signal, or when it has not ended.
func (p *Process) ExitCode() int {
	if p.Alive() {
		return -1
	}
	return p.cmd.ProcessState.ExitCode()
}

// Signal sends one. A process that has ended gets none.
func (p *Process) Signal(s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("rig: %s: %w", p.Name, err)
	}
	return nil
}

// Kill ends it at once, even when it is stopped, and waits until it is gone.
func (p *Process) Kill() error {
	err := p.Signal(syscall.SIGKILL)
	if err == nil {
		<-p.done
	}
	return err
}

// ExitError is a process that did not end as it should when it was asked to.
type ExitError struct {
	Name string
	Code int // -1: a signal ended it
	Late time.Duration
}

func (e *ExitError) Error() string {
	if e.Late > 0 {
		return fmt.Sprintf("%s did not end within %v of SIGTERM", e.Name, e.Late)
	}
	return fmt.Sprintf("%s ended with code %d after SIGTERM", e.Name, e.Code)
}

// Stop asks the process to end as an operator does, with SIGTERM, and kills it when it takes longer than
// patience. It returns an *ExitError when it was not a clean end.
func (p *Process) Stop(patience time.Duration) error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C:
		return errors.Join(&ExitError{Name: p.Name, Code: -1, Late: patience}, p.Kill())
	}
	if code := p.ExitCode(); code != 0 {
		return &ExitError{Name: p.Name, Code: code}
	}
	return nil
}

// Await waits for a line of this life that matches and returns its first group.
func (p *Process) Await(ctx context.Context, pattern *regexp.Regexp) (string, error) {
	group, err := p.Log.Await(ctx, pattern, p.done)
	if errors.Is(err, errEnded) {
		err = fmt.Errorf("with code %d: %w", p.ExitCode(), err)
	}
	if err != nil {
		err = fmt.Errorf("rig: %s: %w", p.Name, err)
	}
	return group, err
}

// Log takes what a process prints, line by line: to a writer, to a function, to whoever waits for a line.
type Log struct {
	mu    sync.Mutex
	to    io.Writer
	each  func(line string)
	rest  []byte
	lines []string // the latest
	waits map[chan string]*regexp.Regexp
}

// tailLines is how many lines a log remembers.
const tailLines = 200

// NewLog makes a log that writes to w and calls each with every line; both may be nil. One process writes
// to a log.
func NewLog(w io.Writer, each func(line string)) *Log {
	return &Log{to: w, each: each, waits: make(map[chan string]*regexp.Regexp)}
}

// Write implements io.Writer.
func (l *Log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.to != nil {
		if _, err := l.to.Write(b); err != nil {
			return 0, err
		}
	}
	for _, c := range b {
		if c != '\n' {
			l.rest = append(l.rest, c)
			continue
		}
		l.line(string(l.rest))
		l.rest = l.rest[:0]
	}
	return len(b), nil
}

func (l *Log) line(line string) {
	if l.each != nil {
		l.each(line)
	}
	if len(l.lines) == tailLines {
		l.lines = append(l.lines[:0], l.lines[1:]...)
	}
	l.lines = append(l.lines, line)
	for found, pattern := range l.waits {
		tell(found, pattern, line)
	}
}

// tell gives a waiter the first match only.
func tell(found chan string, pattern *regexp.Regexp, line string) {
	if m := pattern.FindStringSubmatch(line); m != nil {
		select {
		case found <- m[len(m)-1]:
		default:
		}
	}
}

// errEnded says that nobody writes to a log any more.
var errEnded = errors.New("it has ended")

// Await waits for a line that matches, of those remembered too, and returns its first group. ended is closed
// when nothing more will come.
func (l *Log) Await(ctx context.Context, pattern *regexp.Regexp, ended <-chan struct{}) (string, error) {
	found := l.watch(pattern)
	defer l.unwatch(found)
	var err error
	select {
	case group := <-found:
		return group, nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-ended:
		err = errEnded
	}
	select {
	case group := <-found: // the last words
		return group, nil
	default:
		return "", fmt.Errorf("no %q: %w; the log:\n%s", pattern, err, l.Tail())
	}
}

func (l *Log) watch(pattern *regexp.Regexp) chan string {
	found := make(chan string, 1)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		tell(found, pattern, line)
	}
	l.waits[found] = pattern
	return found
}

func (l *Log) unwatch(found chan string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.waits, found)
}

// Tail is the latest lines.
func (l *Log) Tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b []byte
	for _, line := range l.lines {
		b = append(append(b, line...), '\n')
	}
	return string(b)
}
