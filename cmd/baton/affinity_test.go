package main

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"baton/wire"
)

// dialogue is a conversation of which each turn goes on from the last.
type dialogue struct {
	id     string // "" for none
	salt   string // hides its ids from a relay's router
	ids    []int32
	held   int    // tokens of the last prompt, which its prefill engine holds
	engine string // the last prefill engine
}

// turns runs the next turn of all dialogues at once. It returns how much of what could be cached was, and how many went
// to another engine.
func (f *fleet) turns(t *testing.T, list []*dialogue) (share float64, moved int) {
	t.Helper()
	const block = 32
	cached, could := make([]int, len(list)), make([]int, len(list))
	engines := make([]string, len(list))
	var running sync.WaitGroup
	for i, d := range list {
		d.ids = append(d.ids, prompt(80, uint64(len(d.ids)*100+i))...)
		could[i] = d.held / block * block
		running.Go(func() {
			body := map[string]any{"prompt": d.ids, "max_tokens": 8, "temperature": 0, "ignore_eos": true, "return_handoff": true}
			if d.id != "" {
				body["conversation_params"] = map[string]any{"conversation_id": d.id}
			}
			if d.salt != "" {
				body["cache_salt"] = d.salt
			}
			c, err := f.tryComplete(t.Context(), body)
			if err != nil {
				t.Errorf("%d: %v", i, err)
				return
			}
			cached[i], engines[i] = c.Usage.PromptTokensDetails.CachedTokens, c.Choices[0].Handoff.PrefillEngine
			d.held = len(d.ids)
			d.ids = append(d.ids, c.Choices[0].TokenIDs...)
		})
	}
	running.Wait()
	total, all := 0, 0
	for i, d := range list {
		total, all = total+min(cached[i], could[i]), all+could[i]
		if d.engine != "" && d.engine != engines[i] {
			moved++
		}
		d.engine = engines[i]
	}
	return float64(total) / float64(max(all, 1)), moved
}

// awaitEngines waits until /health says so.
func (f *fleet) awaitEngines(t *testing.T, says string) {
	t.Helper()
	health := ""
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		resp, err := http.Get(f.url + "/health")
		if err != nil {
			t.Fatal(err)
		}
		raw, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if health = string(raw); err == nil && strings.Contains(health, says) {
			return
		}
	}
	t.Fatalf("/health still says %s", health)
}

// TestAffinityOutlivesTheFrontend: a frontend holds nothing that routing needs. One that is killed and started again finds
// every conversation where it was (19), and so does a fleet whose coordinator was: the engines say what they hold.
func TestAffinityOutlivesTheFrontend(t *testing.T) {
	const patience = "--peer-timeout=10s" // an engine that is taken for dead on a busy machine would lose what it holds
	f := processesOf(t, goldenPath("qwen3"), []string{patience}, []string{wire.RolePrefill, wire.RolePrefill, wire.RoleDecode},
		patience, "--kv-memory=64MiB", "--block-size=32")
	var list []*dialogue
	for i := range 8 {
		list = append(list, &dialogue{id: fmt.Sprintf("session-%d", i), ids: prompt(200, uint64(i))})
	}
	check := func(when string) {
		t.Helper()
		for range 2 {
			if share, moved := f.turns(t, list); share < 0.95 || moved > 0 {
				t.Errorf("%s: %.0f %% of what could be cached was, and %d conversations moved", when, 100*share, moved)
			}
		}
	}
	f.awaitEngines(t, `"prefill":2`)
	f.turns(t, list)
	used := map[string]int{}
	for _, d := range list {
		used[d.engine]++
	}
	if len(used) != 2 {
		t.Fatalf("conversations went to %v", used)
	}
	check("before")
	addr := f.parts["coordinator"].await(t, `coordinator at (\S+)`)
	frontend := func() {
		if err := f.parts["frontend"].Kill(); err != nil {
			t.Fatal(err)
		}
		f.parts["frontend"] = start(t, "frontend", "--listen=127.0.0.1:0", "--coordinator="+addr, "--model="+goldenPath("qwen3"), "--served-model-name=m")
		f.url = f.parts["frontend"].await(t, `frontend at (\S+)`)
		f.awaitHealth(t)
		f.awaitEngines(t, `"prefill":2`)
	}
	frontend()
	check("after the frontend's death")
	if err := f.parts["coordinator"].Kill(); err != nil {
		t.Fatal(err)
	}
	f.parts["coordinator"] = start(t, "coordinator", "--listen="+addr, patience)
	frontend()
	slices.Reverse(list) // least work and turns would give them to others
	check("after the coordinator's death too")
}

// TestAffinityOutlivesTheRelay: the same where nobody coordinates. A relay that was killed and one that takes its place learn
// from the engines what they hold, and which sessions they had, before they send them anything, whichever of the two routers
// chooses: half of the conversations have ids, the other half is known by its tokens.
func TestAffinityOutlivesTheRelay(t *testing.T) {
	model := goldenPath("qwen3")
	flags := []string{"--transfer=tcp", "--kv-memory=64MiB", "--block-size=32"}
	prefill := httpPart(t, nil, model, wire.RolePrefill, append(flags, "--name=prefill1")...)
	other := httpPart(t, nil, model, wire.RolePrefill, append(flags, "--name=prefill2", "--shard=tp=1,dp=2")...)
	decode := httpPart(t, nil, model, wire.RoleDecode, flags...)
	var list []*dialogue
	for i := range 8 {
		d := &dialogue{ids: prompt(200, uint64(i))}
		if i%2 == 0 {
			d.id, d.salt = fmt.Sprintf("session-%d", i), "salt"
		}
		list = append(list, d)
	}
	f := relayed(t, nil, prefill, decode, "--prefill="+other.url)
	f.awaitEngines(t, `"prefill":"2 of 2"`)
	f.turns(t, list)
	for round, router := range []string{"conversation", "kv_cache_aware"} {
		// An engine's groups have a name each.
		moves := func(when string) {
			t.Helper()
			if share, moved := f.turns(t, list); share < 0.95 || moved > 0 {
				t.Errorf("%s, %s: %.0f %% of what could be cached was, and %d conversations moved", router, when, 100*share, moved)
			}
		}
		used := map[string]int{}
		for _, d := range list {
			used[strings.SplitN(d.engine, "_", 2)[0]]++
		}
		if len(used) != 2 {
			t.Fatalf("conversations went to %v", used)
		}
		if round == 0 {
			moves("before")
		}
		if err := f.parts["frontend"].Kill(); err != nil {
			t.Fatal(err)
		}
		f = relayed(t, nil, prefill, decode, "--prefill="+other.url, "--prefill-router="+router)
		f.awaitEngines(t, `"prefill":"2 of 2"`)
		slices.Reverse(list) // load and turns would give them to others
		moves("after the relay's death")
		moves("a turn later")
	}
	if known := metric(t, prefill.url, "baton_leg_cached_blocks") + metric(t, other.url, "baton_leg_cached_blocks"); known < 8*200/32 {
		t.Errorf("the prefill engines tell of %v blocks", known)
	}
}
