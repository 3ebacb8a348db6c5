package loadgen

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"slices"
	"time"
)

// traceRow is one line of a trace: Mooncake's format, with the fields for sessions that NVIDIA's aiperf has, and two of our own
// (prefix_length, result). Lines that we write have a result, which is not read.
type traceRow struct {
	Timestamp *float64       `json:"timestamp,omitempty"` // ms
	Delay     *float64       `json:"delay,omitempty"`     // ms
	Session   string         `json:"session_id,omitempty"`
	Input     int            `json:"input_length,omitzero"`
	Output    int            `json:"output_length"`
	Prefix    int            `json:"prefix_length,omitzero"`
	HashIDs   []int64        `json:"hash_ids,omitempty"`
	Messages  jsontext.Value `json:"messages,omitempty"`
	Mode      string         `json:"message_mode,omitempty"`
	Result    *traceResult   `json:"result,omitempty"`
}

// traceResult is what became of a request. Times are in milliseconds.
type traceResult struct {
	Sent    float64  `json:"sent_ms"` // on the clock of timestamps
	TTFT    *float64 `json:"ttft_ms,omitempty"`
	E2E     float64  `json:"e2el_ms"`
	Output  int      `json:"output_tokens"`
	Prompt  *int     `json:"prompt_tokens,omitempty"`
	Cached  *int     `json:"cached_tokens,omitempty"`
	Reused  int      `json:"reusable_tokens"`
	Tries   int      `json:"tries"`
	Finish  string   `json:"finish_reason,omitempty"`
	Error   string   `json:"error,omitempty"`
	Message string   `json:"message,omitempty"`
}

// TraceError is a line that cannot be used.
type TraceError struct {
	Line           int
	Field, Problem string // Field may be empty
}

func (e *TraceError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("line %d: %s", e.Line, e.Problem)
	}
	return fmt.Sprintf("line %d: %s: %s", e.Line, e.Field, e.Problem)
}

// Bounds on traces.
const (
	maxTraceLine = 64 << 20
	maxTraceRows = 1 << 22
	maxLabel     = 256               // bytes of a session's id
	maxTraceTime = 1e3 * 86400 * 366 // ms
)

// Trace is a plan that was read from a file.
type Trace struct {
	sessions []*Session
	requests int
	messages bool
}

// Sessions is how many conversations there are; requests that belong to none are counted as one each.
func (t *Trace) Sessions() int { return len(t.sessions) }

// HasMessages tells whether some of it consists of chat messages, which only the chat endpoint takes.
func (t *Trace) HasMessages() bool { return t.messages }

// Requests implements Plan.
func (t *Trace) Requests() int { return t.requests }

// Round implements Plan. A round's times begin with its first session's.
func (t *Trace) Round(r, n int) iter.Seq[*Session] {
	part := t.sessions[len(t.sessions)*r/n : len(t.sessions)*(r+1)/n]
	return func(yield func(*Session) bool) {
		for _, s := range part {
			moved := *s
			moved.Start -= part[0].Start
			if part[0].Start > 0 {
				moved.Turns = slices.Clone(s.Turns)
				for i := range moved.Turns {
					moved.Turns[i].At = max(moved.Turns[i].At-part[0].Start, 0)
				}
			}
			if !yield(&moved) {
				return
			}
		}
	}
}

