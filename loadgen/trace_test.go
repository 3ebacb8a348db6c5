package loadgen

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func readTrace(t *testing.T, lines ...string) *Trace {
	t.Helper()
	trace, err := ReadTrace(strings.NewReader(strings.Join(lines, "\n")), 512)
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

func TestMooncakeTracesAreRead(t *testing.T) {
	trace := readTrace(t,
		`{"timestamp": 105, "input_length": 1800, "output_length": 26, "hash_ids": [0, 3, 4, 5]}`,
		``,
		`{"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [0, 1]}`,
		`{"timestamp": 274.5, "input_length": 1300, "output_length": 52, "hash_ids": [0, 3], "extra": {"x": [1]}}`,
	)
	sessions := slices.Collect(trace.Round(0, 1))
	if len(sessions) != 3 || trace.Requests() != 3 || sessions[1].Start != 105*time.Millisecond || sessions[2].Start != 274500*time.Microsecond {
		t.Fatalf("%+v", sessions)
	}
	c := content{seed: 1, vocab: 1000}
	prompt := func(i int) (ids []int32) {
		for _, p := range sessions[i].Turns[0].pieces(sessions[i].ID, 0) {
			c.sequence(p, func(id int32) { ids = append(ids, id) })
		}
		return ids
	}
	a, b, d := prompt(0), prompt(1), prompt(2)
	if len(a) != 655 || len(b) != 1800 || len(d) != 1300 {
		t.Fatalf("prompts of %d, %d, %d tokens", len(a), len(b), len(d))
	}
	if !slices.Equal(a[:512], b[:512]) || slices.Equal(a[512:600], b[512:600]) || !slices.Equal(b[:1024], d[:1024]) || slices.Equal(b[1024:1100], d[1024:1100]) {
		t.Error("prompts have other prefixes in common than their hash_ids")
	}
}

func TestSessionsAreRead(t *testing.T) {
	trace := readTrace(t,
		`{"timestamp":50,"session_id":"a","input_length":10,"output_length":3,"prefix_length":4}`,
		`{"timestamp":10,"session_id":"b","output_length":5,"messages":[{"role":"user","content":"hi"}],"message_mode":"delta"}`,
		`{"delay":200,"session_id":"a","input_length":7,"output_length":4}`,
		`{"timestamp":9000,"session_id":"b","output_length":5,"messages":[ {"role":"user","content":"again"} ]}`,
	)
	sessions := slices.Collect(trace.Round(0, 1))
	want := []*Session{
		{ID: "b", Turns: []Turn{
			{Messages: []byte(`{"role":"user","content":"hi"}`), Output: 5},
			{Messages: []byte(`{"role":"user","content":"again"}`), Afresh: true, At: 8990 * time.Millisecond, Output: 5},
		}},
		{ID: "a", Start: 40 * time.Millisecond, Turns: []Turn{
			{Prefix: 4, Own: 6, HashBlock: 512, Output: 3}, {Delay: 200 * time.Millisecond, Own: 7, HashBlock: 512, Output: 4},
		}},
	}
	if !reflect.DeepEqual(sessions, want) || !trace.HasMessages() || trace.Requests() != 4 || trace.Sessions() != 2 {
		for _, s := range sessions {
			t.Errorf("%+v", s)
		}
	}
	if second := slices.Collect(trace.Round(1, 2)); len(second) != 1 || second[0].ID != "a" || second[0].Start != 0 {
		t.Errorf("round 1 of 2: %+v", second)
	}
}

func TestWrongTraces(t *testing.T) {
	good := `{"input_length":5,"output_length":5,"session_id":"s"}`
	for _, tc := range []struct {
		field string
		lines []string
	}{
		{"", nil},
		{"", []string{"x"}},
		{"", []string{`[1]`}},
		{"", []string{`{"input_length":"5"}`}},
		{"", []string{`{"input_length":1e30}`}},
		{"input_length", []string{`{"output_length":5}`}},
		{"input_length", []string{`{"input_length":-5,"output_length":5}`}},
		{"input_length", []string{`{"input_length":99999999,"output_length":5}`}},
		{"output_length", []string{`{"input_length":5}`}},
		{"timestamp", []string{`{"timestamp":-1,"input_length":5,"output_length":5}`}},
		{"delay", []string{`{"delay":1e300,"input_length":5,"output_length":5}`}},
		{"prefix_length", []string{`{"prefix_length":6,"input_length":5,"output_length":5}`}},
		{"hash_ids", []string{`{"input_length":512,"output_length":5,"hash_ids":[1,2]}`}},
		{"session_id", []string{`{"input_length":5,"output_length":5,"session_id":"a b"}`}},
		{"session_id", []string{`{"input_length":5,"output_length":5,"session_id":"a\r\nX-Evil:1"}`}},
		{"messages", []string{`{"output_length":5,"messages":{}}`}},
		{"messages", []string{`{"output_length":5,"messages":[ ]}`}},
		{"message_mode", []string{`{"output_length":5,"messages":[{}],"message_mode":"x"}`}},
	} {
		_, err := ReadTrace(strings.NewReader(strings.Join(append([]string{good, ""}, tc.lines...), "\n")), 512)
		if tc.lines == nil {
			_, err = ReadTrace(strings.NewReader("\n"), 512)
		}
		var bad *TraceError
		if !errors.As(err, &bad) || bad.Field != tc.field || tc.lines != nil && bad.Line != 3 {
			t.Errorf("%s: %v", tc.lines, err)
		}
	}
}

// What was recorded replays with the same prompts, at the same times.
func TestRecordsReplay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stub{first: 300 * time.Millisecond, step: 10 * time.Millisecond, cached: 3}
		target := s.start(t)
		plan := synthetic(5, 3, 9, 4)
		plan.Prefix, plan.Rate, plan.Think = 6, 2, time.Second
		var file bytes.Buffer
		recorder := NewRecorder(&file)
		c := Config{Targets: []Target{target}, Plan: plan, Observe: recorder.Observe}
		first := mustRun(t, c)
		if err := recorder.Flush(); err != nil {
			t.Fatal(err)
		}
		asks, at := s.asks, s.at
		s.asks, s.at = nil, nil
		trace, err := ReadTrace(bytes.NewReader(file.Bytes()), 512)
		if err != nil {
			t.Fatalf("%v in %s", err, &file)
		}
		second := mustRun(t, Config{Targets: []Target{target}, Plan: trace})
		for i, a := range s.asks {
			if b := asks[i]; string(a.Prompt) != string(b.Prompt) || a.MaxTokens != b.MaxTokens || a.header.Get("X-Session-Id") != b.header.Get("X-Session-Id") {
				t.Errorf("request %d: %+v, was %+v", i, a, b)
			}
			if got, want := s.at[i].Sub(s.at[0]), at[i].Sub(at[0]); (got - want).Abs() > 2*time.Microsecond {
				t.Errorf("request %d came after %v, was %v", i, got, want)
			}
		}
		if len(s.asks) != 15 || first.Targets[0].TTFT.P99 != second.Targets[0].TTFT.P99 {
			t.Errorf("%d requests", len(s.asks))
		}
		line, _, _ := strings.Cut(file.String(), "\n")
		for _, part := range []string{`"session_id":"bench-5-0"`, `"ttft_ms":300`, `"e2el_ms":330`, `"prompt_tokens":15`, `"output_tokens":4`, `"tries":1`, `"finish_reason":"length"`} {
			if !strings.Contains(line, part) {
				t.Errorf("no %s in %s", part, line)
			}
		}
	})
}

func TestSpeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stub{}
		trace := readTrace(t, `{"timestamp":0,"input_length":5,"output_length":1}`, `{"timestamp":6000,"input_length":5,"output_length":1}`)
		mustRun(t, Config{Targets: []Target{s.start(t)}, Plan: trace, Load: Load{Speed: 3}})
		if got := s.at[1].Sub(s.at[0]); got != 2*time.Second {
			t.Errorf("after %v", got)
		}
	})
}

func FuzzReadTrace(f *testing.F) {
	f.Add([]byte(`{"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [0, 1, 2]}`))
	f.Add([]byte(`{"delay":1,"session_id":"a","input_length":7,"output_length":4,"prefix_length":2}`))
	f.Add([]byte(`{"session_id":"a","messages":[{}],"output_length":4,"message_mode":"delta"}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		trace, err := ReadTrace(bytes.NewReader(in), 512)
		if err != nil {
			return
		}
		requests := 0
		for s := range trace.Round(0, 1) {
			requests += len(s.Turns)
			for k := range s.Turns {
				tokens := 0
				for _, p := range s.Turns[k].pieces(s.ID, k) {
					if p.tokens <= 0 {
						t.Fatalf("%+v", s)
					}
					tokens += p.tokens
				}
				if n := s.Turns[k].inputTokens(); len(s.Turns[k].Messages) == 0 && (n != tokens || n < 1 || n > maxTokens) {
					t.Fatalf("%d tokens, %d in pieces: %+v", n, tokens, s)
				}
			}
		}
		if requests != trace.Requests() {
			t.Fatal(fmt.Sprint(requests, " requests, not ", trace.Requests()))
		}
	})
}
