package main

import (
	"context"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"baton/internal/rig"
	"baton/wire"
)

// prompt makes n token ids of the golden models' vocabulary.
func prompt(n int, seed uint64) []int32 {
	rng := rand.New(rand.NewPCG(seed, 7))
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = 3 + rng.Int32N(630)
	}
	return ids
}

func TestRepeatedPromptMovesOnlyWhatIsMissing(t *testing.T) {
	f := serve(t, goldenPath("llama"), "--kv-memory=64MiB")
	body := func() map[string]any {
		return map[string]any{"prompt": prompt(2000, 1), "max_tokens": 5, "temperature": 0, "return_handoff": true}
	}
	const complete, partial = 2000 / 32, 1
	first := f.complete(t, body())
	if h := first.Choices[0].Handoff; h == nil || h.BlocksMoved != complete+partial || h.BlocksReused != 0 || first.Usage.PromptTokensDetails.CachedTokens != 0 {
		t.Errorf("first: %d cached tokens, handoff %+v; want 0 and %d blocks moved", first.Usage.PromptTokensDetails.CachedTokens, h, complete+partial)
	}
	again := f.complete(t, body())
	if got := again.Usage.PromptTokensDetails.CachedTokens; got != complete*32 {
		t.Errorf("again: %d cached tokens, want all %d complete blocks: %d", got, complete, complete*32)
	}
	if h := again.Choices[0].Handoff; h == nil || h.BlocksReused != complete || h.BlocksMoved != partial || h.PromptComputed != 2000-complete*32 {
		t.Errorf("again: handoff %+v; want %d blocks reused, %d moved and %d tokens computed", h, complete, partial, 2000-complete*32)
	}
	if !slices.Equal(first.Choices[0].TokenIDs, again.Choices[0].TokenIDs) {
		t.Errorf("ids %v, then %v", first.Choices[0].TokenIDs, again.Choices[0].TokenIDs)
	}
	if moved := metric(t, f.url, "baton_handoff_blocks_moved_total"); moved != complete+2*partial {
		t.Errorf("%v blocks moved in all, want %d", moved, complete+2*partial)
	}
}

