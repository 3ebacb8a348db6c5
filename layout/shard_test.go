package layout

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestParseShards(t *testing.T) {
	tests := []struct {
		spec string
		want []Shard
		err  string // a part of the error
	}{
		{spec: "tp=1", want: []Shard{{1, 1, 1, 1, 1, nil, ""}}},
		{spec: "dp=3", want: []Shard{{1, 1, 3, 1, 1, nil, ""}}},
		{spec: "tp=1,dp=2,role=prefill+tp=1,dp=2,role=decode",
			want: []Shard{{1, 1, 2, 1, 1, nil, "prefill"}, {1, 1, 2, 1, 1, nil, "decode"}}},
		{spec: " tp=4 , pp=2,role = prefill ; tp=8,dp=2,ep=4,expt_tp=2,cp=1,role=decode",
			want: []Shard{{4, 2, 1, 1, 4, nil, "prefill"}, {8, 1, 2, 4, 2, nil, "decode"}}},
		{spec: "tp=2+dp=2", want: []Shard{{2, 1, 1, 1, 2, nil, ""}, {1, 1, 2, 1, 1, nil, ""}}},

		{spec: "pp=2,stages=5/7", want: []Shard{{1, 2, 1, 1, 1, []int{5, 7}, ""}}},
		{spec: "stages=1/2/1", want: []Shard{{1, 3, 1, 1, 1, []int{1, 2, 1}, ""}}},
		{spec: "pp=3,stages=5/7", err: "stages: 5/7 gives the layers of 2 pipeline stages, pp is 3"},
		{spec: "stages=5/0", err: `"5/0": each stage needs its number of layers`},

		{spec: "", err: "shard 0: it is empty"},
		{spec: "tp=1+", err: "shard 1: it is empty"},
		{spec: "tp=1;;tp=1", err: "shard 1: it is empty"},
		{spec: "tp", err: `"tp" is not key=value`},
		{spec: "tp=", err: `"tp=" is not key=value`},
		{spec: "tp=1,", err: `"" is not key=value`},
		{spec: "tp=1,tp=2", err: "shard 0: tp: it is given twice"},
		{spec: "tp=0", err: `tp: "0" must be a number in [1, 4096]`},
		{spec: "tp=1+pp=x", err: `shard 1: pp: "x" must be a number`},
		{spec: "dp=99999999999999999999", err: "must be a number"},
		{spec: "tq=2", err: "tq: unknown key; known are tp, pp, dp"},
		{spec: "tp=2,cp=2", err: "cp: 2: context parallelism would split"},
		{spec: "tp=2,ep=3,expt_tp=1", err: "tp·dp = 2·1 = 2 ranks, which ep·expt_tp = 3·1 = 3 does not divide"},
		{spec: "tp=8,dp=2,ep=4", err: "tp·dp = 8·2 = 16 ranks, which ep·expt_tp = 4·8 = 32 does not divide"},
		{spec: "tp=1,role=both", err: `"both" is not a role`},
		{spec: "tp=1,role=prefill+tp=1", err: "1 of 2 shards have no role"},
		{spec: "tp=1,role=prefill+tp=1,role=prefill", err: "2 prefill and 0 decode shards"},
		{spec: "role=decode", err: "0 prefill and 1 decode shards"},
	}
	for _, tt := range tests {
		got, err := ParseShards(tt.spec)
		if tt.err != "" {
			var spec *SpecError
			if !errors.As(err, &spec) || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%q: error %v, want one with %q", tt.spec, err, tt.err)
			}
			continue
		}
		if err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%q: %+v, %v, want %+v", tt.spec, got, err, tt.want)
		}
	}
}

func TestCheckWorld(t *testing.T) {
	shards, err := ParseShards("tp=2,dp=2+tp=4,pp=2")
	if err != nil {
		t.Fatal(err)
	}
	if err := CheckWorld(shards, 12); err != nil {
		t.Error(err)
	}
	if err := CheckWorld(shards, 8); err == nil || !strings.Contains(err.Error(), "2·1·2 + 4·2·1 = 12 ranks, but there are 8") {
		t.Errorf("error %v", err)
	}
}

func FuzzParseShards(f *testing.F) {
	f.Add("tp=1,dp=2,role=prefill+tp=1,dp=2,role=decode")
	f.Add("tp=8,pp=2,ep=4,expt_tp=2,dp=2,cp=1;pp=3")
	f.Fuzz(func(t *testing.T, spec string) {
		shards, err := ParseShards(spec)
		if err != nil {
			return
		}
		var texts []string
		for _, s := range shards {
			texts = append(texts, s.String())
			if s.Ranks() < 1 {
				t.Errorf("%+v has %d ranks", s, s.Ranks())
			}
		}
		again, err := ParseShards(strings.Join(texts, "+"))
		if err != nil || !reflect.DeepEqual(again, shards) {
			t.Errorf("%q reads as %v, that as %v, %v", spec, shards, again, err)
		}
	})
}

func TestRanks(t *testing.T) {
	s := Shard{TP: 4, PP: 2, DP: 2, EP: 2, ExpertTP: 2}
	tests := []struct {
		rank int
		want Place
	}{
		{0, Place{0, 0, 0, 0, 0, 0}},
		{3, Place{3, 0, 0, 1, 1, 0}},
		{4, Place{0, 0, 1, 0, 0, 1}},
		{7, Place{3, 0, 1, 1, 1, 1}},
		{8, Place{0, 1, 0, 0, 0, 0}},
		{15, Place{3, 1, 1, 1, 1, 1}},
	}
	for _, tt := range tests {
		if got := s.Place(tt.rank); got != tt.want {
			t.Errorf("rank %d is at %+v, want %+v", tt.rank, got, tt.want)
		}
	}
	for rank := range s.Ranks() {
		p := s.Place(rank)
		if got := s.Rank(p.TP, p.PP, p.DP); got != rank {
			t.Errorf("rank %d is at %+v, where rank %d is", rank, p, got)
		}
	}
	if got, want := s.Group(1), []int{4, 5, 6, 7, 12, 13, 14, 15}; !slices.Equal(got, want) {
		t.Errorf("group 1 is %v, want %v", got, want)
	}
}