// ReadTrace reads a trace: a JSON object a line. hashBlock is how many tokens an element of hash_ids stands for (Mooncake: 512). Its
// errors are *TraceError, or the reader's.
func ReadTrace(r io.Reader, hashBlock int) (*Trace, error) {
	if hashBlock < 1 || hashBlock > maxTokens {
		return nil, &ConfigError{"hash block", fmt.Sprintf("%d tokens are not within 1 to %d", hashBlock, maxTokens)}
	}
	t := &Trace{}
	byID := make(map[string]*Session)
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), maxTraceLine)
	number := 0
	for lines.Scan() {
		number++
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue
		}
		var row traceRow
		if err := json.Unmarshal(line, &row, lenient...); err != nil {
			return nil, &TraceError{number, "", jsonProblem(err)}
		}
		if err := t.add(&row, byID, hashBlock); err != nil {
			err.Line = number
			return nil, err
		}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return nil, &TraceError{number + 1, "", fmt.Sprintf("it is longer than %d MiB", maxTraceLine>>20)}
	} else if lines.Err() != nil {
		return nil, lines.Err()
	}
	if len(t.sessions) == 0 {
		return nil, &TraceError{number + 1, "", "the trace ends without a request"}
	}
	slices.SortStableFunc(t.sessions, func(a, b *Session) int { return cmp.Compare(a.Start, b.Start) })
	return t, nil
}

// jsonProblem is a parser's error in a reader's words.
func jsonProblem(err error) string {
	var semantic *json.SemanticError
	if errors.As(err, &semantic) {
		return fmt.Sprintf("%s has a value of the wrong type, or one that is out of range", semantic.JSONPointer)
	}
	return "it is not a JSON object: " + err.Error()
}

func (t *Trace) add(row *traceRow, byID map[string]*Session, hashBlock int) *TraceError {
	turn, bad := row.turn(hashBlock)
	if bad != nil {
		return bad
	}
	if t.requests++; t.requests > maxTraceRows {
		return &TraceError{Problem: fmt.Sprintf("there are more than %d requests", maxTraceRows)}
	}
	t.messages = t.messages || len(turn.Messages) > 0
	start := time.Duration(0)
	if row.Timestamp != nil {
		start = fromMillis(*row.Timestamp)
	}
	s := byID[row.Session]
	if row.Session == "" || s == nil {
		s = &Session{ID: row.Session, Start: start, Single: row.Session == "", Turns: []Turn{turn}}
		if s.Single {
			s.ID = fmt.Sprint("request-", t.requests)
		} else {
			byID[s.ID] = s
		}
		t.sessions = append(t.sessions, s)
		return nil
	}
	if turn.inputTokens() == 0 && len(turn.Messages) == 0 {
		return &TraceError{Field: "input_length", Problem: "a later turn of a session adds at least one token"}
	}
	if len(s.Turns) == maxTurns {
		return &TraceError{Field: "session_id", Problem: fmt.Sprintf("%q has more than %d turns", s.ID, maxTurns)}
	}
	turn.At = start
	s.Turns = append(s.Turns, turn)
	return nil
}

// turn checks a row's fields and makes a turn of them.
func (row *traceRow) turn(hashBlock int) (t Turn, bad *TraceError) {
	fail := func(field, problem string, args ...any) (Turn, *TraceError) {
		return t, &TraceError{Field: field, Problem: fmt.Sprintf(problem, args...)}
	}
	for field, ms := range map[string]*float64{"timestamp": row.Timestamp, "delay": row.Delay} {
		if ms != nil && !(*ms >= 0 && *ms <= maxTraceTime) {
			return fail(field, "%v is not a time in milliseconds", *ms)
		}
	}
	if row.Output < 1 || row.Output > maxTokens {
		return fail("output_length", "%d is not within 1 to %d", row.Output, maxTokens)
	}
	for i := range len(row.Session) {
		if c := row.Session[i]; len(row.Session) > maxLabel || c <= ' ' || c > '~' {
			return fail("session_id", "it is to have at most %d visible ASCII characters", maxLabel)
		}
	}
	t.Output = row.Output
	if row.Delay != nil {
		t.Delay = fromMillis(*row.Delay)
	}
	if len(row.Messages) > 0 {
		return row.chat(t)
	}
	blocks := len(row.HashIDs) * hashBlock
	switch {
	case row.Input < 0 || row.Input > maxTokens:
		return fail("input_length", "%d is not within 1 to %d", row.Input, maxTokens)
	case row.Input == 0:
		return fail("input_length", "it is missing, and there are no messages either")
	case row.Prefix < 0 || row.Prefix > row.Input:
		return fail("prefix_length", "%d is not within 0 to input_length, %d", row.Prefix, row.Input)
	case blocks >= row.Input-row.Prefix+hashBlock:
		return fail("hash_ids", "%d of them, of %d tokens each, are more than the %d tokens of input_length", len(row.HashIDs), hashBlock, row.Input)
	}
	t.Prefix, t.HashIDs, t.HashBlock = row.Prefix, row.HashIDs, hashBlock
	t.Own = row.Input - row.Prefix - blocks
	return t, nil
}