func TestSixteenCopiesComputeAndMoveThePromptOnce(t *testing.T) {
	for _, transport := range []string{"shm", "tcp-push"} {
		t.Run(transport, func(t *testing.T) {
			f := serve(t, goldenPath("qwen3"), "--kv-memory=64MiB", "--transfer="+transport, "--shards=role=prefill+dp=2,role=decode")
			const n, size = 1000, 32
			body := func(seed int) map[string]any {
				return map[string]any{"prompt": prompt(n, 2), "max_tokens": 12, "temperature": 0.8, "seed": seed, "return_handoff": true}
			}
			copies := make([]completion, 16)
			var wg sync.WaitGroup
			for i := range copies {
				wg.Go(func() {
					var err error
					if copies[i], err = f.tryComplete(t.Context(), body(i)); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if t.Failed() {
				return
			}
			computed, requests := 0, map[string]int{}
			for _, c := range copies {
				computed += c.Choices[0].Handoff.PromptComputed
				requests[c.Choices[0].Handoff.DecodeEngine]++
			}
			if want := n + 15*(n%size); computed != want {
				t.Errorf("%d prompt tokens computed, want %d: the prompt once, and the %d of its partial block for each other copy", computed, want, n%size)
			}
			for engine, count := range requests {
				want := float64(n/size + count) // every request has a partial block of its own
				if moved := metric(t, f.url, "baton_handoff_blocks_moved_total", engine); moved != want {
					t.Errorf("%v blocks moved to %s for %d requests, want %v", moved, engine, count, want)
				}
			}
			solo := serve(t, goldenPath("qwen3"), "--kv-memory=64MiB", "--shards=tp=1")
			for i, c := range copies {
				if alone := solo.complete(t, body(i)).Choices[0].TokenIDs; !slices.Equal(c.Choices[0].TokenIDs, alone) {
					t.Errorf("copy %d: %v, alone %v", i, c.Choices[0].TokenIDs, alone)
				}
			}
		})
	}
}

// stream reads the token ids of a streamed completion until it ends, or until limit of them have come.
func (f *fleet) stream(ctx context.Context, body map[string]any, limit int) (ids []int32, err error) {
	return f.streamFrom(ctx, body, limit, make(chan struct{}, 1))
}

// streamFrom is stream, and says when the first tokens have come.
func (f *fleet) streamFrom(ctx context.Context, body map[string]any, limit int, begun chan<- struct{}) (ids []int32, err error) {
	body = maps.Clone(body)
	body["model"], body["stream"], body["return_token_ids"] = f.model, true, true
	ctx, hangUp := context.WithCancel(ctx)
	defer hangUp()
	enough := false
	answer, err := rig.Stream(ctx, f.http(), f.url, body, func(a *rig.Answer) {
		if begun != nil {
			begun <- struct{}{}
			begun = nil
		}
		if enough = len(a.IDs) >= limit; enough {
			hangUp()
		}
	})
	if enough {
		err = nil
	}
	return answer.IDs, err
}

// A third of 32 streams hang up midway. The others get what they would get alone, and everything that
// anybody held comes back.
func TestStreamsAndCancellations(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	t.Run("fleets", func(t *testing.T) {
		for _, flags := range [][]string{
			{"--shards=tp=1"}, {"--transfer=shm"}, {"--transfer=tcp"}, {"--transfer=tcp-push", "--shards=dp=2,role=prefill+dp=2,role=decode"},
		} {
			t.Run(flags[len(flags)-1], func(t *testing.T) {
				streams(t, serve(t, goldenPath("qwen2"), append(flags, "--kv-memory=8MiB", "--max-requests=12", "--max-tokens=100")...))
			})
		}
	})
	http.DefaultClient.CloseIdleConnections()
}

func streams(t *testing.T, f *fleet) {
	body := func(i int) map[string]any {
		return map[string]any{
			"prompt": prompt(1+(i*97)%700, uint64(i%5)), "max_tokens": 10 + (i*13)%70,
			"temperature": 0.8, "seed": i, "ignore_eos": true,
		}
	}
	got := make([][]int32, 32)
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() {
			limit := 1 << 30
			if i%3 == 0 {
				limit = 1 + i%8 // then hang up
			}
			var err error
			if got[i], err = f.stream(t.Context(), body(i), limit); err != nil {
				t.Errorf("stream %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	for i, ids := range got {
		alone := f.complete(t, body(i)).Choices[0].TokenIDs
		if i%3 == 0 {
			alone = alone[:min(len(ids), len(alone))]
		}
		if !slices.Equal(ids, alone) {
			t.Errorf("stream %d: %v, alone %v", i, ids, alone)
		}
	}
	f.awaitRest(t)
}

// awaitRest waits until nothing is held anywhere.
func (f *fleet) awaitRest(t *testing.T) {
	t.Helper()
	var held float64
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		held = metric(t, f.url, "baton_engine_kv_blocks", `state="used"`) + metric(t, f.url, "baton_engine_requests") +
			metric(t, f.url, "baton_coordinator_requests") + metric(t, f.url, "baton_coordinator_engine_blocks_reserved")
		if held == 0 {
			return
		}
	}
	t.Errorf("%v blocks, requests and reservations are still held", held)
}

// Streams of an engine that dies go on, with the tokens they would have had, on another; those of others do
// not notice.
func TestDecodeEngineDies(t *testing.T) {
	f := processes(t, goldenPath("qwen3"), []string{wire.RolePrefill, wire.RoleDecode, wire.RoleDecode}, "--kv-memory=256MiB")
	body := func(i int) map[string]any {
		return map[string]any{
			"prompt": prompt(50, uint64(i)), "max_tokens": 600, "temperature": 0.8, "seed": i, "ignore_eos": true,
		}
	}
	const n = 16
	streams := make([][]int32, n)
	begun := make(chan struct{}, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			ids, err := f.streamFrom(t.Context(), body(i), 1<<30, begun)
			if err != nil {
				t.Errorf("stream %d: %v", i, err)
			}
			streams[i] = ids
		})
	}
	for range n {
		<-begun // every stream has tokens
	}
	if err := f.parts["decode2"].Kill(); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	alone := serve(t, goldenPath("qwen3"), "--kv-memory=64MiB", "--shards=tp=1")
	for i, ids := range streams {
		if want := alone.complete(t, body(i)).Choices[0].TokenIDs; !slices.Equal(ids, want) {
			t.Errorf("stream %d: %v, undisturbed %v", i, ids, want)
		}
	}
	if log := f.parts["coordinator"].Log.Tail(); !strings.Contains(log, "decode2 is gone") {
		t.Errorf("the coordinator did not notice the death:\n%s", log)
	}
}

// When nobody is left to go on, clients are told so, soon and in words.
func TestLastDecodeEngineDies(t *testing.T) {
	f := processesOf(t, goldenPath("qwen3"), []string{"--engine-wait=1s"}, []string{wire.RolePrefill, wire.RoleDecode}, "--kv-memory=64MiB")
	begun := make(chan struct{}, 1)
	ended := make(chan error, 1)
	go func() {
		_, err := f.streamFrom(t.Context(), map[string]any{"prompt": prompt(50, 1), "max_tokens": 3000, "ignore_eos": true}, 1<<30, begun)
		ended <- err
	}()
	<-begun
	if err := f.parts["decode2"].Kill(); err != nil {
		t.Fatal(err)
	}
	died := time.Now()
	err := <-ended
	if after := time.Since(died); err == nil || !strings.Contains(err.Error(), "decode") || after > 2*time.Second {
		t.Errorf("after %v: %v; want an error that names the role within 2 s", after, err)
	}
}
