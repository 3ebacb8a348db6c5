//go:build unix

package chaos

import (
	"encoding/json"
	"io"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"baton/internal/rig"
	"baton/wire"
)

// What the drill would not notice, it could not report.
func TestDiffers(t *testing.T) {
	q := &question{want: rig.Answer{
		Text: "abcd", IDs: []int32{1, 2, 3, 4}, Logprobs: []json.Number{"-1", "-2", "-3", "-4"}, Finish: "length",
	}}
	for _, c := range []struct {
		name  string
		got   rig.Answer
		whole bool
		want  string
	}{
		{"the same", q.want, true, ""},
		{"its beginning, broken off", rig.Answer{Text: "ab", IDs: []int32{1, 2}, Logprobs: []json.Number{"-1", "-2"}}, false, ""},
		{"nothing, broken off", rig.Answer{}, false, ""},
		{"its beginning as the whole", rig.Answer{Text: "ab", IDs: []int32{1, 2}, Finish: "length"}, true, "2 tokens, want 4"},
		{"another token", rig.Answer{Text: "abcd", IDs: []int32{1, 2, 5, 4}, Logprobs: q.want.Logprobs, Finish: "length"}, true, "token 2 is 5, want 3"},
		{"a token twice", rig.Answer{Text: "ab", IDs: []int32{1, 2, 2}}, false, "token 2 is 2, want 3"},
		{"another text", rig.Answer{Text: "abcx", IDs: q.want.IDs, Logprobs: q.want.Logprobs, Finish: "length"}, true, "another text"},
		{"another text, broken off", rig.Answer{Text: "x", IDs: []int32{1}}, false, "do not begin"},
		{"too much", rig.Answer{Text: "abcd", IDs: []int32{1, 2, 3, 4, 5}}, false, "do not begin"},
		{"another end", rig.Answer{Text: "abcd", IDs: q.want.IDs, Logprobs: q.want.Logprobs, Finish: "stop"}, true, "finish reason"},
		{"another log-probability", rig.Answer{Text: "abcd", IDs: q.want.IDs, Logprobs: []json.Number{"-1", "-2", "-3", "-4.1"}, Finish: "length"}, true, "log-probability 3 is -4.1"},
		{"a log-probability less", rig.Answer{Text: "abcd", IDs: q.want.IDs, Logprobs: q.want.Logprobs[:3], Finish: "length"}, true, "3 log-probabilities"},
	} {
		if got := q.differs(c.got, c.whole); c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestExcused(t *testing.T) {
	at := func(s float64) time.Time { return time.Unix(0, 0).Add(time.Duration(s * float64(time.Second))) }
	d := &drill{run: &Drill{}}
	for _, n := range []struct {
		what string
		at   float64
		out  bool
	}{
		{wire.RoleDecode, 0, false},
		{wire.RoleDecode, 10, true}, {wire.RoleDecode, 11, true}, {wire.RoleDecode, 13, false}, // too short
		{wire.RoleDecode, 30, true}, {wire.RoleDecode, 35, true}, {wire.RoleDecode, 39, false}, // long enough
		{"coordinator", 50, true}, {"coordinator", 51, false},
		{wire.RolePrefill, 100, true}, {wire.RolePrefill, 109, true}, // goes on
	} {
		d.note(n.what, at(n.at), n.out)
	}
	for _, c := range []struct {
		from, to float64
		want     bool
	}{
		{0, 9, false}, {10, 14, false}, {29, 29.5, false}, {29, 31, true}, {38, 40, true}, {40, 41, false},
		{45, 50.5, true}, {53, 54, true}, {55, 56, false}, {99, 101, true}, {200, 201, true},
	} {
		if got := d.excused(at(c.from), at(c.to)); got != c.want {
			t.Errorf("from %v to %v: %v, want %v", c.from, c.to, got, c.want)
		}
	}
}

// Disturbances of one engine leave another of its role alone; those of several befall nobody who is disturbed.
func TestSeize(t *testing.T) {
	fleet := func() *drill {
		return &drill{run: &Drill{}, members: []*member{
			{name: "prefill0", role: wire.RolePrefill}, {name: "prefill1", role: wire.RolePrefill},
			{name: "decode0", role: wire.RoleDecode}, {name: "decode1", role: wire.RoleDecode},
		}}
	}
	for _, k := range kinds {
		for seed := range uint64(20) {
			d, rng := fleet(), rand.New(rand.NewPCG(seed, 0))
			first := d.seize(k, rng)
			if first == nil {
				t.Fatalf("%s: nobody of an undisturbed fleet", k.name)
			}
			free := map[string]int{}
			for _, m := range d.members {
				if !m.busy {
					free[m.role]++
				}
			}
			if len(first) == 1 && (free[wire.RolePrefill] == 0 || free[wire.RoleDecode] == 0) {
				t.Errorf("%s: %v leaves %v", k.name, names(first), free)
			}
			if second := d.seize(kinds[6], rng); second != nil {
				t.Errorf("%s, then all engines: %v", k.name, names(second))
			}
			if second := d.seize(kinds[0], rng); len(first) == 1 && (len(second) != 1 || second[0].role == first[0].role) || len(first) != 1 && free[wire.RolePrefill]+free[wire.RoleDecode] != 2 && second != nil {
				t.Errorf("%s of %v, then one: %v", k.name, names(first), names(second))
			}
			d.letGo(first)
			d.hubBusy = false
		}
	}
	if _, err := chosen([]string{"kill", "earthquake"}); err == nil || !strings.Contains(err.Error(), "earthquake") {
		t.Errorf("an unknown kind: %v", err)
	}
}

// A seed decides what is asked.
func TestQuestionsFollowTheSeed(t *testing.T) {
	of := func(seed uint64) []*question { return ask(rand.New(rand.NewPCG(seed, 1)), 20) }
	if !reflect.DeepEqual(of(1), of(1)) {
		t.Error("one seed, different questions")
	}
	if reflect.DeepEqual(of(1), of(2)) {
		t.Error("different seeds, one set of questions")
	}
}

func TestGrown(t *testing.T) {
	d := &drill{cfg: Config{Prefill: 2, Decode: 3, Thorough: true, Progress: io.Discard}, transport: "tcp", run: &Drill{}, members: []*member{
		{name: "decode0", role: wire.RoleDecode},
	}}
	base := holdings{Resources: rig.Resources{Files: 10, Conns: 2, Pools: 1}, goroutines: 15}
	for _, c := range []struct {
		name   string
		change func(*holdings)
		want   string
	}{
		{"decode0", func(*holdings) {}, ""},
		{"decode0", func(h *holdings) { h.Files += 7 }, "descriptors"},
		{"decode0", func(h *holdings) { h.Conns += 32; h.goroutines += 32 }, ""},
		{"decode0", func(h *holdings) { h.Conns += 33 }, "TCP connections"},
		{"frontend", func(h *holdings) { h.Conns++ }, "TCP connections"},
		{"decode0", func(h *holdings) { h.goroutines += 7 }, "goroutines"},
		{"decode0", func(h *holdings) { h.Pools = 3 }, ""},
		{"decode0", func(h *holdings) { h.Pools = 4 }, "KV pools"},
		{"decode0", func(h *holdings) { h.Pools = 0 }, "its own KV pool"},
		{"frontend", func(h *holdings) { h.Pools = 0 }, ""},
		{"decode0", func(h *holdings) { h.Dead = 1 }, "gone"},
	} {
		after := base
		c.change(&after)
		got := strings.Join(d.grown(map[string]holdings{c.name: base}, map[string]holdings{c.name: after}), "; ")
		if (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %+v: %q, want %q", c.name, after, got, c.want)
		}
	}
}
