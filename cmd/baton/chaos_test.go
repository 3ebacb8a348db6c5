package main

import (
	"testing"
	"time"

	"baton/internal/chaos"
)

// Engines die, stop and come back under load, for a few seconds with each transport; `make chaos` takes longer.
func TestChaos(t *testing.T) {
	if testing.Short() {
		t.Skip("many seconds of disturbed processes")
	}
	report, err := chaos.Run(t.Context(), chaos.Config{
		Command: theTest,
		Model:   goldenPath("qwen3"), Duration: 9 * time.Second, Streams: 8, Questions: 16, Decode: 2, Every: 400 * time.Millisecond,
		Flags: []string{"--kv-memory=64MiB", "--threads=1"}, Dir: t.TempDir(), Progress: t.Output(), Seed: 5,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := report.Write(t.Output()); err != nil {
		t.Error(err)
	}
	if !report.OK() {
		t.Error("there were problems")
	}
}
