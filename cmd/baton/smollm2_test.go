package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"baton/wire"
)

// smollm2 is the real model, which `make model` puts into the cache.
func smollm2(t *testing.T) string {
	t.Helper()
	cache := os.Getenv("BATON_CACHE")
	if cache == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			t.Fatal(err)
		}
		cache = filepath.Join(home, ".cache", "baton")
	}
	path := filepath.Join(cache, "SmolLM2-135M-Instruct.Q4_1.gguf")
	if _, err := os.Stat(path); err != nil {
		t.Skipf("needs %s; `make model` gets it", path)
	}
	return path
}

func TestSmolLM2KnowsTheCapitalOfFrance(t *testing.T) {
	model := smollm2(t)
	question := "What is the capital of France?"
	for name, f := range map[string]*fleet{
		"one process": serve(t, model, "--kv-memory=256MiB"),
		"processes":   processes(t, model, []string{wire.RolePrefill, wire.RoleDecode}, "--kv-memory=256MiB", "--transfer=tcp"),
	} {
		var out bytes.Buffer
		if err := ask(t.Context(), &out, selfClient{}, f.url, "m", question); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := out.String(); !strings.Contains(got, "Paris") || !strings.Contains(got, "blocks moved") {
			t.Errorf("%s: %s", name, got)
		}
	}
}
