package loadgen

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// near is for figures that are rounded to six digits, or to a histogram's bucket.
func near(got, want float64) bool { return math.Abs(got-want) <= 0.005*math.Abs(want)+1e-6 }

func mustRun(t *testing.T, c Config) *Report {
	t.Helper()
	report, err := Run(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func synthetic(sessions, turns, tokens, output int) *Synthetic {
	return &Synthetic{Sessions: sessions, Turns: turns, New: Exactly(tokens), Output: Exactly(output), Burstiness: 1, Seed: 5}
}

func TestClosedLoopMeasuresWhatTheServerDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stub{first: 200 * time.Millisecond, step: 10 * time.Millisecond, cached: 50}
		plan := synthetic(12, 1, 50, 11)
		plan.Prefix = 50
		report := mustRun(t, Config{
			Targets: []Target{s.start(t)}, Plan: plan, Load: Load{Concurrency: 4},
			Goal: Goal{TTFT: 250 * time.Millisecond, TPOT: 11 * time.Millisecond},
		})
		r := report.Targets[0]
		if r.Completed != 12 || r.Failed != 0 || r.InputTokens != 1200 || r.OutputTokens != 132 || r.CountedBy != "usage" || r.StreamedTokens != 132 {
			t.Errorf("counts: %+v", r)
		}
		for what, check := range map[string][2]float64{
			"duration": {r.Duration, 0.9}, "TTFT": {r.TTFT.P50, 200}, "TTFT max": {r.TTFT.Max, 200}, "TPOT": {r.TPOT.Mean, 10},
			"ITL": {r.ITL.P99, 10}, "E2E": {r.E2E.P90, 300}, "requests/s": {r.RequestThroughput, 12 / 0.9},
			"tokens/s": {r.OutputThroughput, 132 / 0.9}, "goodput": {r.Goodput, 12 / 0.9}, "hit rate": {*r.HitRate, 550. / 1200}, "of ideal": {*r.HitOfIdeal, 1},
		} {
			if !near(check[0], check[1]) {
				t.Errorf("%s: %v, want %v", what, check[0], check[1])
			}
		}
		if r.ITL.Count != 120 || r.SendDelay.Max != 0 || len(report.Warnings) != 0 {
			t.Errorf("ITL %+v, delay %+v, warnings %q", r.ITL, r.SendDelay, report.Warnings)
		}
		if a := s.asks[0]; a.Model != "m" || !a.IgnoreEOS || !a.ReturnIDs || a.MaxTokens != 11 || a.header.Get("X-Session-Id") != "" {
			t.Errorf("request: %+v", a)
		}
	})
}

// The server stalls for two seconds. Requests that were meant to be sent meanwhile have waited, whatever this process did.
func TestOpenLoopCountsFromWhenRequestsWereMeantToBeSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stub{}
		s.script = func(a *ask, _ http.ResponseWriter) bool {
			if a.number == 0 {
				time.Sleep(2 * time.Second)
			}
			return false
		}
		trace, err := ReadTrace(strings.NewReader(strings.Join(slices.Collect(func(yield func(string) bool) {
			for i := range 20 {
				if !yield(fmt.Sprintf(`{"timestamp":%d,"input_length":5,"output_length":1}`, 1000+100*i)) {
					return
				}
			}
		}), "\n")), 512)
		if err != nil {
			t.Fatal(err)
		}
		report := mustRun(t, Config{Targets: []Target{s.start(t)}, Plan: trace, Load: Load{MaxConcurrency: 1}})
		r := report.Targets[0]
		// 2000, 1900, ... 100 ms: each but the first waited for the stall's end.
		if r.Completed != 20 || !near(r.TTFT.Max, 2000) || !near(r.TTFT.Mean, 1050) || !near(r.SendDelay.Max, 1900) {
			t.Errorf("TTFT %+v, delay %+v", r.TTFT, r.SendDelay)
		}
		if len(report.Warnings) != 1 || !strings.Contains(report.Warnings[0], "bound on what runs at a time") {
			t.Errorf("warnings: %q", report.Warnings)
		}
		for i, at := range s.at[:2] {
			if got := at.Sub(s.at[0]); got != time.Duration(i)*2*time.Second {
				t.Errorf("request %d came after %v", i, got)
			}
		}
	})
}

func TestOpenLoopSendsOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stub{first: 5 * time.Second}
		plan := synthetic(50, 1, 5, 1)
		plan.Rate = 20
		r := mustRun(t, Config{Targets: []Target{s.start(t)}, Plan: plan}).Targets[0]
		if r.Completed != 50 || r.SendDelay.Max != 0 || !near(r.TTFT.Max, 5000) {
			t.Errorf("%+v", r)
		}
		i := 0
		for session := range plan.Round(0, 1) {
			if got := s.at[i].Sub(s.at[0]); got != session.Start {
				t.Fatalf("request %d came after %v, meant %v", i, got, session.Start)
			}
			i++
		}
	})
}

func TestTurnsSendAnswersBack(t *testing.T) {
	for _, kind := range []Prompt{IDs, Text, Chat} {
		t.Run(string(kind), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &stub{first: time.Second}
				plan := synthetic(3, 4, 7, 2)
				plan.Prefix, plan.Think = 20, 3*time.Second
				var results []*Result
				report := mustRun(t, Config{
					Targets: []Target{s.start(t)}, Plan: plan, Load: Load{Concurrency: 1},
					Request: Request{Prompt: kind, SessionBody: true}, Observe: func(r *Result) { results = append(results, r) },
				})
				if r := report.Targets[0]; r.Completed != 12 || r.Sessions != 3 || !near(r.Duration, 3*(4*1+3*3)) {
					t.Fatalf("%+v", r)
				}
				for i, a := range s.asks {
					session, turn := i/4, i%4
					if id := fmt.Sprintf("bench-5-%d", session); a.header.Get("X-Session-Id") != id || a.Params.ID != id {
						t.Errorf("request %d has session %q, %q; want %q", i, a.header.Get("X-Session-Id"), a.Params.ID, id)
					}
					if turn > 0 {
						checkContinues(t, kind, s.asks[i-1], a)
					}
				}
				if kind != IDs {
					return
				}
				if !slices.Equal(s.asks[0].ids()[:20], s.asks[4].ids()[:20]) || slices.Equal(s.asks[0].ids()[20:], s.asks[4].ids()[20:]) {
					t.Errorf("prompts of two sessions: %v, %v; want only the first 20 in common", s.asks[0].ids(), s.asks[4].ids())
				}
				var reusable []int
				for _, r := range results {
					reusable = append(reusable, r.Reusable)
				}
				// The prefix of 20, then prompt and answer of the turn before but for the answer's last token.
				if want := []int{0, 28, 37, 46, 20, 28, 37, 46, 20, 28, 37, 46}; !slices.Equal(reusable, want) {
					t.Errorf("reusable %v, want %v", reusable, want)
				}
			})
		})
	}
}

// checkContinues checks that a prompt is the one before, the answer to it, and something new.
func checkContinues(t *testing.T, kind Prompt, before, after *ask) {
	t.Helper()
	n := len(before.ids())
	switch kind {
	case IDs:
		want := append(before.ids(), int32(n), int32(n+1))
		if got := after.ids(); len(got) != n+2+7 || !slices.Equal(got[:n+2], want) {
			t.Errorf("after %v came %v", before.ids(), got)
		}
	case Text:
		start := strings.TrimSuffix(string(before.Prompt), `"`) + " w0 w1 "
		if got := string(after.Prompt); !strings.HasPrefix(got, start) || len(strings.Fields(got)) != len(strings.Fields(string(before.Prompt)))+2+7 {
			t.Errorf("after %s came %s", before.Prompt, got)
		}
	case Chat:
		m := len(before.Messages)
		if len(after.Messages) != m+2 || !reflect.DeepEqual(after.Messages[:m], before.Messages) ||
			string(after.Messages[m]) != `{"role":"assistant","content":"w0 w1"}` || !strings.HasPrefix(string(after.Messages[m+1]), `{"role":"user","content":"`) {
			t.Errorf("after %s came %s", before.Messages, after.Messages)
		}
	}
}

