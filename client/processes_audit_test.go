package client

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// listEnv makes the test binary print where sessions go instead of testing.
const listEnv = "BATON_CLIENT_LIST"

func TestMain(m *testing.M) {
	if os.Getenv(listEnv) == "" {
		os.Exit(m.Run())
	}
	s, err := NewSessions(urls(6))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for i := range 200 {
		fmt.Println(s.URL(fmt.Sprintf("rollout %d é", i)))
	}
	os.Exit(0)
}

// TestOtherProcessesAgree: nothing of a process, such as a seed or the order in which sessions come, is in the rule (40).
func TestOtherProcessesAgree(t *testing.T) {
	s, err := NewSessions(urls(6))
	if err != nil {
		t.Fatal(err)
	}
	here := make([]string, 200)
	for i := range here {
		k := len(here) - 1 - i
		here[k] = s.URL(fmt.Sprintf("rollout %d é", k))
	}
	for range 2 {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), listEnv+"=1")
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		for i, url := range strings.Fields(string(out)) {
			if url != here[i] {
				t.Errorf("session %d: %s there, %s here", i, url, here[i])
			}
		}
		if n := len(strings.Fields(string(out))); n != len(here) {
			t.Errorf("%d URLs", n)
		}
	}
}