// chat takes over messages: the elements of the array.
func (row *traceRow) chat(t Turn) (Turn, *TraceError) {
	m := bytes.TrimSpace(row.Messages)
	if len(m) < 2 || m[0] != '[' || len(bytes.TrimSpace(m[1:len(m)-1])) == 0 {
		return t, &TraceError{Field: "messages", Problem: "it is not an array of messages"}
	}
	switch row.Mode {
	case "", "history":
		t.Afresh = true
	case "delta":
	default:
		return t, &TraceError{Field: "message_mode", Problem: fmt.Sprintf("%q is neither history nor delta", row.Mode)}
	}
	t.Messages = slices.Clone(jsontext.Value(bytes.TrimSpace(m[1 : len(m)-1])))
	return t, nil
}

func fromMillis(ms float64) time.Duration {
	return time.Duration(math.Round(ms * float64(time.Millisecond)))
}

// toMillis keeps microseconds.
func toMillis(d time.Duration) float64 { return float64(max(d, 0).Round(time.Microsecond)) / 1e6 }

// Recorder writes what was asked, and what became of it, as a trace.
type Recorder struct {
	w     *bufio.Writer
	began time.Time
	err   error
}

// NewRecorder writes to w; Flush ends it. Times are counted from now on.
func NewRecorder(w io.Writer) *Recorder {
	return &Recorder{w: bufio.NewWriterSize(w, 64<<10), began: time.Now()}
}

// Observe is for Config.Observe.
func (rec *Recorder) Observe(r *Result) {
	if rec.err != nil {
		return
	}
	t := &r.Session.Turns[r.Turn]
	row := traceRow{Input: t.inputTokens(), Output: t.Output, Prefix: t.Prefix, HashIDs: t.HashIDs}
	if !r.Session.Single {
		row.Session = r.Session.ID
	}
	if len(t.Messages) > 0 {
		row.Messages, row.Mode = slices.Concat(jsontext.Value{'['}, t.Messages, jsontext.Value{']'}), "delta"
		if t.Afresh {
			row.Mode = "history"
		}
	}
	if at := toMillis(r.Meant.Sub(rec.began)); r.Turn == 0 {
		row.Timestamp = &at
	} else {
		delay := toMillis(t.Delay)
		row.Delay = &delay
	}
	row.Result = rec.result(r)
	line, err := json.Marshal(&row)
	if err == nil {
		_, err = rec.w.Write(append(line, '\n'))
	}
	rec.err = err
}

func (rec *Recorder) result(r *Result) *traceResult {
	out := &traceResult{
		Sent: toMillis(r.Sent.Sub(rec.began)), E2E: millis(r.E2E()), Output: r.OutputTokens, Reused: r.Reusable, Tries: r.Tries, Finish: r.Finish,
	}
	if d, ok := r.TTFT(); ok {
		ms := millis(d)
		out.TTFT = &ms
	}
	if r.PromptTokens >= 0 {
		out.Prompt = &r.PromptTokens
	}
	if r.CachedTokens >= 0 {
		out.Cached = &r.CachedTokens
	}
	if r.Err != nil {
		out.Error, out.Message = r.Err.Kind, r.Err.Message
	}
	return out
}

// Flush writes what is buffered, and returns the first error.
func (rec *Recorder) Flush() error {
	if rec.err != nil {
		return rec.err
	}
	return rec.w.Flush()
}
