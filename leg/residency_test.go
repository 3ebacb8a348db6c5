package leg

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"baton/kvcache"
	"baton/wire"
)

// Readers who come, go on at their own pace and miss what they miss know in the end what the engines hold, and never
// hear of a block before its parent.
func TestReadersLearnWhatIsHeld(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newResidency()
		r.kept = rapid.IntRange(1, 6).Draw(t, "kept")
		held := []map[digest]digest{{}, {}, {}} // a group's blocks and their parents
		groups := []int{0, 1, 70}
		r.most = rapid.IntRange(1, 3).Draw(t, "sessions")
		lately := map[string]time.Time{}
		readers := make([]struct {
			at       place
			known    map[digest]bool
			sessions map[digest]time.Time
		}, 3)
		read := func(i, limit int) bool {
			events, at, reset := r.read(readers[i].at, limit)
			if reset {
				readers[i].known, readers[i].sessions = map[digest]bool{}, map[digest]time.Time{}
			}
			for _, e := range events {
				switch e.Kind {
				case Stored:
					if e.Parent != (digest{}) && !readers[i].known[e.Parent] {
						t.Fatalf("reader %d hears of %x before its parent", i, e.Digest[:2])
					}
					readers[i].known[e.Digest] = true
				case Removed:
					delete(readers[i].known, e.Digest)
				case SessionSeen:
					readers[i].sessions[e.Digest] = e.At
				}
			}
			if len(events) > limit {
				t.Fatalf("%d events", len(events))
			}
			readers[i].at = at
			return at.next == r.next
		}
		var now time.Time
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			now = now.Add(time.Second)
			g := rapid.IntRange(0, 2).Draw(t, "group")
			switch rapid.IntRange(0, 6).Draw(t, "what") {
			case 0, 1: // a prompt of some blocks
				parent := digest{}
				for range rapid.IntRange(1, 4).Draw(t, "blocks") {
					d := sha256.Sum256(append(parent[:], byte(rapid.IntRange(0, 1).Draw(t, "block"))))
					held[g][d] = parent
					r.stored(groups[g], d, parent)
					parent = d
				}
			case 2, 3: // a block without children goes
				for _, d := range slices.SortedFunc(maps.Keys(held[g]), func(a, b digest) int { return slices.Compare(a[:], b[:]) }) {
					leaf := true
					for _, parent := range held[g] {
						leaf = leaf && parent != d
					}
					if leaf {
						delete(held[g], d)
						r.removed(groups[g], d)
						break
					}
				}
			case 4:
				clear(held[g])
				r.forget(groups[g])
			case 6:
				name := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "name")
				lately[name] = now
				r.saw(name, now)
			case 5:
				read(rapid.IntRange(0, 2).Draw(t, "reader"), rapid.IntRange(1, 5).Draw(t, "limit"))
			}
		}
		want := map[digest]bool{}
		for _, h := range held {
			for d := range h {
				want[d] = true
			}
		}
		for i := range readers {
			for !read(i, 3) {
			}
			if !maps.Equal(readers[i].known, want) {
				t.Fatalf("reader %d knows %v, held are %v", i, readers[i].known, want)
			}
			// Of sessions it knows the last ones at least.
			names := slices.SortedFunc(maps.Keys(lately), func(a, b string) int { return lately[b].Compare(lately[a]) })
			for _, name := range names[:min(len(names), r.most)] {
				if at := readers[i].sessions[sha256.Sum256([]byte(name))]; !at.Equal(lately[name]) {
					t.Fatalf("reader %d has seen %s at %v, it was at %v", i, name, at, lately[name])
				}
			}
		}
		if most := 2*(len(r.blocks)+len(r.sessions)+r.kept) + 1; len(r.log) > 2*most {
			t.Fatalf("the log has %d entries for %d blocks", len(r.log), len(r.blocks))
		}
	})
}

