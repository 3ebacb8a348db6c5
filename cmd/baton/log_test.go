package main

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// writes are what reached a writer, one element a call.
type writes []string

func (w *writes) Write(b []byte) (int, error) {
	*w = append(*w, string(b))
	return len(b), nil
}

func TestLinesOfAMomentAreWrittenTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w writes
		log, lines := newLogger(&w, slog.LevelInfo, false)
		expect := func(when string, counts ...int) {
			t.Helper()
			synctest.Wait()
			var got []int
			for _, s := range w {
				got = append(got, strings.Count(s, "\n"))
			}
			if len(got) != len(counts) {
				t.Fatalf("%s: lines by write are %v, want %v", when, got, counts)
			}
			for i := range got {
				if got[i] != counts[i] {
					t.Fatalf("%s: lines by write are %v, want %v", when, got, counts)
				}
			}
		}
		log.Info("first")
		expect("at once", 1)
		for range 10 {
			log.With("a", 1).WithGroup("g").Info("more", "b", 2)
		}
		log.Debug("not shown")
		expect("at first", 1)
		time.Sleep(lineWait)
		expect("a while later", 1, 10)
		time.Sleep(time.Second)
		expect("without news", 1, 10)
		log.Info("after silence")
		expect("at once again", 1, 10, 1)
		log.Info("before")
		log.With("x", 1).Warn("a warning")
		expect("a warning", 1, 10, 1, 2)
		for range 2 * linesAhead / 100 {
			log.Info(strings.Repeat("x", 100))
		}
		if len(w) < 5 || len(w[4]) < linesAhead || len(w[4]) > linesAhead+200 {
			t.Errorf("%d writes; too much waits", len(w))
		}
		n := len(w)
		log.Info("last")
		lines.Flush()
		expectLast := w[len(w)-1]
		if len(w) != n+1 || !strings.Contains(expectLast, "msg=last") {
			t.Errorf("%d writes, the last is %q", len(w)-n, expectLast)
		}
		time.Sleep(time.Second)
		if len(w) != n+1 {
			t.Error("written twice")
		}
	})
}
