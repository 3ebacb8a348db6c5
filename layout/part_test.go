package layout

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// Over all ranks of a shard: each engine's ranks have every layer and slice once, each expert group has every
// slice of every expert once, and the groups that ranks form agree with each other.
func TestParts(t *testing.T) {
	const layers = 7
	for _, spec := range []string{
		"tp=1", "tp=4", "pp=3", "stages=2/5", "tp=2,pp=2,dp=2", "tp=1,dp=2,ep=2", "tp=2,ep=2,expt_tp=1",
		"tp=2,dp=4,ep=4,expt_tp=2", "tp=4,ep=1,expt_tp=2", "tp=2,dp=4,ep=2,expt_tp=1", "tp=1,dp=4,ep=2,pp=2",
	} {
		shards, err := ParseShards(spec)
		if err != nil {
			t.Fatal(err)
		}
		s := shards[0]
		seen := map[string]int{}
		for rank := range s.Ranks() {
			p, err := s.Part(rank, layers)
			if err != nil {
				t.Fatal(err)
			}
			at := s.Place(rank)
			for l := range p.Layers {
				seen[fmt.Sprintf("dp %d: layer %d, slice %d of %d", at.DP, p.Layer+l, p.TPRank, p.TP)]++
			}
			if p.First() != (p.Layer == 0) || p.Last() != (p.Layer+p.Layers == layers) {
				t.Errorf("%s: rank %d: %+v", spec, rank, p)
			}
			tensors, pipeline, experts := s.TensorGroup(rank), s.PipelineGroup(rank), s.ExpertGroup(rank)
			engines, tokens := s.ExpertEngines(rank)
			if tensors[at.TP] != rank || pipeline[at.PP] != rank || tokens[slices.Index(engines, at.DP)] != rank {
				t.Errorf("%s: rank %d is misplaced in %v, %v, %v", spec, rank, tensors, pipeline, tokens)
			}
			held := map[[2]int]bool{}
			for i, r := range experts {
				other := s.Place(r)
				held[[2]int{other.EP, other.ExpertTP}] = true
				if i != other.EP*s.ExpertTP+other.ExpertTP || !slices.Equal(s.ExpertGroup(r), experts) || !slices.Contains(engines, other.DP) {
					t.Errorf("%s: rank %d: its expert group %v has rank %d at %d", spec, rank, experts, r, i)
				}
			}
			if len(held) != s.EP*s.ExpertTP || !slices.Contains(experts, rank) {
				t.Errorf("%s: rank %d: its expert group %v holds %d slices", spec, rank, experts, len(held))
			}
			if s.Lockstep() != (len(engines) > 1) {
				t.Errorf("%s: lockstep is %v with engines %v", spec, s.Lockstep(), engines)
			}
		}
		if len(seen) != s.DP*layers*s.TP {
			t.Errorf("%s: %d slices of layers, want %d", spec, len(seen), s.DP*layers*s.TP)
		}
		for what, n := range seen {
			if n != 1 {
				t.Errorf("%s: %s is held %d times", spec, what, n)
			}
		}
	}
	s := Shard{TP: 1, PP: 2, DP: 1, EP: 1, ExpertTP: 1, Stages: []int{5, 7}}
	if _, err := s.Part(0, 11); err == nil || !strings.Contains(err.Error(), "stages=5/7 is 12 layers in all; the model has 11") {
		t.Errorf("%v", err)
	}
}
