package route

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"baton/kvcache"
)

// text is a chain of n blocks that begins as others of its kind do.
func text(kind, n int) []kvcache.Digest {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(kind*1000 + i)
	}
	return kvcache.Chain(kvcache.Digest{}, 1, ids)
}

func three() []Worker { return []Worker{{ID: 11, Slot: 0}, {ID: 12, Slot: 1}, {ID: 13, Slot: 2}} }

func TestRouterNames(t *testing.T) {
	names := RouterNames()
	if want := []string{"conversation", "kv_cache_aware", "load_balancing", "round_robin"}; !slices.Equal(names, want) {
		t.Errorf("%v", names)
	}
	for _, name := range names {
		if r, err := NewRouter(name, NewIndex(10)); err != nil || r.Name() != name {
			t.Errorf("%s: %v, %v", name, r, err)
		}
	}
	if _, err := NewRouter("random", nil); err == nil || err.Error() != `route: no router "random"; use one of conversation, kv_cache_aware, load_balancing, round_robin` {
		t.Error(err)
	}
}

func TestTurnAndLoad(t *testing.T) {
	var turn TurnRouter
	var got []int
	for range 4 {
		got = append(got, turn.Pick(Request{}, three()).Index)
	}
	got = append(got, turn.Pick(Request{}, three()[:1]).Index)
	if want := []int{0, 1, 2, 0, 0}; !slices.Equal(got, want) {
		t.Errorf("round robin: %v", got)
	}
	var load LoadRouter
	w := three()
	got = nil
	for range 6 {
		i := load.Pick(Request{}, w).Index
		w[i].Requests++
		got = append(got, i)
	}
	w[0].Requests--
	got = append(got, load.Pick(Request{}, w).Index)
	if want := []int{0, 1, 2, 0, 1, 2, 0}; !slices.Equal(got, want) {
		t.Errorf("load: %v", got)
	}
	w = three()
	if a, b := load.Pick(Request{}, w).Index, load.Pick(Request{}, w).Index; a == b {
		t.Errorf("among equals it is always %d", a)
	}
}

// Behaviours 41, 44 and 45: an id stays where it is under load; the least recently used is forgotten; one whose worker is
// not among the candidates moves for good.
func TestConversationByID(t *testing.T) {
	c := NewConversation(0, 2, nil)
	pick := func(id string, w []Worker) uint64 { return w[c.Pick(Request{Conversation: id}, w).Index].ID }
	w := three()
	a := pick("a", w)
	w[0].Content = 1 << 30
	if got := pick("a", w); got != a {
		t.Errorf("a moved from %d to %d under load", a, got)
	}
	if b := pick("b", w); b == a {
		t.Error("b went to the loaded worker")
	}
	if got := c.Pick(Request{Conversation: "a"}, w); got.Reason != ReasonConversation {
		t.Errorf("%+v", got)
	}
	pick("c", w) // forgets b
	if got := c.Pick(Request{Conversation: "b"}, w); got.Reason != ReasonLoad {
		t.Errorf("b is still known: %+v", got)
	}
	c = NewConversation(0, 0, nil)
	w = three()
	a = pick("a", w)
	rest := slices.DeleteFunc(three(), func(w Worker) bool { return w.ID == a })
	moved := pick("a", rest)
	if got := pick("a", three()); got != moved {
		t.Errorf("a went back to %d from %d, which holds it now", got, moved)
	}
	if c.Needs("a") != 0 || c.Needs("") != NeedContent {
		t.Error("text is looked at although there is an id, or not although there is none")
	}
}

// Behaviour 43: the part that must match, to the block.
func TestConversationByText(t *testing.T) {
	for _, tt := range []struct {
		first, second int
		want          string
	}{
		{75, 100, ReasonPrefix}, {74, 100, ReasonLoad}, {3, 4, ReasonPrefix}, {100, 50, ReasonPrefix}, {1, 1, ReasonPrefix}, {0, 1, ReasonLoad}, {1, 0, ReasonLoad},
	} {
		c := NewConversation(0, 0, nil)
		at := c.Pick(Request{Content: text(1, tt.first)}, three()).Index
		w := three()
		w[at].Content = 1 << 20
		got := c.Pick(Request{Content: text(1, tt.second)}, w)
		if got.Reason != tt.want || (got.Reason == ReasonPrefix) != (got.Index == at) {
			t.Errorf("%d then %d blocks: %+v, the first was at %d", tt.first, tt.second, got, at)
		}
	}
	// The deepest match wins, whatever the load.
	c := NewConversation(0, 0, nil)
	c.held.Record(0, text(1, 80))
	c.held.Record(2, text(1, 90))
	w := three()
	w[2].Content = 1 << 20
	if got := c.Pick(Request{Content: text(1, 100)}, w); got.Index != 2 || got.Match != 90 || got.Blocks != 100 {
		t.Errorf("%+v", got)
	}
	c.Forget(Worker{Slot: 2})
	if got := c.Pick(Request{Content: text(1, 100)}, w); got.Index != 0 || got.Match != 80 {
		t.Errorf("%+v", got)
	}
}

