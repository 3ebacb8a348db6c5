package layout

import "fmt"

// Part is the share of a model that one rank computes: the layers of its pipeline stage, of each of them a
// slice of the heads, of the MLP and of the experts, and a slice of the vocabulary.
type Part struct {
	TP, TPRank             int // slices of heads, MLPs and vocabulary
	Stage, Stages          int
	Layer, Layers          int // those of the stage
	EP, EPRank             int // runs of experts
	ExpertTP, ExpertTPRank int // slices of each expert
}

// Whole is the part of the only rank of an engine.
func Whole(layers int) Part {
	return Part{TP: 1, Stages: 1, Layers: layers, EP: 1, ExpertTP: 1}
}

// First reports whether the rank's stage reads tokens.
func (p Part) First() bool { return p.Stage == 0 }

// Last reports whether the rank's stage makes logits.
func (p Part) Last() bool { return p.Stage == p.Stages-1 }

// StageLayers is how many layers each pipeline stage of the shard has, of a model with so many.
func (s Shard) StageLayers(layers int) ([]int, error) {
	if s.Stages == nil {
		return EvenStages(layers, s.PP)
	}
	sum := 0
	for _, n := range s.Stages {
		sum += n
	}
	if sum != layers {
		return nil, fmt.Errorf("layout: stages=%s is %d layers in all; the model has %d", joinStages(s.Stages), sum, layers)
	}
	return s.Stages, nil
}

// Part is what a rank of the shard computes of a model with so many layers.
func (s Shard) Part(rank, layers int) (Part, error) {
	stages, err := s.StageLayers(layers)
	if err != nil {
		return Part{}, err
	}
	at := s.Place(rank)
	p := Part{
		TP: s.TP, TPRank: at.TP, Stage: at.PP, Stages: s.PP, Layers: stages[at.PP],
		EP: s.EP, EPRank: at.EP, ExpertTP: s.ExpertTP, ExpertTPRank: at.ExpertTP,
	}
	for _, n := range stages[:at.PP] {
		p.Layer += n
	}
	return p, nil
}

// TensorGroup lists the ranks that split the same layers for the same requests.
func (s Shard) TensorGroup(rank int) []int {
	at := s.Place(rank)
	return s.list(s.TP, func(i int) int { return s.Rank(i, at.PP, at.DP) })
}

// PipelineGroup lists the ranks that a rank's activations pass through, by stage.
func (s Shard) PipelineGroup(rank int) []int {
	at := s.Place(rank)
	return s.list(s.PP, func(i int) int { return s.Rank(at.TP, i, at.DP) })
}

// ExpertGroup lists the ranks that together hold every expert of a rank's stage once: EP major, ExpertTP minor.
func (s Shard) ExpertGroup(rank int) []int {
	at := s.Place(rank)
	size := s.EP * s.ExpertTP
	first := at.PP*s.DP*s.TP + at.ExpertDP*size
	return s.list(size, func(i int) int { return first + i })
}

// ExpertEngines lists the engines (numbers of DP groups) whose tokens the rank's expert group computes, and the
// ranks of a group that has one of each of them, in the same order, this rank among them.
func (s Shard) ExpertEngines(rank int) (engines, ranks []int) {
	at := s.Place(rank)
	n := max(s.EP*s.ExpertTP/s.TP, 1)
	first := at.DP / n * n
	return s.list(n, func(i int) int { return first + i }),
		s.list(n, func(i int) int { return s.Rank(at.TP, at.PP, first+i) })
}

// Lockstep reports whether the engines of the shard have to compute together, because they share experts.
func (s Shard) Lockstep() bool { return s.DP > 1 && s.EP*s.ExpertTP > s.TP }

func (s Shard) list(n int, at func(i int) int) []int {
	ranks := make([]int, n)
	for i := range ranks {
		ranks[i] = at(i)
	}
	return ranks
}