// The log does not grow with what comes and goes, and a reader who was away for too long begins anew.
func TestLogIsBounded(t *testing.T) {
	r := newResidency()
	r.kept = 100
	r.stored(0, digest{1}, digest{})
	_, away, _ := r.read(place{}, 10)
	for i := range 10_000 {
		d := digest{2, byte(i), byte(i >> 8)}
		r.stored(0, d, digest{1})
		if i == 9_950 {
			_, at, _ := r.read(place{}, 10)
			defer func() {
				if _, _, reset := r.read(at, 10); reset {
					t.Error("a reader who missed 50 changes begins anew")
				}
			}()
		}
		r.removed(0, d)
	}
	if len(r.log) > 300 {
		t.Errorf("%d entries", len(r.log))
	}
	if events, _, reset := r.read(away, 10); !reset || len(events) != 1 {
		t.Errorf("%v, reset %v", events, reset)
	}
}

func kvEvent(kind uint8, n byte) wire.KVEvent {
	e := wire.KVEvent{Kind: kind, Digest: digest{n}, Version: 1}
	if n > 1 {
		e.Parent = digest{n - 1}
	}
	return e
}

// The core numbers reports as a coordinator does: a gap is mended by a snapshot, other weights' blocks do not count.
func TestReportsOfEngines(t *testing.T) {
	core, err := New(Config{Engines: []string{"p0", "p1"}, Incarnation: 0xabc})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1000, 0)
	say := func(engine string, m wire.Message) (told string) {
		for _, a := range core.Step(now, EngineSaid{engine, m}) {
			if tell, ok := a.(Tell); ok {
				told += tell.Engine + " " + tell.Message.Header().String()
			}
		}
		return told
	}
	at := ""
	expect := func(reset bool, want ...string) {
		t.Helper()
		var got []string
		c := core.Cached(at)
		for _, e := range c.Events {
			got = append(got, fmt.Sprint(e.Kind, e.Digest[0], e.Parent[0]))
		}
		if c.Reset != reset || !slices.Equal(got, want) || c.BlockSize != 16 || c.More {
			t.Errorf("%+v, want %v, reset %v", c, want, reset)
		}
		at = c.Cursor
	}
	for _, name := range []string{"p0", "p1"} {
		say(name, &wire.RegisterRole{Name: name, Role: wire.RolePrefill, WeightVersion: 1, Geometry: wire.Geometry{BlockSize: 16}})
		say(name, &wire.KVEvents{Sequence: 1, Next: 1, Reset: true})
	}
	expect(true)
	say("p0", &wire.KVEvents{Sequence: 1, Next: 3, Events: []wire.KVEvent{kvEvent(wire.KVStored, 1), kvEvent(wire.KVStored, 2)}})
	expect(false, "1 1 0", "1 2 1")
	say("p1", &wire.KVEvents{Sequence: 1, Next: 2, Events: []wire.KVEvent{kvEvent(wire.KVStored, 1)}})
	expect(false) // it is held already
	other := kvEvent(wire.KVStored, 9)
	other.Version = 2
	say("p0", &wire.KVEvents{Sequence: 3, Next: 5, Events: []wire.KVEvent{other, kvEvent(wire.KVRemoved, 2)}})
	expect(false, "2 2 0")
	if got := say("p0", &wire.KVEvents{Sequence: 7, Next: 8, Events: []wire.KVEvent{kvEvent(wire.KVStored, 5)}}); got != "p0 KVResync" {
		t.Errorf("after a gap: %q", got)
	}
	if got := say("p0", &wire.KVEvents{Sequence: 8, Next: 9, Events: []wire.KVEvent{kvEvent(wire.KVStored, 5)}}); got != "" {
		t.Errorf("while a snapshot is due: %q", got)
	}
	expect(false)
	say("p0", &wire.KVEvents{Sequence: 9, Next: 9, Reset: true, Events: []wire.KVEvent{kvEvent(wire.KVStored, 3)}})
	expect(false, "1 3 2")
	core.Step(now, EngineGone{"p0"})
	expect(false, "2 3 0")
	say("p1", &wire.KVEvents{Sequence: 2, Next: 3, Events: []wire.KVEvent{{Kind: wire.KVCleared}}})
	expect(false, "2 1 0")
	for _, bad := range []string{"", "7.1.1", "abc", "abc.99.99", "abc.-1.0", "abc.1", at + "x"} {
		if c := core.Cached(bad); c.Reset != (bad != at+"x") {
			t.Errorf("cursor %q: %+v", bad, c)
		}
	}
}

