package loadgen

import (
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestRoundsArePartsOfThePlan(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		plan := synthetic(rapid.IntRange(1, 60).Draw(t, "sessions"), rapid.IntRange(1, 3).Draw(t, "turns"), 10, 5)
		plan.New, plan.Output, plan.Rate = Range{5, 50}, Range{1, 9}, 3
		n := rapid.IntRange(1, 7).Draw(t, "rounds")
		var ids []string
		requests := 0
		for r := range n {
			for s := range plan.Round(r, n) {
				ids = append(ids, s.ID)
				requests += len(s.Turns)
			}
			if once := slices.Collect(plan.Round(r, n)); !reflect.DeepEqual(once, slices.Collect(plan.Round(r, n))) {
				t.Fatalf("round %d is not the same twice", r)
			}
		}
		var all []string
		for s := range plan.Round(0, 1) {
			all = append(all, s.ID)
			for _, turn := range s.Turns {
				if turn.Own < 5 || turn.Own > 50 || turn.Output < 1 || turn.Output > 9 {
					t.Fatalf("%+v", turn)
				}
			}
		}
		if !slices.Equal(ids, all) || requests != plan.Requests() {
			t.Fatalf("%d rounds have %v (%d requests), the plan %v (%d)", n, ids, requests, all, plan.Requests())
		}
	})
}

// The gaps between arrivals have the mean that the rate says, and the spread that the burstiness says: the coefficient of
// variation of a gamma distribution is 1/sqrt(shape).
func TestArrivals(t *testing.T) {
	for _, shape := range []float64{0.3, 1, 4} {
		plan := synthetic(20000, 1, 1, 1)
		plan.Rate, plan.Burstiness = 50, shape
		var sum, squares float64
		last, n := time.Duration(0), 0
		for s := range plan.Round(0, 1) {
			if s.Start > 0 {
				gap := (s.Start - last).Seconds()
				sum, squares, n = sum+gap, squares+gap*gap, n+1
			}
			last = s.Start
		}
		mean := sum / float64(n)
		variation := math.Sqrt(squares/float64(n)-mean*mean) / mean
		if math.Abs(mean*50-1) > 0.05 || math.Abs(variation*math.Sqrt(shape)-1) > 0.05 {
			t.Errorf("burstiness %v: mean gap %v s, variation %v", shape, mean, variation)
		}
	}
}

func TestRangesAreRead(t *testing.T) {
	for in, want := range map[string]Range{"5": {5, 5}, "5:9": {5, 9}, "9:9": {9, 9}} {
		var r Range
		if err := r.UnmarshalText([]byte(in)); err != nil || r != want {
			t.Errorf("%s: %v, %v", in, r, err)
		}
	}
	for _, in := range []string{"", "x", "9:5", "1:2:3", "1:2 ", "1-2", ":"} {
		if err := new(Range).UnmarshalText([]byte(in)); err == nil {
			t.Errorf("%q is a range", in)
		}
	}
}

func TestPromptsAreMadeOfPieces(t *testing.T) {
	c := content{seed: 1, vocab: 10}
	p := piece{key: 7, tokens: 400}
	counts := map[int32]int{}
	c.sequence(p, func(id int32) { counts[id]++ })
	if len(counts) != 7 || counts[2] != 0 || counts[10] != 0 {
		t.Errorf("ids %v; want those from 3 to 9", counts)
	}
	short, long := c.appendIDs(nil, piece{7, 5}), c.appendIDs(nil, piece{7, 6})
	if string(long[:len(short)]) != string(short) || long[len(short)] != ',' {
		t.Errorf("%s is not the beginning of %s", short, long)
	}
	if other := (content{seed: 2, vocab: 10}).appendIDs(nil, piece{7, 5}); string(other) == string(short) {
		t.Errorf("two seeds say %s", other)
	}
}

func TestHistogram(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) time.Duration {
			return time.Duration(rapid.Int64Range(0, 1<<rapid.IntRange(0, 45).Draw(t, "bits")).Draw(t, "d"))
		}), 1, 300).Draw(t, "durations")
		cut := rapid.IntRange(0, len(all)).Draw(t, "cut")
		a, b := &histogram{}, &histogram{}
		for i, d := range all {
			if i < cut {
				a.add(d)
			} else {
				b.add(d)
			}
		}
		a.merge(b)
		slices.Sort(all)
		for _, q := range []float64{0, .01, .5, .9, .99, 1} {
			want := all[max(int(math.Ceil(q*float64(len(all))))-1, 0)]
			if got := a.quantile(q); math.Abs(float64(got-want)) > 0.004*float64(want)+0.5 {
				t.Fatalf("quantile %v of %v: %v, want %v", q, all, got, want)
			}
		}
		d := a.distribution()
		if d.Count != uint64(len(all)) || d.Min != millis(all[0]) || d.Max != millis(all[len(all)-1]) {
			t.Fatalf("%+v of %v", d, all)
		}
	})
}