func TestFailuresAreToldApart(t *testing.T) {
	long := `{"choices":[{"text":"` + strings.Repeat("x", maxEvent) + `"}]}`
	for _, tc := range []struct {
		kind, message string
		script        func(w http.ResponseWriter)
	}{
		{"http_400", "too long", func(w http.ResponseWriter) {
			http.Error(w, `{"error":{"message":"too long","type":"x"}}`, 400)
		}},
		{"http_503", "no engine", func(w http.ResponseWriter) { http.Error(w, "no engine", http.StatusServiceUnavailable) }},
		{KindCut, "", func(w http.ResponseWriter) { emit(w, `{"choices":[{"text":"a"}]}`) }},
		{KindCut, "", func(w http.ResponseWriter) {
			emit(w, `{"choices":[{"text":"a"}]}`)
			panic(http.ErrAbortHandler)
		}},
		{KindConnect, "", func(http.ResponseWriter) { panic(http.ErrAbortHandler) }},
		{KindStream, "engine lost", func(w http.ResponseWriter) {
			emit(w, `{"choices":[{"text":"a"}]}`)
			emit(w, `{"error":{"message":"engine lost"}}`)
		}},
		{KindResponse, "not a JSON object", func(w http.ResponseWriter) { emit(w, "hello") }},
		{KindResponse, "", func(w http.ResponseWriter) { emit(w, `{"choices":[{"text":`) }},
		{KindResponse, "8 MiB", func(w http.ResponseWriter) { emit(w, long) }},
		{KindTimeout, "", func(w http.ResponseWriter) {
			emit(w, `{"choices":[{"text":"a"}]}`)
			time.Sleep(time.Hour)
		}},
	} {
		t.Run(tc.kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &stub{script: func(_ *ask, w http.ResponseWriter) bool { tc.script(w); return true }}
				target := s.start(t)
				target.Client.Transport.(*http.Transport).DisableKeepAlives = true // a used connection would be tried twice
				report := mustRun(t, Config{Targets: []Target{target}, Plan: synthetic(1, 2, 5, 2), Load: Load{Concurrency: 1}, Timeout: time.Minute})
				r := report.Targets[0]
				if r.Completed != 0 || r.Failed != 1 || report.Failed() != 1 || r.SessionsLost != 1 || len(r.Errors) != 1 || len(s.asks) != 1 {
					t.Fatalf("%+v after %d requests", r, len(s.asks))
				}
				if e := r.Errors[0]; e.Kind != tc.kind || e.Count != 1 || !strings.Contains(e.Example, tc.message) {
					t.Errorf("%+v, want %s: %s", e, tc.kind, tc.message)
				}
			})
		})
	}
}

func TestRetriesGoOnCounting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stub{first: 100 * time.Millisecond, step: time.Millisecond}
		began := time.Now()
		s.script = func(a *ask, w http.ResponseWriter) bool {
			if time.Since(began) > 3*time.Second {
				return false
			}
			if a.number%2 == 0 {
				emit(w, `{"choices":[{"text":"a","token_ids":[1]}]}`)
			} else {
				http.Error(w, "starting", http.StatusServiceUnavailable)
			}
			return true
		}
		target := s.start(t)
		report := mustRun(t, Config{Targets: []Target{target}, Plan: synthetic(1, 2, 5, 3), Load: Load{Concurrency: 1}, RetryFor: time.Minute})
		r := report.Targets[0]
		if r.Completed != 2 || r.Failed != 0 || r.Retries != len(s.asks)-2 || r.Retries < 4 || r.OutputTokens != 6 || r.ITL.Count != 4 {
			t.Errorf("%+v after %d requests", r, len(s.asks))
		}
		if r.TTFT.Max < 3000 || r.TTFT.Min > 101 {
			t.Errorf("TTFT %+v: the first counts from before the failures, the second does not", r.TTFT)
		}
		// Four hundreds are final at once.
		s.script = func(_ *ask, w http.ResponseWriter) bool { http.Error(w, "no", 404); return true }
		if r := mustRun(t, Config{Targets: []Target{target}, Plan: synthetic(1, 1, 5, 3), Load: Load{Concurrency: 1}, RetryFor: time.Minute}).Targets[0]; r.Retries != 0 || r.Failed != 1 {
			t.Errorf("%+v", r)
		}
	})
}

func TestDurationEndsTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stub{first: 700 * time.Millisecond}
		plan := synthetic(0, 10, 5, 1)
		r := mustRun(t, Config{Targets: []Target{s.start(t)}, Plan: plan, Load: Load{Concurrency: 3}, Duration: 2 * time.Second}).Targets[0]
		// Turns begin at 0, 0.7 and 1.4 s; those that run at 2 s are waited for.
		if r.Completed != 9 || r.Failed != 0 || r.SessionsUnfinished != 3 || !near(r.Duration, 2.1) {
			t.Errorf("%+v", r)
		}
	})
}

func TestTwoTargetsTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow, fast := &stub{first: 200 * time.Millisecond}, &stub{first: 100 * time.Millisecond}
		report := mustRun(t, Config{
			Targets: []Target{slow.start(t), fast.start(t)}, Plan: synthetic(8, 1, 5, 2), Load: Load{Concurrency: 1}, Rounds: 2, Warmup: 1,
		})
		for i, a := range slow.asks {
			if string(a.Prompt) != string(fast.asks[i].Prompt) {
				t.Errorf("request %d: %s and %s", i, a.Prompt, fast.asks[i].Prompt)
			}
		}
		if len(slow.asks) != 9 || !fast.at[5].Before(slow.at[5]) || !slow.at[1].Before(fast.at[1]) {
			t.Errorf("%d requests; slow at %v, fast at %v: want slow first in round 0, fast first in round 1", len(slow.asks), slow.at, fast.at)
		}
		found := false
		for _, r := range report.Comparison {
			if r.Metric == "ttft_ms.p50" {
				found = near(r.First, 200) && near(r.Second, 100) && near(r.Ratio, 0.5) && near(r.Low, 0.5) && near(r.High, 0.5)
			}
		}
		if !found {
			t.Errorf("comparison %+v", report.Comparison)
		}
	})
}

func TestEndOfContextEndsTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stub{first: time.Second}
		ctx, cancel := context.WithTimeoutCause(t.Context(), 2500*time.Millisecond, errors.New("enough"))
		defer cancel()
		report, err := Run(ctx, Config{Targets: []Target{s.start(t)}, Plan: synthetic(0, 1, 5, 1), Load: Load{Concurrency: 2}, Duration: time.Hour})
		if err == nil || err.Error() != "enough" {
			t.Errorf("%v", err)
		}
		if r := report.Targets[0]; r.Completed != 4 || r.Failed != 0 {
			t.Errorf("%+v", r)
		}
	})
}

func TestServersWithoutIDsOrUsage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stub{owner: "tensorrt_llm"}
		target := s.start(t)
		r := mustRun(t, Config{Targets: []Target{target}, Plan: synthetic(1, 2, 5, 3), Load: Load{Concurrency: 1}}).Targets[0]
		if r.Failed != 1 || r.Errors[0].Kind != KindSession || s.asks[0].ReturnIDs {
			t.Errorf("a server that is not asked for ids: %+v", r)
		}
		s.script = func(_ *ask, w http.ResponseWriter) bool {
			for range 3 {
				emit(w, `{"choices":[{"text":"two tokens"}]}`)
			}
			emit(w, "[DONE]")
			return true
		}
		report := mustRun(t, Config{Targets: []Target{target}, Plan: synthetic(1, 1, 5, 3), Load: Load{Concurrency: 1}})
		if r := report.Targets[0]; r.CountedBy != "events" || r.OutputTokens != 3 || r.HitRate != nil || r.CachedTokens != nil || len(report.Warnings) != 1 {
			t.Errorf("without usage: %+v, %q", r, report.Warnings)
		}
		// Twice as many ids as usage says, as a relay that sends chunks twice would.
		s.script = func(_ *ask, w http.ResponseWriter) bool {
			for range 2 {
				emit(w, `{"choices":[{"text":"a","token_ids":[1,2]}]}`)
			}
			emit(w, `{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}`)
			emit(w, "[DONE]")
			return true
		}
		report = mustRun(t, Config{Targets: []Target{target}, Plan: synthetic(1, 1, 5, 2), Load: Load{Concurrency: 1}})
		if len(report.Warnings) != 1 || !strings.Contains(report.Warnings[0], "4 ids in all, 2 by usage") {
			t.Errorf("twice: %q", report.Warnings)
		}
	})
}