// A reader who has nothing to learn waits, until there is something, its time is over or the server closes.
func TestCachedWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := NewServer(ServerConfig{Core: Config{Engines: []string{"b0"}}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		ctx := context.Background()
		c, err := s.Cached(ctx, "", time.Hour) // a new reader learns at once that there is nothing
		if err != nil || !c.Reset {
			t.Fatalf("%+v, %v", c, err)
		}
		start := time.Now()
		if again, err := s.Cached(ctx, c.Cursor, 10*time.Second); err != nil || again.Reset || again.Cursor != c.Cursor || time.Since(start) != 10*time.Second {
			t.Errorf("%+v, %v after %v", again, err, time.Since(start))
		}
		s.step(EngineSaid{"b0", &wire.RegisterRole{Name: "b0", Role: wire.RoleBoth, WeightVersion: 1, Geometry: wire.Geometry{BlockSize: 8}}})
		s.step(EngineSaid{"b0", &wire.KVEvents{Sequence: 1, Next: 1, Reset: true}})
		start = time.Now()
		time.AfterFunc(3*time.Second, func() {
			s.step(EngineSaid{"b0", &wire.KVEvents{Sequence: 1, Next: 2, Events: []wire.KVEvent{kvEvent(wire.KVStored, 1)}}})
		})
		if c, err = s.Cached(ctx, c.Cursor, 10*time.Second); err != nil || len(c.Events) != 1 || c.BlockSize != 8 || time.Since(start) != 3*time.Second {
			t.Errorf("%+v, %v after %v", c, err, time.Since(start))
		}
		brief, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if _, err := s.Cached(brief, c.Cursor, time.Minute); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		time.AfterFunc(time.Second, s.Close)
		if _, err := s.Cached(ctx, c.Cursor, time.Minute); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}

// A request without a session goes to the data-parallel group that has most of its prompt, while that has room.
func TestGroupByWhatIsCached(t *testing.T) {
	core, err := New(Config{Engines: []string{"b0", "b1", "b2"}})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1000, 0)
	prompt := make([]int32, 9)
	chain := kvcache.Chain(kvcache.Digest{}, 4, prompt)
	for i, held := range []int{0, 1, 2} {
		name := fmt.Sprintf("b%d", i)
		events := &wire.KVEvents{Sequence: 1, Next: 1, Reset: true}
		for n := range held {
			e := wire.KVEvent{Kind: wire.KVStored, Digest: chain[n], Version: 1}
			if n > 0 {
				e.Parent = chain[n-1]
			}
			events.Events = append(events.Events, e)
		}
		core.Step(now, EngineSaid{name, &wire.RegisterRole{Name: name, Role: wire.RoleBoth, WeightVersion: 1, Requests: 2, Geometry: wire.Geometry{BlockSize: 4, MaxSeqLen: 64}}})
		core.Step(now, EngineSaid{name, events})
	}
	var went []string
	for id := uint64(1); id <= 7; id++ {
		job := Job{Group: -1, Chain: chain, Request: &wire.SubmitRequest{Prompt: prompt, Sampling: wire.Sampling{MaxTokens: 1}}}
		for _, a := range core.Step(now, Submit{id, job}) {
			if tell, ok := a.(Tell); ok {
				went = append(went, tell.Engine)
			}
		}
	}
	if want := []string{"b2", "b2", "b1", "b1", "b0", "b0"}; len(went) != 7 || !slices.Equal(went[:6], want) {
		t.Errorf("they went to %v, want %v and one more", went, want)
	}
}
