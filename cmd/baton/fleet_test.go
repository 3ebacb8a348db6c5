package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"baton/internal/rig"
)

// TestMain lets the test binary stand in for bin/baton, so that fleets of real processes can be started.
func TestMain(m *testing.M) {
	if os.Getenv("BATON_TEST_AS_MAIN") == "1" {
		os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// fleet is something that serves at url.
type fleet struct {
	url    string
	model  string
	client *http.Client     // nil for one that knows no certificates and no API key
	parts  map[string]*part // of separate processes, by name
}

// part is one process of a fleet.
type part struct {
	*rig.Process
	args []string
}

// theTest is the test binary as bin/baton.
var theTest = rig.Command{Path: os.Args[0], Env: []string{"BATON_TEST_AS_MAIN=1"}}

// serve starts everything in this process.
func serve(t *testing.T, model string, flags ...string) *fleet {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	out, log, stopped := rig.NewLog(nil, nil), rig.NewLog(nil, nil), make(chan struct{})
	args := append([]string{"--log-level=warn", "serve", "--listen=127.0.0.1:0", "--served-model-name=m", "--model=" + model}, flags...)
	code := 0
	go func() {
		defer close(stopped)
		code = runContext(ctx, args, out, log)
	}()
	t.Cleanup(func() {
		cancel()
		<-stopped
		if code != 0 {
			t.Errorf("baton %s ended with %d:\n%s%s", strings.Join(args, " "), code, out.Tail(), log.Tail())
		}
	})
	return &fleet{url: await(t, out, `at (https?://\S+)`, stopped), model: "m"}
}

// await waits for a line that matches and returns its first group.
func await(t *testing.T, log *rig.Log, pattern string, stopped <-chan struct{}) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	group, err := log.Await(ctx, regexp.MustCompile(pattern), stopped)
	if err != nil {
		t.Fatal(err)
	}
	return group
}

// start runs one process of a fleet until the test ends.
func start(t *testing.T, args ...string) *part {
	t.Helper()
	return startAs(t, theTest, args...)
}

func startAs(t *testing.T, command rig.Command, args ...string) *part {
	t.Helper()
	process, err := command.Start(args[0], rig.NewLog(nil, nil), args...)
	if err != nil {
		t.Fatal(err)
	}
	p := &part{process, args}
	t.Cleanup(func() { p.end(t) })
	return p
}

// await waits for what the process prints.
func (p *part) await(t *testing.T, pattern string) string {
	t.Helper()
	return await(t, p.Log, pattern, p.Done())
}

// end asks the process to end, as an operator would. How it does is the test's business.
func (p *part) end(t *testing.T) {
	t.Helper()
	var failed *rig.ExitError
	if err := p.Stop(20 * time.Second); errors.As(err, &failed) && failed.Late > 0 {
		t.Errorf("%v: %v:\n%s", p.args, err, p.Log.Tail())
	}
	if t.Failed() {
		t.Logf("%v:\n%s", p.args, p.Log.Tail())
	}
}

// processes starts a coordinator, one engine of each role, and a frontend, each a process.
func processes(t *testing.T, model string, roles []string, flags ...string) *fleet {
	t.Helper()
	return processesOf(t, model, nil, roles, flags...)
}

// processesOf is processes with flags of the coordinator's own.
func processesOf(t *testing.T, model string, hubFlags, roles []string, flags ...string) *fleet {
	t.Helper()
	f := &fleet{model: "m", parts: map[string]*part{}}
	hub := start(t, append([]string{"coordinator", "--listen=127.0.0.1:0"}, hubFlags...)...)
	f.parts["coordinator"] = hub
	addr := hub.await(t, `coordinator at (\S+)`)
	for _, role := range roles {
		name := fmt.Sprintf("%s%d", role, len(f.parts))
		f.parts[name] = start(t, append([]string{
			"engine", "--role=" + role, "--name=" + name,
			"--coordinator=" + addr, "--model=" + model, "--metrics=127.0.0.1:0",
		}, flags...)...)
	}
	front := start(t, "frontend", "--listen=127.0.0.1:0", "--coordinator="+addr, "--model="+model, "--served-model-name=m")
	f.parts["frontend"] = front
	f.url = front.await(t, `frontend at (\S+)`)
	if len(roles) > 0 {
		f.awaitHealth(t)
	}
	return f
}

func (f *fleet) http() *http.Client { return cmp.Or(f.client, http.DefaultClient) }

func (f *fleet) awaitHealth(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		resp, err := f.http().Get(f.url + "/health")
		if err != nil {
			continue
		}
		resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			return
		}
	}
	t.Fatal("the fleet did not become healthy within 30 s")
}

// post sends a body and returns the status and the answer.
func (f *fleet) post(ctx context.Context, path string, body any) (int, []byte, error) {
	raw, err := json.Marshal(body)
	if err != nil {
		return 0, nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+path, bytes.NewReader(raw))
	if err != nil {
		return 0, nil, err
	}
	resp, err := f.http().Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}

// completion is what the tests read of a /v1/completions answer. Numbers stay text, to compare bits.
type completion struct {
	Choices []struct {
		Text         string  `json:"text"`
		TokenIDs     []int32 `json:"token_ids"`
		FinishReason string  `json:"finish_reason"`
		Logprobs     struct {
			TokenLogprobs []json.Number            `json:"token_logprobs"`
			TopLogprobs   []map[string]json.Number `json:"top_logprobs"`
		} `json:"logprobs"`
		PromptLogprobs []map[string]struct {
			Logprob json.Number `json:"logprob"`
		} `json:"prompt_logprobs"`
		Handoff *askHandoff `json:"handoff"`
	} `json:"choices"`
	Usage struct {
		PromptTokens        int `json:"prompt_tokens"`
		CompletionTokens    int `json:"completion_tokens"`
		PromptTokensDetails struct {
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
}

// complete runs a /v1/completions request that must succeed.
func (f *fleet) complete(t *testing.T, body map[string]any) completion {
	t.Helper()
	c, err := f.tryComplete(t.Context(), body)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (f *fleet) tryComplete(ctx context.Context, body map[string]any) (completion, error) {
	body["model"] = f.model
	body["return_token_ids"] = true
	if body["seed"] == nil {
		body["seed"] = 1 // or no two runs of a test were the same
	}
	var c completion
	status, raw, err := f.post(ctx, "/v1/completions", body)
	if err != nil {
		return c, err
	}
	if status != http.StatusOK {
		return c, fmt.Errorf("status %d: %s", status, raw)
	}
	return c, json.Unmarshal(raw, &c)
}

// metric sums the samples of a series whose labels contain all of want.
func metric(t *testing.T, url, name string, want ...string) float64 {
	t.Helper()
	all, err := rig.Scrape(t.Context(), http.DefaultClient, url)
	if err != nil {
		t.Fatal(err)
	}
	sum, found := all.Sum(name, want...)
	if !found {
		t.Fatalf("no series %s %v", name, want)
	}
	return sum
}

// golden is what Hugging Face transformers computed in f32 for a tiny checkpoint.
type golden struct {
	Cases []struct {
		Prompt         []int32   `json:"prompt"`
		Generated      []int32   `json:"generated"`
		Logprobs       []float64 `json:"logprobs"`
		PromptLogprobs []float64 `json:"prompt_logprobs"`
	} `json:"cases"`
}

func goldenPath(name string) string { return filepath.Join("..", "..", "testdata", "goldens", name) }

func readGolden(t *testing.T, name string) golden {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(goldenPath(name), "golden.json"))
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.Unmarshal(raw, &g); err != nil {
		t.Fatal(err)
	}
	return g
}