func TestProgressAndExtraFields(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stub{first: time.Second}
		var shots []Snapshot
		mustRun(t, Config{
			Targets: []Target{s.start(t)}, Plan: synthetic(4, 1, 5, 2), Load: Load{Concurrency: 2}, Every: 1500 * time.Millisecond,
			Progress: func(s Snapshot) { shots = append(shots, s) }, Request: Request{Extra: []byte(`{ "return_handoff": true }`), SessionHeader: "-"},
		})
		if len(shots) != 1 || shots[0].Done != 2 || shots[0].Running != 2 || shots[0].Planned != 4 || shots[0].Tokens != 4 {
			t.Errorf("%+v", shots)
		}
		if !s.asks[0].Handoff {
			t.Errorf("the extra field did not arrive")
		}
	})
}

func TestWrongConfigurations(t *testing.T) {
	good := func() Config {
		return Config{Targets: []Target{{URL: "h:1"}}, Plan: synthetic(1, 1, 1, 1), Load: Load{Concurrency: 1}}
	}
	for field, change := range map[string]func(c *Config){
		"Targets":           func(c *Config) { c.Targets = nil },
		"Plan":              func(c *Config) { c.Plan = nil },
		"Duration":          func(c *Config) { c.Plan.(*Synthetic).Sessions = 0 },
		"Load.Concurrency":  func(c *Config) { c.Load.Concurrency = 0 },
		"Load.Speed":        func(c *Config) { c.Load.Speed = -1 },
		"New":               func(c *Config) { c.Plan.(*Synthetic).New = Range{2, 1} },
		"Output":            func(c *Config) { c.Plan.(*Synthetic).Output = Range{} },
		"Burstiness":        func(c *Config) { c.Plan.(*Synthetic).Burstiness = math.NaN() },
		"Rate":              func(c *Config) { c.Plan.(*Synthetic).Rate = math.Inf(1) },
		"Request.VocabSize": func(c *Config) { c.Request.VocabSize = 3 },
		"Request.Prompt":    func(c *Config) { c.Request.Prompt = "x" },
		"Request.Extra":     func(c *Config) { c.Request.Extra = []byte("[]") },
		"Target.URL":        func(c *Config) { c.Targets[0].URL = "ftp://x" },
		"Warmup":            func(c *Config) { c.Warmup = -1 },
	} {
		c := good()
		change(&c)
		_, err := Run(t.Context(), c)
		var bad *ConfigError
		if !errors.As(err, &bad) || bad.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// The table has what the report has, and says what is not as it looks.
func TestReportForPeople(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &stub{first: 200 * time.Millisecond, step: 10 * time.Millisecond, cached: 30}
		b := &stub{owner: "someone", first: 100 * time.Millisecond, step: 10 * time.Millisecond}
		b.script = func(a *ask, w http.ResponseWriter) bool {
			switch a.number {
			case 0:
				http.Error(w, "not now", http.StatusServiceUnavailable)
			default: // two tokens an event
				for range 2 {
					time.Sleep(20 * time.Millisecond)
					emit(w, `{"choices":[{"text":"a b"}]}`)
				}
				emit(w, `{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":4}}`)
				emit(w, "[DONE]")
			}
			return true
		}
		plan := synthetic(4, 1, 10, 4)
		plan.Prefix = 30
		report := mustRun(t, Config{
			Targets: []Target{a.start(t), b.start(t)}, Plan: plan, Load: Load{Concurrency: 1}, Rounds: 2, Goal: Goal{E2E: time.Minute},
		})
		var out strings.Builder
		if err := report.Write(&out); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			"requests         4 ", "requests         3, 1 FAILED", "1 x http_503: not now", "prefix hit rate  56.2 %", "of the ideal     100.0 %",
			"prefix hit rate  the server does not tell", "goodput/s", "TTFT           200.0     200.0     200.0     200.0     200.0", "ITL *", "between events",
			"ttft_ms.p50               200.0      20.00    0.100   0.100 to 0.100", "us of CPU an event",
		} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("no %q in\n%s", want, &out)
			}
		}
	})
}
