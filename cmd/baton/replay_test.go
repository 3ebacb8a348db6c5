//go:build unix

package main

import (
	"testing"

	"baton/internal/replay"
)

// Sessions survive the death of a prefill engine and of the frontend, and say what they would have said; `scripts/replay` takes longer.
func TestReplay(t *testing.T) {
	if testing.Short() {
		t.Skip("seconds of disturbed processes")
	}
	for name, relay := range map[string]bool{"coordinator": false, "relay": true} {
		t.Run(name, func(t *testing.T) { replayOnce(t, relay) })
	}
}

func replayOnce(t *testing.T, relay bool) {
	report, err := replay.Run(t.Context(), replay.Config{
		Command: theTest, Sessions: 6, Turns: 10, Prefix: 300, New: 90, Output: 20, Share: 0.7, Verify: true, Seed: 3, Relay: relay,
		Dir: t.TempDir(), Progress: t.Output(),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := report.Write(t.Output()); err != nil {
		t.Error(err)
	}
	if report.Lost != 0 || report.Changed != 0 || !report.Verified || report.Completed != 60 {
		t.Errorf("%d turns complete, %d trajectories lost, %d changed", report.Completed, report.Lost, report.Changed)
	}
	for _, p := range report.Phases {
		if p.Turns == 0 || p.HitRate == 0 || p.TTFT99 == 0 {
			t.Errorf("%+v", p)
		}
	}
	if report.Retries == 0 {
		t.Error("nobody noticed that the frontend was gone")
	}
}