func TestResidency(t *testing.T) {
	held := NewIndex(1000)
	r := NewResidency(held)
	w := three()
	for i := range w {
		w[i].Reports = true
	}
	var parent kvcache.Digest
	for _, d := range text(1, 10) {
		held.Store(1, d, parent)
		parent = d
	}
	got := r.Pick(Request{Tokens: text(1, 12)}, w)
	if got.Index != 1 || got.Match != 10 || got.Blocks != 12 || got.Reason != ReasonResidency {
		t.Errorf("%+v", got)
	}
	w[1].Requests = 64 // as good as full
	if got := r.Pick(Request{Tokens: text(1, 12)}, w); got.Index == 1 {
		t.Errorf("a full worker gets %+v", got)
	}
	w[1].Requests = 0
	// A prompt that runs is expected where it runs, until it is over.
	first := r.Pick(Request{Tokens: text(2, 10)}, w)
	if again := r.Pick(Request{Tokens: text(2, 10)}, w); again.Index != first.Index || again.Match != 10 {
		t.Errorf("%+v after %+v", again, first)
	} else {
		r.Done(again)
	}
	r.Done(first)
	if got := r.Pick(Request{Tokens: text(2, 10)}, w); got.Match != 0 {
		t.Errorf("after it is over: %+v", got)
	}
	// Of workers that do not report, what was sent there counts.
	w = three()
	first = r.Pick(Request{Tokens: text(3, 10)}, w)
	r.Done(first)
	if again := r.Pick(Request{Tokens: text(3, 11)}, w); again.Index != first.Index || again.Match != 10 {
		t.Errorf("%+v after %+v", again, first)
	}
	// Without ids it is as good as conversation.
	a := r.Pick(Request{Conversation: "a"}, w).Index
	if got := r.Pick(Request{Conversation: "a"}, w); got.Index != a || got.Reason != ReasonConversation {
		t.Errorf("%+v", got)
	}
	r.Forget(w[first.Index])
	if again := r.Pick(Request{Tokens: text(3, 11)}, w); again.Match != 0 {
		t.Errorf("a worker that is gone still holds: %+v", again)
	}
}

// Whatever comes, routers choose among the candidates, and a conversation moves only when its worker is away.
func TestRoutersStayInBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom(RouterNames()).Draw(t, "router")
		r, err := NewRouter(name, NewIndex(200))
		if err != nil {
			t.Fatal(err)
		}
		at := map[string]uint64{}
		var open []Choice
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			var w []Worker
			for _, one := range three() {
				if rapid.Bool().Draw(t, "there") {
					one.Requests, one.Content = rapid.IntRange(0, 100).Draw(t, "requests"), rapid.Int64Range(0, 1000).Draw(t, "content")
					one.Reports = rapid.Bool().Draw(t, "reports")
					w = append(w, one)
				}
			}
			if len(w) == 0 {
				continue
			}
			q := Request{Content: text(rapid.IntRange(0, 2).Draw(t, "kind"), rapid.IntRange(0, 20).Draw(t, "n"))}
			if rapid.Bool().Draw(t, "ids") {
				q.Tokens = q.Content
			}
			if rapid.Bool().Draw(t, "named") {
				q.Conversation = fmt.Sprint(rapid.IntRange(0, 3).Draw(t, "id"))
			}
			c := r.Pick(q, w)
			if c.Index < 0 || c.Index >= len(w) || c.Match > c.Blocks || c.Reason == "" {
				t.Fatalf("%+v of %d", c, len(w))
			}
			open = append(open, c)
			if name == "conversation" && q.Conversation != "" {
				before := at[q.Conversation]
				if at[q.Conversation] = w[c.Index].ID; before != at[q.Conversation] && slices.ContainsFunc(w, func(w Worker) bool { return w.ID == before }) {
					t.Fatalf("conversation %s moved from %d to %d", q.Conversation, before, at[q.Conversation])
				}
			}
			if rapid.Bool().Draw(t, "done") {
				r.Done(open[0])
				open = open[1:]
			}
		}
		for _, c := range open {
			r.Done(c)
		}
	})
}

// A router that knows nothing of a conversation sends it where it was, by what workers say; what it chose itself counts more.
func TestLearnedConversations(t *testing.T) {
	key := func(name string) SessionKey { return sha256.Sum256([]byte(name)) }
	workers := []Worker{{ID: 1, Slot: 0}, {ID: 2, Slot: 1, Content: 100}, {ID: 3, Slot: 2, Content: 200}}
	for _, r := range []interface {
		Router
		Learn(SessionKey, uint64, int64)
	}{NewConversation(0, 0, nil), NewResidency(NewIndex(10))} {
		r.Learn(key("a"), 3, 20)
		r.Learn(key("a"), 2, 10) // older
		r.Learn(key("b"), 2, 10)
		r.Learn(key("b"), 3, 30)
		r.Learn(key("c"), 9, 30) // who is not there
		for name, want := range map[string]uint64{"a": 3, "b": 3, "c": 1, "d": 1} {
			if got := workers[r.Pick(Request{Conversation: name}, workers).Index].ID; got != want {
				t.Errorf("%s: %s went to %d, want %d", r.Name(), name, got, want)
			}
		}
		r.Learn(key("d"), 2, 40)
		if got := workers[r.Pick(Request{Conversation: "d"}, workers).Index].ID; got != 1 {
			t.Errorf("%s: d went to %d, though this router had sent it to 1", r.Name(), got)
		}
		if r.Needs("a")&NeedTokens != 0 && r.Name() == "conversation" {
			t.Errorf("%s looks at the tokens of a conversation that it knows", r.Name())
		}
	}
}
