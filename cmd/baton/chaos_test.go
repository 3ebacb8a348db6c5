package main

import (
	"os"
	"testing"
	"time"

	"baton/internal/chaos"
	"baton/internal/rig"
)

// Engines die, stop and come back under load, for a few seconds with each transport; `make chaos` takes longer.
func TestChaos(t *testing.T) {
	if testing.Short() {
		t.Skip("many seconds of disturbed processes")
	}
	report, err := chaos.Run(t.Context(), chaos.Config{
		Command: rig.Command{Path: os.Args[0], Env: []string{"BATON_TEST_AS_MAIN=1"}},
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
