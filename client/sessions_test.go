package client

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

func urls(n int) []string {
	list := make([]string, n)
	for i := range list {
		list[i] = fmt.Sprintf("http://host:%d/v1", 8300+i)
	}
	return list
}

// TestIndex has the vectors of the clients that this rule comes from (39).
func TestIndex(t *testing.T) {
	for _, tt := range []struct {
		session string
		want    map[int]int // number of URLs: index
	}{
		{"session-1", map[int]int{1: 0, 2: 0, 3: 1, 4: 0, 6: 4, 8: 0}},
		{"session-2", map[int]int{1: 0, 2: 1, 3: 2, 4: 1, 6: 5, 8: 5}},
		// e3b0c44298fc1c14 is 16406829232824261652, the hash of nothing.
		{"", map[int]int{2: 0, 3: 1, 5: 2, 1000: 652}},
	} {
		for n, want := range tt.want {
			if got := Index(tt.session, n); got != want {
				t.Errorf("session %q of %d: %d, want %d", tt.session, n, got, want)
			}
		}
	}
}

// TestProcessesAgree: a session has one URL at all its turns, in every process that has the list (40).
func TestProcessesAgree(t *testing.T) {
	processes := make([]*Sessions, 3)
	for i := range processes {
		var err error
		if processes[i], err = NewSessions(urls(6)); err != nil {
			t.Fatal(err)
		}
	}
	for turn := range 4 {
		for i := range 50 {
			session := fmt.Sprintf("session-%d", i)
			want := urls(6)[Index(session, 6)]
			if got := processes[(turn+i)%len(processes)].URL(session); got != want {
				t.Errorf("%s, turn %d: %s, want %s", session, turn, got, want)
			}
		}
	}
}

// TestSpread: many sessions use all URLs about equally.
func TestSpread(t *testing.T) {
	const n, sessions = 8, 8000
	var counts [n]int
	for i := range sessions {
		counts[Index(fmt.Sprintf("rollout-%d", i), n)]++
	}
	for i, c := range counts {
		// Six standard deviations around 1000.
		if c < 820 || c > 1180 {
			t.Errorf("URL %d has %d of %d sessions", i, c, sessions)
		}
	}
}

func TestSetURLs(t *testing.T) {
	for _, list := range [][]string{nil, {""}, {"a", "b", "a"}} {
		if _, err := NewSessions(list); err == nil {
			t.Errorf("%q is accepted", list)
		}
	}
	if _, err := NewSessions(nil); !errors.Is(err, ErrNoURLs) {
		t.Errorf("got %v", err)
	}
	list := urls(3)
	s, err := NewSessions(list)
	if err != nil {
		t.Fatal(err)
	}
	list[1] = "changed by the caller"
	if got := s.URL("session-1"); got != urls(3)[1] {
		t.Errorf("session-1 goes to %s", got)
	}
	if err := s.SetURLs([]string{"x", "x"}); err == nil || s.URL("session-1") != urls(3)[1] {
		t.Errorf("a refused list changed something: %v", err)
	}
}

// TestSessionsStay plays random calls against the rule written down plainly.
func TestSessionsStay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := urls(6)
		list := all[:3]
		s, err := NewSessions(list)
		if err != nil {
			t.Fatal(err)
		}
		pinned := map[string]string{}
		for range rapid.IntRange(1, 60).Draw(t, "calls") {
			session := fmt.Sprint(rapid.IntRange(0, 9).Draw(t, "session"))
			switch rapid.IntRange(0, 5).Draw(t, "call") {
			case 0:
				list = rapid.SliceOfNDistinct(rapid.SampledFrom(all), 1, 6, rapid.ID[string]).Draw(t, "urls")
				if err := s.SetURLs(list); err != nil {
					t.Fatal(err)
				}
				for k, url := range pinned {
					if !slices.Contains(list, url) {
						delete(pinned, k)
					}
				}
			case 1:
				s.Forget(session)
				delete(pinned, session)
			default:
				want, ok := pinned[session]
				if !ok {
					want = list[Index(session, len(list))]
					pinned[session] = want
				}
				if got := s.URL(session); got != want {
					t.Fatalf("session %s goes to %s, want %s of %v", session, got, want, list)
				}
			}
		}
	})
}

// TestForgetting: no more is remembered than the limit, the used sessions longest.
func TestForgetting(t *testing.T) {
	s, err := NewSessions(urls(4))
	if err != nil {
		t.Fatal(err)
	}
	s.limit = 10
	kept := s.URL("kept")
	for i := range 1000 {
		s.URL(fmt.Sprint(i))
		if i%5 == 0 {
			s.URL("kept")
		}
		if n := len(s.young) + len(s.old); n > 2*s.limit {
			t.Fatalf("%d sessions are remembered, the limit is %d", n, 2*s.limit)
		}
	}
	more := urls(7)
	if Index("kept", 7) == slices.Index(more, kept) {
		t.Fatal("the session would not move: choose another name")
	}
	if err := s.SetURLs(more); err != nil {
		t.Fatal(err)
	}
	if got := s.URL("kept"); got != kept {
		t.Errorf("a session in use moved from %s to %s", kept, got)
	}
	if got, want := s.URL("3"), more[Index("3", 7)]; got != want {
		t.Errorf("a forgotten session goes to %s, want %s", got, want)
	}
}

// TestConcurrentUse: whoever asks, and whatever URLs join and leave meanwhile, a session stays where it was.
func TestConcurrentUse(t *testing.T) {
	s, err := NewSessions(urls(5))
	if err != nil {
		t.Fatal(err)
	}
	const sessions = 20
	var want [sessions]string
	for k := range want {
		want[k] = s.URL(fmt.Sprint(k))
	}
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for i := range 1000 {
				k := i % sessions
				if got := s.URL(fmt.Sprint(k)); got != want[k] {
					t.Errorf("session %d moved from %s to %s", k, want[k], got)
					return
				}
				s.URL(fmt.Sprint("new ", i))
				if i%100 == 0 {
					if err := s.SetURLs(append(urls(5), fmt.Sprintf("http://more:%d", i))); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	callers.Wait()
}
