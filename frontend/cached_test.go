package frontend

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"baton/kvcache"
	"baton/wire"
)

type cacheNews struct {
	Engine, Cursor string
	Reset, More    bool
	BlockSize      int `json:"block_size"`
	Events         []struct {
		Type    string
		Parent  []byte
		Blocks  [][]byte
		Session []byte
		At      int64
	}
}

func readNews(t *testing.T, s *Server, query string) (n cacheNews) {
	t.Helper()
	got := do(t, s.Handler(), "POST", "/kv_cache_events"+query, "")
	if got.status != http.StatusOK {
		t.Fatalf("status %d: %s", got.status, got.body)
	}
	if err := json.Unmarshal(got.body, &n); err != nil {
		t.Fatalf("%v in %s", err, got.body)
	}
	return n
}

// What an engine has cached can be read as the digests that a relay computes from a prompt's ids, by several readers, and as
// it changes.
func TestCacheEvents(t *testing.T) {
	s, _ := legServer(t, wire.RoleBoth)
	first := readNews(t, s, "")
	if first.Engine != "baton" || !first.Reset || first.More || len(first.Events) != 0 || first.BlockSize < 1 {
		t.Fatalf("%+v", first)
	}
	if same := readNews(t, s, "?cursor="+first.Cursor+"&wait=0.01"); same.Reset || same.Cursor != first.Cursor {
		t.Errorf("%+v", same)
	}
	ids := make([]int32, 3*first.BlockSize+1)
	for i := range ids {
		ids[i] = int32(i % 600)
	}
	raw, _ := json.Marshal(map[string]any{"model": "toy", "prompt": ids, "max_tokens": 1})
	done := make(chan cacheNews)
	go func() { done <- readNews(t, s, "?cursor="+first.Cursor+"&wait=20") }()
	if got := do(t, s.Handler(), "POST", "/v1/completions", string(raw)); got.status != http.StatusOK {
		t.Fatalf("%d %s", got.status, got.body)
	}
	<-done // it is woken by the first of them
	for _, n := range []cacheNews{readNews(t, s, "?cursor="+first.Cursor), readNews(t, s, "")} {
		var got []kvcache.Digest
		for _, e := range n.Events {
			if e.Type != "stored" || len(got) > 0 && string(e.Parent) != string(got[len(got)-1][:]) || len(got) == 0 && e.Parent != nil {
				t.Fatalf("%+v", n)
			}
			for _, b := range e.Blocks {
				got = append(got, kvcache.Digest(b))
			}
		}
		if want := kvcache.Chain(kvcache.Digest{}, n.BlockSize, ids); !slices.Equal(got, want) {
			t.Errorf("%x, want %x", got, want)
		}
	}
	for _, bad := range []string{"?wait=x", "?wait=-1", "?wait=31", "?wait=NaN"} {
		if got := do(t, s.Handler(), "POST", "/kv_cache_events"+bad, ""); got.status != http.StatusBadRequest || !strings.Contains(string(got.body), "seconds") {
			t.Errorf("%s: %d %s", bad, got.status, got.body)
		}
	}
	if got := do(t, s.Handler(), "GET", "/kv_cache_events", ""); got.status != http.StatusMethodNotAllowed {
		t.Errorf("%d %s", got.status, got.body)
	}
	// So are sessions, by the hashes of their names.
	before := readNews(t, s, "").Cursor
	if got := do(t, s.Handler(), "POST", "/v1/completions", `{"model":"toy","prompt":[5,6],"max_tokens":1,"conversation_params":{"conversation_id":"one"}}`); got.status != http.StatusOK {
		t.Fatalf("%d %s", got.status, got.body)
	}
	if n := readNews(t, s, "?cursor="+before); len(n.Events) != 1 || n.Events[0].Type != "session" || kvcache.Digest(n.Events[0].Session) != sha256.Sum256([]byte("one")) ||
		time.Since(time.UnixMilli(n.Events[0].At)) > time.Minute {
		t.Errorf("%+v", n)
	}
	// A reader who waits does not hold up a shutdown.
	last := readNews(t, s, "")
	waiting := make(chan int)
	go func() {
		waiting <- do(t, s.Handler(), "POST", "/kv_cache_events?wait=20&cursor="+last.Cursor, "").status
	}()
	time.Sleep(10 * time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	start := time.Now()
	if err := s.Shutdown(ctx); err != nil || time.Since(start) > 5*time.Second {
		t.Errorf("%v after %v", err, time.Since(start))
	}
	if status := <-waiting; status != http.StatusServiceUnavailable {
		t.Errorf("the reader who waited got %d", status)
	}
}
