//go:build unix

package rig

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var shell = Command{Path: "/bin/sh", Env: []string{"WORD=hello"}}

func start(t *testing.T, script string) *Process {
	t.Helper()
	p, err := shell.Start("script", NewLog(nil, nil), "-c", script)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Kill(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func TestAwait(t *testing.T) {
	p := start(t, "echo before; echo $WORD at 127.0.0.1:1; echo last >&2; read nothing")
	for range 2 { // a line that was printed already counts
		if got, err := p.Await(t.Context(), regexp.MustCompile(`^hello at (\S+)`)); got != "127.0.0.1:1" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
	}
	<-p.Done() // its input is empty
	if _, err := p.Await(t.Context(), regexp.MustCompile("never")); err == nil || !strings.Contains(err.Error(), "last") {
		t.Errorf("after its end: %v, want its last words", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := start(t, "exec sleep 10").Await(ctx, regexp.MustCompile("never")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want a deadline exceeded", err)
	}
}

func TestEnds(t *testing.T) {
	ready := regexp.MustCompile("(ready)")
	for _, c := range []struct {
		script string
		want   ExitError
	}{
		{"trap 'exit 0' TERM; echo ready; while :; do sleep 0.01; done", ExitError{}},
		{"trap 'exit 3' TERM; echo ready; while :; do sleep 0.01; done", ExitError{Name: "script", Code: 3}},
		{"trap '' TERM; echo ready; while :; do sleep 0.01; done", ExitError{Name: "script", Code: -1, Late: 200 * time.Millisecond}},
	} {
		p := start(t, c.script)
		if _, err := p.Await(t.Context(), ready); err != nil {
			t.Fatal(err)
		}
		var got ExitError
		var exit *ExitError
		if err := p.Stop(200 * time.Millisecond); errors.As(err, &exit) {
			got = *exit
		} else if err != nil {
			t.Error(err)
		}
		if got != c.want || p.Alive() {
			t.Errorf("%s: %+v, want %+v; alive: %v", c.script, got, c.want, p.Alive())
		}
	}
	stopped := start(t, "echo ready; exec sleep 10")
	if err := errors.Join(stopped.Signal(syscall.SIGSTOP), stopped.Kill(), stopped.Signal(syscall.SIGCONT)); err != nil || stopped.Alive() {
		t.Errorf("a stopped process: %v, alive: %v", err, stopped.Alive())
	}
}

func TestLogLines(t *testing.T) {
	var each []string
	var to strings.Builder
	l := NewLog(&to, func(line string) { each = append(each, line) })
	for _, part := range []string{"a", "b\nc", "d\n\nlast"} {
		if n, err := l.Write([]byte(part)); n != len(part) || err != nil {
			t.Error(n, err)
		}
	}
	if want := []string{"ab", "cd", ""}; !slices.Equal(each, want) || to.String() != "ab\ncd\n\nlast" || l.Tail() != "ab\ncd\n\n" {
		t.Errorf("%q, %q, %q", each, to.String(), l.Tail())
	}
	for range 2 * tailLines {
		if _, err := l.Write([]byte("x\n")); err != nil {
			t.Fatal(err)
		}
	}
	if l.Tail() != strings.Repeat("x\n", tailLines) {
		t.Errorf("%d bytes are remembered", len(l.Tail()))
	}
}

func TestResources(t *testing.T) {
	if _, err := os.Stat("/proc/self/fd"); err != nil {
		t.Skip("no /proc here")
	}
	silent := filepath.Join(t.TempDir(), "silent")
	if err := syscall.Mkfifo(silent, 0o600); err != nil {
		t.Fatal(err)
	}
	look := func(script string) Resources {
		p := start(t, "exec <>"+silent+"; "+script+"echo ready; read nothing") // at rest from then on
		if _, err := p.Await(t.Context(), regexp.MustCompile("(ready)")); err != nil {
			t.Fatal(err)
		}
		r, err := p.Resources()
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	plain, more := look(""), look("exec 7</dev/null 8</dev/null; ")
	if more.Files != plain.Files+2 || more.Conns != 0 || more.Dead != 0 || more.Pools != 0 || more.RSS < 1<<16 || more.RSS > 1<<28 {
		t.Errorf("%+v, want two files more than %+v", more, plain)
	}
	cpu, rss, err := parseStat("42 (a) b (c) S 1 42 42 0 -1 0 1 0 0 0 250 50 7 7 20 0 1 0 9 1000 3 99")
	if cpu != 3*time.Second || rss != 3*int64(os.Getpagesize()) || err != nil {
		t.Errorf("%v, %v, %v", cpu, rss, err)
	}
	for _, bad := range []string{"", "42 (a) S 1", "42 (a) S 1 42 42 0 -1 0 1 0 0 0 x 50 7 7 20 0 1 0 9 1000 3 99"} {
		if _, _, err := parseStat(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	got := make(map[string]string)
	socketStates("  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"+
		"   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 77 1 0 100 0 0 10 0\n"+
		"   1: 0100007F:1F90 0100007F:AAAA 08 00000000:00000000 00:00000000 00000000     0        0 78 1 0 20 0 0 10 -1\n"+
		"   2: 0100007F:1F90 0100007F:AAAB 06 00000000:00000000 00:00000000 00000000     0        0 0 1 0 20 0 0 10 -1\n", got)
	if want := map[string]string{"socket:[77]": "0A", "socket:[78]": "08"}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestMetrics(t *testing.T) {
	m, err := parseMetrics(strings.NewReader("# HELP a x\na{state=\"used\",engine=\"e 1\"} 2\na{state=\"free\"} 3.5\nab 7\n"))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
		ok     bool
	}{
		{"a", nil, 5.5, true}, {"a", []string{`state="used"`}, 2, true}, {"ab", nil, 7, true}, {"a", []string{`state="x"`}, 0, false}, {"b", nil, 0, false},
	} {
		if got, ok := m.Sum(c.name, c.labels...); got != c.want || ok != c.ok {
			t.Errorf("%s %v: %v, %v", c.name, c.labels, got, ok)
		}
	}
	if _, err := parseMetrics(strings.NewReader("a b\n")); err == nil {
		t.Error("a sample that is no number is accepted")
	}
}

func TestStream(t *testing.T) {
	answer, status := "", http.StatusOK
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if status != http.StatusOK {
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(status)
		}
		_, _ = w.Write([]byte(answer))
	}))
	defer server.Close()
	client := server.Client()
	defer client.CloseIdleConnections()
	const one = `data: {"choices":[{"text":"a","token_ids":[1,2],"logprobs":{"token_logprobs":[-0.10,-2]}}]}` + "\n\n"
	const end = `data: {"choices":[{"text":"b","token_ids":[3],"finish_reason":"stop"}]}` + "\n\n"
	whole := Answer{Text: "ab", IDs: []int32{1, 2, 3}, Logprobs: []json.Number{"-0.10", "-2"}, Finish: "stop"}
	for _, c := range []struct {
		name, answer string
		status       int
		want         Answer
		news         int
		err          string
		retryable    bool
	}{
		{"whole", one + end + "data: [DONE]\n\n", 200, whole, 2, "", false},
		{"cut off", one, 200, Answer{Text: "a", IDs: []int32{1, 2}, Logprobs: whole.Logprobs}, 1, "without [DONE]", false},
		{"error event", one + `data: {"error":{"message":"m","type":"service_unavailable_error","code":"engine_lost"}}` + "\n\n", 200,
			Answer{Text: "a", IDs: []int32{1, 2}, Logprobs: whole.Logprobs}, 1, "engine_lost", true},
		{"refusal", `{"error":{"message":"m","type":"server_error","code":"x"}}`, 500, Answer{}, 0, "server_error", true},
		{"not JSON", "oops", 502, Answer{}, 0, "oops", false},
		{"a broken event", "data: {\n\n", 200, Answer{}, 0, "event", false},
	} {
		answer, status = c.answer, c.status
		news := 0
		got, err := Completion{Model: "m"}.Stream(t.Context(), client, server.URL, func() { news++ })
		var refused *HTTPError
		retryable := errors.As(err, &refused) && refused.Retryable()
		if !reflect.DeepEqual(got, c.want) || news != c.news || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) || retryable != c.retryable {
			t.Errorf("%s: %+v, %d events, %v, retryable %v", c.name, got, news, err, retryable)
		}
	}
}
